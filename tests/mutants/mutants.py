"""The mutants: what of the protocol each breaks, by which edit, and what has to catch it.

Not a switch in the product: each edit replaces a text that stands exactly once in a file, in a private copy (mutate.py). When the
product changes so that it does not, the mutant is rotten, and its test fails until it follows.
"""
from __future__ import annotations

from typing import NamedTuple

from mutate import Edits


class Mutant(NamedTuple):
    name: str
    breaks: str  # for the table in docs/reliability.md
    edits: Edits
    scenario: str  # of scenarios.py
    by: tuple[str, ...]  # who may catch it there: "race", "fault" (both: the simulated driver), "bytes", "invariant", "deadline", "check"
    quiet: str = ""  # a scenario in which the bytes come out right all the same: a race has to be seen there
    card: str = ""  # a scenario of tests/gpu/test_mutants_on_card.py


_C = "csrc"  # whichever of its files has the text

_AWAIT_READY = (_C, "    return zcx_gate_await(w->gate, d->ordinal, d->gate.ready_slot, d->gate.ready, stream, err);\n",
                "    (void)stream;\n    return 0;\n")
_DONE_SEEN = (_C, "            int r = done_seen(p, err);\n", "            int r = 1;\n            (void)done_seen;\n")
_POST_DONE = "    if (!r) r = zcx_gate_post(w->gate, d->ordinal, d->gate.done_slot, d->gate.done, d->gate_stream, err);\n"
_OUTCOME = "        return r ? r : hold_outcome(p, *ev, NULL, err);\n"
_SEND_READY = "        r = zcx_call_gate_ready(p, &p->gates[i], err);\n"
_COUNT_CHECK = (_C, "    int r = prove_counting(d, &e, m->seed, driver, err);\n", "    int r = 0;\n    (void)prove_counting;\n")
_UNCOUNTED = (_C, "    *last = known->count == 1;\n", "    *last = 1;\n")

MUTANTS = (
    Mutant("ready-not-awaited", "the worker does not wait for READY", (_AWAIT_READY,), "ready", ("race", "bytes"), "ready_passed", "ready"),
    Mutant("ready-too-early", "READY is posted by the CPU, before the inputs' work", (
        (_C, _SEND_READY, "        p->gates[i].ready = zcx_gate_next(p->gate, p->gates[i].ready_slot);\n"
                               "        zcx_gate_post_cpu(p->gate, p->gates[i].ready_slot, p->gates[i].ready);\n        r = 0;\n"),),
           "ready", ("race", "bytes"), "ready_written", "ready"),
    Mutant("ready-of-another-stream", "READY of a result comes from a stream that did not allocate it", (
        (_C, "    if (!r) r = zcx_call_gate_ready(p, g, err);\n",
         "    struct zcx_scope other;\n    zcu_stream own = r ? NULL : g->stream;\n    if (!r) r = zcx_scope_open(&other, g->ordinal, err);\n"
         "    if (!r) {\n        r = zcx_cu(err, \"cuStreamCreate\", other.d->StreamCreate(&g->stream, ZCU_STREAM_NON_BLOCKING));\n"
         "        if (!r) r = zcx_call_gate_ready(p, g, err);\n        g->stream = own;\n        zcx_scope_close(&other);\n    }\n"),),
           "give_back", ("race",), "fresh"),
    Mutant("done-not-awaited", "a call returns when RESULT has come", (_DONE_SEEN,), "done", ("race", "bytes"), "done_written", "done"),
    Mutant("error-without-done", "a call that failed returns when ERROR has come", (
        (_C, _OUTCOME, "        if (!r && h->type == ZCX_ERROR) {\n            p->state = ZCX_RETURNED;\n            return 0;\n        }\n" + _OUTCOME),),
           "scratch_of_an_error", ("race",)),
    Mutant("done-too-early", "DONE is posted by the CPU, before the call's work", (
        (_C, _POST_DONE, "    if (!r) zcx_gate_post_cpu(w->gate, d->gate.done_slot, d->gate.done);\n"),),
           "done", ("race", "bytes"), "done_written", "done"),
    Mutant("done-before-unimport", "DONE is posted before the un-import", (
        (_C, _POST_DONE, ""),
        (_C, "    if (!r) r = unmap_marked(w, index, 0, err);\n", _POST_DONE + "    if (!r) r = unmap_marked(w, index, 0, err);\n")),
           "give_back", ("race",), "give_back"),
    Mutant("one-stream-joined", "un-import and DONE wait for one stream, not for the context", (
        (_C, "zcx_driver_record_context(driver, context, d->work)", "driver->EventRecord(d->work, NULL)"),),
           "side", ("race", "fault", "bytes"), "side_written", "side"),
    Mutant("unimport-on-another-stream", "the worker un-imports on another stream than the one that posts DONE", (
        (_C, "    return zcx_pool_unmap(d->pool, i->wire.key, d->gate_stream, NULL, err);\n",
         "    return zcx_pool_unmap(d->pool, i->wire.key, NULL, NULL, err);\n"),),
           "give_back", ("race",), "give_back"),
    Mutant("released-at-the-message", "what was lent is released when RESULT or ERROR comes, not at DONE", (
        (_C, _OUTCOME,
         "        if (!r) r = hold_outcome(p, *ev, NULL, err);\n        if (r < 0) return r;\n        pthread_mutex_lock(&p->lock);\n"
         "        for (size_t i = 0; i < p->ntransfers; i++)\n            if (p->transfers[i].seq == p->seq && !p->transfers[i].keeps && p->transfers[i].owner)\n"
         "                zcx_transfer_release(p, &p->transfers[i]);\n        pthread_mutex_unlock(&p->lock);\n        ev->kind = ZCX_EV_RELEASED;\n"
         "        return 0;\n"),),
           "scratch", ("race",), "", "scratch"),
    Mutant("freed-on-another-stream", "the parent's memory is freed on another stream than the one that it was used on", (
        (_C, "    rc = zcx_cu(err, \"cuMemFreeAsync\", s.d->MemFreeAsync(ptr, stream));\n",
         "    zcu_stream other = stream;\n    rc = zcx_cu(err, \"cuStreamCreate\", s.d->StreamCreate(&other, ZCU_STREAM_NON_BLOCKING));\n"
         "    if (!rc) rc = zcx_cu(err, \"cuMemFreeAsync\", s.d->MemFreeAsync(ptr, other));\n"),),
           "free_late", ("race",)),
    Mutant("stream-waits-for-the-worker", "a stream of the parent's waits for DONE", (
        (_C, _SEND_READY, _SEND_READY + "        if (!r) r = zcx_gate_await(p->gate, p->gates[i].ordinal, p->gates[i].done_slot, "
                                             "p->gates[i].done, p->gates[i].stream, err);\n"),
        (_C, "    if (g->is_parent) return zcx_fail(err, ZCX_E_RANGE, \"a stream of the parent never waits for a worker\");\n", "")),
           "hang", ("deadline",)),
    Mutant("slot-reused-unobserved", "a slot is given out again although its last post was not seen", (
        (_C, "    return !s->written && reached(g, s->ordinal, slot, s->announced, NULL) == 1;\n", "    return 1;\n"),),
           "slots", ("fault", "invariant")),
    Mutant("values-repeat", "each use of a slot posts the same value", (
        (_C, "        first = g->slots[slot].announced + ZCX_GATE_STEP;\n        g->slots[slot].announced += n * ZCX_GATE_STEP;\n",
         "        first = ZCX_GATE_STEP;\n        g->slots[slot].announced = n * ZCX_GATE_STEP;\n"),),
           "ready_again", ("race", "bytes"), "ready_again_written"),
    Mutant("no-quarantine", "what a dead worker had is released with WorkerDied", (
        (_C, "        if (p->state == ZCX_BROKEN) t->state = QUARANTINED;\n", "        if (p->state == ZCX_BROKEN) zcx_transfer_release(p, t);\n"),),
           "die", ("race",)),
    Mutant("quarantine-by-pidfd", "a worker counts as gone when it was reaped, although a child of it lives", (
        ("comfy_zerocopy/process.py", "        if self._live >= 0 or not self.exited.is_set() or self.gone.is_set():\n",
         "        if not self.exited.is_set() or self.gone.is_set():\n"),),
           "die", ("race",)),
    Mutant("kept-not-named", "the worker does not say what it keeps", (
        (_C, "        if (i->seq == w->seq) kept[nkept++] = i->wire.id; /* dropped this instant, on a device: RELEASE follows */\n", "        {}\n"),),
           "keep", ("race",)),
    Mutant("kept-ignored", "the parent releases what the worker keeps", ((_C, "        t->keeps = 1;\n", ""),), "keep", ("race",)),
    Mutant("release-too-early", "RELEASE is sent before the un-import is done", (
        (_C, "        if (q == ZCU_ERROR_NOT_READY) continue;\n", "        if (q == ZCU_ERROR_NOT_READY) q = 0;\n"),),
           "forget", ("race",)),
    Mutant("import-not-counted", "the first of two uses that is dropped unmaps both", (_UNCOUNTED,), "give_back", ("fault", "check")),
    Mutant("import-not-counted-nor-checked", "the same, with a start-up check that does not look", (_UNCOUNTED, _COUNT_CHECK), "twice",
           ("fault",), "", "twice"),
    Mutant("slab-unmapped-at-once", "memory of an arena is un-mapped in the worker before the GPU is done", (
        (_C, "        r = zcx_device_settle(scope.d, d, err);\n        if (!r) r = unmap_marked(w, index, 1, err);\n",
         "        r = zcx_device_join(scope.d, d, err);\n        if (!r) r = unmap_marked(w, index, 1, err);\n"),),
           "arena_result", ("race",)),
    Mutant("block-reused-at-once", "a block of an arena is given out again before its last use is done", (
        (_C, "        r = d->EventQuery(b->event);\n        if (r == ZCU_ERROR_NOT_READY) return 0;\n", "        r = ZCU_SUCCESS;\n"),),
           "arena_reuse", ("race",), "", ""),
    Mutant("input-mapped-writable", "an input in an arena is mapped to be written", (
        (_C, ".flags = v->writable ? ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE : ZCU_MEM_ACCESS_FLAGS_PROT_READ};",
         ".flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};"),),
           "arena_edit", ("bytes",)),
)


def environment(scenario: str) -> dict[str, str]:
    """What a scenario wants of the simulated driver."""
    if scenario.startswith("arena"):
        return {"SIMCUDA_ATTRIBUTES": "119=0"}  # no pool of this device can be shared: an arena serves
    return {"SIMCUDA_DEVICES": "2"} if scenario == "slots" else {}
