/* arena.c: see arena.h.
 *
 * What shapes this file:
 *   - What the driver may still be using is told by one event of the whole context, not of a stream: whoever used a block, on
 *     whatever stream, is covered. Each such event covers all that the one before it did, so that what was put forms one queue,
 *     and a block whose event could not be recorded comes free with the next one behind it.
 *   - cuCtxRecordEvent is refused while a thread captures a graph, and ends that capture: while one is known (driver.h), the block
 *     waits without an event.
 *   - Memory returns to the device only when every mapping and every handle of it is gone, in the importers too.
 *   - A call that gives something back can fail; what it was to give back is remembered, and tried again with the next trim. */
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ALIGNMENT 512ull
#define SHARED_MOST (16ull << 20)  /* a larger block is a slab of its own */
#define SHARED_BYTES (64ull << 20) /* of a slab that blocks share */
#define MOST (1ull << 46)
#define EVENTS 32                  /* recorded at a time; what is put beyond that waits for the next that comes free */
#define SPIN_US 100                /* after a large put: an idle GPU is done by then */
#define PATIENCE_MS 10000

/* ---- physical memory, mapped here or not ---- */

struct piece {
    uint64_t bytes;
    zcu_mem handle;
    unsigned char held, mapped; /* what there is to undo */
};

struct region {
    struct region *next;        /* of the leftovers */
    zcu_ptr base;
    uint64_t bytes;
    unsigned char reserved;     /* the addresses are ours */
    uint32_t npieces, room;
    struct piece *pieces;       /* one after the other from `base` */
};

/* Every slab of every arena of this process, by address, and what a driver call refused to give back. Never locked over one. */
static struct {
    pthread_mutex_t lock;
    _Atomic pid_t owner;        /* 0: no slab was ever made */
    struct zcx_slab **sorted;
    size_t count, room;
    struct region *leftovers;
} registry = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static struct region *region_new(uint64_t bytes) {
    struct region *r = calloc(1, sizeof *r);
    if (r) r->bytes = bytes;
    return r;
}

static int region_grow(struct region *r, struct zcx_err *err) {
    uint32_t room = r->room ? r->room * 2 : 1;
    struct piece *larger;

    if (r->npieces < r->room) return 0;
    larger = realloc(r->pieces, room * sizeof *larger);
    if (!larger) return zcx_fail(err, ENOMEM, "no memory for a list of %u pieces", room);
    r->pieces = larger;
    r->room = room;
    return 0;
}

static void region_dealloc(struct region *r) {
    free(r->pieces);
    free(r);
}

/* As much as the driver lets us; 1: all of it. Addresses are freed only when nothing is mapped there any more. */
static int region_undo(struct region *r) {
    struct zcx_scope s;
    zcu_ptr at = r->base;
    int mapped = 0, held = 0;

    if (zcx_scope_open(&s, -1, NULL)) return 0;
    for (uint32_t i = 0; i < r->npieces; i++) {
        struct piece *p = &r->pieces[i];
        if (p->mapped && !s.d->MemUnmap(at, p->bytes)) p->mapped = 0;
        if (p->held && !s.d->MemRelease(p->handle)) p->held = 0;
        mapped |= p->mapped;
        held |= p->held;
        at += p->bytes;
    }
    if (r->reserved && !mapped && !s.d->MemAddressFree(r->base, r->bytes)) r->reserved = 0;
    zcx_scope_close(&s);
    return !mapped && !held && !r->reserved;
}

/* How many bytes were given back. */
static uint64_t region_drop(struct region *r) {
    uint64_t bytes = r->bytes;

    if (!region_undo(r)) {
        pthread_mutex_lock(&registry.lock);
        r->next = registry.leftovers;
        registry.leftovers = r;
        pthread_mutex_unlock(&registry.lock);
        return 0;
    }
    region_dealloc(r);
    return bytes;
}

static uint64_t drop_leftovers(void) {
    struct region *r, *next;
    uint64_t bytes = 0;

    pthread_mutex_lock(&registry.lock);
    r = registry.leftovers;
    registry.leftovers = NULL;
    pthread_mutex_unlock(&registry.lock);
    for (; r; r = next) {
        next = r->next;
        bytes += region_drop(r);
    }
    return bytes;
}

/* ---- slabs and blocks ---- */

enum state { FREE, LIVE, PENDING };

struct zcx_block {              /* or a free part: together they cover the slab, in order of their addresses */
    struct zcx_slab *slab;
    struct zcx_block *prev, *next;
    struct zcx_block *later;    /* PENDING: put after this one */
    uint64_t offset, size, asked, ticket;
    zcu_event event;            /* PENDING: NULL: none was recorded */
    enum state state;
};

struct zcx_slab {
    _Atomic uint32_t refs;      /* one is the arena's, while it is in use there */
    pid_t owner;
    struct zcx_arena *arena;    /* NULL: adopted */
    struct zcx_slab *next;      /* of the arena's, or on its way out */
    struct region *region;
    struct zcx_block *blocks;
    uint64_t free;
    uint32_t used;              /* blocks that live or are pending */
    enum zcx_arena_use use;
    int shared;
    _Atomic int let_go;         /* no block will come out of it any more */
};

struct zcx_arena {
    _Atomic uint32_t refs;
    pid_t owner;                /* a child of fork() frees nothing, and must not wait for this mutex */
    int ordinal;
    uint64_t granularity;
    zcu_access_desc peers[ZCX_MAX_DEVICES];
    size_t npeers;
    pthread_mutex_t lock;
    uint32_t patience_ms;
    zcu_ctx context;            /* NULL: not asked yet */
    zcu_event events[EVENTS];   /* not in use */
    uint32_t nevents, made;
    struct zcx_slab *slabs;     /* the oldest first */
    struct zcx_block *first, *last; /* pending, in the order in which they were put */
    uint64_t tickets, done;     /* the last one given, and the last one that came free */
    uint64_t taken, pending, mapped, nslabs;
};

/* Where it is, or would be put. */
static size_t registry_place(zcu_ptr base) {
    size_t low = 0, high = registry.count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (registry.sorted[middle]->region->base < base) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int registry_add(struct zcx_slab *s, struct zcx_err *err) {
    size_t at;

    pthread_mutex_lock(&registry.lock);
    if (registry.count == registry.room) {
        size_t room = registry.room ? registry.room * 2 : 16;
        struct zcx_slab **larger = realloc(registry.sorted, room * sizeof *larger);
        if (!larger) {
            pthread_mutex_unlock(&registry.lock);
            return zcx_fail(err, ENOMEM, "no memory for a table of %zu slabs", room);
        }
        registry.sorted = larger;
        registry.room = room;
    }
    at = registry_place(s->region->base);
    memmove(&registry.sorted[at + 1], &registry.sorted[at], (registry.count - at) * sizeof *registry.sorted);
    registry.sorted[at] = s;
    registry.count++;
    atomic_store(&registry.owner, s->owner);
    pthread_mutex_unlock(&registry.lock);
    return 0;
}

static void registry_remove(const struct zcx_slab *s) {
    size_t at;

    pthread_mutex_lock(&registry.lock);
    at = registry_place(s->region->base);
    registry.count--;
    memmove(&registry.sorted[at], &registry.sorted[at + 1], (registry.count - at) * sizeof *registry.sorted);
    pthread_mutex_unlock(&registry.lock);
}

int zcx_slab_find(zcu_ptr ptr, uint64_t nbytes, struct zcx_slab **out, zcu_ptr *base) {
    struct zcx_slab *s = NULL;

    if (atomic_load(&registry.owner) != getpid()) return 1;
    pthread_mutex_lock(&registry.lock);
    size_t at = registry_place(ptr);
    if (at < registry.count && registry.sorted[at]->region->base == ptr) s = registry.sorted[at];
    else if (at > 0) s = registry.sorted[at - 1];
    if (s && (ptr - s->region->base >= s->region->bytes || nbytes > s->region->bytes - (ptr - s->region->base))) s = NULL;
    if (s) zcx_slab_ref(s);
    pthread_mutex_unlock(&registry.lock);
    if (!s) return 1;
    *out = s;
    *base = s->region->base;
    return 0;
}

struct zcx_slab *zcx_slab_ref(struct zcx_slab *s) {
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

/* How many bytes that gave back. */
static uint64_t slab_drop(struct zcx_slab *s) {
    uint64_t bytes = 0;

    if (atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return 0;
    if (s->owner == getpid()) bytes = region_drop(s->region);
    else region_dealloc(s->region);
    free(s->blocks);
    free(s);
    return bytes;
}

void zcx_slab_unref(struct zcx_slab *s) {
    if (s) slab_drop(s);
}

uint64_t zcx_slab_bytes(const struct zcx_slab *s) { return s->region->bytes; }
uint32_t zcx_slab_pieces(const struct zcx_slab *s) { return s->region->npieces; }
uint64_t zcx_slab_piece_bytes(const struct zcx_slab *s, uint32_t piece) { return s->region->pieces[piece].bytes; }
int zcx_slab_shared(const struct zcx_slab *s) { return s->shared; }
int zcx_slab_let_go(const struct zcx_slab *s) { return atomic_load_explicit(&s->let_go, memory_order_acquire); }

int zcx_slab_export(struct zcx_slab *s, uint32_t piece, int *fd, struct zcx_err *err) {
    struct zcx_scope scope;
    int rc, made = -1;

    if (piece >= s->region->npieces)
        return zcx_fail(err, ZCX_E_RANGE, "piece %u of a slab of %u", piece, s->region->npieces);
    rc = zcx_scope_open(&scope, -1, err);
    if (rc) return rc;
    rc = zcx_cu(err, "cuMemExportToShareableHandle",
                scope.d->MemExportToShareableHandle(&made, s->region->pieces[piece].handle,
                                                    ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    zcx_scope_close(&scope);
    if (rc) return rc;
    if (fcntl(made, F_SETFD, FD_CLOEXEC) < 0) {
        rc = zcx_fail_errno(err, "fcntl");
        close(made);
        return rc;
    }
    *fd = made;
    return 0;
}

static zcu_mem_props props_on(int ordinal) {
    return (zcu_mem_props){.type = ZCU_MEM_ALLOCATION_TYPE_PINNED,
                           .handle_types = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                           .location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
}

/* Memory for a slab, mapped, reachable from its own device and from each peer that may. */
static int region_make(struct zcx_arena *a, const struct zcx_driver *d, struct region *r, struct zcx_err *err) {
    zcu_mem_props props = props_on(a->ordinal);
    zcu_access_desc own = {.location = props.location, .flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    struct piece *p;
    int rc = region_grow(r, err);

    if (rc) return rc;
    p = r->pieces;
    *p = (struct piece){.bytes = r->bytes};
    rc = zcx_cu(err, "cuMemCreate", d->MemCreate(&p->handle, r->bytes, &props, 0));
    if (rc) return rc;
    p->held = 1;
    r->npieces = 1;
    rc = zcx_cu(err, "cuMemAddressReserve", d->MemAddressReserve(&r->base, r->bytes, 0, 0, 0));
    if (rc) return rc;
    r->reserved = 1;
    rc = zcx_cu(err, "cuMemMap", d->MemMap(r->base, r->bytes, 0, p->handle, 0));
    if (rc) return rc;
    p->mapped = 1;
    rc = zcx_cu(err, "cuMemSetAccess", d->MemSetAccess(r->base, r->bytes, &own, 1));
    /* A peer that refuses can be copied to by way of this device: each by itself, and none is a failure. */
    for (size_t i = 0; !rc && i < a->npeers; i++) d->MemSetAccess(r->base, r->bytes, &a->peers[i], 1);
    return rc;
}

/* Appended to the arena's; what it holds is one free part. Under the lock. */
static int slab_new(struct zcx_arena *a, const struct zcx_driver *d, uint64_t bytes, enum zcx_arena_use use, int shared,
                    struct zcx_slab **out, struct zcx_err *err) {
    struct zcx_slab *s = calloc(1, sizeof *s), **at = &a->slabs;
    struct zcx_block *all = calloc(1, sizeof *all);
    struct region *r = region_new(bytes);
    int rc;

    if (!s || !all || !r) {
        rc = zcx_fail(err, ENOMEM, "no memory for a slab's bookkeeping");
        goto dealloc;
    }
    rc = region_make(a, d, r, err);
    if (rc) goto drop;
    *all = (struct zcx_block){.slab = s, .size = bytes};
    s->refs = 1;
    s->owner = a->owner;
    s->arena = a;
    s->region = r;
    s->blocks = all;
    s->free = bytes;
    s->use = use;
    s->shared = shared;
    rc = registry_add(s, err);
    if (rc) goto drop;
    while (*at) at = &(*at)->next;
    *at = s;
    a->nslabs++;
    a->mapped += bytes;
    *out = s;
    return 0;

drop:
    region_drop(r);
    r = NULL;
dealloc:
    free(r);
    free(all);
    free(s);
    return rc;
}

/* The first `size` bytes of a free part. */
static int carve(struct zcx_arena *a, struct zcx_block *b, uint64_t size, struct zcx_err *err) {
    if (b->size > size) {
        struct zcx_block *rest = calloc(1, sizeof *rest);
        if (!rest) return zcx_fail(err, ENOMEM, "no memory for a block's bookkeeping");
        *rest = (struct zcx_block){.slab = b->slab, .prev = b, .next = b->next, .offset = b->offset + size, .size = b->size - size};
        if (rest->next) rest->next->prev = rest;
        b->next = rest;
        b->size = size;
    }
    b->state = LIVE;
    b->slab->used++;
    b->slab->free -= size;
    a->taken += size;
    return 0;
}

static void swallow_next(struct zcx_block *b) {
    struct zcx_block *gone = b->next;

    b->size += gone->size;
    b->next = gone->next;
    if (b->next) b->next->prev = b;
    free(gone);
}

/* Nothing uses the oldest pending block any more: it becomes a free part again. */
static void release_first(struct zcx_arena *a) {
    struct zcx_block *b = a->first;

    a->first = b->later;
    if (!a->first) a->last = NULL;
    if (b->event) a->events[a->nevents++] = b->event;
    a->done = b->ticket;
    a->pending -= b->size;
    b->slab->used--;
    b->slab->free += b->size;
    b->event = NULL;
    b->state = FREE;
    if (b->next && b->next->state == FREE) swallow_next(b);
    if (b->prev && b->prev->state == FREE) swallow_next(b->prev);
}

static void release_until(struct zcx_arena *a, uint64_t ticket) {
    while (a->first && a->first->ticket <= ticket) release_first(a);
}

/* Leaves the block without an event where that cannot be now. The caller's context is the arena's. */
static void record(struct zcx_arena *a, const struct zcx_driver *d, struct zcx_block *b) {
    zcu_event event;

    if (!d->CtxRecordEvent) return;
    if (!a->context && d->CtxGetCurrent(&a->context)) {
        a->context = NULL;
        return;
    }
    if (a->nevents) {
        event = a->events[--a->nevents];
    } else {
        if (a->made == EVENTS || d->EventCreate(&event, ZCU_EVENT_DISABLE_TIMING)) return;
        a->made++;
    }
    if (zcx_driver_record_context(d, a->context, event)) a->events[a->nevents++] = event;
    else b->event = event;
}

static int query_all(struct zcx_arena *a, const struct zcx_driver *d, struct zcx_err *err) {
    for (;;) {
        struct zcx_block *b = a->first;
        zcu_result r;
        while (b && !b->event) b = b->later;
        if (!b) return 0;
        r = d->EventQuery(b->event);
        if (r == ZCU_ERROR_NOT_READY) return 0;
        if (r) return zcx_cu(err, "cuEventQuery", r);
        release_until(a, b->ticket);
    }
}

/* Let go of all pending blocks that are complete. */
static int settle(struct zcx_arena *a, const struct zcx_driver *d, struct zcx_err *err) {
    int rc = query_all(a, d, err);

    if (rc || !a->last || a->last->event) return rc;
    record(a, d, a->last);
    return a->last->event ? query_all(a, d, err) : 0;
}

/* Slabs without blocks leave the arena; `keep`: but one shared slab for each use. The caller drops them without the lock. */
static struct zcx_slab *cull(struct zcx_arena *a, int keep) {
    struct zcx_slab *out = NULL, **at = &a->slabs, *s;
    int kept[2] = {0, 0};

    while ((s = *at)) {
        if (s->used || (keep && s->shared && !kept[s->use]++)) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        registry_remove(s);
        atomic_store_explicit(&s->let_go, 1, memory_order_release);
        a->nslabs--;
        a->mapped -= s->region->bytes;
        s->next = out;
        out = s;
    }
    return out;
}

static uint64_t drop_all(struct zcx_slab *s) {
    uint64_t bytes = 0;

    while (s) {
        struct zcx_slab *next = s->next;
        bytes += slab_drop(s);
        s = next;
    }
    return bytes;
}

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Before CUDA 12.5 there is no event of a context: the thread waits for all that it was given. The lock is let go of meanwhile. */
static int synchronize(struct zcx_arena *a, const struct zcx_driver *d, struct zcx_err *err) {
    uint64_t ticket = a->tickets;
    int rc;

    pthread_mutex_unlock(&a->lock);
    rc = zcx_cu(err, "cuCtxSynchronize", zcx_driver_synchronize_context(d));
    pthread_mutex_lock(&a->lock);
    if (!rc) release_until(a, ticket);
    return rc;
}

/* 1: something that was pending came free; 0: nothing is pending, or nothing came free in time. `*until` 0: the first time. */
static int wait_for_some(struct zcx_arena *a, const struct zcx_driver *d, int64_t *until, struct zcx_err *err) {
    uint64_t done = a->done;
    long pause_us = 20;

    if (!*until) *until = now_us() + (int64_t)a->patience_ms * 1000;
    else if (now_us() >= *until) return 0;
    while (a->first) {
        int rc = d->CtxRecordEvent ? settle(a, d, err) : synchronize(a, d, err);
        if (rc) return rc;
        if (a->done != done) return 1;
        if (now_us() >= *until) return 0;
        struct timespec pause = {.tv_nsec = pause_us * 1000};
        pthread_mutex_unlock(&a->lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&a->lock);
        if (pause_us < 2000) pause_us *= 2;
    }
    return a->done != done;
}

/* ---- the arena ---- */

static int why_unfit(const struct zcx_driver *d, zcu_device device, int ordinal, struct zcx_err *err) {
    int can = 0;

    if (!d->DeviceGetAttribute(&can, ZCU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) && !can)
        return zcx_fail(err, ZCX_E_UNFIT, "device %d has no virtual memory management", ordinal);
    if (!d->DeviceGetAttribute(&can, ZCU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) && !can)
        return zcx_fail(err, ZCX_E_UNFIT, "memory of device %d cannot be shared as file descriptors (so it is on WSL2)", ordinal);
    return zcx_fail(err, ZCX_E_UNFIT, "this driver lacks a part of virtual memory management");
}

static int find_peers(const struct zcx_driver *d, struct zcx_arena *a, zcu_device device, struct zcx_err *err) {
    for (int i = 0; i < d->count; i++) {
        zcu_device peer;
        int can = 0, rc;
        if (i == a->ordinal) continue;
        rc = zcx_cu(err, "cuDeviceGet", d->DeviceGet(&peer, i));
        if (!rc) rc = zcx_cu(err, "cuDeviceCanAccessPeer", d->DeviceCanAccessPeer(&can, peer, device));
        if (rc) return rc;
        if (can)
            a->peers[a->npeers++] = (zcu_access_desc){.location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE, .id = i},
                                                      .flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    }
    return 0;
}

/* A power of two, as cuda.h says; anything else would break the arithmetic here. */
static int granularity_of(const struct zcx_driver *d, int ordinal, uint64_t *out, struct zcx_err *err) {
    zcu_mem_props props = props_on(ordinal);
    size_t g = 0;
    int rc = zcx_cu(err, "cuMemGetAllocationGranularity",
                    d->MemGetAllocationGranularity(&g, &props, ZCU_MEM_ALLOC_GRANULARITY_MINIMUM));

    if (rc) return rc;
    if (g < ALIGNMENT || g > SHARED_BYTES || g & (g - 1))
        return zcx_fail(err, ZCX_E_UNFIT, "device %d maps memory in units of %zu bytes", ordinal, g);
    *out = g;
    return 0;
}

int zcx_arena_new(struct zcx_arena **out, int ordinal, struct zcx_err *err) {
    struct zcx_arena *a;
    struct zcx_scope s;
    zcu_device device;
    int rc;

    if (ordinal < 0) return zcx_fail(err, ZCX_E_RANGE, "device %d", ordinal);
    rc = zcx_scope_open(&s, -1, err);
    if (rc) return rc;
    rc = zcx_cu(err, "cuDeviceGet", s.d->DeviceGet(&device, ordinal));
    if (!rc && !s.d->vmm[ordinal]) rc = why_unfit(s.d, device, ordinal, err);
    if (rc) goto close_scope;
    a = calloc(1, sizeof *a);
    if (!a || pthread_mutex_init(&a->lock, NULL)) {
        rc = zcx_fail(err, ENOMEM, "no memory for an arena's bookkeeping");
        goto dealloc;
    }
    a->refs = 1;
    a->owner = getpid();
    a->ordinal = ordinal;
    a->patience_ms = PATIENCE_MS;
    rc = granularity_of(s.d, ordinal, &a->granularity, err);
    if (!rc) rc = find_peers(s.d, a, device, err);
    if (rc) goto destroy_lock;
    zcx_scope_close(&s);
    *out = a;
    return 0;

destroy_lock:
    pthread_mutex_destroy(&a->lock);
dealloc:
    free(a);
close_scope:
    zcx_scope_close(&s);
    return rc;
}

int zcx_arena_ordinal(const struct zcx_arena *a) { return a->ordinal; }

void zcx_arena_patience(struct zcx_arena *a, uint32_t ms) {
    pthread_mutex_lock(&a->lock);
    a->patience_ms = ms;
    pthread_mutex_unlock(&a->lock);
}

struct zcx_arena *zcx_arena_ref(struct zcx_arena *a) {
    atomic_fetch_add_explicit(&a->refs, 1, memory_order_relaxed);
    return a;
}

/* No block lives and nobody refers to it. What the GPU does not let go of stays, with the arena: it cannot be freed under its hands. */
static void arena_end(struct zcx_arena *a) {
    struct zcx_slab *idle;
    struct zcx_scope s;
    int64_t until = 0;
    int pending, opened = zcx_scope_open(&s, a->ordinal, NULL) == 0;

    pthread_mutex_lock(&a->lock);
    while (opened && a->first && wait_for_some(a, s.d, &until, NULL) > 0) {}
    pending = a->first != NULL;
    idle = cull(a, 0);
    pthread_mutex_unlock(&a->lock);
    drop_all(idle);
    for (uint32_t i = 0; opened && !pending && i < a->nevents; i++) s.d->EventDestroy(a->events[i]);
    if (opened) zcx_scope_close(&s);
    if (pending) return;
    pthread_mutex_destroy(&a->lock);
    free(a);
}

void zcx_arena_unref(struct zcx_arena *a) {
    if (!a || a->owner != getpid()) return;
    if (atomic_fetch_sub_explicit(&a->refs, 1, memory_order_acq_rel) == 1) arena_end(a);
}

static int fit(struct zcx_arena *a, uint64_t size, enum zcx_arena_use use, struct zcx_block **out, struct zcx_err *err) {
    for (struct zcx_slab *s = a->slabs; s; s = s->next) {
        if (!s->shared || s->use != use || s->free < size) continue;
        for (struct zcx_block *b = s->blocks; b; b = b->next) {
            if (b->state != FREE || b->size < size) continue;
            int rc = carve(a, b, size, err);
            if (!rc) *out = b;
            return rc;
        }
    }
    return 1;
}

static int out_of_memory(int rc, const struct zcx_err *err) {
    return rc == -ZCX_E_CUDA && err->cuda == ZCU_ERROR_OUT_OF_MEMORY;
}

/* Where there is room, or in a new slab. */
static int place(struct zcx_arena *a, const struct zcx_driver *d, uint64_t size, enum zcx_arena_use use, struct zcx_block **out,
                 struct zcx_err *err) {
    uint64_t whole = round_up(size, a->granularity);
    int shared = size <= SHARED_MOST, rc = shared ? fit(a, size, use, out, err) : 1;
    struct zcx_slab *s;

    if (rc <= 0) return rc;
    rc = slab_new(a, d, shared ? SHARED_BYTES : whole, use, shared, &s, err);
    if (shared && out_of_memory(rc, err)) rc = slab_new(a, d, whole, use, shared, &s, err);
    if (!rc) rc = carve(a, s->blocks, shared ? size : whole, err);
    if (!rc) *out = s->blocks;
    return rc;
}

static int say_full(const struct zcx_arena *a, const struct zcx_driver *d, uint64_t nbytes, struct zcx_err *err) {
    size_t free_bytes = 0, total = 0;

    if (d->MemGetInfo(&free_bytes, &total)) free_bytes = 0;
    return zcx_err_at(err, __FILE__, __LINE__, ZCX_E_CUDA, ZCU_ERROR_OUT_OF_MEMORY, "cuMemCreate",
                      "%llu bytes were asked for on device %d: %zu are free there, and %llu that were given back are still in use",
                      (unsigned long long)nbytes, a->ordinal, free_bytes, (unsigned long long)a->pending);
}

/* Without the lock for a moment: what a driver call takes back may take long. 1: something was taken back. */
static int give_back(struct zcx_arena *a, int keep) {
    struct zcx_slab *idle = cull(a, keep);
    uint64_t bytes;

    if (!idle && keep) return 0;
    pthread_mutex_unlock(&a->lock);
    bytes = drop_all(idle) + (keep ? 0 : drop_leftovers());
    pthread_mutex_lock(&a->lock);
    return bytes != 0;
}

int zcx_arena_take(struct zcx_arena *a, uint64_t nbytes, enum zcx_arena_use use, struct zcx_block **out, struct zcx_err *err) {
    struct zcx_err why = {0};
    struct zcx_block *b = NULL;
    struct zcx_scope s;
    int64_t until = 0;
    int rc, more;

    if (!nbytes) return zcx_fail(err, ZCX_E_RANGE, "a block of no bytes");
    rc = zcx_scope_open(&s, a->ordinal, err);
    if (rc) return rc;
    pthread_mutex_lock(&a->lock);
    if (nbytes > MOST) {
        rc = say_full(a, s.d, nbytes, &why);
        goto unlock;
    }
    /* A failure of these two is not the caller's: it matters only where there is no room, and is met again there. */
    settle(a, s.d, NULL);
    give_back(a, 1);
    for (;;) {
        rc = place(a, s.d, round_up(nbytes, ALIGNMENT), use, &b, &why);
        if (!out_of_memory(rc, &why)) break;
        if (give_back(a, 0)) continue;
        more = wait_for_some(a, s.d, &until, &why);
        if (more < 0) rc = more;
        if (more <= 0) break;
    }
    if (out_of_memory(rc, &why)) rc = say_full(a, s.d, nbytes, &why);
    if (!rc) {
        b->asked = nbytes;
        zcx_arena_ref(a);
        *out = b;
    }
unlock:
    pthread_mutex_unlock(&a->lock);
    zcx_scope_close(&s);
    if (rc && err) *err = why;
    return rc;
}

zcu_ptr zcx_block_address(const struct zcx_block *b) { return b->slab->region->base + b->offset; }
uint64_t zcx_block_bytes(const struct zcx_block *b) { return b->asked; }
struct zcx_slab *zcx_block_slab(const struct zcx_block *b) { return b->slab; }

void zcx_block_put(struct zcx_block *b) {
    struct zcx_slab *idle = NULL;
    struct zcx_arena *a;
    struct zcx_scope s;
    uint64_t ticket;
    int opened, large;

    if (!b) return;
    a = b->slab->arena;
    if (a->owner != getpid()) return;
    opened = zcx_scope_open(&s, a->ordinal, NULL) == 0;
    pthread_mutex_lock(&a->lock);
    large = !b->slab->shared;
    ticket = b->ticket = ++a->tickets;
    b->state = PENDING;
    b->later = NULL;
    a->taken -= b->size;
    a->pending += b->size;
    if (a->last) a->last->later = b;
    else a->first = b;
    a->last = b;
    if (opened) {
        record(a, s.d, b);
        int64_t until = large && b->event ? now_us() + SPIN_US : 0;
        do {
            if (query_all(a, s.d, NULL)) break;
        } while (a->done < ticket && now_us() < until);
        idle = cull(a, 1);
    }
    pthread_mutex_unlock(&a->lock);
    drop_all(idle);
    if (opened) zcx_scope_close(&s);
    zcx_arena_unref(a);
}

int zcx_arena_trim(struct zcx_arena *a, int all, uint64_t *freed) {
    struct zcx_slab *idle;
    struct zcx_scope s;
    uint64_t bytes = 0;
    int pending = 0;

    if (a->owner == getpid() && zcx_scope_open(&s, a->ordinal, NULL) == 0) {
        pthread_mutex_lock(&a->lock);
        settle(a, s.d, NULL);
        if (all && a->first && !s.d->CtxRecordEvent) synchronize(a, s.d, NULL);
        pending = a->first != NULL;
        idle = cull(a, !all);
        pthread_mutex_unlock(&a->lock);
        bytes = drop_leftovers() + drop_all(idle);
        zcx_scope_close(&s);
    }
    if (freed) *freed = bytes;
    return pending;
}

void zcx_arena_usage(struct zcx_arena *a, struct zcx_arena_usage *out) {
    *out = (struct zcx_arena_usage){0};
    if (a->owner != getpid()) return;
    pthread_mutex_lock(&a->lock);
    out->taken = a->taken;
    out->pending = a->pending;
    out->idle = a->mapped - a->taken - a->pending;
    out->slabs = a->nslabs;
    out->mapped = a->mapped;
    pthread_mutex_unlock(&a->lock);
}

/* ---- memory of somebody else ---- */

#define unfit(err, call, result, what)                                                                                  \
    zcx_err_at((err), __FILE__, __LINE__, ZCX_E_UNFIT, (result), (call), "%s: %s", (what), zcx_driver_error_text(result))

/* One more mapping, the one that begins at or around `at`, as the next piece. cuMemGetAddressRange tells where it ends (cuda.h; the
 * pointer's attributes tell of the reserved addresses); a size that were more than that would not map in the importer. */
static int adopt_piece(const struct zcx_driver *d, struct region *r, int ordinal, zcu_ptr at, struct zcx_err *err) {
    static const char gap[] = "it is not mapped throughout";
    zcu_mem_props props = {0};
    struct piece *p;
    zcu_ptr base;
    size_t bytes;
    zcu_result result = d->MemGetAddressRange(&base, &bytes, at);
    int rc;

    if (result) return unfit(err, "cuMemGetAddressRange", result, gap);
    if (at - base >= bytes) return zcx_fail(err, ZCX_E_UNFIT, "%s", gap);
    rc = region_grow(r, err);
    if (rc) return rc;
    p = &r->pieces[r->npieces];
    *p = (struct piece){.bytes = bytes};
    result = d->MemRetainAllocationHandle(&p->handle, (void *)(uintptr_t)base);
    if (result) return unfit(err, "cuMemRetainAllocationHandle", result, "this is no memory that can be shared piece by piece");
    p->held = 1;
    r->npieces++;
    r->bytes += bytes;
    if (r->npieces == 1) r->base = base;
    result = d->MemGetAllocationPropertiesFromHandle(&props, p->handle);
    if (result) return unfit(err, "cuMemGetAllocationPropertiesFromHandle", result, "what kind of memory it is cannot be told");
    if (!(props.handle_types & ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return zcx_fail(err, ZCX_E_UNFIT, "it was made without leave to be shared as a file descriptor");
    if (props.location.type != ZCU_MEM_LOCATION_TYPE_DEVICE || props.location.id != ordinal)
        return zcx_fail(err, ZCX_E_UNFIT, "it does not all lie on device %d", ordinal);
    return 0;
}

static int adopt_all(const struct zcx_driver *d, struct region *r, int ordinal, zcu_ptr ptr, uint64_t nbytes, struct zcx_err *err) {
    struct zcx_scope s;
    zcu_ptr end = ptr + (nbytes ? nbytes : 1);
    int rc;

    if (end < ptr) return zcx_fail(err, ZCX_E_RANGE, "%llu bytes reach beyond the address space", (unsigned long long)nbytes);
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    rc = adopt_piece(d, r, ordinal, ptr, err);
    while (!rc && r->base + r->bytes < end) rc = adopt_piece(d, r, ordinal, r->base + r->bytes, err);
    zcx_scope_close(&s);
    return rc;
}

int zcx_slab_adopt(zcu_ptr ptr, uint64_t nbytes, struct zcx_slab **out, zcu_ptr *base, struct zcx_err *err) {
    const struct zcx_driver *d;
    struct zcx_ptr_info info;
    struct zcx_slab *s;
    struct region *r;
    int rc = zcx_driver_open(&d, err);

    if (!rc) rc = zcx_driver_ptr_info(d, ptr, &info, err);
    if (rc) return rc;
    if (info.type != ZCU_MEMORYTYPE_DEVICE || info.pool || info.legacy_ipc)
        return zcx_fail(err, ZCX_E_UNFIT, "this is no device memory made with cuMemCreate");
    if (!(info.handle_types & ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return zcx_fail(err, ZCX_E_UNFIT, "it was made without leave to be shared as a file descriptor");
    if (info.ordinal < 0 || info.ordinal >= d->count || !d->vmm[info.ordinal] || !d->MemGetAddressRange)
        return zcx_fail(err, ZCX_E_UNFIT, "this driver lacks a part of virtual memory management");
    s = calloc(1, sizeof *s);
    r = region_new(0);
    if (!s || !r) {
        free(s);
        free(r);
        return zcx_fail(err, ENOMEM, "no memory for a slab's bookkeeping");
    }
    rc = adopt_all(d, r, info.ordinal, ptr, nbytes, err);
    if (rc) {
        region_drop(r);
        free(s);
        return rc;
    }
    s->refs = 1;
    s->owner = getpid();
    s->region = r;
    *out = s;
    *base = r->base;
    return 0;
}

/* ---- importer ---- */

struct zcx_vmm {
    pid_t owner;
    int ordinal, writable, complete;
    int broken;               /* a piece did not import: nothing more is added */
    uint32_t npieces;
    uint64_t granularity, added;
    struct region *region;
};

int zcx_vmm_new(struct zcx_vmm **out, int ordinal, uint64_t bytes, uint32_t npieces, int writable, struct zcx_err *err) {
    struct zcx_vmm *v;
    struct zcx_scope s;
    zcu_device device;
    int rc;

    if (ordinal < 0) return zcx_fail(err, ZCX_E_RANGE, "device %d", ordinal);
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    v = calloc(1, sizeof *v);
    if (!v || !(v->region = region_new(bytes))) {
        rc = zcx_fail(err, ENOMEM, "no memory for a mapping's bookkeeping");
        goto dealloc;
    }
    rc = zcx_cu(err, "cuDeviceGet", s.d->DeviceGet(&device, ordinal));
    if (!rc && !s.d->vmm[ordinal]) rc = why_unfit(s.d, device, ordinal, err);
    if (!rc) rc = granularity_of(s.d, ordinal, &v->granularity, err);
    if (rc) goto dealloc_region;
    if (!bytes || bytes > MOST || bytes % v->granularity || !npieces || npieces > bytes / v->granularity) {
        rc = zcx_fail(err, ZCX_E_PROTOCOL, "a slab of %llu bytes in %u pieces cannot be", (unsigned long long)bytes, npieces);
        goto dealloc_region;
    }
    rc = zcx_cu(err, "cuMemAddressReserve", s.d->MemAddressReserve(&v->region->base, bytes, 0, 0, 0));
    if (rc) goto dealloc_region;
    v->region->reserved = 1;
    v->owner = getpid();
    v->ordinal = ordinal;
    v->npieces = npieces;
    v->writable = writable;
    zcx_scope_close(&s);
    *out = v;
    return 0;

dealloc_region:
    region_dealloc(v->region);
dealloc:
    free(v);
    zcx_scope_close(&s);
    return rc;
}

static int map_piece(const struct zcx_driver *d, struct zcx_vmm *v, int fd, uint64_t bytes, struct zcx_err *err) {
    struct region *r = v->region;
    struct piece *p = &r->pieces[r->npieces];
    zcu_result result;

    *p = (struct piece){.bytes = bytes};
    result = d->MemImportFromShareableHandle(&p->handle, (void *)(intptr_t)fd, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result) return unfit(err, "cuMemImportFromShareableHandle", result, "a piece does not import");
    p->held = 1;
    r->npieces++;
    result = d->MemMap(r->base + v->added, bytes, 0, p->handle, 0);
    if (result) return unfit(err, "cuMemMap", result, "a piece does not map");
    p->mapped = 1;
    v->added += bytes;
    /* The mapping keeps the memory; a handle more would keep it beyond that. */
    if (!d->MemRelease(p->handle)) p->held = 0;
    return 0;
}

static int give_access(const struct zcx_driver *d, struct zcx_vmm *v, struct zcx_err *err) {
    zcu_access_desc access = {.location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE, .id = v->ordinal},
                              .flags = v->writable ? ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE : ZCU_MEM_ACCESS_FLAGS_PROT_READ};
    zcu_result result = d->MemSetAccess(v->region->base, v->region->bytes, &access, 1);

    if (result) return unfit(err, "cuMemSetAccess", result, "access is refused");
    v->complete = 1;
    return 0;
}

int zcx_vmm_add(struct zcx_vmm *v, int fd, uint64_t bytes, struct zcx_err *err) {
    uint64_t left = v->region->bytes - v->added;
    uint32_t more = v->npieces - v->region->npieces; /* this one too */
    struct zcx_scope s;
    int rc;

    if (v->broken) return zcx_fail(err, ZCX_E_UNFIT, "an earlier piece did not import");
    if (!more) return zcx_fail(err, ZCX_E_PROTOCOL, "more pieces than the %u that were announced", v->npieces);
    if (!bytes || bytes % v->granularity || bytes > left || (left - bytes) / v->granularity < more - 1 || (more == 1 && bytes < left))
        return zcx_fail(err, ZCX_E_PROTOCOL, "a piece of %llu bytes where %llu are left for %u", (unsigned long long)bytes,
                        (unsigned long long)left, more);
    rc = region_grow(v->region, err);
    if (!rc) rc = zcx_scope_open(&s, v->ordinal, err);
    if (rc) return rc;
    rc = map_piece(s.d, v, fd, bytes, err);
    if (!rc && more == 1) rc = give_access(s.d, v, err);
    v->broken = rc != 0;
    zcx_scope_close(&s);
    return rc;
}

int zcx_vmm_complete(const struct zcx_vmm *v) { return v->complete; }
zcu_ptr zcx_vmm_base(const struct zcx_vmm *v) { return v->region->base; }
uint64_t zcx_vmm_bytes(const struct zcx_vmm *v) { return v->region->bytes; }
int zcx_vmm_ordinal(const struct zcx_vmm *v) { return v->ordinal; }

void zcx_vmm_free(struct zcx_vmm *v) {
    if (!v) return;
    if (v->owner == getpid()) {
        drop_leftovers();
        region_drop(v->region);
    } else {
        region_dealloc(v->region);
    }
    free(v);
}
