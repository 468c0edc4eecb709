/* xfer_worker.h: what the files of the worker's end share; nobody else includes it.
 *
 *   xfer_worker.c  the session: what is received, a call from begin to finish, what happens between calls
 *   xfer_import.c  devices, segments and slabs that the parent tells of, and what is mapped of them
 *   xfer_check.c   the worker's half of the start-up checks
 */
#ifndef ZCX_XFER_WORKER_H
#define ZCX_XFER_WORKER_H

#include <pthread.h>
#include <unistd.h>

#include "xfer.h"

struct device {
    int open;                    /* accepted, with or without a pool */
    struct zcx_pool *pool;       /* NULL: none, or it could not be imported */
    int ordinal;
    zcu_stream gate_stream;      /* non-blocking: waits for the whole context, then un-imports and posts */
    zcu_event work;              /* records the context's work */
    /* the gate of the call under way */
    int in_call;
    struct zcx_gate_ref gate;
    /* DONE of the last call, until it was seen to complete */
    int watched;
    int64_t asked;               /* when the driver was last asked about the gate stream */
    /* an un-import outside a call: RELEASE goes out when it completed */
    int releasing;
    zcu_event released;
};

struct segment {
    struct segment *next;
    uint64_t id;
    struct zcx_shm *file;
};

/* Device memory of the parent's arena, mapped here as one. */
struct slab {
    struct slab *next;
    uint64_t id;
    unsigned device;
    int writable, stays;
    uint32_t next_piece, npieces, uses; /* uses: imports in it */
    uint64_t bytes;
    struct zcx_vmm *vmm;         /* NULL: it could not be mapped */
    char why[200];
};

/* Host memory of the result file that copies go through: mapped and pinned once. */
struct window {
    struct window *next;
    uint64_t offset;
    void *address;
    struct zcx_ring_pin pin;
};

struct zcx_import {
    struct zcx_import *next, **link;
    struct zcx_worker *owner;
    struct zcx_buffer wire;
    uint64_t seq;
    int ordinal;                 /* -1: host */
    void *address;               /* host: where; device: the first byte lent, as a number */
    struct slab *slab;           /* vmm: counted there */
    enum {
        LIVE,
        DROPPED,                 /* nobody here uses it any more */
        GOING,                   /* it was, before all work of the context was waited for: it may be un-mapped behind that */
        RELEASING,               /* of a device, outside its call: RELEASE follows when the GPU is done */
    } state;
};

struct zcx_worker {
    struct zcx_sock sock;
    pid_t pid;                   /* a child of fork() shares the connection, and must not speak on it */
    int kick;                    /* eventfd: something was dropped while the main thread waits */
    struct zcx_gate *gate;
    struct device devices[ZCX_MAX_DEVICES]; /* by index on the wire */
    struct segment *segments;    /* under the lock: a thread that asks for a result receives, while another maps an input */
    struct slab *slabs;          /* of the main thread, and of who asks for a result: both hold the call */
    struct window *windows;
    _Atomic uint64_t seq;        /* of the call under way or the last one; zcx_worker_progress reads it from any thread */
    int in_call;                 /* results can be asked for; under rpc */
    struct zcx_msg msg;
    int has_msg;
    pthread_mutex_t rpc;         /* one ALLOC at a time, and none across the end of a call */
    uint64_t request;
    uint64_t *dropped;           /* handles that the parent let go of while an answer was awaited: next() tells of them */
    size_t ndropped, cdropped;
    pthread_mutex_t lock;        /* over the imports and segments */
    struct zcx_import *imports;
};

/* ---- xfer_worker.c ---- */

int zcx_worker_tell(struct zcx_worker *w, struct zcx_header h, const void *head, size_t nhead, const void *tree, size_t ntree, struct zcx_err *err);
/* Let the gate stream go on only after everything that this context was given so far. Its scope is open. */
int zcx_device_join(const struct zcx_driver *driver, struct device *d, struct zcx_err *err);
/* The same, and wait for it on the CPU: this process's own work. */
int zcx_device_settle(const struct zcx_driver *driver, struct device *d, struct zcx_err *err);

/* ---- xfer_import.c ---- */

int zcx_worker_take_device(struct zcx_worker *w, struct zcx_err *err); /* POOL, DEVICE */
int zcx_worker_take_segment(struct zcx_worker *w, struct zcx_err *err);
void zcx_worker_drop_segment(struct zcx_worker *w, uint64_t id);
int zcx_worker_take_event(struct zcx_worker *w, struct zcx_err *err);
int zcx_worker_take_slab(struct zcx_worker *w, struct zcx_err *err);
int zcx_worker_drop_slab(struct zcx_worker *w, uint64_t id, struct zcx_err *err);
/* The window of copies at this place of the result file, mapped and pinned. */
int zcx_worker_window(struct zcx_worker *w, int ordinal, uint64_t segment, uint64_t offset, unsigned char **out, struct zcx_err *err);
struct slab *zcx_worker_slab(struct zcx_worker *w, uint64_t id); /* NULL: unknown */
/* At the end of a call: un-map the slabs of a device that it told of and that nothing uses. All work of the context is complete. */
void zcx_worker_trim_slabs(struct zcx_worker *w, unsigned device);

int zcx_import_map(struct zcx_worker *w, const struct zcx_buffer *b, struct zcx_import **out, struct zcx_err *err); /* under rpc, or nobody else asks */
/* Un-import one. Of a pool this is ordered after the context's work by the gate stream; of a slab it is done at once, so that all work of the
 * context must be complete. */
int zcx_import_unmap(struct zcx_worker *w, struct zcx_import *i, struct zcx_err *err);
void zcx_import_forget(struct zcx_import *i); /* under the lock */

/* ---- xfer_check.c ---- */

int zcx_worker_take_proof(struct zcx_worker *w, struct zcx_err *err);

#endif
