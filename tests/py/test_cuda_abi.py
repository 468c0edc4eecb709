"""Our own CUDA ABI header against NVIDIA's, wherever one is installed: a toolkit, or the wheel nvidia-cuda-runtime."""
from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess

import pytest

import cbuild

SOURCE = cbuild.ROOT / "tests" / "c" / "abi_against_cuda_h.c"
NEWEST = 12050  # of the functions in csrc/driver.h: older headers do not declare it


def include_folders() -> list[pathlib.Path]:
    folders = [pathlib.Path(os.environ[k]) / "include" for k in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(k)]
    folders.append(pathlib.Path("/usr/local/cuda/include"))
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        folders += [pathlib.Path(place) / name / "include" for name in ("cuda_runtime", "cu13")]
    found: dict[pathlib.Path, None] = {}
    for folder in folders:
        if (folder / "cuda.h").is_file() and (folder / "cudaTypedefs.h").is_file():
            found[folder.resolve()] = None
    return list(found)


FOLDERS = include_folders()


def compile_against(folder: pathlib.Path, ours: pathlib.Path, out: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [cbuild.CC, *cbuild.WARN, f"-I{ours}", "-isystem", str(folder), "-c", "-o", str(out), str(SOURCE)],
        capture_output=True, text=True,
    )


def version_of(folder: pathlib.Path) -> int:
    found = re.search(r"^#define CUDA_VERSION (\d+)", (folder / "cuda.h").read_text(errors="replace"), re.M)
    assert found, f"{folder}/cuda.h names no CUDA_VERSION"
    return int(found[1])


def test_names_every_constant() -> None:
    header = re.sub(r"/\*.*?\*/", "", (cbuild.ROOT / "csrc" / "cuda_abi.h").read_text(), flags=re.S)
    ours = set(re.findall(r"\bZCU_(\w+) =", header))
    assert ours and ours == set(re.findall(r"^(?:CONSTANT|RESULT)\((\w+)\);", SOURCE.read_text(), re.M))


@pytest.mark.skipif(not FOLDERS, reason="no cuda.h here: neither $CUDA_HOME, /usr/local/cuda nor the wheel nvidia-cuda-runtime")
@pytest.mark.parametrize("folder", FOLDERS or [None], ids=str)
def test_matches_cuda_h(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if version_of(folder) < NEWEST:
        pytest.skip(f"{folder}/cuda.h is CUDA {version_of(folder)}, older than functions that are in our table")
    done = compile_against(folder, cbuild.ROOT / "csrc", tmp_path / "abi.o")
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.skipif(not FOLDERS, reason="no cuda.h here: neither $CUDA_HOME, /usr/local/cuda nor the wheel nvidia-cuda-runtime")
@pytest.mark.parametrize(("file", "before", "after"), [
    ("cuda_abi.h", "ZCU_MEMPOOL_ATTR_USED_MEM_HIGH = 8", "ZCU_MEMPOOL_ATTR_USED_MEM_HIGH = 7"),
    ("cuda_abi.h", "unsigned char reserved[54]", "unsigned char reserved[62]"),
    ("cuda_abi.h", "int alloc_type, handle_types;", "int handle_types, alloc_type;"),
    ("cuda_abi.h", "unsigned char compression, rdma;", "unsigned char compression;"),
    ("driver.h", "X(MemRetainAllocationHandle, 11000", "X(MemRetainAllocationHandle, 10020"),
    ("driver.h", "X(DevicePrimaryCtxRelease, 11000", "X(DevicePrimaryCtxRelease, 11010"),
    ("driver.h", "(zcu_stream, zcu_event, unsigned)", "(zcu_stream, zcu_event)"),
    ("driver.h", "(zcu_device, unsigned *, int *)", "(zcu_device, int *, unsigned *)"),
])
def test_would_notice(file: str, before: str, after: str, tmp_path: pathlib.Path) -> None:
    for header in ("cuda_abi.h", "driver.h", "err.h"):
        text = (cbuild.ROOT / "csrc" / header).read_text()
        if header == file:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / header).write_text(text)
    if version_of(FOLDERS[0]) < NEWEST:
        pytest.skip(f"{FOLDERS[0]}/cuda.h is older than functions that are in our table")
    assert compile_against(FOLDERS[0], tmp_path, tmp_path / "abi.o").returncode != 0
