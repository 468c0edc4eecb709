/* xfer.h: one session between the parent and one worker, and the life of every buffer that it lends.
 *
 * The parent allocates everything: inputs it lends, results it allocates on request and the worker fills in place.
 * The life of a lent buffer (docs/ownership.md has the whole table):
 *
 *   parent   EXPORT, READY posted → LENT ──RESULT or ERROR──→ RETURNING ──DONE seen──→ released
 *                                     │                            └─ still mapped by the worker → KEPT ──RELEASE──→ released
 *                                     └─ the worker died → QUARANTINED ── it and its children are gone ──→ released
 *   worker   mapped → (used) → dropped → unmapped, after all work of its context → DONE posted, or RELEASE sent
 *
 * `struct zcx_parent` (xfer_parent.c) and `struct zcx_worker` (xfer_worker.c) are the two ends. They hold the wire, the gate
 * and the table of transfers; each drives one call at a time. A function that waits returns 2 on a signal and is called
 * again, so that its caller can run Python's handlers in between; nothing is lost by that.
 * Does not: know Python objects (an `owner` is an opaque pointer that the caller gets back), choose a rung, start or reap
 * processes. Thread rules: one thread at a time per session, except where a function says "any thread". */
#ifndef ZCX_XFER_H
#define ZCX_XFER_H

#include "arena.h"
#include "canary.h"
#include "files.h"
#include "gate.h"
#include "pool.h"
#include "ring.h"
#include "sock.h"

/* ======== parent ======== */

struct zcx_parent;

enum zcx_session_state {
    ZCX_NEW, ZCX_HELLO_SENT, ZCX_STARTING, ZCX_IDLE,
    ZCX_PREPARING, /* a call was begun: buffers are being lent, nothing was sent */
    ZCX_CALLING,   /* CALL sent */
    ZCX_RETURNING, /* RESULT or ERROR came; DONE is awaited */
    ZCX_RETURNED,  /* DONE seen: results may be taken, then zcx_parent_end */
    ZCX_BROKEN,    /* died, or broke the protocol: nothing more is sent or read */
};

/* Takes both descriptors, also when it fails. pidfd is borrowed, as is `files`; both must outlive the session. */
int zcx_parent_new(struct zcx_parent **out, struct zcx_files *files, int sock_fd, int control_fd, int pidfd, struct zcx_err *err);
enum zcx_session_state zcx_parent_state(const struct zcx_parent *p);
int zcx_parent_fd(const struct zcx_parent *p); /* to poll for idle messages; borrowed */

/* HELLO to the worker. The answer, the gate page and the result file follow inside zcx_parent_step. */
int zcx_parent_hello(struct zcx_parent *p, const char *version, const char *python, struct zcx_err *err);

enum zcx_event_kind {
    ZCX_EV_STARTED,        /* the worker's target is imported; peer's hello in ev->hello */
    ZCX_EV_FAILED_START,   /* ev->code, ev->tree */
    ZCX_EV_DEVICE,         /* answer to zcx_parent_offer: ev->device, ev->refused (ZCX_POOL_*), ev->text */
    ZCX_EV_PROVED,         /* the check of zcx_parent_prove is over: ev->device, ev->refused, ev->text */
    ZCX_EV_ALLOC,          /* a device result is asked for: ev->alloc, ev->request. Host results are answered in here */
    ZCX_EV_PROGRESS,       /* ev->progress */
    ZCX_EV_RESULT,         /* DONE was seen on every device: ev->tree */
    ZCX_EV_ERROR,          /* the same, ev->code says what kind */
    ZCX_EV_IMPORT_REFUSED, /* the call was not run, DONE was seen: ev->transfer, ev->text */
    ZCX_EV_HANDLE_DROP,    /* ev->handle */
    ZCX_EV_RELEASED,       /* kept transfers ended: drain zcx_parent_released */
};
struct zcx_event {
    enum zcx_event_kind kind;
    uint32_t code;
    uint64_t request, transfer, handle;
    unsigned device;
    int refused;
    struct zcx_text text;
    struct zcx_alloc alloc;
    struct zcx_progress progress;
    struct zcx_hello hello;
    const unsigned char *tree; /* borrowed until the next step */
    size_t tree_bytes;
};
/* Receive and handle until there is something for the caller.
 * 0: *ev; 1: deadline (CLOCK_MONOTONIC ns); 2: a signal. -ZCX_E_DIED; -ZCX_E_PROTOCOL (the session is broken then). */
int zcx_parent_step(struct zcx_parent *p, int64_t deadline, struct zcx_event *ev, struct zcx_err *err);

/* Offer a device, with its pool (referenced by the session from then on) or, where it has none, NULL; the answer is ZCX_EV_DEVICE.
 * *index: its number on the wire. One that was refused is offered again. 1: offered before; then *accepted says 1 yes, -1 not
 * answered yet. */
int zcx_parent_offer(struct zcx_parent *p, int ordinal, struct zcx_pool *pool, unsigned *index, int *accepted, struct zcx_err *err);

/* Start a check of canary.h on an accepted device: memory is taken (of the pool; of `arena` for ZCX_PROVE_VMM and _READ), marks are
 * written late, the worker is asked. (ZCX_PROVE_WINDOW takes none of either, but pinned host memory.) ZCX_EV_PROVED comes when DONE was
 * seen and the worker's own marks were read back. One at a time.
 * What it shows of windows is remembered: until ZCX_PROVE_WINDOWS held, the pool rung refuses allocations above the limit. */
int zcx_parent_prove(struct zcx_parent *p, unsigned device, uint32_t step, struct zcx_arena *arena, struct zcx_err *err);

/* The largest allocation of this device's pool that is sure to be importable, wherever it starts: all, once windows are proved. */
uint64_t zcx_parent_limit(const struct zcx_parent *p, unsigned device);

/* A call: begin, lend, send, step until RESULT/ERROR/IMPORT_REFUSED, take results, end. */
int zcx_parent_begin(struct zcx_parent *p, uint64_t max_result_bytes, uint64_t *seq, struct zcx_err *err);
/* After begin: what this call lends is lent so that the worker keeps it. It is counted apart. */
int zcx_parent_lease(struct zcx_parent *p, struct zcx_err *err);

/* Lend device memory at [ptr, ptr + nbytes), by rung: ZCX_RUNG_POOL, of the device's pool; ZCX_RUNG_VMM, of an arena of ours or of whoever
 * made it with cuMemCreate and exportable handles (read-only for the worker, unless it is `private`: a copy made for this call). `stream`
 * is where READY is posted for this device (one per device and call: the first one given counts; a stream that captures is refused with -ZCX_E_UNFIT). -ZCX_E_UNFIT: not on this rung. */
int zcx_parent_lend_device(struct zcx_parent *p, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes, int private, zcu_stream stream,
                           void *owner, uint64_t *id, struct zcx_err *err);
/* Let device memory cross by a copy through a window (ring.h): the parts, back to back, as one buffer of `nbytes` that the worker keeps as its own.
 * `window`: ZCX_RING_BYTES of an arena of ours, taken on success; NULL: pinned host memory of the session's. The copies are queued on `stream` while
 * the call runs, from zcx_parent_step. -ZCX_E_UNFIT: not with this driver or this worker; -ZCX_E_LIMIT: no gate slots now. */
int zcx_parent_lend_ring(struct zcx_parent *p, unsigned device, const struct zcx_ring_part *parts, uint32_t nparts, uint64_t nbytes,
                         struct zcx_block *window, zcu_stream stream, void *owner, uint64_t *id, struct zcx_err *err);
/* Lend host memory that lies in some session's result file: no copy. 1: it does not, or that file has no descriptor any more. */
int zcx_parent_lend_shared(struct zcx_parent *p, const void *address, uint64_t nbytes, void *owner, uint64_t *id, struct zcx_err *err);
/* Lend copies: all pieces go into one input segment, reused when it is free again. `owner` is not kept: bytes are copied now. */
struct zcx_source { const void *address; uint64_t nbytes; uint64_t id; /* out */ };
int zcx_parent_lend_copies(struct zcx_parent *p, struct zcx_source *sources, size_t n, struct zcx_err *err);

/* Post READY and send CALL, with every transfer lent since begin. */
int zcx_parent_send(struct zcx_parent *p, const void *tree, size_t tree_bytes, int64_t deadline, struct zcx_err *err);

/* Answers to ZCX_EV_ALLOC. Here as above an owner is taken only on success. */
int zcx_parent_allocated(struct zcx_parent *p, uint64_t request, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes,
                         zcu_stream stream, void *owner, struct zcx_err *err);
/* To one of place 2, where no memory of this side can be shared: the worker's bytes come through pinned host memory to [ptr, ptr + nbytes). */
int zcx_parent_allocated_ring(struct zcx_parent *p, uint64_t request, unsigned device, zcu_ptr ptr, uint64_t nbytes, zcu_stream stream, void *owner,
                              struct zcx_err *err);
int zcx_parent_refuse(struct zcx_parent *p, uint64_t request, enum zcx_refusal code, const char *reason, struct zcx_err *err);

/* After RESULT: what a view names. 1: no such transfer of this call (the peer's fault). */
struct zcx_lent {
    uint64_t nbytes;
    int result, device;
    int complete;             /* staged results: have all bytes come? */
    void *owner;              /* still the table's */
    unsigned char *address;   /* host result: its bytes */
    enum zcx_rung rung;
    zcu_ptr ptr;
    uint32_t window;          /* device: chunks per window of its import; 0: in one piece */
};
int zcx_parent_lent(struct zcx_parent *p, uint64_t id, struct zcx_lent *out);
/* A reference to a host result of the call under way. 1: there is no such result. */
int zcx_parent_take(struct zcx_parent *p, uint64_t id, struct zcx_range **out);

/* The call is over, however it ended: transfers that the worker does not keep are released, owners go to the released list.
 * In PREPARING (nothing was sent) everything is. */
void zcx_parent_end(struct zcx_parent *p);
/* One owner that nobody needs any more; NULL: none left. The caller drops its reference. */
void *zcx_parent_released(struct zcx_parent *p);

/* CANCEL for this call, on the control socket. Any thread. */
int zcx_parent_cancel(struct zcx_parent *p, uint64_t seq, struct zcx_err *err);
int zcx_parent_drop_handle(struct zcx_parent *p, uint64_t handle, struct zcx_err *err); /* any thread; 1: no room now, try again */
int zcx_parent_bye(struct zcx_parent *p, struct zcx_err *err);
void zcx_parent_shutdown(struct zcx_parent *p); /* any thread: a step under way ends with -ZCX_E_DIED */

/* The worker and all that inherited from it are gone: everything quarantined or kept is released, sockets closed. */
void zcx_parent_gone(struct zcx_parent *p);
/* 1 when zcx_parent_free leaves nothing behind: gone, and no stream of ours still has a post to write into the gate's page.
 * (Freed before that, the page stays mapped and registered.) */
int zcx_parent_idle(struct zcx_parent *p);
void zcx_parent_free(struct zcx_parent *p); /* owners must have been drained */

struct zcx_parent_stats {
    uint64_t transfers, quarantined, result_bytes_taken, result_bytes_warm, input_bytes, calls;
    uint64_t kept, kept_host_bytes, kept_device_bytes; /* nobody asked for it: the worker's code has not let go */
    uint64_t leased, leased_bytes;                     /* kept because of zcx_parent_lease */
};
void zcx_parent_stats(struct zcx_parent *p, struct zcx_parent_stats *out); /* any thread */
/* What is kept and not leased, by the call that lent it and the place: writes up to `room` rows, oldest first (a call can have several of
 * one place), and returns how many there are. Any thread. */
struct zcx_kept { uint64_t seq, count, nbytes; int ordinal /* -1: host */; };
size_t zcx_parent_kept(struct zcx_parent *p, struct zcx_kept *out, size_t room);
uint64_t zcx_parent_reclaim(struct zcx_parent *p); /* any thread: gives warm ranges back; bytes */
void zcx_parent_rest(struct zcx_parent *p); /* nobody calls now: gives back all that is kept only for speed */

/* ======== worker ======== */

struct zcx_worker;
struct zcx_import; /* one buffer mapped here */

int zcx_worker_new(struct zcx_worker **out, int sock_fd, struct zcx_err *err); /* takes the descriptor */
void zcx_worker_free(struct zcx_worker *w);

/* The stream on which the function's work begins, by ordinal: asked at every await. NULL function: the legacy stream. */
typedef zcu_stream (*zcx_stream_of)(void *arg, int ordinal);

enum zcx_work_kind { ZCX_WORK_HELLO, ZCX_WORK_CALL, ZCX_WORK_BYE, ZCX_WORK_HANDLE_DROP };
struct zcx_work {
    enum zcx_work_kind kind;
    uint64_t seq, handle;
    struct zcx_hello hello;
    uint32_t nbuffers;
    const unsigned char *buffers;   /* encoded, back to back; borrowed until the next call of anything that receives */
    const unsigned char *tree;
    size_t tree_bytes;
};
/* The next thing to do. Handles itself what tells of gates, devices and memory, checks, and PING; watches the GPU work of the last call; unmaps what was
 * dropped while idle. 0: *work; 2: a signal; -ZCX_E_DIED: the parent is gone; -ZCX_E_CUDA: the GPU faulted (the parent was
 * told: exit). */
int zcx_worker_next(struct zcx_worker *w, struct zcx_work *work, struct zcx_err *err);
int zcx_worker_hello(struct zcx_worker *w, const struct zcx_hello *parents, const char *version, const char *python, struct zcx_err *err);
int zcx_worker_started(struct zcx_worker *w, struct zcx_err *err);

/* Make the stream of each of the call's devices wait for READY. After it, buffers may be mapped and used. */
int zcx_worker_begin(struct zcx_worker *w, zcx_stream_of stream_of, void *arg, struct zcx_err *err);
/* Map a buffer of the call under way. -ZCX_E_UNFIT: cannot be imported here; say so with zcx_worker_import_refused. */
int zcx_worker_map(struct zcx_worker *w, const struct zcx_buffer *b, struct zcx_import **out, struct zcx_err *err);
/* Ask the parent for a result buffer and map it. Any thread, one at a time (locks). 0; 2: a signal (call again with the same
 * *request; start with 0); 1: refused: *code and reason in err->text. *out NULL: it is *staged, to be given to zcx_worker_transfer
 * (only for place 2). */
int zcx_worker_alloc(struct zcx_worker *w, const struct zcx_alloc *a, uint64_t *request, zcx_stream_of stream_of, void *arg,
                     struct zcx_import **out, struct zcx_buffer *staged, uint32_t *code, struct zcx_err *err);
int zcx_worker_ordinal(const struct zcx_worker *w, unsigned device); /* of a device on the wire; -1: not open here */
/* A staged buffer of the call under way: queue its copies between `memory`, device memory of this process's, and the window, on `stream`;
 * inputs come, results go. -ZCX_E_UNFIT: the window cannot be mapped here. */
int zcx_worker_transfer(struct zcx_worker *w, const struct zcx_buffer *b, zcu_ptr memory, zcu_stream stream, struct zcx_err *err);

struct zcx_import_info {
    uint64_t id, nbytes, seq;
    int ordinal; /* -1: host */
    void *address;
    int result, private;
    struct zcx_seams seams; /* from the first byte lent on */
};
void zcx_import_info(const struct zcx_import *i, struct zcx_import_info *out);
int zcx_import_edited(const struct zcx_import *i); /* host input: was the private mapping written to? */
/* Nobody here uses it any more. Any thread. Unmapped at the end of the call, or when idle. */
void zcx_import_drop(struct zcx_import *i);

/* End the call: waits of the gate streams for all work of their contexts, un-import, DONE, then the message. `type`:
 * ZCX_RESULT, ZCX_ERROR; with ZCX_IMPORT_REFUSED, `transfer` is the buffer and the tree is a reason. */
int zcx_worker_finish(struct zcx_worker *w, enum zcx_type type, uint32_t code, uint64_t transfer, const void *tree, size_t tree_bytes,
                      struct zcx_err *err);
/* Imports of the call under way that are not dropped yet. */
uint32_t zcx_worker_alive(struct zcx_worker *w);
int zcx_worker_failed_start(struct zcx_worker *w, const void *tree, size_t tree_bytes, struct zcx_err *err);
int zcx_worker_progress(struct zcx_worker *w, double done, double total, const char *message, size_t n, struct zcx_err *err); /* any thread; dropped when the parent does not read */
int zcx_worker_drop_handle(struct zcx_worker *w, uint64_t handle, struct zcx_err *err); /* any thread; 1: the parent does not read */

/* ======== watch (xfer_watch.c): the worker's eye on the control socket ======== */

struct zcx_watch;
/* Start a thread that reads `control_fd` (taken, also on failure). A CANCEL stores its seq and sends `signal_number` to the
 * calling thread, again and again until zcx_watch_answer; end of file kills the worker's whole session: every process whose
 * session id is ours. No PR_SET_PDEATHSIG: that fires when the parent's spawning *thread* ends. */
int zcx_watch_start(struct zcx_watch **out, int control_fd, int signal_number, struct zcx_err *err);
uint64_t zcx_watch_cancelled(const struct zcx_watch *w); /* seq of the last CANCEL; 0: none */
void zcx_watch_answer(struct zcx_watch *w, uint64_t seq); /* this call is over or is ending: no more signals for it */

#endif
