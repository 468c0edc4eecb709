/* test_pool.c: pools, what is exported from them, and the counted imports, on the simulated driver. */
// sources: csrc/pool.c csrc/window.c csrc/driver.c csrc/err.c
// needs: simcuda
// also: thread
#include "cases.h"
#include "pool.h"

#include <fcntl.h>
#include <pthread.h>

#define MIB (1ull << 20)

/* What goes over the socket. */
struct word {
    int op;
    zcu_uuid uuid;
    struct zcx_export e;
    unsigned char byte;
};
enum { OP_POOL, OP_USE, OP_EXPECT_REFUSED, OP_UNMAP, OP_END };

static struct zcx_pool *pool_on(int ordinal) {
    struct zcx_pool *p = NULL;
    struct zcx_err err = {0};
    CHECK(zcx_pool_new(&p, ordinal, &err) == 0, "%s %s", err.call ? err.call : "", err.text);
    return p;
}

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

static zcu_ptr filled(struct zcx_pool *p, uint64_t nbytes, unsigned char byte, zcu_stream stream) {
    struct zcx_scope s;
    zcu_ptr ptr = 0;
    CHECK(zcx_pool_alloc(p, nbytes, stream, &ptr, NULL) == 0);
    CHECK(zcx_scope_open(&s, zcx_pool_ordinal(p), NULL) == 0);
    CHECK(s.d->MemsetD8Async(ptr, byte, nbytes, stream) == 0);
    CHECK(s.d->StreamSynchronize(stream) == 0);
    zcx_scope_close(&s);
    return ptr;
}

static unsigned char byte_at(int ordinal, zcu_ptr ptr, zcu_stream stream) {
    struct zcx_scope s;
    unsigned char byte = 0;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    int r = s.d->MemcpyDtoHAsync(&byte, ptr, 1, stream);
    if (!r) r = s.d->StreamSynchronize(stream);
    CHECK(r == 0, "%s", zcx_driver_error_name(r));
    zcx_scope_close(&s);
    return byte;
}

static uint64_t exports_of(struct zcx_pool *p) {
    struct zcx_pool_usage u;
    CHECK(zcx_pool_usage(p, &u, NULL) == 0);
    return u.exports;
}

/* ---- the guard's arithmetic ---- */

static uint32_t chunks_at(uint64_t offset, uint64_t size, uint64_t alloc_bytes) {
    unsigned char blob[64];
    memset(blob, 0xA5, sizeof blob);
    memcpy(blob + 24, &offset, 8);
    memcpy(blob + 32, &size, 8);
    return zcx_blob_chunks(blob, alloc_bytes);
}

static void chunks(void) {
    const uint64_t chunk = ZCX_CHUNK_BYTES, all = 128 * chunk;
    /* where the blob agrees: exact */
    CHECK(chunks_at(0, 1, 1) == 1);
    CHECK(chunks_at(chunk - 1, 1, 1) == 1);
    CHECK(chunks_at(chunk - 1, 2, 2) == 2);
    CHECK(chunks_at(0, chunk, chunk) == 1);
    CHECK(chunks_at(0, chunk + 1, chunk + 1) == 2);
    CHECK(chunks_at(512, chunk, chunk) == 2);
    CHECK(chunks_at(0, all, all) == 128 && chunks_at(7 * chunk, all, all) == 128);
    CHECK(chunks_at(512, all, all) == 129, "4096 MiB that straddle");
    CHECK(chunks_at(512, all - 512, all - 512) == 128);
    CHECK(chunks_at(0, all + 1, all + 1) == 129);
    /* where it does not: for the worst start */
    CHECK(chunks_at(0, 7, 1) == 1);
    CHECK(chunks_at(0, 7, 2) == 2);
    CHECK(chunks_at(0, 7, chunk) == 2 && chunks_at(0, 7, chunk + 1) == 2 && chunks_at(0, 7, chunk + 2) == 3);
    CHECK(chunks_at(0, 7, all) == 129 && chunks_at(0, 7, all - chunk + 1) == 128 && chunks_at(0, 7, all - chunk + 2) == 129);
    for (uint64_t n = 2; n < 6 * chunk; n += chunk / 3 + 1) {
        uint32_t worst = 0;
        for (uint64_t offset = 0; offset < chunk; offset += 1021 * 512)
            if (chunks_at(offset, n, n) > worst) worst = chunks_at(offset, n, n);
        if (chunks_at(chunk - 1, n, n) > worst) worst = chunks_at(chunk - 1, n, n);
        CHECK(chunks_at(0, n + 1, n) == worst, "%llu bytes", (unsigned long long)n);
    }
    /* numbers that do not fit */
    CHECK(chunks_at(UINT64_MAX, UINT64_MAX, UINT64_MAX) == UINT32_MAX);
    CHECK(chunks_at(UINT64_MAX, 2, 2) == 2, "an end beyond 2^64 is no offset: the worst start it is");
    CHECK(chunks_at(UINT64_MAX - 1, 2, 2) == 1);
    CHECK(chunks_at(0, 0, 0) == 0);
}

/* ---- exporter ---- */

CASE(a_new_pool) {
    struct zcx_pool *p = pool_on(0);
    const struct zcx_driver *d = zcx_driver_opened();
    struct zcx_pool_usage u = {.reserved = 1};
    unsigned flags;
    int active = 1, fd = zcx_pool_fd(p);
    CHECK(d->DevicePrimaryCtxGetState(0, &flags, &active) == 0 && !active, "it needs no context, and makes none");
    CHECK(zcx_pool_ordinal(p) == 0 && zcx_pool_handle(p));
    CHECK(memcmp(zcx_pool_uuid(p), &d->uuid[0], sizeof d->uuid[0]) == 0);
    CHECK(fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    CHECK(zcx_pool_usage(p, &u, NULL) == 0 && u.reserved == 0 && u.exports == 0);
    uint64_t threshold = 0;
    CHECK(d->MemPoolGetAttribute(zcx_pool_handle(p), ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold) == 0);
    CHECK(threshold == UINT64_MAX);
    CHECK(zcx_pool_ref(p) == p);
    zcx_pool_unref(p);
    CHECK(fcntl(fd, F_GETFD) >= 0);
    zcx_pool_unref(p);
    CHECK(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
    zcx_pool_unref(NULL);
}

static void unfit(const char *attributes, const char *words) {
    struct zcx_pool *p = (void *)1;
    struct zcx_err err = {0};
    setenv("SIMCUDA_ATTRIBUTES", attributes, 1);
    CHECK(zcx_pool_new(&p, 0, &err) == -ZCX_E_UNFIT && strstr(err.text, words), "%s", err.text);
    CHECK(p == (void *)1);
    CHECK(zcx_pool_new(&p, -1, &err) == -ZCX_E_RANGE);
    CHECK(zcx_pool_new(&p, 1, &err) < 0, "there is one device");
}
CASE(no_pools) { unfit("115=0", "no memory pools"); }
CASE(no_descriptors) { unfit("119=0", "cannot be shared as file descriptors"); }

CASE(current_pool) {
    struct zcx_pool *p = pool_on(0), *q = pool_on(0);
    zcu_pool previous = NULL, second = NULL;
    CHECK(zcx_pool_is_current(p, NULL) == 0);
    CHECK(zcx_pool_make_current(p, &previous, NULL) == 0 && previous && previous != zcx_pool_handle(p));
    CHECK(zcx_pool_is_current(p, NULL) == 1 && zcx_pool_is_current(q, NULL) == 0);
    CHECK(zcx_pool_make_current(q, &second, NULL) == 0 && second == zcx_pool_handle(p));
    CHECK(zcx_pool_make_current(q, NULL, NULL) == 0 && zcx_pool_is_current(q, NULL) == 1);
    CHECK(zcx_pool_restore(0, previous, NULL) == 0 && zcx_pool_is_current(q, NULL) == 0);
    CHECK(zcx_pool_restore(0, NULL, NULL) < 0);
    zcx_pool_unref(p);
    zcx_pool_unref(q);
}

CASE(exported) {
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    zcu_ptr a = filled(p, 3 * MIB, 1, stream), b = filled(p, 5000, 2, stream);
    struct zcx_export e, f;
    struct zcx_err err;
    CHECK(zcx_pool_export(p, a, 3 * MIB, ZCX_WINDOWS_NO, &e, NULL) == 0);
    CHECK(e.alloc_bytes >= 3 * MIB && e.offset == 0 && e.buffer_id);
    CHECK(zcx_pool_export(p, a + 4097, 100, ZCX_WINDOWS_NO, &f, NULL) == 0);
    CHECK(f.offset == 4097 && f.buffer_id == e.buffer_id && memcmp(f.blob, e.blob, 64) == 0);
    CHECK(exports_of(p) == 1, "remembered");
    CHECK(zcx_pool_export(p, b, 5000, ZCX_WINDOWS_NO, &f, NULL) == 0 && f.buffer_id != e.buffer_id && exports_of(p) == 2);
    memset(&f, 7, sizeof f);
    struct zcx_export untouched = f;
    CHECK(zcx_pool_export(p, a + 1, e.alloc_bytes, ZCX_WINDOWS_NO, &f, &err) == -ZCX_E_RANGE);
    CHECK(zcx_pool_export(p, a + 1, UINT64_MAX, ZCX_WINDOWS_NO, &f, &err) == -ZCX_E_RANGE);
    CHECK(memcmp(&f, &untouched, sizeof f) == 0);
    /* the same address, another allocation: what is remembered does not pass for it */
    CHECK(zcx_pool_free(p, a, stream, NULL) == 0 && synchronize(0, stream) == 0);
    zcu_ptr c = filled(p, 3 * MIB, 3, stream);
    CHECK(c == a, "the simulated driver reuses at once; this case rests on it");
    CHECK(zcx_pool_export(p, c, 1, ZCX_WINDOWS_NO, &f, NULL) == 0 && f.buffer_id != e.buffer_id && exports_of(p) == 3);
    CHECK(zcx_pool_export(p, c, 0, ZCX_WINDOWS_NO, &f, NULL) == 0 && exports_of(p) == 3);
    struct zcx_pool_usage u;
    CHECK(zcx_pool_usage(p, &u, NULL) == 0 && u.used >= 3 * MIB + 5000 && u.reserved >= u.used);
    CHECK(u.reserved_high >= u.reserved && u.used_high >= u.used);
    CHECK(zcx_pool_free(p, c, stream, NULL) == 0 && zcx_pool_free(p, b, stream, NULL) == 0);
    zcx_pool_unref(p);
}

/* More allocations at one address than blobs are remembered: none is taken for a later one. */
CASE(blobs_die_with_their_allocation) {
    setenv("SIMCUDA_DELAY_US", "0", 1);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct zcx_export e;
    zcu_ptr a = 0, before = 0;
    for (uint64_t n = 1; n <= 5000; n++) {
        CHECK(zcx_pool_alloc(p, MIB, stream, &a, NULL) == 0 && (!before || a == before));
        CHECK(zcx_pool_export(p, a, MIB, ZCX_WINDOWS_NO, &e, NULL) == 0);
        CHECK(zcx_pool_export(p, a, MIB, ZCX_WINDOWS_NO, &e, NULL) == 0);
        CHECK(exports_of(p) == n);
        CHECK(zcx_pool_free(p, a, stream, NULL) == 0 && synchronize(0, stream) == 0);
        before = a;
    }
    zcx_pool_unref(p);
}

CASE(not_ours) {
    struct zcx_pool *p = pool_on(0), *q = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct zcx_export e;
    struct zcx_err err;
    struct zcx_scope s;
    zcu_ptr other = filled(q, 4096, 1, stream), plain;
    char here[16];
    CHECK(zcx_pool_export(p, other, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT && strstr(err.text, "another memory pool"), "%s", err.text);
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    CHECK(s.d->MemAllocAsync(&plain, 4096, stream) == 0);
    zcx_scope_close(&s);
    CHECK(zcx_pool_export(p, plain, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT && strstr(err.text, "another memory pool"), "%s", err.text);
    CHECK(zcx_pool_export(p, (zcu_ptr)(uintptr_t)here, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT);
    CHECK(strstr(err.text, "no device memory"), "%s", err.text);
    CHECK(zcx_pool_export(p, 0, 0, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT);
    CHECK(exports_of(p) == 0);
    zcx_pool_unref(p);
    zcx_pool_unref(q);
}

CASE(too_large_to_export) {
    setenv("SIMCUDA_MEMORY", "64G", 1);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct zcx_export e;
    struct zcx_err err;
    zcu_ptr whole, more, small;
    CHECK(zcx_pool_alloc(p, 4096 * MIB, stream, &whole, NULL) == 0);
    CHECK(zcx_pool_export(p, whole, 1, ZCX_WINDOWS_NO, &e, &err) == 0, "128 chunks: %s", err.text);
    CHECK(zcx_blob_chunks(e.blob, e.alloc_bytes) == 128);
    CHECK(zcx_pool_alloc(p, 4096 * MIB + 1, stream, &more, NULL) == 0);
    CHECK(zcx_pool_export(p, more, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT && strstr(err.text, "chunks"), "%s", err.text);
    CHECK(exports_of(p) == 1, "what cannot be imported wherever it begins is not exported at all");
    /* one that begins inside a chunk straddles into a 129th */
    CHECK(zcx_pool_free(p, whole, stream, NULL) == 0 && zcx_pool_free(p, more, stream, NULL) == 0);
    CHECK(synchronize(0, stream) == 0);
    CHECK(zcx_pool_alloc(p, MIB, stream, &small, NULL) == 0);
    CHECK(zcx_pool_alloc(p, 4096 * MIB, stream, &whole, NULL) == 0);
    CHECK(whole % ZCX_CHUNK_BYTES, "the simulated driver does not align large allocations; this case rests on it");
    CHECK(zcx_pool_export(p, whole, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT && strstr(err.text, "129 chunks"), "%s", err.text);
    zcx_pool_unref(p);
}

/* ---- several devices ---- */

static int copy_between(int ordinal, zcu_stream stream, zcu_ptr to, zcu_ptr from) {
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, ordinal, NULL) == 0);
    int r = s.d->MemcpyDtoDAsync(to, from, 4096, stream);
    if (!r) r = s.d->StreamSynchronize(stream);
    zcx_scope_close(&s);
    return r;
}

CASE(peers_reach_the_pool) {
    setenv("SIMCUDA_DEVICES", "3", 1);
    struct zcx_pool *p0 = pool_on(0), *p2 = pool_on(2);
    zcu_stream s0 = stream_on(0), s2 = stream_on(2);
    zcu_ptr a = filled(p0, 4096, 0x11, s0), b = filled(p2, 4096, 0x22, s2), plain;
    struct zcx_scope s;
    CHECK(copy_between(2, s2, b, a) == 0 && byte_at(2, b, s2) == 0x11);
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    CHECK(s.d->MemAllocAsync(&plain, 4096, s0) == 0 && s.d->MemsetD8Async(plain, 5, 4096, s0) == 0);
    CHECK(s.d->StreamSynchronize(s0) == 0);
    zcx_scope_close(&s);
    CHECK(copy_between(2, s2, b, plain) != 0, "control: the default pool was given to nobody");
    zcx_pool_unref(p0);
    zcx_pool_unref(p2);
}

CASE(no_peers) {
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("SIMCUDA_PEER", "0", 1);
    struct zcx_pool *p = pool_on(1);
    CHECK(memcmp(zcx_pool_uuid(p), &zcx_driver_opened()->uuid[1], 16) == 0);
    zcx_pool_unref(p);
}

/* ---- the other process ---- */

/* Imports the pool and does what it is told; every answer is one int. */
static void importer(int sock) {
    struct zcx_pool *p = NULL;
    zcu_stream stream = NULL;
    struct word w;
    for (int fd; (fd = peer_recv(sock, &w, sizeof w)) != -2;) {
        struct zcx_err err = {0};
        zcu_ptr base = 0;
        int answer = -1, last = -1;
        if (w.op == OP_POOL) {
            int r = zcx_pool_import(&p, fd, &w.uuid, &err);
            CHECK(r == 0 && zcx_pool_fd(p) == -1, "%s %s", err.call, err.text);
            close(fd);
            stream = stream_on(zcx_pool_ordinal(p));
            struct zcx_export e;
            CHECK(zcx_pool_export(p, 1, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_RANGE);
            answer = zcx_pool_ordinal(p);
        } else if (w.op == OP_USE) { /* map, read, write, keep */
            CHECK(zcx_pool_map(p, &w.e, &base, &err) == 0, "%s %s", err.call, err.text);
            answer = byte_at(zcx_pool_ordinal(p), base + w.e.offset, stream);
            struct zcx_scope s;
            CHECK(zcx_scope_open(&s, zcx_pool_ordinal(p), NULL) == 0);
            CHECK(s.d->MemsetD8Async(base + w.e.offset, w.byte, 1, stream) == 0 && s.d->StreamSynchronize(stream) == 0);
            zcx_scope_close(&s);
        } else if (w.op == OP_EXPECT_REFUSED) {
            uint32_t before = zcx_pool_mapped(p);
            answer = -zcx_pool_map(p, &w.e, &base, &err);
            CHECK(answer > 0 && base == 0 && zcx_pool_mapped(p) == before && err.text[0]);
        } else if (w.op == OP_UNMAP) {
            answer = zcx_pool_unmap(p, w.e.buffer_id, stream, &last, &err);
            CHECK((answer == 0) == (last >= 0));
            answer = answer ? answer : last;
        } else if (w.op == OP_END) {
            int ordinal = zcx_pool_ordinal(p);
            answer = (int)zcx_pool_mapped(p);
            zcx_pool_unref(p);
            CHECK(synchronize(ordinal, stream) == 0 && synchronize(ordinal, NULL) == 0);
            CHECK(simcuda_count("imports") == 0 && simcuda_count("pools") == 0);
        }
        peer_send(sock, &answer, sizeof answer, -1);
    }
}

static int ask(struct peer *peer, struct word *w, int fd) {
    int answer;
    peer_send(peer->sock, w, sizeof *w, fd);
    CHECK(peer_recv(peer->sock, &answer, sizeof answer) == -1, "the peer is gone");
    return answer;
}
static int ask_op(struct peer *peer, int op, const struct zcx_export *e) {
    struct word w = {.op = op};
    if (e) w.e = *e;
    return ask(peer, &w, -1);
}
static void give_pool(struct peer *peer, struct zcx_pool *p, int expected) {
    struct word w = {.op = OP_POOL, .uuid = *zcx_pool_uuid(p)};
    CHECK(ask(peer, &w, zcx_pool_fd(p)) == expected);
}

CASE(imports_are_counted) {
    struct peer peer = peer_start(importer);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    zcu_ptr a = filled(p, 2 * MIB, 0x41, stream), b = filled(p, 2 * MIB, 0x42, stream);
    struct zcx_export e, f, forged;
    give_pool(&peer, p, 0);
    CHECK(zcx_pool_export(p, a + 1000, 10, ZCX_WINDOWS_NO, &e, NULL) == 0 && zcx_pool_export(p, b, 10, ZCX_WINDOWS_NO, &f, NULL) == 0);

    struct word w = {.op = OP_USE, .e = e, .byte = 0x51};
    CHECK(ask(&peer, &w, -1) == 0x41);
    CHECK(byte_at(0, a + 1000, stream) == 0x51 && byte_at(0, a + 999, stream) == 0x41, "no copy");
    w.byte = 0x61;
    CHECK(ask(&peer, &w, -1) == 0x51);
    w = (struct word){.op = OP_USE, .e = f, .byte = 0x62};
    CHECK(ask(&peer, &w, -1) == 0x42);

    forged = e;
    forged.alloc_bytes++;
    CHECK(ask_op(&peer, OP_EXPECT_REFUSED, &forged) == ZCX_E_PROTOCOL, "a known id with another size");

    CHECK(ask_op(&peer, OP_UNMAP, &e) == 0, "one of two");
    w = (struct word){.op = OP_USE, .e = e, .byte = 0x71};
    CHECK(ask(&peer, &w, -1) == 0x61, "still there: the first un-import of two took nothing away");
    CHECK(ask_op(&peer, OP_UNMAP, &e) == 0);
    CHECK(ask_op(&peer, OP_UNMAP, &e) == 1);
    CHECK(ask_op(&peer, OP_UNMAP, &e) == -ZCX_E_RANGE);
    w = (struct word){.op = OP_USE, .e = f, .byte = 0x63};
    CHECK(ask(&peer, &w, -1) == 0x62, "its neighbour is unharmed");
    CHECK(ask_op(&peer, OP_END, NULL) == 1, "unref takes what is left along");
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

CASE(the_importer_guards_itself) {
    struct peer peer = peer_start(importer);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    zcu_ptr a = filled(p, MIB, 1, stream);
    struct zcx_export e, forged;
    uint64_t size = 4096 * MIB, offset = 512;
    give_pool(&peer, p, 0);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_NO, &e, NULL) == 0);
    forged = e;
    forged.alloc_bytes = 4096 * MIB + 1;
    CHECK(ask_op(&peer, OP_EXPECT_REFUSED, &forged) == ZCX_E_UNFIT);
    forged.alloc_bytes = UINT64_MAX;
    CHECK(ask_op(&peer, OP_EXPECT_REFUSED, &forged) == ZCX_E_UNFIT);
    forged.alloc_bytes = size;
    memcpy(forged.blob + 32, &size, 8);
    memcpy(forged.blob + 24, &offset, 8);
    CHECK(ask_op(&peer, OP_EXPECT_REFUSED, &forged) == ZCX_E_UNFIT, "129 chunks, straddled");
    forged.alloc_bytes = 0;
    CHECK(ask_op(&peer, OP_EXPECT_REFUSED, &forged) == ZCX_E_PROTOCOL);
    forged = e;
    memset(forged.blob, 0xFF, sizeof forged.blob);
    CHECK(ask_op(&peer, OP_EXPECT_REFUSED, &forged) == ZCX_E_CUDA, "the driver's to refuse");
    CHECK(ask_op(&peer, OP_END, NULL) == 0);
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

static void importer_that_sees_only_the_second(int sock) {
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    importer(sock);
}

CASE(devices_go_by_uuid) {
    setenv("SIMCUDA_DEVICES", "2", 1);
    struct peer peer = peer_start(importer_that_sees_only_the_second);
    struct zcx_pool *p = pool_on(1);
    zcu_stream stream = stream_on(1);
    zcu_ptr a = filled(p, MIB, 0x17, stream);
    struct zcx_export e;
    give_pool(&peer, p, 0);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_NO, &e, NULL) == 0);
    struct word w = {.op = OP_USE, .e = e, .byte = 0x18};
    CHECK(ask(&peer, &w, -1) == 0x17 && byte_at(1, a, stream) == 0x18);
    CHECK(ask_op(&peer, OP_UNMAP, &e) == 1);
    CHECK(ask_op(&peer, OP_END, NULL) == 0);
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

CASE(import_refused) {
    struct zcx_pool *p = pool_on(0), *q = (void *)1;
    struct zcx_err err = {0};
    zcu_uuid other = *zcx_pool_uuid(p);
    int before = check_fds();
    other.bytes[3] ^= 1;
    CHECK(zcx_pool_import(&q, zcx_pool_fd(p), &other, &err) == 1 && q == (void *)1 && err.code == 0);
    CHECK(zcx_pool_import(&q, -1, zcx_pool_uuid(p), &err) == -ZCX_E_CUDA && q == (void *)1);
    CHECK(strcmp(err.call, "cuMemPoolImportFromShareableHandle") == 0);
    CHECK(check_fds() == before);
    zcx_pool_unref(p);
}

/* ---- the table of imports, large and in any order ---- */

#define MANY 700

static void importer_of_many(int sock) {
    static struct zcx_export all[MANY];
    static zcu_ptr base[MANY];
    struct zcx_pool *p;
    struct word w;
    int fd = peer_recv(sock, &w, sizeof w);
    CHECK(zcx_pool_import(&p, fd, &w.uuid, NULL) == 0);
    close(fd);
    zcu_stream stream = stream_on(0);
    for (int i = 0; i < MANY; i++) {
        CHECK(peer_recv(sock, &w, sizeof w) == -1);
        all[i] = w.e;
        /* Ids in a row hash apart; these collide. The driver does not look at them. */
        for (int k = 0; k < 3; k++) all[i].buffer_id = (all[i].buffer_id ^ all[i].buffer_id >> 29) * 0xBF58476D1CE4E5B9ull;
        CHECK(zcx_pool_map(p, &all[i], &base[i], NULL) == 0 && zcx_pool_mapped(p) == (uint32_t)i + 1);
    }
    /* a fixed walk through all of them: 700 and 263 have no common divisor */
    for (int k = 0, i = 0; k < MANY; k++, i = (i + 263) % MANY) {
        zcu_ptr again;
        int last = -1;
        CHECK(zcx_pool_map(p, &all[i], &again, NULL) == 0 && again == base[i]);
        CHECK(zcx_pool_unmap(p, all[i].buffer_id, stream, &last, NULL) == 0 && last == 0);
        CHECK(byte_at(0, base[i], stream) == (unsigned char)i);
        CHECK(zcx_pool_unmap(p, all[i].buffer_id, stream, &last, NULL) == 0 && last == 1);
        CHECK(zcx_pool_unmap(p, all[i].buffer_id, stream, NULL, NULL) == -ZCX_E_RANGE);
        CHECK(zcx_pool_mapped(p) == (uint32_t)(MANY - 1 - k));
        int next = (i + 263) % MANY;
        if (k + 1 == MANY) break;
        CHECK(zcx_pool_map(p, &all[next], &again, NULL) == 0);
        CHECK(zcx_pool_unmap(p, all[next].buffer_id, stream, NULL, NULL) == 0);
    }
    zcx_pool_unref(p);
    CHECK(peer_recv(sock, &w, sizeof w) == -2);
}

CASE(many_imports) {
    struct peer peer = peer_start(importer_of_many);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct word w = {.uuid = *zcx_pool_uuid(p)};
    peer_send(peer.sock, &w, sizeof w, zcx_pool_fd(p));
    for (int i = 0; i < MANY; i++) {
        zcu_ptr a = filled(p, 4096, (unsigned char)i, stream);
        CHECK(zcx_pool_export(p, a, 4096, ZCX_WINDOWS_NO, &w.e, NULL) == 0);
        peer_send(peer.sock, &w, sizeof w, -1);
    }
    CHECK(exports_of(p) == MANY);
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

static struct { struct zcx_pool *p; struct zcx_export e[16]; zcu_ptr base[16]; } shared;

static void *map_and_unmap(void *seed) {
    unsigned x = (unsigned)(uintptr_t)seed * 2654435761u + 1;
    zcu_stream stream = stream_on(0);
    for (int k = 0; k < 300; k++) {
        zcu_ptr base = 0;
        x = x * 1664525u + 1013904223u;
        int i = x >> 28, last;
        CHECK(zcx_pool_map(shared.p, &shared.e[i], &base, NULL) == 0 && base);
        CHECK(zcx_pool_unmap(shared.p, shared.e[i].buffer_id, stream, &last, NULL) == 0);
    }
    return NULL;
}

static void importer_with_threads(int sock) {
    pthread_t threads[8];
    struct word w;
    int fd = peer_recv(sock, &w, sizeof w);
    CHECK(zcx_pool_import(&shared.p, fd, &w.uuid, NULL) == 0);
    close(fd);
    for (int i = 0; i < 16; i++) {
        CHECK(peer_recv(sock, &w, sizeof w) == -1);
        shared.e[i] = w.e;
    }
    CHECK(zcx_pool_map(shared.p, &shared.e[0], &shared.base[0], NULL) == 0, "one is kept all the time");
    for (uintptr_t i = 0; i < 8; i++) CHECK(pthread_create(&threads[i], NULL, map_and_unmap, (void *)i) == 0);
    for (int i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(zcx_pool_mapped(shared.p) == 1);
    CHECK(byte_at(0, shared.base[0], NULL) == 0x70);
    zcx_pool_unref(shared.p);
}

CASE(threads_import_the_same) {
    struct peer peer = peer_start(importer_with_threads);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct word w = {.uuid = *zcx_pool_uuid(p)};
    peer_send(peer.sock, &w, sizeof w, zcx_pool_fd(p));
    for (int i = 0; i < 16; i++) {
        CHECK(zcx_pool_export(p, filled(p, 8192, (unsigned char)(0x70 + i), stream), 1, ZCX_WINDOWS_NO, &w.e, NULL) == 0);
        peer_send(peer.sock, &w, sizeof w, -1);
    }
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

/* ---- faults ---- */

static void (*fail_at)(const char *);

CASE(making_fails_at_every_call) {
    struct zcx_pool *p = (void *)1;
    struct zcx_err err;
    char rule[64];
    int n = 0, rc;
    setenv("SIMCUDA_DEVICES", "2", 1);
    zcx_pool_unref(pool_on(0));
    fail_at = library_symbol("simcuda_fail");
    int before = check_fds();
    do {
        snprintf(rule, sizeof rule, "*:%d:999", ++n);
        fail_at(rule);
        memset(&err, 0, sizeof err);
        p = (void *)1;
        rc = zcx_pool_new(&p, 0, &err);
        fail_at("");
        if (!rc) break;
        CHECK(rc == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_UNKNOWN && err.call, "at call %d: %d", n, rc);
        CHECK(p == (void *)1 && check_fds() == before, "at call %d, %s", n, err.call);
    } while (n < 50);
    CHECK(rc == 0 && n > 8 && n < 50, "%d calls", n);
    zcx_pool_unref(p);
    CHECK(check_fds() == before);
}

static void importer_whose_driver_fails(int sock) {
    struct zcx_pool *p;
    struct zcx_err err;
    struct word w;
    zcu_ptr base = 0;
    int last = 7;
    int fd = peer_recv(sock, &w, sizeof w);
    fail_at = library_symbol("simcuda_fail");
    CHECK(zcx_pool_import(&p, fd, &w.uuid, NULL) == 0);
    zcx_pool_unref(p);
    fail_at("cuMemPoolSetAccess:1:801");
    p = (void *)1;
    CHECK(zcx_pool_import(&p, fd, &w.uuid, &err) == -ZCX_E_CUDA && err.cuda == 801 && p == (void *)1);
    fail_at("");
    CHECK(zcx_pool_import(&p, fd, &w.uuid, NULL) == 0);
    close(fd);
    fail_at("cuMemPoolImportPointer:1:2");
    CHECK(zcx_pool_map(p, &w.e, &base, &err) == -ZCX_E_CUDA && err.cuda == 2 && base == 0 && zcx_pool_mapped(p) == 0);
    CHECK(zcx_pool_unmap(p, w.e.buffer_id, NULL, &last, &err) == -ZCX_E_RANGE && last == 7);
    CHECK(zcx_pool_map(p, &w.e, &base, NULL) == 0 && zcx_pool_mapped(p) == 1);
    fail_at("cuMemFreeAsync:1:999");
    CHECK(zcx_pool_unmap(p, w.e.buffer_id, NULL, &last, &err) == -ZCX_E_CUDA && last == 7 && zcx_pool_mapped(p) == 1);
    CHECK(byte_at(0, base, NULL) == 0x33, "it failed: so it is still imported");
    CHECK(zcx_pool_unmap(p, w.e.buffer_id, NULL, &last, NULL) == 0 && last == 1 && zcx_pool_mapped(p) == 0);
    zcx_pool_unref(p);
}

CASE(the_importers_driver_fails) {
    struct peer peer = peer_start(importer_whose_driver_fails);
    struct zcx_pool *p = pool_on(0);
    struct word w = {.uuid = *zcx_pool_uuid(p)};
    CHECK(zcx_pool_export(p, filled(p, MIB, 0x33, NULL), 1, ZCX_WINDOWS_NO, &w.e, NULL) == 0);
    peer_send(peer.sock, &w, sizeof w, zcx_pool_fd(p));
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

/* ---- windows ---- */

#define CHUNK ZCX_CHUNK_BYTES
#define SEAMS 8

/* And the driver dies of an import of more chunks: whoever gets past the guard does not come back. */
static void lower_the_limit_to(const char *chunks) {
    CHECK(setenv("ZCX_CHUNK_LIMIT", chunks, 1) == 0 && setenv("SIMCUDA_IMPORT_CHUNKS", chunks, 1) == 0);
}

/* An allocation of 5 chunks and a half behind a small one, so that it begins inside a chunk. A byte of its own on both sides of
 * wherever a chunk may end, and at both ends. With a limit of 4 it must go in windows. */
static zcu_ptr straddling(struct zcx_pool *p, zcu_stream stream, uint64_t *offset, uint64_t *bytes, struct zcx_export *e,
                          enum zcx_windows_use use) {
    zcu_ptr ptr;
    struct zcx_scope s;
    filled(p, MIB, 1, stream);
    *bytes = 5 * CHUNK + CHUNK / 2;
    CHECK(zcx_pool_alloc(p, *bytes, stream, &ptr, NULL) == 0);
    CHECK(zcx_pool_export(p, ptr, *bytes, use, e, NULL) == 0);
    CHECK(zcx_blob_fields(e->blob, e->alloc_bytes, offset) == 0 && *offset % CHUNK, "it straddles; these cases rest on it");
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    for (uint64_t k = 0; k < SEAMS; k++) { /* k: the border before the pool's k-th chunk of it */
        uint64_t at = k * CHUNK - *offset % CHUNK; /* wraps for the first, which is the allocation's own beginning */
        if (k == 0) at = 0;
        if (at && at <= *bytes) CHECK(s.d->MemsetD8Async(ptr + at - 1, (unsigned char)(0x40 + k), 1, stream) == 0);
        if (at < *bytes) CHECK(s.d->MemsetD8Async(ptr + at, (unsigned char)(0x60 + k), 1, stream) == 0);
    }
    CHECK(s.d->MemsetD8Async(ptr + *bytes - 1, 0x77, 1, stream) == 0);
    CHECK(s.d->StreamSynchronize(stream) == 0);
    zcx_scope_close(&s);
    return ptr;
}

static void see_all_seams(zcu_ptr base, uint64_t offset, uint64_t bytes, zcu_stream stream) {
    for (uint64_t k = 0; k < SEAMS; k++) {
        uint64_t at = k ? k * CHUNK - offset % CHUNK : 0;
        if (at && at <= bytes) CHECK(byte_at(0, base + at - 1, stream) == (unsigned char)(0x40 + k), "before chunk %d", (int)k);
        if (at < bytes) CHECK(byte_at(0, base + at, stream) == (unsigned char)(0x60 + k), "chunk %d", (int)k);
    }
    CHECK(byte_at(0, base + bytes - 1, stream) == 0x77);
}

/* What the peer is told: the pool, an export, where it begins in the pool. */
struct lent { zcu_uuid uuid; struct zcx_export e; uint64_t offset, bytes; };

static struct lent lent_windows(struct peer *peer, struct zcx_pool **pool, zcu_ptr *ptr, enum zcx_windows_use use) {
    struct lent l;
    *pool = pool_on(0);
    l.uuid = *zcx_pool_uuid(*pool);
    *ptr = straddling(*pool, stream_on(0), &l.offset, &l.bytes, &l.e, use);
    peer_send(peer->sock, &l, sizeof l, zcx_pool_fd(*pool));
    return l;
}

static struct zcx_pool *borrow(int sock, struct lent *l) {
    struct zcx_pool *p;
    int fd = peer_recv(sock, l, sizeof *l);
    CHECK(zcx_pool_import(&p, fd, &l->uuid, NULL) == 0);
    close(fd);
    return p;
}

static void importer_in_windows(int sock) {
    struct lent l;
    struct zcx_pool *p = borrow(sock, &l);
    zcu_stream stream = stream_on(0);
    int (*hold)(zcu_stream) = library_symbol("simcuda_hold"), (*release)(zcu_stream) = library_symbol("simcuda_release");
    struct zcx_windows w = zcx_windows_of(l.offset, l.e.alloc_bytes, l.e.window);
    long count = (long)zcx_windows_count(&w);
    zcu_ptr base, again, whole = 7;
    struct zcx_err err;
    struct zcx_export e = l.e;
    int last = -1;
    CHECK(count >= 2, "%ld windows", count);

    e.window = 0;
    CHECK(zcx_pool_map(p, &e, &whole, &err) == -ZCX_E_UNFIT && strstr(err.text, "chunks") && whole == 7, "whole it stays refused: %s", err.text);
    e.window = zcx_chunk_limit() + 1;
    CHECK(zcx_pool_map(p, &e, &whole, &err) == -ZCX_E_UNFIT && strstr(err.text, "window") && whole == 7);
    e.window = UINT32_MAX;
    CHECK(zcx_pool_map(p, &e, &whole, &err) == -ZCX_E_UNFIT && whole == 7);
    e = l.e;
    e.blob[32] ^= 1;
    CHECK(zcx_pool_map(p, &e, &whole, &err) == -ZCX_E_UNFIT && strstr(err.text, "laid out") && whole == 7);
    CHECK(zcx_pool_mapped(p) == 0 && simcuda_count("imports") == 0);

    CHECK(zcx_pool_map(p, &l.e, &base, &err) == 0, "%s", err.text);
    CHECK(zcx_pool_mapped(p) == 1 && simcuda_count("imports") == count, "one for us, %ld for the driver", count);
    see_all_seams(base, l.offset, l.bytes, stream);
    CHECK(zcx_pool_map(p, &l.e, &again, NULL) == 0 && again == base && simcuda_count("imports") == count, "counted, not imported again");
    CHECK(zcx_pool_unmap(p, l.e.buffer_id, stream, &last, NULL) == 0 && last == 0);
    see_all_seams(base, l.offset, l.bytes, stream);

    struct zcx_scope s; /* given up in stream order: what is queued before still reaches all of it */
    CHECK(zcx_scope_open(&s, 0, NULL) == 0 && hold(stream) == 0);
    CHECK(s.d->MemsetD8Async(base, 0x2A, l.bytes, stream) == ZCU_ERROR_INVALID_VALUE, "the driver's own operations end where a window does");
    for (uint64_t k = 0, start, n; k < (uint64_t)count; k++) {
        zcx_windows_at(&w, k, &start, &n);
        CHECK(s.d->MemsetD8Async(base + start, 0x2A, n, stream) == 0);
    }
    CHECK(zcx_pool_unmap(p, l.e.buffer_id, stream, &last, NULL) == 0 && last == 1 && zcx_pool_mapped(p) == 0);
    CHECK(simcuda_count("imports") == count, "none of them before its turn");
    CHECK(release(stream) == 0 && s.d->StreamSynchronize(stream) == 0);
    zcx_scope_close(&s);
    CHECK(simcuda_count("imports") == 0, "as one");

    CHECK(zcx_pool_map(p, &l.e, &base, NULL) == 0); /* unref takes windows along too */
    zcx_pool_unref(p);
    CHECK(synchronize(0, stream) == 0 && synchronize(0, NULL) == 0);
    CHECK(simcuda_count("imports") == 0 && simcuda_count("pools") == 0);
}

static void windows_of(enum zcx_windows_use use, uint32_t expected) {
    lower_the_limit_to("4");
    struct peer peer = peer_start(importer_in_windows);
    struct zcx_pool *p;
    zcu_ptr a;
    struct lent l = lent_windows(&peer, &p, &a, use);
    struct zcx_export e;
    struct zcx_err err;
    CHECK(l.e.window == expected);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_NO, &e, &err) == -ZCX_E_UNFIT && strstr(err.text, "chunks"), "not proved: %s", err.text);
    CHECK(peer_end(&peer) == 0);
    CHECK(byte_at(0, a, NULL) == 0x2A && byte_at(0, a + l.bytes - 1, NULL) == 0x2A && byte_at(0, a + l.bytes / 2, NULL) == 0x2A, "no copy");
    zcx_pool_unref(p);
}
CASE(windows_at_the_limit) { windows_of(ZCX_WINDOWS_YES, 4); }
CASE(windows_of_one_chunk) { windows_of(ZCX_WINDOWS_PROVE, 1); }

/* Only what is above the limit is cut: 4 chunks are not, aligned; straddling they are. The proof cuts whatever it is given. */
CASE(what_is_cut) {
    lower_the_limit_to("4");
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct zcx_export e;
    zcu_ptr a, b;
    CHECK(zcx_pool_alloc(p, 4 * CHUNK, stream, &a, NULL) == 0 && a % CHUNK == 0);
    filled(p, MIB, 1, stream);
    CHECK(zcx_pool_alloc(p, 4 * CHUNK, stream, &b, NULL) == 0 && b % CHUNK);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_YES, &e, NULL) == 0 && e.window == 0);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_NO, &e, NULL) == 0 && e.window == 0);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_PROVE, &e, NULL) == 0 && e.window == 1);
    CHECK(zcx_pool_export(p, b, 1, ZCX_WINDOWS_YES, &e, NULL) == 0 && e.window == 4);
    CHECK(zcx_pool_export(p, b, 1, ZCX_WINDOWS_NO, &e, NULL) == -ZCX_E_UNFIT);
    unsetenv("ZCX_CHUNK_LIMIT");
    CHECK(zcx_pool_export(p, b, 1, ZCX_WINDOWS_YES, &e, NULL) == 0 && e.window == 0);
    zcx_pool_unref(p);
}

static void importer_whose_windows_fail(int sock) {
    struct lent l;
    struct zcx_pool *p = borrow(sock, &l);
    struct zcx_windows w = zcx_windows_of(l.offset, l.e.alloc_bytes, l.e.window);
    int count = (int)zcx_windows_count(&w), last;
    zcu_ptr base = 7;
    struct zcx_err err;
    char rule[64];
    fail_at = library_symbol("simcuda_fail");
    for (int k = 1; k <= count; k++) {
        snprintf(rule, sizeof rule, "cuMemPoolImportPointer:%d:2", k);
        fail_at(rule);
        CHECK(zcx_pool_map(p, &l.e, &base, &err) == -ZCX_E_CUDA && err.cuda == 2 && base == 7, "window %d", k);
        fail_at("");
        CHECK(zcx_pool_mapped(p) == 0 && zcx_pool_unmap(p, l.e.buffer_id, NULL, NULL, NULL) == -ZCX_E_RANGE);
        CHECK(synchronize(0, NULL) == 0 && simcuda_count("imports") == 0, "those before window %d are left", k);
    }
    CHECK(zcx_pool_map(p, &l.e, &base, &err) == 0);
    see_all_seams(base, l.offset, l.bytes, NULL);
    CHECK(zcx_pool_unmap(p, l.e.buffer_id, NULL, &last, NULL) == 0 && last == 1);
    zcx_pool_unref(p);
}

CASE(a_window_fails) {
    struct peer peer = peer_start(importer_whose_windows_fail);
    struct zcx_pool *p;
    zcu_ptr a;
    lent_windows(&peer, &p, &a, ZCX_WINDOWS_PROVE);
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

static void importer_whose_windows_lie_apart(int sock) {
    struct lent l;
    zcu_ptr base = 7;
    struct zcx_err err;
    setenv("SIMCUDA_BREAK", "apart", 1);
    struct zcx_pool *p = borrow(sock, &l);
    CHECK(zcx_pool_map(p, &l.e, &base, &err) == -ZCX_E_UNFIT && strstr(err.text, "next to the one before"), "%s", err.text);
    CHECK(base == 7 && zcx_pool_mapped(p) == 0 && synchronize(0, NULL) == 0 && simcuda_count("imports") == 0);
    zcx_pool_unref(p);
}

CASE(windows_lie_apart) {
    struct peer peer = peer_start(importer_whose_windows_lie_apart);
    struct zcx_pool *p;
    zcu_ptr a;
    lent_windows(&peer, &p, &a, ZCX_WINDOWS_PROVE);
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

static void importer_of_unknown_blobs(int sock) {
    struct lent l;
    struct zcx_pool *p = borrow(sock, &l);
    zcu_ptr base = 7;
    CHECK(zcx_pool_map(p, &l.e, &base, NULL) == 0 && byte_at(0, base, NULL) == 0x11, "whole, an unknown layout is no matter");
    zcx_pool_unref(p);
}

CASE(an_unknown_layout_is_not_cut) {
    setenv("SIMCUDA_BREAK", "blob", 1);
    lower_the_limit_to("4");
    struct peer peer = peer_start(importer_of_unknown_blobs);
    struct zcx_pool *p = pool_on(0);
    zcu_stream stream = stream_on(0);
    struct lent l = {.uuid = *zcx_pool_uuid(p)};
    struct zcx_err err;
    zcu_ptr large, a = filled(p, 2 * CHUNK, 0x11, stream);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_PROVE, &l.e, &err) == -ZCX_E_UNFIT && strstr(err.text, "not known"), "%s", err.text);
    CHECK(zcx_pool_alloc(p, 5 * CHUNK, stream, &large, NULL) == 0);
    CHECK(zcx_pool_export(p, large, 1, ZCX_WINDOWS_YES, &l.e, &err) == -ZCX_E_UNFIT && strstr(err.text, "not known"), "%s", err.text);
    CHECK(zcx_pool_alloc(p, 4 * CHUNK, stream, &large, NULL) == 0);
    CHECK(zcx_pool_export(p, large, 1, ZCX_WINDOWS_NO, &l.e, &err) == -ZCX_E_UNFIT && strstr(err.text, "5 chunks"),
          "where it begins is not known, so it may straddle: %s", err.text);
    CHECK(zcx_pool_export(p, a, 1, ZCX_WINDOWS_YES, &l.e, NULL) == 0 && l.e.window == 0);
    peer_send(peer.sock, &l, sizeof l, zcx_pool_fd(p));
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

/* Threads that map and give up one allocation in windows at once: one import, however it is counted. */
static void importer_with_threads_in_windows(int sock) {
    pthread_t threads[4];
    struct lent l;
    shared.p = borrow(sock, &l);
    for (int i = 0; i < 16; i++) shared.e[i] = l.e;
    CHECK(zcx_pool_map(shared.p, &l.e, &shared.base[0], NULL) == 0, "one is kept all the time");
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, map_and_unmap, (void *)i) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(zcx_pool_mapped(shared.p) == 1);
    see_all_seams(shared.base[0], l.offset, l.bytes, NULL);
    zcx_pool_unref(shared.p);
}

CASE(threads_import_one_in_windows) {
    struct peer peer = peer_start(importer_with_threads_in_windows);
    struct zcx_pool *p;
    zcu_ptr a;
    lent_windows(&peer, &p, &a, ZCX_WINDOWS_PROVE);
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

static void forget_pool(void) {
    int fd = zcx_pool_fd(shared.p);
    struct zcx_export e;
    CHECK(zcx_pool_export(shared.p, shared.base[0], 1, ZCX_WINDOWS_NO, &e, NULL) == -ZCX_E_NODRIVER);
    zcx_pool_unref(shared.p);
    CHECK(fcntl(fd, F_GETFD) >= 0, "the number may belong to somebody else by then");
}

CASE(a_fork_is_harmless) {
    shared.p = pool_on(0);
    shared.base[0] = filled(shared.p, MIB, 9, NULL);
    CHECK(case_fork(forget_pool) == 0);
    CHECK(byte_at(0, shared.base[0], NULL) == 9);
    CHECK(zcx_pool_export(shared.p, shared.base[0], 1, ZCX_WINDOWS_NO, &shared.e[0], NULL) == 0);
    zcx_pool_unref(shared.p);
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
    struct zcx_pool *p = pool_on(0), *made_meanwhile;
    zcu_stream stream = stream_on(0);
    zcu_pool previous;
    zcu_ptr a, b = filled(p, 4096, 1, stream);
    struct zcx_export e;
    pthread_t thread;
    void *result;
    char c = 0;
    capture.begin = library_symbol("cuStreamBeginCapture_v2");
    capture.end = library_symbol("cuStreamEndCapture");
    CHECK(pipe(capture.begun) == 0 && pipe(capture.finish) == 0);
    CHECK(pthread_create(&thread, NULL, capture_meanwhile, NULL) == 0);
    CHECK(read(capture.begun[0], &c, 1) == 1);
    made_meanwhile = pool_on(0);
    CHECK(zcx_pool_make_current(p, &previous, NULL) == 0 && zcx_pool_is_current(p, NULL) == 1);
    CHECK(zcx_pool_restore(0, previous, NULL) == 0);
    CHECK(zcx_pool_alloc(p, 4096, stream, &a, NULL) == 0);
    CHECK(zcx_pool_export(p, b, 4096, ZCX_WINDOWS_NO, &e, NULL) == 0);
    CHECK(zcx_pool_free(p, a, stream, NULL) == 0);
    CHECK(zcx_driver_capturing(zcx_driver_opened(), 0, stream, NULL) == 0);
    zcx_pool_unref(made_meanwhile);
    CHECK(write(capture.finish[1], &c, 1) == 1);
    CHECK(pthread_join(thread, &result) == 0 && result == NULL, "the capture died: %ld", (long)(intptr_t)result);
    zcx_pool_unref(p);
}

int main(void) {
    simcuda_share();
    RUN(chunks);
    RUN(a_new_pool);
    RUN(no_pools);
    RUN(no_descriptors);
    RUN(current_pool);
    RUN(exported);
    RUN(blobs_die_with_their_allocation);
    RUN(not_ours);
    RUN(too_large_to_export);
    RUN(peers_reach_the_pool);
    RUN(no_peers);
    RUN(imports_are_counted);
    RUN(the_importer_guards_itself);
    RUN(devices_go_by_uuid);
    RUN(import_refused);
    RUN(many_imports);
    RUN(threads_import_the_same);
    RUN(making_fails_at_every_call);
    RUN(the_importers_driver_fails);
    RUN(windows_at_the_limit);
    RUN(windows_of_one_chunk);
    RUN(what_is_cut);
    RUN(a_window_fails);
    RUN(windows_lie_apart);
    RUN(an_unknown_layout_is_not_cut);
    RUN(threads_import_one_in_windows);
    RUN(a_fork_is_harmless);
    RUN(a_capture_elsewhere_survives);
    simcuda_unshare();
    return 0;
}
