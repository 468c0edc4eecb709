"""install(): an exportable pool of ours takes the place of the device's current one, at the right moment or not at all.

CUDA is not touched before torch has been imported: opening the driver freezes CUDA_VISIBLE_DEVICES, and ComfyUI may set it
after its prestartup scripts have run. So install() before torch only arms a hook. What happens then depends on what is in
force then: devices, torch's allocator backend, platform. A torch that is there already is no obstacle: tensors allocated
from the swap on are shared, earlier ones are not.

    off      nothing is touched
    results  a pool of ours is current only while a result is allocated (results_pool)
    swap     it is the device's current pool until the process ends

Does not: import torch, allocate, or know ComfyUI (comfyui/ does, and sets `not_before`).
"""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import __version__, _native, config
from ._after_import import AfterImport, loaded

_log = logging.getLogger("comfy_zerocopy")

LIMIT = "any size (above 4096 MiB where the driver passes the check of windows)"  # csrc/window.h, canary.py
_HOST_SERVES = "Workers still run: tensors cross through host memory."

#: Asked right before CUDA would be touched. A host that has not set CUDA_VISIBLE_DEVICES yet names the module whose import
#: says that it has; None: go on.
not_before: Callable[[], str | None] | None = None


@dataclasses.dataclass
class Status:
    """What is in force in this process, and why not more."""

    mode: str  # off | results | swap: what was asked for
    source: str  # who asked: argument, environment, file, default
    state: str  # off | armed (torch is not imported yet) | on | refused
    reason: str  # why it is off, armed or refused; empty when on
    platform: str  # can workers run here
    version: str = __version__
    driver: str | None = None  # "13.0": the CUDA version of the driver; None until it was opened
    devices: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    limit: str = ""  # up to which size a GPU tensor is shared
    rungs: dict[str, str] = dataclasses.field(default_factory=dict)  # rung: what takes it, or why nothing does
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # of our pools, see status()
    counters: dict[str, int] = dataclasses.field(default_factory=dict)  # of this process's workers
    problems: list[str] = dataclasses.field(default_factory=list)  # junk settings

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The log line."""
        line = f"comfy_zerocopy {self.version}: mode {self.mode}"
        if self.state == "on":
            line += " on " + ", ".join(f"cuda:{d['ordinal']} {d['name']}" for d in self.devices if not d["why"])
            line += f"; GPU tensors of {self.limit} are shared"
            line += "".join(f"; cuda:{d['ordinal']} is not: {d['why']}" for d in self.devices if d["why"])
        else:
            line += f", {self.state}" if self.state != "off" else ""
            line += f": {self.reason}" if self.reason else ""
        return line + "".join(f"; {p}" for p in self.problems)


class _Refused(Exception):
    """Why this process keeps the pools it has; the text is for the user."""


def _say(error: Exception) -> str:
    return getattr(error, "text", None) or str(error) or type(error).__name__


def may_have_gpu() -> bool:
    """By the driver's device files (WSL2's too): nothing is opened. For advice only."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and getattr(getattr(torch, "version", None), "cuda", "") is None:
        return False
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg"))) or "ZCX_LIBCUDA" in os.environ


class _Installation:
    """The process's one: guarded by a reentrant lock, because an import that our own code causes can fire the hook."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings = config.Settings()
        self.state = "off"
        self.reason = ""
        self.driver: str | None = None
        self.devices: list[dict[str, Any]] = []
        self.pools: dict[int, Any] = {}
        self.arenas: dict[int, Any] = {}  # None: the device has none
        self.gates: dict[int, threading.RLock] = {}  # per device: one thread at a time changes what is current
        self.displaced: dict[int, int] = {}  # ordinal: the pool that was current before ours
        self.hook: AfterImport | None = None
        self.waited: set[str] = set()
        self.said = ""

    def install(self, mode: str | None) -> None:
        with self.lock:
            settings = config.load(mode)
            if settings.mode == self.settings.mode and self.state in ("armed", "on"):
                self.settings = settings
            else:
                self.stop()
                self.settings = settings
                self.start()
            self.catch_up()
            self.log()  # says nothing twice

    def start(self) -> None:
        self.state, self.reason = "off", ""
        if self.settings.mode == "off":
            if self.settings.source == "default":
                self.reason = (f"GPU results lie in memory that torch does not count; {config.ENVIRONMENT}=1 makes them ordinary tensors" if may_have_gpu() else
                               "no NVIDIA GPU is in sight; CPU tensors need no mode")
            return
        try:
            self.check_machine()
        except _Refused as refused:
            self.state, self.reason = "refused", str(refused)
            return
        self.wait_for("torch")

    def wait_for(self, module: str) -> None:
        self.state, self.reason = "armed", f"waits for the import of {module}"
        self.waited.add(module)
        self.hook = AfterImport(module, self.after_import)

    def after_import(self) -> None:
        with self.lock:
            if self.state == "armed":
                self.activate()
                self.log()

    def catch_up(self) -> None:
        """Armed, and the module is there: it was there before, or came in a way that the hook could not see."""
        if self.state == "armed" and self.hook is not None and self.hook.missed():
            self.activate()
            self.log()

    def activate(self) -> None:
        self.disarm()
        try:
            waiting = not_before() if not_before is not None else None
            if waiting is not None and waiting not in self.waited and loaded(waiting) is None:
                self.wait_for(waiting)
                return
            self.check_torch()
            self.open_driver()
            if self.settings.mode == "swap":
                self.swap()
        except _Refused as refused:
            self.state, self.reason = "refused", str(refused)
        except Exception as error:
            # Whatever this was, the host's import of torch must not feel it.
            self.state, self.reason = "refused", f"unexpected {type(error).__name__}: {error}"
            _log.debug("comfy_zerocopy: unexpected", exc_info=True)
        else:
            self.state, self.reason = "on", ""

    def check_machine(self) -> None:
        verdict = _native.verdict()  # loads the extension now: under the hook it would be an import inside an import
        if not verdict.ok:
            raise _Refused(str(verdict))
        if "microsoft" in os.uname().release.lower():
            raise _Refused(f"WSL2 has no memory pools that two processes can share. {_HOST_SERVES}")

    def check_torch(self) -> None:
        torch = sys.modules["torch"]
        try:
            if torch.version.cuda is None:
                raise _Refused(f"this torch ({torch.__version__}) is built without CUDA. {_HOST_SERVES}")
            backend = torch.cuda.get_allocator_backend()
        except AttributeError as error:
            raise _Refused(f"this torch does not say what it allocates with: {error}") from error
        if backend != "cudaMallocAsync":
            raise _Refused(f"torch allocates with its {backend} backend, which does not use pools: nothing to swap. "
                           "To share, let ComfyUI use cudaMallocAsync (its default; no --disable-cuda-malloc). "
                           f"{_HOST_SERVES}")

    def open_driver(self) -> None:
        zcx = _native.zcx()
        try:
            found = zcx.driver()
        except zcx.Failure as failure:
            raise _Refused(f"{_say(failure)}. {_HOST_SERVES}") from failure
        self.driver = f"{found['version'] // 1000}.{found['version'] % 1000 // 10}"
        self.devices = [dict(d, why="" if d["pools"] and d["posix_fd_pools"] else "it has no pools that can be exported")
                        for d in found["devices"]]
        self.gates = {d["ordinal"]: self.gates.get(d["ordinal"]) or threading.RLock() for d in self.devices}
        if all(d["why"] for d in self.devices):
            raise _Refused(f"no visible GPU has memory pools that can be exported. {_HOST_SERVES}")

    def swap(self) -> None:
        for device in self.devices:
            pool = self.pool(device["ordinal"])
            if pool is None:
                continue
            try:
                self.displaced[pool.ordinal] = pool.make_current()
            except _native.zcx().Failure as failure:
                device["why"] = f"its pool cannot be changed now: {_say(failure)}"
        if not self.displaced:
            raise _Refused("; ".join(f"cuda:{d['ordinal']}: {d['why']}" for d in self.devices) + f". {_HOST_SERVES}")

    def pool(self, ordinal: int) -> Any:
        """The device's pool, made when first asked for and kept for the process's life; None where it cannot be."""
        device = next((d for d in self.devices if d["ordinal"] == ordinal), None)
        if device is None or device["why"]:
            return None
        if ordinal not in self.pools:
            zcx = _native.zcx()
            try:
                self.pools[ordinal] = zcx.Pool(ordinal)
            except zcx.Failure as failure:
                device["why"] = f"no pool: {_say(failure)}"
                return None
        return self.pools[ordinal]

    def disarm(self) -> None:
        if self.hook is not None:
            self.hook.disarm()
            self.hook = None

    def stop(self) -> None:
        """Back to off. The pools stay: tensors live in them, and what was exported is not given back anyway."""
        self.disarm()
        for ordinal, previous in self.displaced.items():
            # Somebody else's pool may be current by now: leave it.
            with contextlib.suppress(_native.zcx().Failure):
                if self.pools[ordinal].is_current():
                    self.pools[ordinal].restore(previous)
        self.displaced.clear()
        self.devices = []
        self.waited.clear()

    def log(self) -> None:
        line = str(self.describe())
        if line != self.said:
            self.said = line
            loud = self.settings.problems or self.state == "refused"
            _log.log(logging.WARNING if loud else logging.INFO, "%s", line)

    def describe(self) -> Status:
        with self.lock:
            on = self.state == "on"
            inputs = {"swap": "inputs and results", "results": "results"}.get(self.settings.mode, "")
            verdict = _native.verdict()
            return Status(
                mode=self.settings.mode, source=self.settings.source, state=self.state, reason=self.reason,
                platform=str(verdict), driver=self.driver, devices=[dict(d) for d in self.devices], limit=LIMIT if on else "",
                rungs={"pool": f"{inputs} of {LIMIT}" if on else f"not used: {self.reason or 'mode off'}",
                       "host": "everything else" if verdict.ok else f"not used: {verdict.why}"},
                problems=list(self.settings.problems))


_here = _Installation()


def _forked() -> None:
    # CUDA does not survive a fork, and another thread may have held the lock.
    global _here
    before, _here = _here, _Installation()
    _here.said = before.said
    if before.state != "off":
        before.disarm()
        _here.settings = before.settings
        _here.state, _here.reason = "refused", "this process is a fork: CUDA does not survive one"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def install(mode: str | None = None) -> Status:
    """Put `mode` (or what environment and file say) into force, now or as soon as torch is imported.

    Idempotent; never raises; logs one line for each thing that it finds out."""
    try:
        _here.install(mode)
    except Exception as error:
        # Whatever this was, it must not take the host down.
        _here.state, _here.reason = "refused", f"unexpected {type(error).__name__}: {error}"
        _log.warning("comfy_zerocopy %s: %s", __version__, _here.reason, exc_info=True)
    return status()


def _parent() -> Any:
    """The module that runs workers, if this process has used it."""
    return sys.modules.get(f"{__package__}.parent")


def status() -> Status:
    """What is in force now. Opens nothing: before torch is imported it knows no devices.

    bytes: `held` by our pools from the device, `idle` of these in no tensor, and `retained`: what of the idle bytes the
    driver would not give back if asked, at most (memory whose pointer was exported is never given back)."""
    with _here.lock:
        _here.catch_up()
        found = _here.describe()
        held = used = retained = 0
        for pool in _here.pools.values():
            with contextlib.suppress(_native.zcx().Failure):
                usage = pool.usage()
                held += usage["reserved"]
                used += usage["used"]
                retained += usage["reserved"] - usage["used"] if usage["exports"] else 0
    found.bytes = {"held": held, "idle": held - used, "retained": retained}
    parent = _parent()
    if parent is not None:
        found.counters = dict(parent.counters())
    return found


def reclaim() -> int:
    """Give back all that can be given back; the bytes. Host memory kept warm for the next call goes, and the arenas' idle slabs;
    the GPU pools' idle memory stays, because what was exported is not returned by a trim and would then be charged twice."""
    parent = _parent()
    freed = int(parent.reclaim()) if parent is not None else 0
    with _here.lock:
        arenas = [a for a in _here.arenas.values() if a is not None]
    return freed + sum(int(a.trim(True)[1]) for a in arenas)


def pool_for(ordinal: int) -> Any:
    """The device's exportable pool (`_zcx.Pool`), one for the process; None when the mode or the device has none."""
    with _here.lock:
        _here.catch_up()
        return _here.pool(ordinal) if _here.state == "on" else None


def made_pool(ordinal: int) -> Any:
    """The same pool if there is one already, else None. Opens and makes nothing."""
    return _here.pools.get(ordinal)


def shareable_pool(ordinal: int) -> Any:
    """The same pool whatever the mode: for memory that was asked for as shareable, and to tell what a tensor came from.

    Opens the driver. Error where there is none; None for a device that has no such pool."""
    from .errors import Error

    with _here.lock:
        if not _here.devices:
            try:
                _here.check_machine()
                _here.open_driver()
            except _Refused as refused:
                raise Error(str(refused)) from None
        return _here.pool(ordinal)


def arena_for(ordinal: int) -> Any:
    """The device's arena (`_zcx.Arena`), one for the process, whatever the mode; None where there can be none. Opens the driver."""
    from . import tensor

    tensor.watch_captures()
    with _here.lock:
        if ordinal not in _here.arenas:
            zcx = _native.zcx()
            try:
                _here.check_machine()
                _here.arenas[ordinal] = zcx.Arena(ordinal)
            except _Refused:
                _here.arenas[ordinal] = None
            except zcx.Failure as failure:
                if failure.code not in (zcx.E_UNFIT, zcx.E_NODRIVER):
                    raise
                _here.arenas[ordinal] = None
        return _here.arenas[ordinal]


@contextlib.contextmanager
def current_pool(pool: Any) -> Iterator[Any]:
    """While it is open, the calling thread's stream-ordered allocations on the pool's device come from it.

    Yields None, and changes nothing, for None or where the device's pool cannot be changed now (the calling thread captures a
    graph). Other threads' allocations in that time land in our pool too, which does no harm."""
    if pool is None:
        yield None
        return
    failure = _native.zcx().Failure
    # One thread at a time: two that interleave would put back each other's pool.
    with _here.gates[pool.ordinal]:
        used = pool
        try:
            previous = None if pool.is_current() else pool.make_current()
        except failure:
            used = previous = None
        try:
            yield used
        finally:
            if previous is not None:
                try:
                    pool.restore(previous)
                except failure as error:
                    _log.warning("comfy_zerocopy: the pool of cuda:%d stays current: %s", pool.ordinal, _say(error))


def results_pool(ordinal: int) -> contextlib.AbstractContextManager[Any]:
    """current_pool() of the device's pool where the mode has one, else nothing."""
    return current_pool(pool_for(ordinal))
