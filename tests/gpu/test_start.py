"""What the start of a worker costs on a real card: no context for CPU tensors, and the time of the start-up checks."""
import statistics
import time

import torch
from test_large import CHUNK, MIB, Outside
from test_rungs import in_arena, unshareable

import comfy_zerocopy as zcx
from comfy_zerocopy import canary, ladder
from comfy_zerocopy._native import zcx as core

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


def test_the_cost_of_each_check(record_property, monkeypatch):
    """How long the first call that needs it waits for each, in a worker without torch. record.py puts them together."""
    z, took = core(), {}
    names = {z.PROVE_POOL: "pool", z.PROVE_WINDOWS: "windows", z.PROVE_VMM: "vmm", z.PROVE_READ: "vmm", z.PROVE_WINDOW: "copies"}
    check, sacrifice = canary.Pools._check, canary.sacrifice

    def timed(name, call, *arguments):
        started = time.perf_counter()
        why = call(*arguments)
        took[name] = took.get(name, 0) + (time.perf_counter() - started) * 1e3
        assert why == "", (name, why)
        return why

    def checked(self, parent, ordinal, step, *rest):
        if self.name != "checks":  # the process that is sacrificed makes checks of its own
            return check(self, parent, ordinal, step, *rest)
        return timed(names[step], check, self, parent, ordinal, step, *rest)

    monkeypatch.setattr(canary.Pools, "_check", checked)
    monkeypatch.setattr(canary, "sacrifice", lambda pool: timed("windows_process", sacrifice, pool))
    small, large = torch.ones(MIB, dtype=torch.uint8, device="cuda"), torch.empty(130 * CHUNK, dtype=torch.uint8, device="cuda")
    slab, other = in_arena(MIB).zero_(), unshareable(MIB)
    rounds = []
    for _ in range(3):
        took.clear()
        monkeypatch.setattr(canary, "_tried", {})
        with zcx.Worker(BARE, name="checks") as w:
            for x, rung, copied in ((small, "pool", False), (large, "pool", False), (slab, "vmm", False)):
                w.call("kind", x)
                assert [(t.rung, t.copied) for t in w.last_report.transfers] == [(rung, copied)]
            with monkeypatch.context() as without:
                without.setattr(ladder.Ladder, "_stage", lambda *_: "staging is forced off")
                without.setattr(ladder.Ladder, "_window", lambda *_: None)
                w.call("kind", other)
            assert [(t.rung, t.copied) for t in w.last_report.transfers] == [("host", True)]
            assert {name: w.status()[name][0] for name in ("pools", "windows", "vmm", "copies")} == dict.fromkeys(
                ("pools", "windows", "vmm", "copies"), "proved")
        rounds.append(dict(took))
    for name in (*dict.fromkeys(names.values()), "windows_process"):
        record_property(f"check_{name}_ms", round(statistics.median(one[name] for one in rounds), 2))
