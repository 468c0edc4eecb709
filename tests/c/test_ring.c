/* test_ring.c: copies through a window between two processes, over device memory and over host memory, on the simulated driver.
 *
 * The slots are small here, so that a transfer of many pieces is quick. Most is done in four ways (who sends, through what).
 * The simulated driver's happens-before aborts at the first access that nothing orders. */
// sources: csrc/ring.c csrc/gate.c csrc/pool.c csrc/window.c csrc/shm.c csrc/driver.c csrc/err.c
// needs: simcuda
// flags: -DZCX_RING_SLOT_BYTES=16384ull
#include "cases.h"
#include "pool.h"
#include "ring.h"
#include "shm.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#define SLOT ZCX_RING_SLOT_BYTES
#define MANY (5 * SLOT + 17)
#define MANY_PIECES 6
#define BLANK 0xA5
#define MAX_PARTS 48

static const uint64_t sizes[] = {1, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT, MANY};

/* ---- what both processes use ---- */

static const struct zcx_driver *driver;
static void (*fail_at)(const char *);
static int (*hold)(zcu_stream), (*release)(zcu_stream), (*step)(zcu_stream, int);
static long (*pending)(zcu_stream), (*injected)(void);
static uint64_t luck = 1;

/* The context stays current, as in a thread of torch. */
static void controls(void) {
    static struct zcx_scope forever;
    CHECK(zcx_scope_open(&forever, 0, NULL) == 0);
    driver = forever.d;
    fail_at = library_symbol("simcuda_fail");
    hold = library_symbol("simcuda_hold");
    release = library_symbol("simcuda_release");
    step = library_symbol("simcuda_step");
    pending = library_symbol("simcuda_pending");
    injected = library_symbol("simcuda_injected");
}

static zcu_stream new_stream(void) {
    zcu_stream stream;
    CHECK(driver->StreamCreate(&stream, ZCU_STREAM_NON_BLOCKING) == 0);
    return stream;
}

static void moment(void) { nanosleep(&(struct timespec){0, 50000}, NULL); }

static uint64_t dice(uint64_t sides) {
    luck = luck * 6364136223846793005u + 1442695040888963407u;
    return (luck >> 33) % sides;
}

static unsigned char byte_at(uint64_t seed, uint64_t i) { return (unsigned char)((i * 2654435761u >> 9) ^ (i + seed * 131)); }

static unsigned char *space(uint64_t n) {
    unsigned char *p = malloc(n);
    CHECK(p);
    return p;
}

/* The tensors of one end: parts at odd places of one allocation, with bytes between them that belong to nobody. */
struct tensors {
    zcu_ptr base;
    uint64_t bytes; /* of the allocation */
    struct zcx_ring_part parts[MAX_PARTS];
    uint32_t n;
};

static void cut(struct tensors *t, uint64_t nbytes, uint32_t n, int gaps) {
    uint64_t at = 3;
    memset(t, 0, sizeof *t);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = i + 1 == n ? nbytes : dice(nbytes + 1) / (dice(8) + 1);
        t->parts[t->n++] = (struct zcx_ring_part){gaps && dice(4) == 0 ? 0 : at, bytes};
        at += bytes + dice(40);
        nbytes -= bytes;
    }
    t->bytes = at + 5;
}

/* What the allocation holds when exactly the parts are filled. */
static unsigned char *image(const struct tensors *t, uint64_t seed) {
    unsigned char *bytes = space(t->bytes);
    uint64_t i = 0;
    memset(bytes, BLANK, t->bytes);
    for (uint32_t k = 0; k < t->n; k++)
        for (uint64_t j = 0; j < t->parts[k].bytes; j++, i++)
            if (t->parts[k].address) bytes[t->parts[k].address - t->base + j] = byte_at(seed, i);
    return bytes;
}

static void place(struct tensors *t, zcu_ptr base) {
    t->base = base;
    for (uint32_t k = 0; k < t->n; k++)
        if (t->parts[k].address) t->parts[k].address += base;
}

static void upload(const struct tensors *t, uint64_t seed, zcu_stream stream) {
    unsigned char *bytes = image(t, seed);
    CHECK(driver->MemcpyHtoDAsync(t->base, bytes, t->bytes, stream) == 0);
    free(bytes);
}

static int holds(const struct tensors *t, uint64_t seed, zcu_stream stream) {
    unsigned char *wanted = image(t, seed), *got = space(t->bytes);
    CHECK(driver->MemcpyDtoHAsync(got, t->base, t->bytes, stream) == 0);
    CHECK(driver->StreamSynchronize(stream) == 0);
    int same = memcmp(wanted, got, t->bytes) == 0;
    free(wanted);
    free(got);
    return same;
}

/* ---- the worker ---- */

struct hello { zcu_uuid uuid; struct zcx_export window; uint64_t shm_offset; };
struct word {
    struct zcx_ring_plan plan;
    uint32_t done_slot;
    uint64_t done, seed;
    int host, sending, check;
    int die_after;      /* so many operations of its stream; negative: it lives */
    int lie;            /* store nonsense in both counters */
    int refuse;         /* it could not map the window, say */
    char rule[64];      /* what fails while it queues */
};
struct answer { int rc, right; long injected; };

static void lie(const struct word *w, int gate_fd) {
    unsigned char *page = mmap(NULL, ZCX_GATE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, gate_fd, 0);
    uint64_t nonsense = UINT64_MAX / 2 - 5;
    CHECK(page != MAP_FAILED);
    memcpy(page + w->plan.filled_slot * ZCX_GATE_STRIDE, &nonsense, sizeof nonsense);
    memcpy(page + w->plan.emptied_slot * ZCX_GATE_STRIDE, &nonsense, sizeof nonsense);
    munmap(page, ZCX_GATE_BYTES);
}

static void die(zcu_stream stream, int after) {
    for (int i = 0; i < after; i++) CHECK(step(stream, 10000) == 1, "operation %d", i);
    kill(getpid(), SIGKILL);
}

static void worker(int sock) {
    struct zcx_gate *g;
    struct zcx_pool *pool;
    struct zcx_shm *shm;
    struct zcx_ring_pin pin = {0};
    struct zcx_err err;
    struct hello h;
    struct word w;
    zcu_ptr window;
    void *host;
    int cut_short = 0;
    int gate_fd = peer_recv(sock, &h, sizeof h), pool_fd = peer_recv(sock, &h, sizeof h), shm_fd = peer_recv(sock, &h, sizeof h);
    CHECK(zcx_gate_open(&g, gate_fd, NULL) == 0);
    controls();
    CHECK(zcx_gate_register(g, 0, NULL) == 0);
    CHECK(zcx_pool_import(&pool, pool_fd, &h.uuid, NULL) == 0 && zcx_pool_map(pool, &h.window, &window, NULL) == 0);
    close(pool_fd);
    CHECK(zcx_shm_take_fd(&shm, shm_fd, ZCX_SHM_RESULT, ZCX_RING_BYTES, NULL) == 0);
    CHECK(zcx_shm_map(shm, h.shm_offset, ZCX_RING_BYTES, &host, NULL) == 0);
    CHECK(zcx_ring_pin(&pin, 0, host, ZCX_RING_BYTES, NULL) == 0);
    zcu_stream stream = new_stream();
    while (peer_recv(sock, &w, sizeof w) == -1) {
        struct answer a = {0};
        struct tensors t;
        zcu_ptr base;
        cut(&t, w.plan.nbytes, 1, 0);
        CHECK(driver->MemAllocAsync(&base, t.bytes, stream) == 0);
        place(&t, base);
        if (w.sending) upload(&t, w.seed, stream);
        else CHECK(driver->MemsetD8Async(base, BLANK, t.bytes, stream) == 0);
        struct zcx_ring_end end = {.gate = g, .stream = stream, .window_is_host = w.host, .host_window = host, .device_window = window,
                                   .parts = t.parts, .nparts = t.n};
        if (w.die_after >= 0) {
            CHECK(driver->StreamSynchronize(stream) == 0);
            CHECK(hold(stream) == 0);
        }
        if (w.lie) lie(&w, gate_fd);
        fail_at(w.rule);
        a.rc = w.refuse ? -1 : zcx_ring_queue(&end, &w.plan, w.sending, &err);
        fail_at("");
        a.injected = injected();
        cut_short |= a.rc != 0;
        if (w.die_after >= 0) die(stream, w.die_after);
        CHECK(zcx_gate_post(g, 0, w.done_slot, w.done, stream, NULL) == 0);
        CHECK(driver->StreamSynchronize(stream) == 0);
        a.right = !w.check || w.sending || holds(&t, w.seed, stream);
        CHECK(driver->MemFreeAsync(base, stream) == 0);
        peer_send(sock, &a, sizeof a, -1);
    }
    CHECK(driver->StreamSynchronize(stream) == 0 && (zcx_gate_idle(g) == 1 || cut_short));
    CHECK(zcx_ring_unpin(&pin, NULL) == 0);
    CHECK(zcx_pool_unmap(pool, h.window.buffer_id, stream, NULL, NULL) == 0 && driver->StreamSynchronize(stream) == 0);
    zcx_pool_unref(pool);
    zcx_shm_unmap(host, ZCX_RING_BYTES);
    zcx_shm_unref(shm);
    zcx_gate_free(g);
    close(gate_fd);
    CHECK(simcuda_count("registered") == 0 || cut_short);
}

/* ---- the parent ---- */

static struct { int sending, host; } way; /* of the case: the parent's role, and the window's kind */

static struct {
    struct peer peer;
    struct zcx_gate *gate;
    struct zcx_pool *pool;
    zcu_ptr window;
    struct zcx_shm *shm;
    uint64_t shm_offset;
    struct zcx_ring_pin pin;
    zcu_stream streams[2];
    struct tensors tensors;
    long events_left; /* at most, in the end */
} here;

static void meet(void) {
    struct hello h;
    here.peer = peer_start(worker);
    CHECK(zcx_gate_new(&here.gate, NULL) == 0);
    controls();
    here.streams[0] = new_stream();
    here.streams[1] = new_stream();
    CHECK(zcx_pool_new(&here.pool, 0, NULL) == 0);
    CHECK(zcx_pool_alloc(here.pool, ZCX_RING_BYTES, here.streams[0], &here.window, NULL) == 0);
    CHECK(zcx_shm_result_new(&here.shm, ZCX_RING_BYTES, NULL) == 0);
    CHECK(zcx_shm_range_take(here.shm, ZCX_RING_BYTES, &here.shm_offset, NULL) == 0);
    CHECK(zcx_ring_pin(&here.pin, 0, zcx_shm_base(here.shm) + here.shm_offset, ZCX_RING_BYTES, NULL) == 0);
    CHECK(driver->StreamSynchronize(here.streams[0]) == 0, "the window is there");
    h.uuid = *zcx_pool_uuid(here.pool);
    h.shm_offset = here.shm_offset;
    CHECK(zcx_pool_export(here.pool, here.window, ZCX_RING_BYTES, ZCX_WINDOWS_NO, &h.window, NULL) == 0);
    peer_send(here.peer.sock, &h, sizeof h, zcx_gate_fd(here.gate));
    peer_send(here.peer.sock, &h, sizeof h, zcx_pool_fd(here.pool));
    peer_send(here.peer.sock, &h, sizeof h, zcx_shm_fd(here.shm));
    fail_at("cuStreamWaitValue64:1:999+,cuStreamWaitEvent:1:999+"); /* what no stream of the parent ever does */
}

/* Each of the 64 slots can be taken: at once, or when the last post was seen. */
static void all_slots_come_free(struct zcx_gate *g) {
    uint32_t taken[ZCX_GATE_SLOTS];
    for (int n = 0; n < ZCX_GATE_SLOTS; moment()) {
        for (n = 0; n < ZCX_GATE_SLOTS && zcx_gate_take(g, &taken[n], &taken[n + 1]) == 0; n += 2) {}
        for (int i = 0; i < n; i++) zcx_gate_put(g, taken[i]);
    }
}

static void part_company(int status) {
    CHECK(peer_end(&here.peer) == status);
    all_slots_come_free(here.gate);
    for (int i = 0; i < 2; i++) CHECK(driver->StreamSynchronize(here.streams[i]) == 0);
    CHECK(zcx_gate_idle(here.gate) == 1);
    zcx_gate_free(here.gate);
    CHECK(zcx_ring_unpin(&here.pin, NULL) == 0);
    zcx_shm_unref(here.shm);
    CHECK(zcx_pool_free(here.pool, here.window, here.streams[0], NULL) == 0);
    CHECK(driver->StreamSynchronize(here.streams[0]) == 0);
    zcx_pool_unref(here.pool);
    CHECK(simcuda_count("registered") == 0 && simcuda_count("events") <= here.events_left);
}

/* The parent's tensors, and the ring over them. */
static struct zcx_ring_end end_of(uint64_t nbytes, uint64_t seed, zcu_stream stream) {
    zcu_ptr base;
    cut(&here.tensors, nbytes, 1 + (uint32_t)dice(MAX_PARTS), !way.sending);
    CHECK(zcx_pool_alloc(here.pool, here.tensors.bytes, stream, &base, NULL) == 0);
    place(&here.tensors, base);
    if (way.sending) upload(&here.tensors, seed, stream);
    else CHECK(driver->MemsetD8Async(base, BLANK, here.tensors.bytes, stream) == 0);
    return (struct zcx_ring_end){.gate = here.gate, .stream = stream, .window_is_host = way.host,
                                 .host_window = here.pin.address, .device_window = here.window, .parts = here.tensors.parts,
                                 .nparts = here.tensors.n};
}

/* DONE of the call: two slots are taken, of which one is used. */
static uint32_t spare_slot;
static struct word begin(struct zcx_ring *r, uint64_t seed) {
    struct word w = {.plan = r->plan, .seed = seed, .host = way.host, .sending = !way.sending, .die_after = -1};
    CHECK(zcx_gate_take(here.gate, &spare_slot, &w.done_slot) == 0);
    w.done = zcx_gate_next(here.gate, w.done_slot);
    return w;
}

static int is_done(const struct word *w) { return zcx_gate_reached(here.gate, 0, w->done_slot, w->done, NULL); }

static void ask(const struct word *w) { peer_send(here.peer.sock, w, sizeof *w, -1); }

static void until_ended(struct zcx_ring *r) {
    int rc;
    while ((rc = zcx_ring_end_transfer(r, NULL)) == 1) moment();
    CHECK(rc == 0);
}

/* What the worker says of it, after DONE. */
static struct answer finish(const struct word *w) {
    struct answer a;
    CHECK(peer_recv(here.peer.sock, &a, sizeof a) == -1, "the worker is gone");
    CHECK(is_done(w));
    zcx_gate_put(here.gate, spare_slot);
    zcx_gate_put(here.gate, w->done_slot);
    return a;
}

static struct answer conclude(struct zcx_ring *r, const struct word *w) {
    until_ended(r);
    return finish(w);
}

static void free_tensors(int stream) {
    CHECK(zcx_pool_free(here.pool, here.tensors.base, here.streams[stream], NULL) == 0);
}

/* A whole transfer, checked on the side that received. The tensors are looked at on another stream than the one that copied. */
static void cross(uint64_t nbytes) {
    static uint64_t seed;
    int other = (int)(++seed % 2);
    struct zcx_ring_end end = end_of(nbytes, seed, here.streams[!other]);
    struct zcx_ring r;
    struct zcx_err err;
    int rc = 0;
    CHECK(zcx_ring_start(&r, &end, nbytes, way.sending, &err) == 0, "%s", err.text);
    struct word w = begin(&r, seed);
    w.check = 1;
    ask(&w);
    while (!rc || !is_done(&w)) {
        rc = zcx_ring_step(&r, &err);
        CHECK(rc >= 0, "%s", err.text);
        if (!rc) moment();
    }
    struct answer a = conclude(&r, &w);
    CHECK(a.rc == 0 && a.right);
    if (!way.sending) CHECK(holds(&here.tensors, seed, here.streams[other]), "%d bytes", (int)nbytes);
    free_tensors(!other);
}

/* What is done four times: both directions, through device memory and through host memory. */
static void all_ways(void (*body)(void)) {
    for (int i = 0; i < 4; i++) {
        way.sending = i & 1;
        way.host = i >> 1;
        CHECK(case_fork(body) == 0, "%s through %s memory", way.sending ? "sending" : "receiving", way.host ? "host" : "device");
    }
}
#define WAYS(name)                                                             \
    static void name##_here(void);                                             \
    static void name(void) { all_ways(name##_here); }                          \
    static void name##_here(void)

/* ---- whole transfers ---- */

static const char *order_seed, *order_delay;

static void every_size(void) {
    setenv("SIMCUDA_SEED", order_seed, 1);
    setenv("SIMCUDA_DELAY_US", order_delay, 1);
    luck = strtoull(order_seed, NULL, 10);
    meet();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) cross(sizes[i]);
    part_company(0);
}

static void every_size_crosses(void) {
    static const char *const orders[][2] = {{"1", "0"}, {"2", "20"}, {"3", "300"}};
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        order_seed = orders[i][0];
        order_delay = orders[i][1];
        all_ways(every_size);
    }
}

/* More transfers than there are slots, so that each is used again. */
WAYS(slots_go_round) {
    meet();
    for (int i = 0; i < ZCX_GATE_SLOTS + 8; i++) cross(1 + dice(3 * SLOT));
    part_company(0);
}

/* ---- order, step by step: both ends in one process, where each stream can be held ---- */

static struct zcx_ring_end one_part(struct zcx_gate *g, zcu_stream stream, zcu_ptr window, struct zcx_ring_part *part) {
    return (struct zcx_ring_end){.gate = g, .stream = stream, .device_window = window, .parts = part, .nparts = 1};
}

static struct { struct zcx_gate *g, *w; zcu_stream ours, theirs; zcu_ptr window; struct zcx_ring_part a, b; } both;

static void both_ends(void) {
    controls();
    CHECK(zcx_gate_new(&both.g, NULL) == 0 && zcx_gate_open(&both.w, zcx_gate_fd(both.g), NULL) == 0);
    both.ours = new_stream();
    both.theirs = new_stream();
    both.a.bytes = both.b.bytes = MANY;
    CHECK(driver->MemAllocAsync(&both.window, ZCX_RING_BYTES, both.ours) == 0);
    CHECK(driver->MemAllocAsync(&both.a.address, MANY, both.ours) == 0);
    CHECK(driver->MemAllocAsync(&both.b.address, MANY, both.ours) == 0);
    CHECK(driver->MemsetD8Async(both.a.address, 7, MANY, both.ours) == 0);
    CHECK(driver->StreamSynchronize(both.ours) == 0);
}

static void both_gone(void) {
    all_slots_come_free(both.g);
    CHECK(driver->StreamSynchronize(both.theirs) == 0 && zcx_gate_idle(both.w) == 1 && zcx_gate_idle(both.g) == 1);
    zcx_gate_free(both.w);
    zcx_gate_free(both.g);
}

static int until_stepped(struct zcx_ring *r, uint64_t queued) {
    int rc = 0;
    while (!rc && r->queued < queued) {
        rc = zcx_ring_step(r, NULL);
        CHECK(rc >= 0);
        if (!rc) moment();
    }
    return rc;
}

CASE(a_sending_parent_waits_for_each_slot) {
    struct zcx_ring r;
    both_ends();
    struct zcx_ring_end ours = one_part(both.g, both.ours, both.window, &both.a), theirs = one_part(both.w, both.theirs, both.window, &both.b);
    CHECK(zcx_ring_start(&r, &ours, MANY, 1, NULL) == 0);
    CHECK(hold(both.theirs) == 0);
    CHECK(zcx_ring_queue(&theirs, &r.plan, 0, NULL) == 0 && pending(both.theirs) == 3 * MANY_PIECES, "all at once");
    CHECK(zcx_ring_step(&r, NULL) == 0 && r.queued == ZCX_RING_DEPTH && zcx_ring_step(&r, NULL) == 0 && r.queued == ZCX_RING_DEPTH);
    CHECK(driver->StreamSynchronize(both.ours) == 0, "it is not the stream that waits");
    for (uint64_t k = 0; k < MANY_PIECES - ZCX_RING_DEPTH; k++) {
        CHECK(step(both.theirs, 10000) == 1 && step(both.theirs, 10000) == 1);
        CHECK(zcx_ring_step(&r, NULL) == 0 && r.queued == ZCX_RING_DEPTH + k, "copied out, but not posted");
        CHECK(step(both.theirs, 10000) == 1);
        CHECK(zcx_ring_step(&r, NULL) == (k + 1 == MANY_PIECES - ZCX_RING_DEPTH) && r.queued == ZCX_RING_DEPTH + k + 1);
    }
    CHECK(zcx_ring_step(&r, NULL) == 1);
    CHECK(release(both.theirs) == 0 && driver->StreamSynchronize(both.theirs) == 0);
    until_ended(&r);
    both_gone();
}

CASE(a_receiving_parent_waits_for_each_piece) {
    struct zcx_ring r;
    both_ends();
    struct zcx_ring_end ours = one_part(both.g, both.ours, both.window, &both.b), theirs = one_part(both.w, both.theirs, both.window, &both.a);
    CHECK(zcx_ring_start(&r, &ours, MANY, 0, NULL) == 0);
    CHECK(hold(both.theirs) == 0);
    CHECK(zcx_ring_queue(&theirs, &r.plan, 1, NULL) == 0 && pending(both.theirs) == 3 * MANY_PIECES - ZCX_RING_DEPTH);
    for (uint64_t k = 0; k < MANY_PIECES; k++) {
        if (k >= ZCX_RING_DEPTH) CHECK(step(both.theirs, 10000) == 1);
        CHECK(step(both.theirs, 10000) == 1);
        CHECK(zcx_ring_step(&r, NULL) == 0 && r.queued == k, "copied in, but not posted");
        CHECK(step(both.theirs, 10000) == 1);
        CHECK(zcx_ring_step(&r, NULL) == (k + 1 == MANY_PIECES) && r.queued == k + 1);
    }
    CHECK(pending(both.theirs) == 0);
    until_ended(&r);
    both_gone();
}

/* All was queued and DONE was seen, but what we copy out of the window is not out yet. */
CASE(the_window_is_free_when_our_copies_are_complete) {
    struct zcx_ring r;
    struct zcx_err err;
    both_ends();
    struct zcx_ring_end ours = one_part(both.g, both.ours, both.window, &both.b), theirs = one_part(both.w, both.theirs, both.window, &both.a);
    both.a.bytes = both.b.bytes = SLOT;
    CHECK(zcx_ring_start(&r, &ours, SLOT, 0, NULL) == 0);
    CHECK(zcx_ring_queue(&theirs, &r.plan, 1, NULL) == 0 && driver->StreamSynchronize(both.theirs) == 0);
    CHECK(hold(both.ours) == 0 && zcx_ring_step(&r, NULL) == 1);
    CHECK(zcx_ring_end_transfer(&r, &err) == 1 && zcx_ring_end_transfer(&r, &err) == 1);
    CHECK(driver->MemsetD8Async(both.a.address, 1, 1, both.ours) == 0, "what comes later on the stream …");
    CHECK(step(both.ours, 10000) == 1 && zcx_ring_end_transfer(&r, &err) == 1);
    CHECK(step(both.ours, 10000) == 1 && step(both.ours, 10000) == 1 && pending(both.ours) == 1);
    CHECK(zcx_ring_end_transfer(&r, &err) == 0, "… is not waited for");
    CHECK(release(both.ours) == 0 && driver->StreamSynchronize(both.ours) == 0);
    both_gone();
}

/* Given up with posts of ours still to come: the last value from the CPU may not be there before them. */
static void given_up_meanwhile(int sending) {
    struct zcx_ring r;
    both_ends();
    struct zcx_ring_end ours = one_part(both.g, both.ours, both.window, sending ? &both.a : &both.b);
    struct zcx_ring_end theirs = one_part(both.w, both.theirs, both.window, sending ? &both.b : &both.a);
    CHECK(zcx_ring_start(&r, &ours, MANY, sending, NULL) == 0);
    CHECK(zcx_ring_queue(&theirs, &r.plan, !sending, NULL) == 0);
    uint32_t own = sending ? r.plan.filled_slot : r.plan.emptied_slot;
    uint64_t last = (sending ? r.plan.filled : r.plan.emptied) + (MANY_PIECES - 1) * ZCX_GATE_STEP;
    CHECK(hold(both.ours) == 0);
    until_stepped(&r, 2);
    zcx_ring_give_up(&r);
    zcx_ring_give_up(&r);
    for (int i = 0; i < 4; i++) {
        CHECK(zcx_ring_step(&r, NULL) == 0 && r.queued == 2 && zcx_gate_reached(both.g, 0, own, last, NULL) == 0);
        CHECK(pending(both.theirs) > 0, "it waits");
        CHECK(step(both.ours, 10000) == 1);
    }
    CHECK(pending(both.ours) == 1 && zcx_ring_step(&r, NULL) == 0, "the event is ours too");
    CHECK(step(both.ours, 10000) == 1 && zcx_ring_step(&r, NULL) == 1 && zcx_gate_reached(both.g, 0, own, last, NULL) == 1);
    CHECK(driver->StreamSynchronize(both.theirs) == 0, "it runs through");
    CHECK(zcx_gate_reached(both.g, 0, own, last, NULL) == 1 && zcx_ring_step(&r, NULL) == 1);
    until_ended(&r);
    CHECK(release(both.ours) == 0);
    both_gone();
}
CASE(given_up_while_sending) { given_up_meanwhile(1); }
CASE(given_up_while_receiving) { given_up_meanwhile(0); }

/* ---- cut short by the parent ---- */

/* A transfer that the parent gives up once `pieces` were queued. The worker lives: it comes through to DONE. */
static void give_up_after(uint64_t pieces) {
    struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
    struct zcx_ring r;
    int rc = 0;
    CHECK(zcx_ring_start(&r, &end, MANY, way.sending, NULL) == 0);
    struct word w = begin(&r, 9);
    ask(&w);
    until_stepped(&r, pieces);
    int whole = r.queued == MANY_PIECES;
    zcx_ring_give_up(&r);
    CHECK(r.given_up == !whole, "when all is queued there is nothing to give up");
    while (!rc || !is_done(&w)) {
        rc = zcx_ring_step(&r, NULL);
        CHECK(rc >= 0);
        moment();
    }
    CHECK(conclude(&r, &w).rc == 0);
    free_tensors(0);
}

WAYS(the_parent_gives_up_at_every_piece) {
    meet();
    for (uint64_t pieces = 0; pieces <= MANY_PIECES; pieces++) {
        give_up_after(pieces);
        cross(MANY);
    }
    part_company(0);
}

/* Nobody was told. What was queued already is still seen through. */
WAYS(nobody_was_told) {
    meet();
    for (int stepped = 0; stepped < 2; stepped++) {
        struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
        struct zcx_ring r;
        CHECK(zcx_ring_start(&r, &end, MANY, way.sending, NULL) == 0);
        if (stepped) CHECK(zcx_ring_step(&r, NULL) == 0 && r.queued == (way.sending ? ZCX_RING_DEPTH : 0));
        until_ended(&r);
        free_tensors(0);
        all_slots_come_free(here.gate);
    }
    cross(MANY);
    part_company(0);
}

/* A transfer during which the parent's driver fails as `rule` says: what came of it. */
static int disturbed(const char *rule, int for_ever) {
    struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
    struct zcx_ring r = {.queued = 77};
    struct zcx_err err = {0};
    int rc, failed = 0;
    fail_at(rule);
    rc = zcx_ring_start(&r, &end, MANY, way.sending, &err);
    if (rc) {
        fail_at("");
        CHECK(rc == -ZCX_E_CUDA && err.cuda == 999 && r.queued == 77 && !for_ever, "%s", err.text);
        free_tensors(0);
        return 1;
    }
    struct word w = begin(&r, 9);
    ask(&w);
    for (rc = 0; !rc || !is_done(&w); moment()) {
        rc = zcx_ring_step(&r, &err);
        if (rc >= 0) continue;
        CHECK(rc == -ZCX_E_CUDA && err.cuda == 999 && !failed, "%s", err.text);
        failed = 1;
    }
    if (for_ever) CHECK(zcx_ring_end_transfer(&r, &err) == -ZCX_E_CUDA && err.cuda == 999);
    while ((rc = zcx_ring_end_transfer(&r, &err)) == 1) moment();
    fail_at("");
    failed |= rc < 0;
    CHECK(!for_ever || rc < 0, "nothing is lost by asking");
    if (rc) until_ended(&r);
    finish(&w);
    free_tensors(0);
    return failed;
}

/* The Nth use of one call fails, for each N; "*": of any. The number of failed transfers. */
static int each_use_fails(const char *call) {
    char rule[64];
    int n = 0, failures = 0;
    long hit;
    do {
        long before = injected();
        snprintf(rule, sizeof rule, "%s:%d:999", call, ++n);
        failures += disturbed(rule, 0);
        hit = injected() - before;
        cross(SLOT + 1);
    } while (hit && n < 300);
    CHECK(n < 300);
    return failures;
}

WAYS(the_parents_driver_fails_at_every_call) {
    meet();
    cross(MANY);
    CHECK(each_use_fails("cuEventCreate") == 1 && each_use_fails("cuEventQuery") >= 1);
    CHECK(each_use_fails("cuEventRecord") == 0, "it is tried again");
    CHECK(each_use_fails("cuStreamWriteValue64") == MANY_PIECES);
    CHECK(each_use_fails(!way.host ? "cuMemcpyDtoDAsync" : way.sending ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync") >= MANY_PIECES / 2);
    CHECK(each_use_fails("cuCtxGetCurrent") > MANY_PIECES);
    CHECK(simcuda_count("events") == 0);
    CHECK(each_use_fails("*") > 3 * MANY_PIECES);
    here.events_left = LONG_MAX; /* of each whose destruction was what failed, one */
    part_company(0);
}

/* From some call on nothing of the driver works any more, but what was queued is still carried out, late, as after a failure
 * that is not the context's. The worker comes through all the same. Host memory: that somebody reads what is still being written
 * is how it has to be here. */
static void nothing_works(void) {
    static const int at[] = {9, 15, 21, 27, 40};
    char rule[64];
    way.host = 1;
    meet();
    cross(MANY);
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        snprintf(rule, sizeof rule, "*:%d:999+", at[i]);
        disturbed(rule, 1);
        cross(MANY);
    }
    part_company(0);
}
CASE(nothing_works_any_more_while_sending) {
    way.sending = 1;
    nothing_works();
}
CASE(nothing_works_any_more_while_receiving) {
    way.sending = 0;
    nothing_works();
}

/* ---- cut short by the worker ---- */

/* Steps until DONE; true when that was the whole transfer. */
static int step_until_done(struct zcx_ring *r, const struct word *w) {
    while (!is_done(w)) {
        CHECK(zcx_ring_step(r, NULL) >= 0);
        moment();
    }
    return r->queued == MANY_PIECES;
}

WAYS(the_workers_driver_fails_at_every_call) {
    int n = 0, failures = 0, short_ones = 0, rc;
    long before = 0;
    meet();
    do {
        struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
        struct zcx_ring r;
        CHECK(zcx_ring_start(&r, &end, MANY, way.sending, NULL) == 0);
        struct word w = begin(&r, 9);
        snprintf(w.rule, sizeof w.rule, "*:%d:999", ++n);
        ask(&w);
        short_ones += !step_until_done(&r, &w);
        struct answer a = conclude(&r, &w);
        rc = a.rc;
        int hit = a.injected != before;
        CHECK(rc == 0 || (rc == -ZCX_E_CUDA && hit), "call %d", n);
        failures += rc != 0;
        before = a.injected;
        free_tensors(0);
        cross(SLOT + 1);
        if (!hit) break;
    } while (n < 300);
    CHECK(rc == 0 && n < 300 && failures > 3 * MANY_PIECES && short_ones > MANY_PIECES, "%d %d %d", n, failures, short_ones);
    part_company(0);
}

WAYS(the_worker_refuses) {
    meet();
    struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
    struct zcx_ring r;
    CHECK(zcx_ring_start(&r, &end, MANY, way.sending, NULL) == 0);
    struct word w = begin(&r, 9);
    w.refuse = 1;
    ask(&w);
    CHECK(!step_until_done(&r, &w) && conclude(&r, &w).rc == -1);
    free_tensors(0);
    cross(MANY);
    part_company(0);
}

static int die_after;
static void killed(void) {
    if (way.host && die_after % 3) return; /* through host memory at every piece only */
    meet();
    cross(SLOT + 1);
    struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
    struct zcx_ring r;
    struct pollfd gone = {.fd = here.peer.sock, .events = POLLIN}; /* the other end is closed after the driver's descriptors */
    CHECK(zcx_ring_start(&r, &end, MANY, way.sending, NULL) == 0);
    struct word w = begin(&r, 9);
    w.die_after = die_after;
    ask(&w);
    while (poll(&gone, 1, 0) == 0) {
        CHECK(zcx_ring_step(&r, NULL) >= 0);
        moment();
    }
    CHECK(peer_end(&here.peer) == 128 + SIGKILL);
    CHECK(is_done(&w) == 0);
    until_ended(&r);
    zcx_gate_post_cpu(here.gate, w.done_slot, w.done);
    zcx_gate_put(here.gate, spare_slot);
    zcx_gate_put(here.gate, w.done_slot);
    all_slots_come_free(here.gate);
    for (int i = 0; i < 2; i++) CHECK(driver->StreamSynchronize(here.streams[i]) == 0, "no stream of ours hangs on it");
    CHECK(zcx_gate_idle(here.gate) == 1);
    zcx_gate_free(here.gate);
    CHECK(zcx_ring_unpin(&here.pin, NULL) == 0);
    zcx_shm_unref(here.shm);
    free_tensors(0);
    CHECK(zcx_pool_free(here.pool, here.window, here.streams[0], NULL) == 0);
    CHECK(driver->StreamSynchronize(here.streams[0]) == 0);
    zcx_pool_unref(here.pool);
}

static void the_worker_is_killed_at_every_operation(void) {
    for (die_after = 0; die_after <= 3 * MANY_PIECES - (int)ZCX_RING_DEPTH; die_after++) all_ways(killed);
}

/* ---- a lying worker ---- */

static void lied_to(void) {
    way.host = 1; /* the simulated driver would call what comes of it a race */
    meet();
    cross(MANY);
    struct zcx_ring_end end = end_of(MANY, 9, here.streams[0]);
    struct zcx_ring r;
    CHECK(zcx_ring_start(&r, &end, MANY, way.sending, NULL) == 0);
    struct word w = begin(&r, 9);
    w.lie = 1;
    ask(&w);
    step_until_done(&r, &w);
    conclude(&r, &w);
    if (!way.sending) { /* what came is wrong perhaps, but it is where it belongs */
        unsigned char *bytes = space(here.tensors.bytes);
        struct tensors none = here.tensors;
        none.n = 0;
        unsigned char *outside = image(&none, 9);
        /* On the stream that copied: after a lie the parent's CPU may have waited for none of its work. */
        CHECK(driver->MemcpyDtoHAsync(bytes, here.tensors.base, here.tensors.bytes, here.streams[0]) == 0);
        CHECK(driver->StreamSynchronize(here.streams[0]) == 0);
        for (uint32_t k = 0; k < here.tensors.n; k++)
            if (here.tensors.parts[k].address)
                memcpy(bytes + (here.tensors.parts[k].address - here.tensors.base), outside, here.tensors.parts[k].bytes);
        CHECK(memcmp(bytes, outside, here.tensors.bytes) == 0);
        free(bytes);
        free(outside);
    }
    free_tensors(0);
    CHECK(peer_end(&here.peer) == 0);
    CHECK(driver->StreamSynchronize(here.streams[0]) == 0);
    CHECK(zcx_ring_unpin(&here.pin, NULL) == 0);
    zcx_gate_free(here.gate);
    zcx_shm_unref(here.shm);
}
CASE(a_worker_lies_while_we_send) {
    way.sending = 1;
    lied_to();
}
CASE(a_worker_lies_while_we_receive) {
    way.sending = 0;
    lied_to();
}

/* ---- what is refused ---- */

CASE(arguments) {
    struct zcx_ring_part part = {4096, 100};
    struct zcx_ring r = {.queued = 77};
    struct zcx_err err;
    struct zcx_ring_plan plan = {.nbytes = 100, .filled_slot = 1, .emptied_slot = 2, .filled = ZCX_GATE_STEP, .emptied = ZCX_GATE_STEP};
    uint32_t slots[ZCX_GATE_SLOTS];
    CHECK(zcx_ring_pieces(0) == 0 && zcx_ring_pieces(1) == 1 && zcx_ring_pieces(SLOT) == 1 && zcx_ring_pieces(SLOT + 1) == 2);
    CHECK(zcx_ring_pieces(UINT64_MAX) == UINT64_MAX / SLOT + 1);
    both_ends();
    struct zcx_ring_end end = one_part(both.g, both.ours, both.window, &part);
    CHECK(zcx_ring_start(&r, &end, 0, 1, &err) == -ZCX_E_RANGE);
    CHECK(zcx_ring_start(&r, &end, 99, 1, &err) == -ZCX_E_RANGE && strstr(err.text, "more than 99"), "%s", err.text);
    CHECK(zcx_ring_start(&r, &end, 101, 1, &err) == -ZCX_E_RANGE && strstr(err.text, "1 bytes less than 101"), "%s", err.text);
    part.bytes = UINT64_MAX;
    CHECK(zcx_ring_start(&r, &end, UINT64_MAX, 1, &err) == -ZCX_E_RANGE, "more pieces than a slot has numbers");
    part.bytes = 100;
    end.ordinal = 1;
    CHECK(zcx_ring_start(&r, &end, 100, 1, &err) == -ZCX_E_RANGE);
    end.ordinal = 0;
    for (int i = 0; i < ZCX_GATE_SLOTS; i += 2) CHECK(zcx_gate_take(both.g, &slots[i], &slots[i + 1]) == 0);
    CHECK(zcx_ring_start(&r, &end, 100, 1, &err) == 1 && r.queued == 77 && simcuda_count("events") == 0);
    for (int i = 0; i < ZCX_GATE_SLOTS; i++) zcx_gate_put(both.g, slots[i]);
    end.gate = both.w;
    plan.nbytes = 0;
    CHECK(zcx_ring_queue(&end, &plan, 1, &err) == -ZCX_E_PROTOCOL);
    plan.nbytes = UINT64_MAX;
    CHECK(zcx_ring_queue(&end, &plan, 1, &err) == -ZCX_E_PROTOCOL);
    plan.nbytes = 99;
    CHECK(zcx_ring_queue(&end, &plan, 1, &err) == -ZCX_E_RANGE);
    plan.nbytes = 100;
    plan.emptied_slot = 1;
    CHECK(zcx_ring_queue(&end, &plan, 1, &err) == -ZCX_E_PROTOCOL);
    plan.filled_slot = ZCX_GATE_SLOTS;
    CHECK(zcx_ring_queue(&end, &plan, 0, &err) == -ZCX_E_RANGE && pending(both.ours) == 0);
    both_gone();
}

CASE(events_are_no_counters) {
    struct zcx_ring_part part = {4096, 100};
    struct zcx_ring r = {.queued = 77};
    struct zcx_err err;
    setenv("SIMCUDA_HIDE", "cuStreamWaitValue64", 1);
    both_ends();
    struct zcx_ring_end end = one_part(both.g, both.ours, both.window, &part);
    CHECK(zcx_ring_start(&r, &end, 100, 1, &err) == -ZCX_E_UNFIT && r.queued == 77 && simcuda_count("events") == 0, "%s", err.text);
    zcx_gate_free(both.w);
    zcx_gate_free(both.g);
}

/* ---- the host window ---- */

CASE(a_pin_is_one_registration) {
    struct zcx_ring_pin pin = {0}, other = {0};
    struct zcx_err err;
    void *memory = NULL;
    char rule[64];
    int n = 0, rc;
    CHECK(zcx_ring_unpin(&pin, &err) == 0 && !zcx_driver_opened(), "there is nothing to let go of");
    controls();
    memory = mmap(NULL, ZCX_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    do {
        snprintf(rule, sizeof rule, "*:%d:999", ++n);
        fail_at(rule);
        rc = zcx_ring_pin(&pin, 0, memory, ZCX_RING_BYTES, &err);
        fail_at("");
        CHECK(!rc == (simcuda_count("registered") == 1) && (!rc || (rc == -ZCX_E_CUDA && !pin.address)));
    } while (rc && n < 20);
    CHECK(rc == 0 && n > 1);
    CHECK(zcx_ring_pin(&pin, 0, memory, ZCX_RING_BYTES, &err) == 0 && simcuda_count("registered") == 1);
    CHECK(zcx_ring_pin(&other, 0, memory, ZCX_RING_BYTES, &err) == -ZCX_E_CUDA && zcx_ring_unpin(&other, &err) == 0);
    CHECK(zcx_ring_pin(&other, 99, memory, ZCX_RING_BYTES, &err) < 0);
    fail_at("cuMemHostUnregister:1:999");
    CHECK(zcx_ring_unpin(&pin, &err) == -ZCX_E_CUDA && pin.address == memory && simcuda_count("registered") == 1);
    CHECK(zcx_ring_unpin(&pin, &err) == 0 && simcuda_count("registered") == 0);
    CHECK(zcx_ring_unpin(&pin, &err) == 0);
    CHECK(munmap(memory, ZCX_RING_BYTES) == 0);
}

/* ---- a capture in another thread ---- */

static struct { zcu_result (*begin)(zcu_stream, int), (*end)(zcu_stream, void **); int begun[2], finish[2]; } capture;

static void *capture_meanwhile(void *unused) {
    struct zcx_scope s;
    void *graph;
    char c = 0;
    (void)unused;
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    zcu_stream stream = new_stream();
    CHECK(capture.begin(stream, 0) == 0);
    CHECK(write(capture.begun[1], &c, 1) == 1 && read(capture.finish[0], &c, 1) == 1);
    int r = capture.end(stream, &graph);
    zcx_scope_close(&s);
    return (void *)(intptr_t)r;
}

WAYS(a_capture_elsewhere_survives) {
    struct zcx_ring r;
    struct zcx_ring_pin pin = {0};
    pthread_t thread;
    void *result;
    char c = 0;
    both_ends();
    unsigned char *memory = mmap(NULL, ZCX_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    capture.begin = library_symbol("cuStreamBeginCapture_v2");
    capture.end = library_symbol("cuStreamEndCapture");
    CHECK(pipe(capture.begun) == 0 && pipe(capture.finish) == 0);
    CHECK(pthread_create(&thread, NULL, capture_meanwhile, NULL) == 0);
    CHECK(read(capture.begun[0], &c, 1) == 1);
    CHECK(zcx_ring_pin(&pin, 0, memory, ZCX_RING_BYTES, NULL) == 0);
    struct zcx_ring_end ours = one_part(both.g, both.ours, both.window, way.sending ? &both.a : &both.b);
    struct zcx_ring_end theirs = one_part(both.w, both.theirs, both.window, way.sending ? &both.b : &both.a);
    ours.window_is_host = theirs.window_is_host = way.host;
    ours.host_window = theirs.host_window = memory;
    CHECK(zcx_ring_start(&r, &ours, MANY, way.sending, NULL) == 0);
    CHECK(zcx_ring_queue(&theirs, &r.plan, !way.sending, NULL) == 0);
    CHECK(until_stepped(&r, MANY_PIECES) == 1);
    while (pending(both.theirs)) moment();
    until_ended(&r);
    CHECK(zcx_ring_unpin(&pin, NULL) == 0);
    CHECK(write(capture.finish[1], &c, 1) == 1);
    CHECK(pthread_join(thread, &result) == 0 && result == NULL, "the capture died: %ld", (long)(intptr_t)result);
    both_gone();
}

/* The simulated driver remembers so many counters in a session, and no more. */
#define IN_SESSION(test)                                                       \
    do {                                                                       \
        strcpy(case_folder, "/tmp/zcx-cases-XXXXXX");                          \
        simcuda_share();                                                       \
        RUN(test);                                                             \
        simcuda_unshare();                                                     \
    } while (0)

int main(void) {
    IN_SESSION(every_size_crosses);
    IN_SESSION(slots_go_round);
    IN_SESSION(the_parent_gives_up_at_every_piece);
    IN_SESSION(nobody_was_told);
    IN_SESSION(the_parents_driver_fails_at_every_call);
    IN_SESSION(the_workers_driver_fails_at_every_call);
    IN_SESSION(the_worker_refuses);
    IN_SESSION(the_worker_is_killed_at_every_operation);
    IN_SESSION(a_capture_elsewhere_survives);
    IN_SESSION(a_sending_parent_waits_for_each_slot);
    IN_SESSION(a_receiving_parent_waits_for_each_piece);
    IN_SESSION(the_window_is_free_when_our_copies_are_complete);
    IN_SESSION(given_up_while_sending);
    IN_SESSION(given_up_while_receiving);
    IN_SESSION(nothing_works_any_more_while_sending);
    IN_SESSION(nothing_works_any_more_while_receiving);
    IN_SESSION(a_worker_lies_while_we_send);
    IN_SESSION(a_worker_lies_while_we_receive);
    IN_SESSION(arguments);
    IN_SESSION(events_are_no_counters);
    IN_SESSION(a_pin_is_one_registration);
    return 0;
}
