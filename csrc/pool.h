/* pool.h: an exportable memory pool, the pointers exported from it, and the pointers imported into another process.
 *
 * Exporter (the parent): one pool per device, POSIX_FD handles, release threshold at the maximum (memory whose pointer was
 * exported is never given back by a trim, and is then charged twice; reuse is the only thrift). Its fd is exported before
 * any pointer is: the driver refuses the pointers otherwise. Blobs are remembered by buffer id while the allocation lives.
 * Importer (a worker): the pool opened from the fd, and the table of imports: one per allocation, keyed by the exporter's
 * buffer id and counted, because a second import gives the same address and the first free unmaps both.
 * Thread-safe: one mutex per pool over look-up and import, and over un-count and free. Never called with the GIL held.
 * Does not: know sockets, sessions or gates; order anything in time (the caller passes a stream that is already ordered). */
#ifndef ZCX_POOL_H
#define ZCX_POOL_H

#include "driver.h"
#include "window.h"

struct zcx_pool; /* reference-counted */

/* ---- exporter ---- */

/* Create on device `ordinal`, give every peer that can access the device access, export the handle.
 * -ZCX_E_UNFIT: the device has no pools or no POSIX_FD handles for them; text says so. */
int zcx_pool_new(struct zcx_pool **out, int ordinal, struct zcx_err *err);

/* The pool's fd, owned by the pool: callers dup or send it, never close it. */
int zcx_pool_fd(const struct zcx_pool *p);
int zcx_pool_ordinal(const struct zcx_pool *p);
const zcu_uuid *zcx_pool_uuid(const struct zcx_pool *p);
zcu_pool zcx_pool_handle(const struct zcx_pool *p);

/* Make it the device's current pool; *previous (may be NULL) gets what was current. Fails while the caller's own thread
 * captures on that device (the driver refuses). Needs no current context. */
int zcx_pool_make_current(struct zcx_pool *p, zcu_pool *previous, struct zcx_err *err);
int zcx_pool_restore(int ordinal, zcu_pool previous, struct zcx_err *err);
int zcx_pool_is_current(struct zcx_pool *p, struct zcx_err *err); /* 1, 0, negative */

/* Stream-ordered allocation from this pool. */
int zcx_pool_alloc(struct zcx_pool *p, uint64_t nbytes, zcu_stream stream, zcu_ptr *out, struct zcx_err *err);
int zcx_pool_free(struct zcx_pool *p, zcu_ptr ptr, zcu_stream stream, struct zcx_err *err);

/* What travels to the importer. */
struct zcx_export {
    uint64_t buffer_id;
    uint64_t alloc_bytes;  /* size of the whole allocation, from its base */
    uint64_t offset;       /* of the pointer asked for, from the base */
    uint32_t window;       /* chunks per window of the import; 0: imported whole */
    unsigned char blob[64];
};
/* How an import may be cut, see window.h: only where the importer proved windows on its driver. */
enum zcx_windows_use {
    ZCX_WINDOWS_NO,     /* not proved: above the limit there is no import */
    ZCX_WINDOWS_YES,    /* proved: what is above the limit goes in windows of ZCX_WINDOW_CHUNKS */
    ZCX_WINDOWS_PROVE,  /* the proof itself: windows of one chunk, whatever the size */
};
/* Export the allocation that holds `ptr` (interior pointers allowed; `nbytes` must stay inside it).
 * -ZCX_E_UNFIT, with the reason: not from this pool; more than zcx_chunk_limit() chunks would be touched and windows are not
 * to be used; the blob's layout is not the known one and windows were needed. */
int zcx_pool_export(struct zcx_pool *p, zcu_ptr ptr, uint64_t nbytes, enum zcx_windows_use windows, struct zcx_export *out,
                    struct zcx_err *err);

struct zcx_pool_usage { uint64_t reserved, reserved_high, used, used_high, exports; };
int zcx_pool_usage(struct zcx_pool *p, struct zcx_pool_usage *out, struct zcx_err *err);

/* ---- importer ---- */

/* Open from `fd` (borrowed: still the caller's to close) for the device with `uuid`.
 * Sets access for that device. 1: the device is not visible here. */
int zcx_pool_import(struct zcx_pool **out, int fd, const zcu_uuid *uuid, struct zcx_err *err);

/* Import, or count one more, by buffer id. *base is the start of the allocation in this process.
 * -ZCX_E_UNFIT: the guard refuses, or windows did not land side by side. -ZCX_E_PROTOCOL: a known id with another size. (Another blob is none: the exporter may
 * have had to export a live allocation again, and nothing says that the bytes come out the same.) */
int zcx_pool_map(struct zcx_pool *p, const struct zcx_export *e, zcu_ptr *base, struct zcx_err *err);

/* Count one less; at none, cuMemFreeAsync on `stream` (never cuMemFree and a synchronise: that drops the driver's cached
 * mapping and the next import pays in full). *unmapped (may be NULL) says whether it was the last.
 * -ZCX_E_RANGE: unknown id. */
int zcx_pool_unmap(struct zcx_pool *p, uint64_t buffer_id, zcu_stream stream, int *unmapped, struct zcx_err *err);
uint32_t zcx_pool_mapped(struct zcx_pool *p); /* imports alive */

/* ---- both ---- */
struct zcx_pool *zcx_pool_ref(struct zcx_pool *p);
/* Last reference: importer: frees what is still mapped on the legacy stream, destroys; exporter: closes the fd, clears
 * peer access, destroys (allocations that live keep being served by the driver). In a forked child: frees memory only. */
void zcx_pool_unref(struct zcx_pool *p);

#endif
