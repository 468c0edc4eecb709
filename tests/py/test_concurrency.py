"""Many at once, on the simulated driver: nobody waits for a stream on the way of a call; what submit() takes of the thread that calls it; the
garbage collector in odd threads; forks and exits while the device is in use; one tensor in two workers at the same time."""
from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT, WORKERS
from test_rungs import COMMON, NO_POOL, WINDOWS

import cbuild

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.usefixtures("deadline")

CROWD = COMMON + f"""
import concurrent.futures, faulthandler, pathlib
def start(**options):
    return zcx.Worker({str(WORKERS / 'crowd.py')!r}, **{{"timeout": 40, **options}})

class Stream:
    "As torch's."
    def __init__(self):
        handle = ctypes.c_void_p()
        with context():
            assert sim.cuStreamCreate(ctypes.byref(handle), 1) == 0  # does not wait for the legacy stream, nor that one for it
        self.cuda_stream = handle.value
    def set(self, x, value):
        with context():
            assert sim.cuMemsetD8Async(ctypes.c_uint64(x.address), ctypes.c_ubyte(value), ctypes.c_size_t(x.nbytes), ctypes.c_void_p(self.cuda_stream)) == 0
    def hold(self, on=True):
        with context():
            assert (sim.simcuda_hold if on else sim.simcuda_release)(ctypes.c_void_p(self.cuda_stream)) == 0
"""


@pytest.fixture
def spawn(tmp_path):
    """spawn(code, **environment): a parent on the simulated driver, which is not waited for, and does not outlive the test."""
    folder, made = tmp_path / "simcuda", []
    folder.mkdir()

    def go(code: str, **env: str) -> subprocess.Popen[str]:
        path = tmp_path / "parent.py"
        path.write_text("from simulated import *\n" + CROWD + textwrap.dedent(code))
        clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{HERE}", "PYTHONDONTWRITEBYTECODE": "1",
                 "ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(folder), "SIMCUDA_ABORT_ON_RACE": "1", **env}
        quiet = "ignore:This process:DeprecationWarning"  # 3.12 and later warn of a fork beside threads
        made.append(subprocess.Popen([sys.executable, "-S", "-W", quiet, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=clean))
        return made[-1]

    yield go
    for p in made:
        p.kill()
        p.communicate()


@pytest.fixture
def script(spawn):
    """script(code, **environment): its stdout, when it has ended well."""
    def go(code: str, **env: str) -> str:
        p = spawn(code, **env)
        out, err = p.communicate(timeout=90)
        assert p.returncode == 0, f"exit status {p.returncode}\n{out}\n{err}"
        return out

    return go


# ---- nobody waits for a stream ----

REFUSED = """
        everywhere = "cuStreamSynchronize:1:999+,cuCtxSynchronize:1:999+,cuEventSynchronize:1:999+"
        def waits(f):
            try:
                f()
            except (zcx.RemoteError, core().Failure) as error:
                return "cuStreamSynchronize" in str(error)
"""


@pytest.mark.parametrize("hidden", ["", "cuStreamWriteValue64,cuStreamWaitValue64"], ids=["counters", "events"])
def test_no_call_waits_for_a_stream_on_either_side(script, hidden):
    """Of the pool: whatever waits for a stream, an event or a context fails in both processes, and no call misses it."""
    script(REFUSED + """
        with start() as w:
            data = os.urandom(5000)
            x = filled_with(zcx.empty((5000,), "uint8", "cuda"), data)
            w.call("twice", x)
            sim.simcuda_fail(everywhere.encode())
            w.call("fail", everywhere)
            assert waits(x.tobytes) and waits(lambda: w.call("bytes_of", x)), "only who asks for bytes does"
            tried = sim.simcuda_injected(), w.call("injected")
            for _ in range(20):
                x, data = w.call("twice", part(x, 7, 2500)), 2 * data[7:2507]
                assert crossed(w) == [("input", "pool", False), ("result", "pool", False)], w.last_report
            assert (sim.simcuda_injected(), w.call("injected")) == tried
            sim.simcuda_fail(b"")
            assert x.tobytes() == data
        assert sim.simcuda_races() == 0
    """, SIMCUDA_HIDE=hidden, SIMCUDA_DELAY_US="300")


def test_the_caller_waits_for_no_stream_on_the_other_rungs_either(script):
    """There the worker waits for its gate stream, so for nobody's work but its own: docs/ownership.md says where."""
    script(REFUSED + f"""
        def calls(w, make, *expected):
            data = [os.urandom(5000) for _ in range(6)]
            xs, got = [make(d) for d in data], []
            w.call("twice", xs[0])
            sim.simcuda_fail(everywhere.encode())
            w.call("fail", everywhere.partition(",")[2])
            tried = sim.simcuda_injected(), w.call("injected")
            for x in xs:
                got.append(w.call("twice", x))
                assert crossed(w) == [("input", *expected), ("result", "vmm", False)]
            assert (sim.simcuda_injected(), w.call("injected")) == tried, expected
            sim.simcuda_fail(b"")
            w.call("fail", "")
            assert [y.tobytes() for y in got] == [2 * d for d in data]
        with start({NO_POOL}) as w:
            calls(w, in_arena, "vmm", False)
            calls(w, unshareable, "staged", True)
            {WINDOWS["staged"]}
            calls(w, unshareable, "staged", True)
            {WINDOWS["host"]}
            calls(w, unshareable, "host", True)
        settled()
    """, SIMCUDA_DELAY_US="300")


# ---- submit() ----


def test_submit_takes_the_stream_of_the_thread_that_calls_it(script, tmp_path):
    """The one that is current then: not the queue's thread's, and not what is current when the call's turn comes."""
    script(f"""
        from comfy_zerocopy import tensor
        here, there = {str(tmp_path / 'here')!r}, {str(tmp_path / 'there')!r}
        current = {{}}  # by thread
        tensor.current_streams = lambda: {{0: current[threading.get_ident()]}} if threading.get_ident() in current else {{}}
        with start() as w:
            x = filled(5000, 3)
            assert w.call("bytes_of", x) == b"\\3" * 5000
            mine, other = Stream(), Stream()
            blocks = w.submit("meet", filled(10, 1), here, there)  # until later
            mine.hold()
            futures = []
            def submits():
                current[threading.get_ident()] = mine
                mine.set(x, 9)
                futures.append(w.submit("bytes_of", x, here + "2"))
                current[threading.get_ident()] = other
            thread = threading.Thread(target=submits)
            thread.start()
            thread.join()
            open(there, "w").close()
            assert blocks.result(20)[2] == b"\\1" * 10
            until(lambda: os.path.exists(here + "2"), "the function has begun")
            assert not concurrent.futures.wait(futures, timeout=0.1).done, "it got its input before the caller's stream had written it"
            mine.hold(False)
            assert futures[0].result(20) == b"\\11" * 5000
        assert sim.simcuda_races() == 0
    """)


# ---- the garbage collector ----


def test_finalizers_in_odd_threads(script):
    """Collections all the time, in whichever thread: what they find is given back under no lock that this thread, or one it waits for, has."""
    script("""
        faulthandler.dump_traceback_later(40, exit=True)
        class Cycle:
            def __init__(self, worker, *things):
                self.worker, self.things, self.me = worker, things, self
            def __del__(self):
                self.worker.status()
        workers = [start(name=name) for name in ("one", "two")]
        for w in workers:
            w.call("twice", filled(10, 1))
        ended, rounds, until_then = [], [0] * 4, time.monotonic() + 1.5
        def go(k):
            while rounds[k] < 8 or (rounds[k] < 100 and time.monotonic() < until_then):
                n, w = rounds[k], workers[(k + rounds[k]) % 2]
                token = w.call("thing")
                cycle = Cycle(w, w.call("on_the_host", 3000 + n), w.call("twice", filled(1500, k)), w.submit("twice", filled(20, k)))
                assert w.call("is_thing", token) and cycle.things[0].tobytes() == bytes([(3000 + n) % 251]) * (3000 + n)
                assert cycle.things[1].tobytes() == bytes([k]) * 3000
                if k < 2 and n == k + 2:
                    other = start(name="dropped")
                    Cycle(w, other, other.call("on_the_host", 10), other.call("twice", filled(20, k)))
                    ended.append(other._session.process.exited)
                    del other
                del cycle
                rounds[k] += 1
        gc.set_threshold(20, 2, 2)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(go, range(4)))
        gc.set_threshold(700, 10, 10)
        for w in workers:
            w.submit("nothing").result(20)  # behind all others
        gc.collect()
        assert len(ended) == 2
        until(lambda: all(e.is_set() for e in ended) and len(parent._all) == 2, "what was dropped has ended")
        for w in workers:
            until(lambda: (w.status()["transfers"], w.status()["kept"], w.status()["result_bytes"]) == (0, 0, 0), w.status)
            assert w.call("count", "imports", "allocations") == [0, 0] and w.call("things") == 0
        until(lambda: count("allocations") == 0, "GPU memory")
        for w in workers:
            w.close()
        settled()
    """)


# ---- forks and exits ----


def test_a_fork_beside_a_device_session(script):
    """A result, what the worker keeps, and a lease: the child can do nothing to them, whatever it drops, and however it ends."""
    script("""
        import signal
        w = start()
        made, data = w.call("twice", filled(2500, 7)), b"\\7" * 5000
        x = filled(5000, 3)
        w.call("keep", x)
        lease = w.lease(made)
        lease.__enter__()
        pid, held = w.pid, (w.status()["kept"], w.status()["leased"])
        for way in ("exit", "_exit"):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                for f in (lambda: w.call("nothing"), lambda: w.submit("nothing"), lambda: w.lease(made).__enter__()):
                    try:
                        f()
                    except zcx.Error as error:
                        assert "belongs to the process that started it" in str(error), error
                    else:
                        os._exit(9)
                w.kill()
                lease.__exit__(None, None, None)
                del made, x, lease
                zcx.reclaim()
                gc.collect()
                if way == "_exit":
                    os._exit(0)
                w.close()
                raise SystemExit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, way
            assert (w.status()["kept"], w.status()["leased"]) == held == (1, 1)
            assert w.call("bytes_of", made) == made.tobytes() == data and w.call("kept") == [x.tobytes()] == [b"\\3" * 5000] and w.pid == pid
        lease.__exit__(None, None, None)
        w.call("forget")
        until(lambda: w.status()["transfers"] == 0, "and it is given back as ever")
        w.close()
        del made, x, lease
        settled()
    """)


def test_an_exit_amid_device_calls_is_quiet(spawn, tmp_path):
    """One runs and one is queued, and something is kept."""
    marker = tmp_path / "running"
    p = spawn(f"""
        w = start()
        x, made = filled(5000, 3), w.call("twice", filled(2500, 7))
        w.call("keep", x)
        running, queued = w.submit("spin", {str(marker)!r}), w.submit("twice", made)
        until(lambda: os.path.exists({str(marker)!r}), "it runs")
        print(w.pid)
    """)
    out, err = p.communicate(timeout=90)
    assert (p.returncode, err) == (0, "")
    assert not pathlib.Path(f"/proc/{int(out)}").exists(), "the worker was waited for"


# ---- one tensor, at the same time ----


def test_one_input_in_two_workers_at_once(script, tmp_path):
    """From two threads: each has one import of it, lets go of its own, and the memory stays until the last has."""
    script(f"""
        with start(name="one") as one, start(name="two") as two, concurrent.futures.ThreadPoolExecutor(2) as pool:
            for w in (one, two):
                w.call("nothing", filled(10, 1))
            for n in range(5):
                data = os.urandom(5000)
                x = filled_with(zcx.empty((5000,), "uint8", "cuda"), data)
                marks = [f"{tmp_path}/{{n}}{{k}}" for k in (1, 2)]
                calls = [pool.submit(w.call, "meet", x, mine, other) for w, mine, other in ((one, *marks), (two, *marks[::-1]))]
                del x  # the calls have it
                for f in calls:
                    address, imports, got = f.result(40)
                    assert imports == 1 and got == data
                del f, calls
                assert [w.call("count", "imports") for w in (one, two)] == [[0], [0]]
                assert one.status()["transfers"] == two.status()["transfers"] == 0
                until(lambda: count("allocations") == 0, "given back")
        assert sim.simcuda_races() == 0
    """)


def test_two_threads_lend_one_input_to_one_worker(script):
    """They take turns, while a lease holds it and views of it are lent: at no time is there more than one import."""
    script("""
        with start() as w:
            data = os.urandom(5000)
            x = filled_with(zcx.empty((5000,), "uint8", "cuda"), data)
            w.call("nothing", x)
            def calls(k):
                for i in range(15):
                    view = part(x, 100 * k + i, 700)
                    with w.lease(view) if i % 3 == 0 else contextlib.nullcontext():
                        assert w.call("bytes_of", view) == data[100 * k + i:100 * k + i + 700]
                        assert w.call("count", "imports")[0] <= 1
                return True
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                assert all(pool.map(calls, range(3)))
            until(lambda: (w.status()["leased"], w.status()["transfers"]) == (0, 0), "given back")
            assert w.call("count", "imports") == [0] and x.tobytes() == data
        assert sim.simcuda_races() == 0
    """, SIMCUDA_DELAY_US="200")
