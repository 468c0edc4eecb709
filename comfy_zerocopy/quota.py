"""What a worker's code keeps of what it was lent, and how much of that is too much.

An input or result that it still refers to after the call (an attribute, a closure, a stored exception, a DLPack capsule, a view, a
thread) stays lent, and so its memory stays taken: nothing that a worker still maps is given back to an allocator. It may keep as much as
the quota allows: of host memory, and of each GPU's. What lease() holds is its caller's own decision, and not counted.
Does not: count (the session in C does), or act on an excess (parent.py does).
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from ._native import zcx


class Kept(NamedTuple):
    """What worker code still refers to of the calls of one function."""

    function: str
    device: int | None  # ordinal; None: host memory
    count: int  # of buffers
    nbytes: int

    def __str__(self) -> str:
        return f"{self.function}: {self.count} buffer{'s' * (self.count != 1)}, {self.nbytes} bytes of {place(self.device)}"


def place(device: int | None) -> str:
    return "host memory" if device is None else f"cuda:{device}"


def default(device: int | None) -> int:
    """A quarter of the machine's memory, or of the GPU's."""
    if device is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return int(next(d["total_bytes"] for d in zcx().driver()["devices"] if d["ordinal"] == device)) // 4


def excess(kept: Iterable[Kept], limit: int | None) -> dict[int | None, int]:
    """By place: the bytes kept there, of the places where that is more than the limit (None: the default)."""
    total: dict[int | None, int] = {}
    for k in kept:
        total[k.device] = total.get(k.device, 0) + k.nbytes
    return {device: n for device, n in total.items() if n > (default(device) if limit is None else limit)}


def say(kept: Iterable[Kept], over: dict[int | None, int], limit: int | None) -> str:
    """The sentence about an excess, for an error."""
    kept = list(kept)
    parts = []
    for device, nbytes in over.items():
        there = sorted((k for k in kept if k.device == device), key=lambda k: -k.nbytes)
        names = ", ".join(f"{k.count} of {k.function}" for k in there[:4]) + (", …" if len(there) > 4 else "")
        parts.append(f"{sum(k.count for k in there)} buffers with {nbytes} bytes of {place(device)} ({names}), and max_kept_bytes is "
                     f"{default(device) if limit is None else limit}")
    return ("its code still refers to what it was lent by calls that are over: " + "; ".join(parts)
            + ". What it wants to keep it must clone(): then the memory that was lent comes back")
