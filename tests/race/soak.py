"""Many calls of every kind, with everything that can go wrong among them, and then: is anything left?

    python tests/race/soak.py --calls 1000000 --rung host|pool [--seed N] [--json FILE]

Several threads call several workers: results of each kind, leases, survivors that are dropped later, exceptions, edited inputs,
results that are too large, timeouts, cancels, a worker that hears no cancel, os._exit, SIGKILL, and workers that are closed and
replaced. Every byte of every result is compared, and of every live tensor now and then. Descriptors, threads, mappings,
/dev/shm, memory, what the simulated driver counts, and on a card the memory that cuMemGetInfo says is in use must then be what they
were after a warm-up.

`--rung pool` uses a card where one is (torch too, where it is installed), else the simulated driver with two devices. A worker has
no torch here, so that it starts fast: InputModified is raised by its function. Exit status 0: nothing was wrong.
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import mix

#: How often each kind of call is made, in ten thousand.
WEIGHTS = {"null": 4200, "check": 1200, "copy": 800, "made": 700, "own": 400, "mixed": 400, "echo": 300, "edit": 200, "submit": 400,
           "lease": 150, "keep": 200, "keep_result": 150, "kept": 200, "forget": 100, "boom": 500,
           "timeout": 12, "cancel": 15, "too_large": 40, "leave": 4, "kill": 6, "deaf": 1, "replace": 3}
EXIT = 7  # of a worker that leaves by itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mix.options(parser)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--largest", type=int, default=1 << 20, help="bytes of the largest tensor")
    parser.add_argument("--silence", type=float, default=120.0, help="seconds without the end of any call that are a hang")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    os.environ.setdefault("SIMCUDA_DELAY_US", "10")  # a tenth less to do for each call than with five times that
    gpu = mix.prepare(arguments.rung, devices=2)
    record = mix.facts(arguments, gpu, "soak")
    stage = mix.Stage(arguments.rung, gpu, arguments.workers, seed, arguments.largest)
    stage.parent._GRACE = 0.3  # a worker that hears nothing is replaced so soon here
    soak = Soak(arguments, [Everything(stage, f"{seed} thread {i}", WEIGHTS) for i in range(arguments.threads)])
    for c in soak.calls:  # each kind once at least, so that what is only made once is there
        for kind in WEIGHTS:
            soak.attempt(c, kind, stage.workers[0])
    soak.run(min(10_000, max(500, arguments.calls // 10)), "warm-up")
    before = stage.settle(restart=True)
    for c in soak.calls:
        c.count.clear()
        c.ended.clear()
    begun = time.monotonic()
    soak.run(arguments.calls, "calls")
    seconds = time.monotonic() - begun
    stage.verify("at the end")
    after = stage.settle(restart=True)
    stage.compare(before, after, mix.SLACK)
    stage.close()
    kinds = sum((c.count for c in soak.calls), collections.Counter())
    ended = sum((c.ended for c in soak.calls), collections.Counter())
    record.update(ok=not stage.problems and kinds.total() >= arguments.calls, problems=stage.problems, seed=seed, rung=arguments.rung,
                  calls=kinds.total(), calls_by_kind=dict(kinds.most_common()), ended_by=dict(ended.most_common()), devices=len(stage.devices),
                  workers=arguments.workers, threads=arguments.threads, largest=arguments.largest, seconds=round(seconds, 1),
                  calls_per_second=round(kinds.total() / seconds), bytes_compared=stage.checked, before=before, after=after,
                  own_memory_over_time=soak.samples)
    print({k: record[k] for k in ("calls", "ended_by", "seconds", "calls_per_second", "before", "after")}, flush=True)
    return mix.write(arguments.json, record)


class Everything(mix.Calls):
    """mix.Calls, and what goes wrong. `ended`: how calls ended that did not return."""

    def __init__(self, stage: mix.Stage, seed: str, weights: dict[str, int]) -> None:
        super().__init__(stage, seed, weights)
        self.ended: collections.Counter[str] = collections.Counter()

    def _fails(self, kind: str, error: type[BaseException], call: Any, right: Any = lambda e: True) -> None:
        try:
            call()
        except error as e:
            self.ended[type(e).__name__] += 1
            self._right(kind, right(e))
        else:
            self._right(kind, False)

    def timeout(self, w: Any) -> None:
        self._fails("timeout", self.stage.zcx.CallTimeout, lambda: w.call("nap", 60, timeout=self.rng.uniform(0, 0.03)))

    def cancel(self, w: Any) -> None:
        future = w.submit("nap", 60)
        if self.rng.random() < 0.8:
            time.sleep(self.rng.uniform(0, 0.01))  # sooner or later: queued, starting, running
        future.cancel()
        self._fails("cancel", self.stage.zcx.Cancelled, future.result)

    def too_large(self, w: Any) -> None:
        self._fails("too_large", self.stage.zcx.ResultTooLarge, lambda: w.call("too_large", (64 << 20) + 1, self.rng.choice(self.stage.devices)))

    def leave(self, w: Any) -> None:
        self._fails("leave", self.stage.zcx.WorkerDied, lambda: w.call("leave", EXIT))

    def deaf(self, w: Any) -> None:
        w.call("echo")  # it runs
        self._fails("deaf", self.stage.zcx.CallTimeout, lambda: w.call("deaf", timeout=0.3))

    def kill(self, w: Any) -> None:
        pid = w.pid
        if pid is not None and self.rng.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
        else:
            w.kill()

    def replace(self, w: Any) -> None:
        with self.stage.lock:
            if w not in self.stage.workers:
                return
            number = self.stage.workers.index(w)
            self.stage.workers[number] = self.stage.worker(number)
        w.close()


class Soak:
    def __init__(self, arguments: argparse.Namespace, calls: list[Everything]) -> None:
        self.arguments, self.calls = arguments, calls
        self.stage = calls[0].stage
        self.lock = threading.Lock()
        self.left = 0
        self.samples: list[int] = []

    def attempt(self, c: Everything, kind: str, w: Any) -> int:
        """One call, or what stands for it; how many were made."""
        zcx = self.stage.zcx
        try:
            return c.run(kind, w)
        except zcx.WorkerDied as error:
            if (error.signal or signal.SIGKILL) != signal.SIGKILL or (error.exit_status or EXIT) != EXIT:  # None: not reaped yet
                self.stage.problem(f"{kind}: nobody ended that worker so: {error}")
            c.ended["WorkerDied"] += 1
        except zcx.Cancelled:
            if w in self.stage.workers:
                self.stage.problem(f"{kind}: nobody cancelled it")
            c.ended["Cancelled"] += 1
        except zcx.Error as error:
            if "is closed" not in str(error):
                self.stage.problem(f"{kind}: {type(error).__name__}: {error}")
            c.ended["closed"] += 1
        except Exception as error:
            self.stage.problem(f"{kind}: {type(error).__name__}: {error}")
        c.count[kind] += 1
        return 1

    def _thread(self, c: Everything) -> None:
        while not self.stage.problems:
            with self.lock:
                if self.left <= 0:
                    return
            made = self.attempt(c, *c.one())
            with self.lock:
                self.left -= made

    def run(self, calls: int, what: str) -> None:
        self.left, begun, seen = calls, time.monotonic(), time.monotonic()
        steps = [calls * i // 20 for i in range(20)]
        with concurrent.futures.ThreadPoolExecutor(len(self.calls)) as pool:
            futures = [pool.submit(self._thread, c) for c in self.calls]
            before = self.left
            while concurrent.futures.wait(futures, 1.0)[1]:
                if self.left != before:
                    before, seen = self.left, time.monotonic()
                if time.monotonic() - seen > self.arguments.silence:
                    print(f"PROBLEM: no call has ended for {self.arguments.silence} s", flush=True)
                    faulthandler.dump_traceback()
                    os._exit(3)
                if steps and self.left <= steps[-1]:
                    while steps and self.left <= steps[-1]:
                        steps.pop()
                    self.samples.append(mix.pattern.resident()[0])
                    self.stage.verify("now and then")
                    print(f"{what}: {calls - self.left} of {calls}, {time.monotonic() - begun:.0f} s", flush=True)
            for f in futures:
                f.result()


if __name__ == "__main__":
    sys.exit(main())
