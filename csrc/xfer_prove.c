/* xfer_prove.c: the parent's half of the start-up checks (canary.h). See xfer_parent.h.
 *
 * Does not: choose what is checked, or wait (canary.py and xfer_parent.c do). */
#include "xfer_parent.h"

#include <stdio.h>
#include <string.h>

static const struct zcx_seams whole; /* here the memory is one allocation */

/* The check has a stream of its own, so that nothing of the host's is waited for. */
static int write_marks(struct zcx_parent *p, uint32_t step, struct zcx_err *err) {
    struct proof *f = &p->proof;
    struct zcx_pool *pool = p->pools[f->gate.pool].pool;
    struct zcx_scope scope;
    int r = zcx_scope_open(&scope, f->gate.ordinal, err);
    if (r) return r;
    r = zcx_cu(err, "cuStreamCreate", scope.d->StreamCreate(&f->gate.stream, ZCU_STREAM_NON_BLOCKING));
    if (!r) r = zcx_pool_alloc(pool, ZCX_CANARY_BYTES, f->gate.stream, &f->memory, err);
    if (!r && step == ZCX_PROVE_POOL) r = zcx_canary_identity(scope.d, zcx_pool_handle(pool), f->memory, f->gate.stream, err);
    if (!r) r = zcx_canary_write(scope.d, f->memory, &whole, f->seed, f->gate.stream, err);
    if (!r) r = zcx_call_gate_ready(p, &f->gate, err);
    zcx_scope_close(&scope);
    return r;
}

/* Only after DONE: the worker's marks, made from the seed's successor, must all be there. */
static int read_marks(struct zcx_parent *p, struct zcx_err *err) {
    struct zcx_scope scope;
    int r = zcx_scope_open(&scope, p->proof.gate.ordinal, err);
    if (r) return r;
    r = zcx_canary_check(scope.d, p->proof.memory, &whole, p->proof.seed + 1, p->proof.gate.stream, err);
    zcx_scope_close(&scope);
    return r;
}

/* Memory that the worker may still write to is only given back when its DONE was seen and can be believed, or when it is gone;
 * and on the stream that wrote our own marks, which may not all be written yet when a worker dies early. */
void zcx_proof_end(struct zcx_parent *p) {
    struct proof *f = &p->proof;
    struct zcx_scope scope;
    zcx_call_gate_drop(p, &f->gate);
    if (f->gate.stream && zcx_scope_open(&scope, f->gate.ordinal, NULL) == 0) {
        if (f->memory) zcx_pool_free(p->pools[f->gate.pool].pool, f->memory, f->gate.stream, NULL);
        scope.d->StreamDestroy(f->gate.stream); /* what is queued on it goes on */
        zcx_scope_close(&scope);
    }
    memset(f, 0, sizeof *f);
}

int zcx_parent_prove(struct zcx_parent *p, unsigned pool, uint32_t step, struct zcx_err *err) {
    REQUIRE(p, p->state >= ZCX_IDLE && p->state <= ZCX_CALLING && !p->proof.step, "a check", err);
    if (pool >= p->npools || p->pools[pool].accepted != 1) return zcx_fail(err, ZCX_E_RANGE, "pool %u was not accepted by the worker", pool);
    struct proof *f = &p->proof;
    struct zcx_export e;
    unsigned char body[16 + ZCX_GATE_REF_BYTES + ZCX_BUFFER_BYTES];
    int r = zcx_call_gate_new(p, pool, NULL, &f->gate, err);
    if (r) return r;
    f->seed = (uint64_t)zcx_now();
    r = write_marks(p, step, err);
    if (!r) r = zcx_pool_export(p->pools[pool].pool, f->memory, ZCX_CANARY_BYTES, step == ZCX_PROVE_WINDOWS ? ZCX_WINDOWS_PROVE : ZCX_WINDOWS_NO, &e, err);
    if (r) goto undo;
    struct zcx_prove m = {.step = step, .seed = f->seed, .gate = zcx_call_gate_ref(&f->gate),
                          .buffer = {.id = p->next_id++, .rung = ZCX_RUNG_POOL, .flags = ZCX_BUFFER_RESULT, .pool = (uint16_t)pool,
                                     .window = e.window, .nbytes = ZCX_CANARY_BYTES, .offset = e.offset, .alloc_bytes = e.alloc_bytes,
                                     .key = e.buffer_id}};
    memcpy(m.buffer.blob, e.blob, sizeof m.buffer.blob);
    long n = zcx_prove_encode(&m, body, sizeof body, err);
    r = n < 0 ? (int)n : zcx_parent_tell(p, ZCX_PROVE, 0, body, (size_t)n, -1, err);
    if (r) goto undo;
    f->step = step;
    return 0;
undo:
    zcx_gate_post_cpu(p->gate, f->gate.done_slot, f->gate.done); /* nobody was told to post it */
    zcx_proof_end(p);
    return r;
}

int zcx_proof_seen(struct zcx_parent *p, struct zcx_event *ev, struct zcx_err *err) {
    struct proof *f = &p->proof;
    struct zcx_err why = {0};
    int r = zcx_gate_reached(p->gate, f->gate.ordinal, f->gate.done_slot, f->gate.done, err);
    if (r != 1) return r < 0 ? r : 1;
    if (!f->failed) {
        r = read_marks(p, &why);
        f->failed = r != 0;
        if (r) snprintf(f->reason, sizeof f->reason, "what the worker wrote did not arrive: %.180s", why.cuda ? zcx_driver_error_name(why.cuda) : why.text);
    }
    if (f->failed) { /* DONE came too early, or an un-import failed: the worker may reach that memory yet */
        p->pools[f->gate.pool].doubted[f->step - 1] = f->memory;
        f->memory = 0;
    }
    if (f->step == ZCX_PROVE_WINDOWS) p->pools[f->gate.pool].windows = f->failed ? ZCX_WINDOWS_NO : ZCX_WINDOWS_YES;
    ev->kind = ZCX_EV_PROVED;
    ev->pool = f->gate.pool;
    ev->refused = f->failed;
    memcpy(p->proof_reason, f->reason, sizeof p->proof_reason);
    ev->text = zcx_text_of(p->proof_reason);
    zcx_proof_end(p);
    return 0;
}
