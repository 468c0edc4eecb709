/* xfer_prove.c: the parent's half of the start-up checks (canary.h). See xfer_parent.h.
 *
 * Does not: choose what is checked, or wait (canary.py and xfer_parent.c do). */
#include "xfer_parent.h"

#include <stdio.h>
#include <string.h>

static const struct zcx_seams whole; /* here the memory is one allocation */

/* The check has a stream of its own, so that nothing of the host's is waited for. */
static int write_marks(struct zcx_parent *p, uint32_t step, struct zcx_arena *arena, struct zcx_err *err) {
    struct proof *f = &p->proof;
    struct zcx_pool *pool = p->devices[f->gate.device].pool;
    uint64_t nbytes = zcx_canary_bytes(step);
    struct zcx_scope scope;
    int r = zcx_scope_open(&scope, f->gate.ordinal, err);
    if (r) return r;
    r = zcx_cu(err, "cuStreamCreate", scope.d->StreamCreate(&f->gate.stream, ZCU_STREAM_NON_BLOCKING));
    if (!r && step == ZCX_PROVE_WINDOW) {
        r = zcx_window_take(p, f->gate.ordinal, &f->window, err);
        if (!r) r = zcx_cu(err, "cuMemAllocAsync", scope.d->MemAllocAsync(&f->memory, nbytes, f->gate.stream));
    } else if (!r && arena) {
        r = zcx_arena_take(arena, nbytes, step == ZCX_PROVE_READ ? ZCX_ARENA_READ : ZCX_ARENA_WRITE, &f->block, err);
        if (!r) f->memory = zcx_block_address(f->block);
    } else if (!r) {
        r = zcx_pool_alloc(pool, nbytes, f->gate.stream, &f->memory, err);
    }
    if (!r && step == ZCX_PROVE_POOL) r = zcx_canary_identity(scope.d, zcx_pool_handle(pool), f->memory, f->gate.stream, err);
    if (!r) r = zcx_canary_write(scope.d, f->memory, nbytes, &whole, f->seed, f->gate.stream, err);
    if (!r && f->window)
        r = zcx_cu(err, "cuMemcpyDtoHAsync", scope.d->MemcpyDtoHAsync(zcx_range_address(f->window->range), f->memory, nbytes, f->gate.stream));
    if (!r) r = zcx_call_gate_ready(p, &f->gate, err);
    zcx_scope_close(&scope);
    return r;
}

/* Only after DONE: the worker's marks, made from the seed's successor, must all be there. */
static int read_marks(struct zcx_parent *p, struct zcx_err *err) {
    const struct proof *f = &p->proof;
    struct zcx_scope scope;
    if (f->window) return zcx_canary_check_host(zcx_range_address(f->window->range), zcx_canary_bytes(f->step), f->seed + 1, err);
    int r = zcx_scope_open(&scope, f->gate.ordinal, err);
    if (r) return r;
    r = zcx_canary_check(scope.d, f->memory, zcx_canary_bytes(f->step), &whole, f->seed + (f->step != ZCX_PROVE_READ), f->gate.stream, err);
    zcx_scope_close(&scope);
    return r;
}

/* Memory that the worker may still write to is only given back when its DONE was seen and can be believed, or when it is gone;
 * and on the stream that wrote our own marks, which may not all be written yet when a worker dies early. */
void zcx_proof_end(struct zcx_parent *p) {
    struct proof *f = &p->proof;
    struct zcx_scope scope;
    zcx_call_gate_drop(p, &f->gate);
    if (f->block) zcx_block_put(f->block);
    if (f->gate.stream && zcx_scope_open(&scope, f->gate.ordinal, NULL) == 0) {
        if (f->memory && f->window) scope.d->MemFreeAsync(f->memory, f->gate.stream); /* no worker knows it */
        else if (f->memory && !f->block) zcx_pool_free(p->devices[f->gate.device].pool, f->memory, f->gate.stream, NULL);
        scope.d->StreamDestroy(f->gate.stream); /* what is queued on it goes on */
        zcx_scope_close(&scope);
    }
    if (f->slab) f->slab->uses--;
    if (f->window && !f->failed) f->window->busy = 0; /* else the worker may write to it yet */
    memset(f, 0, sizeof *f);
    zcx_parent_trim_slabs(p, 0);
}

static int buffer_of(struct zcx_parent *p, uint32_t step, struct zcx_buffer *b, struct zcx_err *err) {
    struct proof *f = &p->proof;
    uint64_t nbytes = zcx_canary_bytes(step);
    *b = (struct zcx_buffer){.id = p->next_id++, .rung = ZCX_RUNG_POOL, .flags = step == ZCX_PROVE_READ ? 0 : ZCX_BUFFER_RESULT,
                             .pool = (uint16_t)f->gate.device, .nbytes = nbytes};
    if (f->window) {
        b->rung = ZCX_RUNG_HOST;
        b->offset = zcx_range_offset(f->window->range); /* in segment 0 */
        return 0;
    }
    if (f->block) {
        int r = zcx_parent_send_slab(p, f->gate.device, f->memory, nbytes, step == ZCX_PROVE_VMM, &f->slab, &b->offset, err);
        if (r) return r;
        b->rung = ZCX_RUNG_VMM;
        b->key = f->slab->id;
        b->alloc_bytes = zcx_slab_bytes(f->slab->memory);
        return 0;
    }
    struct zcx_export e;
    int r = zcx_pool_export(p->devices[f->gate.device].pool, f->memory, nbytes, step == ZCX_PROVE_WINDOWS ? ZCX_WINDOWS_PROVE : ZCX_WINDOWS_NO, &e, err);
    if (r) return r;
    b->window = e.window;
    b->offset = e.offset;
    b->alloc_bytes = e.alloc_bytes;
    b->key = e.buffer_id;
    memcpy(b->blob, e.blob, sizeof b->blob);
    return 0;
}

int zcx_parent_prove(struct zcx_parent *p, unsigned device, uint32_t step, struct zcx_arena *arena, struct zcx_err *err) {
    REQUIRE(p, p->state >= ZCX_IDLE && p->state <= ZCX_CALLING && !p->proof.step, "a check", err);
    if (device >= p->ndevices || p->devices[device].accepted != 1) return zcx_fail(err, ZCX_E_RANGE, "device %u was not accepted by the worker", device);
    if (step < 1 || step > ZCX_PROVE_STEPS || (step == ZCX_PROVE_VMM || step == ZCX_PROVE_READ) != (arena != NULL)) return zcx_fail(err, ZCX_E_RANGE, "there is no check %u like that", step);
    if (step <= ZCX_PROVE_WINDOWS && !p->devices[device].pooled) return zcx_fail(err, ZCX_E_RANGE, "the worker did not open the pool of this device");
    struct proof *f = &p->proof;
    unsigned char body[16 + ZCX_GATE_REF_BYTES + ZCX_BUFFER_BYTES];
    int r = zcx_call_gate_new(p, device, NULL, &f->gate, err);
    if (r) return r;
    f->seed = (uint64_t)zcx_now();
    r = write_marks(p, step, arena, err);
    struct zcx_prove m = {.step = step, .seed = f->seed, .gate = zcx_call_gate_ref(&f->gate)};
    if (!r) r = buffer_of(p, step, &m.buffer, err);
    if (r) goto undo;
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
    struct device *d = &p->devices[f->gate.device];
    struct zcx_err why = {0};
    int r = zcx_gate_reached(p->gate, f->gate.ordinal, f->gate.done_slot, f->gate.done, err);
    if (r != 1) return r < 0 ? r : 1;
    if (!f->failed) {
        r = read_marks(p, &why);
        f->failed = r != 0;
        if (r) snprintf(f->reason, sizeof f->reason, "what the worker wrote did not arrive: %.180s", why.cuda ? zcx_driver_error_name(why.cuda) : why.text);
    }
    if (f->failed) { /* DONE came too early, or an un-import failed: the worker may reach that memory yet */
        d->doubted[f->step - 1].window = f->window;
        if (!f->window) {
            d->doubted[f->step - 1].memory = f->memory;
            d->doubted[f->step - 1].block = f->block;
            f->memory = 0;
            f->block = NULL;
        }
    }
    if (f->step == ZCX_PROVE_WINDOWS) d->windows = f->failed ? ZCX_WINDOWS_NO : ZCX_WINDOWS_YES;
    ev->kind = ZCX_EV_PROVED;
    ev->device = f->gate.device;
    ev->refused = f->failed;
    memcpy(p->proof_reason, f->reason, sizeof p->proof_reason);
    ev->text = zcx_text_of(p->proof_reason);
    zcx_proof_end(p);
    return 0;
}
