"""Each test here is a fault that was found once, and its smallest reproduction."""
from __future__ import annotations

import gc
import os
import pathlib
import re
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
from conftest import ROOT, Run, until

import cbuild
import comfy_zerocopy as zcx
from comfy_zerocopy import parent

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.usefixtures("deadline")

CODE = """
import os, threading, time
from comfy_zerocopy.worker import empty, expose, handle, progress
objects, errors = [], []

@expose
def nothing(*a): pass

@expose
def flood():
    while True: progress(1.0)

@expose
def step():
    progress(1.0)

@expose
def sleep(seconds): time.sleep(seconds)

@expose
def filled(nbytes):
    x = empty((nbytes,), "uint8")
    memoryview(x).cast("B")[:] = b"\\7" * nbytes
    return x

class Counted:
    alive = 0
    def __init__(self): Counted.alive += 1
    def __del__(self): Counted.alive -= 1

@expose
def many(n): return [handle(Counted()) for _ in range(n)]

@expose
def alive(): return Counted.alive

@expose
def hold(token): objects.append(token)

@expose
def drop_in_fork():
    pid = os.fork()
    if not pid:
        try:
            objects.clear()
            try:
                empty((10,), "uint8")
            except Exception as error:
                os._exit(0 if "fork" in str(error) else 3)
            os._exit(4)
        finally:
            os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

@expose
def held(): return objects[0]

def late():
    while True:
        try:
            empty((100,), "uint8")
        except Exception as error:
            errors.append(error)

@expose
def late_thread(): threading.Thread(target=late, daemon=True).start()

@expose
def length(x): return len(x), x[:1] == x[-1:]
"""


@pytest.fixture
def target(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "faults.py"
    path.write_text(CODE)
    return path


def test_a_worker_that_never_stops_reporting_stops_no_clock(target):
    with zcx.Worker(target) as w:
        w.call("nothing")
        begin = time.monotonic()
        with pytest.raises(zcx.CallTimeout):
            w.call("flood", timeout=0.5)
        assert time.monotonic() - begin < 4, "within the grace, and not by it"
        w.call("nothing")


def test_submit_to_a_worker_that_is_closed(target):
    w = zcx.Worker(target)
    w.submit("nothing").result(20)
    w.close()
    with pytest.raises(zcx.Error, match="closed"):
        w.submit("nothing").result(20)


def test_a_worker_that_died_while_the_call_was_made_ready_is_dead(target):
    class Deadly:
        def __init__(self, w):
            self.w = w

    def encode(o):
        session = o.w._session
        o.w.kill()
        until(session.process.gone.is_set, "gone")
        until(lambda: session.parent is None or session.parent.state == "broken", "its session to be over")
        return None

    zcx.register(Deadly, "test.deadly", encode, lambda o: o)
    with zcx.Worker(target) as w:
        w.call("nothing")
        with pytest.raises(zcx.WorkerDied):
            w.call("nothing", Deadly(w))
        w.call("nothing")


@pytest.mark.parametrize("what", ["call", "close"])
def test_a_worker_used_from_within_its_own_call_is_an_error_and_no_deadlock(target, what):
    seen = []

    def on_progress(*_):
        try:
            w.call("nothing", timeout=5) if what == "call" else w.close()
        except zcx.Error as error:
            seen.append(error)

    w = zcx.Worker(target, on_progress=on_progress)
    w.call("step")
    assert len(seen) == 1 and "within" in str(seen[0]), seen
    w.call("nothing")
    w.close()


def test_handles_dropped_while_a_worker_is_busy_are_not_forgotten(target):
    with zcx.Worker(target) as w:
        tokens = w.call("many", 3000)
        assert w.call("alive") == 3000
        busy = w.submit("sleep", 0.5)
        until(lambda: w.status().get("state") == "calling", "the call to run")
        tokens.clear()
        busy.result(20)
        until(lambda: w.call("alive") == 0, "the worker to let go of all")


def test_a_fork_of_a_worker_speaks_for_nobody(target):
    with zcx.Worker(target) as w:
        o = object()
        w.call("hold", zcx.handle(o))
        assert w.call("drop_in_fork") == 0
        assert w.call("held") is o


def test_a_thread_that_outlives_its_call_does_not_touch_the_next_ones_message(target):
    with zcx.Worker(target) as w:
        w.call("late_thread")
        for _ in range(300):
            assert w.call("length", bytes(1 << 20)) == (1 << 20, True)


def resident() -> int:
    """Bytes of result files that are in memory here."""
    text = pathlib.Path("/proc/self/smaps").read_text()
    return sum(int(n) << 10 for n in re.findall(r"memfd:zcx-result[^\n]*\n(?:[^\n]*\n)*?Rss:\s+(\d+) kB", text))


def test_results_that_outlive_their_worker_give_their_memory_back_when_they_go(target):
    before = resident()
    with zcx.Worker(target) as w:
        x = w.call("filled", 64 << 20)
        assert bytes(memoryview(x).cast("B")[:: 4096]) == b"\7" * (16 << 10)
    until(lambda: not parent._all, "the session to be over")
    assert resident() >= before + (64 << 20)
    del x
    gc.collect()
    assert resident() < before + (4 << 20)


def test_a_start_that_fails_half_way_leaves_no_descriptor(target, monkeypatch):
    def descriptors():
        gc.collect()
        return sorted(os.listdir("/proc/self/fd"))

    with zcx.Worker(target) as w:
        w.call("nothing")
        session = w._session
    until(lambda: session.parent is None, "the session to be over, and its page unmapped")
    before = descriptors()

    def none(pid):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none)
    with zcx.Worker(target) as w, pytest.raises(zcx.WorkerDied, match="Too many open files"):
        w.call("nothing")
    until(lambda: descriptors() == before, "all to be closed")


# ---- on the simulated driver ----


@pytest.fixture
def script(run: Run, tmp_path: pathlib.Path) -> Callable[..., str]:
    folder = tmp_path / "simcuda"
    folder.mkdir()

    def go(code: str, **env: str) -> str:
        clean = {"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
        return run("from simulated import *\n" + textwrap.dedent(code), path=(ROOT, HERE), env=clean).stdout

    return go


def test_a_cancel_that_crosses_the_answer_to_an_allocation(script):
    """The worker gave up waiting for memory on a device that this call had not met yet: its DONE is due all the same."""
    script("""
        import threading
        from comfy_zerocopy import ladder
        allocate, known = ladder.allocate, threading.Event()
        with worker(timeout=None) as w:
            assert from_worker(w) is True
            def slow(*arguments):
                assert known.wait(20)
                future.cancel()
                time.sleep(0.5)
                return allocate(*arguments)
            ladder.allocate = slow
            future = w.submit("filled", 5000, 7)
            known.set()
            try:
                future.result(20)
            except zcx.Cancelled:
                pass
            else:
                raise AssertionError("not cancelled")
            ladder.allocate, pid = allocate, w.pid
            assert from_worker(w) is True and w.pid == pid, "the worker lives on"
    """)


def test_ready_that_cannot_be_posted_for_a_result_costs_the_rung_only(script):
    """A gate that was made for that result and never told must not be waited for."""
    script("""
        import ctypes, os
        from comfy_zerocopy import ladder
        fail = ctypes.CDLL(os.environ["ZCX_LIBCUDA"]).simcuda_fail
        allocate = ladder.allocate
        with worker(timeout=10) as w:
            assert from_worker(w) is True
            def then_fail(*arguments):
                made = allocate(*arguments)
                fail(b"cuStreamWriteValue64:1:719")
                return made
            ladder.allocate = then_fail
            assert "cuStreamWriteValue64" in from_worker(w)
            ladder.allocate = allocate
            assert from_worker(w) is True
    """)


LINGERS = """
import sys, threading
sys.modules["torch"] = sys.modules["numpy"] = None
from comfy_zerocopy import tensor
from comfy_zerocopy.errors import Cancelled
from comfy_zerocopy.worker import empty, expose
kept = []

@expose
def linger(x, host):
    kept.append(host)
    threading.Timer(0.02, kept.clear).start()
    return x.tobytes()

@expose
def interrupted():
    before = tensor.current_stream
    def raises(ordinal):
        raise Cancelled("in the midst of it")
    tensor.current_stream = raises
    try:
        empty((10,), "uint8", "cuda")
    except Cancelled:
        return "heard"
    finally:
        tensor.current_stream = before
"""


def test_a_release_that_overtakes_done(script, tmp_path):
    """What was kept when the function returned may be let go of before the GPU is done with the call."""
    (tmp_path / "lingers.py").write_text(LINGERS)
    script(f"""
        x, host = filled(5000, 3), Array(bytearray(9000), 0, (9000,), "uint8")
        import ctypes
        host.address = ctypes.addressof(ctypes.c_char.from_buffer(host.owner))
        with zcx.Worker({str(tmp_path / "lingers.py")!r}, timeout=40, env={{"SIMCUDA_DELAY_US": "100000"}}) as w:
            for _ in range(3):
                assert w.call("linger", x, host) == b"\\x03" * 5000
    """)


def test_an_exception_in_the_midst_of_an_allocation_is_not_swallowed(script, tmp_path):
    """Of a cancel that comes just while the worker is asked for its stream."""
    (tmp_path / "lingers.py").write_text(LINGERS)
    script(f"""
        with zcx.Worker({str(tmp_path / "lingers.py")!r}, timeout=40) as w:
            assert w.call("interrupted") == "heard"
            assert w.status()["kept"] == 0
    """)


SPOILT = """
import resource
from comfy_zerocopy.worker import empty, expose

class Final(Exception):
    def __str__(self):
        raise SystemExit(3)

@expose
def final():
    raise Final

@expose
def nothing(*a): pass

@expose
def fill_up():
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20),) * 2)

@expose
def filled(nbytes):
    return empty((nbytes,), "uint8")
"""


def test_an_error_whose_text_would_end_the_process_is_told(tmp_path):
    path = tmp_path / "spoilt.py"
    path.write_text(SPOILT)
    with zcx.Worker(path) as w:
        w.call("nothing")
        before = w.pid
        with pytest.raises(zcx.RemoteError, match="__str__ failed"):
            w.call("final")
        w.call("nothing")
        assert w.pid == before


def test_a_worker_without_address_space_says_that_it_lacks_memory(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "spoilt.py"
    path.write_text(SPOILT)
    with zcx.Worker(path) as w:
        w.call("fill_up")
        before = w.pid
        with pytest.raises(MemoryError, match="in the worker"):
            w.call("filled", 1 << 26)
        with pytest.raises(MemoryError, match="in the worker"):
            w.call("nothing", numpy.zeros(1 << 26, "uint8"))
        w.call("nothing")
        assert w.pid == before


def test_a_parent_without_address_space_cannot_start_a_worker_and_says_why(target, monkeypatch):
    z = parent._native.zcx()

    def full(*_):
        failure = z.Failure("mmap: Cannot allocate memory")
        failure.code = 12
        raise failure

    monkeypatch.setattr(z, "Parent", full)
    with zcx.Worker(target) as w:
        with pytest.raises(MemoryError, match="Cannot allocate"):
            w.call("nothing")
        monkeypatch.undo()
        w.call("nothing")


def test_kill_in_a_fork_of_the_parent_waits_for_nobody(target):
    with zcx.Worker(target) as w:
        w.call("nothing")
        pid = os.fork()
        if not pid:
            begin = time.monotonic()
            w.kill()
            os._exit(int(time.monotonic() - begin > 2))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        w.call("nothing")


def test_a_library_that_another_thread_is_importing_is_not_there_yet(run):
    """The first host result of a process imports numpy; another thread's call looked at its own tensor with half of it."""
    run("""
        import importlib.util, pathlib, sys, threading
        from comfy_zerocopy import tensor
        pathlib.Path("numpy.py").write_text(
            "import sys\\n__version__ = '1'\\nsys.half.set()\\nassert sys.go.wait(20)\\nclass ndarray: pass\\n")
        sys.path.insert(0, ".")
        sys.half, sys.go = threading.Event(), threading.Event()
        first = threading.Thread(target=tensor.need, args=("numpy", "an array"))
        first.start()
        assert sys.half.wait(20) and sys.modules["numpy"].__version__ == "1"
        assert tensor.loaded("numpy") is None and tensor.look(object()) is None
        found = []
        second = threading.Thread(target=lambda: found.append(tensor.need("numpy", "an array").ndarray))
        second.start()
        second.join(0.05)
        assert not found
        sys.go.set()
        first.join()
        second.join()
        assert found and tensor.loaded("numpy") is sys.modules["numpy"]
    """)


def test_a_cancel_that_comes_too_late_interrupts_nothing_of_the_next_call(tmp_path):
    """Its signal cut short whatever C code the next call slept in."""
    (tmp_path / "sleeper.py").write_text("""
import ctypes, time
from comfy_zerocopy.worker import expose

@expose
def nothing():
    pass

@expose
def sleep(seconds, marker):
    begun = time.monotonic()
    open(marker, "w").close()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return time.monotonic() - begun
""")
    with zcx.Worker(tmp_path / "sleeper.py", timeout=40) as w:
        w.call("nothing")
        over = w.status()["calls"]
        future = w.submit("sleep", 0.3, str(tmp_path / "sleeps"))
        until((tmp_path / "sleeps").exists, "it sleeps")
        w._session.parent.cancel(over)
        assert future.result(30) >= 0.3
        assert w.call("nothing") is None


@pytest.fixture
def talker(tmp_path):
    """A worker that writes, and leaves a program behind that holds its output but nothing else of it."""
    (tmp_path / "talker.py").write_text("""
import os, subprocess, sys
from comfy_zerocopy.worker import expose

@expose
def program():
    sys.stderr.write("said\\nhalf a line")
    sys.stderr.flush()
    return os.getpid(), subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True).pid

@expose
def nothing():
    pass
""")
    with zcx.Worker(tmp_path / "talker.py", timeout=40) as w:
        yield w


def test_the_end_of_a_workers_output_that_is_seen_with_its_death_is_watched_no_more(talker):
    """Its descriptors were closed, and their numbers stayed with the keeper: it never heard of the process that got them next. The kernel
    closes what a process had in no order: the pipe that says that it is gone can end before its output does."""
    talker.call("nothing")
    p, done = talker._session.process, threading.Event()
    numbers = {p._popen.stdout.fileno(), p._popen.stderr.fileno(), p.pidfd, p._live}
    left = []

    def both():  # what the keeper does when it wakes for these two, and the output ends while it does
        assert numbers <= set(p._keeper._selector.get_map())
        os.kill(p.pid, 9)
        os.waitid(os.P_PIDFD, p.pidfd, os.WEXITED | os.WNOWAIT)
        p._ended()
        p._left()
        left.extend(numbers & set(p._keeper._selector.get_map()))
        done.set()

    p._keeper.do(both)
    assert done.wait(20) and p.gone.is_set()
    assert left == []
    assert talker.call("nothing") is None


def test_nobody_reads_where_a_gone_worker_wrote(talker):
    """A program that it started still holds its output: the end never came, and the last words were read from whatever had the
    descriptor's number by then."""
    worker, program = talker.call("program")
    p = talker._session.process
    numbers = {p._popen.stdout.fileno(), p._popen.stderr.fileno()}
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.write(write, b"not the worker's\n")
    made = []
    try:
        os.kill(worker, 9)
        assert p.gone.wait(20)
        while not numbers <= set(made) and len(made) < 100:
            made.append(os.dup(read))
        assert numbers <= set(made)
        assert p.describe()["stderr"] == ["said", "half a line"]
        assert os.read(read, 100) == b"not the worker's\n"
    finally:
        os.kill(program, 9)
        for fd in (read, write, *made):
            os.close(fd)
