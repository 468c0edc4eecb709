#!/usr/bin/env python3
"""What torch allocates under each of its backends, and which way of sharing that memory allows. Needs torch with CUDA.

native: legacy IPC of the segment's base. native with expandable segments: VMM pieces with file descriptors. cudaMallocAsync:
pool memory, exportable only if the current pool was made so. Decide by the pointer's attributes, never by the configuration.
One helper process per backend; needs 160 MiB of free device memory beyond a context."""

from __future__ import annotations

import ctypes
import importlib.util
import os

import cudalib
from cudalib import MIB, Child, Driver, Report, Role

SIZES = [1000, 3 * MIB, 64 * MIB]
BACKENDS = {
    "native": ("", False),
    "expandable": ("expandable_segments:True", False),
    "cudaMallocAsync": ("backend:cudaMallocAsync", False),
    "cudaMallocAsync, pool swapped": ("backend:cudaMallocAsync", True),
}
EXPECTED = {"native": "ipc", "expandable": "vmm", "cudaMallocAsync": "none", "cudaMallocAsync, pool swapped": "pool"}


class Allocator(Role):
    def op_open(self, swap: bool) -> dict:
        cu, self.pool = self.cu, 0
        if swap:
            self.pool = cu.pool()
            cu("cuDeviceSetMemPool", cu.ordinal, self.pool)
            os.close(cu.pool_fd(self.pool))
        import torch

        self.torch = torch
        return {"torch": torch.__version__, "backend": torch.cuda.get_allocator_backend()}

    def op_allocate(self, size: int) -> dict:
        cu = self.cu
        tensor = self.torch.zeros(size, dtype=self.torch.uint8, device=f"cuda:{cu.ordinal}")
        address = tensor.data_ptr()
        about = cu.pointer(address)
        base, whole, handle = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        cu("cuMemGetAddressRange", ctypes.byref(base), ctypes.byref(whole), address)
        legacy = cu.code("cuIpcGetMemHandle", (ctypes.c_ubyte * 64)(), base.value)
        retain = cu.code("cuMemRetainAllocationHandle", ctypes.byref(handle), base.value)
        fd, vmm = ctypes.c_int(-1), -1
        if not retain:
            vmm = cu.code("cuMemExportToShareableHandle", ctypes.byref(fd), handle.value, cudalib.POSIX_FD, 0)
            if not vmm:
                os.close(fd.value)
            cu("cuMemRelease", handle.value)
        pointer = cu.code("cuMemPoolExportPointer", (ctypes.c_ubyte * 64)(), base.value) if about["pool"] else -1
        rung = (
            "pool"
            if pointer == 0
            else "ipc"
            if about["legacy_ipc"] and legacy == 0
            else "vmm"
            if about["handle_types"] & cudalib.POSIX_FD and vmm == 0
            else "none"
        )
        return {
            "rung": rung,
            "legacy_ipc": about["legacy_ipc"],
            "handle_types": about["handle_types"],
            "in_a_pool": bool(about["pool"]),
            "ours": bool(self.pool) and about["pool"] == self.pool,
            "offset": address - base.value,
            "range": whole.value,
            "cuIpcGetMemHandle": legacy,
            "cuMemRetainAllocationHandle": retain,
            "cuMemPoolExportPointer": pointer,
        }


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    if importlib.util.find_spec("torch") is None:
        raise cudalib.CannotRun("torch is not installed for this interpreter")
    for name, (conf, swap) in BACKENDS.items():
        with Child("allocator", env={"PYTORCH_CUDA_ALLOC_CONF": conf}) as child:
            opened = child.ask("open", swap=swap, timeout=120)
            rows = [child.ask("allocate", size=size, timeout=60) for size in SIZES]
        rungs = {r["rung"] for r in rows}
        report.step(
            name,
            rungs == {EXPECTED[name]},
            f"torch {opened['torch']} ({opened['backend']}): shared by {' / '.join(sorted(rungs))}; "
            f"offsets in the allocation {[r['offset'] for r in rows]}, its sizes {[r['range'] // MIB for r in rows]} MiB",
            rows=rows,
        )


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"allocator": Allocator},
        deadline=150,
        verdict="native: legacy IPC; expandable segments: VMM handles; cudaMallocAsync: nothing, unless its pool is shareable",
    )
