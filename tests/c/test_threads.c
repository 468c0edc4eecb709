/* test_threads.c: both ends of a session, each driven by one thread while seven others do what xfer.h lets any thread do: for
 * ThreadSanitizer, which sees a race without its being lost. The table of imports under eight threads is in test_pool.c. */
// sources: csrc/[!m]*.c
// also: thread
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "check.h"
#include "xfer.h"

#define CALLS 200
#define RESULTS 2
#define RESULT_BYTES 5000
#define SECONDS 60

static struct zcx_parent *parent;
static struct zcx_worker *worker;
static struct zcx_files *files;
static int control;                           /* the worker's end of it */
static atomic_int stop;
static _Atomic(struct zcx_range *) handed;    /* a result that another thread lets go of */
static _Atomic(struct zcx_import *) dropped;  /* an import that another thread drops */
static unsigned char source[8192];
static int owners_lent, owners_back;

static int64_t soon(void) { return zcx_now() + SECONDS * 1000000000ll; }

/* ---- the worker's main thread ---- */

static struct zcx_import *asked(unsigned char fill, uint64_t *id) {
    unsigned char shape[8];
    struct zcx_alloc a = {.ndim = 1, .itemsize = 1, .dtype = zcx_text_of("uint8"), .shape = shape, .nbytes = RESULT_BYTES};
    struct zcx_import *import = NULL;
    struct zcx_import_info info;
    struct zcx_err err = {0};
    uint64_t request = 0;
    struct zcx_buffer staged;
    uint32_t code;
    zcx_wire_put_u64(shape, 0, a.nbytes);
    int r = zcx_worker_alloc(worker, &a, &request, NULL, NULL, &import, &staged, &code, &err);
    if (r == -ZCX_E_RANGE || r == -ZCX_E_DIED) return NULL; /* no call runs, or none ever will */
    CHECK(r == 0, "%d %s", r, err.text);
    zcx_import_info(import, &info);
    memset(info.address, fill, RESULT_BYTES);
    *id = info.id;
    return import;
}

static void drop_later(struct zcx_import *i) {
    struct zcx_import *before = atomic_exchange(&dropped, i);
    if (before) zcx_import_drop(before);
}

static void serve_call(const struct zcx_work *work) {
    struct zcx_import *inputs[8], *results[RESULTS];
    uint64_t ids[RESULTS];
    struct zcx_err err = {0};
    CHECK(work->nbuffers <= 8);
    uint32_t n = work->nbuffers;
    unsigned char buffers[8 * ZCX_BUFFER_BYTES];
    memcpy(buffers, work->buffers, n * ZCX_BUFFER_BYTES); /* from begin on, other threads receive */
    CHECK(zcx_worker_begin(worker, NULL, NULL, &err) == 0, "%s", err.text);
    for (uint32_t i = 0; i < n; i++) {
        struct zcx_buffer b;
        CHECK(zcx_buffer_decode(buffers + i * ZCX_BUFFER_BYTES, &b, &err) == 0, "%s", err.text);
        CHECK(zcx_worker_map(worker, &b, &inputs[i], &err) == 0, "%s", err.text);
    }
    for (int i = 0; i < RESULTS; i++) CHECK((results[i] = asked((unsigned char)work->seq, &ids[i])) != NULL);
    for (int i = 0; i < RESULTS; i++) drop_later(results[i]);
    for (uint32_t i = 0; i < n; i++) drop_later(inputs[i]); /* some of them are kept past the call by that */
    int r = zcx_worker_finish(worker, ZCX_RESULT, 0, 0, ids, sizeof ids, &err);
    CHECK(r == 0 || r == -ZCX_E_DIED, "%d %s", r, err.text);
}

static void *serve(void *arg) {
    (void)arg;
    for (;;) {
        struct zcx_work work;
        struct zcx_err err = {0};
        unsigned char cancel[64];
        int r = zcx_worker_next(worker, &work, &err);
        if (r == -ZCX_E_DIED) return NULL;
        CHECK(r == 0, "%d %s", r, err.text);
        while (recv(control, cancel, sizeof cancel, MSG_DONTWAIT) > 0) {}
        if (work.kind == ZCX_WORK_HELLO) {
            CHECK(zcx_worker_hello(worker, &work.hello, "1", "3", &err) == 0, "%s", err.text);
            CHECK(zcx_worker_started(worker, &err) == 0, "%s", err.text);
        } else if (work.kind == ZCX_WORK_CALL) {
            serve_call(&work);
        }
    }
}

/* ---- the parent's driving thread ---- */

static void drain(void) {
    for (void *o; (o = zcx_parent_released(parent));) {
        CHECK(o == &owners_lent);
        owners_back++;
    }
}

/* Until an event of this kind. */
static void step_to(enum zcx_event_kind kind, struct zcx_event *ev) {
    do {
        struct zcx_err err = {0};
        int r = zcx_parent_step(parent, soon(), ev, &err);
        CHECK(r == 0 || r == 2, "%d %s", r, err.text);
        if (r == 2) ev->kind = ZCX_EV_PROGRESS;
        if (ev->kind == ZCX_EV_RELEASED) drain();
    } while (ev->kind != kind);
}

static void call(struct zcx_range **lent) {
    struct zcx_source sources[3] = {{.address = source, .nbytes = 64}, {.address = source, .nbytes = sizeof source}, {.address = source, .nbytes = 0}};
    struct zcx_err err = {0};
    struct zcx_event ev;
    uint64_t seq, id;
    CHECK(zcx_parent_begin(parent, 64 << 20, &seq, &err) == 0, "%s", err.text);
    CHECK(zcx_parent_lend_copies(parent, sources, 3, &err) == 0, "%s", err.text);
    if (*lent) {
        CHECK(zcx_parent_lend_shared(parent, zcx_range_address(*lent), RESULT_BYTES, &owners_lent, &id, &err) == 0, "%s", err.text);
        owners_lent++;
    }
    CHECK(zcx_parent_send(parent, "", 0, soon(), &err) == 0, "%s", err.text);
    step_to(ZCX_EV_RESULT, &ev);
    CHECK(ev.tree_bytes == 8 * RESULTS);
    for (uint32_t i = 0; i < RESULTS; i++) {
        struct zcx_range *range;
        CHECK(zcx_parent_take(parent, zcx_wire_u64(ev.tree, i), &range) == 0);
        for (int k = 0; k < RESULT_BYTES; k++) CHECK(zcx_range_address(range)[k] == (unsigned char)seq, "byte %d", k);
        if (i) {
            zcx_range_unref(atomic_exchange(&handed, range));
        } else {
            zcx_range_unref(*lent); /* the transfer's own segment keeps the file, not the bytes: nobody looks at them any more */
            *lent = range;
        }
    }
    zcx_parent_end(parent);
    drain();
}

/* ---- bystanders ---- */

static void *look(void *arg) {
    (void)arg;
    while (!stop) {
        struct zcx_parent_stats stats;
        zcx_parent_stats(parent, &stats);
        CHECK(stats.kept + stats.quarantined <= stats.transfers && stats.calls <= CALLS);
        sched_yield();
    }
    return NULL;
}

static void *reclaim(void *arg) {
    (void)arg;
    while (!stop) {
        zcx_parent_reclaim(parent);
        zcx_range_unref(atomic_exchange(&handed, NULL));
        sched_yield();
    }
    return NULL;
}

static void *cancel(void *arg) {
    (void)arg;
    for (uint64_t seq = 1; !stop; seq++) {
        zcx_parent_cancel(parent, seq, NULL); /* an error while the worker has not read the last ones */
        sched_yield();
    }
    return NULL;
}

static void *forget(void *arg) {
    (void)arg;
    while (!stop) {
        CHECK(zcx_parent_drop_handle(parent, 7, NULL) != -ZCX_E_RANGE);
        sched_yield();
    }
    return NULL;
}

static void *ask(void *arg) {
    (void)arg;
    while (!stop) {
        uint64_t id;
        struct zcx_import *i = asked(0, &id);
        if (i) zcx_import_drop(i);
        sched_yield();
    }
    return NULL;
}

static void *tell(void *arg) {
    (void)arg;
    while (!stop) {
        zcx_worker_progress(worker, 1, 2, "on", 2, NULL);
        zcx_worker_drop_handle(worker, 7, NULL);
        sched_yield();
    }
    return NULL;
}

static void *let_go(void *arg) {
    (void)arg;
    while (!stop) {
        drop_later(NULL);
        zcx_worker_alive(worker);
        sched_yield();
    }
    return NULL;
}

static void *shut_down(void *arg) {
    (void)arg;
    zcx_parent_shutdown(parent);
    return NULL;
}

/* ---- a session ---- */

static void session(void *(*const bystanders[])(void *), int n) {
    int pair[2], controls[2];
    pthread_t server, others[8], ender;
    struct zcx_range *lent = NULL;
    struct zcx_event ev;
    struct zcx_err err = {0};
    CHECK(n <= 8);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, controls) == 0);
    CHECK((files = zcx_files_new()) != NULL);
    CHECK(zcx_parent_new(&parent, files, pair[0], controls[0], -1, &err) == 0, "%s", err.text);
    CHECK(zcx_worker_new(&worker, pair[1], &err) == 0, "%s", err.text);
    control = controls[1];
    owners_lent = owners_back = 0;
    stop = 0;
    CHECK(pthread_create(&server, NULL, serve, NULL) == 0);
    CHECK(zcx_parent_hello(parent, "1", "3", &err) == 0, "%s", err.text);
    step_to(ZCX_EV_STARTED, &ev);
    for (int i = 0; i < n; i++) CHECK(pthread_create(&others[i], NULL, bystanders[i], NULL) == 0);
    for (int i = 0; i < CALLS; i++) call(&lent);
    CHECK(pthread_create(&ender, NULL, shut_down, NULL) == 0);
    int r;
    do r = zcx_parent_step(parent, soon(), &ev, &err);
    while (r == 0 || r == 2);
    CHECK(r == -ZCX_E_DIED, "%d %s", r, err.text);
    CHECK(pthread_join(ender, NULL) == 0);
    stop = 1;
    for (int i = 0; i < n; i++) CHECK(pthread_join(others[i], NULL) == 0);
    CHECK(pthread_join(server, NULL) == 0);
    zcx_parent_gone(parent);
    drain();
    CHECK(owners_back == owners_lent && owners_lent == CALLS - 1, "%d of %d", owners_back, owners_lent);
    zcx_range_unref(lent);
    zcx_range_unref(atomic_exchange(&handed, NULL));
    drop_later(NULL);
    zcx_worker_free(worker);
    zcx_parent_free(parent);
    zcx_files_free(files);
    close(control);
}

/* ---- a parent that changes its segments while a call runs ---- */

static int raw; /* its end */

static void send_raw(enum zcx_type type, uint64_t seq, uint64_t id, const void *body, size_t n, int fd) {
    struct zcx_sock s = {.fd = raw, .pidfd = -1};
    struct zcx_header h = {.type = (uint16_t)type, .seq = seq, .id = id};
    struct zcx_piece piece = {body, n};
    CHECK(zcx_sock_send(&s, h, &piece, 1, &fd, fd >= 0, soon(), NULL) == 0);
}

static void send_segment(uint64_t id) {
    unsigned char body[32];
    struct zcx_shm *s;
    CHECK(zcx_shm_input_new(&s, 4096, NULL) == 0);
    struct zcx_segment m = {.size = zcx_shm_size(s), .kind = ZCX_SHM_INPUT};
    send_raw(ZCX_SEGMENT, 0, id, body, (size_t)zcx_segment_encode(&m, body, sizeof body, NULL), zcx_shm_fd(s));
    zcx_shm_unref(s);
}

/* Each request is answered with a segment more, one less, and no. */
static void *change_segments(void *arg) {
    unsigned char packet[1024], body[64];
    struct zcx_refused no = {.code = ZCX_REFUSED_MEMORY, .reason = zcx_text_of("no")};
    size_t n = (size_t)zcx_refused_encode(&no, body, sizeof body, NULL);
    struct zcx_header h;
    ssize_t got;
    (void)arg;
    for (uint64_t id = 2; (got = recv(raw, packet, sizeof packet, 0)) > 0; id++) {
        CHECK(zcx_header_decode(packet, (size_t)got, &h, NULL) == 0);
        if (h.type != ZCX_ALLOC) continue;
        send_segment(id);
        send_raw(ZCX_SEGMENT_DROP, 0, id, NULL, 0, -1);
        send_raw(ZCX_REFUSED, h.seq, h.id, body, n, -1);
    }
    return NULL;
}

static void *ask_in_vain(void *arg) {
    (void)arg;
    for (int i = 0; i < CALLS; i++) {
        unsigned char shape[8] = {1};
        struct zcx_alloc a = {.ndim = 1, .itemsize = 1, .dtype = zcx_text_of("uint8"), .shape = shape, .nbytes = 1};
        struct zcx_import *import;
        struct zcx_buffer staged;
        uint64_t request = 0;
        uint32_t code = 0;
        CHECK(zcx_worker_alloc(worker, &a, &request, NULL, NULL, &import, &staged, &code, NULL) == 1 && code == ZCX_REFUSED_MEMORY);
    }
    stop = 1;
    return NULL;
}

static void inputs_are_mapped_while_segments_change(void) {
    int pair[2];
    unsigned char fixed[8], buffers[ZCX_BUFFER_BYTES], body[sizeof fixed + sizeof buffers];
    struct zcx_buffer b = {.id = 1, .rung = ZCX_RUNG_HOST, .nbytes = 100, .key = 1};
    struct zcx_call_msg m = {.nbuffers = 1, .gates = fixed, .buffers = buffers};
    struct zcx_work work;
    struct zcx_err err = {0};
    pthread_t changer, asker;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(zcx_worker_new(&worker, pair[1], &err) == 0, "%s", err.text);
    raw = pair[0];
    stop = 0;
    send_segment(1);
    zcx_buffer_encode(&b, buffers);
    send_raw(ZCX_CALL, 1, 0, body, (size_t)zcx_call_msg_encode(&m, body, sizeof body, NULL), -1);
    CHECK(zcx_worker_next(worker, &work, &err) == 0 && work.kind == ZCX_WORK_CALL, "%s", err.text);
    CHECK(zcx_worker_begin(worker, NULL, NULL, &err) == 0, "%s", err.text);
    CHECK(pthread_create(&changer, NULL, change_segments, NULL) == 0 && pthread_create(&asker, NULL, ask_in_vain, NULL) == 0);
    while (!stop) {
        struct zcx_import *import;
        CHECK(zcx_worker_map(worker, &b, &import, &err) == 0, "%s", err.text);
        zcx_import_drop(import);
    }
    CHECK(pthread_join(asker, NULL) == 0);
    CHECK(zcx_worker_finish(worker, ZCX_RESULT, 0, 0, "", 0, &err) == 0, "%s", err.text);
    CHECK(shutdown(raw, SHUT_RDWR) == 0 && pthread_join(changer, NULL) == 0);
    zcx_worker_free(worker);
    close(raw);
}

static void the_parents_end_under_threads(void) {
    session((void *(*const[])(void *)){look, look, look, reclaim, reclaim, cancel, forget}, 7);
}

static void the_workers_end_under_threads(void) {
    session((void *(*const[])(void *)){ask, ask, ask, tell, tell, let_go, let_go}, 7);
}

int main(void) {
    alarm(2 * SECONDS);
    RUN(the_parents_end_under_threads);
    RUN(the_workers_end_under_threads);
    RUN(inputs_are_mapped_while_segments_change);
    return 0;
}
