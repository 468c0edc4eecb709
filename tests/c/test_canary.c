/* test_canary.c: the marks of the start-up checks, on the simulated driver: one wrong byte in any of them is found and named, through
 * an import in windows as well, whose seam may lie within a mark. */
// sources: csrc/canary.c csrc/pool.c csrc/window.c csrc/driver.c csrc/err.c
// needs: simcuda
#include "canary.h"
#include "cases.h"
#include "pool.h"

#define MIB (1ull << 20)
#define MARK 512u
#define ODD (5 * MIB + 4099) /* the mark that no alignment favours */
#define CHUNK ZCX_CHUNK_BYTES

static const struct zcx_seams none = {0, 0};
static unsigned char copy[64 << 20]; /* what the host has of the marks */

static unsigned marks_of(uint64_t nbytes) { return 2 * (unsigned)(nbytes / (2 * MIB)) + 1; }

/* Both sides of every 2 MiB, and the odd one. */
static uint64_t mark(unsigned i, uint64_t nbytes) {
    if (i + 1 == marks_of(nbytes)) return ODD;
    return i / 2 * 2 * MIB + (i % 2 ? 2 * MIB - MARK : 0);
}

static unsigned char read_byte(const struct zcx_driver *d, zcu_ptr at, zcu_stream stream) {
    unsigned char byte;
    CHECK(d->MemcpyDtoHAsync(&byte, at, 1, stream) == 0 && d->StreamSynchronize(stream) == 0);
    return byte;
}

/* Exactly this byte is named, with what is read and what was written. */
static void named(const struct zcx_err *err, uint64_t at, unsigned char reads, unsigned char wrote) {
    char expected[80];
    snprintf(expected, sizeof expected, "byte %llu of the check's memory reads %u, not %u", (unsigned long long)at, reads, wrote);
    CHECK(!strcmp(err->text, expected), "\"%s\", not \"%s\"", err->text, expected);
}

/* In every mark one byte is spoilt, on the host also others: the first, the last, or one between, always another one. */
static void every_mark(const struct zcx_driver *d, zcu_ptr base, uint64_t nbytes, const struct zcx_seams *seams, zcu_stream stream) {
    const uint64_t seed = 0x5EED;
    unsigned n = marks_of(nbytes);
    struct zcx_err err;
    CHECK(zcx_canary_write(d, base, nbytes, seams, seed, stream, &err) == 0, "%s %s", err.call ? err.call : "", err.text);
    CHECK(zcx_canary_check(d, base, nbytes, seams, seed, stream, &err) == 0, "%s", err.text);
    CHECK(zcx_canary_check(d, base, nbytes, seams, seed + 1, stream, &err) == 1, "marks of another seed");
    for (unsigned i = 0; i < n; i++)
        memset(copy + mark(i, nbytes), read_byte(d, base + mark(i, nbytes), stream), MARK);
    CHECK(zcx_canary_check_host(copy, nbytes, seed, &err) == 0, "each mark is of one value: %s", err.text);
    CHECK(zcx_canary_check_host(copy, nbytes, seed + 1, &err) == 1);
    for (unsigned i = 0; i < n; i++) {
        const uint64_t within[] = {0, MARK - 1, 1 + i * 37 % (MARK - 2)};
        for (unsigned k = 0; k < 3; k++) {
            uint64_t at = mark(i, nbytes) + within[k];
            unsigned char wrote = copy[at], wrong = wrote ^ 0x80;
            CHECK(wrote != 0xFF, "what lay there before it");
            copy[at] = wrong;
            CHECK(zcx_canary_check_host(copy, nbytes, seed, &err) == 1);
            named(&err, at, wrong, wrote);
            copy[at] = wrote;
            if (k != i % 3) continue; /* on the device it takes its time */
            CHECK(read_byte(d, base + at, stream) == wrote && d->MemsetD8Async(base + at, wrong, 1, stream) == 0);
            CHECK(zcx_canary_check(d, base, nbytes, seams, seed, stream, &err) == 1, "mark %u, byte %llu", i, (unsigned long long)within[k]);
            named(&err, at, wrong, wrote);
            CHECK(d->MemsetD8Async(base + at, wrote, 1, stream) == 0);
        }
    }
    CHECK(zcx_canary_check(d, base, nbytes, seams, seed, stream, &err) == 0 && zcx_canary_check_host(copy, nbytes, seed, &err) == 0, "all is as it was");
}

static zcu_stream stream_new(const struct zcx_driver *d) {
    zcu_stream stream;
    CHECK(d->StreamCreate(&stream, ZCU_STREAM_NON_BLOCKING) == 0);
    return stream;
}

/* Of the process that has allocated it, in one piece: of both sizes that there are. */
CASE(in_one_piece) {
    struct zcx_pool *p;
    struct zcx_scope s;
    CHECK(zcx_pool_new(&p, 0, NULL) == 0 && zcx_scope_open(&s, 0, NULL) == 0);
    zcu_stream stream = stream_new(s.d);
    CHECK(zcx_canary_bytes(ZCX_PROVE_POOL) == 64 * MIB && zcx_canary_bytes(ZCX_PROVE_WINDOWS) == 64 * MIB);
    for (uint32_t step = ZCX_PROVE_VMM; step <= ZCX_PROVE_STEPS; step++) CHECK(zcx_canary_bytes(step) == 24 * MIB);
    for (uint64_t nbytes = 24 * MIB; nbytes <= 64 * MIB; nbytes += 40 * MIB) {
        zcu_ptr base;
        CHECK(zcx_pool_alloc(p, nbytes, stream, &base, NULL) == 0);
        every_mark(s.d, base, nbytes, &none, stream);
        CHECK(zcx_pool_free(p, base, stream, NULL) == 0);
    }
    CHECK(s.d->StreamSynchronize(stream) == 0);
    zcx_scope_close(&s);
    zcx_pool_unref(p);
}

struct lent { zcu_uuid uuid; struct zcx_export e; };

static void importer(int sock) {
    struct lent l;
    struct zcx_pool *p;
    struct zcx_scope s;
    struct zcx_err err;
    zcu_ptr base;
    int last, fd = peer_recv(sock, &l, sizeof l);
    CHECK(zcx_pool_import(&p, fd, &l.uuid, NULL) == 0);
    close(fd);
    CHECK(l.e.window == 1 && zcx_pool_map(p, &l.e, &base, NULL) == 0);
    struct zcx_seams seams = zcx_windows_seams(l.e.blob, l.e.alloc_bytes, 0, l.e.window);
    CHECK(seams.first > ODD && seams.first < ODD + MARK && seams.step == CHUNK, "one lies within the odd mark: %llu", (unsigned long long)seams.first);
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    zcu_stream stream = stream_new(s.d);
    every_mark(s.d, base, l.e.alloc_bytes, &seams, stream);
    CHECK(zcx_canary_check(s.d, base, l.e.alloc_bytes, &none, 1, stream, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_INVALID_VALUE,
          "this driver has seams: %s", err.text);
    CHECK(zcx_canary_write(s.d, base, l.e.alloc_bytes, &none, 1, stream, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_INVALID_VALUE);
    CHECK(zcx_pool_unmap(p, l.e.buffer_id, stream, &last, NULL) == 0 && last == 1 && s.d->StreamSynchronize(stream) == 0);
    zcx_scope_close(&s);
    zcx_pool_unref(p);
}

/* Imported in windows of one chunk, and lying in the pool so that one ends in the midst of a mark. */
CASE(in_windows) {
    struct peer peer = peer_start(importer);
    struct zcx_pool *p;
    struct zcx_scope s;
    struct lent l;
    zcu_ptr before, base;
    CHECK(zcx_pool_new(&p, 0, NULL) == 0 && zcx_scope_open(&s, 0, NULL) == 0);
    CHECK(zcx_pool_alloc(p, CHUNK - (ODD / MARK + 1) * MARK, NULL, &before, NULL) == 0 && zcx_pool_alloc(p, 64 * MIB, NULL, &base, NULL) == 0);
    CHECK(s.d->StreamSynchronize(NULL) == 0); /* what the peer does comes behind it */
    zcx_scope_close(&s);
    CHECK(zcx_pool_export(p, base, 64 * MIB, ZCX_WINDOWS_PROVE, &l.e, NULL) == 0);
    l.uuid = *zcx_pool_uuid(p);
    peer_send(peer.sock, &l, sizeof l, zcx_pool_fd(p));
    CHECK(peer_end(&peer) == 0);
    zcx_pool_unref(p);
}

int main(void) {
    simcuda_share();
    setenv("SIMCUDA_DELAY_US", "0", 1);
    RUN(in_one_piece);
    RUN(in_windows);
    simcuda_unshare();
    return 0;
}
