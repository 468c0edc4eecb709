"""The package where it cannot run: it imports, says why it is off and what to do, and raises only where a worker is asked for."""
from __future__ import annotations

import pathlib
import pickle
import shutil
import sys
import sysconfig

import pytest
from conftest import FAKES, ROOT, Run

from comfy_zerocopy import errors

PUBLIC = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import comfy_zerocopy as zcx
from comfy_zerocopy import _native, config, doctor, errors
assert zcx.Error and zcx.Status and zcx.UnsupportedPlatform
verdict = _native.verdict()
assert not verdict.ok and verdict.why, verdict
status = zcx.install("swap")
assert (status.state, status.platform) == ("refused", str(verdict)) and status.reason == str(verdict), status
assert zcx.reclaim() == 0 and zcx.status().state == "refused"
for call in (_native.zcx, _native.require):
    try:
        call()
    except zcx.UnsupportedPlatform as error:
        assert str(error) == str(verdict)
    else:
        raise AssertionError("no error")
report = doctor.examine(import_torch=False)
assert report["ok"] is False and verdict.why in doctor.text(report), doctor.text(report)
assert not any("this look failed" in f["says"] for f in report["findings"]), report
print(verdict)
"""


@pytest.fixture
def bare(tmp_path: pathlib.Path) -> pathlib.Path:
    """The package's folder without an extension, as an installed copy."""
    shutil.copytree(ROOT / "comfy_zerocopy", tmp_path / "site" / "comfy_zerocopy",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / "site"


@pytest.mark.parametrize(("platform", "name"), [("win32", "Windows"), ("darwin", "macOS"), ("freebsd14", "freebsd14")])
def test_other_systems(run: Run, platform: str, name: str) -> None:
    out = run(f"import logging, sys; sys.platform = {platform!r}\n" + PUBLIC).stdout
    assert f"off on {name}" in out and "Linux" in out


def test_other_systems_without_what_only_linux_has(run: Run) -> None:
    run("""
import os, sys, logging
import concurrent.futures, importlib.metadata, argparse, subprocess    # what the standard library itself needs
sys.platform = "win32"
for name in ("memfd_create", "pidfd_open", "uname", "register_at_fork", "MFD_CLOEXEC"):
    delattr(os, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
""" + PUBLIC)


def test_free_threaded(run: Run) -> None:
    out = run("""
import sysconfig
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
""" + PUBLIC).stdout
    assert "free-threaded" in out and "regular build" in out


def test_not_built_in_a_checkout(run: Run, bare: pathlib.Path) -> None:
    (bare / "csrc").mkdir()
    (bare / "setup.py").touch()
    out = run(PUBLIC, path=(bare,)).stdout
    assert "not built" in out and f'-m pip install -e "{bare.resolve()}"' in out and sys.executable in out


def test_not_built_in_a_venv(run: Run, bare: pathlib.Path) -> None:
    assert "--force-reinstall ./comfy-zerocopy" in run(PUBLIC, path=(bare,)).stdout


def test_built_for_another_python(run: Run, bare: pathlib.Path) -> None:
    (bare / "comfy_zerocopy" / "_zcx.cpython-39-x86_64-linux-gnu.so").touch()
    out = run(PUBLIC, path=(bare,)).stdout
    assert "built for another Python" in out and "_zcx.cpython-39-x86_64-linux-gnu.so" in out


def test_built_wrongly(run: Run, bare: pathlib.Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (bare / "comfy_zerocopy" / f"_zcx{suffix}").write_bytes(b"not an object")
    assert "does not load" in run(PUBLIC, path=(bare,)).stdout


def test_extension_of_another_version(run: Run) -> None:
    out = run("import fake_zcx; fake_zcx.put('0.0.9')\n" + PUBLIC, path=(FAKES, ROOT)).stdout
    assert "version 0.0.9" in out and "pip install" in out


def test_extension_of_another_copy(run: Run, bare: pathlib.Path) -> None:
    out = run("import sys, fake_zcx; fake_zcx.put(); sys.modules['comfy_zerocopy._zcx'].__file__ = '/elsewhere/_zcx.abi3.so'\n" + PUBLIC,
              path=(FAKES, bare)).stdout
    assert "not built" in out


@pytest.mark.parametrize("prelude", ["import shutil, sys; sys.platform = 'win32'", "import sys; sys.modules['comfy_zerocopy._zcx'] = None"])
def test_worker_says_that_it_cannot_be(run: Run, prelude: str) -> None:
    run(prelude + """
import comfy_zerocopy as zcx
try:
    zcx.Worker("colorsys")
except zcx.UnsupportedPlatform as error:
    assert "Linux" in str(error) or "pip install" in str(error), error
else:
    raise AssertionError("a worker was made")
""")


def test_nothing_installed(run: Run) -> None:
    """No site-packages at all: no numpy, no torch."""
    run("""
import sys
from comfy_zerocopy import errors
import comfy_zerocopy as zcx
for name in zcx.__all__:
    if name != "__version__" and name not in ("Worker", "register", "handle", "empty"):
        assert getattr(zcx, name)
assert zcx.install().state == "off"
assert not {"numpy", "torch"} & set(sys.modules)
""")


def test_unknown_name(run: Run) -> None:
    done = run("import comfy_zerocopy; comfy_zerocopy.instal", ok=False)
    assert "AttributeError: module 'comfy_zerocopy' has no attribute 'instal'" in done.stderr


# ---- errors ----

ALL = [
    errors.Error("x"),
    errors.WorkerDied("the worker died", pid=7, signal=9, stderr=["a", "b"], state="running"),
    errors.WorkerDied("the worker died", exit_status=3),
    errors.WorkerDied("the worker died", signal=250),
    errors.RemoteError("ValueError", "bad", "Traceback …\n"),
    errors.CallTimeout("no answer in 3 s"),
    errors.Cancelled("cancelled"),
    errors.ProtocolError("a count of 7 in 3 bytes"),
    errors.CudaError("cuMemAllocAsync", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    errors.UnsupportedType("a generator cannot cross", "args[0]['x'][2]"),
    errors.InputModified("args[0] was changed in place"),
    errors.ResultTooLarge("5 GiB asked for, 4 GiB allowed"),
    errors.PayloadTooLarge("the tree has 300 levels"),
    errors.UnsupportedPlatform("not here"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_errors_can_be_pickled(error: errors.Error) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error) and again.args == error.args


def test_errors_say_what_they_know() -> None:
    assert str(ALL[1]) == "the worker died, killed by SIGKILL, while running; its last lines:\n    a\n    b"
    assert str(ALL[2]) == "the worker died, exit status 3" and str(ALL[3]) == "the worker died, killed by signal 250"
    assert str(ALL[4]) == "ValueError: bad\n\nIn the worker:\nTraceback …"
    assert str(ALL[8]) == "cuMemAllocAsync failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    assert str(ALL[9]) == "args[0]['x'][2]: a generator cannot cross"


def test_errors_are_what_callers_expect() -> None:
    from concurrent.futures import CancelledError

    assert issubclass(errors.Cancelled, CancelledError) and issubclass(errors.CallTimeout, TimeoutError)
    assert issubclass(errors.UnsupportedType, TypeError) and issubclass(errors.PayloadTooLarge, ValueError)


def test_every_error_is_public_and_documented() -> None:
    import comfy_zerocopy

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    page = (ROOT / "docs" / "errors.md").read_text()
    for name in classes:
        assert name in comfy_zerocopy.__all__ and getattr(comfy_zerocopy, name) is getattr(errors, name)
        assert f"## {name}\n" in page, f"docs/errors.md does not explain {name}"
        assert "What to do" in (getattr(errors, name).__doc__ or "") or name == "Error"
