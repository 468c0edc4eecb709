"""The parent of the walk: brings a session into a named state, lets a fault happen there, and looks at what follows.

docs/ownership.md has the table of what must follow; tests/py/test_faults.py reads it and asks for each row. This process answers: a
line of JSON for each line that it reads. It is a parent without libraries, on the simulated driver, with tests/faults/at.c preloaded.

    STATES      how to get there, and stop there
    OUTSIDE     faults that happen to a process wherever it is
    INSIDE      faults of one call of the system's or the driver's, each where it can come: by (state, fault)

    python walk.py                   answers
    python walk.py parents STATE…    brings a worker into each of these states, says which processes there are, and waits to be killed
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import os
import pathlib
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref

import comfy_zerocopy as zcx
from comfy_zerocopy import canary, parent, process
from comfy_zerocopy.array import Array

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 15.0  # for what must happen at once
DEMOTED = os.environ.get("FAULTS_DEMOTED")  # what the driver refuses every worker, so that another rung is taken
N = 5000  # bytes of an array; many share one chunk of the driver's
EXIT, CLOSE = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
sim = ctypes.CDLL(os.environ["ZCX_LIBCUDA"])
at = ctypes.CDLL(None)
folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ["FAULTS_DIR"]))
numbers = iter(range(1 << 30))
parent._GRACE = 0.15
logging.getLogger("comfy_zerocopy").addHandler(logging.NullHandler())
logging.getLogger("comfy_zerocopy").propagate = False


def until(condition, what):
    end = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.001)
    return value


def ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# ---- arrays ----


def turned(data):
    return data.translate(bytes(255 - i for i in range(256)))


def on_host(data):
    memory = bytearray(data)
    return Array(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), (len(data),), "uint8")


def on_device(data):
    x = zcx.empty((len(data),), "uint8", "cuda")
    x.copy_from(data)
    return x


MADE = (on_host,) if os.environ.get("FAULTS_HOST") else (on_host, on_device)  # of what a row has, by turns


class Live:
    """Arrays whose bytes are known, and must not change."""

    def __init__(self, n=3):
        self.pairs = []
        for _ in range(n):
            for make in MADE:
                data = os.urandom(N)
                self.pairs.append((make(data), data))

    def drop(self):
        """Every second one of each kind is this process's no longer."""
        self.pairs = [pair for i, pair in enumerate(self.pairs) if i // len(MADE) % 2 == 0]

    def check(self, what):
        for x, data in self.pairs:
            assert bytes(x.tobytes()) == data, f"{what}: {'host' if x.device is None else 'device'} memory changed"


# ---- stops ----


class Stop:
    """A place where a process waits: hold() is for at.c, path for worker.py. there(): it has come; go(): it may go on."""

    def __init__(self):
        self.path = str(folder / f"stop{next(numbers)}")
        self._fd = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def hold(self, point, nth="1"):
        return f"{point}|{nth}|hold={self.path}"

    def there(self):
        return os.path.exists(self.path + ".there")

    def go(self):
        if self._fd >= 0:
            os.mkdir(self.path + ".go")  # takes no descriptor
            os.close(self._fd)
            self._fd = -1


# ---- one row ----


def new_worker(**env):
    own = {"LD_PRELOAD": os.environ["FAULTS_LIBRARY"], "FAULTS": "", "FAULTS_IMPORT": None, "SIMCUDA_FAIL": DEMOTED, **env}
    return zcx.Worker(HERE / "worker.py", name=f"walked {next(numbers)}", timeout=40, env=own)


class Row:
    """What one row needs. worker: the one that is called; future: the call that runs, or None; live: what must not change.

    Some of what it lends it lets go of (drop) before the fault: this process's transfers hold the only reference then, and if they let go
    too early the memory is free. What is allocated at once (fresh) would get it. A worker that ends leaves a child which holds what it
    inherited until the row is over, so that nothing of that worker's may be given back while the row looks."""

    def __init__(self, fault, timeout=40.0):
        self.fault, self.timeout = fault, timeout
        self.live = Live()
        self.given = [data for _, data in self.live.pairs]  # what the last call was given
        self.lent = []  # the very list that it was given
        self.fresh = []
        self.exits = contextlib.ExitStack()
        self.stops, self.future, self.worker, self.pid = [], None, None, None
        self.options = {}  # more of the function's
        self.began = 0.0
        self.freed = lambda: None  # lets the parent's own stream go on
        self.child = None
        self.running = warm

    # ---- to get there ----

    def stop(self):
        self.stops.append(Stop())
        return self.stops[-1]

    def use(self):
        """A worker that runs already."""
        self.worker = self.running()
        self.pid = self.worker.pid
        self.fork()

    def fork(self):
        if self.fault != "parent exits":
            self.child = self.worker.call("child", str(folder))

    def start(self, **env):
        """One that the next call starts, with this in its environment."""
        self.worker = self.exits.enter_context(new_worker(**env))

    def lend(self):
        self.given, self.lent = [data for _, data in self.live.pairs], [x for x, _ in self.live.pairs]
        return self.lent

    def submit(self, **options):
        timeout = self.timeout if self.fault in ("timeout", "SIGSTOP") else SECONDS * 2
        self.began = time.monotonic()
        self.future = self.worker.submit("work", self.lend(), timeout=timeout, **self.options, **options)

    def drop(self):
        """When all of it is lent, and nobody walks the list any more."""
        self.live.drop()
        self.lent.clear()

    def reach(self, what, reached):
        until(lambda: reached() or self.future.done(), what)
        if self.future.done() and self.fault in ("timeout", "SIGSTOP") and isinstance(self.future.exception(0), zcx.CallTimeout):
            raise TooEarly
        until(reached, what)  # behind a RESULT that was sent the parent may be faster
        until(lambda: self.worker._session is not None or parent._all, "a process")
        self.pid = self.worker.pid or next(s.process.pid for s in parent._all if s.process.name == self.worker.name and not s.process.exited.is_set())

    def state(self):
        return self.worker.status()["state"]

    # ---- afterwards ----

    def end(self):
        """How the call ended, with what text, and its result. Nothing of it stays in this process: no traceback, no argument."""
        error = self.future.exception(SECONDS)
        found, text = (type(error).__name__, str(error)) if error is not None else ("result", "; ".join(map(str, self.worker.last_report.transfers)))
        got = self.future.result(0) if error is None else []
        call = weakref.ref(self.future)
        self.future = error = None
        self.live.drop()
        self.lent.clear()
        until(lambda: gc.collect() >= 0 and call() is None, "nobody refers to the call any more")
        return found, text, got

    def allocate(self):
        """At once: what a worker, or what it left behind, may still write to must not be given out again."""
        self.cure()
        gc.collect()
        self.fresh.append(Live(4))

    def release(self):
        self.freed()
        for s in self.stops:
            s.go()

    def cure(self):
        """What failed does not fail again."""
        self.freed()
        at.faults_arm(b"")
        if self.worker._env:
            self.worker._env.update(FAULTS="", FAULTS_RAISE=None, SIMCUDA_FAIL=DEMOTED)

    def orphan(self):
        """What a worker left behind ends: it is gone then."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        self.child = None

    def close(self):
        self.release()
        self.cure()
        self.orphan()
        self.exits.close()


class TooEarly(Exception):
    """The call's time was over before the state was reached."""


_warm = None


def warm():
    """The worker that rows use one after another: it has been called, and knows the device."""
    global _warm
    if _warm is None:
        _warm = new_worker()
    if not _warm.alive:
        right(_warm)
    return _warm


def right(w):
    live = Live(1)
    got = w.call("work", [x for x, _ in live.pairs])
    for (_, data), made in zip(live.pairs, got, strict=True):
        assert bytes(made.tobytes()) == turned(data), "a result's bytes"
    live.check("a call's inputs")


# ---- states ----

STATES = {}


def state(name):
    return lambda reach: STATES.setdefault(name, reach)


@state("NEW")
def _(row):
    stop = row.stop()
    at.faults_arm(stop.hold("send HELLO").encode())
    row.start()
    row.submit()
    row.reach("the parent is about to greet", stop.there)


@state("HELLO_SENT")
def _(row):
    stop = row.stop()
    row.start(FAULTS=stop.hold("recv HELLO"))
    row.submit()
    row.reach("the worker was greeted", stop.there)


@state("STARTING")
def _(row):
    stop = row.stop()
    row.start(FAULTS_IMPORT=stop.path)
    row.submit()
    row.reach("the target is being imported", stop.there)


@state("IDLE")
def _(row):
    row.use()


def held(name, point, nth="1", *, parents=False, fresh=False, complete=False):
    """A call that stops where at.c can stop it. complete: the parent has all that it waits for."""
    @state(name)
    def _(row):
        stop = row.stop()
        rule = stop.hold(point, nth)
        if fresh:
            row.start(FAULTS=rule)
            row.fork()
        else:
            row.use()
        if parents:
            at.faults_arm(rule.encode())
        elif not fresh:
            row.worker.call("arm", rule)
        row.submit()
        row.reach(point, stop.there)
        if complete:
            until(row.future.done, "DONE has arrived")


held("OFFERING", "recv POOL", fresh=True)
held("PROVING", "recv PROVE", fresh=True)
held("PREPARING", "send CALL", parents=True)
held("CALLING", "recv CALL")


@state("RETURNING")
def _(row):
    row.use()
    row.submit(busy=120_000_000)
    row.reach("the GPU is at work behind the result", lambda: row.state() == "returning")


@state("RETURNED")
def _(row):
    stop = row.stop()
    row.use()
    _pauses.append(stop)
    row.submit(pause=True)
    row.reach("the parent is taking the result", stop.there)
    assert row.state() == "returned"


class Pause:
    pass


_pauses = []


def _pause(_):
    stop = _pauses.pop()
    open(stop.path + ".there", "w").close()
    until(lambda: os.path.exists(stop.path + ".go"), "the row goes on")
    return Pause()


zcx.register(Pause, "test.pause", lambda o: None, _pause)


@state("BROKEN")
def _(row):
    """The worker is dead and not gone: a child of its holds what it inherited."""
    stop = row.stop()
    row.use()
    row.submit(running=stop.path)
    row.reach("the function runs", stop.there)
    row.drop()
    os.kill(row.pid, signal.SIGKILL)
    assert row.end()[0] == "WorkerDied"
    assert parent.counters()["quarantined"] >= len(row.given), parent.counters()


@state("waiting for READY")
def _(row):
    stop = row.stop()
    row.use()
    in_own_context(lambda: sim.simcuda_hold(None))
    row.freed = lambda: in_own_context(lambda: sim.simcuda_release(None))
    row.submit(running=stop.path)
    row.reach("the function runs", stop.there)


def in_own_context(call):
    context = ctypes.c_void_p()
    assert sim.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and sim.cuCtxPushCurrent_v2(context) == 0
    assert call() == 0
    assert sim.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


held("mapping", "cuMemPoolImportPointer")


def resting(name, where):
    @state(name)
    def _(row):
        stop = row.stop()
        row.use()
        row.submit(**{where: stop.path})
        row.reach(f"the function is {where}", stop.there)


resting("function running", "running")
held("ALLOC asked", "sent ALLOC")
resting("filling", "filling")
held("un-importing", "cuMemFreeAsync")
held("DONE posted", "send RESULT", "2")  # the first is that of the call that arms
held("RESULT sent", "sent RESULT", "2", complete=True)


@state("KEPT")
def _(row):
    row.use()
    got = row.worker.call("work", row.lend(), keep=True)
    row.live.pairs += [(made, turned(data)) for made, (_, data) in zip(got, list(row.live.pairs), strict=True)]
    only(row, "kept")


def only(row, what):
    until(lambda: row.worker.status()[what] == len(row.live.pairs), f"just these are {what}")
    row.drop()


@state("lease held")
def _(row):
    row.use()
    row.exits.enter_context(row.worker.lease(row.lend()))
    only(row, "leased")


# ---- faults from outside ----

DEATHS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "os._exit": EXIT, "socket closed": CLOSE}
SAYS = {"SIGKILL": "killed by SIGKILL", "SIGSEGV": "killed by SIGSEGV", "os._exit": "exit status 41"}  # of WorkerDied, beside what the table says
PARENTS_STOP = ("NEW", "PREPARING", "RETURNED")  # where it is the parent that is stopped
NOT_LENT = ("NEW", "HELLO_SENT", "STARTING", "IDLE", "OFFERING", "PROVING")  # nothing, or not all


def outside(row, state):
    STATES[state](row)
    if state not in (*NOT_LENT, "KEPT", "lease held"):
        row.drop()
    if row.fault == "timeout":
        if state in PARENTS_STOP:
            until(lambda: time.monotonic() > row.began + row.timeout, "its time is over")
            row.release()
        return
    if row.fault == "cancel":
        assert row.future.cancel() or state == "RETURNED"
        if state in ("NEW", "HELLO_SENT", "STARTING", *PARENTS_STOP):
            row.release()
        return
    if DEATHS.get(row.fault, 0) >= EXIT:
        until(lambda: listens(row.pid), "at.c is there")
    os.kill(row.pid, DEATHS.get(row.fault, signal.SIGSTOP))
    if row.fault == "socket closed" and state != "waiting for READY":
        row.release()  # it finds out, and leaves
    elif row.fault == "socket closed":
        for s in row.stops:
            s.go()
    if row.fault == "SIGSTOP":
        until(lambda: pathlib.Path(f"/proc/{row.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        if state in PARENTS_STOP:
            row.release()
    else:
        until(lambda: ended(row.pid), "it has ended")
        for s in row.stops:
            s.go()  # another worker may come by
        if row.future is None:
            until(lambda: not row.worker.alive, "its end was noticed")


def listens(pid):
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(caught[1], 16) >> (CLOSE - 1) & 1


def child_ends(row, state):
    """What a child of the dead worker's kept from being given back is given back when it ends."""
    STATES[state](row)
    right(row.worker)
    assert parent.counters()["quarantined"], "it is still held"
    row.live.check("what is quarantined")
    row.allocate()
    row.orphan()


# ---- faults of one call ----

INSIDE = {}


def inside(*where):
    return lambda f: INSIDE.update({(state, fault): f for state, fault in where}) or f


@contextlib.contextmanager
def few():
    """No descriptor can be opened in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def rest_all():
    """Nothing is kept warm: what is needed next has to be made."""
    for s in list(parent._all):
        with s.busy:
            if s.parent is not None:
                s.parent.rest()


def wait(row):
    with contextlib.suppress(BaseException):
        row.future.result(SECONDS)


@inside(("NEW", "fd limit"))
def no_descriptor_for_a_process(row):
    row.start()
    with few():
        row.submit()
        wait(row)


def parent_refused(*where, rule, fresh=False, **options):
    """A call of this process's fails."""
    @inside(*where)
    def _(row):
        if fresh:
            row.start()
        else:
            row.use()
        rest_all()
        at.faults_arm(rule.encode())
        row.submit(**options)
        wait(row)
        row.pid = row.pid or row.worker.pid
    _.__name__ = "parent_refused"


def worker_refused(*where, rule, **options):
    """A call of a worker's fails, which has run before."""
    @inside(*where)
    def _(row):
        row.use()
        row.worker.call("arm", rule)
        row.submit(**options)
        wait(row)
    _.__name__ = "worker_refused"


def fresh_worker(*where, **env):
    """One in whose environment it stands."""
    @inside(*where)
    def _(row):
        row.start(**env)
        row.submit()
        wait(row)
        row.pid = row.worker.pid
    _.__name__ = "fresh_worker"


parent_refused(("NEW", "memfd full"), rule="memfd_create|1|refuse=28", fresh=True)
parent_refused(("NEW", "memory"), rule="mmap|1|refuse=12", fresh=True)
fresh_worker(("HELLO_SENT", "fd limit"), FAULTS="sent HELLO|1|fds")
fresh_worker(("STARTING", "exception"), FAULTS_RAISE="1")
fresh_worker(("STARTING", "fd limit"), FAULTS="sent STARTED|1|fds")
fresh_worker(("OFFERING", "driver"), SIMCUDA_FAIL="cuMemPoolImportFromShareableHandle:1:801")
fresh_worker(("OFFERING", "memory"), SIMCUDA_FAIL="cuMemHostRegister:1:2")
fresh_worker(("PROVING", "driver"), SIMCUDA_FAIL="cuMemPoolImportPointer:1:999")
parent_refused(("PROVING", "memory"), rule="cuMemAllocFromPoolAsync|1|refuse=2", fresh=True)
parent_refused(("PREPARING", "driver"), rule="cuMemPoolExportPointer|1|refuse=999")
parent_refused(("PREPARING", "memfd full"), rule="fallocate|1+|refuse=28")
parent_refused(("PREPARING", "memory"), rule="mmap|1+|refuse=12")
parent_refused(("CALLING", "driver"), rule="cuMemAllocFromPoolAsync|1|refuse=999")
parent_refused(("CALLING", "memory"), rule="cuMemAllocFromPoolAsync|1|refuse=2")
parent_refused(("CALLING", "memfd full"), rule="fallocate|2+|refuse=28")  # the first is the input segment's
worker_refused(("mapping", "driver"), rule="cuMemPoolImportPointer|1|refuse=999")
worker_refused(("mapping", "memory"), rule="mmap|1|refuse=12")
worker_refused(("waiting for READY", "driver"), rule="cuStreamWaitValue64|1|refuse=999")
worker_refused(("function running", "exception"), rule="", error="running")
worker_refused(("ALLOC asked", "driver"), rule="cuMemPoolImportPointer|4|refuse=999")
worker_refused(("ALLOC asked", "memory"), rule="mmap|4|refuse=12")
worker_refused(("filling", "exception"), rule="", error="filling")
worker_refused(("filling", "driver"), rule="", error="fault")
worker_refused(("un-importing", "driver"), rule="cuMemFreeAsync|1|refuse=999")
worker_refused(("DONE posted", "driver"), rule="cuStreamWriteValue64|1|refuse=999")
worker_refused(("DONE posted", "memfd full"), rule="memfd_create|1|refuse=28", tree=100_000)
worker_refused(("DONE posted", "memory"), rule="memfd_create|1|refuse=12", tree=100_000)


@inside(("OFFERING", "fd limit"))
def the_worker_can_take_no_descriptor(row):
    row.start()
    row.worker.call("arm", "sent RESULT|1|fds")
    row.pid = row.worker.pid
    row.submit()
    wait(row)


@inside(("PREPARING", "fd limit"))
def no_descriptor_for_an_input(row):
    row.use()
    rest_all()
    with few():
        row.submit()
        wait(row)


@inside(("CALLING", "fd limit"))
def no_descriptor_for_the_answer(row):
    stop = row.stop()
    row.use()
    row.submit(running=stop.path, tree=100_000)
    row.reach("the function runs", stop.there)
    with few():
        row.release()
        wait(row)


@inside(("IDLE", "fd limit"))
def an_idle_worker_can_take_no_descriptor(row):
    row.use()  # it ends by that
    rest_all()
    row.worker.call("work", [], few=True)
    row.submit()
    wait(row)


@inside(("IDLE", "driver"))
def the_context_is_lost_while_idle(row):
    row.use()
    row.worker.call("fault")
    row.submit()
    wait(row)


@inside(("RETURNING", "driver"))
def the_context_is_lost_behind_the_result(row):
    stop = row.stop()
    row.use()
    row.submit(busy=120_000_000, late=stop.path)
    row.reach("DONE is awaited", lambda: row.state() == "returning")
    row.release()
    wait(row)


@inside(("waiting for READY", "exception"))
def an_exception_before_READY(row):
    row.options["error"] = "running"
    STATES["waiting for READY"](row)
    for s in row.stops:
        s.go()
    until(lambda: row.state() == "returning", "it was raised, and DONE is awaited")
    row.release()


@inside(("function running", "fd limit"))
def whether_it_was_edited_cannot_be_seen(row):
    row.start()
    right(row.worker)
    row.pid = row.worker.pid
    row.future = row.worker.submit("work", [x for x, _ in row.live.pairs], few="inputs")
    wait(row)
    for made, (x, data) in zip(row.future.result(0), row.live.pairs, strict=True):
        assert bytes(made.tobytes()) == data and (made is not x or x.device is not None)
    row.worker.kill()


@inside(("DONE posted", "fd limit"))
def no_descriptor_for_the_result(row):
    row.start()
    right(row.worker)
    row.pid = row.worker.pid
    row.submit(few=True, tree=100_000)
    wait(row)


@inside(("KEPT", "driver"))
def a_kept_import_cannot_be_given_up(row):
    STATES["KEPT"](row)
    row.worker.call("arm", "cuMemFreeAsync|1|refuse=999")
    row.worker.call("forget")
    until(lambda: not row.worker.alive, "it leaves")


# ---- what must follow ----

ENOUGH = 64  # more events than an arena keeps for its next use


def baseline():
    """What this process holds when one worker is idle and nothing is lent or kept warm."""
    gc.collect()
    rest_all()
    zcx.reclaim()
    counters = parent.counters()
    return {"descriptors": len(os.listdir("/proc/self/fd")), "mappings": pathlib.Path("/proc/self/maps").read_text().count("memfd:zcx"),
            "sessions": len(parent._all), "events": max(sim.simcuda_count(b"events"), ENOUGH),
            **{n: counters.get(n, 0) for n in ("workers", "transfers", "kept", "leased", "quarantined")},
            **{n: sim.simcuda_count(n.encode()) for n in ("allocations", "imports", "registered", "streams")}}


_first = None


def settled():
    """baseline(), when one worker is idle and of others nothing is left."""
    registered = sim.simcuda_count(b"registered")
    if MADE[-1] is on_device:
        with new_worker(SIMCUDA_FAIL="cuMemPoolImportPointer:1:999") as w:
            right(w)  # by the next rung, whose arena stays
    until(lambda: not parent.counters()["transfers"], "what was let go of a moment too late is released")
    until(lambda: len(parent._all) == 1 and sim.simcuda_count(b"registered") == registered, "its session is over")
    kept = threading.Event()
    process.keeper().do(kept.set)  # behind the end of that session, which comes in the same thread
    assert kept.wait(SECONDS)
    return baseline()


def walk(state, fault, test, outcome, says, worker):
    """One row; AssertionError if it does not hold."""
    global _first
    right(warm())
    if _first is None:
        _first = settled()
    for timeout in (0.25, 1.0, 4.0):
        row = Row(fault, timeout)
        try:
            run(row, state, fault, test, outcome, says, worker)
            break
        except TooEarly:
            continue
        finally:
            row.close()
            del row
    right(warm())
    try:
        until(lambda: baseline() == _first, "all as before")
    except AssertionError:
        raise AssertionError({k: (was, now) for (k, was), now in zip(_first.items(), baseline().values(), strict=True) if was != now}) from None


def run(row, state, fault, test, outcome, says, worker):
    action = INSIDE.get((state, fault), outside) if state != "BROKEN" else child_ends
    assert action.__name__ == test, f"this row is walked by {action.__name__}, the table names {test}"
    action(row, state) if action in (outside, child_ends) else action(row)
    pid = row.pid
    if row.future is None:
        row.allocate()
        row.submit()
    found, text, got = row.end()
    row.allocate()
    assert found == outcome, f"{found} ({text}), the table says {outcome}"
    for part in (*says, *([SAYS[fault]] if outcome == "WorkerDied" and fault in SAYS else [])):
        assert part in text, f"{part!r} is not in {text!r}"
    if test != "whether_it_was_edited_cannot_be_seen":
        for made, data in zip(got, row.given, strict=False):
            assert bytes(made.tobytes()) == turned(data), "the result's bytes"
    row.release()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    if row.fault in DEATHS:
        until(lambda: row.worker.pid != pid, "its end was noticed")
    right(row.worker)
    assert (row.worker.pid == pid) is (worker == "kept"), f"the worker was {'kept' if row.worker.pid == pid else 'replaced'}, the table says {worker}"
    row.live.check("what the call was given")
    row.orphan()
    for live in row.fresh:
        live.check("what was allocated at once")
    if row.worker.status()["kept"] and state == "KEPT":
        row.worker.call("forget")
        until(lambda: not row.worker.status()["kept"], "it lets go")
    assert sim.simcuda_races() == 0


def answer():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        begun = time.monotonic()
        try:
            walk(**json.loads(line))
            found = ""
        except BaseException:
            found = traceback.format_exc()
        print(json.dumps({"error": found, "seconds": round(time.monotonic() - begun, 3)}), file=out, flush=True)


def parents(states):
    """A worker in each state; which processes there are; and no end."""
    global SECONDS
    SECONDS = canary.SECONDS = canary.OPEN_SECONDS = 600.0
    rows, pids = [], {}

    def another():
        w = row.exits.enter_context(new_worker())
        right(w)
        pids[name] = [w.call("child", str(folder))]
        return w

    for name in sorted(states, key=lambda name: name == "waiting for READY"):  # which holds this process's own stream
        row = Row("parent exits")
        row.running = another
        rows.append(row)
        STATES[name](row)
        pids.setdefault(name, []).append(row.pid or row.worker.pid)
    print(json.dumps(pids), flush=True)
    signal.pause()


if __name__ == "__main__":
    parents(sys.argv[2:]) if sys.argv[1:2] == ["parents"] else answer()
