"""Kills and soaks (tests/race), short: the same programs that make the records, with fewer moments and calls. Whether they would
notice is tested too."""
from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import ROOT

import cbuild
import records

RACE = ROOT / "tests" / "race"
SECONDS = 1800  # a program that takes this long hangs; on an idle machine with two cores the longest takes two and a half minutes

Start = Callable[..., "Program"]


class Program:
    """One of tests/race, running."""

    def __init__(self, folder: pathlib.Path, name: str, arguments: tuple[str, ...]) -> None:
        self.record, self.said = folder / "record.json", folder / "said"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "SIMCUDA_", "CUDA_VISIBLE"))}
        command = [sys.executable, str(RACE / f"{name}.py"), *arguments, "--json", str(self.record)]
        with open(self.said, "w") as said:
            self.process = subprocess.Popen(command, env=clean, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)

    def result(self) -> dict[str, Any]:
        """The record of a run in which nothing was wrong."""
        status = self.process.wait(SECONDS)
        assert status == 0, f"exit status {status}\n{self.said.read_text()[-6000:]}"
        return dict(json.loads(self.record.read_text()))


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    made: list[Program] = []

    def go(name: str, *arguments: str) -> Program:
        folder = tmp_path / f"{len(made)}"
        folder.mkdir()
        made.append(Program(folder, name, arguments))
        return made[-1]

    yield go
    for p in made:
        if p.process.poll() is None:
            os.killpg(p.process.pid, 9)
            p.process.wait()


def test_kills_at_random_moments(start: Start) -> None:
    """Of workers in the midst of mixed calls, and of parents whose worker is deep in C and has children."""
    host = start("kill", "--moments", "80", "--rung", "host")
    pool = start("kill", "--moments", "40", "--rung", "pool")
    parents = start("parent", "--moments", "10", "--rung", "pool")
    for program, moments in ((host, 80), (pool, 40)):
        found = program.result()
        assert found["moments"] >= found["moments_that_hit_a_call"] == moments and found["hangs"] == 0 and found["problems"] == []
        assert found["worker_died"] >= moments and len(found["own_memory_over_moments"]) >= 40
        assert found["bytes_compared"] > moments << 20
    found = parents.result()
    assert found["moments"] == {"kill": 10, "execv": 10} and found["worker_of_an_ended_thread_lives"] is True
    assert found["counts"]["processes"] == 20 * 5 and found["counts"]["shared files"] >= 20 * 4


def test_very_many_requests_for_results_at_once(start: Start) -> None:
    found = start("allocs", "--allocs", "100000").result()
    assert found["problems"] == [] and found["allocs"] == 100_000
    assert {name: scene["ended_by"].partition(":")[0] for name, scene in found["scenes"].items()} == {
        "read": "int", "not read": "ProtocolError", "not read, cancelled": "Cancelled"}
    assert found["scenes"]["read"]["ended_by"] == "int: 65536"


def test_soak(start: Start) -> None:
    """A hundred thousand calls with small tensors on the simulated driver, and some on the host."""
    programs = [(start("soak", "--calls", str(calls), "--rung", rung, "--largest", str(largest)), calls, rung)
                for calls, rung, largest in ((100_000, "pool", 16 << 10), (10_000, "host", 256 << 10))]
    kinds, ends = set(), set()
    for program, calls, rung in programs:
        found = program.result()
        kinds.update(found["calls_by_kind"])
        ends.update(found["ended_by"])
        assert found["calls"] >= calls and found["problems"] == [] and found["devices"] == (2 if rung == "pool" else 1)
    # Of both: the rarest is one in ten thousand.
    assert {"WorkerDied", "Cancelled", "CallTimeout", "ResultTooLarge"} <= ends
    assert {"keep", "kept", "lease", "edit", "leave", "kill", "deaf", "replace"} <= kinds


@pytest.mark.parametrize("path", sorted(p for p in (ROOT / "research" / "results").glob("*.json") if p.name.startswith(("allocs-", "kill-", "parent-", "soak-"))),
                         ids=lambda p: p.stem)
def test_the_records_are_whole(path: pathlib.Path) -> None:
    found = json.loads(path.read_text())
    assert found["ok"] is True and found["problems"] == [] and re.fullmatch("[0-9a-f]{64}", found["source_sha256"])
    assert found["record"] == path.name.partition("-")[0] and (found["record"] == "allocs" or isinstance(found["seed"], int))
    if path.name in records.older():
        warnings.warn(f"{path.name} is of other sources than these", stacklevel=1)
    if found["record"] == "kill":
        assert found["hangs"] == 0 and found["moments"] >= 200
        assert found["moments_that_hit_a_call"] >= (100 if found["gpu"] == "card" else 1000)
    elif found["record"] == "allocs":
        assert found["allocs"] == found["scenes"]["read"]["pending_before_the_first_was_read"] == 1_000_000 and found["scenes"]["read"]["ended_by"] == "int: 65536"
    elif found["record"] == "parent":
        assert found["moments"] == dict.fromkeys(("kill", "execv"), 20 if found["gpu"] == "card" else 200)
    else:
        assert found["calls"] >= (10_000 if found["gpu"] == "card" else 100_000)


def test_the_simulated_driver_starts_beside_what_a_dead_process_left(tmp_path: pathlib.Path) -> None:
    """A worker's fork holds what the worker held: the next process must not take that place in the session."""
    code = """
import ctypes, os, signal, sys
assert ctypes.CDLL(sys.argv[1]).cuInit(0) == 0
if len(sys.argv) == 3:
    pid = os.fork()
    if not pid:
        signal.pause()
    with open(sys.argv[2], "w") as f:
        f.write(str(pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    left = tmp_path / "left"
    try:
        for arguments in ([str(left)], []):
            done = subprocess.run([sys.executable, "-c", code, str(cbuild.simcuda()), *arguments], env={**os.environ, "SIMCUDA_DIR": str(tmp_path)},
                                  check=False, timeout=60)
            assert done.returncode == -9, "it started"
    finally:
        os.kill(int(left.read_text()), 9)


# ---- would they notice? ----

LEFT = """
import mmap, os, threading, time
settle, run, held = mix.Stage.settle, program.Soak.run, []
def late(self, restart):
    if held:  # the second time
        fd = os.memfd_create("left")
        os.truncate(fd, 4096)
        held.extend([mmap.mmap(fd, 4096), bytearray(os.urandom(1 << 20)) * 80])
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    held.append(0)
    return settle(self, restart)
def change(self, calls, what):
    run(self, calls, what)
    if what == "calls":
        one = self.stage.some(self.stage.rng)
        self.stage.plain(one.tensor).copy_from(bytes(one.nbytes))
mix.Stage.settle, program.Soak.run = late, change
"""
CHANGED = """
verify = mix.Stage.verify
def change(self, when):
    one = self.some(self.rng)
    self.plain(one.tensor).copy_from(bytes(one.nbytes))
    verify(self, when)
mix.Stage.verify = change
"""
OTHERWISE = "import os\nkill = os.kill\nos.kill = lambda pid, number: kill(pid, 11)\n"
HANGS = "import time\nprogram.Race.measure = lambda self: None\nprogram.Race._thread = lambda self, calls: time.sleep(60)\n"
SURVIVES = """
kill, times = program.subprocess.Popen.kill, []
def late(self):  # the first parent is not ended
    times.append(0)
    if len(times) > 1:
        kill(self)
program.subprocess.Popen.kill, program.until_over = late, lambda read: None
"""


@pytest.mark.parametrize(("name", "arguments", "fault", "status", "says"), [
    ("soak", ("--calls", "200"), LEFT, 1, ("was changed", "descriptors:", "mappings:", "memory:", "threads:")),
    ("kill", ("--moments", "1"), CHANGED, 1, ("was changed",)),
    ("kill", ("--moments", "30"), OTHERWISE, 1, ("signal 11",)),
    ("kill", ("--moments", "1", "--deadline", "1"), HANGS, 3, ("5 threads are not done within 1.0 s",)),
    ("parent", ("--moments", "1"), SURVIVES, 1, ("kill: alive, or nobody's, 2", "still has memory that was shared")),
], ids=["left", "changed", "otherwise", "hangs", "survives"])
def test_what_is_wrong_is_seen(tmp_path: pathlib.Path, name: str, arguments: tuple[str, ...], fault: str, status: int, says: tuple[str, ...]) -> None:
    code = (f"import sys\nsys.path.insert(0, {str(RACE)!r})\nsys.argv = [{name!r}, *{arguments!r}]\n"
            f"import mix, {name} as program\nprogram.WARM_UP = 0\n{fault}\nsys.exit(program.main())\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    for text in says:
        assert text in done.stdout, done.stdout + done.stderr
