"""The parent's side of the mix that kill.py, parent.py and soak.py run: calls of every kind, on tensors whose every byte is known.

`Stage` has the devices, the live tensors and the checks of the whole process; `Calls` makes one call after the other in one
thread, all chosen by a seed. Does not: kill anything, or judge figures by itself.
"""
from __future__ import annotations

import argparse
import collections
import ctypes
import datetime
import gc
import importlib.util
import json
import math
import os
import pathlib
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pattern
from pattern import NOISE

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: How much more there may be at the end: an allocator keeps some of what it once had, and so do a pool and a context on a card.
SLACK = {"memory": 16 << 20, "allocated": 2 << 20, "python blocks": 20_000, "shared memory": 16 << 20,
         "vram of cuda:0 outside": 64 << 20, "vram of cuda:1 outside": 64 << 20, "pool of": 512 << 20}
CARD = {"memory": 32 << 20, "allocated": 32 << 20}  # instead, on a card: its driver and torch allocate as they like
EVENTS = 32  # that an arena keeps for its next blocks: so many more of the simulated driver's for each
KEPT = 3  # tensors that a worker keeps at most


class Live(NamedTuple):
    """A tensor of this process's that must never change: the bytes of NOISE from `at` on."""

    tensor: Any
    at: int
    nbytes: int


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rung", choices=("host", "pool"), default="host", help="pool: GPU tensors, on a card or else on the simulated driver")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--json", metavar="FILE", help="write the record there")


def prepare(rung: str, devices: int, torch: bool = True) -> str:
    """Before the package is imported: the driver, and torch where GPU tensors can be torch's. What the GPU is, in a word."""
    for name in ("COMFY_ZEROCOPY", "COMFY_ZEROCOPY_CONFIG"):
        os.environ.pop(name, None)
    # glibc keeps what is below this size when it is freed, and raises it as it learns: by then memory says little of what is in use.
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
    if rung == "host":
        sys.modules["torch"] = None  # type: ignore[assignment]
        return "none"
    if "ZCX_LIBCUDA" not in os.environ and not os.path.exists("/dev/nvidiactl"):
        sys.path.insert(0, str(HERE.parent))
        import cbuild

        os.environ["ZCX_LIBCUDA"] = str(cbuild.simcuda())
    if "ZCX_LIBCUDA" in os.environ:
        os.environ.setdefault("SIMCUDA_ABORT_ON_RACE", "1")
        os.environ.setdefault("SIMCUDA_DEVICES", str(devices))
        if "SIMCUDA_DIR" not in os.environ:
            os.environ["SIMCUDA_DIR"] = tempfile.mkdtemp(prefix="zcx-simcuda-")
            import atexit

            atexit.register(shutil.rmtree, os.environ["SIMCUDA_DIR"], True)
        sys.modules["torch"] = None  # type: ignore[assignment]
        return "simulated"
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    if torch and importlib.util.find_spec("torch") is not None:
        import comfy_zerocopy

        comfy_zerocopy.install("swap")
        importlib.import_module("torch").zeros(1, device="cuda")
    return "card"


class Stage:
    """Workers, devices, live tensors. `problems`: what was wrong; the first ones are enough."""

    def __init__(self, rung: str, gpu: str, workers: int, seed: int, largest: int = pattern.LONGEST, live: int = 24) -> None:
        import comfy_zerocopy as zcx
        from comfy_zerocopy import _install, array, canary, parent, tensor
        from comfy_zerocopy._native import zcx as core

        self.zcx, self.core, self.array, self.parent, self.tensor = zcx, core(), array, parent, tensor
        canary.SECONDS = 120  # a check that is late because the machine is busy says nothing here
        self.rung, self.gpu, self.largest, self.most = rung, gpu, largest, live
        self.devices: list[int | None] = [None]
        if rung == "pool":
            self.devices = [d["ordinal"] for d in self.core.driver()["devices"] if d["posix_fd_pools"]][:2]
            if not self.devices:
                raise SystemExit("no GPU here has memory pools that can be exported")
        #: A quarter of the GPU tensors is memory of ours, which workers map without the right to write.
        self.arenas = {d: _install.arena_for(d) for d in self.devices if d is not None}
        self.rng = random.Random(seed)
        self.lock = threading.Lock()
        self.live: list[Live] = []
        self.problems: list[str] = []
        self.checked = 0  # bytes of live tensors compared
        self.workers = [self.worker(i) for i in range(workers)]

    def worker(self, number: int) -> Any:
        return self.zcx.Worker(HERE / "worker.py", name=f"race{number}", max_result_bytes=64 << 20)

    def problem(self, text: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(text)
            print(f"PROBLEM: {text}", flush=True)

    # ---- tensors ----

    def new(self, rng: random.Random, device: int | None, nbytes: int | None = None) -> Live:
        """Allocated and filled now."""
        n = pattern.some_size(rng, self.largest) if nbytes is None else nbytes
        at = pattern.some_place(rng, n)
        if device is None:
            data = bytearray(NOISE[at:at + n])
            return Live(self.array.Array(data, ctypes.addressof(ctypes.c_char.from_buffer(data)), (n,), "uint8"), at, n)
        arena = self.arenas.get(device)
        if arena is not None and rng.random() < 0.25:
            memory = self.array.ArenaMemory(arena, n, False)
            x = self.tensor.Memory(memory, memory.address, n, device).build(self.tensor.TORCH, 0, "uint8", (n,), (1,), 0)
        else:
            x = self.zcx.empty((n,), "uint8", f"cuda:{device}")
        self.plain(x).copy_from(NOISE[at:at + n])
        return Live(x, at, n)

    def plain(self, x: Any) -> Any:
        """Whatever library's tensor it is, as the package's own Array of bytes."""
        found = self.tensor.look(x)
        return self.array.Array(found.owner, found.low, (found.high - found.low,), "uint8", None, found.device)

    def whole(self, one: Live) -> bool:
        x = self.plain(one.tensor)
        if x.nbytes != one.nbytes:
            return False
        if x.device is None:
            return pattern.same(x.address, one.at, x.nbytes)
        data = x.tobytes()
        return data == NOISE[one.at:one.at + one.nbytes]

    def add(self, one: Live, rng: random.Random) -> None:
        """One more live tensor; some other one is dropped when there are enough."""
        dropped = None
        with self.lock:
            self.live.append(one)
            if len(self.live) > self.most:
                dropped = self.live.pop(rng.randrange(len(self.live)))
        del dropped  # not under the lock: it may free memory

    def some(self, rng: random.Random) -> Live:
        with self.lock:
            if self.live:
                return rng.choice(self.live)
        one = self.new(rng, rng.choice(self.devices))
        self.add(one, rng)
        return one

    def verify(self, when: str) -> None:
        """Every live tensor, every byte."""
        with self.lock:
            known = list(self.live)
        for one in known:
            if not self.whole(one):
                self.problem(f"{when}: a tensor of {one.nbytes} bytes (from {one.at}) was changed")
            self.checked += one.nbytes

    # ---- figures ----

    def settle(self, restart: bool) -> dict[str, int]:
        """Drop everything, wait until it was given back, and say what this process still holds."""
        if restart:
            for w in self.workers:
                w.kill()
        for w in self.workers:
            w.call("forget", timeout=60)
            for device in self.devices:
                one = self.new(random.Random(1), device, 5000)
                w.call("check", (one.tensor, one.at), timeout=60)
                w.submit("echo", timeout=60).result(60)
                del one
        with self.lock:
            self.live.clear()
        gc.collect()
        self.until(lambda: len(self.parent._all) == len(self.workers), "only the workers that run have a session")
        for name in ("transfers", "kept", "quarantined"):
            self.until(lambda name=name: self.parent.counters().get(name, 0) == 0, f"nothing is counted as {name}")
        for w in self.workers:
            if self.gpu == "simulated":
                self.until(lambda w=w: w.call("figures", timeout=60)["simulated imports"] == 0, "a worker un-imports everything")
        if self.gpu == "simulated":
            self.until(lambda: pattern.count()["simulated allocations"] == 0, "all simulated memory is given back")
        for s in list(self.parent._all):
            s.parent.rest()  # what is kept for speed while calls come in
        self.zcx.reclaim()
        for arena in filter(None, self.arenas.values()):
            self.until(lambda arena=arena: arena.usage()["taken"] == 0, "all memory of the arena is given back")
            self.until(lambda arena=arena: not arena.trim(True)[0], "no memory of the arena waits for the GPU")
        ctypes.CDLL(None).malloc_trim(0)
        own, shared = pattern.resident()
        found = {"descriptors": pattern.descriptors(), "threads": pattern.threads(), "mappings": pattern.mappings(), "memory": own,
                 **pattern.allocated(), "shared memory": shared, "shm": len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
                 **pattern.count(), **{f"arena of cuda:{d}": a.usage()["mapped"] for d, a in self.arenas.items() if a is not None}}
        if self.gpu == "simulated":
            found["shared memory"] -= pattern.simulated_memory()
            found.update({f"pool of cuda:{d}": self.pool(d)["reserved"] for d in self.arenas})
        if self.gpu == "card":
            found.update(self.vram())
        return found

    @staticmethod
    def pool(ordinal: int) -> dict[str, int]:
        from comfy_zerocopy import _install

        return _install.shareable_pool(ordinal).usage()

    def vram(self) -> dict[str, int]:
        """What cuMemGetInfo says is in use, of all processes; less what our pools hold, because a pool keeps what it once had."""
        cuda, context, free, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        found = {}
        for ordinal in self.devices:
            self.core.synchronize(ordinal, 0)
            if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) or cuda.cuCtxPushCurrent_v2(context):
                raise RuntimeError("the device's context cannot be used")
            failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
            cuda.cuDevicePrimaryCtxRelease_v2(ordinal)
            if failed:
                raise RuntimeError(f"cuMemGetInfo: {failed}")
            usage = self.pool(ordinal)
            found[f"vram of cuda:{ordinal} outside the pool"] = total.value - free.value - usage["reserved"]
            found[f"vram of cuda:{ordinal} in tensors"] = usage["used"]
            found[f"pool of cuda:{ordinal}"] = usage["reserved"]
        return found

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                self.problem(f"not within {seconds:.0f} s: {what} ({self.parent.counters()}, {pattern.count()})")
                return
            time.sleep(0.002)

    def compare(self, before: dict[str, int], after: dict[str, int], slack: dict[str, int]) -> None:
        """Nothing is left: equal, but for memory, which may be higher by `slack`."""
        if self.gpu == "card":
            slack = {**slack, **CARD}
        for name, n in after.items():
            allowed = EVENTS * len(self.arenas) if name == "simulated events" else next((slack[s] for s in slack if name.startswith(s)), 0)
            if n > before[name] + allowed:
                self.problem(f"{name}: {before[name]} before, {n} after")

    def close(self) -> None:
        for w in self.workers:
            w.close()
        self.until(lambda: not self.parent._all, "every worker is gone")


#: How often each kind of call is made, in a thousand.
COMMON = {"null": 200, "check": 160, "copy": 130, "made": 100, "own": 60, "mixed": 80, "echo": 40, "edit": 40, "submit": 40, "lease": 30,
          "keep": 30, "keep_result": 20, "kept": 20, "forget": 10, "boom": 40}


class Calls:
    """One thread's calls. Each returns how many it made; whatever it finds wrong is a problem of the stage's."""

    def __init__(self, stage: Stage, seed: str, weights: dict[str, int] | None = None) -> None:
        self.stage, self.rng = stage, random.Random(seed)
        weights = weights or COMMON
        self.kinds, self.weights = list(weights), list(weights.values())
        self.count: collections.Counter[str] = collections.Counter()

    def one(self) -> tuple[str, Any]:
        """(kind, worker) of the next call, which is then made by `run`."""
        kind = self.rng.choices(self.kinds, self.weights)[0]
        return kind, self.rng.choice(self.stage.workers)

    def run(self, kind: str, w: Any) -> int:
        made = getattr(self, kind)(w) or 1
        self.count[kind] += made
        return made

    # ---- what a call must show ----

    def _right(self, kind: str, right: bool) -> None:
        if not right:
            self.stage.problem(f"{kind}: the answer is wrong")

    def _result(self, kind: str, tensor: Any, at: int, nbytes: int, live: bool = True) -> None:
        one = Live(tensor, at, nbytes)
        self._right(kind, self.stage.whole(one))
        if live:
            self.stage.add(one, self.rng)

    def _input(self) -> Live:
        """One that is there already, or now and then a new one."""
        if self.rng.random() < 0.25:
            one = self.stage.new(self.rng, self.rng.choice(self.stage.devices))
            self.stage.add(one, self.rng)
            return one
        return self.stage.some(self.rng)

    def _wish(self) -> tuple[int, int, int | None]:
        n = pattern.some_size(self.rng, self.stage.largest)
        return n, pattern.some_place(self.rng, n), self.rng.choice(self.stage.devices)

    def null(self, w: Any) -> None:
        self._right("null", w.call("echo", 1, "two", [3.0]) == (1, "two", [3.0]))

    def check(self, w: Any) -> None:
        several = [self._input() for _ in range(self.rng.choice((1, 1, 1, 2, 5)))]
        self._right("check", w.call("check", *[(one.tensor, one.at) for one in several]) == [])

    def submit(self, w: Any) -> None:
        one = self._input()
        self._right("submit", w.submit("check", (one.tensor, one.at)).result() == [])

    def copy(self, w: Any) -> None:
        one = self._input()
        self._result("copy", w.call("copy", one.tensor, self.rng.choice((1, 1, 8))), one.at, one.nbytes)

    def made(self, w: Any) -> None:
        n, at, device = self._wish()
        self._result("made", w.call("made", n, at, device), at, n)

    def own(self, w: Any) -> None:
        n, at, device = self._wish()
        self._result("own", w.call("own", n, at, device), at, n)

    def mixed(self, w: Any) -> None:
        one = self._input()
        n, at, _ = self._wish()
        got = w.call("mixed", one.tensor, one.at, n, at)
        self._right("mixed", got["whole"] and got["x"] is one.tensor and got["again"] is got["new"])
        half = one.nbytes // 2
        self._result("mixed", got["part"], one.at + half, one.nbytes - half, live=False)
        self._result("mixed", got["new"], at, n)
        self._result("mixed", got["own"], at, n)

    def echo(self, w: Any) -> None:
        one, two = self._input(), self._input()
        got = w.call("echo", one.tensor, two.tensor, one.tensor)
        self._right("echo", got[0] is one.tensor is got[2] and got[1] is two.tensor)

    def edit(self, w: Any) -> None:
        """On the host the worker edits a copy of its own. A GPU input is the caller's own memory: nobody edits it here."""
        one = self._input()
        if self.stage.rung == "host":
            got = w.call("edit", one.tensor)
            self._right("edit", self.stage.plain(got).tobytes() == bytes(one.nbytes))
        try:
            w.call("edit_and_say", one.tensor)
        except self.stage.zcx.InputModified as error:
            self._right("edit", "args[0]" in str(error))
        else:
            self._right("edit", False)
        self._right("edit", self.stage.whole(one))

    def lease(self, w: Any) -> int:
        one = self._input()
        with w.lease(one.tensor):
            for _ in range(2):
                self._right("lease", w.call("check", (one.tensor, one.at)) == [])
        return 4

    def keep(self, w: Any) -> None:
        one = self._input()
        self._right("keep", w.call("keep", one.tensor, one.at, KEPT) <= KEPT)

    def keep_result(self, w: Any) -> None:
        n, at, device = self._wish()
        self._result("keep_result", w.call("make_and_keep", n, at, device, KEPT), at, n)

    def kept(self, w: Any) -> None:
        self._right("kept", w.call("kept") == [])

    def forget(self, w: Any) -> None:
        w.call("forget")

    def boom(self, w: Any) -> None:
        one = self._input()
        try:
            w.call("boom", one.tensor)
        except self.stage.zcx.RemoteError as error:
            self._right("boom", error.message == str(one.nbytes))
        else:
            self._right("boom", False)


# ---- records ----


def facts(arguments: argparse.Namespace, stage_gpu: str, what: str) -> dict[str, Any]:
    """The head of a record: where, when, of which sources, and the command that makes it again."""
    sys.path.insert(0, str(HERE.parent))
    import records

    found: dict[str, Any] = {
        "record": what, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version(), "gpu": stage_gpu,
        "source_sha256": records.source_sha256(),
        "command": shlex.join(["python", os.path.relpath(os.path.abspath(sys.argv[0]), ROOT), *sys.argv[1:]]),
    }
    if stage_gpu == "card":
        torch = sys.modules.get("torch")
        found.update(torch=getattr(torch, "__version__", None), driver=records.gpu_record().driver_version())
        asked = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
        found["card"] = (asked.stdout.splitlines() or [None])[0]
    return found


def write(path: str | None, record: dict[str, Any]) -> int:
    """The record to its file and its verdict to the terminal; the exit status."""
    if path:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(json.dumps(record, indent=1) + "\n")
    print("ok" if record["ok"] else "NOT OK", flush=True)
    return 0 if record["ok"] else 1


def spread(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    if not values:
        return {}
    ms = sorted(1000 * v for v in values)
    return {"p50": round(statistics.median(ms), 2), "p99": round(ms[math.ceil(0.99 * len(ms)) - 1], 2), "max": round(ms[-1], 2)}
