"""What the driver really does between this process and one worker, proved before anything of the user's depends on it.

Each check writes marks late, behind slow work, and the other side must read every one of them as soon as the gate lets it through
(csrc/canary.h): so it fails if an import shows other memory, if a gate lets through too early, or if what was imported again or
is counted twice is not there. A check that fails demotes the rung it speaks for, in that worker, with the reason; a tensor then
takes the next rung. docs/windows.md lists what is proved.

    pool      when a worker first meets a GPU tensor of a device (so that a worker for CPU tensors never gets a CUDA context)
    vmm       the same for memory of the arena, mapped to be written and mapped to be read, when it is first lent
    copies    pinned host memory that both copy to and from, when nothing on the device can be lent
    windows   when an allocation above the driver's limit is first met. What it rests on is undocumented, so that a process
              of its own, which nobody needs, tries it before any worker does

A lack of memory, or of gate slots, shows nothing about the driver: the check is made again the next time.
Does not: choose rungs (ladder.py does), or touch torch.
"""
from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from . import probe, room
from ._native import zcx

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
SECONDS = 20.0  # for one check; that of a pool took 18 ms on an idle H200
OPEN_SECONDS = 120.0  # for a worker to open the driver and a device: seconds, on a machine with many
_log = logging.getLogger("comfy_zerocopy")

Until = Callable[[str, float], Any]  # until(kind, deadline): the session's next event of that kind, None at the deadline (time.monotonic)


class Stuck(Exception):
    """A check did not end, or ended the worker: the session is of no more use, and the rung is demoted."""

    def __init__(self, why: str, demoted: dict[int, str], ordinal: int, died: bool) -> None:
        super().__init__(why)
        self.demoted, self.ordinal, self.died = demoted, ordinal, died


class Verdicts:
    """By ordinal: "" where a check held, else why the rung is not used."""

    def __init__(self) -> None:
        self.pools: dict[int, str] = {}
        self.windows: dict[int, str] = {}
        self.slabs: dict[int, str] = {}
        self.copies: dict[int, str] = {}
        self.devices: dict[int, str] = {}  # whether the worker can use the device at all
        self.kills = 0  # checks in a row that SIGKILL ended

    def pardon(self, stuck: Stuck) -> None:
        """SIGKILL ended that check. No driver does that: somebody did, or the kernel for want of memory. So the next process tries
        it again, unless it happens each time."""
        self.kills += 1
        if self.kills < 3:
            stuck.demoted.pop(stuck.ordinal, None)

    def status(self) -> dict[str, dict[int, str]]:
        pools = {**self.pools, **{k: why for k, why in self.devices.items() if why}}
        rungs = (("pools", pools), ("windows", self.windows), ("vmm", self.slabs), ("copies", self.copies))
        return {name: {k: v or "proved" for k, v in found.items()} for name, found in rungs}


class Pools(Verdicts):
    """One session's pools: offered, proved, or why not.

    demoted: what checks that ended earlier processes of this worker showed; it is not tried again, and grows here."""

    def __init__(self, name: str, demoted: Verdicts) -> None:
        super().__init__()
        self.name, self.demoted = name, demoted
        self.pools.update(demoted.pools)
        self.windows.update(demoted.windows)
        self.slabs.update(demoted.slabs)
        self.copies.update(demoted.copies)
        self.devices.update(demoted.devices)
        self.unfinished = False  # an answer is still to come, for which nobody waits: the session cannot go on
        self.killed = False  # by its user: what happens then shows nothing
        self.unseen: set[int] = set()  # devices that are not visible to the worker
        self.pid = 0  # the worker's
        self._index: dict[int, int] = {}

    def device(self, parent: Any, ordinal: int, pool: Any, until: Until) -> tuple[int | None, str]:
        """The device's index in the session, offered on first use with its pool (None: it has none); or None and why it is of no use.

        Raises out-of-memory where there is no room for the worker's context."""
        if ordinal not in self.devices:
            if pool is None:
                self.pools.setdefault(ordinal, "this GPU has no pool that can be exported")
            why = self._with_room(ordinal, lambda: self._met(parent, ordinal, pool, until))
            if ordinal not in self._index and not _shows_something(why):
                return None, why  # it was not asked yet
            self.devices[ordinal] = why
            if why:
                _log.warning("comfy_zerocopy: worker %s does not use cuda:%d: %s", self.name, ordinal, why)
        why = self.devices[ordinal]
        return (None, why) if why else (self._index[ordinal], "")

    def open(self, parent: Any, pool: Any, until: Until) -> tuple[int | None, str]:
        """The pool's index in the session, offered and proved on first use; or None and why the worker cannot use it.

        Raises out-of-memory where there is no room for a check."""
        ordinal = pool.ordinal
        index, why = self.device(parent, ordinal, pool, until)
        if index is None:
            return None, why
        if ordinal not in self.pools:
            probe.obey()
            why = self._with_room(ordinal, lambda: self._check(parent, ordinal, zcx().PROVE_POOL, self.demoted.pools, until))
            if not why or _shows_something(why):
                self.pools[ordinal] = why
            if why:
                _log.warning("comfy_zerocopy: worker %s shares no memory of cuda:%d's pool: %s", self.name, ordinal, why)
                return None, why
        why = self.pools[ordinal]
        return (None, why) if why else (index, "")

    def open_slabs(self, parent: Any, arena: Any, until: Until) -> str:
        """ "" once memory of the arena may be lent, else why not. The device is open."""
        ordinal = arena.ordinal
        if ordinal not in self.slabs:
            why = self._check(parent, ordinal, zcx().PROVE_VMM, self.demoted.slabs, until, arena)
            why = why or self._check(parent, ordinal, zcx().PROVE_READ, self.demoted.slabs, until, arena)
            if not why or _shows_something(why):
                self.slabs[ordinal] = why
            if why:
                _log.warning("comfy_zerocopy: worker %s shares no memory of cuda:%d's arena: %s", self.name, ordinal, why)
            return why
        return self.slabs[ordinal]

    def open_copies(self, parent: Any, ordinal: int, until: Until) -> str:
        """ "" once copies may go through pinned memory, else why not. The device is open."""
        if ordinal not in self.copies:
            # Twice: pinning takes longer than the parent's late work, so that the first one could not see a gate that opens too early.
            why = self._check(parent, ordinal, zcx().PROVE_WINDOW, self.demoted.copies, until)
            why = why or self._check(parent, ordinal, zcx().PROVE_WINDOW, self.demoted.copies, until)
            if not why or _shows_something(why):
                self.copies[ordinal] = why
            if why:
                _log.warning("comfy_zerocopy: worker %s copies nothing of cuda:%d through pinned memory: %s", self.name, ordinal, why)
            return why
        return self.copies[ordinal]

    def open_windows(self, parent: Any, pool: Any, until: Until) -> str:
        """ "" once allocations above the limit may cross in windows, else why not. The pool is open."""
        ordinal = pool.ordinal
        if ordinal not in self.windows:
            why = sacrifice(pool) or self.check_windows(parent, pool, until)
            if not why or _shows_something(why):
                self.windows[ordinal] = why
            if why:
                _log.warning("comfy_zerocopy: worker %s: no tensor above the driver's limit is shared on cuda:%d: %s", self.name, ordinal, why)
                return why
        return self.windows[ordinal]

    def check_windows(self, parent: Any, pool: Any, until: Until) -> str:
        """The check alone, in this very worker."""
        return self._check(parent, pool.ordinal, zcx().PROVE_WINDOWS, self.demoted.windows, until)

    def _with_room(self, ordinal: int, attempt: Callable[[], str]) -> str:
        """What attempt() answers. Where that is a lack of memory the host is asked for room, and it is made once more."""
        why = attempt()
        asked = _lacks_memory(why) and room.make(ordinal, room.context(ordinal))
        if asked:
            why = attempt()
        if _lacks_memory(why):
            raise room.refused(ordinal, f"the CUDA context and the start-up check of worker {self.name}", why, asked)
        return why

    def _met(self, parent: Any, ordinal: int, pool: Any, until: Until) -> str:
        """Offer the device, if there is room for what that takes."""
        before = room.admit(ordinal, self.pid, self.name)
        why = self._offer(parent, ordinal, pool, until)
        if not why:
            room.learn(ordinal, before)
        return why

    def _offer(self, parent: Any, ordinal: int, pool: Any, until: Until) -> str:
        z = zcx()
        self.unfinished = True  # from before it is sent: a signal's handler may raise as soon as it was
        try:
            index, accepted = parent.offer(ordinal, pool)
        except z.Failure as failure:
            if parent.state == "broken":
                raise
            self.unfinished = False
            return f"it cannot be offered: {failure}"
        self._index[ordinal] = index
        if accepted is None:
            refused, reason = self._await("device", OPEN_SECONDS, "opening the GPU", ordinal, self.demoted.devices, until)
            if refused == z.POOL_UNSEEN:
                self.unseen.add(ordinal)
            if refused == z.POOL_REFUSED:
                self.pools[ordinal] = reason
                _log.warning("comfy_zerocopy: worker %s shares no memory of cuda:%d's pool: %s", self.name, ordinal, reason)
            return reason if refused not in (0, z.POOL_REFUSED) else ""
        self.unfinished = False
        return ""

    def _check(self, parent: Any, ordinal: int, step: int, demoted: dict[int, str], until: Until, arena: Any = None) -> str:
        z = zcx()
        what = {z.PROVE_POOL: "sharing", z.PROVE_WINDOWS: "windows", z.PROVE_VMM: "the arena", z.PROVE_READ: "reading the arena", z.PROVE_WINDOW: "pinned memory"}[step]
        what = f"the start-up check of {what}"
        self.unfinished = True  # as in _offer
        try:
            parent.prove(self._index[ordinal], step, arena)
        except z.Failure as failure:
            if parent.state == "broken":  # of what it was told of before the check itself
                raise self._ended(failure, what, ordinal, demoted) from None
            self.unfinished = False
            return f"{what} failed: {failure}"
        failed, reason = self._await("proved", SECONDS, what, ordinal, demoted, until)
        return f"{what} failed: {reason}" if failed else ""

    def _await(self, kind: str, seconds: float, what: str, ordinal: int, demoted: dict[int, str], until: Until) -> tuple[int, str]:
        try:
            event = until(kind, time.monotonic() + seconds)
        except zcx().Failure as failure:
            raise self._ended(failure, what, ordinal, demoted) from None
        if event is None:
            raise self._stuck(f"{what} did not end within {seconds:g} s", ordinal, demoted, False)
        self.unfinished = False
        if kind == "proved":  # that a device opens is no check, and comes before each
            self.demoted.kills = 0
        return event[2], event[3]

    def _ended(self, failure: Any, what: str, ordinal: int, demoted: dict[int, str]) -> Exception:
        """The session broke in the midst of it; by us, or by the worker."""
        return failure if self.killed else self._stuck(f"{what} ended the worker", ordinal, demoted, failure.code == zcx().E_DIED)

    def _stuck(self, why: str, ordinal: int, demoted: dict[int, str], died: bool) -> Stuck:
        demoted[ordinal] = why
        _log.warning("comfy_zerocopy: worker %s, cuda:%d: %s", self.name, ordinal, why)
        return Stuck(why, demoted, ordinal, died)


def _shows_something(why: str) -> bool:
    return not _lacks_memory(why) and "gate slot" not in why


_NO_ROOM = "there was no room"


def _lacks_memory(why: str) -> bool:
    return "CUDA_ERROR_OUT_OF_MEMORY" in why or why.startswith(_NO_ROOM)


def ending(known: dict[str, Any]) -> str:
    """How a process ended, from Process.describe()."""
    if known["signal"] is None:
        return f"ended with exit status {known['exit_status']}"
    try:
        return f"was ended by {signal.Signals(known['signal']).name}"
    except ValueError:
        return f"was ended by signal {known['signal']}"


_tried: dict[int, str] = {}
_trying = threading.RLock()  # here as everywhere: a finalizer may come in the midst, in the same thread


def sacrifice(pool: Any) -> str:
    """ "" if a throw-away process imported small windows of this pool and lived; else what became of it. Once per device."""
    with _trying:
        why = _tried.get(pool.ordinal)
        if why is None:
            why = _try(pool)
            if not why or _shows_something(why):
                _tried[pool.ordinal] = why
        return why


def _try(pool: Any) -> str:
    from .errors import Error
    from .parent import Worker

    # Any module will do: nothing of it is called.
    with Worker("comfy_zerocopy.array", name="windows check") as w:
        try:
            return w._prove_windows(pool)
        except (Error, zcx().Failure) as error:
            return f"a process that was to try it failed: {str(error).splitlines()[0]}"
        except Exception as error:
            if not room.is_out_of_memory(error):
                raise
            return f"{_NO_ROOM} for a process that was to try it: {error}"


def _forked() -> None:
    # Another thread may have held the lock.
    global _trying
    _trying = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, where this file is imported to say that workers do not run
    os.register_at_fork(after_in_child=_forked)
