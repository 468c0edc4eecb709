/* xfer_check.c: the worker's half of the start-up checks (canary.h). See xfer_worker.h.
 *
 * Does not: decide what a failed check means (the parent does). */
#include "xfer_worker.h"

#include <stdio.h>
#include <string.h>

static struct zcx_seams seams_of(const struct zcx_export *e) {
    return zcx_windows_seams(e->blob, e->alloc_bytes, e->offset, e->window);
}

/* Imported twice, the second time by count: the parent's marks must be seen through both, and still when one was dropped. */
static int prove_counting(struct device *d, const struct zcx_export *e, uint64_t seed, const struct zcx_driver *driver, struct zcx_err *err) {
    struct zcx_seams seams = seams_of(e);
    zcu_ptr first, second;
    int r = zcx_pool_map(d->pool, e, &first, err);
    if (r) return r;
    r = zcx_pool_map(d->pool, e, &second, err);
    if (!r) {
        r = zcx_canary_check(driver, first + e->offset, zcx_canary_bytes(ZCX_PROVE_POOL), &seams, seed, d->gate_stream, err);
        int undone = zcx_pool_unmap(d->pool, e->buffer_id, d->gate_stream, NULL, r ? NULL : err);
        if (!r) r = undone;
        if (!r) r = zcx_canary_check(driver, second + e->offset, zcx_canary_bytes(ZCX_PROVE_POOL), &seams, seed, d->gate_stream, err);
    }
    int undone = zcx_pool_unmap(d->pool, e->buffer_id, d->gate_stream, NULL, r ? NULL : err);
    return r ? r : undone;
}

/* Imported again after it was given up, as a tensor is that is lent call after call: the marks must be there once more. Marks
 * of our own are written behind slow work; the un-import after them is queued, and must not come before them. */
static int prove_again(struct device *d, const struct zcx_export *e, uint64_t seed, const struct zcx_driver *driver, struct zcx_err *err) {
    struct zcx_seams seams = seams_of(e);
    zcu_ptr base;
    int r = zcx_cu(err, "cuStreamSynchronize", driver->StreamSynchronize(d->gate_stream)); /* see await_release */
    if (!r) r = zcx_pool_map(d->pool, e, &base, err);
    if (r) return r;
    r = zcx_canary_check(driver, base + e->offset, zcx_canary_bytes(ZCX_PROVE_POOL), &seams, seed, d->gate_stream, err);
    if (!r) r = zcx_canary_write(driver, base + e->offset, zcx_canary_bytes(ZCX_PROVE_POOL), &seams, seed + 1, d->gate_stream, err);
    int undone = zcx_pool_unmap(d->pool, e->buffer_id, d->gate_stream, NULL, r ? NULL : err);
    return r ? r : undone;
}

static int prove_pool(struct device *d, const struct zcx_prove *m, const struct zcx_driver *driver, struct zcx_err *err) {
    struct zcx_export e = {.buffer_id = m->buffer.key, .alloc_bytes = m->buffer.alloc_bytes, .offset = m->buffer.offset, .window = m->buffer.window};
    memcpy(e.blob, m->buffer.blob, sizeof e.blob);
    int r = prove_counting(d, &e, m->seed, driver, err);
    return r ? r : prove_again(d, &e, m->seed, driver, err);
}

static const struct zcx_seams whole; /* a slab is mapped as one */

/* A slab: the parent's marks must be there; where it may be written, ours are, late. */
static int prove_slab(struct zcx_worker *w, struct device *d, const struct zcx_prove *m, const struct zcx_driver *driver, struct zcx_err *err) {
    struct zcx_import *i;
    uint64_t nbytes = zcx_canary_bytes(m->step);
    int r = zcx_import_map(w, &m->buffer, &i, err);
    if (r) return r;
    zcu_ptr at = (zcu_ptr)(uintptr_t)i->address;
    r = zcx_canary_check(driver, at, nbytes, &whole, m->seed, d->gate_stream, err);
    if (!r && m->step == ZCX_PROVE_VMM) r = zcx_canary_write(driver, at, nbytes, &whole, m->seed + 1, d->gate_stream, err);
    int undone = zcx_device_settle(driver, d, r ? NULL : err);
    if (undone) return r ? r : undone; /* it stays mapped: the context is lost */
    undone = zcx_import_unmap(w, i, r ? NULL : err);
    pthread_mutex_lock(&w->lock);
    zcx_import_forget(i);
    pthread_mutex_unlock(&w->lock);
    return r ? r : undone;
}

/* The parent's marks come through pinned host memory, and ours go back the same way, late. */
static int prove_window(struct zcx_worker *w, struct device *d, const struct zcx_prove *m, const struct zcx_driver *driver, struct zcx_err *err) {
    uint64_t nbytes = zcx_canary_bytes(m->step);
    unsigned char *window;
    zcu_ptr own;
    int r = zcx_worker_window(w, d->ordinal, m->buffer.key, m->buffer.offset, &window, err);
    if (!r) r = zcx_cu(err, "cuMemAllocAsync", driver->MemAllocAsync(&own, nbytes, d->gate_stream));
    if (r) return r;
    r = zcx_cu(err, "cuMemcpyHtoDAsync", driver->MemcpyHtoDAsync(own, window, nbytes, d->gate_stream));
    if (!r) r = zcx_canary_check(driver, own, nbytes, &whole, m->seed, d->gate_stream, err);
    if (!r) r = zcx_canary_write(driver, own, nbytes, &whole, m->seed + 1, d->gate_stream, err);
    if (!r) r = zcx_cu(err, "cuMemcpyDtoHAsync", driver->MemcpyDtoHAsync(window, own, nbytes, d->gate_stream));
    int undone = zcx_cu(r ? NULL : err, "cuMemFreeAsync", driver->MemFreeAsync(own, d->gate_stream));
    return r ? r : undone;
}

/* Does the buffer fit the step? */
static int fits(const struct zcx_prove *m) {
    const struct zcx_buffer *b = &m->buffer;
    if (m->step < 1 || m->step > ZCX_PROVE_STEPS || b->nbytes != zcx_canary_bytes(m->step)) return 0;
    if (m->step == ZCX_PROVE_WINDOW) return b->rung == ZCX_RUNG_HOST;
    if (m->step >= ZCX_PROVE_VMM) return b->rung == ZCX_RUNG_VMM && (m->step == ZCX_PROVE_VMM) == (b->flags == ZCX_BUFFER_RESULT);
    return b->rung == ZCX_RUNG_POOL && (m->step == ZCX_PROVE_WINDOWS) == (b->window != 0);
}

int zcx_worker_take_proof(struct zcx_worker *w, struct zcx_err *err) {
    struct zcx_prove m;
    struct zcx_err why = {0};
    struct zcx_scope scope;
    unsigned char body[ZCX_STRING_MAX + 64];
    char reason[320] = "";
    int r = zcx_prove_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r) return r;
    if (!fits(&m)) return zcx_fail(err, ZCX_E_PROTOCOL, "a check of unknown kind %u", m.step);
    if (m.buffer.pool >= ZCX_MAX_DEVICES || !w->devices[m.buffer.pool].open || (m.buffer.rung == ZCX_RUNG_POOL && !w->devices[m.buffer.pool].pool) ||
        m.gate.pool != m.buffer.pool || m.gate.ready_slot >= ZCX_GATE_SLOTS || m.gate.done_slot >= ZCX_GATE_SLOTS)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a check on device %u, which was not accepted", m.buffer.pool);
    struct device *d = &w->devices[m.buffer.pool];
    r = zcx_scope_open(&scope, d->ordinal, err);
    if (r) return r;
    int seen = zcx_gate_await(w->gate, d->ordinal, m.gate.ready_slot, m.gate.ready, d->gate_stream, &why);
    if (!seen) seen = m.step == ZCX_PROVE_WINDOW ? prove_window(w, d, &m, scope.d, &why)
                         : m.step >= ZCX_PROVE_VMM ? prove_slab(w, d, &m, scope.d, &why) : prove_pool(d, &m, scope.d, &why);
    if (seen) snprintf(reason, sizeof reason, "%s%s%s%s%s", why.call ? why.call : "", why.call ? ": " : "",
                       why.cuda ? zcx_driver_error_name(why.cuda) : "", why.cuda ? ", " : "", why.text);
    r = zcx_device_join(scope.d, d, err); /* windows of an import that failed half way are given up on another stream */
    if (!r) r = zcx_gate_post(w->gate, d->ordinal, m.gate.done_slot, m.gate.done, d->gate_stream, err);
    if (r) goto close_scope;
    struct zcx_proved proved = {.pool = m.buffer.pool, .failed = seen != 0, .step = m.step, .reason = zcx_text_of(reason)};
    long n = zcx_proved_encode(&proved, body, sizeof body, err);
    r = n < 0 ? (int)n : zcx_worker_tell(w, (struct zcx_header){.type = ZCX_PROVED}, body, (size_t)n, NULL, 0, err);
    /* A check that faulted is this worker's end, at once: nobody would look at this stream again, and DONE would never come. */
    if (!r) r = zcx_cu(err, "cuStreamSynchronize", scope.d->StreamSynchronize(d->gate_stream));
close_scope:
    zcx_scope_close(&scope);
    return r;
}
