/* test_gate.c: counters and events between two processes, on the simulated driver, whose streams can be held. */
// sources: csrc/gate.c csrc/driver.c csrc/err.c
// needs: simcuda
#include "cases.h"
#include "gate.h"

#include <fcntl.h>
#include <pthread.h>
#include <poll.h>
#include <sys/mman.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define READY_MS 10000

static void (*fail_at)(const char *);

static void controls(void) { fail_at = library_symbol("simcuda_fail"); }

/* The simulated driver's own controls look handles up in the current context, which is device 0's here. */
static long control(const char *name, zcu_stream stream) {
    struct zcx_scope s;
    long r;
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    if (strcmp(name, "step") == 0) r = ((int (*)(zcu_stream, int))library_symbol("simcuda_step"))(stream, READY_MS);
    else if (strcmp(name, "pending") == 0) r = ((long (*)(zcu_stream))library_symbol("simcuda_pending"))(stream);
    else r = ((int (*)(zcu_stream))library_symbol(strcmp(name, "hold") ? "simcuda_release" : "simcuda_hold"))(stream);
    zcx_scope_close(&s);
    return r;
}
static int hold(zcu_stream stream) { return (int)control("hold", stream); }
static int release(zcu_stream stream) { return (int)control("release", stream); }
static int step(zcu_stream stream) { return (int)control("step", stream); }
static long pending(zcu_stream stream) { return control("pending", stream); }

static zcu_stream stream_on(int ordinal) {
    struct zcx_scope s;
    zcu_stream stream;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    CHECK(s.d->StreamCreate(&stream, ZCU_STREAM_NON_BLOCKING) == 0);
    zcx_scope_close(&s);
    return stream;
}

static int synchronize(int ordinal, zcu_stream stream) {
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    int r = s.d->StreamSynchronize(stream);
    zcx_scope_close(&s);
    return r;
}

static struct zcx_gate *new_gate(void) {
    struct zcx_gate *g = NULL;
    struct zcx_err err;
    CHECK(zcx_gate_new(&g, &err) == 0, "%s", err.call);
    return g;
}

static struct zcx_gate *open_gate(int fd) {
    struct zcx_gate *g = NULL;
    struct zcx_err err;
    CHECK(zcx_gate_open(&g, fd, &err) == 0, "%s", err.text);
    return g;
}

static void registered(struct zcx_gate *g, int ordinal) {
    struct zcx_err err = {0};
    CHECK(zcx_gate_register(g, ordinal, &err) == 0, "%s %s", err.call ? err.call : "", err.text);
}

/* Wait for what another process or the simulated GPU is about to do. The case's alarm ends a wait that is in vain. */
static void until_reached(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value) {
    struct zcx_err err;
    for (int r; (r = zcx_gate_reached(g, ordinal, slot, value, &err)) != 1;) {
        CHECK(r == 0, "%s", err.text);
        poll(NULL, 0, 1);
    }
}

/* ---- the page ---- */

CASE(the_page_is_sealed) {
    struct zcx_gate *g = new_gate(), *w;
    int fd = zcx_gate_fd(g), before = check_fds();
    CHECK(fcntl(fd, F_GET_SEALS) == SEALS && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    CHECK(ftruncate(fd, 0) < 0 && ftruncate(fd, 1 << 20) < 0);
    w = open_gate(fd);
    CHECK(zcx_gate_fd(w) == -1 && check_fds() == before);
    zcx_gate_post_cpu(g, 5, 77);
    CHECK(zcx_gate_reached(w, 0, 5, 77, NULL) == 1 && zcx_gate_reached(w, 0, 5, 78, NULL) == 0);
    zcx_gate_free(g);
    CHECK(fcntl(fd, F_GETFD) < 0, "closed");
    CHECK(zcx_gate_reached(w, 0, 5, 77, NULL) == 1, "the other mapping lives on");
    zcx_gate_free(w);
    zcx_gate_free(NULL);
    CHECK(!zcx_driver_opened(), "none of this touches CUDA");
}

static void refused(int fd) {
    struct zcx_gate *g = (void *)1;
    struct zcx_err err;
    CHECK(zcx_gate_open(&g, fd, &err) == -ZCX_E_PROTOCOL && err.text[0] && g == (void *)1);
    close(fd);
}

CASE(other_pages_are_refused) {
    struct zcx_gate *g;
    int fd = memfd_create("x", MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, ZCX_GATE_BYTES) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    refused(fd); /* SEAL is missing */
    fd = memfd_create("x", MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, ZCX_GATE_BYTES) == 0);
    refused(fd);
    fd = memfd_create("x", MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, ZCX_GATE_BYTES - 1) == 0 && fcntl(fd, F_ADD_SEALS, SEALS) == 0);
    refused(fd);
    fd = memfd_create("x", MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, 2 * ZCX_GATE_BYTES) == 0 && fcntl(fd, F_ADD_SEALS, SEALS) == 0);
    refused(fd);
    fd = open("/dev/zero", O_RDWR);
    refused(fd);
    int ends[2];
    CHECK(pipe(ends) == 0);
    refused(ends[0]);
    close(ends[1]);
    CHECK(zcx_gate_open(&g, -1, NULL) == -EBADF);
}

/* ---- slots ---- */

CASE(slots_are_handed_out) {
    struct zcx_gate *g = new_gate();
    uint32_t r, d, first, second;
    char taken[ZCX_GATE_SLOTS] = {0};
    CHECK(zcx_gate_take(g, &first, &second) == 0 && first != second);
    taken[first] = taken[second] = 1;
    for (int i = 1; i < ZCX_GATE_SLOTS / 2; i++) {
        CHECK(zcx_gate_take(g, &r, &d) == 0 && r < ZCX_GATE_SLOTS && d < ZCX_GATE_SLOTS);
        CHECK(!taken[r]++ && !taken[d]++);
    }
    r = d = 99;
    CHECK(zcx_gate_take(g, &r, &d) == 1 && r == 99 && d == 99);
    zcx_gate_put(g, first);
    CHECK(zcx_gate_take(g, &r, &d) == 1, "one is not enough");
    uint64_t value = zcx_gate_next(g, second), next;
    CHECK(value && (next = zcx_gate_next(g, second)) > value);
    zcx_gate_put(g, second);
    CHECK(zcx_gate_take(g, &r, &d) == 1, "announced, but not seen");
    zcx_gate_post_cpu(g, second, value);
    CHECK(zcx_gate_take(g, &r, &d) == 1, "the last announced one counts");
    zcx_gate_post_cpu(g, second, next);
    CHECK(zcx_gate_take(g, &r, &d) == 0 && r + d == first + second);
    CHECK(zcx_gate_next(g, second) > next, "a slot's values never start over");
    zcx_gate_put(g, ZCX_GATE_SLOTS);
    CHECK(zcx_gate_next(g, ZCX_GATE_SLOTS) == 0);
    zcx_gate_post_cpu(g, ZCX_GATE_SLOTS, 1);
    zcx_gate_free(g);
}

CASE(many_posts_of_a_slot) {
    struct zcx_gate *g = new_gate();
    uint32_t r, d, used[2];
    CHECK(zcx_gate_take(g, &r, &d) == 0);
    uint64_t before = zcx_gate_next(g, r), first = zcx_gate_next_n(g, r, 1000);
    CHECK(first == before + ZCX_GATE_STEP && zcx_gate_next(g, r) == first + 1000 * ZCX_GATE_STEP);
    CHECK(zcx_gate_next_n(g, ZCX_GATE_SLOTS, 3) == 0);
    used[0] = r;
    used[1] = d;
    CHECK(zcx_gate_next_n(g, d, ZCX_GATE_POSTS - 1) && zcx_gate_next_n(g, d, ZCX_GATE_POSTS), "the last time that it is given out");
    CHECK(zcx_gate_next_n(g, d, 1) == 0 && zcx_gate_next_n(g, d, UINT64_MAX) == 0, "it has no more");
    zcx_gate_post_cpu(g, r, first + 1000 * ZCX_GATE_STEP);
    zcx_gate_post_cpu(g, d, UINT64_MAX / 2);
    zcx_gate_put(g, r);
    zcx_gate_put(g, d);
    for (int i = 0, seen = 0; i < ZCX_GATE_SLOTS; i++) {
        CHECK(zcx_gate_take(g, &r, &d) == 0 && r != used[1] && d != used[1], "it would turn round");
        seen |= r == used[0] || d == used[0];
        zcx_gate_put(g, r);
        zcx_gate_put(g, d);
        CHECK(seen || i + 1 < ZCX_GATE_SLOTS);
    }
    zcx_gate_free(g);
}

CASE(slots_go_round) {
    struct zcx_gate *g = new_gate();
    uint32_t r, d, first, second;
    CHECK(zcx_gate_take(g, &first, &second) == 0);
    zcx_gate_put(g, first);
    zcx_gate_put(g, second);
    for (int i = 1; i < ZCX_GATE_SLOTS / 2; i++) {
        CHECK(zcx_gate_take(g, &r, &d) == 0 && r != first && d != first && r != second && d != second);
        zcx_gate_put(g, r);
        zcx_gate_put(g, d);
    }
    CHECK(zcx_gate_take(g, &r, &d) == 0 && r == first && d == second);
    zcx_gate_free(g);
}

/* ---- counters; both ends in one process, where each stream can be watched ---- */

CASE(ready_then_done) {
    struct zcx_gate *g = new_gate(), *w = open_gate(zcx_gate_fd(g));
    uint32_t ready, done;
    registered(g, 0);
    registered(w, 0);
    registered(g, 0);
    controls();
    CHECK(!zcx_gate_uses_events(g) && !zcx_gate_uses_events(w));
    zcu_stream ours = stream_on(0), theirs = stream_on(0);
    CHECK(hold(ours) == 0);
    CHECK(zcx_gate_take(g, &ready, &done) == 0);
    uint64_t r = zcx_gate_next(g, ready), d = zcx_gate_next(g, done);
    CHECK(zcx_gate_idle(g) == 1 && zcx_gate_idle(w) == 1);
    CHECK(zcx_gate_await(w, 0, ready, r, theirs, NULL) == 0, "the wait may be queued before the post");
    CHECK(zcx_gate_post(w, 0, done, d, theirs, NULL) == 0);
    CHECK(zcx_gate_idle(w) == 0);
    CHECK(zcx_gate_post(g, 0, ready, r, ours, NULL) == 0);
    CHECK(zcx_gate_idle(g) == 0);
    CHECK(zcx_gate_reached(g, 0, ready, r, NULL) == 0 && zcx_gate_reached(g, 0, done, d, NULL) == 0);
    CHECK(pending(theirs) == 2);
    CHECK(step(ours) == 1);
    until_reached(g, 0, done, d);
    CHECK(zcx_gate_reached(w, 0, ready, r, NULL) == 1);
    CHECK(zcx_gate_idle(g) == 1 && zcx_gate_idle(w) == 1);
    uint64_t r2 = zcx_gate_next(g, ready), d2 = zcx_gate_next(g, done);
    CHECK(zcx_gate_reached(g, 0, ready, r2, NULL) == 0 && zcx_gate_reached(g, 0, done, d2, NULL) == 0,
          "what a post writes stays below the next value");
    CHECK(simcuda_count("registered") == 2, "once by each side");
    zcx_gate_free(w);
    zcx_gate_free(g);
    CHECK(simcuda_count("registered") == 0);
    CHECK(release(ours) == 0 && synchronize(0, ours) == 0 && synchronize(0, theirs) == 0);
}

CASE(a_store_sets_a_waiting_stream_free) {
    struct zcx_gate *g = new_gate(), *w = open_gate(zcx_gate_fd(g));
    registered(g, 0);
    registered(w, 0);
    controls();
    zcu_stream theirs = stream_on(0);
    uint64_t value = zcx_gate_next(g, 3);
    CHECK(zcx_gate_await(w, 0, 3, value, theirs, NULL) == 0);
    CHECK(pending(theirs) == 1 && zcx_gate_idle(w) == 0, "the page may not go from under a wait either");
    zcx_gate_post_cpu(g, 3, value);
    CHECK(synchronize(0, theirs) == 0 && zcx_gate_idle(w) == 1);
    zcx_gate_free(w);
    zcx_gate_free(g);
}

CASE(the_parent_never_waits) {
    struct zcx_gate *g = new_gate();
    registered(g, 0);
    CHECK(zcx_gate_await(g, 0, 1, 1, NULL, NULL) == -ZCX_E_RANGE);
    zcx_gate_free(g);
}

CASE(out_of_range) {
    struct zcx_gate *g = new_gate(), *w = open_gate(zcx_gate_fd(g));
    zcu_ipc_event handle = {{0}};
    CHECK(zcx_gate_post(g, 0, 1, 1, NULL, NULL) == -ZCX_E_RANGE, "not registered");
    CHECK(zcx_gate_await(w, 0, 1, 1, NULL, NULL) == -ZCX_E_RANGE);
    registered(g, 0);
    registered(w, 0);
    CHECK(zcx_gate_post(g, 0, ZCX_GATE_SLOTS, 1, NULL, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_post(g, 1, 0, 1, NULL, NULL) == -ZCX_E_RANGE && zcx_gate_post(g, -1, 0, 1, NULL, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_post(g, ZCX_MAX_DEVICES, 0, 1, NULL, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_await(w, 0, ZCX_GATE_SLOTS, 1, NULL, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_reached(g, 0, ZCX_GATE_SLOTS, 1, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_register(g, 1, NULL) == -ZCX_E_RANGE && zcx_gate_register(g, -1, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_event_export(g, 0, 0, &handle, NULL) == -ZCX_E_RANGE, "counters need no events");
    CHECK(zcx_gate_event_import(w, 0, 0, &handle, NULL) == -ZCX_E_RANGE);
    zcx_gate_free(w);
    zcx_gate_free(g);
}

CASE(registered_once_for_all_devices) {
    setenv("SIMCUDA_DEVICES", "3", 1);
    struct zcx_gate *g = new_gate();
    registered(g, 2);
    controls();
    fail_at("cuMemHostRegister:1:999+");
    registered(g, 0);
    registered(g, 2);
    fail_at("");
    zcu_stream s0 = stream_on(0), s2 = stream_on(2);
    uint64_t a = zcx_gate_next(g, 7), b = zcx_gate_next(g, 8);
    CHECK(zcx_gate_post(g, 0, 7, a, s0, NULL) == 0 && zcx_gate_post(g, 2, 8, b, s2, NULL) == 0);
    until_reached(g, 0, 7, a);
    until_reached(g, 2, 8, b);
    CHECK(zcx_gate_idle(g) == 1);
    zcx_gate_free(g);
}

/* ---- what a lying peer stores ---- */

CASE(lies_do_not_make_it_idle) {
    struct zcx_gate *g = new_gate(), *liar = open_gate(zcx_gate_fd(g));
    uint32_t ready, done, r, d;
    registered(g, 0);
    controls();
    zcu_stream ours = stream_on(0);
    CHECK(hold(ours) == 0 && zcx_gate_take(g, &ready, &done) == 0);
    uint64_t value = zcx_gate_next(g, ready);
    CHECK(zcx_gate_post(g, 0, ready, value, ours, NULL) == 0);
    zcx_gate_post_cpu(liar, ready, value);
    CHECK(zcx_gate_reached(g, 0, ready, value, NULL) == 1, "it can spoil its own call");
    CHECK(zcx_gate_idle(g) == 0, "but not have the page taken from under a stream of ours");
    zcx_gate_put(g, ready);
    zcx_gate_put(g, done);
    for (int i = 0; i < ZCX_GATE_SLOTS; i++) {
        CHECK(zcx_gate_take(g, &r, &d) == 0 && r != ready && d != ready, "nor the slot given out again");
        zcx_gate_put(g, r);
        zcx_gate_put(g, d);
    }
    CHECK(step(ours) == 1 && zcx_gate_idle(g) == 1);
    CHECK(zcx_gate_take(g, &r, &d) == 0);
    zcx_gate_free(liar);
    zcx_gate_free(g);
    CHECK(release(ours) == 0 && synchronize(0, ours) == 0);
}

CASE(freed_too_early_the_page_stays) {
    struct zcx_gate *g = new_gate();
    registered(g, 0);
    controls();
    zcu_stream ours = stream_on(0);
    CHECK(hold(ours) == 0);
    CHECK(zcx_gate_post(g, 0, 1, zcx_gate_next(g, 1), ours, NULL) == 0);
    zcx_gate_free(g);
    CHECK(simcuda_count("registered") == 1);
    CHECK(release(ours) == 0);
    CHECK(synchronize(0, ours) == 0, "the post would have faulted on unregistered memory");
}

CASE(what_cuda_will_not_let_go_of_stays_mapped) {
    struct zcx_gate *g = new_gate();
    registered(g, 0);
    controls();
    fail_at("cuMemHostUnregister:1:999");
    zcx_gate_free(g);
    CHECK(((long (*)(void))library_symbol("simcuda_injected"))() == 1);
    char line[256];
    int mapped = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) mapped |= strstr(line, "zcx-gate") != NULL;
    fclose(maps);
    CHECK(mapped && simcuda_count("registered") == 1);
}

/* A stream of ours that is still to post an earlier value, after the CPU had to post the last one. */
CASE(a_late_post_does_not_undo_a_store) {
    struct zcx_gate *g = new_gate();
    uint32_t ready, done;
    registered(g, 0);
    controls();
    zcu_stream ours = stream_on(0);
    CHECK(hold(ours) == 0 && zcx_gate_take(g, &ready, &done) == 0);
    uint64_t first = zcx_gate_next(g, ready), second = zcx_gate_next(g, ready);
    CHECK(zcx_gate_post(g, 0, ready, first, ours, NULL) == 0);
    fail_at("cuStreamWriteValue64:1:999");
    CHECK(zcx_gate_post(g, 0, ready, second, ours, NULL) == -ZCX_E_CUDA);
    zcx_gate_post_cpu(g, ready, second);
    CHECK(zcx_gate_reached(g, 0, ready, second, NULL) == 1 && zcx_gate_idle(g) == 0);
    CHECK(step(ours) == 1);
    CHECK(zcx_gate_reached(g, 0, ready, second, NULL) == 1 && zcx_gate_idle(g) == 1);
    zcx_gate_put(g, ready);
    zcx_gate_put(g, done);
    int seen = 0;
    for (int i = 0; i < ZCX_GATE_SLOTS / 2; i++) {
        uint32_t r, d;
        CHECK(zcx_gate_take(g, &r, &d) == 0);
        seen += r == ready || d == ready;
    }
    CHECK(seen == 1, "the slot is not lost");
    zcx_gate_free(g);
    CHECK(release(ours) == 0 && synchronize(0, ours) == 0);
}

/* A post that arrived, but was not looked at before the CPU stored over it. */
CASE(a_store_over_a_post) {
    struct zcx_gate *g = new_gate();
    registered(g, 0);
    zcu_stream ours = stream_on(0);
    uint64_t first = zcx_gate_next(g, 6), second = zcx_gate_next(g, 6);
    CHECK(zcx_gate_post(g, 0, 6, first, ours, NULL) == 0 && synchronize(0, ours) == 0);
    zcx_gate_post_cpu(g, 6, second);
    CHECK(zcx_gate_idle(g) == 1);
    zcx_gate_free(g);
    CHECK(simcuda_count("registered") == 0);
}

/* ---- two processes ---- */

struct word {
    int op;
    uint32_t ready, done;
    uint64_t ready_value, done_value;
    zcu_ipc_event events[2];
};
enum { OP_CALL = 1, OP_HANG, OP_EARLY };

/* A worker that awaits READY and posts DONE, on a stream of its own. */
static void worker(int sock) {
    struct word w;
    struct zcx_err err = {0};
    int fd = peer_recv(sock, &w, sizeof w), answer;
    struct zcx_gate *g = open_gate(fd);
    close(fd);
    registered(g, 0);
    controls();
    zcu_stream stream = stream_on(0);
    answer = zcx_gate_uses_events(g);
    peer_send(sock, &answer, sizeof answer, -1);
    while (peer_recv(sock, &w, sizeof w) == -1) {
        if (zcx_gate_uses_events(g)) {
            zcu_ipc_event other = w.events[0];
            int before = check_fds();
            CHECK(zcx_gate_event_import(g, 0, w.ready, &w.events[0], &err) == 0, "%s", err.call);
            CHECK(zcx_gate_event_import(g, 0, w.ready, &w.events[0], &err) == 0, "told again");
            CHECK(zcx_gate_event_import(g, 0, w.done, &w.events[1], &err) == 0);
            other.bytes[0] ^= 1;
            CHECK(zcx_gate_event_import(g, 0, w.ready, &other, &err) == -ZCX_E_PROTOCOL);
            CHECK(check_fds() == before);
        }
        if (w.op == OP_EARLY) {
            answer = -zcx_gate_await(g, 0, w.ready, w.ready_value, stream, &err);
        } else {
            answer = zcx_gate_await(g, 0, w.ready, w.ready_value, stream, &err);
            if (w.op == OP_HANG) CHECK(hold(stream) == 0);
            if (!answer) answer = zcx_gate_post(g, 0, w.done, w.done_value, stream, &err);
        }
        peer_send(sock, &answer, sizeof answer, -1);
    }
    CHECK(synchronize(0, stream) == 0 && zcx_gate_idle(g) == 1);
    zcx_gate_free(g);
    CHECK(simcuda_count("registered") == 0 && simcuda_count("events") == 0);
}

static int ask(struct peer *peer, struct word *w, int fd) {
    int answer;
    peer_send(peer->sock, w, sizeof *w, fd);
    CHECK(peer_recv(peer->sock, &answer, sizeof answer) == -1, "the peer is gone");
    return answer;
}

static void announce(struct zcx_gate *g, struct word *w) {
    w->ready_value = zcx_gate_next(g, w->ready);
    w->done_value = zcx_gate_next(g, w->done);
    if (zcx_gate_uses_events(g)) {
        zcu_ipc_event again;
        CHECK(zcx_gate_event_export(g, 0, w->ready, &w->events[0], NULL) == 0);
        CHECK(zcx_gate_event_export(g, 0, w->done, &w->events[1], NULL) == 0);
        CHECK(zcx_gate_event_export(g, 0, w->done, &again, NULL) == 0 && memcmp(&again, &w->events[1], sizeof again) == 0);
    }
}

static void calls(int events) {
    struct peer peer = peer_start(worker);
    struct zcx_gate *g = new_gate();
    struct word w = {0};
    registered(g, 0);
    controls();
    CHECK(zcx_gate_uses_events(g) == events);
    CHECK(ask(&peer, &w, zcx_gate_fd(g)) == events, "the worker follows the parent");
    zcu_stream ours = stream_on(0);
    for (int i = 0; i < 3 * ZCX_GATE_SLOTS; i++) {
        w.op = OP_CALL;
        CHECK(zcx_gate_take(g, &w.ready, &w.done) == 0);
        announce(g, &w);
        CHECK(hold(ours) == 0);
        CHECK(zcx_gate_post(g, 0, w.ready, w.ready_value, ours, NULL) == 0);
        CHECK(ask(&peer, &w, -1) == 0);
        CHECK(zcx_gate_reached(g, 0, w.done, w.done_value, NULL) == 0, "posted, but READY is still to come");
        CHECK(release(ours) == 0);
        until_reached(g, 0, w.done, w.done_value);
        zcx_gate_put(g, w.ready);
        zcx_gate_put(g, w.done);
    }
    CHECK(peer_end(&peer) == 0);
    CHECK(zcx_gate_idle(g) == 1);
    zcx_gate_free(g);
    CHECK(simcuda_count("registered") == 0 && simcuda_count("events") == 0);
}

CASE(calls_with_counters) { calls(0); }

static void without_counters(void) { setenv("SIMCUDA_HIDE", "cuStreamWriteValue64", 1); }

CASE(calls_with_events) {
    without_counters();
    calls(1);
}

CASE(calls_with_events_where_only_the_attribute_says_no) {
    setenv("SIMCUDA_ATTRIBUTES", "122=0", 1);
    calls(1);
}

CASE(events_count_only_once_recorded) {
    without_counters();
    struct peer peer = peer_start(worker);
    struct zcx_gate *g = new_gate();
    struct word w = {0};
    registered(g, 0);
    CHECK(ask(&peer, &w, zcx_gate_fd(g)) == 1);
    CHECK(zcx_gate_take(g, &w.ready, &w.done) == 0);
    CHECK(zcx_gate_post(g, 0, w.ready, 1, NULL, NULL) == -ZCX_E_UNFIT, "no event was made yet");
    announce(g, &w);
    CHECK(zcx_gate_reached(g, 0, w.done, w.done_value, NULL) == 0, "an event that was never recorded queries as complete");
    w.op = OP_EARLY;
    CHECK(ask(&peer, &w, -1) == ZCX_E_PROTOCOL, "and waits for nothing");
    zcx_gate_post_cpu(g, w.ready, w.ready_value);
    w.op = OP_CALL;
    CHECK(ask(&peer, &w, -1) == 0, "a post from the CPU needs no event");
    until_reached(g, 0, w.done, w.done_value);
    /* the next value is another post, though the event is complete */
    uint64_t next = zcx_gate_next(g, w.done);
    CHECK(zcx_gate_reached(g, 0, w.done, next, NULL) == 0);
    CHECK(peer_end(&peer) == 0);
    zcx_gate_free(g);
}

CASE(events_of_another_device) {
    without_counters();
    setenv("SIMCUDA_DEVICES", "2", 1);
    struct zcx_gate *g = new_gate();
    zcu_ipc_event handle;
    uint32_t ready, done, r, d;
    int seen = 0;
    registered(g, 1);
    zcu_stream ours = stream_on(1);
    CHECK(zcx_gate_take(g, &ready, &done) == 0);
    CHECK(zcx_gate_event_export(g, 0, ready, &handle, NULL) == -ZCX_E_RANGE);
    CHECK(zcx_gate_event_export(g, 1, ready, &handle, NULL) == 0);
    CHECK(zcx_gate_post(g, 1, ready, zcx_gate_next(g, ready), ours, NULL) == 0 && synchronize(1, ours) == 0);
    zcx_gate_put(g, ready);
    zcx_gate_put(g, done);
    for (int i = 0; i < ZCX_GATE_SLOTS / 2; i++) {
        CHECK(zcx_gate_take(g, &r, &d) == 0);
        seen += r == ready || d == ready;
    }
    CHECK(seen == 1, "nobody asked for READY, but it is complete: the slot is free");
    zcx_gate_free(g);
    CHECK(simcuda_count("events") == 0);
}

CASE(a_killed_worker_hangs_nobody) {
    without_counters();
    struct peer peer = peer_start(worker);
    struct zcx_gate *g = new_gate();
    struct word w = {.op = OP_HANG};
    uint32_t r, d;
    registered(g, 0);
    CHECK(ask(&peer, &w, zcx_gate_fd(g)) == 1);
    CHECK(zcx_gate_take(g, &w.ready, &w.done) == 0);
    announce(g, &w);
    zcu_stream ours = stream_on(0);
    CHECK(zcx_gate_post(g, 0, w.ready, w.ready_value, ours, NULL) == 0);
    w.op = OP_HANG;
    CHECK(ask(&peer, &w, -1) == 0);
    CHECK(kill(peer.pid, SIGKILL) == 0);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    CHECK(zcx_gate_reached(g, 0, w.done, w.done_value, NULL) == 0, "never, and asking does not block");
    CHECK(synchronize(0, ours) == 0, "no stream of ours hangs on it");
    zcx_gate_put(g, w.ready);
    zcx_gate_put(g, w.done);
    for (int i = 0; i < ZCX_GATE_SLOTS; i++) {
        CHECK(zcx_gate_take(g, &r, &d) == 0 && r != w.done && d != w.done, "its slot is not given out");
        zcx_gate_put(g, r);
        zcx_gate_put(g, d);
    }
    zcx_gate_post_cpu(g, w.done, w.done_value);
    CHECK(zcx_gate_reached(g, 0, w.done, w.done_value, NULL) == 1);
    CHECK(zcx_gate_idle(g) == 1);
    zcx_gate_free(g);
}

CASE(neither_counters_nor_events) {
    struct zcx_gate *g = new_gate();
    struct zcx_err err;
    setenv("SIMCUDA_HIDE", "cuStreamWaitValue64,cuIpcOpenEventHandle", 1);
    CHECK(zcx_gate_register(g, 0, &err) == -ZCX_E_UNFIT && strstr(err.text, "neither"), "%s", err.text);
    CHECK(!zcx_gate_uses_events(g));
    zcx_gate_free(g);
}

static void worker_without_counters(int sock) {
    struct zcx_gate *g;
    struct zcx_err err;
    struct word w;
    int fd = peer_recv(sock, &w, sizeof w);
    setenv("SIMCUDA_ATTRIBUTES", "122=0", 1);
    g = open_gate(fd);
    close(fd);
    int answer = -zcx_gate_register(g, 0, &err);
    CHECK(strstr(err.text, "64-bit stream memory operations"));
    zcx_gate_free(g);
    peer_send(sock, &answer, sizeof answer, -1);
}

CASE(a_worker_that_cannot_follow_says_so) {
    struct peer peer = peer_start(worker_without_counters);
    struct zcx_gate *g = new_gate();
    struct word w = {0};
    registered(g, 0);
    CHECK(ask(&peer, &w, zcx_gate_fd(g)) == ZCX_E_UNFIT);
    CHECK(peer_end(&peer) == 0);
    zcx_gate_free(g);
}

CASE(a_junk_mode_is_refused) {
    struct zcx_gate *g = new_gate(), *w;
    struct zcx_err err;
    unsigned char *page = mmap(NULL, ZCX_GATE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, zcx_gate_fd(g), 0);
    CHECK(page != MAP_FAILED);
    memset(page + 16, 0xFF, 4);
    w = open_gate(zcx_gate_fd(g));
    CHECK(zcx_gate_register(w, 0, &err) == -ZCX_E_PROTOCOL, "%s", err.text);
    registered(g, 0);
    CHECK(!zcx_gate_uses_events(g), "the parent never believes it");
    CHECK(munmap(page, ZCX_GATE_BYTES) == 0);
    zcx_gate_free(w);
    zcx_gate_free(g);
}

/* ---- faults ---- */

CASE(registering_fails_at_every_call) {
    struct zcx_gate *g = new_gate();
    struct zcx_err err;
    char rule[64];
    int n = 0, rc;
    stream_on(0); /* the context is there */
    controls();
    do {
        snprintf(rule, sizeof rule, "*:%d:999", ++n);
        fail_at(rule);
        rc = zcx_gate_register(g, 0, &err);
        fail_at("");
        if (!rc) break;
        CHECK(rc == -ZCX_E_CUDA && err.cuda == 999 && err.call, "at call %d", n);
        CHECK(zcx_gate_post(g, 0, 0, 1, NULL, NULL) == -ZCX_E_RANGE, "not registered");
    } while (n < 50);
    CHECK(rc == 0 && n > 3, "%d calls", n);
    zcu_stream ours = stream_on(0);
    uint64_t value = zcx_gate_next(g, 2);
    CHECK(zcx_gate_post(g, 0, 2, value, ours, NULL) == 0);
    until_reached(g, 0, 2, value);
    zcx_gate_free(g);
    CHECK(simcuda_count("registered") == 0);
}

CASE(exporting_an_event_fails_at_every_call) {
    without_counters();
    struct zcx_gate *g = new_gate();
    struct zcx_err err;
    zcu_ipc_event handle;
    char rule[64];
    int n = 0, rc;
    registered(g, 0);
    controls();
    do {
        snprintf(rule, sizeof rule, "*:%d:999", ++n);
        fail_at(rule);
        rc = zcx_gate_event_export(g, 0, 4, &handle, &err);
        fail_at("");
        if (!rc) break;
        CHECK(rc == -ZCX_E_CUDA && err.cuda == 999, "at call %d", n);
        CHECK(zcx_gate_post(g, 0, 4, 1, NULL, NULL) == -ZCX_E_UNFIT);
    } while (n < 50);
    CHECK(rc == 0 && n > 3, "%d calls", n);
    CHECK(zcx_gate_post(g, 0, 4, 1, NULL, NULL) == 0);
    zcx_gate_free(g);
}

static struct zcx_gate *inherited;
static void forget_gate(void) {
    int fd = zcx_gate_fd(inherited);
    CHECK(zcx_gate_idle(inherited) == 1);
    zcx_gate_free(inherited);
    CHECK(fcntl(fd, F_GETFD) >= 0, "the number may belong to somebody else by then");
}

CASE(a_fork_is_harmless) {
    inherited = new_gate();
    registered(inherited, 0);
    controls();
    zcu_stream ours = stream_on(0);
    uint64_t value = zcx_gate_next(inherited, 2);
    CHECK(hold(ours) == 0 && zcx_gate_post(inherited, 0, 2, value, ours, NULL) == 0);
    CHECK(case_fork(forget_gate) == 0);
    CHECK(release(ours) == 0);
    until_reached(inherited, 0, 2, value);
    zcx_gate_free(inherited);
}

/* ---- a capture in another thread ---- */

static struct { zcu_result (*begin)(zcu_stream, int), (*end)(zcu_stream, void **); int begun[2], finish[2]; } capture;

static void *capture_meanwhile(void *unused) {
    zcu_stream stream = stream_on(0);
    struct zcx_scope s;
    void *graph;
    char c = 0;
    (void)unused;
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    CHECK(capture.begin(stream, 0) == 0);
    CHECK(write(capture.begun[1], &c, 1) == 1 && read(capture.finish[0], &c, 1) == 1);
    int r = capture.end(stream, &graph);
    zcx_scope_close(&s);
    return (void *)(intptr_t)r;
}

static void captured_meanwhile(int events) {
    struct zcx_gate *g = new_gate(), *w = open_gate(zcx_gate_fd(g));
    zcu_stream stream = stream_on(0);
    zcu_ipc_event handle;
    pthread_t thread;
    void *result;
    char c = 0;
    capture.begin = library_symbol("cuStreamBeginCapture_v2");
    capture.end = library_symbol("cuStreamEndCapture");
    CHECK(pipe(capture.begun) == 0 && pipe(capture.finish) == 0);
    CHECK(pthread_create(&thread, NULL, capture_meanwhile, NULL) == 0);
    CHECK(read(capture.begun[0], &c, 1) == 1);
    registered(g, 0);
    registered(w, 0);
    CHECK(zcx_gate_uses_events(g) == events);
    uint64_t value = zcx_gate_next(g, 0);
    if (events) CHECK(zcx_gate_event_export(g, 0, 0, &handle, NULL) == 0);
    CHECK(zcx_gate_post(g, 0, 0, value, stream, NULL) == 0);
    if (!events) CHECK(zcx_gate_await(w, 0, 0, value, stream, NULL) == 0);
    until_reached(g, 0, 0, value);
    while (!zcx_gate_idle(w)) poll(NULL, 0, 1);
    CHECK(synchronize(0, stream) == 0);
    zcx_gate_free(w);
    zcx_gate_free(g);
    CHECK(write(capture.finish[1], &c, 1) == 1);
    CHECK(pthread_join(thread, &result) == 0 && result == NULL, "the capture died: %ld", (long)(intptr_t)result);
}
CASE(a_capture_elsewhere_survives) { captured_meanwhile(0); }
CASE(a_capture_elsewhere_survives_events) {
    without_counters();
    captured_meanwhile(1);
}

/* ---- many threads ---- */

struct caller { struct zcx_gate *g, *w; };

static void *call_over_and_over(void *arg) {
    struct caller *c = arg;
    zcu_stream ours = stream_on(0), theirs = stream_on(0);
    for (int i = 0; i < 100; i++) {
        uint32_t ready, done;
        CHECK(zcx_gate_take(c->g, &ready, &done) == 0);
        uint64_t r = zcx_gate_next(c->g, ready), d = zcx_gate_next(c->g, done);
        CHECK(zcx_gate_post(c->g, 0, ready, r, ours, NULL) == 0);
        CHECK(zcx_gate_await(c->w, 0, ready, r, theirs, NULL) == 0);
        CHECK(zcx_gate_post(c->w, 0, done, d, theirs, NULL) == 0);
        until_reached(c->g, 0, done, d);
        CHECK(zcx_gate_reached(c->g, 0, ready, r, NULL) == 1, "DONE came after READY");
        zcx_gate_put(c->g, ready);
        zcx_gate_put(c->g, done);
    }
    return NULL;
}

CASE(threads_call_at_once) {
    pthread_t threads[8];
    struct caller c = {.g = new_gate()};
    c.w = open_gate(zcx_gate_fd(c.g));
    registered(c.g, 0);
    registered(c.w, 0);
    for (int i = 0; i < 8; i++) CHECK(pthread_create(&threads[i], NULL, call_over_and_over, &c) == 0);
    for (int i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(zcx_gate_idle(c.g) == 1);
    while (!zcx_gate_idle(c.w)) poll(NULL, 0, 1);
    zcx_gate_free(c.w);
    zcx_gate_free(c.g);
}

int main(void) {
    simcuda_share();
    RUN(the_page_is_sealed);
    RUN(other_pages_are_refused);
    RUN(slots_are_handed_out);
    RUN(many_posts_of_a_slot);
    RUN(slots_go_round);
    RUN(ready_then_done);
    RUN(a_store_sets_a_waiting_stream_free);
    RUN(the_parent_never_waits);
    RUN(out_of_range);
    RUN(registered_once_for_all_devices);
    RUN(lies_do_not_make_it_idle);
    RUN(freed_too_early_the_page_stays);
    RUN(what_cuda_will_not_let_go_of_stays_mapped);
    RUN(a_late_post_does_not_undo_a_store);
    RUN(a_store_over_a_post);
    RUN(calls_with_counters);
    RUN(calls_with_events);
    RUN(calls_with_events_where_only_the_attribute_says_no);
    RUN(events_count_only_once_recorded);
    RUN(events_of_another_device);
    RUN(a_killed_worker_hangs_nobody);
    RUN(neither_counters_nor_events);
    RUN(a_worker_that_cannot_follow_says_so);
    RUN(a_junk_mode_is_refused);
    RUN(registering_fails_at_every_call);
    RUN(exporting_an_event_fails_at_every_call);
    RUN(a_fork_is_harmless);
    RUN(a_capture_elsewhere_survives);
    RUN(a_capture_elsewhere_survives_events);
    RUN(threads_call_at_once);
    simcuda_unshare();
    return 0;
}
