/* xfer_lend.c: what a worker is lent: the table of transfers, the gates of a call, slabs and segments. See xfer_parent.h.
 *
 * Does not: receive anything, or decide when a call is over (xfer_parent.c does). */
#include "xfer_parent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- transfers ---- */

static void *grown(void *array, size_t count, size_t *capacity, size_t item) {
    if (count < *capacity) return array;
    size_t want = *capacity ? *capacity * 2 : 8;
    void *p = realloc(array, want * item);
    if (p) *capacity = want;
    return p;
}

struct transfer *zcx_transfer_find(struct zcx_parent *p, uint64_t id) {
    size_t low = 0, high = p->ntransfers;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (p->transfers[middle].id < id) low = middle + 1;
        else high = middle;
    }
    return low < p->ntransfers && p->transfers[low].id == id ? &p->transfers[low] : NULL;
}

int zcx_transfer_reserve(struct zcx_parent *p, struct zcx_err *err) {
    pthread_mutex_lock(&p->lock);
    void *t = grown(p->transfers, p->ntransfers, &p->ctransfers, sizeof *p->transfers);
    if (t) p->transfers = t;
    void *o = t ? grown(p->released, p->nreleased + p->ntransfers, &p->creleased, sizeof *p->released) : NULL;
    if (o) p->released = o;
    pthread_mutex_unlock(&p->lock);
    return o ? 0 : zcx_fail(err, ENOMEM, "no memory for a transfer");
}

struct transfer *zcx_transfer_add(struct zcx_parent *p, struct transfer t) {
    pthread_mutex_lock(&p->lock);
    t.id = t.wire.id = p->next_id++;
    t.seq = p->seq;
    t.leased = p->leasing;
    t.state = LENT;
    p->transfers[p->ntransfers++] = t;
    pthread_mutex_unlock(&p->lock);
    return &p->transfers[p->ntransfers - 1];
}

void zcx_transfer_release(struct zcx_parent *p, struct transfer *t) {
    if (t->owner) p->released[p->nreleased++] = t->owner;
    if (t->segment) t->segment->uses--;
    if (t->slab) t->slab->uses--;
    if (t->ring) zcx_ring_dispose(t->ring);
    zcx_range_unref(t->range);
    *t = (struct transfer){.id = t->id, .state = RELEASED}; /* the id stays until the next compaction: zcx_transfer_find() counts on their order */
}

void zcx_transfers_compact(struct zcx_parent *p) {
    size_t n = 0;
    for (size_t i = 0; i < p->ntransfers; i++)
        if (p->transfers[i].state != RELEASED) p->transfers[n++] = p->transfers[i];
    p->ntransfers = n;
}

void *zcx_parent_released(struct zcx_parent *p) {
    pthread_mutex_lock(&p->lock);
    void *owner = p->nreleased ? p->released[--p->nreleased] : NULL;
    pthread_mutex_unlock(&p->lock);
    return owner;
}

/* ---- devices and gates ---- */

int zcx_parent_offer(struct zcx_parent *p, int ordinal, struct zcx_pool *pool, unsigned *index, int *accepted, struct zcx_err *err) {
    REQUIRE(p, p->state >= ZCX_IDLE && p->state <= ZCX_CALLING, "offering a device", err);
    unsigned at = 0;
    while (at < p->ndevices && p->devices[at].ordinal != ordinal) at++;
    if (at < p->ndevices && p->devices[at].accepted) {
        *index = at;
        *accepted = p->devices[at].accepted;
        return 1;
    }
    if (at == ZCX_MAX_DEVICES) return zcx_fail(err, ZCX_E_LIMIT, "more than %d devices", ZCX_MAX_DEVICES);
    const struct zcx_driver *d;
    unsigned char body[64];
    struct zcx_pool_msg m = {.index = (uint16_t)at};
    int r = zcx_driver_open(&d, err);
    if (r) return r;
    if (ordinal < 0 || ordinal >= d->count) return zcx_fail(err, ZCX_E_RANGE, "there is no device %d", ordinal);
    memcpy(m.uuid, d->uuid[ordinal].bytes, sizeof m.uuid);
    long n = zcx_pool_msg_encode(&m, body, sizeof body, err);
    if (n < 0) return (int)n;
    r = zcx_gate_register(p->gate, ordinal, err);
    if (r) return r;
    r = zcx_parent_tell(p, pool ? ZCX_POOL : ZCX_DEVICE, 0, body, (size_t)n, pool ? zcx_pool_fd(pool) : -1, err);
    if (r) return r;
    if (at == p->ndevices) p->devices[p->ndevices++] = (struct device){.ordinal = ordinal};
    if (pool && !p->devices[at].pool) p->devices[at].pool = zcx_pool_ref(pool);
    p->devices[at].accepted = -1;
    *index = at;
    *accepted = -1;
    return 0;
}

/* In event mode a slot's event travels once, before the first message that names the slot. */
static int introduce_slot(struct zcx_parent *p, unsigned device, uint32_t slot, struct zcx_err *err) {
    struct zcx_gate_event m = {.pool = (uint16_t)device, .slot = slot};
    zcu_ipc_event handle;
    unsigned char body[128];
    int r = zcx_gate_event_export(p->gate, p->devices[device].ordinal, slot, &handle, err);
    if (r) return r;
    memcpy(m.handle, handle.bytes, sizeof m.handle);
    long n = zcx_gate_event_encode(&m, body, sizeof body, err);
    if (n < 0) return (int)n;
    return zcx_parent_tell(p, ZCX_GATE_EVENT, 0, body, (size_t)n, -1, err);
}

int zcx_call_gate_new(struct zcx_parent *p, unsigned device, zcu_stream stream, struct call_gate *out, struct zcx_err *err) {
    struct call_gate g = {.device = device, .ordinal = p->devices[device].ordinal, .stream = stream};
    int r = zcx_gate_take(p->gate, &g.ready_slot, &g.done_slot);
    if (r) return zcx_fail(err, ZCX_E_LIMIT, "every gate slot still waits for work that was queued on a stream before: wait for it, then call again");
    if (zcx_gate_uses_events(p->gate)) {
        r = introduce_slot(p, device, g.ready_slot, err);
        if (!r) r = introduce_slot(p, device, g.done_slot, err);
        if (r) {
            zcx_gate_put(p->gate, g.ready_slot);
            zcx_gate_put(p->gate, g.done_slot);
            return r;
        }
    }
    g.done = zcx_gate_next(p->gate, g.done_slot);
    *out = g;
    return 0;
}

void zcx_call_gate_drop(struct zcx_parent *p, const struct call_gate *g) {
    zcx_gate_put(p->gate, g->ready_slot);
    zcx_gate_put(p->gate, g->done_slot);
}

void zcx_call_gate_withdraw(struct zcx_parent *p, const struct call_gate *g) {
    zcx_gate_post_cpu(p->gate, g->done_slot, g->done);
    zcx_call_gate_drop(p, g);
}

int zcx_call_gate_of(struct zcx_parent *p, unsigned device, zcu_stream stream, struct call_gate **out, struct zcx_err *err) {
    for (unsigned i = 0; i < p->ngates; i++)
        if (p->gates[i].device == device) {
            *out = &p->gates[i];
            return 0;
        }
    const struct zcx_driver *d;
    int ordinal = p->devices[device].ordinal;
    int r = zcx_driver_open(&d, err);
    if (r) return r;
    r = zcx_driver_capturing(d, ordinal, stream, err);
    if (r < 0) return r;
    if (r) return zcx_fail(err, ZCX_E_UNFIT, "the calling stream is being captured into a graph: call the worker outside the capture");
    r = zcx_call_gate_new(p, device, stream, &p->gates[p->ngates], err);
    if (!r) *out = &p->gates[p->ngates++];
    return r;
}

int zcx_call_gate_ready(struct zcx_parent *p, struct call_gate *g, struct zcx_err *err) {
    uint64_t value = zcx_gate_next(p->gate, g->ready_slot);
    int r = zcx_gate_post(p->gate, g->ordinal, g->ready_slot, value, g->stream, err);
    if (r) zcx_gate_post_cpu(p->gate, g->ready_slot, value); /* it was announced: a slot whose value never comes is lost */
    else g->ready = value;
    return r;
}

struct zcx_gate_ref zcx_call_gate_ref(const struct call_gate *g) {
    return (struct zcx_gate_ref){
        .pool = (uint16_t)g->device, .ready_slot = g->ready_slot, .done_slot = g->done_slot, .ready = g->ready, .done = g->done};
}

/* ---- lending ---- */

uint64_t zcx_parent_limit(const struct zcx_parent *p, unsigned device) {
    return device < p->ndevices && p->devices[device].windows == ZCX_WINDOWS_YES ? UINT64_MAX : (zcx_chunk_limit() - 1) * ZCX_CHUNK_BYTES + 1;
}

static int pool_buffer(struct zcx_parent *p, unsigned device, zcu_ptr ptr, uint64_t nbytes, struct transfer *t, struct zcx_err *err) {
    struct device *d = &p->devices[device];
    struct zcx_export e;
    if (!d->pooled) return zcx_fail(err, ZCX_E_UNFIT, "the worker did not open the pool of this device");
    int r = zcx_pool_export(d->pool, ptr, nbytes, d->windows, &e, err);
    if (r) return r;
    t->wire = (struct zcx_buffer){.rung = ZCX_RUNG_POOL, .pool = (uint16_t)device, .nbytes = nbytes, .offset = e.offset,
                                  .alloc_bytes = e.alloc_bytes, .key = e.buffer_id, .window = e.window};
    memcpy(t->wire.blob, e.blob, sizeof t->wire.blob);
    return 0;
}

static int slab_buffer(struct zcx_parent *p, unsigned device, zcu_ptr ptr, uint64_t nbytes, int writable, struct transfer *t, struct zcx_err *err) {
    uint64_t offset;
    int r = zcx_parent_send_slab(p, device, ptr, nbytes, writable, &t->slab, &offset, err);
    if (r) return r;
    t->wire = (struct zcx_buffer){.rung = ZCX_RUNG_VMM, .pool = (uint16_t)device, .nbytes = nbytes, .offset = offset,
                                  .alloc_bytes = zcx_slab_bytes(t->slab->memory), .key = t->slab->id};
    return 0;
}

int zcx_transfer_of_device(struct zcx_parent *p, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes, uint8_t flags, zcu_stream stream,
                           struct transfer *t, struct call_gate **gate, struct zcx_err *err) {
    if (device >= p->ndevices || p->devices[device].accepted != 1) return zcx_fail(err, ZCX_E_RANGE, "device %u was not accepted by the worker", device);
    int r = zcx_call_gate_of(p, device, stream, gate, err);
    if (!r) r = rung == ZCX_RUNG_POOL ? pool_buffer(p, device, ptr, nbytes, t, err) : slab_buffer(p, device, ptr, nbytes, flags != 0, t, err);
    if (!r) r = zcx_transfer_reserve(p, err); /* last: while a slab is told of, what the worker says may take room */
    if (r) {
        if (t->slab) t->slab->uses--;
        t->slab = NULL;
        return r;
    }
    t->ptr = ptr;
    t->wire.flags = flags;
    return 0;
}

int zcx_parent_lend_device(struct zcx_parent *p, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes, int private, zcu_stream stream,
                           void *owner, uint64_t *id, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_PREPARING, "lending", err);
    if (rung != ZCX_RUNG_POOL && rung != ZCX_RUNG_VMM) return zcx_fail(err, ZCX_E_RANGE, "rung %d lends no device memory", (int)rung);
    struct transfer t = {.owner = owner};
    struct call_gate *g;
    unsigned known = p->ngates;
    int r = zcx_transfer_of_device(p, device, rung, ptr, nbytes, private ? ZCX_BUFFER_PRIVATE : 0, stream, &t, &g, err);
    if (r) {
        if (p->ngates > known) zcx_call_gate_withdraw(p, &p->gates[--p->ngates]);
        return r;
    }
    *id = zcx_transfer_add(p, t)->id;
    return 0;
}

/* ---- slabs ---- */

/* Descriptors under way count against the sender's limit, and a tensor may be made of hundreds of pieces: after this many, the worker says that
 * it has closed them. Twice as many are under way at most. */
#define PIECES_UNDER_WAY 32u

static int send_piece(struct zcx_parent *p, const struct slab *s, uint32_t piece, struct zcx_err *err) {
    uint32_t npieces = zcx_slab_pieces(s->memory);
    int answer = (piece + 1) % PIECES_UNDER_WAY == 0;
    unsigned char body[64];
    struct zcx_slab_msg m = {.pool = (uint16_t)s->device, .piece = piece, .npieces = npieces, .piece_bytes = zcx_slab_piece_bytes(s->memory, piece),
                             .bytes = zcx_slab_bytes(s->memory),
                             .flags = (uint16_t)((s->writable ? ZCX_SLAB_WRITABLE : 0) | (s->stays ? ZCX_SLAB_STAYS : 0) | (answer ? ZCX_SLAB_ANSWER : 0))};
    int fd, r;
    if (answer) {
        r = zcx_parent_await_slabs(p, 0, err); /* of the batch before this one */
        if (r) return r;
    }
    long n = zcx_slab_msg_encode(&m, body, sizeof body, err);
    if (n < 0) return (int)n;
    r = zcx_slab_export(s->memory, piece, &fd, err);
    if (r) return r;
    r = zcx_parent_tell(p, ZCX_SLAB, s->id, body, (size_t)n, fd, err);
    close(fd);
    p->unanswered += !r && answer;
    return r;
}

static void forget_slab(struct zcx_parent *p, struct slab *gone) {
    for (struct slab **at = &p->slabs; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            zcx_slab_unref(gone->memory);
            free(gone);
            return;
        }
}

int zcx_parent_send_slab(struct zcx_parent *p, unsigned device, zcu_ptr ptr, uint64_t nbytes, int writable, struct slab **out, uint64_t *offset,
                         struct zcx_err *err) {
    struct zcx_slab *memory;
    zcu_ptr base;
    int r = 0;
    if (!(p->features & ZCX_FEATURE_VMM)) return zcx_fail(err, ZCX_E_UNFIT, "the worker's comfy-zerocopy is too old for it");
    if (zcx_slab_find(ptr, nbytes, &memory, &base)) r = zcx_slab_adopt(ptr, nbytes, &memory, &base, err);
    if (r) return r;
    struct slab *s;
    for (s = p->slabs; s && !(s->memory == memory && s->device == device && s->writable == writable && (s->stays || s->seq == p->seq)); s = s->next) {}
    if (s) {
        zcx_slab_unref(memory);
        s->uses++;
    } else {
        s = calloc(1, sizeof *s);
        if (!s) {
            zcx_slab_unref(memory);
            return zcx_fail(err, ENOMEM, "no memory for a slab");
        }
        *s = (struct slab){.next = p->slabs, .memory = memory, .id = ++p->next_slab, .seq = p->seq, .device = device, .writable = writable,
                           .stays = zcx_slab_shared(memory), .uses = 1}; /* already: a RELEASE that is heard meanwhile trims what has none */
        p->slabs = s;
        for (uint32_t piece = 0; piece < zcx_slab_pieces(memory) && !r; piece++) r = send_piece(p, s, piece, err);
        if (r) {
            struct zcx_header h = {.type = ZCX_SLAB_DROP, .id = s->id};
            if (p->state != ZCX_BROKEN) zcx_sock_send(&p->sock, h, NULL, 0, NULL, 0, 0, NULL); /* what came of it goes with the call at the latest */
            forget_slab(p, s);
            return r;
        }
    }
    *offset = ptr - base;
    *out = s;
    return 0;
}

void zcx_parent_trim_slabs(struct zcx_parent *p, int all) {
    for (struct slab *s = p->slabs, *next; s; s = next) {
        next = s->next;
        if (s->uses || (s->stays && !all && !zcx_slab_let_go(s->memory))) continue;
        struct zcx_header h = {.type = ZCX_SLAB_DROP, .id = s->id};
        if (s->stays && p->state != ZCX_BROKEN && zcx_sock_send(&p->sock, h, NULL, 0, NULL, 0, 0, NULL)) continue; /* it does not read now: later */
        forget_slab(p, s);
    }
}

/* ---- segments ---- */

static int segment_new(struct zcx_parent *p, struct zcx_shm *file, enum zcx_shm_kind kind, struct segment **out, struct zcx_err *err) {
    struct segment *s = calloc(1, sizeof *s);
    if (!s) {
        zcx_shm_unref(file);
        return zcx_fail(err, ENOMEM, "no memory for a segment");
    }
    s->file = file;
    s->kind = kind;
    pthread_mutex_lock(&p->lock);
    s->id = p->next_segment++;
    s->next = p->segments;
    p->segments = s;
    pthread_mutex_unlock(&p->lock);
    *out = s;
    return 0;
}

int zcx_parent_send_segment(struct zcx_parent *p, struct segment *s, struct zcx_err *err) {
    if (s->sent) return 0;
    unsigned char body[32];
    struct zcx_segment m = {.size = zcx_shm_size(s->file), .kind = (uint16_t)s->kind};
    long n = zcx_segment_encode(&m, body, sizeof body, err);
    if (n < 0) return (int)n;
    int fd = zcx_shm_fd(s->file), own = -1;
    if (s->kind == ZCX_SHM_FOREIGN) {
        own = fd = zcx_shm_readonly_fd(s->file, err);
        if (fd < 0) return fd;
    }
    int r = zcx_parent_tell(p, ZCX_SEGMENT, s->id, body, (size_t)n, fd, err);
    if (own >= 0) close(own);
    if (!r) s->sent = 1;
    return r;
}

int zcx_parent_lend_shared(struct zcx_parent *p, const void *address, uint64_t nbytes, void *owner, uint64_t *id, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_PREPARING, "lending", err);
    struct zcx_shm *file = zcx_files_find(p->files, address, nbytes);
    if (!file) return 1;
    int r = zcx_transfer_reserve(p, err);
    struct segment *s;
    for (s = p->segments; s && !(s->kind == ZCX_SHM_FOREIGN && s->file == file); s = s->next) {}
    if (r || s) zcx_shm_unref(file);
    if (!r && !s) r = segment_new(p, file, ZCX_SHM_FOREIGN, &s, err);
    if (!r) r = zcx_parent_send_segment(p, s, err); /* now: another thread may close the file's descriptor at any time */
    if (r == -ZCX_E_UNFIT) return 1;
    if (r) return r;
    struct transfer t = {.owner = owner, .segment = s,
                         .wire = {.rung = ZCX_RUNG_HOST, .nbytes = nbytes, .key = s->id,
                                  .offset = (uint64_t)((const unsigned char *)address - zcx_shm_base(s->file))}};
    pthread_mutex_lock(&p->lock);
    s->uses++;
    pthread_mutex_unlock(&p->lock);
    *id = zcx_transfer_add(p, t)->id;
    return 0;
}

/* Small pieces share pages; a larger one starts on its own, so that its mapping holds nothing else. */
static uint64_t placed(uint64_t at, uint64_t nbytes) {
    uint64_t alignment = nbytes >= ZCX_PAGE ? ZCX_PAGE : 64;
    return (at + alignment - 1) & ~(alignment - 1);
}

void zcx_parent_trim_segments(struct zcx_parent *p, uint64_t idle_bound) {
    pthread_mutex_lock(&p->lock);
    uint64_t idle = 0;
    for (struct segment **at = &p->segments, *s; (s = *at);) {
        uint64_t size = zcx_shm_size(s->file), taken = 0, warm = 0;
        if (s->kind == ZCX_SHM_FOREIGN) zcx_shm_usage(s->file, &taken, &warm);
        int drop = !s->uses && (s->kind == ZCX_SHM_INPUT ? idle + size > idle_bound : s->kind == ZCX_SHM_FOREIGN && !taken);
        if (!drop) {
            if (s->kind == ZCX_SHM_INPUT && !s->uses) idle += size;
            at = &s->next;
            continue;
        }
        *at = s->next;
        /* Best effort and without waiting: a worker that missed it holds an fd and a file that is empty for us. */
        struct zcx_header h = {.type = ZCX_SEGMENT_DROP, .id = s->id};
        if (s->sent && p->state != ZCX_BROKEN) zcx_sock_send(&p->sock, h, NULL, 0, NULL, 0, 0, NULL);
        zcx_shm_unref(s->file);
        free(s);
    }
    pthread_mutex_unlock(&p->lock);
}

int zcx_parent_give_up_idle(struct zcx_parent *p) {
    struct zcx_parent_stats before, after;
    zcx_parent_stats(p, &before);
    zcx_parent_trim_segments(p, 0);
    zcx_parent_stats(p, &after);
    return zcx_shm_reclaim(p->results) > 0 || after.input_bytes < before.input_bytes;
}

int zcx_parent_lend_copies(struct zcx_parent *p, struct zcx_source *sources, size_t n, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_PREPARING, "lending", err);
    uint64_t total = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = placed(total, sources[i].nbytes);
        if (__builtin_add_overflow(at, sources[i].nbytes, &total)) return zcx_fail(err, ZCX_E_RANGE, "the inputs' sizes overflow");
    }
    struct segment *best = NULL;
    for (struct segment *s = p->segments; s; s = s->next)
        if (s->kind == ZCX_SHM_INPUT && !s->uses && zcx_shm_size(s->file) >= total && (!best || zcx_shm_size(s->file) < zcx_shm_size(best->file)))
            best = s;
    int r;
    if (!best) {
        struct zcx_shm *file;
        uint64_t size = total < (1u << 20) ? 1u << 20 : total + total / 8; /* a little more, so that the next call fits too */
        r = zcx_shm_input_new(&file, size, err);
        if (r && (size > total || zcx_parent_give_up_idle(p))) r = zcx_shm_input_new(&file, total ? total : 1, err);
        if (r) return r;
        r = segment_new(p, file, ZCX_SHM_INPUT, &best, err);
        if (r) return r;
    }
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        r = zcx_transfer_reserve(p, err);
        if (r) return r;
        at = placed(at, sources[i].nbytes);
        memcpy(zcx_shm_base(best->file) + at, sources[i].address, sources[i].nbytes);
        struct transfer t = {.segment = best, .wire = {.rung = ZCX_RUNG_HOST, .nbytes = sources[i].nbytes, .offset = at, .key = best->id}};
        pthread_mutex_lock(&p->lock);
        best->uses++;
        pthread_mutex_unlock(&p->lock);
        sources[i].id = zcx_transfer_add(p, t)->id;
        at += sources[i].nbytes;
    }
    return 0;
}
