/* ring.c: see ring.h.
 *
 * Who may touch slot s = k % depth, and what says so:
 *
 *     sender    copies piece k in     once EMPTIED of piece k - depth is posted; then posts FILLED of piece k behind the copy
 *     receiver  copies piece k out    once FILLED of piece k is posted;          then posts EMPTIED of piece k behind the copy
 *
 * Each counter is posted by one side only, on one stream, in growing order: so it only grows, whatever is still outstanding.
 *
 * A transfer that is cut short. A post from the CPU breaks that order: a smaller value that a stream has yet to post would come
 * after it and lower the counter again, under a stream of the worker that waits for the large one. So:
 *   - While the worker lives and may wait (zcx_ring_give_up), the CPU posts the last value only when all that was queued on our
 *     own stream is complete. That includes a copy whose post then failed: the other side would be let into a slot under it. Our
 *     stream waits for no worker, so it gets there; an event of our own says when, which no worker can forge. If the driver cannot
 *     even say that, its streams are most likely dead: the post is made at once, and again at each step, so that a late
 *     smaller one does not stay.
 *   - When the other side is through (zcx_ring_end_transfer), nobody waits for our counter: what the CPU stores there only makes
 *     the slot free, and the gate gives no slot out before the last post of our streams was seen (gate.c). The other counter was
 *     posted by the worker's stream: all its posts come before DONE, and a worker that is gone posts nothing; so the CPU's value
 *     stays the largest. (A false DONE lets the worker lower a counter later that is another call's by then: of its own session.)
 * The worker posts nothing it owes: if it could not queue it all, it says so or ends, and the parent makes up for it. (By storing
 * over the worker's last post, which the worker then may never see: a gate of its that is not idle stays mapped until it ends.) */
#include "ring.h"

#include <inttypes.h>
#include <string.h>

uint64_t zcx_ring_pieces(uint64_t nbytes) { return nbytes / ZCX_RING_SLOT_BYTES + (nbytes % ZCX_RING_SLOT_BYTES != 0); }

/* Where in the list of parts the next piece begins. */
struct cursor {
    uint32_t part;
    uint64_t offset;
};

static int check_parts(const struct zcx_ring_end *e, uint64_t nbytes, struct zcx_err *err) {
    uint64_t left = nbytes;

    for (uint32_t i = 0; i < e->nparts; i++) {
        if (e->parts[i].bytes > left) return zcx_fail(err, ZCX_E_RANGE, "the parts are more than %" PRIu64 " bytes", nbytes);
        left -= e->parts[i].bytes;
    }
    if (left) return zcx_fail(err, ZCX_E_RANGE, "the parts are %" PRIu64 " bytes less than %" PRIu64, left, nbytes);
    return 0;
}

/* `n` bytes between a tensor and the window, `at` bytes into it. */
static int copy(const struct zcx_driver *d, const struct zcx_ring_end *e, zcu_ptr tensor, uint64_t at, uint64_t n, int sending,
                struct zcx_err *err) {
    if (e->window_is_host)
        return sending ? zcx_cu(err, "cuMemcpyDtoHAsync", d->MemcpyDtoHAsync(e->host_window + at, tensor, n, e->stream))
                       : zcx_cu(err, "cuMemcpyHtoDAsync", d->MemcpyHtoDAsync(tensor, e->host_window + at, n, e->stream));
    return zcx_cu(err, "cuMemcpyDtoDAsync",
                  sending ? d->MemcpyDtoDAsync(e->device_window + at, tensor, n, e->stream)
                          : d->MemcpyDtoDAsync(tensor, e->device_window + at, n, e->stream));
}

/* Piece k, which begins at the cursor. check_parts held, so the parts reach as far as the plan. */
static int copy_piece(const struct zcx_driver *d, const struct zcx_ring_end *e, const struct zcx_ring_plan *plan, uint64_t k,
                      struct cursor *c, int sending, struct zcx_err *err) {
    uint64_t at = k % ZCX_RING_DEPTH * ZCX_RING_SLOT_BYTES, left = plan->nbytes - k * ZCX_RING_SLOT_BYTES;

    if (left > ZCX_RING_SLOT_BYTES) left = ZCX_RING_SLOT_BYTES;
    while (left) {
        const struct zcx_ring_part *part = &e->parts[c->part];
        uint64_t n = part->bytes - c->offset;
        if (n > left) n = left;
        if (n && part->address) {
            int rc = copy(d, e, part->address + c->offset, at, n, sending, err);
            if (rc) return rc;
        }
        at += n;
        left -= n;
        c->offset += n;
        if (c->offset == part->bytes) *c = (struct cursor){c->part + 1, 0};
    }
    return 0;
}

static uint64_t filled(const struct zcx_ring_plan *plan, uint64_t k) { return plan->filled + k * ZCX_GATE_STEP; }
static uint64_t emptied(const struct zcx_ring_plan *plan, uint64_t k) { return plan->emptied + k * ZCX_GATE_STEP; }

/* The copy of piece k, and its post behind it. */
static int queue_piece(const struct zcx_driver *d, const struct zcx_ring_end *e, const struct zcx_ring_plan *plan, uint64_t k,
                       struct cursor *c, int sending, struct zcx_err *err) {
    int rc = copy_piece(d, e, plan, k, c, sending, err);

    if (rc) return rc;
    return sending ? zcx_gate_post(e->gate, e->ordinal, plan->filled_slot, filled(plan, k), e->stream, err)
                   : zcx_gate_post(e->gate, e->ordinal, plan->emptied_slot, emptied(plan, k), e->stream, err);
}

/* ---- the worker's end ---- */

static int await_piece(const struct zcx_ring_end *e, const struct zcx_ring_plan *plan, uint64_t k, int sending,
                       struct zcx_err *err) {
    if (!sending) return zcx_gate_await(e->gate, e->ordinal, plan->filled_slot, filled(plan, k), e->stream, err);
    if (k < ZCX_RING_DEPTH) return 0;
    return zcx_gate_await(e->gate, e->ordinal, plan->emptied_slot, emptied(plan, k - ZCX_RING_DEPTH), e->stream, err);
}

int zcx_ring_queue(const struct zcx_ring_end *e, const struct zcx_ring_plan *plan, int sending, struct zcx_err *err) {
    uint64_t pieces = zcx_ring_pieces(plan->nbytes);
    struct cursor c = {0};
    struct zcx_scope s;
    int rc;

    if (!pieces || pieces > ZCX_GATE_POSTS || plan->filled_slot == plan->emptied_slot)
        return zcx_fail(err, ZCX_E_PROTOCOL, "no ring has %" PRIu64 " pieces and slots %u and %u", pieces, plan->filled_slot,
                        plan->emptied_slot);
    rc = check_parts(e, plan->nbytes, err);
    if (rc) return rc;
    rc = zcx_gate_register(e->gate, e->ordinal, err);
    if (rc) return rc;
    rc = zcx_scope_open(&s, e->ordinal, err);
    if (rc) return rc;
    for (uint64_t k = 0; k < pieces && !rc; k++) {
        rc = await_piece(e, plan, k, sending, err);
        if (!rc) rc = queue_piece(s.d, e, plan, k, &c, sending, err);
    }
    zcx_scope_close(&s);
    return rc;
}

/* ---- the parent's end ---- */

static int start(struct zcx_ring *r, uint64_t pieces, struct zcx_err *err) {
    struct zcx_ring_plan *plan = &r->plan;
    struct zcx_gate *g = r->end.gate;
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, r->end.ordinal, err);

    if (rc) return rc;
    rc = zcx_cu(err, "cuEventCreate", s.d->EventCreate(&r->last, ZCU_EVENT_DISABLE_TIMING));
    if (!rc && (rc = zcx_gate_take(g, &plan->filled_slot, &plan->emptied_slot))) s.d->EventDestroy(r->last);
    zcx_scope_close(&s);
    if (rc) return rc;
    plan->filled = zcx_gate_next_n(g, plan->filled_slot, pieces);
    plan->emptied = zcx_gate_next_n(g, plan->emptied_slot, pieces);
    return 0;
}

int zcx_ring_start(struct zcx_ring *r, const struct zcx_ring_end *end, uint64_t nbytes, int sending, struct zcx_err *err) {
    struct zcx_ring new = {.end = *end, .plan = {.nbytes = nbytes}, .sending = sending};
    uint64_t pieces = zcx_ring_pieces(nbytes);
    int rc;

    if (!pieces || pieces > ZCX_GATE_POSTS) return zcx_fail(err, ZCX_E_RANGE, "a ring of %" PRIu64 " bytes", nbytes);
    rc = check_parts(end, nbytes, err);
    if (rc) return rc;
    rc = zcx_gate_register(end->gate, end->ordinal, err);
    if (rc) return rc;
    if (zcx_gate_uses_events(end->gate))
        return zcx_fail(err, ZCX_E_UNFIT, "copies through a window need 64-bit stream memory operations, which this driver lacks");
    rc = start(&new, pieces, err);
    if (!rc) *r = new;
    return rc;
}

/* May piece k be queued? */
static int allowed(const struct zcx_ring *r, uint64_t k, struct zcx_err *err) {
    const struct zcx_ring_plan *plan = &r->plan;

    if (!r->sending) return zcx_gate_reached(r->end.gate, r->end.ordinal, plan->filled_slot, filled(plan, k), err);
    if (k < ZCX_RING_DEPTH) return 1;
    return zcx_gate_reached(r->end.gate, r->end.ordinal, plan->emptied_slot, emptied(plan, k - ZCX_RING_DEPTH), err);
}

/* Nothing more will be queued. At once, so that what others queue on the stream later on is not waited for; and once. */
static int record_last(const struct zcx_driver *d, struct zcx_ring *r, struct zcx_err *err) {
    int rc;

    if (r->recorded) return 0;
    rc = zcx_cu(err, "cuEventRecord", d->EventRecord(r->last, r->end.stream));
    r->recorded = !rc;
    return rc;
}

/* Is all that this side queued complete? 1 yes, 0 no, negative: the driver cannot tell. */
static int drained(const struct zcx_driver *d, struct zcx_ring *r, struct zcx_err *err) {
    zcu_result q;
    int rc;

    if (!r->touched) return 1;
    rc = record_last(d, r, err);
    if (rc) return rc;
    q = d->EventQuery(r->last);
    return q == ZCU_SUCCESS ? 1 : q == ZCU_ERROR_NOT_READY ? 0 : zcx_cu(err, "cuEventQuery", q);
}

static void post_last_own(struct zcx_ring *r, uint64_t last) {
    if (r->sending) zcx_gate_post_cpu(r->end.gate, r->plan.filled_slot, filled(&r->plan, last));
    else zcx_gate_post_cpu(r->end.gate, r->plan.emptied_slot, emptied(&r->plan, last));
}

static void post_last_theirs(struct zcx_ring *r, uint64_t last) {
    if (r->sending) zcx_gate_post_cpu(r->end.gate, r->plan.emptied_slot, emptied(&r->plan, last));
    else zcx_gate_post_cpu(r->end.gate, r->plan.filled_slot, filled(&r->plan, last));
}

/* Given up: post what is owed, when it may be. */
static int settle(struct zcx_ring *r) {
    struct zcx_scope s;

    if (zcx_scope_open(&s, r->end.ordinal, NULL) == 0) {
        int rc = drained(s.d, r, NULL);
        zcx_scope_close(&s);
        if (!rc) return 0;
    }
    post_last_own(r, zcx_ring_pieces(r->plan.nbytes) - 1);
    return 1;
}

void zcx_ring_give_up(struct zcx_ring *r) {
    if (r->queued == zcx_ring_pieces(r->plan.nbytes)) return; /* nothing is owed */
    r->given_up = 1;
    settle(r);
}

static int queue_allowed(const struct zcx_driver *d, struct zcx_ring *r, uint64_t pieces, struct zcx_err *err) {
    while (r->queued < pieces) {
        struct cursor c = {r->part, r->part_offset};
        int rc = allowed(r, r->queued, err);
        if (rc <= 0) return rc;
        r->touched = 1;
        rc = queue_piece(d, &r->end, &r->plan, r->queued, &c, r->sending, err);
        if (rc) return rc;
        r->part = c.part;
        r->part_offset = c.offset;
        r->queued++;
    }
    record_last(d, r, NULL); /* tried again by zcx_ring_end_transfer */
    return 1;
}

int zcx_ring_step(struct zcx_ring *r, struct zcx_err *err) {
    uint64_t pieces = zcx_ring_pieces(r->plan.nbytes);
    struct zcx_scope s;
    int rc;

    if (r->given_up) return settle(r);
    if (r->queued == pieces) return 1;
    rc = allowed(r, r->queued, err);
    if (!rc) return 0; /* the usual answer, without a call into the driver */
    if (rc > 0) rc = zcx_scope_open(&s, r->end.ordinal, err);
    if (!rc) {
        rc = queue_allowed(s.d, r, pieces, err);
        zcx_scope_close(&s);
    }
    if (rc < 0) zcx_ring_give_up(r);
    return rc;
}

int zcx_ring_end_transfer(struct zcx_ring *r, struct zcx_err *err) {
    uint64_t last = zcx_ring_pieces(r->plan.nbytes) - 1;
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, r->end.ordinal, err);

    if (rc) return rc;
    rc = drained(s.d, r, err);
    if (rc > 0) s.d->EventDestroy(r->last);
    zcx_scope_close(&s);
    if (rc <= 0) return rc < 0 ? rc : 1;
    post_last_own(r, last);
    post_last_theirs(r, last);
    zcx_gate_put(r->end.gate, r->plan.filled_slot);
    zcx_gate_put(r->end.gate, r->plan.emptied_slot);
    memset(r, 0, sizeof *r);
    return 0;
}

/* ---- the host window ---- */

int zcx_ring_pin(struct zcx_ring_pin *pin, int ordinal, void *address, uint64_t bytes, struct zcx_err *err) {
    struct zcx_scope s;
    int rc;

    if (pin->address) return 0;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    rc = zcx_cu(err, "cuMemHostRegister", s.d->MemHostRegister(address, bytes, ZCU_MEMHOSTREGISTER_PORTABLE));
    zcx_scope_close(&s);
    if (!rc) *pin = (struct zcx_ring_pin){address, ordinal};
    return rc;
}

int zcx_ring_unpin(struct zcx_ring_pin *pin, struct zcx_err *err) {
    struct zcx_scope s;
    int rc;

    if (!pin->address) return 0;
    rc = zcx_scope_open(&s, pin->ordinal, err);
    if (rc) return rc;
    rc = zcx_cu(err, "cuMemHostUnregister", s.d->MemHostUnregister(pin->address));
    zcx_scope_close(&s);
    if (!rc) *pin = (struct zcx_ring_pin){0};
    return rc;
}
