"""Faults with GPU work of the worker's queued, on a real card: the rows of docs/ownership.md that only a card can show to hold.

In each one a kernel of many seconds is on the worker's stream, and a write into the parent's memory behind it. The caller hears of the
end at once; no stream of this process waits; nothing that is allocated at once, and nothing that lay beside it, changes; the next call works.
Workers are started side by side and, after each row, again: a context and torch take seconds."""
import contextlib
import os
import signal
import time

import pytest
import torch

import comfy_zerocopy as zcx
from comfy_zerocopy import parent

MIB = 1 << 20
LONG = 20_000_000_000  # cycles: about ten seconds
SOON = 6  # seconds: a process with a kernel under way takes a while to end
WORKER = os.path.join(os.path.dirname(__file__), "worker_faults.py")

#: name: (state, fault, exception, text, is the worker kept?)
ROWS = {
    "killed before READY": ("waiting for READY", signal.SIGKILL, zcx.WorkerDied, "killed by SIGKILL", False),
    "killed while it fills": ("filling", signal.SIGKILL, zcx.WorkerDied, "killed by SIGKILL", False),
    "killed behind RESULT": ("RETURNING", signal.SIGKILL, zcx.WorkerDied, "killed by SIGKILL", False),
    "killed while it keeps": ("KEPT", signal.SIGKILL, None, "", False),
    "killed with a lease": ("lease held", signal.SIGKILL, None, "", False),
    "crash": ("filling", "crash", zcx.WorkerDied, "killed by SIGSEGV", False),
    "exit": ("filling", "exit", zcx.WorkerDied, "exit status 41", False),
    "fault behind RESULT": ("RETURNING", "fault", zcx.WorkerDied, "its work on the GPU failed", False),
    "exception behind the GPU": ("RETURNING", "exception", zcx.RemoteError, "KeyError", True),
    "stopped": ("filling", signal.SIGSTOP, zcx.CallTimeout, "the worker was ended", False),
    "timeout behind the GPU": ("filling", "timeout", zcx.CallTimeout, "the worker was ended", False),
    "cancel behind the GPU": ("filling", "cancel", zcx.Cancelled, "the worker was ended", False),
    "timeout": ("function running", "timeout", zcx.CallTimeout, "the worker is kept", True),
    "cancel": ("function running", "cancel", zcx.Cancelled, "was cancelled", True),
}


def until(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.002)


class Known:
    """Tensors of the pool whose contents are known."""

    def __init__(self, n):
        self.tensors = [torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8, device="cuda") for _ in range(n)]
        self.copies = [t.cpu() for t in self.tensors]

    def check(self, what):
        for t, copy in zip(self.tensors, self.copies, strict=True):
            assert torch.equal(t.cpu(), copy), what


@pytest.fixture(scope="module")
def workers():
    """By row: a worker that runs and knows the card."""
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(zcx.Worker(WORKER, name=f"faults {i}", timeout=60)) for i, name in enumerate(ROWS)}
        one = torch.ones(1, dtype=torch.uint8, device="cuda")
        started = [w.submit("total", one) for w in made.values()]
        assert [f.result(90) for f in started] == [1] * len(made)
        yield made


@pytest.fixture(scope="module")
def live():
    return Known(4)


_next = []  # (row, worker, the next call, its result, pid before, kept, what was allocated at once)


@pytest.mark.parametrize("row", ROWS)
def test_row(workers, live, row, tmp_path, monkeypatch):
    state, fault, error, text, kept = ROWS[row]
    monkeypatch.setattr(parent, "_GRACE", 0.5)
    w, x, marker = workers[row], Known(1), tmp_path / "there"
    pid, (t,), side, future = w.pid, x.tensors, torch.cuda.Stream(), None
    limit = 2 if fault in ("timeout", signal.SIGSTOP) else 60
    with contextlib.ExitStack() as stack:
        if state == "KEPT":
            w.call("keep", t)
            until(lambda: w.status()["kept"] == 1, "just that is kept")
        elif state == "lease held":
            stack.enter_context(w.lease(t))
        elif state == "RETURNING":
            cycles = {"fault": LONG // 40, "exception": LONG // 10}.get(fault, LONG)
            future = w.submit("late", t, cycles, None, fault if fault in ("fault", "exception") else "return", timeout=limit)
            until(lambda: w.status()["state"] == "returning" or future.done(), "RESULT or ERROR came")
        else:
            if state == "waiting for READY":
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if state == "waiting for READY" else torch.cuda.current_stream()):
                if state == "waiting for READY":
                    torch.cuda._sleep(LONG)
                future = w.submit("late", t, LONG if state == "filling" else 0, str(marker), fault if fault in ("exit", "crash") else "rest", timeout=limit)
            until(lambda: marker.exists() or future.done(), "the function runs")
        assert future is None or fault in ("exit", "crash", "fault") or not future.done()

        begun = time.monotonic()
        if isinstance(fault, signal.Signals):
            os.kill(pid, fault)
        elif fault == "cancel":
            assert future.cancel()
        if error is not None:
            with pytest.raises(error, match=text):
                future.result(60)
            assert time.monotonic() - begun < SOON + (limit if limit < 60 else 0)
        else:
            until(lambda: not w.alive, "its end was noticed")
        if state == "waiting for READY":
            assert not side.query(), "the caller heard of it while its own stream was still at work"

        done = torch.cuda.Event()
        done.record()
        until(done.query, "this process's stream goes on", 3)
        at_once = Known(4)
        live.check("what lay beside")
        x.check("the input")
    _next.append((row, w, w.submit("total", t), int(t.sum(dtype=torch.int64)), pid, kept, at_once))


def test_the_next_calls(live):
    assert _next
    for row, w, future, result, pid, kept, at_once in _next:
        assert future.result(90) == result, row
        assert (w.pid == pid) is kept, row
        at_once.check(row)
    live.check("what lay beside")
    until(lambda: not parent.counters().get("quarantined"), "what the dead had is given back")
    until(lambda: not any(w.status()["transfers"] for _, w, *_ in _next), "nothing is lent")
    _next.clear()
