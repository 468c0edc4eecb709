"""The rungs beside the pool across processes, on the simulated driver: memory of an arena, copies on the device, copies through a window.
The parent is a process without torch; an access that nothing orders ends it."""
from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Callable

import pytest
from conftest import ROOT, WORKERS, Run

import cbuild

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.usefixtures("deadline")

COMMON = f"""
import contextlib, ctypes, gc, hashlib, os, resource
sim = ctypes.CDLL(os.environ["ZCX_LIBCUDA"])
from comfy_zerocopy import _install, array, ladder, parent
parent._GRACE = 0.5
MIB = 1 << 20

def start(**options):
    return zcx.Worker({str(WORKERS / 'rungs.py')!r}, **{{"timeout": 40, **options}})

def over(memory, nbytes, device=0):
    return Array(memory, memory.address, (nbytes,), "uint8", None, device)

def filled_with(x, data):
    x.copy_from(data)
    return x

def in_arena(data, device=0):
    "What workers map read-only."
    return filled_with(over(array.ArenaMemory(_install.arena_for(device), len(data), False), len(data), device), data)

others = {{}}
def unshareable(data, device=0):
    "Of a pool that nobody swapped in: only a copy of it can cross."
    pool = others.setdefault(device, None) or others.update({{device: core().Pool(device)}}) or others[device]
    return filled_with(over(array.DeviceMemory(pool, len(data)), len(data), device), data)

def part(x, first, n):
    return Array(x.owner, x.address + first, (n,), "uint8", None, x.device)

def complement(data):
    return data.translate(bytes(255 - i for i in range(256)))

def digest(data):
    return hashlib.sha1(data).hexdigest()

def until(condition, what):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.002)

def count(name):
    return sim.simcuda_count(name.encode())

@contextlib.contextmanager
def context(device=0):
    c = ctypes.c_void_p()
    assert sim.cuDevicePrimaryCtxRetain(ctypes.byref(c), device) == 0 and sim.cuCtxPushCurrent(c) == 0
    yield
    assert sim.cuCtxPopCurrent(ctypes.byref(c)) == 0 and sim.cuDevicePrimaryCtxRelease(device) == 0

def free(device=0):
    left, whole = ctypes.c_size_t(), ctypes.c_size_t()
    with context(device):
        assert sim.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(whole)) == 0
    return left.value

def crossed(w):
    return [(t.direction, t.rung, t.copied) for t in w.last_report.transfers]

def input_rungs(w):
    return [(t.rung, t.copied) for t in w.last_report.transfers if t.direction == "input"]

def result_rungs(w):
    return [(t.rung, t.copied) for t in w.last_report.transfers if t.direction == "result"]

def settled():
    "Nothing is left: no call's, and (the workers are closed) nothing of the arenas either."
    gc.collect()
    until(lambda: not parent._all, "the sessions are over")
    until(lambda: (zcx.reclaim(), count("blocks") == count("mappings") == count("allocations") == count("registered") == 0)[1],
          lambda: {{n: count(n) for n in ("blocks", "mappings", "allocations", "registered")}})
    assert sim.simcuda_races() == 0
"""
NO_POOL = 'env={"SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801+"}'
#: Through a window: where staging has no room; where there is no arena in between either.
WINDOWS = {"staged": 'ladder.Ladder._stage = lambda *_: ""',
           "host": 'ladder.Ladder._stage = lambda *_: ""; ladder.Ladder._window = lambda *_: None'}


@pytest.fixture
def script(run: Run, tmp_path: pathlib.Path) -> Callable[..., str]:
    """script(code, **environment): a parent on the simulated driver."""
    folder = tmp_path / "simcuda"
    folder.mkdir()

    def go(code: str, **env: str) -> str:
        clean = {"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(folder), "SIMCUDA_ABORT_ON_RACE": "1", **env}
        path = tmp_path / "parent.py"  # a file, so that tracebacks show the lines
        path.write_text("from simulated import *\n" + COMMON + textwrap.dedent(code))
        return run(f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))", path=(ROOT, HERE), env=clean, timeout=90).stdout

    return go


# ---- the arena ----


@pytest.mark.parametrize("seed, delay", [(1, 0), (2, 400)])
def test_inputs_of_the_arena(script, seed, delay):
    script("""
        with start() as w:
            for n in (1, 4097, 3 * MIB + 5, 40 * MIB):
                data = os.urandom(n)
                x = in_arena(data)
                for _ in range(2):
                    assert w.call("digests", x) == [digest(data)] and crossed(w) == [("input", "vmm", False)]
                assert w.call("echo", x) is x
            data = os.urandom(9000)
            x = in_arena(data)
            view, again = part(x, 100, 50), part(x, 0, 8999)
            got = w.call("echo", [x, view, again, x])
            assert got[0] is got[3] is x and got[1] is view and got[2] is again and len(crossed(w)) == 1, "one for what shares its bytes"
            new = w.call("view", x, 7, 20)
            assert new.address == x.address + 7 and new.tobytes() == data[7:27]
            many = [in_arena(os.urandom(1000 + i)) for i in range(60)]
            assert w.call("bytes_of", *many) == [m.tobytes() for m in many]
            assert _install.arena_for(0).usage()["slabs"] <= 4, "small ones share slabs"
            assert w.status()["transfers"] == 0 and w.status()["vmm"] == {0: "proved"} and w.status()["pools"] == {}
            before = w.call("count", "mappings"), w.call("descriptors"), len(os.listdir("/proc/self/fd"))
            for i in range(40):
                assert w.call("bytes_of", many[i]) == [many[i].tobytes()]
            assert (w.call("count", "mappings"), w.call("descriptors"), len(os.listdir("/proc/self/fd"))) == before, "nothing accumulates"
        del x, view, again, got, new, many
        settled()
    """, SIMCUDA_SEED=str(seed), SIMCUDA_DELAY_US=str(delay))


def test_an_input_of_the_arena_cannot_be_written(script):
    """The device enforces it: the worker's context is lost, and the bytes are what they were."""
    script("""
        with start() as w:
            data = os.urandom(5000)
            x = in_arena(data)
            assert w.call("bytes_of", x) == [data]
            pid = w.pid
            try:
                w.call("edited", x)
            except (zcx.WorkerDied, zcx.RemoteError):
                pass
            else:
                raise AssertionError("written")
            assert x.tobytes() == data and w.call("bytes_of", x) == [data]
        del x
        settled()
    """)


def test_leases(script):
    script("""
        with start() as w:
            data = os.urandom(70_000)
            x = in_arena(data)
            with w.lease(x):
                assert w.status()["transfers"] == 1
                assert w.call("bytes_of", x) == [data] and input_rungs(w) == [("vmm", False)], "lent once more while it is leased"
            assert w.call("bytes_of", x) == [data]
            until(lambda: w.status()["transfers"] == 0, "given up")
        del x
        settled()
    """)


@pytest.mark.parametrize("without", ["the worker opens no pool", "the parent has none"])
def test_results_in_the_arena(script, without):
    hide = {"SIMCUDA_ATTRIBUTES": "119=0"} if "parent" in without else {}
    script(f"""
        with start({"" if hide else NO_POOL}) as w:
            for n in (1, 5000, 3 * MIB + 5, 40 * MIB):
                data = os.urandom(n)
                x = in_arena(data)
                got = w.call("turned", x)
                assert crossed(w) == [("input", "vmm", False), ("result", "vmm", False)], crossed(w)
                assert got.tobytes() == complement(data) and core().pointer(got.address)["pool"] == 0
                back = w.call("turned", got)
                assert crossed(w)[0] == ("input", "vmm", False) and back.tobytes() == data, "lent on as it is"
                got.copy_from(data)
                assert got.tobytes() == data, "it is the parent's own"
                own = w.call("own", x)  # in memory of the worker's: of a pool, or else of an arena
                assert result_rungs(w) == [("vmm", True)] and own.tobytes() == complement(data)
                del got, back, own
            assert w.status()["transfers"] == 0
        del x
        settled()
    """, **hide)


def test_memory_that_the_driver_does_not_free_at_once_is_not_lost(script):
    script("""
        unshareable(b"1")  # makes the pool
        kept = [array.DeviceMemory(others[0], MIB) for _ in range(3)]
        def left():
            core().synchronize(0, 0)  # a free executes late, like all else
            return count("allocations"), len(array.DeviceMemory._owed)
        assert left() == (3, 0)
        sim.simcuda_fail(b"cuMemFreeAsync:1:999+")
        del kept[1:]
        assert left() == (3, 2)
        sim.simcuda_fail(b"cuMemFreeAsync:2:999")  # it recovers, and stumbles once more
        del kept
        assert left() == (1, 1), "one that is refused holds up none"
        array.DeviceMemory(others[0], MIB)  # who needs memory tries again
        assert left() == (0, 0)
        settled()
    """)


def test_memory_of_results_goes_back_to_the_device(script):
    script(f"""
        with start({NO_POOL}) as w:
            w.call("turned", in_arena(b"1" * 100))
            gc.collect()
            until(lambda: (zcx.reclaim(), count("mappings") == 0)[1], "idle slabs go")
            assert w.call("count", "mappings") == [0], "it has heard of that"
            before = free()
            x = in_arena(b"1" * (64 * MIB))
            got = w.call("turned", x)
            assert free() <= before - 128 * MIB
            del x, got
            until(lambda: (_install.arena_for(0).trim(False), free() >= before)[1], lambda: (free(), before))
        settled()
    """)


def test_slabs_that_the_arena_let_go_of_do_not_stay(script):
    """Peaks, and calls all the time between them: each would leave its slabs mapped in both processes."""
    script(f"""
        with start({NO_POOL}) as w:
            seen = set()
            for i in range(4):
                many = [in_arena(bytes([i]) * (4 * MIB)) for _ in range(40)]
                assert w.call("bytes_of", *many[::13]) == [bytes([i]) * (4 * MIB)] * 4
                del many
                gc.collect()
                until(lambda: not _install.arena_for(0).trim(False)[0], "the GPU is done")
                w.call("turned", in_arena(b"1"))
                assert _install.arena_for(0).usage()["slabs"] <= 2
                seen.add((count("mappings"), count("handles"), *w.call("count", "mappings", "handles"), free()))
            assert len(seen) <= 2 and max(seen)[0] <= 3, seen
    """)


def test_what_is_kept_is_not_used_again(script):
    script(f"""
        with start({NO_POOL}) as w:
            datas = [os.urandom(3000), os.urandom(30 * MIB)]
            for data in datas:
                x = in_arena(data)
                w.call("keep", x)
                assert (w.status()["kept"], w.status()["kept_bytes"]) == (1, len(data))
                del x
                gc.collect()
                new = [in_arena(bytes(len(data))) for _ in range(4)]
                assert w.call("kept") == [data] if len(data) < MIB else w.call("kept_digests") == [digest(data)], "nobody else was given it"
                w.call("forget")
                until(lambda: w.status()["kept"] == 0, "an idle worker is heard to let go")
                del new
            made = w.call("make_and_keep", 30 * MIB, 9)
            assert result_rungs(w) == [("vmm", False)] and w.status()["kept"] == 1
            made.copy_from(bytes([4]) * (30 * MIB))
            held = free()
            del made
            gc.collect()
            assert w.call("kept_digests") == [digest(bytes([4]) * (30 * MIB))] and free() <= held + 8 * MIB
            w.call("forget")
            until(lambda: w.status()["kept"] == 0, "let go")
            until(lambda: (_install.arena_for(0).trim(False), free() >= held + 30 * MIB)[1], "and it went back")
            w.call("make_and_keep", 30 * MIB, 5)
        settled()
    """)


def piecewise(npieces: int, piece: int) -> str:
    """Memory as torch's expandable segments have it, by the driver's own calls: (base, free it)."""
    return f"""
        class Piecewise:
            def __init__(self, n={npieces}, piece={piece}):
                self.size, self.handles, base = n * piece, [], ctypes.c_uint64()
                props = (ctypes.c_int * 8)(1, 1, 1, 0)  # pinned, POSIX_FD, on device 0
                access = (ctypes.c_int * 3)(1, 0, 3)    # device 0 may read and write
                with context():
                    assert sim.cuMemAddressReserve(ctypes.byref(base), ctypes.c_size_t(self.size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)) == 0
                    self.address = base.value
                    for k in range(n):
                        handle = ctypes.c_uint64()
                        assert sim.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(piece), props, ctypes.c_ulonglong(0)) == 0
                        assert sim.cuMemMap(ctypes.c_uint64(self.address + k * piece), ctypes.c_size_t(piece), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)) == 0
                        self.handles.append(handle)
                    assert sim.cuMemSetAccess(ctypes.c_uint64(self.address), ctypes.c_size_t(self.size), access, ctypes.c_size_t(1)) == 0
            def free(self):
                with context():
                    assert sim.cuCtxSynchronize() == 0
                    assert sim.cuMemUnmap(ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)) == 0
                    for handle in self.handles:
                        assert sim.cuMemRelease(handle) == 0
                    assert sim.cuMemAddressFree(ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)) == 0
    """


def test_memory_of_many_pieces(script):
    """More pieces than descriptors may be open: no more than a few are under way at once, and none stays open."""
    script(piecewise(130, 2 << 20) + """
        with start() as w:
            w.call("bytes_of", in_arena(b"1"))
            pieces = Piecewise()
            places = {k * 2 * MIB + d: 1 + k for k in range(130) for d in (0, 2 * MIB - 1)}
            x = over(pieces, 130 * 2 * MIB)
            for p, value in places.items():
                byte(x, p).copy_from(bytes([value]))
            used = len(os.listdir("/proc/self/fd")), w.call("descriptors")
            resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 80, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            for _ in range(2):
                assert w.call("bytes_at", x, list(places)) == bytes(places.values()) and crossed(w) == [("input", "vmm", False)]
                assert (len(os.listdir("/proc/self/fd")), w.call("descriptors")) == used
            assert w.call("count", "imports") == [0]
            assert w.call("bytes_at", part(x, 7 * MIB + 1, 3 * MIB), [0, MIB - 1]) == bytes([byte(x, 7 * MIB + 1).tobytes()[0], places[8 * MIB - 1 + 1]])
            got = w.call("echo", x)
            assert got is x and w.status()["transfers"] == 0
            del got
            before = w.call("count", "mappings")
            assert before[0] <= 4, "slabs of others do not stay mapped"
        pieces.free()
        del x
        settled()
    """)


# ---- copies on the device ----


def test_staged(script):
    script("""
        with start() as w:
            for n in (1, 4099, 3 * MIB + 5, 40 * MIB):
                data = os.urandom(n)
                x = unshareable(data)
                for _ in range(2):
                    assert w.call("digests", x) == [digest(data)] and crossed(w) == [("input", "staged", True)]
                    assert w.last_report.transfers[0].reason
                got = w.call("edited", x)
                assert x.tobytes() == data, "an edit stays in the worker"
                assert got is not x and got.tobytes() == b"\\x2a" + data[1:] and crossed(w)[0] == ("input", "staged", True)
                del got
            view = part(x, 5, 100)
            assert w.call("bytes_of", view, part(x, 50, 100)) == [data[5:105], data[50:150]] and len(crossed(w)) == 1
            assert w.status()["transfers"] == w.status()["kept"] == 0
            held = free()
            for _ in range(5):
                assert w.call("digests", x) == [digest(data)]
            gc.collect()
            until(lambda: (_install.arena_for(0).trim(False), free() >= held)[1], "copies go back when the call is over")
        del x, view
        gc.collect()
        settled()
    """)


def test_a_copy_is_one_copy_on_the_device(script):
    """Each copy is counted by making the next one fail, and every one by way of the host: staged is one in the parent and none in the
    worker, a window one on each side."""
    script("""
        def only(parents, workers):
            "So many copies on the device, and no other one."
            no = "cuMemcpyDtoHAsync:1:999+,cuMemcpyHtoDAsync:1:999+,cuMemcpyDtoDAsync:%d:999+"
            sim.simcuda_fail((no % (parents + 1)).encode())
            w.call("fail", no % (workers + 1))
        def arrived():
            sim.simcuda_fail(b"")
            w.call("fail", "")
            assert w.call("kept") == [data], "its bytes, though nobody looked at them until now"
            w.call("forget")
        with start() as w:
            data = os.urandom(3 * MIB + 5)
            x = unshareable(data)
            for parents, workers in ((1, 0), (1, 1)):
                w.call("bytes_at", x, [0])
                only(parents, workers)
                w.call("keep", x)
                assert crossed(w) == [("input", "staged", True)]
                arrived()
                for too_few in ((parents - 1, workers), (parents, workers - 1)):
                    if min(too_few) >= 0:
                        only(*too_few)
                        try:
                            w.call("echo", 1, x)
                        except zcx.Error as error:
                            assert "cuMemcpyDtoDAsync" in str(error), error
                        else:
                            raise AssertionError("it did with fewer")
                        sim.simcuda_fail(b"")
                        w.call("fail", "")
                ladder.Ladder._stage = lambda *_: ""
            assert w.call("bytes_of", x) == [data] and w.status()["transfers"] == 0
        del x
        settled()
    """)


#: The device has room for a window's 64 MiB, and not for 100 MiB.
SHORT = """
        class Ballast:
            def __init__(self):
                self.pool = core().Pool(0)
                self.at = self.pool.alloc((free() - 66 * MIB) // CHUNK * CHUNK, 0)
                assert 66 * MIB <= free() < 98 * MIB
            def drop(self):
                self.pool.free(self.at, 0)
                core().synchronize(0, 0)
                self.pool = None
"""


def test_what_does_not_fit_twice_goes_through_a_window(script):
    """The worker's own pool has the memory, which the device does not show as free; nothing stands in for the arena's refusal."""
    script(SHORT + """
        unshareable(b"1")  # makes the pool
        x = over(array.DeviceMemory(others[0], 100 * MIB), 100 * MIB)
        places = {0: 1, 32 * MIB - 1: 2, 32 * MIB: 3, 64 * MIB: 4, 100 * MIB - 1: 5}
        for place, value in places.items():
            byte(x, place).copy_from(bytes([value]))
        with start() as w:
            stage, ladder.Ladder._stage = ladder.Ladder._stage, lambda *_: ""
            w.call("bytes_at", x, [0])  # what the worker took for this is in its pool from now on
            ladder.Ladder._stage = stage
            until(lambda: (_install.arena_for(0).trim(False), count("blocks") == 0)[1], "the window went back")
            held, asked, before = Ballast(), [], free()
            zcx.set_make_room(lambda *what: asked.append(what))
            assert w.call("bytes_at", x, list(places)) == bytes(places.values()) and crossed(w) == [("input", "staged", True)]
            assert asked == [(0, x.nbytes)], "what it takes is not there, for all that one can see from here"
            until(lambda: (_install.arena_for(0).trim(False), free() >= before)[1], "it took the window, and gave it back")
            assert w.status()["transfers"] == 0
    """, SIMCUDA_MEMORY="2GiB")


def test_room_for_no_copy_is_an_error_with_the_numbers(script):
    script(SHORT + """
        small = unshareable(b"2" * 100)
        x = over(array.DeviceMemory(others[0], 100 * MIB), 100 * MIB)
        for place in (0, x.nbytes - 1):
            byte(x, place).copy_from(b"1")
        for hook in (False, True):
            with start() as w:
                assert w.call("bytes_of", small) == [b"2" * 100]
                pid, held, asked = w.pid, Ballast(), []
                zcx.set_make_room((lambda *what: asked.append(what)) if hook else None)
                try:
                    w.call("bytes_at", x, [0])
                except MemoryError as error:
                    assert f"It needed a copy of {100 * MIB} bytes of its own, because in mode off tensors are not allocated from a pool" in str(error), error
                    then = "MiB free by then, after the host was asked to make room: free" if hook else "MiB free by then: free"
                    assert re.search(rf"\\ncuda:0 had [0-9]+ {then}", str(error)), error
                else:
                    raise AssertionError("there was room?")
                assert asked == [(0, 100 * MIB)] * hook
                assert (w.pid, w.status()["transfers"], w.status()["kept"]) == (pid, 0, 0)
                assert w.call("bytes_of", small) == [b"2" * 100] and input_rungs(w) == [("staged", True)]
                if hook:
                    zcx.set_make_room(lambda *_: held.pool and held.drop())
                    assert w.call("bytes_at", x, [0, 100 * MIB - 1]) == b"11" and w.pid == pid, "the host made room"
                else:
                    held.drop()
    """, SIMCUDA_MEMORY="2GiB")


def test_the_last_resort_says_as_much(script):
    """Through pageable memory: nothing of the device can be lent, and there is nothing to order copies through a window with."""
    script("""
        small = unshareable(b"1")
        x = over(array.DeviceMemory(others[0], 900 * MIB), 900 * MIB)
        why = ("in mode off tensors are not allocated from a pool that can be exported: COMFY_ZEROCOPY=swap does that; this GPU has no virtual "
               "memory that can be exported; copies through a window need 64-bit stream memory operations, which this driver lacks")
        asked = []
        zcx.set_make_room(lambda *what: asked.append(what))
        with start() as w:
            assert w.call("bytes_of", small) == [b"1"] and input_rungs(w) == [("host", True)] and not asked
            assert w.last_report.transfers[0].reason == why
            try:
                w.call("bytes_at", x, [0])
            except MemoryError as error:
                assert f"in the worker: no {x.nbytes} bytes of cuda:0 could be had: " in str(error), error
                assert f"\\nIt needed a copy of {x.nbytes} bytes of its own, because {why}.\\ncuda:0 had " in str(error), error
                assert " MiB free by then, after the host was asked to make room: free GPU memory" in str(error), error
            else:
                raise AssertionError("there was room?")
            assert asked == [(0, x.nbytes)] and w.call("bytes_of", small) == [b"1"]
    """, SIMCUDA_MEMORY="1700MiB", SIMCUDA_HIDE="cuMemCreate,cuStreamWriteValue64,cuStreamWaitValue64")


# ---- memory that can be shared in every mode ----


@pytest.mark.parametrize("mode", ["off", "results", "swap"])
def test_empty_can_be_shared(script, mode):
    """Of the pool as long as no worker needs windows for it, wherever it begins. The mode is on; torch was there only for that."""
    script(f"""
        import sys, types
        cuda = types.SimpleNamespace(get_allocator_backend=lambda: "cudaMallocAsync")
        sys.modules["torch"] = types.SimpleNamespace(__version__="2", version=types.SimpleNamespace(cuda="13"), cuda=cuda)
        status = zcx.install({mode!r})
        assert (status.mode, status.state) == ({mode!r}, "off" if {mode!r} == "off" else "on"), status
        del sys.modules["torch"]
        with start() as w:
            for n, rung in ((5000, "pool"), (127 * CHUNK, "pool"), (127 * CHUNK + 1, "vmm")):
                x = zcx.empty((n,), "uint8", "cuda")
                byte(x, n - 1).copy_from(b"\\7")
                assert w.call("bytes_at", x, [n - 1]) == b"\\7" and crossed(w) == [("input", rung, False)], (n, crossed(w))
                assert (core().pointer(x.address)["pool"] != 0) is (rung == "pool")
                del x
            assert w.status()["windows"] == {{}} and w.status()["vmm"] == w.status()["pools"] == {{0: "proved"}}
    """, SIMCUDA_MEMORY="40GiB")


@pytest.mark.parametrize("where", ["no device pools", "another backend"])
def test_empty_can_be_shared_where_no_pool_serves(script, where):
    """The arena does: on a device without such pools, and where the process allocates by other means than that pool (torch's native backend)."""
    script(f"""
        if {where!r} == "another backend":
            foreign = core().Pool(0)
            def allocate(ordinal, nbytes, pool, stream):
                memory = array.DeviceMemory(foreign, nbytes)
                return memory, memory.address
            ladder.allocate = allocate
        with start() as w:
            data = os.urandom(5000)
            x = zcx.empty((5000,), "uint8", "cuda")
            x.copy_from(data)
            assert core().pointer(x.address)["pool"] == 0
            assert w.call("bytes_of", x) == [data] and crossed(w) == [("input", "vmm", False)]
            assert w.status()["vmm"] == {{0: "proved"}}
        del x
        settled()
    """, **({"SIMCUDA_ATTRIBUTES": "119=0"} if where == "no device pools" else {}))


def test_many_threads_and_workers(script):
    script("""
        import concurrent.futures
        with start(name="one") as one, start(name="two") as two:
            datas = [os.urandom(1000 + 37 * i) for i in range(12)]
            def calls(k):
                for i, data in enumerate(datas):
                    w = (one, two)[(k + i) % 2]
                    x = (in_arena, unshareable)[(k + i) // 2 % 2](data)
                    assert w.call("turned", x).tobytes() == complement(data)
                    del x
                return True
            unshareable(b"1")  # makes the pool
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                assert all(pool.map(calls, range(4)))
            assert one.status()["transfers"] == two.status()["transfers"] == 0
        settled()
    """, SIMCUDA_DELAY_US="200")


# ---- through a window ----


@pytest.mark.parametrize("window", WINDOWS)
def test_through_a_window(script, window):
    """Sizes around a piece, and several tensors at once."""
    script(f"""
        {WINDOWS[window]}
        wanted = ({window!r}, True)
        with start() as w:
            for n in (1, 32 * MIB - 1, 32 * MIB, 32 * MIB + 1, 64 * MIB + 3):
                data = os.urandom(n)
                x = unshareable(data)
                assert w.call("digests", x) == [digest(data)] and input_rungs(w) == [wanted]
                del x
            datas = [os.urandom(n) for n in (1, 511, 513, 33 * MIB + 77, 12_345)]
            xs = [unshareable(d) for d in datas]
            odd = part(xs[3], 1, 33 * MIB)
            for _ in range(2):
                assert w.call("digests", *xs, odd) == [*map(digest, datas), digest(datas[3][1:33 * MIB + 1])] and input_rungs(w) == [wanted] * 5
            got = w.call("edited", xs[4])
            assert xs[4].tobytes() == datas[4] and got.tobytes() == b"\\x2a" + datas[4][1:]
            assert w.status()["transfers"] == w.status()["kept"] == 0
            for _ in range(40):  # the slots of the gate and the window serve again and again
                assert w.call("bytes_of", xs[2]) == [datas[2]]
        del xs, odd, got
        settled()
    """)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_parents_work_before_it_is_awaited(script, window):
    """And the parent's thread waits for none of it."""
    script(f"""
        {WINDOWS[window]}
        with start() as w:
            data = os.urandom(33 * MIB)
            x = unshareable(data)
            w.call("digests", x)
            with context():
                assert sim.simcuda_spin(None, ctypes.c_uint64(300_000)) == 0
                assert sim.cuMemsetD8Async(ctypes.c_uint64(x.address), ctypes.c_ubyte(7), ctypes.c_size_t(5), None) == 0
            assert w.call("digests", x) == [digest(b"\\7" * 5 + data[5:])] and input_rungs(w) == [({window!r}, True)]
        del x
        settled()
    """, SIMCUDA_DELAY_US="500")


def test_results_through_pinned_memory(script):
    """No memory of the parent's can be shared: the worker's own bytes come piece by piece."""
    script("""
        with start(env={"SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801+", "SIMCUDA_HIDE": "cuMemImportFromShareableHandle"}) as w:
            for n in (1, 5000, 32 * MIB, 64 * MIB + 1):
                data = os.urandom(n)
                x = unshareable(data)
                for how in ("own", "turned"):
                    got = w.call(how, x)
                    assert crossed(w) == [("input", "host", True), ("result", "host", True)], crossed(w)
                    assert got.device == 0 and got.tobytes() == complement(data)
                    del got
            data = os.urandom(5 * MIB + 3)
            x = unshareable(data)
            many = w.call("own_many", x, 7)
            assert all(m.tobytes() == complement(data) for m in many) and all(r == ("host", True) for r in result_rungs(w))
            assert w.status()["copies"] == {0: "proved"} and "start-up check of the arena failed" in w.status()["vmm"][0]
            assert w.status()["transfers"] == 0
        del x, many
        settled()
    """)


@pytest.mark.parametrize("how", ["kill", "timeout", "cancel"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_transfer_that_is_cut_short(script, window, how):
    """Some of its copies are made, then the parent's stream stands still: slots, windows and blocks come back all the same."""
    script(f"""
        {WINDOWS[window]}
        with start() as w:
            data = os.urandom(65 * MIB)
            x = unshareable(data)
            assert w.call("digests", x) == [digest(data)]
            until(lambda: w.status()["transfers"] == 0, "over")
            pid, error = w.pid, {{"kill": zcx.WorkerDied, "timeout": zcx.CallTimeout, "cancel": (zcx.Cancelled, zcx.CallTimeout)}}[{how!r}]
            with context():
                assert sim.simcuda_hold(None) == 0
            future = w.submit("digests", x, timeout={2 if how == "timeout" else 40})
            def step(n):
                with context():
                    for _ in range(n):
                        until(lambda: sim.simcuda_step(None, 1) == 1, "an operation")
            step(2)  # READY or a copy, and what comes next
            if {how!r} == "kill":
                os.kill(pid, signal.SIGKILL)
            elif {how!r} == "cancel":
                future.cancel()
            begun = time.monotonic()
            try:
                future.result(20)
            except error:
                pass
            else:
                raise AssertionError("it got through?")
            assert time.monotonic() - begun < 8
            with context():
                assert sim.simcuda_release(None) == 0
            del future
            assert w.call("digests", x) == [digest(data)] and input_rungs(w) == [({window!r}, True)]
            assert x.tobytes() == data and w.status()["transfers"] == 0
            until(lambda: parent.counters()["quarantined"] == 0, "the dead one's is given back")
        del x
        settled()
    """)


# ---- what cannot be imported ----


def test_refused_imports_take_the_next_rung(script):
    """The call is planned again: the pool's memory is staged, and what cannot be mapped either comes through pinned memory."""
    script("""
        with start() as w:
            x, data = filled(5000, 3), bytes([3]) * 5000
            assert w.call("bytes_of", x) == [data] and input_rungs(w) == [("pool", False)]
            y = in_arena(data)
            assert w.call("bytes_of", y) == [data] and input_rungs(w) == [("vmm", False)]
            w.call("fail", "cuMemPoolImportPointer:1:999")
            assert w.call("bytes_of", x) == [data] and input_rungs(w) == [("staged", True)]
            assert "cannot import it: cuMemPoolImportPointer" in w.last_report.transfers[0].reason or "CUDA_ERROR_UNKNOWN" in w.last_report.transfers[0].reason
            assert w.call("bytes_of", x) == [data] and input_rungs(w) == [("pool", False)], "once is not for ever"
            large = bytes([5]) * (40 * MIB)
            z = in_arena(large)
            w.call("fail", "cuMemImportFromShareableHandle:1:999+")
            assert w.call("digests", z) == [digest(large)] and input_rungs(w) == [("host", True)]
            assert "CUDA_ERROR_UNKNOWN" in w.last_report.transfers[0].reason
            v = unshareable(large)
            assert w.call("digests", v, x) == [digest(large), digest(data)] and sorted(input_rungs(w)) == [("host", True), ("pool", False)]
            w.call("fail", "")
            assert w.call("digests", z) == [digest(large)] and input_rungs(w) == [("vmm", False)]
            assert w.status()["transfers"] == 0
        del x, y, z, v
        settled()
    """)


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_mappings_that_fail_at_each_use(script, call):
    script(f"""
        with start() as w:
            data = os.urandom(40 * MIB)
            x, y = in_arena(data), unshareable(data)
            assert w.call("digests", x, y) == [digest(data)] * 2
            for nth in (1, 2):
                w.call("fail", f"{call}:{{nth}}:2")
                assert w.call("digests", x, y) == [digest(data)] * 2
                w.call("fail", "")
                assert w.status()["transfers"] == 0
            assert w.call("digests", x, y) == [digest(data)] * 2 and sorted(input_rungs(w)) == [("staged", True), ("vmm", False)]
        del x, y
        settled()
    """)


def test_a_worker_that_maps_no_slabs(script):
    script("""
        with start(env={"SIMCUDA_HIDE": "cuMemImportFromShareableHandle"}) as w:
            data = os.urandom(5000)
            for x in (in_arena(data), unshareable(data)):
                assert w.call("bytes_of", x) == [data] and input_rungs(w) == [("host", True)] and w.last_report.transfers[0].reason
            assert "start-up check of the arena failed" in w.status()["vmm"][0] and w.status()["copies"] == {0: "proved"}
            p = filled(5000, 3)
            assert w.call("turned", p).tobytes() == bytes([252]) * 5000 and {t.rung for t in w.last_report.transfers} == {"pool"}, "exactly that rung"
        del x, p
        settled()
    """)


def test_three_devices(script):
    script("""
        datas = [os.urandom(40_000 + i) for i in range(3)]
        xs = [in_arena(d, i) for i, d in enumerate(datas)]
        ys = [unshareable(d, i) for i, d in enumerate(datas)]
        with start(env={"CUDA_VISIBLE_DEVICES": "2,0,1", "SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801+"}) as w:
            assert w.call("bytes_of", *xs, *ys) == datas * 2 and sorted(input_rungs(w)) == [("staged", True)] * 3 + [("vmm", False)] * 3
            assert w.status()["vmm"] == {i: "proved" for i in range(3)}
            for i in range(3):
                got = w.call("turned", xs[i])
                assert got.device == i and got.tobytes() == complement(datas[i]) and result_rungs(w) == [("vmm", False)]
            ladder.Ladder._stage = lambda *_: ""
            assert w.call("bytes_of", *ys) == datas and input_rungs(w) == [("staged", True)] * 3
            ladder.Ladder._window = lambda *_: None
            assert w.call("bytes_of", *ys) == datas and input_rungs(w) == [("host", True)] * 3
            assert w.status()["transfers"] == 0
        del xs, ys, got
        settled()
    """, SIMCUDA_DEVICES="3")


# ---- the checks ----

WRONG_BYTES = r"byte \d+ of the check's memory reads \d+, not \d+"
#: What is broken in the worker: (its environment, what status() says of "vmm", of "copies"); None: proved.
BROKEN = {
    "an import shows other memory": ({"SIMCUDA_BREAK": "vmm"}, f"check of the arena failed: {WRONG_BYTES}", None),
    "a mapping to be read shows other memory": ({"SIMCUDA_BREAK": "vmm-read"}, f"check of reading the arena failed: {WRONG_BYTES}", None),
    "an import fails": ({"SIMCUDA_FAIL": "cuMemImportFromShareableHandle:1:999+"}, "check of the arena failed: .*CUDA_ERROR_UNKNOWN", None),
    "the second import fails": ({"SIMCUDA_FAIL": "cuMemImportFromShareableHandle:2:999+"}, "check of reading the arena failed: .*CUDA_ERROR_UNKNOWN", None),
    "an import kills the worker": ({"SIMCUDA_BREAK": "vmm-crash"}, "check of the arena ended the worker", None),
    "an import never returns": ({"SIMCUDA_BREAK": "vmm-hang"}, "check of the arena did not end within 1 s", None),
    "pinned memory brings other bytes": ({"SIMCUDA_BREAK": "vmm,pinned"}, "failed", f"check of pinned memory failed: {WRONG_BYTES}"),
    "nothing gets back to pinned memory": ({"SIMCUDA_BREAK": "vmm,pinned-back"}, "failed", f"check of pinned memory failed: what the worker wrote did not arrive: {WRONG_BYTES}"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_the_checks_find(script, what):
    environment, vmm, copies = BROKEN[what]
    script(f"""
        vmm, copies = {vmm!r}, {copies!r}
        canary.SECONDS = 1.0 if "never" in {what!r} else 20.0
        data = os.urandom(5000)
        x, y = in_arena(data), unshareable(data)
        with start(name="broken", env={environment!r}) as w, start(name="sound") as v:
            for _ in range(2):
                assert w.call("bytes_of", x, y) == [data] * 2 and input_rungs(w) == [("host", True)] * 2
                assert all(t.reason for t in w.last_report.transfers)
                assert w.call("turned", y).tobytes() == complement(data)
            assert re.search(vmm, w.status()["vmm"][0]), w.status()
            assert w.status()["copies"] == {{0: "proved"}} if copies is None else re.search(copies, w.status()["copies"][0]), w.status()
            assert w.status()["pools"] == {{0: "proved"}}, "which the results needed"
            for expected in filter(None, (vmm, copies)):
                said = [line for line in log if re.search(expected, line) and "worker broken" in line]
                assert len(said) == (1 if expected != "failed" else 2), log
            assert v.call("bytes_of", x, y) == [data] * 2 and sorted(input_rungs(v)) == [("staged", True), ("vmm", False)]
        del x, y
        settled()
    """)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle"])
def test_an_arena_that_fails_in_the_parent(script, call):
    """Of no worker's making: it is demoted for the one that meets it, and the next one tries it."""
    script(f"""
        data = os.urandom(5000)
        y = unshareable(data)
        with start() as w:
            sim.simcuda_fail(b"{call}:1:999+")
            assert w.call("bytes_of", y) == [data] and input_rungs(w) == [("host", True)]
            sim.simcuda_fail(b"")
            assert "CUDA_ERROR_UNKNOWN" in w.status()["vmm"][0], w.status()
        with start() as w:
            assert w.call("bytes_of", y) == [data] and input_rungs(w) == [("staged", True)] and w.status()["vmm"] == {{0: "proved"}}
        del y
        settled()
    """)
