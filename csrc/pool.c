/* pool.c: see pool.h.
 *
 * What the driver does that shapes this file, each seen on driver 580.159.04 (H200):
 *   - A pointer cannot be exported before the pool's handle was, hence the fd at once (research/pool-ipc/verify_pool_swap.py).
 *   - Memory that was exported is never given back by a trim, and charged twice after one, hence the release threshold at its
 *     maximum, and no trim here (probe_retention.py).
 *   - A second import of one allocation gives the same address and no second reference; the first free unmaps both, hence the
 *     table of imports and its counts (probe_duplicate_import.py).
 *   - A blob that outlives its allocation imports without an error and shows other memory, hence the key: a buffer id is never
 *     given twice, so that what is remembered under it cannot be taken for another allocation (probe_blob_layout.py).
 *   - An import of more than 128 chunks overruns the importer's stack, hence the guard (repro_mempool_import_segv.py). */
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOBS 4096u /* remembered; ids are handed out in order, so that what is overwritten is among the oldest */

struct blob {
    uint64_t buffer_id, size;
    zcu_ptr base;             /* 0: empty */
    zcu_pool_blob bytes;
};

struct import {
    uint64_t buffer_id, size;
    zcu_ptr base;
    uint32_t count;           /* 0: empty */
    struct zcx_windows windows; /* step 0: imported whole */
};

struct zcx_pool {
    _Atomic uint32_t refs;
    pid_t owner;              /* process that made it; a child of fork() may only let go of memory */
    pthread_mutex_t lock;
    zcu_pool handle;
    zcu_uuid uuid;
    int ordinal;
    int fd;                   /* exporter; importer: -1 */
    /* exporter */
    struct blob *blobs;
    uint64_t exports;
    zcu_access_desc peers[ZCX_MAX_DEVICES]; /* whom access was given to */
    size_t npeers;
    /* importer: open addressing, linear probing, a power of two of them, never more than half full */
    struct import *imports;
    uint32_t capacity;
    _Atomic uint32_t mapped;
};

static struct zcx_pool *pool_alloc(int ordinal, const zcu_uuid *uuid) {
    struct zcx_pool *p = calloc(1, sizeof *p);

    if (!p) return NULL;
    if (pthread_mutex_init(&p->lock, NULL)) {
        free(p);
        return NULL;
    }
    p->refs = 1;
    p->owner = getpid();
    p->ordinal = ordinal;
    p->uuid = *uuid;
    p->fd = -1;
    return p;
}

static void pool_dealloc(struct zcx_pool *p) {
    free(p->blobs);
    free(p->imports);
    free(p);
}

/* ---- exporter ---- */

static int check_device(const struct zcx_driver *d, zcu_device device, int ordinal, struct zcx_err *err) {
    int pools, types, rc;

    rc = zcx_cu(err, "cuDeviceGetAttribute",
                d->DeviceGetAttribute(&pools, ZCU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, device));
    if (rc) return rc;
    if (!pools) return zcx_fail(err, ZCX_E_UNFIT, "device %d has no memory pools", ordinal);
    rc = zcx_cu(err, "cuDeviceGetAttribute",
                d->DeviceGetAttribute(&types, ZCU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, device));
    if (rc) return rc;
    if (!(types & ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return zcx_fail(err, ZCX_E_UNFIT, "memory pools of device %d cannot be shared as file descriptors (so it is on WSL2)",
                        ordinal);
    return 0;
}

/* torch gives peers access to the default pool only. In a process that allocates from ours, a strided copy between two
 * devices would die of an illegal address, and the context with it. */
static int give_peers_access(const struct zcx_driver *d, struct zcx_pool *p, zcu_device device, struct zcx_err *err) {
    int rc;

    for (int i = 0; i < d->count; i++) {
        zcu_device peer;
        int can = 0;
        if (i == p->ordinal) continue;
        rc = zcx_cu(err, "cuDeviceGet", d->DeviceGet(&peer, i));
        if (!rc) rc = zcx_cu(err, "cuDeviceCanAccessPeer", d->DeviceCanAccessPeer(&can, peer, device));
        if (rc) return rc;
        if (can)
            p->peers[p->npeers++] = (zcu_access_desc){.location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE, .id = i},
                                                      .flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    }
    if (!p->npeers) return 0;
    rc = zcx_cu(err, "cuMemPoolSetAccess", d->MemPoolSetAccess(p->handle, p->peers, p->npeers));
    if (rc) p->npeers = 0;
    return rc;
}

/* Access that was given must be taken back first: else a later pool that gets the same handle inherits it (NVIDIA bug
 * 5698116, published, not seen here). */
static void destroy_exporter(const struct zcx_driver *d, struct zcx_pool *p) {
    for (size_t i = 0; i < p->npeers; i++) p->peers[i].flags = ZCU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (p->npeers) d->MemPoolSetAccess(p->handle, p->peers, p->npeers);
    d->MemPoolDestroy(p->handle);
}

int zcx_pool_new(struct zcx_pool **out, int ordinal, struct zcx_err *err) {
    zcu_pool_props props = {
        .alloc_type = ZCU_MEM_ALLOCATION_TYPE_PINNED,
        .handle_types = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal},
    };
    uint64_t threshold = UINT64_MAX;
    struct zcx_pool *p;
    struct zcx_scope s;
    zcu_device device;
    int rc, fd = -1;

    if (ordinal < 0) return zcx_fail(err, ZCX_E_RANGE, "device %d", ordinal);
    /* No context: a parent that installs itself before torch has none yet, and nothing below needs one. */
    rc = zcx_scope_open(&s, -1, err);
    if (rc) return rc;
    rc = zcx_cu(err, "cuDeviceGet", s.d->DeviceGet(&device, ordinal));
    if (!rc) rc = check_device(s.d, device, ordinal, err);
    if (rc) goto close_scope;
    p = pool_alloc(ordinal, &s.d->uuid[ordinal]);
    if (!p) {
        rc = zcx_fail(err, ENOMEM, "no memory for a pool's bookkeeping");
        goto close_scope;
    }
    p->blobs = calloc(BLOBS, sizeof *p->blobs);
    if (!p->blobs) {
        rc = zcx_fail(err, ENOMEM, "no memory for a pool's blobs");
        goto dealloc;
    }
    rc = zcx_cu(err, "cuMemPoolCreate", s.d->MemPoolCreate(&p->handle, &props));
    if (rc) goto dealloc;
    rc = zcx_cu(err, "cuMemPoolSetAttribute",
                s.d->MemPoolSetAttribute(p->handle, ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    if (!rc) rc = give_peers_access(s.d, p, device, err);
    if (rc) goto destroy;
    rc = zcx_cu(err, "cuMemPoolExportToShareableHandle",
                s.d->MemPoolExportToShareableHandle(&fd, p->handle, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    if (rc) goto destroy;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
        rc = zcx_fail_errno(err, "fcntl");
        goto close_fd;
    }
    p->fd = fd;
    *out = p;
    zcx_scope_close(&s);
    return 0;

close_fd:
    close(fd);
destroy:
    destroy_exporter(s.d, p);
dealloc:
    pthread_mutex_destroy(&p->lock);
    pool_dealloc(p);
close_scope:
    zcx_scope_close(&s);
    return rc;
}

int zcx_pool_fd(const struct zcx_pool *p) { return p->fd; }
int zcx_pool_ordinal(const struct zcx_pool *p) { return p->ordinal; }
const zcu_uuid *zcx_pool_uuid(const struct zcx_pool *p) { return &p->uuid; }
zcu_pool zcx_pool_handle(const struct zcx_pool *p) { return p->handle; }

static int get_current(const struct zcx_driver *d, int ordinal, zcu_device *device, zcu_pool *current, struct zcx_err *err) {
    int rc = zcx_cu(err, "cuDeviceGet", d->DeviceGet(device, ordinal));
    if (!rc) rc = zcx_cu(err, "cuDeviceGetMemPool", d->DeviceGetMemPool(current, *device));
    return rc;
}

static int set_current(int ordinal, zcu_pool wanted, zcu_pool *previous, struct zcx_err *err) {
    struct zcx_scope s;
    zcu_device device;
    zcu_pool before;
    int rc = zcx_scope_open(&s, -1, err);

    if (rc) return rc;
    rc = get_current(s.d, ordinal, &device, &before, err);
    if (!rc) rc = zcx_cu(err, "cuDeviceSetMemPool", s.d->DeviceSetMemPool(device, wanted));
    zcx_scope_close(&s);
    if (!rc && previous) *previous = before;
    return rc;
}

int zcx_pool_make_current(struct zcx_pool *p, zcu_pool *previous, struct zcx_err *err) {
    return set_current(p->ordinal, p->handle, previous, err);
}

int zcx_pool_restore(int ordinal, zcu_pool previous, struct zcx_err *err) {
    return set_current(ordinal, previous, NULL, err);
}

int zcx_pool_is_current(struct zcx_pool *p, struct zcx_err *err) {
    struct zcx_scope s;
    zcu_device device;
    zcu_pool current;
    int rc = zcx_scope_open(&s, -1, err);

    if (rc) return rc;
    rc = get_current(s.d, p->ordinal, &device, &current, err);
    zcx_scope_close(&s);
    return rc ? rc : current == p->handle;
}

int zcx_pool_alloc(struct zcx_pool *p, uint64_t nbytes, zcu_stream stream, zcu_ptr *out, struct zcx_err *err) {
    struct zcx_scope s;
    zcu_ptr ptr;
    int rc = zcx_scope_open(&s, p->ordinal, err);

    if (rc) return rc;
    rc = zcx_cu(err, "cuMemAllocFromPoolAsync", s.d->MemAllocFromPoolAsync(&ptr, nbytes, p->handle, stream));
    zcx_scope_close(&s);
    if (!rc) *out = ptr;
    return rc;
}

int zcx_pool_free(struct zcx_pool *p, zcu_ptr ptr, zcu_stream stream, struct zcx_err *err) {
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, p->ordinal, err);

    if (rc) return rc;
    rc = zcx_cu(err, "cuMemFreeAsync", s.d->MemFreeAsync(ptr, stream));
    zcx_scope_close(&s);
    return rc;
}

static int refuse_chunks(uint64_t alloc_bytes, uint32_t chunks, struct zcx_err *err) {
    return zcx_fail(err, ZCX_E_UNFIT,
                    "an allocation of %llu MiB lies in %u chunks of 32 MiB, and the driver imports no more than %u at once safely",
                    (unsigned long long)(alloc_bytes >> 20), chunks, zcx_chunk_limit());
}

/* More than the limit wherever it begins? Then, without windows, it is not even exported: that costs 6 ms for 16 GiB, and
 * memory that was exported once is never given back. */
static int too_large(uint64_t alloc_bytes) { return alloc_bytes > zcx_chunk_limit() * ZCX_CHUNK_BYTES; }

/* The window to import with, 0 for none, or the guard's refusal. */
static int choose_window(const unsigned char blob[64], uint64_t alloc_bytes, enum zcx_windows_use use, uint32_t *window,
                         struct zcx_err *err) {
    uint32_t chunks = zcx_blob_chunks(blob, alloc_bytes), limit = zcx_chunk_limit();
    uint64_t offset;

    *window = 0;
    if (use != ZCX_WINDOWS_PROVE && chunks <= limit) return 0;
    if (use == ZCX_WINDOWS_NO) return refuse_chunks(alloc_bytes, chunks, err);
    if (zcx_blob_fields(blob, alloc_bytes, &offset))
        return zcx_fail(err, ZCX_E_UNFIT, "this driver lays out what it exports in a way that is not known, so it cannot be cut into windows");
    *window = use == ZCX_WINDOWS_PROVE ? 1 : limit < ZCX_WINDOW_CHUNKS ? limit : ZCX_WINDOW_CHUNKS;
    return 0;
}

/* Under the lock: two threads that export the same allocation pay once. */
static int blob_of(const struct zcx_driver *d, struct zcx_pool *p, const struct zcx_ptr_info *info, zcu_pool_blob *out,
                   struct zcx_err *err) {
    struct blob *b = &p->blobs[info->buffer_id % BLOBS];
    zcu_pool_blob fresh;
    int rc;

    if (b->base != info->base || b->buffer_id != info->buffer_id || b->size != info->size) {
        rc = zcx_cu(err, "cuMemPoolExportPointer", d->MemPoolExportPointer(&fresh, info->base));
        if (rc) return rc;
        *b = (struct blob){.buffer_id = info->buffer_id, .size = info->size, .base = info->base, .bytes = fresh};
        p->exports++;
    }
    *out = b->bytes;
    return 0;
}

int zcx_pool_export(struct zcx_pool *p, zcu_ptr ptr, uint64_t nbytes, enum zcx_windows_use windows, struct zcx_export *out,
                    struct zcx_err *err) {
    struct zcx_ptr_info info;
    struct zcx_scope s;
    zcu_pool_blob blob;
    uint32_t window;
    int rc;

    if (p->fd < 0) return zcx_fail(err, ZCX_E_RANGE, "only the process that made a pool exports pointers of it");
    rc = zcx_scope_open(&s, p->ordinal, err);
    if (rc) return rc;
    rc = zcx_driver_ptr_info(s.d, ptr, &info, err);
    if (rc) goto close_scope;
    if (info.type != ZCU_MEMORYTYPE_DEVICE) {
        rc = zcx_fail(err, ZCX_E_UNFIT, "this is no device memory that CUDA knows");
        goto close_scope;
    }
    if (info.pool != p->handle) {
        rc = zcx_fail(err, ZCX_E_UNFIT, "%s",
                      info.pool ? "it was allocated from another memory pool than ours, which cannot be shared"
                                : "it was not allocated from a memory pool");
        goto close_scope;
    }
    if (ptr < info.base || ptr - info.base > info.size || nbytes > info.size - (ptr - info.base)) {
        rc = zcx_fail(err, ZCX_E_RANGE, "%llu bytes reach beyond the allocation of %llu", (unsigned long long)nbytes,
                      (unsigned long long)info.size);
        goto close_scope;
    }
    if (windows == ZCX_WINDOWS_NO && too_large(info.size)) {
        rc = refuse_chunks(info.size, zcx_blob_chunks((unsigned char[64]){0}, info.size), err);
        goto close_scope;
    }
    pthread_mutex_lock(&p->lock);
    rc = blob_of(s.d, p, &info, &blob, err);
    pthread_mutex_unlock(&p->lock);
    if (!rc) rc = choose_window(blob.bytes, info.size, windows, &window, err);
    if (rc) goto close_scope;
    out->window = window;
    out->buffer_id = info.buffer_id;
    out->alloc_bytes = info.size;
    out->offset = ptr - info.base;
    memcpy(out->blob, blob.bytes, sizeof out->blob);
close_scope:
    zcx_scope_close(&s);
    return rc;
}

int zcx_pool_usage(struct zcx_pool *p, struct zcx_pool_usage *out, struct zcx_err *err) {
    static const int which[4] = {ZCU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, ZCU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
                                 ZCU_MEMPOOL_ATTR_USED_MEM_CURRENT, ZCU_MEMPOOL_ATTR_USED_MEM_HIGH};
    uint64_t values[4] = {0}, exports;
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, -1, err);

    if (rc) return rc;
    for (int i = 0; i < 4 && !rc; i++)
        rc = zcx_cu(err, "cuMemPoolGetAttribute", s.d->MemPoolGetAttribute(p->handle, which[i], &values[i]));
    pthread_mutex_lock(&p->lock);
    exports = p->exports;
    pthread_mutex_unlock(&p->lock);
    zcx_scope_close(&s);
    if (rc) return rc;
    *out = (struct zcx_pool_usage){.reserved = values[0], .reserved_high = values[1], .used = values[2],
                                   .used_high = values[3], .exports = exports};
    return 0;
}

/* ---- importer ---- */

int zcx_pool_import(struct zcx_pool **out, int fd, const zcu_uuid *uuid, struct zcx_err *err) {
    zcu_access_desc access = {.location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const struct zcx_driver *d;
    struct zcx_scope s;
    struct zcx_pool *p;
    int rc, ordinal;

    rc = zcx_driver_open(&d, err);
    if (rc) return rc;
    if (zcx_driver_find(d, uuid, &ordinal)) return 1;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    p = pool_alloc(ordinal, uuid);
    if (!p) {
        rc = zcx_fail(err, ENOMEM, "no memory for a pool's bookkeeping");
        goto close_scope;
    }
    rc = zcx_cu(err, "cuMemPoolImportFromShareableHandle",
                d->MemPoolImportFromShareableHandle(&p->handle, (void *)(intptr_t)fd,
                                                    ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    if (rc) goto dealloc;
    /* The descriptor names its GPU by itself and imports anywhere, but where that is not the device in use nobody has access
     * until it is set (driver 580.159.04, two H200s). Where it is, this changes nothing. */
    access.location.id = ordinal;
    rc = zcx_cu(err, "cuMemPoolSetAccess", d->MemPoolSetAccess(p->handle, &access, 1));
    if (rc) goto destroy;
    zcx_scope_close(&s);
    *out = p;
    return 0;

destroy:
    d->MemPoolDestroy(p->handle);
dealloc:
    pthread_mutex_destroy(&p->lock);
    pool_dealloc(p);
close_scope:
    zcx_scope_close(&s);
    return rc;
}

static uint32_t place_of(uint64_t buffer_id, uint32_t capacity) {
    return (uint32_t)((buffer_id * 0x9E3779B97F4A7C15ull) >> 32) & (capacity - 1);
}

/* The entry of this id, or the empty one where it would go. The table is never full. */
static struct import *find(struct import *table, uint32_t capacity, uint64_t buffer_id) {
    uint32_t i = place_of(buffer_id, capacity);
    while (table[i].count && table[i].buffer_id != buffer_id) i = (i + 1) & (capacity - 1);
    return &table[i];
}

static int make_room(struct zcx_pool *p, struct zcx_err *err) {
    uint32_t capacity = p->capacity ? p->capacity : 32;
    struct import *larger;

    while (p->mapped + 1 > capacity / 2) {
        if (capacity > UINT32_MAX / 2) return zcx_fail(err, ZCX_E_LIMIT, "%u allocations are imported already", p->mapped);
        capacity *= 2;
    }
    if (capacity == p->capacity) return 0;
    larger = calloc(capacity, sizeof *larger);
    if (!larger) return zcx_fail(err, ENOMEM, "no memory for a table of %u imports", capacity);
    for (uint32_t i = 0; i < p->capacity; i++)
        if (p->imports[i].count) *find(larger, capacity, p->imports[i].buffer_id) = p->imports[i];
    free(p->imports);
    p->imports = larger;
    p->capacity = capacity;
    return 0;
}

/* Leaves no hole: an entry after it that was put off by linear probing moves up, so that no look-up ends too early. */
static void forget(struct zcx_pool *p, struct import *gone) {
    uint32_t mask = p->capacity - 1, hole = (uint32_t)(gone - p->imports);

    for (uint32_t i = (hole + 1) & mask; p->imports[i].count; i = (i + 1) & mask) {
        uint32_t home = place_of(p->imports[i].buffer_id, p->capacity);
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            p->imports[hole] = p->imports[i];
            hole = i;
        }
    }
    p->imports[hole].count = 0;
}

/* Give up windows [from, to) of an import. The first failure is the one to report: the context is lost then. */
static int free_windows(const struct zcx_driver *d, const struct zcx_windows *w, zcu_ptr base, uint64_t from, uint64_t to,
                        zcu_stream stream, struct zcx_err *err) {
    int rc = 0;
    for (uint64_t k = from; k < to && !rc; k++) {
        uint64_t start, bytes;
        zcx_windows_at(w, k, &start, &bytes);
        rc = zcx_cu(err, "cuMemFreeAsync", d->MemFreeAsync(base + start, stream));
    }
    return rc;
}

/* One import per window. They must land side by side, as they lie in the exporter. */
static int import_windows(const struct zcx_driver *d, struct zcx_pool *p, const struct zcx_export *e,
                          const struct zcx_windows *w, zcu_ptr *base, struct zcx_err *err) {
    uint64_t count = zcx_windows_count(w), k;
    int rc = 0;

    for (k = 0; k < count; k++) {
        uint64_t start, bytes;
        zcu_pool_blob blob;
        zcu_ptr ptr;
        zcx_windows_at(w, k, &start, &bytes);
        zcx_windows_blob(w, k, e->blob, blob.bytes);
        rc = zcx_cu(err, "cuMemPoolImportPointer", d->MemPoolImportPointer(&ptr, p->handle, &blob));
        if (rc) break;
        if (k == 0) *base = ptr;
        if (ptr != *base + start) {
            d->MemFreeAsync(ptr, NULL);
            rc = zcx_fail(err, ZCX_E_UNFIT, "the driver did not import window %llu of %llu next to the one before it",
                          (unsigned long long)k, (unsigned long long)count);
            break;
        }
    }
    if (rc) free_windows(d, w, *base, 0, k, NULL, NULL);
    return rc;
}

static int import_whole(const struct zcx_driver *d, struct zcx_pool *p, const struct zcx_export *e, zcu_ptr *base,
                        struct zcx_err *err) {
    zcu_pool_blob blob;
    uint32_t chunks = zcx_blob_chunks(e->blob, e->alloc_bytes);

    /* What the fields say is the peer's word too: a size above the limit is refused whatever they are. */
    if (too_large(e->alloc_bytes) || chunks > zcx_chunk_limit()) return refuse_chunks(e->alloc_bytes, chunks, err);
    memcpy(blob.bytes, e->blob, sizeof blob.bytes);
    return zcx_cu(err, "cuMemPoolImportPointer", d->MemPoolImportPointer(base, p->handle, &blob));
}

static int map_locked(const struct zcx_driver *d, struct zcx_pool *p, const struct zcx_export *e, zcu_ptr *base,
                      struct zcx_err *err) {
    struct import *known = p->capacity ? find(p->imports, p->capacity, e->buffer_id) : NULL;
    struct zcx_windows windows = {0};
    uint64_t offset;
    zcu_ptr ptr = 0;
    int rc;

    if (known && known->count) {
        if (known->size != e->alloc_bytes)
            return zcx_fail(err, ZCX_E_PROTOCOL, "buffer %llu has %llu bytes, and was named with %llu",
                            (unsigned long long)e->buffer_id, (unsigned long long)known->size,
                            (unsigned long long)e->alloc_bytes);
        if (known->count == UINT32_MAX)
            return zcx_fail(err, ZCX_E_LIMIT, "buffer %llu is imported too often", (unsigned long long)e->buffer_id);
        known->count++;
        *base = known->base;
        return 0;
    }
    if (e->alloc_bytes == 0) return zcx_fail(err, ZCX_E_PROTOCOL, "an allocation of no bytes");
    if (e->window > zcx_chunk_limit()) return zcx_fail(err, ZCX_E_UNFIT, "a window of %u chunks is above the limit", e->window);
    if (e->window) {
        if (zcx_blob_fields(e->blob, e->alloc_bytes, &offset))
            return zcx_fail(err, ZCX_E_UNFIT, "what was exported is laid out in a way that is not known here");
        windows = zcx_windows_of(offset, e->alloc_bytes, e->window);
    }
    rc = make_room(p, err);
    if (!rc) rc = e->window ? import_windows(d, p, e, &windows, &ptr, err) : import_whole(d, p, e, &ptr, err);
    if (rc) return rc;
    *find(p->imports, p->capacity, e->buffer_id) =
        (struct import){.buffer_id = e->buffer_id, .size = e->alloc_bytes, .base = ptr, .count = 1, .windows = windows};
    p->mapped++;
    *base = ptr;
    return 0;
}

int zcx_pool_map(struct zcx_pool *p, const struct zcx_export *e, zcu_ptr *base, struct zcx_err *err) {
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, p->ordinal, err);

    if (rc) return rc;
    pthread_mutex_lock(&p->lock);
    rc = map_locked(s.d, p, e, base, err);
    pthread_mutex_unlock(&p->lock);
    zcx_scope_close(&s);
    return rc;
}

static int free_import(const struct zcx_driver *d, const struct import *i, zcu_stream stream, struct zcx_err *err) {
    if (!i->windows.step) return zcx_cu(err, "cuMemFreeAsync", d->MemFreeAsync(i->base, stream));
    return free_windows(d, &i->windows, i->base, 0, zcx_windows_count(&i->windows), stream, err);
}

static int unmap_locked(const struct zcx_driver *d, struct zcx_pool *p, uint64_t buffer_id, zcu_stream stream, int *last,
                        struct zcx_err *err) {
    struct import *known = p->capacity ? find(p->imports, p->capacity, buffer_id) : NULL;
    int rc;

    if (!known || !known->count)
        return zcx_fail(err, ZCX_E_RANGE, "buffer %llu is not imported here", (unsigned long long)buffer_id);
    *last = known->count == 1;
    if (*last) {
        rc = free_import(d, known, stream, err);
        if (rc) return rc; /* still imported, and still counted */
        forget(p, known);
        p->mapped--;
    } else {
        known->count--;
    }
    return 0;
}

int zcx_pool_unmap(struct zcx_pool *p, uint64_t buffer_id, zcu_stream stream, int *unmapped, struct zcx_err *err) {
    struct zcx_scope s;
    int last = 0, rc = zcx_scope_open(&s, p->ordinal, err);

    if (rc) return rc;
    pthread_mutex_lock(&p->lock);
    rc = unmap_locked(s.d, p, buffer_id, stream, &last, err);
    pthread_mutex_unlock(&p->lock);
    zcx_scope_close(&s);
    if (!rc && unmapped) *unmapped = last;
    return rc;
}

uint32_t zcx_pool_mapped(struct zcx_pool *p) { return p->mapped; }

/* ---- both ---- */

struct zcx_pool *zcx_pool_ref(struct zcx_pool *p) {
    atomic_fetch_add_explicit(&p->refs, 1, memory_order_relaxed);
    return p;
}

void zcx_pool_unref(struct zcx_pool *p) {
    struct zcx_scope s;

    if (!p || atomic_fetch_sub_explicit(&p->refs, 1, memory_order_acq_rel) != 1) return;
    if (p->owner != getpid()) {
        /* Neither the driver, which does not survive a fork, nor the descriptor, whose number the child may have given to
         * something else by now, nor the mutex, which a thread of the parent may have held. */
        pool_dealloc(p);
        return;
    }
    if (p->fd >= 0) close(p->fd);
    if (zcx_scope_open(&s, p->fd >= 0 ? -1 : p->ordinal, NULL) == 0) {
        if (p->fd >= 0) {
            destroy_exporter(s.d, p);
        } else {
            for (uint32_t i = 0; i < p->capacity; i++)
                if (p->imports[i].count) free_import(s.d, &p->imports[i], NULL, NULL);
            s.d->MemPoolDestroy(p->handle);
        }
        zcx_scope_close(&s);
    }
    pthread_mutex_destroy(&p->lock);
    pool_dealloc(p);
}
