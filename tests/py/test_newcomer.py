"""What somebody meets who tries the package for the first time: each mistake gets a sentence that helps."""
from __future__ import annotations

import ctypes
import decimal
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import FAKES, ROOT, WORKERS, Run

import comfy_zerocopy as zcx
from comfy_zerocopy import array, snapshot, tree
from comfy_zerocopy.array import Array

# ---- arrays ----


def floats(*values: float) -> Array:
    data = (ctypes.c_float * len(values))(*values)
    return Array(data, ctypes.addressof(data), (len(values),), "float32")


@pytest.mark.parametrize("what", ["1 - a", "a - 1", "a + a", "-a", "a < 1", "a[0]", "a[...]", "list(a)", "a ** 2", "2 @ a"])
def test_an_array_computes_nothing_and_says_what_to_do(what: str) -> None:
    with pytest.raises(TypeError, match=r"install numpy or torch in the worker's environment, or use tobytes\(\), copy_from\(\)"):
        eval(what, {"a": floats(1, 2)})
    with pytest.raises(TypeError, match="install numpy or torch"):
        floats(1, 2)[:] = 3


def test_libraries_may_still_compute_with_an_array() -> None:
    np = pytest.importorskip("numpy")
    assert (floats(1, 2) + np.ones(2)).tolist() == [2, 3] and (np.ones(2) - floats(1, 2)).tolist() == [0, -1]
    assert floats(1) != floats(1) and np.asarray(floats(1, 2)).tolist() == [1, 2]


def test_the_data_of_an_array() -> None:
    a = floats(1, 2, 3)
    assert list(a.data) == [1, 2, 3] and a.data.format == "f"
    a.data[1] = 7
    assert list(a.data) == [1, 7, 3]
    view = Array(a.owner, a.address, (3,), "float32").data
    del a
    assert list(view) == [1, 7, 3]  # the view keeps the memory
    part = floats(1, 2, 3)
    assert list(Array(part.owner, part.address + 4, (2, 1), "float32").data) == [2, 3]
    assert Array(part.owner, part.address, (6,), "float16").data.format == "B"
    assert list(Array(None, 0, (0, 3), "float32").data) == []
    for unfit in (Array(part.owner, part.address, (2,), "float32", (8,)), Array(None, 4096, (2,), "float32", None, 0)):
        with pytest.raises(BufferError, match="not contiguous, or on a GPU"):
            _ = unfit.data
    assert set(array._MEMORYVIEW) < set(array.DTYPES)


def test_the_data_of_inputs_and_results_in_a_worker_without_libraries(run: Run, tmp_path: pathlib.Path) -> None:
    (tmp_path / "bare.py").write_text("""
from array import array
from comfy_zerocopy.worker import empty_like, expose
@expose
def invert(image):
    out = empty_like(image)
    out.data[:] = array("f", [1 - x for x in image.data])
    return out
@expose
def wrong(image):
    return 1 - image
""")
    done = run("""
        import sys
        from array import array
        import comfy_zerocopy as zcx
        from comfy_zerocopy.array import Array
        a = array("f", [0, 0.25, 1])
        image = Array(a, a.buffer_info()[0], (3,), "float32")
        with zcx.Worker("bare.py") as w:
            got = w.call("invert", image)
            print(list(got.data), w.last_report.transfers[1].copied)
            try:
                w.call("wrong", image)
            except zcx.RemoteError as error:
                print(error.message)
    """)
    lines = done.stdout.splitlines()
    assert lines[0] == "[1.0, 0.75, 0.0] False" and "install numpy or torch" in lines[1]


# ---- what is wrong with the arguments ----


@pytest.mark.parametrize(("timeout", "kind", "says"), [
    ("3", TypeError, "a number of seconds or None, not a str"), (True, TypeError, "not a bool"), (-1, ValueError, "0 or more, not -1"),
    (float("nan"), ValueError, "0 or more, not nan"),
])
def test_timeouts_that_are_none(start: Any, timeout: Any, kind: type[Exception], says: str) -> None:
    w = start("plain")
    for use in (lambda: zcx.Worker("plain", timeout=timeout), lambda: w.call("echo", timeout=timeout), lambda: w.submit("echo", timeout=timeout)):
        with pytest.raises(kind, match=says):
            use()


def test_a_timeout_beyond_every_clock_is_no_limit(start: Any) -> None:
    assert start("plain").call("echo", 1, timeout=float("inf")) == start("plain", timeout=1e300).call("echo", 1) == 1


def test_no_target() -> None:
    with pytest.raises(ValueError, match="name a module, or the path of a .py file"):
        zcx.Worker("")


@pytest.mark.parametrize(("options", "kind", "says"), [
    *[({limit: value}, kind, rf"^{limit} is a whole number of bytes.* not {says}") for limit in ("max_result_bytes", "max_kept_bytes")
      for value, kind, says in (("1", TypeError, "a str"), (1.5, TypeError, "a float"), (True, TypeError, "a bool"), (-1, ValueError, "-1"),
                                (1 << 63, ValueError, str(1 << 63)))],
    ({"target": None}, TypeError, "^target is a module's name, or the path of a .py file, not a NoneType"),
    ({"target": floats}, TypeError, "^target is .*, not a function"), ({"target": b"w.py"}, TypeError, "^target is .*, not a bytes"),
    ({"python": 3}, TypeError, "^python is an interpreter's path, .*, not a int"), ({"cwd": 3}, TypeError, "^cwd is a folder's path or None, not a int"),
    ({"name": 3}, TypeError, "^name is a str or None, not a int"), ({"env": "A=1"}, TypeError, "^env is a dict of changes, .*, not a str"),
    ({"env": {"A": 1}}, TypeError, r"^env\['A'\] is a str, or None to remove the variable, not a int"), ({"env": {1: "A"}}, TypeError, "^env has the name 1"),
])
def test_arguments_that_are_none(options: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        zcx.Worker(**{"target": "plain", **options})
    zcx.Worker("plain", max_result_bytes=(1 << 63) - 1, max_kept_bytes=0, env={}, name=None)  # control


def test_a_folder_is_no_interpreter(start: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(zcx.WorkerDied, match=f"python '{tmp_path}' is a directory: name the interpreter in it, '{tmp_path}/bin/python'"):
        start("plain", python=tmp_path).call("echo")


def test_relative_paths_are_the_callers(start: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the worker works, and wherever this process has gone when it is started. A bare name is looked up on PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "there").mkdir()
    for name in ("bin/ours", "bin/python-of-ours"):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    w = start("plain", python="bin/ours", cwd="there")
    monkeypatch.chdir("/")
    assert w.call("where")["cwd"] == str(tmp_path / "there")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert start("plain", python="python-of-ours", env={"PATH": path}).call("echo", 1) == 1


def test_a_file_that_calls_itself_while_it_is_imported(start: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "itself.py").write_text("""
import comfy_zerocopy as zcx
from comfy_zerocopy.worker import expose
@expose
def f():
    return zcx.Worker(__file__, timeout=40).call("g")
@expose
def g():
    return 7
if not CAREFUL or __name__ == "__main__":
    print(zcx.Worker(__file__, timeout=40).call("f"))
""".replace("CAREFUL", "False"))
    with pytest.raises(zcx.RemoteError, match='importing .*itself.py failed: worker itself cannot be started while this process, .*`if __name__ == "__main__":`'):
        start(tmp_path / "itself.py").call("f")
    (tmp_path / "careful.py").write_text((tmp_path / "itself.py").read_text().replace("not False", "False"))
    assert start(tmp_path / "careful.py").call("f") == 7  # control: a worker that starts one when it is called


@pytest.mark.parametrize(("source", "says"), [
    ("@expose\ndef f(): pass\n@expose\ndef f(): pass\n", r"ValueError: .*importing .* failed: f is exposed twice \(.*w.py:2 and .*w.py:4\): .* rename one"),
    ("@expose\nclass A: pass\n", "TypeError: .*A is a class: expose a function that makes one"),
    ("class A:\n    @expose\n    def f(self): pass\n", r"TypeError: .*A\.f is a method, .*: expose a function that calls it"),
    ("class A:\n    @expose\n    @staticmethod\n    def f(): pass\n", r"TypeError: .*A\.f is a method"),
])
def test_what_is_exposed_by_mistake(start: Any, tmp_path: pathlib.Path, source: str, says: str) -> None:
    (tmp_path / "w.py").write_text("from comfy_zerocopy.worker import expose\n" + source)
    with pytest.raises(zcx.RemoteError, match=says):
        start(tmp_path / "w.py").call("f")


def test_what_may_be_exposed(start: Any, tmp_path: pathlib.Path) -> None:
    """A bound method, a function made by another one, and a module's function again when that is loaded again."""
    (tmp_path / "again.py").write_text("from comfy_zerocopy.worker import expose\n@expose\ndef h(): return 3\n")
    (tmp_path / "w.py").write_text("""
import importlib, again
from comfy_zerocopy.worker import expose
class A:
    def f(self): return 1
expose(A().f)
def make():
    @expose
    def g(): return 2
make()
importlib.reload(again)
""")
    w = start(tmp_path / "w.py")
    assert [w.call(name) for name in "fgh"] == [1, 2, 3]


def test_the_workers_names_are_found_where_they_are() -> None:
    from comfy_zerocopy import worker

    assert {*worker.__all__} - {*zcx.__all__} == {*zcx._IN_WORKERS}
    with pytest.raises(AttributeError, match="in a worker's file: from comfy_zerocopy.worker import expose"):
        _ = zcx.expose


def test_which_of_them_cannot_be_used(start: Any) -> None:
    for options, says in (({"python": "/nowhere/python"}, "python '/nowhere/python' cannot be run: No such file"),
                          ({"cwd": "/nowhere"}, "cwd '/nowhere' is no directory"),
                          ({"cwd": "/nowhere", "python": "/nowhere/python"}, "cwd '/nowhere' is no directory")):
        with pytest.raises(zcx.WorkerDied, match=rf"worker plain cannot be started: {says}") as caught:
            start("plain", **options).call("echo")
        assert "while starting" not in str(caught.value)


def test_a_worker_of_an_old_python_is_named_once(start: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 9, 18, 'final', 0)\n")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(zcx.UnsupportedPlatform, match="^worker plain: this worker's Python is 3.9") as caught:
        start("plain", python=fake).call("where")
    assert str(caught.value).count("3.9") == str(caught.value).count("3.10") == 1


def test_empty_says_what_it_is_not_for_and_what_is_missing(run: Run) -> None:
    with pytest.raises(ValueError, match="a CPU tensor needs no such memory: it is copied once into shared memory"):
        zcx.empty(3, device="cpu")
    done = run("""
        import comfy_zerocopy as zcx
        try:
            zcx.empty(3)
        except zcx.Error as error:
            print(error)
    """, env={"ZCX_LIBCUDA": "/nowhere/libcuda.so.1"})
    assert done.stdout.startswith("there is no NVIDIA GPU (or driver) in this process: no NVIDIA driver: /nowhere/libcuda.so.1")


# ---- types ----


def test_an_encode_that_fails_is_named(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_by_type", {})
    monkeypatch.setattr(tree, "_by_tag", {})
    zcx.register(decimal.Decimal, "test.Bad", lambda d: d.nothing, decimal.Decimal)
    w = start("plain")
    with pytest.raises(zcx.UnsupportedType, match="registered for Decimal under the tag 'test.Bad' failed: AttributeError") as caught:
        w.call("echo", 1, {"x": [decimal.Decimal(1)]})
    assert isinstance(caught.value.__cause__, AttributeError) and caught.value.place == "args[1]['x'][0]"
    zcx.register(decimal.Decimal, "test.Bad", lambda d: bytes(1 << 62), decimal.Decimal)
    with pytest.raises(MemoryError):
        w.call("echo", decimal.Decimal(1))
    assert w.call("echo", 1) == 1


def test_the_report_of_a_call_that_failed_is_its_own(start: Any) -> None:
    w = start("plain")
    x = floats(1, 2)
    w.call("echo", x)
    assert len(w.last_report.transfers) == 1
    with pytest.raises(zcx.UnsupportedType):
        w.call("echo", object())
    assert w.last_report == zcx.Report(())
    with pytest.raises(zcx.RemoteError):
        w.call("boom", x)
    assert [t.direction for t in w.last_report.transfers] == ["input"]


def test_what_help_shows() -> None:
    for word in ("last_report", "on_progress", "name", "pid"):
        assert word in (zcx.Worker.__doc__ or "")
    assert zcx.Transfer("input", 1, "host", True, "x") in zcx.Report((zcx.Transfer("input", 1, "host", True, "x"),)).transfers
    keys = {"calls", "transfers", "kept", "kept_bytes", "kept_device_bytes", "leased", "leased_bytes", "quarantined", "result_bytes", "warm_bytes", "input_bytes", "handles"}
    with zcx.Worker(WORKERS / "plain.py") as w:
        w.call("echo", 1)
        assert set(w.status()) - keys <= {"name", "pid", "alive", "state", "pools", "windows", "vmm", "copies"} and keys <= set(w.status())
    assert all(key in (zcx.Worker.status.__doc__ or "") for key in keys)


# ---- what a remote error shows ----


def test_a_remote_traceback_begins_in_the_users_code(start: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(zcx.RemoteError) as caught:
        start("plain").call("boom", "x")
    assert "comfy_zerocopy/worker.py" not in caught.value.traceback and "in boom" in caught.value.traceback
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(zcx.RemoteError, match="importing .*broken.py failed: No module named 'no_such_module'") as caught:
        start(tmp_path / "broken.py").call("f")
    frames = [line for line in caught.value.traceback.splitlines() if line.lstrip().startswith("File")]
    assert len(frames) == 1 and "broken.py" in frames[0], caught.value.traceback
    (tmp_path / "broken.py").write_text("def f(:\n")
    for target, kind in ((tmp_path / "broken.py", "SyntaxError"), (tmp_path / "missing.py", "FileNotFoundError"), ("no_such_module", "ModuleNotFoundError")):
        with pytest.raises(zcx.RemoteError, match="importing .* failed") as caught:
            start(target).call("f")
        assert caught.value.type_name == kind and "worker.py" not in caught.value.traceback and "importlib" not in caught.value.traceback


# ---- the folder in the cache ----


def test_snapshots_that_nobody_used_for_a_month_are_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "comfy-zerocopy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = time.time() - 40 * 24 * 3600
    stale, used, other, file = root / ("a" * 32), root / ("b" * 32), root / "notes", root / ("c" * 32)
    for folder in (stale, used, other):
        (folder / "comfy_zerocopy").mkdir(parents=True)
    file.touch()
    (root / ("d" * 32)).symlink_to(other)
    for path in (stale, other, file):
        os.utime(path, (old, old))
    here = snapshot.folder()
    assert sorted(p.name for p in root.iterdir()) == sorted([used.name, other.name, file.name, "d" * 32, pathlib.Path(here).name])
    os.utime(here, (old, old))
    assert snapshot.folder() == here and time.time() - os.stat(here).st_mtime < 1000  # used: young again
    assert (other / "comfy_zerocopy").is_dir()


# ---- advice ----

ADVICE = """
import os, sys, types
exists = os.path.exists
os.path.exists = lambda path: {there} if str(path) == "/dev/nvidiactl" else not str(path).startswith("/dev/") and exists(path)
from comfy_zerocopy import _native
import fake_zcx
fake_zcx.put()
from comfy_zerocopy import doctor
torch = {torch}
if torch: sys.modules["torch"] = torch
(mode,) = [f for f in doctor.examine(touch_cuda={touch}, import_torch=False)["findings"] if f["topic"] == "mode"]
print("COMFY_ZEROCOPY=1" in mode["todo"] and "GPU results are shared, as memory that torch does not count" in mode["says"],
      "no GPU tensors to share" in mode["says"])
"""
CPU_TORCH = "types.SimpleNamespace(__version__='2', version=types.SimpleNamespace(cuda=None))"


@pytest.mark.parametrize(("torch", "touch", "devices", "there", "advised"), [
    ("None", True, "11", False, True), ("None", True, "00", True, False), ("None", True, "", True, False), ("None", False, "", True, True),
    ("None", False, "", False, False), (CPU_TORCH, True, "11", True, False), (CPU_TORCH, False, "11", True, False),
])
def test_doctor_advises_a_mode_only_where_there_is_something_to_share(run: Run, torch: str, touch: bool, devices: str, there: bool,
                                                                      advised: bool) -> None:
    """As far as it may look: inside a host that has not begun with CUDA, at the driver's device files."""
    done = run(ADVICE.format(torch=torch, touch=touch, there=there), path=(FAKES, ROOT), env={"FAKE_DEVICES": devices})
    assert done.stdout == f"{advised} {not advised}\n"


@pytest.mark.parametrize("there", [True, False])
def test_the_start_line_advises_it_only_where_a_driver_is_in_sight(run: Run, there: bool) -> None:
    done = run(f"""
        import os
        exists = os.path.exists
        os.path.exists = lambda path: {there} if str(path) == "/dev/nvidiactl" else not str(path).startswith("/dev/") and exists(path)
        import comfy_zerocopy
        print(comfy_zerocopy.install().reason)
    """)
    assert ("COMFY_ZEROCOPY=1" in done.stdout) is there and ("no NVIDIA GPU is in sight" in done.stdout) is not there


# ---- the command line ----


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    p = subprocess.Popen([sys.executable, "-m", "comfy_zerocopy", "doctor"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.close()
    assert p.stderr.read() == b"" and p.wait(40) == 1
    p.stderr.close()


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "comfy_zerocopy", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"comfy_zerocopy {zcx.__version__}\n"


def test_bench_says_what_its_rows_are() -> None:
    from comfy_zerocopy import bench

    assert set(bench._ROWS) == set(bench._AGAINST)
    row = {"row": "shared", "bytes": 1, "p50_us": 1.0, "p99_us": 2.0, "n": 3}
    text = bench._text({"version": "1", "device": "CPU", "library": "", "rows": [row], "ratios": [], "floor": [], "note": ""})
    assert f"shared   {bench._ROWS['shared']}" in text and bench._ROWS["pool"] not in text
