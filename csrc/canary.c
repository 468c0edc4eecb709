/* canary.c: see canary.h. */
#include "canary.h"

#include <string.h>

#define MARK 512u     /* bytes of one mark, all of one value */
#define LATE (4ull << 30) /* bytes of overwriting before the marks: 1 to 5 ms, far longer than a message and an import take */
#define BYTES_MAX (64ull << 20)
#define PIECE (2ull << 20) /* between marks */

/* Where the marks are: both ends, an interior place that no alignment favours, and both sides of wherever a chunk may end,
 * that is every 2 MiB. */
#define NMARKS_MAX (2 * (unsigned)(BYTES_MAX / PIECE) + 1)
static unsigned nmarks(uint64_t nbytes) { return 2 * (unsigned)(nbytes / PIECE) + 1; }
static uint64_t place(unsigned i, unsigned n) {
    if (i == n - 1) return (5ull << 20) + 4099;
    uint64_t start = i / 2 * PIECE;
    return i % 2 ? start + PIECE - MARK : start;
}

/* Never the value that the overwriting leaves. */
static unsigned char value(uint64_t seed, unsigned i) {
    uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15ull; /* splitmix64 */
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (unsigned char)(1 + (x >> 32) % 250);
}

uint64_t zcx_canary_bytes(uint32_t step) { return step >= ZCX_PROVE_VMM ? 24ull << 20 : BYTES_MAX; }

int zcx_canary_identity(const struct zcx_driver *d, zcu_pool pool, zcu_ptr memory, zcu_stream stream, struct zcx_err *err) {
    struct zcx_ptr_info info = {0};
    uint64_t ids[3];
    int r = zcx_driver_ptr_info(d, memory, &info, err);
    ids[0] = info.buffer_id;
    for (int i = 1; i < 3 && !r; i++) {
        zcu_ptr small;
        r = zcx_cu(err, "cuMemAllocFromPoolAsync", d->MemAllocFromPoolAsync(&small, MARK, pool, stream));
        if (r) return r;
        r = zcx_driver_ptr_info(d, small, &info, err);
        ids[i] = info.buffer_id;
        int undone = zcx_cu(r ? NULL : err, "cuMemFreeAsync", d->MemFreeAsync(small, stream)); /* its address is free for the next */
        if (!r) r = undone;
    }
    if (r) return r;
    if (ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2])
        return zcx_fail(err, ZCX_E_UNFIT, "the driver gives two allocations one identity");
    return 0;
}

static int fill(const struct zcx_driver *d, zcu_ptr base, const struct zcx_seams *seams, uint64_t at, uint64_t n, unsigned char byte,
                zcu_stream stream, struct zcx_err *err) {
    int r = 0;
    for (uint64_t piece; n && !r; at += piece, n -= piece) {
        piece = zcx_seams_piece(seams, at, n);
        r = zcx_cu(err, "cuMemsetD8Async", d->MemsetD8Async(base + at, byte, piece, stream));
    }
    return r;
}

int zcx_canary_write(const struct zcx_driver *d, zcu_ptr base, uint64_t nbytes, const struct zcx_seams *seams, uint64_t seed, zcu_stream stream,
                     struct zcx_err *err) {
    unsigned n = nmarks(nbytes);
    int r = 0;
    for (uint64_t done = 0; done < LATE && !r; done += nbytes) r = fill(d, base, seams, 0, nbytes, 0xFF, stream, err);
    for (unsigned i = 0; i < n && !r; i++) r = fill(d, base, seams, place(i, n), MARK, value(seed, i), stream, err);
    return r;
}

static int compare(const unsigned char *seen, unsigned i, unsigned n, uint64_t seed, struct zcx_err *err) {
    for (unsigned k = 0; k < MARK; k++)
        if (seen[k] != value(seed, i)) {
            zcx_fail(err, ZCX_E_UNFIT, "byte %llu of the check's memory reads %u, not %u", (unsigned long long)(place(i, n) + k), seen[k], value(seed, i));
            return 1;
        }
    return 0;
}

int zcx_canary_check(const struct zcx_driver *d, zcu_ptr base, uint64_t nbytes, const struct zcx_seams *seams, uint64_t seed, zcu_stream stream,
                     struct zcx_err *err) {
    unsigned char seen[NMARKS_MAX][MARK];
    unsigned n = nmarks(nbytes);
    int r = 0;
    memset(seen, 0, sizeof seen);
    for (unsigned i = 0; i < n; i++)
        for (uint64_t k = 0, piece; k < MARK && !r; k += piece) {
            piece = zcx_seams_piece(seams, place(i, n) + k, MARK - k);
            r = zcx_cu(err, "cuMemcpyDtoHAsync", d->MemcpyDtoHAsync(seen[i] + k, base + place(i, n) + k, piece, stream));
        }
    if (!r) r = zcx_cu(err, "cuStreamSynchronize", d->StreamSynchronize(stream));
    if (r) return r;
    for (unsigned i = 0; i < n && !r; i++) r = compare(seen[i], i, n, seed, err);
    return r;
}

int zcx_canary_check_host(const unsigned char *copy, uint64_t nbytes, uint64_t seed, struct zcx_err *err) {
    unsigned n = nmarks(nbytes);
    int r = 0;
    for (unsigned i = 0; i < n && !r; i++) r = compare(copy + place(i, n), i, n, seed, err);
    return r;
}
