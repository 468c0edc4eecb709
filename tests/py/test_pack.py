"""The pack in ComfyUI's custom_nodes folder, in every world: it loads, says one line, and breaks nothing.

HOST does what ComfyUI does with a pack (main.py and nodes.py, 0.3.64): the prestartup script by its path, before torch and
before CUDA_VISIBLE_DEVICES; then the folder's __init__.py under its path as module name."""
from __future__ import annotations

import importlib.machinery
import pathlib
import shutil

import pytest
from conftest import FAKES, ROOT, Run

HOST = """
import importlib.util, io, logging, os, sys
log = io.StringIO()
logging.basicConfig(stream=log, level=logging.INFO, format="%(levelname)s %(message)s")
pack = os.environ["PACK"]

def lines():
    return [line for line in log.getvalue().splitlines() if "comfy_zerocopy" in line]

def prestartup():
    script = os.path.join(pack, "prestartup_script.py")
    spec = importlib.util.spec_from_file_location(os.path.splitext(script)[0], script)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

def nodes():
    name = pack.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(pack, "__init__.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

def report(module):
    cls = module.NODE_CLASS_MAPPINGS["ZeroCopyStatus"]
    assert cls.INPUT_TYPES() == {"required": {}} and cls.RETURN_TYPES == ("STRING",) and cls.OUTPUT_NODE is True
    assert cls.CATEGORY and module.NODE_DISPLAY_NAME_MAPPINGS["ZeroCopyStatus"]
    assert cls.IS_CHANGED() != cls.IS_CHANGED()
    shown = getattr(cls(), cls.FUNCTION)()
    assert shown["ui"]["text"] == [shown["result"][0]]
    return shown["result"][0]
"""


@pytest.fixture
def lay(tmp_path: pathlib.Path):
    """lay("name"): a clone of the repository under custom_nodes, without an extension."""

    def go(name: str = "ComfyUI-zero-copy.v2", version: str | None = None) -> pathlib.Path:
        pack = tmp_path / "custom_nodes" / name
        shutil.copytree(ROOT / "comfy_zerocopy", pack / "comfy_zerocopy", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        shutil.copytree(ROOT / "csrc", pack / "csrc")
        for file in ("__init__.py", "prestartup_script.py", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / file, pack / file)
        if version:
            set_version(pack, version)
        return pack

    return go


def set_version(folder: pathlib.Path, version: str) -> None:
    file = folder / "comfy_zerocopy" / "__init__.py"
    file.write_text(file.read_text().replace('__version__ = "0.1.0"', f'__version__ = "{version}"'))


def install(site: pathlib.Path, version: str) -> pathlib.Path:
    """A copy as pip would install it."""
    shutil.copytree(ROOT / "comfy_zerocopy", site / "comfy_zerocopy", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    set_version(site, version)
    return site


@pytest.mark.parametrize("name", ["comfy-zerocopy", "comfy_zerocopy", "ComfyUI-zero-copy.v2", "zéro copie 1"])
def test_not_built_not_opted_in(run: Run, lay, name: str) -> None:
    run(HOST + """
path, before = list(sys.path), set(sys.modules)
prestartup()
assert len(lines()) == 1 and "off" in lines()[0], lines()
module = nodes()
assert len(lines()) == 1, lines()
assert sys.path == path and "torch" not in sys.modules
# one copy of the package, under its own name
assert [n for n in sys.modules if n.endswith("comfy_zerocopy") and n not in (pack, pack.replace(".", "_x_"))] == ["comfy_zerocopy"]
text = report(module)
assert "not built" in text and f'pip install "{os.path.realpath(pack)}"' in text, text
""", path=(), env={"PACK": str(lay(name))})


def test_not_built_opted_in(run: Run, lay) -> None:
    run(HOST + """
prestartup()
assert len(lines()) == 1 and lines()[0].startswith("WARNING") and "mode swap, refused" in lines()[0] and "not built" in lines()[0]
report(nodes())
""", path=(), env={"PACK": str(lay()), "COMFY_ZEROCOPY": "swap"})


def test_opted_in_by_the_file_in_the_user_directory(run: Run, lay, tmp_path: pathlib.Path) -> None:
    (tmp_path / "comfy_zerocopy.json").write_text('{"mode": "results"}')
    run(HOST + """
import types
sys.modules["folder_paths"] = types.SimpleNamespace(get_user_directory=os.getcwd)
prestartup()
assert "mode results, refused" in lines()[0]
assert "set by file" in report(nodes())
""", path=(), env={"PACK": str(lay())})


def test_junk_settings(run: Run, lay, tmp_path: pathlib.Path) -> None:
    (tmp_path / "comfy_zerocopy.json").write_text("{junk")
    run(HOST + """
import types
sys.modules["folder_paths"] = types.SimpleNamespace(get_user_directory=os.getcwd)
prestartup()
assert len(lines()) == 1 and lines()[0].startswith("WARNING") and "banana" in lines()[0] and "JSON" in lines()[0], lines()
assert "banana" in report(nodes())
""", path=(), env={"PACK": str(lay()), "COMFY_ZEROCOPY": "banana"})


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems(run: Run, lay, platform: str) -> None:
    run(f"import importlib.util, logging, pathlib, sys; sys.platform = {platform!r}" + HOST + """
prestartup()
assert len(lines()) == 1
assert "only Linux" in report(nodes())
""", path=(), env={"PACK": str(lay()), "COMFY_ZEROCOPY": "1"})


def test_whole_start_of_comfyui(run: Run, lay) -> None:
    """Prestartup, then the devices, then torch: the swap sees the devices that ComfyUI chose."""
    run(HOST + """
sys.dont_write_bytecode = True
import types
class Put:                                      # the pack's copy comes later than this: give it the fake when it asks
    def find_spec(self, name, path=None, target=None):
        if name == "comfy_zerocopy._zcx":
            import fake_zcx
            fake_zcx.put()
            return importlib.util.spec_from_loader(name, types.SimpleNamespace(
                create_module=lambda spec: sys.modules[name], exec_module=lambda module: None))
sys.meta_path.insert(0, Put())
prestartup()
import fake_zcx
assert fake_zcx.calls == [] and "torch" not in sys.modules and len(lines()) == 1 and "armed" in lines()[0], lines()
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
assert importlib.util.find_spec("torch")        # cuda_malloc.py
import torch
assert fake_zcx.seen == {"CUDA_VISIBLE_DEVICES": "1"} and fake_zcx.current == {0: 1000}
assert len(lines()) == 2 and "mode swap on cuda:0" in lines()[1] and "Fake 0" in lines()[1]
text = report(nodes())
assert "swap (set by environment COMFY_ZEROCOPY), on" in text, text
""", path=(FAKES,), env={"PACK": str(lay()), "COMFY_ZEROCOPY": "swap"})


@pytest.mark.parametrize(("cuda_device", "default_device", "later"), [(1, None, "1"), (None, 2, "2,0,1")])
def test_torch_imported_before_comfyui_chose_the_devices(run: Run, lay, tmp_path: pathlib.Path, cuda_device, default_device,
                                                         later: str) -> None:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "cli_args.py").write_text(
        f"import types\nargs = types.SimpleNamespace(cuda_device={cuda_device}, default_device={default_device})")
    (tmp_path / "comfy" / "model_management.py").write_text("import torch")
    run(HOST + """
import comfy.cli_args
import torch                                    # another pack's prestartup script did
import comfy_zerocopy, fake_zcx
fake_zcx.put()
prestartup()
assert fake_zcx.calls == [] and "armed" in lines()[0], lines()
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LATER"]
import comfy.model_management
assert fake_zcx.seen == {"CUDA_VISIBLE_DEVICES": os.environ["LATER"]} and "mode swap on cuda:0" in lines()[-1], lines()
""", path=(tmp_path, FAKES, ROOT), env={"PACK": str(lay()), "COMFY_ZEROCOPY": "swap", "LATER": later})


def test_devices_chosen_already(run: Run) -> None:
    run("""
import os, sys, types
from comfy_zerocopy.comfyui.prestartup import not_before
assert not_before() is None
args = types.SimpleNamespace(cuda_device=None, default_device=None)
sys.modules["comfy.cli_args"] = types.SimpleNamespace(args=args)
assert not_before() is None
args.cuda_device = 1
assert not_before() == "comfy.model_management"
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
assert not_before() is None
""")


# ---- two copies ----

WHICH = HOST + """
prestartup()
module = nodes()
import comfy_zerocopy
print(comfy_zerocopy.__version__, os.path.dirname(os.path.dirname(comfy_zerocopy.__file__)))
print(sum("two copies" in line for line in lines()))
report(module)
"""


@pytest.mark.parametrize(("theirs", "ours", "winner"), [
    ("0.1.0", "0.1.0", "installed"), ("0.2.0", "0.1.0", "installed"), ("0.1.0", "0.1.1", "pack"), ("0.9.0", "0.10.0", "pack"),
    ("1.0", "1.0.0", "pack"),
])
def test_two_copies(run: Run, lay, tmp_path: pathlib.Path, theirs: str, ours: str, winner: str) -> None:
    pack, site = lay(version=ours), install(tmp_path / "site", theirs)
    out = run(WHICH, path=(site,), env={"PACK": str(pack)}).stdout.splitlines()
    assert out == [f"{theirs} {site}" if winner == "installed" else f"{ours} {pack}", "0" if theirs == ours else "1"]


@pytest.mark.parametrize("stale", [None, b"of \0000.1.0\000"], ids=["not built", "built before the pull"])
def test_a_newer_clone_that_was_not_built_leaves_the_installed_copy(run: Run, lay, tmp_path: pathlib.Path, stale: bytes | None) -> None:
    pack, site = lay(version="0.2.0"), install(tmp_path / "site", "0.1.0")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (site / "comfy_zerocopy" / f"_zcx{suffix}").write_bytes(b"of \0000.1.0\000")
    if stale:
        (pack / "comfy_zerocopy" / f"_zcx{suffix}").write_bytes(stale)
    tell = "print(*lines(), sep='\\n')"
    which = WHICH.replace("\nreport(module)", f"\n{tell}")
    out = run(which, path=(site,), env={"PACK": str(pack)}).stdout.splitlines()
    assert out[:2] == [f"0.1.0 {site}", "1"] and f'pip install "{pack}"' in "".join(out[2:]), out
    (pack / "comfy_zerocopy" / f"_zcx{suffix}").write_bytes(b"of \0000.2.0\000")
    assert run(which, path=(site,), env={"PACK": str(pack)}).stdout.splitlines()[:2] == [f"0.2.0 {pack}", "1"]


def test_imported_already_wins(run: Run, lay, tmp_path: pathlib.Path) -> None:
    pack, site = lay(version="0.3.0"), install(tmp_path / "site", "0.2.0")
    out = run("import comfy_zerocopy" + WHICH, path=(site,), env={"PACK": str(pack)}).stdout.splitlines()
    assert out == [f"0.2.0 {site}", "0"]


def test_the_same_copy_twice_is_one(run: Run, lay) -> None:
    """An editable install of the pack's own folder, and the folder behind a link."""
    pack = lay()
    link = pack.parent / "link"
    link.symlink_to(pack)
    assert run(WHICH, path=(pack,), env={"PACK": str(link)}).stdout.splitlines() == [f"0.1.0 {pack}", "0"]


def test_custom_nodes_on_the_path_is_no_copy(run: Run, lay) -> None:
    """Some packs put custom_nodes on sys.path: then the pack's own folder, if named so, looks like the package."""
    pack = lay("comfy_zerocopy")
    assert run(WHICH, path=(pack.parent,), env={"PACK": str(pack)}).stdout.splitlines() == [f"0.1.0 {pack}", "0"]


# ---- a broken copy ----

@pytest.mark.parametrize("file", ["__init__.py", "comfyui/prestartup.py", "comfyui/nodes.py", "_install.py"])
@pytest.mark.parametrize("content", ["syntax error", "raise RuntimeError('broken')", None])
def test_broken_copy_loads_without_nodes(run: Run, lay, file: str, content: str | None) -> None:
    pack = lay()
    target = pack / "comfy_zerocopy" / file
    if content is None:
        target.unlink()
    else:
        target.write_text(content)
    run(HOST + """
prestartup()
module = nodes()
assert module.NODE_CLASS_MAPPINGS == {} and module.NODE_DISPLAY_NAME_MAPPINGS == {}
assert 1 <= len(lines()) <= 2 and all(line.count("comfy_zerocopy") for line in lines()), lines()
""", path=(), env={"PACK": str(pack)})


def test_scripts_run_on_an_old_python_without_harm() -> None:
    """ComfyUI on an unsupported Python must still start: the two files that it loads parse with 3.8's grammar."""
    import ast

    for file in ("__init__.py", "prestartup_script.py"):
        ast.parse((ROOT / file).read_text(), feature_version=(3, 8))


def test_prestartup_is_quick(run: Run, lay) -> None:
    """It is part of every start of ComfyUI: nothing heavy is imported."""
    run(HOST + """
prestartup()
assert not {"numpy", "torch", "asyncio", "multiprocessing", "subprocess"} & set(sys.modules)
""", path=(), env={"PACK": str(lay()), "COMFY_ZEROCOPY": "swap"})
