/* xfer_worker.c: the worker's end of a session. See xfer.h for the contract.
 *
 * One rule decides the order of everything here: the parent may free what it lent as soon as it sees DONE (or RELEASE), so
 * both are said only after the un-import, and the un-import waits for all work of this process's context, not for one
 * stream: a side stream that nobody joined must not write into memory that belongs to somebody else by then. */
#include "xfer_worker.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define SEND_NS (30ll * 1000000000)
/* While GPU work of the last call or release is under way it is looked at this often, and after that long asked about. */
#define WATCH_NS 1000000
#define WATCH_ASK_NS 20000000
#define PACKET_SPIN_NS 20000

int zcx_worker_new(struct zcx_worker **out, int sock_fd, struct zcx_err *err) {
    struct zcx_worker *w = calloc(1, sizeof *w);
    int r;
    if (!w) {
        close(sock_fd);
        return zcx_fail(err, ENOMEM, "no memory for a session");
    }
    w->pid = getpid();
    r = zcx_sock_open(&w->sock, sock_fd, -1, err);
    if (r) goto free_w;
    w->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w->kick < 0) {
        r = zcx_fail_errno(err, "eventfd");
        goto close_sock;
    }
    pthread_mutex_init(&w->rpc, NULL);
    pthread_mutex_init(&w->lock, NULL);
    *out = w;
    return 0;
close_sock:
    zcx_sock_close(&w->sock);
free_w:
    free(w);
    return r;
}

/* The process is about to end: the driver gives back what it holds; only what others could see is closed here. */
void zcx_worker_free(struct zcx_worker *w) {
    int driver_holds = 0;
    if (!w) return;
    for (unsigned k = 0; k < ZCX_MAX_DEVICES; k++) driver_holds |= w->devices[k].open;
    if (!driver_holds) zcx_gate_free(w->gate);
    if (w->has_msg) zcx_msg_free(&w->msg);
    zcx_sock_close(&w->sock);
    close(w->kick);
    free(w->dropped);
    while (w->segments) {
        struct segment *s = w->segments;
        w->segments = s->next;
        zcx_shm_unref(s->file);
        free(s);
    }
    for (struct zcx_import *i; (i = w->imports);) {
        w->imports = i->next;
        if (i->ordinal < 0) zcx_shm_unmap(i->address, i->wire.nbytes);
        free(i);
    }
    pthread_mutex_destroy(&w->rpc);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

int zcx_worker_tell(struct zcx_worker *w, struct zcx_header h, const void *head, size_t nhead, const void *tree, size_t ntree, struct zcx_err *err) {
    struct zcx_piece pieces[2] = {{head, nhead}, {tree, ntree}};
    int r = zcx_sock_send(&w->sock, h, pieces, 2, NULL, 0, zcx_now() + SEND_NS, err);
    return r == 1 ? zcx_fail(err, ZCX_E_DIED, "the parent does not read its messages") : r;
}

int zcx_worker_hello(struct zcx_worker *w, const struct zcx_hello *parents, const char *version, const char *python, struct zcx_err *err) {
    unsigned char body[2 * ZCX_STRING_MAX + 64];
    uint16_t common = parents->protocol_max < ZCX_PROTOCOL_MAX ? parents->protocol_max : ZCX_PROTOCOL_MAX;
    struct zcx_hello hello = {.protocol_min = ZCX_PROTOCOL_MIN, .protocol_max = common, .pid = (uint32_t)getpid(),
                              .features = ZCX_FEATURES, .version = zcx_text_of(version), .python = zcx_text_of(python)};
    long n = zcx_hello_encode(&hello, body, sizeof body, err);
    if (n < 0) return (int)n;
    int r = zcx_worker_tell(w, (struct zcx_header){.type = ZCX_HELLO}, body, (size_t)n, NULL, 0, err);
    if (!r && (common < ZCX_PROTOCOL_MIN || common < parents->protocol_min))
        r = zcx_fail(err, ZCX_E_PROTOCOL, "the parent's comfy-zerocopy %.*s speaks protocol %u to %u, this one %d to %d", (int)parents->version.length,
                     parents->version.bytes, parents->protocol_min, parents->protocol_max, ZCX_PROTOCOL_MIN, ZCX_PROTOCOL_MAX);
    return r;
}

int zcx_worker_started(struct zcx_worker *w, struct zcx_err *err) {
    return zcx_worker_tell(w, (struct zcx_header){.type = ZCX_STARTED}, NULL, 0, NULL, 0, err);
}

static int send_result(struct zcx_worker *w, enum zcx_type type, uint32_t code, uint64_t seq, const uint64_t *kept, uint32_t nkept,
                       const void *tree, size_t tree_bytes, struct zcx_err *err) {
    size_t fixed = 8 + 8 * (size_t)nkept;
    unsigned char *head = malloc(2 * fixed);
    if (!head) return zcx_fail(err, ENOMEM, "no memory for the result's head");
    struct zcx_result_msg m = {.nkept = nkept, .code = code, .kept = head + fixed};
    for (uint32_t i = 0; i < nkept; i++) zcx_wire_put_u64(head + fixed, i, kept[i]);
    long n = zcx_result_msg_encode(&m, head, fixed, err);
    int r = n < 0 ? (int)n : zcx_worker_tell(w, (struct zcx_header){.type = (uint16_t)type, .seq = seq}, head, (size_t)n, tree, tree_bytes, err);
    free(head);
    return r;
}

int zcx_worker_failed_start(struct zcx_worker *w, const void *tree, size_t tree_bytes, struct zcx_err *err) {
    return send_result(w, ZCX_ERROR, ZCX_FAILED_STARTUP, 0, NULL, 0, tree, tree_bytes, err);
}

/* Messages that may come at any time and are dealt with here. 1: it was one of them. */
static int introduced(struct zcx_worker *w, struct zcx_err *err) {
    const struct zcx_header *h = &w->msg.header;
    int r;
    switch (h->type) {
    case ZCX_GATE: {
        struct zcx_gate_page page;
        r = zcx_gate_page_decode(w->msg.body, h->length, &page, err);
        if (r) return r;
        if (w->gate || w->msg.nfds != 1 || page.slots != ZCX_GATE_SLOTS || page.stride != ZCX_GATE_STRIDE)
            return zcx_fail(err, ZCX_E_PROTOCOL, "the gate's page does not fit");
        r = zcx_gate_open(&w->gate, w->msg.fds[0], err);
        break;
    }
    case ZCX_GATE_EVENT: r = zcx_worker_take_event(w, err); break;
    case ZCX_POOL:
    case ZCX_DEVICE: r = zcx_worker_take_device(w, err); break;
    case ZCX_SLAB: r = zcx_worker_take_slab(w, err); break;
    case ZCX_SLAB_DROP: r = zcx_worker_drop_slab(w, h->id, err); break;
    case ZCX_PROVE: r = zcx_worker_take_proof(w, err); break;
    case ZCX_SEGMENT: r = zcx_worker_take_segment(w, err); break;
    case ZCX_SEGMENT_DROP: zcx_worker_drop_segment(w, h->id); r = 0; break;
    case ZCX_PING: r = zcx_worker_tell(w, (struct zcx_header){.type = ZCX_PONG}, NULL, 0, NULL, 0, err); break;
    default: return 0;
    }
    return r ? r : 1;
}

static int receive(struct zcx_worker *w, struct zcx_err *err) {
    if (w->has_msg) zcx_msg_free(&w->msg);
    w->has_msg = 0;
    int r = zcx_sock_recv(&w->sock, &w->msg, err);
    if (!r) w->has_msg = 1;
    return r;
}

/* ---- gates ---- */

static int set_gate(struct zcx_worker *w, const struct zcx_gate_ref *g, struct zcx_err *err) {
    if (g->pool >= ZCX_MAX_DEVICES || !w->devices[g->pool].open || g->ready_slot >= ZCX_GATE_SLOTS || g->done_slot >= ZCX_GATE_SLOTS)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a gate on device %u, which was not accepted", g->pool);
    w->devices[g->pool].gate = *g;
    w->devices[g->pool].in_call = 1;
    return 0;
}

static int await_ready(struct zcx_worker *w, struct device *d, zcx_stream_of stream_of, void *arg, struct zcx_err *err) {
    zcu_stream stream = stream_of ? stream_of(arg, d->ordinal) : NULL;
    return zcx_gate_await(w->gate, d->ordinal, d->gate.ready_slot, d->gate.ready, stream, err);
}

/* Only from here on may other threads ask for results: they receive, and the call's message has been copied by now. */
int zcx_worker_begin(struct zcx_worker *w, zcx_stream_of stream_of, void *arg, struct zcx_err *err) {
    pthread_mutex_lock(&w->rpc);
    w->in_call = 1;
    pthread_mutex_unlock(&w->rpc);
    for (unsigned i = 0; i < ZCX_MAX_DEVICES; i++)
        if (w->devices[i].in_call) {
            int r = await_ready(w, &w->devices[i], stream_of, arg, err);
            if (r) return r;
        }
    return 0;
}

int zcx_device_join(const struct zcx_driver *driver, struct device *d, struct zcx_err *err) {
    zcu_ctx context;
    int r = zcx_cu(err, "cuCtxGetCurrent", driver->CtxGetCurrent(&context));
    if (r) return r;
    /* cuCtxRecordEvent came with CUDA 12.5; before it, this process waits on the CPU: its own work only, nobody else's. While a thread of this
     * process captures a graph, neither can be had, and the call's end waits for that. */
    struct timespec pause = {.tv_nsec = 1000000};
    zcu_result q;
    while ((q = driver->CtxRecordEvent ? zcx_driver_record_context(driver, context, d->work) : zcx_driver_synchronize_context(driver)) ==
           ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        nanosleep(&pause, NULL);
    if (!driver->CtxRecordEvent) return zcx_cu(err, "cuCtxSynchronize", q);
    r = zcx_cu(err, "cuCtxRecordEvent", q);
    if (!r) r = zcx_cu(err, "cuStreamWaitEvent", driver->StreamWaitEvent(d->gate_stream, d->work, 0));
    return r;
}

int zcx_device_settle(const struct zcx_driver *driver, struct device *d, struct zcx_err *err) {
    int r = zcx_device_join(driver, d, err);
    return r ? r : zcx_cu(err, "cuStreamSynchronize", driver->StreamSynchronize(d->gate_stream));
}

/* ---- the end of a call ---- */

/* What was dropped by now, in this call or (`seq` 0) outside any, may be un-mapped once all work that the context was given by now is over.
 * What is dropped later may have work of its own by then. */
static void mark_dropped(struct zcx_worker *w, unsigned device, uint64_t seq) {
    pthread_mutex_lock(&w->lock);
    for (struct zcx_import *i = w->imports; i; i = i->next)
        if (i->state == DROPPED && i->ordinal >= 0 && i->wire.pool == device && (!seq || i->seq == seq)) i->state = GOING;
    pthread_mutex_unlock(&w->lock);
}

static int unmap_marked(struct zcx_worker *w, unsigned device, int of_slabs, struct zcx_err *err) {
    int r = 0;
    pthread_mutex_lock(&w->lock);
    for (struct zcx_import *i = w->imports, *next; i && !r; i = next) {
        next = i->next;
        if (i->state != GOING || i->wire.pool != device || (i->slab != NULL) != of_slabs) continue;
        r = zcx_import_unmap(w, i, err);
        if (!r) zcx_import_forget(i);
    }
    pthread_mutex_unlock(&w->lock);
    return r;
}

static int has_slabs(const struct zcx_worker *w, unsigned device) {
    const struct slab *s;
    for (s = w->slabs; s && s->device != device; s = s->next) {}
    return s != NULL;
}

static int done(struct zcx_worker *w, struct device *d, struct zcx_err *err) {
    unsigned index = (unsigned)(d - w->devices);
    struct zcx_scope scope;
    int r = zcx_scope_open(&scope, d->ordinal, err);
    if (r) return r;
    if (w->in_call) mark_dropped(w, index, w->seq); /* after its end, what is dropped is said with RELEASE */
    if (has_slabs(w, index)) {
        /* A mapping is un-made at once, and not in the order of a stream: everything that may use it must be over. This comes before the
         * pool's un-imports, whose mappings a wait after them would drop from the driver's cache. */
        r = zcx_device_settle(scope.d, d, err);
        if (!r) r = unmap_marked(w, index, 1, err);
        if (!r) zcx_worker_trim_slabs(w, index);
    } else {
        r = zcx_device_join(scope.d, d, err);
    }
    if (!r) r = unmap_marked(w, index, 0, err);
    if (!r) r = zcx_gate_post(w->gate, d->ordinal, d->gate.done_slot, d->gate.done, d->gate_stream, err);
    zcx_scope_close(&scope);
    d->in_call = 0;
    d->watched = !r;
    d->asked = zcx_now();
    return r;
}

int zcx_worker_finish(struct zcx_worker *w, enum zcx_type type, uint32_t code, uint64_t transfer, const void *tree, size_t tree_bytes,
                      struct zcx_err *err) {
    int r = 0;
    uint64_t *kept = NULL;
    uint32_t nkept = 0;
    pthread_mutex_lock(&w->rpc);
    for (unsigned i = 0; i < ZCX_MAX_DEVICES && !r; i++)
        if (w->devices[i].in_call) r = done(w, &w->devices[i], err);
    if (r) {
        /* The context is poisoned: say so while the parent still listens, and leave. It must never see DONE from us. */
        char why[256];
        int n = snprintf(why, sizeof why, "%s: %s", err->call ? err->call : "?", zcx_driver_error_name(err->cuda));
        send_result(w, ZCX_ERROR, ZCX_FAILED_GPU, w->seq, NULL, 0, why, (size_t)n, NULL);
        goto unlock;
    }
    pthread_mutex_lock(&w->lock);
    size_t live = 0;
    for (struct zcx_import *i = w->imports, *next; i; i = next) {
        next = i->next;
        if (i->seq != w->seq) continue;
        if (i->state == DROPPED && i->ordinal < 0) {
            zcx_import_unmap(w, i, NULL);
            zcx_import_forget(i);
        } else {
            live++;
        }
    }
    kept = malloc((live ? live : 1) * sizeof *kept);
    for (struct zcx_import *i = w->imports; i && kept; i = i->next)
        if (i->seq == w->seq) kept[nkept++] = i->wire.id; /* dropped this instant, on a device: RELEASE follows */
    pthread_mutex_unlock(&w->lock);
    w->in_call = 0;
    if (!kept) r = zcx_fail(err, ENOMEM, "no memory for the list of kept buffers");
    else if (type != ZCX_IMPORT_REFUSED) r = send_result(w, type, code, w->seq, kept, nkept, tree, tree_bytes, err);
    else {
        unsigned char body[ZCX_STRING_MAX + 64];
        struct zcx_refused m = {.code = code, .reason = {tree, tree_bytes > ZCX_STRING_MAX ? ZCX_STRING_MAX : (uint32_t)tree_bytes}};
        long n = zcx_refused_encode(&m, body, sizeof body, err);
        r = n < 0 ? (int)n : zcx_worker_tell(w, (struct zcx_header){.type = ZCX_IMPORT_REFUSED, .seq = w->seq, .id = transfer}, body, (size_t)n, NULL, 0, err);
    }
    free(kept);
unlock:
    pthread_mutex_unlock(&w->rpc);
    return r;
}

/* ---- between calls ---- */

static int release_message(struct zcx_worker *w, const uint64_t *ids, uint32_t n, struct zcx_err *err) {
    size_t fixed = 8 + 8 * (size_t)n;
    unsigned char *body = malloc(2 * fixed);
    if (!body) return zcx_fail(err, ENOMEM, "no memory for a release");
    struct zcx_release m = {.count = n, .ids = body + fixed};
    for (uint32_t i = 0; i < n; i++) zcx_wire_put_u64(body + fixed, i, ids[i]);
    long length = zcx_release_encode(&m, body, fixed, err);
    int r = length < 0 ? (int)length : zcx_worker_tell(w, (struct zcx_header){.type = ZCX_RELEASE}, body, (size_t)length, NULL, 0, err);
    free(body);
    return r;
}

/* Un-import what was dropped outside its call, and say RELEASE for what the GPU has let go of. */
static int sweep(struct zcx_worker *w, struct zcx_err *err) {
    uint64_t ids[256];
    uint32_t n = 0;
    int r = 0, needs[ZCX_MAX_DEVICES] = {0}, complete[ZCX_MAX_DEVICES] = {0};
    const struct zcx_driver *driver = zcx_driver_opened();

    for (unsigned k = 0; k < ZCX_MAX_DEVICES; k++) {
        struct device *d = &w->devices[k];
        struct zcx_scope scope;
        if (!d->releasing) continue;
        r = zcx_scope_open(&scope, d->ordinal, err);
        if (r) return r;
        int q = driver->EventQuery(d->released);
        zcx_scope_close(&scope);
        if (q == ZCU_ERROR_NOT_READY) continue;
        if (q) return zcx_cu(err, "cuEventQuery", q);
        complete[k] = 1;
    }
    pthread_mutex_lock(&w->lock);
    for (struct zcx_import *i = w->imports, *next; i && n < 256; i = next) {
        next = i->next;
        int host = i->ordinal < 0;
        if ((host && i->state == DROPPED) || (!host && i->state == RELEASING && complete[i->wire.pool])) {
            ids[n++] = i->wire.id;
            if (host || i->slab) zcx_import_unmap(w, i, NULL);
            zcx_import_forget(i);
        } else if (!host && i->state == DROPPED && (!w->devices[i->wire.pool].releasing || complete[i->wire.pool])) {
            needs[i->wire.pool] = 1;
        }
    }
    pthread_mutex_unlock(&w->lock);
    for (unsigned k = 0; k < ZCX_MAX_DEVICES; k++)
        if (complete[k]) {
            int left = 0;
            pthread_mutex_lock(&w->lock);
            for (const struct zcx_import *i = w->imports; i; i = i->next) left |= i->state == RELEASING && i->wire.pool == k;
            pthread_mutex_unlock(&w->lock);
            w->devices[k].releasing = left; /* more than one message's worth: the next sweep takes them */
        }
    if (n) r = release_message(w, ids, n, err);
    for (unsigned k = 0; k < ZCX_MAX_DEVICES && !r; k++) {
        struct device *d = &w->devices[k];
        struct zcx_scope scope;
        if (!needs[k] || d->releasing) continue;
        r = zcx_scope_open(&scope, d->ordinal, err);
        if (r) return r;
        mark_dropped(w, k, 0);
        r = zcx_device_join(scope.d, d, err);
        pthread_mutex_lock(&w->lock);
        for (struct zcx_import *i = w->imports; i && !r; i = i->next)
            if (i->state == GOING && i->wire.pool == k) {
                r = i->slab ? 0 : zcx_import_unmap(w, i, err); /* a slab's waits until the event says that all is over */
                if (!r) i->state = RELEASING;
            }
        pthread_mutex_unlock(&w->lock);
        if (!r) r = zcx_cu(err, "cuEventRecord", scope.d->EventRecord(d->released, d->gate_stream));
        zcx_scope_close(&scope);
        d->releasing = !r;
    }
    return r;
}

/* Is GPU work of the last call still under way? Its failure is the worker's end. The counter says that it is over without a
 * call into the driver: one that finds a stream idle drops the mappings of what was just un-imported, and the next import of
 * the same memory pays in full. The driver is asked only when that takes long: a fault posts no counter. */
static int watch(struct zcx_worker *w, int *pending, struct zcx_err *err) {
    *pending = 0;
    for (unsigned k = 0; k < ZCX_MAX_DEVICES; k++) {
        struct device *d = &w->devices[k];
        struct zcx_scope scope;
        int r;
        if (!d->watched && !d->releasing) continue;
        if (d->watched) {
            r = zcx_gate_reached(w->gate, d->ordinal, d->gate.done_slot, d->gate.done, err);
            if (r < 0) return r;
            d->watched = !r;
        }
        if (!d->watched && !d->releasing) continue;
        *pending = 1;
        if (zcx_now() - d->asked < WATCH_ASK_NS) continue;
        r = zcx_scope_open(&scope, d->ordinal, err);
        if (r) return r;
        int q = scope.d->StreamQuery(d->gate_stream);
        zcx_scope_close(&scope);
        d->asked = zcx_now();
        if (q && q != ZCU_ERROR_NOT_READY) return zcx_cu(err, "cuStreamQuery", q);
    }
    return 0;
}

/* Wait for a packet, a kick, or `ns` (negative: for ever). 0: a packet; 1: something else; 2: a signal. */
static int wait_idle(struct zcx_worker *w, int64_t ns, struct zcx_err *err) {
    struct pollfd f[2] = {{.fd = w->sock.fd, .events = POLLIN}, {.fd = w->kick, .events = POLLIN}};
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    int n = ppoll(f, 2, ns < 0 ? NULL : &t, NULL);
    if (n < 0) return errno == EINTR ? 2 : zcx_fail_errno(err, "ppoll");
    uint64_t count;
    if (f[1].revents && read(w->kick, &count, sizeof count) < 0 && errno != EAGAIN) return zcx_fail_errno(err, "read");
    return f[0].revents ? 0 : 1;
}

static int start_call(struct zcx_worker *w, struct zcx_work *work, struct zcx_err *err) {
    struct zcx_call_msg m;
    int r = zcx_call_msg_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r) return r;
    if (w->msg.header.seq <= w->seq) return zcx_fail(err, ZCX_E_PROTOCOL, "call %llu came twice", (unsigned long long)w->msg.header.seq);
    for (uint32_t i = 0; i < m.ngates && !r; i++) {
        struct zcx_gate_ref g;
        r = zcx_gate_ref_decode(m.gates + i * ZCX_GATE_REF_BYTES, &g, err);
        if (!r) r = set_gate(w, &g, err);
    }
    if (r) return r;
    w->seq = w->msg.header.seq;
    *work = (struct zcx_work){.kind = ZCX_WORK_CALL, .seq = w->seq, .nbuffers = m.nbuffers, .buffers = m.buffers, .tree = m.tree,
                              .tree_bytes = m.tree_bytes};
    return 0;
}

static int gpu_fault(struct zcx_worker *w, int r, struct zcx_err *err) {
    char why[256];
    int n = snprintf(why, sizeof why, "%s: %s", err->call ? err->call : "?", zcx_driver_error_name(err->cuda));
    if (r == -ZCX_E_CUDA) send_result(w, ZCX_ERROR, ZCX_FAILED_GPU, w->seq, NULL, 0, why, (size_t)n, NULL);
    return r;
}

/* The answer to a request that was given up, at a signal. The memory was never mapped here; but where the parent made a gate
 * for it, it waits for our DONE: that comes at the call's end, or now, if the call has ended. */
static int pass_over(struct zcx_worker *w, struct zcx_err *err) {
    struct zcx_allocated m;
    if (w->msg.header.type != ZCX_ALLOCATED) return 0;
    int r = zcx_allocated_decode(w->msg.body, w->msg.header.length, &m, err);
    if (r || !m.has_gate) return r;
    int ended = !w->in_call;
    const struct zcx_gate_ref *known = m.gate.pool < ZCX_MAX_DEVICES ? &w->devices[m.gate.pool].gate : NULL;
    if (ended && known && known->done_slot == m.gate.done_slot && known->done == m.gate.done) return 0; /* said already */
    r = set_gate(w, &m.gate, err);
    return r || !ended ? r : done(w, &w->devices[m.gate.pool], err);
}

int zcx_worker_next(struct zcx_worker *w, struct zcx_work *work, struct zcx_err *err) {
    int64_t spin_until = zcx_now() + PACKET_SPIN_NS;
    if (w->ndropped) {
        *work = (struct zcx_work){.kind = ZCX_WORK_HANDLE_DROP, .handle = w->dropped[--w->ndropped]};
        return 0;
    }
    for (;;) {
        int pending, r = sweep(w, err);
        if (!r) r = watch(w, &pending, err);
        if (r) return gpu_fault(w, r, err);
        r = receive(w, err);
        if (r < 0) return r;
        if (r == 1) {
            if (zcx_now() < spin_until) continue;
            r = wait_idle(w, pending ? WATCH_NS : -1, err);
            if (r < 0 || r == 2) return r;
            continue;
        }
        r = introduced(w, err);
        if (r < 0) return r;
        if (r) continue;
        switch (w->msg.header.type) {
        case ZCX_HELLO:
            work->kind = ZCX_WORK_HELLO;
            return zcx_hello_decode(w->msg.body, w->msg.header.length, &work->hello, err);
        case ZCX_CALL: return start_call(w, work, err);
        case ZCX_BYE: *work = (struct zcx_work){.kind = ZCX_WORK_BYE}; return 0;
        case ZCX_HANDLE_DROP: *work = (struct zcx_work){.kind = ZCX_WORK_HANDLE_DROP, .handle = w->msg.header.id}; return 0;
        case ZCX_ALLOCATED:
        case ZCX_REFUSED:
            r = pass_over(w, err);
            if (r) return gpu_fault(w, r, err);
            continue;
        default: return zcx_fail(err, ZCX_E_PROTOCOL, "message type %u means nothing to a worker", w->msg.header.type);
        }
    }
}

/* ---- results ---- */

static int hold_drop(struct zcx_worker *w, uint64_t handle, struct zcx_err *err) {
    if (w->ndropped == w->cdropped) {
        size_t want = w->cdropped ? 2 * w->cdropped : 16;
        uint64_t *p = realloc(w->dropped, want * sizeof *p);
        if (!p) return zcx_fail(err, ENOMEM, "no memory for a handle's number");
        w->dropped = p;
        w->cdropped = want;
    }
    w->dropped[w->ndropped++] = handle;
    return 0;
}

/* The answer to request `want`; earlier ones that were given up are passed over. 0, 1 refused, 2 a signal. */
static int await_answer(struct zcx_worker *w, uint64_t want, struct zcx_allocated *out, uint32_t *code, struct zcx_err *err) {
    for (;;) {
        int r = receive(w, err);
        if (r == 1) {
            r = zcx_sock_wait(&w->sock, INT64_MAX, PACKET_SPIN_NS, err);
            if (r < 0 || r == 2) return r;
            continue;
        }
        if (!r) r = introduced(w, err);
        if (r < 0) return r;
        if (r) continue;
        const struct zcx_header *h = &w->msg.header;
        if (h->type == ZCX_HANDLE_DROP) {
            r = hold_drop(w, h->id, err);
            if (r) return r;
            continue;
        }
        if (h->type != ZCX_ALLOCATED && h->type != ZCX_REFUSED) return zcx_fail(err, ZCX_E_PROTOCOL, "message type %u came instead of an allocation", h->type);
        if (h->id != want) {
            r = pass_over(w, err);
            if (r) return r;
            continue;
        }
        if (h->type == ZCX_ALLOCATED) return zcx_allocated_decode(w->msg.body, h->length, out, err);
        struct zcx_refused m;
        r = zcx_refused_decode(w->msg.body, h->length, &m, err);
        if (r) return r;
        *code = m.code;
        zcx_fail(err, ZCX_E_LIMIT, "%.*s", (int)m.reason.length, m.reason.bytes);
        return 1;
    }
}

static int alloc_locked(struct zcx_worker *w, const struct zcx_alloc *a, uint64_t *request, zcx_stream_of stream_of, void *arg,
                        struct zcx_import **out, struct zcx_buffer *staged, uint32_t *code, struct zcx_err *err) {
    unsigned char body[128 + 256 + 8 * ZCX_NDIM_MAX];
    struct zcx_allocated answer;
    int r;
    if (!w->in_call) return zcx_fail(err, ZCX_E_RANGE, "a result can only be made while a call runs");
    if (!*request) {
        long n = zcx_alloc_encode(a, body, sizeof body, err);
        if (n < 0) return (int)n;
        *request = ++w->request;
        r = zcx_worker_tell(w, (struct zcx_header){.type = ZCX_ALLOC, .seq = w->seq, .id = *request}, body, (size_t)n, NULL, 0, err);
        if (r) return r;
    }
    r = await_answer(w, *request, &answer, code, err);
    if (r) return r;
    if (answer.has_gate) {
        r = set_gate(w, &answer.gate, err);
        if (!r) r = await_ready(w, &w->devices[answer.gate.pool], stream_of, arg, err);
        if (r) return r;
    }
    if (answer.buffer.rung != ZCX_RUNG_STAGED) return zcx_import_map(w, &answer.buffer, out, err);
    if (a->place != 2) return zcx_fail(err, ZCX_E_PROTOCOL, "the parent answered with memory that was not asked for");
    *out = NULL;
    *staged = answer.buffer;
    return 0;
}

int zcx_worker_alloc(struct zcx_worker *w, const struct zcx_alloc *a, uint64_t *request, zcx_stream_of stream_of, void *arg,
                     struct zcx_import **out, struct zcx_buffer *staged, uint32_t *code, struct zcx_err *err) {
    if (w->pid != getpid()) return zcx_fail(err, ZCX_E_RANGE, "a result is made by the worker's own process, not by its fork");
    pthread_mutex_lock(&w->rpc);
    int r = alloc_locked(w, a, request, stream_of, arg, out, staged, code, err);
    pthread_mutex_unlock(&w->rpc);
    return r;
}

int zcx_worker_progress(struct zcx_worker *w, double done_so_far, double total, const char *message, size_t n, struct zcx_err *err) {
    unsigned char body[ZCX_STRING_MAX + 64];
    struct zcx_progress m = {done_so_far, total, {message, n > ZCX_STRING_MAX ? ZCX_STRING_MAX : (uint32_t)n}};
    long length = zcx_progress_encode(&m, body, sizeof body, err);
    if (length < 0) return (int)length;
    struct zcx_piece piece = {body, (size_t)length};
    struct zcx_header h = {.type = ZCX_PROGRESS, .seq = w->seq};
    if (w->pid != getpid()) return 0;
    int r = zcx_sock_send(&w->sock, h, &piece, 1, NULL, 0, 0, err);
    return r == 1 ? 0 : r;
}

int zcx_worker_drop_handle(struct zcx_worker *w, uint64_t handle, struct zcx_err *err) {
    struct zcx_header h = {.type = ZCX_HANDLE_DROP, .id = handle};
    if (w->pid != getpid()) return 0; /* a copy of the token went, not the token */
    return zcx_sock_send(&w->sock, h, NULL, 0, NULL, 0, zcx_now() + SEND_NS, err);
}
