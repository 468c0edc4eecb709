"""The pool rung across processes, on the simulated driver: late streams, any order, memory that is poisoned when it is freed, and
every driver call made to fail: that also on the other rungs. The parent is a process without torch; an access that nothing orders ends it."""
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
import ctypes, gc, os, pathlib
sim = ctypes.CDLL(os.environ["ZCX_LIBCUDA"])
from comfy_zerocopy import parent
parent._GRACE = 0.5

def start(**options):
    return zcx.Worker({str(WORKERS / 'pool.py')!r}, **{{"timeout": 40, **options}})

def noise(n, device="cuda"):
    data = os.urandom(n)
    x = zcx.empty((n,), "uint8", device)
    x.copy_from(data)
    return x, data

def part(x, first, n):
    return Array(x.owner, x.address + first, (n,), "uint8", None, x.device)

def counts():
    return {{n: sim.simcuda_count(n.encode()) for n in ("allocations", "imports", "registered", "streams", "events")}}

def until(condition, what):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.002)

def rungs(w):
    return [(t.direction, t.nbytes, t.rung, t.copied) for t in w.last_report.transfers]

def whole(w, n, prepare=lambda: None):
    "The whole path, once, with fresh bytes."
    x, data = noise(n)
    view = part(x, 3, n - 7)
    prepare()
    got = w.call("work", x, view, x)
    sim.simcuda_fail(b"")
    assert w.status()["kept"] == 0, "nothing of it is left in the worker"
    assert got["same"] is True and got["out again"] is got["out"] and got["half"].address == got["out"].address + n // 2
    assert got["sum"] == sum(data[3:n - 4])
    assert got["out"].tobytes() == data[::-1]
    assert got["half"].tobytes() == data[::-1][n // 2:]
    assert x.tobytes() == data
    if all(t[2] == "pool" for t in rungs(w)):
        assert got["x"] is x and got["part"] is view
    else:  # the worker had a copy of its own, and could not tell that it was not written to
        assert got["part"].address == got["x"].address + 3 and got["x"].tobytes() == data and got["part"].tobytes() == data[3:n - 4]

def right(w, n=5000):
    whole(w, n)
"""


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


@pytest.mark.parametrize("seed, delay", [(1, 0), (2, 50), (3, 400), (4, 2000)])
def test_the_whole_path(script, seed, delay):
    script("""
        with start() as w:
            for n in (1, 2, 255, 4097, (2 << 20) + 3):
                x, data = noise(n)
                assert w.call("bytes_of", x) == [data] and rungs(w) == [("input", n, "pool", False)]
                got = w.call("turned", x)
                assert got.tobytes() == bytes(255 - b for b in data) and got.device == 0 and got.nbytes == n
                assert rungs(w) == [("input", n, "pool", False), ("result", n, "pool", False)]
                assert core().pointer(got.address)["pool"] == core().pointer(x.address)["pool"] != 0
            for _ in range(5):
                right(w)
                assert rungs(w) == [("input", 5000, "pool", False), ("result", 5000, "pool", False)]
            many = [noise(n) for n in range(1, 60)]
            assert w.call("bytes_of", *[x for x, _ in many]) == [data for _, data in many]
        assert sim.simcuda_races() == 0
    """, SIMCUDA_SEED=str(seed), SIMCUDA_DELAY_US=str(delay))


def test_with_events_where_there_are_no_counters(script):
    script("""
        with start() as w:
            for _ in range(20):
                right(w)
                assert [t[2] for t in rungs(w)] == ["pool", "pool"]
    """, SIMCUDA_HIDE="cuStreamWriteValue64,cuStreamWaitValue64,cuCtxRecordEvent", SIMCUDA_DELAY_US="300")


def test_identity_and_sharing(script):
    script("""
        with start() as w:
            x, data = noise(9000)
            y, _ = noise(10)
            view, start_of = part(x, 100, 50), part(x, 0, 8999)
            got = w.call("echo", [x, view, start_of, y, x])
            assert all(a is b for a, b in zip(got, [x, view, start_of, y, x]))
            assert len(rungs(w)) == 2, "one for what shares its bytes"
            new = w.call("view", x, 7, 20)
            assert new.address == x.address + 7 and new.tobytes() == data[7:27]
            empty = zcx.empty((0, 4), "float32", "cuda")
            back = w.call("echo", empty)
            assert (back.shape, back.dtype, back.device) == ((0, 4), "float32", 0)
    """)


NO_DEVICE_RUNG = {"SIMCUDA_HIDE": "cuMemCreate,cuStreamWriteValue64,cuStreamWaitValue64"}  # no arena, and counters neither: no ring


@pytest.mark.parametrize("rest", ["arena", "ring", "host"])
def test_what_shares_its_bytes_does_so_on_the_other_rungs_too(script, rest):
    """A worker that cannot open the pool: each buffer crosses once, by the next rung that there is."""
    hidden = {"arena": {}, "ring": {"SIMCUDA_HIDE": "cuMemCreate"}, "host": NO_DEVICE_RUNG}[rest]
    script(f"""
        rung, result = {("staged", ("vmm", False)) if rest == "arena" else ("host", ("host", True))!r}
        with start(env={{"SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801"}}) as w:
            for n in (10, 5000, 100_000):
                right(w, n)
                assert rungs(w) == [("input", n, rung, True), ("result", n, *result), ("result", n, result[0], True)], rungs(w)
                assert w.status()["transfers"] == 0
            empty = zcx.empty((0, 4), "float32", "cuda")
            back = w.call("echo", [empty, 1])[0]
            assert (back.shape, back.dtype, back.device) == ((0, 4), "float32", 0)
            gc.collect()
            until(lambda: counts()["allocations"] == 0, "nothing is left here")
            assert w.call("count", "allocations") == [0]
    """, **hidden)


def test_results_go_on_to_other_workers(script):
    script("""
        with start(name="one") as one, start(name="two") as two:
            x, data = noise(70_000)
            made = one.call("turned", x)
            back = two.call("turned", made)
            assert back.tobytes() == data and [t[2:] for t in rungs(two)] == [("pool", False)] * 2
            one.kill()
            assert two.call("bytes_of", made, back) == [bytes(255 - b for b in data), data]
            right(one)
    """)


def test_a_kept_input_stays_lent(script):
    script("""
        with start() as w:
            right(w)
            gc.collect()
            until(lambda: counts()["allocations"] == 0, "frees come in stream order, late")
            x, data = noise(3000)
            w.call("keep", x)
            assert (w.status()["kept"], w.status()["kept_bytes"]) == (1, 3000)
            del x
            others = [noise(3000) for _ in range(8)]
            assert w.call("kept") == [data], "its memory was not given to anybody else"
            w.call("forget")
            until(lambda: w.status()["kept"] == 0, "an idle worker is heard to let go")
            del others
            gc.collect()
            until(lambda: counts()["allocations"] == 0 and w.status()["transfers"] == 0, "its memory is given back")
            assert w.call("count", "imports") == [0]
    """, SIMCUDA_DELAY_US="300")


def test_a_kept_result_stays_lent(script):
    script("""
        with start() as w:
            made = w.call("make_and_keep", 3000, 9)
            assert made.tobytes() == bytes([9]) * 3000 and w.status()["kept"] == 1
            made.copy_from(bytes([4]) * 3000)
            del made
            others = [noise(3000) for _ in range(8)]
            assert w.call("kept") == [bytes([4]) * 3000]
            w.call("forget")
            until(lambda: w.status()["kept"] == 0, "let go")
            w.call("make_and_keep", 3000, 9)
        gc.collect()
        until(lambda: not parent._all, "gone")
        del others
        gc.collect()
        until(lambda: counts()["allocations"] == 0, "what it kept went with it")
    """)


def test_a_call_returns_only_when_the_work_is_complete(script):
    """The worker returns at once and leaves 200 ms of work on its stream."""
    script("""
        with start() as w:
            x, _ = noise(5000)
            w.call("echo", x)
            begun = time.monotonic()
            got = w.call("busy", x, 200_000)
            assert time.monotonic() - begun >= 0.19 and got.tobytes() == bytes([7]) * 5000
    """)


def test_errors_release_what_was_lent(script):
    script("""
        with start() as w:
            x, data = noise(5000)
            for _ in range(20):
                try:
                    w.call("boom", x)
                except zcx.RemoteError as error:
                    assert error.message == "5000"
                else:
                    raise AssertionError
                assert (w.status()["transfers"], w.call("count", "imports")) == (0, [0])
            assert x.tobytes() == data
    """)


def test_out_of_memory(script):
    script("""
        with start() as w:
            right(w)
            for _ in range(2):
                try:
                    w.call("large", 64 << 30)
                except MemoryError as error:
                    assert "could not allocate the result" in str(error)
                else:
                    raise AssertionError
                right(w)
            try:
                zcx.empty((64 << 30,), "uint8", "cuda")
            except MemoryError:
                pass
            else:
                raise AssertionError
    """, SIMCUDA_MEMORY="1GiB")


def test_the_guard(script):
    """Above the driver's limit, and where windows are not proved: by a copy of the part alone, with the reason, and nobody crashes."""
    script("""
        with start() as w:
            x = zcx.empty((4 * CHUNK,), "uint8", "cuda")
            byte(x, 4 * CHUNK - 1).copy_from(b"\\7")
            small = part(x, 4 * CHUNK - 10, 10)
            assert w.call("bytes_of", small)[0][-1] == 7
            assert rungs(w) == [("input", 10, "staged", True)] and "chunks" in w.last_report.transfers[0].reason, w.last_report
            right(w)
            assert [t[2] for t in rungs(w)] == ["pool", "pool"]
    """, ZCX_CHUNK_LIMIT="3", SIMCUDA_IMPORT_CHUNKS="3", SIMCUDA_BREAK="blob")


@pytest.mark.parametrize("how", ["kill", "timeout", "cancel"])
def test_a_call_that_ends_early(script, tmp_path, how):
    """With work of the worker's on its way into a result that nobody will get, and into memory of the parent's."""
    script(f"""
        marker = {str(tmp_path / 'marker')!r}
        with start() as w:
            right(w)
            x, data = noise(5000)
            others = [noise(5000) for _ in range(4)]
            pid = w.pid
            error = {{"kill": zcx.WorkerDied, "timeout": zcx.CallTimeout, "cancel": zcx.Cancelled}}[{how!r}]
            future = w.submit("busy", x, 300_000, marker, True, timeout={0.3 if how == "timeout" else 40})
            until(lambda: os.path.exists(marker), "it runs")
            begun = time.monotonic()
            if {how!r} == "kill":
                os.kill(pid, signal.SIGKILL)
            elif {how!r} == "cancel":
                future.cancel()
            try:
                future.result(20)
            except error:
                pass
            assert time.monotonic() - begun < 3
            del future
            new = [noise(5000) for _ in range(8)]
            right(w)
            assert (w.pid == pid) is ({how!r} != "kill")
            assert x.tobytes() == data and all(t.tobytes() == d for t, d in others + new)
            assert w.status()["transfers"] == 0
            until(lambda: parent.counters()["quarantined"] == 0, "the dead one's memory is given back")
            del x, others, new
            gc.collect()
            until(lambda: counts()["allocations"] == 0, "nothing is left")
    """)


def test_a_worker_whose_context_is_lost(script):
    """It says so and leaves; the parent waits for no DONE that will not come."""
    script("""
        with start() as w:
            right(w)
            pid = w.pid
            x, data = noise(5000)
            begun = time.monotonic()
            try:
                w.call("fault", x)
            except zcx.WorkerDied as error:
                assert "its work on the GPU failed" in str(error)
            else:
                raise AssertionError
            assert time.monotonic() - begun < 5 and x.tobytes() == data
            right(w)
            assert w.pid != pid
    """)


def test_nothing_accumulates(script):
    script("""
        with start() as w:
            for n in (5000, 70_000):
                right(w, n)
            def all_counts():
                return counts(), w.call("count", "imports", "events", "streams", "memory", "registered"), len(os.listdir("/proc/self/fd"))
            gc.collect()
            until(lambda: counts()["allocations"] == 0, "frees come in stream order, late")
            before = all_counts()
            for i in range(150):
                right(w, 100 + 977 * i % 90_000)
            gc.collect()
            until(lambda: all_counts() == before, (before, all_counts()))
            assert w.status()["transfers"] == w.status()["kept"] == w.status()["quarantined"] == 0
        until(lambda: not parent._all, "gone")
        until(lambda: counts()["registered"] == 0 and counts()["allocations"] == 0, counts())
    """)


def test_memory_waits_for_no_collection(script):
    """What a call held goes when its last user lets go of it, whether the call worked or not."""
    script("""
        with start() as w:
            right(w)
            gc.collect()
            gc.disable()
            for function in ("echo", "turned", "boom"):
                x, _ = noise(5000)
                try:
                    w.call(function, x)
                except zcx.RemoteError:
                    pass
                assert w.status()["kept"] == 0, function
                del x
                until(lambda: counts()["allocations"] == 0, function)
    """)


def test_many_threads_and_workers(script):
    script("""
        import concurrent.futures
        with start(name="one") as one, start(name="two") as two:
            def calls(k):
                for i in range(12):
                    right((one, two)[(k + i) % 2], 1000 + 100 * k + i)
                return True
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                assert all(pool.map(calls, range(6)))
            assert one.status()["transfers"] == two.status()["transfers"] == 0
        assert sim.simcuda_races() == 0
    """, SIMCUDA_DELAY_US="200")


# ---- every call fails ----

SWEEP = """
        from comfy_zerocopy import _install, array, ladder
        {prepare}
        KINDS = "allocations", "imports", "registered", "streams", "events", "reservations", "mappings", "handles", "blocks"
        OWN = 32 << 20  # what the driver keeps, with a file, of memory of its own that a process once had to use

        others = []
        def elsewhere(n):
            "Memory of a pool that nobody swapped in: only a copy of it can cross."
            others or others.append(core().Pool(0))
            return array.DeviceMemory(others[0], n)

        def noise(n):
            data, memory = os.urandom(n), {memory}
            x = Array(memory, memory.address, (n,), "uint8", None, 0)
            x.copy_from(data)
            return x, data

        def begin():
            "A worker whose inputs cross by the rung."
            w = start(env={env!r})
            right(w)
            assert ("input", 5000, *{wanted!r}) in rungs(w), rungs(w)
            return w

        def attempt(w, rules=""):
            "Right bytes, or an error of ours, whose text it returns: its traceback would hold what the call was given."
            try:
                whole(w, 4000, lambda: sim.simcuda_fail(rules.encode()))
            except (zcx.Error, MemoryError) as error:
                sim.simcuda_fail(b"")
                return str(error)

        def free():
            context, left, all_of_it = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
            assert sim.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and sim.cuCtxPushCurrent_v2(context) == 0
            assert sim.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(all_of_it)) == 0
            assert sim.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0 and sim.cuDevicePrimaryCtxRelease(0) == 0
            return left.value

        def files(pid):
            return len(os.listdir(f"/proc/{{pid}}/fd")), pathlib.Path(f"/proc/{{pid}}/maps").read_text().count("memfd:zcx")

        def held(w):
            "What the two processes hold while no call is under way."
            gc.collect()
            ours, theirs = [sim.simcuda_count(n.encode()) for n in KINDS], w.call("count", *KINDS)
            for found in (ours, theirs):
                found[KINDS.index("events")] = max(found[KINDS.index("events")], 64)  # an arena uses some again
            status = w.status()
            return {{"ours": ours, "our files": files("self"), "theirs": theirs, "their files": files(w.pid), "free": free(),
                    "sessions": len(parent._all), **{{n: status[n] for n in ("state", "transfers", "kept", "quarantined", "handles")}}}}

        def rested(w):
            "The same without what is only kept for the next call."
            for s in list(parent._all):
                with s.busy:
                    if s.parent is not None:
                        s.parent.rest()
            zcx.reclaim()
            return held(w)

        def different(now, before):
            # All of this process's is as before. The worker's may be more by a little, but not by more and more: what it could not
            # free, because that was made to fail; two windows that it registered, which stay so until it ends; two files, and three chunks.
            mine = dict(now)
            for name, places in {{"theirs": {{KINDS.index("allocations"): 8, KINDS.index("registered"): 2}}, "their files": {{0: 2, 1: 2}}}}.items():
                mine[name] = type(now[name])(b if b <= n <= b + places.get(k, 0) else n for k, (n, b) in enumerate(zip(now[name], before[name])))
            if abs(now["free"] - before["free"]) <= 3 * OWN:
                mine["free"] = before["free"]
            return {{n: (before[n], mine[n]) for n in mine if mine[n] != before[n]}}

        def as_before(w):
            end = time.monotonic() + 20
            while different(held(w), before) and (found := different(rested(w), before_at_rest)):
                assert time.monotonic() < end, (now, error, found)
                time.sleep(0.005)

        def by_the_rung(w):
            "The next call works; a worker that was sent to another rung is replaced. So is one in which a slab for results could not be"
            "mapped: that is remembered there as long as the slab is told of (csrc/xfer_import.c), and a call fails by it."
            try:
                right(w)
            except (zcx.RemoteError, MemoryError):
                if not {env!r}:  # results of the pool: nothing is remembered
                    raise
                w.close()
                return begin()
            if ("input", 5000, *{wanted!r}) not in rungs(w):
                w.close()
                w = begin()
            return w

        def at_rest(w):
            "When the GPU is known to be done with what the arena is to give back."
            end = time.monotonic() + 20
            while True:
                found, arena = rested(w), _install.arena_for(0)
                use = arena.usage() if arena is not None else dict(pending=0, slabs=0)
                if not use["pending"] and (not use["slabs"] or use["taken"]):
                    return found
                assert time.monotonic() < end, (found, use)
                time.sleep(0.005)

        w = begin()
        before_at_rest = at_rest(w)
        right(w)
        before = held(w)
"""
ARENA = {"SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801+"}  # no pool for this worker: results come from the arena
#: What is lent, where from, and what is refused to get it there: by rung of the inputs. A window of the arena, or of pinned memory.
RUNGS = {
    "pool": {"wanted": ("pool", False), "memory": "zcx.empty((n,), 'uint8', 'cuda').owner", "prepare": "", "env": {}},
    "vmm": {"wanted": ("vmm", False), "memory": "array.ArenaMemory(_install.arena_for(0), n, False)", "prepare": "", "env": ARENA},
    "staged": {"wanted": ("staged", True), "memory": "elsewhere(n)", "prepare": "", "env": ARENA},
    "window": {"wanted": ("staged", True), "memory": "elsewhere(n)", "prepare": "ladder.Ladder._stage = lambda *_: ''", "env": ARENA},
    "pinned window": {"wanted": ("host", True), "memory": "elsewhere(n)",
                      "prepare": "ladder.Ladder._stage = lambda *_: ''; ladder.Ladder._window = lambda *_: None",
                      "env": {**ARENA, "SIMCUDA_HIDE": "cuMemImportFromShareableHandle"}},
}
#: (rung, code, first N, step): the pool's calls each with every code; of the others each with one of two.
SWEEPS = [("pool", code, first, 2) for code in (999, 2, 700) for first in (1, 2)] + \
         [(rung, code, first, 2) for rung in list(RUNGS)[1:] for code, first in ((999, 1), (2, 2))]


def sweep(rung: str) -> str:
    return textwrap.dedent(SWEEP.format(**RUNGS[rung]))


@pytest.mark.parametrize("rung, code, first, step", SWEEPS)
def test_the_parents_driver_fails_at_its_nth_call(script, rung, code, first, step):
    """Swept upward until a call injects nothing, with a worker that knows the device. After each: what both processes hold is as before."""
    out = script(sweep(rung) + textwrap.dedent(f"""
        failed, now = 0, {first}
        while True:
            injected = sim.simcuda_injected()
            error = attempt(w, f"*:{{now}}:{code}")
            if sim.simcuda_injected() == injected:
                assert error is None, error
                break
            failed += error is not None
            w = by_the_rung(w)
            as_before(w)
            now += {step}
            assert now < 300
        assert now > 10
        w.close()
        print(failed)
    """))
    assert int(out) > 0


@pytest.mark.parametrize("rung, code, first, step", [s for s in SWEEPS if s[1] != 700])
def test_the_workers_driver_fails_at_its_nth_call(script, rung, code, first, step):
    """In calls of a worker that knows the device, one after another; the same."""
    out = script(sweep(rung) + textwrap.dedent(f"""
        failed, now = 0, {first}
        while True:
            injected, pid = w.call("injected"), w.pid
            w.call("fail", f"*:{{now}}:{code}")
            error = attempt(w)
            failed += error is not None
            if w.pid == pid and w.alive:
                w.call("fail", "")
                if w.call("injected") == injected:
                    assert error is None, error
                    break
            w = by_the_rung(w)
            as_before(w)
            now += {step}
            assert now < 300
        assert now > 10
        w.close()
        others.clear()
        gc.collect()
        until(lambda: not parent._all and counts()["allocations"] == 0, "nothing is left")
        print(failed)
    """))
    assert int(out) > 0


def test_memory_that_a_worker_could_not_give_up_is_not_freed(script):
    """The un-import at the end of the start-up check fails: that memory is held until the worker is gone."""
    script("""
        with start(env={"SIMCUDA_FAIL": "cuMemFreeAsync:2:999"}) as w:
            right(w)
            assert "cuMemFreeAsync" in w.status()["pools"][0] and rungs(w)[0] == ("input", 5000, "staged", True)
            gc.collect()
            until(lambda: counts()["allocations"] == 1, "all but that")
        until(lambda: not parent._all and counts()["allocations"] == 0, "given back")
        assert sim.simcuda_races() == 0
    """)


PHASES = [(0, 999), (1, 2), (2, 999), (3, 700)]
PLACES = """
        def places(path):
            "Of the calls that were logged, those that follow the same call count as one place: its first or its last use. A share of these."
            names, uses = ["", *(line.split()[1] for line in path.read_text().splitlines())], {{}}
            for n in range(1, len(names)):
                uses.setdefault(tuple(names[n - 1:n + 1]), []).append(n)
            return [several[-({phase} % 2)] for several in list(uses.values())[{phase}::{phases}]]

        log_path = pathlib.Path({log!r})
        log_path.write_text("")
"""


def placed(phase: int, log: pathlib.Path) -> str:
    return textwrap.dedent(PLACES.format(phase=phase, phases=len(PHASES), log=str(log)))


@pytest.mark.parametrize("phase, code", PHASES)
def test_the_parents_driver_fails_while_a_worker_meets_the_device(script, tmp_path, phase, code):
    """The same with a worker that is new each time. Sampled, because each starts a process: over the parametrization every place in the
    code that calls the driver is met, as far as the call before it tells places apart, but not every N."""
    out = script(sweep("pool") + placed(phase, tmp_path / "calls") + textwrap.dedent(f"""
        def fresh():
            w = start(env={{"SIMCUDA_FAIL_LOG": None}})
            w.call("echo", 1)
            return w

        w.close()
        os.environ["SIMCUDA_FAIL_LOG"] = str(log_path)
        with fresh() as w:
            assert attempt(w, "*:1:0+") is None  # logs, and fails none
        chosen, hits, failed = places(log_path), 0, 0
        assert len(chosen) > 8
        for now in chosen:
            with fresh() as w:
                injected = sim.simcuda_injected()
                error = attempt(w, f"*:{{now}}:{code}")
                hits += sim.simcuda_injected() > injected
                failed += error is not None
                right(w)
                status = w.status()
                assert status["transfers"] == status["quarantined"] == 0 and status["state"] == "idle"
        assert hits > len(chosen) * 3 // 4, "nearly as many calls each time"
        gc.collect()
        until(lambda: not parent._all, "the sessions are over")
        until(lambda: counts()["allocations"] <= 2 and counts()["registered"] <= 2, counts)  # whose release was made to fail
        print(failed)
    """))
    assert int(out) > 0


@pytest.mark.parametrize("phase", [phase for phase, _ in PHASES])
def test_the_workers_driver_fails_when_it_meets_the_device(script, tmp_path, phase):
    """From its environment, in a process of its own each time: opening the driver, the check, the first call. Sampled in the same way."""
    script(sweep("pool") + placed(phase, tmp_path / "calls") + textwrap.dedent("""
        w.close()
        def meeting(rules):
            log_path.write_text("")
            return start(env={"SIMCUDA_FAIL": rules, "SIMCUDA_FAIL_LOG": str(log_path)})

        with meeting("*:1:0+") as w:
            assert attempt(w) is None and [t[2] for t in rungs(w)] == ["pool", "pool"]
        chosen, hits = places(log_path), 0
        assert len(chosen) > 8
        for now in chosen:
            with meeting(f"*:{now}:999") as w:
                error = attempt(w)
                w._env["SIMCUDA_FAIL"] = None  # one that died has a successor, where nothing fails
                w.call("fail", "")
                again = attempt(w)
                injected = log_path.read_text()
                hits += injected != ""
                if "which worker pool cannot use" in str(error):  # it cannot open the driver at all, and says so each time
                    assert again == error
                else:
                    assert again is None, (now, injected, error, again)
                assert w.status()["transfers"] == w.status()["quarantined"] == 0
                assert w.call("echo", 1) == 1
        assert hits > len(chosen) * 3 // 4, "nearly as many calls each time"
        gc.collect()
        until(lambda: not parent._all and counts()["allocations"] == 0 and counts()["registered"] == 0, "nothing is left")
    """))
