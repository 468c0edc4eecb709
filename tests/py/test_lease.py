"""What a worker keeps after a call: by lease(), or because its code still refers to it; and how it is heard to let go."""
import gc
import time

import pytest
from test_concurrency import script, spawn  # noqa: F401

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


def test_a_lease_is_one_import_for_as_long_as_it_is_open(script):  # noqa: F811
    """Of a GPU tensor: no call in it imports, and it lies at the same place; another lease of it is no other import."""
    script("""
        with start() as w:
            data = os.urandom(5000)
            x = filled_with(zcx.empty((5000,), "uint8", "cuda"), data)
            w.call("nothing", x)
            assert w.call("count", "imports") == [0]
            with w.lease(x):
                at = w.call("address", x)
                w.call("fail", "cuMemPoolImportPointer:1:999+")
                for n in range(4):
                    assert w.call("address", x) == at and w.call("address", part(x, n, 10)) == at + n
                    assert w.call("bytes_of", x) == data and crossed(w) == [("input", "pool", False)]
                    assert w.call("count", "imports") == [1] and w.status()["leased"] == 1
                with w.lease([x, x]), w.lease(part(x, 0, 100)):
                    assert w.call("count", "imports") == [1] and w.status()["leased"] == 3
                until(lambda: w.status()["leased"] == 1, "the inner ones are over")
                assert w.call("address", x) == at and w.call("count", "imports") == [1]
                assert w.call("injected") == 0, "no import was tried"
                w.call("nothing", filled(10, 1))
                assert crossed(w) == [("input", "staged", True)] and w.call("injected") == 1, "another tensor's would have failed"
                w.call("fail", "")
            until(lambda: w.status()["leased"] == 0, "it is over")
            assert w.call("count", "imports") == [0] and w.call("bytes_of", x) == data
    """)


def test_what_bounds_a_lease(script):  # noqa: F811
    """The block and the worker's life; not a number: the memory is the caller's own."""
    script("""
        import weakref
        def leased(w):
            return w.status().get("leased", 0), w.status().get("leased_bytes", 0)
        class Enough(Exception):
            pass
        with start(max_kept_bytes=0) as w:
            xs = [filled(5000, n) for n in range(40)]
            with contextlib.suppress(Enough), contextlib.ExitStack() as stack:
                for x in xs:
                    stack.enter_context(w.lease(x))
                assert leased(w) == (40, 200_000) and w.call("count", "imports") == [40]
                mine = [weakref.ref(x) for x in xs]
                del x
                xs.clear()
                gc.collect()
                assert all(m() is not None for m in mine), "the block has them, whoever drops them"
                raise Enough
            until(lambda: leased(w) == (0, 0) and count("allocations") == 0, "given back, however the block ended")
            x = filled(5000, 7)
            with w.lease(x):
                session, pid = w._session, w.pid
                os.kill(pid, signal.SIGKILL)
                until(lambda: session.parent is None, "it is gone")
                assert w.call("bytes_of", x) == b"\\7" * 5000 and w.pid != pid
                assert leased(w) == (0, 0) and w.call("count", "imports") == [0], "the next worker has no lease"
                mine = weakref.ref(x)
                del x
                gc.collect()
                assert mine() is not None, "the block has it all the same"
            until(lambda: count("allocations") == 0, "given back")
            x = filled(5000, 7)
            with w.lease(x):
                w.close()
                until(lambda: not parent._all, "its session is over")
                assert x.tobytes() == b"\\7" * 5000
            del x
        settled()
    """)


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
