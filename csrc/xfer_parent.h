/* xfer_parent.h: what the files of the parent's end share; nobody else includes it.
 *
 *   xfer_parent.c  the session: its states, what is sent and received, a call from begin to end
 *   xfer_lend.c    the table of transfers: lending device and host memory, gates, what is released when
 *   xfer_ring.c    what crosses by copies through a window
 *   xfer_prove.c   the start-up checks
 *
 * One thread at a time drives a session; the lock is for statistics and reclaim, which come from others. */
#ifndef ZCX_XFER_PARENT_H
#define ZCX_XFER_PARENT_H

#include <pthread.h>
#include <unistd.h>

#include "xfer.h"

enum transfer_state { LENT, KEPT, QUARANTINED, RELEASED };

struct transfer {
    uint64_t id, seq;
    enum transfer_state state;
    int keeps;                  /* named as kept by RESULT or ERROR */
    int leased;                 /* if it is kept, somebody asked for that */
    struct zcx_buffer wire;
    zcu_ptr ptr;                /* device: the first byte lent */
    void *owner;
    struct segment *segment;    /* host input: counted there */
    struct slab *slab;          /* vmm, and the device window of a ring: counted there */
    struct ring *ring;          /* staged: owned */
    struct zcx_range *range;    /* host result */
};

struct segment {
    struct segment *next;
    struct zcx_shm *file;
    uint64_t id;
    enum zcx_shm_kind kind;
    uint32_t uses;
    int sent;
};

/* A slab of the arena's, as this worker knows it. One that several blocks share stays mapped there; any other one is unmapped with the
 * last transfer in it, without a word, so that it is named again only within the call that told of it. */
struct slab {
    struct slab *next;
    struct zcx_slab *memory;
    uint64_t id, seq;
    unsigned device;
    int writable, stays;
    uint32_t uses;              /* transfers in it that are not released */
};

/* Pinned memory of the session's result file that rings go through, one at a time. */
struct window {
    struct window *next;
    struct zcx_range *range;
    struct zcx_ring_pin pin;
    int busy;
};

struct ring {
    struct zcx_ring core;
    struct zcx_ring_part *parts;
    struct window *window;      /* of pinned memory; NULL: it is the block */
    struct zcx_block *block;    /* owned, of the arena; NULL: it is the window */
    int ended;                  /* its slots are given back, and nothing of it is outstanding */
    int complete;               /* all pieces were queued here before it ended */
};

struct device {
    int ordinal;
    struct zcx_pool *pool;      /* NULL: it has none that can be exported */
    int accepted;               /* open in the worker; -1: no answer yet */
    int pooled;                 /* and its pool too */
    enum zcx_windows_use windows;
    struct {
        zcu_ptr memory;
        struct zcx_block *block;
        struct window *window;
    } doubted[ZCX_PROVE_STEPS]; /* memory of checks that failed although DONE was seen, by step */
};

struct call_gate {
    unsigned device;
    int ordinal;
    uint32_t ready_slot, done_slot;
    uint64_t ready, done;
    zcu_stream stream;
};

/* A check that is under way. */
struct proof {
    uint32_t step;              /* 0: none */
    struct call_gate gate;
    zcu_ptr memory;
    struct zcx_block *block;    /* which holds it, of the arena; NULL: the pool's */
    struct slab *slab;
    struct window *window;      /* host memory in its place */
    uint64_t seed;
    int answered;               /* PROVED came: DONE is awaited */
    int failed;
    char reason[256];
};

struct zcx_parent {
    struct zcx_sock sock;
    int control, gone;
    pid_t creator;
    _Atomic(enum zcx_session_state) state; /* written by the driving thread; zcx_parent_drop_handle looks at it from any */
    struct zcx_files *files;
    struct zcx_gate *gate;
    struct zcx_shm *results;
    uint64_t features;              /* that both sides have */
    struct device devices[ZCX_MAX_DEVICES];
    unsigned ndevices;
    struct proof proof;
    char proof_reason[256];         /* of the last one: events borrow it */

    _Atomic uint64_t seq;           /* written by the driving thread; statistics read it from any */
    uint64_t next_id, next_segment, next_slab;
    struct slab *slabs;
    struct window *windows;
    unsigned nrings;                /* of the call, not ended */
    int64_t ring_since;             /* when one of them last got on */
    uint32_t unanswered;            /* SLAB messages that asked for SLAB_TAKEN */
    uint64_t *dropped;              /* handles that the worker let go of while something else was awaited: the next step tells of them */
    size_t ndropped, cdropped;
    uint64_t result_limit, result_bytes;
    uint32_t result_count;
    int leasing;                    /* what this call lends is meant to be kept */
    struct call_gate gates[ZCX_MAX_DEVICES];
    unsigned ngates;
    struct zcx_msg msg;             /* the last one received; freed at the next step */
    int has_msg;
    struct zcx_event outcome;       /* RESULT, ERROR or IMPORT_REFUSED, held back until DONE is seen */
    unsigned char *outcome_bytes;   /* its body, copied: the socket's packet is overwritten meanwhile */
    int64_t done_since;             /* when DONE was first looked for */
    int64_t deadline;               /* of the step under way or the last one: answers wait no longer for a worker that does not read */
    uint64_t wanted_request;        /* of the ALLOC that the caller is answering */

    pthread_mutex_t lock;           /* over all below: statistics and reclaim come from other threads */
    struct transfer *transfers;     /* ascending ids */
    size_t ntransfers, ctransfers;
    struct segment *segments;
    void **released;
    size_t nreleased, creleased;
};

/* ---- xfer_parent.c ---- */

int zcx_parent_broken(struct zcx_parent *p, int r);
int zcx_parent_wrong_state(const struct zcx_parent *p, const char *what, struct zcx_err *err);
#define REQUIRE(p, condition, what, err) \
    if ((p)->creator != getpid() || !(condition)) return zcx_parent_wrong_state((p), (what), (err))
/* A message of the session's or the call's, of one piece; a worker that does not read it in time breaks the session. */
int zcx_parent_tell(struct zcx_parent *p, enum zcx_type type, uint64_t id, const void *body, size_t n, int fd, struct zcx_err *err);
uint64_t zcx_parent_warm_bound(void);
/* While a call is prepared: hear what the worker says until it has answered all but `most` of the SLAB messages. */
int zcx_parent_await_slabs(struct zcx_parent *p, uint32_t most, struct zcx_err *err);

/* ---- xfer_lend.c ---- */

struct transfer *zcx_transfer_find(struct zcx_parent *p, uint64_t id);
/* Room for one more transfer, and for its owner on the released list: releasing must not be able to fail. */
int zcx_transfer_reserve(struct zcx_parent *p, struct zcx_err *err);
struct transfer *zcx_transfer_add(struct zcx_parent *p, struct transfer t); /* only after a reserve */
void zcx_transfer_release(struct zcx_parent *p, struct transfer *t);        /* under the lock */
void zcx_transfers_compact(struct zcx_parent *p);                           /* under the lock */
/* What is lent of a device: export and gate. With flags (RESULT, PRIVATE) the worker may write. Of a slab that the worker does not know it is told; of the transfer nothing is. */
int zcx_transfer_of_device(struct zcx_parent *p, unsigned device, enum zcx_rung rung, zcu_ptr ptr, uint64_t nbytes, uint8_t flags, zcu_stream stream,
                           struct transfer *t, struct call_gate **gate, struct zcx_err *err);
/* Tell of the slab that holds this memory. *offset: of the memory in it. */
int zcx_parent_send_slab(struct zcx_parent *p, unsigned device, zcu_ptr ptr, uint64_t nbytes, int writable, struct slab **out, uint64_t *offset,
                         struct zcx_err *err);
/* Forget slabs that the worker has let go of; tell it to let go of those that stay, if the arena has, or if `all`. */
void zcx_parent_trim_slabs(struct zcx_parent *p, int all);

int zcx_call_gate_new(struct zcx_parent *p, unsigned device, zcu_stream stream, struct call_gate *out, struct zcx_err *err);
/* The call's gate on this device; made when the first buffer of the device is lent. */
int zcx_call_gate_of(struct zcx_parent *p, unsigned device, zcu_stream stream, struct call_gate **out, struct zcx_err *err);
int zcx_call_gate_ready(struct zcx_parent *p, struct call_gate *g, struct zcx_err *err); /* posts READY */
struct zcx_gate_ref zcx_call_gate_ref(const struct call_gate *g);
void zcx_call_gate_drop(struct zcx_parent *p, const struct call_gate *g);
/* One that nobody was told of: its DONE was announced, and so is said here. */
void zcx_call_gate_withdraw(struct zcx_parent *p, const struct call_gate *g);

/* Tell the worker of a segment before the first message that names it. */
int zcx_parent_send_segment(struct zcx_parent *p, struct segment *s, struct zcx_err *err);
/* Segments that nobody uses: foreign ones go at once when their worker has no result left, input ones above the bound. */
void zcx_parent_trim_segments(struct zcx_parent *p, uint64_t idle_bound);
/* Memory that is only kept for speed: 1 when there was some. */
int zcx_parent_give_up_idle(struct zcx_parent *p);

/* ---- xfer_ring.c ---- */

/* As zcx_transfer_of_device, for a result whose bytes come through pinned host memory. */
int zcx_transfer_of_ring(struct zcx_parent *p, unsigned device, zcu_ptr ptr, uint64_t nbytes, zcu_stream stream, struct transfer *t,
                         struct call_gate **gate, struct zcx_err *err);
/* Queue what may be queued. 1: some ring is not through yet; negative: the driver failed, once for each ring. */
int zcx_rings_step(struct zcx_parent *p, struct zcx_err *err);
/* The other side is through. 1: copies of ours are not complete; 0: all rings are ended; negative: the driver cannot tell. */
int zcx_rings_end(struct zcx_parent *p, struct zcx_err *err);
int zcx_window_take(struct zcx_parent *p, int ordinal, struct window **out, struct zcx_err *err); /* pinned; busy until it is said to be free */
void zcx_ring_dispose(struct ring *r); /* ended, or left behind: its window is neither free nor used again */
void zcx_windows_free(struct zcx_parent *p);

/* ---- xfer_prove.c ---- */

/* PROVED came. 0: *ev says how the check ended; 1: go on, DONE is not there yet. */
int zcx_proof_seen(struct zcx_parent *p, struct zcx_event *ev, struct zcx_err *err);
void zcx_proof_end(struct zcx_parent *p);

#endif
