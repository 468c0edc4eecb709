#!/usr/bin/env python3
"""What happens to the device memory of an IPC pool after it was exported, freed and trimmed.

Never exported: a trim gives it back. Exported once: `reserved` falls to 0 but the device's free memory does not come back, the
next allocation takes new memory on top (charged twice), bounded at one extra backing per exported range, until the pool is
destroyed, its descriptors are closed and every importer is gone. Needs device memory for two contexts and five blocks of 64 MiB
to 1 GiB (a sixteenth of what is free). Other users of the card disturb it: differences below half a block count as none."""

from __future__ import annotations

import os

import cudalib
from cudalib import GIB, MIB, Child, Driver, Importer, Report, Role


class Owner(Role):
    """One pool, one block at a time; every answer says what the device and the pool say by then."""

    def op_open(self, size: int, threshold_zero: bool = False) -> dict:
        cu = self.cu
        self.size, self.stream = size, cu.stream()
        self.pool = cu.pool(threshold=0) if threshold_zero else cu.pool()
        self.fd = cu.pool_fd(self.pool)
        self.to_send = [self.fd]
        cu.free(cu.alloc(4096, self.pool, self.stream), self.stream)
        return self._state(trim=not threshold_zero)

    def op_fill(self, export: bool) -> dict:
        self.block = self.cu.alloc(self.size, self.pool, self.stream)
        allocated = self._state(trim=False)
        blob = self.cu.blob(self.block).hex() if export else ""
        return dict(allocated, blob=blob, free_exported=self._state(trim=False)["free"])

    def op_drop(self, trim: bool = True) -> dict:
        self.cu.free(self.block, self.stream)
        return self._state(trim)

    def op_end(self, close: bool = True) -> dict:
        self.cu("cuMemPoolDestroy", self.pool)
        if close:
            os.close(self.fd)
        self.pool = 0
        return self._state(trim=False)

    def op_look(self) -> dict:
        return self._state(trim=False)

    def _state(self, trim: bool) -> dict:
        cu = self.cu
        cu.sync(self.stream)
        if trim:
            cu("cuMemPoolTrimTo", self.pool, 0)
        return {"free": cu.free_bytes(), "reserved": cu.pool_number(self.pool, 5) if self.pool else 0}


class Ledger:
    """How many blocks the device is short of, against the start."""

    def __init__(self, owner: Child, size: int, keep_fd: bool = False, **how):
        self.owner, self.size = owner, size
        self.start = owner.ask("open", size=size, **how)["free"]
        self.fd = owner.fds[0]
        if not keep_fd:  # a descriptor of the pool keeps its memory
            os.close(self.fd)

    def short(self, state: dict) -> int:
        return round((self.start - state["free"]) / self.size)

    def __call__(self, op: str, **data) -> tuple[int, dict]:
        state = self.owner.ask(op, **data)
        return self.short(state), state


def experiment(report: Report) -> None:
    cu = Driver(cudalib.options.device)
    report.opened(cu)
    size = min(GIB, cu.free_bytes() // 16) // (32 * MIB) * (32 * MIB)
    if size < 64 * MIB:
        raise cudalib.CannotRun(f"needs 1 GiB of free device memory, {cu.free_bytes() // MIB} MiB are free")
    report.say(f"one block is {size // MIB} MiB")

    with Child("owner") as owner:
        book = Ledger(owner, size)
        book("fill", export=False)
        short, state = book("drop")
        report.step(
            "never exported",
            short == 0 and state["reserved"] < size,
            f"freed and trimmed: {short} blocks short, reserved {state['reserved'] // MIB} MiB",
            short=short,
        )

    with Child("owner") as owner:
        book = Ledger(owner, size)
        book("fill", export=True)
        short, state = book("drop")
        report.step(
            "exported",
            short == 1 and state["reserved"] < size,
            f"freed and trimmed: {short} block short although reserved says {state['reserved'] // MIB} MiB",
            short=short,
        )
        short, state = book("fill", export=True)
        after = book.short({"free": state["free_exported"]})
        report.step(
            "charged twice",
            short == 2,
            f"the next block of that size: {short} blocks short with one alive; once that one is exported as well: {after}",
            short=short,
            after_export=after,
        )
        shorts = []
        for _ in range(3):
            shorts.append(book("drop")[0])
            book("fill", export=True)
        report.step(
            "bounded",
            shorts == [1, 1, 1],
            f"three more rounds of allocate, export, free, trim: {shorts} blocks short",
            shorts=shorts,
        )
        book("drop")
        short, _ = book("end")
        report.step(
            "ends with the pool", short == 0, f"pool destroyed and its descriptor closed: {short} blocks short", short=short
        )

    with Child("owner") as owner:
        book = Ledger(owner, size, threshold_zero=True)
        book("fill", export=True)
        short, state = book("drop", trim=False)
        report.step(
            "released by threshold 0",
            short == 1,
            f"freed and synchronised: {short} block short, reserved {state['reserved'] // MIB} MiB",
            short=short,
        )

    with Child("owner") as owner, Child("importer") as importer:
        book = Ledger(owner, size, keep_fd=True)
        importer.ask("open", fds=(book.fd,))
        os.close(book.fd)
        start = owner.ask("look")["free"]
        context = book.start - start  # the importer's context takes memory, and gives it back with the process
        blob = owner.ask("fill", export=True)["blob"]
        importer.ask("import", key="block", blob=blob)
        importer.ask("free", key="block")
        book("drop")
        alive = round((start - owner.ask("end")["free"]) / size)
        importer.close()
        gone = round((start + context - owner.ask("look")["free"]) / size)
        report.step(
            "ends with the importers",
            alive == 1 and gone == 0,
            f"pool destroyed, import given back, importer alive: {alive} block short; importer gone: {gone}",
            alive=alive,
            gone=gone,
        )


if __name__ == "__main__":
    cudalib.run(
        __file__,
        __doc__,
        experiment,
        {"owner": Owner, "importer": Importer},
        deadline=60,
        verdict="exported memory is kept until pool, descriptors and importers are gone, and is charged twice after a trim",
    )
