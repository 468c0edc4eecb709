"""The rungs beside `pool` on a real card: the arena, staged copies, pinned host memory; and 16 GiB without windows on a card of 24."""
import random
import time

import pytest
import torch
from test_large import GIB, MIB, Outside, crossing, fill, holds, only, sums

import comfy_zerocopy as zcx
from comfy_zerocopy import _install, array, canary, ladder

WORKER = __file__.replace("test_rungs.py", "worker_torch.py")
SIZES = [1, 4099, 16 * MIB, 96 * MIB + 5, 1024 * MIB]


def rungs(w, direction):
    return [(t.rung, t.copied) for t in w.last_report.transfers if t.direction == direction]


def in_arena(nbytes):
    """A torch tensor in memory of the arena, whatever its size."""
    memory = array.ArenaMemory(_install.arena_for(0), nbytes, False)
    return ladder.tensor.Memory(memory, memory.address, nbytes, 0).build(ladder.tensor.TORCH, 0, "uint8", (nbytes,), (1,), 0)


def unshareable(nbytes):
    """A tensor of the pool that torch had before the swap: nothing can export it."""
    pool = _install.pool_for(0)
    pool.restore(_install._here.displaced[0])
    try:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    finally:
        pool.make_current()


def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def until_free(nbytes):
    end = time.monotonic() + 20
    while free() < nbytes:
        assert time.monotonic() < end, (free(), nbytes)
        time.sleep(0.005)


@pytest.fixture
def no_windows(monkeypatch):
    def refuse(self, parent, pool, until):
        self.windows[pool.ordinal] = "windows are forced off"
        return self.windows[pool.ordinal]

    monkeypatch.setattr(canary.Pools, "open_windows", refuse)


@pytest.mark.parametrize("nbytes", SIZES)
def test_arena_in_and_results(worker, monkeypatch, nbytes):
    x = in_arena(nbytes)
    x.random_(0, 256)
    assert worker.call("total", x) == int(x.sum(dtype=torch.int64))
    assert rungs(worker, "input") == [("vmm", False)]
    monkeypatch.setattr(ladder.Ladder, "_pool_result", lambda *_: "the pool is forced off")
    got = worker.call("copy", x)
    assert rungs(worker, "result") == [("vmm", False)]
    assert torch.equal(got, x)
    back = worker.call("copy", got)  # a result of the arena's is lent on as it is
    assert rungs(worker, "input") == [("vmm", False)] and torch.equal(back, x)
    assert worker.call("give_back", x)[0] is x


def test_an_arena_result_waits_for_unjoined_streams(worker, monkeypatch):
    """The un-mapping comes after all work of the worker's context, and DONE after that."""
    monkeypatch.setattr(ladder.Ladder, "_pool_result", lambda *_: "the pool is forced off")
    x = in_arena(8 * MIB).random_(0, 256)
    for how in ("slow_copy", "side_stream_copy"):
        assert torch.equal(worker.call(how, x, 200_000_000), x)
        assert rungs(worker, "result") == [("vmm", False)]


def test_many_small_ones_share_slabs(worker, monkeypatch):
    monkeypatch.setattr(ladder.Ladder, "_pool_result", lambda *_: "the pool is forced off")
    xs = [in_arena(1000 + i).random_(0, 256) for i in range(200)]
    for _ in range(3):
        for x, y in zip(xs, [worker.call("copy", x) for x in xs], strict=True):
            assert torch.equal(x, y)
    assert _install.arena_for(0).usage()["slabs"] <= 4


def test_memory_of_the_arena_goes_back(worker, monkeypatch):
    monkeypatch.setattr(ladder.Ladder, "_pool_result", lambda *_: "the pool is forced off")
    worker.call("copy", in_arena(32 * MIB).zero_())
    before = free()
    x = in_arena(2 * GIB)
    fill(x, 1)
    got = worker.call("copy", x)
    assert holds(got, 1) and free() <= before - 4 * GIB + 64 * MIB
    del x, got
    until_free(before - 256 * MIB - 64 * MIB)  # holds() has a part of its own in the pool


def test_record_stream(worker, monkeypatch):
    """On memory that torch did not allocate: in the parent, and in the worker."""
    side = torch.cuda.Stream()
    x = in_arena(32 * MIB).fill_(3)
    x.record_stream(side)
    x[5:].view(torch.int8)[7:].record_stream(side)
    assert worker.call("recorded", x) == 3 * 32 * MIB
    monkeypatch.setattr(ladder.Ladder, "_pool_result", lambda *_: "the pool is forced off")
    got = worker.call("copy", x)
    got.record_stream(side)
    del got
    torch.empty(1000, device="cuda").record_stream(side)


@pytest.mark.parametrize("nbytes", SIZES)
def test_staged(worker, nbytes):
    x = unshareable(nbytes)
    assert worker.call("total", x) == int(x.sum(dtype=torch.int64))
    (t,) = [t for t in worker.last_report.transfers if t.direction == "input"]
    assert (t.rung, t.copied) == ("staged", True) and "before the pools were swapped" in t.reason
    assert worker.call("give_back", x)[0] is x


def test_an_edit_of_a_staged_input_stays_in_the_worker(worker):
    x = unshareable(4 * MIB)
    before = x.clone()
    got = worker.call("edited", x)
    assert torch.equal(x, before) and torch.equal(got, before + 1)


@pytest.mark.parametrize("nbytes", [1, 32 * MIB, 64 * MIB + 1, 300 * MIB + 77])
@pytest.mark.parametrize("window", ["staged", "host"])
def test_through_a_window(worker, monkeypatch, window, nbytes):
    """Piece by piece: several tensors at once, behind a slow kernel, and nothing of the parent waits."""
    monkeypatch.setattr(ladder.Ladder, "_stage", lambda *_: "staging is forced off")
    if window == "host":
        monkeypatch.setattr(ladder.Ladder, "_window", lambda *_: None)
    x, y = unshareable(nbytes), unshareable(12_345)
    torch.cuda._sleep(200_000_000)
    x.add_(1)
    sums = worker.call("totals", x, y)
    assert rungs(worker, "input") == [(window, True)] * 2
    assert sums == [int(x.sum(dtype=torch.int64)), int(y.sum(dtype=torch.int64))]
    back, edited = worker.call("give_back", x)[0], worker.call("edited", x)
    assert back is x and torch.equal(edited, x + 1)


@pytest.mark.parametrize("nbytes", [1, 64 * MIB + 1, 300 * MIB + 77])
def test_results_through_pinned_memory(worker, monkeypatch, nbytes):
    """Where no memory of the parent's can be shared: the worker's own bytes come piece by piece."""
    monkeypatch.setattr(ladder.Ladder, "_pool_result", lambda *_: "the pool is forced off")
    monkeypatch.setattr(ladder.Ladder, "slabs", lambda *_: (None, "the arena is forced off"))
    x = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    for how in ("own", "own"):
        got = worker.call(how, x)
        assert rungs(worker, "result") == [("host", True)]
        assert torch.equal(got, x + 1)


def test_16_gib_without_windows_on_a_card_of_24(no_windows, record_property):
    seed = random.getrandbits(40)
    with zcx.Worker(WORKER, name="no windows") as w:
        w.call("part_sums", torch.zeros(MIB, dtype=torch.uint8, device="cuda"))  # contexts, kernels
        w.call("part_sums", in_arena(MIB).zero_())
        w.call("filled_parts", 4096, 1)
        x = torch.empty(16 * GIB, dtype=torch.uint8, device="cuda")
        fill(x, seed)
        expected = sums(x)
        with only(8 * GIB):  # 24 in all
            pid = w.pid
            with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
                w.call("part_sums", x)
            record_property("refusal", str(caught.value))
            assert "windows are forced off" in str(caught.value) and str(16 * GIB) in str(caught.value)
            assert w.call("part_sums", torch.zeros(MIB, dtype=torch.uint8, device="cuda")) and w.pid == pid, "the worker is well"
        del x
        torch.cuda.synchronize()
        with only(24 * GIB), Outside() as outside:
            x = zcx.empty((16 * GIB,), torch.uint8, "cuda")
            fill(x, seed)
            assert sums(x) == expected
            before = outside.now()
            started = time.perf_counter()
            assert w.call("part_sums", x) == expected
            record_property("input_16gib_ms", round((time.perf_counter() - started) * 1e3, 1))
            crossing(w, "input", record_property, "peek", x)
            assert rungs(w, "input") == [("vmm", False)]
            beyond_input = outside.highest - before
            del x
            until_free(16 * GIB)
            before = outside.now()
            started = time.perf_counter()
            got = w.call("filled_parts", 16 * GIB, seed)
            record_property("result_16gib_ms", round((time.perf_counter() - started) * 1e3, 1))
            assert rungs(w, "result") == [("vmm", False)]
            beyond_result = outside.highest - before - 16 * GIB // MIB
            assert holds(got, seed)
            del got
            until_free(16 * GIB)
            crossing(w, "result", record_property, "ends", 16 * GIB)
            until_free(16 * GIB)
            ordinary = torch.empty(16 * GIB, dtype=torch.uint8, device="cuda").fill_(1)  # of torch's own pool, beside what that holds already
            torch.cuda.synchronize()
            del ordinary
        record_property("peak_beyond_input_mib", beyond_input)
        record_property("peak_beyond_result_mib", beyond_result)
        assert beyond_input <= 64 and beyond_result <= 64
