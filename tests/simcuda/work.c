/* work.c: what the streams hold, in the session file, so that the work of a process outlives it: it goes on while a child that it
 * forked has the driver's descriptors, and lands in memory that others may have by then.
 *
 * Each stream has a ring there, filled at submission and emptied at execution. Whoever has a file of the memory open does what
 * is left of a reaped process's, one operation of each stream at a time. Simplified: streams do not wait for each other any
 * more, events stay as they are, what reads the dead process's own memory finds SIM_LOST there, an operation over memory in
 * several pieces does the first of them, and what does not fit into the ring is lost. */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "session.h"

/* Nothing that others can see: id 0. */
static struct shared_bytes shared_at(zcu_ptr p, uint64_t n, bool host) {
    struct pool *pool = host ? NULL : sim_pool_of(p);
    const struct mapping *m = host || pool ? NULL : sim_vmm_mapping(p);
    struct shared_bytes b = {.n = n};
    if (pool && pool->fd >= 0 && sim_pool_backed(pool, p - (zcu_ptr)pool->base, n)) {
        b.id = pool->id;
        b.where = p - (zcu_ptr)pool->base;
        b.place = sim_pool_place(pool, b.where, &b.n);
    } else if (m) {
        b.id = m->block->id;
        b.where = p - m->base;
        b.place = SIM_BLOCK_HEAD + b.where;
        if (b.n > m->size - b.where) b.n = m->size - b.where;
    }
    return b;
}

static void describe(struct work *w, const struct op *op) {
    const struct hostreg *h;
    memset(w, 0, sizeof *w);
    w->number = op->number;
    w->value = op->value;
    w->byte = op->byte;
    switch (op->kind) {
    case OP_SET:
    case OP_COPY:
        w->dst = shared_at(op->dst, op->n, op->dst_host);
        if (op->kind == OP_COPY) w->src = shared_at(op->src, op->n, op->src_host);
        if (w->dst.id) w->kind = op->kind == OP_SET ? WORK_SET : WORK_COPY;
        break;
    case OP_WAIT_VALUE:
    case OP_WRITE_VALUE:
        h = sim_registered((void *)op->dst, 8);
        if (!h || !h->ino) break;
        w->kind = op->kind == OP_WAIT_VALUE ? WORK_WAIT_VALUE : WORK_WRITE_VALUE;
        w->dev = h->dev;
        w->ino = h->ino;
        w->offset = h->offset + (op->dst - (zcu_ptr)h->base);
        break;
    case OP_SPIN: w->kind = WORK_SPIN; break;
    default: break;
    }
}

void work_queued(const struct stream *s, const struct op *op) {
    if (s->slot < 0 || !sim_session_shared()) return;
    sim_session_lock();
    struct stream_work *q = &session->work[s->slot];
    uint32_t *held = &session->held[s->slot];
    if (*held < SESSION_WORK) {
        describe(&q->ring[(q->first + *held) % SESSION_WORK], op);
        ++*held;
        hb_join(&q->clock, &op->clock);
    }
    sim_session_unlock();
}

static void drop_first(int slot) {
    struct stream_work *q = &session->work[slot];
    q->first = --session->held[slot] ? (q->first + 1) % SESSION_WORK : 0;
}

void work_executed(const struct stream *s, uint64_t number) {
    if (s->slot < 0 || !sim_session_shared()) return;
    sim_session_lock();
    struct stream_work *q = &session->work[s->slot];
    while (session->held[s->slot] && q->ring[q->first].number <= number) drop_first(s->slot);
    hb_join(&q->clock, &s->clock); /* with what a wait brought */
    sim_session_unlock();
}

/* ---- the dead ---- */

static int file_of(uint64_t id) {
    for (const struct pool *p = sim.pools; p; p = p->next)
        if (p->fd >= 0 && p->id == id) return p->fd;
    for (const struct block *b = sim.blocks; b; b = b->next)
        if (b->id == id) return b->fd;
    return -1;
}

static uint64_t *counter_here(const struct work *w) {
    for (const struct hostreg *h = sim.hostregs; h; h = h->next)
        if (h->ino && h->dev == w->dev && h->ino == w->ino && w->offset >= h->offset && w->offset + 8 <= h->offset + h->size)
            return (uint64_t *)(h->base + (w->offset - h->offset));
    return NULL;
}

/* Can this process do it, and now? */
static bool can_do(struct work *w) {
    const uint64_t *counter = counter_here(w);
    switch (w->kind) {
    case WORK_SET:
    case WORK_COPY: return file_of(w->dst.id) >= 0;
    case WORK_WAIT_VALUE: return counter && sim_waited_for(__atomic_load_n(counter, __ATOMIC_ACQUIRE), w->value, w->byte);
    case WORK_WRITE_VALUE: return counter;
    case WORK_SPIN:
        if (!w->until) w->until = sim_now() + (int64_t)w->value * 1000;
        return sim_now() >= w->until;
    default: return true;
    }
}

static void land(const struct work *w) {
    unsigned char bytes[1 << 16];
    int to = file_of(w->dst.id), from = w->kind == WORK_COPY ? file_of(w->src.id) : -1;
    for (uint64_t at = 0; at < w->dst.n; at += sizeof bytes) {
        size_t n = w->dst.n - at < sizeof bytes ? (size_t)(w->dst.n - at) : sizeof bytes;
        memset(bytes, w->kind == WORK_SET ? w->byte : SIM_LOST, n);
        bool whole = from < 0 || at + n > w->src.n || pread(from, bytes, n, (off_t)(w->src.place + at)) == (ssize_t)n;
        if (!whole || pwrite(to, bytes, n, (off_t)(w->dst.place + at)) != (ssize_t)n) return;
    }
}

static void perform(struct stream *s, const struct work *w) {
    uint64_t *counter = counter_here(w);
    switch (w->kind) {
    case WORK_SET:
    case WORK_COPY:
        if (w->src.id) hb_landed(s, w->src.id, w->src.where, w->src.n, false);
        hb_landed(s, w->dst.id, w->dst.where, w->dst.n, true);
        land(w);
        break;
    case WORK_WAIT_VALUE: hb_awaited(s, (zcu_ptr)counter, __atomic_load_n(counter, __ATOMIC_ACQUIRE)); break;
    case WORK_WRITE_VALUE:
        hb_posted(s, (zcu_ptr)counter, w->value);
        __atomic_store_n(counter, w->value, __ATOMIC_RELEASE);
        break;
    default: break;
    }
}

/* Dead and reaped. Asked in this way it opens nothing: tests count descriptors while this thread runs. */
static bool reaped(struct process_id p) { return p.pid != sim_self().pid && kill(p.pid, 0) && errno == ESRCH; }

/* The next of a stream, if its process is dead and this one can do it. It is this one's to do then. */
static bool take(int slot, struct stream *as, struct work *out) {
    struct stream_work *q = &session->work[slot];
    bool taken = false;
    sim_session_lock();
    struct process_id owner = session->clocks[slot].owner;
    bool over = session->held[slot] && reaped(owner);
    if (over && sim_gone(owner)) session->held[slot] = 0; /* what nothing keeps going */
    if (over && session->held[slot] && can_do(&q->ring[q->first])) {
        *out = q->ring[q->first];
        drop_first(slot);
        as->slot = slot;
        as->clock = q->clock;
        as->clock.at[slot] = ++session->clocks[slot].tick;
        q->clock = as->clock;
        taken = true;
    }
    sim_session_unlock();
    return taken;
}

void work_of_the_dead(void) {
    static struct stream as; /* for the clock; under sim.lock */
    static struct work w;
    for (int slot = 0; slot < SIM_SLOTS; slot++) {
        if (!__atomic_load_n(&session->held[slot], __ATOMIC_RELAXED) || !take(slot, &as, &w)) continue;
        perform(&as, &w);
        sim_session_lock();
        hb_join(&session->work[slot].clock, &as.clock);
        sim_session_unlock();
    }
}
