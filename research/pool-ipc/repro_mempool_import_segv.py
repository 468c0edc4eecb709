#!/usr/bin/env python3
"""cuMemPoolImportPointer() kills the importing process when one allocation spans too many 32 MiB chunks. Stand-alone.

One file, stock Python 3.9+ on Linux, no packages, no CUDA toolkit: it needs an NVIDIA driver and a GPU, nothing else. For each
size a pool allocation is exported here and imported in a fresh process, whose death is this script's finding.

Read the ladder by chunks: the driver imports a pool allocation as 32 MiB chunks. Up to 128 of them (4096 MiB) all is well; from
165 on (5264 MiB) the importer dies of SIGSEGV. Between 129 and 164 the import *returns success*, although (as published from
disassembly of driver 580.126.20) the driver has by then written past a 128-entry array on its stack. That overwrite is looked
for from outside: the import runs on a thread whose dead stack is searched for the chunk handles it left there. A run longer
than 128 shows the overwrite; a shorter one shows nothing either way.

Also shown: the same allocation imports in windows of at most 128 chunks (by an undocumented field of the export data), and
cuMemCreate memory of any size imports. Device memory: 6.2 GiB for the whole ladder, less if less is free (steps that do not
fit are said to be left out; at least 5.2 GiB are needed to see the crash)."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

MIB = 1 << 20
CHUNK = 32 * MIB
SOUND = 128  # chunks
STRADDLE = 16 * MIB  # how far into a chunk the straddling allocations begin
LADDER = [2048, 4064, 4096, 4128, 4608, 5120, 5248, 5264, 5280, 6144]  # MiB, begun at a chunk's start
STRADDLING = [4064, 4096, 5232, 5248]  # MiB, begun inside a chunk
POSIX_FD = 1


class NoGround(Exception):
    pass


class Failed(Exception):
    pass


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
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    _fields_ = [("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int)]


class Driver:
    """libcuda.so.1 (or $ZCX_LIBCUDA), one device, its primary context current, one stream."""

    # 64-bit arguments that ctypes must not take for ints
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
        "cuMemPoolTrimTo": [1],
    }
    SUFFIX = {"cuCtxPushCurrent": "_v2", "cuMemGetInfo": "_v2", "cuMemcpyDtoHAsync": "_v2"}

    def __init__(self, ordinal: int):
        try:
            self.lib = ctypes.CDLL(os.environ.get("ZCX_LIBCUDA") or "libcuda.so.1")
        except OSError as error:
            raise NoGround(f"no CUDA driver here: {error}") from None
        code = self.code("cuInit", 0)
        if code:
            raise NoGround(f"cuInit returned {code}: no usable GPU here")
        context = ctypes.c_void_p()
        self.ordinal = ordinal
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self("cuCtxPushCurrent", context)
        self.context = context
        self.stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(self.stream), 1)

    def find(self, name: str):
        try:
            return self.lib[name + self.SUFFIX.get(name, "")]
        except AttributeError:
            return None

    def code(self, name: str, *arguments) -> int:
        function = self.find(name)
        if function is None:
            raise NoGround(f"this driver has no {name}")
        wide = self.WIDE.get(name, [])
        return function(*[ctypes.c_uint64(a) if i in wide and isinstance(a, int) else a for i, a in enumerate(arguments)])

    def __call__(self, name: str, *arguments) -> None:
        code = self.code(name, *arguments)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorName(code, ctypes.byref(text))
            raise Failed(f"{name} -> {(text.value or b'?').decode()} ({code})")

    def sync(self) -> None:
        self("cuStreamSynchronize", self.stream)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def last_byte(self, address: int, size: int) -> int:
        byte = ctypes.c_ubyte()
        self("cuMemcpyDtoHAsync", ctypes.byref(byte), address + size - 1, 1, self.stream)
        self.sync()
        return byte.value

    def new_pool(self) -> tuple[ctypes.c_void_p, int]:
        pool, fd = ctypes.c_void_p(), ctypes.c_int(-1)
        self("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(PoolProps(1, POSIX_FD, 1, self.ordinal)))
        self("cuMemPoolExportToShareableHandle", ctypes.byref(fd), pool, POSIX_FD, 0)
        return pool, fd.value

    def alloc(self, pool: ctypes.c_void_p, size: int) -> int:
        out = ctypes.c_uint64()
        self("cuMemAllocFromPoolAsync", ctypes.byref(out), size, pool, self.stream)
        self.sync()
        return out.value

    def free(self, address: int) -> None:
        self("cuMemFreeAsync", address, self.stream)
        self.sync()

    def mark_end(self, address: int, byte: int, size: int) -> None:
        """The last MiB: what the importer looks at."""
        self("cuMemsetD8Async", address + size - MIB, ctypes.c_ubyte(byte), MIB, self.stream)
        self.sync()


# ---- the importing process


def stack_bounds() -> tuple[int, int]:
    """The calling thread's stack, lowest and highest address."""
    libc = ctypes.CDLL(None)
    attributes, base, size = ctypes.create_string_buffer(256), ctypes.c_void_p(), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_ulong
    if libc.pthread_getattr_np(ctypes.c_ulong(libc.pthread_self()), attributes):
        return 0, 0
    libc.pthread_attr_getstack(attributes, ctypes.byref(base), ctypes.byref(size))
    return base.value or 0, (base.value or 0) + size.value


def longest_run(low: int, high: int) -> dict:
    """The longest run of words on that (parked) thread's stack that rise by one constant step: handles that an import left."""
    data = b""
    with open("/proc/self/mem", "rb", 0) as memory:
        for page in range(high - 4096, max(low, high - 64 * 4096) - 1, -4096):
            try:
                memory.seek(page)
                data = memory.read(4096) + data
            except OSError:
                break
    best = {"length": 0, "stride": 0, "step": 0}
    words = memoryview(data).cast("I")
    for stride in (1, 2, 3, 4, 6, 8):  # entries of 4 to 32 bytes
        run = [1] * len(words)
        for i in range(stride, len(words)):
            step = words[i] - words[i - stride]
            if 0 < abs(step) <= 64 and words[i - stride] > 4096:
                chained = i >= 2 * stride and run[i - stride] > 1 and words[i - stride] - words[i - 2 * stride] == step
                run[i] = run[i - stride] + 1 if chained else 2
                if run[i] > best["length"]:
                    best = {"length": run[i], "stride": stride * 4, "step": step}
    return best


def importer(connection: socket.socket, ordinal: int) -> None:
    """One request, one answer; the death on the way is the finding."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    packet, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    request = json.loads(packet)
    cu = Driver(ordinal)
    answer: dict = {"us": [], "last": [], "contiguous": True}
    if request["kind"] == "vmm":
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        begin = time.perf_counter()
        cu("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fds[0]), POSIX_FD)
        cu("cuMemAddressReserve", ctypes.byref(address), request["size"], 0, 0, 0)
        cu("cuMemMap", address.value, request["size"], 0, handle.value, 0)
        cu("cuMemSetAccess", address.value, request["size"], ctypes.byref(AccessDesc(1, ordinal, 3)), 1)
        answer["us"].append((time.perf_counter() - begin) * 1e6)
        answer["last"].append(cu.last_byte(address.value, request["size"]))
    else:
        pool = ctypes.c_void_p()
        cu("cuMemPoolImportFromShareableHandle", ctypes.byref(pool), ctypes.c_void_p(fds[0]), POSIX_FD, 0)
        failure: list = []
        bounds: list = []
        imported, looked = threading.Lock(), threading.Lock()
        imported.acquire()
        looked.acquire()

        def work() -> None:
            try:
                cu("cuCtxPushCurrent", cu.context)
                bounds.extend(stack_bounds())
                blobs = [
                    ((ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(blob)), size) for blob, size in request["parts"]
                ]
                function, expected = cu.find("cuMemPoolImportPointer"), None
                for blob, size in blobs:
                    out = ctypes.c_uint64()
                    begin = time.perf_counter()
                    code = function(ctypes.byref(out), pool, blob)
                    took = time.perf_counter() - begin
                    if request["look"]:  # at once, before anything else uses the stack
                        imported.release()
                        looked.acquire()
                    answer["us"].append(took * 1e6)
                    if code:
                        raise Failed(f"cuMemPoolImportPointer -> {code}")
                    answer["contiguous"] &= expected in (None, out.value)
                    expected = out.value + size
                    answer["last"].append(cu.last_byte(out.value, size))
            except (Failed, NoGround) as error:
                failure.append(str(error))
            finally:
                if imported.locked():
                    imported.release()

        threading.stack_size(4 * MIB)
        thread = threading.Thread(target=work)
        thread.start()
        if request["look"]:
            imported.acquire()
            answer["stack"] = longest_run(*bounds) if len(bounds) == 2 and bounds[1] else {}
            looked.release()
        thread.join()
        if failure:
            answer["failed"] = failure[0]
    connection.send(json.dumps(answer).encode())


def ask(request: dict, fd: int, ordinal: int, seconds: float = 40) -> dict:
    """Run one importer: its answer, or {'died': 'SIGSEGV'}."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--importer", str(theirs.fileno()), str(ordinal)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        stderr=subprocess.PIPE,
    )
    theirs.close()
    try:
        socket.send_fds(ours, [json.dumps(request).encode()], [fd])
        ours.settimeout(seconds)
        packet = ours.recv(1 << 16)
    except socket.timeout:
        packet = b'{"died": "no answer in time"}'
    except OSError:
        packet = b""
    finally:
        ours.close()
        if not packet:
            process.wait(20)
        process.kill()
        _, errors = process.communicate()
    if packet:
        return json.loads(packet)
    status = process.returncode
    if status < 0:
        return {"died": signal.Signals(-status).name}
    return {"died": f"exit status {status}: {errors.decode(errors='replace').strip().splitlines()[-1:]}"}


# ---- the exporting process


class Report:
    def __init__(self, as_json: bool):
        self.as_json, self.rows, self.begin, self.card, self.cuda = as_json, [], time.monotonic(), "", ""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def row(self, **row) -> dict:
        self.rows.append(row)
        where = f"{row['chunks']:4d} chunks" if "chunks" in row else "           "
        self.say(
            f"{row['what']:34} {row['mib']:6d} MiB {where}  {row['result']}"
            + (f"  {row['note']}" if row.get("note") else "")
        )
        return row

    def finish(self, verdict: str, code: int) -> int:
        if self.as_json:
            try:
                with open("/sys/module/nvidia/version") as file:
                    driver = file.read().strip()
            except OSError:
                driver = "unknown"
            print(
                json.dumps(
                    {
                        "script": os.path.basename(__file__),
                        "verdict": verdict,
                        "exit": code,
                        "card": self.card,
                        "driver": driver,
                        "cuda": self.cuda,
                        "python": platform.python_version(),
                        "kernel": platform.release(),
                        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "seconds": round(time.monotonic() - self.begin, 2),
                        "steps": self.rows,
                    }
                ),
                flush=True,
            )
        self.say(f"verdict: {('as expected', 'UNEXPECTED', 'CANNOT RUN HERE')[code]}: {verdict}")
        return code


def place(cu: Driver, pool: ctypes.c_void_p, size: int, straddle: bool) -> tuple[int, list[int], bytes]:
    """An allocation whose first byte lies at a chunk's start, or STRADDLE behind it; (address, padding, export data)."""
    padding: list[int] = []
    if straddle:
        whole = cu.alloc(pool, size + STRADDLE)  # makes room behind the padding
        cu.free(whole)
        padding.append(cu.alloc(pool, STRADDLE))
    address = cu.alloc(pool, size)
    blob = (ctypes.c_ubyte * 64)()
    cu("cuMemPoolExportPointer", blob, address)
    return address, padding, bytes(blob)


def offset_of(blob: bytes) -> int:
    return int.from_bytes(blob[24:32], "little")  # in the pool: undocumented


def one_import(report: Report, cu: Driver, mib: int, straddle: bool, number: int) -> dict:
    size = mib * MIB
    pool, fd = cu.new_pool()
    try:
        address, padding, blob = place(cu, pool, size, straddle)
        byte = 0x20 + number
        cu.mark_end(address, byte, size)
        inside = offset_of(blob) % CHUNK
        count = (inside + size + CHUNK - 1) // CHUNK
        answer = ask({"kind": "pool", "parts": [[blob.hex(), size]], "look": True}, fd, cu.ordinal)
        if "died" in answer:
            result = answer["died"]
        elif "failed" in answer:
            result = answer["failed"]
        else:
            result = "imports" if answer["last"] == [byte] else f"WRONG BYTES {answer['last']}"
        note = f"{answer['us'][0]:.0f} us" if answer.get("us") else ""
        stack = answer.get("stack") or {}
        if stack.get("length", 0) >= 64:
            note += f", {stack['length']} handles in a row on the dead stack"
        row = report.row(
            what="straddling a chunk" if inside else "begins at a chunk",
            mib=mib,
            chunks=count,
            offset=inside,
            result=result,
            note=note,
            stack=stack,
        )
        for old in [address, *padding]:
            cu.free(old)
        return row
    finally:
        os.close(fd)
        cu("cuMemPoolDestroy", pool)


def windows(report: Report, cu: Driver, mib: int) -> dict:
    size = mib * MIB
    pool, fd = cu.new_pool()
    try:
        address, _, blob = place(cu, pool, size, False)
        parts, at = [], 0
        while at < size:
            start = offset_of(blob) + at
            span = min(size - at, SOUND * CHUNK - start % CHUNK)
            cu.mark_end(address + at, 0x77, span)
            parts.append([(blob[:24] + start.to_bytes(8, "little") + span.to_bytes(8, "little") + blob[40:]).hex(), span])
            at += span
        answer = ask({"kind": "pool", "parts": parts, "look": False}, fd, cu.ordinal)
        good = answer.get("last") == [0x77] * len(parts) and answer.get("contiguous")
        row = report.row(
            what=f"in {len(parts)} windows",
            mib=mib,
            result="imports, contiguous" if good else str(answer),
            note=f"{sum(answer['us']):.0f} us" if answer.get("us") else "",
        )
        cu.free(address)
        return row
    finally:
        os.close(fd)
        cu("cuMemPoolDestroy", pool)


def vmm(report: Report, cu: Driver, mib: int) -> dict:
    if cu.find("cuMemCreate") is None:
        return report.row(what="cuMemCreate memory", mib=mib, result="not run", note="this driver has no cuMemCreate")
    size, handle, address, fd = mib * MIB, ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
    cu("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(AllocationProp(1, POSIX_FD, 1, cu.ordinal)), 0)
    cu("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
    cu("cuMemMap", address.value, size, 0, handle.value, 0)
    cu("cuMemSetAccess", address.value, size, ctypes.byref(AccessDesc(1, cu.ordinal, 3)), 1)
    cu.mark_end(address.value, 0x66, size)
    cu("cuMemExportToShareableHandle", ctypes.byref(fd), handle.value, POSIX_FD, 0)
    answer = ask({"kind": "vmm", "size": size}, fd.value, cu.ordinal)
    os.close(fd.value)
    return report.row(
        what="cuMemCreate memory",
        mib=mib,
        result="imports" if answer.get("last") == [0x66] else str(answer),
        note=f"{answer['us'][0]:.0f} us" if answer.get("us") else "",
    )


def experiment(report: Report, ordinal: int, limit_mib: int) -> tuple[str, int]:
    cu = Driver(ordinal)
    name, version = ctypes.create_string_buffer(128), ctypes.c_int()
    cu("cuDeviceGetName", name, 128, ordinal)
    cu("cuDriverGetVersion", ctypes.byref(version))
    report.card, report.cuda = name.value.decode(), f"{version.value // 1000}.{version.value % 1000 // 10}"
    room = (cu.free_bytes() - 700 * MIB) // MIB  # the importer's context, and some air
    if limit_mib:
        room = min(room, limit_mib)
    report.say(f"{report.card}, CUDA {report.cuda}, room for allocations of {room} MiB")
    ladder = [m for m in LADDER if m <= room]
    straddling = [m for m in STRADDLING if m + STRADDLE // MIB <= room]
    if not ladder:
        raise NoGround(f"needs at least {LADDER[0] + 700} MiB of free device memory")
    rows = [one_import(report, cu, mib, False, i) for i, mib in enumerate(ladder)]
    rows += [one_import(report, cu, mib, True, 32 + i) for i, mib in enumerate(straddling)]
    left_out = [m for m in LADDER if m > room]
    if left_out:
        report.say(f"left out for lack of device memory: {left_out} MiB")
    # Windows small enough for any card prove the mechanism; above the limit they prove the way out.
    ways_out = [windows(report, cu, ladder[-1]), vmm(report, cu, ladder[-1])]

    sound = [r for r in rows if r["chunks"] <= SOUND]
    dead = [r for r in rows if r["chunks"] > SOUND and r["result"].startswith("SIG")]
    lucky = [r for r in rows if r["chunks"] > SOUND and r["result"] == "imports"]
    seen = [r for r in lucky if r["stack"].get("length", 0) > SOUND]
    odd = [r for r in rows if r not in dead and r["result"] != "imports"]
    odd += [r for r in ways_out if not r["result"].startswith(("imports", "not run"))]
    if odd or any(r["result"] != "imports" for r in sound):
        return f"not as documented: {[(r['what'], r['mib'], r['result']) for r in odd] or 'a sound size failed'}", 1
    if not any(r["chunks"] > 164 for r in rows) and not dead:
        raise NoGround(
            f"the largest allocation that fits has {max(r['chunks'] for r in rows)} chunks; the crash needs 165 (5264 MiB)"
        )
    if not dead:
        return "the bug does not show on this driver: every size imported", 1
    first = min(r["chunks"] for r in dead)
    text = f"importer dies of {dead[0]['result']} from {first} chunks ({first * 32} MiB) on; "
    text += f"last sound size {SOUND} chunks (4096 MiB)"
    if lucky:
        text += (
            f"; {len(lucky)} imports of 129 to {max(r['chunks'] for r in lucky)} chunks returned success, the overwrite "
            + ("is seen on the dead stack" if seen else "cannot be seen from outside in this run")
        )
    return text + "; windows" + (
        " and cuMemCreate memory are" if ways_out[1]["result"] == "imports" else " are"
    ) + " unaffected", 0


def main() -> int:
    if len(sys.argv) > 3 and sys.argv[1] == "--importer":
        importer(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
        os._exit(0)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 the bug shows as documented, 1 it does not, 2 cannot run here.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the lines for people on stderr")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the device (default 0)")
    parser.add_argument("--limit", type=int, default=0, metavar="MIB", help="try no allocation above this")
    parser.add_argument("--deadline", type=float, default=180, help="seconds for the whole script (default 180)")
    options = parser.parse_args()
    report = Report(options.json)

    def late() -> None:
        os._exit(report.finish(f"the deadline of {options.deadline:.0f} s passed after {len(report.rows)} rows", 1))

    watchdog = threading.Timer(options.deadline, late)
    watchdog.daemon = True
    watchdog.start()
    try:
        verdict, code = experiment(report, options.device, options.limit)
    except NoGround as error:
        verdict, code = str(error), 2
    except Failed as error:
        verdict, code = f"stopped after {len(report.rows)} rows: {error}", 1
    watchdog.cancel()
    report.finish(verdict, code)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
