#!/usr/bin/env python3
"""What an IPC pool means for CUDA graph capture.

1. Inside a capture: an allocation from an IPC pool is refused; from the default pool it is captured; changing the current pool
   during a capture invalidates it; default pool put back before and ours after works.
2. In another thread while one captures in global mode (torch's default): which calls are refused *and* break that capture, and
   that bracketing them with cuThreadExchangeStreamCaptureMode(RELAXED) saves both; but not from what concerns the whole context.
Each case runs in a fresh helper process, because a broken capture is hard to leave. Needs 16 MiB and one context at a time."""

from __future__ import annotations

import ctypes
import mmap
import threading

import cudalib
from cudalib import CAPTURE_UNSUPPORTED, NOT_SUPPORTED, Child, Driver, Report, Role

GLOBAL, RELAXED = 0, 2


class Capturer(Role):
    def _begin(self) -> int:
        stream = self.cu.stream()
        self.cu("cuStreamBeginCapture", stream, GLOBAL)
        return stream

    def _end(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        return self.cu.code("cuStreamEndCapture", stream, ctypes.byref(graph))

    def op_inside(self, case: str) -> dict:
        cu = self.cu
        ours, default, out = cu.pool(), cu.default_pool(), ctypes.c_uint64()
        if case == "ours current":
            cu("cuDeviceSetMemPool", cu.ordinal, ours)
        elif case == "default put back":
            cu("cuDeviceSetMemPool", cu.ordinal, ours)
            cu("cuDeviceSetMemPool", cu.ordinal, default)
        stream = self._begin()
        changed = cu.code("cuDeviceSetMemPool", cu.ordinal, ours) if case == "changed during capture" else 0
        if case == "named pool":
            code = cu.code("cuMemAllocFromPoolAsync", ctypes.byref(out), 4096, ours, stream)
        else:
            code = cu.code("cuMemAllocAsync", ctypes.byref(out), 4096, stream)
        end = self._end(stream)
        return {"changed": changed, "alloc": code, "end": end}

    def op_elsewhere(self, call: str, relaxed: bool) -> dict:
        cu = self.cu
        ours, default, side = cu.pool(), cu.default_pool(), cu.stream()
        cu.pool_fd(ours)
        block = cu.alloc(4096, ours, side)
        page = mmap.mmap(-1, 8192)
        base = ctypes.addressof(ctypes.c_char.from_buffer(page))
        cu("cuMemHostRegister", base + 4096, 4096, 3)
        word, out, free, total = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
        cu("cuMemHostGetDevicePointer", ctypes.byref(word), base + 4096, 0)
        calls = {
            "nothing": lambda: 0,
            "cuDeviceSetMemPool": lambda: (
                cu.code("cuDeviceSetMemPool", cu.ordinal, ours) or cu.code("cuDeviceSetMemPool", cu.ordinal, default)
            ),
            "cuMemPoolExportPointer": lambda: cu.code("cuMemPoolExportPointer", (ctypes.c_ubyte * 64)(), block),
            "cuMemAllocFromPoolAsync": lambda: cu.code("cuMemAllocFromPoolAsync", ctypes.byref(out), 4096, ours, side),
            "cuMemHostRegister": lambda: cu.code("cuMemHostRegister", base, 4096, 3),
            "cuStreamQuery": lambda: cu.code("cuStreamQuery", side),
            "cuCtxRecordEvent": lambda: cu.code("cuCtxRecordEvent", context, event),
            "cuCtxSynchronize": lambda: cu.code("cuCtxSynchronize"),
            "cuMemGetInfo": lambda: cu.code("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total)),
            "cuStreamWriteValue64": lambda: cu.code("cuStreamWriteValue64", side, word.value, 1, 0),
        }
        context, event = ctypes.c_void_p(), ctypes.c_void_p()
        cu("cuCtxGetCurrent", ctypes.byref(context))
        cu("cuEventCreate", ctypes.byref(event), 2)
        capturing, called, result = threading.Event(), threading.Event(), {}

        def capture() -> None:
            cu.enter_thread()
            stream = self._begin()
            capturing.set()
            called.wait(20)
            memory = ctypes.c_uint64()
            result["alloc"] = cu.code("cuMemAllocAsync", ctypes.byref(memory), 4096, stream)
            result["end"] = self._end(stream)

        thread = threading.Thread(target=capture)
        thread.start()
        capturing.wait(20)
        mode = ctypes.c_int(RELAXED)
        if relaxed:
            cu("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        code = calls[call]()
        if relaxed:
            cu("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        called.set()
        thread.join(20)
        return dict(result, code=code)


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    if not cu.has("cuStreamBeginCapture", "cuStreamEndCapture"):
        raise cudalib.CannotRun("this driver has no stream capture")
    name = cu.error_name
    inside = {
        "default pool": (lambda a: not a["alloc"] and not a["end"], "is captured"),
        "ours current": (lambda a: a["alloc"] == NOT_SUPPORTED, "is refused"),
        "named pool": (lambda a: a["alloc"] == NOT_SUPPORTED, "is refused"),
        "default put back": (lambda a: not a["alloc"] and not a["end"], "is captured"),
        "changed during capture": (lambda a: a["changed"] == CAPTURE_UNSUPPORTED and a["end"], "breaks the capture"),
    }
    for case, (expected, words) in inside.items():
        with Child("capturer") as child:
            a = child.ask("inside", case=case)
        report.step(
            f"in a capture: {case}",
            bool(expected(a)),
            f"an allocation {words}: alloc {name(a['alloc'])}, end of capture {name(a['end'])}"
            + (f", cuDeviceSetMemPool {name(a['changed'])}" if a["changed"] else ""),
            **a,
        )
    breaking = (
        "cuDeviceSetMemPool",
        "cuMemPoolExportPointer",
        "cuMemAllocFromPoolAsync",
        "cuMemHostRegister",
        "cuStreamQuery",
    )
    whole = tuple(call for call in ("cuCtxRecordEvent", "cuCtxSynchronize") if cu.has(call))  # the first came with CUDA 12.5
    harmless = ("nothing", "cuMemGetInfo", "cuStreamWriteValue64")
    for call in harmless + breaking + whole:
        for relaxed in (False,) if call in harmless else (False, True):
            with Child("capturer") as child:
                a = child.ask("elsewhere", call=call, relaxed=relaxed)
            lives = not a["alloc"] and not a["end"] and not a["code"]
            breaks = a["code"] == CAPTURE_UNSUPPORTED and bool(a["alloc"] or a["end"])
            report.step(
                f"in another thread: {call}{', relaxed' if relaxed else ''}",
                breaks if call in whole or (call in breaking and not relaxed) else lives,
                f"-> {name(a['code'])}; that capture then: alloc {name(a['alloc'])}, end {name(a['end'])}",
                **a,
            )


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"capturer": Capturer},
        deadline=100,
        verdict="IPC pools refuse allocation in a capture, and pool calls of another thread break one unless bracketed as RELAXED; "
        "what concerns the whole context breaks one all the same",
    )
