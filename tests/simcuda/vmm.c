/* vmm.c: virtual memory management: physical memory by handle, address ranges, mappings with rights, descriptors.
 *
 * A block is the physical memory behind a handle: a memfd, whose first page says what it is. It stays charged to the device
 * until its last handle, mapping and descriptor is gone in every process. An import is a block of its own, with a handle of its
 * own, on the same file. Mappings start without any access. Fresh memory is never zero at its beginning and its end. */
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

#define BLOCK_MAGIC 0x6b636f6c62617563ull
#define POISONED_GRAINS 64 /* of fresh memory, one page each */

struct block_head { uint64_t magic, id, size; int device, handle_types; };

struct reservation {
    struct reservation *next;
    unsigned char *base;
    uint64_t size;
};

static struct { unsigned char *base; uint64_t size; } last_freed; /* the next reservation of that size gets it again */

/* ---- finding things ---- */

static struct block *block_of(zcu_mem handle) {
    for (struct block *b = sim.blocks; b; b = b->next)
        if (b->handle == handle && b->handles) return b;
    return NULL;
}

static struct reservation *reservation_of(zcu_ptr p, uint64_t n) {
    for (struct reservation *r = sim.reservations; r; r = r->next)
        if (p >= (zcu_ptr)r->base && n <= r->size && p - (zcu_ptr)r->base <= r->size - n) return r;
    return NULL;
}

bool sim_vmm_reserved(zcu_ptr p) { return reservation_of(p, 1) != NULL; }

struct mapping *sim_vmm_mapping(zcu_ptr p) {
    for (struct mapping *m = sim.mappings; m; m = m->next)
        if (p >= m->base && p - m->base < m->size) return m;
    return NULL;
}

bool sim_vmm_access(zcu_ptr p, uint64_t n, int device, int rights) {
    while (n) {
        struct mapping *m = sim_vmm_mapping(p);
        if (!m || (m->access[device] & rights) != rights) return false;
        uint64_t here = m->base + m->size - p;
        if (here >= n) break;
        p += here;
        n -= here;
    }
    return true;
}

/* [p, p + n) is whole mappings, one after the other without a gap. */
static bool whole_mappings(zcu_ptr p, uint64_t n) {
    while (n) {
        struct mapping *m = sim_vmm_mapping(p);
        if (!m || m->base != p || m->size > n) return false;
        p += m->size;
        n -= m->size;
    }
    return true;
}

/* ---- blocks ---- */

static struct block *block_new(int fd, const struct block_head *h, bool imported) {
    struct block *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    *b = (struct block){.next = sim.blocks, .id = h->id, .handle = sim.next_id++ << 8 | 0x5a, .size = h->size, .fd = fd,
                        .device = h->device, .handle_types = h->handle_types, .handles = 1, .imported = imported};
    sim.blocks = b;
    return b;
}

/* When this process has neither handle nor mapping left. */
static void settle(struct block *b) {
    if (b->handles || b->maps) return;
    struct block **at = &sim.blocks;
    while (*at != b) at = &(*at)->next;
    *at = b->next;
    close(b->fd);
    if (b->imported) sim_charge_import(b->id, b->device, -1, 0);
    else sim_charge_destroyed(b->id, b->size);
    free(b);
}

static int file_new(const struct block_head *h) {
    unsigned char poison[4096];
    int fd = memfd_create("simcuda-memory", MFD_CLOEXEC);
    if (fd < 0) return -1;
    memset(poison, SIM_POISON, sizeof poison);
    bool ok = !ftruncate(fd, (off_t)(SIM_BLOCK_HEAD + h->size)) && pwrite(fd, h, sizeof *h, 0) == (ssize_t)sizeof *h;
    for (uint64_t g = 0; ok && g < h->size / SIM_GRAIN && g < POISONED_GRAINS; g++)
        ok = pwrite(fd, poison, sizeof poison, (off_t)(SIM_BLOCK_HEAD + g * SIM_GRAIN)) == (ssize_t)sizeof poison;
    ok = ok && pwrite(fd, poison, sizeof poison, (off_t)(SIM_BLOCK_HEAD + h->size - sizeof poison)) == (ssize_t)sizeof poison;
    if (!ok) {
        close(fd);
        return -1;
    }
    return fd;
}

static zcu_result device_of(const zcu_mem_props *props, int *device) {
    if (props->type != ZCU_MEM_ALLOCATION_TYPE_PINNED) return ZCU_ERROR_INVALID_VALUE;
    if (props->location.type != ZCU_MEM_LOCATION_TYPE_DEVICE) return ZCU_ERROR_INVALID_VALUE;
    if ((*device = sim_physical(props->location.id)) < 0) return ZCU_ERROR_INVALID_DEVICE;
    return props->handle_types & ~ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? ZCU_ERROR_NOT_SUPPORTED : ZCU_SUCCESS;
}

CALL(MemGetAllocationGranularity, 10020, size_t *out, const zcu_mem_props *props, int which) {
    ENTER(MemGetAllocationGranularity);
    int device;
    zcu_result r = device_of(props, &device);
    if (r) return r;
    if (which != ZCU_MEM_ALLOC_GRANULARITY_MINIMUM && which != ZCU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return ZCU_ERROR_INVALID_VALUE;
    *out = SIM_GRAIN;
    return ZCU_SUCCESS;
}

CALL(MemCreate, 10020, zcu_mem *out, size_t n, const zcu_mem_props *props, unsigned long long flags) {
    ENTER_UNSAFE(MemCreate);
    struct block_head h = {.magic = BLOCK_MAGIC, .size = n, .handle_types = props->handle_types};
    zcu_result r = device_of(props, &h.device);
    if (r) return r;
    if (!n || n % SIM_GRAIN || flags) return ZCU_ERROR_INVALID_VALUE;
    if (getrandom(&h.id, sizeof h.id, 0) != sizeof h.id) abort();
    h.id |= 1; /* 0 is nobody's */
    if ((r = sim_charge(h.device, h.id, (int64_t)n))) return r;
    int fd = file_new(&h);
    struct block *b = fd < 0 ? NULL : block_new(fd, &h, false);
    if (!b) {
        if (fd >= 0) close(fd);
        sim_charge_destroyed(h.id, 0);
        return ZCU_ERROR_OUT_OF_MEMORY;
    }
    hb_block_new(b);
    *out = b->handle;
    return ZCU_SUCCESS;
}

CALL(MemRelease, 10020, zcu_mem handle) {
    ENTER_UNSAFE(MemRelease);
    struct block *b = block_of(handle);
    if (!b) return ZCU_ERROR_INVALID_VALUE;
    b->handles--;
    settle(b);
    return ZCU_SUCCESS;
}

CALL(MemRetainAllocationHandle, 11000, zcu_mem *out, void *at) {
    ENTER_UNSAFE(MemRetainAllocationHandle);
    struct mapping *m = sim_vmm_mapping((zcu_ptr)at);
    if (!m) return ZCU_ERROR_INVALID_VALUE;
    m->block->handles++;
    *out = m->block->handle;
    return ZCU_SUCCESS;
}

CALL(MemGetAllocationPropertiesFromHandle, 10020, zcu_mem_props *out, zcu_mem handle) {
    ENTER(MemGetAllocationPropertiesFromHandle);
    struct block *b = block_of(handle);
    if (!b) return ZCU_ERROR_INVALID_VALUE;
    int ordinal = sim_ordinal(b->device);
    *out = (zcu_mem_props){.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .handle_types = b->handle_types,
                           .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, ordinal < 0 ? 0 : ordinal}};
    return ZCU_SUCCESS;
}

/* ---- export and import ---- */

CALL(MemExportToShareableHandle, 10020, void *out, zcu_mem handle, int type, unsigned long long flags) {
    ENTER_UNSAFE(MemExportToShareableHandle);
    struct block *b = block_of(handle);
    if (!b || type != ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(b->handle_types & type) || flags)
        return ZCU_ERROR_INVALID_VALUE;
    int fd = fcntl(b->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return ZCU_ERROR_UNKNOWN;
    sim_charge_exported(b->id, fd);
    *(int *)out = fd;
    return ZCU_SUCCESS;
}

CALL(MemImportFromShareableHandle, 10020, zcu_mem *out, void *handle, int type) {
    ENTER_UNSAFE(MemImportFromShareableHandle);
    struct block_head h;
    struct stat st;
    if (type != ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return ZCU_ERROR_INVALID_VALUE;
    int fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return ZCU_ERROR_INVALID_VALUE;
    zcu_result r = ZCU_SUCCESS;
    if (pread(fd, &h, sizeof h, 0) != (ssize_t)sizeof h || h.magic != BLOCK_MAGIC || fstat(fd, &st) ||
        (uint64_t)st.st_size != SIM_BLOCK_HEAD + h.size) r = ZCU_ERROR_INVALID_VALUE;
    else if (h.device < 0 || h.device >= sim.devices) r = ZCU_ERROR_NOT_SUPPORTED;
    if (sim_breaks("vmm-crash")) raise(SIGSEGV);
    while (sim_breaks("vmm-hang")) pause();
    if (!r && sim_breaks("vmm")) { /* it shows other memory */
        close(fd);
        if ((fd = file_new(&h)) < 0) return ZCU_ERROR_OUT_OF_MEMORY;
    }
    struct block *b = r ? NULL : block_new(fd, &h, true);
    if (!b) {
        close(fd);
        return r ? r : ZCU_ERROR_OUT_OF_MEMORY;
    }
    sim_charge_import(b->id, b->device, 1, b->size);
    sim_charge_exported(b->id, fd);
    *out = b->handle;
    return ZCU_SUCCESS;
}

/* ---- address ranges ---- */

CALL(MemAddressReserve, 10020, zcu_ptr *out, size_t n, size_t alignment, zcu_ptr wish, unsigned long long flags) {
    ENTER_UNSAFE(MemAddressReserve);
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!n || n % SIM_GRAIN || alignment & (alignment - 1) || flags) return ZCU_ERROR_INVALID_VALUE;
    if (alignment < SIM_GRAIN) alignment = SIM_GRAIN;
    if (n > (1ull << 47) || alignment > (1ull << 40)) return ZCU_ERROR_OUT_OF_MEMORY;
    if (!wish && last_freed.size == n) wish = (zcu_ptr)last_freed.base;
    struct reservation *r = calloc(1, sizeof *r);
    if (!r) return ZCU_ERROR_OUT_OF_MEMORY;
    unsigned char *base = MAP_FAILED;
    if (wish && wish % alignment == 0) base = mmap((void *)wish, n, PROT_NONE, how | MAP_FIXED_NOREPLACE, -1, 0);
    if (base == MAP_FAILED) {
        uint64_t slide = (1 + sim_random() % 64) * SIM_GRAIN, room = n + alignment + slide;
        unsigned char *p = mmap(NULL, room, PROT_NONE, how, -1, 0);
        if (p == MAP_FAILED) {
            free(r);
            return ZCU_ERROR_OUT_OF_MEMORY;
        }
        base = (unsigned char *)(((uintptr_t)p + slide + alignment - 1) & ~(uintptr_t)(alignment - 1));
        if (base > p) munmap(p, (size_t)(base - p));
        if (p + room > base + n) munmap(base + n, (size_t)(p + room - (base + n)));
    }
    madvise(base, n, MADV_DONTDUMP);
    *r = (struct reservation){sim.reservations, base, n};
    sim.reservations = r;
    *out = (zcu_ptr)base;
    return ZCU_SUCCESS;
}

CALL(MemAddressFree, 10020, zcu_ptr p, size_t n) {
    ENTER_UNSAFE(MemAddressFree);
    struct reservation **at = &sim.reservations;
    while (*at && ((zcu_ptr)(*at)->base != p || (*at)->size != n)) at = &(*at)->next;
    struct reservation *r = *at;
    if (!r) return ZCU_ERROR_INVALID_VALUE;
    for (struct mapping *m = sim.mappings; m; m = m->next)
        if (m->base >= p && m->base - p < n) return ZCU_ERROR_INVALID_VALUE;
    *at = r->next;
    munmap(r->base, r->size);
    last_freed.base = r->base;
    last_freed.size = r->size;
    free(r);
    return ZCU_SUCCESS;
}

/* ---- mappings ---- */

CALL(MemMap, 10020, zcu_ptr p, size_t n, size_t offset, zcu_mem handle, unsigned long long flags) {
    ENTER_UNSAFE(MemMap);
    struct block *b = block_of(handle);
    if (!b || !n || p % SIM_GRAIN || n % SIM_GRAIN || offset || n > b->size || flags) return ZCU_ERROR_INVALID_VALUE;
    if (!reservation_of(p, n)) return ZCU_ERROR_INVALID_VALUE;
    for (struct mapping *m = sim.mappings; m; m = m->next)
        if (p < m->base + m->size && m->base < p + n) return ZCU_ERROR_INVALID_VALUE;
    struct mapping *m = calloc(1, sizeof *m);
    if (!m) return ZCU_ERROR_OUT_OF_MEMORY;
    *m = (struct mapping){.next = sim.mappings, .base = p, .size = n, .id = sim.next_id++, .block = b};
    sim.mappings = m;
    b->maps++;
    return ZCU_SUCCESS;
}

/* What the CPU may do there: the most that any device may. */
static int show(const struct mapping *m) {
    int rights = 0, how = MAP_FIXED | MAP_NORESERVE;
    for (int i = 0; i < SIM_DEVICES; i++) rights |= m->access[i];
    if (!rights)
        return mmap((void *)m->base, m->size, PROT_NONE, how | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED;
    int protection = PROT_READ | (rights & 2 ? PROT_WRITE : 0);
    if (protection == PROT_READ && sim_breaks("vmm-read")) /* other memory */
        return mmap((void *)m->base, m->size, PROT_READ, how | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED;
    return mmap((void *)m->base, m->size, protection, how | MAP_SHARED, m->block->fd, SIM_BLOCK_HEAD) == MAP_FAILED;
}

CALL(MemUnmap, 10020, zcu_ptr p, size_t n) {
    ENTER_UNSAFE(MemUnmap);
    if (!n || !whole_mappings(p, n)) return ZCU_ERROR_INVALID_VALUE;
    hb_unmapping(p, n);
    for (struct mapping **at = &sim.mappings; *at;) {
        struct mapping *m = *at;
        if (m->base < p || m->base - p >= n) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        memset(m->access, 0, sizeof m->access);
        if (show(m)) abort();
        m->block->maps--;
        settle(m->block);
        free(m);
    }
    return ZCU_SUCCESS;
}

CALL(MemSetAccess, 10020, zcu_ptr p, size_t n, const zcu_access_desc *list, size_t count) {
    ENTER_UNSAFE(MemSetAccess);
    if (!n || !count || !whole_mappings(p, n)) return ZCU_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        int d = list[i].location.type == ZCU_MEM_LOCATION_TYPE_DEVICE ? sim_physical(list[i].location.id) : -1;
        if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
        if (list[i].flags != ZCU_MEM_ACCESS_FLAGS_PROT_NONE && list[i].flags != ZCU_MEM_ACCESS_FLAGS_PROT_READ &&
            list[i].flags != ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE) return ZCU_ERROR_INVALID_VALUE;
        for (uint64_t at = 0; at < n; at += sim_vmm_mapping(p + at)->size) {
            int of = sim_vmm_mapping(p + at)->block->device;
            if (of != d && !sim_peers(of, d)) return ZCU_ERROR_INVALID_DEVICE;
        }
    }
    for (uint64_t at = 0; at < n; at += sim_vmm_mapping(p + at)->size) {
        struct mapping *m = sim_vmm_mapping(p + at);
        uint8_t before[SIM_DEVICES];
        memcpy(before, m->access, sizeof before);
        for (size_t i = 0; i < count; i++) m->access[sim_physical(list[i].location.id)] = (uint8_t)list[i].flags;
        if (show(m)) {
            memcpy(m->access, before, sizeof before);
            return ZCU_ERROR_OUT_OF_MEMORY;
        }
    }
    return ZCU_SUCCESS;
}

CALL(MemGetAccess, 10020, unsigned long long *flags, const zcu_location *location, zcu_ptr p) {
    ENTER(MemGetAccess);
    struct mapping *m = sim_vmm_mapping(p);
    int d = location->type == ZCU_MEM_LOCATION_TYPE_DEVICE ? sim_physical(location->id) : -1;
    if (!m || d < 0) return ZCU_ERROR_INVALID_VALUE;
    *flags = m->access[d];
    return ZCU_SUCCESS;
}

long sim_vmm_count(const char *what) {
    long n = 0;
    if (!strcmp(what, "handles"))
        for (struct block *b = sim.blocks; b; b = b->next) n += b->handles;
    else if (!strcmp(what, "blocks"))
        for (struct block *b = sim.blocks; b; b = b->next) n++;
    else if (!strcmp(what, "mappings"))
        for (struct mapping *m = sim.mappings; m; m = m->next) n++;
    else if (!strcmp(what, "reservations"))
        for (struct reservation *r = sim.reservations; r; r = r->next) n++;
    else n = -1;
    return n;
}
