/* session.h: the layout of the session file. Only session.c and hb.c look inside. */
#ifndef SIM_SESSION_H
#define SIM_SESSION_H

#include "sim.h"

#define SESSION_MAGIC 0x32616475636d6973ull
#define SESSION_PROCESSES 512
#define SESSION_POOLS 8192
#define SESSION_IMPORTERS 32
#define SESSION_EVENTS 8192
#define SESSION_COUNTERS 1024
#define SESSION_SHADOWS 4096
#define SESSION_ACCESSES 48
#define SESSION_SHADOW_IMPORTERS 8
#define SESSION_WORK 64

/* Each process has the lock of its own byte on the session file, on a description that its forked children share. */
struct process_charge { struct process_id owner; uint64_t bytes[SIM_DEVICES]; };

struct pool_charge {         /* or a block's */
    uint64_t id;             /* 0: free */
    int device;
    struct process_id owner;
    uint64_t bytes;
    bool destroyed;
    uint64_t dev, ino;       /* of its file, once exported; ino 0: never */
    struct process_id importers[SESSION_IMPORTERS];
};

/* A counter that streams post: what is ordered before its present value. */
struct shadow_counter { uint64_t dev, ino, offset, value; struct clock clock; };

enum access_kind { ACCESS_READ, ACCESS_WRITE, ACCESS_UNIMPORT, ACCESS_UNMAP, ACCESS_CREATE, ACCESS_FREE };

/* One access to an allocation: [offset, offset + n) of the pool or block, at tick `tick` of clock `slot`. */
struct shadow_access { uint64_t offset, n; uint32_t slot, tick; enum access_kind kind; };

/* What was done to one allocation since it was made, and who has it imported. A block is one allocation, of id 0. */
struct shadow {
    uint64_t pool, offset, n; /* pool 0: not in use */
    uint64_t id;              /* the owner's buffer id */
    bool freed;
    uint32_t count;
    struct shadow_access access[SESSION_ACCESSES];
    struct { struct process_id process; uint32_t count; } importers[SESSION_SHADOW_IMPORTERS];
};

/* Bytes that several processes can reach: where in the file of which pool or block, and where in its addresses. */
struct shared_bytes { uint64_t id, place, where, n; };

/* An operation that a stream holds, as far as it matters to others. */
struct work {
    uint64_t number;         /* within the stream */
    enum { WORK_PRIVATE, WORK_SET, WORK_COPY, WORK_WAIT_VALUE, WORK_WRITE_VALUE, WORK_SPIN } kind;
    struct shared_bytes dst, src; /* src.id 0: its bytes are lost with the process */
    uint64_t dev, ino, offset;    /* the counter */
    uint64_t value;
    unsigned char byte;
    int64_t until;
};
struct stream_work {
    struct clock clock;      /* of what was executed, and what the host knew at the last submission */
    uint32_t first;
    struct work ring[SESSION_WORK];
};

struct session {
    uint64_t magic;
    pthread_mutex_t lock;
    struct process_charge processes[SESSION_PROCESSES];
    struct pool_charge pools[SESSION_POOLS];
    int pools_used;
    uint64_t event_generation;
    struct event_slot events[SESSION_EVENTS];
    uint64_t races;
    struct clock host;       /* what some host thread of some process knows to be complete */
    struct { struct process_id owner; uint32_t tick, floor; bool taken; } clocks[SIM_SLOTS];
    struct shadow_counter counters[SESSION_COUNTERS];
    uint32_t counters_used, shadows_used;
    struct shadow shadows[SESSION_SHADOWS];
    uint32_t held[SIM_SLOTS];           /* operations in each of these rings: all processes look here often */
    struct stream_work work[SIM_SLOTS]; /* by the stream's clock */
};
extern struct session *session;

#endif
