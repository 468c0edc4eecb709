/* memory.c: what a pointer is, copies and memsets, memory outside pools, registered host memory, legacy IPC.
 *
 * A device address is the address of a mapping in this process: a test may look at the bytes, the product must not. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

#define IPC_MAGIC 0x6d656d6369706973ull
#define LINEAR_ROUND (2ull << 20)
#define PAGE 4096ull

/* Pages that nobody wrote do not exist; poisoning them would cost the memory of a card. */
void sim_poison(unsigned char *p, uint64_t n) {
    static unsigned char resident[4096];
    unsigned char *end = p + n, *page = (unsigned char *)((uintptr_t)p & ~(PAGE - 1));
    while (page < end) {
        uint64_t left = ((uint64_t)(end - page) + PAGE - 1) / PAGE, pages = left < sizeof resident ? left : sizeof resident;
        if (mincore(page, pages * PAGE, resident)) memset(resident, 0, pages);
        for (uint64_t i = 0; i < pages; i++, page += PAGE) {
            unsigned char *from = page < p ? p : page, *to = page + PAGE > end ? end : page + PAGE;
            if (resident[i] & 1) memset(from, SIM_POISON, (size_t)(to - from));
        }
    }
}

/* ---- memory outside pools ---- */

static struct linear *linear_at(zcu_ptr p) {
    for (struct linear *l = sim.linears; l; l = l->next)
        if (p >= (zcu_ptr)l->base && p < (zcu_ptr)l->base + l->size) return l;
    return NULL;
}

static struct linear *linear_new(uint64_t n, int fd, int device) {
    struct linear *l = calloc(1, sizeof *l);
    if (!l) return NULL;
    l->base = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    if (l->base == MAP_FAILED) {
        free(l);
        return NULL;
    }
    l->size = n;
    l->fd = fd;
    l->device = device;
    l->id = sim.next_id++;
    l->next = sim.linears;
    sim.linears = l;
    return l;
}

void sim_linear_free(struct linear *l) {
    struct linear **at = &sim.linears;
    while (*at != l) at = &(*at)->next;
    *at = l->next;
    munmap(l->base, l->size);
    if (l->fd >= 0) close(l->fd);
    if (!l->opened && !l->host) sim_charge(l->device, 0, -(int64_t)((l->size + LINEAR_ROUND - 1) & ~(LINEAR_ROUND - 1)));
    free(l);
}

CALL_V(MemAlloc, _v2, 3020, zcu_ptr *out, size_t n) {
    ENTER_UNSAFE(MemAlloc);
    struct ctx *c = sim_current();
    if (!c) return ZCU_ERROR_INVALID_CONTEXT;
    if (!n) return ZCU_ERROR_INVALID_VALUE;
    int64_t charge = (int64_t)((n + LINEAR_ROUND - 1) & ~(LINEAR_ROUND - 1));
    zcu_result r = sim_charge(c->device, 0, charge);
    if (r) return r;
    int fd = memfd_create("simcuda-memory", MFD_CLOEXEC);
    struct linear *l = fd < 0 || ftruncate(fd, (off_t)n) ? NULL : linear_new(n, fd, c->device);
    if (!l) {
        if (fd >= 0) close(fd);
        sim_charge(c->device, 0, -charge);
        return ZCU_ERROR_OUT_OF_MEMORY;
    }
    *out = (zcu_ptr)l->base;
    return ZCU_SUCCESS;
}

/* Waits for all work of the context, as the card does, also when the pointer is a pool's. */
CALL_V(MemFree, _v2, 3020, zcu_ptr p) {
    ENTER_UNSAFE(MemFree);
    struct ctx *c = sim_current();
    if (!c) return ZCU_ERROR_INVALID_CONTEXT;
    if (!p) return ZCU_SUCCESS;
    zcu_result r = sim_wait_ctx(c);
    if (r) return r;
    struct linear *l = linear_at(p);
    if (l) {
        if ((zcu_ptr)l->base != p || l->opened || l->host) return ZCU_ERROR_INVALID_VALUE;
        sim_linear_free(l);
        return ZCU_SUCCESS;
    }
    struct pool *pool = sim_pool_of(p);
    if (!pool) return ZCU_ERROR_INVALID_VALUE;
    if ((r = sim_pool_free(pool, p, c->legacy))) return r;
    return sim_wait_stream(c->legacy);
}

CALL(MemHostAlloc, 2020, void **out, size_t n, unsigned flags) {
    ENTER_UNSAFE(MemHostAlloc);
    struct ctx *c = sim_current();
    if (!c) return ZCU_ERROR_INVALID_CONTEXT;
    if (!n || flags & ~7u) return ZCU_ERROR_INVALID_VALUE;
    struct hostreg *h = calloc(1, sizeof *h);
    struct linear *l = h ? linear_new((n + PAGE - 1) & ~(PAGE - 1), -1, c->device) : NULL;
    if (!l) {
        free(h);
        return ZCU_ERROR_OUT_OF_MEMORY;
    }
    l->host = true;
    *h = (struct hostreg){.next = sim.hostregs, .base = l->base, .size = l->size, .allocated = true};
    sim.hostregs = h;
    *out = l->base;
    return ZCU_SUCCESS;
}

static void hostreg_free(struct hostreg *h) {
    struct hostreg **at = &sim.hostregs;
    while (*at != h) at = &(*at)->next;
    *at = h->next;
    free(h);
}

CALL(MemFreeHost, 2000, void *p) {
    ENTER_UNSAFE(MemFreeHost);
    struct linear *l = linear_at((zcu_ptr)p);
    if (!l || !l->host || l->base != p) return ZCU_ERROR_INVALID_VALUE;
    zcu_result r = sim_wait_ctx(&sim.ctx[l->device]);
    if (r) return r;
    hostreg_free(sim_registered(p, 1));
    sim_linear_free(l);
    return ZCU_SUCCESS;
}

/* ---- registered host memory ---- */

struct hostreg *sim_registered(const void *p, uint64_t n) {
    const unsigned char *at = p;
    for (struct hostreg *h = sim.hostregs; h; h = h->next)
        if (at >= h->base && n <= h->size && (uint64_t)(at - h->base) <= h->size - n) return h;
    return NULL;
}

/* What is mapped there: writable, and of which file. False: nothing, or not all of it. */
static bool mapping_of(const void *p, uint64_t n, bool *writable, struct hostreg *h) {
    FILE *f = fopen("/proc/self/maps", "re");
    char line[512], rights[8];
    bool found = false;
    uintptr_t at = (uintptr_t)p, end = at + n;
    *writable = true;
    while (f && at < end && fgets(line, sizeof line, f)) {
        unsigned long from, to, offset, ino;
        unsigned major, minor;
        if (sscanf(line, "%lx-%lx %7s %lx %x:%x %lu", &from, &to, rights, &offset, &major, &minor, &ino) != 7) continue;
        if (to <= at) continue;
        if (from > at) break;
        if (!found) {
            h->dev = (uint64_t)major << 32 | minor;
            h->ino = rights[3] == 's' ? ino : 0;
            h->offset = offset + (at - from);
        }
        found = true;
        *writable = *writable && rights[1] == 'w';
        at = to;
    }
    if (f) fclose(f);
    return found && at >= end;
}

CALL_V(MemHostRegister, _v2, 6050, void *p, size_t n, unsigned flags) {
    ENTER_UNSAFE(MemHostRegister);
    bool writable;
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    if (!p || !n || flags & ~15u) return ZCU_ERROR_INVALID_VALUE;
    unsigned char *from = p;
    for (struct hostreg *h = sim.hostregs; h; h = h->next)
        if (from < h->base + h->size && h->base < from + n) return SIM_ERROR_ALREADY_REGISTERED;
    struct hostreg *h = calloc(1, sizeof *h);
    if (!h) return ZCU_ERROR_OUT_OF_MEMORY;
    if (!mapping_of(p, n, &writable, h) || (!writable && !(flags & 8))) { /* 8: READ_ONLY */
        free(h);
        return ZCU_ERROR_INVALID_VALUE;
    }
    h->base = from;
    h->size = n;
    h->next = sim.hostregs;
    sim.hostregs = h;
    return ZCU_SUCCESS;
}

CALL(MemHostUnregister, 4000, void *p) {
    ENTER_UNSAFE(MemHostUnregister);
    struct hostreg *h = sim_registered(p, 1);
    if (!h || h->allocated) return SIM_ERROR_NOT_REGISTERED;
    if (h->base != p) return ZCU_ERROR_INVALID_VALUE;
    hostreg_free(h);
    return ZCU_SUCCESS;
}

CALL_V(MemHostGetDevicePointer, _v2, 3020, zcu_ptr *out, void *p, unsigned flags) {
    ENTER(MemHostGetDevicePointer);
    if (flags || !sim_registered(p, 1)) return ZCU_ERROR_INVALID_VALUE;
    *out = (zcu_ptr)p;
    return ZCU_SUCCESS;
}

/* ---- what a pointer is ---- */

zcu_result sim_reach(zcu_ptr p, uint64_t n, int device) {
    struct linear *l = linear_at(p);
    if (l) return n <= l->size - (p - (zcu_ptr)l->base) ? ZCU_SUCCESS : ZCU_ERROR_INVALID_VALUE;
    struct pool *pool = sim_pool_of(p);
    if (sim_vmm_reserved(p)) /* whether it may be written is seen by the device, at execution */
        return sim_vmm_access(p, n, device, ZCU_MEM_ACCESS_FLAGS_PROT_READ) ? ZCU_SUCCESS : ZCU_ERROR_INVALID_VALUE;
    if (!pool || pool->access[device] != ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE) return ZCU_ERROR_INVALID_VALUE;
    uint64_t offset = p - (zcu_ptr)pool->base;
    if (n > pool->chunks * SIM_CHUNK - offset) return ZCU_ERROR_INVALID_VALUE;
    if (pool->imported && sim_pool_import(pool, p) && !sim_pool_covered(pool, offset, n)) return ZCU_ERROR_INVALID_VALUE;
    if (sim_pool_backed(pool, offset, n)) return ZCU_SUCCESS;
    sim_set_fault(ZCU_ERROR_ILLEGAL_ADDRESS, "memory that is not mapped (any more)", p);
    return ZCU_ERROR_ILLEGAL_ADDRESS;
}

bool sim_mapped(zcu_ptr p, uint64_t n, int device, bool write) {
    if (linear_at(p)) return true;
    if (sim_vmm_reserved(p))
        return sim_vmm_access(p, n, device, write ? ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE : ZCU_MEM_ACCESS_FLAGS_PROT_READ);
    struct pool *pool = sim_pool_of(p);
    return pool && sim_pool_backed(pool, p - (zcu_ptr)pool->base, n);
}

struct what { zcu_ptr base; uint64_t size, id; struct pool *pool; int device, type, handle_types; bool legacy; };

static bool identify(zcu_ptr p, struct what *w) {
    struct pool *pool = sim_pool_of(p);
    struct linear *l = linear_at(p);
    struct hostreg *h = sim_registered((void *)p, 1);
    struct mapping *m = sim_vmm_mapping(p);
    memset(w, 0, sizeof *w);
    if (pool) {
        struct segment *s = pool->imported ? NULL : sim_pool_segment(pool, p);
        struct import *i = pool->imported ? sim_pool_import(pool, p) : NULL;
        if (!s && !i) return false;
        *w = (struct what){.size = s ? s->asked : i->size, .id = s ? s->id : i->id, .pool = pool, .device = pool->device,
                           .base = (zcu_ptr)pool->base + (s ? s->offset : i->offset), .type = ZCU_MEMORYTYPE_DEVICE};
        return true;
    }
    if (l)
        *w = (struct what){.base = (zcu_ptr)l->base, .size = l->size, .id = l->id, .device = l->device,
                           .type = l->host ? ZCU_MEMORYTYPE_HOST : ZCU_MEMORYTYPE_DEVICE, .legacy = !l->host && !l->opened};
    else if (m)
        *w = (struct what){.base = m->base, .size = m->size, .id = m->id, .device = m->block->device,
                           .type = ZCU_MEMORYTYPE_DEVICE, .handle_types = m->block->handle_types};
    else if (h)
        *w = (struct what){.base = (zcu_ptr)h->base, .size = h->size, .device = sim.map[0], .type = ZCU_MEMORYTYPE_HOST};
    return l || m || h;
}

static bool attribute(int number, void *out, zcu_ptr p, const struct what *w, bool known) {
    int ordinal = known ? sim_ordinal(w->device) : 0;
    switch (number) {
    case ZCU_POINTER_ATTRIBUTE_CONTEXT:
        *(void **)out = known && w->device >= 0 && !w->pool && sim.ctx[w->device].active ? &sim.ctx[w->device] : NULL;
        break;
    case ZCU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = known ? (unsigned)w->type : 0; break;
    case 3: *(zcu_ptr *)out = known ? p : 0; break; /* DEVICE_POINTER */
    case 4: *(void **)out = known && w->type == ZCU_MEMORYTYPE_HOST ? (void *)p : NULL; break; /* HOST_POINTER */
    case ZCU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t *)out = !known ? 0 : sim_breaks("identity") ? 1 : w->id; break;
    case ZCU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = ordinal < 0 ? 0 : ordinal; break; /* 0: a hidden device */
    case ZCU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)out = known && w->legacy; break;
    case ZCU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(zcu_ptr *)out = known ? w->base : 0; break;
    case ZCU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = known ? w->size : 0; break;
    case ZCU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned *)out = known ? (unsigned)w->handle_types : 0; break;
    case ZCU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)out = known ? w->pool : NULL; break;
    default: return false;
    }
    return true;
}

CALL(PointerGetAttributes, 7000, unsigned n, int *numbers, void **out, zcu_ptr p) {
    ENTER_CPU(PointerGetAttributes);
    struct what w;
    bool known = identify(p, &w);
    for (unsigned i = 0; i < n; i++)
        if (!attribute(numbers[i], out[i], p, &w, known)) return ZCU_ERROR_INVALID_VALUE;
    return ZCU_SUCCESS;
}

CALL(PointerGetAttribute, 4000, void *out, int number, zcu_ptr p) {
    ENTER_CPU(PointerGetAttribute);
    struct what w;
    return identify(p, &w) && attribute(number, out, p, &w, true) ? ZCU_SUCCESS : ZCU_ERROR_INVALID_VALUE;
}

CALL_V(MemGetAddressRange, _v2, 3020, zcu_ptr *base, size_t *size, zcu_ptr p) {
    ENTER_CPU(MemGetAddressRange);
    struct what w;
    if (!identify(p, &w) || w.type != ZCU_MEMORYTYPE_DEVICE) return ZCU_ERROR_NOT_FOUND;
    if (base) *base = w.base;
    if (size) *size = w.size;
    return ZCU_SUCCESS;
}

/* ---- copies and memsets ---- */

enum side { HOST, DEVICE };

/* `wait`: return when it is done. Pageable host memory is copied at once when it is the source, and makes the call wait
 * when it is the destination: so it is on a card. */
static zcu_result copy(struct stream *s, zcu_ptr dst, enum side to, zcu_ptr src, enum side from, uint64_t n, bool wait) {
    zcu_result r = 0;
    if (!n) return ZCU_SUCCESS;
    if (to == DEVICE && (r = sim_reach(dst, n, s->ctx->device))) return r;
    if (from == DEVICE && (r = sim_reach(src, n, s->ctx->device))) return r;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    struct op *op = sim_op(OP_COPY);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->dst = dst;
    op->src = src;
    op->n = n;
    op->dst_host = to == HOST;
    op->src_host = from == HOST;
    if (from == HOST && !wait && !sim_registered((void *)src, n)) {
        if (!(op->staging = malloc(n))) {
            free(op);
            return ZCU_ERROR_OUT_OF_MEMORY;
        }
        memcpy(op->staging, (void *)src, n);
        op->src = (zcu_ptr)op->staging;
    }
    if (to == HOST && !sim_registered((void *)dst, n)) wait = true;
    sim_submit(s, op);
    return wait ? sim_wait_stream(s) : ZCU_SUCCESS;
}

static zcu_result set(struct stream *s, zcu_ptr dst, unsigned char byte, uint64_t n) {
    zcu_result r;
    if (!n) return ZCU_SUCCESS;
    if ((r = sim_reach(dst, n, s->ctx->device))) return r;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    struct op *op = sim_op(OP_SET);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->dst = dst;
    op->byte = byte;
    op->n = n;
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

CALL_V(MemcpyHtoDAsync, _v2, 3020, zcu_ptr dst, const void *src, size_t n, zcu_stream stream) {
    ENTER(MemcpyHtoDAsync);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (!r && sim_breaks("pinned") && sim_registered((void *)src, n)) return set(s, dst, 0xA5, n);
    return r ? r : copy(s, dst, DEVICE, (zcu_ptr)src, HOST, n, false);
}

CALL_V(MemcpyDtoHAsync, _v2, 3020, void *dst, zcu_ptr src, size_t n, zcu_stream stream) {
    ENTER(MemcpyDtoHAsync);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (!r && sim_breaks("pinned-back") && sim_registered(dst, n)) return ZCU_SUCCESS;
    return r ? r : copy(s, (zcu_ptr)dst, HOST, src, DEVICE, n, false);
}

CALL_V(MemcpyDtoDAsync, _v2, 3020, zcu_ptr dst, zcu_ptr src, size_t n, zcu_stream stream) {
    ENTER(MemcpyDtoDAsync);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    return r ? r : copy(s, dst, DEVICE, src, DEVICE, n, false);
}

CALL(MemsetD8Async, 3020, zcu_ptr dst, unsigned char byte, size_t n, zcu_stream stream) {
    ENTER(MemsetD8Async);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    return r ? r : set(s, dst, byte, n);
}

/* The forms without a stream go through the legacy one; those that touch only the device return before it is done. */
CALL_V(MemcpyHtoD, _v2, 3020, zcu_ptr dst, const void *src, size_t n) {
    ENTER_UNSAFE(MemcpyHtoD);
    struct stream *s;
    zcu_result r = sim_stream(NULL, &s);
    return r ? r : copy(s, dst, DEVICE, (zcu_ptr)src, HOST, n, true);
}

CALL_V(MemcpyDtoH, _v2, 3020, void *dst, zcu_ptr src, size_t n) {
    ENTER_UNSAFE(MemcpyDtoH);
    struct stream *s;
    zcu_result r = sim_stream(NULL, &s);
    return r ? r : copy(s, (zcu_ptr)dst, HOST, src, DEVICE, n, true);
}

CALL_V(MemcpyDtoD, _v2, 3020, zcu_ptr dst, zcu_ptr src, size_t n) {
    ENTER_UNSAFE(MemcpyDtoD);
    struct stream *s;
    zcu_result r = sim_stream(NULL, &s);
    return r ? r : copy(s, dst, DEVICE, src, DEVICE, n, false);
}

CALL_V(MemsetD8, _v2, 3020, zcu_ptr dst, unsigned char byte, size_t n) {
    ENTER_UNSAFE(MemsetD8);
    struct stream *s;
    zcu_result r = sim_stream(NULL, &s);
    return r ? r : set(s, dst, byte, n);
}

/* ---- legacy IPC: counted, unlike a pool's imports ---- */

typedef struct { unsigned char bytes[64]; } ipc_mem;
struct ipc_handle { uint64_t magic; struct process_id owner; int fd, device; uint64_t size; };

CALL(IpcGetMemHandle, 4010, ipc_mem *out, zcu_ptr p) {
    ENTER(IpcGetMemHandle);
    struct linear *l = linear_at(p);
    if (!l || l->host || l->opened) return ZCU_ERROR_INVALID_VALUE;
    struct ipc_handle h = {IPC_MAGIC, sim_self(), l->fd, l->device, l->size};
    memset(out, 0, sizeof *out);
    memcpy(out, &h, sizeof h);
    return ZCU_SUCCESS;
}

CALL_V(IpcOpenMemHandle, _v2, 4010, zcu_ptr *out, ipc_mem handle, unsigned flags) {
    ENTER_UNSAFE(IpcOpenMemHandle);
    struct ipc_handle h;
    char path[64];
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    memcpy(&h, &handle, sizeof h);
    if (h.magic != IPC_MAGIC || flags > 1) return ZCU_ERROR_INVALID_VALUE;
    if (h.owner.pid == sim_self().pid) return ZCU_ERROR_INVALID_CONTEXT; /* not in the process that exported it */
    for (struct linear *l = sim.linears; l; l = l->next)
        if (l->opened && l->owner.pid == h.owner.pid && l->owner.start == h.owner.start && l->owner_fd == h.fd) {
            l->opened++;
            *out = (zcu_ptr)l->base;
            return ZCU_SUCCESS;
        }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.owner.pid, h.fd);
    int fd = sim_dead(h.owner) ? -1 : open(path, O_RDWR | O_CLOEXEC);
    struct linear *l = fd < 0 ? NULL : linear_new(h.size, fd, h.device);
    if (!l) {
        if (fd >= 0) close(fd);
        return ZCU_ERROR_INVALID_VALUE;
    }
    l->opened = 1;
    l->owner = h.owner;
    l->owner_fd = h.fd;
    *out = (zcu_ptr)l->base;
    return ZCU_SUCCESS;
}

CALL(IpcCloseMemHandle, 4010, zcu_ptr p) {
    ENTER_UNSAFE(IpcCloseMemHandle);
    struct linear *l = linear_at(p);
    if (!l || !l->opened || (zcu_ptr)l->base != p) return ZCU_ERROR_INVALID_VALUE;
    if (l->opened > 1) {
        l->opened--;
        return ZCU_SUCCESS;
    }
    zcu_result r = sim_wait_ctx(&sim.ctx[l->device]);
    if (!r) sim_linear_free(l);
    return r;
}
