/* conformance.c: what the driver does where it matters to this package: each case is a fact that the design stands on.
 *
 * It runs unchanged on the simulated driver and on a card (tests/py/test_conformance.py), so that the former cannot drift
 * from the latter. Found on driver 580.159.04, one H200. $ZCX_LIBCUDA names the library. A case that needs more devices than
 * there are says "skip". A stream is kept busy by a wait for a counter that nobody has posted, so no kernel is needed.
 * Does not: test the package (csrc/driver.c opens the library, that is all), nor how long anything takes. */
// sources: csrc/driver.c csrc/err.c
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include "cases.h"
#include "pool.h"

#define MIB (1ull << 20)
#define GIVES(code, call)                                                                               \
    do {                                                                                                \
        int result_ = (call);                                                                           \
        CHECK(result_ == (code), "%s gave %s", #call, zcx_driver_error_name(result_));                  \
    } while (0)
#define OK(call) GIVES(ZCU_SUCCESS, call)
#define FAILS(call) CHECK((call) != ZCU_SUCCESS, "%s", #call)

typedef struct { unsigned char bytes[64]; } ipc_mem;

/* What this process works with: each case has a process of its own. */
static const struct zcx_driver *d;
static zcu_ctx ctx;
static zcu_stream st;

/* ---- helpers ---- */

static void *symbol_or_null(const char *name) {
    void *library = dlopen(d->path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    return dlsym(library, name);
}

static void *symbol(const char *name) {
    void *s = symbol_or_null(name);
    CHECK(s, "%s", name);
    return s;
}

static int simulated(void) { return symbol_or_null("simcuda_races") != NULL; }

static void open_device(int ordinal) {
    struct zcx_err err = {0};
    zcu_device device;
    CHECK(zcx_driver_open(&d, &err) == 0, "%s", err.text);
    OK(d->DeviceGet(&device, ordinal));
    OK(d->DevicePrimaryCtxRetain(&ctx, device));
    OK(d->CtxPushCurrent(ctx));
    OK(d->StreamCreate(&st, ZCU_STREAM_NON_BLOCKING));
}

static void open_gpu(void) { open_device(0); }

static zcu_pool pool_on(int ordinal, int handle_types) {
    zcu_pool_props props = {.alloc_type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .handle_types = handle_types,
                            .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, ordinal}};
    uint64_t threshold = UINT64_MAX;
    zcu_pool pool;
    OK(d->MemPoolCreate(&pool, &props));
    OK(d->MemPoolSetAttribute(pool, ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    return pool;
}

static zcu_pool new_pool(void) { return pool_on(0, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR); }

static int export_fd(zcu_pool pool) {
    int fd = -1;
    OK(d->MemPoolExportToShareableHandle(&fd, pool, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return fd;
}

static zcu_ptr alloc(zcu_pool pool, uint64_t n) {
    zcu_ptr p;
    OK(d->MemAllocFromPoolAsync(&p, n, pool, st));
    return p;
}

static zcu_ptr filled(zcu_pool pool, uint64_t n, unsigned char byte) {
    zcu_ptr p = alloc(pool, n);
    OK(d->MemsetD8Async(p, byte, n, st));
    OK(d->StreamSynchronize(st));
    return p;
}

static unsigned char byte_at(zcu_ptr p) {
    unsigned char byte;
    OK(d->MemcpyDtoHAsync(&byte, p, 1, st));
    OK(d->StreamSynchronize(st));
    return byte;
}

static int read_result(zcu_ptr p) { /* of a read that may be refused, at the call or later */
    unsigned char byte;
    int r = d->MemcpyDtoHAsync(&byte, p, 1, st);
    return r ? r : d->StreamSynchronize(st);
}

static uint64_t field(const zcu_pool_blob *blob, int at) {
    uint64_t v;
    memcpy(&v, blob->bytes + at, sizeof v);
    return v;
}

static zcu_pool_blob window(const zcu_pool_blob *blob, uint64_t from, uint64_t size) {
    zcu_pool_blob w = *blob;
    uint64_t offset = field(blob, 24) + from;
    memcpy(w.bytes + 24, &offset, sizeof offset);
    memcpy(w.bytes + 32, &size, sizeof size);
    return w;
}

static uint64_t chunks(const zcu_pool_blob *blob) {
    uint64_t from = field(blob, 24), n = field(blob, 32);
    return (from + n - 1) / ZCX_CHUNK_BYTES - from / ZCX_CHUNK_BYTES + 1;
}

static uint64_t free_memory(void) {
    size_t f, total;
    OK(d->MemGetInfo(&f, &total));
    return f;
}

/* A page of counters that both processes map; made before the peer. */
static uint64_t *page_new(void) {
    int fd = memfd_create("counters", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(p != MAP_FAILED);
    close(fd);
    return p;
}

static zcu_ptr page_register(uint64_t *page) {
    zcu_ptr gpu;
    OK(d->MemHostRegister(page, 4096, ZCU_MEMHOSTREGISTER_PORTABLE | ZCU_MEMHOSTREGISTER_DEVICEMAP));
    OK(d->MemHostGetDevicePointer(&gpu, page, 0));
    return gpu;
}

/* On x86 a plain store and a plain load. */
static void store(uint64_t *counter, uint64_t value) { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }
static uint64_t load(const uint64_t *counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }

static void pause_briefly(void) {
    struct timespec t = {0, 200000};
    nanosleep(&t, NULL);
}

/* Until the case's alarm. */
#define UNTIL(condition) while (!(condition)) pause_briefly()

/* Nothing may happen for a moment: it can only fail to notice. */
#define STAYS(condition)                                                                                \
    for (int moment_ = 0; moment_ < 100; moment_++) {                                                   \
        CHECK(condition);                                                                               \
        pause_briefly();                                                                                \
    }

/* ---- messages between the two processes of a case ---- */

struct note {
    zcu_pool_blob blob[3];
    zcu_ipc_event event;
    ipc_mem mem;
    zcu_uuid uuid;
    uint64_t bytes;
    zcu_ptr address;
    int number;
};

static void tell(int sock, const struct note *n, int fd) { peer_send(sock, n, sizeof *n, fd); }

static struct note hear(int sock, int *fd) {
    struct note n;
    int got = peer_recv(sock, &n, sizeof n);
    CHECK(got != -2, "the other side is gone");
    if (fd) *fd = got;
    return n;
}

static zcu_pool import_pool(int fd) {
    zcu_pool pool;
    OK(d->MemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)fd, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fd);
    return pool;
}

static zcu_ptr import(zcu_pool pool, zcu_pool_blob *blob) {
    zcu_ptr p;
    OK(d->MemPoolImportPointer(&p, pool, blob));
    return p;
}

/* ---- pools and pointers ---- */

CASE(export_of_a_pointer_needs_the_handle_first) {
    zcu_pool_blob blob;
    open_gpu();
    zcu_pool pool = new_pool();
    zcu_ptr p = alloc(pool, MIB);
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemPoolExportPointer(&blob, p));
    close(export_fd(pool));
    OK(d->MemPoolExportPointer(&blob, p));
    CHECK(field(&blob, 32) == MIB, "size in the blob: %llu", (unsigned long long)field(&blob, 32));
}

CASE(export_of_an_interior_pointer_is_refused) {
    zcu_pool_blob blob;
    open_gpu();
    zcu_pool pool = new_pool();
    close(export_fd(pool));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemPoolExportPointer(&blob, alloc(pool, MIB) + 4096));
}

CASE(export_from_the_default_pool_is_refused) {
    zcu_pool_blob blob;
    zcu_ptr p;
    int fd;
    zcu_pool pool;
    open_gpu();
    OK(d->MemAllocAsync(&p, MIB, st));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemPoolExportPointer(&blob, p));
    OK(d->DeviceGetMemPool(&pool, 0));
    FAILS(d->MemPoolExportToShareableHandle(&fd, pool, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

static uint64_t id_of(zcu_ptr p) {
    struct zcx_ptr_info info;
    CHECK(zcx_driver_ptr_info(d, p, &info, NULL) == 0);
    return info.buffer_id;
}

CASE(buffer_ids_are_never_used_twice) {
    open_gpu();
    zcu_pool pool = new_pool();
    zcu_ptr a = alloc(pool, MIB), b = alloc(pool, MIB);
    uint64_t first = id_of(a);
    CHECK(first != id_of(b) && id_of(a) == first);
    OK(d->MemFreeAsync(a, st));
    zcu_ptr c = alloc(pool, MIB);
    CHECK(c == a, "the address is used again");
    CHECK(id_of(c) != first && id_of(c) != id_of(b));
}

CASE(attributes_of_a_pointer) {
    struct zcx_ptr_info info;
    int on_the_stack;
    open_gpu();
    zcu_pool pool = new_pool();
    zcu_ptr p = alloc(pool, 3 * MIB);
    CHECK(zcx_driver_ptr_info(d, p + 5000, &info, NULL) == 0);
    CHECK(info.base == p && info.size == 3 * MIB, "size %llu", (unsigned long long)info.size);
    CHECK(info.pool == pool && info.ordinal == 0 && info.type == ZCU_MEMORYTYPE_DEVICE && !info.legacy_ipc);
    CHECK(zcx_driver_ptr_info(d, (zcu_ptr)(uintptr_t)&on_the_stack, &info, NULL) == 0 && info.type == 0 && !info.pool);
}

CASE(the_current_pool_serves_plain_allocations) {
    zcu_result (*default_of)(zcu_pool *, zcu_device);
    zcu_pool standard, now;
    struct zcx_ptr_info info;
    zcu_ptr p;
    open_gpu();
    *(void **)&default_of = symbol("cuDeviceGetDefaultMemPool");
    OK(default_of(&standard, 0));
    OK(d->DeviceGetMemPool(&now, 0));
    CHECK(now == standard);
    zcu_pool pool = new_pool();
    OK(d->DeviceSetMemPool(0, pool));
    OK(d->DeviceGetMemPool(&now, 0));
    CHECK(now == pool);
    OK(d->MemAllocAsync(&p, MIB, st));
    CHECK(zcx_driver_ptr_info(d, p, &info, NULL) == 0 && info.pool == pool);
    OK(d->DeviceSetMemPool(0, standard));
    OK(d->MemAllocAsync(&p, MIB, st));
    CHECK(zcx_driver_ptr_info(d, p, &info, NULL) == 0 && info.pool == standard);
}

CASE(a_pool_needs_no_current_context) {
    zcu_ctx popped;
    zcu_pool now;
    open_gpu();
    OK(d->StreamSynchronize(st));
    OK(d->CtxPopCurrent(&popped));
    zcu_pool pool = new_pool();
    OK(d->DeviceSetMemPool(0, pool));
    OK(d->DeviceGetMemPool(&now, 0));
    CHECK(now == pool);
    close(export_fd(pool));
}

CASE(destroying_the_current_pool_makes_the_default_current) {
    zcu_pool standard, now;
    open_gpu();
    OK(d->DeviceGetMemPool(&standard, 0));
    zcu_pool pool = new_pool();
    OK(d->DeviceSetMemPool(0, pool));
    OK(d->MemPoolDestroy(pool));
    OK(d->DeviceGetMemPool(&now, 0));
    CHECK(now == standard);
}

CASE(a_destroyed_pool_serves_what_lives) {
    zcu_pool_blob blob;
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr p = filled(pool, MIB, 0x21);
    OK(d->MemPoolDestroy(pool));
    CHECK(byte_at(p + MIB - 1) == 0x21);
    OK(d->MemPoolExportPointer(&blob, p));
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    close(fd);
}

CASE(freed_memory_is_used_again_in_stream_order) {
    open_gpu();
    uint64_t *page = page_new();
    zcu_ptr counters = page_register(page);
    zcu_pool pool = new_pool();
    zcu_ptr a = filled(pool, MIB, 1);
    OK(d->StreamWaitValue64(st, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ)); /* the free below cannot have been executed */
    OK(d->MemFreeAsync(a, st));
    zcu_ptr b = alloc(pool, MIB);
    CHECK(b == a);
    OK(d->MemsetD8Async(b, 2, MIB, st));
    store(&page[0], 1);
    CHECK(byte_at(b) == 2 && byte_at(b + MIB - 1) == 2);
}

CASE(trim_returns_only_what_was_never_exported) {
    zcu_pool_blob blob;
    uint64_t n = 256 * MIB, slack = 96 * MIB, reserved;
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    uint64_t before = free_memory();
    zcu_ptr p = filled(pool, n, 1);
    CHECK(free_memory() + n <= before + slack);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolTrimTo(pool, 0));
    CHECK(free_memory() + slack >= before, "not exported: comes back");
    p = filled(pool, n, 1);
    OK(d->MemPoolExportPointer(&blob, p));
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolTrimTo(pool, 0));
    OK(d->MemPoolGetAttribute(pool, ZCU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    CHECK(reserved == 0, "%llu", (unsigned long long)reserved);
    CHECK(free_memory() + n <= before + slack, "exported: stays");
    p = filled(pool, n, 1);
    CHECK(free_memory() + 2 * n <= before + slack, "and is charged on top");
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolDestroy(pool));
    close(fd);
    CHECK(free_memory() + slack >= before, "until the pool and its descriptors are gone");
}

/* ---- imports ---- */

static void import_and_double(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_pool pool = import_pool(fd);
    zcu_ptr p = import(pool, &n.blob[0]);
    struct zcx_ptr_info info;
    CHECK(zcx_driver_ptr_info(d, p, &info, NULL) == 0 && info.base == p && info.pool == pool && info.ordinal == 0);
    CHECK(byte_at(p) == 0x31 && byte_at(p + n.bytes - 1) == 0x31);
    OK(d->MemsetD8Async(p + n.bytes - 1, 0x62, 1, st));
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    p = import(pool, &n.blob[0]); /* again, after the un-import */
    CHECK(byte_at(p + n.bytes - 1) == 0x62);
    OK(d->MemFreeAsync(p, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolDestroy(pool));
    tell(sock, &n, -1);
}

CASE(an_import_shows_the_exporters_bytes) {
    struct peer peer = peer_start(import_and_double);
    struct note n = {.bytes = 48 * MIB};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr before = alloc(pool, MIB), p = filled(pool, n.bytes, 0x31);
    OK(d->MemPoolExportPointer(&n.blob[0], p));
    tell(peer.sock, &n, fd);
    hear(peer.sock, NULL);
    CHECK(byte_at(p) == 0x31 && byte_at(p + n.bytes - 1) == 0x62);
    OK(d->MemFreeAsync(before, st));
    close(fd);
    CHECK(peer_end(&peer) == 0);
}

static void import_twice(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_pool pool = import_pool(fd);
    zcu_ptr a = import(pool, &n.blob[0]), b = import(pool, &n.blob[0]);
    CHECK(a == b);
    CHECK(byte_at(b) == 0x41);
    OK(d->MemFreeAsync(a, st));
    OK(d->StreamSynchronize(st));
    FAILS(read_result(b));
    _exit(0); /* the context may be poisoned */
}

CASE(the_first_free_unmaps_both_of_two_imports) {
    struct peer peer = peer_start(import_twice);
    struct note n = {.number = 0};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr p = filled(pool, 64 * MIB, 0x41);
    OK(d->MemPoolExportPointer(&n.blob[0], p));
    tell(peer.sock, &n, fd);
    CHECK(peer_end(&peer) == 0);
    CHECK(byte_at(p) == 0x41);
    close(fd);
}

static void import_neighbours(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_pool pool = import_pool(fd);
    zcu_ptr a = import(pool, &n.blob[0]), b = import(pool, &n.blob[1]);
    CHECK(byte_at(a) == 1 && byte_at(b) == 2);
    OK(d->MemFreeAsync(a, st));
    OK(d->StreamSynchronize(st));
    CHECK(byte_at(b) == 2);
}

CASE(an_unimport_leaves_the_neighbours_in_the_chunk) {
    struct peer peer = peer_start(import_neighbours);
    struct note n = {.number = 0};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    OK(d->MemPoolExportPointer(&n.blob[0], filled(pool, MIB, 1)));
    OK(d->MemPoolExportPointer(&n.blob[1], filled(pool, MIB, 2)));
    CHECK(field(&n.blob[0], 24) / ZCX_CHUNK_BYTES == field(&n.blob[1], 24) / ZCX_CHUNK_BYTES, "they share a chunk");
    tell(peer.sock, &n, fd);
    CHECK(peer_end(&peer) == 0);
    close(fd);
}

static void import_windows(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_pool pool = import_pool(fd);
    zcu_ptr a = import(pool, &n.blob[0]), b = import(pool, &n.blob[1]), c = import(pool, &n.blob[2]);
    CHECK(b == a + n.bytes && c == b + n.bytes, "contiguous");
    CHECK(byte_at(a) == 1 && byte_at(b) == 2 && byte_at(c) == 3);
    CHECK(byte_at(c + n.bytes - 1) == 3);
    OK(d->MemFreeAsync(a, st));
    OK(d->StreamSynchronize(st));
    CHECK(byte_at(b) == 2 && byte_at(c) == 3);
}

CASE(windows_of_a_blob_land_next_to_each_other) {
    struct peer peer = peer_start(import_windows);
    struct note n = {.bytes = ZCX_CHUNK_BYTES};
    zcu_pool_blob whole;
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr p = alloc(pool, 3 * n.bytes);
    for (int i = 0; i < 3; i++) OK(d->MemsetD8Async(p + (uint64_t)i * n.bytes, (unsigned char)(i + 1), n.bytes, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolExportPointer(&whole, p));
    CHECK(field(&whole, 32) == 3 * n.bytes);
    for (int i = 0; i < 3; i++) n.blob[i] = window(&whole, (uint64_t)i * n.bytes, n.bytes);
    tell(peer.sock, &n, fd);
    CHECK(peer_end(&peer) == 0);
    close(fd);
}

static void import_large(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_ptr p = import(import_pool(fd), &n.blob[0]);
    CHECK(byte_at(p) == 5 && byte_at(p + n.bytes - 1) == 6);
}

/* The importer's exit status. */
static int export_large(uint64_t bytes, uint64_t expected_chunks) {
    struct peer peer = peer_start(import_large);
    struct note n = {.bytes = bytes};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr p = alloc(pool, bytes);
    OK(d->MemsetD8Async(p, 5, 4096, st));
    OK(d->MemsetD8Async(p + bytes - 4096, 6, 4096, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolExportPointer(&n.blob[0], p));
    CHECK(chunks(&n.blob[0]) == expected_chunks, "%llu chunks", (unsigned long long)chunks(&n.blob[0]));
    tell(peer.sock, &n, fd);
    close(fd);
    return peer_end(&peer);
}

CASE(an_import_of_128_chunks_works) { CHECK(export_large(4096 * MIB, 128) == 0); }

static int sacrifice;

/* On a card this overruns the importer's stack, and may or may not kill it: only the simulated driver is made to. */
CASE(an_import_of_129_chunks_kills) {
    if (!sacrifice) return;
    CHECK(export_large(4128 * MIB, 129) == 128 + SIGSEGV);
}

static void import_refused(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_pool pool = import_pool(fd);
    uint64_t threshold = 0;
    zcu_access_desc access = {{ZCU_MEM_LOCATION_TYPE_DEVICE, 0}, ZCU_MEM_ACCESS_FLAGS_PROT_READ};
    zcu_ptr p;
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemPoolSetAttribute(pool, ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    GIVES(ZCU_ERROR_NOT_SUPPORTED, d->MemPoolSetAccess(pool, &access, 1));
    access.flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(d->MemPoolSetAccess(pool, &access, 1));
    FAILS(d->MemAllocFromPoolAsync(&p, MIB, pool, st));
    FAILS(d->DeviceSetMemPool(0, pool));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->MemPoolImportPointer(&p, pool, &n.blob[0])); /* chunks that were never exported */
}

CASE(what_an_imported_pool_refuses) {
    struct peer peer = peer_start(import_refused);
    struct note n = {.number = 0};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr p = filled(pool, 64 * MIB, 1);
    OK(d->MemPoolExportPointer(&n.blob[0], p));
    n.blob[0] = window(&n.blob[0], 1024 * MIB, MIB);
    tell(peer.sock, &n, fd);
    CHECK(peer_end(&peer) == 0);
    close(fd);
}

static void import_old(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    CHECK(byte_at(import(import_pool(fd), &n.blob[0])) != 0x52, "what was there before, or what the free left of it");
}

CASE(an_old_blob_does_not_show_what_is_there_now) {
    struct peer peer = peer_start(import_old);
    struct note n = {.number = 0};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr old = filled(pool, 64 * MIB, 0x51);
    OK(d->MemPoolExportPointer(&n.blob[0], old));
    OK(d->MemFreeAsync(old, st));
    OK(d->StreamSynchronize(st));
    OK(d->MemPoolTrimTo(pool, 0));
    zcu_ptr fresh = filled(pool, 64 * MIB, 0x52);
    CHECK(fresh == old, "the address is used again");
    tell(peer.sock, &n, fd);
    CHECK(peer_end(&peer) == 0);
    close(fd);
}

static void import_elsewhere(int sock) {
    char visible[64] = "GPU-";
    int fd, r;
    struct note n = hear(sock, &fd);
    for (int i = 0; i < 16; i++)
        sprintf(visible + strlen(visible), "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", n.uuid.bytes[i]);
    setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    open_gpu();
    CHECK(d->count == 1 && !memcmp(&d->uuid[0], &n.uuid, sizeof n.uuid));
    zcu_pool pool = import_pool(fd);
    zcu_ptr p = import(pool, &n.blob[0]);
    if (n.number) { /* the pool's own device, which had another number there */
        CHECK(byte_at(p) == 0x71);
        return;
    }
    zcu_access_desc access = {{ZCU_MEM_LOCATION_TYPE_DEVICE, 0}, ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    unsigned char byte;
    r = d->MemcpyDtoHAsync(&byte, p, 1, st);
    CHECK(r == ZCU_ERROR_INVALID_VALUE, "%s", zcx_driver_error_name(r));
    OK(d->MemPoolSetAccess(pool, &access, 1));
    CHECK(byte_at(p) == 0x71);
}

static int two_devices = 1; /* what the second of a case found out; see main */

/* Exporter on device 1; the importer sees only device 0 (same 0) or only device 1 (same 1). */
static void elsewhere(int same) {
    struct peer peer = peer_start(import_elsewhere);
    struct note n = {.number = same};
    int can = 0;
    struct zcx_err err = {0};
    CHECK(zcx_driver_open(&d, &err) == 0, "%s", err.text);
    if (d->count < 2 || d->DeviceCanAccessPeer(&can, 0, 1) || !can) {
        kill(peer.pid, SIGKILL);
        peer_end(&peer);
        exit(77);
    }
    open_device(1);
    zcu_pool pool = pool_on(1, ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    int fd = export_fd(pool);
    zcu_ptr p = filled(pool, MIB, 0x71);
    OK(d->MemPoolExportPointer(&n.blob[0], p));
    n.uuid = d->uuid[same];
    tell(peer.sock, &n, fd);
    CHECK(peer_end(&peer) == 0);
    close(fd);
}

static void hidden_here(void) { elsewhere(0); }
static void renumbered_here(void) { elsewhere(1); }

static void on_two_devices(void (*body)(void)) {
    int status = case_fork(body);
    CHECK(status == 0 || status == 77, "exit status %d", status);
    two_devices = status == 0;
}

static void a_hidden_device_gives_no_access_until_it_is_set(void) { on_two_devices(hidden_here); }
static void a_pools_descriptor_names_its_device(void) { on_two_devices(renumbered_here); }

static void open_legacy(int sock) {
    zcu_result (*open_handle)(zcu_ptr *, ipc_mem, unsigned), (*close_handle)(zcu_ptr);
    struct note n = hear(sock, NULL);
    zcu_ptr a, b;
    open_gpu();
    *(void **)&open_handle = symbol("cuIpcOpenMemHandle_v2");
    *(void **)&close_handle = symbol("cuIpcCloseMemHandle");
    OK(open_handle(&a, n.mem, 1));
    OK(open_handle(&b, n.mem, 1));
    CHECK(a == b && byte_at(b) == 0x42);
    OK(close_handle(a));
    CHECK(byte_at(b) == 0x42);
    OK(close_handle(b));
}

CASE(legacy_handles_are_counted) {
    struct peer peer = peer_start(open_legacy);
    struct note n = {.number = 0};
    zcu_result (*mem_alloc)(zcu_ptr *, size_t), (*get_handle)(ipc_mem *, zcu_ptr);
    struct zcx_ptr_info info;
    zcu_ptr p;
    open_gpu();
    *(void **)&mem_alloc = symbol("cuMemAlloc_v2");
    *(void **)&get_handle = symbol("cuIpcGetMemHandle");
    OK(mem_alloc(&p, MIB));
    CHECK(zcx_driver_ptr_info(d, p, &info, NULL) == 0 && info.legacy_ipc && !info.pool);
    OK(d->MemsetD8Async(p, 0x42, MIB, st));
    OK(d->StreamSynchronize(st));
    OK(get_handle(&n.mem, p));
    tell(peer.sock, &n, -1);
    CHECK(peer_end(&peer) == 0);
}

/* ---- virtual memory management ---- */

#define GRAIN (2 * MIB)
#define READ_ONLY ZCU_MEM_ACCESS_FLAGS_PROT_READ
#define READ_WRITE ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE

static const zcu_mem_props vmm_props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED,
                                        .handle_types = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                        .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};

static zcu_mem mem_new(uint64_t n) {
    zcu_mem h;
    OK(d->MemCreate(&h, n, &vmm_props, 0));
    return h;
}

static zcu_ptr reserve(uint64_t n) {
    zcu_ptr p;
    OK(d->MemAddressReserve(&p, n, 0, 0, 0));
    return p;
}

static void allow(zcu_ptr p, uint64_t n, int flags) {
    zcu_access_desc desc = {{ZCU_MEM_LOCATION_TYPE_DEVICE, 0}, flags};
    OK(d->MemSetAccess(p, n, &desc, 1));
}

static zcu_ptr mapped(zcu_mem h, uint64_t n, int flags) {
    zcu_ptr p = reserve(n);
    OK(d->MemMap(p, n, 0, h, 0));
    allow(p, n, flags);
    return p;
}

static void fill(zcu_ptr p, unsigned char byte, uint64_t n) {
    OK(d->MemsetD8Async(p, byte, n, st));
    OK(d->StreamSynchronize(st));
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

CASE(vmm_is_there_in_grains_of_two_mebibytes) {
    size_t grain = 0;
    zcu_mem h;
    open_gpu();
    CHECK(d->vmm[0]);
    OK(d->MemGetAllocationGranularity(&grain, &vmm_props, ZCU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CHECK(grain == GRAIN, "%zu", grain);
    FAILS(d->MemCreate(&h, GRAIN / 2, &vmm_props, 0));
}

CASE(an_address_gives_its_handle_back) {
    zcu_mem again;
    zcu_mem_props props;
    open_gpu();
    zcu_mem h = mem_new(GRAIN);
    zcu_ptr p = mapped(h, GRAIN, READ_WRITE);
    OK(d->MemRetainAllocationHandle(&again, (void *)(uintptr_t)(p + 5000)));
    CHECK(again == h);
    OK(d->MemRelease(h));
    OK(d->MemGetAllocationPropertiesFromHandle(&props, again));
    CHECK(props.type == ZCU_MEM_ALLOCATION_TYPE_PINNED && props.handle_types == ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CHECK(props.location.type == ZCU_MEM_LOCATION_TYPE_DEVICE && props.location.id == 0);
    close(mem_export(again));
    OK(d->MemRelease(again));
    OK(d->MemUnmap(p, GRAIN));
    OK(d->MemAddressFree(p, GRAIN));
}

CASE(pieces_are_one_range) {
    struct zcx_ptr_info info;
    open_gpu();
    zcu_mem a = mem_new(2 * GRAIN), b = mem_new(GRAIN);
    zcu_ptr p = reserve(8 * GRAIN);
    OK(d->MemMap(p, 2 * GRAIN, 0, a, 0));
    OK(d->MemMap(p + 2 * GRAIN, GRAIN, 0, b, 0));
    allow(p, 3 * GRAIN, READ_WRITE);
    fill(p, 1, 3 * GRAIN);
    fill(p + 2 * GRAIN - 10, 2, 20); /* over the seam */
    CHECK(byte_at(p + 2 * GRAIN - 1) == 2 && byte_at(p + 2 * GRAIN) == 2 && byte_at(p + 3 * GRAIN - 1) == 1);
    CHECK(zcx_driver_ptr_info(d, p + 2 * GRAIN + 5, &info, NULL) == 0);
    CHECK(info.type == ZCU_MEMORYTYPE_DEVICE && !info.pool && !info.legacy_ipc && info.ordinal == 0);
    CHECK(info.handle_types == ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "%u", info.handle_types);
}

CASE(a_handle_can_be_mapped_twice) {
    open_gpu();
    zcu_mem h = mem_new(GRAIN);
    zcu_ptr p = mapped(h, GRAIN, READ_WRITE), q = mapped(h, GRAIN, READ_ONLY);
    fill(p, 0x19, GRAIN);
    CHECK(p != q && byte_at(q) == 0x19 && byte_at(q + GRAIN - 1) == 0x19);
    OK(d->MemUnmap(p, GRAIN));
    CHECK(byte_at(q) == 0x19, "the other mapping stays");
}

CASE(a_mapping_gives_no_access_by_itself) {
    open_gpu();
    zcu_mem h = mem_new(GRAIN);
    zcu_ptr p = mapped(h, GRAIN, READ_WRITE), q = reserve(GRAIN);
    fill(p, 3, GRAIN);
    OK(d->MemMap(q, GRAIN, 0, h, 0));
    FAILS(read_result(q));
    _exit(0); /* the context may be poisoned */
}

CASE(vmm_memory_comes_back_with_its_last_reference) {
    uint64_t n = 256 * MIB, slack = 64 * MIB;
    open_gpu();
    OK(d->MemUnmap(mapped(mem_new(GRAIN), GRAIN, READ_WRITE), GRAIN));
    uint64_t before = free_memory();
    zcu_mem h = mem_new(n);
    zcu_ptr p = mapped(h, n, READ_WRITE);
    int fd = mem_export(h);
    fill(p, 4, n);
    CHECK(free_memory() + n <= before + slack);
    OK(d->MemRelease(h));
    CHECK(free_memory() + n <= before + slack && byte_at(p) == 4, "it is mapped");
    OK(d->MemUnmap(p, n));
    CHECK(free_memory() + n <= before + slack, "a descriptor is open");
    h = mem_import(fd);
    p = mapped(h, n, READ_ONLY);
    CHECK(byte_at(p) == 4);
    OK(d->MemUnmap(p, n));
    CHECK(free_memory() + n <= before + slack, "a handle is open");
    OK(d->MemRelease(h));
    CHECK(free_memory() + slack >= before);
}

static void vmm_read_then_write(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_ptr p = mapped(mem_import(fd), n.bytes, READ_ONLY);
    CHECK(byte_at(p) == 0x33 && byte_at(p + n.bytes - 1) == 0x33);
    int r = d->MemsetD8Async(p + n.bytes / 2, 0x44, MIB, st);
    if (!r) GIVES(ZCU_ERROR_ILLEGAL_ADDRESS, d->StreamSynchronize(st)); /* a kernel's write: this always */
    else printf("a memset of memory that may only be read gives %s at the call\n", zcx_driver_error_name(r));
    fflush(stdout);
    tell(sock, &n, -1);
    _exit(0);
}

CASE(a_write_to_a_read_only_mapping_hits_the_writer_only) {
    struct peer peer = peer_start(vmm_read_then_write);
    struct note n = {.bytes = 32 * MIB};
    open_gpu();
    zcu_mem h = mem_new(n.bytes);
    zcu_ptr p = mapped(h, n.bytes, READ_WRITE);
    fill(p, 0x33, n.bytes);
    int fd = mem_export(h);
    tell(peer.sock, &n, fd);
    close(fd);
    hear(peer.sock, NULL);
    CHECK(peer_end(&peer) == 0);
    CHECK(byte_at(p + n.bytes / 2) == 0x33 && byte_at(p + n.bytes / 2 + MIB - 1) == 0x33);
    fill(p, 0x55, n.bytes);
    CHECK(byte_at(p) == 0x55);
}

static void vmm_no_access(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_ptr p = reserve(n.bytes);
    OK(d->MemMap(p, n.bytes, 0, mem_import(fd), 0));
    FAILS(read_result(p));
    tell(sock, &n, -1);
    _exit(0);
}

CASE(an_importer_needs_rights_of_its_own) {
    struct peer peer = peer_start(vmm_no_access);
    struct note n = {.bytes = GRAIN};
    open_gpu();
    zcu_mem h = mem_new(n.bytes);
    zcu_ptr p = mapped(h, n.bytes, READ_WRITE);
    fill(p, 0x21, n.bytes);
    int fd = mem_export(h);
    tell(peer.sock, &n, fd);
    close(fd);
    hear(peer.sock, NULL);
    CHECK(peer_end(&peer) == 0);
    CHECK(byte_at(p) == 0x21);
}

static void vmm_hold(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    zcu_access_desc desc = {{ZCU_MEM_LOCATION_TYPE_DEVICE, 0}, READ_WRITE};
    open_gpu();
    zcu_mem h = mem_import(fd);
    zcu_ptr p = reserve(n.bytes);
    FAILS(d->MemSetAccess(p, n.bytes, &desc, 1)); /* nothing is mapped */
    OK(d->MemMap(p, n.bytes, 0, h, 0));
    OK(d->MemRelease(h)); /* the mapping keeps it */
    OK(d->MemSetAccess(p, n.bytes, &desc, 1));
    CHECK(byte_at(p) == 0x61);
    fill(p, 0x62, n.bytes);
    tell(sock, &n, -1);
    hear(sock, NULL);
}

CASE(a_killed_vmm_importer_leaves_the_exporter_whole) {
    struct peer peer = peer_start(vmm_hold);
    struct note n = {.bytes = 32 * MIB};
    open_gpu();
    zcu_mem h = mem_new(n.bytes);
    zcu_ptr p = mapped(h, n.bytes, READ_WRITE);
    fill(p, 0x61, n.bytes);
    int fd = mem_export(h);
    tell(peer.sock, &n, fd);
    close(fd);
    hear(peer.sock, NULL);
    CHECK(byte_at(p) == 0x62 && byte_at(p + n.bytes - 1) == 0x62);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    CHECK(byte_at(p) == 0x62);
    fill(p, 0x63, n.bytes);
    CHECK(byte_at(p) == 0x63);
}

/* ---- counters ---- */

static uint64_t *shared_page;

static void wait_then_post(int sock) {
    open_gpu();
    zcu_ptr counters = page_register(shared_page);
    struct note n = {.number = 1};
    OK(d->StreamWaitValue64(st, counters, 7, ZCU_STREAM_WAIT_VALUE_GEQ)); /* before it is posted */
    OK(d->StreamWriteValue64(st, counters + 64, 9, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    tell(sock, &n, -1);
    OK(d->StreamSynchronize(st));
    hear(sock, NULL);
}

CASE(a_stream_waits_for_a_counter_of_another_process) {
    shared_page = page_new();
    struct peer peer = peer_start(wait_then_post);
    open_gpu();
    zcu_ptr counters = page_register(shared_page);
    struct note n = hear(peer.sock, NULL);
    STAYS(load(&shared_page[8]) == 0);
    OK(d->StreamWriteValue64(st, counters, 6, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    STAYS(load(&shared_page[8]) == 0);
    OK(d->StreamWriteValue64(st, counters, 8, ZCU_STREAM_WRITE_VALUE_DEFAULT)); /* more than it waits for */
    UNTIL(load(&shared_page[8]) == 9);
    tell(peer.sock, &n, -1);
    CHECK(peer_end(&peer) == 0);
}

CASE(a_plain_store_frees_a_waiting_stream) {
    open_gpu();
    uint64_t *page = page_new();
    zcu_ptr counters = page_register(page);
    OK(d->StreamWaitValue64(st, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    OK(d->StreamWriteValue64(st, counters + 8, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    STAYS(load(&page[1]) == 0 && d->StreamQuery(st) == ZCU_ERROR_NOT_READY);
    store(&page[0], 1);
    OK(d->StreamSynchronize(st));
    CHECK(load(&page[1]) == 1);
}

CASE(a_counter_inside_a_pool_is_refused) {
    open_gpu();
    zcu_ptr p = alloc(new_pool(), MIB);
    GIVES(ZCU_ERROR_INVALID_VALUE, d->StreamWriteValue64(st, p, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    GIVES(ZCU_ERROR_INVALID_VALUE, d->StreamWaitValue64(st, p, 0, ZCU_STREAM_WAIT_VALUE_GEQ));
}

static void die_waiting(int sock) {
    open_gpu();
    zcu_ptr counters = page_register(shared_page);
    struct note n = {.number = 1};
    OK(d->StreamWaitValue64(st, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    OK(d->StreamWriteValue64(st, counters + 64, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    tell(sock, &n, -1);
    hear(sock, NULL);
}

CASE(a_dead_process_posts_nothing) {
    shared_page = page_new();
    struct peer peer = peer_start(die_waiting);
    open_gpu();
    zcu_ptr counters = page_register(shared_page);
    hear(peer.sock, NULL);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    store(&shared_page[0], 1);
    STAYS(load(&shared_page[8]) == 0);
    OK(d->StreamWaitValue64(st, counters + 64, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    store(&shared_page[8], 1); /* and its waiters are free at once */
    OK(d->StreamSynchronize(st));
}

static void die_with_a_child(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    zcu_ptr counters = page_register(shared_page), p = mapped(mem_import(fd), n.bytes, READ_WRITE);
    CHECK(byte_at(p) == 0x11);
    OK(d->StreamWaitValue64(st, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    OK(d->MemsetD8Async(p, 0x77, n.bytes, st));
    OK(d->StreamWriteValue64(st, counters + 64, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { /* it has the driver's descriptors, and touches nothing */
        alarm(CASE_SECONDS);
        close(sock);
        UNTIL(load(&shared_page[16]));
        _exit(0);
    }
    tell(sock, &n, -1);
    hear(sock, NULL);
}

CASE(the_work_of_the_dead_goes_on_while_a_child_lives) {
    shared_page = page_new();
    struct peer peer = peer_start(die_with_a_child);
    struct note n = {.bytes = GRAIN};
    open_gpu();
    page_register(shared_page);
    zcu_mem h = mem_new(n.bytes);
    zcu_ptr p = mapped(h, n.bytes, READ_WRITE);
    fill(p, 0x11, n.bytes);
    int fd = mem_export(h);
    tell(peer.sock, &n, fd);
    close(fd);
    hear(peer.sock, NULL);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    CHECK(byte_at(p) == 0x11);
    store(&shared_page[0], 1); /* reaped; and still: */
    UNTIL(load(&shared_page[8]) == 1);
    CHECK(byte_at(p) == 0x77 && byte_at(p + n.bytes - 1) == 0x77);
    store(&shared_page[16], 1);
}

/* ---- events ---- */

static zcu_event event_new(unsigned flags) {
    zcu_event e;
    OK(d->EventCreate(&e, ZCU_EVENT_DISABLE_TIMING | flags));
    return e;
}

static void record_imported(int sock) {
    zcu_event e;
    struct note n = hear(sock, NULL);
    open_gpu();
    zcu_ptr counters = page_register(shared_page);
    OK(d->IpcOpenEventHandle(&e, n.event));
    OK(d->StreamWaitEvent(st, e, 0)); /* never recorded: a no-op */
    OK(d->StreamSynchronize(st));
    OK(d->StreamWaitValue64(st, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    OK(d->EventRecord(e, st));
    tell(sock, &n, -1);
    if (n.number == 0) OK(d->StreamSynchronize(st));
    hear(sock, NULL);
}

CASE(an_event_crosses_processes) {
    shared_page = page_new();
    struct peer peer = peer_start(record_imported);
    struct note n = {.number = 0};
    open_gpu();
    zcu_event e = event_new(ZCU_EVENT_INTERPROCESS);
    OK(d->IpcGetEventHandle(&n.event, e));
    CHECK(d->EventQuery(e) == ZCU_SUCCESS, "never recorded");
    tell(peer.sock, &n, -1);
    hear(peer.sock, NULL);
    STAYS(d->EventQuery(e) == ZCU_ERROR_NOT_READY);
    store(&shared_page[0], 1);
    UNTIL(d->EventQuery(e) == ZCU_SUCCESS);
    OK(d->StreamWaitEvent(st, e, 0));
    OK(d->StreamSynchronize(st));
    tell(peer.sock, &n, -1);
    CHECK(peer_end(&peer) == 0);
}

CASE(an_event_of_the_dead_stays_pending) {
    shared_page = page_new();
    struct peer peer = peer_start(record_imported);
    struct note n = {.number = 1};
    open_gpu();
    zcu_event e = event_new(ZCU_EVENT_INTERPROCESS);
    OK(d->IpcGetEventHandle(&n.event, e));
    tell(peer.sock, &n, -1);
    hear(peer.sock, NULL);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    STAYS(d->EventQuery(e) == ZCU_ERROR_NOT_READY);
    OK(d->StreamSynchronize(st)); /* nothing here waits for it */
    _exit(0);                     /* nor shall the end of this process */
}

CASE(a_context_event_covers_every_stream) {
    zcu_stream side[2] = {NULL, NULL}; /* the second is the legacy one */
    open_gpu();
    if (!d->CtxRecordEvent) {
        printf("skip: this driver has no cuCtxRecordEvent\n");
        return;
    }
    OK(d->StreamCreate(&side[0], ZCU_STREAM_NON_BLOCKING));
    uint64_t *page = page_new();
    zcu_ptr counters = page_register(page);
    for (int i = 0; i < 2; i++) {
        zcu_event e = event_new(0);
        OK(d->StreamWaitValue64(side[i], counters, (uint64_t)i + 1, ZCU_STREAM_WAIT_VALUE_GEQ));
        OK(d->CtxRecordEvent(ctx, e));
        OK(d->StreamWaitEvent(st, e, 0));
        OK(d->StreamWriteValue64(st, counters + 64, (uint64_t)i + 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
        STAYS(load(&page[8]) == (uint64_t)i && d->EventQuery(e) == ZCU_ERROR_NOT_READY);
        store(&page[0], (uint64_t)i + 1);
        UNTIL(load(&page[8]) == (uint64_t)i + 1);
        OK(d->EventQuery(e));
    }
}

CASE(the_legacy_stream_and_blocking_streams_wait_for_each_other) {
    zcu_stream blocking;
    open_gpu();
    OK(d->StreamCreate(&blocking, ZCU_STREAM_DEFAULT));
    uint64_t *page = page_new();
    zcu_ptr counters = page_register(page);
    OK(d->StreamWaitValue64(NULL, counters, 1, ZCU_STREAM_WAIT_VALUE_GEQ));
    OK(d->StreamWriteValue64(blocking, counters + 64, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    OK(d->StreamWriteValue64(st, counters + 128, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    OK(d->StreamSynchronize(st)); /* a non-blocking one does not */
    CHECK(load(&page[16]) == 1);
    STAYS(load(&page[8]) == 0);
    store(&page[0], 1);
    OK(d->StreamSynchronize(blocking));
    CHECK(load(&page[8]) == 1);
}

CASE(a_copy_to_pageable_memory_returns_when_it_is_done) {
    unsigned char byte = 0;
    open_gpu();
    zcu_ptr p = alloc(new_pool(), 64 * MIB);
    OK(d->MemsetD8Async(p, 0x17, 64 * MIB, st));
    OK(d->MemcpyDtoHAsync(&byte, p + 64 * MIB - 1, 1, st));
    CHECK(byte == 0x17);
}

/* ---- capture ---- */

struct capturer {
    zcu_result (*begin)(zcu_stream, int), (*end)(zcu_stream, void **), (*destroy)(void *);
    int phase; /* 1: capturing, 2: end it */
    int result;
};

static void *capture_on_a_thread(void *arg) {
    struct capturer *c = arg;
    zcu_stream s;
    void *graph = NULL;
    OK(d->CtxPushCurrent(ctx));
    OK(d->StreamCreate(&s, ZCU_STREAM_NON_BLOCKING));
    OK(c->begin(s, 0)); /* global mode: torch's default */
    __atomic_store_n(&c->phase, 1, __ATOMIC_RELEASE);
    UNTIL(__atomic_load_n(&c->phase, __ATOMIC_ACQUIRE) == 2);
    c->result = c->end(s, &graph);
    if (graph) OK(c->destroy(graph));
    OK(d->StreamDestroy(s));
    return NULL;
}

static struct { zcu_pool pool, standard; zcu_ptr p, counters; void *host; zcu_event event; } capture_with;

static int call_set_pool(void) { return d->DeviceSetMemPool(0, capture_with.standard); }
static int call_export(void) { return d->MemPoolExportPointer(&(zcu_pool_blob){{0}}, capture_with.p); }
static int call_alloc(void) { return d->MemAllocFromPoolAsync(&(zcu_ptr){0}, 4096, capture_with.pool, st); }
static int call_query(void) { return d->StreamQuery(st); }
static int call_register(void) {
    int r = d->MemHostRegister(capture_with.host, 4096, ZCU_MEMHOSTREGISTER_DEVICEMAP);
    return r ? r : d->MemHostUnregister(capture_with.host);
}
static int call_info(void) { return d->MemGetInfo(&(size_t){0}, &(size_t){0}); }
static int call_post(void) { return d->StreamWriteValue64(st, capture_with.counters, 1, ZCU_STREAM_WRITE_VALUE_DEFAULT); }

static int call_record_context(void) {
    zcu_ctx context;
    OK(d->CtxGetCurrent(&context));
    return d->CtxRecordEvent ? d->CtxRecordEvent(context, capture_with.event) : d->CtxSynchronize();
}
static int call_synchronize_context(void) { return d->CtxSynchronize(); }

/* What a call gives while another thread captures, and what becomes of that capture. */
static void during_a_capture(int (*call)(void), int relaxed, int gives, int ends) {
    struct capturer c = {.phase = 0};
    pthread_t thread;
    int mode = ZCU_STREAM_CAPTURE_MODE_RELAXED, r;
    OK(d->StreamSynchronize(st));
    *(void **)&c.begin = symbol("cuStreamBeginCapture_v2");
    *(void **)&c.end = symbol("cuStreamEndCapture");
    *(void **)&c.destroy = symbol("cuGraphDestroy");
    CHECK(pthread_create(&thread, NULL, capture_on_a_thread, &c) == 0);
    UNTIL(__atomic_load_n(&c.phase, __ATOMIC_ACQUIRE) == 1);
    if (relaxed) OK(d->ThreadExchangeStreamCaptureMode(&mode));
    r = call();
    if (relaxed) OK(d->ThreadExchangeStreamCaptureMode(&mode));
    CHECK(!relaxed || mode == ZCU_STREAM_CAPTURE_MODE_RELAXED, "the exchange gives back what was there");
    __atomic_store_n(&c.phase, 2, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    CHECK(r == gives, "%s", zcx_driver_error_name(r));
    CHECK(c.result == ends, "%s", zcx_driver_error_name(c.result));
}

CASE(calls_during_another_threads_capture) {
    int (*const unsafe[])(void) = {call_set_pool, call_export, call_alloc, call_query, call_register};
    int (*const safe[])(void) = {call_info, call_post};
    int (*const whole[])(void) = {call_record_context, call_synchronize_context};
    open_gpu();
    capture_with.pool = new_pool();
    OK(d->DeviceGetMemPool(&capture_with.standard, 0));
    close(export_fd(capture_with.pool));
    capture_with.p = filled(capture_with.pool, MIB, 1);
    capture_with.counters = page_register(page_new());
    capture_with.host = page_new();
    OK(d->EventCreate(&capture_with.event, ZCU_EVENT_DISABLE_TIMING));
    for (size_t i = 0; i < sizeof unsafe / sizeof *unsafe; i++) {
        during_a_capture(unsafe[i], 0, ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, ZCU_ERROR_STREAM_CAPTURE_INVALIDATED);
        during_a_capture(unsafe[i], 1, ZCU_SUCCESS, ZCU_SUCCESS);
    }
    for (size_t i = 0; i < sizeof safe / sizeof *safe; i++) during_a_capture(safe[i], 0, ZCU_SUCCESS, ZCU_SUCCESS);
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        for (int relaxed = 0; relaxed < 2; relaxed++)
            during_a_capture(whole[i], relaxed, ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, ZCU_ERROR_STREAM_CAPTURE_INVALIDATED);
}

CASE(an_exportable_pool_refuses_to_be_captured) {
    zcu_result (*begin)(zcu_stream, int), (*end)(zcu_stream, void **);
    zcu_ptr p;
    void *graph;
    int status;
    open_gpu();
    *(void **)&begin = symbol("cuStreamBeginCapture_v2");
    *(void **)&end = symbol("cuStreamEndCapture");
    zcu_pool pool = new_pool();
    OK(d->StreamIsCapturing(st, &status));
    CHECK(status == ZCU_STREAM_CAPTURE_STATUS_NONE);
    OK(begin(st, 0));
    OK(d->StreamIsCapturing(st, &status));
    CHECK(status != ZCU_STREAM_CAPTURE_STATUS_NONE);
    GIVES(ZCU_ERROR_NOT_SUPPORTED, d->MemAllocFromPoolAsync(&p, MIB, pool, st));
    end(st, &graph);
}

/* ---- processes ---- */

CASE(a_fork_of_a_cuda_process_has_no_cuda) {
    int status;
    open_gpu();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(d->Init(0) == ZCU_SUCCESS ? 1 : 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "cuInit works in the child");
    CHECK(byte_at(filled(new_pool(), MIB, 1)) == 1);
}

static void hold_an_import(int sock) {
    int fd;
    struct note n = hear(sock, &fd);
    open_gpu();
    CHECK(byte_at(import(import_pool(fd), &n.blob[0])) == 0x33);
    tell(sock, &n, -1);
    hear(sock, NULL);
}

CASE(a_killed_importer_leaves_the_exporter_whole) {
    struct peer peer = peer_start(hold_an_import);
    struct note n = {.number = 0};
    open_gpu();
    zcu_pool pool = new_pool();
    int fd = export_fd(pool);
    zcu_ptr p = filled(pool, 64 * MIB, 0x33);
    OK(d->MemPoolExportPointer(&n.blob[0], p));
    tell(peer.sock, &n, fd);
    hear(peer.sock, NULL);
    kill(peer.pid, SIGKILL);
    CHECK(peer_end(&peer) == 128 + SIGKILL);
    CHECK(byte_at(p) == 0x33);
    OK(d->MemFreeAsync(p, st));
    CHECK(byte_at(filled(pool, 64 * MIB, 0x34)) == 0x34);
    close(fd);
}

/* Is it the simulated driver? Asked in a child, so that this process never opens it. */
static void ask(void) {
    open_gpu();
    exit(simulated() ? 0 : 78);
}

int main(void) {
    int found = case_fork(ask);
    CHECK(found == 0 || found == 78, "no CUDA here");
    sacrifice = found == 0;
    printf("on %s\n", sacrifice ? "the simulated driver" : "a card");
    RUN(export_of_a_pointer_needs_the_handle_first);
    RUN(export_of_an_interior_pointer_is_refused);
    RUN(export_from_the_default_pool_is_refused);
    RUN(buffer_ids_are_never_used_twice);
    RUN(attributes_of_a_pointer);
    RUN(the_current_pool_serves_plain_allocations);
    RUN(a_pool_needs_no_current_context);
    RUN(destroying_the_current_pool_makes_the_default_current);
    RUN(a_destroyed_pool_serves_what_lives);
    RUN(freed_memory_is_used_again_in_stream_order);
    RUN(trim_returns_only_what_was_never_exported);
    RUN(an_import_shows_the_exporters_bytes);
    RUN(the_first_free_unmaps_both_of_two_imports);
    RUN(an_unimport_leaves_the_neighbours_in_the_chunk);
    RUN(windows_of_a_blob_land_next_to_each_other);
    RUN(an_import_of_128_chunks_works);
    if (sacrifice) RUN(an_import_of_129_chunks_kills);
    RUN(what_an_imported_pool_refuses);
    RUN(an_old_blob_does_not_show_what_is_there_now);
    RUN(a_hidden_device_gives_no_access_until_it_is_set);
    RUN(a_pools_descriptor_names_its_device);
    if (!two_devices) printf("skip the last two: they need two devices that can access each other\n");
    RUN(legacy_handles_are_counted);
    RUN(vmm_is_there_in_grains_of_two_mebibytes);
    RUN(an_address_gives_its_handle_back);
    RUN(pieces_are_one_range);
    RUN(a_handle_can_be_mapped_twice);
    RUN(a_mapping_gives_no_access_by_itself);
    RUN(vmm_memory_comes_back_with_its_last_reference);
    RUN(a_write_to_a_read_only_mapping_hits_the_writer_only);
    RUN(an_importer_needs_rights_of_its_own);
    RUN(a_killed_vmm_importer_leaves_the_exporter_whole);
    RUN(a_stream_waits_for_a_counter_of_another_process);
    RUN(a_plain_store_frees_a_waiting_stream);
    RUN(a_counter_inside_a_pool_is_refused);
    RUN(a_dead_process_posts_nothing);
    RUN(the_work_of_the_dead_goes_on_while_a_child_lives);
    RUN(an_event_crosses_processes);
    RUN(an_event_of_the_dead_stays_pending);
    RUN(a_context_event_covers_every_stream);
    RUN(the_legacy_stream_and_blocking_streams_wait_for_each_other);
    RUN(a_copy_to_pageable_memory_returns_when_it_is_done);
    RUN(calls_during_another_threads_capture);
    RUN(an_exportable_pool_refuses_to_be_captured);
    RUN(a_fork_of_a_cuda_process_has_no_cuda);
    RUN(a_killed_importer_leaves_the_exporter_whole);
    return 0;
}
