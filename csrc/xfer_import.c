/* xfer_import.c: what the parent tells this worker of, and what is mapped of it. See xfer_worker.h.
 *
 * Does not: order anything in time, but for what an import itself needs; answer calls. */
#include "xfer_worker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- devices, segments, events ---- */

/* The stream and the events of a device that was never open here. */
static int open_device(struct zcx_worker *w, struct device *d, struct zcx_err *err) {
    struct zcx_scope scope;
    int r = zcx_gate_register(w->gate, d->ordinal, err);
    if (r) return r;
    r = zcx_scope_open(&scope, d->ordinal, err);
    if (r) return r;
    r = zcx_cu(err, "cuStreamCreate", scope.d->StreamCreate(&d->gate_stream, ZCU_STREAM_NON_BLOCKING));
    if (!r) r = zcx_cu(err, "cuEventCreate", scope.d->EventCreate(&d->work, ZCU_EVENT_DISABLE_TIMING));
    if (!r) r = zcx_cu(err, "cuEventCreate", scope.d->EventCreate(&d->released, ZCU_EVENT_DISABLE_TIMING));
    zcx_scope_close(&scope);
    return r;
}

int zcx_worker_take_device(struct zcx_worker *w, struct zcx_err *err) {
    struct zcx_pool_msg m;
    struct zcx_err why = {0};
    unsigned char body[ZCX_STRING_MAX + 64];
    int pooled = w->msg.header.type == ZCX_POOL;
    int r = zcx_pool_msg_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r) return r;
    if (m.index >= ZCX_MAX_DEVICES || w->devices[m.index].open || w->msg.nfds != (unsigned)pooled || !w->gate)
        return zcx_fail(err, ZCX_E_PROTOCOL, "the parent offered device %u out of turn", m.index);
    struct device new = {0};
    zcu_uuid uuid;
    const struct zcx_driver *driver;
    unsigned refused = 0;
    memcpy(uuid.bytes, m.uuid, sizeof uuid.bytes);
    r = zcx_driver_open(&driver, &why);
    if (!r) r = zcx_driver_find(driver, &uuid, &new.ordinal);
    if (r == 1) r = zcx_fail(&why, ZCX_E_UNFIT, "the worker does not see this GPU (CUDA_VISIBLE_DEVICES)");
    if (r) {
        refused = ZCX_POOL_UNSEEN; /* without a driver there is no device either */
    } else {
        r = open_device(w, &new, &why);
        if (r) refused = ZCX_POOL_NO_DEVICE;
        else if (pooled) {
            r = zcx_pool_import(&new.pool, w->msg.fds[0], &uuid, &why);
            if (r) refused = ZCX_POOL_REFUSED;
        }
    }
    char reason[512] = "";
    if (r && why.cuda) snprintf(reason, sizeof reason, "%s: %s %s", why.call, zcx_driver_error_name(why.cuda), why.text);
    else if (r) snprintf(reason, sizeof reason, "%s", why.text);
    new.open = refused <= ZCX_POOL_REFUSED;
    if (new.open) w->devices[m.index] = new;
    struct zcx_pool_reply reply = {.index = m.index, .refused = (uint16_t)refused, .reason = zcx_text_of(reason)};
    long n = zcx_pool_reply_encode(&reply, body, sizeof body, err);
    return n < 0 ? (int)n : zcx_worker_tell(w, (struct zcx_header){.type = ZCX_POOL_REPLY}, body, (size_t)n, NULL, 0, err);
}

int zcx_worker_take_segment(struct zcx_worker *w, struct zcx_err *err) {
    struct zcx_segment m;
    int r = zcx_segment_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r) return r;
    if (w->msg.nfds != 1) return zcx_fail(err, ZCX_E_PROTOCOL, "a segment came without its descriptor");
    struct segment *s = calloc(1, sizeof *s);
    if (!s) return zcx_fail(err, ENOMEM, "no memory for a segment");
    s->id = w->msg.header.id;
    r = zcx_shm_take_fd(&s->file, zcx_msg_take_fd(&w->msg, 0), (enum zcx_shm_kind)m.kind, m.size, err);
    if (r) {
        free(s);
        return r;
    }
    pthread_mutex_lock(&w->lock);
    s->next = w->segments;
    w->segments = s;
    pthread_mutex_unlock(&w->lock);
    return 0;
}

void zcx_worker_drop_segment(struct zcx_worker *w, uint64_t id) {
    struct segment **at, *s;
    pthread_mutex_lock(&w->lock);
    for (at = &w->segments; (s = *at) && s->id != id; at = &s->next) {}
    if (s) *at = s->next;
    pthread_mutex_unlock(&w->lock);
    if (!s) return;
    zcx_shm_unref(s->file);
    free(s);
}

/* With a reference for the caller; NULL: there is none of this id. */
static struct zcx_shm *segment_of(struct zcx_worker *w, uint64_t id) {
    struct segment *s;
    pthread_mutex_lock(&w->lock);
    for (s = w->segments; s && s->id != id; s = s->next) {}
    struct zcx_shm *file = s ? zcx_shm_ref(s->file) : NULL;
    pthread_mutex_unlock(&w->lock);
    return file;
}

int zcx_worker_take_event(struct zcx_worker *w, struct zcx_err *err) {
    struct zcx_gate_event m;
    zcu_ipc_event handle;
    int r = zcx_gate_event_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r) return r;
    if (m.pool >= ZCX_MAX_DEVICES || !w->devices[m.pool].open || m.slot >= ZCX_GATE_SLOTS)
        return zcx_fail(err, ZCX_E_PROTOCOL, "an event for slot %u of device %u, which was not accepted", m.slot, m.pool);
    memcpy(handle.bytes, m.handle, sizeof handle.bytes);
    return zcx_gate_event_import(w->gate, w->devices[m.pool].ordinal, m.slot, &handle, err);
}

/* ---- slabs ---- */

struct slab *zcx_worker_slab(struct zcx_worker *w, uint64_t id) {
    struct slab *s;
    for (s = w->slabs; s && s->id != id; s = s->next) {}
    return s;
}

/* Why a slab cannot be mapped is remembered: a buffer in it is refused with that, and takes another rung. */
static void give_up(struct slab *s, const struct zcx_err *why) {
    if (why->cuda) snprintf(s->why, sizeof s->why, "%s: %s", why->call, zcx_driver_error_name(why->cuda));
    else snprintf(s->why, sizeof s->why, "%.190s", why->text);
    if (s->vmm) zcx_vmm_free(s->vmm);
    s->vmm = NULL;
}

int zcx_worker_take_slab(struct zcx_worker *w, struct zcx_err *err) {
    struct zcx_slab_msg m;
    struct zcx_err why = {0};
    uint64_t id = w->msg.header.id;
    struct slab *s = zcx_worker_slab(w, id);
    int r = zcx_slab_msg_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r) return r;
    if (m.pool >= ZCX_MAX_DEVICES || !w->devices[m.pool].open || w->msg.nfds != 1 || (s ? s->next_piece != m.piece || s->npieces != m.npieces || s->bytes != m.bytes || s->device != m.pool : m.piece != 0))
        return zcx_fail(err, ZCX_E_PROTOCOL, "piece %u of slab %llu out of turn", m.piece, (unsigned long long)id);
    if (!s) {
        s = calloc(1, sizeof *s);
        if (!s) return zcx_fail(err, ENOMEM, "no memory for a slab");
        *s = (struct slab){.next = w->slabs, .id = id, .device = m.pool, .writable = m.flags & ZCX_SLAB_WRITABLE, .stays = m.flags & ZCX_SLAB_STAYS,
                           .npieces = m.npieces, .bytes = m.bytes};
        w->slabs = s;
        if (zcx_vmm_new(&s->vmm, w->devices[m.pool].ordinal, m.bytes, m.npieces, s->writable, &why)) give_up(s, &why);
    }
    s->next_piece++;
    if (s->vmm && zcx_vmm_add(s->vmm, w->msg.fds[0], m.piece_bytes, &why)) give_up(s, &why);
    if (!(m.flags & ZCX_SLAB_ANSWER)) return 0;
    zcx_msg_free(&w->msg);
    w->has_msg = 0;
    return zcx_worker_tell(w, (struct zcx_header){.type = ZCX_SLAB_TAKEN, .id = id}, NULL, 0, NULL, 0, err);
}

static void forget_slab(struct zcx_worker *w, struct slab *gone) {
    for (struct slab **at = &w->slabs; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            if (gone->vmm) zcx_vmm_free(gone->vmm);
            free(gone);
            return;
        }
}

void zcx_worker_trim_slabs(struct zcx_worker *w, unsigned device) {
    for (struct slab *s = w->slabs, *next; s; s = next) {
        next = s->next;
        if (s->device == device && !s->uses && !s->stays) forget_slab(w, s);
    }
}

int zcx_worker_drop_slab(struct zcx_worker *w, uint64_t id, struct zcx_err *err) {
    struct slab *s = zcx_worker_slab(w, id);
    struct zcx_scope scope;
    if (!s) return 0; /* it went with its last buffer, or could not be told of to the end */
    if (s->uses) return zcx_fail(err, ZCX_E_PROTOCOL, "slab %llu is dropped while it is lent", (unsigned long long)id);
    struct device *d = &w->devices[s->device];
    int r = zcx_scope_open(&scope, d->ordinal, err);
    if (r) return r;
    r = zcx_device_settle(scope.d, d, err); /* code that was done with it may have work queued in it all the same */
    zcx_scope_close(&scope);
    if (!r) forget_slab(w, s);
    return r;
}

/* ---- imports ---- */

/* An un-import of the same allocation that is queued, but not done, would take a new import of it away: the driver counts no
 * second one. The wait is for this process's own work. */
static int await_release(struct zcx_worker *w, const struct zcx_buffer *b, struct zcx_err *err) {
    int queued = 0;
    pthread_mutex_lock(&w->lock);
    for (const struct zcx_import *i = w->imports; i; i = i->next)
        queued |= i->state == RELEASING && i->wire.rung == ZCX_RUNG_POOL && i->wire.pool == b->pool && i->wire.key == b->key;
    pthread_mutex_unlock(&w->lock);
    if (!queued) return 0;
    struct zcx_scope scope;
    int r = zcx_scope_open(&scope, w->devices[b->pool].ordinal, err);
    if (r) return r;
    r = zcx_cu(err, "cuStreamSynchronize", scope.d->StreamSynchronize(w->devices[b->pool].gate_stream));
    zcx_scope_close(&scope);
    return r;
}

static int map_host(struct zcx_worker *w, struct zcx_import *i, struct zcx_err *err) {
    struct zcx_shm *file = segment_of(w, i->wire.key);
    if (!file) return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer in an unknown segment");
    int r = zcx_shm_map(file, i->wire.offset, i->wire.nbytes, &i->address, err);
    zcx_shm_unref(file);
    return r;
}

static int map_pool(struct zcx_worker *w, struct zcx_import *i, struct zcx_err *err) {
    const struct zcx_buffer *b = &i->wire;
    struct device *d = &w->devices[b->pool];
    struct zcx_export e = {.buffer_id = b->key, .alloc_bytes = b->alloc_bytes, .offset = b->offset, .window = b->window};
    zcu_ptr base;
    if (!d->pool) return zcx_fail(err, ZCX_E_UNFIT, "the pool of this device is not open here");
    memcpy(e.blob, b->blob, sizeof e.blob);
    int r = await_release(w, b, err);
    if (r) return r;
    r = zcx_pool_map(d->pool, &e, &base, err);
    if (r == -ZCX_E_CUDA) { /* it takes another rung; if the context is lost, the end of the call says so */
        if (err) err->code = ZCX_E_UNFIT;
        return -ZCX_E_UNFIT;
    }
    if (!r) i->address = (void *)(uintptr_t)(base + b->offset);
    return r;
}

static int map_slab(struct zcx_worker *w, struct zcx_import *i, struct zcx_err *err) {
    const struct zcx_buffer *b = &i->wire;
    struct slab *s = zcx_worker_slab(w, b->key);
    if (!s || s->device != b->pool) return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer in a slab that was not told of");
    if (!s->vmm) return zcx_fail(err, ZCX_E_UNFIT, "%s", s->why);
    if (!zcx_vmm_complete(s->vmm) || b->alloc_bytes != zcx_vmm_bytes(s->vmm) || (b->flags && !s->writable))
        return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer in a slab that is not all there, or another one than it says");
    s->uses++;
    i->slab = s;
    i->address = (void *)(uintptr_t)(zcx_vmm_base(s->vmm) + b->offset);
    return 0;
}

int zcx_import_map(struct zcx_worker *w, const struct zcx_buffer *b, struct zcx_import **out, struct zcx_err *err) {
    struct zcx_import *i = calloc(1, sizeof *i);
    int r;
    if (!i) return zcx_fail(err, ENOMEM, "no memory for an import");
    i->owner = w;
    i->wire = *b;
    i->seq = w->seq;
    i->ordinal = -1;
    if (b->rung != ZCX_RUNG_HOST && (b->pool >= ZCX_MAX_DEVICES || !w->devices[b->pool].open)) {
        r = zcx_fail(err, ZCX_E_PROTOCOL, "a buffer on device %u, which was not accepted", b->pool);
    } else if (b->rung == ZCX_RUNG_HOST) {
        r = map_host(w, i, err);
    } else {
        i->ordinal = w->devices[b->pool].ordinal;
        r = b->rung == ZCX_RUNG_POOL ? map_pool(w, i, err) : b->rung == ZCX_RUNG_VMM ? map_slab(w, i, err)
            : zcx_fail(err, ZCX_E_UNFIT, "the worker has no way to import rung %u", b->rung);
    }
    if (r) {
        free(i);
        return r;
    }
    pthread_mutex_lock(&w->lock);
    i->next = w->imports;
    i->link = &w->imports;
    if (i->next) i->next->link = &i->next;
    w->imports = i;
    pthread_mutex_unlock(&w->lock);
    *out = i;
    return 0;
}

int zcx_worker_map(struct zcx_worker *w, const struct zcx_buffer *b, struct zcx_import **out, struct zcx_err *err) {
    pthread_mutex_lock(&w->rpc); /* a thread that outlived its call may be told of memory just now */
    int r = zcx_import_map(w, b, out, err);
    pthread_mutex_unlock(&w->rpc);
    return r;
}

void zcx_import_info(const struct zcx_import *i, struct zcx_import_info *out) {
    *out = (struct zcx_import_info){.id = i->wire.id, .nbytes = i->wire.nbytes, .seq = i->seq, .ordinal = i->ordinal, .address = i->address,
                                    .result = i->wire.flags & ZCX_BUFFER_RESULT, .private = i->wire.flags & ZCX_BUFFER_PRIVATE};
    if (i->ordinal >= 0) out->seams = zcx_windows_seams(i->wire.blob, i->wire.alloc_bytes, i->wire.offset, i->wire.window);
}

int zcx_import_edited(const struct zcx_import *i) {
    return i->ordinal < 0 && !(i->wire.flags & ZCX_BUFFER_RESULT) && i->wire.nbytes ? zcx_shm_edited(i->address, i->wire.nbytes) : 0;
}

void zcx_import_drop(struct zcx_import *i) {
    struct zcx_worker *w = i->owner;
    uint64_t one = 1;
    if (w->pid != getpid()) return; /* the lock may be held by a thread that is not here */
    pthread_mutex_lock(&w->lock);
    i->state = DROPPED;
    pthread_mutex_unlock(&w->lock);
    ssize_t n = write(w->kick, &one, sizeof one);
    (void)n; /* full: the waiter wakes up all the same */
}

void zcx_import_forget(struct zcx_import *i) {
    *i->link = i->next;
    if (i->next) i->next->link = i->link;
    free(i);
}

int zcx_import_unmap(struct zcx_worker *w, struct zcx_import *i, struct zcx_err *err) {
    if (i->ordinal < 0) {
        zcx_shm_unmap(i->address, i->wire.nbytes);
        return 0;
    }
    if (i->slab) {
        struct slab *s = i->slab;
        i->slab = NULL;
        if (!--s->uses && !s->stays) forget_slab(w, s);
        return 0;
    }
    struct device *d = &w->devices[i->wire.pool];
    return zcx_pool_unmap(d->pool, i->wire.key, d->gate_stream, NULL, err);
}

uint32_t zcx_worker_alive(struct zcx_worker *w) {
    uint32_t n = 0;
    pthread_mutex_lock(&w->lock);
    for (const struct zcx_import *i = w->imports; i; i = i->next) n += i->state == LIVE && i->seq == w->seq;
    pthread_mutex_unlock(&w->lock);
    return n;
}

/* ---- copies through a window ---- */

int zcx_worker_ordinal(const struct zcx_worker *w, unsigned device) {
    return device < ZCX_MAX_DEVICES && w->devices[device].open ? w->devices[device].ordinal : -1;
}

int zcx_worker_window(struct zcx_worker *w, int ordinal, uint64_t segment, uint64_t offset, unsigned char **out, struct zcx_err *err) {
    struct window *known;
    for (known = w->windows; known && (segment || known->offset != offset); known = known->next) {}
    if (!known) {
        struct zcx_shm *file = segment ? NULL : segment_of(w, 0);
        if (!file) return zcx_fail(err, ZCX_E_PROTOCOL, "a window in segment %llu, where none can be", (unsigned long long)segment);
        known = calloc(1, sizeof *known);
        int r = known ? zcx_shm_map(file, offset, ZCX_RING_BYTES, &known->address, err) : zcx_fail(err, ENOMEM, "no memory for a window");
        zcx_shm_unref(file);
        if (r) {
            free(known);
            return r;
        }
        known->offset = offset;
        known->next = w->windows;
        w->windows = known;
    }
    int r = zcx_ring_pin(&known->pin, ordinal, known->address, ZCX_RING_BYTES, err);
    if (r) return r;
    *out = known->address;
    return 0;
}

int zcx_worker_transfer(struct zcx_worker *w, const struct zcx_buffer *b, zcu_ptr memory, zcu_stream stream, struct zcx_err *err) {
    struct zcx_ring_ref ref;
    int r = zcx_ring_ref_decode(b->blob, &ref, err);
    if (r) return r;
    if (b->rung != ZCX_RUNG_STAGED || b->pool >= ZCX_MAX_DEVICES || !w->devices[b->pool].open || ref.filled_slot >= ZCX_GATE_SLOTS || ref.emptied_slot >= ZCX_GATE_SLOTS)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a transfer on device %u, which was not accepted", b->pool);
    struct zcx_ring_part part = {memory, b->nbytes};
    struct zcx_ring_end end = {.gate = w->gate, .ordinal = w->devices[b->pool].ordinal, .stream = stream, .parts = &part, .nparts = 1,
                               .window_is_host = ref.carrier == ZCX_CARRIER_SEGMENT};
    struct zcx_ring_plan plan = {.nbytes = b->nbytes, .filled_slot = ref.filled_slot, .emptied_slot = ref.emptied_slot, .filled = ref.filled, .emptied = ref.emptied};
    int sending = b->flags & ZCX_BUFFER_RESULT;
    pthread_mutex_lock(&w->rpc); /* a thread that outlived its call may be told of memory just now */
    if (end.window_is_host) {
        r = zcx_worker_window(w, end.ordinal, b->key, b->offset, &end.host_window, err);
    } else {
        struct slab *s = zcx_worker_slab(w, b->key);
        if (!s || s->device != b->pool || (s->vmm && (!zcx_vmm_complete(s->vmm) || b->offset > zcx_vmm_bytes(s->vmm) ||
                                                       zcx_vmm_bytes(s->vmm) - b->offset < ZCX_RING_BYTES || (sending && !s->writable))))
            r = zcx_fail(err, ZCX_E_PROTOCOL, "a window in a slab that was not told of, or is too small");
        else if (!s->vmm) r = zcx_fail(err, ZCX_E_UNFIT, "%s", s->why);
        else end.device_window = zcx_vmm_base(s->vmm) + b->offset; /* mapped until the end of the call, which waits for what is queued here */
    }
    if (!r) r = zcx_ring_queue(&end, &plan, sending, err);
    pthread_mutex_unlock(&w->rpc);
    return r;
}
