"""What a worker's code keeps after the call that lent it: it stays as it was, however it is kept; it is counted, reported, and bounded."""
from __future__ import annotations

import logging
import os
import pickle
import threading

import pytest
from conftest import until
from test_pool_sim import script  # noqa: F401

import comfy_zerocopy as zcx
from comfy_zerocopy import parent, quota

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("deadline")

WAYS = ("attribute", "closure", "traceback", "capsule", "view", "thread")
KIB = 1024


def noise(n: int) -> np.ndarray:
    return np.frombuffer(os.urandom(n), "u1").copy()


def kept(w: zcx.Worker) -> tuple[int, int, int]:
    status = w.status()
    return status["kept"], status["kept_bytes"], status["kept_device_bytes"]


@pytest.fixture(params=["", "numpy"], ids=["bare", "numpy"])
def library(request):
    return {"TEST_IMPORT": request.param}


# ---- it stays as it was ----


def test_however_it_is_kept_it_reads_the_same_calls_later(start, library):
    w = start("keeps", env=library)
    own = start("keeps", env=library)
    xs = {how: noise(5000 + i) for i, how in enumerate(WAYS)}
    want = {how: x.tobytes()[how == "view":] for how, x in xs.items()}
    for how, x in xs.items():  # copied ones and, from another worker's memory, shared ones
        shared = how in ("attribute", "capsule", "thread")
        lent = own.call("make_and_keep", "attribute", 5000, 7, None) if shared else x
        if shared:
            lent[...] = x[:5000]
            want[how] = lent.tobytes()
        w.call("keep", how, lent)
        assert w.last_report.transfers[0].copied is not shared
        x[...] = 0
        del lent
    own.call("forget")
    assert kept(w)[0] == len(WAYS) and kept(w)[2] == 0
    for _ in range(3):
        more = [noise(5000) for _ in range(8)]
        w.call("nothing", *more)
        del more
        assert w.call("read") == want
    assert {(k.function, k.device, k.count) for k in w.last_report.kept} == {("keep", None, len(WAYS))}
    assert sum(k.nbytes for k in w.last_report.kept) == kept(w)[1]
    w.call("forget")
    until(lambda: w.status()["transfers"] == 0, "all comes back")
    w.call("nothing")
    assert w.last_report.kept == ()


def test_a_result_that_is_kept_however(start, library):
    w = start("keeps", env=library)
    for i, how in enumerate(WAYS):
        w.call("make_and_keep", how, 3000, i, None)  # and nobody here has it
    mine = [w.call("make_and_keep", "attribute", 3000, 0, None), noise(3000)]
    others = [start("keeps", env=library).call("make_and_keep", "attribute", 3000, 99, None) for _ in range(2)]
    assert w.call("read") == {how: bytes([i]) * (3000 - (how == "view")) for i, how in enumerate(WAYS)}
    w.call("forget")
    del mine, others
    until(lambda: w.status()["result_bytes"] == 0, "all comes back")


@pytest.fixture(scope="module")
def torch():
    """Imported before the deadline of a test begins."""
    return pytest.importorskip("torch")


def test_however_a_worker_with_torch_keeps_it(start, torch):
    """Tensors of the CPU, what numpy sees of them, a capsule of torch's own: inputs, and results that nobody here has."""
    w = start("keeps", env={"TEST_IMPORT": "torch"})
    ways, want = (*WAYS, "numpy"), {}
    for how in ways:
        x = torch.from_numpy(noise(5000))
        w.call("keep", how, x)
        want[how] = x.numpy().tobytes()[how == "view":]
        x.zero_()
    assert kept(w) == (len(ways), 5000 * len(ways), 0)

    def same():
        for _ in range(2):
            w.call("nothing", *[torch.from_numpy(noise(5000)) for _ in range(8)])
        assert w.call("read") == want

    same()
    w.call("forget")
    until(lambda: w.status()["transfers"] == 0, "all comes back")
    for i, how in enumerate(ways):
        assert type(w.call("make_and_keep", how, 3000, i, None)) is torch.Tensor
        want[how] = bytes([i]) * (3000 - (how == "view"))
    same()
    assert [(k.function, k.count, k.nbytes) for k in w.last_report.kept] == [("make_and_keep", len(ways), 3000 * len(ways))]
    w.call("forget")
    until(lambda: w.status()["result_bytes"] == 0, "all comes back")


# How a tensor of the simulated driver crosses: by what noise() makes.
BY_RUNG = """
        from comfy_zerocopy import array, ladder
        rung = {rung!r}
        if rung == "vmm":
            ladder._shareable_pool = lambda ordinal: None
        if rung == "staged":
            other = core().Pool(0)  # that nobody swapped in
            def noise(n):
                data, memory = os.urandom(n), array.DeviceMemory(other, n)
                x = Array(memory, memory.address, (n,), "uint8", None, 0)
                x.copy_from(data)
                return x, data
"""
RUNGS = ["pool", "vmm", "staged"]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_stashed_gpu_tensor_reads_the_same_calls_later(script, rung):  # noqa: F811
    """The simulated driver poisons what is freed and gives it out again at once."""
    script(BY_RUNG.format(rung=rung) + f"""
        ways = {WAYS!r}
        with zcx.Worker({os.path.join(os.path.dirname(__file__), 'workers', 'keeps.py')!r}, timeout=40) as w:
            def churn():
                for _ in range(2):
                    some = [noise(3000)[0] for _ in range(6)]
                    w.call("nothing", *some)
                    del some
                    gc.collect()
            want = {{}}
            for how in ways:
                x, data = noise(3000)
                w.call("keep", how, x)
                assert rungs(w) == [("input", 3000, rung, rung == "staged")]
                want[how] = data[how == "view":]
                del x
                churn()
            assert w.call("read") == want
            status = w.status()
            assert (status["kept"], status["kept_bytes"], status["kept_device_bytes"]) == (6, 18000, 18000)
            assert [tuple(k) for k in w.last_report.kept] == [("keep", 0, 6, 18000)]
            w.call("forget")
            until(lambda: w.status()["transfers"] == 0, "let go")
            for i, how in enumerate(ways):
                w.call("make_and_keep", how, 3000, i, "cuda")  # and nobody here has it
                churn()
            assert w.call("read") == {{how: bytes([i]) * (3000 - (how == "view")) for i, how in enumerate(ways)}}
            w.call("forget")
            until(lambda: w.status()["transfers"] == 0, "let go")
            gc.collect()
            until(lambda: counts()["allocations"] == 0 and w.call("count", "imports") == [0], "nothing is left")
    """, SIMCUDA_DELAY_US="200")


# ---- the quota ----


def test_over_it_the_call_fails_and_names_what_is_kept(start):
    w = start("keeps", max_kept_bytes=10_000, env={"TEST_IMPORT": "numpy"})
    for _ in range(2):
        w.call("keep_more", noise(5000))
    assert w.last_report.kept == (zcx.Kept("keep_more", None, 2, 10_000),)
    assert str(w.last_report.kept[0]) == "keep_more: 2 buffers, 10000 bytes of host memory"
    pid = w.pid
    with pytest.raises(zcx.KeptTooMuch, match=r"after make_and_keep: .* 3 buffers with 10001 bytes of host memory \(2 of keep_more, "
                                              r"1 of make_and_keep\), and max_kept_bytes is 10000\. .*clone\(\).*make_and_keep returned was dropped") as caught:
        w.call("make_and_keep", "closure", 1, 5, None)
    assert caught.value.kept == w.last_report.kept and sum(k.nbytes for k in caught.value.kept) == 10_001
    assert pickle.loads(pickle.dumps(caught.value)).kept == caught.value.kept
    assert kept(w)[:2] == (3, 10_001), "the worker has it, so it is not given back"
    with pytest.raises(zcx.KeptTooMuch):  # not more than before: the worker lives
        w.call("nothing")
    w.call("forget")
    assert w.pid == pid and w.call("nothing") is None and kept(w)[0] == 0


def test_one_that_goes_on_is_replaced(start):
    w = start("keeps", max_kept_bytes=10_000, env={"TEST_IMPORT": "numpy"})
    lent = w.call("make_and_keep", "view", 4000, 5, None)
    w.call("keep_more", lent)
    with pytest.raises(zcx.KeptTooMuch):
        w.call("keep_more", noise(5000))
    pid, session = w.pid, w._session
    with pytest.raises(zcx.KeptTooMuch, match="kept still more, so the worker was ended"):
        w.call("keep_more", noise(1))
    assert not w.alive
    assert w.call("read") == {} and w.pid != pid
    until(lambda: session.parent is None, "what the old one had is given back")
    assert (lent == 5).all()


def test_calls_that_fail_are_bounded_too_and_fail_with_their_own_error(start, caplog):
    w = start("keeps", max_kept_bytes=10_000, env={"TEST_IMPORT": "numpy"})
    with caplog.at_level(logging.WARNING, "comfy_zerocopy"):
        for n, alive in ((6000, True), (6000, True), (1, False)):
            with pytest.raises(zcx.RemoteError, match="after it was kept"):
                w.call("fail", noise(n))
            assert w.alive is alive
    told = [r.getMessage() for r in caplog.records if "max_kept_bytes" in r.getMessage()]
    assert len(told) == 2 and "of fail)" in told[0] and "was ended" in told[1]


def test_what_is_replaced_by_the_next_call_does_not_count_twice(start, monkeypatch):
    """self.prev = x: when the call ends, the release of the one before is still on its way."""
    monkeypatch.setattr(parent, "_RELEASE", 20.0)
    w = start("keeps", max_kept_bytes=6000, env={"TEST_IMPORT": "numpy"})
    for i in range(20):
        w.call("keep", "attribute", np.full(5000, i, "u1"))
    assert w.status()["calls"] == 20, "no collection was asked for"
    assert w.call("read") == {"attribute": bytes([19]) * 5000}
    assert [k.count for k in w.last_report.kept] == [1]


@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_replaced_by_the_next_call_does_not_count_twice_on_a_gpu(script, rung):  # noqa: F811
    """And what is over it is an error, on each rung."""
    script(BY_RUNG.format(rung=rung) + f"""
        parent._RELEASE = 20.0
        with zcx.Worker({os.path.join(os.path.dirname(__file__), 'workers', 'keeps.py')!r}, timeout=40, max_kept_bytes=6000) as w:
            for i in range(10):
                x, data = noise(5000)
                w.call("keep", "attribute", x)
                assert rungs(w) == [("input", 5000, rung, rung == "staged")]
            assert w.status()["calls"] == 10, "no collection was asked for"
            assert w.call("read") == {{"attribute": data}}
            x, more = noise(1001)
            parent._RELEASE = 0.05
            try:
                w.call("keep_more", x)
            except zcx.KeptTooMuch as error:
                assert "2 buffers with 6001 bytes of cuda:0 (1 of keep, 1 of keep_more)" in str(error), error
                assert [tuple(k) for k in error.kept] == [("keep", 0, 1, 5000), ("keep_more", 0, 1, 1001)] == [tuple(k) for k in w.last_report.kept]
                assert (w.status()["kept"], w.status()["kept_bytes"], w.status()["kept_device_bytes"]) == (2, 6001, 6001)
            else:
                raise AssertionError
            w.call("forget")
            until(lambda: w.status()["transfers"] == 0, "let go")
            x, data = noise(7000)
            with w.lease(x):
                w.call("nothing", x)
                assert (w.status()["leased_bytes"], w.status()["kept"]) == (7000, 0)
            until(lambda: w.status()["transfers"] == 0, "let go")
    """, SIMCUDA_DELAY_US="300")


def test_cycles_that_nobody_has_do_not_count(start):
    w = start("keeps", max_kept_bytes=6000, env={"TEST_IMPORT": "numpy"})
    for _ in range(4):
        w.call("keep_old_cycle", noise(5000))
    assert w.alive and kept(w)[0] <= 1


def test_leases_do_not_count(start):
    w = start("keeps", max_kept_bytes=0, env={"TEST_IMPORT": "numpy"})
    x = noise(5000)
    with w.lease([x, x[10:]]):
        w.call("nothing", x)
        assert (w.status()["leased"], w.status()["leased_bytes"], w.last_report.kept) == (1, 5000, ())
        with pytest.raises(zcx.KeptTooMuch):
            w.call("keep_more", x)  # this the code itself keeps
        w.call("forget")
    until(lambda: w.status()["transfers"] == 0, "let go")


def test_nobody_waits_for_a_worker_that_keeps_too_much(start):
    """The call that fails so takes as long as a release may take, and others have their turn."""
    w = start("keeps", max_kept_bytes=0, env={"TEST_IMPORT": "numpy"})
    errors = []

    def calls():
        try:
            w.call("keep", "attribute", noise(100))
        except zcx.KeptTooMuch as error:
            errors.append(error)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(errors) == 3 and all(e.kept == (zcx.Kept("keep", None, 1, 100),) for e in errors)
    w.call("forget")


def test_the_limit(tmp_path, monkeypatch, start):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert quota.default(None) == memory // 4
    assert quota.excess([zcx.Kept("f", None, 1, memory // 4 + 1), zcx.Kept("g", None, 1, 5)], None) == {None: memory // 4 + 6}
    assert quota.excess([zcx.Kept("f", None, 1, 7), zcx.Kept("f", 0, 2, 8), zcx.Kept("f", 1, 2, 9)], 7) == {0: 8, 1: 9}
    with pytest.raises(ValueError, match="max_kept_bytes"):
        start("keeps", max_kept_bytes=-1)
    (tmp_path / "settings.json").write_text('{"max_kept_bytes": 99}')
    monkeypatch.setenv("COMFY_ZEROCOPY_CONFIG", str(tmp_path / "settings.json"))
    w = start("keeps", env={"TEST_IMPORT": "numpy"})
    with pytest.raises(zcx.KeptTooMuch, match="max_kept_bytes is 99"):
        w.call("keep_more", noise(100))
    assert start("keeps", max_kept_bytes=100, env={"TEST_IMPORT": "numpy"}).call("keep_more", noise(100)) is None


def test_a_quarter_of_the_gpu(script):  # noqa: F811
    script("""
        from comfy_zerocopy import quota
        assert (quota.default(0), quota.default(1)) == (256 << 20, 256 << 20)
    """, SIMCUDA_MEMORY="1GiB", SIMCUDA_DEVICES="2")
