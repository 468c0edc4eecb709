#!/usr/bin/env python3
"""Verify, step by step, that a process can share its GPU tensors with another while torch keeps its async allocator.

A pool with POSIX_FD handles is made the device's current pool; what cudaMallocAsync (and so torch's cudaMallocAsync
backend) allocates from then on can be exported. A second process without torch reads an allocation with no copy, writes into
it in place, is ordered by interprocess events, and gives its import back before the owner frees.

The chain is walked twice: with the driver alone, and with torch where it is installed. Needs 192 MiB of free device memory
beyond the two contexts (some 500 MiB each on a large card). Everything runs in helper processes."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import sys

import cudalib
from cudalib import INVALID_VALUE, MIB, CannotRun, Child, Driver, Importer, Report, Role

SIZE = 64 * MIB


class Owner(Role):
    """Swaps the pool, allocates (with torch or without), exports, owns everything."""

    def op_swap(self) -> dict:
        cu = self.cu
        self.pool = cu.pool()
        cu("cuDeviceSetMemPool", cu.ordinal, self.pool)
        current = ctypes.c_void_p()
        cu("cuDeviceGetMemPool", ctypes.byref(current), cu.ordinal)
        self.stream, self.torch = cu.stream(), None
        return {"current": current.value == self.pool}

    def op_torch(self) -> dict:
        import torch

        if not torch.cuda.is_available():
            raise CannotRun("the torch that is installed here sees no GPU")
        self.torch = torch
        x = torch.ones(4, device=f"cuda:{self.cu.ordinal}")
        return {
            "version": torch.__version__,
            "backend": torch.cuda.get_allocator_backend(),
            "sum": float(x.sum()),
            "allocated": torch.cuda.memory_allocated(),
        }

    def op_allocate(self) -> dict:
        cu, data = self.cu, os.urandom(SIZE)
        if self.torch:
            t = self.torch
            host = t.frombuffer(bytearray(data), dtype=t.uint8)
            self.tensor = host.to(f"cuda:{cu.ordinal}")
            t.cuda.synchronize()
            self.address = self.tensor.data_ptr()
        else:
            out = ctypes.c_uint64()
            cu("cuMemAllocAsync", ctypes.byref(out), SIZE, self.stream)
            self.address = out.value
            cu.write(self.address, data, self.stream)
        about = cu.pointer(self.address)
        return {
            "ours": about["pool"] == self.pool,
            "legacy_ipc": about["legacy_ipc"],
            "handle_types": about["handle_types"],
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    def op_export_early(self) -> dict:
        return {"code": self.cu.code("cuMemPoolExportPointer", (ctypes.c_ubyte * 64)(), self.address)}

    def op_export(self) -> dict:
        self.to_send = [self.cu.pool_fd(self.pool)]
        return {"blob": self.cu.blob(self.address).hex()}

    def op_events(self) -> dict:
        self.ready, self.done = self.cu.event(True), self.cu.event(True)
        return {"ready": self.cu.event_handle(self.ready).hex(), "done": self.cu.event_handle(self.done).hex()}

    def op_fill_and_record(self, byte: int) -> dict:
        self.cu.fill(self.address, byte, SIZE, self.stream)
        self.cu("cuEventRecord", self.ready, self.stream)
        return {}

    def op_await_done(self) -> dict:
        self.cu("cuStreamWaitEvent", self.stream, self.done, 0)
        return {"drained": self.cu.drained(self.stream, 10)}

    def op_hash(self) -> dict:
        if self.torch:
            return {
                "sha256": hashlib.sha256(
                    self.tensor.cpu().numpy().tobytes() if _numpy() else bytes(self.tensor.cpu().tolist())
                ).hexdigest()
            }
        return {"sha256": hashlib.sha256(self.cu.read(self.address, SIZE, self.stream)).hexdigest()}

    def op_free_memory(self) -> dict:
        return {"free": self.cu.free_bytes()}

    def op_release(self) -> dict:
        """Free, and allocate again: an ordinary life goes on."""
        if self.torch:
            t = self.torch
            side = t.cuda.Stream()
            self.tensor.record_stream(side)
            with t.cuda.stream(side):
                total = int((self.tensor.view(-1)[:1024] >= 0).sum())
            del self.tensor
            again = t.zeros(SIZE, dtype=t.uint8, device=f"cuda:{self.cu.ordinal}")
            t.cuda.synchronize()
            return {"ok": total == 1024 and int(again[-1]) == 0}
        cu = self.cu
        cu.free(self.address, self.stream)
        out = ctypes.c_uint64()
        cu("cuMemAllocAsync", ctypes.byref(out), SIZE, self.stream)
        cu.fill(out.value, 0, SIZE, self.stream)
        ok = cu.read(out.value + SIZE - 1, 1, self.stream) == b"\0"
        cu.free(out.value, self.stream)
        cu.sync(self.stream)
        return {"ok": ok}


class Worker(Importer):
    def op_modules(self) -> dict:
        return {"torch": "torch" in sys.modules, "numpy": "numpy" in sys.modules}

    def op_hash(self, key: str) -> dict:
        return {"sha256": hashlib.sha256(self.cu.read(self.held[key], SIZE, self.stream)).hexdigest()}

    def op_fill(self, key: str) -> dict:
        data = os.urandom(SIZE)
        self.cu.write(self.held[key], data, self.stream)
        return {"sha256": hashlib.sha256(data).hexdigest()}

    def op_events(self, ready: str, done: str) -> dict:
        self.ready = self.cu.event_open(bytes.fromhex(ready))
        self.done = self.cu.event_open(bytes.fromhex(done))
        return {}

    def op_gated(self, key: str, byte: int) -> dict:
        """Behind READY: look at what the owner wrote, write, un-import, record DONE; the host waits for nothing but the look."""
        cu, seen = self.cu, (ctypes.c_ubyte * 4)()
        cu("cuStreamWaitEvent", self.stream, self.ready, 0)
        cu("cuMemcpyDtoHAsync", seen, self.held[key] + SIZE - 4, 4, self.stream)
        cu.sync(self.stream)
        cu.fill(self.held[key], byte, SIZE, self.stream)
        cu.free(self.held.pop(key), self.stream)
        cu("cuEventRecord", self.done, self.stream)
        return {"seen": bytes(seen).hex()}


def _numpy() -> bool:
    return importlib.util.find_spec("numpy") is not None


def chain(report: Report, with_torch: bool) -> None:
    mark = "torch" if with_torch else "driver"
    with Child("owner", env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}) as owner, Child("worker") as worker:
        report.step(f"{mark}: swap", owner.ask("swap")["current"], "our pool is the device's current pool")
        if with_torch:
            t = owner.ask("torch", timeout=120)
            report.step(
                "torch: start",
                t["backend"] == "cudaMallocAsync" and t["sum"] == 4.0,
                f"torch {t['version']} came up on backend {t['backend']}",
            )
            report.step(
                "torch: statistics",
                t["allocated"] == 0,
                f"memory_allocated() says {t['allocated']} with tensors alive: it reads the default pool",
                **t,
            )
        a = owner.ask("allocate", timeout=60)
        report.step(
            f"{mark}: allocation",
            a["ours"] and not a["legacy_ipc"],
            "a plain allocation lies in our pool and is not legacy-IPC capable",
            **a,
        )
        code = owner.ask("export_early")["code"]
        report.step(
            f"{mark}: order",
            code == INVALID_VALUE,
            f"pointer export before the pool's own export -> {code} (INVALID_VALUE is 1)",
            code=code,
        )
        blob = owner.ask("export")["blob"]
        fd = owner.fds[0]
        worker.ask("open", fds=(fd,))
        os.close(fd)
        before = owner.ask("free_memory")["free"]
        imported = worker.ask("import", key="a", blob=blob)
        used = before - owner.ask("free_memory")["free"]
        here = worker.ask("modules")
        report.step(
            f"{mark}: import",
            used < SIZE // 2 and not here["torch"],
            f"a process without torch imported {SIZE // MIB} MiB in {imported['us']:.0f} us; device memory used: {used // MIB} MiB",
            us=imported["us"],
            used=used,
        )
        report.step(
            f"{mark}: read",
            worker.ask("hash", key="a", timeout=60)["sha256"] == a["sha256"],
            "the worker reads the owner's bytes",
        )
        wrote = worker.ask("fill", key="a", timeout=60)["sha256"]
        report.step(
            f"{mark}: write in place",
            owner.ask("hash", timeout=60)["sha256"] == wrote,
            "the owner sees what the worker wrote",
        )
        events = owner.ask("events")
        worker.ask("events", **events)
        owner.ask("fill_and_record", byte=0x3C)
        seen = worker.ask("gated", key="a", byte=0x5D)["seen"]
        drained = owner.ask("await_done")["drained"]
        report.step(
            f"{mark}: events",
            seen == "3c" * 4
            and drained
            and owner.ask("hash", timeout=60)["sha256"] == hashlib.sha256(b"\x5d" * SIZE).hexdigest(),
            "READY orders the worker's read, DONE the owner's; the import was given back before DONE",
        )
        report.step(
            f"{mark}: teardown",
            owner.ask("release", timeout=60)["ok"],
            "the owner frees after the importer, and allocates again",
        )


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    if not cu.attribute(115):
        raise CannotRun("this device has no memory pools")
    if not cu.attribute(119) & cudalib.POSIX_FD:
        raise CannotRun("pools of this device cannot be shared by file descriptor (WSL2, vGPU and some others)")
    if cu.free_bytes() < 192 * MIB:
        raise CannotRun(f"needs 192 MiB of free device memory, {cu.free_bytes() // MIB} are free")
    chain(report, False)
    if importlib.util.find_spec("torch") is None:
        report.skip("torch", "torch is not installed for this interpreter")
    else:
        try:
            chain(report, True)
        except CannotRun as error:
            report.skip("torch", str(error))


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"owner": Owner, "worker": Worker},
        deadline=150,
        verdict="allocations made after the swap are shared without a copy, both ways, with ordered access and teardown",
    )
