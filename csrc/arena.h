/* arena.h: device memory that is ours to give out and to give back: cuMemCreate with POSIX_FD handles, and its import elsewhere.
 *
 * Why beside the pool: memory of an exported pool never returns to the device (docs/windows.md), is importable only whole and
 * writable, and not above 128 chunks where windows were not proved. VMM memory really returns, can be mapped read-only, and has no
 * limit. It is used for results that the pool cannot carry, for what zcx.empty() makes where there is no pool, and for staging.
 *
 * Exporter (the parent): a *slab* is one or more handles, mapped side by side at one address; a *block* is a part of a slab. A
 * large block is a slab of its own and returns to the device when it is put; small ones share slabs, which stay for the next
 * while there is use for them. Blocks that workers may write lie in other slabs than blocks that they only read.
 * A block that was put is used again, or returned, only when all work that its context was given until then is complete
 * (cuCtxRecordEvent): whoever used it, on whatever stream. Nothing here waits for that, but for zcx_arena_take when the device has
 * nothing else left, and then for this process's own work, for a bounded time.
 * Importer (a worker): one mapping per slab and access, made piece by piece from descriptors, given up as one.
 * Thread-safe: one mutex per arena. Never called with the GIL held.
 * Does not: know sockets, sessions or gates; count imports (xfer does). */
#ifndef ZCX_ARENA_H
#define ZCX_ARENA_H

#include "driver.h"

struct zcx_arena; /* reference-counted, one per device; blocks keep it */
struct zcx_slab;  /* reference-counted; its memory stays while somebody refers to it, also after its arena let go of it */
struct zcx_block;

/* ---- exporter ---- */

/* -ZCX_E_UNFIT: the device or the driver has no virtual memory management with POSIX_FD handles; text says which. */
int zcx_arena_new(struct zcx_arena **out, int ordinal, struct zcx_err *err);
int zcx_arena_ordinal(const struct zcx_arena *a);
struct zcx_arena *zcx_arena_ref(struct zcx_arena *a);
/* The last one, of the caller or by the last block, gives everything back. What is pending then is waited for, as zcx_arena_take does; what
 * the GPU does not let go of in that time is left to the end of the process. In a forked child: frees nothing. */
void zcx_arena_unref(struct zcx_arena *a);
/* How long zcx_arena_take may wait, 10 s unless told. */
void zcx_arena_patience(struct zcx_arena *a, uint32_t ms);

enum zcx_arena_use { ZCX_ARENA_READ, ZCX_ARENA_WRITE }; /* what workers may do with it */
/* `nbytes` (more than 0) at an address aligned to 512. The contents are undefined. -ZCX_E_CUDA with cuda 2 (out of memory) when
 * the device has no room, also after what was put came free (waited for up to 10 s of this process's own work; before CUDA 12.5 by
 * cuCtxSynchronize, which knows no limit); the text has the numbers. -ZCX_E_RANGE: no bytes. */
int zcx_arena_take(struct zcx_arena *a, uint64_t nbytes, enum zcx_arena_use use, struct zcx_block **out, struct zcx_err *err);
/* Any thread, also one that captures or while another captures. In a forked child: frees nothing. */
void zcx_block_put(struct zcx_block *b);
zcu_ptr zcx_block_address(const struct zcx_block *b);
uint64_t zcx_block_bytes(const struct zcx_block *b);   /* as asked for */
struct zcx_slab *zcx_block_slab(const struct zcx_block *b); /* borrowed */

/* Give back what is complete: slabs without blocks. 1: something is still pending (call again later); 0: nothing is.
 * `all`: also the one shared slab of each use that is kept for the next block; and before CUDA 12.5, where nothing else tells, wait for
 * all work of the context. *freed (may be NULL): bytes returned. */
int zcx_arena_trim(struct zcx_arena *a, int all, uint64_t *freed);

struct zcx_arena_usage {
    uint64_t taken;   /* in blocks that live */
    uint64_t pending; /* put, and the GPU not known to be done */
    uint64_t idle;    /* free in slabs */
    uint64_t slabs, mapped; /* how many, and the bytes in all of them */
};
void zcx_arena_usage(struct zcx_arena *a, struct zcx_arena_usage *out);

/* The slab of an arena of this process that holds [ptr, ptr + nbytes), referenced; 1: none does. Any arena: a registry. */
int zcx_slab_find(zcu_ptr ptr, uint64_t nbytes, struct zcx_slab **out, zcu_ptr *base);
/* Memory that somebody else made with cuMemCreate and mapped (torch's expandable segments): its handles, retained, as a slab that covers
 * [ptr, ptr + nbytes), rounded out to whole pieces. -ZCX_E_UNFIT: not VMM memory, not exportable as a descriptor, or not mapped throughout. */
int zcx_slab_adopt(zcu_ptr ptr, uint64_t nbytes, struct zcx_slab **out, zcu_ptr *base, struct zcx_err *err);
struct zcx_slab *zcx_slab_ref(struct zcx_slab *s);
void zcx_slab_unref(struct zcx_slab *s);
uint64_t zcx_slab_bytes(const struct zcx_slab *s);
uint32_t zcx_slab_pieces(const struct zcx_slab *s);
uint64_t zcx_slab_piece_bytes(const struct zcx_slab *s, uint32_t piece);
int zcx_slab_shared(const struct zcx_slab *s); /* small blocks share it: importers keep it mapped until they are told to drop it */
int zcx_slab_let_go(const struct zcx_slab *s); /* its arena gives no blocks out of it any more: whoever still refers to it keeps memory for nothing */
/* A descriptor of one piece, new for each call: the caller closes it. */
int zcx_slab_export(struct zcx_slab *s, uint32_t piece, int *fd, struct zcx_err *err);

/* ---- importer ---- */

struct zcx_vmm; /* one slab mapped here */

/* Reserve address space for `bytes` in `npieces` pieces. Nothing is mapped yet. -ZCX_E_PROTOCOL: sizes that cannot be (0, not multiples of the
 * granularity, above 2^46, more pieces than bytes / granularity). -ZCX_E_UNFIT: no virtual memory management here. */
int zcx_vmm_new(struct zcx_vmm **out, int ordinal, uint64_t bytes, uint32_t npieces, int writable, struct zcx_err *err);
/* The next piece. `fd` is borrowed, and not needed afterwards. -ZCX_E_PROTOCOL: one piece too many, or sizes that do not add up;
 * -ZCX_E_UNFIT with the driver's words: it does not import, and zcx_vmm_free is all that is left to do. */
int zcx_vmm_add(struct zcx_vmm *v, int fd, uint64_t bytes, struct zcx_err *err);
/* 1 when all pieces are there and the mapping may be used (access is set with the last one). */
int zcx_vmm_complete(const struct zcx_vmm *v);
zcu_ptr zcx_vmm_base(const struct zcx_vmm *v);
uint64_t zcx_vmm_bytes(const struct zcx_vmm *v);
int zcx_vmm_ordinal(const struct zcx_vmm *v);
/* Un-map. The caller has made sure that all work of the context that uses it is complete. */
void zcx_vmm_free(struct zcx_vmm *v);

#endif
