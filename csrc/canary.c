/* canary.c: see canary.h. */
#include "canary.h"

#include <string.h>

#define MARK 512u     /* bytes of one mark, all of one value */
#define REPEATS 64    /* of overwriting 64 MiB: 1 to 5 ms, far longer than a message and an import take */

/* Where the marks are: both ends, an interior place that no alignment favours, and both sides of wherever a chunk may end,
 * that is every 2 MiB (the granularity of allocations). */
#define NMARKS (2 * (unsigned)(ZCX_CANARY_BYTES >> 21) + 1)
static uint64_t place(unsigned i) {
    if (i == NMARKS - 1) return (5ull << 20) + 4099;
    uint64_t piece = (uint64_t)(i / 2) << 21;
    return i % 2 ? piece + (2u << 20) - MARK : piece;
}

/* Never the value that the overwriting leaves. */
static unsigned char value(uint64_t seed, unsigned i) {
    uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15ull; /* splitmix64 */
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (unsigned char)(1 + (x >> 32) % 250);
}

int zcx_canary_write(const struct zcx_driver *d, zcu_ptr base, uint64_t seed, zcu_stream stream, struct zcx_err *err) {
    int r = 0;
    for (int i = 0; i < REPEATS && !r; i++)
        r = zcx_cu(err, "cuMemsetD8Async", d->MemsetD8Async(base, 0xFF, ZCX_CANARY_BYTES, stream));
    for (unsigned i = 0; i < NMARKS && !r; i++)
        r = zcx_cu(err, "cuMemsetD8Async", d->MemsetD8Async(base + place(i), value(seed, i), MARK, stream));
    return r;
}

int zcx_canary_check(const struct zcx_driver *d, zcu_ptr base, uint64_t seed, zcu_stream stream, struct zcx_err *err) {
    unsigned char seen[NMARKS][MARK];
    int r = 0;
    memset(seen, 0, sizeof seen);
    for (unsigned i = 0; i < NMARKS && !r; i++)
        r = zcx_cu(err, "cuMemcpyDtoHAsync", d->MemcpyDtoHAsync(seen[i], base + place(i), MARK, stream));
    if (!r) r = zcx_cu(err, "cuStreamSynchronize", d->StreamSynchronize(stream));
    if (r) return r;
    for (unsigned i = 0; i < NMARKS; i++)
        for (unsigned k = 0; k < MARK; k++)
            if (seen[i][k] != value(seed, i)) {
                zcx_fail(err, ZCX_E_UNFIT, "byte %llu of the check's memory reads %u, not %u", (unsigned long long)(place(i) + k), seen[i][k],
                         value(seed, i));
                return 1;
            }
    return 0;
}
