"""A stand-in for `_zcx` that records what is called, when, and in which environment. `put()` before the package looks."""
from __future__ import annotations

import os
import sys
import types

calls: list[str] = []
current: dict[int, int] = {}
seen: dict[str, str | None] = {}


class Failure(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code, self.cuda, self.call, self.text = 1004, 0, None, text


class Pool:
    def __init__(self, ordinal: int) -> None:
        calls.append(f"Pool({ordinal})")
        self.ordinal, self.uuid, self.handle = ordinal, f"{ordinal:032x}", 1000 + ordinal

    def make_current(self) -> int:
        if os.environ.get("FAKE_CAPTURING"):
            raise Failure("this thread captures a graph")
        previous = current.get(self.ordinal, 1)
        current[self.ordinal] = self.handle
        calls.append(f"make_current({self.ordinal})")
        return previous

    def restore(self, previous: int) -> None:
        calls.append(f"restore({self.ordinal}, {previous})")
        current[self.ordinal] = previous

    def is_current(self) -> bool:
        return current.get(self.ordinal, 1) == self.handle

    def usage(self) -> dict[str, int]:
        return {"reserved": 64 << 20, "reserved_high": 96 << 20, "used": 16 << 20, "used_high": 80 << 20, "exports": self.ordinal}


def driver() -> dict:
    calls.append("driver")
    seen.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    pools = os.environ.get("FAKE_DEVICES", "1")  # one digit a device: does it have pools?
    if not pools:
        raise Failure("libcuda.so.1 was not found")
    return {"version": 13000, "path": "/fake/libcuda.so.1", "devices": [
        {"ordinal": i, "uuid": f"{i:032x}", "name": f"Fake {i}", "total_bytes": 24 << 30, "pools": digit == "1",
         "posix_fd_pools": digit == "1", "stream_mem_ops": True} for i, digit in enumerate(pools)]}


def put(version: str | None = None) -> None:
    import comfy_zerocopy

    module = types.ModuleType("comfy_zerocopy._zcx")
    module.Failure, module.Pool, module.driver = Failure, Pool, driver
    module.__version__, module.PROTOCOL, module.ABI = version or comfy_zerocopy.__version__, (1, 1), "abi3"
    sys.modules[module.__name__] = module
