/* gate.h: READY and DONE. A page of 64-bit counters that both processes map (sealed memfd) and that the GPU posts and awaits.
 *
 * A slot is one cache line with one counter that only grows. Posting writes the next value on a stream when the work before
 * it is complete; awaiting makes a stream, or the CPU, go on once the counter has reached a value. Why counters and not
 * interprocess events: an event that a killed process left pending hangs every stream that waits on it, for ever
 * (driver 580.159.04, research/pool-ipc/probe_dead_event.py); a counter can be set free by a plain store.
 * Where the driver has no 64-bit stream memory operations, each slot gets an interprocess event instead: READY is awaited by
 * the worker's stream, DONE is only ever *queried* by the parent, after the message that says it was recorded.
 * The parent owns the page and hands out the slots; a worker uses those that a message names.
 * A slot is given out again only after its last post was observed by the CPU.
 * Does not: know sockets, pools or transfers, nor when a peer is dead (the caller's wait does). */
#ifndef ZCX_GATE_H
#define ZCX_GATE_H

#include "driver.h"

#define ZCX_GATE_SLOTS 64
#define ZCX_GATE_STRIDE 64
#define ZCX_GATE_BYTES (ZCX_GATE_SLOTS * ZCX_GATE_STRIDE)
#define ZCX_GATE_STEP (1ull << 32)   /* from one value of a slot to the next; a post may write more, but less than that */
#define ZCX_GATE_POSTS (1u << 30)    /* a slot that was just taken has values for so many posts at least */

struct zcx_gate;

/* Parent: make the sealed memfd and map it. Touches no CUDA. */
int zcx_gate_new(struct zcx_gate **out, struct zcx_err *err);
/* Worker: map the page behind `fd` (borrowed) after checking size and seals. -ZCX_E_PROTOCOL if they do not hold. */
int zcx_gate_open(struct zcx_gate **out, int fd, struct zcx_err *err);
int zcx_gate_fd(const struct zcx_gate *g); /* parent: owned by the gate */

/* Register the page with CUDA for device `ordinal`, once; cheap when done already. */
int zcx_gate_register(struct zcx_gate *g, int ordinal, struct zcx_err *err);

/* Parent: take two free slots for one call on one device. *ready and *done are slot numbers; 1: none free now. */
int zcx_gate_take(struct zcx_gate *g, uint32_t *ready, uint32_t *done);
/* Parent: hand a slot back; it is free again once its counter has reached what was last announced for it. */
void zcx_gate_put(struct zcx_gate *g, uint32_t slot);
/* The next value of a slot: what the next post on it must write. Only the parent numbers posts, of both slots. Values grow in
 * steps of ZCX_GATE_STEP, and a post may write more than its value, but never as much as the next one (gate.c says why). */
uint64_t zcx_gate_next(struct zcx_gate *g, uint32_t slot);
/* The first of the next n (1 to ZCX_GATE_POSTS), ZCX_GATE_STEP apart. 0: the slot has not so many left. All n are announced: one
 * that is never posted is never waited for, as long as the last one is posted. */
uint64_t zcx_gate_next_n(struct zcx_gate *g, uint32_t slot, uint64_t n);

/* Post `value` on `stream`, after all work queued on it so far. As long as a slot is taken, its posts go on one stream: two
 * streams would post in any order. */
int zcx_gate_post(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, zcu_stream stream, struct zcx_err *err);
/* Make `stream` wait for `value`. Worker only, for posts of the parent: its streams never wait for a worker (-ZCX_E_RANGE).
 * -ZCX_E_PROTOCOL, with events only: it was not posted yet, and so cannot be waited for. */
int zcx_gate_await(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, zcu_stream stream, struct zcx_err *err);
/* Post from the CPU: for a side whose GPU work is known to be over, or that never had any. */
void zcx_gate_post_cpu(struct zcx_gate *g, uint32_t slot, uint64_t value);
/* 1 once the counter has reached `value` (acquire), 0 before; no call into the driver. With events: cuEventQuery. */
int zcx_gate_reached(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, struct zcx_err *err);

/* Event fallback: 1 when it is in force (set at registration). The handles of a slot's event travel in POOL messages. */
int zcx_gate_uses_events(const struct zcx_gate *g);
int zcx_gate_event_export(struct zcx_gate *g, int ordinal, uint32_t slot, zcu_ipc_event *out, struct zcx_err *err);
int zcx_gate_event_import(struct zcx_gate *g, int ordinal, uint32_t slot, const zcu_ipc_event *in, struct zcx_err *err);

/* 1 when no post or wait of ours is still outstanding on the page: only then may it be unregistered (a stream would write into
 * memory that CUDA no longer knows). Nothing that the peer stores in the page can make it say 1 too early. */
int zcx_gate_idle(struct zcx_gate *g);
/* The caller made sure that it is idle; if it is not, the page is left mapped and registered for the life of the process.
 * In a forked child: frees memory only. */
void zcx_gate_free(struct zcx_gate *g);

#endif
