"""cudalib.py: what the scripts of this folder share: the CUDA driver by ctypes, helper processes, and the report.

Stock Python 3.9+ on Linux, standard library only. The driver is libcuda.so.1, or the library that $ZCX_LIBCUDA names.
Does not: touch CUDA when imported, fork after CUDA (a helper is a new interpreter), or know what any script looks for.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

MIB = 1 << 20
GIB = 1 << 30
CHUNK = 32 * MIB  # what a pool allocation is imported in, one handle each
CHUNK_LIMIT = 128  # chunks that an import survives (seen on 580.126.20 and 580.159.04)

INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 1, 2, 600, 700, 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
POSIX_FD = 1
PROT_READ, PROT_READWRITE = 1, 3

# name: (arguments, suffix of the exported symbol). i int, I unsigned, Q 64 bits or CUdeviceptr, P pointer or opaque handle.
SIGNATURES = {
    "cuInit": ("I", ""),
    "cuDriverGetVersion": ("P", ""),
    "cuGetErrorName": ("iP", ""),
    "cuDeviceGetCount": ("P", ""),
    "cuDeviceGet": ("Pi", ""),
    "cuDeviceGetName": ("Pii", ""),
    "cuDeviceGetAttribute": ("Pii", ""),
    "cuDevicePrimaryCtxRetain": ("Pi", ""),
    "cuCtxPushCurrent": ("P", "_v2"),
    "cuCtxPopCurrent": ("P", "_v2"),
    "cuMemGetInfo": ("PP", "_v2"),
    "cuPointerGetAttributes": ("IPPQ", ""),
    "cuStreamCreate": ("PI", ""),
    "cuStreamDestroy": ("P", "_v2"),
    "cuStreamQuery": ("P", ""),
    "cuStreamSynchronize": ("P", ""),
    "cuStreamWaitEvent": ("PPI", ""),
    "cuStreamBeginCapture": ("Pi", "_v2"),
    "cuStreamEndCapture": ("PP", ""),
    "cuGraphDestroy": ("P", ""),
    "cuCtxGetCurrent": ("P", ""),
    "cuCtxRecordEvent": ("PP", ""),
    "cuCtxSynchronize": ("", ""),
    "cuThreadExchangeStreamCaptureMode": ("P", ""),
    "cuStreamWriteValue64": ("PQQI", "_v2"),
    "cuStreamWaitValue64": ("PQQI", "_v2"),
    "cuEventCreate": ("PI", ""),
    "cuEventDestroy": ("P", "_v2"),
    "cuEventRecord": ("PP", ""),
    "cuEventQuery": ("P", ""),
    "cuIpcGetEventHandle": ("PP", ""),
    "cuMemHostRegister": ("PQI", "_v2"),
    "cuMemHostUnregister": ("P", ""),
    "cuMemHostGetDevicePointer": ("PPI", "_v2"),
    "cuDeviceSetMemPool": ("iP", ""),
    "cuDeviceGetMemPool": ("Pi", ""),
    "cuDeviceGetDefaultMemPool": ("Pi", ""),
    "cuMemPoolCreate": ("PP", ""),
    "cuMemPoolDestroy": ("P", ""),
    "cuMemPoolSetAttribute": ("PiP", ""),
    "cuMemPoolGetAttribute": ("PiP", ""),
    "cuMemPoolTrimTo": ("PQ", ""),
    "cuMemPoolSetAccess": ("PPQ", ""),
    "cuMemPoolExportToShareableHandle": ("PPiQ", ""),
    "cuMemPoolImportFromShareableHandle": ("PPiQ", ""),
    "cuMemPoolExportPointer": ("PQ", ""),
    "cuMemPoolImportPointer": ("PPP", ""),
    "cuMemAllocFromPoolAsync": ("PQPP", ""),
    "cuMemAllocAsync": ("PQP", ""),
    "cuMemFreeAsync": ("QP", ""),
    "cuMemAlloc": ("PQ", "_v2"),
    "cuMemFree": ("Q", "_v2"),
    "cuMemGetAddressRange": ("PPQ", "_v2"),
    "cuMemcpyHtoDAsync": ("QPQP", "_v2"),
    "cuMemcpyDtoHAsync": ("PQQP", "_v2"),
    "cuMemcpyDtoDAsync": ("QQQP", "_v2"),
    "cuMemsetD8Async": ("QBQP", ""),
    "cuIpcGetMemHandle": ("PQ", ""),
    "cuIpcCloseMemHandle": ("Q", ""),
    "cuMemCreate": ("PQPQ", ""),
    "cuMemRelease": ("Q", ""),
    "cuMemAddressReserve": ("PQQQQ", ""),
    "cuMemAddressFree": ("QQ", ""),
    "cuMemMap": ("QQQQQ", ""),
    "cuMemUnmap": ("QQ", ""),
    "cuMemSetAccess": ("QQPQ", ""),
    "cuMemExportToShareableHandle": ("PQiQ", ""),
    "cuMemImportFromShareableHandle": ("PPi", ""),
    "cuMemRetainAllocationHandle": ("PQ", ""),
    "cuMemGetAllocationGranularity": ("PPi", ""),
    "cuModuleLoadData": ("PP", ""),
    "cuModuleGetFunction": ("PPP", ""),
    "cuLaunchKernel": ("PIIIIIIIPPP", ""),
}
KINDS = {"i": ctypes.c_int, "I": ctypes.c_uint, "Q": ctypes.c_uint64, "P": ctypes.c_void_p, "B": ctypes.c_ubyte}

# hold: one thread that spins for so many nanoseconds; store: one word. What needs a kernel is skipped where the driver
# cannot compile this.
PTX = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry hold(.param .u64 duration)
{
    .reg .u64 %begin, %now, %limit, %spent;
    .reg .pred %more;
    ld.param.u64 %limit, [duration];
    mov.u64 %begin, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %spent, %now, %begin;
    setp.lo.u64 %more, %spent, %limit;
    @%more bra AGAIN;
    ret;
}
.visible .entry store(.param .u64 where, .param .u32 what)
{
    .reg .u64 %address;
    .reg .u32 %word;
    ld.param.u64 %address, [where];
    ld.param.u32 %word, [what];
    st.global.u32 [%address], %word;
    ret;
}
"""


class CannotRun(Exception):
    """The script has no ground to stand on here; the text says what is missing."""


class CudaError(Exception):
    def __init__(self, call: str, code: int, name: str):
        super().__init__(f"{call} -> {name} ({code})")
        self.call, self.code, self.name = call, code, name


class ChildDied(Exception):
    """A helper ended where it should have answered; .how is 'SIGSEGV' or 'exit status 3'."""

    def __init__(self, how: str):
        super().__init__(how)
        self.how = how


class ChildSilent(Exception):
    """A helper did not answer in time. It was killed."""


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


class AccessDesc(ctypes.Structure):
    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Handle64(ctypes.Structure):
    """CUipcEventHandle, CUipcMemHandle: 64 bytes, passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Driver:
    """The driver, opened: device `ordinal` with its primary context current in this thread."""

    def __init__(self, ordinal: int = 0):
        name = os.environ.get("ZCX_LIBCUDA") or "libcuda.so.1"
        try:
            self.lib = ctypes.CDLL(name)
        except OSError as error:
            raise CannotRun(f"no CUDA driver here: {error}") from None
        self.functions: dict = {}
        code = self.code("cuInit", 0)
        if code:
            raise CannotRun(f"cuInit -> {self.error_name(code)} ({code}): no usable GPU here")
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        if ordinal >= count.value:
            raise CannotRun(f"device {ordinal} was asked for, but the driver shows {count.value}")
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), ordinal)
        self.ordinal = ordinal
        self.context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), ordinal)
        self.enter_thread()

    # ---- calling

    def function(self, name: str):
        if name in self.functions:
            return self.functions[name]
        arguments, suffix = SIGNATURES[name]
        try:
            found = self.lib[name + suffix]
        except AttributeError:
            found = self._by_address(name)
        if found is not None:
            found.restype = ctypes.c_int
            found.argtypes = [KINDS[c] for c in arguments]
        self.functions[name] = found
        return found

    def _by_address(self, name: str):
        """A driver may offer a call through cuGetProcAddress only."""
        try:
            lookup = self.lib["cuGetProcAddress_v2"]
        except AttributeError:
            return None
        lookup.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
        address, status = ctypes.c_void_p(), ctypes.c_int()
        if lookup(name.encode(), ctypes.byref(address), 12000, 0, ctypes.byref(status)) or not address.value:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *[KINDS[c] for c in SIGNATURES[name][0]])(address.value)

    def has(self, *names: str) -> bool:
        return all(self.function(name) is not None for name in names)

    def code(self, name: str, *arguments) -> int:
        """Call and give back the result code."""
        function = self.function(name)
        if function is None:
            raise CannotRun(f"this driver has no {name}")
        return function(*arguments)

    def __call__(self, name: str, *arguments) -> None:
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code, self.error_name(code))

    def error_name(self, code: int) -> str:
        if not code:
            return "SUCCESS"
        text = ctypes.c_char_p()
        self.function("cuGetErrorName")(code, ctypes.byref(text))
        return (text.value or b"?").decode().replace("CUDA_ERROR_", "")

    def by_value(self, name: str, value: Handle64, flags: int) -> int:
        """cuIpcOpenMemHandle and cuIpcOpenEventHandle take their 64 bytes by value: the pointer or event that they give."""
        out = ctypes.c_void_p()
        try:
            function = self.lib[name + ("_v2" if name == "cuIpcOpenMemHandle" else "")]
        except AttributeError:
            raise CannotRun(f"this driver has no {name}") from None
        function.restype = ctypes.c_int
        code = (
            function(ctypes.byref(out), value, ctypes.c_uint(flags))
            if name == "cuIpcOpenMemHandle"
            else function(ctypes.byref(out), value)
        )
        if code:
            raise CudaError(name, code, self.error_name(code))
        return out.value or 0

    # ---- device

    def enter_thread(self) -> None:
        self("cuCtxPushCurrent", self.context)

    def card(self) -> str:
        text = ctypes.create_string_buffer(128)
        self("cuDeviceGetName", text, 128, self.ordinal)
        return text.value.decode()

    def version(self) -> str:
        value = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(value))
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self("cuDeviceGetAttribute", ctypes.byref(value), number, self.ordinal)
        return value.value

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def free_bytes(self) -> int:
        return self.memory()[0]

    # ---- streams and events

    def stream(self) -> int:
        out = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(out), 1)
        return out.value or 0

    def sync(self, stream: int) -> None:
        self("cuStreamSynchronize", stream)

    def drained(self, stream: int, seconds: float) -> bool:
        """Look at the stream until its work is done or the time is over; never blocks in the driver."""
        end = time.monotonic() + seconds
        while True:
            code = self.code("cuStreamQuery", stream)
            if code != NOT_READY:
                if code:
                    raise CudaError("cuStreamQuery", code, self.error_name(code))
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.0005)

    def event(self, interprocess: bool = False) -> int:
        out = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(out), 2 | (4 if interprocess else 0))
        return out.value or 0

    def event_handle(self, event: int) -> bytes:
        handle = Handle64()
        self("cuIpcGetEventHandle", ctypes.byref(handle), event)
        return bytes(handle.bytes)

    def event_open(self, handle: bytes) -> int:
        return self.by_value("cuIpcOpenEventHandle", Handle64.from_buffer_copy(handle), 0)

    # ---- bytes

    def fill(self, address: int, byte: int, count: int, stream: int) -> None:
        self("cuMemsetD8Async", address, byte, count, stream)

    def write(self, address: int, data: bytes, stream: int) -> None:
        source = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self("cuMemcpyHtoDAsync", address, source, len(data), stream)
        self.sync(stream)

    def read(self, address: int, count: int, stream: int) -> bytes:
        target = (ctypes.c_ubyte * count)()
        self("cuMemcpyDtoHAsync", target, address, count, stream)
        self.sync(stream)
        return bytes(target)

    # ---- pools

    def pool(self, handle_types: int = POSIX_FD, threshold: int = 2**64 - 1) -> int:
        props = PoolProps(1, handle_types, 1, self.ordinal)
        out, value = ctypes.c_void_p(), ctypes.c_uint64(threshold)
        self("cuMemPoolCreate", ctypes.byref(out), ctypes.byref(props))
        self("cuMemPoolSetAttribute", out, 4, ctypes.byref(value))
        return out.value or 0

    def pool_fd(self, pool: int) -> int:
        fd = ctypes.c_int(-1)
        self("cuMemPoolExportToShareableHandle", ctypes.byref(fd), pool, POSIX_FD, 0)
        return fd.value

    def pool_open(self, fd: int) -> int:
        out = ctypes.c_void_p()
        self("cuMemPoolImportFromShareableHandle", ctypes.byref(out), fd, POSIX_FD, 0)
        return out.value or 0

    def pool_access(self, pool: int, flags: int) -> int:
        access = AccessDesc(1, self.ordinal, flags)
        return self.code("cuMemPoolSetAccess", pool, ctypes.byref(access), 1)

    def pool_number(self, pool: int, attribute: int) -> int:
        value = ctypes.c_uint64()
        self("cuMemPoolGetAttribute", pool, attribute, ctypes.byref(value))
        return value.value

    def default_pool(self) -> int:
        """The pool that is current before anybody set one."""
        out = ctypes.c_void_p()
        name = "cuDeviceGetDefaultMemPool" if self.has("cuDeviceGetDefaultMemPool") else "cuDeviceGetMemPool"
        self(name, ctypes.byref(out), self.ordinal)
        return out.value or 0

    def alloc(self, count: int, pool: int, stream: int) -> int:
        out = ctypes.c_uint64()
        self("cuMemAllocFromPoolAsync", ctypes.byref(out), count, pool, stream)
        self.sync(stream)
        return out.value

    def free(self, address: int, stream: int) -> None:
        self("cuMemFreeAsync", address, stream)

    def blob(self, address: int) -> bytes:
        data = (ctypes.c_ubyte * 64)()
        self("cuMemPoolExportPointer", data, address)
        return bytes(data)

    def import_pointer(self, pool: int, blob: bytes) -> int:
        data = (ctypes.c_ubyte * 64).from_buffer_copy(blob)
        out = ctypes.c_uint64()
        self("cuMemPoolImportPointer", ctypes.byref(out), pool, data)
        return out.value

    def pointer(self, address: int) -> dict:
        """What the driver says about an address: pool, legacy IPC, handle types, buffer id, start and size."""
        wanted = {
            "buffer_id": (7, ctypes.c_uint64),
            "legacy_ipc": (10, ctypes.c_int),
            "start": (11, ctypes.c_uint64),
            "size": (12, ctypes.c_size_t),
            "handle_types": (14, ctypes.c_uint),
            "pool": (17, ctypes.c_void_p),
        }
        values = {key: kind() for key, (_, kind) in wanted.items()}
        numbers = (ctypes.c_int * len(wanted))(*[number for number, _ in wanted.values()])
        places = (ctypes.c_void_p * len(wanted))(*[ctypes.addressof(v) for v in values.values()])
        self("cuPointerGetAttributes", len(wanted), numbers, places, address)
        return {key: v.value or 0 for key, v in values.items()}

    # ---- virtual memory management

    VMM = (
        "cuMemCreate",
        "cuMemRelease",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressFree",
    )

    def vmm_create(self, count: int) -> int:
        prop = AllocationProp(1, POSIX_FD, 1, self.ordinal)
        out = ctypes.c_uint64()
        self("cuMemCreate", ctypes.byref(out), count, ctypes.byref(prop), 0)
        return out.value

    def vmm_fd(self, handle: int) -> int:
        fd = ctypes.c_int(-1)
        self("cuMemExportToShareableHandle", ctypes.byref(fd), handle, POSIX_FD, 0)
        return fd.value

    def vmm_open(self, fd: int) -> int:
        out = ctypes.c_uint64()
        self("cuMemImportFromShareableHandle", ctypes.byref(out), fd, POSIX_FD)
        return out.value

    def vmm_map(self, handle: int, count: int, flags: int = PROT_READWRITE) -> int:
        out = ctypes.c_uint64()
        self("cuMemAddressReserve", ctypes.byref(out), count, 0, 0, 0)
        self("cuMemMap", out.value, count, 0, handle, 0)
        access = AccessDesc(1, self.ordinal, flags)
        self("cuMemSetAccess", out.value, count, ctypes.byref(access), 1)
        return out.value

    def vmm_unmap(self, address: int, count: int, handle: int) -> None:
        self("cuMemUnmap", address, count)
        self("cuMemAddressFree", address, count)
        self("cuMemRelease", handle)

    # ---- kernels

    def kernel(self, name: str) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), ctypes.create_string_buffer(PTX))
        self("cuModuleGetFunction", ctypes.byref(function), module, ctypes.create_string_buffer(name.encode()))
        return function.value or 0

    def launch(self, function: int, stream: int, *values) -> None:
        places = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        self("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, places, None)


class Counters:
    """A page of 64-bit counters in a memfd, mapped and registered so that streams can post and await them."""

    def __init__(self, cu: Driver, fd: int | None = None):
        import mmap

        self.fd = os.memfd_create("counters", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, 4096)
        self.map = mmap.mmap(self.fd, 4096)
        self.words = (ctypes.c_uint64 * 512).from_buffer(self.map)
        host = ctypes.addressof(self.words)
        cu("cuMemHostRegister", host, 4096, 3)
        device = ctypes.c_uint64()
        cu("cuMemHostGetDevicePointer", ctypes.byref(device), host, 0)
        self.cu, self.device = cu, device.value

    def post(self, slot: int, value: int, stream: int) -> None:
        self.cu("cuStreamWriteValue64", stream, self.device + slot * 64, value, 0)

    def await_(self, slot: int, value: int, stream: int) -> None:
        self.cu("cuStreamWaitValue64", stream, self.device + slot * 64, value, 0)

    def __getitem__(self, slot: int) -> int:
        return self.words[slot * 8]

    def __setitem__(self, slot: int, value: int) -> None:
        self.words[slot * 8] = value

    def reached(self, slot: int, value: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self[slot] < value:
            if time.monotonic() > end:
                return False
            time.sleep(0.0002)
        return True


def chunks(blob: bytes, size: int) -> int:
    """32 MiB chunks that an import touches, from the offset that the blob holds (undocumented: probe_blob_layout.py)."""
    offset = int.from_bytes(blob[24:32], "little")
    return (offset % CHUNK + size + CHUNK - 1) // CHUNK


def window(blob: bytes, offset: int, size: int) -> bytes:
    """A copy of the blob, narrowed to `size` bytes at `offset` of the allocation."""
    start = int.from_bytes(blob[24:32], "little") + offset
    return blob[:24] + start.to_bytes(8, "little") + size.to_bytes(8, "little") + blob[40:]


# ---- helper processes

_children: list = []


class Child:
    """A new interpreter that runs this script with a role, and answers over a socket: one packet each way, fds included."""

    def __init__(self, role: str, *, env: dict | None = None):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket, self.role, self.fds = ours, role, []
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(sys.argv[0]), "--role", role, str(theirs.fileno()), str(options.device)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=dict(os.environ, **(env or {})),
        )
        theirs.close()
        _children.append(self)

    def ask(self, op: str, *, fds: tuple = (), timeout: float = 30.0, **data):
        try:
            socket.send_fds(self.socket, [json.dumps([op, data]).encode()], list(fds))
        except OSError:
            raise ChildDied(self.how()) from None
        self.socket.settimeout(timeout)
        try:
            packet, self.fds, _, _ = socket.recv_fds(self.socket, 1 << 20, 8)
        except socket.timeout:
            self.kill()
            raise ChildSilent(f"{self.role} gave no answer to {op} in {timeout:.0f} s") from None
        except ConnectionError:
            packet = b""
        if not packet:
            raise ChildDied(self.how())
        answer = json.loads(packet)
        if isinstance(answer, dict) and "cuda_error" in answer:
            raise CudaError(*answer["cuda_error"])
        if isinstance(answer, dict) and "cannot_run" in answer:
            raise CannotRun(answer["cannot_run"])
        return answer

    def how(self) -> str:
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return "no answer, killed"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """The end of the socket ends the helper; wait until it is gone, so that its memory is too."""
        self.socket.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Role:
    """Base of what a helper does: methods named op_… answer to ask(…). CUDA is opened at the first use of self.cu."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.received: list = []
        self.to_send: list = []
        self._cu = None

    @property
    def cu(self) -> Driver:
        if self._cu is None:
            self._cu = Driver(options.device)
        return self._cu

    def serve(self) -> None:
        while True:
            packet, self.received, _, _ = socket.recv_fds(self.connection, 1 << 20, 8)
            if not packet:
                return
            op, data = json.loads(packet)
            self.to_send = []
            try:
                answer = getattr(self, "op_" + op)(**data)
            except CudaError as error:
                answer = {"cuda_error": [error.call, error.code, error.name]}
            except CannotRun as error:
                answer = {"cannot_run": str(error)}
            socket.send_fds(self.connection, [json.dumps(answer).encode()], self.to_send)


class Importer(Role):
    """The common worker: opens a pool, imports pointers, reads, writes, un-imports."""

    def __init__(self, connection: socket.socket):
        super().__init__(connection)
        self.stream = 0
        self.pool = 0
        self.held: dict = {}

    def op_open(self) -> dict:
        self.stream = self.cu.stream()
        if self.received:
            self.pool = self.cu.pool_open(self.received[0])
            os.close(self.received[0])
        return {}

    def op_import(self, key: str, blob: str) -> dict:
        begin = time.perf_counter()
        address = self.cu.import_pointer(self.pool, bytes.fromhex(blob))
        self.held[key] = address
        return {"address": address, "us": (time.perf_counter() - begin) * 1e6}

    def op_read(self, key: str, offset: int = 0, count: int = 4) -> dict:
        return {"bytes": self.cu.read(self.held[key] + offset, count, self.stream).hex()}

    def op_write(self, key: str, data: str, offset: int = 0) -> dict:
        self.cu.write(self.held[key] + offset, bytes.fromhex(data), self.stream)
        return {}

    def op_free(self, key: str, sync: bool = True) -> dict:
        begin = time.perf_counter()
        self.cu.free(self.held.pop(key), self.stream)
        if sync:
            self.cu.sync(self.stream)
        return {"us": (time.perf_counter() - begin) * 1e6}


# ---- the report

AS_EXPECTED, UNEXPECTED, NOT_RUN, MEASURED = "as expected", "unexpected", "not run", "measured"


class Report:
    """Lines for people as they come; at the end a verdict, or one JSON object."""

    def __init__(self, script: str, as_json: bool):
        self.script, self.as_json = script, as_json
        self.steps: list = []
        self.begin = time.monotonic()
        self.card = self.cuda = ""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def opened(self, cu: Driver) -> None:
        self.card, self.cuda = cu.card(), cu.version()
        free, total = cu.memory()
        self.say(f"{self.card}, driver {driver_version()}, CUDA {self.cuda}, {free // MIB} of {total // MIB} MiB free")

    def step(self, name: str, outcome, text: str, **data) -> bool:
        """outcome: True as expected, False not, or one of the words above."""
        if isinstance(outcome, bool):
            outcome = AS_EXPECTED if outcome else UNEXPECTED
        self.steps.append({"name": name, "outcome": outcome, "text": text, "data": data})
        self.say(f"[{outcome}] {name}: {text}")
        return outcome != UNEXPECTED

    def skip(self, name: str, why: str) -> None:
        self.step(name, NOT_RUN, why)

    def count(self, outcome: str) -> int:
        return sum(s["outcome"] == outcome for s in self.steps)

    def finish(self, verdict: str, code: int) -> int:
        if self.as_json:
            print(
                json.dumps(
                    {
                        "script": self.script,
                        "verdict": verdict,
                        "exit": code,
                        "card": self.card,
                        "driver": driver_version(),
                        "cuda": self.cuda,
                        "python": platform.python_version(),
                        "kernel": platform.release(),
                        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "seconds": round(time.monotonic() - self.begin, 2),
                        "steps": self.steps,
                    }
                ),
                flush=True,
            )
        word = {0: "as expected", 1: "UNEXPECTED", 2: "CANNOT RUN HERE"}[code]
        self.say(f"verdict: {word}: {verdict}")
        return code


def driver_version() -> str:
    try:
        return pathlib.Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


options = argparse.Namespace(device=0)  # filled by run()


def run(file: str, doc: str, experiment, roles: dict, *, verdict: str, deadline: float, arguments=None) -> None:
    """The main of every script: a helper's role, or the experiment with its report. Ends the process.

    experiment(report): makes the steps. verdict: what holds when every step that ran came out as expected.
    arguments: a function that adds the script's own options to the parser."""
    if len(sys.argv) > 4 and sys.argv[1] == "--role":
        options.device = int(sys.argv[4])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        roles[sys.argv[2]](socket.socket(fileno=int(sys.argv[3]))).serve()
        os._exit(0)
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 as expected, 1 not as expected, 2 cannot run here.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the lines for people on stderr")
    parser.add_argument("--device", type=int, default=options.device, help="ordinal of the device (default 0)")
    parser.add_argument(
        "--deadline", type=float, default=deadline, help=f"seconds for the whole script (default {deadline:.0f})"
    )
    if arguments:
        arguments(parser)
    parser.parse_args(namespace=options)
    report = Report(pathlib.Path(file).name, options.json)

    ending = threading.Lock()  # who takes it says the verdict: the death of the helpers that the deadline kills is none

    def late() -> None:
        if not ending.acquire(blocking=False):
            return
        for child in _children:
            child.process.kill()
        last = report.steps[-1]["name"] if report.steps else "none"
        os._exit(report.finish(f"the deadline of {options.deadline:.0f} s passed; the last step done: {last}", 1))

    watchdog = threading.Timer(options.deadline, late)
    watchdog.daemon = True
    watchdog.start()
    try:
        try:
            experiment(report)
        finally:
            ending.acquire()
        bad = [s["name"] for s in report.steps if s["outcome"] == UNEXPECTED]
        skipped = [s["name"] for s in report.steps if s["outcome"] == NOT_RUN]
        if bad:
            code, text = 1, f"differs from what is documented in: {', '.join(bad)}"
        elif len(skipped) == len(report.steps):
            code, text = 2, "no step could run: " + "; ".join(f"{s['name']}: {s['text']}" for s in report.steps)
        else:
            code, text = 0, verdict + (f" (not run here: {', '.join(skipped)})" if skipped else "")
    except CannotRun as error:
        code, text = 2, str(error)
    except (CudaError, ChildDied, ChildSilent) as error:
        code, text = 1, f"stopped after {len(report.steps)} steps: {type(error).__name__}: {error}"
    finally:
        watchdog.cancel()
        for child in _children:
            if child.process.poll() is None:
                child.kill()
    report.finish(text, code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a stream that hangs, as some scripts show, must not hold up the end
