/* gate.c: see gate.h.
 *
 * The page. One line of 64 bytes per slot, all of it writable by both processes:
 *
 *     +0   counter    u64   posted by a GPU, or by a CPU
 *     +8   recorded   u64   event fallback: the value whose event record was queued, by the CPU of the side that did it
 *     +16  mode       u32   line 0 only: enum mode, by the parent at its first registration
 *
 * Values. The parent numbers posts in steps of 2^32, and a post writes its value with 32 random bits below it: still below the
 * next value, so that whoever waits for "at least" need not know them. They are there because the other process can write to
 * the page as well. A worker that stores a value itself only spoils its own call; but taking it for our own post would let us
 * unregister the page while a stream of ours has yet to write there, which kills the context. Nobody can store, before the
 * GPU did, bits that were never told.
 * A slot has values for 2^31 posts; once half of them are gone it is not given out any more. A call uses one; a ring one for each
 * 32 MiB, which with the slots taken in turn is 2^60 bytes in one session.
 *
 * Events, where the driver has no 64-bit stream memory operations. One interprocess event per slot and device, created by the
 * parent when its handle is first asked for. A query or a wait on an event looks at its last record only, and one that was
 * never recorded counts as complete. Hence `recorded`: it is written after cuEventRecord returned, and until it holds the
 * value there is nothing to look at. Whoever saw the event complete writes the counter, so that all else (is the slot free? was
 * it posted from the CPU?) reads counters in both modes. */
#include "gate.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* Values stay below this: the driver compares by the sign of the difference, which turns round there. */
#define LAST_VALUE (1ull << 63)
_Static_assert(ZCX_GATE_POSTS * ZCX_GATE_STEP == LAST_VALUE / 2, "what a slot that is given out must have left");
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

enum mode { UNDECIDED, COUNTERS, EVENTS };

struct line {
    _Atomic uint64_t counter;
    _Atomic uint64_t recorded;
    _Atomic uint32_t mode;
    unsigned char unused[44];
};
_Static_assert(sizeof(struct line) == ZCX_GATE_STRIDE, "a slot is one cache line");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock would not be shared with the other process");

struct slot {
    uint64_t announced;         /* the last value given out by zcx_gate_next */
    int taken;
    int ordinal;                /* events: the device whose event the slot uses now */
    _Atomic uint64_t cpu;       /* the last value that this process posted from the CPU */
    _Atomic uint64_t written;   /* what our last post on a stream writes, until it was seen; 0: nothing outstanding */
    _Atomic uint64_t awaited;   /* counters: the last value that a stream of ours waits for */
    _Atomic uint64_t own;       /* events: the last value that we recorded */
};

struct device {
    zcu_ptr page;                               /* counters: as this device's streams address it */
    zcu_event events[ZCX_GATE_SLOTS];           /* events; NULL: not exchanged yet */
    zcu_ipc_event handles[ZCX_GATE_SLOTS];      /* of each: a handle is asked for, and opened, once */
};

struct zcx_gate {
    struct line *lines;
    int fd;                     /* parent; worker: -1 */
    pid_t owner;                /* a child of fork() may only let go of memory */
    int is_parent;
    pthread_mutex_t lock;       /* over slots' taken and announced, registration, events, random bits */
    struct slot slots[ZCX_GATE_SLOTS];
    uint32_t next;              /* where the search for a free slot begins */
    _Atomic int mode;           /* enum mode */
    int registered;             /* with CUDA; counters only */
    int home;                   /* the device that registered it first */
    _Atomic(struct device *) devices[ZCX_MAX_DEVICES];
    uint32_t random[32];
    unsigned nrandom;           /* of them unused */
};

/* ---- making and opening ---- */

static int wrap(struct zcx_gate **out, int fd, int is_parent, struct zcx_err *err) {
    struct zcx_gate *g = calloc(1, sizeof *g);
    int rc;

    if (!g) return zcx_fail(err, ENOMEM, "no memory for a gate");
    rc = pthread_mutex_init(&g->lock, NULL);
    if (rc) {
        rc = zcx_fail(err, rc, "no mutex for a gate");
        goto free_gate;
    }
    g->lines = mmap(NULL, ZCX_GATE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (g->lines == MAP_FAILED) {
        rc = zcx_fail_errno(err, "mmap");
        goto destroy_mutex;
    }
    g->fd = is_parent ? fd : -1;
    g->is_parent = is_parent;
    g->owner = getpid();
    *out = g;
    return 0;

destroy_mutex:
    pthread_mutex_destroy(&g->lock);
free_gate:
    free(g);
    return rc;
}

int zcx_gate_new(struct zcx_gate **out, struct zcx_err *err) {
    int rc, fd = memfd_create("zcx-gate", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0) return zcx_fail_errno(err, "memfd_create");
    /* Allocated here and not at the first touch, where a machine without memory would answer with SIGBUS. */
    if (fallocate(fd, 0, 0, ZCX_GATE_BYTES) < 0) {
        rc = zcx_fail_errno(err, "fallocate");
        goto close_fd;
    }
    if (fcntl(fd, F_ADD_SEALS, SEALS) < 0) {
        rc = zcx_fail_errno(err, "fcntl");
        goto close_fd;
    }
    rc = wrap(out, fd, 1, err);
    if (!rc) return 0;
close_fd:
    close(fd);
    return rc;
}

int zcx_gate_open(struct zcx_gate **out, int fd, struct zcx_err *err) {
    struct stat st;
    int seals;

    if (fstat(fd, &st) < 0) return zcx_fail_errno(err, "fstat");
    if (!S_ISREG(st.st_mode) || st.st_size != ZCX_GATE_BYTES)
        return zcx_fail(err, ZCX_E_PROTOCOL, "the gate's page is no file of %d bytes", ZCX_GATE_BYTES);
    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return zcx_fail(err, ZCX_E_PROTOCOL, "the gate's page is not sealed against a change of its size");
    return wrap(out, fd, 0, err);
}

int zcx_gate_fd(const struct zcx_gate *g) { return g->fd; }

/* ---- registration ---- */

static int can_count(const struct zcx_driver *d, int ordinal, int *can, struct zcx_err *err) {
    zcu_device device;
    int rc;

    if (!d->StreamWriteValue64 || !d->StreamWaitValue64) {
        *can = 0;
        return 0;
    }
    rc = zcx_cu(err, "cuDeviceGet", d->DeviceGet(&device, ordinal));
    if (rc) return rc;
    return zcx_cu(err, "cuDeviceGetAttribute",
                  d->DeviceGetAttribute(can, ZCU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device));
}

/* One mode for the whole page, chosen by the parent: counters if every device that it sees can. */
static int choose(const struct zcx_driver *d, enum mode *out, struct zcx_err *err) {
    int can = 1;

    for (int i = 0; i < d->count && can; i++) {
        int rc = can_count(d, i, &can, err);
        if (rc) return rc;
    }
    *out = can ? COUNTERS : EVENTS;
    return 0;
}

static int decide(const struct zcx_driver *d, struct zcx_gate *g, enum mode *out, struct zcx_err *err) {
    uint32_t told = atomic_load_explicit(&g->lines[0].mode, memory_order_acquire);

    if (g->mode != UNDECIDED) {
        *out = (enum mode)g->mode;
        return 0;
    }
    if (g->is_parent || told == UNDECIDED) return choose(d, out, err);
    if (told != COUNTERS && told != EVENTS) return zcx_fail(err, ZCX_E_PROTOCOL, "the gate's page is in mode %u", told);
    *out = (enum mode)told;
    return 0;
}

static int register_counters(const struct zcx_driver *d, struct zcx_gate *g, int ordinal, zcu_ptr *page,
                             struct zcx_err *err) {
    int can, rc;

    rc = can_count(d, ordinal, &can, err);
    if (rc) return rc;
    if (!can)
        return zcx_fail(err, ZCX_E_UNFIT, "device %d has no 64-bit stream memory operations, which the gate uses here", ordinal);
    if (!g->registered) {
        rc = zcx_cu(err, "cuMemHostRegister", d->MemHostRegister(g->lines, ZCX_GATE_BYTES, ZCU_MEMHOSTREGISTER_PORTABLE |
                                                                 ZCU_MEMHOSTREGISTER_DEVICEMAP));
        if (rc) return rc;
        g->registered = 1;
        g->home = ordinal;
    }
    return zcx_cu(err, "cuMemHostGetDevicePointer", d->MemHostGetDevicePointer(page, g->lines, 0));
}

static int register_locked(const struct zcx_driver *d, struct zcx_gate *g, int ordinal, struct zcx_err *err) {
    struct device *device;
    enum mode mode = COUNTERS; /* decide() sets it; gcc at -O2 cannot see that */
    int rc;

    if (g->devices[ordinal]) return 0;
    rc = decide(d, g, &mode, err);
    if (rc) return rc;
    if (mode == EVENTS && (!d->IpcGetEventHandle || !d->IpcOpenEventHandle))
        return zcx_fail(err, ZCX_E_UNFIT, "this driver has neither 64-bit stream memory operations nor interprocess events");
    device = calloc(1, sizeof *device);
    if (!device) return zcx_fail(err, ENOMEM, "no memory for a gate");
    if (mode == COUNTERS) rc = register_counters(d, g, ordinal, &device->page, err);
    if (rc) {
        free(device);
        return rc;
    }
    g->mode = mode;
    if (g->is_parent) atomic_store_explicit(&g->lines[0].mode, mode, memory_order_release);
    atomic_store_explicit(&g->devices[ordinal], device, memory_order_release);
    return 0;
}

int zcx_gate_register(struct zcx_gate *g, int ordinal, struct zcx_err *err) {
    struct zcx_scope s;
    int rc;

    if (ordinal < 0 || ordinal >= ZCX_MAX_DEVICES) return zcx_fail(err, ZCX_E_RANGE, "device %d", ordinal);
    if (atomic_load_explicit(&g->devices[ordinal], memory_order_acquire)) return 0;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    pthread_mutex_lock(&g->lock);
    rc = register_locked(s.d, g, ordinal, err);
    pthread_mutex_unlock(&g->lock);
    zcx_scope_close(&s);
    return rc;
}

int zcx_gate_uses_events(const struct zcx_gate *g) { return g->mode == EVENTS; }

static int device_of(struct zcx_gate *g, int ordinal, uint32_t slot, struct device **out, struct zcx_err *err) {
    struct device *device = NULL;

    if (slot >= ZCX_GATE_SLOTS) return zcx_fail(err, ZCX_E_RANGE, "slot %u of %d", slot, ZCX_GATE_SLOTS);
    if (ordinal >= 0 && ordinal < ZCX_MAX_DEVICES) device = atomic_load_explicit(&g->devices[ordinal], memory_order_acquire);
    if (!device) return zcx_fail(err, ZCX_E_RANGE, "the gate is not registered for device %d", ordinal);
    *out = device;
    return 0;
}

/* ---- looking ---- */

static uint64_t counter_of(const struct zcx_gate *g, uint32_t slot) {
    return atomic_load_explicit(&g->lines[slot].counter, memory_order_acquire);
}

/* Has our own last post on a stream arrived? Only what it alone could have written says so. */
static void look_for_own(struct zcx_gate *g, uint32_t slot, uint64_t seen) {
    uint64_t written = g->slots[slot].written;
    if (written && seen == written) atomic_compare_exchange_strong(&g->slots[slot].written, &written, 0);
}

static int counted(const struct zcx_gate *g, uint32_t slot, uint64_t value) {
    return counter_of(g, slot) >= value || g->slots[slot].cpu >= value;
}

static void raise_counter(struct zcx_gate *g, uint32_t slot, uint64_t value) {
    uint64_t seen = counter_of(g, slot);

    do {
        look_for_own(g, slot, seen);
        if (seen >= value) return;
    } while (!atomic_compare_exchange_weak_explicit(&g->lines[slot].counter, &seen, value, memory_order_acq_rel,
                                                    memory_order_acquire));
}

static int reached(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, struct zcx_err *err) {
    struct device *device;
    struct zcx_scope s;
    zcu_result r;
    int rc;

    if (counted(g, slot, value)) return 1;
    if (g->mode != EVENTS) return 0;
    rc = device_of(g, ordinal, slot, &device, err);
    if (rc) return rc;
    if (g->slots[slot].own < value && atomic_load_explicit(&g->lines[slot].recorded, memory_order_acquire) < value) return 0;
    if (!device->events[slot]) return 0;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    r = s.d->EventQuery(device->events[slot]);
    zcx_scope_close(&s);
    if (r == ZCU_ERROR_NOT_READY) return 0;
    rc = zcx_cu(err, "cuEventQuery", r);
    if (rc) return rc;
    raise_counter(g, slot, value);
    return 1;
}

int zcx_gate_reached(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, struct zcx_err *err) {
    if (slot >= ZCX_GATE_SLOTS) return zcx_fail(err, ZCX_E_RANGE, "slot %u of %d", slot, ZCX_GATE_SLOTS);
    return reached(g, ordinal, slot, value, err);
}

/* ---- slots ---- */

static int is_free(struct zcx_gate *g, uint32_t slot) {
    struct slot *s = &g->slots[slot];

    if (s->taken || s->announced >= LAST_VALUE / 2) return 0;
    look_for_own(g, slot, counter_of(g, slot));
    return !s->written && reached(g, s->ordinal, slot, s->announced, NULL) == 1;
}

int zcx_gate_take(struct zcx_gate *g, uint32_t *ready, uint32_t *done) {
    uint32_t found[2];
    int n = 0;

    pthread_mutex_lock(&g->lock);
    for (uint32_t i = 0; i < ZCX_GATE_SLOTS && n < 2; i++) {
        uint32_t slot = (g->next + i) % ZCX_GATE_SLOTS;
        if (is_free(g, slot)) found[n++] = slot;
    }
    if (n == 2) {
        g->slots[found[0]].taken = g->slots[found[1]].taken = 1;
        g->next = (found[1] + 1) % ZCX_GATE_SLOTS;
        *ready = found[0];
        *done = found[1];
    }
    pthread_mutex_unlock(&g->lock);
    return n == 2 ? 0 : 1;
}

void zcx_gate_put(struct zcx_gate *g, uint32_t slot) {
    if (slot >= ZCX_GATE_SLOTS) return;
    pthread_mutex_lock(&g->lock);
    look_for_own(g, slot, counter_of(g, slot));
    g->slots[slot].taken = 0;
    pthread_mutex_unlock(&g->lock);
}

uint64_t zcx_gate_next_n(struct zcx_gate *g, uint32_t slot, uint64_t n) {
    uint64_t first = 0;

    if (slot >= ZCX_GATE_SLOTS) return 0;
    pthread_mutex_lock(&g->lock);
    if (n <= (LAST_VALUE - ZCX_GATE_STEP - g->slots[slot].announced) / ZCX_GATE_STEP) {
        first = g->slots[slot].announced + ZCX_GATE_STEP;
        g->slots[slot].announced += n * ZCX_GATE_STEP;
    }
    pthread_mutex_unlock(&g->lock);
    return first;
}

uint64_t zcx_gate_next(struct zcx_gate *g, uint32_t slot) { return zcx_gate_next_n(g, slot, 1); }

/* ---- posting and awaiting ---- */

static int random_bits(struct zcx_gate *g, uint64_t *out, struct zcx_err *err) {
    int rc = 0;

    pthread_mutex_lock(&g->lock);
    if (!g->nrandom) {
        if (getrandom(g->random, sizeof g->random, 0) == (ssize_t)sizeof g->random)
            g->nrandom = sizeof g->random / sizeof *g->random;
        else
            rc = zcx_fail_errno(err, "getrandom");
    }
    if (!rc) *out = g->random[--g->nrandom];
    pthread_mutex_unlock(&g->lock);
    return rc;
}

static int post_counter(const struct zcx_driver *d, struct zcx_gate *g, struct device *device, uint32_t slot, uint64_t value,
                        zcu_stream stream, struct zcx_err *err) {
    uint64_t bits, before = g->slots[slot].written;
    int rc = random_bits(g, &bits, err);

    if (rc) return rc;
    /* Outstanding before it can arrive. The default flags put a fence for the stream's earlier writes before the counter's. */
    g->slots[slot].written = value | bits;
    rc = zcx_cu(err, "cuStreamWriteValue64",
                d->StreamWriteValue64(stream, device->page + slot * ZCX_GATE_STRIDE + offsetof(struct line, counter),
                                      g->slots[slot].written, ZCU_STREAM_WRITE_VALUE_DEFAULT));
    if (rc) g->slots[slot].written = before;
    return rc;
}

static int post_event(const struct zcx_driver *d, struct zcx_gate *g, struct device *device, uint32_t slot, uint64_t value,
                      zcu_stream stream, struct zcx_err *err) {
    int rc;

    if (!device->events[slot]) return zcx_fail(err, ZCX_E_UNFIT, "no event was exchanged for slot %u", slot);
    rc = zcx_cu(err, "cuEventRecord", d->EventRecord(device->events[slot], stream));
    if (rc) return rc;
    g->slots[slot].own = value;
    atomic_store_explicit(&g->lines[slot].recorded, value, memory_order_release);
    return 0;
}

int zcx_gate_post(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, zcu_stream stream, struct zcx_err *err) {
    struct device *device;
    struct zcx_scope s;
    int rc = device_of(g, ordinal, slot, &device, err);

    if (rc) return rc;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    rc = g->mode == EVENTS ? post_event(s.d, g, device, slot, value, stream, err)
                           : post_counter(s.d, g, device, slot, value, stream, err);
    zcx_scope_close(&s);
    return rc;
}

static int await_event(const struct zcx_driver *d, struct zcx_gate *g, struct device *device, uint32_t slot, uint64_t value,
                       zcu_stream stream, struct zcx_err *err) {
    if (counted(g, slot, value)) return 0;
    /* A wait on an event that was not recorded yet would be no wait at all. */
    if (!device->events[slot] || atomic_load_explicit(&g->lines[slot].recorded, memory_order_acquire) < value)
        return zcx_fail(err, ZCX_E_PROTOCOL, "slot %u was to be awaited before it was posted", slot);
    return zcx_cu(err, "cuStreamWaitEvent", d->StreamWaitEvent(stream, device->events[slot], 0));
}

static int await_counter(const struct zcx_driver *d, struct zcx_gate *g, struct device *device, uint32_t slot, uint64_t value,
                         zcu_stream stream, struct zcx_err *err) {
    int rc = zcx_cu(err, "cuStreamWaitValue64",
                    d->StreamWaitValue64(stream, device->page + slot * ZCX_GATE_STRIDE + offsetof(struct line, counter), value,
                                         ZCU_STREAM_WAIT_VALUE_GEQ));
    if (!rc) g->slots[slot].awaited = value;
    return rc;
}

int zcx_gate_await(struct zcx_gate *g, int ordinal, uint32_t slot, uint64_t value, zcu_stream stream, struct zcx_err *err) {
    struct device *device;
    struct zcx_scope s;
    int rc = device_of(g, ordinal, slot, &device, err);

    if (rc) return rc;
    if (g->is_parent) return zcx_fail(err, ZCX_E_RANGE, "a stream of the parent never waits for a worker");
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    rc = g->mode == EVENTS ? await_event(s.d, g, device, slot, value, stream, err)
                           : await_counter(s.d, g, device, slot, value, stream, err);
    zcx_scope_close(&s);
    return rc;
}

/* Remembered here as well: a post that a stream still has to make may put the counter back to an earlier value. */
void zcx_gate_post_cpu(struct zcx_gate *g, uint32_t slot, uint64_t value) {
    if (slot >= ZCX_GATE_SLOTS) return;
    if (g->slots[slot].cpu < value) g->slots[slot].cpu = value;
    raise_counter(g, slot, value);
}

/* ---- events ---- */

static int export_locked(const struct zcx_driver *d, struct zcx_gate *g, struct device *device, int ordinal, uint32_t slot,
                         zcu_ipc_event *out, struct zcx_err *err) {
    zcu_ipc_event handle;
    zcu_event event;
    int rc;

    if (!device->events[slot]) {
        rc = zcx_cu(err, "cuEventCreate", d->EventCreate(&event, ZCU_EVENT_DISABLE_TIMING | ZCU_EVENT_INTERPROCESS));
        if (rc) return rc;
        rc = zcx_cu(err, "cuIpcGetEventHandle", d->IpcGetEventHandle(&handle, event));
        if (rc) {
            d->EventDestroy(event);
            return rc;
        }
        device->events[slot] = event;
        device->handles[slot] = handle;
    }
    g->slots[slot].ordinal = ordinal;
    *out = device->handles[slot];
    return 0;
}

static int import_locked(const struct zcx_driver *d, struct device *device, uint32_t slot, const zcu_ipc_event *in,
                         struct zcx_err *err) {
    zcu_event event;
    int rc;

    if (device->events[slot]) {
        if (memcmp(&device->handles[slot], in, sizeof *in) == 0) return 0; /* told again */
        return zcx_fail(err, ZCX_E_PROTOCOL, "slot %u has an event already, and another one was sent", slot);
    }
    rc = zcx_cu(err, "cuIpcOpenEventHandle", d->IpcOpenEventHandle(&event, *in));
    if (rc) return rc;
    device->events[slot] = event;
    device->handles[slot] = *in;
    return 0;
}

static int event_device(struct zcx_gate *g, int ordinal, uint32_t slot, int parent, struct device **out,
                        struct zcx_err *err) {
    if (g->is_parent != parent || g->mode != EVENTS)
        return zcx_fail(err, ZCX_E_RANGE, "events go from the parent to the worker, and only where there are no counters");
    return device_of(g, ordinal, slot, out, err);
}

int zcx_gate_event_export(struct zcx_gate *g, int ordinal, uint32_t slot, zcu_ipc_event *out, struct zcx_err *err) {
    struct device *device;
    struct zcx_scope s;
    int rc = event_device(g, ordinal, slot, 1, &device, err);

    if (rc) return rc;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    pthread_mutex_lock(&g->lock);
    rc = export_locked(s.d, g, device, ordinal, slot, out, err);
    pthread_mutex_unlock(&g->lock);
    zcx_scope_close(&s);
    return rc;
}

int zcx_gate_event_import(struct zcx_gate *g, int ordinal, uint32_t slot, const zcu_ipc_event *in, struct zcx_err *err) {
    struct device *device;
    struct zcx_scope s;
    int rc = event_device(g, ordinal, slot, 0, &device, err);

    if (rc) return rc;
    rc = zcx_scope_open(&s, ordinal, err);
    if (rc) return rc;
    pthread_mutex_lock(&g->lock);
    rc = import_locked(s.d, device, slot, in, err);
    pthread_mutex_unlock(&g->lock);
    zcx_scope_close(&s);
    return rc;
}

/* ---- the end ---- */

int zcx_gate_idle(struct zcx_gate *g) {
    if (g->owner != getpid()) return 1;
    for (uint32_t i = 0; i < ZCX_GATE_SLOTS; i++) {
        struct slot *s = &g->slots[i];
        uint64_t seen = counter_of(g, i);
        look_for_own(g, i, seen);
        if (s->written || seen < s->awaited) return 0;
    }
    return 1;
}

/* 0 when CUDA knows nothing of the page any more. */
static int let_go(struct zcx_gate *g) {
    struct zcx_scope s;
    int left = g->registered;

    for (int i = 0; i < ZCX_MAX_DEVICES; i++) {
        struct device *device = g->devices[i];
        if (!device || g->mode != EVENTS || zcx_scope_open(&s, i, NULL)) continue;
        for (int k = 0; k < ZCX_GATE_SLOTS; k++)
            if (device->events[k]) s.d->EventDestroy(device->events[k]);
        zcx_scope_close(&s);
    }
    if (g->registered && zcx_gate_idle(g) && zcx_scope_open(&s, g->home, NULL) == 0) {
        if (s.d->MemHostUnregister(g->lines) == ZCU_SUCCESS) left = 0;
        zcx_scope_close(&s);
    }
    return left;
}

void zcx_gate_free(struct zcx_gate *g) {
    int left = 0;

    if (!g) return;
    if (g->owner == getpid()) {
        left = let_go(g);
        if (g->fd >= 0) close(g->fd);
        pthread_mutex_destroy(&g->lock);
    } /* else a fork: the driver is gone, the mutex may be held, and the descriptor's number may be somebody else's by now */
    /* A page that CUDA still knows stays mapped for the life of the process: 4 KiB lost, not a context. */
    if (!left) munmap(g->lines, ZCX_GATE_BYTES);
    for (int i = 0; i < ZCX_MAX_DEVICES; i++) free(g->devices[i]);
    free(g);
}
