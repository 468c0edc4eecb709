"""Scenarios on the simulated driver, each of which the right code passes and at least one mutant does not.

A scenario is a parent process without libraries: `python -c 'import scenarios; scenarios.main()' NAME`. It prints one line of
JSON: {"wrong": null or [how, text], "races": n}. How it can go wrong by itself: "bytes", "invariant", "deadline", "check" (the
start-up check refused, so that nothing was shared). What the simulated driver sees (races, faults) it says on stderr.
A worker's CPU is blind (SIMCUDA_BLIND, tests/simcuda/README.md): what it may rely on it has to await.
"""
from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

sys.modules["torch"] = sys.modules["numpy"] = None  # type: ignore[assignment]

import comfy_zerocopy as zcx  # noqa: E402
import gpu  # noqa: E402
from comfy_zerocopy import parent as parents  # noqa: E402
from comfy_zerocopy.array import Array  # noqa: E402

N = 70_000
CALLS = 33  # after so many every slot of the gate's page was used
#: What a wrong call does at once, and what the right one waits for: it is given so long to do it.
CHANCE = 0.2
LIMIT = 10.0


class Wrong(Exception):
    """how: as the head of this file says. text: what was wrong, and after a colon how far."""

    def __init__(self, how: str, text: str) -> None:
        super().__init__(how, text)


def check(condition: Any, how: str, text: Any) -> None:
    if not condition:
        raise Wrong(how, str(text))


def until(condition: Callable[[], Any], how: str, text: str, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < end, how, f"{text}: not within {seconds:g} s")
        time.sleep(0.002)


class Scene:
    """A worker, a folder for files that say something, and what must hold when all is over."""

    def __init__(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="scene-"))
        self.names = 0
        self.rung = "pool"
        self.fault = False  # a fault is what the right code ends in
        self.held: list[Any] = []
        self.w = zcx.Worker(pathlib.Path(__file__).parent / "worker.py", name="scene", timeout=30, env={"SIMCUDA_BLIND": "1"})

    def file(self) -> pathlib.Path:
        self.names += 1
        return self.folder / str(self.names)

    def shared(self) -> None:
        """What crossed in the last call was shared: else the scenario would show nothing."""
        for t in self.w.last_report.transfers:
            check(t.rung == self.rung and not t.copied, "check", t)

    def warm(self) -> None:
        """The worker has met the GPU, and passed the start-up check."""
        x = filled(1)
        self.held.append(x)  # what comes back late is the scenario's business
        check(self.w.call("bytes_of", x) == [b"\1" * N], "bytes", "a call before the scenario")
        self.shared()

    def finished(self, future: Any, go: pathlib.Path) -> Any:
        """The call's result. What the worker waits for is said only once the worker has answered and DONE was awaited a while:
        a call that returned before has not waited for it."""
        end = None
        while not future.done():
            if end is None and self.state() == "returning":
                end = time.monotonic() + CHANCE
            if end is not None and time.monotonic() > end:
                go.touch()
                end += LIMIT
            time.sleep(0.001)
        return future.result(20)

    def state(self) -> str:
        return self.w.status()["state"]

    def end(self) -> None:
        self.held.clear()
        gc.collect()
        until(lambda: self.w.status().get("transfers", 0) == 0, "invariant", "nothing is lent any more")
        self.w.close()
        until(lambda: not parents._all, "invariant", "the session is over")
        gc.collect()
        until(lambda: gpu.count("allocations") == 0, "invariant", "all memory was given back")
        until(lambda: gpu.count("registered") == 0, "invariant", "the gate's page was let go of")

    def close(self) -> None:
        self.w.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def filled(value: int, n: int = N) -> Any:
    x = zcx.empty((n,), "uint8", "cuda")
    x.copy_from(bytes([value]) * n)
    return x


def same(x: Any, value: int, what: str) -> None:
    data = x if isinstance(x, bytes) else x.tobytes()
    check(data == bytes([value]) * len(data), "bytes", f"{what}: {data[0]} to {data[-1]} instead of {value}")


def chance(condition: Callable[[], Any]) -> None:
    """Wait for what only a mutant does, but not long."""
    end = time.monotonic() + CHANCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


# ---- gates ----


def ready(scene: Scene, written: bool = False) -> None:
    """An input is read behind the work that makes it. written: the bytes are there already, only nothing says so."""
    scene.warm()
    x = filled(1)
    gpu.hold()
    gpu.fill(x, 2)
    if written:
        gpu.step(leave=0)
    future = scene.w.submit("bytes_of", x)
    until(lambda: future.done() or scene.state() == "calling", "deadline", "the call begins")
    chance(future.done)
    gpu.release()
    gpu.synchronize()  # the write after a read that was too early is a race, too
    same(future.result(20)[0], 2, "what the worker read")
    scene.shared()


def ready_written(scene: Scene) -> None:
    ready(scene, True)


def ready_passed(scene: Scene) -> None:
    """As ready_written, and READY is not held back: it is there before anybody could miss it."""
    scene.warm()
    x = filled(1)
    gpu.fill(x, 2)
    until(lambda: not gpu.pending(), "deadline", "it is written")
    same(scene.w.call("bytes_of", x)[0], 2, "what the worker read")


def use_all_slots(scene: Scene) -> None:
    x = filled(1)
    for _ in range(CALLS):
        scene.w.call("echo", x)


def ready_again(scene: Scene) -> None:
    """As ready, with slots that were used before."""
    use_all_slots(scene)
    ready(scene)


def ready_again_written(scene: Scene) -> None:
    use_all_slots(scene)
    ready(scene, True)


def done(scene: Scene, written: bool = False, side: bool = False) -> None:
    """A result is complete when the call returns. written: its bytes are there already, only nothing says so. side: it is
    written on a stream that nobody joins."""
    scene.warm()
    go = scene.file()
    got = scene.finished(scene.w.submit("late_result", N, 7, str(go), written, side), go)
    scene.held.append(got)  # not freed while a mutant's worker still writes to it: that is another scenario's
    same(got, 7, "the result")
    go.touch()
    scene.shared()


def done_written(scene: Scene) -> None:
    done(scene, written=True)


def side(scene: Scene) -> None:
    done(scene, side=True)


def side_written(scene: Scene) -> None:
    done(scene, written=True, side=True)


def scratch(scene: Scene, fails: bool = False) -> None:
    """Memory that the worker still writes to when it has answered is not given to anybody else. fails: it answered with an error."""
    scene.warm()
    go = scene.file()
    future = scene.w.submit("late_scratch", N, 7, str(go), fails)
    until(lambda: future.done() or scene.state() == "returning", "deadline", "the worker answers")
    chance(future.done)
    others = [filled(9) for _ in range(4)]
    go.touch()
    try:
        future.result(20)
    except zcx.RemoteError:
        pass
    until(lambda: scene.w.call("pending") == 0, "deadline", "the worker's work is done")
    for x in others:
        same(x, 9, "memory of somebody else's")


def scratch_of_an_error(scene: Scene) -> None:
    scratch(scene, True)


def give_back(scene: Scene) -> None:
    """Memory goes back as soon as its call has returned."""
    scene.warm()
    for value in range(5):
        x = filled(value)
        same(scene.w.call("bytes_of", x)[0], value, "an input")
        del x
        same(scene.w.call("filled", N, value), value, "a result")
        scene.shared()
        gpu.synchronize()
        check(gpu.count("allocations") == len(scene.held), "invariant", "nothing but the scene's own is left")


def fresh(scene: Scene) -> None:
    """A result in memory of which no free is under way."""
    scene.warm()
    gpu.synchronize_all()
    got = scene.w.call("filled", N, 4)
    scene.held.append(got)
    same(got, 4, "a result")


def free_late(scene: Scene) -> None:
    """A free comes behind the work that was queued before it."""
    scene.warm()
    x = filled(1)
    scene.w.call("echo", x)
    gpu.hold()
    gpu.fill(x, 2)
    del x
    chance(lambda: gpu.count("allocations") == 0)
    gpu.release()
    gpu.synchronize()


def hang(scene: Scene) -> None:
    """A worker that hangs, and then is killed, keeps no stream of this process's from going on."""
    scene.warm()
    x, y, marker = filled(1), filled(1), scene.file()
    future = scene.w.submit("hang", str(marker), x)
    until(marker.exists, "deadline", "the worker runs")
    gpu.fill(y, 2)
    until(lambda: not gpu.pending(), "deadline", "this process's stream goes on while the worker hangs", 2)
    os.kill(scene.w.pid or 0, signal.SIGKILL)
    try:
        future.result(20)
    except zcx.WorkerDied:
        pass
    same(y, 2, "what the stream wrote")
    scene.warm()


def quarantined() -> int:
    return parents.counters().get("quarantined", 0)


def die(scene: Scene) -> None:
    """What a dead worker had is given to nobody while a child of it lives: what was queued lands meanwhile."""
    scene.warm()
    x, go, marker = filled(1), scene.file(), scene.file()
    future = scene.w.submit("die_with_work", x, N, str(go), str(marker))
    until(marker.exists, "deadline", "the worker runs")
    os.kill(scene.w.pid or 0, signal.SIGKILL)
    try:
        future.result(20)
    except zcx.WorkerDied:
        pass
    del future
    gc.collect()
    others = [filled(9) for _ in range(6)]
    until(lambda: ctypes.string_at(x.address + N - 1, 1) == b"\7", "deadline", "the dead worker's work lands")
    held = quarantined()
    go.touch()
    until(lambda: quarantined() == 0, "deadline", "what it had is given back")
    for other in others:
        same(other, 9, "memory of somebody else's")
    check(held == 2, "invariant", f"{held} of 2 buffers were held back while the child lived")


def slots(scene: Scene) -> None:
    """A slot of the gate into which a stream still has to post is not used for another call, and the page stays where it is."""
    x, y = filled(1), zcx.empty((N,), "uint8", "cuda:1")
    y.copy_from(bytes(N))
    scene.w.call("echo", x, y)
    scene.shared()
    gpu.hold()
    gpu.fail("cuStreamWriteValue64:2:999")  # READY of the first device is queued, that of the second fails: nothing is sent
    try:
        scene.w.call("echo", x, y)
    except zcx.CudaError:
        pass
    else:
        raise Wrong("check", "a post that failed was no error")
    gpu.fail("")
    for _ in range(CALLS):
        scene.w.call("echo", y)
    scene.w.close()
    until(lambda: not parents._all, "invariant", "the session is over")
    chance(lambda: gpu.count("registered") == 0)
    gpu.release()
    until(lambda: not gpu.pending(), "deadline", "the late post arrives", 1)


# ---- imports ----


def keep(scene: Scene) -> None:
    """What the worker keeps is not given to anybody else, and reads the same later."""
    scene.warm()
    x = filled(3)
    scene.w.call("keep", x)
    scene.w.call("make_and_keep", N, 4)
    del x
    gpu.synchronize()
    others = [filled(9) for _ in range(6)]
    for data, value in zip(scene.w.call("kept"), (3, 4), strict=True):
        same(data, value, "what was kept")
    check(scene.w.status()["kept"] == 2, "invariant", "what is kept is counted")
    scene.w.call("forget", "")
    until(lambda: scene.w.status()["kept"] == 0, "invariant", "it is let go of")
    for x in others:
        same(x, 9, "memory of somebody else's")


def forget(scene: Scene) -> None:
    """What the worker let go of is given back only when its work is done."""
    scene.warm()
    scene.w.call("make_and_keep", N, 3)
    go = scene.file()
    scene.w.call("forget", str(go))
    chance(lambda: scene.w.call("echo") and scene.w.status()["kept"] == 0)
    others = [filled(9) for _ in range(4)]
    go.touch()
    until(lambda: scene.w.status()["kept"] == 0, "invariant", "it is let go of")
    for x in others:
        same(x, 9, "memory of somebody else's")


def twice(scene: Scene) -> None:
    """Two parts of one allocation in one call: one is dropped with the call, the other is kept."""
    x = filled(3)
    first, last = (Array(x.owner, x.address + at, (4096,), "uint8", None, x.device) for at in (0, N - 4096))
    scene.w.call("keep", first, last)
    check(len(scene.w.last_report.transfers) == 2, "check", "the two parts crossed as one")
    scene.shared()
    same(scene.w.call("kept")[0], 3, "what was kept")
    scene.w.call("forget", "")



# ---- the arena ----


def arena_result(scene: Scene) -> None:
    """A result in an arena is un-mapped in the worker when its work is done. It is large: small ones stay mapped."""
    scene.rung = "vmm"
    scene.warm()
    go = scene.file()
    future = scene.w.submit("late_result", 20 << 20, 7, str(go), False, False)
    chance(future.done)
    go.touch()
    same(future.result(20), 7, "the result")
    scene.shared()


def arena_reuse(scene: Scene) -> None:
    """Memory of an arena that was dropped is given out again when the work that was queued before is done."""
    scene.rung = "vmm"
    scene.warm()
    x, other = filled(1), gpu.stream()
    scene.w.call("echo", x)
    gpu.hold()
    gpu.fill(x, 2)
    del x
    y = zcx.empty((N,), "uint8", "cuda")
    gpu.fill(y, 9, other)
    gpu.synchronize(other)
    gpu.release()
    gpu.synchronize()
    same(y, 9, "memory of somebody else's")


def arena_edit(scene: Scene) -> None:
    """An input in an arena is not the worker's to write to: that is the end of the worker, and the bytes are what they were."""
    scene.rung = "vmm"
    scene.warm()
    x = filled(3)
    scene.fault = True
    try:
        scene.w.call("edit", x)
    except zcx.Error:
        pass
    same(x, 3, "an input that the worker wrote to")
    scene.w.kill()


class _Echo(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


def main(name: str) -> None:
    for logger in ("comfy_zerocopy", "comfy_zerocopy.worker"):
        logging.getLogger(logger).setLevel(logging.INFO)
    logging.getLogger("comfy_zerocopy").addHandler(_Echo())  # what a worker's driver says
    parents._GRACE = 0.5
    gpu.enter()
    scene, wrong = Scene(), None
    try:
        globals()[name](scene)
        scene.end()
    except Wrong as error:
        wrong = list(error.args)
    except BaseException as error:
        traceback.print_exc()
        wrong = ["error", f"{type(error).__name__}: {error}"]
    races = gpu.races()
    scene.close()
    print(json.dumps({"wrong": wrong, "races": races, "fault": scene.fault}), flush=True)
    os._exit(0)  # not by way of whatever a mutant left hanging
