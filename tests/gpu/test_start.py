"""What the start of a worker costs on a real card: no context for CPU tensors, and the time of the start-up checks."""
import statistics
import time

import torch
from test_large import MIB, Outside

import comfy_zerocopy as zcx
from comfy_zerocopy import canary

BARE = __file__.replace("test_start.py", "worker_bare.py")
WORKER = __file__.replace("test_start.py", "worker_torch.py")


def test_a_worker_for_cpu_tensors_has_no_context(record_property):
    torch.zeros(1, device="cuda")
    with Outside() as outside, zcx.Worker(WORKER, name="cpu") as w:
        before = outside.now()
        x = torch.arange(5 * MIB, dtype=torch.uint8)
        assert w.call("total", x) == int(x.sum(dtype=torch.int64)) and torch.equal(w.call("copy", x), x)
        used = outside.now() - before
        assert w.call("total", x.cuda()) == int(x.sum(dtype=torch.int64))
        context = outside.now() - before
        record_property("cpu_worker_mib", used)
        record_property("gpu_worker_mib", context)
        assert used <= 2 and context > 64, (used, context)


def test_the_cost_of_the_checks(record_property, monkeypatch):
    """The first call with a GPU tensor, without torch in the worker: with the start-up check, and without."""
    x = torch.ones(MIB, dtype=torch.uint8, device="cuda")

    def first_call():
        with zcx.Worker(BARE, name="start") as w:
            w.call("modules")
            started = time.perf_counter()
            w.call("kind", x)
            return (time.perf_counter() - started) * 1e3

    first_call()
    with_checks = [first_call() for _ in range(5)]
    monkeypatch.setattr(canary.Pools, "_check", lambda *_: "")
    without = [first_call() for _ in range(5)]
    record_property("first_gpu_call_ms", round(statistics.median(with_checks), 1))
    record_property("first_gpu_call_unchecked_ms", round(statistics.median(without), 1))
    record_property("checks_ms", round(statistics.median(with_checks) - statistics.median(without), 1))
