/* test_simcuda.c: what only the simulated driver does: order on demand, failures on demand, and the races that it must see.
 *
 * What it shares with a card is in conformance.c. */
// sources: csrc/driver.c csrc/err.c
// needs: simcuda
#include "simcuda.h"

/* ---- order and failures on demand ---- */

CASE(a_held_stream_goes_one_step_at_a_time) {
    open_sim();
    zcu_ptr p = alloc(pool_new(), MIB);
    OK(d->StreamSynchronize(st));
    CHECK(sim.hold(st) == 0);
    OK(d->MemsetD8Async(p, 1, MIB, st));
    OK(d->MemsetD8Async(p, 2, MIB, st));
    CHECK(sim.pending(st) == 2 && peek(p) == 0);
    CHECK(sim.step(st, 1000) == 1 && peek(p) == 1 && sim.pending(st) == 1);
    GIVES(ZCU_ERROR_NOT_READY, d->StreamQuery(st));
    CHECK(sim.release(st) == 0);
    OK(d->StreamSynchronize(st));
    CHECK(peek(p) == 2 && sim.step(st, 1000) == 0);
    CHECK(sim.hold((zcu_stream)(uintptr_t)0x1234) == -1);
}

CASE(a_step_that_is_not_ready_times_out) {
    page_new();
    open_sim();
    CHECK(sim.hold(st) == 0);
    OK(d->StreamWaitValue64(st, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    CHECK(sim.step(st, 20) == -1 && sim.pending(st) == 1);
    __atomic_store_n(page, 1, __ATOMIC_RELEASE);
    CHECK(sim.step(st, 10000) == 1 && sim.pending(st) == 0);
}

static int order, nth;
static void first(void *unused) { (void)unused; if (nth++ == 0) order |= 1; }
static void second(void *unused) { (void)unused; if (nth++ == 0) order |= 2; }

CASE(streams_overtake_each_other) {
    zcu_result (*launch)(zcu_stream, void (*)(void *), void *);
    open_sim();
    *(void **)&launch = library_symbol("cuLaunchHostFunc");
    for (int i = 0; i < 1000 && order != 3; i++) {
        nth = 0;
        OK(launch(st, first, NULL));
        OK(launch(other, second, NULL));
        OK(d->CtxSynchronize());
    }
    CHECK(order == 3, "either is the first at times");
}

CASE(a_free_poisons_when_it_is_executed) {
    open_sim();
    zcu_ptr p = alloc(pool_new(), MIB);
    OK(d->MemsetD8Async(p, 7, MIB, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.hold(st) == 0);
    OK(d->MemFreeAsync(p, st));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemFreeAsync(p, st));
    CHECK(peek(p) == 7 && peek(p + MIB - 1) == 7);
    CHECK(sim.step(st, 10000) == 1);
    CHECK(peek(p) == 0xDB && peek(p + MIB - 1) == 0xDB);
}

CASE(a_long_kernel_keeps_its_stream_busy) {
    page_new();
    open_sim();
    CHECK(sim.spin(st, 200000) == 0);
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    OK(d->StreamWriteValue64(other, counters + 64, 1, 0));
    OK(d->StreamSynchronize(other));
    CHECK(__atomic_load_n(page, __ATOMIC_ACQUIRE) == 0);
    OK(d->StreamSynchronize(st));
    CHECK(__atomic_load_n(page, __ATOMIC_ACQUIRE) == 1);
}

CASE(the_nth_call_fails) {
    zcu_event e[8];
    int n = 0;
    open_sim();
    sim.fail("cuEventCreate:2:2");
    OK(d->EventCreate(&e[n++], 0));
    GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->EventCreate(&e[n], 0));
    OK(d->EventCreate(&e[n++], 0));
    CHECK(sim.injected() == 1);
    sim.fail("cuEventQuery:1:999,cuEventCreate:1:2+");
    GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->EventCreate(&e[n], 0));
    GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->EventCreate(&e[n], 0));
    GIVES(ZCU_ERROR_UNKNOWN, d->EventQuery(e[0]));
    OK(d->EventQuery(e[0]));
    sim.fail("*:3:999");
    OK(d->EventQuery(e[0]));
    OK(d->StreamQuery(st));
    GIVES(ZCU_ERROR_UNKNOWN, d->EventQuery(e[0]));
    CHECK(sim.injected() == 5 && sim.count("events") == 2);
    sim.fail("");
    while (n) OK(d->EventDestroy(e[--n]));
    CHECK(sim.count("events") == 0);
}

CASE(a_failure_from_the_environment_is_logged) {
    char path[] = "/tmp/simcuda-log-XXXXXX", line[100] = "";
    int fd = mkstemp(path);
    zcu_pool pool;
    zcu_pool_props props = {.alloc_type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CHECK(fd >= 0);
    setenv("SIMCUDA_FAIL", "cuMemPoolCreate:1:801", 1);
    setenv("SIMCUDA_FAIL_LOG", path, 1);
    open_sim();
    GIVES(ZCU_ERROR_NOT_SUPPORTED, d->MemPoolCreate(&pool, &props));
    CHECK(read(fd, line, sizeof line - 1) > 0);
    unlink(path);
    close(fd);
    CHECK(strstr(line, " cuMemPoolCreate 1 801\n"), "%s", line);
}

CASE(an_older_driver_lacks_symbols) {
    int can;
    setenv("SIMCUDA_HIDE", "cuStreamWriteValue64,cuCtxRecordEvent", 1);
    setenv("SIMCUDA_ATTRIBUTES", "115=0", 1);
    open_sim();
    CHECK(!d->StreamWriteValue64 && !d->CtxRecordEvent && d->StreamWaitValue64);
    OK(d->DeviceGetAttribute(&can, ZCU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
    CHECK(!can);
    OK(d->DeviceGetAttribute(&can, ZCU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0));
    CHECK(!can);
}

CASE(a_post_into_unregistered_memory_is_a_fault) {
    page_new();
    open_sim();
    CHECK(sim.hold(st) == 0);
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    OK(d->MemHostUnregister(page));
    CHECK(sim.step(st, 10000) == -1);
    GIVES(ZCU_ERROR_ILLEGAL_ADDRESS, d->StreamQuery(other));
    CHECK(__atomic_load_n(page, __ATOMIC_ACQUIRE) == 0);
}

CASE(after_a_fault_nothing_is_executed) {
    page_new();
    open_sim();
    CHECK(sim.hold(st) == 0);
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    sim.fault(ZCU_ERROR_ILLEGAL_ADDRESS);
    sim.release(st);
    GIVES(ZCU_ERROR_ILLEGAL_ADDRESS, d->StreamSynchronize(st));
    GIVES(ZCU_ERROR_ILLEGAL_ADDRESS, d->CtxSynchronize());
    CHECK(__atomic_load_n(page, __ATOMIC_ACQUIRE) == 0);
}

/* ---- memory of the device, over processes ---- */

static void take_a_gibibyte(int sock) {
    char byte;
    open_sim();
    alloc(pool_new(), 1024 * MIB);
    peer_send(sock, "t", 1, -1);
    peer_recv(sock, &byte, 1);
}

CASE(memory_is_shared_and_comes_back_from_the_dead) {
    size_t before, now, total;
    zcu_ptr p;
    char byte;
    setenv("SIMCUDA_MEMORY", "1500MiB", 1);
    struct peer peer = peer_start(take_a_gibibyte);
    open_sim();
    OK(d->MemGetInfo(&before, &total));
    CHECK(total == 1500 * MIB);
    peer_recv(peer.sock, &byte, 1);
    OK(d->MemGetInfo(&now, &total));
    CHECK(now == 476 * MIB, "%zu", now);
    zcu_pool pool = pool_new();
    GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->MemAllocFromPoolAsync(&p, 1024 * MIB, pool, st));
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    OK(d->MemAllocFromPoolAsync(&p, 1024 * MIB, pool, st));
}

CASE(free_memory_moves_for_a_larger_allocation) {
    zcu_ptr p[5], large;
    setenv("SIMCUDA_MEMORY", "640MiB", 1);
    open_sim();
    zcu_pool pool = pool_new();
    for (int i = 0; i < 5; i++) p[i] = alloc(pool, 128 * MIB);
    GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->MemAllocFromPoolAsync(&large, MIB, pool, st));
    OK(d->MemFreeAsync(p[1], st));
    OK(d->MemFreeAsync(p[3], st));
    OK(d->StreamSynchronize(st));
    large = alloc(pool, 256 * MIB);
    OK(d->MemsetD8Async(large, 9, 256 * MIB, st));
    OK(d->StreamSynchronize(st));
    CHECK(peek(large) == 9 && peek(large + 256 * MIB - 1) == 9);
}

CASE(another_stream_waits_for_the_free_that_it_needs) {
    zcu_ptr p, q;
    setenv("SIMCUDA_MEMORY", "64MiB", 1);
    open_sim();
    zcu_pool pool = pool_new();
    p = alloc(pool, 64 * MIB);
    OK(d->StreamSynchronize(st));
    CHECK(sim.hold(st) == 0);
    OK(d->MemFreeAsync(p, st));
    OK(d->MemAllocFromPoolAsync(&q, 64 * MIB, pool, other));
    CHECK(q == p);
    OK(d->MemsetD8Async(q, 3, 1, other));
    GIVES(ZCU_ERROR_NOT_READY, d->StreamQuery(other));
    sim.release(st);
    OK(d->StreamSynchronize(other));
    CHECK(peek(q) == 3);
    CHECK(sim.races() == 0);
}

/* ---- a peer that has an import, and what it does with it on command ---- */

struct order {
    enum { READ, WRITE, WAIT, POST, UNIMPORT, SIDE_WRITE, SYNC, ALL_OF_IT, RECORD, FORK } what;
    zcu_pool_blob blob;
    zcu_ipc_event event;
};

static void posted(int slot) {
    while (__atomic_load_n(&page[slot * 8], __ATOMIC_ACQUIRE) != 1) usleep(100);
}

static void obey(int sock) {
    struct order o;
    zcu_pool pool;
    zcu_ptr p;
    zcu_event e;
    unsigned char byte;
    pid_t child;
    int fd = peer_recv(sock, &o, sizeof o);
    open_sim();
    OK(d->MemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)fd, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fd);
    OK(d->MemPoolImportPointer(&p, pool, &o.blob));
    for (;;) {
        peer_send(sock, "k", 1, -1);
        if (peer_recv(sock, &o, sizeof o) == -2) return;
        switch (o.what) {
        case READ: OK(d->MemcpyDtoHAsync(&byte, p, 1, st)); break;
        case WRITE: OK(d->MemsetD8Async(p, 5, MIB, st)); break;
        case WAIT: OK(d->StreamWaitValue64(st, counters, 1, 0)); break;
        case POST: OK(d->StreamWriteValue64(st, counters + 64, 1, 0)); break;
        case UNIMPORT: OK(d->MemFreeAsync(p, st)); break;
        case SIDE_WRITE:
            OK(d->MemsetD8Async(p, 6, MIB, other));
            while (sim.pending(other)) usleep(100); /* done, but nobody was told */
            break;
        case SYNC: OK(d->StreamSynchronize(st)); break;
        case FORK:
            CHECK((child = fork()) >= 0);
            if (child) break;
            alarm(CASE_SECONDS);
            close(sock);
            while (!__atomic_load_n(&page[16], __ATOMIC_ACQUIRE)) usleep(100);
            _exit(0);
        case RECORD:
            OK(d->IpcOpenEventHandle(&e, o.event));
            OK(d->EventRecord(e, st));
            break;
        default: break;
        }
    }
}

static void order_peer(const struct peer *peer, int what) {
    struct order o = {.what = what};
    char byte;
    peer_send(peer->sock, &o, sizeof o, -1);
    peer_recv(peer->sock, &byte, 1);
}

static zcu_pool lent_pool;

/* A peer that has one MiB of ours imported; our stream is held behind what was queued for it. */
static zcu_ptr lend(struct peer *peer) {
    struct order o = {.what = READ};
    char byte;
    int fd;
    page_new();
    *peer = peer_start(obey);
    open_sim();
    lent_pool = pool_new();
    OK(d->MemPoolExportToShareableHandle(&fd, lent_pool, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    zcu_ptr p = alloc(lent_pool, MIB);
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolExportPointer(&o.blob, p));
    peer_send(peer->sock, &o, sizeof o, fd);
    close(fd);
    peer_recv(peer->sock, &byte, 1);
    return p;
}

CASE(the_protocol_has_no_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    for (int i = 0; i < 3; i++) OK(d->MemsetD8Async(p, 4, MIB, st));
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    order_peer(&peer, WAIT);
    order_peer(&peer, READ);
    order_peer(&peer, WRITE);
    order_peer(&peer, UNIMPORT);
    order_peer(&peer, POST);
    posted(1);
    unsigned char byte;
    OK(d->MemcpyDtoHAsync(&byte, p, 1, other));
    CHECK(byte == 5);
    OK(d->MemFreeAsync(p, other)); /* any stream: the host has seen DONE */
    OK(d->StreamSynchronize(other));
    CHECK(sim.races() == 0);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_read_before_ready_is_a_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    OK(d->MemsetD8Async(p, 4, MIB, st));
    while (sim.pending(st)) usleep(100);
    CHECK(peek(p) == 4, "the bytes are right");
    order_peer(&peer, READ);
    CHECK(sim.races() == 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(ready_posted_before_the_last_write_is_a_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    OK(d->MemsetD8Async(p, 4, MIB, st));
    while (sim.pending(st)) usleep(100);
    order_peer(&peer, WAIT);
    order_peer(&peer, READ);
    CHECK(sim.races() == 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_free_without_done_is_a_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    order_peer(&peer, WRITE);
    order_peer(&peer, UNIMPORT); /* executed or not: nobody was told */
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() >= 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_free_of_what_is_still_imported_is_a_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    order_peer(&peer, WRITE);
    order_peer(&peer, POST); /* and no un-import before it */
    posted(1);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() == 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(an_unimport_after_done_is_a_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    order_peer(&peer, WRITE);
    order_peer(&peer, POST);
    order_peer(&peer, UNIMPORT);
    posted(1);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() >= 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_side_stream_that_nothing_joins_is_a_race) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    order_peer(&peer, SIDE_WRITE);
    order_peer(&peer, UNIMPORT);
    order_peer(&peer, POST);
    posted(1);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() == 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_use_after_the_free_is_a_race) {
    open_sim();
    zcu_ptr p = alloc(pool_new(), MIB);
    OK(d->MemFreeAsync(p, st));
    OK(d->MemsetD8Async(p, 1, MIB, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() == 1);
}

CASE(a_free_on_the_wrong_stream_is_a_race) {
    open_sim();
    zcu_ptr p = alloc(pool_new(), MIB);
    OK(d->MemsetD8Async(p, 1, MIB, st));
    OK(d->MemFreeAsync(p, other));
    OK(d->CtxSynchronize());
    CHECK(sim.races() >= 1);
}

CASE(what_the_dead_did_is_over) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    order_peer(&peer, WRITE);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() == 0);
}

CASE(but_not_while_a_child_of_theirs_lives) {
    struct peer peer;
    zcu_ptr p = lend(&peer);
    order_peer(&peer, FORK);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() == 1, "it has the memory imported");
    __atomic_store_n(&page[16], 1, __ATOMIC_RELEASE);
}

/* READY was posted long ago, and the hosts taken together know it; but this importer's never asked. */
static void read_after(int wait, long races) {
    struct peer peer;
    setenv("SIMCUDA_BLIND", "1", 1);
    zcu_ptr p = lend(&peer);
    OK(d->MemsetD8Async(p, 4, MIB, st));
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    posted(0);
    if (wait) order_peer(&peer, WAIT);
    order_peer(&peer, READ);
    order_peer(&peer, SYNC);
    CHECK(sim.races() == races);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_wait_that_is_missing_is_a_race_to_the_blind) { read_after(0, 1); }
CASE(a_wait_is_enough_for_the_blind) { read_after(1, 0); }

CASE(events_and_barriers_order) {
    zcu_event e;
    zcu_stream blocking;
    open_sim();
    zcu_ptr p = alloc(pool_new(), MIB);
    OK(d->StreamCreate(&blocking, 0));
    OK(d->EventCreate(&e, ZCU_EVENT_DISABLE_TIMING));
    OK(d->MemsetD8Async(p, 1, MIB, st));
    OK(d->EventRecord(e, st));
    OK(d->StreamWaitEvent(blocking, e, 0));
    OK(d->MemsetD8Async(p, 2, MIB, blocking));
    OK(d->MemsetD8Async(p, 3, MIB, NULL));
    OK(d->MemsetD8Async(p, 4, MIB, blocking));
    OK(d->StreamSynchronize(blocking));
    OK(d->MemsetD8Async(p, 5, MIB, other));
    OK(d->StreamSynchronize(other));
    CHECK(peek(p) == 5 && sim.races() == 0);
}

/* A stream that records an event which a dead process left pending never moves again. */
CASE(a_record_behind_the_dead_hangs) {
    struct peer peer;
    struct order o = {.what = RECORD};
    zcu_event e;
    char byte;
    lend(&peer);
    OK(d->EventCreate(&e, ZCU_EVENT_DISABLE_TIMING | ZCU_EVENT_INTERPROCESS));
    OK(d->IpcGetEventHandle(&o.event, e));
    order_peer(&peer, WAIT);
    peer_send(peer.sock, &o, sizeof o, -1);
    peer_recv(peer.sock, &byte, 1);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    OK(d->EventRecord(e, st));
    for (int i = 0; i < 100; i++) {
        GIVES(ZCU_ERROR_NOT_READY, d->StreamQuery(st));
        GIVES(ZCU_ERROR_NOT_READY, d->EventQuery(e));
        usleep(200);
    }
    CHECK(sim.pending(st) == 1);
}

int main(void) {
    ALONE(a_held_stream_goes_one_step_at_a_time);
    ALONE(a_step_that_is_not_ready_times_out);
    ALONE(streams_overtake_each_other);
    ALONE(a_free_poisons_when_it_is_executed);
    ALONE(a_long_kernel_keeps_its_stream_busy);
    ALONE(the_nth_call_fails);
    ALONE(a_failure_from_the_environment_is_logged);
    ALONE(an_older_driver_lacks_symbols);
    ALONE(a_post_into_unregistered_memory_is_a_fault);
    ALONE(after_a_fault_nothing_is_executed);
    ALONE(memory_is_shared_and_comes_back_from_the_dead);
    ALONE(free_memory_moves_for_a_larger_allocation);
    ALONE(another_stream_waits_for_the_free_that_it_needs);
    ALONE(the_protocol_has_no_race);
    ALONE(a_read_before_ready_is_a_race);
    ALONE(ready_posted_before_the_last_write_is_a_race);
    ALONE(a_free_without_done_is_a_race);
    ALONE(a_free_of_what_is_still_imported_is_a_race);
    ALONE(an_unimport_after_done_is_a_race);
    ALONE(a_side_stream_that_nothing_joins_is_a_race);
    ALONE(a_use_after_the_free_is_a_race);
    ALONE(a_free_on_the_wrong_stream_is_a_race);
    ALONE(what_the_dead_did_is_over);
    ALONE(but_not_while_a_child_of_theirs_lives);
    ALONE(a_wait_that_is_missing_is_a_race_to_the_blind);
    ALONE(a_wait_is_enough_for_the_blind);
    ALONE(events_and_barriers_order);
    ALONE(a_record_behind_the_dead_hangs);
    return 0;
}
