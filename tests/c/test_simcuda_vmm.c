/* test_simcuda_vmm.c: the simulated driver's virtual memory management, and what outlives a process: charges, descriptors, work.
 *
 * What it shares with a card is in conformance.c. */
// sources: csrc/driver.c csrc/err.c
// needs: simcuda
#include "simcuda.h"

#define GRAIN (2 * MIB)
#define R ZCU_MEM_ACCESS_FLAGS_PROT_READ
#define RW ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE

static zcu_mem mem_new(uint64_t n) {
    zcu_mem_props props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .handle_types = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                           .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    zcu_mem h;
    OK(d->MemCreate(&h, n, &props, 0));
    return h;
}

static zcu_ptr reserve(uint64_t n) {
    zcu_ptr p;
    OK(d->MemAddressReserve(&p, n, 0, 0, 0));
    return p;
}

static int allow(zcu_ptr p, uint64_t n, int flags) {
    zcu_access_desc desc = {{ZCU_MEM_LOCATION_TYPE_DEVICE, 0}, flags};
    return d->MemSetAccess(p, n, &desc, 1);
}

static zcu_ptr map_new(zcu_mem h, uint64_t n, int flags) {
    zcu_ptr p = reserve(n);
    OK(d->MemMap(p, n, 0, h, 0));
    OK(allow(p, n, flags));
    return p;
}

static int mem_export(zcu_mem h) {
    int fd = -1;
    OK(d->MemExportToShareableHandle(&fd, h, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return fd;
}

static zcu_mem mem_import(int fd) {
    zcu_mem h;
    OK(d->MemImportFromShareableHandle(&h, (void *)(intptr_t)fd, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    return h;
}

static uint64_t charged(void) {
    size_t f, total;
    OK(d->MemGetInfo(&f, &total));
    return total - f;
}

static void set(zcu_ptr p, unsigned char byte, uint64_t n) {
    OK(d->MemsetD8Async(p, byte, n, st));
    OK(d->StreamSynchronize(st));
}

static void nothing_left(void) {
    CHECK(sim.count("handles") == 0 && sim.count("mappings") == 0 && sim.count("blocks") == 0 && sim.count("reservations") == 0);
    CHECK(charged() == 0);
}

/* ---- one process ---- */

CASE(what_is_refused) {
    zcu_mem_props props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    zcu_mem h, unshared;
    zcu_ptr p;
    size_t grain;
    int fd;
    open_sim();
    OK(d->MemGetAllocationGranularity(&grain, &props, ZCU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CHECK(grain == GRAIN);
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemCreate(&h, 0, &props, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemCreate(&h, GRAIN + 4096, &props, 0));
    OK(d->MemCreate(&unshared, GRAIN, &props, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemExportToShareableHandle(&fd, unshared, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    props.location.id = 1;
    GIVES(ZCU_ERROR_INVALID_DEVICE, d->MemCreate(&h, GRAIN, &props, 0));
    props.location.id = 0;
    props.handle_types = 2;
    GIVES(ZCU_ERROR_NOT_SUPPORTED, d->MemCreate(&h, GRAIN, &props, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemAddressReserve(&p, GRAIN + 1, 0, 0, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemAddressReserve(&p, GRAIN, 3 * GRAIN, 0, 0));
    h = mem_new(2 * GRAIN);
    p = reserve(4 * GRAIN);
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemMap(p, 2 * GRAIN, GRAIN, h, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemMap(p, 4 * GRAIN, 0, h, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemMap(p + 4096, GRAIN, 0, h, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemMap(p + 3 * GRAIN, 2 * GRAIN, 0, h, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemMap(p, GRAIN, 0, h + 1, 0));
    OK(d->MemMap(p, 2 * GRAIN, 0, h, 0));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemMap(p + GRAIN, 2 * GRAIN, 0, h, 0)); /* mapped already */
    GIVES(ZCU_ERROR_INVALID_VALUE, allow(p, 4 * GRAIN, RW));                  /* not all of it is mapped */
    GIVES(ZCU_ERROR_INVALID_VALUE, allow(p, 2 * GRAIN, 2));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemAddressFree(p, 4 * GRAIN));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemUnmap(p, GRAIN));
    OK(d->MemUnmap(p, 2 * GRAIN));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemUnmap(p, 2 * GRAIN));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemAddressFree(p, 2 * GRAIN));
    OK(d->MemAddressFree(p, 4 * GRAIN));
    OK(d->MemRelease(h));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemRelease(h));
    OK(d->MemRelease(unshared));
    fd = memfd_create("not of the driver", MFD_CLOEXEC);
    GIVES(ZCU_ERROR_INVALID_VALUE,
          d->MemImportFromShareableHandle(&h, (void *)(intptr_t)fd, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    nothing_left();
}

CASE(everything_is_counted) {
    open_sim();
    zcu_mem h = mem_new(3 * GRAIN), again;
    zcu_ptr p = map_new(h, 3 * GRAIN, RW);
    CHECK(sim.count("handles") == 1 && sim.count("mappings") == 1 && sim.count("blocks") == 1 && charged() == 3 * GRAIN);
    OK(d->MemRetainAllocationHandle(&again, (void *)(uintptr_t)(p + GRAIN + 5)));
    CHECK(again == h && sim.count("handles") == 2);
    OK(d->MemRelease(h));
    OK(d->MemRelease(again));
    CHECK(sim.count("handles") == 0 && charged() == 3 * GRAIN, "the mapping keeps it");
    set(p, 7, 3 * GRAIN);
    OK(d->MemUnmap(p, 3 * GRAIN));
    CHECK(sim.count("reservations") == 1 && charged() == 0);
    OK(d->MemAddressFree(p, 3 * GRAIN));
    nothing_left();
}

CASE(addresses_are_used_again_at_once) {
    open_sim();
    zcu_ptr p = reserve(5 * GRAIN);
    OK(d->MemAddressFree(p, 5 * GRAIN));
    CHECK(reserve(5 * GRAIN) == p);
    zcu_ptr q;
    OK(d->MemAddressReserve(&q, GRAIN, 64 * MIB, 0, 0));
    CHECK(q % (64 * MIB) == 0);
}

CASE(fresh_memory_is_not_zero) {
    open_sim();
    zcu_ptr p = map_new(mem_new(2 * GRAIN), 2 * GRAIN, R);
    CHECK(peek(p) == 0xDB && peek(p + GRAIN) == 0xDB && peek(p + 2 * GRAIN - 1) == 0xDB);
}

CASE(it_is_as_large_as_the_device) {
    zcu_mem_props props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    zcu_mem h, more;
    setenv("SIMCUDA_MEMORY", "64MiB", 1);
    open_sim();
    h = mem_new(48 * MIB);
    GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->MemCreate(&more, 18 * MIB, &props, 0));
    OK(d->MemCreate(&more, 16 * MIB, &props, 0));
    OK(d->MemRelease(h));
    OK(d->MemRelease(more));
    OK(d->MemCreate(&more, 64 * MIB, &props, 0));
}

CASE(each_of_its_calls_can_fail) {
    static const char *const names[] = {
        "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
        "cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"};
    zcu_mem_props props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    zcu_access_desc desc = {{ZCU_MEM_LOCATION_TYPE_DEVICE, 0}, RW};
    zcu_mem h = 0;
    zcu_ptr p = 0;
    size_t n = 0;
    int fd = -1;
    open_sim();
    sim.fail("*:1:999+");
    GIVES(999, d->MemGetAllocationGranularity(&n, &props, 0));
    GIVES(999, d->MemCreate(&h, GRAIN, &props, 0));
    GIVES(999, d->MemAddressReserve(&p, GRAIN, 0, 0, 0));
    GIVES(999, d->MemMap(p, GRAIN, 0, h, 0));
    GIVES(999, d->MemSetAccess(p, GRAIN, &desc, 1));
    GIVES(999, d->MemRetainAllocationHandle(&h, NULL));
    GIVES(999, d->MemGetAllocationPropertiesFromHandle(&props, h));
    GIVES(999, d->MemExportToShareableHandle(&fd, h, 1, 0));
    GIVES(999, d->MemImportFromShareableHandle(&h, NULL, 1));
    GIVES(999, d->MemUnmap(p, GRAIN));
    GIVES(999, d->MemAddressFree(p, GRAIN));
    GIVES(999, d->MemRelease(h));
    CHECK(sim.injected() == sizeof names / sizeof *names && !h && !p && !n && fd == -1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char rule[100];
        snprintf(rule, sizeof rule, "%s:2:2", names[i]);
        sim.fail(rule);
        d->MemCreate(&h, GRAIN, &props, 0);
        CHECK(sim.injected() == (long)(sizeof names / sizeof *names), "not the first, and no other call");
        if (!strcmp(names[i], "cuMemCreate")) {
            GIVES(ZCU_ERROR_OUT_OF_MEMORY, d->MemCreate(&h, GRAIN, &props, 0));
            break;
        }
        OK(d->MemRelease(h));
    }
    sim.fail("");
    OK(d->MemRelease(h));
    nothing_left();
}

/* ---- work and unmapping ---- */

CASE(unmapping_what_queued_work_touches_is_a_race) {
    open_sim();
    zcu_ptr p = map_new(mem_new(GRAIN), GRAIN, RW);
    CHECK(sim.hold(st) == 0);
    OK(d->MemsetD8Async(p, 1, GRAIN, st));
    OK(d->MemUnmap(p, GRAIN));
    CHECK(sim.races() == 1);
    CHECK(sim.step(st, 10000) == -1);
    GIVES(ZCU_ERROR_ILLEGAL_ADDRESS, d->StreamQuery(other));
}

CASE(unmapping_before_the_end_of_the_work_is_known_is_a_race) {
    open_sim();
    zcu_ptr p = map_new(mem_new(GRAIN), GRAIN, RW);
    OK(d->MemsetD8Async(p, 1, GRAIN, st));
    while (sim.pending(st)) usleep(100);
    OK(d->MemUnmap(p, GRAIN));
    CHECK(sim.races() == 1);
}

CASE(unmapping_after_it_is_not) {
    page_new();
    open_sim();
    zcu_ptr p = map_new(mem_new(GRAIN), GRAIN, RW), q = map_new(mem_new(GRAIN), GRAIN, RW);
    set(p, 1, GRAIN);
    OK(d->MemUnmap(p, GRAIN));
    OK(d->MemcpyDtoDAsync(q, q + MIB, MIB, other));
    OK(d->StreamWriteValue64(other, counters, 1, 0));
    while (__atomic_load_n(page, __ATOMIC_ACQUIRE) != 1) usleep(100);
    OK(d->MemUnmap(q, GRAIN));
    CHECK(sim.races() == 0);
}

CASE(the_same_bytes_by_another_address_are_a_race) {
    open_sim();
    zcu_mem h = mem_new(2 * GRAIN);
    zcu_ptr p = map_new(h, 2 * GRAIN, RW), q = map_new(h, 2 * GRAIN, RW);
    OK(d->MemsetD8Async(p, 1, GRAIN, st));
    OK(d->MemsetD8Async(q + GRAIN, 2, GRAIN, other));
    OK(d->CtxSynchronize());
    CHECK(sim.races() == 0 && peek(q) == 1 && peek(p + GRAIN) == 2);
    OK(d->MemsetD8Async(p, 1, GRAIN, st));
    OK(d->MemsetD8Async(q + GRAIN - 1, 2, 2, other));
    OK(d->CtxSynchronize());
    CHECK(sim.races() == 1);
}

/* ---- a peer that has a handle of ours, mapped, and what it does with it on command ---- */

struct order { enum { READ, WRITE, WAIT, POST, UNMAP, RELEASE, FORK, TELL_NOTHING } what; };

static void obey(int sock) {
    struct order o;
    unsigned char byte;
    pid_t child;
    int fd = peer_recv(sock, &o, sizeof o);
    open_sim();
    zcu_mem h = mem_import(fd);
    zcu_ptr p = map_new(h, GRAIN, RW);
    for (;;) {
        peer_send(sock, "k", 1, -1);
        if (peer_recv(sock, &o, sizeof o) == -2) return;
        switch (o.what) {
        case READ: OK(d->MemcpyDtoHAsync(&byte, p, 1, st)); break;
        case WRITE: OK(d->MemsetD8Async(p, 5, GRAIN, st)); break;
        case WAIT: OK(d->StreamWaitValue64(st, counters, 1, 0)); break;
        case POST: OK(d->StreamWriteValue64(st, counters + 64, 1, 0)); break;
        case UNMAP:
            OK(d->StreamSynchronize(st));
            OK(d->MemUnmap(p, GRAIN));
            break;
        case RELEASE: OK(d->MemRelease(h)); break;
        case FORK: /* until the page's third counter is set */
            CHECK((child = fork()) >= 0);
            if (child) break;
            alarm(CASE_SECONDS);
            close(sock);
            while (!__atomic_load_n(&page[16], __ATOMIC_ACQUIRE)) usleep(100);
            _exit(0);
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

/* One grain that a peer has mapped as well. */
static zcu_ptr lend(struct peer *peer, zcu_mem *out) {
    struct order o = {.what = TELL_NOTHING};
    char byte;
    page_new();
    *peer = peer_start(obey);
    open_sim();
    *out = mem_new(GRAIN);
    zcu_ptr p = map_new(*out, GRAIN, RW);
    set(p, 4, GRAIN);
    int fd = mem_export(*out);
    peer_send(peer->sock, &o, sizeof o, fd);
    close(fd);
    peer_recv(peer->sock, &byte, 1);
    return p;
}

static void posted(int slot) {
    while (__atomic_load_n(&page[slot * 8], __ATOMIC_ACQUIRE) != 1) usleep(100);
}

static void give_up(zcu_ptr p, zcu_mem h) {
    OK(d->MemUnmap(p, GRAIN));
    OK(d->MemAddressFree(p, GRAIN));
    OK(d->MemRelease(h));
}

CASE(the_protocol_has_no_race) {
    struct peer peer;
    zcu_mem h;
    zcu_ptr p = lend(&peer, &h);
    OK(d->MemsetD8Async(p, 3, GRAIN, st));
    OK(d->StreamWriteValue64(st, counters, 1, 0));
    order_peer(&peer, WAIT);
    order_peer(&peer, WRITE);
    order_peer(&peer, POST);
    posted(1);
    unsigned char byte;
    OK(d->MemcpyDtoHAsync(&byte, p, 1, other));
    CHECK(byte == 5);
    order_peer(&peer, UNMAP);
    order_peer(&peer, RELEASE);
    give_up(p, h);
    CHECK(sim.races() == 0);
    nothing_left();
    CHECK(peer_end(&peer) == 0);
}

CASE(a_write_by_its_mapping_and_ours_is_a_race) {
    struct peer peer;
    zcu_mem h;
    zcu_ptr p = lend(&peer, &h);
    order_peer(&peer, WRITE);
    while (peek(p + GRAIN - 1) != 5) usleep(100);
    OK(d->MemsetD8Async(p, 6, 1, st));
    OK(d->StreamSynchronize(st));
    CHECK(sim.races() == 1);
    CHECK(peer_end(&peer) == 0);
}

CASE(it_stays_charged_until_the_importer_lets_go) {
    struct peer peer;
    zcu_mem h;
    zcu_ptr p = lend(&peer, &h);
    give_up(p, h);
    CHECK(sim.count("blocks") == 0 && charged() == GRAIN);
    order_peer(&peer, RELEASE);
    CHECK(charged() == GRAIN, "still mapped");
    order_peer(&peer, UNMAP);
    CHECK(charged() == 0);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_dead_importer_holds_nothing) {
    struct peer peer;
    zcu_mem h;
    zcu_ptr p = lend(&peer, &h);
    order_peer(&peer, WRITE);
    give_up(p, h);
    CHECK(charged() == GRAIN);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    CHECK(charged() == 0 && sim.races() == 0);
}

CASE(a_mere_descriptor_holds_it) {
    open_sim();
    zcu_mem h = mem_new(GRAIN);
    zcu_ptr p = map_new(h, GRAIN, RW);
    int fd = mem_export(h);
    set(p, 9, GRAIN);
    give_up(p, h);
    CHECK(sim.count("blocks") == 0 && charged() == GRAIN);
    h = mem_import(dup(fd));
    p = map_new(h, GRAIN, R);
    CHECK(peek(p) == 9 && charged() == GRAIN);
    give_up(p, h);
    CHECK(charged() == GRAIN);
    close(fd);
    nothing_left();
}

CASE(a_mere_descriptor_holds_a_pools_memory) {
    zcu_pool_blob blob;
    int fd;
    open_sim();
    zcu_pool pool = pool_new();
    OK(d->MemPoolExportToShareableHandle(&fd, pool, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    zcu_ptr p = alloc(pool, MIB);
    OK(d->MemPoolExportPointer(&blob, p));
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolDestroy(pool));
    CHECK(charged() == 32 * MIB);
    close(fd);
    CHECK(charged() == 0);
}

static void import_wrong(int sock) {
    struct order o;
    setenv("SIMCUDA_BREAK", "vmm", 1);
    int fd = peer_recv(sock, &o, sizeof o);
    open_sim();
    zcu_ptr p = map_new(mem_import(fd), GRAIN, RW);
    CHECK(peek(p) != 4);
    set(p, 7, GRAIN);
}

CASE(an_import_that_shows_other_memory) {
    struct peer peer = peer_start(import_wrong);
    struct order o = {.what = TELL_NOTHING};
    open_sim();
    zcu_mem h = mem_new(GRAIN);
    zcu_ptr p = map_new(h, GRAIN, RW);
    set(p, 4, GRAIN);
    int fd = mem_export(h);
    peer_send(peer.sock, &o, sizeof o, fd);
    close(fd);
    CHECK(peer_end(&peer) == 0);
    CHECK(peek(p) == 4);
}

/* ---- what outlives a process ---- */

/* A peer that was killed with a write queued behind a counter, and perhaps a post after it; a child of it may live on until
 * page[16] is set. */
static zcu_ptr left_behind(zcu_mem *h, int with_child, int with_post) {
    struct peer peer;
    zcu_ptr p = lend(&peer, h);
    order_peer(&peer, WAIT);
    order_peer(&peer, WRITE);
    if (with_post) order_peer(&peer, POST);
    if (with_child) order_peer(&peer, FORK);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    return p;
}

static void no_more(void) { __atomic_store_n(&page[16], 1, __ATOMIC_RELEASE); }

CASE(work_goes_on_while_a_child_lives) {
    zcu_mem h;
    zcu_ptr p = left_behind(&h, 1, 1);
    CHECK(peek(p) == 4);
    __atomic_store_n(page, 1, __ATOMIC_RELEASE);
    posted(1);
    CHECK(peek(p) == 5 && peek(p + GRAIN - 1) == 5);
    no_more();
}

CASE(a_use_of_that_memory_meanwhile_is_a_race) {
    zcu_mem h;
    zcu_ptr p = left_behind(&h, 1, 0);
    set(p, 6, GRAIN); /* for somebody else: it was not given back yet */
    CHECK(sim.races() == 0, "so far: its write waits");
    CHECK(sim.hold(st) == 0);
    OK(d->MemsetD8Async(p, 7, GRAIN, st));
    __atomic_store_n(page, 1, __ATOMIC_RELEASE);
    while (peek(p + GRAIN - 1) != 5) usleep(100);
    sim.release(st);
    while (peek(p + GRAIN - 1) != 7) usleep(100);
    CHECK(sim.races() == 1, "and the bytes came out right");
    no_more();
}

CASE(work_without_a_child_is_over) {
    zcu_mem h;
    zcu_ptr p = left_behind(&h, 0, 1);
    __atomic_store_n(page, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 100; i++) {
        CHECK(peek(p) == 4 && __atomic_load_n(&page[8], __ATOMIC_ACQUIRE) == 0);
        usleep(500);
    }
}

CASE(its_memory_is_charged_while_a_child_lives) {
    zcu_mem h;
    zcu_ptr p = left_behind(&h, 1, 0);
    give_up(p, h);
    CHECK(charged() == GRAIN);
    no_more();
    while (charged()) usleep(100);
}

int main(void) {
    ALONE(what_is_refused);
    ALONE(everything_is_counted);
    ALONE(addresses_are_used_again_at_once);
    ALONE(fresh_memory_is_not_zero);
    ALONE(it_is_as_large_as_the_device);
    ALONE(each_of_its_calls_can_fail);
    ALONE(unmapping_what_queued_work_touches_is_a_race);
    ALONE(unmapping_before_the_end_of_the_work_is_known_is_a_race);
    ALONE(unmapping_after_it_is_not);
    ALONE(the_same_bytes_by_another_address_are_a_race);
    ALONE(the_protocol_has_no_race);
    ALONE(a_write_by_its_mapping_and_ours_is_a_race);
    ALONE(it_stays_charged_until_the_importer_lets_go);
    ALONE(a_dead_importer_holds_nothing);
    ALONE(a_mere_descriptor_holds_it);
    ALONE(a_mere_descriptor_holds_a_pools_memory);
    ALONE(an_import_that_shows_other_memory);
    ALONE(work_goes_on_while_a_child_lives);
    ALONE(a_use_of_that_memory_meanwhile_is_a_race);
    ALONE(work_without_a_child_is_over);
    ALONE(its_memory_is_charged_while_a_child_lives);
    return 0;
}
