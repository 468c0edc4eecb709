/* xfer_ring.c: the parent's end of what crosses by copies through a window (ring.h). See xfer_parent.h.
 *
 * A ring belongs to its transfer. It is stepped by whoever steps the session, and ended when DONE was seen or the worker is gone; until
 * then, and until our own copies are complete, its transfer is not released.
 * Does not: choose what crosses so. */
#include "xfer_parent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* So much pinned memory for one session, 64 MiB each. More results at once than that are refused this way. */
#define WINDOWS_MAX 4

int zcx_window_take(struct zcx_parent *p, int ordinal, struct window **out, struct zcx_err *err) {
    struct window *w;
    unsigned n = 0;
    for (w = p->windows; w && w->busy; w = w->next) n++;
    if (!w) {
        if (n == WINDOWS_MAX) return zcx_fail(err, ZCX_E_LIMIT, "%d windows of pinned memory are in use already", WINDOWS_MAX);
        w = calloc(1, sizeof *w);
        if (!w) return zcx_fail(err, ENOMEM, "no memory for a window");
        int r = zcx_range_new(&w->range, p->results, ZCX_RING_BYTES, err);
        if (r) {
            free(w);
            return r;
        }
        w->next = p->windows;
        p->windows = w;
    }
    int r = zcx_ring_pin(&w->pin, ordinal, zcx_range_address(w->range), ZCX_RING_BYTES, err);
    if (r) return r;
    w->busy = 1;
    *out = w;
    return 0;
}

void zcx_windows_free(struct zcx_parent *p) {
    for (struct window **at = &p->windows, *w; (w = *at);) {
        if (w->busy || zcx_ring_unpin(&w->pin, NULL)) { /* CUDA still knows it: it stays for the life of the process */
            at = &w->next;
            continue;
        }
        *at = w->next;
        zcx_range_unref(w->range);
        free(w);
    }
}

void zcx_ring_dispose(struct ring *r) {
    if (r->ended) {
        if (r->window) r->window->busy = 0;
        if (r->block) zcx_block_put(r->block);
    }
    free(r->parts);
    free(r);
}

/* The ring itself and its buffer. Nothing is told to the worker, but of a slab. The window is the caller's until it succeeds. */
static int ring_new(struct zcx_parent *p, unsigned device, const struct zcx_ring_part *parts, uint32_t nparts, uint64_t nbytes, int sending,
                    struct zcx_block *block, zcu_stream stream, struct transfer *t, struct zcx_err *err) {
    struct zcx_ring_end end = {.gate = p->gate, .ordinal = p->devices[device].ordinal, .stream = stream, .window_is_host = !block, .nparts = nparts};
    struct zcx_ring_ref ref = {.carrier = block ? ZCX_CARRIER_SLAB : ZCX_CARRIER_SEGMENT};
    struct ring *r = calloc(1, sizeof *r);
    int rc;
    t->wire = (struct zcx_buffer){.rung = ZCX_RUNG_STAGED, .flags = sending ? 0 : ZCX_BUFFER_RESULT, .pool = (uint16_t)device, .nbytes = nbytes};
    if (!r) return zcx_fail(err, ENOMEM, "no memory for a ring");
    r->parts = malloc(nparts * sizeof *parts);
    if (!r->parts) {
        rc = zcx_fail(err, ENOMEM, "no memory for a ring");
        goto free_ring;
    }
    memcpy(r->parts, parts, nparts * sizeof *parts);
    end.parts = r->parts;
    if (block) {
        rc = zcx_parent_send_slab(p, device, zcx_block_address(block), ZCX_RING_BYTES, !sending, &t->slab, &t->wire.offset, err);
        if (rc) goto free_ring;
        end.device_window = zcx_block_address(block);
        t->wire.key = t->slab->id;
    } else {
        rc = zcx_window_take(p, end.ordinal, &r->window, err);
        if (rc) goto free_ring;
        end.host_window = zcx_range_address(r->window->range);
        t->wire.offset = zcx_range_offset(r->window->range); /* in segment 0 */
    }
    rc = zcx_ring_start(&r->core, &end, nbytes, sending, err);
    if (rc == 1) rc = zcx_fail(err, ZCX_E_LIMIT, "every gate slot still waits for work that was queued on a stream before: wait for it, then call again");
    if (rc) goto undo;
    ref.filled_slot = r->core.plan.filled_slot;
    ref.emptied_slot = r->core.plan.emptied_slot;
    ref.filled = r->core.plan.filled;
    ref.emptied = r->core.plan.emptied;
    zcx_ring_ref_encode(&ref, t->wire.blob);
    r->block = block;
    t->ring = r;
    p->nrings++;
    p->ring_since = zcx_now();
    return 0;
undo:
    if (t->slab) t->slab->uses--;
    t->slab = NULL;
    if (r->window) r->window->busy = 0;
free_ring:
    free(r->parts);
    free(r);
    return rc;
}

int zcx_parent_lend_ring(struct zcx_parent *p, unsigned device, const struct zcx_ring_part *parts, uint32_t nparts, uint64_t nbytes,
                         struct zcx_block *window, zcu_stream stream, void *owner, uint64_t *id, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_PREPARING, "lending", err);
    if (device >= p->ndevices || p->devices[device].accepted != 1) return zcx_fail(err, ZCX_E_RANGE, "device %u was not accepted by the worker", device);
    if (!(p->features & ZCX_FEATURE_RING)) return zcx_fail(err, ZCX_E_UNFIT, "the worker's comfy-zerocopy is too old for copies through a window");
    struct transfer t = {.owner = owner};
    struct call_gate *g;
    unsigned known = p->ngates;
    int r = zcx_transfer_reserve(p, err);
    if (!r) r = zcx_call_gate_of(p, device, stream, &g, err);
    if (!r) r = ring_new(p, device, parts, nparts, nbytes, 1, window, stream, &t, err);
    if (r) {
        if (p->ngates > known) zcx_call_gate_withdraw(p, &p->gates[--p->ngates]);
        return r;
    }
    *id = zcx_transfer_add(p, t)->id;
    return 0;
}

int zcx_transfer_of_ring(struct zcx_parent *p, unsigned device, zcu_ptr ptr, uint64_t nbytes, zcu_stream stream, struct transfer *t,
                         struct call_gate **gate, struct zcx_err *err) {
    struct zcx_ring_part part = {ptr, nbytes};
    if (device >= p->ndevices || p->devices[device].accepted != 1) return zcx_fail(err, ZCX_E_RANGE, "device %u was not accepted by the worker", device);
    int r = zcx_transfer_reserve(p, err);
    if (!r) r = zcx_call_gate_of(p, device, stream, gate, err);
    if (!r) r = ring_new(p, device, &part, 1, nbytes, 0, NULL, stream, t, err);
    if (r) return r;
    t->ptr = ptr;
    return 0;
}

int zcx_rings_step(struct zcx_parent *p, struct zcx_err *err) {
    int waits = 0;
    for (size_t i = 0; i < p->ntransfers && p->nrings; i++) {
        struct ring *r = p->transfers[i].ring;
        if (!r || r->ended) continue;
        uint64_t before = r->core.queued;
        int rc = zcx_ring_step(&r->core, err);
        if (rc < 0) return rc;
        if (r->core.queued != before) p->ring_since = zcx_now();
        waits |= !rc;
    }
    return waits;
}

int zcx_rings_end(struct zcx_parent *p, struct zcx_err *err) {
    int waits = 0;
    for (size_t i = 0; i < p->ntransfers && p->nrings; i++) {
        struct ring *r = p->transfers[i].ring;
        if (!r || r->ended) continue;
        uint64_t pieces = zcx_ring_pieces(r->core.plan.nbytes);
        int complete = r->core.queued == pieces && !r->core.given_up;
        int rc = zcx_ring_end_transfer(&r->core, err);
        if (rc < 0) return rc;
        if (rc) {
            waits = 1;
            continue;
        }
        r->ended = 1;
        r->complete = complete;
        p->nrings--;
    }
    return waits;
}
