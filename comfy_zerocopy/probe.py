"""How large an import this driver bears: measured in a process that nobody needs, and remembered for each driver version.

    python -m comfy_zerocopy doctor --probe

A ladder of imports, counted in chunks of 32 MiB, up to the guard's 128 and never beyond: above it the drivers that were looked at
overrun their importer's stack, up to 164 chunks without any sign, so that an import which succeeds there shows nothing. What is
learnt can therefore only lower the guard (obey()), never raise it. docs/windows.md has the story.
Does not: prove windows for any worker (canary.py does, at each start); run inside a host.
"""
from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from ._native import zcx

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128)
ENVIRONMENT = "ZCX_CHUNK_LIMIT"  # read by csrc/window.c, which takes nothing above its own limit
_FILE = "drivers.json"


def release(driver: dict[str, Any]) -> str:
    """The driver's version as its maker names it ("580.159.04"), else the CUDA version that it says."""
    found = re.search(r"libcuda\.so\.(\d+\.[\d.]*\d)$", os.path.realpath(driver["path"]))
    if found:
        return found[1]
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
        found = re.search(r"\bKernel Module\b.*?(\d+\.\d+[\d.]*)", text)
    except OSError:
        found = None
    return found[1] if found else f"CUDA {driver['version'] // 1000}.{driver['version'] % 1000 // 10}"


def _path() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")) / "comfy-zerocopy" / _FILE


def _all() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def remembered(driver: dict[str, Any]) -> dict[str, Any] | None:
    """What was measured on this version before: limit, tried (chunks), says, when. None: nothing, or nothing readable."""
    found = _all().get(release(driver))
    if not isinstance(found, dict):
        return None
    numbers = [found.get("limit"), found.get("tried")]
    fit = all(type(n) is int and 0 <= n <= LADDER[-1] for n in numbers)
    return found if fit and isinstance(found.get("says"), str) and isinstance(found.get("when"), str) else None


def _remember(driver: dict[str, Any], record: dict[str, Any]) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, part = tempfile.mkstemp(prefix=".part-", dir=path.parent)
    with os.fdopen(fd, "w", encoding="utf-8") as stream:
        json.dump({**_all(), release(driver): record}, stream, indent=1)
    os.replace(part, path)


# ---- obeying ----

_lock = threading.RLock()
_obeyed = False


def obey() -> None:
    """Lower the guard to what was measured on this driver version. Once for the process; its workers inherit it.

    Called when a pool is first offered: the driver is open by then."""
    global _obeyed
    with _lock:
        if _obeyed:
            return
        _obeyed = True
        found = remembered(zcx().driver())
        if found is not None and found["limit"] < min(in_force(), LADDER[-1]):
            os.environ[ENVIRONMENT] = str(max(found["limit"], 1))  # 0 would mean nothing; at 1 the start-up check fails, and says so


def in_force() -> int:
    """The guard's limit, as csrc/window.c reads it."""
    found = re.match(r"\s*\+?(\d+)", os.environ.get(ENVIRONMENT, ""))
    return min(int(found[1]) or LADDER[-1], LADDER[-1]) if found else LADDER[-1]


# ---- measuring ----


def measure(ordinal: int = 0, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Climb the ladder on one GPU; what was found, remembered. Error or Failure when nothing can be measured at all.

    Takes up to 4 GiB of GPU memory for some seconds: as much as there is, if that is less."""
    global _obeyed
    from . import canary
    from ._install import shareable_pool
    from .array import Array
    from .errors import CallTimeout, Error, WorkerDied
    from .ladder import allocate
    from .parent import Worker

    _obeyed = True  # what an earlier look found must not narrow this one
    chunk, driver, pool = zcx().CHUNK_BYTES, zcx().driver(), shareable_pool(ordinal)
    if pool is None:
        raise Error(f"cuda:{ordinal} has no pool that can be exported")
    most, good, why, died = in_force(), 0, "", False
    with Worker(f"{__package__}.probe_worker", name="probe", timeout=120) as w:
        for n in [n for n in LADDER if n < most] + [most]:
            nbytes = (n - 1) * chunk + 1  # touches n chunks, wherever it begins
            try:
                x = Array(*allocate(ordinal, nbytes, pool, None), (nbytes,), "uint8", None, ordinal)  # of the pool, whatever its size
                places = sorted({0, *range(chunk // 2, nbytes, chunk), nbytes - 1})
                for p in places:
                    _write(x, p)
                got = w.call("seen", x, places)
            except CallTimeout:
                died, why = True, f"an import of {n} chunks did not end"
                break
            except WorkerDied as error:
                if error.signal == signal.SIGKILL:
                    raise  # somebody ended it: that says nothing about the driver
                died, why = True, f"an import of {n} chunks ended the process that made it ({canary.ending(vars(error))})"
                break
            except Exception as error:
                if getattr(error, "cuda", 0) != 2 and not isinstance(error, MemoryError):
                    raise
                why = f"the GPU had no memory free to try {n} chunks"
                break
            crossed = w.last_report.transfers[0]
            if crossed.copied:
                raise Error(f"cuda:{ordinal} is not shared: {crossed.reason}")
            if got != bytes(_value(p) for p in places):
                died, why = True, f"an import of {n} chunks showed other bytes"
                break
            good = n
            tell(f"{n} chunks ({n * chunk >> 20} MiB): right")
            del x
    windows = "not tried" if died else canary.sacrifice(pool)
    record = {"limit": good if died else LADDER[-1], "tried": good, "says": _say(good, most, why, died, windows), "when": time.strftime("%Y-%m-%d"),
              "windows": windows or "proved"}
    _remember(driver, record)
    return {"driver": release(driver), **record}


def _value(place: int) -> int:
    return 1 + place * 2654435761 // 4096 % 251


def _write(x: Any, place: int) -> None:
    from .array import Array

    Array(x.owner, x.address + place, (1,), "uint8", None, x.device).copy_from(bytes([_value(place)]))


def _say(good: int, most: int, why: str, died: bool, windows: str) -> str:
    size = f"{good * 32} MiB ({good} chunks)"
    if died:
        return f"imports up to {size} are right, and {why}: no larger one is made on this driver version"
    text = f"imports up to {size} are right"
    if good < most:
        text += f"; {why}, so that the guard stays at {LADDER[-1]} chunks"
    return text + ("; larger allocations cross in windows" if not windows else f"; larger allocations are copied: {windows}")
