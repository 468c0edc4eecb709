"""What a worker keeps after a call: by lease(), or because its code still refers to it; and how it is heard to let go."""
import gc
import time

import pytest

import comfy_zerocopy as zcx

np = pytest.importorskip("numpy")

CODE = """
import threading
from comfy_zerocopy.worker import expose, empty_like
kept = []
@expose
def keep(x):
    kept.append(x)
@expose
def total():
    return [float(k.sum()) for k in kept]
@expose
def forget_later(event=None):
    timer = threading.Timer(0.05, kept.clear)
    timer.start()
@expose
def result():
    x = empty_like(kept[0])
    x[:] = 7
    kept.append(x)
    return x
@expose
def fail(x):
    def inner(): return x
    raise ValueError(inner)
@expose
def nothing(x): pass
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "keeper.py").write_text(CODE)
    with zcx.Worker(tmp_path / "keeper.py") as w:
        yield w


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kept(w):
    return w.status()["kept"]


def test_what_user_code_keeps_stays_and_an_idle_worker_is_heard_to_let_go(worker):
    x = np.arange(10000.0)
    worker.call("keep", x)
    assert kept(worker) == 1 and worker.status()["kept_bytes"] == x.nbytes
    x[:] = 0  # the worker has its own bytes of a copied input
    worker.call("nothing", np.ones(10000))  # must not be given the kept one's memory
    assert worker.call("total") == [np.arange(10000.0).sum()]
    worker.call("forget_later")
    until(lambda: kept(worker) == 0)  # without another call
    assert worker.status()["transfers"] == 0


def test_a_result_that_both_sides_keep_is_given_back_when_both_let_go(worker):
    worker.call("keep", np.zeros(100000))
    got = worker.call("result")
    assert kept(worker) == 2 and got[0] == 7
    taken = worker.status()["result_bytes"]
    assert taken >= got.nbytes
    del got
    gc.collect()
    assert worker.status()["result_bytes"] == taken  # the worker may still write there
    worker.call("forget_later")
    until(lambda: worker.status()["result_bytes"] == 0)


def test_a_traceback_keeps_nothing(worker):
    with pytest.raises(zcx.RemoteError, match="ValueError"):
        worker.call("fail", np.ones(1000))
    until(lambda: kept(worker) == 0)


def test_lease_keeps_it_for_as_long_as_it_is_open(worker):
    x = np.ones(5000)
    with worker.lease({"a": [x]}):
        status = worker.status()
        assert (status["leased"], status["leased_bytes"], status["kept"], status["kept_bytes"]) == (1, x.nbytes, 0, 0)
        worker.call("nothing", x)
        assert worker.status()["leased"] == 1
    until(lambda: worker.status()["leased"] == 0)
    assert worker.status()["transfers"] == 0


def test_a_lease_ends_quietly_with_its_worker(worker):
    with worker.lease(np.ones(5000)):
        worker.kill()
        until(lambda: not worker.alive)
    worker.call("nothing", 1)
    assert worker.status()["leased"] == 0
    with worker.lease(np.ones(10)):
        worker.close()


def test_memory_that_is_only_kept_for_speed_is_given_back_when_nobody_calls(worker, monkeypatch):
    from comfy_zerocopy import parent

    monkeypatch.setattr(parent, "_REST", 0.1)
    worker.call("keep", np.zeros(100000))
    got = worker.call("result")
    worker.call("forget_later")
    del got
    until(lambda: worker.status()["kept"] == 0)
    until(lambda: worker.status()["input_bytes"] == 0 and worker.status()["warm_bytes"] == 0)
    worker.call("nothing", np.zeros(100000))  # and it comes back when it is needed
    assert worker.status()["input_bytes"] >= 800000
