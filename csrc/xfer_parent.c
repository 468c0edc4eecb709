/* xfer_parent.c: the parent's end of a session. See xfer.h for the contract, docs/ownership.md for the table of states.
 *
 * Everything that a worker sends is checked against the state and the table before it changes either; a message that does
 * not fit breaks the session and nothing else. */
#include "xfer_parent.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* What idle input segments, and what the result file's free ranges, may hold: a part of the machine's memory, because pages that
 * are there already make a large tensor several times cheaper. It is given back when nobody has called for a while
 * (zcx_parent_rest). */
uint64_t zcx_parent_warm_bound(void) {
    uint64_t bound = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 16;
    return bound < (256ull << 20) ? 256ull << 20 : bound > (4ull << 30) ? 4ull << 30 : bound;
}

/* A worker that does not read an answer for this long is not going to: its socket is full of our messages. */
#define ANSWER_NS (30ll * 1000000000)
/* DONE is looked for this long without sleeping, then with sleeps of an eighth of the time that it has taken so far, so that
 * waiting adds no more than that, up to the longest. */
#define DONE_SPIN_NS 200000
#define DONE_SLEEP_MAX_NS 1000000
/* A result costs a page, however few bytes max_result_bytes counts for it. */
#define RESULTS_MAX 65536u
/* So many messages are handled before signals are looked at. */
#define MESSAGES_MAX 256
/* So many may come, releases and dropped handles mostly, while it is awaited that the worker takes the memory it was told of. */
#define MEANWHILE_MAX 65536u
/* A packet is looked for this long without sleeping: about one hand-off. */
#define PACKET_SPIN_NS 20000

int zcx_parent_broken(struct zcx_parent *p, int r) {
    p->state = ZCX_BROKEN;
    return r;
}

int zcx_parent_wrong_state(const struct zcx_parent *p, const char *what, struct zcx_err *err) {
    if (p->creator != getpid()) return zcx_fail(err, ZCX_E_UNFIT, "this worker belongs to the process that started it, not to its fork: start another one here");
    if (p->state == ZCX_BROKEN) return zcx_fail(err, ZCX_E_DIED, "the session is over");
    return zcx_fail(err, ZCX_E_RANGE, "%s is not possible in state %d of the session", what, (int)p->state);
}

int zcx_parent_new(struct zcx_parent **out, struct zcx_files *files, int sock_fd, int control_fd, int pidfd, struct zcx_err *err) {
    int r;
    struct zcx_parent *p = calloc(1, sizeof *p);
    if (!p) {
        close(sock_fd);
        close(control_fd);
        return zcx_fail(err, ENOMEM, "no memory for a session");
    }
    p->control = control_fd;
    p->creator = getpid();
    p->files = files;
    p->next_id = 1;
    p->next_segment = 1;
    p->deadline = INT64_MAX;
    r = zcx_sock_open(&p->sock, sock_fd, pidfd, err);
    if (r) goto free_p;
    r = zcx_gate_new(&p->gate, err);
    if (r) goto close_sock;
    /* Address space for twice the machine's memory: more can never be in use, and holes in it cost nothing. */
    uint64_t space = 1ull << 30, want = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) * 2;
    while (space < want) space *= 2;
    r = zcx_shm_result_new(&p->results, space, err);
    if (r) goto free_gate;
    zcx_shm_keep_warm(p->results, zcx_parent_warm_bound());
    zcx_files_sweep(files);
    r = zcx_files_add(files, p->results, err);
    if (r) goto free_results;
    pthread_mutex_init(&p->lock, NULL);
    *out = p;
    return 0;

free_results:
    zcx_shm_unref(p->results);
free_gate:
    zcx_gate_free(p->gate);
close_sock:
    zcx_sock_close(&p->sock);
free_p:
    close(control_fd);
    free(p);
    return r;
}

enum zcx_session_state zcx_parent_state(const struct zcx_parent *p) { return p->state; }
int zcx_parent_fd(const struct zcx_parent *p) { return p->sock.fd; }

int zcx_parent_tell(struct zcx_parent *p, enum zcx_type type, uint64_t id, const void *body, size_t n, int fd, struct zcx_err *err) {
    struct zcx_header h = {.type = (uint16_t)type, .seq = p->seq, .id = id};
    struct zcx_piece piece = {body, n};
    int64_t until = zcx_now() + ANSWER_NS;
    int r;
    if (until > p->deadline) until = p->deadline;
    do r = zcx_sock_send(&p->sock, h, &piece, 1, &fd, fd >= 0, until, err);
    while (r == 2); /* it must not be forgotten, and the wait is bounded */
    if (r == 1) r = zcx_fail(err, ZCX_E_PROTOCOL, "the worker does not read its messages");
    return r < 0 ? zcx_parent_broken(p, r) : r;
}

int zcx_parent_hello(struct zcx_parent *p, const char *version, const char *python, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_NEW, "hello", err);
    unsigned char body[2 * ZCX_STRING_MAX + 64];
    struct zcx_hello hello = {
        .protocol_min = ZCX_PROTOCOL_MIN, .protocol_max = ZCX_PROTOCOL_MAX, .pid = (uint32_t)getpid(),
        .features = ZCX_FEATURES, .version = zcx_text_of(version), .python = zcx_text_of(python)};
    long n = zcx_hello_encode(&hello, body, sizeof body, err);
    if (n < 0) return (int)n;
    int r = zcx_parent_tell(p, ZCX_HELLO, 0, body, (size_t)n, -1, err);
    if (!r) p->state = ZCX_HELLO_SENT;
    return r;
}

/* ---- a call ---- */

int zcx_parent_begin(struct zcx_parent *p, uint64_t max_result_bytes, uint64_t *seq, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_IDLE, "a call", err);
    p->seq++;
    p->ngates = 0;
    p->result_limit = max_result_bytes;
    p->result_bytes = 0;
    p->result_count = 0;
    p->leasing = 0;
    p->wanted_request = 0;
    p->deadline = INT64_MAX;
    p->state = ZCX_PREPARING;
    *seq = p->seq;
    return 0;
}

int zcx_parent_lease(struct zcx_parent *p, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_PREPARING, "a lease", err);
    p->leasing = 1;
    return 0;
}

int zcx_parent_send(struct zcx_parent *p, const void *tree, size_t tree_bytes, int64_t deadline, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_PREPARING, "sending", err);
    size_t first = 0;
    while (first < p->ntransfers && p->transfers[first].seq != p->seq) first++;
    size_t nbuffers = p->ntransfers - first; /* ids ascend, so this call's are the last */
    int r;
    for (size_t i = first; i < p->ntransfers; i++)
        if (p->transfers[i].segment) {
            r = zcx_parent_send_segment(p, p->transfers[i].segment, err);
            if (r) return r;
        }
    size_t fixed = 8 + p->ngates * ZCX_GATE_REF_BYTES + nbuffers * ZCX_BUFFER_BYTES;
    unsigned char *gates = malloc(2 * fixed), *head;
    if (!gates) return zcx_fail(err, ENOMEM, "no memory for the call's %zu buffers", nbuffers);
    head = gates + fixed;
    for (unsigned i = 0; i < p->ngates; i++) {
        r = zcx_call_gate_ready(p, &p->gates[i], err);
        if (r) goto free_head;
        struct zcx_gate_ref g = zcx_call_gate_ref(&p->gates[i]);
        zcx_gate_ref_encode(&g, gates + i * ZCX_GATE_REF_BYTES);
    }
    unsigned char *buffers = gates + p->ngates * ZCX_GATE_REF_BYTES;
    for (size_t i = 0; i < nbuffers; i++) zcx_buffer_encode(&p->transfers[first + i].wire, buffers + i * ZCX_BUFFER_BYTES);
    struct zcx_call_msg m = {.ngates = p->ngates, .nbuffers = (uint32_t)nbuffers, .gates = gates, .buffers = buffers};
    long n = zcx_call_msg_encode(&m, head, fixed, err);
    if (n < 0) {
        r = (int)n;
        goto free_head;
    }
    struct zcx_header h = {.type = ZCX_CALL, .seq = p->seq};
    struct zcx_piece pieces[2] = {{head, (size_t)n}, {tree, tree_bytes}};
    r = zcx_sock_send(&p->sock, h, pieces, 2, NULL, 0, deadline, err);
    if (r == 0) p->state = ZCX_CALLING;
    else if (r == -ZCX_E_DIED) zcx_parent_broken(p, r);
free_head:
    free(gates);
    return r;
}

/* ---- receiving ---- */

static int out_of_turn(struct zcx_parent *p, const struct zcx_header *h, struct zcx_err *err) {
    return zcx_fail(err, ZCX_E_PROTOCOL, "the worker sent message type %u of call %llu in state %d of call %llu", h->type,
                    (unsigned long long)h->seq, (int)p->state, (unsigned long long)p->seq);
}

static int refuse(struct zcx_parent *p, uint64_t request, enum zcx_refusal code, const char *reason, struct zcx_err *err) {
    unsigned char body[ZCX_STRING_MAX + 64];
    struct zcx_refused m = {.code = code, .reason = zcx_text_of(reason)};
    long n = zcx_refused_encode(&m, body, sizeof body, err);
    if (n < 0) return (int)n;
    return zcx_parent_tell(p, ZCX_REFUSED, request, body, (size_t)n, -1, err);
}

static int send_allocated(struct zcx_parent *p, uint64_t request, const struct zcx_allocated *m, struct zcx_err *err) {
    unsigned char body[8 + ZCX_GATE_REF_BYTES + ZCX_BUFFER_BYTES];
    long n = zcx_allocated_encode(m, body, sizeof body, err);
    if (n < 0) return (int)n;
    return zcx_parent_tell(p, ZCX_ALLOCATED, request, body, (size_t)n, -1, err);
}

/* Answer a host ALLOC without troubling Python: a range of the result file. */
static int alloc_host(struct zcx_parent *p, uint64_t request, uint64_t nbytes, struct zcx_err *err) {
    struct zcx_err why;
    struct zcx_range *range;
    int r = zcx_transfer_reserve(p, err);
    if (r) return r;
    r = zcx_range_new(&range, p->results, nbytes, &why);
    if (r && zcx_parent_give_up_idle(p)) r = zcx_range_new(&range, p->results, nbytes, &why);
    if (r) return refuse(p, request, ZCX_REFUSED_MEMORY, why.text[0] ? why.text : strerror(-r < 1000 ? -r : ENOMEM), err);
    struct transfer t = {.range = range, .wire = {.rung = ZCX_RUNG_HOST, .flags = ZCX_BUFFER_RESULT, .nbytes = nbytes,
                                                  .offset = zcx_range_offset(range), .key = 0 /* the result file is segment 0 */}};
    struct zcx_allocated m = {.buffer = zcx_transfer_add(p, t)->wire};
    p->result_bytes += nbytes;
    return send_allocated(p, request, &m, err);
}

/* Mark what the worker still maps. */
static int keep(struct zcx_parent *p, const struct zcx_result_msg *m, struct zcx_err *err) {
    for (uint32_t i = 0; i < m->nkept; i++) {
        struct transfer *t = zcx_transfer_find(p, zcx_wire_u64(m->kept, i));
        if (!t || t->seq != p->seq) return zcx_fail(err, ZCX_E_PROTOCOL, "the worker keeps a buffer that this call did not lend");
        t->keeps = 1;
    }
    return 0;
}

static int release_ids(struct zcx_parent *p, const struct zcx_release *m, struct zcx_err *err) {
    int r = 0;
    pthread_mutex_lock(&p->lock);
    for (uint32_t i = 0; i < m->count && !r; i++) {
        uint64_t id = zcx_wire_u64(m->ids, i);
        struct transfer *t = zcx_transfer_find(p, id);
        if (t && t->state == KEPT) zcx_transfer_release(p, t);
        else if (t && t->keeps) t->keeps = 0; /* DONE was not seen yet: it goes at the call's end */
        else if (t ? t->state != RELEASED : !id || id >= p->next_id) r = -ZCX_E_PROTOCOL; /* releasing is idempotent */
    }
    zcx_transfers_compact(p);
    pthread_mutex_unlock(&p->lock);
    zcx_parent_trim_slabs(p, 0);
    return r ? zcx_fail(err, ZCX_E_PROTOCOL, "the worker released a buffer that it does not keep") : 0;
}

/* The outcome's body moves out of the socket's packet. */
static int hold_outcome(struct zcx_parent *p, struct zcx_event e, const struct zcx_text *text, struct zcx_err *err) {
    size_t n = e.tree_bytes + (text ? text->length : 0);
    free(p->outcome_bytes);
    p->outcome_bytes = malloc(n ? n : 1);
    if (!p->outcome_bytes) return zcx_fail(err, ENOMEM, "no memory for a result of %zu bytes", n);
    if (e.tree_bytes) memcpy(p->outcome_bytes, e.tree, e.tree_bytes);
    e.tree = p->outcome_bytes;
    if (text) {
        memcpy(p->outcome_bytes, text->bytes, text->length);
        e.text = (struct zcx_text){(const char *)p->outcome_bytes, text->length};
    }
    p->outcome = e;
    p->state = ZCX_RETURNING;
    p->done_since = zcx_now();
    return 1;
}

static int greet(struct zcx_parent *p, const struct zcx_hello *hello, struct zcx_err *err) {
    if (hello->protocol_max < ZCX_PROTOCOL_MIN || hello->protocol_max > ZCX_PROTOCOL_MAX)
        return zcx_fail(err, ZCX_E_PROTOCOL, "the worker's comfy-zerocopy %.*s speaks protocol %u, this one speaks %d to %d: install the same version in both environments",
                        (int)hello->version.length, hello->version.bytes, hello->protocol_max, ZCX_PROTOCOL_MIN, ZCX_PROTOCOL_MAX);
    unsigned char body[32];
    struct zcx_gate_page page = {ZCX_GATE_SLOTS, ZCX_GATE_STRIDE};
    struct zcx_segment results = {zcx_shm_size(p->results), ZCX_SHM_RESULT};
    long n = zcx_gate_page_encode(&page, body, sizeof body, err);
    int r = n < 0 ? (int)n : zcx_parent_tell(p, ZCX_GATE, 0, body, (size_t)n, zcx_gate_fd(p->gate), err);
    if (r) return r;
    n = zcx_segment_encode(&results, body, sizeof body, err);
    return n < 0 ? (int)n : zcx_parent_tell(p, ZCX_SEGMENT, 0, body, (size_t)n, zcx_shm_fd(p->results), err);
}

/* One message. 0: *ev is for the caller; 1: done with, go on. */
static int handle(struct zcx_parent *p, struct zcx_event *ev, struct zcx_err *err) {
    const struct zcx_msg *m = &p->msg;
    const struct zcx_header *h = &m->header;
    size_t n = h->length;
    int calling = p->state == ZCX_CALLING && h->seq == p->seq;
    int r;
    if (m->nfds) return zcx_fail(err, ZCX_E_PROTOCOL, "the worker sent descriptors; none of its messages carries any");
    switch (h->type) {
    case ZCX_HELLO:
        if (p->state != ZCX_HELLO_SENT) return out_of_turn(p, h, err);
        r = zcx_hello_decode(m->body, n, &ev->hello, err);
        if (!r) r = greet(p, &ev->hello, err);
        if (r && r != -ZCX_E_DIED) return r; /* dead already: why its target could not be imported may still be in the queue */
        p->features = ev->hello.features & ZCX_FEATURES;
        p->state = ZCX_STARTING;
        return 1;
    case ZCX_STARTED:
        if (p->state != ZCX_STARTING) return out_of_turn(p, h, err);
        p->state = ZCX_IDLE;
        ev->kind = ZCX_EV_STARTED;
        return 0;
    case ZCX_POOL_REPLY: {
        struct zcx_pool_reply reply;
        r = zcx_pool_reply_decode(m->body, n, &reply, err);
        if (r) return r;
        if (reply.index >= p->ndevices || p->devices[reply.index].accepted != -1) return out_of_turn(p, h, err);
        struct device *d = &p->devices[reply.index];
        d->accepted = reply.refused <= ZCX_POOL_REFUSED;
        d->pooled = d->pool && !reply.refused;
        ev->kind = ZCX_EV_DEVICE;
        ev->device = reply.index;
        ev->refused = reply.refused;
        ev->text = reply.reason;
        return 0;
    }
    case ZCX_PROVED: {
        struct zcx_proved proved;
        r = zcx_proved_decode(m->body, n, &proved, err);
        if (r) return r;
        if (!p->proof.step || p->proof.answered || proved.step != p->proof.step || proved.pool != p->proof.gate.device) return out_of_turn(p, h, err);
        p->proof.answered = 1;
        p->proof.failed = proved.failed != 0;
        snprintf(p->proof.reason, sizeof p->proof.reason, "%.*s", (int)(proved.reason.length < 200 ? proved.reason.length : 200), proved.reason.bytes);
        p->done_since = zcx_now();
        return 1;
    }
    case ZCX_ALLOC: {
        uint64_t nbytes;
        char why[240];
        if (!calling) return out_of_turn(p, h, err);
        r = zcx_alloc_decode(m->body, n, &ev->alloc, err);
        if (!r) r = zcx_alloc_bytes(&ev->alloc, &nbytes, err);
        if (r) return r;
        if (nbytes > p->result_limit - p->result_bytes) {
            snprintf(why, sizeof why, "a result of %llu bytes would bring this call to %llu, and max_result_bytes is %llu: raise that, an argument of "
                     "Worker or a setting in comfy_zerocopy.json, or return less",
                     (unsigned long long)nbytes, (unsigned long long)nbytes + (unsigned long long)p->result_bytes, (unsigned long long)p->result_limit);
            r = refuse(p, h->id, ZCX_REFUSED_TOO_LARGE, why, err);
            return r ? r : 1;
        }
        if (p->result_count == RESULTS_MAX) {
            snprintf(why, sizeof why, "a call makes at most %u results: return fewer and larger ones", RESULTS_MAX);
            r = refuse(p, h->id, ZCX_REFUSED_TOO_LARGE, why, err);
            return r ? r : 1;
        }
        p->result_count++;
        if (!ev->alloc.place) {
            r = alloc_host(p, h->id, nbytes, err);
            return r ? r : 1;
        }
        p->wanted_request = ev->request = h->id;
        ev->kind = ZCX_EV_ALLOC;
        return 0;
    }
    case ZCX_PROGRESS:
        if (!calling && !(h->seq <= p->seq)) return out_of_turn(p, h, err);
        r = zcx_progress_decode(m->body, n, &ev->progress, err);
        if (r) return r;
        if (!calling) return 1; /* a late one, of a thread that outlived its call */
        ev->kind = ZCX_EV_PROGRESS;
        return 0;
    case ZCX_RESULT:
    case ZCX_ERROR: {
        struct zcx_result_msg result;
        r = zcx_result_msg_decode(m->body, n, &result, err);
        if (r) return r;
        if ((h->type == ZCX_RESULT) != (result.code == 0)) return zcx_fail(err, ZCX_E_PROTOCOL, "type %u came with code %u", h->type, result.code);
        ev->kind = h->type == ZCX_RESULT ? ZCX_EV_RESULT : ZCX_EV_ERROR;
        ev->code = result.code;
        ev->tree = result.tree;
        ev->tree_bytes = result.tree_bytes;
        if (h->type == ZCX_ERROR && p->state == ZCX_STARTING && !h->seq) {
            ev->kind = ZCX_EV_FAILED_START;
            return 0;
        }
        if (h->type == ZCX_ERROR && result.code == ZCX_FAILED_GPU && h->seq <= p->seq && p->state >= ZCX_IDLE) /* also of a kept buffer's un-import */
            return zcx_fail(err, ZCX_E_DIED, "its work on the GPU failed: %.*s", (int)(result.tree_bytes < 160 ? result.tree_bytes : 160), (const char *)result.tree);
        if (!calling) return out_of_turn(p, h, err);
        r = keep(p, &result, err);
        return r ? r : hold_outcome(p, *ev, NULL, err);
    }
    case ZCX_IMPORT_REFUSED: {
        struct zcx_refused refused;
        if (!calling) return out_of_turn(p, h, err);
        r = zcx_refused_decode(m->body, n, &refused, err);
        if (r) return r;
        struct transfer *t = zcx_transfer_find(p, h->id);
        if (!t || t->seq != p->seq) return zcx_fail(err, ZCX_E_PROTOCOL, "the worker refused a buffer that this call did not lend");
        ev->kind = ZCX_EV_IMPORT_REFUSED;
        ev->transfer = h->id;
        return hold_outcome(p, *ev, &refused.reason, err);
    }
    case ZCX_RELEASE: {
        struct zcx_release release;
        r = zcx_release_decode(m->body, n, &release, err);
        if (!r) r = release_ids(p, &release, err);
        if (r) return r;
        ev->kind = ZCX_EV_RELEASED;
        return 0;
    }
    case ZCX_HANDLE_DROP:
        ev->kind = ZCX_EV_HANDLE_DROP;
        ev->handle = h->id;
        return 0;
    case ZCX_SLAB_TAKEN:
        if (!p->unanswered) return out_of_turn(p, h, err);
        p->unanswered--;
        return 1;
    case ZCX_PONG:
        return 1;
    default:
        return out_of_turn(p, h, err);
    }
}

/* Receive one message and handle it. 0: *ev; 1: handled; 3: there was none. */
static int next_message(struct zcx_parent *p, struct zcx_event *ev, struct zcx_err *err) {
    if (p->has_msg) zcx_msg_free(&p->msg);
    p->has_msg = 0;
    int r = zcx_sock_recv(&p->sock, &p->msg, err);
    if (r) return r < 0 ? zcx_parent_broken(p, r) : 3;
    p->has_msg = 1;
    memset(ev, 0, sizeof *ev);
    r = handle(p, ev, err);
    return r < 0 ? zcx_parent_broken(p, r) : r;
}

static int hold_drop(struct zcx_parent *p, uint64_t handle, struct zcx_err *err) {
    if (p->ndropped == p->cdropped) {
        size_t want = p->cdropped ? 2 * p->cdropped : 16;
        uint64_t *list = realloc(p->dropped, want * sizeof *list);
        if (!list) return zcx_fail(err, ENOMEM, "no memory for a handle's number");
        p->dropped = list;
        p->cdropped = want;
    }
    p->dropped[p->ndropped++] = handle;
    return 0;
}

int zcx_parent_await_slabs(struct zcx_parent *p, uint32_t most, struct zcx_err *err) {
    int64_t until = zcx_now() + ANSWER_NS;
    for (unsigned handled = 0; p->unanswered > most;) {
        struct zcx_event ev;
        int r = next_message(p, &ev, err);
        if (r < 0) return r;
        if (r == 0 && ev.kind == ZCX_EV_HANDLE_DROP) r = hold_drop(p, ev.handle, err);
        else if (r == 0 && ev.kind != ZCX_EV_RELEASED && ev.kind != ZCX_EV_PROGRESS) /* what it released is drained at the call's end */
            return zcx_parent_broken(p, zcx_fail(err, ZCX_E_PROTOCOL, "the worker spoke of something else while it was told of memory"));
        if (r < 0) return r;
        if (r != 3 && (++handled > MEANWHILE_MAX || zcx_now() > until))
            return zcx_parent_broken(p, zcx_fail(err, ZCX_E_PROTOCOL, "the worker talks on, and does not take the memory that it is told of"));
        if (r != 3) continue;
        do r = zcx_sock_wait(&p->sock, until, PACKET_SPIN_NS, err);
        while (r == 2); /* the wait is bounded */
        if (r == 1) r = zcx_fail(err, ZCX_E_PROTOCOL, "the worker does not take the memory that it is told of");
        if (r < 0) return zcx_parent_broken(p, r);
    }
    return 0;
}

/* 1: DONE was seen on every device of the call. */
static int done_seen(struct zcx_parent *p, struct zcx_err *err) {
    for (unsigned i = 0; i < p->ngates; i++) {
        int r = zcx_gate_reached(p->gate, p->gates[i].ordinal, p->gates[i].done_slot, p->gates[i].done, err);
        if (r != 1) return r;
    }
    return 1;
}

int zcx_parent_step(struct zcx_parent *p, int64_t deadline, struct zcx_event *ev, struct zcx_err *err) {
    REQUIRE(p, p->state > ZCX_NEW && p->state < ZCX_BROKEN, "receiving", err);
    p->deadline = deadline;
    if (p->ndropped) {
        *ev = (struct zcx_event){.kind = ZCX_EV_HANDLE_DROP, .handle = p->dropped[--p->ndropped]};
        return 0;
    }
    for (unsigned handled = 0;;) {
        int64_t now = 0;
        int rings = p->nrings && p->state >= ZCX_CALLING ? zcx_rings_step(p, err) : 0;
        if (rings < 0) return rings;
        int polling = p->state == ZCX_RETURNING || p->proof.answered || rings; /* for a counter, which no descriptor announces */
        int64_t since = rings && p->state == ZCX_CALLING ? p->ring_since : p->done_since;
        if (polling) now = zcx_now();
        if (p->proof.answered) {
            struct zcx_event e = {0};
            int r = zcx_proof_seen(p, &e, err);
            if (r < 0) return zcx_parent_broken(p, r);
            if (r == 0) {
                *ev = e;
                return 0;
            }
            now = zcx_now();
        }
        if (p->state == ZCX_RETURNING) {
            int r = done_seen(p, err);
            if (r > 0 && p->nrings) { /* a piece that was filled just before DONE is looked for after it */
                r = zcx_rings_step(p, err);
                if (r >= 0) r = zcx_rings_end(p, err);
                if (r >= 0) r = !r;
            }
            if (r < 0) return zcx_parent_broken(p, r);
            if (r) {
                p->state = ZCX_RETURNED;
                *ev = p->outcome;
                return 0;
            }
            now = zcx_now();
            if (now - p->done_since < DONE_SPIN_NS) continue;
        }
        struct zcx_event e;
        int r = next_message(p, &e, err);
        if (r < 0) return r;
        if (r == 0) {
            *ev = e;
            return 0;
        }
        if (r == 1) {
            if (zcx_now() > deadline) return 1; /* a peer that never stops talking stops no clock, and no signal */
            if (++handled == MESSAGES_MAX) return 2;
            continue;
        }
        int64_t until = deadline;
        if (polling) {
            int64_t sleep = (now - since) / 8;
            if (sleep > DONE_SLEEP_MAX_NS) sleep = DONE_SLEEP_MAX_NS;
            until = now + sleep < deadline ? now + sleep : deadline;
        }
        r = zcx_sock_wait(&p->sock, until, polling ? 0 : PACKET_SPIN_NS, err);
        if (r < 0) return zcx_parent_broken(p, r);
        if (r == 2) return 2;
        if (r == 1 && until == deadline) return 1;
    }
}

/* One that nobody was told of, and of which nothing was queued. */
static void withdraw_ring(struct zcx_parent *p, struct ring *r) {
    r->ended = zcx_ring_end_transfer(&r->core, NULL) == 0;
    zcx_ring_dispose(r);
    p->nrings--;
}

/* rung: how the memory is reached; ZCX_RUNG_STAGED: by copies through a window. */
static int allocated(struct zcx_parent *p, uint64_t request, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes,
                     zcu_stream stream, void *owner, struct zcx_err *err) {
    struct transfer t = {.owner = owner};
    struct call_gate *g;
    unsigned known = p->ngates;
    int r = rung == ZCX_RUNG_STAGED ? zcx_transfer_of_ring(p, device, ptr, nbytes, stream, &t, &g, err)
                                    : zcx_transfer_of_device(p, device, rung, ptr, nbytes, ZCX_BUFFER_RESULT, stream, &t, &g, err);
    if (!r && g->stream != stream) /* posts of one slot on two streams could land in either order */
        r = zcx_fail(err, ZCX_E_RANGE, "a call uses one stream per device");
    if (!r) r = zcx_call_gate_ready(p, g, err);
    if (r) {
        if (t.slab) t.slab->uses--;
        if (t.ring) withdraw_ring(p, t.ring);
        if (p->ngates > known) zcx_call_gate_withdraw(p, &p->gates[--p->ngates]); /* the call would wait for its DONE */
        return r;
    }
    struct zcx_allocated m = {.has_gate = 1, .gate = zcx_call_gate_ref(g), .buffer = zcx_transfer_add(p, t)->wire};
    p->result_bytes += nbytes;
    p->wanted_request = 0;
    r = send_allocated(p, request, &m, err);
    if (r) zcx_transfer_find(p, m.buffer.id)->owner = NULL; /* nobody was told of it: it stays the caller's */
    return r;
}

int zcx_parent_allocated(struct zcx_parent *p, uint64_t request, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes,
                         zcu_stream stream, void *owner, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_CALLING && request == p->wanted_request, "answering", err);
    if (rung != ZCX_RUNG_POOL && rung != ZCX_RUNG_VMM) return zcx_fail(err, ZCX_E_RANGE, "rung %d has no device results", (int)rung);
    return allocated(p, request, device, rung, ptr, nbytes, stream, owner, err);
}

int zcx_parent_allocated_ring(struct zcx_parent *p, uint64_t request, unsigned device, zcu_ptr ptr, uint64_t nbytes, zcu_stream stream, void *owner,
                              struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_CALLING && request == p->wanted_request, "answering", err);
    if (!(p->features & ZCX_FEATURE_RING)) return zcx_fail(err, ZCX_E_UNFIT, "the worker's comfy-zerocopy is too old for copies through a window");
    return allocated(p, request, device, ZCX_RUNG_STAGED, ptr, nbytes, stream, owner, err);
}

int zcx_parent_refuse(struct zcx_parent *p, uint64_t request, enum zcx_refusal code, const char *reason, struct zcx_err *err) {
    REQUIRE(p, p->state == ZCX_CALLING && request == p->wanted_request, "answering", err);
    p->wanted_request = 0;
    return refuse(p, request, code, reason, err);
}

/* ---- after the result ---- */

int zcx_parent_lent(struct zcx_parent *p, uint64_t id, struct zcx_lent *out) {
    struct transfer *t = zcx_transfer_find(p, id);
    if (!t || t->seq != p->seq) return 1;
    *out = (struct zcx_lent){.nbytes = t->wire.nbytes, .result = t->wire.flags & ZCX_BUFFER_RESULT, .device = t->wire.rung != ZCX_RUNG_HOST,
                             .owner = t->owner, .address = t->range ? zcx_range_address(t->range) : NULL,
                             .rung = (enum zcx_rung)t->wire.rung, .ptr = t->ptr, .window = t->wire.window, .complete = !t->ring || t->ring->complete};
    return 0;
}

int zcx_parent_take(struct zcx_parent *p, uint64_t id, struct zcx_range **out) {
    struct transfer *t = zcx_transfer_find(p, id);
    if (!t || t->seq != p->seq || !t->range) return 1;
    *out = zcx_range_ref(t->range);
    return 0;
}

void zcx_parent_end(struct zcx_parent *p) {
    if (p->creator != getpid()) return;
    if (p->state < ZCX_PREPARING) return;
    int nothing_sent = p->state == ZCX_PREPARING, returned = p->state == ZCX_RETURNED;
    if (!nothing_sent && !returned) p->state = ZCX_BROKEN; /* a call that is given up half way: what it lent may still be written */
    for (unsigned i = 0; i < p->ngates; i++) {
        if (nothing_sent) zcx_call_gate_withdraw(p, &p->gates[i]);
        else zcx_call_gate_drop(p, &p->gates[i]);
    }
    p->ngates = 0;
    if (nothing_sent && p->nrings) zcx_rings_end(p, NULL); /* nothing was queued: they end at once */
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->ntransfers; i++) {
        struct transfer *t = &p->transfers[i];
        if (p->state == ZCX_BROKEN) t->state = QUARANTINED;
        else if (t->seq == p->seq && t->keeps) t->state = KEPT;
        else if (t->seq == p->seq) zcx_transfer_release(p, t);
    }
    zcx_transfers_compact(p);
    pthread_mutex_unlock(&p->lock);
    free(p->outcome_bytes);
    p->outcome_bytes = NULL;
    if (p->state != ZCX_BROKEN) p->state = ZCX_IDLE;
    zcx_parent_trim_slabs(p, 0);
    zcx_parent_trim_segments(p, zcx_parent_warm_bound());
}

int zcx_parent_cancel(struct zcx_parent *p, uint64_t seq, struct zcx_err *err) {
    unsigned char packet[ZCX_HEADER_BYTES];
    struct zcx_header h = {.type = ZCX_CANCEL, .seq = seq};
    if (p->creator != getpid()) return zcx_parent_wrong_state(p, "cancelling", err);
    zcx_header_encode(&h, packet);
    ssize_t n;
    while ((n = send(p->control, packet, sizeof packet, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 && errno == EINTR) {}
    return n < 0 ? zcx_fail(err, ZCX_E_DIED, "the worker does not listen any more") : 0;
}

int zcx_parent_drop_handle(struct zcx_parent *p, uint64_t handle, struct zcx_err *err) {
    struct zcx_header h = {.type = ZCX_HANDLE_DROP, .id = handle};
    if (p->creator != getpid() || p->state == ZCX_BROKEN) return 0;
    return zcx_sock_send(&p->sock, h, NULL, 0, NULL, 0, 0, err);
}

int zcx_parent_bye(struct zcx_parent *p, struct zcx_err *err) {
    REQUIRE(p, p->state > ZCX_NEW && p->state < ZCX_BROKEN, "saying goodbye", err);
    struct zcx_header h = {.type = ZCX_BYE};
    int r = zcx_sock_send(&p->sock, h, NULL, 0, NULL, 0, 0, err);
    p->state = ZCX_BROKEN; /* nothing more is said; what it keeps waits for its end */
    return r;
}

void zcx_parent_shutdown(struct zcx_parent *p) {
    if (p->creator == getpid()) zcx_sock_shutdown(&p->sock);
}

/* The worker is gone: all is released, but for what copies of our own still read or write. */
static void release_gone(struct zcx_parent *p) {
    if (p->nrings) zcx_rings_end(p, NULL);
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->ntransfers; i++)
        if (!p->transfers[i].ring || p->transfers[i].ring->ended) zcx_transfer_release(p, &p->transfers[i]);
    zcx_transfers_compact(p);
    pthread_mutex_unlock(&p->lock);
    zcx_parent_trim_slabs(p, 1);
}

void zcx_parent_gone(struct zcx_parent *p) {
    if (p->creator != getpid()) return;
    p->state = ZCX_BROKEN;
    for (unsigned i = 0; i < p->ngates; i++) zcx_call_gate_drop(p, &p->gates[i]);
    p->ngates = 0;
    if (p->proof.step) zcx_proof_end(p);
    for (unsigned i = 0; i < p->ndevices; i++)
        for (unsigned k = 0; k < ZCX_PROVE_STEPS; k++) {
            struct device *d = &p->devices[i];
            if (d->doubted[k].window) d->doubted[k].window->busy = 0;
            if (d->doubted[k].block) zcx_block_put(d->doubted[k].block);
            else if (d->doubted[k].memory) zcx_pool_free(d->pool, d->doubted[k].memory, NULL, NULL);
            memset(&d->doubted[k], 0, sizeof d->doubted[k]);
        }
    if (p->has_msg) zcx_msg_free(&p->msg);
    p->has_msg = 0;
    /* The descriptors stay until zcx_parent_free: another thread may be about to send CANCEL, and a number that was closed
     * here could be somebody else's file by then. */
    zcx_sock_shutdown(&p->sock);
    shutdown(p->control, SHUT_RDWR);
    p->gone = 1;
    release_gone(p);
    pthread_mutex_lock(&p->lock);
    while (p->segments) {
        struct segment *s = p->segments;
        p->segments = s->next;
        zcx_shm_unref(s->file);
        free(s);
    }
    pthread_mutex_unlock(&p->lock);
    zcx_parent_trim_slabs(p, 1);
}

int zcx_parent_idle(struct zcx_parent *p) {
    if (p->creator != getpid()) return 1;
    if (p->gone && p->nrings) release_gone(p);
    return p->gone && !p->nrings && zcx_gate_idle(p->gate);
}

void zcx_parent_free(struct zcx_parent *p) {
    if (!p) return;
    if (p->creator == getpid()) {
        zcx_gate_free(p->gate);
        zcx_windows_free(p);
        for (unsigned i = 0; i < p->ndevices; i++) zcx_pool_unref(p->devices[i].pool);
        zcx_files_close(p->files, p->results);
        zcx_shm_unref(p->results);
        pthread_mutex_destroy(&p->lock);
    }
    zcx_sock_close(&p->sock);
    close(p->control);
    free(p->outcome_bytes);
    free(p->transfers);
    free(p->released);
    free(p->dropped);
    free(p);
}

void zcx_parent_stats(struct zcx_parent *p, struct zcx_parent_stats *out) {
    struct zcx_parent_stats s = {.calls = p->seq};
    *out = s;
    if (p->creator != getpid()) return; /* a thread that is not here may have held the lock */
    pthread_mutex_lock(&p->lock);
    s.transfers = p->ntransfers;
    for (size_t i = 0; i < p->ntransfers; i++) {
        const struct transfer *t = &p->transfers[i];
        s.quarantined += t->state == QUARANTINED;
        if (t->state != KEPT) continue;
        if (t->leased) {
            s.leased++;
            s.leased_bytes += t->wire.nbytes;
        } else {
            s.kept++;
            *(t->wire.rung == ZCX_RUNG_HOST ? &s.kept_host_bytes : &s.kept_device_bytes) += t->wire.nbytes;
        }
    }
    for (const struct segment *g = p->segments; g; g = g->next)
        if (g->kind == ZCX_SHM_INPUT) s.input_bytes += zcx_shm_size(g->file);
    zcx_shm_usage(p->results, &s.result_bytes_taken, &s.result_bytes_warm);
    pthread_mutex_unlock(&p->lock);
    *out = s;
}

size_t zcx_parent_kept(struct zcx_parent *p, struct zcx_kept *out, size_t room) {
    size_t n = 0;
    struct zcx_kept last = {0};
    if (p->creator != getpid()) return 0;
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->ntransfers; i++) {
        const struct transfer *t = &p->transfers[i];
        if (t->state != KEPT || t->leased) continue;
        int ordinal = t->wire.rung == ZCX_RUNG_HOST ? -1 : p->devices[t->wire.pool].ordinal;
        if (!n || last.seq != t->seq || last.ordinal != ordinal) {
            last = (struct zcx_kept){.seq = t->seq, .ordinal = ordinal};
            n++;
        }
        last.count++;
        last.nbytes += t->wire.nbytes;
        if (n <= room) out[n - 1] = last;
    }
    pthread_mutex_unlock(&p->lock);
    return n;
}

void zcx_parent_rest(struct zcx_parent *p) {
    if (p->creator != getpid() || p->state != ZCX_IDLE) return;
    zcx_windows_free(p);
    zcx_parent_give_up_idle(p);
    zcx_parent_trim_slabs(p, 1);
}

uint64_t zcx_parent_reclaim(struct zcx_parent *p) {
    if (p->creator != getpid()) return 0;
    zcx_files_sweep(p->files);
    return zcx_shm_reclaim(p->results);
}
