"""Every row of the table in docs/ownership.md: a session is brought into the state, the fault happens, and what follows is looked at.

The parent is a process of its own (tests/faults/walk.py), which walks one row after another on the simulated driver; it reports what it
found. Here the table is read and held to be whole."""
from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import ROOT, until

import cbuild
from faults import walking
from faults.walking import WALK, Row, cells, read

pytestmark = pytest.mark.usefixtures("deadline")
FAULTS = ("SIGKILL", "SIGSEGV", "os._exit", "socket closed", "SIGSTOP", "timeout", "cancel", "parent exits", "exception", "driver", "fd limit",
          "memfd full", "memory")
CANNOT, AS = "cannot happen: ", "as "
REFUSED = {"arena": "cuMemPoolImportPointer:1:999", "copies": "cuMemPoolImportPointer:1:999,cuMemImportFromShareableHandle:1:801+"}
LOWER = [("arena", s) for s in ("CALLING", "function running", "filling", "DONE posted", "KEPT", "lease held")] + \
        [("copies", s) for s in ("CALLING", "function running", "filling", "DONE posted")]
EVENTS = ("CALLING", "RETURNING", "un-importing", "DONE posted")  # where gates matter


STATES, ROWS = read()
WALKED = [(s, f, r) for s, f, r in ROWS if not r.outcome.startswith((CANNOT, AS)) and r.test != "parents"]
ENDS = [s for s, _, r in ROWS if r.test == "parents"]
#: With host memory alone: where something is lent, and it takes no device to get there.
WITHOUT = ("NEW", "HELLO_SENT", "STARTING", "IDLE", "OFFERING", "PROVING", "RETURNING", "waiting for READY", "un-importing")
HOST = [(s, f, r) for s, f, r in WALKED if s not in WITHOUT and f != "driver" and (s, f) != ("CALLING", "memory") and (s != "mapping" or f == "memory")]
HOST_ENDS = [s for s in ENDS if s not in (*WITHOUT, "mapping")]


def test_every_state_and_every_fault_has_one_row():
    assert len(set(STATES)) == len(STATES) >= 24
    assert sorted((s, f) for s, f, _ in ROWS) == sorted((s, f) for s in STATES for f in FAULTS)


def test_every_row_has_a_test_or_a_reason():
    source = WALK.read_text()
    for state, fault, row in ROWS:
        if row.outcome.startswith(CANNOT):
            assert len(row.outcome.removeprefix(CANNOT).split()) > 3, f"{state}, {fault}: no reason"
        elif row.outcome.startswith(AS):
            assert set(row.outcome.removeprefix(AS).split(", ")) <= {s for s, _, _ in WALKED}, f"{state}, {fault}"
        elif fault == "parent exits":
            assert row.test == "parents", state
        else:
            assert f"def {row.test}(" in source or f'"{row.test}"' in source, f"{state}, {fault}: there is no {row.test}"
            assert row.worker in ("kept", "new"), f"{state}, {fault}"
    assert len(WALKED) > 120


class Walk(walking.Walk):
    """On the simulated driver, in a folder of its own."""

    def __init__(self, folder: pathlib.Path, *arguments: str, package: pathlib.Path = ROOT, **env: str) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
        (self.folder / "sim").mkdir()
        library = str(cbuild.faults())
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "PYTHON", "CUDA_VISIBLE"))}
        clean.update(PYTHONPATH=str(package), PYTHONDONTWRITEBYTECODE="1", ZCX_LIBCUDA=str(cbuild.simcuda()), SIMCUDA_DIR=str(self.folder / "sim"),
                     SIMCUDA_ABORT_ON_RACE="1", FAULTS_DIR=str(self.folder), FAULTS_LIBRARY=library, FAULTS="", LD_PRELOAD=library, **env)
        super().__init__(self.folder / "errors", clean, *arguments)

    def close(self) -> None:
        self.end()
        self.errors.close()
        shutil.rmtree(self.folder)


class Walks:
    """Two processes that walk, each one row after another; and others when those are gone. Rows are walked ahead of the tests that ask."""

    def __init__(self, folder: pathlib.Path, rows: list[tuple[str, str, Row]], **env: str) -> None:
        self._folder, self._env = folder, env
        self._made: list[Walk] = []
        self._own = threading.local()
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self._found = {(state, fault): self._pool.submit(self._ask, state, fault, row) for state, fault, row in rows}

    def _ask(self, state: str, fault: str, row: Row) -> str:
        """What does not hold, or nothing."""
        walk = getattr(self._own, "walk", None)
        if walk is None or walk.process.poll() is not None:
            self._own.walk = walk = Walk(self._folder, **self._env)
            self._made.append(walk)
        return walk.ask(state, fault, row)

    def hold(self, state: str, fault: str) -> None:
        if problem := self._found[state, fault].result(45):
            pytest.fail(problem)

    def now(self, state: str, fault: str, row: Row) -> str:
        """As the walk would find it if the table said that."""
        return self._pool.submit(self._ask, state, fault, row).result(45)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for w in self._made:
            w.end()
        self._pool.shutdown()
        for w in self._made:
            w.close()


def chosen(request: pytest.FixtureRequest, name: str, **only: str) -> list[tuple[str, str, Row]]:
    """The rows of the tests of that name that this run has."""
    parameters = [item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == name and item.path == pathlib.Path(__file__)]
    return [(p["state"], p.get("fault", "SIGKILL"), p.get("row") or KILLS[p["state"]]) for p in parameters
            if only.items() <= p.items()]


@pytest.fixture(scope="module")
def walks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    w = Walks(tmp_path_factory.mktemp("walks"), chosen(request, "test_row"))
    yield w
    w.close()


@pytest.fixture(scope="module")
def with_host_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    w = Walks(tmp_path_factory.mktemp("host"), chosen(request, "test_row_with_host_memory_alone"), FAULTS_HOST="1")
    yield w
    w.close()


@pytest.fixture(scope="module")
def with_events(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    w = Walks(tmp_path_factory.mktemp("events"), chosen(request, "test_killed_where_events_are_the_gates"),
              SIMCUDA_HIDE="cuStreamWriteValue64,cuStreamWaitValue64")
    yield w
    w.close()


@pytest.fixture(scope="module")
def lower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Walks]]:
    made = {rung: Walks(tmp_path_factory.mktemp(rung), chosen(request, "test_killed_on_a_lower_rung", rung=rung), FAULTS_DEMOTED=refused)
            for rung, refused in REFUSED.items()}
    yield made
    for w in made.values():
        w.close()


KILLS = {s: r for s, f, r in WALKED if f == "SIGKILL"}


@pytest.mark.parametrize("state, fault, row", WALKED, ids=[f"{s}-{f}" for s, f, _ in WALKED])
def test_row(walks, state, fault, row):
    walks.hold(state, fault)


@pytest.mark.parametrize("state, fault, row", HOST, ids=[f"{s}-{f}" for s, f, _ in HOST])
def test_row_with_host_memory_alone(with_host_memory, state, fault, row):
    """A session without a gate, whose worker never meets a device: nothing but the messages says when a call is over."""
    with_host_memory.hold(state, fault)


@pytest.mark.parametrize("state", EVENTS)
def test_killed_where_events_are_the_gates(with_events, state):
    with_events.hold(state, "SIGKILL")


@pytest.mark.parametrize("rung, state", LOWER)
def test_killed_on_a_lower_rung(lower, rung, state):
    """Results in the arena, inputs copied into it; or both through pinned memory of the host's."""
    lower[rung].hold(state, "SIGKILL")


# ---- the parent ends ----


def ended(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture(scope="module", autouse=True)
def parents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Walk]]:
    """Begun with the first test: they have time until the last ones ask for them."""
    made = {"device": Walk(tmp_path_factory.mktemp("parents"), "parents", *ENDS),
            "host": Walk(tmp_path_factory.mktemp("parents"), "parents", *HOST_ENDS, FAULTS_HOST="1")}
    yield made
    for walk in made.values():
        walk.close()


@pytest.fixture(scope="module")
def survivors(parents: dict[str, Walk]) -> Callable[[str], dict[str, list[int]]]:
    """By state: what still ran two seconds after the parent of a worker in that state, and of a child of the worker's in a process group
    of its own, was killed."""

    @functools.cache
    def of(memory: str) -> dict[str, list[int]]:
        walk = parents[memory]
        pids: dict[str, list[int]] = json.loads(walk.line(45))
        assert not {state: several for state, several in pids.items() if any(map(ended, several))}, "they should all live"
        walk.end()
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(ended(pid) for several in pids.values() for pid in several):
            time.sleep(0.005)
        return {state: [pid for pid in several if not ended(pid)] for state, several in pids.items()}

    return of


@pytest.mark.parametrize("memory, state", [("device", s) for s in ENDS] + [("host", s) for s in HOST_ENDS])
def test_the_parent_ends(survivors, memory, state):
    assert survivors(memory)[state] == []


OWN = """
import os, signal, time
from comfy_zerocopy.worker import expose

@expose
def echo(x):
    return x

@expose
def child():
    pid = os.fork()
    while not pid:
        signal.pause()
    return pid

@expose
def beat(path):
    while True:
        with open(path, "ab", 0) as f:
            f.write(b".")
        time.sleep(0.01)
"""


@pytest.fixture
def own(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_stopped_worker_without_a_timeout_is_waited_for(start, own):
    w = start(own, timeout=None)
    assert w.call("echo", 1) == 1
    pid = w.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        future = w.submit("echo", 2)
        until(lambda: w.status()["state"] == "calling", "the call was sent")
        assert not future.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert future.result(40) == 2 and w.pid == pid


@pytest.mark.parametrize("how", ["kill", "timeout"])
def test_what_is_in_the_workers_process_group_ends_with_it(start, own, how, monkeypatch):
    from comfy_zerocopy import CallTimeout, parent

    monkeypatch.setattr(parent, "_GRACE", 0.1)
    w = start(own)
    child, pid = w.call("child"), w.pid
    assert os.getpgid(child) == pid and not ended(child)
    if how == "kill":
        w.kill()
    else:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(CallTimeout):
            w.call("echo", 1, timeout=0.1)
    until(lambda: ended(child), "it went with the worker")


def test_a_fork_of_the_parent_keeps_the_worker(run, own, tmp_path):
    """One that executes nothing holds the parent's end too: the worker lives on when the parent dies, and ends with the fork."""
    beats = tmp_path / "beats"
    found = run(f"""
        import os, signal
        import comfy_zerocopy as zcx
        w = zcx.Worker({str(own)!r})
        pid = w.call("child") and w.pid
        w.submit("beat", {str(beats)!r})
        while not os.path.exists({str(beats)!r}):
            os.sched_yield()
        fork = os.fork()
        if not fork:
            os.closerange(0, 3)
            while True:
                signal.pause()
        print(pid, fork, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """, ok=False)
    worker, fork = map(int, found.stdout.split())
    try:
        assert found.returncode == -signal.SIGKILL
        before = beats.stat().st_size
        until(lambda: beats.stat().st_size > before + 50, "it goes on working")
        assert not ended(worker)
    finally:
        os.kill(fork, signal.SIGKILL)
    until(lambda: ended(worker), "it ends with the fork")


def test_a_row_that_does_not_hold_is_found(walks):
    """The walk itself can fail."""
    place = ("function running", "SIGKILL")
    assert "the table says Cancelled" in walks.now(*place, Row("Cancelled", [], "new", "outside"))
    assert "'nothing of the kind' is not in" in walks.now(*place, Row("WorkerDied", ["nothing of the kind"], "new", "outside"))
    assert "the worker was replaced, the table says kept" in walks.now(*place, Row("WorkerDied", [], "kept", "outside"))
    assert walks.now(*place, KILLS[place[0]]) == "", "and it goes on"


@pytest.mark.parametrize("mutant, state", [("no-quarantine", "function running"), ("quarantine-by-pidfd", "KEPT")])
def test_a_row_fails_where_memory_is_given_back_too_early(tmp_path, monkeypatch, mutant, state):
    """With a package in which that is so, see tests/mutants."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutants")
    import mutate

    import mutants

    mutate.package(tmp_path, next(m.edits for m in mutants.MUTANTS if m.name == mutant))
    walk = Walk(tmp_path, package=tmp_path)
    try:
        with pytest.raises(pytest.fail.Exception, match="RACE: free of .* while another process has it imported"):
            walk.ask(state, "SIGKILL", KILLS[state])
    finally:
        walk.close()


def test_the_summary_counts_right():
    """docs/reliability.md says how many rows each fault has."""
    page = (ROOT / "docs" / "reliability.md").read_text().split("\n## Every state, every fault\n")[1].split("\n## ")[0]
    found = {line[0]: (int(line[2]), int(line[3])) for line in map(cells, re.findall(r"^\| .*\d+ \| \d+ \|.*$", page, re.M))}
    cannot = {f: sum(fault == f and r.outcome.startswith(CANNOT) for _, fault, r in ROWS) for f in FAULTS}
    assert found == {f: (sum(fault == f and not r.outcome.startswith((CANNOT, AS)) for _, fault, r in ROWS), cannot[f]) for f in FAULTS}
