"""install(): what is touched when, in each mode, and the hook that waits for torch.

Each case is a fresh interpreter with a fake torch and a fake `_zcx` that record what happens to them; the real extension on
the simulated driver is at the end."""
from __future__ import annotations

import pathlib
import zipfile

import pytest
from conftest import FAKES, ROOT, Run, absent

import cbuild

PATH = (FAKES, ROOT)
START = """
import io, logging, os, sys
log = io.StringIO()
logging.basicConfig(stream=log, level=logging.INFO, format="%(levelname)s %(message)s")
import fake_zcx
fake_zcx.put()
import comfy_zerocopy as zcx

def lines():
    return log.getvalue().splitlines()

def hooks():
    return [f for f in sys.meta_path if type(f).__name__ == "AfterImport"]

"""


@pytest.fixture
def case(run: Run):
    def go(code: str, **env: str) -> str:
        return run(START + code, path=PATH, env=env).stdout

    return go


# ---- modes ----

def test_swap_waits_for_torch(case) -> None:
    case("""
from comfy_zerocopy._install import LIMIT
s = zcx.install("swap")
assert (s.mode, s.state, s.source) == ("swap", "armed", "argument"), s
assert fake_zcx.calls == [] and "torch" not in sys.modules and len(hooks()) == 1
assert lines() == ["INFO comfy_zerocopy 0.1.0: mode swap, armed: waits for the import of torch"], lines()
os.environ["CUDA_VISIBLE_DEVICES"] = "3"     # the host sets it after the prestartup scripts
import torch
assert fake_zcx.seen == {"CUDA_VISIBLE_DEVICES": "3"}
assert fake_zcx.calls == ["driver", "Pool(0)", "make_current(0)"], fake_zcx.calls
assert hooks() == [] and "exec_module" not in vars(torch.__loader__)
assert len(lines()) == 2 and "mode swap on cuda:0 Fake 0" in lines()[1] and LIMIT in lines()[1], lines()
s = zcx.status()
assert (s.state, s.reason, s.driver, s.limit) == ("on", "", "13.0", LIMIT)
assert s.devices[0]["name"] == "Fake 0" and s.rungs["pool"] == f"inputs and results of {LIMIT}"
""")


def test_late(case) -> None:
    case("""
import torch
s = zcx.install("swap")
assert s.state == "on" and fake_zcx.calls[-1] == "make_current(0)" and hooks() == [] and len(lines()) == 1
""")


def test_idempotent_and_says_it_once(case) -> None:
    case("""
for _ in range(3):
    zcx.install("swap")
assert len(hooks()) == 1 and len(lines()) == 1
import torch
for _ in range(3):
    assert zcx.install("swap").state == "on"
assert fake_zcx.calls == ["driver", "Pool(0)", "make_current(0)"] and len(lines()) == 2
""")


def test_off_touches_nothing(case) -> None:
    case("""
s = zcx.install()
assert (s.mode, s.state) == ("off", "off") and hooks() == [] and len(lines()) == 1 and "no NVIDIA GPU is in sight" in lines()[0]
import torch
assert fake_zcx.calls == [] and zcx.status().state == "off"
""")


def test_results_mode_is_current_only_around_results(case) -> None:
    case("""
from comfy_zerocopy._install import LIMIT, pool_for, results_pool
assert zcx.install("results").state == "armed" and pool_for(0) is None
import torch
assert fake_zcx.calls == ["driver"] and fake_zcx.current == {}
assert zcx.status().rungs["pool"] == f"results of {LIMIT}"
pool = pool_for(0)
assert pool is pool_for(0) and fake_zcx.calls == ["driver", "Pool(0)"] and not pool.is_current()
with results_pool(0) as got:
    assert got is pool and pool.is_current()
    with results_pool(0) as again:
        assert again is pool
    assert pool.is_current()
assert fake_zcx.calls[2:] == ["make_current(0)", "restore(0, 1)"]
try:
    with results_pool(0):
        raise KeyError
except KeyError:
    pass
assert not pool.is_current()
assert pool_for(7) is None
with results_pool(7) as got:
    assert got is None
""", COMFY_ZEROCOPY="swap")


def test_results_pool_of_many_threads(case) -> None:
    case("""
import threading
from comfy_zerocopy._install import results_pool
import torch
zcx.install("results")
bad = []
start = threading.Barrier(4)
def work():
    start.wait()
    for _ in range(200):
        with results_pool(0) as pool:
            if not pool.is_current():
                bad.append("another thread put its pool back")
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not bad and fake_zcx.current == {0: 1} and fake_zcx.calls.count("Pool(0)") == 1
""")


def test_results_pool_in_a_capture_yields_none(case) -> None:
    case("""
from comfy_zerocopy._install import results_pool
import torch
zcx.install("results")
os.environ["FAKE_CAPTURING"] = "1"
with results_pool(0) as pool:
    assert pool is None
del os.environ["FAKE_CAPTURING"]
with results_pool(0) as pool:
    assert pool is not None
""")


def test_swap_mode_displaced_by_somebody_is_made_current_around_results(case) -> None:
    case("""
from comfy_zerocopy._install import results_pool
import torch
zcx.install("swap")
fake_zcx.current[0] = 77
with results_pool(0) as pool:
    assert pool.is_current()
assert fake_zcx.current[0] == 77
""")


def test_back_to_off_and_on_again(case) -> None:
    case("""
import torch
zcx.install("swap")
assert fake_zcx.current == {0: 1000}
assert zcx.install("off").state == "off" and fake_zcx.current == {0: 1} and zcx.status().devices == []
assert zcx.install("swap").state == "on" and fake_zcx.current == {0: 1000}
assert fake_zcx.calls.count("Pool(0)") == 1
fake_zcx.current[0] = 77                      # somebody else's
assert zcx.install("off").state == "off" and fake_zcx.current == {0: 77}
""")


def test_off_while_armed(case) -> None:
    case("""
zcx.install("swap")
assert zcx.install("off").state == "off" and hooks() == []
import torch
assert fake_zcx.calls == []
""")


def test_all_visible_gpus(case) -> None:
    case("""
zcx.install("swap")
import torch
s = zcx.status()
assert s.state == "on" and fake_zcx.current == {0: 1000, 2: 1002}
assert [bool(d["why"]) for d in s.devices] == [False, True, False]
assert "cuda:1 is not: it has no pools" in lines()[-1], lines()
from comfy_zerocopy._install import pool_for
assert pool_for(1) is None and pool_for(2).ordinal == 2
# held, idle and, on the pool that exported something, not to be given back
assert s.bytes == {"held": 128 << 20, "idle": 96 << 20, "retained": 48 << 20}, s.bytes
import json
assert json.loads(json.dumps(s.to_dict()))["devices"][2]["uuid"] == f"{2:032x}"
""", FAKE_DEVICES="101")


@pytest.mark.parametrize(("env", "words"), [
    ({"FAKE_TORCH_BACKEND": "native"}, ("native", "nothing to swap", "--disable-cuda-malloc")),
    ({"FAKE_TORCH_CUDA": ""}, ("without CUDA",)),
    ({"FAKE_DEVICES": ""}, ("libcuda.so.1 was not found",)),
    ({"FAKE_DEVICES": "00"}, ("no visible GPU has memory pools",)),
    ({"FAKE_CAPTURING": "1"}, ("this thread captures a graph",)),
])
def test_refusals_say_why(case, env: dict[str, str], words: tuple[str, ...]) -> None:
    case(f"""
zcx.install("swap")
import torch
s = zcx.status()
assert s.state == "refused" and s.limit == "" and not fake_zcx.current
for word in {words!r}:
    assert word in s.reason and word in lines()[-1], s.reason
assert len(lines()) == 2 and "host memory" in s.reason
from comfy_zerocopy._install import pool_for, results_pool
assert pool_for(0) is None
with results_pool(0) as pool:
    assert pool is None
""", **env)


def test_wsl2_is_never_swapped(case) -> None:
    case("""
real = os.uname()
os.uname = lambda: os.uname_result((real[0], real[1], "5.15.153.1-microsoft-standard-WSL2", real[3], real[4]))
s = zcx.install("swap")
assert s.state == "refused" and "WSL2" in s.reason and hooks() == []
import torch
assert fake_zcx.calls == []
""")


def test_junk_is_off_with_one_warning(case) -> None:
    case("""
s = zcx.install()
assert s.state == "off" and len(lines()) == 1 and lines()[0].startswith("WARNING") and "banana" in lines()[0], lines()
assert zcx.install(object()).state == "off"
class Bad:
    def __repr__(self): raise RuntimeError("no")
zcx.install(Bad())
""", COMFY_ZEROCOPY="banana")


def test_torch_of_another_kind(case) -> None:
    case("""
import types
sys.modules["torch"] = types.ModuleType("torch")
s = zcx.install("swap")
assert s.state == "refused" and "does not say" in s.reason
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(cuda="13"), cuda=types.SimpleNamespace(
    get_allocator_backend=lambda: 1 // 0))
s = zcx.install("swap")
assert s.state == "refused" and "ZeroDivisionError" in s.reason
""")


def test_not_before(case) -> None:
    case("""
from comfy_zerocopy import _install
import pathlib
pathlib.Path("host_ready.py").write_text("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'")
sys.path.insert(0, ".")
_install.not_before = lambda: "host_ready"   # says so for ever: once the module is there, it is there
zcx.install("swap")
import torch
assert zcx.status().state == "armed" and "host_ready" in zcx.status().reason and fake_zcx.calls == []
assert zcx.install("swap").state == "armed" and fake_zcx.calls == []
import host_ready
assert zcx.status().state == "on" and fake_zcx.seen == {"CUDA_VISIBLE_DEVICES": "1"} and hooks() == []
""")


def test_fork_leaves_the_child_without_cuda(case) -> None:
    case("""
import torch
zcx.install("swap")
before = list(fake_zcx.calls)
pid = os.fork()
if pid == 0:
    s = zcx.status()
    good = s.state == "refused" and "fork" in s.reason and s.bytes["held"] == 0 and fake_zcx.calls == before
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert zcx.status().state == "on"
""")


def test_reclaim_without_workers_is_zero(case) -> None:
    case("""
import torch
zcx.install("swap")
before = list(fake_zcx.calls)
assert zcx.reclaim() == 0 and fake_zcx.calls == before
""")


# ---- the hook ----

def test_hook_survives_a_mere_look(case) -> None:
    case("""
import importlib.util
zcx.install("swap")
spec = importlib.util.find_spec("torch")     # as ComfyUI's cuda_malloc.py does
assert spec.submodule_search_locations and fake_zcx.calls == [] and len(hooks()) == 1
assert type(spec.loader) is importlib.machinery.SourceFileLoader
assert spec.loader.get_source("torch").startswith('\"\"\"') and spec.loader.get_resource_reader("torch") is not None
assert spec.loader.is_package("torch") and spec.loader.get_filename("torch") == spec.origin
import torch
assert zcx.status().state == "on"
""")


def test_hook_survives_an_import_that_fails_half_way(case) -> None:
    case("""
zcx.install("swap")
try:
    import torch
except ImportError as error:
    assert "half way" in str(error)
else:
    raise AssertionError("it did not break")
assert zcx.status().state == "armed" and fake_zcx.calls == [] and len(hooks()) == 1
import torch
assert zcx.status().state == "on" and len(lines()) == 2
""", FAKE_TORCH_BREAKS_ONCE="1")


def test_torch_that_is_not_installed_stays_an_ordinary_error(run: Run) -> None:
    run(START + """
zcx.install("swap")
sys.path.remove(os.environ["FAKE_PATH"])
try:
    import torch
except ModuleNotFoundError as error:
    assert error.name == "torch"
else:
    raise AssertionError("found a torch")
assert zcx.status().state == "armed"
""", path=PATH, env={"FAKE_PATH": str(FAKES)})


def test_reload_afterwards(case) -> None:
    case("""
import importlib
zcx.install("swap")
import torch
before = list(fake_zcx.calls)
assert importlib.reload(torch) is torch and fake_zcx.calls == before
""")


def test_other_hooks_that_ask_the_whole_list(case) -> None:
    case("""
import importlib.util
class Nosy:
    "Asks all finders itself, the way ours does, and wraps the loader too."
    saw, busy = [], False
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.busy:
            return None
        self.busy = True
        try:
            for f in sys.meta_path:
                spec = None if f is self or not hasattr(f, "find_spec") else f.find_spec(name, path, target)
                if spec: break
        finally:
            self.busy = False
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (self.saw.append("before"), run(module), self.saw.append("after"))
        return spec
class Old:
    "A finder of the old kind, without find_spec."
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(0, Old())
sys.meta_path.insert(0, first := Nosy())
zcx.install("swap")
sys.meta_path.insert(0, last := Nosy())
import torch
assert zcx.status().state == "on" and fake_zcx.calls.count("driver") == 1 and hooks() == []
assert first.saw + last.saw and set(first.saw + last.saw) == {"before", "after"}
""")


def test_lazy_loader_stays_lazy(case) -> None:
    case("""
import importlib.util
zcx.install("swap")
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
module = importlib.util.module_from_spec(spec)
sys.modules["torch"] = module
spec.loader.exec_module(module)
import colorsys                              # any other import must not look into the lazy module
assert zcx.status().state == "armed" and type(module).__name__ == "_LazyModule" and fake_zcx.calls == []
module.version
assert zcx.status().state == "on" and "driver" in fake_zcx.calls
""")


def test_torch_in_a_zip(run: Run, tmp_path: pathlib.Path) -> None:
    archive = tmp_path / "torch.zip"
    with zipfile.ZipFile(archive, "w") as z:
        for file in (FAKES / "torch").glob("*.py"):
            z.write(file, f"torch/{file.name}")
        z.writestr("neighbour.py", "")
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    (fakes / "fake_zcx.py").write_text((FAKES / "fake_zcx.py").read_text())
    run(START + """
zcx.install("swap")
import importlib.util
importlib.util.find_spec("torch"); importlib.util.find_spec("torch")   # one loader serves the whole archive
import neighbour
assert zcx.status().state == "armed"
import torch
assert type(torch.__loader__).__name__ == "zipimporter" and "exec_module" not in vars(torch.__loader__)
assert zcx.status().state == "on" and fake_zcx.calls.count("driver") == 1
""", path=(archive, fakes, ROOT))


def test_loader_that_cannot_be_wrapped_is_noticed_later(case) -> None:
    case("""
import importlib.machinery, importlib.util, types
class Slotted:
    __slots__ = ()
    def create_module(self, spec): return None
    def exec_module(self, module):
        module.version = types.SimpleNamespace(cuda="13.0")
        module.cuda = types.SimpleNamespace(get_allocator_backend=lambda: "cudaMallocAsync")
class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec("torch", Slotted()) if name == "torch" else None
sys.meta_path.insert(0, Finder())
zcx.install("swap")
import torch
import colorsys
assert fake_zcx.calls.count("driver") == 1 and hooks() == []
assert zcx.status().state == "on"
""")


def test_torch_put_into_sys_modules_is_noticed_by_status(case) -> None:
    case("""
import types
zcx.install("swap")
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(cuda="13.0"),
                                             cuda=types.SimpleNamespace(get_allocator_backend=lambda: "cudaMallocAsync"))
assert zcx.status().state == "on" and hooks() == []
""")


def test_threads_that_import_at_once(case) -> None:
    case("""
import threading
zcx.install("swap")
start = threading.Barrier(8)
states = []
def work():
    start.wait()
    import torch
    states.append(zcx.status().state)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert states == ["on"] * 8 and fake_zcx.calls == ["driver", "Pool(0)", "make_current(0)"] and len(lines()) == 2
""")


def test_install_from_within_torchs_import(run: Run, tmp_path: pathlib.Path) -> None:
    for file in FAKES.rglob("*.py"):
        target = tmp_path / "fakes" / file.relative_to(FAKES)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text()
        if file.name == "__init__.py":
            text += "\nimport comfy_zerocopy\nassert comfy_zerocopy.install('swap').state == 'armed'\n"
        target.write_text(text)
    run(START + """
import torch
assert zcx.status().state == "on" and fake_zcx.calls == ["driver", "Pool(0)", "make_current(0)"]
""", path=(tmp_path / "fakes", ROOT))


def test_step_that_fails_does_not_reach_the_importer(run: Run) -> None:
    done = run("""
import logging
logging.basicConfig()
import sys
from comfy_zerocopy._after_import import AfterImport
AfterImport("colorsys", lambda: 1 // 0)
import colorsys
assert colorsys.rgb_to_hsv and not [f for f in sys.meta_path if type(f).__name__ == "AfterImport"]
""")
    assert "the step after the import of colorsys failed" in done.stderr and "ZeroDivisionError" in done.stderr


def test_importing_the_package_is_cheap(run: Run) -> None:
    run("""
import sys
import comfy_zerocopy
assert not {"dataclasses", "logging", "concurrent.futures", "numpy", "torch", "comfy_zerocopy._zcx"} & set(sys.modules)
assert set(comfy_zerocopy.__all__) <= set(dir(comfy_zerocopy))
""")


# ---- the real extension on the simulated driver ----

@pytest.fixture
def real(run: Run):
    """As `case`, with the extension that is built in this folder, a driver library of its own, and only torch faked."""
    if not list((ROOT / "comfy_zerocopy").glob("_zcx*.so")):
        absent("the extension is not built in this folder (pip install -e .)")

    def go(code: str, **env: str) -> None:
        run(START.replace("import fake_zcx\nfake_zcx.put()\n", "") + code, path=PATH,
            env={"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DEVICES": "3", **env})

    return go


def test_real_swap_sees_the_devices_that_were_chosen_late(real) -> None:
    real("""
assert zcx.install("swap").state == "armed"
os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"
import torch
s = zcx.status()
assert s.state == "on" and s.driver == "13.0" and [d["ordinal"] for d in s.devices] == [0, 1], s
from comfy_zerocopy import _zcx
from comfy_zerocopy._install import pool_for
assert pool_for(0).is_current() and pool_for(1).is_current() and pool_for(0).uuid == s.devices[0]["uuid"]
assert len({d["uuid"] for d in s.devices}) == 2
pool = pool_for(1)
at = pool.alloc(8 << 20, 0)
assert _zcx.pointer(at)["pool"] == pool.handle and pool.usage()["used"] >= 8 << 20
assert zcx.status().bytes["held"] >= 8 << 20
pool.free(at, 0)
""")


def test_real_results_mode_puts_back_what_was_current(real) -> None:
    real("""
import torch
assert zcx.install("results").state == "on"
from comfy_zerocopy._install import pool_for, results_pool
for ordinal in range(3):
    with results_pool(ordinal) as pool:
        assert pool.is_current() and pool.ordinal == ordinal
        for other in range(3):
            assert pool_for(other).is_current() == (other == ordinal)
    assert not pool.is_current()
assert zcx.install("swap").state == "on" and all(pool_for(i).is_current() for i in range(3))
pools = [pool_for(i) for i in range(3)]
assert zcx.install("off").state == "off" and not any(p.is_current() for p in pools)
""")


@pytest.mark.parametrize(("env", "words"), [
    ({"SIMCUDA_ATTRIBUTES": "119=0"}, "no visible GPU has memory pools"),
    ({"SIMCUDA_ATTRIBUTES": "115=0"}, "no visible GPU has memory pools"),
    ({"CUDA_VISIBLE_DEVICES": ""}, "host memory"),
    ({"ZCX_LIBCUDA": "/nowhere/libcuda.so.1"}, "/nowhere/libcuda.so.1"),
    ({"SIMCUDA_HIDE": "cuMemPoolExportPointer"}, "cuMemPoolExportPointer"),
    ({"SIMCUDA_FAIL": "cuMemPoolCreate:1:2+"}, "CUDA_ERROR_OUT_OF_MEMORY"),
    ({"SIMCUDA_FAIL": "cuDeviceSetMemPool:1:801+"}, "CUDA_ERROR_NOT_SUPPORTED"),
])
def test_real_refusals_say_why(real, env: dict[str, str], words: str) -> None:
    real(f"""
zcx.install("swap")
import torch
s = zcx.status()
assert s.state == "refused" and {words!r} in s.reason and "Workers still run" in s.reason, s
assert len(lines()) == 2 and lines()[1].startswith("WARNING")
""", **env)


def test_real_fork(real) -> None:
    real("""
import torch
zcx.install("swap")
pid = os.fork()
if pid == 0:
    import gc
    from comfy_zerocopy import _install
    good = zcx.status().state == "refused" and zcx.install("swap").state == "refused" and _install.pool_for(0) is None
    gc.collect()
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
from comfy_zerocopy._install import pool_for
assert zcx.status().state == "on" and pool_for(0).is_current()
pool_for(0).free(pool_for(0).alloc(1 << 20, 0), 0)
""")
