/* hb.c: happens-before: is each access to a pool's memory ordered behind what it depends on, over all processes?
 *
 * Every stream has a clock: for each stream of the session the tick up to which its work is known to be done. Clocks travel
 * with events and with counters that streams post, and each allocation remembers who touched it when. An access that nothing
 * orders behind a conflicting one is a race, also where the bytes came out right.
 * The hosts are taken to be one, that knows all that any of them can know: what a synchronise or a query told, and every
 * counter as soon as it is posted (the product reads counters with plain loads that no driver sees). So order between CPUs
 * is never questioned, only work of a GPU that no CPU can know to be done. A process with SIMCUDA_BLIND=1 is the exception: its
 * host knows what it asked for itself, and what its own streams posted. Copies and memsets are seen; a test that stands in for
 * a kernel uses them. A dead process's accesses are over when no child of it has the driver's descriptors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session.h"

int hb_slot_take(void) {
    int found = -1;
    sim_session_lock();
    for (int i = 0; i < SIM_SLOTS && found < 0; i++)
        if (!session->clocks[i].taken) found = i;
    for (int i = 0; i < SIM_SLOTS && found < 0; i++)
        if (sim_gone(session->clocks[i].owner)) {
            found = i;
            session->clocks[i].floor = session->clocks[i].tick;
        }
    if (found >= 0) {
        session->clocks[found].taken = true;
        session->clocks[found].owner = sim_self();
        session->held[found] = 0;
        memset(&session->work[found], 0, offsetof(struct stream_work, ring));
    }
    sim_session_unlock();
    return found;
}

void hb_slot_put(int slot) {
    if (slot < 0) return;
    sim_session_lock();
    session->clocks[slot].taken = false; /* the ticks go on: what the stream did stays to be ordered */
    sim_session_unlock();
}

void hb_join(struct clock *into, const struct clock *from) {
    for (int i = 0; i < SIM_SLOTS; i++)
        if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
}

static struct clock own; /* what this process's host knows; guarded as the session is */

static bool blind(void) {
    static int known = -1;
    if (known < 0) known = getenv("SIMCUDA_BLIND") != NULL;
    return known;
}

void hb_host_sees(const struct clock *c) {
    sim_session_lock();
    hb_join(&session->host, c);
    hb_join(&own, c);
    sim_session_unlock();
}

void hb_submit(struct op *op) {
    sim_session_lock();
    op->clock = blind() ? own : session->host;
    sim_session_unlock();
}

void hb_begin(struct stream *s, struct op *op) {
    hb_join(&s->clock, &op->clock);
    for (const struct stream *t = sim.streams; t; t = t->next) /* the legacy stream's barriers */
        if (t->ctx == s->ctx && !op->unordered && ((s->legacy && !t->nonblocking) || (t->legacy && !s->nonblocking)))
            hb_join(&s->clock, &t->clock);
    if (s->slot < 0) return;
    sim_session_lock();
    s->clock.at[s->slot] = ++session->clocks[s->slot].tick;
    hb_join(&session->work[s->slot].clock, &s->clock);
    sim_session_unlock();
}

/* ---- counters ---- */

static struct shadow_counter *counter_of(zcu_ptr address, bool make) {
    const struct hostreg *h = sim_registered((void *)address, 8);
    struct shadow_counter key = {.dev = h->ino ? h->dev : (uint64_t)sim_self().pid, .ino = h->ino,
                                 .offset = h->ino ? h->offset + (address - (zcu_ptr)h->base) : address};
    for (uint32_t i = 0; i < session->counters_used; i++) {
        struct shadow_counter *c = &session->counters[i];
        if (c->dev == key.dev && c->ino == key.ino && c->offset == key.offset) return c;
    }
    if (!make) return NULL;
    /* A full table begins anew at its end: the last one's order is forgotten, a wait on it is taken for one on a CPU. */
    uint32_t at = session->counters_used < SESSION_COUNTERS ? session->counters_used++ : SESSION_COUNTERS - 1;
    session->counters[at] = key;
    return &session->counters[at];
}

void hb_posted(struct stream *s, zcu_ptr address, uint64_t value) {
    sim_session_lock();
    struct shadow_counter *c = counter_of(address, true);
    hb_join(&c->clock, &s->clock);
    hb_join(&session->host, &s->clock);
    hb_join(&own, &s->clock);
    c->value = value;
    sim_session_unlock();
}

void hb_awaited(struct stream *s, zcu_ptr address, uint64_t value) {
    sim_session_lock();
    struct shadow_counter *c = counter_of(address, false);
    if (c) hb_join(&s->clock, &c->clock);
    if (!c || c->value != value) hb_join(&s->clock, &session->host); /* a CPU stored it */
    sim_session_unlock();
}

/* ---- allocations ---- */

static const char *const kind_names[] = {"read", "write", "un-import", "unmapping", "allocation", "free"};

static void report(const struct shadow *w, enum access_kind kind, uint64_t offset, uint64_t n, const char *why,
                   const char *what) {
    session->races++;
    fprintf(stderr, "simcuda: RACE: %s of [%llu, +%llu) %s%s, in allocation [%llu, +%llu) of pool %llx\n", kind_names[kind],
            (unsigned long long)offset, (unsigned long long)n, why, what, (unsigned long long)w->offset,
            (unsigned long long)w->n, (unsigned long long)w->pool);
    if (getenv("SIMCUDA_ABORT_ON_RACE")) abort();
}

#define NOT_YET UINT32_MAX /* the tick of a making that is queued but not executed: nothing is ordered behind it */

static struct shadow *shadow_of(uint64_t pool, uint64_t id) {
    for (uint32_t i = 0; i < session->shadows_used; i++)
        if (session->shadows[i].pool == pool && session->shadows[i].id == id) return &session->shadows[i];
    return NULL;
}

/* The allocation there. While a free is queued and the memory is given out again there are two: the older one. Else the one
 * that is not free, else the one that was. */
static struct shadow *shadow_at(uint64_t pool, uint64_t offset) {
    struct shadow *best = NULL;
    for (uint32_t i = 0; i < session->shadows_used; i++) {
        struct shadow *w = &session->shadows[i];
        if (w->pool != pool || offset < w->offset || offset - w->offset >= w->n) continue;
        if (!best || best->freed > w->freed || (best->freed == w->freed && w->id < best->id)) best = w;
    }
    return best;
}

static bool ordered(const struct stream *s, const struct shadow_access *a) {
    if (a->tick <= s->clock.at[a->slot] || a->tick <= session->clocks[a->slot].floor) return true;
    return sim_gone(session->clocks[a->slot].owner);
}

static bool conflict(const struct shadow_access *a, const struct shadow_access *b) {
    if (a->offset >= b->offset + b->n || b->offset >= a->offset + a->n) return false;
    if (a->kind == ACCESS_UNIMPORT || b->kind == ACCESS_UNIMPORT) /* it touches no byte; but the free must come after it */
        return a->kind == ACCESS_FREE || b->kind == ACCESS_FREE;
    if (a->kind >= ACCESS_CREATE || b->kind >= ACCESS_CREATE) return true;
    return a->kind == ACCESS_WRITE || b->kind == ACCESS_WRITE;
}

static void remember(struct shadow *w, const struct shadow_access *b) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w->count; i++) { /* what the same stream did to the same bytes before adds nothing */
        struct shadow_access *a = &w->access[i];
        bool same = a->slot == b->slot && a->offset == b->offset && a->n == b->n;
        if (same && (a->kind == b->kind || b->kind == ACCESS_WRITE) && a->kind < ACCESS_CREATE) continue;
        w->access[kept++] = *a;
    }
    w->count = kept;
    for (uint32_t i = 0; w->count == SESSION_ACCESSES && i < w->count; i++) /* full: forget what the hosts know to be over */
        if (w->access[i].tick <= session->host.at[w->access[i].slot]) w->access[i] = w->access[--w->count];
    if (w->count == SESSION_ACCESSES) w->count--;
    w->access[w->count++] = *b;
}

static void touch(const struct stream *s, struct shadow *w, uint64_t offset, uint64_t n, enum access_kind kind) {
    struct shadow_access b = {offset, n, (uint32_t)s->slot, s->clock.at[s->slot], kind};
    for (uint32_t i = 0; i < w->count; i++) {
        const struct shadow_access *a = &w->access[i];
        bool freed = a->kind == ACCESS_FREE;
        if (!freed && (!conflict(a, &b) || ordered(s, a))) continue;
        report(w, kind, offset, n, freed ? "after its " : "that nothing orders behind another's ", kind_names[a->kind]);
        break;
    }
    remember(w, &b);
}

static void access_to(const struct stream *s, uint64_t pool, uint64_t where, uint64_t n, bool write) {
    sim_session_lock();
    struct shadow *w = shadow_at(pool, where);
    if (w) touch(s, w, where, n, write ? ACCESS_WRITE : ACCESS_READ);
    sim_session_unlock();
}

void hb_access(const struct stream *s, zcu_ptr p, uint64_t n, bool write) {
    const struct pool *pool = sim_pool_of(p);
    if (s->slot < 0) return;
    if (pool) access_to(s, pool->id, p - (zcu_ptr)pool->base, n, write);
    for (struct mapping *m; !pool && n && (m = sim_vmm_mapping(p));) { /* the physical bytes, wherever else they are mapped */
        uint64_t where = p - m->base, here = m->size - where < n ? m->size - where : n;
        access_to(s, m->block->id, where, here, write);
        p += here;
        n -= here;
    }
}

void hb_landed(const struct stream *s, uint64_t pool, uint64_t where, uint64_t n, bool write) {
    access_to(s, pool, where, n, write);
}

/* Drop what is known of the allocations in a range: of all, or of those that are free again. */
static void forget(uint64_t pool, uint64_t offset, uint64_t n, bool all) {
    for (uint32_t i = 0; i < session->shadows_used; i++) {
        struct shadow *w = &session->shadows[i];
        if (w->pool == pool && w->offset < offset + n && offset < w->offset + w->n && (all || w->freed)) w->pool = 0;
    }
    while (session->shadows_used && !session->shadows[session->shadows_used - 1].pool) session->shadows_used--;
}

static struct shadow *shadow_new(uint64_t pool, uint64_t offset, uint64_t n, uint64_t id) {
    struct shadow *w = NULL;
    for (uint32_t i = 0; i < session->shadows_used && !w; i++)
        if (!session->shadows[i].pool) w = &session->shadows[i];
    if (!w && session->shadows_used < SESSION_SHADOWS) w = &session->shadows[session->shadows_used++];
    if (!w) return NULL;
    memset(w, 0, sizeof *w);
    w->pool = pool;
    w->offset = offset;
    w->n = n;
    w->id = id;
    return w;
}

void hb_create(const struct stream *s, const struct op *op) {
    if (s->slot < 0) return;
    sim_session_lock();
    forget(op->pool->id, op->dst, op->n, false);
    struct shadow *w = shadow_new(op->pool->id, op->dst, op->n, op->value);
    if (w) w->access[w->count++] = (struct shadow_access){op->dst, op->n, (uint32_t)s->slot, NOT_YET, ACCESS_CREATE};
    sim_session_unlock();
}

void hb_created(const struct stream *s, const struct op *op) {
    sim_session_lock();
    struct shadow *w = shadow_of(op->pool->id, op->value);
    for (uint32_t i = 0; w && s->slot >= 0 && i < w->count; i++)
        if (w->access[i].tick == NOT_YET) w->access[i].tick = s->clock.at[s->slot];
    sim_session_unlock();
}

void hb_freed(const struct stream *s, const struct op *op) {
    if (s->slot < 0) return;
    sim_session_lock();
    struct shadow *w = shadow_of(op->pool->id, op->value);
    if (w) {
        touch(s, w, op->dst, op->n, ACCESS_FREE);
        w->freed = true;
        for (int i = 0; i < SESSION_SHADOW_IMPORTERS; i++)
            if (w->importers[i].count && !sim_gone(w->importers[i].process))
                report(w, ACCESS_FREE, op->dst, op->n, "while another process has it imported", "");
    }
    sim_session_unlock();
}

void hb_imported(const struct pool *p, uint64_t serial) {
    sim_session_lock();
    struct shadow *w = shadow_of(p->id, serial);
    for (int i = 0; w && i < SESSION_SHADOW_IMPORTERS; i++) {
        bool mine = w->importers[i].process.pid == sim_self().pid;
        if (!mine && w->importers[i].count && !sim_gone(w->importers[i].process)) continue;
        if (!mine) w->importers[i].count = 0;
        w->importers[i].process = sim_self();
        w->importers[i].count++;
        break;
    }
    sim_session_unlock();
}

void hb_unimported(const struct stream *s, const struct op *op) {
    sim_session_lock();
    struct shadow *w = shadow_of(op->pool->id, op->value);
    for (int i = 0; w && i < SESSION_SHADOW_IMPORTERS; i++)
        if (w->importers[i].process.pid == sim_self().pid && w->importers[i].count) w->importers[i].count--;
    if (w && s->slot >= 0) touch(s, w, op->dst, op->n, ACCESS_UNIMPORT);
    sim_session_unlock();
}

void hb_pool_gone(const struct pool *p) {
    sim_session_lock();
    forget(p->id, 0, p->chunks * SIM_CHUNK, true);
    sim_session_unlock();
}

void hb_forget(uint64_t pool) { forget(pool, 0, UINT64_MAX, true); }

/* ---- blocks ---- */

void hb_block_new(const struct block *b) {
    sim_session_lock();
    shadow_new(b->id, 0, b->size, 0);
    sim_session_unlock();
}

static bool overlaps(zcu_ptr a, uint64_t n, zcu_ptr b, uint64_t m) { return a < b + m && b < a + n; }

static bool queued(zcu_ptr p, uint64_t n) {
    for (const struct stream *s = sim.streams; s; s = s->next)
        for (const struct op *op = s->head; op; op = op->next) {
            if (op->kind != OP_COPY && op->kind != OP_SET) continue;
            if (!op->dst_host && overlaps(op->dst, op->n, p, n)) return true;
            if (op->kind == OP_COPY && !op->src_host && overlaps(op->src, op->n, p, n)) return true;
        }
    return false;
}

/* What a stream of this process did there, as far as no host knows that it is over. NULL: nothing. With a second mapping of
 * the same bytes here it cannot be told by which of them. */
static const struct shadow_access *unfinished(const struct shadow *w, const struct mapping *m) {
    for (uint32_t i = 0; w && m->block->maps == 1 && i < w->count; i++) {
        const struct shadow_access *a = &w->access[i];
        bool mine = session->clocks[a->slot].owner.pid == sim_self().pid;
        bool known = a->tick <= session->host.at[a->slot] || a->tick <= session->clocks[a->slot].floor;
        if (mine && !known && a->kind <= ACCESS_WRITE && a->offset < m->size) return a;
    }
    return NULL;
}

void hb_unmapping(zcu_ptr p, uint64_t n) {
    bool waiting = queued(p, n);
    sim_session_lock();
    for (const struct mapping *m = sim.mappings; m; m = m->next) {
        if (!overlaps(m->base, m->size, p, n)) continue;
        const struct shadow *w = shadow_of(m->block->id, 0);
        const struct shadow_access *a = unfinished(w, m);
        if (w && waiting) report(w, ACCESS_UNMAP, 0, m->size, "while work is queued that touches it", "");
        else if (a) report(w, ACCESS_UNMAP, 0, m->size, "before any host knows the end of a ", kind_names[a->kind]);
        waiting = false;
    }
    sim_session_unlock();
}

/* ---- for tests only ---- */

/* Races seen in the session so far, by any of its processes. */
SIM_EXPORT long simcuda_races(void);
long simcuda_races(void) { return session ? (long)session->races : 0; }
