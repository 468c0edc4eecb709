"""Worker processes: started, listened to, and known to be gone.

One keeper thread per parent process watches every worker's output (into `logging`), its pidfd and its liveness pipe. A worker
is *gone* only when it was reaped and the pipe has ended too: whoever inherited from it (a forked grandchild) holds the card as
well, and its queued work can still land.
Does not: know sessions or tensors. Never forks after CUDA: subprocess executes at once.
"""
from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import snapshot

UNFIT = 78  # the exit status of _boot.py
_TAIL = 20  # lines of stderr kept for WorkerDied
_LINE = 8192  # a longer line is forwarded in pieces
_log = logging.getLogger("comfy_zerocopy.worker")


class Flag:
    """A threading.Event whose lock the same thread can enter again: a finalizer may run, and wait for an end, in the midst of a wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is an RLock
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        if not self._set:
            with self._changed:
                self._changed.wait_for(self.is_set, timeout)
        return self._set


class Keeper:
    """The thread. Callbacks run in it, so they must neither block nor take a lock that is held while waiting for it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: None)
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name="comfy_zerocopy keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def discard(self) -> None:
        """It was not started, and is not needed."""
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def here(self) -> bool:
        """Is this the keeper's thread? Who is (a finalizer that the garbage collector runs there) must not wait for what it does."""
        return threading.get_ident() == self._thread.ident

    def do(self, what: Callable[[], None]) -> None:
        """Run it in the keeper's thread, soon. Any thread."""
        self._todo.append(what)
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Keeper's thread only."""
        self._timers.append((time.monotonic() + seconds, next(self._order), what))

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Keeper's thread only."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _run(self) -> None:
        while True:
            timeout = None
            if self._timers:
                timeout = max(0.0, min(self._timers)[0] - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._call(key.data)
            while self._todo:
                self._call(self._todo.popleft())
            now = time.monotonic()
            due = sorted(t for t in self._timers if t[0] <= now)
            self._timers = [t for t in self._timers if t[0] > now]
            for _, _, what in due:
                self._call(what)

    def _call(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            _log.exception("comfy_zerocopy: the keeper's callback failed")


_keeper: Keeper | None = None
_keeper_lock = threading.RLock()


def keeper() -> Keeper:
    global _keeper
    with _keeper_lock:
        if _keeper is None:
            made = Keeper()
            if _keeper is not None:  # a finalizer in this thread was here meanwhile
                made.discard()
                return _keeper
            _keeper = made  # before it is started: a finalizer that comes then may already ask things of it
            try:
                made.start()
            except BaseException:
                _keeper = None
                made.discard()
                raise
        return _keeper


def running() -> Keeper | None:
    """The keeper if there is one. Takes no lock: finalizers ask, in the midst of anything."""
    return _keeper


def _forked() -> None:
    # The thread did not survive the fork, and the lock may have been held. The parent's workers are the parent's.
    global _keeper, _keeper_lock
    _keeper, _keeper_lock = None, threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, where this file is imported to say that workers do not run
    os.register_at_fork(after_in_child=_forked)


def environment(changes: Mapping[str, str | None] | None, other_python: bool) -> dict[str, str]:
    """The worker's environment: the parent's, less what would send another interpreter astray, with `changes` on top (None
    removes a variable)."""
    env = dict(os.environ)
    if other_python:
        for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
            env.pop(name, None)
    env["PYTHONUNBUFFERED"] = "1"  # output arrives while it matters
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = str(value)
    return env


class Process:
    """One worker process, from its start to its end.

    sock, control: the parent's ends of the session and control sockets (the session takes them). on_gone is called once, in
    the keeper's thread, when nothing of the worker can touch shared memory any more. OSError when it cannot be started."""

    def __init__(self, arguments: Sequence[str], *, python: str | None, env: Mapping[str, str | None] | None, cwd: str | None,
                 name: str, on_gone: Callable[[], None]) -> None:
        self.name = name
        self.returncode: int | None = None
        self._creator = os.getpid()
        self.exited = Flag()
        self.gone = Flag()
        self._on_gone = on_gone
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        # Both can be entered again by the same thread, in a finalizer that the garbage collector runs under them.
        self._read_lock = threading.RLock()
        self._reading = False
        self._reap_lock = threading.RLock()  # a pid must not be signalled once it is reaped
        self._reaping = False
        self._open: dict[int, tuple[bytearray, int]] = {}
        executable = python or sys.executable
        folder = snapshot.folder()
        sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        live_read, live_write = os.pipe2(os.O_CLOEXEC)
        popen = None
        try:
            handed = [theirs.fileno(), their_control.fileno(), live_write]
            popen = subprocess.Popen(
                [executable, "-c", snapshot.boot(), folder, *map(str, handed), *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=handed, cwd=cwd,
                env=environment(env, python is not None and os.path.realpath(python) != os.path.realpath(sys.executable)),
                start_new_session=True, bufsize=0)
            self.pidfd = os.pidfd_open(popen.pid)
        except BaseException:
            sock.close()
            control.close()
            os.close(live_read)
            if popen is not None:
                popen.kill()
                popen.communicate()
            raise
        finally:
            theirs.close()
            their_control.close()
            os.close(live_write)
        self._popen, self.pid = popen, popen.pid
        self.sock, self.control = sock.detach(), control.detach()
        self._live = live_read
        for stream, level in ((self._popen.stdout, logging.INFO), (self._popen.stderr, logging.WARNING)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._open[stream.fileno()] = (bytearray(), level)
        self._log = _log.getChild(name)
        self._keeper = keeper()
        self._keeper.do(self._begin)

    # ---- in the keeper's thread ----

    def _begin(self) -> None:
        for fd in list(self._open):
            self._keeper.watch(fd, lambda fd=fd: self._output(fd))
        self._keeper.watch(self.pidfd, self._ended)
        self._keeper.watch(self._live, self._left)

    def _output(self, fd: int) -> None:
        if not self._read(fd):
            self._keeper.unwatch(fd)

    def _ended(self) -> None:
        self._keeper.unwatch(self.pidfd)
        with self._reap_lock:
            self._reaping = True
            self.returncode = self._popen.wait()
        self.exited.set()
        self._finish()

    def _left(self) -> None:
        try:
            if os.read(self._live, 1):
                return  # nobody writes to it; a stray byte means nothing
        except OSError:
            pass
        self._keeper.unwatch(self._live)
        os.close(self._live)
        self._live = -1
        self._finish()

    def _finish(self) -> None:
        if self._live >= 0 or not self.exited.is_set() or self.gone.is_set():
            return
        self.drain()
        with self._read_lock:  # their numbers are given out again: from here on nobody reads there
            for pending, level in list(self._open.values()):
                if pending:
                    self._line(pending, level)
            self._open.clear()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            self._keeper.unwatch(stream.fileno())  # also one whose end somebody else saw
            stream.close()
        self.gone.set()
        self._on_gone()

    def release(self) -> None:
        """Nobody waits on the pidfd any more. Called once, by who was told that it is gone."""
        os.close(self.pidfd)

    # ---- any thread ----

    def _read(self, fd: int) -> bool:
        """Forward what is there; False at the end. A lock, because a caller whose worker died reads as well."""
        with self._read_lock:
            state = self._open.get(fd)
            if state is None or self._reading:
                return state is not None
            self._reading = True
            try:
                return self._forward(fd, *state)
            finally:
                self._reading = False

    def _forward(self, fd: int, pending: bytearray, level: int) -> bool:
        ended = False
        for _ in range(64):  # a flood must not keep the keeper from its other work
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            pending += data
            *lines, rest = pending.split(b"\n")
            pending[:] = rest
            for line in lines:
                self._line(line, level)
            while len(pending) > _LINE:
                self._line(pending[:_LINE], level)
                del pending[:_LINE]
        if ended:
            if pending:
                self._line(pending, level)
            del self._open[fd]
        return not ended

    def _line(self, line: bytes | bytearray, level: int) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if level == logging.WARNING:
            self._tail.append(text)
        self._log.log(level, "%s", text)

    def drain(self) -> list[str]:
        """Forward what the worker wrote so far; the last lines of its stderr."""
        for fd in list(self._open):
            self._read(fd)
        return list(self._tail)

    def kill(self) -> None:
        """SIGKILL to the worker and its process group. Idempotent; the keeper notices the end. In a forked child: nothing."""
        if self._creator != os.getpid():
            return
        with self._reap_lock:
            if not self._reaping:
                for kill in (os.kill, os.killpg):  # it leads a process group of its own
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Until it was reaped; in the keeper's thread, which does that, no longer than now."""
        return self.exited.wait(0 if self._keeper.here() else timeout)

    def describe(self) -> dict[str, Any]:
        code = self.returncode
        return {"pid": self.pid, "exit_status": code if code is not None and code >= 0 else None,
                "signal": -code if code is not None and code < 0 else None, "stderr": self.drain()}
