/* simcuda.h: what the tests of the simulated driver share: its controls, two streams, a page of counters.
 *
 * Each case has a process of its own and a session of its own: races are counted in it. */
#ifndef ZCX_SIMCUDA_H
#define ZCX_SIMCUDA_H

#include "cases.h"

#include <sys/mman.h>
#include <time.h>

#define MIB (1ull << 20)
#define GIVES(code, call)                                                                               \
    do {                                                                                                \
        int result_ = (call);                                                                           \
        CHECK(result_ == (code), "%s gave %s", #call, zcx_driver_error_name(result_));                  \
    } while (0)
#define OK(call) GIVES(ZCU_SUCCESS, call)

static const struct zcx_driver *d;
static zcu_stream st, other;
static uint64_t *page;      /* counters; mapped before the peer is forked */
static zcu_ptr counters;

static struct {
    int (*hold)(zcu_stream), (*step)(zcu_stream, int), (*release)(zcu_stream), (*spin)(zcu_stream, uint64_t);
    long (*pending)(zcu_stream), (*injected)(void), (*count)(const char *), (*races)(void);
    void (*fail)(const char *), (*fault)(int);
} sim;

static inline void open_sim(void) {
    struct zcx_err err = {0};
    zcu_ctx ctx;
    CHECK(zcx_driver_open(&d, &err) == 0, "%s", err.text);
    *(void **)&sim.hold = library_symbol("simcuda_hold");
    *(void **)&sim.step = library_symbol("simcuda_step");
    *(void **)&sim.release = library_symbol("simcuda_release");
    *(void **)&sim.spin = library_symbol("simcuda_spin");
    *(void **)&sim.pending = library_symbol("simcuda_pending");
    *(void **)&sim.injected = library_symbol("simcuda_injected");
    *(void **)&sim.count = library_symbol("simcuda_count");
    *(void **)&sim.races = library_symbol("simcuda_races");
    *(void **)&sim.fail = library_symbol("simcuda_fail");
    *(void **)&sim.fault = library_symbol("simcuda_fault");
    OK(d->DevicePrimaryCtxRetain(&ctx, 0));
    OK(d->CtxPushCurrent(ctx));
    OK(d->StreamCreate(&st, ZCU_STREAM_NON_BLOCKING));
    OK(d->StreamCreate(&other, ZCU_STREAM_NON_BLOCKING));
    if (!page) return;
    OK(d->MemHostRegister(page, 4096, ZCU_MEMHOSTREGISTER_DEVICEMAP));
    OK(d->MemHostGetDevicePointer(&counters, page, 0));
}

static inline void page_new(void) {
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
}

static inline zcu_pool pool_new(void) {
    zcu_pool_props props = {.alloc_type = ZCU_MEM_ALLOCATION_TYPE_PINNED,
                            .handle_types = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    uint64_t threshold = UINT64_MAX;
    zcu_pool pool;
    OK(d->MemPoolCreate(&pool, &props));
    OK(d->MemPoolSetAttribute(pool, ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    return pool;
}

static inline zcu_ptr alloc(zcu_pool pool, uint64_t n) {
    zcu_ptr p;
    OK(d->MemAllocFromPoolAsync(&p, n, pool, st));
    return p;
}

static inline unsigned char peek(zcu_ptr p) { return *(volatile unsigned char *)(uintptr_t)p; }

#define ALONE(test)                                                            \
    do {                                                                       \
        setenv("SIMCUDA_SESSION", #test, 1);                                   \
        RUN(test);                                                             \
    } while (0)

#endif
