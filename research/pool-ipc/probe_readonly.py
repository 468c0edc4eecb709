#!/usr/bin/env python3
"""Can memory be lent to another process for reading only?

Imported pools: no, cuMemPoolSetAccess(READ) is refused, and so is a release threshold. VMM memory mapped with PROT_READ: yes,
a write there is an error in the writer, and the owner's bytes stay. Needs 64 MiB and two contexts; every write is made in a
helper process, whose context it may poison."""

from __future__ import annotations

import ctypes
import os

import cudalib
from cudalib import INVALID_VALUE, MIB, NOT_SUPPORTED, PROT_READ, PROT_READWRITE, Child, CudaError, Driver, Importer, Report

SIZE = 32 * MIB


class Worker(Importer):
    def op_restrict(self) -> dict:
        value = ctypes.c_uint64(2**64 - 1)
        return {
            "read_only": self.cu.pool_access(self.pool, PROT_READ),
            "both": self.cu.pool_access(self.pool, PROT_READWRITE),
            "threshold": self.cu.code("cuMemPoolSetAttribute", self.pool, 4, ctypes.byref(value)),
        }

    def op_map(self, flags: int) -> dict:
        handle = self.cu.vmm_open(self.received[0])
        os.close(self.received[0])
        self.held["vmm"] = self.cu.vmm_map(handle, SIZE, flags)
        self.stream = self.cu.stream()
        return {"bytes": self.cu.read(self.held["vmm"], 4, self.stream).hex()}

    def op_damage(self, how: str) -> dict:
        cu, where = self.cu, self.held["vmm"]
        if how == "kernel":
            cu.launch(cu.kernel("store"), self.stream, ctypes.c_uint64(where), ctypes.c_uint32(0x66666666))
            code = 0
        else:
            code = cu.code("cuMemsetD8Async", where, 0x66, 4096, self.stream)
        return {"call": code, "sync": cu.code("cuStreamSynchronize", self.stream), "context": cu.code("cuCtxSynchronize")}


def vmm_case(report: Report, cu: Driver, flags: int, how: str) -> None:
    name = f"VMM {'read-only' if flags == PROT_READ else 'read-write'}, {how}"
    stream, handle = cu.stream(), cu.vmm_create(SIZE)
    address = cu.vmm_map(handle, SIZE)
    cu.fill(address, 0x10, SIZE, stream)
    cu.sync(stream)
    fd = cu.vmm_fd(handle)
    try:
        with Child("worker") as worker:
            read = worker.ask("map", flags=flags, fds=(fd,))["bytes"]
            a = worker.ask("damage", how=how)
    except CudaError as error:
        report.skip(name, f"cannot be tried: {error}")
        return
    finally:
        os.close(fd)
    bytes_now = cu.read(address, 4, stream).hex()
    failed = next((c for c in (a["call"], a["sync"], a["context"]) if c), 0)
    whole = bytes_now == "10" * 4
    good = (read == "10" * 4) and (bool(failed) and whole if flags == PROT_READ else not failed and not whole)
    report.step(name, good, f"reads {read}; the write -> {cu.error_name(failed)}; the owner then sees {bytes_now}", **a)
    cu.vmm_unmap(address, SIZE, handle)


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    if cu.free_bytes() < 64 * MIB:
        raise cudalib.CannotRun("needs 64 MiB of free device memory")
    pool = cu.pool()
    fd = cu.pool_fd(pool)
    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        a = worker.ask("restrict")
    os.close(fd)
    report.step(
        "imported pool",
        a["read_only"] == NOT_SUPPORTED and a["both"] == 0,
        f"cuMemPoolSetAccess(READ) -> {cu.error_name(a['read_only'])}, (READWRITE) -> {cu.error_name(a['both'])}",
        **a,
    )
    report.step(
        "imported pool, threshold", a["threshold"] == INVALID_VALUE, f"setting it -> {cu.error_name(a['threshold'])}"
    )
    if not cu.has(*cu.VMM):
        report.skip("VMM", "this driver has no virtual memory management")
        return
    cases = [(PROT_READ, "memset"), (PROT_READ, "kernel"), (PROT_READWRITE, "memset")]
    if not cu.has("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"):
        report.skip("VMM read-only, kernel", "this driver loads no kernels")
        del cases[1]
    for flags, how in cases:
        vmm_case(report, cu, flags, how)


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"worker": Worker},
        deadline=40,
        verdict="pool imports are always writable; VMM mappings can be read-only",
    )
