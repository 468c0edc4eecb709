#!/usr/bin/env python3
"""Import one pool allocation twice in one process: the same address, no second reference, and the first free unmaps both.

For comparison, legacy IPC: opening one handle twice also gives one address, but it is counted: after one close it still reads.
And what saves the day: allocations that share a 32 MiB chunk are independent of each other. Needs 32 MiB and two contexts."""

from __future__ import annotations

import ctypes
import os

import cudalib
from cudalib import MIB, Child, CudaError, Driver, Handle64, Importer, Report


class Worker(Importer):
    def op_code(self, key: str) -> dict:
        """The result code of a read."""
        target = (ctypes.c_ubyte * 4)()
        code = self.cu.code("cuMemcpyDtoHAsync", target, self.held[key], 4, self.stream)
        return {"code": code or self.cu.code("cuStreamSynchronize", self.stream), "bytes": bytes(target).hex()}

    def op_free_code(self, key: str) -> dict:
        return {"code": self.cu.code("cuMemFreeAsync", self.held.pop(key), self.stream)}

    def op_legacy(self, handle: str) -> dict:
        cu, h = self.cu, Handle64.from_buffer_copy(bytes.fromhex(handle))
        first, second = cu.by_value("cuIpcOpenMemHandle", h, 1), cu.by_value("cuIpcOpenMemHandle", h, 1)
        cu("cuIpcCloseMemHandle", first)
        self.held["legacy"] = second
        return {"same": first == second}


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    stream, pool = cu.stream(), cu.pool()
    fd = cu.pool_fd(pool)
    one, neighbour = cu.alloc(MIB, pool, stream), cu.alloc(MIB, pool, stream)
    cu.fill(one, 0x11, MIB, stream)
    cu.fill(neighbour, 0x22, MIB, stream)
    cu.sync(stream)
    blob = cu.blob(one).hex()
    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        first = worker.ask("import", key="first", blob=blob)["address"]
        try:
            second = worker.ask("import", key="second", blob=blob)["address"]
        except CudaError as error:
            report.step("second import", False, f"is refused: {error}")
            return
        report.step(
            "second import", first == second, f"returns {'the same address' if first == second else 'another address'}"
        )
        worker.ask("free", key="second")
        answer = worker.ask("code", key="first")
        report.step(
            "first free unmaps both",
            answer["code"] != 0,
            f"a read through the other import -> {cu.error_name(answer['code'])}, {answer['bytes']}",
            **answer,
        )

    with Child("worker") as worker:
        worker.ask("open", fds=(fd,))
        worker.ask("import", key="one", blob=blob)
        worker.ask("import", key="neighbour", blob=cu.blob(neighbour).hex())
        worker.ask("free", key="one")
        answer = worker.ask("code", key="neighbour")
        report.step(
            "neighbour in the chunk",
            answer["code"] == 0 and answer["bytes"] == "22" * 4,
            f"an allocation of the same 32 MiB chunk still reads {answer['bytes']}",
            **answer,
        )

    if not cu.has("cuMemAlloc", "cuIpcGetMemHandle"):
        report.skip("legacy IPC is counted", "this driver has no legacy IPC")
        return
    address, handle = ctypes.c_uint64(), Handle64()
    cu("cuMemAlloc", ctypes.byref(address), 2 * MIB)
    cu.fill(address.value, 0x33, 2 * MIB, stream)
    cu.sync(stream)
    cu("cuIpcGetMemHandle", ctypes.byref(handle), address.value)
    with Child("worker") as worker:
        worker.ask("open")
        same = worker.ask("legacy", handle=bytes(handle.bytes).hex())["same"]
        answer = worker.ask("code", key="legacy")
        report.step(
            "legacy IPC is counted",
            same and answer["code"] == 0 and answer["bytes"] == "33" * 4,
            f"opened twice (same address: {same}), closed once: still reads {answer['bytes']}",
            **answer,
        )
    os.close(fd)


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"worker": Worker},
        deadline=30,
        verdict="a second pool import is no second reference: keep one import per allocation, and count",
    )
