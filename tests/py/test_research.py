"""The scripts of research/pool-ipc and the patches of docs/upstream, so that none rots where there is no GPU.

On the simulated driver each script reaches the verdict that it reaches on a card, as far as that driver goes; without a driver it
says so and exits 2; a driver that behaves otherwise is noticed. The Windows probe runs against a made-up nvcuda."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import cbuild

FOLDER = cbuild.ROOT / "research" / "pool-ipc"
UPSTREAM = cbuild.ROOT / "docs" / "upstream"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py") if p.name != "cudalib.py")
PROBES = [s for s in SCRIPTS if s not in ("run_all.py", "wddm_pool_probe.py")]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the simulated driver is a Linux library")


def load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str, env: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SIMCUDA_", "FAKE_NVCUDA_", "ZCX_"))}
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env=dict(clean, **env),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def sim(tmp_path: pathlib.Path) -> dict[str, str]:
    return {"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(tmp_path), "SIMCUDA_MEMORY": "8G"}


# script: options, memory, steps that must come out as expected, and the only ones that may be left out
ON_SIMCUDA = {
    "verify_pool_swap.py": ([], "8G", 8, {"torch"}),
    "probe_retention.py": ([], "2G", 7, set()),
    "probe_duplicate_import.py": ([], "8G", 4, set()),
    "probe_graph_capture.py": ([], "8G", 18, set()),
    "probe_blob_layout.py": ([], "8G", 8, set()),
    "probe_dead_event.py": (["--no-heir"], "8G", 4, {"event, held up by a kernel", "dead worker, an heir alive"}),
    "probe_import_cost.py": ([], "780M", 0, {"64 MiB", "1024 MiB", "4096 MiB"}),
    "probe_readonly.py": ([], "8G", 4, {"VMM read-only, kernel"}),
}


@pytest.mark.parametrize("script", ON_SIMCUDA)
def test_on_simcuda(script: str, sim: dict[str, str]) -> None:
    options, memory, good, may_miss = ON_SIMCUDA[script]
    done = run(script, "--json", *options, env=dict(sim, SIMCUDA_MEMORY=memory))
    report = json.loads(done.stdout)
    assert done.returncode == report["exit"] == 0, done.stdout + done.stderr
    outcomes = [(s["name"], s["outcome"]) for s in report["steps"]]
    assert sum(o in ("as expected", "measured") for _, o in outcomes) >= max(good, 1), outcomes
    assert {n for n, o in outcomes if o == "not run"} - {"torch"} <= may_miss - {"torch"}, outcomes
    assert report["card"].startswith("Simulated") and report["date"] and report["script"] == script
    assert done.stderr.splitlines()[-1].startswith("verdict: as expected: ")


def test_ladder_on_simcuda(sim: dict[str, str]) -> None:
    done = run("repro_mempool_import_segv.py", "--json", env=sim)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    ladder = {(r["what"], r["mib"]): r for r in report["steps"]}
    assert ladder["begins at a chunk", 4096]["result"] == "imports" and ladder["begins at a chunk", 4096]["chunks"] == 128
    assert ladder["begins at a chunk", 4128]["result"] == "SIGSEGV"
    assert ladder["straddling a chunk", 4096]["chunks"] == 129 and ladder["straddling a chunk", 4096]["result"] == "SIGSEGV"
    assert ladder["straddling a chunk", 4064]["result"] == "imports"
    assert ladder["in 2 windows", 6144]["result"] == "imports, contiguous"
    assert "4096 MiB" in report["verdict"]


def test_ladder_adapts(sim: dict[str, str]) -> None:
    """What is too small for the crash says so; what is too small for anything says that."""
    done = run("repro_mempool_import_segv.py", "--limit", "2048", env=sim)
    assert done.returncode == 2 and "165" in done.stdout.splitlines()[-1]
    done = run("repro_mempool_import_segv.py", env=dict(sim, SIMCUDA_MEMORY="1G"))
    assert done.returncode == 2 and "free device memory" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("script", PROBES)
def test_without_a_gpu(script: str, tmp_path: pathlib.Path) -> None:
    done = run(script, env={"ZCX_LIBCUDA": str(tmp_path / "none")})
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: CANNOT RUN HERE: no CUDA driver here: ")
    report = json.loads(run(script, "--json", env={"ZCX_LIBCUDA": str(tmp_path / "none")}).stdout)
    assert report["exit"] == 2 and report["steps"] == []


@pytest.mark.parametrize(
    ("script", "rule", "step"),
    [
        ("probe_readonly.py", {"SIMCUDA_FAIL": "cuMemPoolSetAccess:1:1"}, "imported pool"),
        ("probe_blob_layout.py", {"SIMCUDA_FAIL": "cuMemPoolExportPointer:1:999"}, "order"),
        ("probe_blob_layout.py", {"SIMCUDA_FAIL": "cuMemcpyDtoDAsync:1:999"}, "copies across windows"),
        ("probe_duplicate_import.py", {"SIMCUDA_FAIL": "cuMemPoolImportPointer:2:999"}, "second import"),
    ],
)
def test_another_driver_is_noticed(script: str, rule: dict[str, str], step: str, sim: dict[str, str]) -> None:
    done = run(script, "--json", env=dict(sim, **rule))
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [s["name"] for s in report["steps"] if s["outcome"] == "unexpected"] == [step]


def test_deadline(sim: dict[str, str]) -> None:
    done = run("probe_dead_event.py", "--deadline", "0.5", env=sim)
    assert done.returncode == 1 and "the deadline of 0 s passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("script", [*SCRIPTS, "cudalib.py"])
def test_stands_alone(script: str) -> None:
    """Python 3.9 can parse it, and it imports the standard library only (the reproducers not even the folder's own module)."""
    tree = ast.parse((FOLDER / script).read_text(), feature_version=(3, 9))
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    alone = script in ("repro_mempool_import_segv.py", "wddm_pool_probe.py")
    assert names - set(sys.stdlib_module_names) - {"torch"} <= (set() if alone else {"cudalib"})
    assert ast.get_docstring(tree)


# ---- run_all


def test_run_all(sim: dict[str, str], tmp_path: pathlib.Path) -> None:
    """One record; a script that fails does not stop the next."""
    env = dict(sim, SIMCUDA_FAIL="cuMemPoolSetAccess:1:1")
    done = run(
        "run_all.py",
        "--out",
        str(tmp_path / "out"),
        "--only",
        "probe_duplicate_import.py",
        "probe_readonly.py",
        "wddm_pool_probe.py",
        env=env,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    [path] = (tmp_path / "out").iterdir()
    record = json.loads(path.read_text())
    assert {name: r["exit"] for name, r in record["scripts"].items()} == {
        "probe_duplicate_import.py": 0,
        "probe_readonly.py": 1,
        "wddm_pool_probe.py": 2,
    }
    assert record["card"].startswith("Simulated") and re.fullmatch("[0-9a-f]{64}", record["source_sha256"])
    assert all(r["output"] and r["script_sha256"] for r in record["scripts"].values())


def test_run_all_knows_every_script_and_fits() -> None:
    module = load(FOLDER / "run_all.py")
    assert sorted(module.SCRIPTS) == [s for s in SCRIPTS if s != "run_all.py"]
    assert sum(module.SCRIPTS.values()) < 600


def test_source_hash(tmp_path: pathlib.Path) -> None:
    files = {"setup.py": b"1", "csrc/a.c": b"2", "comfy_zerocopy/x/b.pyi": b"3", "tests/gpu/t.py": b"4"}
    for name, data in {**files, "csrc/notes.md": b"no", "tests/py/t.py": b"no"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    digest = hashlib.sha256(b"".join(n.encode() + b"\0" + files[n] + b"\0" for n in sorted(files)))
    assert load(FOLDER / "run_all.py").source_hash(tmp_path) == digest.hexdigest()


# ---- the Windows probe


@pytest.fixture
def nvcuda(tmp_path: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    library = tmp_path / "nvcuda.so"
    flags = [*cbuild.WARN, "-fPIC", "-shared", "-fvisibility=hidden"]
    subprocess.run(
        [cbuild.CC, *flags, "-o", str(library), str(pathlib.Path(__file__).parent / "fake_nvcuda.c"), "-pthread"], check=True
    )
    return ["--driver", str(library)], {"FAKE_NVCUDA_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}


@pytest.mark.parametrize(
    ("how", "code", "verdict", "outcomes"),
    [
        (
            {},
            0,
            "rung pool",
            {"pool": "works", "events": "works", "counters": "works", "vmm": "works", "vmm read-only": "works"},
        ),
        ({"FAKE_NVCUDA_REFUSE": "cuMemPoolCreate"}, 0, "rung vmm", {"pool": "refused", "vmm": "works"}),
        (
            {"FAKE_NVCUDA_REFUSE": "cuMemPoolImportPointer,cuMemHostRegister_v2"},
            0,
            "ordered by events",
            {"counters": "refused"},
        ),
        ({"FAKE_NVCUDA_REFUSE": "cuMemPoolCreate,cuMemExportToShareableHandle"}, 0, "rung host", {"vmm": "refused"}),
        ({"FAKE_NVCUDA_CRASH": "cuMemPoolImportPointer"}, 1, "BROKEN: pool", {"pool": "crashed", "vmm": "works"}),
        ({"FAKE_NVCUDA_LIE": "1"}, 1, "rung host", {"pool": "broken", "vmm": "broken"}),
        ({"FAKE_NVCUDA_REFUSE": "cuInit"}, 2, "no usable GPU", {}),
    ],
    ids=["all", "no-pool", "no-counters", "nothing", "crash", "lie", "no-gpu"],
)
def test_wddm_probe(nvcuda: tuple, how: dict[str, str], code: int, verdict: str, outcomes: dict[str, str]) -> None:
    arguments, env = nvcuda
    done = run("wddm_pool_probe.py", "--json", *arguments, env=dict(env, **how))
    report = json.loads(done.stdout)
    assert done.returncode == report["exit"] == code, done.stdout + done.stderr
    assert verdict in report["verdict"]
    seen = {s["name"]: s["outcome"] for s in report["steps"]}
    assert {k: seen.get(k) for k in outcomes} == outcomes
    assert not list(pathlib.Path(env["TMPDIR"]).glob("zcx-probe-*"))


def test_wddm_probe_fence(nvcuda: tuple, tmp_path: pathlib.Path) -> None:
    """The half of the fence step that is CUDA's: Direct3D's half is replaced by a number."""
    arguments, env = nvcuda
    body = (
        f"import os, sys; sys.path.insert(0, {str(FOLDER)!r}); import wddm_pool_probe as w\n"
        f"sys.argv[0] = w.__file__\nw.SYSTEM.fence = lambda luid: 77\ncode = w.main(['--json', *{arguments!r}])\n"
        "sys.stdout.flush(); os._exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", body], env=dict(os.environ, **env), capture_output=True, text=True, timeout=60
    )
    steps = {s["name"]: s["outcome"] for s in json.loads(done.stdout)["steps"]}
    assert steps["fence"] == "works", done.stdout + done.stderr


def test_wddm_probe_elsewhere() -> None:
    done = run("wddm_pool_probe.py", env={})
    assert done.returncode == 2 and done.stdout.splitlines()[-1].startswith(
        "verdict: CANNOT RUN HERE: this script decides what Windows"
    )


SIZES = {
    "PoolProps": 88,
    "AllocationProp": 32,
    "AccessDesc": 12,
    "PoolBlob": 64,
    "IpcEvent": 64,
    "SemaphoreDesc": 96,
    "SignalParams": 144,
    "WaitParams": 144,
    "SecurityAttributes": 24,
    "ObjectAttributes": 48,
}
IN_CUDA_H = {
    "PoolProps": "CUmemPoolProps",
    "AllocationProp": "CUmemAllocationProp",
    "AccessDesc": "CUmemAccessDesc",
    "PoolBlob": "CUmemPoolPtrExportData",
    "IpcEvent": "CUipcEventHandle",
    "SemaphoreDesc": "CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC",
    "SignalParams": "CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS",
    "WaitParams": "CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS",
}


def test_wddm_probe_structures() -> None:
    module = load(FOLDER / "wddm_pool_probe.py")
    assert {name: ctypes.sizeof(getattr(module, name)) for name in SIZES} == SIZES
    library = load(FOLDER / "cudalib.py")
    assert (ctypes.sizeof(library.PoolProps), ctypes.sizeof(library.AllocationProp), ctypes.sizeof(library.AccessDesc)) == (
        88,
        32,
        12,
    )


def test_wddm_probe_structures_against_cuda_h(tmp_path: pathlib.Path) -> None:
    header = next(
        (p for p in (pathlib.Path("/usr/local/cuda/include/cuda.h"), pathlib.Path("/usr/include/cuda.h")) if p.exists()),
        None,
    )
    if not header:
        pytest.skip("no cuda.h here")
    asserts = "\n".join(f'_Static_assert(sizeof({real}) == {SIZES[ours]}, "{real}");' for ours, real in IN_CUDA_H.items())
    asserts += """
_Static_assert(__builtin_offsetof(CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, handle) == 8, "handle");
_Static_assert(__builtin_offsetof(CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, flags) == 24, "flags");
_Static_assert(__builtin_offsetof(CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, flags) == 72, "wait");
_Static_assert(__builtin_offsetof(CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, flags) == 72, "signal");
_Static_assert(CU_MEM_HANDLE_TYPE_WIN32 == 2 && CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D12_FENCE == 4, "values");
_Static_assert(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES == 119
               && CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED == 104
               && CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED == 125 && CU_DEVICE_ATTRIBUTE_TCC_DRIVER == 35, "attributes");"""
    source = tmp_path / "sizes.c"
    source.write_text(f'#include "{header}"\n{asserts}\nint main(void) {{ return 0; }}\n')
    subprocess.run([cbuild.CC, "-std=c11", "-fsyntax-only", str(source)], check=True)
    module = load(FOLDER / "wddm_pool_probe.py")
    assert (
        module.SemaphoreDesc.win32.offset,
        module.SemaphoreDesc.flags.offset,
        module.WaitParams.flags.offset,
        module.SignalParams.flags.offset,
    ) == (8, 24, 72, 72)


# ---- upstream


@pytest.mark.skipif(not shutil.which("g++"), reason="the patches' headers are C++")
def test_torch_patches_logic(sim: dict[str, str]) -> None:
    """The headers that the patches add, as they stand in the patches, over the simulated driver."""
    script = UPSTREAM / "torch" / "harness" / "harness.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=dict(os.environ, **sim, SIMCUDA_DEVICES="2"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:2] == ["ok pools", "ok ipc"]


def test_comfyui_patch_logic(sim: dict[str, str], tmp_path: pathlib.Path) -> None:
    """The module that the patch adds makes what cudaMallocAsync allocates exportable; where pools have no handles it says so."""
    module = load(UPSTREAM / "torch" / "harness" / "harness.py")
    [(name, text)] = [
        (n, t)
        for n, t in module.new_files((UPSTREAM / "comfyui" / "0001-shareable-pool.patch").read_text()).items()
        if not n.startswith("tests-unit/")
    ]
    (tmp_path / name).write_text(text)
    body = f"""
import ctypes, os, sys
sys.path.insert(0, {str(tmp_path)!r})
import shareable_pool
print(shareable_pool.make_current())
cu = ctypes.CDLL("libcuda.so.1")
for ordinal, (pool, fd) in shareable_pool.pools.items():
    context, out = ctypes.c_void_p(), ctypes.c_uint64()
    assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0 and cu.cuCtxPushCurrent_v2(context) == 0
    assert cu.cuMemAllocAsync(ctypes.byref(out), ctypes.c_size_t(1 << 20), None) == 0 and cu.cuStreamSynchronize(None) == 0
    assert cu.cuMemPoolExportPointer((ctypes.c_ubyte * 64)(), out) == 0
    os.fstat(fd)
"""
    library = pathlib.Path(sim["ZCX_LIBCUDA"]).parent
    env = dict(os.environ, **sim, SIMCUDA_DEVICES="2")
    done = subprocess.run(
        [sys.executable, "-c", body], env=dict(env, LD_LIBRARY_PATH=str(library)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "2 device(s)" in done.stdout, done.stdout + done.stderr
    env["SIMCUDA_ATTRIBUTES"] = "119=0"
    done = subprocess.run(
        [sys.executable, "-c", body], env=dict(env, LD_LIBRARY_PATH=str(library)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "default pool stays" in done.stdout, done.stdout + done.stderr


def test_patches_are_well_formed(tmp_path: pathlib.Path) -> None:
    """git can read each of them, and each names the tree that it was made against."""
    for patch in UPSTREAM.glob("*/*.patch"):
        shown = subprocess.run(["git", "apply", "--numstat", str(patch)], cwd=tmp_path, capture_output=True, text=True)
        assert shown.returncode == 0 and shown.stdout, f"{patch.name}: {shown.stderr}"
    for patch in (UPSTREAM / "torch" / "0001-current-pool.patch", UPSTREAM / "comfyui" / "0001-shareable-pool.patch"):
        assert re.search(r"\b[0-9a-f]{40}\b", patch.read_text())
