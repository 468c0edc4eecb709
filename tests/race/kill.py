"""SIGKILL to a worker at random moments, while several threads make mixed calls of several workers.

    python tests/race/kill.py --moments 1000 --rung host|pool [--seed N] [--json FILE]

As many moments as hit a call that was under way; moments in which that worker had none are made and checked in the same way, and
counted too. A moment: every thread makes some calls, and one worker (that is called, if one is) is killed after a delay that is uniform
over the time such calls take, as measured before. At once memory is allocated and filled, to take what was given back too early, and
every byte of every live tensor is compared; again when the calls have ended and the worker is gone. A call must end within the
deadline: with its right result, or, if it was of the killed worker, in WorkerDied. Some workers leave a child that holds what they held
for a while: the memory must wait for it, and on a GPU queued work goes on. At the end descriptors, threads, mappings and memory are
what they were; this process's own memory is recorded as the moments go by, too.

`--rung pool` uses a card where one is (torch too, where it is installed), else the simulated driver. Exit status 0: nothing was wrong.
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
import time
from typing import Any

import mix

WARM_UP = 12  # moments before the first that counts
MOST = 10  # moments for each that hits: where it takes more, the kills come at the wrong times
SAMPLES = 40  # of this process's own memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mix.options(parser)
    parser.add_argument("--moments", type=int, default=1000, help="that hit a call under way")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4, help="of each thread in each moment")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds that a moment's calls may take")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    gpu = mix.prepare(arguments.rung, devices=1)
    record = mix.facts(arguments, gpu, "kill")
    begun = time.monotonic()
    stage = mix.Stage(arguments.rung, gpu, arguments.workers, seed)
    race = Race(stage, arguments, seed)
    race.measure()
    for _ in range(WARM_UP):
        race.moment()
    before = stage.settle(restart=True)
    race.reset()
    while race.hits < arguments.moments and not stage.problems:
        if race.moments >= MOST * arguments.moments:
            stage.problem(f"of {race.moments} moments only {race.hits} hit a call under way")
            break
        race.moment()
        if race.hits >= len(race.samples) * arguments.moments // SAMPLES:
            race.samples.append(mix.pattern.resident()[0])
        if race.moments % 100 == 0:
            print(f"{race.moments} moments, {race.hits} of them hit a call, {time.monotonic() - begun:.0f} s", flush=True)
    after = stage.settle(restart=True)
    stage.compare(before, after, mix.SLACK)
    stage.close()
    record.update(
        ok=not stage.problems and race.hits == arguments.moments, problems=stage.problems, seed=seed, rung=arguments.rung,
        moments=race.moments, moments_that_hit_a_call=race.hits, moments_that_left_a_child=race.inherited,
        workers=arguments.workers, threads=arguments.threads,
        window_ms=round(1000 * race.window, 1), calls=sum(c.count.total() for c in race.calls), calls_by_kind=race.by_kind(),
        worker_died=sum(race.states.values()), worker_died_by_state=dict(race.states), worker_died_by_call=dict(race.hit_kinds),
        kill_to_worker_died_ms=mix.spread(race.heard),
        slowest_call_ms=round(1000 * race.slowest, 1), hangs=race.hangs, bytes_compared=stage.checked, before=before, after=after,
        own_memory_over_moments=race.samples, seconds=round(time.monotonic() - begun, 1))
    print({k: v for k, v in record.items() if k in ("moments", "moments_that_hit_a_call", "worker_died", "calls", "hangs", "seconds",
                                                     "bytes_compared", "kill_to_worker_died_ms", "before", "after")})
    return mix.write(arguments.json, record)


class Calls(mix.Calls):
    """And a child of the worker's that holds what it holds, and lives a little longer: so does what was queued on the GPU."""

    def __init__(self, stage: mix.Stage, heirs: set[int], seed: str) -> None:
        super().__init__(stage, seed, {**mix.COMMON, "descend": 40})
        self.heirs = heirs

    def descend(self, w: Any) -> None:
        self.heirs.add(w.call("descend", self.rng.uniform(0, 0.1)))


class Race:
    def __init__(self, stage: mix.Stage, arguments: argparse.Namespace, seed: int) -> None:
        self.stage, self.arguments = stage, arguments
        self.rng = random.Random(f"{seed} moments")
        self.heirs: set[int] = set()  # workers that have a child
        self.calls = [Calls(stage, self.heirs, f"{seed} thread {i}") for i in range(arguments.threads)]
        self.pool = concurrent.futures.ThreadPoolExecutor(arguments.threads)
        self.window = 0.0
        self.reset()

    def reset(self) -> None:
        self.moments = self.hits = self.hangs = self.inherited = 0
        self.states: collections.Counter[str] = collections.Counter()
        self.hit_kinds: collections.Counter[str] = collections.Counter()
        self.heard: list[float] = []
        self.samples: list[int] = []
        self.slowest = 0.0
        for c in self.calls:
            c.count.clear()

    def by_kind(self) -> dict[str, int]:
        return dict(sum((c.count for c in self.calls), collections.Counter()).most_common())

    def _thread(self, calls: mix.Calls) -> list[tuple[str, float, float, Any]]:
        """(kind, begun, ended, None or what is known of the worker that died) of each call."""
        made = []
        for _ in range(self.arguments.calls):
            kind, w = calls.one()
            begun, died = time.monotonic(), None
            try:
                calls.run(kind, w)
            except self.stage.zcx.WorkerDied as error:
                died = (error.pid, error.signal, error.state)
            except Exception as error:
                self.stage.problem(f"{kind}: {type(error).__name__}: {error}")
            made.append((kind, begun, time.monotonic(), died))
        return made

    def _start(self) -> list[Any]:
        return [self.pool.submit(self._thread, c) for c in self.calls]

    def _join(self, futures: list[Any]) -> list[tuple[str, float, float, Any]]:
        done, late = concurrent.futures.wait(futures, self.arguments.deadline)
        if late:
            self.hangs += 1
            print(f"PROBLEM: {len(late)} threads are not done within {self.arguments.deadline} s", flush=True)
            faulthandler.dump_traceback()
            os._exit(3)
        return [call for f in futures for call in f.result()]

    def measure(self) -> None:
        """How long a moment's calls take when nobody is killed."""
        took = []
        for _ in range(8):
            begun = time.monotonic()
            self._join(self._start())
            took.append(time.monotonic() - begun)
        self.window = sorted(took[1:])[len(took) // 2]  # the first one starts the workers

    def moment(self) -> None:
        stage, rng = self.stage, self.rng
        delay = rng.uniform(0, self.window)
        begun = time.monotonic()
        futures = self._start()
        time.sleep(max(0.0, begun + delay - time.monotonic()))  # the moment itself: nothing is awaited by it
        victims = [(w.pid, w._turn.held) for w in stage.workers if w.pid is not None]
        pid = rng.choice([pid for pid, called in victims if called] or [pid for pid, _ in victims] or [None])
        if pid is None:  # all are being started
            self._join(futures)
            return
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        # Whoever gave back too early what the dead one can still write to has it taken by these.
        new = [stage.new(rng, rng.choice(stage.devices), rng.choice([None, *sizes]))
               for sizes in [[one.nbytes for one in stage.live[:8]]] for _ in range(6)]
        for one in new:
            if not stage.whole(one):
                stage.problem(f"a tensor of {one.nbytes} bytes, made right after the kill, is not what was written")
        stage.verify("right after the kill")
        made = self._join(futures)
        died = [call for call in made if call[3] is not None]
        for kind, _, _, (who, how, state) in died:
            if who != pid or how != signal.SIGKILL:
                stage.problem(f"{kind}: a worker that nobody killed died: pid {who}, signal {how}, {state}")
            self.states[state] += 1
            self.hit_kinds[kind] += 1
        hit = [ended - killed for _, started, ended, _ in died if started <= killed]
        self.heard += hit
        self.hits += bool(hit)
        self.inherited += pid in self.heirs
        self.heirs.discard(pid)
        self.slowest = max(self.slowest, *(ended - started for _, started, ended, _ in made))
        stage.until(lambda: all(w.pid != pid for w in stage.workers), "its end is known")
        stage.until(lambda: stage.parent.counters().get("quarantined", 0) == 0, "what the dead worker had is given back")
        for one in new:
            if not stage.whole(one):
                stage.problem(f"a tensor of {one.nbytes} bytes, made right after the kill, was changed")
        stage.verify("when the worker is gone")
        for one in new[:2]:
            stage.add(one, rng)
        self.moments += 1


if __name__ == "__main__":
    sys.exit(main())
