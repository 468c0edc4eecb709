"""Allocations above the driver's limit of 128 chunks, in proved windows: on a card that plays one of 24 GiB, and on the whole."""
import contextlib
import ctypes
import random
import subprocess
import threading
import time

import pytest
import torch

import comfy_zerocopy as zcx
from comfy_zerocopy import _install, ladder

MIB, GIB = 1 << 20, 1 << 30
PART = 256 * MIB
CHUNK = 32 * MIB


def fill(x, seed):
    generator = torch.Generator("cuda")
    for i, part in enumerate(x.split(PART)):
        part.random_(0, 256, generator=generator.manual_seed(seed + i))


def sums(x):
    return [int(p.sum(dtype=torch.int64)) for p in x.split(PART)]


def holds(x, seed):
    """Is every byte what fill() writes?"""
    generator, buffer = torch.Generator("cuda"), torch.empty(PART, dtype=torch.uint8, device="cuda")
    for i, part in enumerate(x.split(PART)):
        expected = buffer[:part.numel()].random_(0, 256, generator=generator.manual_seed(seed + i))
        if not torch.equal(part, expected):
            return False
    return True


@contextlib.contextmanager
def only(nbytes):
    """Leave so much of the card's memory: the rest is held by a plain allocation."""
    cuda = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes + GIB:
        pytest.skip(f"only {free >> 30} GiB are free")
    held = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(free - nbytes)) == 0
    try:
        yield
    finally:
        assert cuda.cuMemFree_v2(held) == 0


class Outside:
    """The card's memory in use, as another program sees it, at its highest; MiB."""

    def __enter__(self):
        self.highest, self.samples = 0, 0
        self._process = subprocess.Popen(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "20"],
                                         stdout=subprocess.PIPE, text=True)
        self._seen = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.now()
        return self

    def _read(self):
        for line in self._process.stdout:
            with self._seen:
                self.used = int(line)
                self.highest = max(self.highest, self.used)
                self.samples += 1
                self._seen.notify_all()

    def now(self):
        """What is in use after all that was queued so far; the highest starts anew."""
        torch.cuda.synchronize()
        with self._seen:
            wanted = self.samples + 3  # the one under way is older, and the next may be
            assert self._seen.wait_for(lambda: self.samples >= wanted, 20)
            self.highest = self.used
            return self.used

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()


def shared(w, direction):
    (t,) = [t for t in w.last_report.transfers if t.direction == direction]
    assert (t.rung, t.copied) == ("pool", False), t
    return t


def crossing(w, direction, record_property, function, argument):
    """The time of a call that moves 16 GiB and computes nothing; record.py compares it with the floor. The second one: workers and pools
    have met, and the driver has seen the memory."""
    w.call(function, argument)
    started = time.perf_counter()
    w.call(function, argument)
    record_property(f"{direction}_16gib_crossing_us", round((time.perf_counter() - started) * 1e6))


def test_16_gib_on_a_card_of_24(record_property):
    """Both ways, with fresh random data; beyond the tensor and the contexts at most 64 MiB."""
    seed = random.getrandbits(40)
    with zcx.Worker(__file__.replace("test_large.py", "worker_torch.py"), name="large") as w:
        warm = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        w.call("part_sums", warm)  # contexts, kernels and the check of windows
        big = torch.empty(CHUNK * 130, dtype=torch.uint8, device="cuda")
        w.call("part_sums", big)
        shared(w, "input")
        del big
        w.call("filled_parts", 4096, 1)
        torch.cuda.synchronize()
        with only(24 * GIB), Outside() as outside:
            x = torch.empty(16 * GIB, dtype=torch.uint8, device="cuda")
            fill(x, seed)
            expected = sums(x)
            before = outside.now()
            started = time.perf_counter()
            assert w.call("part_sums", x) == expected
            record_property("input_16gib_ms", round((time.perf_counter() - started) * 1e3, 1))
            crossing(w, "input", record_property, "peek", x)
            shared(w, "input")
            peak = outside.highest
            beyond_input = peak - before
            del x
            before = outside.now()
            started = time.perf_counter()
            got = w.call("filled_parts", 16 * GIB, seed)
            record_property("result_16gib_ms", round((time.perf_counter() - started) * 1e3, 1))
            shared(w, "result")
            assert holds(got, seed)
            peak = outside.highest
            # The pool kept the input's 16 GiB, and the result took them: nothing is added.
            beyond_result = peak - before
            with pytest.raises(torch.cuda.OutOfMemoryError):
                w.call("own", got)  # a copy: it does not fit twice, and says so
            del got
            crossing(w, "result", record_property, "ends", 16 * GIB)
            torch.empty(16 * GIB, dtype=torch.uint8, device="cuda").fill_(1)
            torch.cuda.synchronize()
        record_property("peak_beyond_input_mib", beyond_input)
        record_property("peak_beyond_result_mib", beyond_result)
        assert beyond_input <= 64 and beyond_result <= 64 + PART // MIB + 2  # holds() has a part of its own


@pytest.mark.parametrize("gib", [100, 64])
def test_on_the_whole_card(worker, gib):
    usage = _install.pool_for(0).usage()
    free = torch.cuda.mem_get_info()[0] + usage["reserved"] - usage["used"]
    if free < (gib + 2) * GIB:
        pytest.skip(f"only {free >> 30} GiB are free")
    seed = random.getrandbits(40)
    x = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")
    fill(x, seed)
    assert worker.call("part_sums", x) == sums(x)
    shared(worker, "input")
    del x
    got = worker.call("filled_parts", gib * GIB, seed)
    shared(worker, "result")
    assert holds(got, seed)


def chunks(x):
    """How many of the driver's chunks its memory touches, by where it begins."""
    return (x.data_ptr() % CHUNK + x.numel() + CHUNK - 1) // CHUNK


def offset_in_pool(x):
    """Where it begins in its pool, as the driver tells an importer (csrc/window.h)."""
    blob = (ctypes.c_uint64 * 8)()
    assert ctypes.CDLL("libcuda.so.1").cuMemPoolExportPointer(blob, ctypes.c_uint64(x.data_ptr())) == 0 and blob[4] == x.numel()
    return blob[3]


def beginning(inside, nbytes):
    """A tensor of the pool that begins so far inside a chunk, and what keeps its place free for the next one when it goes."""
    holes = []
    for _ in range(16):
        x = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        wrong = (inside - x.data_ptr()) % CHUNK
        if not wrong:
            return x, holes
        del x
        holes.append(torch.empty(wrong, dtype=torch.uint8, device="cuda"))
    pytest.fail(f"no tensor of {nbytes} bytes begins {inside >> 20} MiB inside a chunk: {[h.data_ptr() % CHUNK >> 20 for h in holes]}")


def in_windows(w, direction):
    return shared(w, direction).reason == ladder.WINDOWS


@pytest.mark.parametrize("inside", [0, 2 * MIB, 30 * MIB], ids=["aligned", "straddling", "straddling by nearly all"])
def test_every_size_around_the_limit(worker, record_property, inside):
    """4 GiB - 64 MiB to 4 GiB + 96 MiB in steps of 16 MiB, both ways, that begin at a chunk's begin and inside one: fresh random bytes, all of
    them compared. What touches more chunks than the driver imports comes in windows, and nothing else does."""
    most = {"input": [0, 0], "result": [0, 0]}  # chunks of the largest that came whole, and in windows

    def crossed(direction, x, nbytes):
        n = chunks(x)
        assert x.numel() == nbytes
        assert in_windows(worker, direction) is (n > 128), (direction, nbytes, n)
        most[direction][n > 128] = max(most[direction][n > 128], n)
        return x.data_ptr() % CHUNK

    for nbytes in range(4 * GIB - 64 * MIB, 4 * GIB + 96 * MIB + 1, 16 * MIB):
        seed = random.getrandbits(40)
        x, holes = beginning(inside, nbytes)
        fill(x, seed)
        assert worker.call("holds_parts", x, seed) is True, nbytes
        assert crossed("input", x, nbytes) == inside
        assert offset_in_pool(x) % CHUNK == inside, "its address says where its chunks begin"
        assert worker.call("holds_parts", x, seed + 1) is False
        for _ in range(4):
            del x  # the result takes its place
            seed = random.getrandbits(40)
            x = worker.call("filled_parts", nbytes, seed)
            assert holds(x, seed), nbytes
            if crossed("result", x, nbytes) == inside:
                break
            del x
            x, holes = beginning(inside, nbytes)
        else:
            pytest.fail(f"no result of {nbytes} bytes began {inside >> 20} MiB inside a chunk")
        del x, holes
    record_property("chunks", most)
    assert most == dict.fromkeys(most, [128, (4 * GIB + 96 * MIB) // CHUNK + (inside > 0)]), most


def test_what_crosses_the_end_of_a_window(monkeypatch):
    """Windows of 128 MiB: kernels cross their ends, the driver's own copies do not and say so, and ours are cut there."""
    monkeypatch.setenv("ZCX_CHUNK_LIMIT", "4")
    with zcx.Worker(__file__.replace("test_large.py", "worker_torch.py"), name="seams") as w:
        x = torch.randint(0, 256, (300 * MIB,), dtype=torch.uint8, device="cuda")
        assert w.call("part_sums", x) == sums(x)
        shared(w, "input")
        got = w.call("own", x)  # a tensor of the worker's own, copied into one that was imported in windows
        assert torch.equal(got, x + 1)
        with pytest.raises(zcx.RemoteError, match="invalid argument"):
            w.call("cloned", x)
        assert w.call("part_sums", x) == sums(x)  # the refusal harmed nothing
