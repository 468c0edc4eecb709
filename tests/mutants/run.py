"""Run every mutant of mutants.py: each has to be caught, under every seed, by a scenario that the right code passes under the same.

    python tests/mutants/run.py [--seeds N] [--only NAME …] [--json FILE] [--table FILE]

Needs gcc, Python's headers, and nothing else: no torch, no card. Also runs each gate's mutant in a scenario whose bytes come out
right: there the simulated driver's happens-before tracking alone has to catch it. Exit status 1 unless all of that is so.
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import mutate  # noqa: E402

import cbuild  # noqa: E402
import mutants  # noqa: E402
import records  # noqa: E402

SECONDS = 60  # for one scenario
DELAYS = (50, 0, 400, 2000)  # microseconds, by seed


@dataclasses.dataclass(frozen=True)
class Seen:
    """How one run of a scenario ended. by: "" if nothing was wrong, else who caught it."""

    by: str
    text: str
    races: int = 0
    wrong: bool = False  # by the scenario's own looks: bytes, counts, deadlines

    def how(self) -> str:
        return f"{self.by}: {self.text.partition(': ')[0]}" if self.by else "not caught"


class Bench:
    """The packages, right and mutated, in a folder that goes with it; and runs of scenarios with them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zcx-mutants-")
        self.folder = pathlib.Path(self._folder.name)
        self.driver = cbuild.simcuda()
        self._passed: dict[tuple[str, int], Seen] = {}
        self._building = threading.Lock()

    def close(self) -> None:
        self._folder.cleanup()

    def package(self, mutant: mutants.Mutant | None) -> pathlib.Path:
        """Where it lies; built at the first time. None: the right code."""
        folder = self.folder / ("right" if mutant is None else mutant.name)
        with self._building:
            if not folder.exists():
                part = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
                mutate.package(part, () if mutant is None else mutant.edits)
                part.rename(folder)
        return folder

    def run(self, mutant: mutants.Mutant | None, scenario: str, seed: int, abort: bool = True) -> Seen:
        package = self.package(mutant)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            env = {k: v for k, v in os.environ.items()
                   if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "SIMCUDA_", "PYTHON", "CUDA_VISIBLE"))}
            env.update(PYTHONPATH=os.pathsep.join(map(str, (package, HERE))), PYTHONDONTWRITEBYTECODE="1", ZCX_LIBCUDA=str(self.driver),
                       SIMCUDA_DIR=scratch, SIMCUDA_SEED=str(seed), SIMCUDA_DELAY_US=str(DELAYS[seed % len(DELAYS)]), TMPDIR=scratch,
                       XDG_CACHE_HOME=str(self.folder / "cache"), **mutants.environment(scenario))
            if abort:
                env["SIMCUDA_ABORT_ON_RACE"] = "1"
            child = subprocess.Popen([sys.executable, "-S", "-c", "import scenarios, sys; scenarios.main(sys.argv[1])", scenario], env=env,
                                     cwd=scratch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     errors="replace", start_new_session=True)
            try:
                said, complained = child.communicate(timeout=SECONDS)
                late = False
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                said, complained = child.communicate()
                late = True
        return judge(said, complained, child.returncode, late)

    def right(self, scenario: str, seed: int) -> Seen:
        """The right code in it; once for each seed."""
        if (scenario, seed) not in self._passed:
            self._passed[scenario, seed] = self.run(None, scenario, seed)
        return self._passed[scenario, seed]


def judge(said: str, complained: str, status: int, late: bool) -> Seen:
    lines = said.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    races, wrong = found.get("races", 0), found.get("wrong")
    race = re.search(r"simcuda: RACE: (.*)", complained)
    if race:
        return Seen("race", re.sub(r" of \[.*?\)|, in allocation.*", "", race[1]), races or 1, bool(wrong) or not found)
    fault = re.search(r"simcuda: fault \d+: (.*?) at 0x", complained)
    if fault and not found.get("fault"):
        return Seen("fault", fault[1], races, True)
    if late:
        return Seen("deadline", f"the scenario did not end within {SECONDS} s", races, True)
    if wrong:
        return Seen(wrong[0], wrong[1], races, True)
    if status or not found:
        return Seen("error", (complained.strip().splitlines() or [f"exit status {status}"])[-1], races, True)
    return Seen("", "", races)


# ---- all of it ----


@dataclasses.dataclass
class Row:
    """One mutant under all seeds."""

    mutant: mutants.Mutant
    caught: collections.Counter[str]  # by whom and how: under how many seeds
    quiet: collections.Counter[str]  # the same where the bytes come out right
    problems: list[str]

    def line(self) -> str:
        """As a row of a table."""
        by, quiet = ("; ".join(f"{what} ({n})" for what, n in sorted(found.items(), key=lambda one: -one[1])) or "–" for found in (self.caught, self.quiet))
        return f"| `{self.mutant.name}` | {self.mutant.breaks} | {by} | {quiet} | {'yes' if self.mutant.card else '–'} |\n"

    def to_dict(self) -> dict[str, Any]:
        m = self.mutant
        return {"mutant": m.name, "breaks": m.breaks, "scenario": m.scenario, "caught": dict(self.caught),
                **({"scenario_with_right_bytes": m.quiet, "caught_there": dict(self.quiet)} if m.quiet else {}), "problems": self.problems}


def judged(bench: Bench, mutant: mutants.Mutant, seeds: range, pool: concurrent.futures.Executor) -> Row:
    row = Row(mutant, collections.Counter(), collections.Counter(), [])
    bench.package(mutant)

    def one(seed: int) -> None:
        seen = bench.run(mutant, mutant.scenario, seed)
        row.caught[seen.how()] += 1
        if seen.by not in mutant.by:
            row.problems.append(f"seed {seed}: in {mutant.scenario} not caught by {' or '.join(mutant.by)}, but {seen}")
        for name in sorted({mutant.scenario, mutant.quiet} - {""}):
            right = bench.right(name, seed)
            if right.by:
                row.problems.append(f"seed {seed}: the right code fails in {name}: {right}")
        if mutant.quiet:
            seen = bench.run(mutant, mutant.quiet, seed, abort=False)
            row.quiet[seen.how()] += 1
            if seen.by != "race" or seen.wrong:
                row.problems.append(f"seed {seed}: in {mutant.quiet} the bytes are right and a race was to be seen, but {seen}")

    for _ in pool.map(one, seeds):
        pass
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 1 on (default 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--json", metavar="FILE", help="write a record")
    parser.add_argument("--table", metavar="FILE", help="write the rows of the table in docs/reliability.md")
    chosen = parser.parse_args(arguments)
    bench, started, rows = Bench(), time.monotonic(), []
    seeds = range(1, chosen.seeds + 1)
    hashed = records.source_sha256()
    try:
        bench.package(None)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for mutant in mutants.MUTANTS:
                if not chosen.only or mutant.name in chosen.only:
                    row = judged(bench, mutant, seeds, pool)
                    rows.append(row)
                    print(f"{'caught' if not row.problems else 'FAILED'}  {mutant.name:32} "
                          f"{'; '.join(f'{n} x {what}' for what, n in (row.caught + row.quiet).items())}", flush=True)
                    for problem in row.problems:
                        print(f"        {problem}", flush=True)
    finally:
        bench.close()
    ok = bool(rows) and not any(row.problems for row in rows)
    seconds = round(time.monotonic() - started, 1)
    if chosen.json:
        record = {"ok": ok, "seeds": chosen.seeds, "mutants": len(rows), "seconds": seconds, "python": platform.python_version(),
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "source_sha256": hashed,
                  "rows": [row.to_dict() for row in rows]}
        pathlib.Path(chosen.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if chosen.table:
        pathlib.Path(chosen.table).write_text("".join(row.line() for row in rows), encoding="utf-8")
    print(f"{sum(not row.problems for row in rows)} of {len(rows)} mutants caught under {chosen.seeds} seeds each, in {seconds:g} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
