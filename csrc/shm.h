/* shm.h: sealed memfds: host memory that two processes map, and that neither can pull away from under the other.
 *
 * Three kinds, all sealed against shrinking, growing and further seals:
 *   input   written by the parent through the one mapping it made before sealing FUTURE_WRITE; the worker can only map it
 *           privately, so an in-place edit stays in the worker
 *   result  one sparse file per worker, of which the parent hands out page-aligned ranges. A result is a range: it owns
 *           exactly its bytes, keeps the file mapped, and costs no fd. A worker maps the ranges it was given, and only them
 *   blob    a payload too large for one packet; written once, then sealed WRITE too
 * Pages of a range are allocated when it is handed out (fallocate), so that a full machine is an error and not a SIGBUS; and
 * because fallocate itself would wake the out-of-memory killer, what is asked for is first compared with what the machine and
 * the control group have available (/proc/meminfo, memory.max): more than that is -ENOMEM before anything moves.
 * Does not: know CUDA, sockets, or who may free what when (the caller does). */
#ifndef ZCX_SHM_H
#define ZCX_SHM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "err.h"

#define ZCX_PAGE 4096u /* the smallest page; the machine's own is what sizes are rounded to */

struct zcx_shm;   /* one mapped memfd, reference-counted, thread-safe */

/* ---- parent ---- */

/* An input segment of `nbytes` (rounded up to pages, all allocated): mapped writable here, then sealed. */
int zcx_shm_input_new(struct zcx_shm **out, uint64_t nbytes, struct zcx_err *err);
/* A sparse result file: address space for `nbytes`, no memory yet. */
int zcx_shm_result_new(struct zcx_shm **out, uint64_t nbytes, struct zcx_err *err);
/* A range of a result file: page-aligned offset, pages allocated. -ENOMEM/-ENOSPC: refused by the machine;
 * -ZCX_E_LIMIT: the file's address space is used up. nbytes 0 gives one page. */
int zcx_shm_range_take(struct zcx_shm *s, uint64_t nbytes, uint64_t *offset, struct zcx_err *err);
/* Give the range back: kept warm for reuse up to a bound, else its pages are punched out. In a forked child: nothing. */
void zcx_shm_range_put(struct zcx_shm *s, uint64_t offset, uint64_t nbytes);
/* What the file may keep warm (at first 256 MiB); before ranges are taken. */
void zcx_shm_keep_warm(struct zcx_shm *s, uint64_t bound);
/* Bytes in ranges handed out; bytes kept warm. Punch out the warm ones: returns bytes given back. */
void zcx_shm_usage(struct zcx_shm *s, uint64_t *taken, uint64_t *warm);
uint64_t zcx_shm_reclaim(struct zcx_shm *s);
/* The worker is gone: punch out the warm ranges. Ranges handed out live on, with the mapping, and are punched out when put back.
 * Nothing is taken from it any more (-ZCX_E_RANGE); the caller makes sure that no zcx_shm_range_take runs meanwhile. Without
 * keep_fd the descriptor is closed too, so that results that outlive their worker cost none. */
void zcx_shm_retire(struct zcx_shm *s, int keep_fd);
/* A read-only descriptor of the same file, for a worker that may read but never write it. Caller closes.
 * -ZCX_E_UNFIT: retired without its descriptor; its results are lent as copies. */
int zcx_shm_readonly_fd(struct zcx_shm *s, struct zcx_err *err);

/* ---- worker ---- */

/* Check kind, size and seals of a received descriptor (taken: closed on failure and kept open in *out on success).
 * -ZCX_E_PROTOCOL with what does not hold. Maps nothing. */
enum zcx_shm_kind { ZCX_SHM_INPUT = 1, ZCX_SHM_RESULT = 2, ZCX_SHM_FOREIGN = 3 /* another worker's results, read-only */ };
int zcx_shm_take_fd(struct zcx_shm **out, int fd, enum zcx_shm_kind kind, uint64_t size, struct zcx_err *err);
/* Map [offset, offset + nbytes): input and foreign copy-on-write, result shared and writable. Offset is page-aligned or is
 * aligned down here; *addr points at the byte asked for. Bounds are checked against the size (-ZCX_E_PROTOCOL). */
int zcx_shm_map(struct zcx_shm *s, uint64_t offset, uint64_t nbytes, void **addr, struct zcx_err *err);
void zcx_shm_unmap(void *addr, uint64_t nbytes);
/* Did anybody write to this private mapping? 1 yes (or cannot be told), 0 no: a written page is anonymous
 * (/proc/self/pagemap, bit 61 clear and bit 63 or 62 set). */
int zcx_shm_edited(const void *addr, uint64_t nbytes);

/* ---- both ---- */

/* Bytes that this process could be given without anybody being killed for them: what the machine and each control group above
 * us have free or reclaimable. Exact only where it is below `need`; UINT64_MAX: not known. The folders: /proc, /sys/fs/cgroup. */
uint64_t zcx_shm_available(uint64_t need, const char *proc, const char *cgroups);
int zcx_shm_fd(const struct zcx_shm *s);        /* borrowed; -1 once retired */
uint64_t zcx_shm_size(const struct zcx_shm *s);
unsigned char *zcx_shm_base(struct zcx_shm *s); /* the parent's whole mapping; NULL in a worker */
struct zcx_shm *zcx_shm_ref(struct zcx_shm *s);
unsigned zcx_shm_refs(const struct zcx_shm *s); /* now; another thread may change it, unless it is 1 and that is ours */
void zcx_shm_unref(struct zcx_shm *s);

/* A payload that did not fit into a packet: a memfd with these bytes, sealed entirely. Caller closes *fd. */
int zcx_shm_blob_new(const void *bytes, uint64_t nbytes, int *fd, struct zcx_err *err);
/* The other side: check that it is a fully sealed memfd of at least nbytes and map it read-only. fd stays the caller's. */
int zcx_shm_blob_map(int fd, uint64_t nbytes, const void **addr, struct zcx_err *err);
void zcx_shm_blob_unmap(const void *addr, uint64_t nbytes);

#endif
