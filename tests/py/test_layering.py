"""The layers that one can grep: who includes what, who opens libraries, and what the built extension shows to the outside.

Each rule is a function over a folder, so that each can be shown to fail on a folder that breaks it."""
from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, absent

CSRC = ROOT / "csrc"
# An object may include its own header and those of lower rank. xfer and module are several files of one rank each.
RANK = {"err": 0, "cuda_abi": 0, "wire": 1, "shm": 1, "driver": 1, "window": 1, "codec": 2, "files": 2, "pool": 2, "arena": 2,
        "gate": 2, "canary": 2, "sock": 3, "ring": 3,
        "xfer": 4, "module": 5}
CUDA = {"cuda_abi", "driver", "pool", "arena", "gate", "canary", "ring"}
TALK = {"wire", "codec", "sock"}


def strip(text: str) -> str:
    """C without comments and without string literals other than those of #include."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    return "\n".join(line if line.lstrip().startswith("#") else re.sub(r'"(?:\\.|[^"\\])*"', '""', line) for line in text.splitlines())


def thing(name: str) -> str:
    """The object that a file belongs to: xfer_parent.c is xfer's."""
    stem = pathlib.PurePath(name).stem
    return next((o for o in ("xfer", "module") if stem == o or stem.startswith(o + "_")), stem)


def includes(folder: pathlib.Path) -> dict[str, set[str]]:
    return {p.name: set(re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', strip(p.read_text()), re.M))
            for p in sorted(folder.glob("*.[ch]"))}


def reach(name: str, graph: dict[str, set[str]]) -> set[str]:
    """The objects of ours that a file includes, through others too."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        for one in graph.get(todo.pop(), ()):
            if one in graph and one not in seen:
                seen.add(one)
                todo.append(one)
    return {thing(one) for one in seen}


def broken_rules(folder: pathlib.Path) -> list[str]:
    graph, found = includes(folder), []
    for name, wants in graph.items():
        own = thing(name)
        if own not in RANK:
            found.append(f"{name}: no layer is named for it")
            continue
        if "Python.h" in wants and name != "module.h":
            found.append(f"{name} includes Python.h; only module.h does")
        if "module.h" in wants and own != "module":
            found.append(f"{name} includes module.h; only the glue does")
        for one in wants & set(graph):
            if thing(one) != own and RANK.get(thing(one), 99) >= RANK[own]:
                found.append(f"{name} includes {one}, which is not below it")
        if own in CUDA | {"window"} and (bad := reach(name, graph) & TALK):
            found.append(f"{name} knows {sorted(bad)}: memory and order know no messages")
        if own in TALK | {"shm", "files"} and (bad := reach(name, graph) & CUDA):
            found.append(f"{name} knows {sorted(bad)}: messages and host memory know no CUDA")
        if own == "window" and (bad := reach(name, graph) & CUDA):
            found.append(f"{name} knows {sorted(bad)}: the arithmetic of windows calls no driver")
        code = strip((folder / name).read_text())
        if name != "driver.c" and (call := re.search(r"\b(dlopen|dlmopen|dlsym|dlvsym)\s*\(", code)):
            found.append(f"{name} calls {call[1]}; only driver.c does")
        if own not in CUDA and own not in ("xfer", "module") and (call := re.search(r"\bcu[A-Z]\w+\s*\(", code)):
            found.append(f"{name} calls {call[0]}")
        if re.search(r"\bcuda[A-Z]\w+\s*\(", code):
            found.append(f"{name} calls the runtime API")
        if any(one.startswith("cuda") and one.endswith(".h") and one != "cuda_abi.h" for one in wants):
            found.append(f"{name} includes a header of the toolkit")
    return found


def test_csrc_keeps_the_rules() -> None:
    assert broken_rules(CSRC) == []
    assert {"module.h", "driver.c", "wire.c"} <= set(includes(CSRC))


@pytest.mark.parametrize(("file", "line", "complaint"), [
    ("pool.c", "#include <Python.h>", "pool.c includes Python.h"),
    ("xfer.h", '#include "module.h"', "xfer.h includes module.h"),
    ("wire.h", '#include "sock.h"', "wire.h includes sock.h, which is not below it"),
    ("pool.h", '#include "wire.h"', "pool.h knows ['wire']"),
    ("arena.h", '#include "codec.h"', "arena.h knows ['codec', 'wire']"),
    ("arena.c", '#include "pool.h"', "arena.c includes pool.h, which is not below it"),
    ("canary.h", '#include "wire.h"', "canary.h knows ['wire']"),
    ("ring.h", '#include "sock.h"', "ring.h includes sock.h, which is not below it"),
    ("ring.c", '#include "wire.h"', "ring.c knows ['wire']"),
    ("gate.c", '#include "ring.h"', "gate.c includes ring.h, which is not below it"),
    ("canary.c", '#include "pool.h"', "canary.c includes pool.h, which is not below it"),
    ("window.c", '#include "cuda_abi.h"', "window.c knows ['cuda_abi']: the arithmetic"),
    ("window.h", '#include "driver.h"', "window.h includes driver.h, which is not below it"),
    ("window.c", "int g(void) { return cuMemFree(0); }", "window.c calls cuMemFree("),
    ("shm.c", '#include "driver.h"', "shm.c knows ['cuda_abi', 'driver']"),
    ("files.c", '#include "gate.h"', "files.c includes gate.h, which is not below it"),
    ("err.h", '#include "wire.h"', "err.h includes wire.h, which is not below it"),
    ("gate.c", "void *f(void) { return dlsym(0, 0); }", "gate.c calls dlsym"),
    ("sock.c", "int g(void) { return cuInit(0); }", "sock.c calls cuInit("),
    ("driver.c", "int g(void) { return cudaMalloc(0, 0); }", "driver.c calls the runtime API"),
    ("driver.c", "#include <cuda.h>", "driver.c includes a header of the toolkit"),
    ("odd.c", "", "odd.c: no layer is named for it"),
])
def test_each_rule_can_fail(tmp_path: pathlib.Path, file: str, line: str, complaint: str) -> None:
    folder = tmp_path / "csrc"
    shutil.copytree(CSRC, folder)
    target = folder / file
    target.write_text((target.read_text() if target.exists() else "") + f"\n{line}\n")
    assert any(complaint in one for one in broken_rules(folder)), broken_rules(folder)


def test_comments_and_strings_are_not_code(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "csrc"
    shutil.copytree(CSRC, folder)
    (folder / "sock.c").write_text('/* dlsym( cuInit( */ // cudaMalloc(\nconst char *s = "dlopen(\\"x\\") cuInit(";\n')
    assert broken_rules(folder) == []


# ---- Python ----

def test_only_the_tensor_module_and_doctor_import_torch() -> None:
    pattern = re.compile(r"^\s*(?:import|from) torch\b|import_module\(['\"]torch", re.M)
    found = {p.name for p in (ROOT / "comfy_zerocopy").rglob("*.py") if pattern.search(p.read_text())}
    assert "doctor.py" in found and found <= {"doctor.py", "tensor.py"}


def test_nothing_imports_what_knows_comfyui() -> None:
    pattern = re.compile(r"^\s*(?:from|import) (?:\.|comfy_zerocopy\.)?comfyui\b|from (?:\.|comfy_zerocopy) import .*\bcomfyui\b", re.M)
    assert [p.name for p in (ROOT / "comfy_zerocopy").glob("*.py") if pattern.search(p.read_text())] == []


# ---- the built extension ----

@pytest.fixture
def built() -> pathlib.Path:
    found = sorted((ROOT / "comfy_zerocopy").glob("_zcx*.so"))
    if not found:
        absent("the extension is not built in this folder (pip install -e .)")
    return found[-1]


def output(*command: object) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def test_extension_shows_one_symbol(built: pathlib.Path) -> None:
    shown = [line.split()[-1] for line in output("nm", "-D", "--defined-only", built).splitlines()]
    assert shown == ["PyInit__zcx"]


def test_extension_needs_only_libc(built: pathlib.Path) -> None:
    needed = re.findall(r"NEEDED.*\[(.+?)\]", output("readelf", "-d", built))
    assert "libc.so.6" in needed
    assert {n.split(".so")[0] for n in needed if not n.startswith("ld-linux")} <= {"libc", "libpthread", "libdl", "libm", "librt"}
