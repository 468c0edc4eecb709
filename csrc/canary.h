/* canary.h: the start-up check's marks: small patterns at known places of a large allocation, written late and read back.
 *
 * Both ends of a session use it (xfer_prove.c, xfer_check.c): one writes marks made from a seed behind work that takes a
 * while, posts its gate, and the other must see them, every one, as soon as the gate lets it through. So the check fails when
 * an import shows other memory, when a gate lets through too early, and when windows do not join.
 * Does not: import, gate, or send; keep device memory. */
#ifndef ZCX_CANARY_H
#define ZCX_CANARY_H

#include "driver.h"
#include "window.h"

/* Steps of PROVE. */
enum {
    ZCX_PROVE_POOL = 1,     /* import whole, twice, both gates */
    ZCX_PROVE_WINDOWS = 2,  /* import in windows of one chunk */
    ZCX_PROVE_VMM = 3,      /* a slab, mapped to be written, both gates */
    ZCX_PROVE_READ = 4,     /* a slab, mapped to be read */
    ZCX_PROVE_WINDOW = 5,   /* no import: pinned host memory, copied to and from, both gates */
    ZCX_PROVE_STEPS = 5,
};
/* Bytes of the memory of a step. A pool's touches two chunks at least, and so has a seam; a slab's is one of its own (arena.h). */
uint64_t zcx_canary_bytes(uint32_t step);

/* Has each allocation an identity of its own: two that live at once, and two that had one address in turn? An importer knows by
 * it what it has imported already (pool.h), so two with one would be taken for each other, without any error.
 * 0; -ZCX_E_UNFIT: not. `memory`: an allocation of `pool`; two small ones are made and freed on `stream`. */
int zcx_canary_identity(const struct zcx_driver *d, zcu_pool pool, zcu_ptr memory, zcu_stream stream, struct zcx_err *err);

/* Queue on `stream`: overwrite the whole allocation many times, then write the marks. Asynchronous; the caller's scope is open.
 * `seams`: of the import that `base` belongs to, which no operation here crosses. */
int zcx_canary_write(const struct zcx_driver *d, zcu_ptr base, uint64_t nbytes, const struct zcx_seams *seams, uint64_t seed, zcu_stream stream, struct zcx_err *err);
/* Copy the marks from the device and compare. Waits for `stream`: only ever one of the check's own, or of a worker.
 * 0: all there; 1: not, err->text says which. */
int zcx_canary_check(const struct zcx_driver *d, zcu_ptr base, uint64_t nbytes, const struct zcx_seams *seams, uint64_t seed, zcu_stream stream, struct zcx_err *err);

/* The same for marks that were copied to the host. */
int zcx_canary_check_host(const unsigned char *copy, uint64_t nbytes, uint64_t seed, struct zcx_err *err);

#endif
