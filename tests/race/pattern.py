"""Bytes that both sides know, and what a process holds: descriptors, threads, mappings of shared memory, memory.

Only the standard library: workers without anything else import it too. Does not: start or check anything."""
from __future__ import annotations

import ctypes
import math
import os
import random

LONGEST = 4 << 20  # the largest tensor
#: Every tensor is a slice of this. Two slices that begin elsewhere have hardly a byte in common.
NOISE = random.Random(20).randbytes(LONGEST + (1 << 20))
_FIRST = ctypes.cast(NOISE, ctypes.c_void_p).value
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
EDGES = (1, 2, 63, 64, 65, 4095, 4096, 4097, 65536, (1 << 20) - 1, 1 << 20, (2 << 20) + 1)


def some_size(rng: random.Random, largest: int = LONGEST) -> int:
    """From 1 byte on, as often in each power of two; one in five at a size where something changes."""
    if rng.random() < 0.2:
        return min(rng.choice(EDGES), largest)
    return int(2 ** rng.uniform(0, math.log2(largest)))


def some_place(rng: random.Random, nbytes: int) -> int:
    return rng.randrange(len(NOISE) - nbytes)


def same(address: int, at: int, nbytes: int) -> bool:
    """Are these bytes NOISE's from `at` on? Without the GIL, and without a copy."""
    assert _FIRST is not None and 0 <= at <= len(NOISE) - nbytes
    return _memcmp(address, _FIRST + at, nbytes) == 0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # less the one that lists


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def mappings() -> int:
    """Of shared memory without a name in any file system."""
    with open("/proc/self/maps") as maps:
        return sum("/memfd:" in line for line in maps)


def resident() -> tuple[int, int]:
    """Bytes of memory: this process's own, and what it shares."""
    with open("/proc/self/statm") as statm:
        _, whole, shared = map(int, statm.read().split()[:3])
    page = os.sysconf("SC_PAGE_SIZE")
    return (whole - shared) * page, shared * page


def count() -> dict[str, int]:
    """What the simulated driver counts in this process; nothing on a real one."""
    path = os.environ.get("ZCX_LIBCUDA")
    if not path:
        return {}
    driver = ctypes.CDLL(path)
    if not hasattr(driver, "simcuda_count"):
        return {}
    return {f"simulated {n}": driver.simcuda_count(n.encode()) for n in ("allocations", "imports", "registered", "streams", "events")}
