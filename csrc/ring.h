/* ring.h: a tensor that crosses by a copy through a small window that both processes map, piece by piece, overlapped.
 *
 * For a tensor that cannot be shared and need not fit twice: the sender copies piece k into slot k % depth and posts FILLED, the
 * receiver's copy out of it follows, and EMPTIED lets the sender use the slot again. Both are counters of the gate's page (gate.h), posted
 * by the streams that copy. The window is device memory of ours (rung `staged`) or pinned host memory (rung `host`); one copy in, one out,
 * and while one slot is filled the other is emptied.
 * The worker queues everything at once: its stream may wait. A stream of the parent never waits for a worker: the parent queues a piece
 * only when its CPU has seen the counter that allows it (zcx_ring_step, from the session's loop).
 * Does not: own the window, the gate or the tensor; know sockets; decide who sends. Thread rules: one thread at a time. */
#ifndef ZCX_RING_H
#define ZCX_RING_H

#include "gate.h"

#define ZCX_RING_DEPTH 2u
#define ZCX_RING_SLOT_BYTES (32ull << 20)
#define ZCX_RING_BYTES (ZCX_RING_DEPTH * ZCX_RING_SLOT_BYTES)

/* What both ends agree on. */
struct zcx_ring_plan {
    uint64_t nbytes;                      /* of all parts, more than 0 */
    uint32_t filled_slot, emptied_slot;   /* of the gate */
    uint64_t filled, emptied;             /* of piece 0; that of piece k: k * ZCX_GATE_STEP more (gate.h) */
};
uint64_t zcx_ring_pieces(uint64_t nbytes);

/* What crosses is a list of parts, back to back: several tensors share one ring. Worker: its one destination or source. Parent: the tensors of a
 * call. Sum of bytes: the plan's nbytes. An address of 0 is a gap (of alignment): nothing is
 * copied there. The list stays the caller's and must live as long as the transfer. */
struct zcx_ring_part { zcu_ptr address; uint64_t bytes; };

/* One end. The window, ZCX_RING_BYTES long, as it is mapped here: a device address, or with window_is_host the host address of memory that is
 * registered with CUDA. */
struct zcx_ring_end {
    struct zcx_gate *gate;
    int ordinal;
    zcu_stream stream;
    int window_is_host;
    unsigned char *host_window;
    zcu_ptr device_window;
    const struct zcx_ring_part *parts;
    uint32_t nparts;
};

/* Worker: queue the whole transfer on e->stream, as receiver or sender. Returns at once. */
int zcx_ring_queue(const struct zcx_ring_end *e, const struct zcx_ring_plan *plan, int sending, struct zcx_err *err);

/* Parent: one transfer under way. */
struct zcx_ring {
    struct zcx_ring_end end;
    struct zcx_ring_plan plan;
    int sending;
    uint64_t queued;                      /* pieces whose copy was queued here */
};
/* Take two gate slots, number all posts of the transfer, fill in r->plan. 1: no slots are free now. -ZCX_E_UNFIT: this gate has events, no
 * counters: a ring needs counters. */
int zcx_ring_start(struct zcx_ring *r, const struct zcx_ring_end *end, uint64_t nbytes, int sending, struct zcx_err *err);
/* Queue what may be queued now. 1: all pieces are queued; 0: not yet; negative: the driver failed. */
int zcx_ring_step(struct zcx_ring *r, struct zcx_err *err);
/* The transfer is over: all queued and the call's DONE was seen, or the worker is gone, or nobody was ever told of it. Posts what is still missing
 * from the CPU, where this side owes it, so that the slots come free; hands them back. */
void zcx_ring_end_transfer(struct zcx_ring *r);

#endif
