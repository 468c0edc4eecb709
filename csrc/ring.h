/* ring.h: tensors that cross by a copy through a small window that both processes map, piece by piece, overlapped.
 *
 * For what cannot be shared and need not fit twice: the sender copies piece k into slot k % depth and posts FILLED, the
 * receiver's copy out of it follows, and EMPTIED lets the sender use the slot again. Both are counters of the gate's page
 * (gate.h), posted by the streams that copy. The window is device memory of ours (rung `staged`) or pinned host memory (rung
 * `host`); one copy in, one out, and while one slot is filled the other is emptied.
 * The worker queues everything at once: its stream may wait. A stream of the parent never waits for a worker: the parent queues
 * a piece only when its CPU has seen the counter that allows it (zcx_ring_step, from the session's loop).
 * What is copied where follows from the plan, which the parent makes. A worker that stores nonsense in the counters makes the
 * parent queue early: the bytes of that worker's own transfer are wrong then, and nothing else is.
 * Does not: own the window, the gate or the tensors; know sockets; decide who sends. Thread rules: one thread at a time. */
#ifndef ZCX_RING_H
#define ZCX_RING_H

#include "gate.h"

#define ZCX_RING_DEPTH 2u
#ifndef ZCX_RING_SLOT_BYTES /* a test of every piece of a transfer has smaller ones */
#define ZCX_RING_SLOT_BYTES (32ull << 20)
#endif
#define ZCX_RING_BYTES (ZCX_RING_DEPTH * ZCX_RING_SLOT_BYTES)

/* What both ends agree on. */
struct zcx_ring_plan {
    uint64_t nbytes;                      /* of all parts, more than 0 */
    uint32_t filled_slot, emptied_slot;   /* of the gate */
    uint64_t filled, emptied;             /* of piece 0; that of piece k: k * ZCX_GATE_STEP more (gate.h) */
};
uint64_t zcx_ring_pieces(uint64_t nbytes);

/* What crosses is a list of parts, back to back: several tensors share one ring. Worker: its one destination or source.
 * Parent: the tensors of a call. The sum of their bytes is the plan's nbytes. An address of 0 is a gap (of alignment): nothing
 * is copied there. The list stays the caller's and must live as long as the transfer. */
struct zcx_ring_part { zcu_ptr address; uint64_t bytes; };

/* One end. The window, ZCX_RING_BYTES long, as it is mapped here: a device address, or with window_is_host the host address of
 * memory that is registered with CUDA (zcx_ring_pin). The stream is ordered behind what made the parts. */
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

/* Worker: queue the whole transfer on e->stream, as receiver or sender. Waits for nothing itself; but a driver whose queue is
 * full (some thousand operations) makes the call wait until the parent steps, so the parent steps from when it told the plan.
 * -ZCX_E_PROTOCOL: a plan that cannot be. On failure what was queued before stays queued, and is ahead of the call's DONE. */
int zcx_ring_queue(const struct zcx_ring_end *e, const struct zcx_ring_plan *plan, int sending, struct zcx_err *err);

/* Parent: one transfer under way. */
struct zcx_ring {
    struct zcx_ring_end end;
    struct zcx_ring_plan plan;
    int sending;
    uint64_t queued;                      /* pieces whose copy and post were queued here */
    uint32_t part;                        /* the next piece begins in this part … */
    uint64_t part_offset;                 /* … at this byte */
    zcu_event last;                       /* behind all that this side queued; seen by nobody else */
    int recorded;
    int touched;                          /* something may have been queued */
    int given_up;
};
/* Take two gate slots, number all posts of the transfer, fill in r->plan. 1: no slots are free now. -ZCX_E_UNFIT: this gate has
 * events, no counters: a ring needs counters. -ZCX_E_RANGE: the parts do not add up to nbytes, or no such device. Started, a
 * ring is ended with zcx_ring_end_transfer, once it returns 0; only then may the window serve another one. */
int zcx_ring_start(struct zcx_ring *r, const struct zcx_ring_end *end, uint64_t nbytes, int sending, struct zcx_err *err);
/* Queue what may be queued now. 1: all pieces are queued; 0: not yet. Negative: the driver failed, and with it the transfer,
 * which is given up. Given up: 1 when this side owes no post any more, 0 not yet: keep stepping.
 * DONE alone does not say that all came: the last piece may be allowed only since just before. A step after DONE that does not
 * return 1 says that the worker did not take part in all of it: the transfer failed, whatever the worker says. */
int zcx_ring_step(struct zcx_ring *r, struct zcx_err *err);
/* Copy nothing more: the call failed here or was cancelled, but the worker lives and its stream waits for our posts. All that
 * this side still owes is posted, at the latest by the steps that follow, so that the worker's stream runs through and DONE
 * comes; the bytes are worth nothing. Any number of times. */
void zcx_ring_give_up(struct zcx_ring *r);
/* The other side is through: the call's DONE was seen, or the worker is gone, or nobody was ever told of the transfer. What is
 * missing in either counter is made up for, and the slots are handed back.
 * 0: over. All that was queued here is complete as well: the window is free, and what was received may be used on any stream.
 * 1: this side's copies are not complete: call again. Negative: the driver cannot tell. Call again, or leave the window, the
 * event and the slots behind: nobody knows what may still be written there. */
int zcx_ring_end_transfer(struct zcx_ring *r, struct zcx_err *err);

/* Register `bytes` at `address` (whole pages that both processes map: a range of a result file, shm.h) for all devices, so that
 * copies to and from it are asynchronous. Zeroed, a pin holds nothing; pinned already: 0 at once. Pinning costs more than many a
 * copy: once per session, at the first use. */
struct zcx_ring_pin {
    void *address;
    int ordinal;
};
int zcx_ring_pin(struct zcx_ring_pin *pin, int ordinal, void *address, uint64_t bytes, struct zcx_err *err);
/* No copy of ours is outstanding: each transfer was ended, or the worker's context is synchronised. Negative: CUDA still knows
 * the memory: leave it mapped for the life of the process. */
int zcx_ring_unpin(struct zcx_ring_pin *pin, struct zcx_err *err);

#endif
