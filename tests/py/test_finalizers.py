"""The garbage collector may run a finalizer in any thread, between any two lines: none of our locks may be waited for there for ever."""
import gc
import pathlib
import signal
import threading

import pytest
from conftest import ROOT, WORKERS, until

import comfy_zerocopy as zcx
from comfy_zerocopy import parent, process

PROGRAM = pathlib.Path(__file__).with_name("finalizers.py")
pytestmark = pytest.mark.usefixtures("deadline")


@pytest.mark.parametrize("seed", [1, 2])
def test_finalizers_anywhere(run, seed):
    said = run(f"import sys; sys.argv = ['', {str(WORKERS / 'plain.py')!r}, '{seed}', '3']; exec(compile(open({str(PROGRAM)!r}).read(), {str(PROGRAM)!r}, 'exec'))",
               path=(ROOT,)).stdout
    assert int(said.split()[0]) > 20, said


def test_a_token_that_goes_in_a_cycle(start):
    w = start("plain")
    for _ in range(3):
        round_and_round = [w.call("load", "m")]
        round_and_round.append(round_and_round)
    del round_and_round
    gc.collect()
    assert w.call("models_alive") == 0


def test_the_end_of_a_lease_starts_no_worker(start):
    w = start("plain")
    with w.lease([1]):
        w.kill()
        until(lambda: w.pid is None, "its end was noticed")
    assert w.pid is None


@pytest.mark.parametrize("busy", [False, True])
def test_exit_with_an_open_lease(run, tmp_path, busy):
    run(f"""
        import os, time
        import comfy_zerocopy as zcx
        w = zcx.Worker({str(WORKERS / "plain.py")!r})
        lease = w.lease([1])
        lease.__enter__()
        class Last:
            def __del__(self):  # when modules go, after all that atexit does
                for late in (lambda: w.call("echo", 1), lambda: w.submit("echo", 1), w.close):
                    try:
                        late()
                    except zcx.Error as error:
                        assert "this process ends" in str(error), error
        last = Last()
        if {busy}:
            w.submit("spin", {str(tmp_path / "running")!r})
            while not os.path.exists({str(tmp_path / "running")!r}):
                time.sleep(0.01)
    """, path=(ROOT,))


def test_a_thread_that_cannot_start_costs_that_call_only(start, monkeypatch):
    w, real = start("plain"), threading.Thread.start

    def none(self):
        raise RuntimeError("can't start new thread")

    w.call("echo", 0)
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="new thread"):
        w.submit("echo", 1)
    monkeypatch.setattr(threading.Thread, "start", real)
    assert w.submit("echo", 2).result(timeout=20) == 2


def test_a_finalizer_while_the_keeper_looks_after_a_worker(start):
    """It has the session then, without a turn: the finalizer gets an error, and everybody goes on."""
    w, said = start("plain"), []

    def finalizer():
        for late in (lambda: w.call("echo", 1), w.close):
            with pytest.raises(zcx.Error, match="looked after"):
                late()
        said.append(True)

    w.call("echo", 0)
    process.keeper().do(lambda: w._session._tend(finalizer))
    until(lambda: said, "it was refused")
    assert w.call("echo", 2) == 2


def test_an_interrupt_leaves_no_lock_taken():
    """Wherever it comes, and while the exception and the frames that it went through are still there: give() would wait for it for ever."""
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    before, found = signal.signal(signal.SIGVTALRM, interrupt), 0
    try:
        for i in range(400):
            turn, mine = parent._Turn(), parent._Ticket()
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6 * (1 + i % 50))
                try:
                    while True:
                        turn.take(mine, None)
                        turn.give(mine)
                        mine = parent._Ticket()
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except Interrupt:
                found += turn._lock.locked()
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert found == 0
