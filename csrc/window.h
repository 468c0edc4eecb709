/* window.h: an allocation too large for one import, cut into windows that the driver can bear.
 *
 * The importer copies the handles of all chunks of an import into an array for 128 of them on its stack (the published
 * disassembly is of driver 580.126.20; the crash was seen on 580.159.04: research/pool-ipc/repro_mempool_import_segv.py).
 * An import of a *part* does not exist in the API. But the 64 bytes that cuMemPoolExportPointer fills hold, at byte 24, the
 * allocation's offset in its pool and, at byte 32, its size, and a copy in which both are narrowed imports that part, next to
 * its neighbours in the importer's address space (research/pool-ipc/probe_blob_layout.py).
 *
 * None of this is documented. So a window is cut only from a true, fresh blob whose fields say what is known of the
 * allocation, only on a driver on which the start-up check (canary) has imported small windows and found them contiguous
 * and right, and every import is checked for contiguity again. docs/windows.md has the whole story.
 * Does not: call the driver, or keep anything. pool.c imports. */
#ifndef ZCX_WINDOW_H
#define ZCX_WINDOW_H

#include <stdint.h>

#include "err.h"

#define ZCX_CHUNK_BYTES (32ull << 20)
#define ZCX_CHUNK_LIMIT 128u  /* most chunks that one import may touch */
#define ZCX_WINDOW_CHUNKS 128u /* of a window, 4 GiB: as few ends as can be, because the driver's own copies do not cross one */

/* The limit in force: ZCX_CHUNK_LIMIT, or what the environment's ZCX_CHUNK_LIMIT lowers it to (never more, never 0). */
uint32_t zcx_chunk_limit(void);

/* The fields, as the driver left them. 0; 1: they do not say `alloc_bytes`, so that this layout is not the known one. */
int zcx_blob_fields(const unsigned char blob[64], uint64_t alloc_bytes, uint64_t *offset);

/* Chunks that an import of the whole allocation touches, straddled ones included. Exact where the fields say alloc_bytes,
 * else the upper bound for an unknown start. */
uint32_t zcx_blob_chunks(const unsigned char blob[64], uint64_t alloc_bytes);

/* Cut [offset, offset + bytes) of a pool at multiples of `chunks` chunks. */
struct zcx_windows { uint64_t offset, bytes, step; };
struct zcx_windows zcx_windows_of(uint64_t offset, uint64_t bytes, uint32_t chunks);
uint64_t zcx_windows_count(const struct zcx_windows *w);
/* The k-th: where it starts behind the allocation's first byte, and its bytes. */
void zcx_windows_at(const struct zcx_windows *w, uint64_t k, uint64_t *start, uint64_t *bytes);
/* The blob of that window. */
void zcx_windows_blob(const struct zcx_windows *w, uint64_t k, const unsigned char blob[64], unsigned char out[64]);

/* Where windows of an import end, counted from `offset` bytes behind the allocation's start: first, and then every step. step 0:
 * imported in one piece. Kernels cross these ends; the driver's own copies and fills do not (CUDA_ERROR_INVALID_VALUE, driver
 * 580.159.04, tests/gpu/test_large.py): who uses those cuts them there. */
struct zcx_seams { uint64_t first, step; };
struct zcx_seams zcx_windows_seams(const unsigned char blob[64], uint64_t alloc_bytes, uint64_t offset, uint32_t chunks);
/* Bytes from `at` on that one operation may touch: up to `left`, or to the next end. */
uint64_t zcx_seams_piece(const struct zcx_seams *s, uint64_t at, uint64_t left);

#endif
