"""What the driver really does between this process and one worker, proved before anything of the user's depends on it.

Each check writes marks late, behind slow work, and the other side must read every one of them as soon as the gate lets it through
(csrc/canary.h): so it fails if an import shows other memory, if a gate lets through too early, or if a duplicate import is not
counted. A check that fails demotes the rung it speaks for, in that worker, with the reason; a tensor then takes the next rung.

    pool      when a worker first meets a GPU tensor of a device (so that a worker for CPU tensors never gets a CUDA context)
    windows   when an allocation above the driver's limit is first met. What it rests on is undocumented, so that a process
              of its own, which nobody needs, tries it before any worker does

Does not: choose rungs (parent.py does), or touch torch.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ._native import zcx

SECONDS = 20.0  # for one check; on an idle GPU it takes a few milliseconds
_log = logging.getLogger("comfy_zerocopy")


class Stuck(Exception):
    """A check did not end, or ended the worker: the session is of no more use, and the rung is demoted."""


class Pools:
    """One session's pools: offered, proved, or why not."""

    def __init__(self, name: str, demoted: dict[int, str]) -> None:
        self.name = name
        self.demoted = demoted  # ordinal: what a check that ended an earlier process of this worker showed
        self.verdicts: dict[int, str] = {}  # ordinal: "" or why the rung is not used
        self.windows: dict[int, str] = {}
        self._index: dict[int, int] = {}

    def open(self, parent: Any, pool: Any, until: Callable[[str, float | None], Any]) -> tuple[int | None, str]:
        """The pool's index in the session, offered and proved on first use; or None and why the worker cannot use it.

        until(kind, deadline): the session's next event of that kind, None at the deadline (time.monotonic)."""
        ordinal = pool.ordinal
        why = self.demoted.get(ordinal) or self.verdicts.get(ordinal)
        if why:
            return None, why
        if why == "":
            return self._index[ordinal], ""
        index, accepted = parent.offer(pool)
        if accepted is None:
            _, _, refused, reason = until("pool", None)
            why = reason if refused else ""
        if not why:
            why = self._check(parent, index, ordinal, zcx().PROVE_POOL, "sharing", until)
        self._index[ordinal] = index
        self.verdicts[ordinal] = why
        if why:
            _log.warning("comfy_zerocopy: worker %s shares no memory of cuda:%d: %s", self.name, ordinal, why)
        return (None, why) if why else (index, "")

    def open_windows(self, parent: Any, pool: Any, until: Callable[[str, float | None], Any]) -> str:
        """ "" once allocations above the limit may cross in windows, else why not. The pool is open."""
        ordinal = pool.ordinal
        if ordinal not in self.windows:
            why = sacrifice(pool)
            if not why:
                why = self._check(parent, self._index[ordinal], ordinal, zcx().PROVE_WINDOWS, "windows", until)
            self.windows[ordinal] = why
            if why:
                _log.warning("comfy_zerocopy: worker %s: no tensor above the driver's limit is shared on cuda:%d: %s", self.name, ordinal, why)
        return self.windows[ordinal]

    def _check(self, parent: Any, index: int, ordinal: int, step: int, what: str, until: Callable[[str, float | None], Any]) -> str:
        z = zcx()
        try:
            parent.prove(index, step)
        except z.Failure as failure:
            if parent.state == "broken":
                raise
            return f"the start-up check of {what} cannot run: {failure}"
        try:
            event = until("proved", time.monotonic() + SECONDS)
        except z.Failure as failure:
            self.demoted[ordinal] = f"the start-up check of {what} ended the worker: {failure}"
            raise Stuck(self.demoted[ordinal]) from None
        if event is None:
            self.demoted[ordinal] = f"the start-up check of {what} did not end within {SECONDS:.0f} s"
            raise Stuck(self.demoted[ordinal])
        return f"the start-up check of {what} failed: {event[3]}" if event[2] else ""


_tried: dict[int, str] = {}
_trying = threading.Lock()


def sacrifice(pool: Any) -> str:
    """ "" if a throw-away process imported small windows of this pool and lived; else what became of it. Once per device."""
    with _trying:
        if pool.ordinal not in _tried:
            _tried[pool.ordinal] = _try(pool)
        return _tried[pool.ordinal]


def _try(pool: Any) -> str:
    from .errors import Error
    from .parent import Worker

    # Any module will do: nothing of it is called.
    with Worker("comfy_zerocopy.array", name="windows check", timeout=SECONDS) as w:
        try:
            return w._prove_windows(pool)
        except Error as error:
            return f"a process that tried it ended: {str(error).splitlines()[0]}"
