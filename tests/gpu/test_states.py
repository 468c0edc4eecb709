"""Rows of the table in docs/ownership.md on a real card, walked by tests/faults/walk.py as on the simulated driver: a worker ends, or a call
fails, in states that only a library can stop a process in; and the parent ends.

What the walk looks at after each row: how the call ended, the bytes of all that was lent and of what was allocated at once, the next call, and
that nothing is left, memory of the card included (card.c says how exactly). Neither side has torch, so that a worker starts in a moment; it
leaves a child that holds what it held, and what the dead one had queued goes on for as long as that lives."""
import json
import pathlib
import time

import card
import pytest
import torch

MIB = 1 << 20
KILLED = ("OFFERING", "PROVING", "PREPARING", "CALLING", "mapping", "ALLOC asked", "un-importing", "DONE posted", "RETURNING")
ROWS = [(state, "SIGKILL") for state in KILLED] + [
    ("filling", "socket closed"), ("RETURNING", "socket closed"), ("filling", "exception"), ("mapping", "driver"), ("filling", "driver"),
    ("un-importing", "driver"), ("DONE posted", "driver")]
EVENTS = [(state, "SIGKILL") for state in ("CALLING", "RETURNING", "un-importing", "DONE posted")]
PARENTS = ("OFFERING", "CALLING", "RETURNING", "filling", "KEPT")
SECONDS = 2.0  # that anything of a session outlives its parent
LEFT = 16 * MIB  # of the card's memory, which its driver gives out in large pieces


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def ids(rows):
    return [f"{state}-{fault}" for state, fault in rows]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not card.can_build():
        pytest.skip("a C compiler is missing")
    return card.driver(tmp_path_factory.mktemp("card"))


class Walked:
    """A walk, and what was in use before it began."""

    def __init__(self, folder, library, *arguments, **more):
        self.before = used()
        self.walk = card.Walk(folder, library, *arguments, **more)

    def hold(self, state, fault):
        if problem := self.walk.ask(state, fault, card.row(state, fault)):
            pytest.fail(problem)

    def back(self, seconds):
        """How long it takes, from now on, until no more is in use than before."""
        begun = time.monotonic()
        while used() > self.before + LEFT:
            assert time.monotonic() - begun < seconds, f"{(used() - self.before) / MIB:.0f} MiB of the card are still in use"
            time.sleep(0.005)
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def walked(library, tmp_path_factory):
    w = Walked(tmp_path_factory.mktemp("walk"), library)
    yield w
    w.walk.end()


@pytest.fixture(scope="module")
def with_events(library, walked, tmp_path_factory):
    """The other walk has ended by now: each looks at the memory in use."""
    assert walked.walk.process.poll() is not None
    w = Walked(tmp_path_factory.mktemp("events"), library, SIMCUDA_HIDE=card.WITHOUT_COUNTERS)
    yield w
    w.walk.end()


@pytest.mark.parametrize("state, fault", ROWS, ids=ids(ROWS))
def test_row(walked, state, fault):
    walked.hold(state, fault)


def test_nothing_is_left(walked):
    walked.walk.close()
    walked.back(10)


@pytest.mark.parametrize("state, fault", EVENTS, ids=ids(EVENTS))
def test_row_where_events_are_the_gates(with_events, state, fault):
    with_events.hold(state, fault)


def test_events_were_the_gates(with_events):
    """A worker that is refused the post of a counter does not notice: it posts none."""
    problem = with_events.walk.ask("DONE posted", "driver", card.row("DONE posted", "driver"))
    assert "the table says WorkerDied" in problem and "AssertionError: result (" in problem, problem
    with_events.walk.close()
    with_events.back(10)


def ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_the_parent_ends(library, tmp_path, record_property):
    """Killed, with a worker in each of these states and a child of each in a process group of its own; one has long kernels queued."""
    w = Walked(tmp_path, library, "parents", *PARENTS)
    try:
        pids = json.loads(w.walk.line(45))
        assert set(pids) == set(PARENTS) and not [pid for several in pids.values() for pid in several if ended(pid)]
        assert used() > w.before + 64 * MIB, "so much would be noticed"
        begun = time.monotonic()
    finally:
        w.walk.end()
    while left := {state: alive for state, several in pids.items() if (alive := [pid for pid in several if not ended(pid)])}:
        assert time.monotonic() - begun < SECONDS, left
        time.sleep(0.002)
    record_property("all_gone_ms", round((time.monotonic() - begun) * 1e3, 1))
    w.back(SECONDS - (time.monotonic() - begun))
    record_property("device_memory_back_ms", round((time.monotonic() - begun) * 1e3, 1))
