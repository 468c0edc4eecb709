"""The parent's side: a Worker is a process whose functions are called with tensors that do not get copied.

A call lends its inputs, allocates each result when the worker asks for it, and returns when the parent's CPU has seen that the
worker's GPU work is complete: what comes back is ordinary memory of this process. Which way a tensor crosses is chosen
per tensor, by what its memory is (ladder.py), and every transfer is reported with its rung and the reason if it was a copy.
Does not: order GPU work or free memory (the session in C does), start processes (process.py does), swap pools (_install does).
"""
from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import errno
import itertools
import logging
import os
import pathlib
import platform
import queue
import signal
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from . import __version__, _native, canary, config, ladder, process, quota, room, tensor, tree
from .array import ArenaMemory
from .errors import (
    CallTimeout,
    Cancelled,
    CudaError,
    Error,
    InputModified,
    KeptTooMuch,
    PayloadTooLarge,
    ProtocolError,
    RemoteError,
    ResultTooLarge,
    UnsupportedPlatform,
    UnsupportedType,
    WorkerDied,
)

_log = logging.getLogger("comfy_zerocopy")
_GRACE = 5.0  # seconds that a worker gets to stop after a cancel, before it is replaced
_KEPT_POLL = 0.2  # seconds between looks for the release of what an idle worker keeps
_RELEASE = 0.2  # seconds that a release may be on its way, before a worker that keeps too much is said to do so
_REST = 30.0  # seconds without a call after which memory that is only kept for speed is given back
_BYE = 5.0  # seconds that a worker gets to end by itself


def _arena_pending(arena: Any) -> None:
    """From a finalizer, of any thread: memory of the arena waits for GPU work. Look again until it went back to the device."""
    keeper = process.running()  # without one, no worker was ever started: the next allocation looks again

    def look() -> None:
        if arena.trim(False)[0] and keeper is not None:
            keeper.later(0.005, look)

    if keeper is not None:
        keeper.do(look)


ArenaMemory.on_pending = staticmethod(_arena_pending)


class Transfer(NamedTuple):
    """How one buffer crossed in the last call."""

    direction: str  # "input" or "result"
    nbytes: int
    rung: str  # "pool", "vmm", "staged" or "host": ladder.py says what they are
    copied: bool
    reason: str  # why it was copied, or what is to be known of it although it was not; mostly empty

    def __str__(self) -> str:
        return f"{self.direction} of {self.nbytes} bytes: " + (f"copied, because {self.reason}" if self.copied
                                                                  else f"shared ({self.rung}{', ' * bool(self.reason)}{self.reason})")


class Report(NamedTuple):
    """What one call moved, and what the worker's code kept of it and of earlier ones."""

    transfers: tuple[Transfer, ...]
    kept: tuple[quota.Kept, ...] = ()


class _Enough(Exception):
    """Ends a wait of ours from its callback."""


class _Ticket:
    """One asker's place in the line for a _Turn."""

    __slots__ = ("wake",)

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()


class _Turn:
    """A lock that is given in the order of asking, with a deadline. Who has it is one reference, so that an interrupt between
    any two steps leaves it with its ticket or without: give() in a `finally` is right in either case."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()  # from before they take it until after they gave it
        self._holder: _Ticket | None = None
        self._queue: collections.deque[_Ticket] = collections.deque()

    @property
    def held(self) -> bool:
        return self._holder is not None

    def require_free(self, what: str) -> None:
        """Who has the turn would wait for itself: callbacks, hooks and finalizers run in the midst of a call."""
        if threading.get_ident() in self._threads:
            raise Error(f"{what} from within a call of the same worker")

    def take(self, mine: _Ticket, deadline: float | None) -> bool:
        """True with the turn; False at the deadline (time.monotonic). give() must follow in every case."""
        self._threads.add(threading.get_ident())
        with self._lock:
            self._queue.append(mine)
        while True:
            with self._lock:
                if self._holder is None:
                    self._holder = self._queue.popleft()
                    self._holder.wake.release()
                if self._holder is mine:
                    return True
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            mine.wake.acquire(timeout=min(left, 1.0))  # looks again now and then: a wake that an interrupt swallowed

    def give(self, mine: _Ticket) -> None:
        """Out of the line, or on to the next in it."""
        with self._lock:
            if mine in self._queue:
                self._queue.remove(mine)
            if self._holder is mine:
                self._holder = self._queue.popleft() if self._queue else None
                if self._holder is not None:
                    self._holder.wake.release()
        self._threads.discard(threading.get_ident())


class _Session:
    """A started worker: process, session, handles. Replaced as a whole when it dies."""

    def __init__(self, owner: Worker) -> None:
        self.busy = threading.Lock()  # held by the thread that drives the session; the keeper releases nothing under it
        self.watching = self.resting = False
        self.tended = False  # the keeper has `busy`, without the turn
        self.called = 0.0  # time.monotonic() of the last call's end
        self.handles: tree.Handles | None = None
        self.functions: dict[int, str] = {}  # by call: of those that may have left something kept
        self.over: dict[int | None, int] = {}  # by place: bytes kept above the quota, when the last call ended
        self.parent: Any = None
        self.pools = canary.Pools(owner.name, owner._demoted)
        with self.busy:  # from before the process exists: it can be gone before there is anything to take apart
            self.process = process.Process([owner._target], python=owner._python, env=owner._env, cwd=owner._cwd, name=owner.name,
                                           on_gone=self._gone)
            self.pools.pid = self.process.pid
            with _all_lock:
                _all.add(self)
            z = _native.zcx()
            try:
                self.parent = z.Parent(self.process.sock, self.process.control, self.process.pidfd)
            except BaseException:
                self.process.kill()
                raise
            self.handles = tree.Handles("p", f"worker {owner.name}", self.parent.drop_handle)

    def usable(self) -> bool:
        parent = self.parent
        return not self.process.exited.is_set() and parent is not None and parent.state == "idle" and not self.pools.unfinished

    def after_call(self) -> None:
        """While the worker keeps buffers, hear of their release also when nobody calls it; and when nobody has called for a
        while, give back what host memory is only kept to make the next call faster."""
        self.called = time.monotonic()
        if not self.watching and self._holds(self.parent):
            self.watching = True
            process.keeper().do(lambda: process.keeper().later(_KEPT_POLL, self._look_idle))
        if not self.resting:
            self.resting = True
            process.keeper().do(lambda: process.keeper().later(_REST, self._rest))

    @staticmethod
    def _holds(parent: Any) -> bool:
        stats = parent.stats()
        return bool(stats["kept"] or stats["leased"])

    def kept(self) -> tuple[quota.Kept, ...]:
        """What the worker's code still refers to, without a lease. By the thread whose turn it is."""
        parent = self.parent
        rows = parent.kept() if parent is not None else []
        self.functions = {row[0]: self.functions[row[0]] for row in rows}
        found: dict[tuple[str, int | None], tuple[int, int]] = {}
        for seq, ordinal, count, nbytes in rows:
            key = (self.functions[seq], None if ordinal < 0 else ordinal)
            before = found.get(key, (0, 0))
            found[key] = (before[0] + count, before[1] + nbytes)
        return tuple(quota.Kept(*key, *sums) for key, sums in found.items())

    def hear(self, enough: Callable[[], Any], seconds: float) -> None:
        """Take in what an idle worker has to say, until it is enough."""
        def look(event: tuple[Any, ...]) -> None:
            self._on_idle(event)
            if enough():
                raise _Enough

        with self.busy, contextlib.suppress(_Enough):
            if not enough():  # the keeper may have heard it
                self.parent.run(_ns(time.monotonic() + seconds), look)

    def _rest(self) -> None:
        """Keeper's thread."""
        parent, left = self.parent, self.called + _REST - time.monotonic()
        if parent is None:
            return

        def rest() -> None:
            self.resting = False  # before the next call can begin, whose end looks at it
            parent.rest()

        if left > 0 or not self._tend(rest):
            process.keeper().later(max(left, 1.0), self._rest)

    def _look_idle(self) -> None:
        """Keeper's thread. A caller that drives the session hears of it itself."""
        parent = self.parent
        if parent is None or self.process.exited.is_set():
            return
        try:
            self._tend(lambda: parent.state == "idle" and parent.run(time.monotonic_ns(), self._on_idle))
        except _native.zcx().Failure as failure:
            _log.warning("comfy_zerocopy: worker %s: %s", self.process.name, failure)
            self.process.kill()
            return
        if self._holds(parent):
            process.keeper().later(_KEPT_POLL, self._look_idle)
        else:
            self.watching = False

    def _tend(self, what: Callable[[], Any]) -> bool:
        """Keeper's thread: drive the session for a moment if nobody does. A finalizer that comes meanwhile, in this thread, must not wait."""
        if not self.busy.acquire(blocking=False):
            return False
        self.tended = True
        try:
            what()
        finally:
            self.tended = False
            self.busy.release()
        return True

    def rest_now(self) -> int:
        """Keeper's thread: what is kept for the next call goes, if none runs; the bytes of host memory."""
        parent, freed = self.parent, 0

        def rest() -> None:
            nonlocal freed
            before = parent.stats()
            parent.rest()
            after = parent.stats()
            freed = sum(max(before[what] - after[what], 0) for what in ("input_bytes", "warm_bytes"))

        if parent is not None:
            self._tend(rest)
        return freed

    def _on_idle(self, event: tuple[Any, ...]) -> None:
        if event[0] == "handle_drop" and self.handles is not None:
            self.handles.forget(event[1])

    def _gone(self) -> None:
        """Keeper's thread: nothing can touch what was lent any more. A caller that still drives the session leaves first."""
        if self.parent is not None:
            self.parent.shutdown()
        if not self.busy.acquire(blocking=False):
            process.keeper().later(0.005, self._gone)
            return
        try:
            if self.handles is not None:
                self.handles.close()
            if self.parent is not None:
                self.parent.gone()
        finally:
            self.busy.release()
        self.process.release()
        with _all_lock:
            _all.discard(self)
        self._let_go()

    def _let_go(self, tries: int = 0) -> None:
        """A stream of ours may still have READY to post into the session's page: it stays mapped until then. A worker that
        wrote nonsense there can make that look unfinished for ever: the page is left behind then, after a minute."""
        if self.parent is None or self.parent.idle() or tries == 1200:
            self.parent = None
        else:
            process.keeper().later(0.05, lambda: self._let_go(tries + 1))


class Worker:
    """A worker process. Starts with the first call, and again with the next call after it died.

    target: a module's name, or the path of a .py file, that uses comfy_zerocopy.worker.expose. A relative path is taken from
        this process's working directory, not from the caller's file: in a node pack, pathlib.Path(__file__).with_name("w.py").
    python: the interpreter (default: this one), as a path, or as a name on PATH. 3.11 or newer needs nothing installed, the package is
        lent to it; 3.10 only if this process runs 3.10 too, or if the package is installed in that environment.
    env: changes to this process's environment (None removes a variable). cwd: its working directory. name: for logs.
    timeout: seconds for each call that names none; None: no limit. It covers waiting for the worker's turn and its start, but not what
        a submitted call waits for those that were submitted before it.
    max_result_bytes: all results of one call together; None: as the configuration says, else what the machine can hold.
    max_kept_bytes: what the worker's code may go on referring to when the calls that lent it are over, of host memory and of each GPU's;
        None: as the configuration says, else a quarter of the machine's memory, and of the GPU's. What lease() holds does not count.
    on_progress: called as on_progress(done, total, message) in the calling thread; what it raises stops the call, and call()
        raises it.

    Attributes: name; pid, alive; on_progress; last_report: a Report, whose `transfers` say how each buffer of the last call
    crossed (of a call that failed: what it had lent by then; a call that failed before anything was lent leaves none), and whose `kept`
    says what the worker's code holds on to.

    What a worker prints goes to logging, "comfy_zerocopy.worker." + name: stdout at INFO, stderr at WARNING.

    Raises UnsupportedPlatform where workers cannot run. Calls may come from any thread; they are taken in order, one at a
    time. A context manager: leaving it closes the worker."""

    def __init__(self, target: str | os.PathLike[str], *, python: str | os.PathLike[str] | None = None,
                 env: Mapping[str, str | None] | None = None, cwd: str | os.PathLike[str] | None = None, name: str | None = None,
                 timeout: float | None = None, max_result_bytes: int | None = None, max_kept_bytes: int | None = None,
                 on_progress: Callable[[float, float, str], Any] | None = None) -> None:
        _native.require()
        target = _path("target", target, "a module's name, or the path of a .py file")
        if not target:
            raise ValueError("target is empty: name a module, or the path of a .py file")
        if target.endswith(".py"):
            target = os.path.abspath(target)  # the worker may have another working directory
        if python is not None:
            python = _path("python", python, "an interpreter's path, or its name on PATH, or None")
            if os.sep in python:
                python = os.path.abspath(python)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is a str or None, not a {type(name).__qualname__}")
        self._target, self._python = target, python
        self._env = _environment(env)
        self._cwd = os.path.abspath(_path("cwd", cwd, "a folder's path or None")) if cwd is not None else None
        self.name = name or pathlib.Path(target).stem
        settings = config.load()
        self._max_result_bytes = _limit("max_result_bytes", max_result_bytes, settings.max_result_bytes)
        self._max_kept_bytes = _limit("max_kept_bytes", max_kept_bytes, settings.max_kept_bytes)
        self._timeout, self.on_progress = _seconds(timeout), on_progress
        self._turn = _Turn()
        self._box: list[_Session | None] = [None]
        # A worker that is dropped without close() does not keep its process.
        weakref.finalize(self, _abandon, self._box).atexit = False
        self._closed = False
        self._foreign = False  # a copy in a forked child: the process and its locks are the parent's
        self._queue = _Queue(self)
        self._demoted = canary.Verdicts()
        self.last_report = Report(())
        _workers.add(self)

    # ---- life ----

    @property
    def _session(self) -> _Session | None:
        return self._box[0]

    @_session.setter
    def _session(self, session: _Session | None) -> None:
        self._box[0] = session

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<comfy_zerocopy.Worker {self.name!r} {'closed' if self._closed else f'pid {self.pid}' if self.alive else 'not running'}>"

    @property
    def pid(self) -> int | None:
        """Of the process that runs now, else None."""
        s = self._session
        return s.process.pid if s is not None and not s.process.exited.is_set() else None

    @property
    def alive(self) -> bool:
        """Does the process run now? A worker that was not called yet has none."""
        return self.pid is not None

    def status(self) -> dict[str, Any]:
        """name, pid, alive, state; pools, windows, vmm and copies, by device: "proved", or why they are not used; and of the session:

        calls (so far), transfers (buffers that are lent now), kept and kept_bytes (of these, what the worker's code still refers to after
        its call, and kept_device_bytes of them on GPUs), leased and leased_bytes (what lease() holds), quarantined (buffers not given back
        before the worker is gone), result_bytes (host results in use), warm_bytes (host memory kept for the next result), input_bytes (host
        memory that copied inputs lie in), handles (objects of this process that the worker holds handles to; handles to the worker's objects
        are counted there, not here)."""
        s = self._session
        found: dict[str, Any] = {"name": self.name, "pid": self.pid, "alive": self.alive, "state": "closed" if self._closed else "not started",
                                 **(s.pools if s is not None else self._demoted).status()}
        parent = s.parent if s is not None else None  # the keeper lets go of it when the worker is gone
        if s is not None and parent is not None:
            found["state"] = parent.state if self.alive else "dead"
            found.update(parent.stats())
            found["handles"] = len(s.handles or ())
        return found

    def close(self) -> None:
        """Let the running call end, say goodbye, and end the process. Idempotent; a later call is an error."""
        self._require_free(f"worker {self.name} cannot be closed")
        self._closed = True  # what is submitted from here on is refused
        if self._foreign or _exiting:
            return
        self._queue.close()
        mine = _Ticket()
        try:
            self._turn.take(mine, None)
            s, self._session = self._session, None
            if s is not None:
                _end(s)
        finally:
            self._turn.give(mine)

    def kill(self) -> None:
        """End the process and wait until it was reaped. A call that runs raises WorkerDied; the next call starts a new process."""
        s = self._session
        if s is not None and not self._foreign:  # a fork would wait for an end that it cannot see
            s.pools.killed = True
            s.process.kill()
            s.process.wait(_BYE)

    # ---- calls ----

    def call(self, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Run the worker's exposed function and return what it returns: tensors are ordinary ones of this process.

        Raises RemoteError (the function raised), WorkerDied, CallTimeout, Cancelled, UnsupportedType, PayloadTooLarge,
        InputModified, KeptTooMuch, ResultTooLarge, ProtocolError, CudaError; torch.cuda.OutOfMemoryError or MemoryError for a lack of
        memory on either side. `timeout` (seconds) replaces the worker's own."""
        return self._call(function, args, kwargs, timeout, tensor.current_streams(), None)

    def submit(self, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """call() in the background. GPU inputs are read when the work that is queued *now* on this thread's current streams is
        done. cancel() reaches the worker while it runs. Futures of one worker run in the order of submission."""
        self._require_own()
        _seconds(timeout)
        self._require_open()
        return self._queue.put(function, args, kwargs, timeout, tensor.current_streams())

    @contextlib.contextmanager
    def lease(self, tensor: Any) -> Iterator[None]:
        """While it is open, the tensor (or a tree of them) stays imported in the worker: calls in it need not import a shared GPU
        tensor again. It spares no copies: what is ordinary memory of this process is copied by each call all the same. It ends with
        the worker: a worker that died holds no lease.

        Raises what call() raises when the lease begins; its end raises nothing."""
        number = next(_numbers)
        self.call("zcx.lease", number, tensor)
        session = self._session
        try:
            yield
        finally:
            if not self._closed and session is not None:
                with contextlib.suppress(Error):  # it died: then the lease is over too
                    self._call("zcx.unlease", (number,), {}, None, {}, None, only=session)

    def _call(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, streams: dict[int, Any],
              running: _Running | None, only: _Session | None = None) -> Any:
        """only: nothing is done if that session is over."""
        if not isinstance(function, str):
            raise TypeError(f"the function is named by a str, not by {type(function).__qualname__}")
        self._require_own()
        timeout = self._timeout if timeout is None else _seconds(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._require_open()
        self._require_free(f"{self.name}.{function} cannot be called")
        mine = _Ticket()
        try:
            if not self._turn.take(mine, deadline):
                raise CallTimeout(f"{self.name}.{function}: the worker was busy with other calls for {timeout} s")
            self._require_open()
            if only is not None and not (self._session is only and only.usable()):
                return None
            while True:
                self.last_report = Report(())  # a call that fails early must not show what another one moved
                session = only if only is not None else self._started(deadline, timeout)
                call = _Call(self, session, function, streams, deadline, timeout)
                if running is not None:
                    running.bind(call)
                try:
                    value = call.run(args, kwargs)
                except canary.Stuck as stuck:
                    # The rung is demoted, so this comes once per check and device, or a few times (pardon); the function has not
                    # begun, or may have.
                    if stuck.died and session.process.wait(1.0) and session.process.describe()["signal"] == signal.SIGKILL:
                        self._demoted.pardon(stuck)
                    session.process.kill()
                    self._session = None
                    if call.sent:
                        session.process.wait(_BYE)
                        raise WorkerDied(f"worker {self.name}: {stuck}, in the midst of a call; the next one does without",
                                         **session.process.describe(), state="running") from None
                except BaseException:
                    self._hold_to_quota(session, function, failed=True)
                    raise
                else:
                    self._hold_to_quota(session, function, failed=False)
                    return value
        finally:
            self._turn.give(mine)

    def _hold_to_quota(self, session: _Session, function: str, failed: bool) -> None:
        """A call is over: what the worker's code keeps is bounded. A call that failed already fails with its own error."""
        if self._session is not session or not session.usable():
            return  # it was ended: all comes back
        over = self._over(session) if self.last_report.kept else {}
        before, session.over = session.over, over
        if not over or function.startswith("zcx."):
            return
        grows = any(nbytes > before.get(device, nbytes) for device, nbytes in over.items())
        text = f"worker {self.name}, after {function}: {quota.say(self.last_report.kept, over, self._max_kept_bytes)}."
        if grows:  # said before, and it went on
            session.process.kill()
            self._session = None
            text += " It was told so before and kept still more, so the worker was ended: the next call starts another"
        if failed:
            _log.warning("comfy_zerocopy: %s", text)
        else:
            raise KeptTooMuch(text + f"{'.' * grows} What {function} returned was dropped", self.last_report.kept)

    def _over(self, session: _Session) -> dict[int | None, int]:
        """By place: what is kept above the quota, when what is on its way back has come, and cycles are collected in the worker."""
        def over() -> dict[int | None, int]:
            return quota.excess(session.kept(), self._max_kept_bytes)

        def enough() -> bool:
            return not over()

        report = self.last_report
        if enough():
            return {}
        try:
            session.hear(enough, _RELEASE)
            if not enough():
                _Call(self, session, "zcx.collect", {}, time.monotonic() + _GRACE, _GRACE).run((), {})
                session.hear(enough, _RELEASE)
        except (Error, _native.zcx().Failure):  # it died, so that all comes back
            return {}
        finally:
            self.last_report = report._replace(kept=session.kept())
        return over()

    def _prove_windows(self, pool: Any) -> str:
        """For canary.sacrifice(): "" or why windows cannot be used, tried in this worker's process."""
        deadline = time.monotonic() + canary.OPEN_SECONDS
        session = self._started(deadline, canary.OPEN_SECONDS)
        call = _Call(self, session, "windows check", {}, None, None)
        with session.busy:
            try:
                index, why = session.pools.open(session.parent, pool, call._until)
                return why if index is None else session.pools.check_windows(session.parent, pool, call._until)
            except canary.Stuck as stuck:
                died = session.process.wait(0.2)  # its socket ends a moment before it does
                session.process.kill()
                return f"{stuck}: a process that tried it {canary.ending(session.process.describe())}" if died else str(stuck)

    def _require_open(self) -> None:
        if self._closed:
            raise Error(f"worker {self.name} is closed: make another one")
        if _exiting:
            raise Error(f"worker {self.name} cannot be called any more: this process ends, and its workers have ended")

    def _require_free(self, what: str) -> None:
        self._turn.require_free(what)
        s, keeper = self._session, process.running()
        if s is not None and s.tended and keeper is not None and keeper.here():
            raise Error(f"{what} from a finalizer that comes while that worker is looked after")

    def _require_own(self) -> None:
        if self._foreign:
            raise Error(f"worker {self.name} belongs to the process that started it, not to its fork: make another one here")

    def _after_fork(self) -> None:
        """In the child. One that was never used is as good as new; locks may have been held by threads that are not here."""
        self._foreign = self._foreign or self._session is not None or self._turn.held
        self._turn, self._queue = _Turn(), _Queue(self)

    def _started(self, deadline: float | None, timeout: float | None) -> _Session:
        """Holding the turn: the running session, or a new one."""
        s = self._session
        if s is not None and s.usable():
            return s
        if s is not None:
            self._session = None
            s.process.kill()
        running = sys.modules.get(f"{__package__}.worker")
        if getattr(running, "importing", False):
            raise Error(f"worker {self.name} cannot be started while this process, a worker itself, imports its file: that could go on without "
                        "end, each starting another. Call it from a function, or under `if __name__ == \"__main__\":`, which no worker runs")
        try:
            s = _Session(self)
        except OSError as error:
            what = str(error)
            if self._cwd is not None and not os.path.isdir(self._cwd):
                what = f"cwd {self._cwd!r} is no directory"
            elif self._python is not None and os.path.isdir(self._python):
                what = f"python {self._python!r} is a directory: name the interpreter in it, {os.path.join(self._python, 'bin', 'python')!r}"
            elif self._python is not None and error.filename == self._python:
                what = f"python {self._python!r} cannot be run: {error.strerror}"
            raise WorkerDied(f"worker {self.name} cannot be started: {what}", state="starting") from error
        except _native.zcx().Failure as failure:
            raise _failed(failure) from None
        try:
            with s.busy:
                if s.process.gone.is_set():
                    raise _died(self, s, None, "starting")
                s.parent.hello(__version__, platform.python_version())
                event = s.parent.run(_ns(deadline), lambda event: None)
        except _native.zcx().Failure as failure:
            raise _died(self, s, failure, "starting") from None
        except BaseException:
            s.process.kill()
            raise
        if event is None:
            s.process.kill()
            raise CallTimeout(f"worker {self.name} did not start within {timeout} s: the timeout includes its start, so raise it, or make a first call "
                              "without one")
        if event[0] != "started":
            s.process.wait(_BYE)
            s.process.kill()
            kind, message, text, _ = _error_tree(event[1], s)
            raise RemoteError(kind, f"worker {self.name}: importing {self._target} failed: {message}", text)
        self._session = s
        return s


def _path(argument: str, value: Any, what: str) -> str:
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(found, str):
        raise TypeError(f"{argument} is {what}, not a {type(value).__qualname__}")
    return found


def _environment(changes: Any) -> dict[str, str | None]:
    if changes is None:
        return {}
    if not isinstance(changes, Mapping):
        raise TypeError(f"env is a dict of changes, {{name: value or None}}, not a {type(changes).__qualname__}")
    for name, value in changes.items():
        if not isinstance(name, str):
            raise TypeError(f"env has the name {name!r}, which is a {type(name).__qualname__} and not a str")
        if value is not None and not isinstance(value, str):
            raise TypeError(f"env[{name!r}] is a str, or None to remove the variable, not a {type(value).__qualname__}")
    return dict(changes)


def _limit(argument: str, value: Any, default: int | None) -> int | None:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} is a whole number of bytes or None, not a {type(value).__qualname__}")
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{argument} is a whole number of bytes, 0 or more and below 2**63, not {value}")
    return value


def _seconds(timeout: Any) -> float | None:
    """A timeout as it was given; None is no limit, and so is one that no clock here could hold."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds or None, not a {type(timeout).__qualname__}")
    if not timeout >= 0:
        raise ValueError(f"timeout is a number of seconds, 0 or more, not {timeout}; None is no limit")
    return None if timeout > 1e9 else timeout


def _ns(deadline: float | None) -> int | None:
    """time.monotonic() seconds as the core's nanoseconds: both are CLOCK_MONOTONIC."""
    return None if deadline is None else int(deadline * 1e9)


_numbers = itertools.count(1)  # of leases
_all: set[_Session] = set()
_all_lock = threading.RLock()  # finalizers come here too
_exiting = False
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _abandon(box: list[_Session | None]) -> None:
    """A finalizer: it runs in any thread, in the midst of anything, so that the keeper does it."""
    s, keeper = box[0], process.running()
    if s is not None and keeper is not None:
        keeper.do(s.process.kill)


def _end(s: _Session) -> None:
    if not s.process.exited.is_set():
        with s.busy:
            parent = s.parent
            if parent is not None:
                parent.bye()
        if not s.process.wait(_BYE):
            s.process.kill()
            s.process.wait(_BYE)


def _died(owner: Worker, s: _Session, failure: Any, state: str) -> Exception:
    """The session is of no more use: make sure that the process ends, and say what is known. failure: None if it is gone already."""
    z = _native.zcx()
    code = z.E_DIED if failure is None else failure.code
    if code == z.E_DIED:
        s.process.wait(1.0)  # its end of the socket closes a moment before it can be reaped
    s.process.kill()
    s.process.wait(_BYE)
    known = s.process.describe()
    if owner._session is s:
        owner._session = None
    if known["exit_status"] == process.UNFIT and state == "starting":
        why = known["stderr"][-1] if known["stderr"] else "its environment cannot run a worker"
        return UnsupportedPlatform(f"worker {owner.name}: {why.removeprefix('comfy_zerocopy: ')}")
    if code == z.E_PROTOCOL:
        return ProtocolError(f"worker {owner.name}: {failure}; it was ended")
    if code != z.E_DIED:
        return _failed(failure)
    text = str(failure)
    detail = f": {text}" if text.startswith("its work on the GPU") else ""
    if s.pools.killed and known["signal"] == signal.SIGKILL:
        return WorkerDied(f"worker {owner.name} (pid {known['pid']}) was ended by kill()", state=state, explained=True, **known)
    what = f"pid {known['pid']}" + (f", started with {owner._python or sys.executable}" if state == "starting" else "")
    return WorkerDied(f"worker {owner.name} ({what}) died{detail}", state=state, **known)


def _failed(failure: Any) -> Exception:
    """A Failure that is neither the worker's death nor its fault."""
    z = _native.zcx()
    if failure.code == z.E_CUDA:
        if failure.cuda == 2:
            return room.out_of_memory(str(failure))
        return CudaError(failure.call, failure.cuda, failure.name)
    if failure.code in (errno.ENOMEM, errno.ENOSPC):  # shared memory has either reason
        return MemoryError(str(failure))
    return Error(str(failure))


def _error_tree(data: bytes, s: _Session) -> tuple[str, str, str, dict[str, Any]]:
    try:
        kind, message, text, detail = tree.decode(data, _no_view, None)
        return str(kind), str(message), str(text), dict(detail)
    except Exception as error:  # it is the other process's text; an error about an error helps nobody
        return "Error", f"(an unreadable error: {error})", "", {}


def _no_view(*_: Any) -> Any:
    raise tree.Foul("a tensor where none can be")


class _Input(NamedTuple):
    """Views of the caller's that were lent together: where their memory begins in the transfer, and as if the transfer began before it;
    and the caller's own objects by (offset, flags, dtype, shape, strides)."""

    offset: int
    memory: tensor.Memory
    own: dict[tuple[Any, ...], list[tuple[int, Any]]]


class _Call:
    """One call: the plan, the answers to what comes on the way, and the decoding of what came back."""

    def __init__(self, owner: Worker, session: _Session, function: str, streams: dict[int, Any], deadline: float | None, timeout: float | None) -> None:
        self.owner, self.session = owner, session
        self.function, self.streams, self.deadline, self.timeout = function, streams, deadline, timeout
        self.seq = 0
        self.transfers: list[Transfer] = []
        self.inputs: dict[int, list[_Input]] = {}  # by transfer id, in the order of their offsets
        self.results: dict[int, tensor.Memory] = {}
        self.uploads = tensor.Uploads()
        self.avoid: dict[int, dict[str, str]] = {}  # index of a look: rungs on which the worker refused it, and why
        self.rungs: dict[int, str] = {}  # by transfer id
        self.ladder: Any = None  # of this attempt
        self.copied: list[tuple[int, int, str]] = []  # GPU inputs that the worker holds in memory of its own: device, bytes, and why
        self.wanted_cancel = False
        self.sent = False  # the worker may have begun with it
        self.over = self.replaced = False  # replaced: it was cancelled and did not stop, so that its worker was ended
        self._ending = threading.Lock()  # over both

    @property
    def parent(self) -> Any:
        """The session's end in C. Not kept here: an exception that somebody stores keeps this object, and must not keep descriptors."""
        return self.session.parent

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        encoder = tree.Encoder((self.function, args, kwargs), "call", self.session.handles)
        try:
            first = encoder.collect()
            with self.session.busy:
                if self.session.process.gone.is_set():  # since it was chosen: the keeper takes the session apart
                    raise _died(self.owner, self.session, None, "idle")
                return self._run(encoder, first)
        finally:
            with self._ending:
                self.over = True
            if self.replaced and self.owner._session is self.session:  # its answer may have come at that very moment
                self.owner._session = None
            if not self.sent:
                encoder.abandon()

    def _run(self, encoder: tree.Encoder, first: bytes) -> Any:
        try:
            while True:
                outcome = self._attempt(encoder, first)
                if outcome is not None:
                    return self._finish(outcome)
                self.parent.end()
                self.sent = False
        except _native.zcx().Failure as failure:
            if self.parent.state == "broken":
                died = _died(self.owner, self.session, failure, "running")
                raise (self._not_stopped() if self.replaced else died) from None
            raise _failed(failure) from None
        finally:
            self.parent.end()
            self.ladder = None  # it refers back to this object: what the call held goes now, not with a collection
            self.owner.last_report = Report(tuple(self.transfers), self.session.kept())
            if self.parent.state == "broken":
                self.session.process.kill()
            else:
                self.session.after_call()

    def _attempt(self, encoder: tree.Encoder, first: bytes) -> tuple[Any, ...] | None:
        """Lend, send, wait. None: the worker refused a buffer, and another rung is to be tried."""
        self.transfers, self.inputs, self.results, self.rungs, self.copied = [], {}, {}, {}, []
        self.ladder = ladder.Ladder(self.parent, self.session.pools, self._until, self._stream, self.avoid)
        self.session.handles.catch_up()
        self.seq = self.parent.begin(self.owner._max_result_bytes)
        self.session.functions[self.seq] = self.function
        if self.function == "zcx.lease":
            self.parent.lease()
        if self.wanted_cancel:
            raise Cancelled(f"{self.owner.name}.{self.function} was cancelled before it ran")
        indices: dict[int, list[int]] = {}  # transfer id: looks
        data = first
        if encoder.looks:
            self._lend(encoder, indices)
            data = encoder.write()
        outcome = self._exchange(data)
        if outcome[0] == "import_refused":
            refused, rung = indices.get(outcome[1], []), self.rungs.get(outcome[1], ladder.HOST)
            if not refused or any(rung in self.avoid.get(index, ()) for index in refused):  # not even as a copy
                raise Error(f"worker {self.owner.name} cannot map its input: {outcome[2]}")
            for index in refused:
                self.avoid.setdefault(index, {})[rung] = f"the worker cannot import it: {outcome[2]}"
            return None
        return outcome

    # ---- inputs ----

    def _lend(self, encoder: tree.Encoder, indices: dict[int, list[int]]) -> None:
        """Choose a rung for each group of tensors that share bytes, lend it, and tell the encoder where the views are."""
        copies: list[tuple[tensor.Group, Any, str]] = []
        windowed: dict[int, list[tuple[tensor.Group, Any, str]]] = {}
        for g in tensor.group(encoder.looks):
            owner = encoder.looks[g.members[0]].owner
            if g.device is None:
                why = next((self.avoid[m][ladder.HOST] for m in g.members if m in self.avoid), "")
                number = None if why else self.parent.lend_shared(g.low, g.high - g.low, owner)
                if number is None:
                    copies.append((g, owner, why or "it is ordinary memory of this process"))
                else:
                    self._lent(encoder, indices, g, ladder.Lent(number, 0, ladder.HOST, "", False), owner)
                continue
            lent = self.ladder.lend(g, owner)
            if isinstance(lent, str):
                if g.device in self.session.pools.unseen:
                    raise UnsupportedType(f"this tensor is on cuda:{g.device} (GPU-{uuid.UUID(tree.uuid_of(g.device))}), which worker "
                                          f"{self.owner.name} cannot use: {lent}. Pass it on the CPU, or let the worker see that GPU",
                                          encoder.place(g.members[0]))
                windowed.setdefault(g.device, []).append((g, owner, lent))
            else:
                self._lent(encoder, indices, g, lent, owner)
        for groups in windowed.values():
            found = self.ladder.through_window(groups)
            if isinstance(found, str):
                copies += [(g, owner, why if not found or found in why else f"{why}; {found}") for g, owner, why in groups]
                self.ladder.prepare(groups[0][0].device, sum(g.high - g.low for g, _, _ in groups))
                continue
            for i, lent in found.items():
                self._lent(encoder, indices, groups[i][0], lent, groups[i][1])
                self._copied(groups[i][0], lent.reason)
        if copies:
            self._lend_copies(encoder, indices, copies)

    def _stream(self, ordinal: int) -> int:
        stream = self.streams.get(ordinal)
        return tensor.current_stream(ordinal) if stream is None else stream.cuda_stream

    def _lent(self, encoder: tree.Encoder, indices: dict[int, list[int]], g: tensor.Group, lent: ladder.Lent, owner: Any) -> None:
        indices.setdefault(lent.number, []).extend(g.members)
        self.rungs[lent.number] = lent.rung
        memory = tensor.Memory(owner, g.low - lent.offset, g.high - g.low + lent.offset, g.device)
        known = self.inputs.setdefault(lent.number, [])
        own: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
        for m in g.members:
            v = encoder.looks[m]
            offset = v.address - g.low + lent.offset
            encoder.views[m] = (lent.number, offset)
            own.setdefault((offset, v.flags, v.dtype, v.shape, v.strides), []).append((v.lib, encoder.objects[m]))
        known.append(_Input(lent.offset, memory, own))
        self.transfers.append(Transfer("input", g.high - g.low, lent.rung, lent.copied, lent.reason))

    def _lend_copies(self, encoder: tree.Encoder, indices: dict[int, list[int]], copies: list[tuple[tensor.Group, Any, str]]) -> None:
        """Host memory is copied into one segment; a GPU tensor for which no device rung works goes down to the host first."""
        sources, staged = [], []
        for g, _, _ in copies:
            address = g.low
            if g.device is not None:
                down = _download(g, self._stream(g.device))
                staged.append(down)
                address = down.address
            sources.append((address, g.high - g.low))
        for (g, owner, why), number in zip(copies, self.parent.lend_copies(sources), strict=True):
            self._lent(encoder, indices, g, ladder.Lent(number, 0, ladder.HOST, why, True), owner)
            for m in g.members:
                if g.device is not None:
                    encoder.wrap[m] = ("zcx.to_device", (tree.Placed(encoder.view(m)), tree.uuid_of(g.device)))
                else:
                    encoder.wrap.pop(m, None)
            if g.device is not None:
                self._copied(g, why)

    def _copied(self, g: tensor.Group, why: str) -> None:
        assert g.device is not None
        self.copied.append((g.device, g.high - g.low, why))

    # ---- waiting ----

    def _until(self, kind: str, deadline: float) -> tuple[Any, ...] | None:
        """The next event of that kind; None at `deadline` if that comes before the call's own."""
        first = deadline if self.deadline is None else min(deadline, self.deadline)
        event = self.parent.run(_ns(first), self._on_event)
        if event is None:
            if first == deadline:
                return None
            raise CallTimeout(f"{self.owner.name}.{self.function}: no answer within {self.timeout} s")
        if event[0] != kind:
            raise ProtocolError(f"worker {self.owner.name} answered {event[0]!r} where {kind!r} was due")
        return event

    def _exchange(self, data: bytes) -> tuple[Any, ...]:
        """CALL, and RESULT, ERROR or IMPORT_REFUSED. A deadline, Ctrl-C or an error of our own stops the worker's call first."""
        try:
            if not self.parent.send(data, _ns(self.deadline)):
                raise CallTimeout(f"{self.owner.name}.{self.function}: the worker did not take the call within {self.timeout} s")
            self.sent = True
            event = self.parent.run(_ns(self.deadline), self._on_event)
        except BaseException:
            # An interrupt may come between any two lines: whether the call is under way, only the session knows.
            if self.parent.state in ("calling", "returning", "returned"):
                self.sent = True
                self._stop()
            raise
        if event is not None:
            return event
        late = CallTimeout(f"{self.owner.name}.{self.function} did not end within {self.timeout} s")
        replaced = self._stop()
        if replaced:
            raise CallTimeout(f"{late}, nor within {_GRACE} s after it was cancelled: the worker was ended, and the next call starts another")
        raise CallTimeout(f"{late}; it was cancelled, and the worker is kept")

    def _stop(self) -> bool:
        """Cancel in the worker and wait for its answer, at most the grace; True: it had to be ended."""
        if self.parent.state == "returned":  # the answer was here already when the signal came
            return False
        try:
            self.parent.cancel(self.seq)
            if not self.session.pools.unfinished and self.parent.run(_ns(time.monotonic() + _GRACE), self._on_event_late) is not None:
                return False
        except Exception:  # it died meanwhile: the caller gets what stopped the call
            pass
        self.session.process.kill()
        self.parent.shutdown()
        return True

    def cancel(self) -> None:
        """From another thread. A worker that does not stop within the grace is replaced."""
        self.wanted_cancel = True
        parent = self.parent
        if self.seq and parent is not None:
            try:
                parent.cancel(self.seq)
            except _native.zcx().Failure:
                return  # it is over
            mine = weakref.ref(self)  # a timer must not keep what was lent
            process.keeper().do(lambda: process.keeper().later(_GRACE, lambda: (call := mine()) and call._enforce()))

    def _enforce(self) -> None:
        """Keeper's thread."""
        with self._ending:
            if not self.over:
                self.replaced = self.session.pools.killed = True
                self.session.process.kill()

    def _not_stopped(self) -> Cancelled:
        return Cancelled(f"{self.owner.name}.{self.function} was cancelled, and did not stop within {_GRACE} s: the worker was ended, and the "
                         "next call starts another")

    def _on_event(self, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == "alloc":
            self._allocate(*event[1:])
        elif kind == "handle_drop":
            self.session.handles.forget(event[1])
        elif kind == "progress" and self.owner.on_progress is not None:
            self.owner.on_progress(*event[1:])

    def _on_event_late(self, event: tuple[Any, ...]) -> None:
        if event[0] == "alloc":
            self.parent.refuse(event[1], _native.zcx().REFUSED_MEMORY, "the call was cancelled")
        elif event[0] == "handle_drop":
            self.session.handles.forget(event[1])

    # ---- results ----

    def _allocate(self, request: int, uuid: str, dtype: str, itemsize: int, nbytes: int, shape: tuple[int, ...], own: bool) -> None:
        """A device result: memory of this process's, on the caller's stream. own: the worker has the bytes in memory of its own."""
        z = _native.zcx()
        ordinal = tree.ordinal_of(uuid)
        if ordinal is None:
            self.parent.refuse(request, z.REFUSED_RUNG, "the parent does not see this GPU (CUDA_VISIBLE_DEVICES)")
            return
        try:
            made = self.ladder.allocate(ordinal, nbytes, self.streams.get(ordinal), own)
        except Exception as error:
            if not room.is_out_of_memory(error):
                raise
            self.parent.refuse(request, z.REFUSED_MEMORY, str(error).split("\n")[0])
            return
        if isinstance(made, str):
            self.parent.refuse(request, z.REFUSED_RUNG, made)
            return
        try:
            self.parent.allocated(request, made.index, made.rung, made.address, nbytes, self._stream(ordinal), made.owner)
        except z.Failure as failure:
            if self.parent.state == "broken":
                raise
            self.parent.refuse(request, z.REFUSED_RUNG, str(failure))

    def _finish(self, outcome: tuple[Any, ...]) -> Any:
        z = _native.zcx()
        if outcome[0] == "error":
            raise self._remote(outcome[1], outcome[2])
        try:
            value, notes = tree.decode(outcome[1], self._view, self.session.handles, {"zcx.to_device": self._upload})
            if not isinstance(notes, dict):
                raise tree.Foul("notes that are not a dict")
        except tree.Foul as foul:
            raise self._foul(str(foul)) from None
        except z.Failure as failure:
            if failure.code != z.E_PROTOCOL:
                raise
            raise self._foul(str(failure)) from None
        except tensor.Unfit as unfit:
            raise UnsupportedType(f"the result of {self.owner.name}.{self.function} holds {unfit}") from None
        except (ValueError, TypeError) as error:
            if isinstance(error, Error):
                raise
            raise self._foul(f"a malformed result: {error}") from None
        for number, memory in self.results.items():
            note = notes.get(number)
            self.transfers.append(Transfer("result", memory.nbytes, self.rungs[number], note is not None,
                                           self.ladder.note(number) if note is None else str(note)))
        return value

    def _foul(self, text: str) -> Exception:
        """What came back cannot be right: such a worker is not called again."""
        self.session.process.kill()
        self.owner._session = None
        return ProtocolError(f"worker {self.owner.name}: {text}; it was ended")

    def _view(self, number: int, offset: int, lib: int, flags: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        if not number:
            if 0 not in shape:
                raise tree.Foul("a tensor without a buffer")
            return tensor.build_empty(lib, dtype, shape)
        known = next((i for i in reversed(self.inputs.get(number, ())) if i.offset <= offset), None)
        memory = known.memory if known is not None else self._result(number)
        libs = {lib}
        if lib == tensor.ARRAY:  # of a worker without libraries: here it is what this process uses
            lib = tensor.TORCH if memory.device is not None else tensor.NUMPY
            libs = {tensor.ARRAY, tensor.NUMPY, tensor.TORCH}
        wanted = tensor.Look(lib, dtype, tensor.itemsize_of(dtype), shape, strides, flags, 0, 0, 0, None, None)
        if not tensor.fits(wanted, memory.nbytes, offset):
            raise tree.Foul("a tensor that reaches outside its buffer")
        if known is not None:
            for own, o in known.own.get((offset, flags, dtype, shape, strides), ()):
                if own in libs:
                    return o  # the caller's own object comes back
        made = memory.build(lib, offset, dtype, shape, strides, flags)
        return made if memory.device is not None else self.uploads.note(made, number, memory, (lib, offset, dtype, shape, strides, flags))

    def _result(self, number: int) -> tensor.Memory:
        memory = self.results.get(number)
        if memory is None:
            lent = self.parent.lent(number)
            if lent is None or not lent[1]:
                raise tree.Foul("a tensor in a buffer that this call did not lend")
            nbytes, _, device, owner, rung, address, _, complete = lent
            if not complete:
                raise tree.Foul("a tensor whose bytes did not all come")
            self.rungs[number] = ladder.name_of(rung, device)
            if device:
                memory = tensor.Memory(owner, address, nbytes, ladder.ordinal_of(owner))
            else:
                buffer = self.parent.take(number)
                memory = tensor.Memory(buffer, buffer.address, nbytes, None)
            self.results[number] = memory
        return memory

    def _upload(self, payload: Any) -> Any:
        """A GPU result that had to come through host memory."""
        host, uuid = payload
        ordinal = tree.ordinal_of(uuid)
        if ordinal is None:
            return host
        return room.with_room(ordinal, getattr(host, "nbytes", 0), "the result", lambda: self.uploads.device(host, ordinal), pooled=False)

    def _remote(self, code: int, data: bytes) -> Exception:
        z = _native.zcx()
        kind, message, text, detail = _error_tree(data, self.session)
        place = f"{self.owner.name}.{self.function}"
        if code == z.FAILED_CANCELLED:
            return Cancelled(f"{place} was cancelled")
        if code == z.FAILED_MODIFIED:
            return InputModified(f"{place}: {message}")
        if code == z.FAILED_TOO_LARGE:
            return ResultTooLarge(f"{place}: {message}")
        if code == z.FAILED_MEMORY:
            copies = "".join(f"\nIt needed a copy of {nbytes} bytes of its own, because {why}." for _, nbytes, why in self.copied)
            copies += "".join("\n" + room.by_then(d, d in self.ladder.asked) for d in sorted({d for d, _, _ in self.copied}))
            return room.out_of_memory(f"{place}, in the worker: {message}{copies}\n\n{text}", "OutOfMemoryError" in kind)
        if "arguments" in detail:
            return UnsupportedType(f"worker {self.owner.name} cannot take an argument of {self.function}: {message}")
        if "unsupported" in detail:
            return UnsupportedType(f"in what {place} returned: {message}")
        if "payload" in detail:
            return PayloadTooLarge(f"{place}: {message}")
        return RemoteError(kind, message, text)


def _download(g: tensor.Group, stream: int) -> tensor.Memory:
    """A GPU tensor's bytes in host memory. The CPU has to wait for them: there is no other way to copy from here."""
    nbytes = g.high - g.low
    data = bytearray(nbytes)
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    z = _native.zcx()
    z.device_copy(g.device, stream, "d", address, g.low, nbytes)
    z.synchronize(g.device, stream)
    return tensor.Memory(data, address, nbytes, None)


# ---- submit ----


class _Running(concurrent.futures.Future):  # type: ignore[type-arg]
    """A future whose cancel() reaches a call that runs, and whose result() raises our Cancelled however it was cancelled.

    cancelled() is True only for one that never ran: one that ran ends with an exception, which Cancelled is."""

    def __init__(self) -> None:
        super().__init__()
        self._call: _Call | None = None
        self._wanted = False

    def bind(self, call: _Call | None) -> None:
        """None: it is over, and what it was called with is not kept by who keeps the future."""
        self._call = call
        if call is not None and self._wanted:
            call.wanted_cancel = True

    def cancel(self) -> bool:
        """True: it will not run, or was asked to stop; False: it is over."""
        if super().cancel():
            return True
        if self.done():
            return False
        self._wanted = True
        call = self._call
        if call is not None:
            call.cancel()
        return True

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        except concurrent.futures.CancelledError as error:
            raise error if isinstance(error, Error) else Cancelled("the call was cancelled before it ran") from None


class _Queue:
    """One thread per worker that runs submitted calls in their order."""

    def __init__(self, owner: Worker) -> None:
        self._owner = weakref.ref(owner)
        self._name = owner.name
        # Not a deque and a semaphore: close() is a finalizer, which may come to the thread that is just putting or getting.
        self._items: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._closed = False
        self._first = itertools.count()
        weakref.finalize(owner, self.close).atexit = False

    def put(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, streams: dict[int, Any]) -> _Running:
        future = _Running()
        self._items.put((future, function, args, kwargs, timeout, streams))
        if self._closed:  # meanwhile, and this may have come behind its look
            self.close()
        elif next(self._first) == 0:
            try:
                threading.Thread(target=self._run, name=f"comfy_zerocopy {self._name}", daemon=True).start()
            except BaseException:
                future.cancel()  # it is still in the line
                self._first = itertools.count()
                raise
        return future

    def close(self) -> None:
        """Calls that are still queued are cancelled; the thread ends."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._items.get_nowait()
                if item is not None:
                    item[0].cancel()
        self._items.put(None)

    def _run(self) -> None:
        room.here.submitted = True
        while True:
            item = self._items.get()
            owner = self._owner()
            if item is None:
                return
            if owner is None:  # collected meanwhile, and this was still in its line
                item[0].cancel()
                return
            future, function, args, kwargs, timeout, streams = item
            del item
            if future.set_running_or_notify_cancel():
                try:
                    value = owner._call(function, args, kwargs, timeout, streams, future)
                except BaseException as error:
                    future.bind(None)
                    future.set_exception(error)
                else:
                    future.bind(None)
                    future.set_result(value)
                    del value
            del owner, future, args, kwargs, streams


# ---- the process's whole ----


def counters() -> dict[str, int]:
    """Sums over the workers of this process."""
    total: dict[str, int] = {"workers": 0}
    with _all_lock:
        sessions = list(_all)
    for s in sessions:
        total["workers"] += not s.process.exited.is_set()
        parent = s.parent
        for key, n in (parent.stats() if parent is not None else {}).items():
            total[key] = total.get(key, 0) + n
    return total


def reclaim() -> int:
    """Give back host memory that is kept warm for the next result, and of workers that no call runs in what is kept for their next call: host
    memory of inputs, and GPU memory that they only keep mapped; the bytes of host memory."""
    freed, done, keeper = 0, process.Flag(), process.running()
    with _all_lock:
        sessions = list(_all)

    def rest() -> None:
        nonlocal freed
        try:
            freed = sum(s.rest_now() for s in sessions)
        finally:
            done.set()

    if sessions and keeper is not None:
        if keeper.here():
            rest()
        else:
            keeper.do(rest)
            done.wait(_BYE)
    return freed + sum(parent.reclaim() for parent in [s.parent for s in sessions] if parent is not None)


def _at_exit() -> None:
    """The process ends: workers end with it, quietly, and before modules are torn down. A call that runs in another thread never gives
    its turn back: nobody may wait for it from here on."""
    global _exiting
    _exiting = True
    with _all_lock:
        sessions = list(_all)
    for s in sessions:
        s.process.kill()
    for s in sessions:
        s.process.wait(_BYE)


atexit.register(_at_exit)


def _forked() -> None:
    # The workers are the parent's: its sockets and memory are left alone here.
    global _all, _all_lock
    _all, _all_lock = set(), threading.RLock()
    for w in list(_workers):
        w._after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, where this file is imported to say that workers do not run
    os.register_at_fork(after_in_child=_forked)
