"""The start-up check, on the simulated driver: each thing that it looks at is broken in turn; what speaks for it is demoted, with
the reason, and nothing else is; the bytes are right all the same. Parents are scripts without torch or numpy."""
from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Callable, Iterator

import pytest
from conftest import ROOT, Run

import cbuild

HERE = pathlib.Path(__file__).resolve().parent
Script = Callable[..., str]


@pytest.fixture(scope="module")
def library() -> str:
    return str(cbuild.simcuda())


@pytest.fixture
def script(run: Run, library: str, tmp_path: pathlib.Path) -> Iterator[Script]:
    """script(code, **environment): a parent on the simulated driver. Its processes share a session there."""
    folder = tmp_path / "simcuda"
    folder.mkdir()

    def go(code: str, **env: str) -> str:
        clean = {"ZCX_LIBCUDA": library, "SIMCUDA_DIR": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
        return run("from simulated import *\n" + textwrap.dedent(code), path=(ROOT, HERE), env=clean).stdout

    yield go


SOUND = {"SIMCUDA_ABORT_ON_RACE": "1"}


def lowered(limit: int) -> dict[str, str]:
    """The guard at `limit` chunks, on a driver that one import of more would kill: whoever gets past the guard dies of it."""
    return {"ZCX_CHUNK_LIMIT": str(limit), "SIMCUDA_IMPORT_CHUNKS": str(limit), **SOUND}


def test_all_is_proved(script: Script) -> None:
    """And no access that nothing orders: the simulated driver ends the process that makes one."""
    script("""
        with worker() as w:
            assert w.status()["pools"] == {} and w.status()["windows"] == {}
            x = filled(100_000, 1)
            assert w.call("total", x) == 100_000 and shared(w) is True
            assert w.status()["pools"] == {0: "proved"} and w.status()["windows"] == {}
            assert from_worker(w) is True
            assert w.call("total", x) == 100_000 and shared(w) is True
        assert w.status()["pools"] == {}, "of the process that ran"
        assert log == [], log
    """, **SOUND)


def test_the_first_meeting_may_be_a_result(script: Script) -> None:
    """The check runs while the call does, and the worker awaits its ALLOC."""
    script("""
        with worker() as w:
            assert from_worker(w) is True and w.status()["pools"] == {0: "proved"}
        with worker() as w:
            x = w.call("marked", 4 * CHUNK, {0: 1, CHUNK: 2, 4 * CHUNK - 1: 3})
            assert shared(w) is True and w.status()["windows"] == {0: "proved"}
            assert [byte(x, p).tobytes()[0] for p in (0, CHUNK, 4 * CHUNK - 1)] == [1, 2, 3]
    """, **lowered(3))


def test_with_events_instead_of_counters(script: Script) -> None:
    script("""
        with worker() as w:
            assert w.call("total", filled(100_000, 1)) == 100_000 and shared(w) is True and from_worker(w) is True
            assert w.status()["pools"] == {0: "proved"}
    """, SIMCUDA_HIDE="cuStreamWriteValue64,cuStreamWaitValue64", **SOUND)


def test_a_worker_for_cpu_tensors_never_opens_the_driver(script: Script) -> None:
    script("""
        data = bytearray(b"\\1" * 5_000_000)
        import ctypes
        x = Array(data, ctypes.addressof(ctypes.c_char.from_buffer(data)), (len(data),), "uint8")
        gpu = filled(1000, 1)
        with worker() as w:
            assert w.call("total", x) == 5_000_000 and w.call("filled", 1000, 7, None).tobytes() == b"\\7" * 1000
            assert w.call("driver_is_mapped", x) is False and w.status()["pools"] == {}
            assert w.call("total", gpu) == 1000
            assert w.call("driver_is_mapped") is True, "control"
    """)


# ---- what is broken, in one worker ----

IN_THE_WORKER = {
    "the import fails": ({"SIMCUDA_FAIL": "cuMemPoolImportPointer:1:999+"}, "cuMemPoolImportPointer: CUDA_ERROR_UNKNOWN"),
    "the import shows other memory": ({"SIMCUDA_BREAK": "import"}, r"byte 0 of the check's memory reads \d+, not \d+"),
    "a second import shows other memory": ({"SIMCUDA_BREAK": "again"}, r"byte 0 of the check's memory reads \d+, not \d+"),
    "an un-import comes before its turn": ({"SIMCUDA_BREAK": "unimport"}, "ended the worker"),
    "DONE comes before the work": ({"SIMCUDA_BREAK": "post", "SIMCUDA_DELAY_US": "10000"}, "what the worker wrote did not arrive: byte"),
    "the un-import fails": ({"SIMCUDA_FAIL": "cuMemFreeAsync:1:999+"}, "cuMemFreeAsync: CUDA_ERROR_UNKNOWN"),
    "the pool cannot be opened": ({"SIMCUDA_FAIL": "cuMemPoolImportFromShareableHandle:1:801"},
                                  "cuMemPoolImportFromShareableHandle: CUDA_ERROR_NOT_SUPPORTED"),
    "the page cannot be registered": ({"SIMCUDA_FAIL": "cuMemHostRegister:1:801+"}, "cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED"),
}


@pytest.mark.parametrize("what", IN_THE_WORKER)
def test_broken_in_a_worker(script: Script, what: str) -> None:
    environment, expected = IN_THE_WORKER[what]
    script(f"""
        expected, usable = {expected!r}, {"registered" not in what}
        x = filled(100_000, 1)
        with worker(name="broken", env={environment!r}) as w, worker(name="sound") as v:
            for _ in range(2):
                assert w.call("total", x) == 100_000
                assert re.search(expected, shared(w)), shared(w)
                next_best(w, "input", usable)
                assert w.call("filled", 5000, 7).tobytes() == b"\\7" * 5000
                next_best(w, "result", usable)
            if usable:
                assert re.search(expected, w.status()["pools"][0]) and w.status()["vmm"] == {{0: "proved"}}, w.status()
            assert w.status()["windows"] == {{}}, w.status()
            said = [line for line in log if re.search(expected, line)]
            assert len(said) == 1 and "broken" in said[0] and "cuda:0" in said[0], log
            assert v.call("total", x) == 100_000 and shared(v) is True and from_worker(v) is True
            assert v.status()["pools"] == {{0: "proved"}}
            assert v.call("total", filled(1000, 3)) == 3000 and w.call("total", filled(1000, 3)) == 3000
    """)


IN_THE_PARENT = {
    "READY comes before the work": ({"SIMCUDA_BREAK": "post", "SIMCUDA_DELAY_US": "10000"},
                                    r"sharing failed: byte \d+ of the check's memory reads \d+, not \d+"),
    "two allocations have one identity": ({"SIMCUDA_BREAK": "identity"}, "two allocations one identity"),
    "the export fails": ({"SIMCUDA_FAIL": "cuMemPoolExportPointer:1:999+"}, "cuMemPoolExportPointer: CUDA_ERROR_UNKNOWN"),
    "the page cannot be registered": ({"SIMCUDA_FAIL": "cuMemHostRegister:1:801+"}, "cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED"),
    "what the worker wrote cannot be read": ({"SIMCUDA_FAIL": "cuMemcpyDtoHAsync:1:719"}, "what the worker wrote did not arrive"),
}


@pytest.mark.parametrize("what", IN_THE_PARENT)
def test_broken_in_the_parent(script: Script, what: str) -> None:
    environment, expected = IN_THE_PARENT[what]
    script(f"""
        expected, usable = {expected!r}, {"registered" not in what and "READY" not in what}
        x = filled(100_000, 1)
        with worker(env=dict.fromkeys({list(environment)!r})) as w:
            assert w.call("total", x) == 100_000 and re.search(expected, shared(w)), shared(w)
            next_best(w, "input", usable)
            assert w.call("filled", 5000, 7).tobytes() == b"\\7" * 5000
            next_best(w, "result", usable)
            if "READY" in {what!r}:  # of no rung can a gate be believed
                assert all("failed: " in w.status()[rung][0] for rung in ("pools", "vmm", "copies")), w.status()
            assert not usable or re.search(expected, w.status()["pools"][0]), w.status()
            assert w.status()["windows"] == {{}}, w.status()
            assert len([line for line in log if re.search(expected, line)]) == 1, log
    """, **environment)


def test_memory_of_a_check_that_was_not_let_through_rightly_is_not_reused(script: Script) -> None:
    """DONE came before the worker's marks: they are still being written, so nobody is given that memory while it lives."""
    script("""
        import ctypes
        count = ctypes.CDLL(__import__("os").environ["ZCX_LIBCUDA"]).simcuda_count
        x = filled(1000, 1)
        with worker(env={"SIMCUDA_BREAK": "post", "SIMCUDA_DELAY_US": "10000"}) as w:
            assert w.call("total", x) == 1000 and "did not arrive" in shared(w)
            y = filled(2 * CHUNK, 9)
            w.call("pid")
            assert count(b"allocations") == 3, "x, y, and what is held back"
            assert set(y.tobytes()) == {9}
        deadline = time.monotonic() + 20
        while count(b"allocations") > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count(b"allocations") == 2 and set(y.tobytes()) == {9}
    """)


def test_what_shows_nothing_about_the_driver_is_tried_again(script: Script) -> None:
    script("""
        x = filled(1000, 1)
        with worker() as w:
            try:
                w.call("total", x)
            except MemoryError as error:
                assert "no room on cuda:0 for the CUDA context and the start-up check of worker device" in str(error)
            else:
                raise AssertionError
            assert w.status()["pools"] == {} and w.status()["transfers"] == 0
            assert w.call("total", x) == 1000 and shared(w) is True and w.status()["pools"] == {0: "proved"}
    """, SIMCUDA_FAIL="cuMemAllocFromPoolAsync:2:2")


# ---- windows ----

LARGE = """
        places = {0: 5, CHUNK - 1: 6, CHUNK: 7, 2 * CHUNK - 1: 8, 2 * CHUNK: 9, 3 * CHUNK - 1: 10, 3 * CHUNK: 11}
        def read(w, x):
            got = w.call("bytes_at", x, list(places))
            assert got == bytes(places.values()), list(got)
            return shared(w)
        def made(w):
            x = w.call("marked", 3 * CHUNK + 1, places)
            assert bytes(byte(x, p).tobytes()[0] for p in places) == bytes(places.values())
            return shared(w)
"""

BROKEN_WINDOWS = {
    "a part shows other memory": ("part", r"byte \d+ of the check's memory reads \d+, not \d+"),
    "parts lie apart": ("apart", "did not import window 1 of 2 next to the one before it|did not import window 1 of 3"),
    "a part kills the importer": ("part-crash", "ended the worker: a process that tried it was ended by SIGSEGV"),
    "the layout is unknown": ("blob", "lays out what it exports in a way that is not known"),
}


@pytest.mark.parametrize("what", BROKEN_WINDOWS)
def test_windows_that_do_not_work_are_not_used(script: Script, what: str) -> None:
    """A process that nobody needs finds out; no worker dies of it, and what needs no windows is shared as before."""
    word, expected = BROKEN_WINDOWS[what]
    script(LARGE + f"""
        expected = {expected!r}
        with worker() as w:
            small = filled(1000, 1)
            assert w.call("total", small) == 1000 and shared(w) is True
            pid = w.pid
            x = marked(3 * CHUNK + 1, places)
            for _ in range(2):
                assert re.search(expected, read(w, x)), shared(w)
                assert re.search("chunks of 32 MiB", shared(w)), "and what it was needed for"
                next_best(w, "input")
                made(w)
                next_best(w, "result")
            assert w.pid == pid, "no worker dies"
            assert re.search(expected, w.status()["windows"][0]) and w.status()["pools"] == {{0: "proved"}}, w.status()
            assert len([line for line in log if re.search(expected, line) and "above the driver's limit" in line]) == 1, log
            assert w.call("total", small) == 1000 and shared(w) is True and from_worker(w) is True
        with worker(name="next") as w:  # the device is known by then
            before = len(log)
            assert re.search(expected, read(w, x)), shared(w)
            assert not any("was ended" in line and "worker next" not in line for line in log[before:])
    """, SIMCUDA_BREAK=word, **lowered(3))


def test_windows_broken_in_one_worker(script: Script) -> None:
    """The sacrificed process was well; the worker's own check is what counts for it."""
    script(LARGE + """
        x = marked(3 * CHUNK + 1, places)
        with worker(env={"SIMCUDA_BREAK": "part"}) as w, worker() as v:
            assert "check of windows failed: byte" in read(w, x)
            next_best(w, "input")
            made(w)
            next_best(w, "result")
            assert w.status()["pools"] == {0: "proved"} and "failed" in w.status()["windows"][0]
            assert read(v, x) is True and made(v) is True and v.status()["windows"] == {0: "proved"}
    """, **lowered(3))


@pytest.mark.parametrize("first", ["input", "result"])
def test_a_worker_that_dies_of_windows_is_replaced_and_keeps_the_pool(script: Script, first: str) -> None:
    script(LARGE + f"""
        x = marked(3 * CHUNK + 1, places)
        with worker(env={{"SIMCUDA_BREAK": "part-crash"}}) as w:
            assert w.call("total", filled(1000, 1)) == 1000 and shared(w) is True
            pid = w.pid
            if {first!r} == "result":  # the call had begun: it is lost, and says why
                try:
                    made(w)
                except zcx.WorkerDied as died:
                    assert "check of windows ended the worker" in str(died) and died.signal == signal.SIGSEGV, (died, died.signal)
                else:
                    raise AssertionError(shared(w))
            assert "check of windows ended the worker" in read(w, x) and w.pid != pid
            next_best(w, "input")
            made(w)
            next_best(w, "result")
            assert "ended the worker" in w.status()["windows"][0] and w.status()["pools"] == {{0: "proved"}}, w.status()
            assert w.call("total", filled(1000, 1)) == 1000 and shared(w) is True, "exactly that rung"
    """, **lowered(3))


@pytest.mark.parametrize("straddling", [False, True], ids=["aligned", "straddling"])
def test_sizes_around_a_lowered_limit(script: Script, straddling: bool) -> None:
    """None kills the importer, and none is copied; windows are proved only for what needs them."""
    script(f"""
        limit, straddling = 4, {straddling}
        if straddling:
            keep = filled(1000, 1)
        with worker() as w:
            for n, extra in ((limit - 1, 0), (limit, -1), (limit, 0), (limit, 1), (limit + 1, 0), (2 * limit + 1, 5)):
                nbytes = n * CHUNK + extra
                first = in_pool(nbytes)
                begin = first.address % CHUNK
                assert bool(begin) is straddling
                borders = [k * CHUNK - begin for k in (1, 2, n - 1, n, n + 1, limit, limit + 1)]
                places = {{p: 1 + i for i, p in enumerate(sorted({{q for b in (0, *borders, nbytes) for q in (b - 1, b) if 0 <= q < nbytes}}))}}
                for p, value in places.items():
                    byte(first, p).copy_from(bytes([value]))
                assert w.call("bytes_at", first, list(places)) == bytes(places.values()) and shared(w) is True
                assert w.call("bytes_at", first, list(places)) == bytes(places.values()) and shared(w) is True, "and again"
                touched = (begin + nbytes - 1) // CHUNK + 1
                if touched > limit:
                    assert w.status()["windows"] == {{0: "proved"}}, (n, extra)
                if nbytes <= (limit - 1) * CHUNK:
                    assert w.status()["windows"] == {{}}, (n, extra)
                del first
                made = w.call("marked", nbytes, places)
                assert shared(w) is True and bytes(byte(made, p).tobytes()[0] for p in places) == bytes(places.values())
                del made
    """, SIMCUDA_MEMORY="40GiB", **lowered(4))


@pytest.mark.parametrize("before", [0, 2 << 20], ids=["aligned", "straddling"])
def test_every_size_around_the_drivers_limit(script: Script, before: int) -> None:
    """4 GiB - 64 MiB to 4 GiB + 96 MiB in steps of 16 MiB, both ways, on a driver that dies of 129 chunks: each is shared, in one
    piece as far as that goes and in windows above."""
    script(f"""
        MIB, before = 1 << 20, {before}
        keep = in_pool(before) if before else None
        seen = set()
        with worker() as w:
            for nbytes in range(4032 * MIB, 4192 * MIB + 1, 16 * MIB):
                x = in_pool(nbytes)
                assert x.address % CHUNK == before
                touched = (before + nbytes - 1) // CHUNK + 1
                seen.add(touched)
                borders = (0, *(k * CHUNK - before for k in (1, 127, 128, 129, 130)), nbytes)
                places = {{p: 1 + i for i, p in enumerate(sorted({{q for b in borders for q in (b - 1, b) if 0 <= q < nbytes}}))}}
                for p, value in places.items():
                    byte(x, p).copy_from(bytes([value]))
                for crossed in ("input", "result"):
                    if crossed == "input":
                        assert w.call("bytes_at", x, list(places)) == bytes(places.values()), nbytes
                    else:
                        x = w.call("marked", nbytes, {{p: 255 - value for p, value in places.items()}})
                        assert bytes(255 - byte(x, p).tobytes()[0] for p in places) == bytes(places.values()), nbytes
                        assert x.address % CHUNK == before
                    assert shared(w) is True, nbytes
                    (t,) = w.last_report.transfers
                    assert (t.direction, "in windows" in t.reason) == (crossed, touched > 128), (nbytes, t)
                    assert w.status()["windows"] == ({{0: "proved"}} if nbytes > 4064 * MIB else {{}}), nbytes
                    if crossed == "input":
                        del x
                del x
        assert sorted(seen) == list(range(127, 133) if before else range(126, 132)), seen
    """, SIMCUDA_MEMORY="40GiB", **SOUND)


@pytest.mark.parametrize(("limit", "before", "holds"), [(1, 32 << 20, False), (2, 32 << 20, True), (2, 1000, False)])
def test_a_guard_below_the_checks_own_chunks(script: Script, limit: int, before: int, holds: bool) -> None:
    """Its 64 MiB are two chunks, or three where they begin inside one: then no import is tried, and the pool is not used."""
    script(f"""
        x = in_pool({before})
        byte(x, 0).copy_from(b"\\7")
        with worker() as w:
            assert w.call("bytes_at", x, [0]) == b"\\7"
            if {holds}:
                assert shared(w) is True and w.status()["pools"] == {{0: "proved"}}
            else:
                assert "the driver imports no more than {limit} at once" in shared(w) and shared(w) in w.status()["pools"][0]
                next_best(w, "input")
            assert w.status()["windows"] == {{}}
    """, **lowered(limit))


def test_whole_copies_across_windows(script: Script) -> None:
    """Bytes of all of it, through the package's own copies, which end where a window does."""
    script("""
        with worker() as w:
            keep = filled(1000, 1)
            x = in_pool(4 * CHUNK)
            x.copy_from(b"\\1" * (4 * CHUNK))
            assert w.call("total", x) == 4 * CHUNK and shared(w) is True and w.status()["windows"] == {0: "proved"}
            y = w.call("filled", 4 * CHUNK, 3)
            assert shared(w) is True and y.tobytes() == b"\\3" * (4 * CHUNK)
    """, **lowered(3))


# ---- checks that do not end ----

HANG = {"SIMCUDA_BREAK": "wait"}


def test_a_check_that_never_ends_costs_the_worker_and_not_the_call(script: Script) -> None:
    script(f"""
        canary.SECONDS = 1.0
        x = filled(1000, 1)
        with worker(env={HANG!r}) as w:
            pid = w.call("pid")
            assert w.call("total", x) == 1000 and "check of sharing did not end within 1 s" in shared(w)
            assert w.call("pid") not in (None, pid), "another process"
            assert all("did not end within 1 s" in w.status()[rung][0] for rung in ("pools", "vmm", "copies")), w.status()
            started = time.monotonic()
            assert "did not end within 1 s" in from_worker(w) and time.monotonic() - started < 1, "none is tried again"
            next_best(w, "result", False)
            said = [line for line in log if "did not end" in line and "cuda:0" in line]
            assert [re.search("check of (.*) did", line)[1] for line in said] == ["sharing", "the arena", "pinned memory"], log
    """)


def test_a_check_that_never_ends_within_a_call(script: Script) -> None:
    script(f"""
        canary.SECONDS = 1.0
        with worker(env={HANG!r}) as w:
            for check, rung in (("sharing", "pools"), ("the arena", "vmm"), ("pinned memory", "copies")):
                started = time.monotonic()
                try:
                    from_worker(w)
                except zcx.WorkerDied as died:
                    assert f"check of {{check}} did not end within 1 s" in str(died) and "the next one does without" in str(died), died
                else:
                    raise AssertionError("it got through?")
                assert time.monotonic() - started < 10
                assert "did not end" in w.status()[rung][0]
            assert "did not end within 1 s" in from_worker(w)
            next_best(w, "result", False)
    """)


#: Only the check of windows of the process of that name has a short time: a loaded machine may need more for one that is well.
HASTY = """
        def hasty(self, *rest):
            canary.SECONDS = 1.0 if self.name == hung else 20.0
            try:
                return check(self, *rest)
            finally:
                canary.SECONDS = 20.0
        check, canary.Pools.check_windows = canary.Pools.check_windows, hasty
"""


def test_windows_that_hang_cost_a_process_that_nobody_needs(script: Script) -> None:
    script(LARGE + '        hung = "windows check"' + HASTY + """
        x = marked(3 * CHUNK + 1, places)
        with worker() as w:
            assert w.call("total", filled(1000, 1)) == 1000 and shared(w) is True
            pid = w.pid
            for _ in range(2):
                assert "the start-up check of windows did not end within 1 s" in read(w, x)
                next_best(w, "input")
                made(w)
                next_best(w, "result")
            assert w.pid == pid and "did not end within 1 s" in w.status()["windows"][0] and w.status()["pools"] == {0: "proved"}
            said = [line for line in log if "check of windows did not end" in line]
            assert len(said) == 2 and "worker windows check" in said[0] and "above the driver's limit" in said[1], log
            assert w.call("total", filled(1000, 1)) == 1000 and shared(w) is True, "exactly that rung"
    """, SIMCUDA_BREAK="part-hang", **lowered(3))


@pytest.mark.parametrize("first", ["input", "result"])
def test_windows_that_hang_in_the_worker_itself(script: Script, first: str) -> None:
    script(LARGE + '        hung = "device"' + HASTY + f"""
        x = marked(3 * CHUNK + 1, places)
        with worker(env={{"SIMCUDA_BREAK": "part-hang"}}) as w:
            pid = w.call("pid")
            if {first!r} == "result":  # the call had begun: it is lost, and says why
                try:
                    made(w)
                except zcx.WorkerDied as died:
                    assert "check of windows did not end within 1 s" in str(died) and "the next one does without" in str(died), died
                else:
                    raise AssertionError(shared(w))
            assert "check of windows did not end within 1 s" in read(w, x) and w.pid != pid
            pid = w.pid
            next_best(w, "input")
            made(w)
            next_best(w, "result")
            assert w.pid == pid and "did not end within 1 s" in w.status()["windows"][0] and w.status()["pools"] == {{0: "proved"}}
            assert w.call("total", filled(1000, 1)) == 1000 and shared(w) is True, "exactly that rung"
    """, **lowered(3))


@pytest.mark.parametrize("first", ["total", "filled"])
@pytest.mark.parametrize("end", ["timeout", "interrupt", "kill"])
def test_what_cuts_a_check_short_shows_nothing(script: Script, first: str, end: str) -> None:
    """The call ends as it was told to; nothing is demoted, and no late answer gets into the next call."""
    script(f"""
        first, end = {first!r}, {end!r}
        x = filled(1000, 1)
        def call(**options):
            return w.call("total", x, **options) if first == "total" else sum(w.call("filled", 1000, 1, **options).tobytes())
        with worker(env={HANG!r}) as w:
            pid = w.call("pid")
            if end == "kill":
                threading.Timer(0.7, w.kill).start()
            if end == "interrupt":
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 0.7)
            try:
                call(timeout=0.7 if end == "timeout" else 30)
            except {{"timeout": zcx.CallTimeout, "interrupt": KeyboardInterrupt, "kill": zcx.WorkerDied}}[end]:
                pass
            else:
                raise AssertionError("it got through?")
            assert w.status()["pools"] == {{}}, w.status()
            assert w.call("pid") != pid
            canary.SECONDS = 0.5
            for _ in range(3):  # each rung's check costs a call that waits for its result
                try:
                    assert call() == 1000
                    break
                except zcx.WorkerDied:
                    assert first == "filled"
            else:
                assert call() == 1000
            assert "did not end within 0.5 s" in w.status()["pools"][0]
    """)


def test_a_worker_that_does_not_open_the_gpu_in_time(script: Script) -> None:
    script("""
        canary.OPEN_SECONDS = 1.0
        x = filled(1000, 1)
        with worker() as w:
            w.call("pid")
            import os
            os.kill(w.pid, signal.SIGSTOP)  # deep in the driver, for all that one can see
            assert w.call("total", x) == 1000 and "opening the GPU did not end within 1 s" in shared(w)
    """)


@pytest.mark.parametrize("first", ["total", "filled"])
def test_a_kill_in_the_midst_of_a_check_shows_nothing(script: Script, first: str) -> None:
    """No driver sends SIGKILL: somebody did, or the kernel for want of memory. The next process tries the rung again."""
    script(f"""
        import os
        x = filled(1000, 1)
        def call():
            return w.call("total", x) if {first!r} == "total" else sum(w.call("filled", 1000, 1).tobytes())
        def kill():
            while not w._session.pools.unfinished:
                time.sleep(0.001)
            w._env = {{}}  # of the next process: its driver does not hang
            os.kill(pid, signal.SIGKILL)
        with worker(env={HANG!r}) as w:
            pid = w.call("pid")
            killer = threading.Thread(target=kill)
            killer.start()
            try:
                assert call() == 1000
            except zcx.WorkerDied:  # it may just have got through the check, or the function have begun
                assert call() == 1000
            killer.join()
            assert w.call("pid") != pid and w.status()["pools"] == {{0: "proved"}}, w.status()
            assert call() == 1000 and shared(w) is True
    """)


def test_kills_in_the_midst_of_every_check_show_something(script: Script) -> None:
    """Three in a row are believed, and from then on each one."""
    script(f"""
        x, awaits = filled(1000, 1), canary.Pools._await
        def told(self, kind, *rest):
            self.told = kind  # before that a death is no check's
            return awaits(self, kind, *rest)
        canary.Pools.told, canary.Pools._await = None, told
        killed, over = set(), threading.Event()
        def kill():
            while not over.wait(0.001):
                s = w._session
                if s is not None and s.pools.unfinished and s.pools.told == "proved" and not s.process.exited.is_set():
                    s.process.kill()
                    killed.add(s.process.pid)
        with worker(env={HANG!r}) as w:
            killer = threading.Thread(target=kill, daemon=True)
            killer.start()
            assert w.call("total", x) == 1000
            over.set()
            killer.join()
            assert len(killed) == 5, killed
            assert "ended the worker" in shared(w) and all("ended the worker" in w.status()[rung][0] for rung in ("pools", "vmm", "copies"))
            next_best(w, "input", False)
            assert w.call("total", x) == 1000 and len(killed) == 5
    """)
