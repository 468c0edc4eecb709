#!/usr/bin/env python3
"""What it costs to share memory with another process, by size and by means; medians of a few rounds, in microseconds.

Pool: export of the pointer; import the first time; import again after a stream-ordered un-import, and after one followed by a
synchronise (which drops the driver's cached mapping). VMM: import, reserve, map, set access. Legacy IPC: open. For comparison a
device-to-device copy of that size. And many small ones: exports of 64 KiB each against copying them into one slab.
Sizes 2 MiB to 4 GiB, as far as free device memory allows (twice the size, and two contexts). Single runs of one machine: orders
of magnitude, not benchmarks."""

from __future__ import annotations

import ctypes
import os
import statistics
import time

import cudalib
from cudalib import CHUNK_LIMIT, GIB, MEASURED, MIB, CannotRun, Child, Driver, Handle64, Importer, Report, chunks

SIZES = [2 * MIB, 64 * MIB, GIB, 4 * GIB]
SMALL, MANY = 64 << 10, 256


class Worker(Importer):
    def op_vmm(self, size: int) -> dict:
        begin = time.perf_counter()
        handle = self.cu.vmm_open(self.received[0])
        address = self.cu.vmm_map(handle, size)
        took = time.perf_counter() - begin
        self.cu.vmm_unmap(address, size, handle)
        os.close(self.received[0])
        return {"us": took * 1e6}

    def op_legacy(self, handle: str) -> dict:
        begin = time.perf_counter()
        address = self.cu.by_value("cuIpcOpenMemHandle", Handle64.from_buffer_copy(bytes.fromhex(handle)), 1)
        took = time.perf_counter() - begin
        self.cu("cuIpcCloseMemHandle", address)
        return {"us": took * 1e6}

    def op_many(self, blobs: list) -> dict:
        raw = [bytes.fromhex(b) for b in blobs]
        begin = time.perf_counter()
        addresses = [self.cu.import_pointer(self.pool, b) for b in raw]
        took = time.perf_counter() - begin
        for a in addresses:
            self.cu.free(a, self.stream)
        return {"us": took * 1e6}


def timed(function, *arguments) -> tuple:
    begin = time.perf_counter()
    result = function(*arguments)
    return (time.perf_counter() - begin) * 1e6, result


def one_size(report: Report, cu: Driver, size: int) -> None:
    rounds = 3 if size >= GIB else 7
    stream, pool, row = cu.stream(), cu.pool(), {}
    fd = cu.pool_fd(pool)
    address = cu.alloc(size, pool, stream)
    row["export"], blob = timed(cu.blob, address)
    if chunks(blob, size) > CHUNK_LIMIT:
        raise CannotRun(
            f"the allocation of {size // MIB} MiB straddles {chunks(blob, size)} chunks, more than an import survives"
        )
    row["export again"] = timed(cu.blob, address)[0]
    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        row["import, first"] = worker.ask("import", key="a", blob=blob.hex())["us"]
        warm, cold = [], []
        for _ in range(rounds):
            worker.ask("free", key="a", sync=False)
            warm.append(worker.ask("import", key="a", blob=blob.hex())["us"])
        for _ in range(rounds):
            worker.ask("free", key="a", sync=True)
            cold.append(worker.ask("import", key="a", blob=blob.hex())["us"])
        worker.ask("free", key="a")
        row["import, mapping cached"], row["import, after a synchronise"] = statistics.median(warm), statistics.median(cold)
        if cu.has("cuMemcpyDtoDAsync"):
            target = cu.alloc(size, pool, stream)
            copies = []
            for _ in range(rounds):
                begin = time.perf_counter()
                cu("cuMemcpyDtoDAsync", target, address, size, stream)
                cu.sync(stream)
                copies.append((time.perf_counter() - begin) * 1e6)
            row["device copy"] = statistics.median(copies[1:])
            cu.free(target, stream)
    cu.free(address, stream)
    cu.sync(stream)
    os.close(fd)
    cu("cuMemPoolDestroy", pool)
    with Child("worker") as worker:
        worker.ask("open")
        if cu.has(*cu.VMM):
            handle = cu.vmm_create(size)
            took = []
            for _ in range(rounds):
                vmm = cu.vmm_fd(handle)
                took.append(worker.ask("vmm", size=size, fds=(vmm,))["us"])
                os.close(vmm)
            row["VMM import and map"] = statistics.median(took)
            cu("cuMemRelease", handle)
        if cu.has("cuMemAlloc", "cuIpcGetMemHandle", "cuMemFree"):
            out, handle64 = ctypes.c_uint64(), Handle64()
            cu("cuMemAlloc", ctypes.byref(out), size)
            cu("cuIpcGetMemHandle", ctypes.byref(handle64), out.value)
            row["legacy open"] = statistics.median(
                worker.ask("legacy", handle=bytes(handle64.bytes).hex())["us"] for _ in range(rounds)
            )
            cu("cuMemFree", out.value)
    report.step(f"{size // MIB} MiB", MEASURED, ", ".join(f"{k} {v:.0f} us" for k, v in row.items()), **row)


def many_small(report: Report, cu: Driver) -> None:
    stream, pool = cu.stream(), cu.pool()
    fd = cu.pool_fd(pool)
    places = [cu.alloc(SMALL, pool, stream) for _ in range(MANY)]
    slab = cu.alloc(SMALL * MANY, pool, stream)
    export, blobs = timed(lambda: [cu.blob(p) for p in places])
    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        took = worker.ask("many", blobs=[b.hex() for b in blobs])["us"]
    begin = time.perf_counter()
    for i, p in enumerate(places):
        cu("cuMemcpyDtoDAsync", slab + i * SMALL, p, SMALL, stream)
    cu.sync(stream)
    copy = (time.perf_counter() - begin) * 1e6
    report.step(
        f"{MANY} of 64 KiB",
        MEASURED,
        f"exports {export:.0f} us, imports {took:.0f} us, copies into one slab {copy:.0f} us",
        exports=export,
        imports=took,
        copies=copy,
    )
    os.close(fd)


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    room = cu.free_bytes() - 700 * MIB
    for size in SIZES:
        if 2 * size + 64 * MIB > room:
            report.skip(f"{size // MIB} MiB", f"needs {(2 * size) // MIB + 764} MiB of free device memory")
        else:
            one_size(report, cu, size)
    many_small(report, cu)


if __name__ == "__main__":
    cudalib.run(__file__, __doc__, experiment, {"worker": Worker}, deadline=90, verdict="measured, see the rows above")
