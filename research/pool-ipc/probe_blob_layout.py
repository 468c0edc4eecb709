#!/usr/bin/env python3
"""What the 64 bytes of CUmemPoolPtrExportData hold, as far as it can be told from outside, and what follows from it.

The allocation's offset in the pool stands at byte 24 and its size at byte 32, both u64. A copy narrowed to a window imports
that window; windows imported one by one land contiguously, though the driver's own copies and fills do not cross from one into the
next. A blob that outlived its allocation imports all the same, and can show bytes of another time: a blob belongs to one
allocation and must be forgotten with it. None of this is documented.
Needs 352 MiB of free device memory and two contexts."""

from __future__ import annotations

import ctypes
import os

import cudalib
from cudalib import CHUNK, INVALID_VALUE, MEASURED, MIB, Child, ChildDied, CudaError, Driver, Importer, Report, window


def field(blob: bytes, at: int) -> int:
    return int.from_bytes(blob[at : at + 8], "little")


class Worker(Importer):
    def op_copies(self, key: str, offset: int, count: int) -> dict:
        """What the driver's own copies and fills answer over a range that begins in that import; the first byte that came out."""
        cu, start, stream = self.cu, self.held[key] + offset, self.stream
        own, host = cu.alloc(count, cu.default_pool(), stream), ctypes.create_string_buffer(count)
        codes = {
            "DtoD": cu.code("cuMemcpyDtoDAsync", own, start, count, stream),
            "DtoH": cu.code("cuMemcpyDtoHAsync", host, start, count, stream),
            "memset": cu.code("cuMemsetD8Async", start, FILL, count, stream),
        }
        copied = cu.read(own, 1, stream)[0]
        cu.free(own, stream)
        cu.sync(stream)
        return {"codes": codes, "bytes": [copied, host.raw[0]]}


FILL = 0x66


def copies_across(report: Report, cu: Driver, worker: Child, base: int, blob: bytes, size: int, stream: int) -> None:
    """Copies and fills over the end of a window: in one piece, and in two that meet there."""
    seam, side = CHUNK - field(blob, 24) % CHUNK, 4096
    cu.fill(base, 0x21, seam, stream)
    cu.fill(base + seam, 0x22, size - seam, stream)
    cu.sync(stream)
    low = worker.ask("import", key="low", blob=window(blob, 0, seam).hex())["address"]
    high = worker.ask("import", key="high", blob=window(blob, seam, size - seam).hex())["address"]
    if high != low + seam:
        report.step("copies across windows", False, f"the two windows lie {high - low} apart, not {seam}")
        return

    def around() -> list:
        return [cu.read(base + at, 1, stream)[0] for at in (seam - side, seam - 1, seam, seam + side - 1)]

    whole = worker.ask("copies", key="low", offset=seam - side, count=2 * side)
    untouched = around()
    pieces = [
        worker.ask("copies", key="low", offset=seam - side, count=side),
        worker.ask("copies", key="high", offset=0, count=side),
    ]
    written = around()
    good = (
        all(code == INVALID_VALUE for code in whole["codes"].values())
        and untouched == [0x21, 0x21, 0x22, 0x22]
        and all(code == 0 for piece in pieces for code in piece["codes"].values())
        and [piece["bytes"] for piece in pieces] == [[0x21] * 2, [0x22] * 2]
        and written == [FILL] * 4
    )
    said = ", ".join(f"{call} {cu.error_name(code)}" for call, code in whole["codes"].items())
    cut = "work" if all(code == 0 for piece in pieces for code in piece["codes"].values()) else "do not work"
    report.step(
        "copies across windows",
        good,
        f"over the end of a window: {said}; the same in pieces that end there {cut}",
        across=whole["codes"],
        pieces=[piece["codes"] for piece in pieces],
        untouched=untouched,
        written=written,
    )
    for key in ("low", "high"):
        worker.ask("free", key=key)


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
        copies_across(report, cu, worker, first, blobs[0], sizes[0], stream)

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
        {"worker": Worker},
        deadline=45,
        verdict="offset at byte 24, size at byte 32; narrowed copies import as contiguous windows, over whose ends the "
        "driver's copies do not go; a stale blob must never be used",
    )
