/* sim.h: the state of the simulated driver, shared by its files.
 *
 * One mutex guards everything that is private to the process; one thread executes what the streams hold. What several
 * processes see lies in two kinds of shared memory: the session file (charged bytes, interprocess events, happens-before, what
 * the streams hold) and the first part of each exportable pool's memfd. Both carry robust mutexes, so that a process may die anywhere.
 * Lock order: sim.lock, then a pool's control lock, then the session's. */
#ifndef SIM_H
#define SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_abi.h"

/* Codes that the product does not name. */
enum {
    SIM_ERROR_ALREADY_REGISTERED = 712,
    SIM_ERROR_NOT_REGISTERED = 713,
    SIM_ERROR_CAPTURE_UNMATCHED = 903,
    SIM_ERROR_CAPTURE_WRONG_THREAD = 908,
};

#define SIM_EXPORT __attribute__((visibility("default")))
#define SIM_CHUNK (32ull << 20)
#define SIM_IMPORT_CHUNKS 128 /* the real driver's array on the stack holds so many; above, the importer dies */
#define SIM_POISON 0xDB
#define SIM_LOST 0xDE   /* what work of a dead process finds in that process's own memory */
#define SIM_GRAIN (2ull << 20)    /* of virtual memory management */
#define SIM_BLOCK_HEAD 4096ull    /* bytes of a block's memfd before its memory */
#define SIM_DEVICES 16
#define SIM_SLOTS 256 /* clocks: streams of all processes of a session */

/* ---- entry points ---- */

/* Every function that the driver offers puts itself into the section that table.c walks. */
struct sim_symbol {
    const char *name;
    int version;
    void *function;
};
#define SIM_ENTRY(symbol, since)                                                                        \
    static const struct sim_symbol sim_entry_##symbol                                                   \
        __attribute__((section("sim_symbols"), used, aligned(8))) = {#symbol, since, (void *)symbol};
#define CALL(name, since, ...)                                                                          \
    SIM_EXPORT zcu_result cu##name(__VA_ARGS__);                                                        \
    SIM_ENTRY(cu##name, since)                                                                          \
    zcu_result cu##name(__VA_ARGS__)
/* The same under a second, versioned name. */
#define CALL_V(name, suffix, since, ...)                                                                \
    SIM_EXPORT zcu_result cu##name##suffix(__VA_ARGS__) __attribute__((alias("cu" #name)));             \
    CALL(name, since, __VA_ARGS__)

/* First statement of an entry point: not after a fork, not before cuInit, not after a fault (unless the call stays on the
 * CPU), injected failures; then the lock is held until the function returns. */
#define ENTER(name) ENTER_AS(name, true)
#define ENTER_CPU(name) ENTER_AS(name, false)
#define ENTER_AS(name, faulty)                                                                          \
    zcu_result sim_entered = sim_enter("cu" #name, faulty);                                             \
    if (sim_entered) return sim_entered;                                                                \
    __attribute__((cleanup(sim_leave), unused)) int sim_held = sim_lock()
/* ENTER of a call that is refused while another thread captures, see capture.c. */
#define ENTER_UNSAFE(name)                                                                              \
    ENTER(name);                                                                                        \
    if (sim_capture_forbids()) return ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED

zcu_result sim_enter(const char *name, bool faulty);
int sim_lock(void);
void sim_leave(int *held);
int sim_fail(const char *name); /* the code that SIMCUDA_FAIL names for this very call, or 0 */
bool sim_hidden(const char *name); /* SIMCUDA_HIDE names it */
bool sim_breaks(const char *what); /* SIMCUDA_BREAK names it */

/* What is known to have happened: one tick count for each stream of the session (hb.c). */
struct clock { uint32_t at[SIM_SLOTS]; };

/* ---- devices and contexts (device.c) ---- */

struct ctx {
    int device;              /* physical index */
    int retained;
    bool active;
    struct stream *legacy;
};

struct stream {
    struct stream *next;
    struct ctx *ctx;
    uint64_t id;             /* never used twice, unlike the address */
    bool nonblocking, legacy, destroyed, held;
    int steps;               /* operations that a held stream may still execute */
    struct op *head, *tail;
    uint64_t submitted, done;
    struct capture *capture;
    int slot;                /* of its clock, -1 without */
    struct clock clock;
};

struct sim {
    pthread_mutex_t lock;
    pthread_cond_t work;     /* for the thread that executes */
    pthread_cond_t progress; /* for those who wait for it */
    bool inited, forked, thread;
    int fault;               /* sticky */
    uint64_t seed, delay_us;
    uint64_t next_id;        /* buffers, streams, pools */
    uint64_t sequence;       /* operations, over all streams */
    bool hold_new;           /* streams are made held */
    int devices, visible;    /* physical, and how many this process sees */
    int map[SIM_DEVICES];    /* visible ordinal → physical */
    uint64_t memory[SIM_DEVICES];
    struct ctx ctx[SIM_DEVICES];
    struct pool *default_pool[SIM_DEVICES], *current_pool[SIM_DEVICES];
    struct stream *streams;
    struct pool *pools;
    struct event *events;
    struct linear *linears;
    struct hostreg *hostregs;
    struct block *blocks;
    struct mapping *mappings;
    struct reservation *reservations;
    struct capture *captures, *graphs;
    uint64_t executed;
};
extern struct sim sim;

struct ctx *sim_current(void);               /* of the calling thread, or NULL */
int sim_ordinal(int physical);               /* visible ordinal, or -1 */
int sim_physical(int ordinal);               /* or -1 */
void sim_uuid(int physical, zcu_uuid *out);
bool sim_peers(int a, int b);
uint64_t sim_random(void);
int64_t sim_now(void);                       /* ns */
uint64_t sim_env_size(const char *name, uint64_t otherwise); /* "24GiB" */

/* ---- the session (session.c) ---- */

struct process_id { int pid; uint64_t start; };
struct process_id sim_self(void);
bool sim_dead(struct process_id p);
/* Dead, and no child that it forked still has the driver's descriptors: only then is its work over and its memory free.
 * The session's lock is held. */
bool sim_gone(struct process_id p);

int sim_session_open(void);
void sim_session_lock(void);
void sim_session_unlock(void);
void sim_robust_init(pthread_mutex_t *m);
void sim_robust_lock(pthread_mutex_t *m);

/* Device memory charged, over all processes. `pool`: an exportable pool or a block; 0: the process's own memory. */
zcu_result sim_charge(int device, uint64_t pool, int64_t bytes); /* OUT_OF_MEMORY when it does not fit */
uint64_t sim_charged(int device);
/* This process holds (or lets go of) a pool or block that it imported. `bytes`: charged when nobody held it any more. */
void sim_charge_import(uint64_t pool, int device, int delta, uint64_t bytes);
void sim_charge_exported(uint64_t pool, int fd); /* from now on a mere descriptor of that file retains it */
void sim_charge_destroyed(uint64_t pool, uint64_t retained);

struct event_slot {
    uint32_t refs;
    uint64_t generation;
    uint64_t submitted, completed;
    struct process_id recorder; /* of the last record submitted */
    struct clock clock;
};
int sim_slot_take(uint64_t *generation); /* -1: none */
struct event_slot *sim_slot(int index);
void sim_slot_ref(int index, int delta);
bool sim_session_shared(void);

/* ---- streams (stream.c) ---- */

/* Something that will have happened: events, and frees that a reuse may have to wait for. */
struct marker {
    int refs;
    int pending;             /* parts not executed yet */
    struct clock clock;
};
struct marker *sim_marker_new(int pending);
struct marker *sim_marker_ref(struct marker *m);
void sim_marker_unref(struct marker *m);

enum op_kind {
    OP_COPY, OP_SET, OP_FREE, OP_UNIMPORT, OP_ALLOC, OP_MARK, OP_RECORD_SLOT, OP_WAIT, OP_WAIT_SLOT, OP_WRITE_VALUE,
    OP_WAIT_VALUE, OP_HOST, OP_SPIN, OP_LINEAR_FREE
};

struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t sequence;       /* over all streams: what the legacy stream's barriers compare */
    uint64_t number;         /* within the stream */
    int64_t not_before;
    bool unordered;          /* not subject to the legacy stream's barriers (parts of cuCtxRecordEvent) */
    zcu_ptr dst, src;        /* or host addresses */
    bool dst_host, src_host;
    uint64_t n, value;
    unsigned char byte;
    void *staging;           /* freed with the operation */
    struct pool *pool;
    struct marker *marker;   /* one reference */
    int slot;
    uint64_t ticket, earlier;
    struct process_id earlier_recorder;
    void (*fn)(void *);
    void *arg;
    int64_t until;
    struct clock clock;      /* what the host knew when it submitted */
};

/* Resolve a handle in the current context; *out is NULL-safe. INVALID_CONTEXT, INVALID_HANDLE. */
zcu_result sim_stream(zcu_stream handle, struct stream **out);
struct op *sim_op(enum op_kind kind);
void sim_submit(struct stream *s, struct op *op);
zcu_result sim_wait_stream(struct stream *s);  /* until all that it holds now is executed */
zcu_result sim_wait_ctx(struct ctx *c);
bool sim_stream_idle(const struct stream *s);
void sim_set_fault(int code, const char *why, zcu_ptr at);
struct stream *sim_stream_new(struct ctx *c, bool nonblocking);
bool sim_waited_for(uint64_t now, uint64_t value, unsigned how); /* of a counter */

/* ---- memory (memory.c) ---- */

struct linear {              /* cuMemAlloc, and legacy IPC mappings */
    struct linear *next;
    unsigned char *base;
    uint64_t size, id;
    int device, fd;
    int opened;              /* > 0: of another process, opened so many times */
    bool host;               /* cuMemHostAlloc */
    struct process_id owner; /* for opened ones */
    int owner_fd;
};
struct hostreg {
    struct hostreg *next;
    unsigned char *base;
    uint64_t size;
    bool allocated;
    uint64_t dev, ino, offset; /* what file is mapped there: counters are the same in all who map it */
};
struct hostreg *sim_registered(const void *p, uint64_t n);
/* May `device` reach all of [p, p + n)? INVALID_VALUE: no such memory, or no access; ILLEGAL_ADDRESS: was unmapped. */
zcu_result sim_reach(zcu_ptr p, uint64_t n, int device);
/* At execution: is it (still) mapped, and may `device` do that there? */
bool sim_mapped(zcu_ptr p, uint64_t n, int device, bool write);
void sim_linear_free(struct linear *l);
void sim_poison(unsigned char *p, uint64_t n); /* those pages that exist */

/* ---- pools (pool.c) ---- */

struct segment {             /* of a pool's address space, in order; all of it is covered */
    struct segment *prev, *next;
    uint64_t offset, size;
    enum { SEGMENT_FREE, SEGMENT_FREED, SEGMENT_USED } state;
    uint64_t stream;         /* FREED: id of the stream that frees it */
    struct marker *marker;   /* FREED: the free itself */
    uint64_t freed_at;       /* the latest is reused first */
    uint64_t id, asked;      /* USED */
};

struct import {
    struct import *next;
    uint64_t offset, size, id;
    uint64_t serial;         /* the owner's buffer id */
    uint64_t shift;          /* 0, or how far from where it belongs it was put */
};

struct pool {
    struct pool *next;
    uint64_t id;             /* the same in all processes */
    int device;              /* physical; -1: not one of ours */
    bool exportable, imported, destroyed, handle_exported, is_default;
    int fd;                  /* -1 unless exportable or imported */
    struct pool_control *control;
    unsigned char *base;
    uint64_t chunks;         /* of address space */
    int32_t *backing;        /* chunk → physical chunk, or -1; an importer: what it mapped */
    uint32_t *mapped;        /* importer: imports that cover the chunk */
    uint8_t *physical;       /* owner: bit 0 mapped somewhere */
    uint16_t *exports;       /* owner: address chunks whose last export points here */
    uint64_t threshold, max_size;
    uint64_t reserved, reserved_high, used, used_high;
    uint8_t access[SIM_DEVICES];
    struct segment *segments;
    struct import *imports;
    uint64_t last_imported;  /* importer: the highest serial so far */
    uint64_t live;           /* segments used, and frees not executed */
};

struct pool *sim_pool_default(int device);
struct pool *sim_pool_of(zcu_ptr p);          /* whose address space holds it */
struct segment *sim_pool_segment(struct pool *p, zcu_ptr at); /* the live allocation there */
struct import *sim_pool_import(struct pool *p, zcu_ptr at);
bool sim_pool_covered(struct pool *p, uint64_t offset, uint64_t n); /* by one import */
zcu_result sim_pool_alloc(struct pool *p, uint64_t n, struct stream *s, zcu_ptr *out);
zcu_result sim_pool_free(struct pool *p, zcu_ptr at, struct stream *s);
void sim_pool_freed(struct op *op);           /* execution of OP_FREE */
void sim_pool_unimported(struct op *op);      /* execution of OP_UNIMPORT */
bool sim_pool_backed(struct pool *p, uint64_t offset, uint64_t n);
uint64_t sim_pool_place(const struct pool *p, uint64_t offset, uint64_t *n); /* in its file; *n cut to what is in one piece */
void sim_pools_release(void);                 /* at a synchronise: down to the thresholds */

/* ---- virtual memory management (vmm.c) ---- */

struct block {               /* physical memory; an import is one of its own */
    struct block *next;
    uint64_t id;             /* the same in all processes */
    zcu_mem handle;
    uint64_t size;
    int fd, device, handle_types;
    int handles, maps;       /* references of this process */
    bool imported;
};

struct mapping {
    struct mapping *next;
    zcu_ptr base;
    uint64_t size, id;
    struct block *block;     /* from its beginning */
    uint8_t access[SIM_DEVICES];
};

bool sim_vmm_reserved(zcu_ptr p);
struct mapping *sim_vmm_mapping(zcu_ptr p);
bool sim_vmm_access(zcu_ptr p, uint64_t n, int device, int rights); /* all of it mapped, with these rights */
long sim_vmm_count(const char *what);

/* ---- what other processes can see of the streams (work.c) ---- */

void work_queued(const struct stream *s, const struct op *op);
void work_executed(const struct stream *s, uint64_t number);
void work_of_the_dead(void);

/* ---- events (event.c) ---- */

struct event {
    struct event *next;
    bool interprocess, opened;
    struct marker *marker;   /* the last record, or NULL */
    int slot;                /* -1 unless interprocess */
};
bool sim_slot_stuck(const struct op *op);

/* ---- capture (capture.c) ---- */

struct capture {
    struct capture *next;
    struct stream *stream;
    int mode;
    pthread_t thread;
    bool invalid;
};
bool sim_capture_forbids(void);
bool sim_capture_forbids_context(void);
/* A stream operation: 0: not capturing, execute it; 1: recorded, return success; else an error code, negated. */
int sim_capture_op(struct stream *s);

/* ---- happens-before (hb.c) ---- */

int hb_slot_take(void);      /* a clock for a stream; -1: none is left, the stream is not tracked */
void hb_slot_put(int slot);
void hb_join(struct clock *into, const struct clock *from);
void hb_host_sees(const struct clock *c);     /* a synchronise returned, or a query said yes */
void hb_submit(struct op *op);
void hb_begin(struct stream *s, struct op *op);
void hb_posted(struct stream *s, zcu_ptr address, uint64_t value);
void hb_awaited(struct stream *s, zcu_ptr address, uint64_t value);
void hb_access(const struct stream *s, zcu_ptr p, uint64_t n, bool write);
void hb_create(const struct stream *s, const struct op *op);  /* OP_ALLOC is submitted */
void hb_created(const struct stream *s, const struct op *op); /* … and executed */
void hb_freed(const struct stream *s, const struct op *op);
void hb_imported(const struct pool *p, uint64_t serial);
void hb_unimported(const struct stream *s, const struct op *op);
void hb_pool_gone(const struct pool *p);
void hb_block_new(const struct block *b);
void hb_unmapping(zcu_ptr p, uint64_t n);     /* whole mappings, still there */
void hb_forget(uint64_t pool);                /* a pool or block that nobody has any more; the session's lock is held */
/* Work of a dead process's stream touches [where, where + n) of a pool or block. */
void hb_landed(const struct stream *s, uint64_t pool, uint64_t where, uint64_t n, bool write);

#endif
