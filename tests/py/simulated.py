"""For scripts on the simulated driver: a parent without libraries, and what it sees of a worker."""
from __future__ import annotations

import logging
import pathlib
import re
import signal
import threading
import time

import comfy_zerocopy as zcx
from comfy_zerocopy import _install, canary, ladder
from comfy_zerocopy._native import zcx as core
from comfy_zerocopy.array import Array

__all__ = ["CHUNK", "Array", "byte", "canary", "core", "filled", "from_worker", "in_pool", "log", "marked", "next_best", "re", "shared", "signal", "threading", "time", "worker", "zcx"]

CHUNK = 32 << 20
log: list[str] = []


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.append(record.getMessage())


logging.getLogger("comfy_zerocopy").addHandler(_Log())
logging.getLogger("comfy_zerocopy").setLevel(logging.INFO)


def worker(**options):
    """A worker of workers/device.py."""
    return zcx.Worker(pathlib.Path(__file__).parent / "workers" / "device.py", **{"timeout": 40, **options})


def byte(x, place):
    return Array(x.owner, x.address + place, (1,), "uint8", None, x.device)


def filled(nbytes, value, device="cuda"):
    x = zcx.empty((nbytes,), "uint8", device)
    x.copy_from(bytes([value]) * nbytes)
    return x


def in_pool(nbytes, ordinal=0):
    """Of the pool whatever its size: empty() takes the arena for what would need windows."""
    owner, address = ladder.allocate(ordinal, nbytes, _install.shareable_pool(ordinal), None)
    return Array(owner, address, (nbytes,), "uint8", None, ordinal)


def marked(nbytes, places):
    """Large, of the pool, but only the pages of its marks exist."""
    x = in_pool(nbytes)
    for place, value in places.items():
        byte(x, place).copy_from(bytes([value]))
    return x


def shared(w):
    """Did all that crossed in the last call cross without a copy? Else the reasons."""
    transfers = w.last_report.transfers
    assert transfers
    return True if all(t.rung == "pool" and not t.copied for t in transfers) else "; ".join(t.reason for t in transfers)


def next_best(w, direction, device=True):
    """Where the pool cannot be used: an input was staged, a result lies in the arena; without a device rung both came by the host."""
    (t,) = [t for t in w.last_report.transfers if t.direction == direction]
    wanted = ("host", True) if not device else ("staged", True) if direction == "input" else ("vmm", False)
    assert (t.rung, t.copied) == wanted, t


def from_worker(w, nbytes=5000):
    """A result's bytes are right; (shared or why not)."""
    assert w.call("filled", nbytes, 7).tobytes() == b"\7" * nbytes
    return shared(w)
