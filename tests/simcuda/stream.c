/* stream.c: queues, and the one thread that executes what is in them: late, in an order that SIMCUDA_SEED picks.
 *
 * An operation is ready when it is the first of its stream, its delay is over, the legacy stream's barriers let it pass and
 * what it waits for has happened. Of those that are ready any may be next. A test can hold a stream and step it. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "session.h"

#define AFTER_THE_CALL_NS 2000
#define POLL_FIRST_NS 20000
#define POLL_LAST_NS 500000
#define LOOK_NS 10000000 /* for work of the dead */

/* ---- markers ---- */

struct marker *sim_marker_new(int pending) {
    struct marker *m = calloc(1, sizeof *m);
    if (m) {
        m->refs = 1;
        m->pending = pending;
    }
    return m;
}

struct marker *sim_marker_ref(struct marker *m) {
    if (m) m->refs++;
    return m;
}

void sim_marker_unref(struct marker *m) {
    if (m && !--m->refs) free(m);
}

/* ---- streams ---- */

struct stream *sim_stream_new(struct ctx *c, bool nonblocking) {
    struct stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->ctx = c;
    s->id = sim.next_id++;
    s->nonblocking = nonblocking;
    s->held = sim.hold_new;
    s->slot = hb_slot_take();
    s->next = sim.streams;
    sim.streams = s;
    return s;
}

static void stream_free(struct stream *s) {
    struct stream **at = &sim.streams;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    hb_slot_put(s->slot);
    free(s);
}

zcu_result sim_stream(zcu_stream handle, struct stream **out) {
    struct ctx *c = sim_current();
    if (!c) return ZCU_ERROR_INVALID_CONTEXT;
    if (!handle || handle == (zcu_stream)1) return *out = c->legacy, ZCU_SUCCESS; /* NULL, and CU_STREAM_LEGACY */
    for (struct stream *s = sim.streams; s; s = s->next)
        if ((void *)s == (void *)handle && !s->destroyed && !s->legacy) return *out = s, ZCU_SUCCESS;
    return ZCU_ERROR_INVALID_HANDLE;
}

struct op *sim_op(enum op_kind kind) {
    struct op *op = calloc(1, sizeof *op);
    if (op) {
        op->kind = kind;
        op->slot = -1;
    }
    return op;
}

static void op_free(struct op *op) {
    sim_marker_unref(op->marker);
    free(op->staging);
    free(op);
}

static void *execute_all(void *unused);

void sim_submit(struct stream *s, struct op *op) {
    op->sequence = ++sim.sequence;
    op->number = ++s->submitted;
    op->not_before = sim_now() + AFTER_THE_CALL_NS + (sim.delay_us ? (int64_t)(sim_random() % (sim.delay_us * 1000)) : 0);
    hb_submit(op);
    work_queued(s, op);
    if (s->tail) s->tail->next = op;
    else s->head = op;
    s->tail = op;
    if (!sim.thread) {
        pthread_t t;
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are for the program's threads */
        if (!pthread_create(&t, NULL, execute_all, NULL)) {
            pthread_detach(t);
            sim.thread = true;
        }
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    }
    pthread_cond_signal(&sim.work);
}

/* ---- execution ---- */

void sim_set_fault(int code, const char *why, zcu_ptr at) {
    if (!sim.fault) fprintf(stderr, "simcuda: fault %d: %s at 0x%llx\n", code, why, at);
    __atomic_store_n(&sim.fault, code, __ATOMIC_RELEASE);
    /* What is queued will never run: not after this process's death either. */
    sim_session_lock();
    for (const struct stream *s = sim.streams; s; s = s->next)
        if (s->slot >= 0) session->held[s->slot] = 0;
    sim_session_unlock();
    pthread_cond_broadcast(&sim.progress);
}

bool sim_waited_for(uint64_t now, uint64_t value, unsigned how) {
    switch (how & 3) {
    case 0: return (int64_t)(now - value) >= 0;
    case 1: return now == value;
    case 2: return (now & value) != 0;
    default: return ~(now | value) != 0;
    }
}

enum { READY, LATER, POLL, BLOCKED };

/* Barriers of the legacy stream: it waits for what the blocking streams held before, and they for it. */
static bool barred(const struct stream *s, const struct op *op) {
    if (op->unordered || s->nonblocking) return false;
    if (!s->legacy) return s->ctx->legacy->head && s->ctx->legacy->head->sequence < op->sequence;
    for (const struct stream *t = sim.streams; t; t = t->next)
        if (t != s && t->ctx == s->ctx && !t->nonblocking && t->head && t->head->sequence < op->sequence) return true;
    return false;
}

static int ready(struct stream *s, int64_t now) {
    struct op *op = s->head;
    if (s->held && !s->steps) return BLOCKED;
    if (barred(s, op)) return BLOCKED;
    if (now < op->not_before) return LATER;
    switch (op->kind) {
    case OP_WAIT: return op->marker->pending ? BLOCKED : READY;
    case OP_WAIT_SLOT: return __atomic_load_n(&sim_slot(op->slot)->completed, __ATOMIC_ACQUIRE) >= op->ticket ? READY : POLL;
    case OP_RECORD_SLOT: return sim_slot_stuck(op) ? POLL : READY;
    case OP_WAIT_VALUE:
        if (sim_breaks("wait")) return BLOCKED;
        if (!sim_registered((void *)op->src, 8)) return READY; /* and faults */
        return sim_waited_for(__atomic_load_n((uint64_t *)op->src, __ATOMIC_ACQUIRE), op->value, op->byte) ? READY : POLL;
    case OP_SPIN:
        if (!op->until) op->until = now + (int64_t)op->value * 1000;
        return now >= op->until ? READY : POLL;
    default: return READY;
    }
}

static void illegal(const char *what, zcu_ptr at) { sim_set_fault(ZCU_ERROR_ILLEGAL_ADDRESS, what, at); }

static void execute_copy(struct stream *s, struct op *op) {
    int device = s->ctx->device;
    if (!op->src_host && !sim_mapped(op->src, op->n, device, false))
        return illegal("copy from memory that is not mapped, or may not be read", op->src);
    if (!op->dst_host && !sim_mapped(op->dst, op->n, device, true))
        return illegal("copy to memory that is not mapped, or may not be written", op->dst);
    if (!op->src_host) hb_access(s, op->src, op->n, false);
    if (!op->dst_host) hb_access(s, op->dst, op->n, true);
    memmove((void *)op->dst, (void *)op->src, op->n);
}

/* Is all of it set again by one of the next few operations? Then only a race could see this one. */
static bool set_again(const struct op *op) {
    int n = 0;
    for (const struct op *next = op->next; next && next->kind == OP_SET && n < 4; next = next->next, n++)
        if (next->dst <= op->dst && next->dst + next->n >= op->dst + op->n) return true;
    return false;
}

static void execute_set(struct stream *s, struct op *op) {
    if (!sim_mapped(op->dst, op->n, s->ctx->device, true))
        return illegal("memset of memory that is not mapped, or may not be written", op->dst);
    hb_access(s, op->dst, op->n, true);
    if (!s->held && set_again(op)) return; /* of a held stream each step shows */
    memset((void *)op->dst, op->byte, op->n);
}

static void execute(struct stream *s) {
    struct op *op = s->head;
    hb_begin(s, op);
    switch (op->kind) {
    case OP_COPY: execute_copy(s, op); break;
    case OP_SET: execute_set(s, op); break;
    case OP_ALLOC: hb_created(s, op); break;
    case OP_FREE:
        hb_freed(s, op);
        sim_pool_freed(op);
        break;
    case OP_UNIMPORT:
        hb_unimported(s, op);
        sim_pool_unimported(op);
        break;
    case OP_LINEAR_FREE: sim_linear_free(op->arg); break;
    case OP_MARK:
        hb_join(&op->marker->clock, &s->clock);
        op->marker->pending--;
        break;
    case OP_RECORD_SLOT: {
        struct event_slot *slot = sim_slot(op->slot);
        sim_session_lock();
        hb_join(&slot->clock, &s->clock);
        if (slot->completed < op->ticket) __atomic_store_n(&slot->completed, op->ticket, __ATOMIC_RELEASE);
        sim_session_unlock();
        break;
    }
    case OP_WAIT: hb_join(&s->clock, &op->marker->clock); break;
    case OP_WAIT_SLOT:
        sim_session_lock();
        hb_join(&s->clock, &sim_slot(op->slot)->clock);
        sim_session_unlock();
        break;
    case OP_WRITE_VALUE:
        if (!sim_registered((void *)op->dst, 8)) {
            illegal("write value to memory that is not registered any more", op->dst);
            break;
        }
        hb_posted(s, op->dst, op->value);
        __atomic_store_n((uint64_t *)op->dst, op->value, __ATOMIC_RELEASE);
        break;
    case OP_WAIT_VALUE:
        if (!sim_registered((void *)op->src, 8)) illegal("wait value on memory that is not registered any more", op->src);
        else hb_awaited(s, op->src, __atomic_load_n((uint64_t *)op->src, __ATOMIC_ACQUIRE));
        break;
    case OP_HOST:
        pthread_mutex_unlock(&sim.lock);
        op->fn(op->arg);
        pthread_mutex_lock(&sim.lock);
        break;
    case OP_SPIN: break;
    }
    if (sim.fault) return; /* nothing after it happens */
    if (s->steps) s->steps--;
    s->head = op->next;
    if (!s->head) s->tail = NULL;
    s->done = op->number;
    work_executed(s, op->number);
    op_free(op);
    sim.executed++;
    if (s->destroyed && !s->head) stream_free(s);
    pthread_cond_broadcast(&sim.progress);
}

static void sleep_until(int64_t when) {
    struct timespec t = {when / 1000000000, when % 1000000000};
    pthread_cond_timedwait(&sim.work, &sim.lock, &t);
}

static void *execute_all(void *unused) {
    (void)unused;
    int64_t poll = POLL_FIRST_NS, looked = 0;
    pthread_mutex_lock(&sim.lock);
    for (;;) {
        struct stream *chosen = NULL;
        int64_t now = sim_now(), next = INT64_MAX;
        uint64_t candidates = 0;
        bool polled = false;
        if (sim_session_shared()) { /* somebody has to do it: the dead have no thread */
            if (now - looked >= LOOK_NS) {
                work_of_the_dead();
                looked = now;
            }
            next = looked + LOOK_NS;
        }
        for (struct stream *s = sim.streams; s && !sim.fault; s = s->next) {
            if (!s->head) continue;
            int state = ready(s, now);
            if (state == READY && sim_random() % ++candidates == 0) chosen = s;
            if (state == LATER && s->head->not_before < next) next = s->head->not_before;
            polled = polled || state == POLL;
            if (state == POLL && now + poll < next) next = now + poll;
        }
        if (chosen) {
            execute(chosen);
            poll = POLL_FIRST_NS;
        } else if (next == INT64_MAX) {
            pthread_cond_wait(&sim.work, &sim.lock);
            poll = POLL_FIRST_NS;
        } else {
            sleep_until(next);
            if (!polled) poll = POLL_FIRST_NS;
            else if (poll < POLL_LAST_NS) poll *= 2;
        }
    }
    return NULL;
}

/* ---- waiting from the host ---- */

/* The streams that somebody waits for: one, or those of a context, or its blocking ones. */
static bool among(const struct stream *t, uint64_t id, const struct ctx *c, bool blocking) {
    return t->id == id || (t->ctx == c && !(blocking && t->nonblocking));
}

/* Do they still hold anything submitted up to `sequence`? */
static bool busy(uint64_t sequence, uint64_t id, const struct ctx *c, bool blocking) {
    for (struct stream *t = sim.streams; t; t = t->next)
        if (among(t, id, c, blocking) && t->head && t->head->sequence <= sequence) return true;
    return false;
}

static zcu_result wait_for(uint64_t id, const struct ctx *c, bool blocking) {
    uint64_t sequence = sim.sequence;
    while (!sim.fault && busy(sequence, id, c, blocking)) pthread_cond_wait(&sim.progress, &sim.lock);
    if (sim.fault) return sim.fault;
    for (struct stream *t = sim.streams; t; t = t->next)
        if (among(t, id, c, blocking)) hb_host_sees(&t->clock);
    return ZCU_SUCCESS;
}

/* The legacy stream stands for all blocking ones of its context: its next operation would wait for them. */
zcu_result sim_wait_stream(struct stream *s) { return wait_for(s->id, s->legacy ? s->ctx : NULL, true); }
zcu_result sim_wait_ctx(struct ctx *c) { return wait_for(0, c, false); }
bool sim_stream_idle(const struct stream *s) { return !busy(UINT64_MAX, s->id, s->legacy ? s->ctx : NULL, true); }

/* ---- the driver's calls ---- */

CALL(StreamCreate, 2000, zcu_stream *out, unsigned flags) {
    ENTER(StreamCreate);
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    if (flags & ~1u) return ZCU_ERROR_INVALID_VALUE;
    struct stream *s = sim_stream_new(sim_current(), flags & ZCU_STREAM_NON_BLOCKING);
    if (!s) return ZCU_ERROR_OUT_OF_MEMORY;
    *out = (zcu_stream)(void *)s;
    return ZCU_SUCCESS;
}

CALL_V(StreamDestroy, _v2, 4000, zcu_stream stream) {
    ENTER(StreamDestroy);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (s->legacy) return ZCU_ERROR_INVALID_HANDLE;
    s->destroyed = true; /* what it holds is still executed */
    s->held = false;
    if (!s->head) stream_free(s);
    else pthread_cond_signal(&sim.work);
    return ZCU_SUCCESS;
}

CALL(StreamQuery, 2000, zcu_stream stream) {
    ENTER_UNSAFE(StreamQuery);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (!sim_stream_idle(s)) return ZCU_ERROR_NOT_READY;
    return sim_wait_stream(s);
}

CALL(StreamSynchronize, 2000, zcu_stream stream) {
    ENTER_UNSAFE(StreamSynchronize);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (!r) r = sim_wait_stream(s);
    if (!r) sim_pools_release();
    return r;
}

static zcu_result value_op(enum op_kind kind, zcu_stream stream, zcu_ptr address, uint64_t value, unsigned flags) {
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (address % 8 || !sim_registered((void *)address, 8)) return ZCU_ERROR_INVALID_VALUE;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    struct op *op = sim_op(kind);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->dst = op->src = address;
    op->value = value;
    op->byte = (unsigned char)flags;
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

CALL_V(StreamWriteValue64, _v2, 11070, zcu_stream stream, zcu_ptr address, uint64_t value, unsigned flags) {
    ENTER(StreamWriteValue64);
    if (flags > 1) return ZCU_ERROR_INVALID_VALUE;
    if (sim_breaks("post")) { /* before the stream's work */
        __atomic_store_n((uint64_t *)address, value, __ATOMIC_RELEASE);
        return ZCU_SUCCESS;
    }
    return value_op(OP_WRITE_VALUE, stream, address, value, flags);
}

CALL_V(StreamWaitValue64, _v2, 11070, zcu_stream stream, zcu_ptr address, uint64_t value, unsigned flags) {
    ENTER(StreamWaitValue64);
    if (flags > 3) return ZCU_ERROR_INVALID_VALUE;
    return value_op(OP_WAIT_VALUE, stream, address, value, flags);
}

CALL(LaunchHostFunc, 10000, zcu_stream stream, void (*fn)(void *), void *arg) {
    ENTER(LaunchHostFunc);
    struct stream *s;
    zcu_result r = sim_stream(stream, &s);
    if (r) return r;
    if (!fn) return ZCU_ERROR_INVALID_VALUE;
    if ((r = sim_capture_op(s))) return r < 0 ? -r : ZCU_SUCCESS;
    struct op *op = sim_op(OP_HOST);
    if (!op) return ZCU_ERROR_OUT_OF_MEMORY;
    op->fn = fn;
    op->arg = arg;
    sim_submit(s, op);
    return ZCU_SUCCESS;
}

/* ---- for tests only ---- */

static struct stream *any_stream(zcu_stream handle) {
    struct stream *s = NULL;
    return sim_stream(handle, &s) ? NULL : s;
}

/* Hold a stream: it executes nothing until simcuda_step or simcuda_release. NULL: the current context's legacy stream. */
SIM_EXPORT int simcuda_hold(zcu_stream stream);
int simcuda_hold(zcu_stream stream) {
    pthread_mutex_lock(&sim.lock);
    struct stream *s = any_stream(stream);
    if (s) {
        s->held = true;
        s->steps = 0;
    }
    pthread_mutex_unlock(&sim.lock);
    return s ? 0 : -1;
}

SIM_EXPORT int simcuda_release(zcu_stream stream);
int simcuda_release(zcu_stream stream) {
    pthread_mutex_lock(&sim.lock);
    struct stream *s = any_stream(stream);
    if (s) s->held = false;
    pthread_cond_signal(&sim.work);
    pthread_mutex_unlock(&sim.lock);
    return s ? 0 : -1;
}

/* Let a held stream execute its next operation and wait until it has: 1; 0: it holds none; -1: not such a stream, or the
 * operation did not become ready within `timeout_ms`. */
SIM_EXPORT int simcuda_step(zcu_stream stream, int timeout_ms);
int simcuda_step(zcu_stream stream, int timeout_ms) {
    int result = -1;
    pthread_mutex_lock(&sim.lock);
    struct stream *s = any_stream(stream);
    if (s && !s->head) result = 0;
    else if (s) {
        uint64_t target = s->head->sequence, id = s->id;
        int64_t until = sim_now() + timeout_ms * 1000000ll;
        struct timespec t = {until / 1000000000, until % 1000000000};
        s->steps = 1;
        pthread_cond_signal(&sim.work);
        while (!sim.fault && busy(target, id, NULL, false))
            if (pthread_cond_timedwait(&sim.progress, &sim.lock, &t) == ETIMEDOUT) break;
        if (!busy(target, id, NULL, false)) result = 1;
        else if ((s = any_stream(stream))) s->steps = 0;
    }
    pthread_mutex_unlock(&sim.lock);
    return result;
}

SIM_EXPORT long simcuda_pending(zcu_stream stream);
long simcuda_pending(zcu_stream stream) {
    pthread_mutex_lock(&sim.lock);
    struct stream *s = any_stream(stream);
    long n = s ? (long)(s->submitted - s->done) : -1;
    pthread_mutex_unlock(&sim.lock);
    return n;
}

/* A long kernel: the stream is busy for `us` microseconds and touches nothing. */
SIM_EXPORT int simcuda_spin(zcu_stream stream, uint64_t us);
int simcuda_spin(zcu_stream stream, uint64_t us) {
    pthread_mutex_lock(&sim.lock);
    struct stream *s = any_stream(stream);
    struct op *op = s ? sim_op(OP_SPIN) : NULL;
    if (op) {
        op->value = us;
        sim_submit(s, op);
    }
    pthread_mutex_unlock(&sim.lock);
    return op ? 0 : -1;
}

/* What a kernel that writes out of bounds does: every later call of the process returns `code`. */
SIM_EXPORT void simcuda_fault(int code);
void simcuda_fault(int code) {
    pthread_mutex_lock(&sim.lock);
    sim_set_fault(code, "asked for by the test", 0);
    pthread_mutex_unlock(&sim.lock);
}
