"""The garbage collector may run a finalizer in any thread, between any two lines: none of our locks may be waited for there for ever."""
import gc
import pathlib

import pytest
from conftest import ROOT, WORKERS, until

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
                for late in (lambda: w.call("echo", 1), w.close):
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
