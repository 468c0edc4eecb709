#!/usr/bin/env python3
"""What the 64 bytes of CUmemPoolPtrExportData hold, as far as it can be told from outside, and what follows from it.

The allocation's offset in the pool stands at byte 24 and its size at byte 32, both u64. A copy narrowed to a window imports
that window; windows imported one by one land contiguously. A blob that outlived its allocation imports all the same, and can
show bytes of another time: a blob belongs to one allocation and must be forgotten with it. None of this is documented.
Needs 352 MiB of free device memory and two contexts."""

from __future__ import annotations

import ctypes
import os

import cudalib
from cudalib import CHUNK, INVALID_VALUE, MEASURED, MIB, Child, ChildDied, CudaError, Driver, Importer, Report, window


def field(blob: bytes, at: int) -> int:
    return int.from_bytes(blob[at : at + 8], "little")


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    if cu.free_bytes() < 352 * MIB:
        raise cudalib.CannotRun(f"needs 352 MiB of free device memory, {cu.free_bytes() // MIB} are free")
    stream, pool = cu.stream(), cu.pool()

    first = cu.alloc(64 * MIB, pool, stream)
    data = (ctypes.c_ubyte * 64)()
    early = cu.code("cuMemPoolExportPointer", data, first)
    fd = cu.pool_fd(pool)
    late = cu.code("cuMemPoolExportPointer", data, first)
    report.step(
        "order",
        early == INVALID_VALUE and late == 0,
        f"pointer export before the pool's handle was exported -> {cu.error_name(early)}, after -> {cu.error_name(late)}",
        before=early,
        after=late,
    )
    code = cu.code("cuMemPoolExportPointer", data, first + 4096)
    report.step(
        "interior pointer", code == INVALID_VALUE, f"-> {cu.error_name(code)}: export the base and send an offset", code=code
    )
    default = ctypes.c_uint64()
    cu("cuMemAllocFromPoolAsync", ctypes.byref(default), MIB, cu.default_pool(), stream)
    code = cu.code("cuMemPoolExportPointer", data, default.value)
    report.step(
        "default pool", code == INVALID_VALUE, f"an allocation of the default pool -> {cu.error_name(code)}", code=code
    )

    sizes = [64 * MIB, 5 * MIB, 96 * MIB, 33 * MIB]
    places = [first] + [cu.alloc(size, pool, stream) for size in sizes[1:]]
    blobs = [cu.blob(p) for p in places]
    offsets = [field(b, 24) for b in blobs]
    rounded = [field(b, 32) for b in blobs]
    holds = all(o - offsets[0] == p - places[0] for o, p in zip(offsets, places)) and all(
        size <= r < size + 2 * MIB for size, r in zip(sizes, rounded)
    )
    report.step(
        "fields",
        holds,
        f"offsets {[o // MIB for o in offsets]} MiB (byte 24) follow the addresses, "
        f"sizes {[r // MIB for r in rounded]} MiB (byte 32)",
        blobs=[b.hex() for b in blobs],
    )
    if not holds:
        return

    big, size = places[2], sizes[2]
    for i in range(size // CHUNK):
        cu.fill(big + i * CHUNK, 0x40 + i, CHUNK, stream)
    cu.sync(stream)
    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        at = [
            worker.ask("import", key=f"w{i}", blob=window(blobs[2], i * CHUNK, CHUNK).hex())["address"]
            for i in range(size // CHUNK)
        ]
        steps = [b - a for a, b in zip(at, at[1:])]
        got = [worker.ask("read", key=f"w{i}")["bytes"] for i in range(len(at))]
        good = steps == [CHUNK] * len(steps) and got == [f"{0x40 + i:02x}" * 4 for i in range(len(at))]
        report.step(
            "windows",
            good,
            f"{len(at)} windows of 32 MiB {'are contiguous with the right bytes' if good else f'lie {steps} apart with {got}'}",
            steps=steps,
            bytes=got,
        )
        worker.ask("free", key="w0")
        rest = worker.ask("read", key="w1")["bytes"]
        report.step("windows are independent", rest == "41" * 4, f"one freed, the next still reads {rest}")

    # A blob that is older than the tensor at its address.
    old = cu.alloc(64 * MIB, pool, stream)
    cu.fill(old, 0xA1, 64 * MIB, stream)
    cu.sync(stream)
    stale = cu.blob(old)
    for p in [*places, old]:
        cu.free(p, stream)
    cu.sync(stream)
    cu("cuMemPoolTrimTo", pool, 0)
    again = [cu.alloc(64 * MIB, pool, stream) for _ in range(4)]
    for p in again:
        cu.fill(p, 0xB2, 64 * MIB, stream)
    cu.sync(stream)
    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        try:
            worker.ask("import", key="stale", blob=stale.hex())
            seen = worker.ask("read", key="stale")["bytes"]
            report.step(
                "stale blob",
                True if seen != "b2" * 4 else MEASURED,
                f"imports without an error and shows {seen}; the owner's new tensors hold b2b2b2b2 everywhere",
                bytes=seen,
            )
        except CudaError as error:
            report.step("stale blob", True, f"is refused ({error})")
        except ChildDied as error:
            report.step("stale blob", True, f"kills the importer ({error})")
    for p in again:
        cu.free(p, stream)
    cu.sync(stream)
    os.close(fd)


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"worker": Importer},
        deadline=45,
        verdict="offset at byte 24, size at byte 32; narrowed copies import as contiguous windows; a stale blob must never be used",
    )
