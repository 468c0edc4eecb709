#!/usr/bin/env python3
"""A worker dies with its DONE pending: what an interprocess event does to the other process then, and what a counter does.

Event: the stream that waits on it never moves again, and recording the event anew does not free it. Counter (a 64-bit word in
registered host memory, posted and awaited by streams): a plain store by the CPU frees the stream at once. And when is a dead
worker's queued work really gone? Not while a process that inherited from it lives: its write still lands.

The worker is held up by a counter that nobody posts and, where the driver can compile PTX, by a long kernel. The process whose
stream hangs is a helper too, ended by SIGKILL. Needs 32 MiB and three contexts."""

from __future__ import annotations

import ctypes
import os
import time

import cudalib
from cudalib import MIB, Child, CudaError, Counters, Driver, Importer, Report, Role

HOLD, DONE, GO = 0, 1, 2  # slots


class Owner(Role):
    """Creates the events, the counters and the memory; its stream waits for the worker."""

    def op_open(self) -> dict:
        cu = self.cu
        self.stream, self.pool = cu.stream(), cu.pool()
        self.counters = Counters(cu)
        self.block = cu.alloc(4096, self.pool, self.stream)
        cu.fill(self.block, 0x01, 4096, self.stream)
        cu.sync(self.stream)
        self.to_send = [self.counters.fd, cu.pool_fd(self.pool)]
        return {}

    def op_export(self) -> dict:
        return {"blob": self.cu.blob(self.block).hex()}

    def op_event(self) -> dict:
        self.done = self.cu.event(True)
        return {"handle": self.cu.event_handle(self.done).hex()}

    def op_wait_event(self) -> dict:
        self.cu("cuStreamWaitEvent", self.stream, self.done, 0)
        return {}

    def op_wait_counter(self) -> dict:
        self.counters.await_(DONE, 1, self.stream)
        return {}

    def op_drained(self, seconds: float) -> dict:
        return {"drained": self.cu.drained(self.stream, seconds)}

    def op_store(self, slot: int, value: int) -> dict:
        self.counters[slot] = value
        return {}

    def op_record_again(self, seconds: float) -> dict:
        """From another stream of ours: does that free who waits?"""
        side = self.cu.stream()
        code = self.cu.code("cuEventRecord", self.done, side)
        return {
            "code": code,
            "drained": self.cu.drained(self.stream, seconds),
            "query": self.cu.code("cuEventQuery", self.done),
        }

    def op_look(self) -> dict:
        return {"byte": self.cu.read(self.block, 1, self.cu.stream())[0]}


class Worker(Importer):
    def op_begin(self, kernel: bool) -> dict:
        self.counters = Counters(self.cu, self.received[0])
        self.kernel = self.cu.kernel("hold") if kernel else None
        self.stream = self.cu.stream()
        return {}

    def op_hold_up(self) -> dict:
        """Eight seconds, or until somebody posts HOLD."""
        if self.kernel:
            self.cu.launch(self.kernel, self.stream, ctypes.c_uint64(8_000_000_000))
        else:
            self.counters.await_(HOLD, 1, self.stream)
        return {}

    def op_record(self, handle: str) -> dict:
        self.cu("cuEventRecord", self.cu.event_open(bytes.fromhex(handle)), self.stream)
        return {}

    def op_post(self) -> dict:
        self.counters.post(DONE, 1, self.stream)
        return {}

    def op_map(self, blob: str) -> dict:
        self.pool = self.cu.pool_open(self.received[0])
        return self.op_import("block", blob)

    def op_write_later(self) -> dict:
        self.counters.await_(GO, 1, self.stream)
        self.cu.fill(self.held["block"], 0xEE, 4096, self.stream)
        return {}

    def op_fork(self) -> dict:
        """A descendant that touches no CUDA and only lives on, with everything that it inherited."""
        child = os.fork()
        if not child:
            self.connection.close()
            time.sleep(60)
            os._exit(0)
        return {"pid": child}


def pair(kernel: bool):
    owner, worker = Child("owner"), Child("worker")
    owner.ask("open")
    fds = owner.fds
    worker.ask("begin", kernel=kernel, fds=(fds[0],))
    return owner, worker, fds


def event_case(report: Report, kernel: bool) -> None:
    how = "a kernel" if kernel else "a counter"
    try:
        owner, worker, fds = pair(kernel)
    except (CudaError, cudalib.CannotRun) as error:
        report.skip(f"event, held up by {how}", str(error))
        return
    with owner, worker:
        if not kernel:
            handle = owner.ask("event")["handle"]
            worker.ask("hold_up")
            worker.ask("record", handle=handle)
            owner.ask("wait_event")
            before = owner.ask("drained", seconds=0.3)["drained"]
            owner.ask("store", slot=HOLD, value=1)
            after = owner.ask("drained", seconds=5)["drained"]
            report.step(
                "event, control",
                not before and after,
                "with the worker alive the waiting stream goes on once the worker's work is done",
            )
            owner.ask("store", slot=HOLD, value=0)
        handle = owner.ask("event")["handle"]
        worker.ask("hold_up")
        worker.ask("record", handle=handle)
        owner.ask("wait_event")
        worker.kill()
        drained = owner.ask("drained", seconds=3)["drained"]
        again = owner.ask("record_again", seconds=2)
        report.step(
            f"event, held up by {how}",
            not drained and not again["drained"],
            f"worker killed: the owner's stream {'went on' if drained else 'still waits after 3 s'}; "
            "event recorded anew by the owner"
            f" -> {again['code']}: it {'went on' if again['drained'] else 'still waits'}",
            drained=drained,
            again=again,
        )
        owner.kill()
        for fd in fds:
            os.close(fd)


def counter_case(report: Report) -> None:
    owner, worker, fds = pair(False)
    with owner, worker:
        worker.ask("hold_up")
        worker.ask("post")
        owner.ask("wait_counter")
        worker.kill()
        waits = not owner.ask("drained", seconds=1)["drained"]
        owner.ask("store", slot=DONE, value=1)
        freed = owner.ask("drained", seconds=3)["drained"]
        report.step(
            "counter",
            waits and freed,
            f"worker killed: the owner's stream waits ({waits}); after a plain store it goes on ({freed})",
        )
        for fd in fds:
            os.close(fd)


def gone_case(report: Report, heir: bool) -> None:
    owner, worker, fds = pair(False)
    pid = 0
    with owner, worker:
        try:
            blob = owner.ask("export")["blob"]
            worker.ask("map", blob=blob, fds=(fds[1],))
            pid = worker.ask("fork")["pid"] if heir else 0
            worker.ask("write_later")
            worker.kill()
            owner.ask("store", slot=GO, value=1)
            end, byte = time.monotonic() + 3, 0x01
            while byte == 0x01 and time.monotonic() < end:
                byte = owner.ask("look")["byte"]
                time.sleep(0.05)
        finally:
            if pid:
                os.kill(pid, 9)  # made by our own worker above
            for fd in fds:
                os.close(fd)
        report.step(
            "dead worker, an heir alive" if heir else "dead worker, nobody left",
            (byte == 0xEE) == heir,
            f"its queued write {'landed after it was reaped' if byte == 0xEE else 'never landed (watched for 3 s)'}",
            byte=byte,
        )


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    if not cu.has("cuStreamWriteValue64", "cuStreamWaitValue64") or not cu.attribute(122):
        raise cudalib.CannotRun("this driver or device has no 64-bit stream memory operations")
    if cu.free_bytes() < 32 * MIB:
        raise cudalib.CannotRun("needs 32 MiB of free device memory")
    event_case(report, kernel=False)
    event_case(report, kernel=True)
    counter_case(report)
    gone_case(report, heir=False)
    if cudalib.options.no_heir:
        report.skip("dead worker, an heir alive", "left out as asked")
    else:
        gone_case(report, heir=True)


def arguments(parser) -> None:
    parser.add_argument("--no-heir", action="store_true", help="leave out the step in which the worker forks")


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"owner": Owner, "worker": Worker},
        deadline=75,
        arguments=arguments,
        verdict="an event that a dead process left pending hangs who waits on it for ever; a counter is freed by a store",
    )
