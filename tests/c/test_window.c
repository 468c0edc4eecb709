// sources: csrc/window.c csrc/err.c
/* test_window.c: the arithmetic of windows, where it could be off by one: at the borders of chunks, and at the ends of u64. */
#include "window.h"

#include <string.h>

#include "check.h"

#define CHUNK ZCX_CHUNK_BYTES

static void blob_with(unsigned char blob[64], uint64_t offset, uint64_t size) {
    for (int i = 0; i < 64; i++) blob[i] = (unsigned char)(0x80 + i);
    memcpy(blob + 24, &offset, 8);
    memcpy(blob + 32, &size, 8);
}

/* ---- the limit ---- */

static uint32_t limit_with(const char *text) {
    CHECK(setenv("ZCX_CHUNK_LIMIT", text, 1) == 0);
    uint32_t limit = zcx_chunk_limit();
    CHECK(unsetenv("ZCX_CHUNK_LIMIT") == 0);
    return limit;
}

static void limit(void) {
    CHECK(zcx_chunk_limit() == 128 && ZCX_CHUNK_LIMIT == 128);
    CHECK(limit_with("1") == 1 && limit_with("4") == 4 && limit_with("127") == 127 && limit_with("128") == 128);
    static const char *const no[] = {"129", "165", "4294967296", "4294967297", "99999999999999999999", "0", "-1", "-4294967295",
                                     "-99999999999999999999", "", "lots", " ", "x4"};
    for (size_t i = 0; i < sizeof no / sizeof *no; i++) CHECK(limit_with(no[i]) == 128, "\"%s\"", no[i]);
}

/* ---- the blob's fields ---- */

static void fields(void) {
    unsigned char blob[64], other[64];
    uint64_t offset = 99;
    blob_with(blob, 3 * CHUNK + 512, 5 * CHUNK);
    memcpy(other, blob, 64);
    CHECK(zcx_blob_fields(blob, 5 * CHUNK, &offset) == 0 && offset == 3 * CHUNK + 512);
    CHECK(memcmp(blob, other, 64) == 0);
    offset = 99;
    CHECK(zcx_blob_fields(blob, 5 * CHUNK + 1, &offset) == 1 && zcx_blob_fields(blob, 5 * CHUNK - 1, &offset) == 1);
    CHECK(zcx_blob_fields(blob, 0, &offset) == 1 && offset == 99);
    blob_with(blob, 7, 0);
    CHECK(zcx_blob_fields(blob, 0, &offset) == 1 && offset == 99, "no allocation has no bytes");
    for (int i = 32; i < 40; i++) { /* every byte of the size counts */
        blob_with(blob, 0, CHUNK);
        blob[i] ^= 0x80;
        CHECK(zcx_blob_fields(blob, CHUNK, &offset) == 1, "byte %d", i);
    }
    blob_with(blob, UINT64_MAX, 1);
    CHECK(zcx_blob_fields(blob, 1, &offset) == 0 && offset == UINT64_MAX, "the last byte that there can be");
    blob_with(blob, UINT64_MAX, 2);
    CHECK(zcx_blob_fields(blob, 2, &offset) == 1);
    blob_with(blob, 0, UINT64_MAX);
    CHECK(zcx_blob_fields(blob, UINT64_MAX, &offset) == 0 && offset == 0);
    blob_with(blob, 1, UINT64_MAX);
    CHECK(zcx_blob_fields(blob, UINT64_MAX, &offset) == 0 && offset == 1);
    blob_with(blob, 2, UINT64_MAX);
    CHECK(zcx_blob_fields(blob, UINT64_MAX, &offset) == 1);
}

static void chunks(void) {
    unsigned char blob[64];
    for (uint64_t offset = 0; offset <= 2 * CHUNK; offset += CHUNK / 4)
        for (int lead = -1; lead <= 1; lead++)
            for (uint64_t size = CHUNK / 4; size <= 3 * CHUNK; size += CHUNK / 4)
                for (int tail = -1; tail <= 1; tail++) {
                    uint64_t at = offset + (offset ? (uint64_t)lead : 0), n = size + (uint64_t)tail, counted = 0;
                    for (uint64_t c = 0; c < 8; c++) counted += c * CHUNK < at + n && (c + 1) * CHUNK > at;
                    blob_with(blob, at, n);
                    CHECK(zcx_blob_chunks(blob, n) == counted, "%llu bytes at %llu", (unsigned long long)n, (unsigned long long)at);
                    CHECK(zcx_blob_chunks((unsigned char[64]){0}, n) >= counted, "an unknown start is the worst one");
                }
}

/* ---- cutting ---- */

/* Windows of `chunks` over [offset, offset + bytes): side by side, none empty, all of it, each within one multiple of the step. */
static void cut(uint64_t offset, uint64_t bytes, uint32_t chunks) {
    struct zcx_windows w = zcx_windows_of(offset, bytes, chunks);
    uint64_t step = chunks * CHUNK, count = zcx_windows_count(&w), end = 0;
    unsigned char blob[64], part[64];
    blob_with(blob, offset, bytes);
    CHECK(w.offset == offset && w.bytes == bytes && w.step == step);
    CHECK(count >= 1 && count <= 64, "%llu windows", (unsigned long long)count);
    for (uint64_t k = 0; k < count; k++) {
        uint64_t start, n, at;
        zcx_windows_at(&w, k, &start, &n);
        CHECK(start == end && n >= 1 && n <= step, "window %llu of %llu at %llu", (unsigned long long)k, (unsigned long long)bytes,
              (unsigned long long)offset);
        end = start + n;
        CHECK((offset + start) / step == (offset + end - 1) / step, "within one step");
        CHECK(k == 0 || (offset + start) % step == 0, "cut where a step begins");
        zcx_windows_blob(&w, k, blob, part);
        CHECK(zcx_blob_fields(part, n, &at) == 0 && at == offset + start, "its blob");
        CHECK(zcx_blob_chunks(part, n) <= chunks, "touches %u chunks at most", chunks);
        CHECK(!memcmp(part, blob, 24) && !memcmp(part + 40, blob + 40, 24), "all else is the driver's");
    }
    CHECK(end == bytes, "%llu of %llu bytes", (unsigned long long)end, (unsigned long long)bytes);
}

static void cuts(void) {
    static const uint64_t around[] = {0, 1, 511, 512, 513, CHUNK / 2, CHUNK - 513, CHUNK - 512, CHUNK - 1};
    for (uint32_t chunks = 1; chunks <= 4; chunks++)
        for (uint64_t c = 0; c < 5; c++)
            for (size_t i = 0; i < sizeof around / sizeof *around; i++)
                for (uint64_t d = 0; d < 6; d++)
                    for (size_t k = 0; k < sizeof around / sizeof *around; k++)
                        if (d || around[k]) cut(c * CHUNK + around[i], d * CHUNK + around[k], chunks);
}

static uint64_t count_of(uint64_t offset, uint64_t bytes, uint32_t chunks) {
    struct zcx_windows w = zcx_windows_of(offset, bytes, chunks);
    return zcx_windows_count(&w);
}

static void counts(void) {
    const uint64_t window = ZCX_WINDOW_CHUNKS * CHUNK;
    CHECK(count_of(0, 1, 1) == 1 && count_of(CHUNK - 1, 1, 1) == 1 && count_of(CHUNK - 1, 2, 1) == 2);
    CHECK(count_of(0, CHUNK, 1) == 1 && count_of(0, CHUNK + 1, 1) == 2 && count_of(512, CHUNK, 1) == 2);
    CHECK(count_of(0, 8 * window, ZCX_WINDOW_CHUNKS) == 8, "16 GiB");
    CHECK(count_of(512, 8 * window, ZCX_WINDOW_CHUNKS) == 9);
    CHECK(count_of(7 * CHUNK, 8 * window, ZCX_WINDOW_CHUNKS) == 9, "cuts lie at multiples in the pool, not in the allocation");
    CHECK(ZCX_WINDOW_CHUNKS <= ZCX_CHUNK_LIMIT);
}

/* The last windows of what no machine has: no end is lost to an overflow. */
static void ends_of_u64(void) {
    static const struct { uint64_t offset, bytes; uint32_t chunks; } rows[] = {
        {UINT64_MAX, 1, 1}, {UINT64_MAX - CHUNK + 1, CHUNK, 1}, {UINT64_MAX - CHUNK, CHUNK + 1, 1},
        {0, UINT64_MAX, 1u << 31}, {1, UINT64_MAX, 1u << 31}, {CHUNK - 1, UINT64_MAX - CHUNK + 2, UINT32_MAX},
        {0, UINT64_MAX, UINT32_MAX}, {12345, UINT64_MAX - 12344, UINT32_MAX}, {UINT64_MAX - 5, 6, UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct zcx_windows w = zcx_windows_of(rows[i].offset, rows[i].bytes, rows[i].chunks);
        uint64_t count = zcx_windows_count(&w), end = 0, start, n;
        CHECK(count >= 1 && count <= 512, "row %zu: %llu", i, (unsigned long long)count);
        for (uint64_t k = 0; k < count; k++) {
            zcx_windows_at(&w, k, &start, &n);
            CHECK(start == end && n >= 1 && n <= w.step, "row %zu, window %llu", i, (unsigned long long)k);
            end += n;
        }
        CHECK(end == rows[i].bytes, "row %zu", i);
    }
    struct zcx_windows all = zcx_windows_of(0, UINT64_MAX, 1); /* 2^39 of them: the last */
    uint64_t start, n, last = zcx_windows_count(&all) - 1;
    CHECK(last == (1ull << 39) - 1);
    zcx_windows_at(&all, last, &start, &n);
    CHECK(start == last * CHUNK && n == CHUNK - 1);
}

static void seams_are_where_windows_end(void) {
    unsigned char blob[64] = {0};
    uint64_t offset = 7 * CHUNK + 4096, bytes = 10 * CHUNK;
    memcpy(blob + 24, &offset, 8);
    memcpy(blob + 32, &bytes, 8);
    for (uint32_t chunks = 1; chunks <= 4; chunks++)
        for (uint64_t from = 0; from <= 3 * CHUNK; from += CHUNK / 2 + 512) {
            struct zcx_windows w = zcx_windows_of(offset, bytes, chunks);
            struct zcx_seams s = zcx_windows_seams(blob, bytes, from, chunks);
            for (uint64_t at = 0, piece; at < bytes - from; at += piece) {
                uint64_t start = 0, length = 0;
                piece = zcx_seams_piece(&s, at, bytes - from - at);
                CHECK(piece > 0);
                for (uint64_t k = 0; from + at >= start + length; k++) zcx_windows_at(&w, k, &start, &length);
                CHECK(from + at + piece == start + length, "a piece ends where its window does");
            }
        }
    CHECK(zcx_windows_seams(blob, bytes, 0, 0).step == 0 && zcx_windows_seams(blob, bytes + 1, 0, 1).step == 0);
    struct zcx_seams none = {0, 0};
    CHECK(zcx_seams_piece(&none, 5, 1000) == 1000);
}

int main(void) {
    unsetenv("ZCX_CHUNK_LIMIT");
    RUN(limit);
    RUN(fields);
    RUN(chunks);
    RUN(cuts);
    RUN(counts);
    RUN(ends_of_u64);
    RUN(seams_are_where_windows_end);
    return 0;
}
