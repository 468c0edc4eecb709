/* pool.c: memory pools: stream-ordered allocation, export, import, retention.
 *
 * A pool is an address range of chunks (32 MiB). An exportable one is backed by a memfd: first the control area, then the
 * physical chunks. Which physical chunk stands behind an address may change (trim, and moving free memory together), and
 * what was exported stays charged until the address is exported anew or the pool and its importers are gone: as on a card.
 * An importer maps the chunks that the last export of each address names, at its own addresses; the distance between two
 * allocations is the same everywhere, so windows land next to each other. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

#define POOL_MAGIC 0x6c6f6f7061647563ull
#define MAX_CHUNKS 65536ull
#define CONTROL_BYTES (1ull << 20)
#define GRAIN 512ull /* allocations are multiples of it */

/* The first bytes of an exportable pool's memfd. */
struct pool_control {
    uint64_t magic, id, chunks, owner_base;
    int device;
    pthread_mutex_t lock;          /* over `exported` */
    int32_t exported[MAX_CHUNKS];  /* address chunk → physical chunk at its last export, plus one; 0: never */
};

struct blob { uint64_t magic, id, serial, offset, size, whole; unsigned char rest[16]; };
_Static_assert(offsetof(struct blob, offset) == 24 && offsetof(struct blob, size) == 32, "as on a card");
_Static_assert(sizeof(struct blob) == sizeof(zcu_pool_blob), "as on a card");

/* ---- address ranges and chunks ---- */

static unsigned char *reserve(uint64_t chunks, const unsigned char *not_here) {
    uint64_t slide = 2 + sim_random() % 64, bytes = (chunks + slide) * SIM_CHUNK;
    unsigned char *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    unsigned char *base = (unsigned char *)(((uintptr_t)p + SIM_CHUNK - 1) & ~(SIM_CHUNK - 1));
    base += sim_random() % (slide - 1) * SIM_CHUNK;
    if (base == not_here) base += SIM_CHUNK; /* there is always room for one more */
    if (base > p) munmap(p, (size_t)(base - p));
    munmap(base + chunks * SIM_CHUNK, (size_t)(p + bytes - (base + chunks * SIM_CHUNK)));
    madvise(base, chunks * SIM_CHUNK, MADV_DONTDUMP);
    return base;
}

static int map_chunk(struct pool *p, uint64_t chunk, int32_t physical) {
    void *at = p->base + chunk * SIM_CHUNK;
    int flags = MAP_FIXED | MAP_NORESERVE | (p->fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    off_t offset = p->fd < 0 ? 0 : (off_t)(CONTROL_BYTES + (uint64_t)physical * SIM_CHUNK);
    if (mmap(at, SIM_CHUNK, PROT_READ | PROT_WRITE, flags, p->fd, offset) == MAP_FAILED) return -1;
    p->backing[chunk] = physical;
    return 0;
}

static void unmap_chunk(struct pool *p, uint64_t chunk) {
    void *at = p->base + chunk * SIM_CHUNK;
    int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (mmap(at, SIM_CHUNK, PROT_NONE, flags, -1, 0) == MAP_FAILED) abort();
    p->backing[chunk] = -1;
}

static uint64_t account(const struct pool *p) { return p->exportable ? p->id : 0; }

/* A physical chunk goes back to the device unless somebody's mapping or an export still stands for it. */
static void settle(struct pool *p, int32_t physical) {
    off_t at = (off_t)(CONTROL_BYTES + (uint64_t)physical * SIM_CHUNK);
    if (p->physical[physical] || p->exports[physical]) return;
    if (p->fd >= 0) fallocate(p->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, SIM_CHUNK);
    sim_charge(p->device, account(p), -(int64_t)SIM_CHUNK);
}

static void drop_chunk(struct pool *p, uint64_t chunk) {
    int32_t physical = p->backing[chunk];
    unmap_chunk(p, chunk);
    p->physical[physical] = 0;
    p->reserved -= SIM_CHUNK;
    settle(p, physical);
}

static uint64_t first_chunk(uint64_t offset) { return offset / SIM_CHUNK; }
static uint64_t last_chunk(uint64_t offset, uint64_t n) { return (offset + n - 1) / SIM_CHUNK; }

uint64_t sim_pool_place(const struct pool *p, uint64_t offset, uint64_t *n) {
    uint64_t from = first_chunk(offset), to = from;
    while (to < last_chunk(offset, *n) && p->backing[to + 1] == p->backing[to] + 1) to++;
    if (*n > (to + 1) * SIM_CHUNK - offset) *n = (to + 1) * SIM_CHUNK - offset;
    return CONTROL_BYTES + (uint64_t)p->backing[from] * SIM_CHUNK + offset % SIM_CHUNK;
}

bool sim_pool_backed(struct pool *p, uint64_t offset, uint64_t n) {
    for (uint64_t c = first_chunk(offset); c <= last_chunk(offset, n); c++)
        if (c >= p->chunks || p->backing[c] < 0) return false;
    return true;
}

/* The whole chunks inside a free segment. */
static void free_chunks(const struct segment *s, uint64_t *from, uint64_t *to) {
    *from = (s->offset + SIM_CHUNK - 1) / SIM_CHUNK;
    *to = (s->offset + s->size) / SIM_CHUNK;
}

/* A backed chunk that nobody uses, outside [keep_from, keep_to]: its memory can move. -1: none. */
static int64_t idle_chunk(struct pool *p, uint64_t keep_from, uint64_t keep_to) {
    for (struct segment *s = p->segments; s; s = s->next) {
        uint64_t from, to;
        if (s->state != SEGMENT_FREE) continue;
        free_chunks(s, &from, &to);
        for (uint64_t c = from; c < to; c++)
            if (p->backing[c] >= 0 && (c < keep_from || c > keep_to)) return (int64_t)c;
    }
    return -1;
}

static zcu_result back_chunk(struct pool *p, uint64_t chunk, uint64_t keep_from, uint64_t keep_to) {
    bool full = p->max_size && p->reserved + SIM_CHUNK > p->max_size;
    if (!full && !sim_charge(p->device, account(p), (int64_t)SIM_CHUNK)) {
        int32_t physical = 0;
        while ((uint64_t)physical < p->chunks && (p->physical[physical] || p->exports[physical])) physical++;
        if ((uint64_t)physical == p->chunks || map_chunk(p, chunk, physical)) {
            sim_charge(p->device, account(p), -(int64_t)SIM_CHUNK);
            return ZCU_ERROR_OUT_OF_MEMORY;
        }
        p->physical[physical] = 1;
        p->reserved += SIM_CHUNK;
        if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
        return ZCU_SUCCESS;
    }
    int64_t idle = idle_chunk(p, keep_from, keep_to);
    if (idle < 0) return ZCU_ERROR_OUT_OF_MEMORY;
    int32_t physical = p->backing[idle]; /* an old blob of the idle chunk now shows what will live here */
    unmap_chunk(p, (uint64_t)idle);
    return map_chunk(p, chunk, physical) ? ZCU_ERROR_OUT_OF_MEMORY : ZCU_SUCCESS;
}

static zcu_result back(struct pool *p, uint64_t offset, uint64_t n) {
    uint64_t from = first_chunk(offset), to = last_chunk(offset, n);
    for (uint64_t c = from; c <= to; c++) {
        zcu_result r = p->backing[c] < 0 ? back_chunk(p, c, from, to) : ZCU_SUCCESS;
        if (r) return r; /* what was backed stays reserved: free memory of the pool */
    }
    return ZCU_SUCCESS;
}

/* ---- segments ---- */

static struct segment *split(struct segment *s, uint64_t n) { /* s keeps the first n bytes */
    if (s->size == n) return s;
    struct segment *rest = malloc(sizeof *rest);
    if (!rest) return NULL;
    *rest = *s;
    rest->offset += n;
    rest->size -= n;
    sim_marker_ref(rest->marker);
    s->size = n;
    rest->prev = s;
    rest->next = s->next;
    if (rest->next) rest->next->prev = rest;
    s->next = rest;
    return s;
}

static void swallow_next(struct segment *s) {
    struct segment *n = s->next;
    s->size += n->size;
    if (n->freed_at > s->freed_at) s->freed_at = n->freed_at;
    s->next = n->next;
    if (s->next) s->next->prev = s;
    sim_marker_unref(n->marker);
    free(n);
}

/* Frees that were executed become free memory. */
static void sweep(struct pool *p) {
    for (struct segment *s = p->segments; s; s = s->next)
        if (s->state == SEGMENT_FREED && !s->marker->pending) {
            sim_marker_unref(s->marker);
            s->marker = NULL;
            s->state = SEGMENT_FREE;
        }
    for (struct segment *s = p->segments; s; s = s->next)
        while (s->state == SEGMENT_FREE && s->next && s->next->state == SEGMENT_FREE) swallow_next(s);
}

struct segment *sim_pool_segment(struct pool *p, zcu_ptr at) {
    uint64_t offset = at - (zcu_ptr)p->base;
    for (struct segment *s = p->segments; s; s = s->next)
        if (s->state == SEGMENT_USED && offset >= s->offset && offset < s->offset + s->asked) return s;
    return NULL;
}

struct import *sim_pool_import(struct pool *p, zcu_ptr at) {
    uint64_t offset = at - (zcu_ptr)p->base;
    for (struct import *i = p->imports; i; i = i->next)
        if (offset >= i->offset + i->shift && offset < i->offset + i->shift + i->size) return i;
    return NULL;
}

bool sim_pool_covered(struct pool *p, uint64_t offset, uint64_t n) {
    for (struct import *i = p->imports; i; i = i->next) {
        uint64_t at = i->offset + i->shift;
        if (offset >= at && offset - at <= i->size && n <= i->size - (offset - at)) return true;
    }
    return false;
}

/* ---- pools ---- */

struct pool *sim_pool_of(zcu_ptr at) {
    for (struct pool *p = sim.pools; p; p = p->next)
        if (at >= (zcu_ptr)p->base && at < (zcu_ptr)p->base + p->chunks * SIM_CHUNK) return p;
    return NULL;
}

static struct pool *pool_of(zcu_pool handle) {
    for (struct pool *p = sim.pools; p; p = p->next)
        if ((void *)p == (void *)handle && !p->destroyed) return p;
    return NULL;
}

static void pool_free(struct pool *p) {
    struct pool **at = &sim.pools;
    for (; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    while (p->segments) {
        struct segment *s = p->segments;
        p->segments = s->next;
        sim_marker_unref(s->marker);
        free(s);
    }
    while (p->imports) {
        struct import *i = p->imports;
        p->imports = i->next;
        free(i);
    }
    if (p->base) munmap(p->base, p->chunks * SIM_CHUNK);
    if (p->control) munmap(p->control, CONTROL_BYTES);
    if (p->fd >= 0) close(p->fd);
    free(p->backing);
    free(p->mapped);
    free(p->physical);
    free(p->exports);
    free(p);
}

static struct pool *pool_new(int device, uint64_t chunks, int fd, bool imported) {
    struct pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    if (getrandom(&p->id, sizeof p->id, 0) != sizeof p->id) abort();
    p->id |= 1; /* 0 is nobody's */
    p->fd = fd;
    p->device = device;
    p->imported = imported;
    p->exportable = fd >= 0 && !imported;
    p->chunks = chunks;
    p->backing = malloc(chunks * sizeof *p->backing);
    p->mapped = calloc(chunks, sizeof *p->mapped);
    p->physical = calloc(chunks, sizeof *p->physical);
    p->exports = calloc(chunks, sizeof *p->exports);
    p->segments = calloc(1, sizeof *p->segments);
    if (fd >= 0) {
        p->control = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (p->control == MAP_FAILED) p->control = NULL;
    }
    if (p->backing && p->mapped && p->physical && p->exports && p->segments && (fd < 0 || p->control))
        p->base = reserve(chunks, imported ? (unsigned char *)p->control->owner_base : NULL);
    if (!p->base) {
        p->fd = -1; /* still the caller's */
        pool_free(p);
        return NULL;
    }
    memset(p->backing, 0xff, chunks * sizeof *p->backing);
    p->segments->size = chunks * SIM_CHUNK;
    if (device >= 0) p->access[device] = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    p->next = sim.pools;
    sim.pools = p;
    return p;
}

static uint64_t address_chunks(int device) {
    uint64_t n = 4 * (sim.memory[device] / SIM_CHUNK) + 16;
    return n < MAX_CHUNKS ? n : MAX_CHUNKS;
}

struct pool *sim_pool_default(int device) {
    if (!sim.default_pool[device]) {
        struct pool *p = pool_new(device, address_chunks(device), -1, false);
        if (p) {
            p->is_default = true;
            sim.default_pool[device] = sim.current_pool[device] = p;
        }
    }
    return sim.default_pool[device];
}

static void trim(struct pool *p, uint64_t keep) {
    sweep(p);
    for (struct segment *s = p->segments; s; s = s->next) {
        uint64_t from, to;
        if (s->state != SEGMENT_FREE) continue;
        free_chunks(s, &from, &to);
        for (uint64_t c = from; c < to && p->reserved > keep; c++)
            if (p->backing[c] >= 0) drop_chunk(p, c);
    }
}

void sim_pools_release(void) {
    for (struct pool *p = sim.pools; p; p = p->next)
        if (!p->imported && p->reserved > p->threshold) trim(p, p->threshold);
}

/* A destroyed pool goes when its last allocation or import does. What was exported stays charged to the session's record
 * of the pool while a process has it imported. */
static void finish(struct pool *p) {
    if (!p->destroyed || p->live) return;
    if (p->imported) sim_charge_import(p->id, p->device, -1, 0);
    else {
        uint64_t retained = 0;
        hb_pool_gone(p);
        trim(p, 0);
        for (uint64_t c = 0; c < p->chunks; c++) retained += p->exports[c] ? SIM_CHUNK : 0;
        if (p->exportable) sim_charge_destroyed(p->id, retained);
    }
    pool_free(p);
}

static zcu_result exportable_new(int device, struct pool **out) {
    uint64_t chunks = address_chunks(device);
    int fd = memfd_create("simcuda-pool", MFD_CLOEXEC);
    struct pool *p = NULL;
    if (fd >= 0 && !ftruncate(fd, (off_t)(CONTROL_BYTES + chunks * SIM_CHUNK))) p = pool_new(device, chunks, fd, false);
    if (!p) {
        if (fd >= 0) close(fd);
        return ZCU_ERROR_OUT_OF_MEMORY;
    }
    p->control->magic = POOL_MAGIC;
    p->control->id = p->id;
    p->control->chunks = chunks;
    p->control->owner_base = (uint64_t)(uintptr_t)p->base;
    p->control->device = device;
    sim_robust_init(&p->control->lock);
    sim_charge(device, p->id, 0);
    *out = p;
    return ZCU_SUCCESS;
}

CALL(MemPoolCreate, 11020, zcu_pool *out, const zcu_pool_props *props) {
    ENTER_UNSAFE(MemPoolCreate);
    struct pool *p = NULL;
    zcu_result r = ZCU_SUCCESS;
    if (props->alloc_type != ZCU_MEM_ALLOCATION_TYPE_PINNED) return ZCU_ERROR_INVALID_VALUE;
    if (props->location.type != ZCU_MEM_LOCATION_TYPE_DEVICE) return ZCU_ERROR_INVALID_VALUE;
    int device = sim_physical(props->location.id);
    if (device < 0) return ZCU_ERROR_INVALID_DEVICE;
    if (props->handle_types & ~ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return ZCU_ERROR_NOT_SUPPORTED;
    if (props->handle_types) r = exportable_new(device, &p);
    else if (!(p = pool_new(device, address_chunks(device), -1, false))) r = ZCU_ERROR_OUT_OF_MEMORY;
    if (r) return r;
    p->max_size = (props->max_size + SIM_CHUNK - 1) & ~(SIM_CHUNK - 1);
    *out = (zcu_pool)(void *)p;
    return ZCU_SUCCESS;
}

CALL(MemPoolDestroy, 11020, zcu_pool pool) {
    ENTER_UNSAFE(MemPoolDestroy);
    struct pool *p = pool_of(pool);
    if (!p || p->is_default) return ZCU_ERROR_INVALID_VALUE;
    if (!p->imported && sim.current_pool[p->device] == p) sim.current_pool[p->device] = sim_pool_default(p->device);
    p->destroyed = true;
    finish(p);
    return ZCU_SUCCESS;
}

CALL(DeviceGetDefaultMemPool, 11020, zcu_pool *out, zcu_device device) {
    ENTER(DeviceGetDefaultMemPool);
    int d = sim_physical(device);
    if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
    *out = (zcu_pool)(void *)sim_pool_default(d);
    return *out ? ZCU_SUCCESS : ZCU_ERROR_OUT_OF_MEMORY;
}

CALL(DeviceGetMemPool, 11020, zcu_pool *out, zcu_device device) {
    ENTER(DeviceGetMemPool);
    int d = sim_physical(device);
    if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
    if (!sim_pool_default(d)) return ZCU_ERROR_OUT_OF_MEMORY;
    *out = (zcu_pool)(void *)sim.current_pool[d];
    return ZCU_SUCCESS;
}

CALL(DeviceSetMemPool, 11020, zcu_device device, zcu_pool pool) {
    ENTER_UNSAFE(DeviceSetMemPool);
    int d = sim_physical(device);
    struct pool *p = pool_of(pool);
    if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
    if (!p || p->imported || p->device != d || !sim_pool_default(d)) return ZCU_ERROR_INVALID_VALUE;
    sim.current_pool[d] = p;
    return ZCU_SUCCESS;
}

CALL(MemPoolSetAttribute, 11020, zcu_pool pool, int attribute, void *value) {
    ENTER_UNSAFE(MemPoolSetAttribute);
    struct pool *p = pool_of(pool);
    if (!p || p->imported) return ZCU_ERROR_INVALID_VALUE; /* an imported pool's threshold cannot be set */
    uint64_t v = attribute >= 4 ? *(uint64_t *)value : 0;
    switch (attribute) {
    case 1: case 2: case 3: return ZCU_SUCCESS; /* which reuse is allowed: always the strictest here */
    case ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD: p->threshold = v; return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        if (v) return ZCU_ERROR_INVALID_VALUE;
        p->reserved_high = p->reserved;
        return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (v) return ZCU_ERROR_INVALID_VALUE;
        p->used_high = p->used;
        return ZCU_SUCCESS;
    default: return ZCU_ERROR_INVALID_VALUE;
    }
}

CALL(MemPoolGetAttribute, 11020, zcu_pool pool, int attribute, void *value) {
    ENTER(MemPoolGetAttribute);
    struct pool *p = pool_of(pool);
    if (!p) return ZCU_ERROR_INVALID_VALUE;
    switch (attribute) {
    case 1: case 2: case 3: *(int *)value = 1; return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *(uint64_t *)value = p->threshold; return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(uint64_t *)value = p->reserved; return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(uint64_t *)value = p->reserved_high; return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(uint64_t *)value = p->used; return ZCU_SUCCESS;
    case ZCU_MEMPOOL_ATTR_USED_MEM_HIGH: *(uint64_t *)value = p->used_high; return ZCU_SUCCESS;
    default: return ZCU_ERROR_INVALID_VALUE;
    }
}

CALL(MemPoolTrimTo, 11020, zcu_pool pool, size_t keep) {
    ENTER_UNSAFE(MemPoolTrimTo);
    struct pool *p = pool_of(pool);
    if (!p || p->imported) return ZCU_ERROR_INVALID_VALUE;
    trim(p, keep);
    return ZCU_SUCCESS;
}

CALL(MemPoolSetAccess, 11020, zcu_pool pool, const zcu_access_desc *list, size_t n) {
    ENTER_UNSAFE(MemPoolSetAccess);
    struct pool *p = pool_of(pool);
    if (!p) return ZCU_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < n; i++) {
        int d = list[i].location.type == ZCU_MEM_LOCATION_TYPE_DEVICE ? sim_physical(list[i].location.id) : -1;
        if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
        if (list[i].flags == ZCU_MEM_ACCESS_FLAGS_PROT_READ) return ZCU_ERROR_NOT_SUPPORTED;
        if (list[i].flags && list[i].flags != ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE) return ZCU_ERROR_INVALID_VALUE;
        if (d != p->device && !sim_peers(d, p->device)) return ZCU_ERROR_INVALID_DEVICE;
        if (d == p->device && !list[i].flags) return ZCU_ERROR_INVALID_DEVICE;
    }
    for (size_t i = 0; i < n; i++) p->access[sim_physical(list[i].location.id)] = (uint8_t)list[i].flags;
    return ZCU_SUCCESS;
}

CALL(MemPoolGetAccess, 11020, int *flags, zcu_pool pool, zcu_location *location) {
    ENTER(MemPoolGetAccess);
    struct pool *p = pool_of(pool);
    int d = location->type == ZCU_MEM_LOCATION_TYPE_DEVICE ? sim_physical(location->id) : -1;
    if (!p || d < 0) return ZCU_ERROR_INVALID_VALUE;
    *flags = p->access[d];
    return ZCU_SUCCESS;
}

/* ---- allocation ---- */

/* Can an allocation on stream `s` take this segment? Any: also what another stream frees, after a wait for that. */
static bool usable(const struct segment *g, const struct stream *s, bool any) {
    return g->state == SEGMENT_FREE || (g->state == SEGMENT_FREED && (any || g->stream == s->id));
}

static bool fits(const struct segment *g, uint64_t n, const struct stream *s, bool any) {
    uint64_t sum = 0;
    for (; g && usable(g, s, any) && sum < n; g = g->next) sum += g->size;
    return sum >= n;
}

static uint64_t missing(struct pool *p, uint64_t offset, uint64_t n) {
    uint64_t sum = 0;
    for (uint64_t c = first_chunk(offset); c <= last_chunk(offset, n); c++) sum += p->backing[c] < 0;
    return sum;
}

/* What was freed last and holds it; else where the least memory has to be added. */
static struct segment *choose(struct pool *p, uint64_t n, const struct stream *s, bool any) {
    struct segment *best = NULL;
    uint64_t best_missing = UINT64_MAX;
    for (struct segment *g = p->segments; g; g = g->next) {
        if (!usable(g, s, any) || !fits(g, n, s, any)) continue;
        uint64_t m = missing(p, g->offset, n);
        if (m < best_missing || (m == best_missing && !m && g->freed_at > best->freed_at)) {
            best = g;
            best_missing = m;
        }
    }
    return best;
}

static zcu_result wait_for_free(struct stream *s, const struct segment *g) {
    struct op *op = sim_op(OP_WAIT);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->marker = sim_marker_ref(g->marker);
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

zcu_result sim_pool_alloc(struct pool *p, uint64_t asked, struct stream *s, zcu_ptr *out) {
    uint64_t n = (asked + GRAIN - 1) & ~(GRAIN - 1);
    struct segment *g = NULL;
    zcu_result r = ZCU_ERROR_OUT_OF_MEMORY;
    if (!asked) return ZCU_ERROR_INVALID_VALUE;
    sweep(p);
    for (int any = 0; any < 2 && r; any++) {
        g = choose(p, n, s, any);
        r = g ? back(p, g->offset, n) : ZCU_ERROR_OUT_OF_MEMORY;
    }
    if (r) return r;
    struct op *op = sim_op(OP_ALLOC);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    for (uint64_t sum = 0, at = n; sum < n; at = n - sum) { /* gather exactly n bytes into g */
        struct segment *part = sum ? g->next : g;
        if (part->size > at && !split(part, at)) {
            free(op);
            return ZCU_ERROR_OUT_OF_MEMORY;
        }
        if (part->state == SEGMENT_FREED && part->stream != s->id && (r = wait_for_free(s, part))) {
            free(op);
            return r;
        }
        sum += part->size;
        if (part != g) swallow_next(g);
    }
    sim_marker_unref(g->marker);
    g->marker = NULL;
    g->state = SEGMENT_USED;
    g->asked = asked;
    g->id = sim.next_id++;
    p->used += n;
    if (p->used > p->used_high) p->used_high = p->used;
    p->live++;
    op->pool = p;
    op->dst = g->offset;
    op->n = n;
    op->value = g->id;
    hb_create(s, op);
    sim_submit(s, op);
    *out = (zcu_ptr)p->base + g->offset;
    return ZCU_SUCCESS;
}

void sim_pool_freed(struct op *op) {
    struct pool *p = op->pool;
    sim_poison(p->base + op->dst, op->n);
    op->marker->pending = 0;
    p->live--;
    finish(p);
}

void sim_pool_unimported(struct op *op) {
    struct pool *p = op->pool;
    for (uint64_t c = first_chunk(op->dst); c <= last_chunk(op->dst, op->n); c++)
        if (!--p->mapped[c]) unmap_chunk(p, c);
    p->live--;
    finish(p);
}

static zcu_result unimport(struct pool *p, zcu_ptr at, struct stream *s) {
    struct import **i = &p->imports;
    while (*i && (zcu_ptr)p->base + (*i)->offset + (*i)->shift != at) i = &(*i)->next;
    struct op *op = *i ? sim_op(OP_UNIMPORT) : NULL;
    if (!op) return *i ? ZCU_ERROR_OUT_OF_MEMORY : ZCU_ERROR_INVALID_VALUE;
    struct import *gone = *i;
    *i = gone->next;
    op->pool = p;
    op->dst = gone->offset + gone->shift;
    op->n = gone->size;
    op->value = gone->serial;
    free(gone);
    if (sim_breaks("unimport")) { /* before the stream's work */
        sim_pool_unimported(op);
        free(op);
        return ZCU_SUCCESS;
    }
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

zcu_result sim_pool_free(struct pool *p, zcu_ptr at, struct stream *s) {
    if (p->imported) return unimport(p, at, s);
    struct segment *g = sim_pool_segment(p, at);
    if (!g || (zcu_ptr)p->base + g->offset != at) return ZCU_ERROR_INVALID_VALUE;
    struct op *op = sim_op(OP_FREE);
    struct marker *m = op ? sim_marker_new(1) : NULL;
    if (!m) {
        free(op);
        return ZCU_ERROR_OUT_OF_MEMORY;
    }
    g->state = SEGMENT_FREED;
    g->stream = s->id;
    g->marker = m;
    g->freed_at = sim.sequence + 1;
    p->used -= g->size;
    op->pool = p;
    op->marker = sim_marker_ref(m);
    op->dst = g->offset;
    op->n = g->size;
    op->value = g->id;
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

static zcu_result alloc(zcu_ptr *out, size_t n, struct pool *p, struct stream *s) {
    if (!p || p->imported) return ZCU_ERROR_INVALID_VALUE;
    if (s->capture && s->capture->invalid) return ZCU_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (s->capture && p->exportable) return ZCU_ERROR_NOT_SUPPORTED;
    if (!s->capture && sim_capture_forbids()) return ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return sim_pool_alloc(p, n, s, out);
}

CALL(MemAllocFromPoolAsync, 11020, zcu_ptr *out, size_t n, zcu_pool pool, zcu_stream stream) {
    ENTER(MemAllocFromPoolAsync);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    return r ? r : alloc(out, n, pool_of(pool), s);
}

CALL(MemAllocAsync, 11020, zcu_ptr *out, size_t n, zcu_stream stream) {
    ENTER(MemAllocAsync);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (!sim_pool_default(s->ctx->device)) return ZCU_ERROR_OUT_OF_MEMORY;
    return alloc(out, n, sim.current_pool[s->ctx->device], s);
}

CALL(MemFreeAsync, 11020, zcu_ptr at, zcu_stream stream) {
    ENTER(MemFreeAsync);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    if (sim_capture_forbids()) return ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct pool *p = sim_pool_of(at);
    return p ? sim_pool_free(p, at, s) : ZCU_ERROR_INVALID_VALUE;
}

/* ---- export and import ---- */

CALL(MemPoolExportToShareableHandle, 11020, void *out, zcu_pool pool, int type, unsigned long long flags) {
    ENTER_UNSAFE(MemPoolExportToShareableHandle);
    struct pool *p = pool_of(pool);
    if (!p || !p->exportable || type != ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return ZCU_ERROR_INVALID_VALUE;
    int fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return ZCU_ERROR_UNKNOWN;
    p->handle_exported = true;
    sim_charge_exported(p->id, fd);
    *(int *)out = fd;
    return ZCU_SUCCESS;
}

CALL(MemPoolImportFromShareableHandle, 11020, zcu_pool *out, void *handle, int type, unsigned long long flags) {
    ENTER_UNSAFE(MemPoolImportFromShareableHandle);
    struct pool_control head;
    struct stat st;
    if (type != ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return ZCU_ERROR_INVALID_VALUE;
    int fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return ZCU_ERROR_INVALID_VALUE;
    ssize_t n = pread(fd, &head, offsetof(struct pool_control, lock), 0);
    bool ours = n == (ssize_t)offsetof(struct pool_control, lock) && head.magic == POOL_MAGIC && head.chunks <= MAX_CHUNKS &&
                !fstat(fd, &st) && (uint64_t)st.st_size >= CONTROL_BYTES + head.chunks * SIM_CHUNK;
    struct pool *p = ours ? pool_new(head.device < sim.devices ? head.device : -1, head.chunks, fd, true) : NULL;
    if (!p) {
        close(fd);
        return ours ? ZCU_ERROR_OUT_OF_MEMORY : ZCU_ERROR_INVALID_VALUE;
    }
    p->id = head.id;
    if (p->device >= 0 && sim_ordinal(p->device) < 0) p->access[p->device] = 0;
    sim_charge_import(p->id, p->device, 1, 0);
    *out = (zcu_pool)(void *)p;
    return ZCU_SUCCESS;
}

/* Another layout than that of all drivers seen; its own inverse. */
static void scramble(struct blob *b) {
    b->offset = ~b->offset;
    b->size = ~b->size;
}

/* From now on the export stands for what is behind these addresses. */
static void export_chunk(struct pool *p, uint64_t chunk) {
    int32_t *exported = &p->control->exported[chunk], old = *exported - 1, now = p->backing[chunk];
    if (old == now) return;
    p->exports[now]++;
    *exported = now + 1;
    if (old >= 0) {
        p->exports[old]--;
        settle(p, old);
    }
}

CALL(MemPoolExportPointer, 11020, zcu_pool_blob *out, zcu_ptr at) {
    ENTER_UNSAFE(MemPoolExportPointer);
    struct pool *p = sim_pool_of(at);
    struct segment *g = p && p->exportable ? sim_pool_segment(p, at) : NULL;
    if (!g || !p->handle_exported || (zcu_ptr)p->base + g->offset != at) return ZCU_ERROR_INVALID_VALUE;
    struct blob b = {.magic = POOL_MAGIC, .id = p->id, .serial = g->id, .offset = g->offset, .size = g->asked, .whole = g->asked};
    sim_robust_lock(&p->control->lock);
    for (uint64_t c = first_chunk(g->offset); c <= last_chunk(g->offset, g->asked); c++) export_chunk(p, c);
    pthread_mutex_unlock(&p->control->lock);
    if (sim_breaks("blob")) scramble(&b);
    memcpy(out, &b, sizeof b);
    return ZCU_SUCCESS;
}

/* What the real driver does above its limit: it overruns an array on its stack. */
static void overrun(const char *what) {
    sigset_t set;
    fprintf(stderr, "simcuda: import of %s\n", what);
    signal(SIGSEGV, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, SIGSEGV);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    raise(SIGSEGV);
    _exit(139);
}

static uint64_t import_chunks(void) {
    const char *fewer = getenv("SIMCUDA_IMPORT_CHUNKS");
    return fewer ? (uint64_t)strtol(fewer, NULL, 10) : SIM_IMPORT_CHUNKS;
}

static zcu_result map_import(struct pool *p, uint64_t offset, uint64_t size, uint64_t shift, bool wrong) {
    uint64_t from = first_chunk(offset), to = last_chunk(offset, size), put = shift / SIM_CHUNK;
    zcu_result r = ZCU_SUCCESS;
    sim_robust_lock(&p->control->lock);
    for (uint64_t c = from; c <= to; c++)
        if (!p->control->exported[c]) r = ZCU_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&p->control->lock);
    if (r) return r;
    if (to - from + 1 > import_chunks()) {
        while (sim_breaks("more-hang")) pause();
        if (!sim_breaks("more")) overrun("more chunks than it can bear");
        wrong = true;
    }
    for (uint64_t c = from; c <= to; c++) {
        sim_robust_lock(&p->control->lock);
        int32_t physical = p->control->exported[c] - 1;
        pthread_mutex_unlock(&p->control->lock);
        if (wrong) physical = (int32_t)p->chunks - 1; /* which nobody uses */
        if (!p->mapped[c + put] && map_chunk(p, c + put, physical)) {
            while (c-- > from)
                if (!--p->mapped[c + put]) unmap_chunk(p, c + put);
            return ZCU_ERROR_OUT_OF_MEMORY;
        }
        p->mapped[c + put]++;
    }
    return ZCU_SUCCESS;
}

CALL(MemPoolImportPointer, 11020, zcu_ptr *out, zcu_pool pool, zcu_pool_blob *blob) {
    ENTER_UNSAFE(MemPoolImportPointer);
    struct pool *p = pool_of(pool);
    struct blob b;
    memcpy(&b, blob, sizeof b);
    if (sim_breaks("blob")) scramble(&b);
    if (!p || !p->imported || b.magic != POOL_MAGIC || b.id != p->id || !b.size) return ZCU_ERROR_INVALID_VALUE;
    if (b.offset > p->chunks * SIM_CHUNK || b.size > p->chunks * SIM_CHUNK - b.offset) return ZCU_ERROR_INVALID_VALUE;
    for (struct import *i = p->imports; i; i = i->next)
        if (i->offset == b.offset && i->size == b.size) { /* the same address, and not counted: the first free unmaps both */
            *out = (zcu_ptr)p->base + b.offset;
            return ZCU_SUCCESS;
        }
    bool part = b.size != b.whole, again = p->last_imported >= b.serial;
    if (part && sim_breaks("part-crash")) overrun("a part of an allocation");
    while (part && sim_breaks("part-hang")) pause();
    struct import *i = malloc(sizeof *i);
    if (!i) return ZCU_ERROR_OUT_OF_MEMORY;
    uint64_t shift = 0;
    for (const struct import *o = p->imports; o && part && sim_breaks("apart"); o = o->next)
        if (o->serial == b.serial) shift = p->chunks / 2 * SIM_CHUNK; /* in the half that is never this full */
    bool wrong = sim_breaks("import") || (part && sim_breaks("part")) || (again && !part && sim_breaks("again"));
    zcu_result r = map_import(p, b.offset, b.size, shift, wrong);
    if (r) {
        free(i);
        return r;
    }
    *i = (struct import){p->imports, b.offset, b.size, sim.next_id++, b.serial, shift};
    p->imports = i;
    p->live++;
    if (b.serial > p->last_imported) p->last_imported = b.serial;
    hb_imported(p, b.serial);
    *out = (zcu_ptr)p->base + b.offset + shift;
    return ZCU_SUCCESS;
}

/* ---- for tests only ---- */

/* How many of them this process has now: what must be back at its old value when all is given back. */
SIM_EXPORT long simcuda_count(const char *what);
long simcuda_count(const char *what) {
    long n = 0;
    pthread_mutex_lock(&sim.lock);
    if (!strcmp(what, "streams")) {
        for (struct stream *s = sim.streams; s; s = s->next) n += !s->legacy;
    } else if (!strcmp(what, "events")) {
        for (struct event *e = sim.events; e; e = e->next) n++;
    } else if (!strcmp(what, "memory")) {
        for (struct linear *l = sim.linears; l; l = l->next) n++;
    } else if (!strcmp(what, "registered")) {
        for (struct hostreg *h = sim.hostregs; h; h = h->next) n += !h->allocated;
    } else if (!strcmp(what, "pools")) {
        for (struct pool *p = sim.pools; p; p = p->next) n += !p->is_default;
    } else if (!strcmp(what, "imports")) {
        for (struct pool *p = sim.pools; p; p = p->next) n += p->imported ? (long)p->live : 0;
    } else if (!strcmp(what, "allocations")) {
        for (struct pool *p = sim.pools; p; p = p->next) n += p->imported ? 0 : (long)p->live;
    } else n = sim_vmm_count(what);
    pthread_mutex_unlock(&sim.lock);
    return n;
}
