"""Bytes that both sides know, and what a process holds: descriptors, threads, mappings of shared memory, memory, what is allocated.

Only the standard library: workers without anything else import it too. Does not: start or check anything."""
from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import sys

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


def in_files() -> int:
    """Bytes that the files without a name hold, of which this process has a descriptor; whether it maps them or not."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = f"/proc/self/fd/{fd}"
            if os.readlink(path).startswith("/memfd:"):
                stat = os.stat(path)
                found[stat.st_ino] = 512 * stat.st_blocks
    return sum(found.values())


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def allocated() -> dict[str, int]:
    """What is in use of memory, by what the allocators say: they keep more than that, which `resident` counts too. Python's
    blocks, which glibc knows nothing of, by their number; bytes only where glibc can say (2.33)."""
    found = {"python blocks": sys.getallocatedblocks()}
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Mallinfo2
        info = libc.mallinfo2()
        found["allocated"] = info.uordblks + info.hblkhd
    return found


def simulated_memory() -> int:
    """Bytes of the simulated GPUs' memory that this process's mappings show: a part of what it shares."""
    found, name = 0, ""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                name = rest
            elif first == "Rss:" and "/memfd:simcuda-" in name:
                found += int(rest.split()[0]) << 10
    return found


def count() -> dict[str, int]:
    """What the simulated driver counts in this process; nothing on a real one."""
    path = os.environ.get("ZCX_LIBCUDA")
    if not path:
        return {}
    driver = ctypes.CDLL(path)
    if not hasattr(driver, "simcuda_count"):
        return {}
    return {f"simulated {n}": driver.simcuda_count(n.encode()) for n in ("allocations", "imports", "registered", "streams", "events")}
