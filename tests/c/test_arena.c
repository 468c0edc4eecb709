/* test_arena.c: memory that is given out in blocks, reused when the GPU is done with it, and really goes back; and its import. */
// sources: csrc/arena.c csrc/driver.c csrc/err.c
// needs: simcuda
// also: thread
#include "arena.h"
#include "cases.h"

#include <fcntl.h>
#include <pthread.h>
#include <time.h>

#define MIB (1ull << 20)
#define SLAB (64 * MIB)

static struct zcx_arena *arena_on(int ordinal) {
    struct zcx_arena *a = NULL;
    struct zcx_err err = {0};
    CHECK(zcx_arena_new(&a, ordinal, &err) == 0, "%s %s", err.call ? err.call : "", err.text);
    return a;
}

static struct zcx_block *take(struct zcx_arena *a, uint64_t nbytes, enum zcx_arena_use use) {
    struct zcx_block *b = NULL;
    struct zcx_err err = {0};
    CHECK(zcx_arena_take(a, nbytes, use, &b, &err) == 0, "%s %s", err.call ? err.call : "", err.text);
    CHECK(zcx_block_bytes(b) == nbytes && zcx_block_address(b) % 512 == 0);
    return b;
}

static uint64_t trim(struct zcx_arena *a, int all, int pending) {
    uint64_t freed = 1;
    CHECK(zcx_arena_trim(a, all, &freed) == pending);
    return freed;
}

static struct zcx_arena_usage usage(struct zcx_arena *a) {
    struct zcx_arena_usage u;
    zcx_arena_usage(a, &u);
    CHECK(u.taken + u.pending + u.idle == u.mapped);
    return u;
}

static zcu_stream stream_on(int ordinal) {
    struct zcx_scope s;
    zcu_stream stream;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    CHECK(s.d->StreamCreate(&stream, ZCU_STREAM_NON_BLOCKING) == 0);
    zcx_scope_close(&s);
    return stream;
}

static int fill(int ordinal, zcu_stream stream, zcu_ptr p, unsigned char byte, uint64_t n) {
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    int r = s.d->MemsetD8Async(p, byte, n, stream);
    zcx_scope_close(&s);
    return r;
}

static int synchronize(int ordinal, zcu_stream stream) {
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    int r = s.d->StreamSynchronize(stream);
    zcx_scope_close(&s);
    return r;
}

static unsigned char byte_at(int ordinal, zcu_ptr p, zcu_stream stream) {
    struct zcx_scope s;
    unsigned char byte = 0;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    int r = s.d->MemcpyDtoHAsync(&byte, p, 1, stream);
    if (!r) r = s.d->StreamSynchronize(stream);
    CHECK(r == 0, "%s", zcx_driver_error_name(r));
    zcx_scope_close(&s);
    return byte;
}

static uint64_t free_on(int ordinal) {
    struct zcx_scope s;
    size_t free_bytes, total;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    CHECK(s.d->MemGetInfo(&free_bytes, &total) == 0);
    zcx_scope_close(&s);
    return free_bytes;
}

/* Put, and come back when it came free: nothing else uses the GPU. */
static void put_and_settle(struct zcx_arena *a, struct zcx_block *b) {
    zcx_block_put(b);
    for (int i = 0; i < 10000 && usage(a).pending; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        zcx_arena_trim(a, 0, NULL);
    }
    CHECK(usage(a).pending == 0);
}

static void (*fail_at)(const char *);

static int control(const char *what, zcu_stream stream) {
    int (*function)(zcu_stream) = library_symbol(what);
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    int r = function(stream);
    zcx_scope_close(&s);
    return r;
}

static int let_go(zcu_stream stream) { return control("simcuda_release", stream); }

static zcu_stream held_stream(void) {
    zcu_stream stream = stream_on(0);
    CHECK(control("simcuda_hold", stream) == 0);
    return stream;
}

static void nothing_left(void) {
    CHECK(simcuda_count("handles") == 0 && simcuda_count("mappings") == 0 && simcuda_count("reservations") == 0,
          "%ld handles, %ld mappings, %ld reservations", simcuda_count("handles"), simcuda_count("mappings"),
          simcuda_count("reservations"));
}

/* ---- where there is none ---- */

static void unfit(const char *words) {
    struct zcx_arena *a = (void *)1;
    struct zcx_vmm *v = (void *)1;
    struct zcx_err err = {0};
    CHECK(zcx_arena_new(&a, 0, &err) == -ZCX_E_UNFIT && strstr(err.text, words), "%s", err.text);
    CHECK(zcx_vmm_new(&v, 0, 2 * MIB, 1, 0, &err) == -ZCX_E_UNFIT && strstr(err.text, words), "%s", err.text);
    CHECK(zcx_arena_new(&a, -1, &err) == -ZCX_E_RANGE && zcx_arena_new(&a, 1, &err) < 0, "there is one device");
    CHECK(zcx_vmm_new(&v, -1, 2 * MIB, 1, 0, &err) == -ZCX_E_RANGE && zcx_vmm_new(&v, 1, 2 * MIB, 1, 0, &err) == -ZCX_E_RANGE);
    CHECK(a == (void *)1 && v == (void *)1);
}
CASE(no_vmm) {
    setenv("SIMCUDA_ATTRIBUTES", "102=0", 1);
    unfit("device 0 has no virtual memory management");
}
CASE(no_descriptors) {
    setenv("SIMCUDA_ATTRIBUTES", "103=0", 1);
    unfit("cannot be shared as file descriptors");
}
CASE(no_functions) {
    setenv("SIMCUDA_HIDE", "cuMemUnmap", 1);
    unfit("this driver lacks");
}

/* ---- giving out ---- */

CASE(blocks_and_slabs) {
    struct zcx_arena *a = arena_on(0);
    const struct zcx_driver *d = zcx_driver_opened();
    struct zcx_block *b[4];
    struct zcx_err err;
    unsigned flags;
    int active = 1;
    CHECK(d->DevicePrimaryCtxGetState(0, &flags, &active) == 0 && !active, "it needs no context, and makes none");
    CHECK(zcx_arena_ordinal(a) == 0 && usage(a).slabs == 0);
    b[0] = (void *)1;
    CHECK(zcx_arena_take(a, 0, ZCX_ARENA_READ, &b[0], &err) == -ZCX_E_RANGE && b[0] == (void *)1);
    b[0] = take(a, 1, ZCX_ARENA_READ);
    b[1] = take(a, 513, ZCX_ARENA_READ);
    b[2] = take(a, 16 * MIB, ZCX_ARENA_READ);
    CHECK(zcx_block_slab(b[0]) == zcx_block_slab(b[1]) && zcx_block_slab(b[1]) == zcx_block_slab(b[2]));
    CHECK(zcx_block_address(b[1]) == zcx_block_address(b[0]) + 512 && zcx_block_address(b[2]) == zcx_block_address(b[1]) + 1024);
    CHECK(usage(a).slabs == 1 && usage(a).mapped == SLAB && usage(a).taken == 16 * MIB + 1536 && usage(a).pending == 0);
    CHECK(zcx_slab_bytes(zcx_block_slab(b[0])) == SLAB && zcx_slab_pieces(zcx_block_slab(b[0])) == 1);
    CHECK(zcx_slab_shared(zcx_block_slab(b[0])) == 1);
    b[3] = take(a, 16 * MIB + 1, ZCX_ARENA_READ);
    CHECK(zcx_slab_bytes(zcx_block_slab(b[3])) == 18 * MIB && !zcx_slab_shared(zcx_block_slab(b[3])));
    CHECK(zcx_slab_piece_bytes(zcx_block_slab(b[3]), 0) == 18 * MIB && usage(a).mapped == SLAB + 18 * MIB);
    for (int i = 0; i < 4; i++) put_and_settle(a, b[i]);
    zcx_block_put(NULL);
    CHECK(usage(a).taken == 0 && usage(a).mapped == SLAB && usage(a).slabs == 1, "the large one went back, the other is kept");
    CHECK(trim(a, 0, 0) == 0 && trim(a, 1, 0) == SLAB && trim(a, 1, 0) == 0);
    CHECK(zcx_arena_trim(a, 1, NULL) == 0);
    nothing_left();
    CHECK(zcx_arena_ref(a) == a);
    zcx_arena_unref(a);
    zcx_arena_unref(a);
    zcx_arena_unref(NULL);
}

/* What workers may write lies in other slabs than what they only read, whatever is free where. */
CASE(uses_are_never_mixed) {
    struct zcx_arena *a = arena_on(0);
    struct zcx_block *r = take(a, 4096, ZCX_ARENA_READ), *w = take(a, 4096, ZCX_ARENA_WRITE), *again;
    zcu_ptr at = zcx_block_address(r);
    CHECK(zcx_block_slab(r) != zcx_block_slab(w) && usage(a).slabs == 2);
    put_and_settle(a, r);
    again = take(a, 4096, ZCX_ARENA_WRITE);
    CHECK(zcx_block_slab(again) == zcx_block_slab(w) && usage(a).slabs == 2);
    r = take(a, 4096, ZCX_ARENA_READ);
    CHECK(zcx_block_address(r) == at);
    put_and_settle(a, r);
    put_and_settle(a, w);
    put_and_settle(a, again);
    CHECK(trim(a, 0, 0) == 0 && usage(a).slabs == 2, "one of each use is kept");
    CHECK(trim(a, 1, 0) == 2 * SLAB);
    zcx_arena_unref(a);
}

#define MODEL 64
static uint64_t seed = 88172645463325252ull;
static uint64_t below(uint64_t n) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % n;
}

/* Random sequences against a list of what is live: no two overlap, none reaches out of its slab, and at the end all is in one part. */
CASE(random_sequences) {
    struct { struct zcx_block *b; enum zcx_arena_use use; } live[MODEL] = {0};
    setenv("SIMCUDA_DELAY_US", "0", 1);
    struct zcx_arena *a = arena_on(0);
    zcu_stream stream = stream_on(0);
    uint64_t before = free_on(0);
    for (int step = 0; step < 4000; step++) {
        unsigned i = (unsigned)below(MODEL);
        if (live[i].b) {
            if (below(2)) CHECK(fill(0, stream, zcx_block_address(live[i].b), (unsigned char)step, 1) == 0);
            zcx_block_put(live[i].b);
            live[i].b = NULL;
            continue;
        }
        uint64_t n = 1 + below(below(50) ? below(20) ? 40000 : 5 * MIB : 40 * MIB);
        live[i].use = below(2) ? ZCX_ARENA_READ : ZCX_ARENA_WRITE;
        live[i].b = take(a, n, live[i].use);
        zcu_ptr at = zcx_block_address(live[i].b), base;
        struct zcx_slab *slab;
        CHECK(zcx_slab_find(at, n, &slab, &base) == 0 && slab == zcx_block_slab(live[i].b));
        zcx_slab_unref(slab);
        for (unsigned k = 0; k < MODEL; k++) {
            if (k == i || !live[k].b) continue;
            zcu_ptr other = zcx_block_address(live[k].b);
            CHECK(at + n <= other || other + zcx_block_bytes(live[k].b) <= at, "%u and %u overlap", i, k);
            CHECK(live[k].use == live[i].use || zcx_block_slab(live[k].b) != slab);
        }
        if (step % 100 == 0) zcx_arena_trim(a, 0, NULL);
    }
    for (unsigned i = 0; i < MODEL; i++)
        if (live[i].b) put_and_settle(a, live[i].b);
    CHECK(usage(a).taken == 0 && usage(a).slabs <= 2);
    struct zcx_block *quarter[4];
    for (int i = 0; i < 4; i++) quarter[i] = take(a, 16 * MIB, ZCX_ARENA_READ);
    CHECK(zcx_block_slab(quarter[0]) == zcx_block_slab(quarter[3]), "its free parts are one again");
    for (int i = 0; i < 4; i++) put_and_settle(a, quarter[i]);
    trim(a, 1, 0);
    CHECK(usage(a).mapped == 0 && free_on(0) == before);
    nothing_left();
    zcx_arena_unref(a);
}

/* ---- the GPU is not done ---- */

CASE(reuse_waits_for_the_gpu) {
    struct zcx_arena *a = arena_on(0);
    zcu_stream slow = held_stream(), fast = stream_on(0);
    struct zcx_block *b = take(a, 4096, ZCX_ARENA_WRITE), *c, *e;
    zcu_ptr at = zcx_block_address(b);
    CHECK(fill(0, slow, at, 1, 4096) == 0);
    zcx_block_put(b);
    CHECK(usage(a).pending == 4096 && trim(a, 1, 1) == 0);
    c = take(a, 4096, ZCX_ARENA_WRITE);
    CHECK(zcx_block_address(c) != at && fill(0, fast, zcx_block_address(c), 2, 4096) == 0);
    /* What is put later waits behind it: it is one queue. */
    zcx_block_put(c);
    CHECK(synchronize(0, fast) == 0 && trim(a, 1, 1) == 0 && usage(a).pending == 2 * 4096);
    CHECK(let_go(slow) == 0 && synchronize(0, slow) == 0);
    e = take(a, 4096, ZCX_ARENA_WRITE);
    CHECK(zcx_block_address(e) == at && fill(0, fast, at, 3, 4096) == 0 && byte_at(0, at, fast) == 3);
    put_and_settle(a, e);
    CHECK(trim(a, 1, 0) == SLAB);
    zcx_arena_unref(a);
}

CASE(memory_goes_back) {
    struct zcx_arena *a = arena_on(0);
    zcu_stream slow = held_stream();
    uint64_t before = free_on(0), all = 0;
    struct zcx_block *b = take(a, 100 * MIB, ZCX_ARENA_READ);
    CHECK(free_on(0) == before - 100 * MIB);
    put_and_settle(a, b);
    CHECK(free_on(0) == before && usage(a).slabs == 0, "without a trim");
    b = take(a, 100 * MIB, ZCX_ARENA_READ);
    CHECK(fill(0, slow, zcx_block_address(b), 1, 4096) == 0);
    zcx_block_put(b);
    CHECK(free_on(0) == before - 100 * MIB && usage(a).pending == 100 * MIB && trim(a, 0, 1) == 0);
    CHECK(let_go(slow) == 0 && synchronize(0, slow) == 0);
    CHECK(trim(a, 0, 0) == 100 * MIB && free_on(0) == before);
    /* Several shared slabs come free: all but one go. */
    struct zcx_block *many[12];
    for (int i = 0; i < 12; i++) many[i] = take(a, 16 * MIB, ZCX_ARENA_READ);
    CHECK(usage(a).slabs == 3 && free_on(0) == before - 3 * SLAB);
    for (int i = 0; i < 12; i++) put_and_settle(a, many[i]);
    CHECK(usage(a).slabs == 1 && free_on(0) == before - SLAB);
    CHECK(zcx_arena_trim(a, 1, &all) == 0 && all == SLAB && free_on(0) == before);
    zcx_arena_unref(a);
    nothing_left();
}

/* More at a time than events are kept for: what has none comes free with a later one. */
CASE(more_pending_than_events) {
    struct zcx_arena *a = arena_on(0);
    zcu_stream slow = held_stream();
    struct zcx_block *b[100];
    for (int i = 0; i < 100; i++) {
        b[i] = take(a, 4096, ZCX_ARENA_WRITE);
        CHECK(fill(0, slow, zcx_block_address(b[i]), 1, 4096) == 0);
    }
    for (int i = 0; i < 100; i++) zcx_block_put(b[i]);
    CHECK(usage(a).pending == 100 * 4096 && simcuda_count("events") < 50);
    trim(a, 1, 1);
    CHECK(let_go(slow) == 0 && synchronize(0, slow) == 0);
    CHECK(trim(a, 1, 0) == SLAB && usage(a).mapped == 0);
    zcx_arena_unref(a);
    CHECK(simcuda_count("events") == 0);
}

/* While a stream of the context is captured, no event of the context can be recorded. */
CASE(no_event_while_capturing) {
    struct zcx_arena *a = arena_on(0);
    struct zcx_block *b = take(a, 30 * MIB, ZCX_ARENA_READ), *c = take(a, 30 * MIB, ZCX_ARENA_READ);
    fail_at = library_symbol("simcuda_fail");
    fail_at("cuCtxRecordEvent:1:900+");
    zcx_block_put(b);
    zcx_block_put(c);
    CHECK(usage(a).pending == 60 * MIB && trim(a, 0, 1) == 0 && trim(a, 1, 1) == 0);
    fail_at("");
    CHECK(trim(a, 0, 0) == 60 * MIB && usage(a).mapped == 0);
    zcx_arena_unref(a);
    nothing_left();
    CHECK(simcuda_count("events") == 0);
}

/* Before CUDA 12.5. */
CASE(no_event_of_a_context) {
    setenv("SIMCUDA_HIDE", "cuCtxRecordEvent", 1);
    setenv("SIMCUDA_MEMORY", "200MiB", 1);
    struct zcx_arena *a = arena_on(0);
    zcu_stream stream = stream_on(0);
    struct zcx_block *b = take(a, 100 * MIB, ZCX_ARENA_READ);
    CHECK(fill(0, stream, zcx_block_address(b), 1, 4096) == 0);
    zcx_block_put(b);
    CHECK(synchronize(0, stream) == 0 && trim(a, 0, 1) == 0, "nothing tells");
    b = take(a, 110 * MIB, ZCX_ARENA_READ);
    CHECK(fill(0, stream, zcx_block_address(b), 1, 4096) == 0);
    zcx_block_put(b);
    CHECK(trim(a, 1, 0) == 110 * MIB, "all work of the context was waited for");
    b = take(a, 110 * MIB, ZCX_ARENA_READ);
    zcx_block_put(b);
    zcx_arena_unref(a);
    nothing_left();
}

/* ---- pressure ---- */

static void *let_go_of(void *stream) {
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    CHECK(let_go(stream) == 0);
    return NULL;
}

CASE(out_of_memory) {
    setenv("SIMCUDA_MEMORY", "300MiB", 1);
    struct zcx_arena *a = arena_on(0);
    zcu_stream slow = held_stream();
    struct zcx_block *b = take(a, 200 * MIB, ZCX_ARENA_READ), *c = (void *)1;
    struct zcx_err err;
    pthread_t thread;
    char text[64];
    zcx_arena_patience(a, 0);
    CHECK(zcx_arena_take(a, 150 * MIB, ZCX_ARENA_READ, &c, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_OUT_OF_MEMORY);
    snprintf(text, sizeof text, "%llu are free", (unsigned long long)free_on(0));
    CHECK(c == (void *)1 && strstr(err.text, "157286400 bytes") && strstr(err.text, text) && strstr(err.text, "and 0 that"), "%s",
          err.text);
    CHECK(zcx_arena_take(a, 150 * MIB, ZCX_ARENA_READ, &c, NULL) == -ZCX_E_CUDA);
    CHECK(zcx_arena_take(a, UINT64_MAX, ZCX_ARENA_READ, &c, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_OUT_OF_MEMORY);
    /* Where a whole slab has no room, a small one may. */
    struct zcx_block *rest = take(a, 60 * MIB, ZCX_ARENA_READ), *small = take(a, 5 * MIB, ZCX_ARENA_READ);
    CHECK(zcx_slab_bytes(zcx_block_slab(small)) == 6 * MIB && zcx_slab_shared(zcx_block_slab(small)));
    put_and_settle(a, rest);
    put_and_settle(a, small);
    /* An idle slab makes room. */
    small = take(a, 5 * MIB, ZCX_ARENA_WRITE);
    put_and_settle(a, small);
    CHECK(usage(a).idle > 0);
    rest = take(a, 90 * MIB, ZCX_ARENA_READ);
    put_and_settle(a, rest);
    CHECK(usage(a).idle == 0);
    /* What the GPU still uses does not, in time … */
    CHECK(fill(0, slow, zcx_block_address(b), 1, 4096) == 0);
    zcx_block_put(b);
    CHECK(zcx_arena_take(a, 150 * MIB, ZCX_ARENA_READ, &c, &err) == -ZCX_E_CUDA && strstr(err.text, "and 209715200 that"), "%s", err.text);
    zcx_arena_patience(a, 30);
    CHECK(zcx_arena_take(a, 150 * MIB, ZCX_ARENA_READ, &c, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_OUT_OF_MEMORY && c == (void *)1);
    /* … an error that says that it never will be done is said … */
    fail_at = library_symbol("simcuda_fail");
    fail_at("cuEventQuery:1:700+");
    CHECK(zcx_arena_take(a, 150 * MIB, ZCX_ARENA_READ, &c, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_ILLEGAL_ADDRESS && c == (void *)1);
    fail_at("");
    /* … and when it is done, the waiting ends. */
    zcx_arena_patience(a, 10000);
    CHECK(pthread_create(&thread, NULL, let_go_of, slow) == 0);
    c = take(a, 150 * MIB, ZCX_ARENA_READ);
    CHECK(pthread_join(thread, NULL) == 0);
    put_and_settle(a, c);
    zcx_arena_unref(a);
    nothing_left();
}

/* ---- who refers to what ---- */

CASE(slabs_are_found) {
    struct zcx_arena *a = arena_on(0), *other = arena_on(0);
    struct zcx_block *b[20];
    struct zcx_slab *s = (void *)1;
    zcu_ptr base = 1;
    CHECK(zcx_slab_find(0x1234567, 1, &s, &base) == 1 && s == (void *)1 && base == 1);
    for (int i = 0; i < 20; i++) b[i] = take(i % 2 ? a : other, 17 * MIB + (uint64_t)i, ZCX_ARENA_READ);
    for (int i = 0; i < 20; i++) {
        zcu_ptr at = zcx_block_address(b[i]);
        const uint64_t whole = 18 * MIB;
        CHECK(zcx_slab_find(at, whole, &s, &base) == 0 && s == zcx_block_slab(b[i]) && base == at);
        zcx_slab_unref(s);
        CHECK(zcx_slab_find(at + 5, whole - 5, &s, &base) == 0 && s == zcx_block_slab(b[i]) && base == at);
        zcx_slab_unref(s);
        CHECK(zcx_slab_find(at + whole - 1, 1, &s, &base) == 0 && s == zcx_block_slab(b[i]) && base == at);
        zcx_slab_unref(s);
        CHECK(zcx_slab_find(at, whole + 1, &s, &base) == 1 && zcx_slab_find(at + 1, UINT64_MAX, &s, &base) == 1);
    }
    zcu_ptr gone = zcx_block_address(b[7]);
    put_and_settle(a, b[7]);
    CHECK(zcx_slab_find(gone, 1, &s, &base) == 1);
    for (int i = 0; i < 20; i++)
        if (i != 7) put_and_settle(i % 2 ? a : other, b[i]);
    zcx_arena_unref(a);
    zcx_arena_unref(other);
    nothing_left();
}

CASE(references_outlive_their_arena) {
    struct zcx_arena *a = arena_on(0);
    uint64_t before = free_on(0);
    struct zcx_block *b = take(a, 30 * MIB, ZCX_ARENA_READ), *last = take(a, 4096, ZCX_ARENA_READ);
    struct zcx_slab *s = zcx_slab_ref(zcx_block_slab(b)), *found;
    zcu_ptr at = zcx_block_address(b), base;
    int fd;
    CHECK(fill(0, NULL, at, 7, 1) == 0 && synchronize(0, NULL) == 0);
    put_and_settle(a, b);
    CHECK(usage(a).mapped == SLAB && free_on(0) == before - SLAB - 30 * MIB, "not the arena's any more, and there all the same");
    CHECK(zcx_slab_find(at, 1, &found, &base) == 1 && byte_at(0, at, NULL) == 7);
    zcx_arena_unref(a);
    CHECK(zcx_slab_export(s, 0, &fd, NULL) == 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    struct zcx_err err;
    CHECK(zcx_slab_export(s, 1, &fd, &err) == -ZCX_E_RANGE);
    close(fd);
    zcx_slab_unref(s);
    zcx_slab_unref(NULL);
    CHECK(free_on(0) == before - SLAB);
    zcx_block_put(last);
    nothing_left();
    CHECK(free_on(0) == before && simcuda_count("events") == 0, "the last block took the arena along");
}

CASE(what_the_gpu_keeps_is_left) {
    struct zcx_arena *a = arena_on(0);
    zcu_stream slow = held_stream();
    struct zcx_block *b = take(a, 30 * MIB, ZCX_ARENA_READ), *c = take(a, 4096, ZCX_ARENA_READ);
    zcx_arena_patience(a, 10);
    put_and_settle(a, c);
    CHECK(fill(0, slow, zcx_block_address(b), 1, 4096) == 0);
    zcx_block_put(b);
    zcx_arena_unref(a);
    CHECK(simcuda_count("mappings") == 1, "what is idle went, what is in use did not");
    CHECK(let_go(slow) == 0 && synchronize(0, slow) == 0);
}

CASE(waits_for_the_last) {
    struct zcx_arena *a = arena_on(0);
    zcu_stream slow = held_stream();
    struct zcx_block *b = take(a, 30 * MIB, ZCX_ARENA_READ);
    pthread_t thread;
    CHECK(fill(0, slow, zcx_block_address(b), 1, 4096) == 0);
    zcx_block_put(b);
    CHECK(pthread_create(&thread, NULL, let_go_of, slow) == 0);
    zcx_arena_unref(a);
    nothing_left();
    CHECK(pthread_join(thread, NULL) == 0);
}

/* ---- several devices ---- */

static void peers(int reached) {
    struct zcx_arena *a = arena_on(0);
    zcu_stream there = stream_on(1);
    struct zcx_block *b = take(a, 4096, ZCX_ARENA_READ);
    CHECK((fill(1, there, zcx_block_address(b), 5, 1) == 0) == reached);
    CHECK(synchronize(1, there) == 0);
    CHECK(fill(0, NULL, zcx_block_address(b), 6, 1) == 0 && synchronize(0, NULL) == 0);
    put_and_settle(a, b);
    zcx_arena_unref(a);
    nothing_left();
}
CASE(peers_reach_it) {
    setenv("SIMCUDA_DEVICES", "3", 1);
    peers(1);
}
CASE(no_peers) {
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("SIMCUDA_PEER", "0", 1);
    peers(0);
}
CASE(peers_that_refuse) {
    setenv("SIMCUDA_DEVICES", "3", 1);
    setenv("SIMCUDA_FAIL", "cuMemSetAccess:2:801", 1);
    peers(0);
}

/* ---- memory of somebody else ---- */

#define PIECES 3
static const uint64_t piece_bytes[PIECES] = {2 * MIB, 20 * MIB, 4 * MIB};

/* As torch's expandable segments are: pieces made one by one, side by side. `gap`: one is missing in the middle. */
static zcu_ptr foreign(int handle_types, int other_device, int gap) {
    zcu_access_desc access = {.location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE}, .flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    zcu_ptr base, at;
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    CHECK(s.d->MemAddressReserve(&base, 64 * MIB, 0, 0, 0) == 0);
    at = base;
    for (int i = 0; i < PIECES; i++) {
        zcu_mem_props props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .handle_types = handle_types,
                               .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, i == 1 && other_device ? 1 : 0}};
        zcu_mem handle;
        if (i == 1 && gap) {
            at += piece_bytes[i];
            continue;
        }
        CHECK(s.d->MemCreate(&handle, piece_bytes[i], &props, 0) == 0);
        CHECK(s.d->MemMap(at, piece_bytes[i], 0, handle, 0) == 0 && s.d->MemSetAccess(at, piece_bytes[i], &access, 1) == 0);
        CHECK(s.d->MemRelease(handle) == 0);
        at += piece_bytes[i];
    }
    zcx_scope_close(&s);
    return base;
}

static void refuse(zcu_ptr at, uint64_t n, const char *words) {
    struct zcx_slab *s = (void *)1;
    struct zcx_err err = {0};
    zcu_ptr base = 7;
    long handles = simcuda_count("handles");
    CHECK(zcx_slab_adopt(at, n, &s, &base, &err) == -ZCX_E_UNFIT && strstr(err.text, words), "%s", err.text);
    CHECK(s == (void *)1 && base == 7 && simcuda_count("handles") == handles);
}

CASE(adopted) {
    zcu_ptr at = foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0), base, other;
    struct zcx_slab *s, *found;
    struct zcx_err err;
    CHECK(zcx_slab_adopt(at, 26 * MIB, &s, &base, &err) == 0, "%s", err.text);
    CHECK(base == at && zcx_slab_pieces(s) == PIECES && zcx_slab_bytes(s) == 26 * MIB && !zcx_slab_shared(s));
    for (uint32_t i = 0; i < PIECES; i++) CHECK(zcx_slab_piece_bytes(s, i) == piece_bytes[i]);
    CHECK(simcuda_count("handles") == PIECES && zcx_slab_find(at, 1, &found, &other) == 1, "it is no arena's");
    zcx_slab_unref(s);
    CHECK(simcuda_count("handles") == 0 && simcuda_count("mappings") == PIECES, "the mapping is its owner's");
    CHECK(zcx_slab_adopt(at + 3 * MIB, MIB, &s, &base, NULL) == 0 && base == at + 2 * MIB && zcx_slab_pieces(s) == 1);
    zcx_slab_unref(s);
    CHECK(zcx_slab_adopt(at + 2 * MIB - 1, 2, &s, &base, NULL) == 0 && base == at && zcx_slab_bytes(s) == 22 * MIB);
    zcx_slab_unref(s);
    CHECK(zcx_slab_adopt(at + 2 * MIB, 0, &s, &base, NULL) == 0 && base == at + 2 * MIB && zcx_slab_pieces(s) == 1);
    zcx_slab_unref(s);
    refuse(at, 26 * MIB + 1, "not mapped throughout");
    refuse(at + 30 * MIB, 1, "no device memory");
    CHECK(zcx_slab_adopt(at, UINT64_MAX, &s, &base, NULL) == -ZCX_E_RANGE);
    CHECK(simcuda_count("handles") == 0);
}

CASE(not_to_be_adopted) {
    setenv("SIMCUDA_DEVICES", "2", 1);
    struct zcx_scope s;
    zcu_ptr p;
    refuse(0x1234567, 1, "no device memory");
    refuse(foreign(0, 0, 0), 1, "without leave");
    refuse(foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 1), 26 * MIB, "not mapped throughout");
    refuse(foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1, 0), 26 * MIB, "not all lie on device 0");
    CHECK(zcx_scope_open(&s, 0, NULL) == 0 && s.d->MemAllocAsync(&p, 4096, NULL) == 0 && s.d->StreamSynchronize(NULL) == 0);
    zcx_scope_close(&s);
    refuse(p, 4096, "no device memory made with cuMemCreate");
}

CASE(no_address_ranges) {
    setenv("SIMCUDA_HIDE", "cuMemGetAddressRange", 1);
    refuse(foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0), 1, "lacks a part");
}

/* ---- importer ---- */

struct lent { uint64_t bytes; uint32_t pieces, writable; uint64_t piece[PIECES]; };

static void lend(struct peer *peer, struct zcx_slab *s, int writable) {
    struct lent l = {.bytes = zcx_slab_bytes(s), .pieces = zcx_slab_pieces(s), .writable = (uint32_t)writable};
    for (uint32_t i = 0; i < l.pieces; i++) l.piece[i] = zcx_slab_piece_bytes(s, i);
    peer_send(peer->sock, &l, sizeof l, -1);
    for (uint32_t i = 0; i < l.pieces; i++) {
        int fd;
        char c = 0;
        CHECK(zcx_slab_export(s, i, &fd, NULL) == 0);
        peer_send(peer->sock, &c, 1, fd);
        close(fd);
    }
}

static struct zcx_vmm *borrow(int sock) {
    struct zcx_vmm *v;
    struct zcx_err err = {0};
    struct lent l;
    CHECK(peer_recv(sock, &l, sizeof l) == -1);
    CHECK(zcx_vmm_new(&v, 0, l.bytes, l.pieces, (int)l.writable, &err) == 0, "%s", err.text);
    for (uint32_t i = 0; i < l.pieces; i++) {
        char c;
        CHECK(!zcx_vmm_complete(v));
        int fd = peer_recv(sock, &c, 1);
        CHECK(zcx_vmm_add(v, fd, l.piece[i], &err) == 0, "%s %s", err.call ? err.call : "", err.text);
        if (i + 1 == l.pieces) CHECK(zcx_vmm_add(v, fd, l.piece[i], &err) == -ZCX_E_PROTOCOL && strstr(err.text, "more pieces"));
        close(fd);
    }
    CHECK(zcx_vmm_complete(v) && zcx_vmm_bytes(v) == l.bytes && zcx_vmm_ordinal(v) == 0);
    CHECK(simcuda_count("mappings") == (long)l.pieces && simcuda_count("handles") == 0);
    return v;
}

static void importer_that_writes(int sock) {
    struct zcx_vmm *v = borrow(sock);
    zcu_ptr last = zcx_vmm_base(v) + zcx_vmm_bytes(v) - 1;
    CHECK(byte_at(0, zcx_vmm_base(v), NULL) == 0x11 && byte_at(0, last, NULL) == 0x22);
    CHECK(fill(0, NULL, last, 0x33, 1) == 0 && synchronize(0, NULL) == 0);
    zcx_vmm_free(v);
    nothing_left();
}

static void ends_with(struct zcx_slab *s, zcu_ptr base, void (*importer)(struct zcx_slab *, zcu_ptr)) {
    CHECK(fill(0, NULL, base, 0x11, 1) == 0 && fill(0, NULL, base + zcx_slab_bytes(s) - 1, 0x22, 1) == 0 && synchronize(0, NULL) == 0);
    importer(s, base);
}

static struct peer the_peer;

static void lend_and_see(struct zcx_slab *s, zcu_ptr base) {
    lend(&the_peer, s, 1);
    CHECK(peer_end(&the_peer) == 0);
    CHECK(byte_at(0, base + zcx_slab_bytes(s) - 1, NULL) == 0x33);
}

CASE(import_of_one_piece) {
    the_peer = peer_start(importer_that_writes);
    struct zcx_arena *a = arena_on(0);
    uint64_t before = free_on(0);
    struct zcx_block *b = take(a, 100 * MIB, ZCX_ARENA_WRITE);
    ends_with(zcx_block_slab(b), zcx_block_address(b), lend_and_see);
    put_and_settle(a, b);
    CHECK(free_on(0) == before);
    zcx_arena_unref(a);
}

CASE(import_of_three_pieces) {
    the_peer = peer_start(importer_that_writes);
    zcu_ptr at = foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0), base;
    struct zcx_slab *s;
    CHECK(zcx_slab_adopt(at, 26 * MIB, &s, &base, NULL) == 0 && base == at);
    ends_with(s, base, lend_and_see);
    zcx_slab_unref(s);
}

static void importer_that_may_only_read(int sock) {
    struct zcx_vmm *v = borrow(sock);
    CHECK(byte_at(0, zcx_vmm_base(v), NULL) == 0x11);
    CHECK(fill(0, NULL, zcx_vmm_base(v), 0x33, 1) != 0 || synchronize(0, NULL) != 0);
    zcx_vmm_free(v);
}

static void lend_to_read(struct zcx_slab *s, zcu_ptr base) {
    lend(&the_peer, s, 0);
    CHECK(peer_end(&the_peer) == 0);
    CHECK(byte_at(0, base, NULL) == 0x11);
}

CASE(read_only) {
    the_peer = peer_start(importer_that_may_only_read);
    struct zcx_arena *a = arena_on(0);
    struct zcx_block *b = take(a, 17 * MIB, ZCX_ARENA_READ);
    ends_with(zcx_block_slab(b), zcx_block_address(b), lend_to_read);
    put_and_settle(a, b);
    zcx_arena_unref(a);
}

/* Sizes that cannot be, and pieces that do not add up. Nothing of it maps anything. */
CASE(wrong_sizes) {
    static const struct { uint64_t bytes; uint32_t pieces; } bad[] = {
        {0, 0}, {0, 1}, {2 * MIB, 0}, {2 * MIB, 2}, {2 * MIB + 1, 1}, {4096, 1}, {(1ull << 46) + 2 * MIB, 1}, {UINT64_MAX, UINT32_MAX}};
    struct zcx_vmm *v = (void *)1;
    struct zcx_err err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(zcx_vmm_new(&v, 0, bad[i].bytes, bad[i].pieces, 1, &err) == -ZCX_E_PROTOCOL && v == (void *)1, "%zu", i);
    nothing_left();
    CHECK(zcx_vmm_new(&v, 0, 10 * MIB, 3, 1, &err) == 0);
    static const uint64_t wrong[] = {0, 1, 2 * MIB + 512, 8 * MIB, 10 * MIB, 12 * MIB, UINT64_MAX, UINT64_MAX - 2 * MIB + 1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(zcx_vmm_add(v, -1, wrong[i], &err) == -ZCX_E_PROTOCOL && !zcx_vmm_complete(v), "%zu", i);
    CHECK(simcuda_count("mappings") == 0 && simcuda_count("reservations") == 1);
    zcx_vmm_free(v);
    zcx_vmm_free(NULL);
    CHECK(zcx_vmm_new(&v, 0, 10 * MIB, 1, 1, &err) == 0);
    CHECK(zcx_vmm_add(v, -1, 8 * MIB, &err) == -ZCX_E_PROTOCOL && strstr(err.text, "10485760 are left for 1"), "%s", err.text);
    zcx_vmm_free(v);
    nothing_left();
}

static void importer_of_wrong_descriptors(int sock) {
    struct zcx_vmm *v;
    struct zcx_err err;
    struct lent l;
    char c;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(peer_recv(sock, &l, sizeof l) == -1 && l.pieces == 1 && l.bytes == 18 * MIB);
    int fd = peer_recv(sock, &c, 1);
    /* no memory at all, and what is closed */
    for (int i = 0; i < 2; i++) {
        CHECK(zcx_vmm_new(&v, 0, l.bytes, 1, 1, NULL) == 0);
        CHECK(zcx_vmm_add(v, i ? 1000 : null, l.bytes, &err) == -ZCX_E_UNFIT && strstr(err.text, "does not import"), "%s", err.text);
        CHECK(err.call && err.cuda && !zcx_vmm_complete(v));
        CHECK(zcx_vmm_add(v, fd, l.bytes, &err) == -ZCX_E_UNFIT && strstr(err.text, "earlier"), "%s", err.text);
        zcx_vmm_free(v);
        nothing_left();
    }
    /* memory that is smaller than it was said to be; half of the pieces are there */
    CHECK(zcx_vmm_new(&v, 0, 60 * MIB, 3, 1, NULL) == 0);
    CHECK(zcx_vmm_add(v, fd, 18 * MIB, NULL) == 0 && simcuda_count("mappings") == 1);
    CHECK(zcx_vmm_add(v, fd, 20 * MIB, &err) == -ZCX_E_UNFIT && strstr(err.text, "does not map"), "%s", err.text);
    zcx_vmm_free(v);
    nothing_left();
    /* one that another mapping still has */
    CHECK(zcx_vmm_new(&v, 0, 60 * MIB, 3, 1, NULL) == 0 && zcx_vmm_add(v, fd, 18 * MIB, NULL) == 0);
    zcx_vmm_free(v);
    nothing_left();
    close(fd);
    close(null);
}

CASE(wrong_descriptors) {
    struct peer peer = peer_start(importer_of_wrong_descriptors);
    struct zcx_arena *a = arena_on(0);
    struct zcx_block *b = take(a, 17 * MIB, ZCX_ARENA_READ);
    lend(&peer, zcx_block_slab(b), 1);
    CHECK(peer_end(&peer) == 0);
    put_and_settle(a, b);
    zcx_arena_unref(a);
}

/* ---- a fork, threads ---- */

static struct { struct zcx_arena *a; struct zcx_block *b; struct zcx_vmm *v; struct zcx_slab *s; } shared;

static void child_of_fork(void) {
    struct zcx_arena_usage u = {.taken = 1};
    struct zcx_block *c;
    struct zcx_slab *s;
    uint64_t freed = 1;
    zcu_ptr base, at = zcx_block_address(shared.b);
    int fd;
    CHECK(zcx_slab_find(at, 1, &s, &base) == 1);
    CHECK(zcx_arena_take(shared.a, 4096, ZCX_ARENA_READ, &c, NULL) == -ZCX_E_NODRIVER);
    CHECK(zcx_slab_export(shared.s, 0, &fd, NULL) == -ZCX_E_NODRIVER);
    CHECK(zcx_arena_trim(shared.a, 1, &freed) == 0 && freed == 0);
    zcx_arena_usage(shared.a, &u);
    CHECK(u.taken == 0);
    zcx_block_put(shared.b);
    zcx_vmm_free(shared.v);
    zcx_slab_unref(shared.s);
    zcx_arena_unref(shared.a);
}

CASE(a_fork_is_harmless) {
    zcu_ptr at = foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0), base;
    shared.a = arena_on(0);
    shared.b = take(shared.a, 20 * MIB, ZCX_ARENA_READ);
    CHECK(zcx_slab_adopt(at, 1, &shared.s, &base, NULL) == 0);
    CHECK(zcx_vmm_new(&shared.v, 0, 2 * MIB, 1, 1, NULL) == 0);
    CHECK(fill(0, NULL, zcx_block_address(shared.b), 9, 1) == 0 && synchronize(0, NULL) == 0);
    CHECK(case_fork(child_of_fork) == 0);
    CHECK(byte_at(0, zcx_block_address(shared.b), NULL) == 9 && usage(shared.a).taken == 20 * MIB);
    zcx_vmm_free(shared.v);
    zcx_slab_unref(shared.s);
    put_and_settle(shared.a, shared.b);
    CHECK(usage(shared.a).mapped == 0);
    zcx_arena_unref(shared.a);
}

static void *take_and_put(void *number) {
    struct { struct zcx_block *b; unsigned char byte; } mine[6] = {0};
    zcu_stream stream = stream_on(0);
    uint64_t state = (uintptr_t)number * 0x9E3779B97F4A7C15ull + 1;
    for (int round = 0; round < 160; round++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        unsigned i = (unsigned)(state >> 60) % 6;
        if (mine[i].b) {
            zcu_ptr last = zcx_block_address(mine[i].b) + zcx_block_bytes(mine[i].b) - 1;
            CHECK(byte_at(0, last, stream) == mine[i].byte, "somebody else wrote there");
            /* still in use when it is put */
            CHECK(fill(0, stream, zcx_block_address(mine[i].b), 0xEE, zcx_block_bytes(mine[i].b)) == 0);
            zcx_block_put(mine[i].b);
            mine[i].b = NULL;
            continue;
        }
        uint64_t n = (state >> 40) % 64 ? 1 + (state >> 20) % 100000 : 17 * MIB;
        mine[i].b = take(shared.a, n, (state >> 33) & 1 ? ZCX_ARENA_READ : ZCX_ARENA_WRITE);
        mine[i].byte = (unsigned char)(round ^ (int)(uintptr_t)number << 4);
        CHECK(fill(0, stream, zcx_block_address(mine[i].b) + n - 1, mine[i].byte, 1) == 0);
        if (round % 16 == 0) zcx_arena_trim(shared.a, round % 32 == 0, NULL);
        struct zcx_slab *s;
        zcu_ptr base;
        CHECK(zcx_slab_find(zcx_block_address(mine[i].b), n, &s, &base) == 0 && s == zcx_block_slab(mine[i].b));
        zcx_slab_unref(s);
    }
    for (int i = 0; i < 6; i++) zcx_block_put(mine[i].b);
    return NULL;
}

CASE(threads) {
    pthread_t threads[8];
    setenv("SIMCUDA_DELAY_US", "5", 1);
    shared.a = arena_on(0);
    uint64_t before = free_on(0);
    for (uintptr_t i = 0; i < 8; i++) CHECK(pthread_create(&threads[i], NULL, take_and_put, (void *)i) == 0);
    for (int i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(usage(shared.a).taken == 0);
    zcx_arena_unref(shared.a);
    nothing_left();
    CHECK(free_on(0) == before && simcuda_count("events") == 0);
}

/* ---- every call fails once ---- */

static struct zcx_block *first_alone(struct zcx_arena *a, uint64_t n, int *failed) {
    struct zcx_block *b = NULL;
    struct zcx_err err = {0};
    int rc = zcx_arena_take(a, n, ZCX_ARENA_WRITE, &b, &err);
    CHECK(rc == 0 || (rc == -ZCX_E_CUDA && err.call && !b), "%d %s", rc, err.text);
    *failed |= rc != 0;
    return b;
}

/* What a parent does in its life, with whatever fails in it. */
static int a_life(void) {
    struct zcx_arena *a;
    struct zcx_block *b[3];
    struct zcx_err err = {0};
    int failed = 0, fd = -1, rc = zcx_arena_new(&a, 0, &err);
    if (rc) {
        CHECK(rc == -ZCX_E_CUDA && err.call, "%d", rc);
        return 1;
    }
    b[0] = first_alone(a, 4096, &failed);
    b[1] = first_alone(a, 20 * MIB, &failed);
    b[2] = first_alone(a, 30 * MIB, &failed);
    if (b[1]) {
        failed |= zcx_slab_export(zcx_block_slab(b[1]), 0, &fd, NULL) != 0;
        if (fd >= 0) close(fd);
    }
    for (int i = 0; i < 3; i++) zcx_block_put(b[i]);
    zcx_arena_trim(a, 1, NULL);
    b[0] = first_alone(a, 20 * MIB, &failed);
    zcx_block_put(b[0]);
    zcx_arena_unref(a);
    return failed;
}

static int (*the_life)(void);
static void sweep(int at_least, int (*life)(void), const char *rest) {
    char rule[64];
    long handles = simcuda_count("handles"), mappings = simcuda_count("mappings"), reservations = simcuda_count("reservations");
    long (*injected)(void) = library_symbol("simcuda_injected");
    int failures = 0, fds, n;
    fail_at = library_symbol("simcuda_fail");
    the_life = life;
    CHECK(the_life() == 0, "%s", rest);
    fds = check_fds();
    for (n = 1; n < 2000; n++) {
        long before = injected();
        snprintf(rule, sizeof rule, "*:%d:999", n);
        fail_at(rule);
        failures += the_life();
        fail_at("");
        if (injected() == before) break;
        /* what could not be given back is tried again with the next trim */
        struct zcx_arena *a = arena_on(0);
        zcx_arena_trim(a, 1, NULL);
        zcx_arena_unref(a);
        CHECK(simcuda_count("handles") == handles && simcuda_count("mappings") == mappings &&
              simcuda_count("reservations") == reservations && check_fds() == fds, "%s: call %d left something", rest, n);
    }
    CHECK(n < 2000 && n > at_least && failures > at_least / 4, "%s: %d calls, %d failures", rest, n, failures);
}

CASE(every_call_of_the_exporter_fails) {
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("SIMCUDA_DELAY_US", "0", 1);
    sweep(60, a_life, "exporter");
}

static zcu_ptr foreign_memory;

static int adopting(void) {
    struct zcx_slab *s = NULL;
    struct zcx_err err = {0};
    zcu_ptr base;
    int rc = zcx_slab_adopt(foreign_memory, 26 * MIB, &s, &base, &err);
    CHECK(rc == 0 || ((rc == -ZCX_E_CUDA || rc == -ZCX_E_UNFIT) && !s && err.call), "%d %s", rc, err.text);
    zcx_slab_unref(s);
    return rc != 0;
}

CASE(every_call_of_adopting_fails) {
    foreign_memory = foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0);
    sweep(15, adopting, "adopting");
}

static int piece_fd[PIECES];

static int importing(void) {
    struct zcx_vmm *v = NULL;
    struct zcx_err err = {0};
    int rc = zcx_vmm_new(&v, 0, 26 * MIB, PIECES, 0, &err);
    for (int i = 0; !rc && i < PIECES; i++) rc = zcx_vmm_add(v, piece_fd[i], piece_bytes[i], &err);
    CHECK(rc == 0 || ((rc == -ZCX_E_CUDA || rc == -ZCX_E_UNFIT) && err.call), "%d %s", rc, err.text);
    CHECK(!v || zcx_vmm_complete(v) == !rc);
    zcx_vmm_free(v);
    return rc != 0;
}

static void importer_whose_calls_fail(int sock) {
    struct lent l;
    CHECK(peer_recv(sock, &l, sizeof l) == -1 && l.pieces == PIECES);
    for (int i = 0; i < PIECES; i++) {
        char c;
        piece_fd[i] = peer_recv(sock, &c, 1);
    }
    sweep(15, importing, "importer");
}

CASE(every_call_of_the_importer_fails) {
    struct peer peer = peer_start(importer_whose_calls_fail);
    zcu_ptr at = foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0), base;
    struct zcx_slab *s;
    CHECK(zcx_slab_adopt(at, 26 * MIB, &s, &base, NULL) == 0);
    lend(&peer, s, 0);
    CHECK(peer_end(&peer) == 0);
    zcx_slab_unref(s);
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

CASE(a_capture_elsewhere_survives) {
    zcu_ptr at = foreign(ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0, 0), base;
    struct zcx_arena *a = arena_on(0);
    struct zcx_slab *s;
    pthread_t thread;
    void *result;
    int fd;
    char c = 0;
    capture.begin = library_symbol("cuStreamBeginCapture_v2");
    capture.end = library_symbol("cuStreamEndCapture");
    CHECK(pipe(capture.begun) == 0 && pipe(capture.finish) == 0);
    zcx_driver_capture_begins(); /* as who captures says it */
    CHECK(pthread_create(&thread, NULL, capture_meanwhile, NULL) == 0);
    CHECK(read(capture.begun[0], &c, 1) == 1);
    struct zcx_block *b = take(a, 20 * MIB, ZCX_ARENA_READ), *small = take(a, 512, ZCX_ARENA_WRITE);
    CHECK(zcx_slab_export(zcx_block_slab(b), 0, &fd, NULL) == 0);
    close(fd);
    zcx_block_put(b);
    zcx_block_put(small);
    CHECK(trim(a, 1, 1) == 0, "they wait");
    CHECK(zcx_slab_adopt(at, 26 * MIB, &s, &base, NULL) == 0);
    zcx_slab_unref(s);
    CHECK(write(capture.finish[1], &c, 1) == 1);
    CHECK(pthread_join(thread, &result) == 0 && result == NULL, "the capture died: %ld", (long)(intptr_t)result);
    zcx_driver_capture_ended();
    CHECK(trim(a, 1, 0) > 20 * MIB);
    zcx_arena_unref(a);
}

int main(void) {
    simcuda_share();
    RUN(no_vmm);
    RUN(no_descriptors);
    RUN(no_functions);
    RUN(blocks_and_slabs);
    RUN(uses_are_never_mixed);
    RUN(random_sequences);
    RUN(reuse_waits_for_the_gpu);
    RUN(memory_goes_back);
    RUN(more_pending_than_events);
    RUN(no_event_while_capturing);
    RUN(no_event_of_a_context);
    RUN(out_of_memory);
    RUN(slabs_are_found);
    RUN(references_outlive_their_arena);
    RUN(what_the_gpu_keeps_is_left);
    RUN(waits_for_the_last);
    RUN(peers_reach_it);
    RUN(no_peers);
    RUN(peers_that_refuse);
    RUN(adopted);
    RUN(not_to_be_adopted);
    RUN(no_address_ranges);
    RUN(import_of_one_piece);
    RUN(import_of_three_pieces);
    RUN(read_only);
    RUN(wrong_sizes);
    RUN(wrong_descriptors);
    RUN(a_fork_is_harmless);
    RUN(threads);
    RUN(every_call_of_the_exporter_fails);
    RUN(every_call_of_adopting_fails);
    RUN(every_call_of_the_importer_fails);
    RUN(a_capture_elsewhere_survives);
    simcuda_unshare();
    return 0;
}
