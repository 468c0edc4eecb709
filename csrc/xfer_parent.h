/* xfer_parent.h: what the files of the parent's end share; nobody else includes it.
 *
 *   xfer_parent.c  the session: its states, what is sent and received, a call from begin to end
 *   xfer_lend.c    the table of transfers: lending device and host memory, gates, what is released when
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

struct call_gate {
    unsigned pool;
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
    uint64_t seed, buffer_id;
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
    struct {
        struct zcx_pool *pool;
        int accepted;
        enum zcx_windows_use windows;
        zcu_ptr doubted[ZCX_PROVE_WINDOWS]; /* memory of checks that failed although DONE was seen, by step */
    } pools[ZCX_MAX_DEVICES];
    unsigned npools;
    struct proof proof;
    char proof_reason[256];         /* of the last one: events borrow it */

    _Atomic uint64_t seq;           /* written by the driving thread; statistics read it from any */
    uint64_t next_id, next_segment;
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

/* ---- xfer_lend.c ---- */

struct transfer *zcx_transfer_find(struct zcx_parent *p, uint64_t id);
/* Room for one more transfer, and for its owner on the released list: releasing must not be able to fail. */
int zcx_transfer_reserve(struct zcx_parent *p, struct zcx_err *err);
struct transfer *zcx_transfer_add(struct zcx_parent *p, struct transfer t); /* only after a reserve */
void zcx_transfer_release(struct zcx_parent *p, struct transfer *t);        /* under the lock */
void zcx_transfers_compact(struct zcx_parent *p);                           /* under the lock */
/* What is lent of a pool: export and gate; nothing is told to the worker. */
int zcx_transfer_of_pool(struct zcx_parent *p, unsigned pool, zcu_ptr ptr, uint64_t nbytes, zcu_stream stream, struct transfer *t,
                         struct call_gate **gate, struct zcx_err *err);

int zcx_call_gate_new(struct zcx_parent *p, unsigned pool, zcu_stream stream, struct call_gate *out, struct zcx_err *err);
/* The call's gate on this device; made when the first buffer of the device is lent. */
int zcx_call_gate_of(struct zcx_parent *p, unsigned pool, zcu_stream stream, struct call_gate **out, struct zcx_err *err);
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

/* ---- xfer_prove.c ---- */

/* PROVED came. 0: *ev says how the check ended; 1: go on, DONE is not there yet. */
int zcx_proof_seen(struct zcx_parent *p, struct zcx_event *ev, struct zcx_err *err);
void zcx_proof_end(struct zcx_parent *p);

#endif
