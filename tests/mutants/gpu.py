"""The simulated driver's streams, for both sides of a scenario: queue work, hold it back, let it go step by step.

A thread that names no stream must have a context: enter() gives it one, for good."""
from __future__ import annotations

import ctypes
import os
from typing import Any

lib = ctypes.CDLL(os.environ["ZCX_LIBCUDA"])
_u64 = ctypes.c_uint64
NON_BLOCKING = 1


def ok(result: int) -> None:
    assert result == 0, result


def enter(ordinal: int = 0) -> None:
    ok(lib.cuInit(0))
    context = ctypes.c_void_p()
    ok(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    ok(lib.cuCtxPushCurrent(context))


def stream() -> int:
    """A stream that the legacy one does not wait for."""
    made = ctypes.c_void_p()
    ok(lib.cuStreamCreate(ctypes.byref(made), NON_BLOCKING))
    assert made.value
    return made.value


def follow(on: int, before: int = 0) -> None:
    """`on` goes on after what `before` was given so far."""
    event = ctypes.c_void_p()
    ok(lib.cuEventCreate(ctypes.byref(event), 2))
    ok(lib.cuEventRecord(event, ctypes.c_void_p(before)))
    ok(lib.cuStreamWaitEvent(ctypes.c_void_p(on), event, 0))
    ok(lib.cuEventDestroy_v2(event))


def fill(x: Any, value: int, on: int = 0) -> None:
    """What stands for a kernel: it writes all of x, when its turn comes."""
    ok(lib.cuMemsetD8Async(_u64(x.address), ctypes.c_ubyte(value), ctypes.c_size_t(x.nbytes), ctypes.c_void_p(on)))


def hold(on: int = 0) -> None:
    ok(lib.simcuda_hold(ctypes.c_void_p(on)))


def step(on: int = 0, leave: int = 1) -> None:
    """All but the last `leave` operations of a held stream, to their end. No host is told that they are done."""
    while pending(on) > leave:
        assert lib.simcuda_step(ctypes.c_void_p(on), 10_000) == 1


def release(on: int = 0) -> None:
    ok(lib.simcuda_release(ctypes.c_void_p(on)))


def busy(microseconds: int, on: int = 0) -> None:
    ok(lib.simcuda_spin(ctypes.c_void_p(on), _u64(microseconds)))


def pending(on: int = 0) -> int:
    return lib.simcuda_pending(ctypes.c_void_p(on))


def synchronize(on: int = 0) -> None:
    ok(lib.cuStreamSynchronize(ctypes.c_void_p(on)))


def synchronize_all() -> None:
    ok(lib.cuCtxSynchronize())


def count(what: str) -> int:
    return lib.simcuda_count(what.encode())


def races() -> int:
    return lib.simcuda_races()


def fail(rules: str) -> None:
    lib.simcuda_fail(rules.encode())
