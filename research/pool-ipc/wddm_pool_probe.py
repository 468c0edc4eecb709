#!/usr/bin/env python3
"""Decide what two processes can share on a Windows machine with an NVIDIA card (WDDM). One file, stock Python 3.9+.

    py wddm_pool_probe.py            lines for people, the verdict last
    py wddm_pool_probe.py --json     one JSON object on stdout

Tried, each on its own, against a second process that this script starts: a memory pool with WIN32 handles (create, export,
pointer export, import, read, write in place); interprocess events; counters in shared, registered host memory; a D3D12 fence
imported by both sides; VMM memory whose handle travels by DuplicateHandle, writable and read-only. "refused" means that the
driver said no, with its code: that decides as well as "works". A step that kills the second process is "crashed".

The verdict names the rung that the Windows row of a platform matrix can have, and the gate that orders it:
pool (both directions) > vmm (arena: worker to parent at least) > host. Exit status: 0 a verdict was reached, 1 something is broken
(wrong bytes, a crash), 2 cannot run here. Device memory: 64 MiB and two contexts. Needs no rights beyond the user's own.

NOT YET RUN ON WINDOWS by its authors: they had none. Its logic runs against a made-up driver in their tests."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import mmap
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
SIZE = 16 * MIB
WIN32 = 2  # CU_MEM_HANDLE_TYPE_WIN32
D3D12_FENCE = 4  # CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D12_FENCE
PROT_READ, PROT_READWRITE = 1, 3
NOT_READY = 600
WORKS, REFUSED, BROKEN, CRASHED, NOT_RUN = "works", "refused", "broken", "crashed", "not run"


class NoGround(Exception):
    """Cannot run here; the text says why."""


class Refused(Exception):
    """The driver said no."""

    def __init__(self, call: str, code: int, name: str):
        super().__init__(f"{call} -> {name} ({code})")
        self.call, self.code, self.name = call, code, name


class Died(Exception):
    """The second process is gone, or silent."""


# ---- structures of the driver and of Windows (64-bit)


class PoolProps(ctypes.Structure):
    _fields_ = [
        ("alloc_type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("security", ctypes.c_void_p),
        ("max_size", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32_meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


class PoolBlob(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class IpcEvent(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Win32Handle(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_void_p), ("name", ctypes.c_void_p)]


class SemaphoreDesc(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("win32", Win32Handle), ("flags", ctypes.c_uint), ("reserved", ctypes.c_uint * 16)]


class SignalParams(ctypes.Structure):
    _fields_ = [
        ("fence_value", ctypes.c_uint64),
        ("nvscisync", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("params_reserved", ctypes.c_uint * 12),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    ]


class KeyedMutexWait(ctypes.Structure):
    _fields_ = [("key", ctypes.c_uint64), ("timeout_ms", ctypes.c_uint)]


class WaitParams(ctypes.Structure):
    _fields_ = [
        ("fence_value", ctypes.c_uint64),
        ("nvscisync", ctypes.c_uint64),
        ("mutex", KeyedMutexWait),
        ("params_reserved", ctypes.c_uint * 10),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    ]


class SecurityAttributes(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint32), ("descriptor", ctypes.c_void_p), ("inherit", ctypes.c_int)]


class ObjectAttributes(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint32),
        ("root", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("attributes", ctypes.c_uint32),
        ("descriptor", ctypes.c_void_p),
        ("quality", ctypes.c_void_p),
    ]


# ---- the system


class Windows:
    """Handles are the process's own until duplicated into the other."""

    def __init__(self) -> None:
        self.kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        self.kernel32.GetCurrentProcess.restype = ctypes.c_void_p
        self.kernel32.DuplicateHandle.argtypes = [ctypes.c_void_p] * 3 + [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_int,
            ctypes.c_uint32,
        ]
        self.kernel32.CloseHandle.argtypes = [ctypes.c_void_p]
        self.keep: list = []

    def driver(self, name: str | None):
        try:
            return ctypes.WinDLL(name or "nvcuda.dll")
        except OSError as error:
            raise NoGround(f"no CUDA driver here: {error}") from None

    def descriptor(self) -> int:
        """Full access for the owner and for nobody else."""
        advapi32 = ctypes.WinDLL("advapi32", use_last_error=True)
        out = ctypes.c_void_p()
        if not advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW(
            ctypes.c_wchar_p("D:P(A;;GA;;;OW)"), 1, ctypes.byref(out), None
        ):
            raise NoGround(f"no security descriptor: Windows error {ctypes.get_last_error()}")
        return out.value or 0

    def pool_security(self) -> int:
        attributes = SecurityAttributes(ctypes.sizeof(SecurityAttributes), self.descriptor(), 0)
        self.keep.append(attributes)
        return ctypes.addressof(attributes)

    def vmm_security(self) -> int:
        attributes = ObjectAttributes(ctypes.sizeof(ObjectAttributes), None, None, 0, self.descriptor(), None)
        self.keep.append(attributes)
        return ctypes.addressof(attributes)

    def give(self, handle: int, process: subprocess.Popen) -> int:
        """The handle's value in the other process."""
        out, own = ctypes.c_void_p(), self.kernel32.GetCurrentProcess()
        if not self.kernel32.DuplicateHandle(own, handle, int(process._handle), ctypes.byref(out), 0, 0, 2):
            raise Refused("DuplicateHandle", ctypes.get_last_error(), "Windows error")
        return out.value or 0

    def close(self, handle: int) -> None:
        self.kernel32.CloseHandle(handle)

    def shared_page(self, name: str) -> mmap.mmap:
        return mmap.mmap(-1, 4096, tagname="Local\\" + name)

    def forget_page(self, name: str) -> None:
        """It goes with its last handle."""

    def fence(self, luid: bytes) -> int:
        """A shared handle of a D3D12 fence on the adapter with this LUID, made through COM by hand."""

        def guid(text: str) -> ctypes.Array:
            import uuid

            return (ctypes.c_ubyte * 16).from_buffer_copy(uuid.UUID(text).bytes_le)

        def method(pointer: ctypes.c_void_p, slot: int, *types):
            table = ctypes.cast(pointer, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents
            return ctypes.WINFUNCTYPE(ctypes.c_long, ctypes.c_void_p, *types)(table[slot])

        def check(call: str, result: int) -> None:
            if result < 0:
                raise Refused(call, result, f"HRESULT {result & 0xFFFFFFFF:#010x}")

        try:
            dxgi, d3d12 = ctypes.WinDLL("dxgi"), ctypes.WinDLL("d3d12")
        except OSError as error:
            raise NoGround(f"no Direct3D 12 here: {error}") from None
        factory, adapter, device, fence, handle = (ctypes.c_void_p() for _ in range(5))
        check(
            "CreateDXGIFactory1",
            dxgi.CreateDXGIFactory1(guid("1bc6ea02-ef36-464f-bf0c-21ca39e5168a"), ctypes.byref(factory)),
        )
        by_luid = method(factory, 26, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
        check(
            "EnumAdapterByLuid",
            by_luid(
                factory, int.from_bytes(luid, "little"), guid("2411e7e1-12ac-4ccf-bd14-9798e8534dc0"), ctypes.byref(adapter)
            ),
        )
        check(
            "D3D12CreateDevice",
            d3d12.D3D12CreateDevice(adapter, 0xB000, guid("189819f1-1db6-4b57-be54-1821339b85f7"), ctypes.byref(device)),
        )
        make = method(device, 36, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        check("CreateFence", make(device, 0, 1, guid("0a753dcf-c4d8-4b91-adf6-be5a60d95a76"), ctypes.byref(fence)))
        share = method(device, 31, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_wchar_p, ctypes.c_void_p)
        check("CreateSharedHandle", share(device, fence, None, 0x10000000, None, ctypes.byref(handle)))
        self.keep += [factory, adapter, device, fence]
        return handle.value or 0


class Other:
    """Any other system, with a made-up driver: for tests of this script only. A handle is a number that both sides may use."""

    def driver(self, name: str | None):
        if not name:
            raise NoGround("this script decides what Windows can do: run it there (a WDDM machine with an NVIDIA card)")
        return ctypes.CDLL(name)

    def pool_security(self) -> int:
        return 0

    def vmm_security(self) -> int:
        return 0

    def give(self, handle: int, process: subprocess.Popen) -> int:
        return handle

    def close(self, handle: int) -> None:
        pass

    def shared_page(self, name: str) -> mmap.mmap:
        fd = os.open(os.path.join(tempfile.gettempdir(), name), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, 4096)
            return mmap.mmap(fd, 4096)
        finally:
            os.close(fd)

    def forget_page(self, name: str) -> None:
        os.unlink(os.path.join(tempfile.gettempdir(), name))

    def fence(self, luid: bytes) -> int:
        raise NoGround("no Direct3D 12 on this system")


SYSTEM = Windows() if sys.platform == "win32" else Other()


# ---- the driver


class Driver:
    WIDE = {
        "cuMemPoolExportPointer": [1],
        "cuMemAllocFromPoolAsync": [1],
        "cuMemFreeAsync": [0],
        "cuMemsetD8Async": [0, 2],
        "cuMemcpyDtoHAsync": [1, 2],
        "cuMemCreate": [1, 3],
        "cuMemAddressReserve": [1, 2, 3, 4],
        "cuMemMap": [0, 1, 2, 3, 4],
        "cuMemSetAccess": [0, 1, 3],
        "cuMemExportToShareableHandle": [1, 3],
        "cuMemPoolExportToShareableHandle": [3],
        "cuMemPoolImportFromShareableHandle": [3],
        "cuMemRelease": [0],
        "cuMemUnmap": [0, 1],
        "cuMemAddressFree": [0, 1],
        "cuStreamWriteValue64": [1, 2],
        "cuStreamWaitValue64": [1, 2],
        "cuMemHostRegister": [1],
        "cuMemPoolSetAccess": [2],
    }
    SUFFIX = {
        "cuCtxPushCurrent": "_v2",
        "cuMemGetInfo": "_v2",
        "cuMemcpyDtoHAsync": "_v2",
        "cuStreamWriteValue64": "_v2",
        "cuStreamWaitValue64": "_v2",
        "cuMemHostRegister": "_v2",
        "cuMemHostGetDevicePointer": "_v2",
    }

    def __init__(self, ordinal: int, name: str | None):
        self.lib = SYSTEM.driver(name)
        code = self.code("cuInit", 0)
        if code:
            raise NoGround(f"cuInit returned {code}: no usable GPU here")
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        if ordinal >= count.value:
            raise NoGround(f"device {ordinal} was asked for, the driver shows {count.value}")
        self.ordinal = ordinal
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self("cuCtxPushCurrent", context)
        self("cuStreamCreate", ctypes.byref(stream), 1)
        self.stream = stream

    def code(self, name: str, *arguments) -> int:
        try:
            function = self.lib[name + self.SUFFIX.get(name, "")]
        except AttributeError:
            raise Refused(name, -1, "not in this driver") from None
        wide = self.WIDE.get(name, [])
        return function(*[ctypes.c_uint64(a) if i in wide and isinstance(a, int) else a for i, a in enumerate(arguments)])

    def __call__(self, name: str, *arguments) -> None:
        code = self.code(name, *arguments)
        if code:
            text = ctypes.c_char_p()
            self.lib["cuGetErrorName"](code, ctypes.byref(text))
            raise Refused(name, code, (text.value or b"?").decode())

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        return 0 if self.code("cuDeviceGetAttribute", ctypes.byref(value), number, self.ordinal) else value.value

    def sync(self) -> None:
        self("cuStreamSynchronize", self.stream)

    def fill(self, address: int, byte: int) -> None:
        self("cuMemsetD8Async", address, ctypes.c_ubyte(byte), SIZE, self.stream)

    def ends(self, address: int) -> list:
        """First and last byte."""
        out = []
        for at in (address, address + SIZE - 1):
            byte = ctypes.c_ubyte()
            self("cuMemcpyDtoHAsync", ctypes.byref(byte), at, 1, self.stream)
            self.sync()
            out.append(byte.value)
        return out

    def drained(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.code("cuStreamQuery", self.stream) == NOT_READY:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def map(self, handle: int, flags: int) -> int:
        out = ctypes.c_uint64()
        self("cuMemAddressReserve", ctypes.byref(out), SIZE, 0, 0, 0)
        self("cuMemMap", out.value, SIZE, 0, handle, 0)
        self("cuMemSetAccess", out.value, SIZE, ctypes.byref(AccessDesc(1, self.ordinal, flags)), 1)
        return out.value

    def page(self, name: str) -> tuple:
        """A shared page, registered: (the 64-bit words, their address for streams)."""
        shared = SYSTEM.shared_page(name)
        words = (ctypes.c_uint64 * 512).from_buffer(shared)
        self("cuMemHostRegister", ctypes.c_void_p(ctypes.addressof(words)), 4096, 3)
        device = ctypes.c_uint64()
        self("cuMemHostGetDevicePointer", ctypes.byref(device), ctypes.c_void_p(ctypes.addressof(words)), 0)
        return words, device.value

    def semaphore(self, handle: int) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        self(
            "cuImportExternalSemaphore",
            ctypes.byref(out),
            ctypes.byref(SemaphoreDesc(D3D12_FENCE, Win32Handle(handle, None))),
        )
        return out

    def signal(self, semaphore: ctypes.c_void_p, value: int) -> None:
        self("cuSignalExternalSemaphoresAsync", ctypes.byref(semaphore), ctypes.byref(SignalParams(value)), 1, self.stream)

    def await_(self, semaphore: ctypes.c_void_p, value: int) -> None:
        self("cuWaitExternalSemaphoresAsync", ctypes.byref(semaphore), ctypes.byref(WaitParams(value)), 1, self.stream)


# ---- the second process


class Second:
    """Answers one JSON line to one JSON line."""

    def __init__(self, ordinal: int, name: str | None):
        self.cu = Driver(ordinal, name)

    def pool(self, handle: int) -> dict:
        pool = ctypes.c_void_p()
        self.cu("cuMemPoolImportFromShareableHandle", ctypes.byref(pool), ctypes.c_void_p(handle), WIN32, 0)
        SYSTEM.close(handle)
        self.imported = pool
        return {}

    def pointer(self, blob: str) -> dict:
        out = ctypes.c_uint64()
        self.cu(
            "cuMemPoolImportPointer",
            ctypes.byref(out),
            self.imported,
            ctypes.byref(PoolBlob.from_buffer_copy(bytes.fromhex(blob))),
        )
        self.address = out.value
        return {"bytes": self.cu.ends(out.value)}

    def write(self, byte: int) -> dict:
        self.cu.fill(self.address, byte)
        self.cu.sync()
        return {}

    def free(self) -> dict:
        self.cu("cuMemFreeAsync", self.address, self.cu.stream)
        self.cu.sync()
        return {}

    def event(self, handle: str) -> dict:
        event = ctypes.c_void_p()
        function = self.cu.lib["cuIpcOpenEventHandle"]
        code = function(ctypes.byref(event), IpcEvent.from_buffer_copy(bytes.fromhex(handle)))
        if code:
            raise Refused("cuIpcOpenEventHandle", code, "")
        self.cu("cuStreamWaitEvent", self.cu.stream, event, 0)
        self.cu("cuEventRecord", event, self.cu.stream)
        return {"drained": self.cu.drained(5)}

    def counters(self, name: str) -> dict:
        """Wait for 1 in the first word, then post 2 in the second."""
        words, device = self.cu.page(name)
        self.kept = words
        self.cu("cuStreamWaitValue64", self.cu.stream, device, 1, 0)
        self.cu("cuStreamWriteValue64", self.cu.stream, device + 64, 2, 0)
        return {}

    def fence(self, handle: int) -> dict:
        """Wait for 1, then signal 2."""
        semaphore = self.cu.semaphore(handle)
        self.cu.await_(semaphore, 1)
        self.cu.signal(semaphore, 2)
        return {}

    def vmm(self, handle: int, flags: int) -> dict:
        memory = ctypes.c_uint64()
        self.cu("cuMemImportFromShareableHandle", ctypes.byref(memory), ctypes.c_void_p(handle), WIN32)
        SYSTEM.close(handle)
        self.address = self.cu.map(memory.value, flags)
        return {"bytes": self.cu.ends(self.address)}

    def damage(self) -> dict:
        """Write where only reading is allowed; the context may be spoilt by it."""
        try:
            self.cu.fill(self.address, 0x99)
            self.cu.sync()
        except Refused as error:
            return {"refused": str(error)}
        return {"refused": ""}


def second(ordinal: int, name: str | None) -> None:
    try:
        me, hello = Second(ordinal, name), {}
    except (NoGround, Refused) as error:
        me, hello = None, {"refused": [str(error), -1, ""]}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        op, data = json.loads(line)
        try:
            answer = getattr(me, op)(**data)
        except Refused as error:
            answer = {"refused_call": [error.call, error.code, error.name]}
        print(json.dumps(answer), flush=True)
    os._exit(0)


class Peer:
    def __init__(self, ordinal: int, name: str | None):
        command = [sys.executable, os.path.abspath(__file__), "--second", str(ordinal), *([name] if name else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        hello = self._answer(60)
        if "refused" in hello:
            raise Died(f"the second process could not open the driver: {hello['refused'][0]}")

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                self.lines.put({"refused_call": ["the second process", -1, f"said {line.strip()[:80]!r}"]})
        self.lines.put(None)

    def _answer(self, seconds: float) -> dict:
        try:
            answer = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.process.kill()
            raise Died(f"no answer in {seconds:.0f} s") from None
        if answer is None:
            status = self.process.wait(10)
            raise Died(
                f"ended with status {status & 0xFFFFFFFF:#x}" if sys.platform == "win32" else f"ended with status {status}"
            )
        if "refused_call" in answer:
            raise Refused(*answer["refused_call"])
        return answer

    def ask(self, op: str, seconds: float = 30, **data) -> dict:
        try:
            self.process.stdin.write(json.dumps([op, data]) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the answer says how it ended
        return self._answer(seconds)

    def give(self, handle: int) -> int:
        return SYSTEM.give(handle, self.process)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


# ---- the steps


class Probe:
    def __init__(self, options: argparse.Namespace):
        self.options, self.steps, self.begin, self.card, self.cuda = options, [], time.monotonic(), "", ""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr if self.options.json else sys.stdout, flush=True)

    def note(self, name: str, outcome: str, text: str) -> None:
        self.steps.append({"name": name, "outcome": outcome, "text": text})
        self.say(f"[{outcome}] {name}: {text}")

    def outcome(self, name: str) -> str:
        return next((s["outcome"] for s in self.steps if s["name"] == name), NOT_RUN)

    def step(self, name: str, function) -> None:
        """function() -> (good, text). Refusals, deaths and missing ground are outcomes."""
        try:
            good, text = function()
            self.note(name, WORKS if good else BROKEN, text)
        except Refused as error:
            self.note(name, REFUSED, str(error))
        except Died as error:
            self.note(name, CRASHED, str(error))
        except NoGround as error:
            self.note(name, NOT_RUN, str(error))

    def peer(self) -> Peer:
        return Peer(self.options.device, self.options.driver)

    def run(self) -> tuple[str, int]:
        cu = self.cu = Driver(self.options.device, self.options.driver)
        name, version = ctypes.create_string_buffer(128), ctypes.c_int()
        cu("cuDeviceGetName", name, 128, self.options.device)
        cu("cuDriverGetVersion", ctypes.byref(version))
        self.card, self.cuda = name.value.decode(), f"{version.value // 1000}.{version.value % 1000 // 10}"
        answers = {
            "TCC": 35,
            "VMM": 102,
            "VMM with WIN32 handles": 104,
            "pools": 115,
            "pool handle types": 119,
            "64-bit stream memory operations": 122,
            "interprocess events": 125,
        }
        self.attributes = {key: cu.attribute(number) for key, number in answers.items()}
        self.say(f"{self.card}, CUDA {self.cuda}, {platform.platform()}")
        self.say("the driver claims: " + ", ".join(f"{k} {v}" for k, v in self.attributes.items()))
        self.step("pool", self.pool)
        self.step("events", self.events)
        self.step("counters", self.counters)
        self.step("fence", self.fence)
        self.step("vmm", lambda: self.vmm(PROT_READWRITE))
        self.step("vmm read-only", lambda: self.vmm(PROT_READ))

        broken = [s["name"] for s in self.steps if s["outcome"] in (BROKEN, CRASHED)]
        rung = next((r for r in ("pool", "vmm") if self.outcome(r) == WORKS), "host")
        gate = next((g for g in ("counters", "fence", "events") if self.outcome(g) == WORKS), "")
        words = {
            "pool": "pool sharing works, both directions",
            "vmm": "no pool sharing; a VMM arena works (worker to parent at least)",
            "host": "no device memory can be shared; host memory is what is left",
        }[rung]
        ordered = f"ordered by {gate}" if gate else "and nothing orders streams of two processes: synchronise on the CPU"
        text = f"rung {rung}: {words}, {ordered}" if rung != "host" else f"rung host: {words}"
        return text + (f"; BROKEN: {', '.join(broken)}" if broken else ""), 1 if broken else 0

    def pool(self) -> tuple[bool, str]:
        cu, pool, handle, address, blob = self.cu, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(), PoolBlob()
        cu("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(PoolProps(1, WIN32, 1, cu.ordinal, SYSTEM.pool_security())))
        cu("cuMemAllocFromPoolAsync", ctypes.byref(address), SIZE, pool, cu.stream)
        cu.fill(address.value, 0x31)
        cu.sync()
        early = cu.code("cuMemPoolExportPointer", ctypes.byref(blob), address.value)
        cu("cuMemPoolExportToShareableHandle", ctypes.byref(handle), pool, WIN32, 0)
        cu("cuMemPoolExportPointer", ctypes.byref(blob), address.value)
        with self.peer() as peer:
            peer.ask("pool", handle=peer.give(handle.value or 0))
            seen = peer.ask("pointer", blob=bytes(blob.bytes).hex())["bytes"]
            peer.ask("write", byte=0x42)
            back = cu.ends(address.value)
            peer.ask("free")
        cu("cuMemFreeAsync", address.value, cu.stream)
        cu.sync()
        SYSTEM.close(handle.value or 0)
        return seen == [0x31] * 2 and back == [0x42] * 2, (
            f"created, exported, imported; the other process reads {seen}, writes in place, we read {back}; "
            "pointer export before the "
            f"pool's own -> {early}"
        )

    def events(self) -> tuple[bool, str]:
        cu, event, handle = self.cu, ctypes.c_void_p(), IpcEvent()
        cu("cuEventCreate", ctypes.byref(event), 2 | 4)
        cu("cuIpcGetEventHandle", ctypes.byref(handle), event)
        cu("cuEventRecord", event, cu.stream)
        with self.peer() as peer:
            theirs = peer.ask("event", handle=bytes(handle.bytes).hex())["drained"]
            cu("cuStreamWaitEvent", cu.stream, event, 0)
            ours = cu.drained(5)
        return theirs and ours, f"the other process waited and recorded ({theirs}), we waited for it ({ours})"

    def counters(self) -> tuple[bool, str]:
        if not self.attributes["64-bit stream memory operations"]:
            raise Refused("stream memory operations", 801, "the device says that it has none of 64 bits")
        name = f"zcx-probe-{os.getpid()}"
        try:
            words, device = self.cu.page(name)
            with self.peer() as peer:
                peer.ask("counters", name=name)
                early = words[8]
                self.cu("cuStreamWriteValue64", self.cu.stream, device, 1, 0)
                self.cu("cuStreamWaitValue64", self.cu.stream, device + 64, 2, 0)
                drained = self.cu.drained(5)
        finally:
            SYSTEM.forget_page(name)
        return early == 0 and drained and words[
            8
        ] == 2, f"held until we posted ({early == 0}), then it posted and our stream went on ({drained})"

    def fence(self) -> tuple[bool, str]:
        luid, mask = ctypes.create_string_buffer(8), ctypes.c_uint()
        self.cu("cuDeviceGetLuid", luid, ctypes.byref(mask), self.cu.ordinal)
        handle = SYSTEM.fence(luid.raw)
        semaphore = self.cu.semaphore(handle)
        with self.peer() as peer:
            peer.ask("fence", handle=peer.give(handle))
            self.cu.signal(semaphore, 1)
            self.cu.await_(semaphore, 2)
            drained = self.cu.drained(5)
        return drained, f"both sides imported a D3D12 fence; ours reached the value that the other signalled ({drained})"

    def vmm(self, flags: int) -> tuple[bool, str]:
        cu, memory, handle = self.cu, ctypes.c_uint64(), ctypes.c_void_p()
        cu(
            "cuMemCreate",
            ctypes.byref(memory),
            SIZE,
            ctypes.byref(AllocationProp(1, WIN32, 1, cu.ordinal, SYSTEM.vmm_security())),
            0,
        )
        address = cu.map(memory.value, PROT_READWRITE)
        cu.fill(address, 0x53)
        cu.sync()
        cu("cuMemExportToShareableHandle", ctypes.byref(handle), memory.value, WIN32, 0)
        with self.peer() as peer:
            seen = peer.ask("vmm", handle=peer.give(handle.value or 0), flags=flags)["bytes"]
            refused = ""
            if flags == PROT_READWRITE:
                peer.ask("write", byte=0x64)
            else:
                refused = peer.ask("damage")["refused"]
            back = cu.ends(address)
        SYSTEM.close(handle.value or 0)
        cu("cuMemUnmap", address, SIZE)
        cu("cuMemAddressFree", address, SIZE)
        cu("cuMemRelease", memory.value)
        if flags == PROT_READWRITE:
            return seen == [0x53] * 2 and back == [
                0x64
            ] * 2, f"handle duplicated; the other process reads {seen}, writes in place, we read {back}"
        return seen == [0x53] * 2 and back == [0x53] * 2 and bool(refused), (
            f"mapped for reading, it reads {seen}; a write there: {refused or 'went through'}; our bytes then {back}"
        )

    def finish(self, verdict: str, code: int) -> int:
        if self.options.json:
            print(
                json.dumps(
                    {
                        "script": os.path.basename(__file__),
                        "verdict": verdict,
                        "exit": code,
                        "card": self.card,
                        "cuda": self.cuda,
                        "system": platform.platform(),
                        "python": platform.python_version(),
                        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "seconds": round(time.monotonic() - self.begin, 2),
                        "attributes": getattr(self, "attributes", {}),
                        "steps": self.steps,
                    }
                ),
                flush=True,
            )
        self.say(f"verdict: {('reached', 'BROKEN', 'CANNOT RUN HERE')[code]}: {verdict}")
        return code


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the lines for people on stderr")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the device (default 0)")
    parser.add_argument("--deadline", type=float, default=120, help="seconds for the whole script (default 120)")
    parser.add_argument("--driver", default=None, help="another driver library than nvcuda.dll (for tests)")
    probe = Probe(parser.parse_args(arguments))

    def late() -> None:
        os._exit(probe.finish(f"the deadline of {probe.options.deadline:.0f} s passed after {len(probe.steps)} steps", 1))

    watchdog = threading.Timer(probe.options.deadline, late)
    watchdog.daemon = True
    watchdog.start()
    try:
        verdict, code = probe.run()
    except NoGround as error:
        verdict, code = str(error), 2
    except (Refused, Died) as error:
        verdict, code = f"stopped after {len(probe.steps)} steps: {error}", 1
    watchdog.cancel()
    return probe.finish(verdict, code)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--second":
        second(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a stream that waits for ever must not hold up the end
