/* event.c: events. A local one points at the marker of its last record; an interprocess one is a slot of the session:
 * a count of records submitted and a count completed. What a dead process left pending never completes. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define HANDLE_MAGIC 0x746e657665636973ull

static struct event *event_of(zcu_event handle) {
    for (struct event *e = sim.events; e; e = e->next)
        if ((void *)e == (void *)handle) return e;
    return NULL;
}

static struct event *event_new(int slot) {
    struct event *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->slot = slot;
    e->interprocess = slot >= 0;
    e->next = sim.events;
    sim.events = e;
    return e;
}

/* A record behind one that a dead process left pending hangs its stream: 580.159.04, and so here. */
bool sim_slot_stuck(const struct op *op) {
    return op->earlier && __atomic_load_n(&sim_slot(op->slot)->completed, __ATOMIC_ACQUIRE) < op->earlier &&
           op->earlier_recorder.pid != sim_self().pid && sim_dead(op->earlier_recorder);
}

CALL(EventCreate, 2000, zcu_event *out, unsigned flags) {
    ENTER(EventCreate);
    uint64_t generation;
    int slot = -1;
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    if (flags & ~7u) return ZCU_ERROR_INVALID_VALUE;
    if (flags & ZCU_EVENT_INTERPROCESS) {
        if (!(flags & ZCU_EVENT_DISABLE_TIMING)) return ZCU_ERROR_INVALID_VALUE;
        if ((slot = sim_slot_take(&generation)) < 0) return ZCU_ERROR_OUT_OF_MEMORY;
    }
    struct event *e = event_new(slot);
    if (!e) return ZCU_ERROR_OUT_OF_MEMORY;
    *out = (zcu_event)(void *)e;
    return ZCU_SUCCESS;
}

CALL_V(EventDestroy, _v2, 4000, zcu_event event) {
    ENTER(EventDestroy);
    struct event **at = &sim.events, *e = event_of(event);
    if (!e) return ZCU_ERROR_INVALID_HANDLE;
    while (*at != e) at = &(*at)->next;
    *at = e->next;
    if (e->slot >= 0) sim_slot_ref(e->slot, -1);
    sim_marker_unref(e->marker);
    free(e);
    return ZCU_SUCCESS;
}

static zcu_result record_slot(struct event *e, struct stream *s) {
    struct op *op = sim_op(OP_RECORD_SLOT);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    struct event_slot *slot = sim_slot(e->slot);
    sim_session_lock();
    op->slot = e->slot;
    op->earlier = slot->submitted;
    op->earlier_recorder = slot->recorder;
    op->ticket = ++slot->submitted;
    slot->recorder = sim_self();
    sim_session_unlock();
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

static zcu_result mark(struct marker *m, struct stream *s, bool unordered) {
    struct op *op = sim_op(OP_MARK);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->marker = sim_marker_ref(m);
    op->unordered = unordered;
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

CALL(EventRecord, 2000, zcu_event event, zcu_stream stream) {
    ENTER(EventRecord);
    struct stream *s;
    struct event *e = event_of(event);
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (!e) return ZCU_ERROR_INVALID_HANDLE;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    if (e->slot >= 0) return record_slot(e, s);
    struct marker *m = sim_marker_new(1);
    if (!m) return ZCU_ERROR_OUT_OF_MEMORY;
    sim_marker_unref(e->marker);
    e->marker = m;
    return mark(m, s, false);
}

/* All work of the context that was submitted before, in every stream: one part in each that holds any. */
CALL(CtxRecordEvent, 12050, zcu_ctx ctx, zcu_event event) {
    ENTER(CtxRecordEvent);
    struct event *e = event_of(event);
    struct ctx *c = ctx ? (struct ctx *)(void *)ctx : sim_current();
    if (!e || e->slot >= 0) return ZCU_ERROR_INVALID_HANDLE;
    if (!c) return ZCU_ERROR_INVALID_CONTEXT;
    if (sim_capture_forbids_context()) return ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct marker *m = sim_marker_new(0);
    if (!m) return ZCU_ERROR_OUT_OF_MEMORY;
    sim_marker_unref(e->marker);
    e->marker = m;
    for (struct stream *s = sim.streams; s; s = s->next) {
        if (s->ctx != c) continue;
        if (!s->head) hb_join(&m->clock, &s->clock);
        else if (!mark(m, s, true)) m->pending++;
        else return ZCU_ERROR_OUT_OF_MEMORY;
    }
    return ZCU_SUCCESS;
}

static bool complete(struct event *e) {
    if (e->slot < 0) return !e->marker || !e->marker->pending;
    struct event_slot *slot = sim_slot(e->slot);
    return __atomic_load_n(&slot->completed, __ATOMIC_ACQUIRE) >= __atomic_load_n(&slot->submitted, __ATOMIC_ACQUIRE);
}

static zcu_result seen(struct event *e) {
    if (e->slot >= 0) hb_host_sees(&sim_slot(e->slot)->clock);
    else if (e->marker) hb_host_sees(&e->marker->clock);
    return ZCU_SUCCESS;
}

CALL(EventQuery, 2000, zcu_event event) {
    ENTER_UNSAFE(EventQuery);
    struct event *e = event_of(event);
    if (!e) return ZCU_ERROR_INVALID_HANDLE;
    return complete(e) ? seen(e) : ZCU_ERROR_NOT_READY;
}

CALL(EventSynchronize, 2000, zcu_event event) {
    ENTER_UNSAFE(EventSynchronize);
    struct event *e;
    while ((e = event_of(event)) && !sim.fault && !complete(e)) {
        int64_t until = sim_now() + 200000; /* the record may be another process's */
        struct timespec t = {until / 1000000000, until % 1000000000};
        pthread_cond_timedwait(&sim.progress, &sim.lock, &t);
    }
    if (sim.fault) return sim.fault;
    return e ? seen(e) : ZCU_ERROR_INVALID_HANDLE;
}

CALL(StreamWaitEvent, 3020, zcu_stream stream, zcu_event event, unsigned flags) {
    ENTER(StreamWaitEvent);
    struct stream *s;
    struct event *e = event_of(event);
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (!e) return ZCU_ERROR_INVALID_HANDLE;
    if (flags > 1) return ZCU_ERROR_INVALID_VALUE;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    if (e->slot < 0 && !e->marker) return ZCU_SUCCESS; /* never recorded: a no-op */
    struct op *op = sim_op(e->slot < 0 ? OP_WAIT : OP_WAIT_SLOT);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->marker = sim_marker_ref(e->marker);
    op->slot = e->slot;
    if (e->slot >= 0) op->ticket = __atomic_load_n(&sim_slot(e->slot)->submitted, __ATOMIC_ACQUIRE);
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

struct event_handle { uint64_t magic, generation; int64_t slot; }; /* without padding: all bytes travel, and none is unset */

CALL(IpcGetEventHandle, 4010, zcu_ipc_event *out, zcu_event event) {
    ENTER(IpcGetEventHandle);
    struct event *e = event_of(event);
    if (!e) return ZCU_ERROR_INVALID_HANDLE;
    if (e->slot < 0) return ZCU_ERROR_INVALID_VALUE;
    if (!sim_session_shared()) return ZCU_ERROR_NOT_SUPPORTED; /* what a card says where nothing is shared */
    struct event_handle h = {HANDLE_MAGIC, sim_slot(e->slot)->generation, e->slot};
    memset(out, 0, sizeof *out);
    memcpy(out, &h, sizeof h);
    return ZCU_SUCCESS;
}

CALL(IpcOpenEventHandle, 4010, zcu_event *out, zcu_ipc_event handle) {
    ENTER(IpcOpenEventHandle);
    struct event_handle h;
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    memcpy(&h, &handle, sizeof h);
    struct event_slot *slot = sim_slot(h.slot);
    if (h.magic != HANDLE_MAGIC || !slot || !slot->refs || slot->generation != h.generation) return ZCU_ERROR_INVALID_VALUE;
    struct event *e = event_new(h.slot);
    if (!e) return ZCU_ERROR_OUT_OF_MEMORY;
    e->opened = true;
    sim_slot_ref(h.slot, 1);
    *out = (zcu_event)(void *)e;
    return ZCU_SUCCESS;
}
