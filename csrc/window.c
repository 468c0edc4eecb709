/* window.c: see window.h. */
#include "window.h"

#include <stdlib.h>
#include <string.h>

enum { OFFSET_AT = 24, SIZE_AT = 32 };

static uint64_t u64_at(const unsigned char *bytes) {
    uint64_t v;
    memcpy(&v, bytes, sizeof v); /* the driver's own byte order, on this machine */
    return v;
}

uint32_t zcx_chunk_limit(void) {
    const char *text = getenv("ZCX_CHUNK_LIMIT");
    long wanted = text ? strtol(text, NULL, 10) : 0;
    return wanted > 0 && wanted < (long)ZCX_CHUNK_LIMIT ? (uint32_t)wanted : ZCX_CHUNK_LIMIT;
}

int zcx_blob_fields(const unsigned char blob[64], uint64_t alloc_bytes, uint64_t *offset) {
    uint64_t at = u64_at(blob + OFFSET_AT);
    if (!alloc_bytes || u64_at(blob + SIZE_AT) != alloc_bytes || at > UINT64_MAX - (alloc_bytes - 1)) return 1;
    *offset = at;
    return 0;
}

uint32_t zcx_blob_chunks(const unsigned char blob[64], uint64_t alloc_bytes) {
    uint64_t offset, chunks, rest = alloc_bytes - 1;
    if (!alloc_bytes) return 0;
    if (!zcx_blob_fields(blob, alloc_bytes, &offset)) chunks = (offset + rest) / ZCX_CHUNK_BYTES - offset / ZCX_CHUNK_BYTES + 1;
    else /* the worst start is the last byte of a chunk: that byte lies in a chunk of its own, what remains fills others */
        chunks = 1 + rest / ZCX_CHUNK_BYTES + (rest % ZCX_CHUNK_BYTES != 0);
    return chunks > UINT32_MAX ? UINT32_MAX : (uint32_t)chunks;
}

struct zcx_windows zcx_windows_of(uint64_t offset, uint64_t bytes, uint32_t chunks) {
    return (struct zcx_windows){offset, bytes, chunks * ZCX_CHUNK_BYTES};
}

uint64_t zcx_windows_count(const struct zcx_windows *w) {
    return (w->offset + (w->bytes - 1)) / w->step - w->offset / w->step + 1;
}

void zcx_windows_at(const struct zcx_windows *w, uint64_t k, uint64_t *start, uint64_t *bytes) {
    /* Cuts lie at multiples of the step in the pool, so the first window may be shorter, and so may the last. */
    uint64_t lead = w->step - w->offset % w->step, most = k ? w->step : lead, rest;
    *start = k ? lead + (k - 1) * w->step : 0;
    rest = w->bytes - *start;
    *bytes = rest < most ? rest : most;
}

void zcx_windows_blob(const struct zcx_windows *w, uint64_t k, const unsigned char blob[64], unsigned char out[64]) {
    uint64_t start, bytes, at;
    zcx_windows_at(w, k, &start, &bytes);
    at = w->offset + start;
    memcpy(out, blob, 64);
    memcpy(out + OFFSET_AT, &at, sizeof at);
    memcpy(out + SIZE_AT, &bytes, sizeof bytes);
}

struct zcx_seams zcx_windows_seams(const unsigned char blob[64], uint64_t alloc_bytes, uint64_t offset, uint32_t chunks) {
    uint64_t start, step = chunks * ZCX_CHUNK_BYTES;
    if (!chunks || zcx_blob_fields(blob, alloc_bytes, &start)) return (struct zcx_seams){0, 0};
    return (struct zcx_seams){step - (start + offset) % step, step};
}

uint64_t zcx_seams_piece(const struct zcx_seams *s, uint64_t at, uint64_t left) {
    if (!s->step) return left;
    uint64_t end = at < s->first ? s->first - at : s->step - (at - s->first) % s->step;
    return end < left ? end : left;
}
