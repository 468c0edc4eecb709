// sources: tests/fuzz/fuzz_main.c csrc/[!m]*.c
// flags: -DZCX_RING_SLOT_BYTES=65536ull
/* fuzz_session.c: one end of a session (xfer.h) against a peer that the input scripts. The first byte says which end is ours; what
 * follows are steps, one byte each with the bytes that it wants: calls of our side, as its caller makes them, and packets of the
 * peer's: any type, with fields, descriptors and damage from the input.
 *
 * Held to: no step waits (each deadline has passed already), every owner comes back exactly once, and not while its call runs,
 * nor from a broken session before the peer is gone; live results keep their bytes and share none; and at the end no
 * descriptor and no mapping is left.
 * Accepted is an input in which no side was told of a broken protocol and at least one call ended well.
 *
 * With ZCX_LIBCUDA pointing at the simulated driver the parent lends device memory too, and the peer lies in the gate's page. The
 * worker's end stays on host memory: it leaves what the driver holds to the end of its process.
 *
 * With clang: tests/fuzz/run.py. */
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#include "xfer.h"

int fuzz_accepted;

#define OWNERS 128
#define IMPORTS 32
#define RANGES 32
#define STEPS_MAX 400          /* of one input */
#define QUEUED_MAX 48          /* packets of the peer's that our side has not read yet: no answer finds a full socket */
#define SOURCE_BYTES (256u << 10)
#define DEVICE_BYTES (1u << 20)
#define FOREIGN_BYTES 65536u
#define FIXED (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* ---- what the whole process has ---- */

static unsigned char source[SOURCE_BYTES];
static struct zcx_shm *foreign;         /* a result file of "another worker" */
static uint64_t foreign_at;
static struct zcx_pool *pool;           /* NULL: no driver */
static zcu_ptr device_memory;           /* of the pool */
static struct zcx_arena *arena;
static struct zcx_block *arena_memory;
static volatile unsigned sink;

static void start_once(void) {
    static int started;
    if (started) return;
    started = 1;
    HOLDS(zcx_shm_result_new(&foreign, 1 << 20, NULL) == 0 && zcx_shm_range_take(foreign, FOREIGN_BYTES, &foreign_at, NULL) == 0);
    for (size_t i = 0; i < sizeof source; i++) source[i] = (unsigned char)(i * 7);
    if (!getenv("ZCX_LIBCUDA")) return;
    HOLDS(zcx_pool_new(&pool, 0, NULL) == 0 && zcx_pool_alloc(pool, DEVICE_BYTES, NULL, &device_memory, NULL) == 0);
    HOLDS(zcx_arena_new(&arena, 0, NULL) == 0 && zcx_arena_take(arena, DEVICE_BYTES, ZCX_ARENA_READ, &arena_memory, NULL) == 0);
}

static int count_fds(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    HOLDS(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

/* Of shared memory: ours, or a segment of the peer's. */
static int count_mappings(void) {
    static char maps[1 << 20];
    size_t n = 0;
    ssize_t got;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), count = 0;
    HOLDS(fd >= 0);
    while ((got = read(fd, maps + n, sizeof maps - 1 - n)) > 0) n += (size_t)got;
    close(fd);
    maps[n] = 0;
    for (const char *at = maps; (at = strstr(at, "/memfd:zcx-")); at++) count++;
    return count;
}

static void look_at(const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) sink += ((const unsigned char *)p)[i];
}
static void look_at_text(struct zcx_text t) { look_at(t.bytes, t.length); }

/* ---- the input ---- */

struct script {
    const uint8_t *at, *end;
    unsigned steps;
    int protocol_broken, calls_ended;
};

static uint8_t byte(struct script *s) { return s->at < s->end ? *s->at++ : 0; }

static int more(struct script *s) { return s->at < s->end && s->steps++ < STEPS_MAX; }

/* A size or an id: mostly small, sometimes one that arithmetic stumbles over. */
static uint64_t number(struct script *s) {
    static const uint64_t odd[] = {0xffff,     0x10000,   1ull << 31, 0xffffffff,        1ull << 32,
                                   1ull << 52, INT64_MAX, 1ull << 63, UINT64_MAX - 4095, UINT64_MAX};
    uint8_t b = byte(s);
    if (b < 128) return b;
    if (b < 224) return (uint64_t)(b - 127) * 4096;
    return odd[(b - 224) % (sizeof odd / sizeof *odd)];
}

static uint64_t bounded(struct script *s, uint64_t most) {
    uint64_t n = number(s);
    return n < most ? n : most;
}

static struct zcx_err why;

static struct zcx_err *fresh(void) {
    memset(&why, 0, sizeof why);
    return &why;
}

/* What one of ours returned, told of in fresh(). */
static int judged(struct script *s, int r) {
    HOLDS(r >= 0 || (why.code == -r && why.file));
    if (r == -ZCX_E_PROTOCOL) s->protocol_broken = 1;
    return r;
}

/* ---- packets of the peer ---- */

struct peer {
    int fd;                     /* -1: closed */
    int queued;                 /* packets since our side was last seen to have read everything */
    unsigned char last[ZCX_PACKET_MAX];
    size_t nlast;
    uint64_t seq, request;      /* what it knows of the session */
    _Atomic uint64_t *page;     /* parent's gate page, once it came */
    uint32_t done_slot;
    uint64_t done, done_seq;
};

/* A descriptor as good or as bad as the input wants it. */
static int descriptor(unsigned kind, uint64_t size) {
    static const int seals[] = {0, FIXED, FIXED | F_SEAL_FUTURE_WRITE, FIXED | F_SEAL_WRITE};
    int ends[2], fd;
    switch (kind % 8) {
    case 0: case 1: case 2: case 3:
        fd = memfd_create("zcx-fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        HOLDS(fd >= 0 && ftruncate(fd, (off_t)size) == 0 && fcntl(fd, F_ADD_SEALS, seals[kind % 4]) == 0);
        return fd;
    case 4: { /* one that may only be read, as another worker's results are */
        char path[64];
        fd = descriptor(1, size);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        int readonly = open(path, O_RDONLY | O_CLOEXEC);
        close(fd);
        HOLDS(readonly >= 0);
        return readonly;
    }
    case 5: return open("/dev/null", O_RDWR | O_CLOEXEC);
    case 6:
        HOLDS(pipe2(ends, O_CLOEXEC) == 0);
        close(ends[1]);
        return ends[0];
    default: return eventfd(0, EFD_CLOEXEC);
    }
}

static void post_packet(struct peer *p, const unsigned char *bytes, size_t n, const int *fds, unsigned nfds) {
    union {
        struct cmsghdr header;
        unsigned char bytes[CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
    if (p->fd < 0 || p->queued >= QUEUED_MAX) return;
    if (nfds) {
        memset(&control, 0, sizeof control);
        mh.msg_control = &control;
        mh.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(nfds * sizeof(int));
        memcpy(CMSG_DATA(&control.header), fds, nfds * sizeof(int));
    }
    if (sendmsg(p->fd, &mh, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) p->queued++;
}

/* A message that is right in itself and whole. */
static void post(struct peer *p, enum zcx_type type, uint64_t seq, uint64_t id, const void *body, size_t n, int fd) {
    struct zcx_header h = {.type = (uint16_t)type, .nfds = fd >= 0, .length = (uint32_t)n, .seq = seq, .id = id};
    unsigned char packet[1024];
    HOLDS(ZCX_HEADER_BYTES + n <= sizeof packet);
    zcx_header_encode(&h, packet);
    if (n) memcpy(packet + ZCX_HEADER_BYTES, body, n);
    post_packet(p, packet, ZCX_HEADER_BYTES + n, &fd, fd >= 0);
}

static struct zcx_text text(struct script *s) {
    struct zcx_text t = {(const char *)s->at, byte(s) % 32};
    t.bytes = (const char *)s->at;
    if (t.length > (size_t)(s->end - s->at)) t.length = (uint32_t)(s->end - s->at);
    s->at += t.length;
    return t;
}

static struct zcx_gate_ref gate_ref(struct script *s) {
    struct zcx_gate_ref g = {.pool = byte(s) % 4, .ready_slot = byte(s), .done_slot = byte(s)};
    g.ready = number(s);
    g.done = number(s);
    return g;
}

static struct zcx_buffer buffer(struct script *s) {
    uint8_t kind = byte(s);
    struct zcx_buffer b = {.rung = kind < 200 ? ZCX_RUNG_HOST : kind % 8, .flags = kind & 1};
    b.id = number(s);
    if (kind >= 200) b.pool = byte(s);
    b.key = number(s);
    b.offset = number(s);
    b.nbytes = number(s);
    if (b.rung == ZCX_RUNG_POOL) b.window = byte(s);
    if (b.rung != ZCX_RUNG_HOST) b.alloc_bytes = number(s);
    if (b.rung == ZCX_RUNG_STAGED) {
        struct zcx_ring_ref ref = {.carrier = byte(s)};
        ref.filled_slot = byte(s);
        ref.emptied_slot = byte(s);
        ref.filled = ref.emptied = number(s);
        zcx_ring_ref_encode(&ref, b.blob);
    }
    return b;
}

/* A body of this type from the input's fields; its length, or a negative code when it cannot be encoded. */
static long body_of(struct script *s, enum zcx_type type, unsigned char *out, size_t cap, uint64_t *size) {
    unsigned char array[64 * 8];
    uint32_t n;
    switch (type) {
    case ZCX_HELLO: {
        struct zcx_hello m = {.protocol_min = byte(s), .protocol_max = byte(s)};
        m.features = byte(s);
        m.version = text(s);
        m.python = text(s);
        return zcx_hello_encode(&m, out, cap, NULL);
    }
    case ZCX_GATE: {
        struct zcx_gate_page m = {ZCX_GATE_SLOTS + byte(s), ZCX_GATE_STRIDE};
        *size = ZCX_GATE_BYTES;
        return zcx_gate_page_encode(&m, out, cap, NULL);
    }
    case ZCX_GATE_EVENT: {
        struct zcx_gate_event m = {.pool = byte(s), .slot = byte(s)};
        return zcx_gate_event_encode(&m, out, cap, NULL);
    }
    case ZCX_SLAB: {
        struct zcx_slab_msg m = {.pool = byte(s), .flags = byte(s) % 8};
        m.piece = byte(s);
        m.npieces = byte(s);
        m.piece_bytes = number(s);
        m.bytes = number(s);
        return zcx_slab_msg_encode(&m, out, cap, NULL);
    }
    case ZCX_POOL: case ZCX_DEVICE: {
        struct zcx_pool_msg m = {.index = byte(s)};
        return zcx_pool_msg_encode(&m, out, cap, NULL);
    }
    case ZCX_POOL_REPLY: {
        struct zcx_pool_reply m = {.index = byte(s), .refused = byte(s)};
        m.reason = text(s);
        return zcx_pool_reply_encode(&m, out, cap, NULL);
    }
    case ZCX_SEGMENT: {
        struct zcx_segment m = {.kind = byte(s)};
        m.size = number(s);
        *size = m.size < (1 << 20) ? m.size : 4096;
        return zcx_segment_encode(&m, out, cap, NULL);
    }
    case ZCX_CALL: {
        unsigned char gates[4 * ZCX_GATE_REF_BYTES], buffers[8 * ZCX_BUFFER_BYTES];
        struct zcx_call_msg m = {.ngates = byte(s) % 4, .nbuffers = byte(s) % 8, .gates = gates, .buffers = buffers};
        for (uint32_t i = 0; i < m.ngates; i++) {
            struct zcx_gate_ref g = gate_ref(s);
            zcx_gate_ref_encode(&g, gates + i * ZCX_GATE_REF_BYTES);
        }
        for (uint32_t i = 0; i < m.nbuffers; i++) {
            struct zcx_buffer b = buffer(s);
            zcx_buffer_encode(&b, buffers + i * ZCX_BUFFER_BYTES);
        }
        return zcx_call_msg_encode(&m, out, cap, NULL);
    }
    case ZCX_ALLOC: {
        struct zcx_alloc m = {.dtype = zcx_text_of("float32"), .shape = array};
        m.place = byte(s);
        m.ndim = byte(s) % 8;
        m.itemsize = 1 + byte(s) % 16;
        for (unsigned i = 0; i < m.ndim; i++) zcx_wire_put_u64(array, i, number(s));
        uint64_t lie = number(s);
        m.nbytes = lie ? lie : m.itemsize; /* else the true product, where there is one */
        for (unsigned i = 0; !lie && i < m.ndim; i++) m.nbytes *= (uint64_t)zcx_alloc_dim(&m, i);
        return zcx_alloc_encode(&m, out, cap, NULL);
    }
    case ZCX_ALLOCATED: {
        struct zcx_allocated m = {.has_gate = byte(s) & 1};
        if (m.has_gate) m.gate = gate_ref(s);
        m.buffer = buffer(s);
        return zcx_allocated_encode(&m, out, cap, NULL);
    }
    case ZCX_REFUSED: case ZCX_IMPORT_REFUSED: {
        struct zcx_refused m = {.code = byte(s)};
        m.reason = text(s);
        return zcx_refused_encode(&m, out, cap, NULL);
    }
    case ZCX_RESULT: case ZCX_ERROR: {
        struct zcx_result_msg m = {.nkept = byte(s) % 64, .code = byte(s), .kept = array};
        for (uint32_t i = 0; i < m.nkept; i++) zcx_wire_put_u64(array, i, number(s));
        long fixed = zcx_result_msg_encode(&m, out, cap, NULL);
        struct zcx_text tree = text(s);
        if (fixed < 0 || tree.length > cap - (size_t)fixed) return -ZCX_E_LIMIT;
        memcpy(out + fixed, tree.bytes, tree.length);
        return fixed + (long)tree.length;
    }
    case ZCX_RELEASE: {
        struct zcx_release m = {.count = byte(s) % 64, .ids = array};
        for (uint32_t i = 0; i < m.count; i++) zcx_wire_put_u64(array, i, number(s));
        return zcx_release_encode(&m, out, cap, NULL);
    }
    case ZCX_PROGRESS: {
        struct zcx_progress m = {byte(s), byte(s), {0}};
        m.message = text(s);
        return zcx_progress_encode(&m, out, cap, NULL);
    }
    case ZCX_PROVE: {
        struct zcx_prove m = {.step = byte(s), .seed = 1};
        m.gate = gate_ref(s);
        m.buffer = buffer(s);
        return zcx_prove_encode(&m, out, cap, NULL);
    }
    case ZCX_PROVED: {
        struct zcx_proved m = {.pool = byte(s), .failed = byte(s), .step = byte(s)};
        m.reason = text(s);
        return zcx_proved_encode(&m, out, cap, NULL);
    }
    default:
        n = byte(s) % 64;
        for (uint32_t i = 0; i < n; i++) out[i] = byte(s);
        return n;
    }
}

/* One packet of the script: type, seq, id, descriptors, body, damage. */
static void post_scripted(struct script *s, struct peer *p) {
    enum zcx_type type = byte(s) % (ZCX_TYPE_END + 1);
    uint8_t seq = byte(s), damage;
    struct zcx_header h = {.type = (uint16_t)type};
    unsigned char *packet = p->last, blob[64];
    int fds[8];
    unsigned nfds, kind;
    uint64_t size = 4096;
    h.seq = seq == 0 ? p->seq : seq == 1 ? p->seq + 1 : seq == 2 ? p->seq - 1 : seq == 3 ? 0 : seq == 4 ? UINT64_MAX : seq;
    h.id = number(s);
    nfds = byte(s);
    kind = nfds >> 3;
    nfds &= 7;
    long n = body_of(s, type, packet + ZCX_HEADER_BYTES, 4096, &size);
    if (n < 0) n = 0;
    damage = byte(s);
    h.length = (uint32_t)n;
    h.nfds = nfds;
    for (unsigned i = 0; i < nfds; i++) HOLDS((fds[i] = descriptor(kind, size)) >= 0);
    p->nlast = ZCX_HEADER_BYTES + (size_t)n;
    switch (damage % 16) {
    case 1: /* cut, and says so */
        if (n) h.length = (uint32_t)--n;
        p->nlast = ZCX_HEADER_BYTES + (size_t)n;
        break;
    case 2: p->nlast -= p->nlast > damage ? damage : p->nlast; break; /* cut, and does not */
    case 3: p->nlast++; break;
    case 4: h.length = (uint32_t)number(s); break;
    case 5: h.nfds = byte(s); break;
    case 6: h.flags = byte(s); break;
    case 7: case 8: /* the body in a memfd, sealed or not */
        if (nfds < 7 && n) {
            int fd = fds[nfds++] = descriptor(damage % 16 == 7 ? 0 : damage >> 4, 0);
            ssize_t written = write(fd, packet + ZCX_HEADER_BYTES, (size_t)n < sizeof blob ? (size_t)n : sizeof blob);
            if (damage % 16 == 7 && damage >> 4 != 1) fcntl(fd, F_ADD_SEALS, FIXED | F_SEAL_WRITE);
            h.flags = ZCX_FLAG_BODY_FD;
            h.nfds = nfds;
            h.length = written > 0 ? (uint32_t)written : 1;
            p->nlast = ZCX_HEADER_BYTES;
        }
        break;
    case 9: { /* more than one packet may hold */
        p->nlast = ZCX_PACKET_MAX;
        break;
    }
    }
    zcx_header_encode(&h, packet);
    if (damage % 16 == 10) packet[byte(s) % ZCX_HEADER_BYTES] ^= 1 + byte(s);
    post_packet(p, packet, p->nlast, fds, nfds);
    for (unsigned i = 0; i < nfds; i++) close(fds[i]);
}

static void post_again(struct peer *p, unsigned times) {
    for (unsigned i = 0; i < times && p->nlast; i++) post_packet(p, p->last, p->nlast, NULL, 0);
}

/* Read what our side said; learn what a worker would learn from it. */
static void hear(struct peer *p) {
    union {
        struct cmsghdr header;
        unsigned char bytes[CMSG_SPACE(8 * sizeof(int))];
    } control;
    static unsigned char packet[ZCX_PACKET_MAX];
    if (p->fd < 0) return;
    for (;;) {
        struct iovec iov = {packet, sizeof packet};
        struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(p->fd, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        struct zcx_header h;
        struct zcx_call_msg call;
        struct zcx_allocated allocated;
        struct zcx_prove prove;
        struct zcx_gate_ref g = {0};
        if (n <= 0) return;
        HOLDS(zcx_header_decode(packet, (size_t)n, &h, NULL) == 0);
        const unsigned char *body = packet + ZCX_HEADER_BYTES;
        struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
        for (size_t i = 0; c && i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (h.type == ZCX_GATE && !p->page) {
                p->page = mmap(NULL, ZCX_GATE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
                HOLDS(p->page != MAP_FAILED);
            }
            close(fd);
        }
        if (h.flags & ZCX_FLAG_BODY_FD) continue;
        if (h.type == ZCX_CALL && zcx_call_msg_decode(body, h.length, &call, NULL) == 0 && call.ngates) HOLDS(zcx_gate_ref_decode(call.gates, &g, NULL) == 0);
        if (h.type == ZCX_ALLOCATED && zcx_allocated_decode(body, h.length, &allocated, NULL) == 0) g = allocated.gate;
        if (h.type == ZCX_PROVE && zcx_prove_decode(body, h.length, &prove, NULL) == 0) g = prove.gate;
        if (!g.done) continue;
        p->done_slot = g.done_slot;
        p->done = g.done;
        p->done_seq = h.seq;
    }
}

static void close_peer(struct peer *p) {
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
}

static void end_peer(struct peer *p) {
    close_peer(p);
    if (p->page) munmap(p->page, ZCX_GATE_BYTES);
}

/* ---- the parent's end ---- */

struct owner { int taken, released; uint64_t seq; };

struct parent {
    struct script *s;
    struct peer peer;
    struct zcx_parent *p;
    struct zcx_files *files;
    int control, pidfd, gone, watched;
    uint64_t seq, request;
    unsigned proofs;
    struct owner owners[OWNERS];
    unsigned nowners;
    struct { struct zcx_range *range; unsigned char pattern; } ranges[RANGES];
};

static void drain(struct parent *t) {
    enum zcx_session_state state = zcx_parent_state(t->p);
    for (struct owner *o; (o = zcx_parent_released(t->p));) {
        HOLDS(o >= t->owners && o < t->owners + t->nowners && o->taken && !o->released);
        HOLDS(!t->watched || t->gone);
        HOLDS(t->gone || state < ZCX_PREPARING || state == ZCX_BROKEN || o->seq < t->seq);
        o->released = 1;
    }
    if (state == ZCX_BROKEN) t->watched = 1;
}

/* NULL: all are used up. */
static struct owner *new_owner(struct parent *t) {
    if (t->nowners == OWNERS) return NULL;
    struct owner *o = &t->owners[t->nowners++];
    o->seq = t->seq;
    return o;
}

static size_t shown(const struct zcx_range *r) {
    uint64_t n = zcx_range_bytes(r);
    return n < 4096 ? (size_t)n : 4096;
}

static void drop_range(struct parent *t, unsigned i) {
    struct zcx_range *r = t->ranges[i].range;
    if (!r) return;
    for (size_t k = 0; k < shown(r); k++) HOLDS(zcx_range_address(r)[k] == t->ranges[i].pattern);
    zcx_range_unref(r);
    t->ranges[i].range = NULL;
}

static void keep_range(struct parent *t, struct zcx_range *r, unsigned i) {
    const unsigned char *at = zcx_range_address(r);
    unsigned char pattern = (unsigned char)(i + 1);
    drop_range(t, i);
    for (unsigned k = 0; k < RANGES; k++) {
        struct zcx_range *other = t->ranges[k].range;
        if (other == r) pattern = t->ranges[k].pattern;
        else if (other)
            HOLDS(at + zcx_range_bytes(r) <= zcx_range_address(other) || zcx_range_address(other) + zcx_range_bytes(other) <= at);
    }
    memset(zcx_range_address(r), pattern, shown(r));
    t->ranges[i].range = r;
    t->ranges[i].pattern = pattern;
}

static void take_event(struct parent *t, const struct zcx_event *ev) {
    look_at_text(ev->text);
    look_at(ev->tree, ev->tree_bytes);
    if (ev->kind == ZCX_EV_STARTED) t->peer.seq = 0;
    if (ev->kind == ZCX_EV_PROGRESS) look_at_text(ev->progress.message);
    if (ev->kind == ZCX_EV_RESULT || ev->kind == ZCX_EV_ERROR) t->s->calls_ended++;
    if (ev->kind == ZCX_EV_ALLOC) {
        look_at_text(ev->alloc.dtype);
        look_at(ev->alloc.shape, (size_t)ev->alloc.ndim * 8);
        t->request = ev->request;
    }
}

static int step(struct parent *t, int64_t deadline) {
    struct zcx_event ev;
    int r = judged(t->s, zcx_parent_step(t->p, deadline, &ev, fresh()));
    if (r == 0) take_event(t, &ev);
    return r;
}

/* Until nothing is left to receive. */
static void pump(struct parent *t, int listening) {
    struct pollfd f = {.fd = zcx_parent_fd(t->p), .events = POLLIN};
    for (unsigned i = 0; i < 2 * QUEUED_MAX && poll(&f, 1, 0) == 1 && step(t, 0) >= 0; i++)
        if (listening) hear(&t->peer);
    if (zcx_parent_state(t->p) == ZCX_RETURNING) step(t, 0); /* a counter, perhaps, which no descriptor announces */
    t->peer.queued = 0;
}

static void end_call(struct parent *t) {
    enum zcx_session_state state = zcx_parent_state(t->p);
    drain(t);
    if (state == ZCX_CALLING || state == ZCX_RETURNING) t->watched = 1; /* given up half way */
    zcx_parent_end(t->p);
    drain(t);
}

static void lend_copies(struct parent *t) {
    struct zcx_source sources[4];
    unsigned n = byte(t->s) % 5;
    for (unsigned i = 0; i < n; i++) sources[i] = (struct zcx_source){.address = source, .nbytes = bounded(t->s, SOURCE_BYTES)};
    judged(t->s, zcx_parent_lend_copies(t->p, sources, n, fresh()));
}

static void lend_shared(struct parent *t) {
    const unsigned char *address = zcx_shm_base(foreign) + foreign_at;
    uint64_t size = FOREIGN_BYTES, id;
    uint8_t which = byte(t->s);
    struct owner *o = new_owner(t);
    if (!o) return;
    if (which < RANGES && t->ranges[which].range) {
        address = zcx_range_address(t->ranges[which].range);
        size = zcx_range_bytes(t->ranges[which].range);
    } else if (which >= 250) {
        address = source; /* in no result file */
    }
    uint64_t offset = bounded(t->s, size), nbytes = bounded(t->s, size - offset);
    int r = judged(t->s, zcx_parent_lend_shared(t->p, address + offset, nbytes, o, &id, fresh()));
    HOLDS(r <= 0 || which >= 250 || which < RANGES);
    o->taken = r == 0;
}

/* By each rung, right or not: memory of the pool, of an arena, of nobody. */
static void lend_device(struct parent *t) {
    uint8_t how = byte(t->s);
    uint64_t offset = number(t->s), nbytes = number(t->s), id;
    struct owner *o = pool ? new_owner(t) : NULL;
    if (!o) return;
    zcu_ptr memory = how & 1 ? zcx_block_address(arena_memory) : device_memory;
    struct zcx_ring_part parts[2] = {{memory, nbytes / 2}, {0, nbytes - nbytes / 2}};
    int r;
    if (how & 4) r = zcx_parent_lend_ring(t->p, how >> 4 & 1, parts, 2, nbytes, NULL, NULL, o, &id, fresh());
    else r = zcx_parent_lend_device(t->p, how >> 4 & 1, how & 2 ? ZCX_RUNG_VMM : ZCX_RUNG_POOL, memory + offset, nbytes, how >> 3 & 1, NULL, o, &id, fresh());
    o->taken = judged(t->s, r) == 0;
}

static void offer(struct parent *t) {
    unsigned index;
    int accepted;
    uint8_t how = byte(t->s);
    if (pool) judged(t->s, zcx_parent_offer(t->p, how >> 1, how & 1 ? NULL : pool, &index, &accepted, fresh()));
}

static void prove(struct parent *t) {
    uint8_t how = byte(t->s);
    if (pool && t->proofs++ == 0) /* it moves much memory */
        judged(t->s, zcx_parent_prove(t->p, 0, how >> 1, how & 1 ? arena : NULL, fresh()));
}

static void answer(struct parent *t) {
    uint8_t how = byte(t->s);
    uint64_t request = how & 1 ? t->request : number(t->s);
    if (how & 2) {
        struct owner *o = new_owner(t);
        uint64_t nbytes = number(t->s);
        unsigned device = how >> 4 & 1;
        zcu_ptr memory = !pool ? 0 : how & 8 ? zcx_block_address(arena_memory) : device_memory;
        int r;
        if (!o) return;
        if (how & 4) r = zcx_parent_allocated_ring(t->p, request, device, memory, nbytes, NULL, o, fresh());
        else r = zcx_parent_allocated(t->p, request, device, how & 8 ? ZCX_RUNG_VMM : ZCX_RUNG_POOL, memory, nbytes, NULL, o, fresh());
        o->taken = judged(t->s, r) == 0;
    } else {
        judged(t->s, zcx_parent_refuse(t->p, request, ZCX_REFUSED_TOO_LARGE, "the script says no", fresh()));
    }
}

static void look_up(struct parent *t) {
    uint8_t into = byte(t->s) % RANGES;
    uint64_t id = number(t->s);
    struct zcx_lent lent;
    struct zcx_range *range;
    if (zcx_parent_lent(t->p, id, &lent) == 0 && lent.address) look_at(lent.address, lent.nbytes < 64 ? lent.nbytes : 64);
    if (zcx_parent_take(t->p, id, &range) == 0) keep_range(t, range, into);
}

static void look_over(struct parent *t) {
    struct zcx_parent_stats stats;
    zcx_parent_stats(t->p, &stats);
    HOLDS(stats.kept + stats.quarantined <= stats.transfers && stats.calls == t->seq);
    zcx_parent_reclaim(t->p);
    zcx_parent_rest(t->p);
}

/* 0: this session is over. */
static int parent_op(struct parent *t) {
    struct script *s = t->s;
    uint64_t seq;
    uint8_t op = byte(s) % 32;
    if (op >= 5 && op <= 22 && op != 14) hear(&t->peer); /* what is sent outside a step waits for room, for a while */
    switch (op) {
    case 0: step(t, 0); break;
    case 1: step(t, zcx_now() + 100000); break;
    case 2: case 3: pump(t, 1); break;
    case 4: pump(t, 0); break;
    case 5:
        if (judged(s, zcx_parent_begin(t->p, bounded(s, 1 << 20), &seq, fresh())) == 0) t->peer.seq = t->seq = seq;
        break;
    case 6: lend_copies(t); break;
    case 7: lend_shared(t); break;
    case 8: case 9: {
        struct zcx_text tree = text(s);
        judged(s, zcx_parent_send(t->p, tree.bytes, tree.length, 0, fresh()));
        break;
    }
    case 10: look_up(t); break;
    case 11: case 12: end_call(t); break;
    case 13: judged(s, zcx_parent_cancel(t->p, number(s), fresh())); break;
    case 14: judged(s, zcx_parent_drop_handle(t->p, number(s), fresh())); break;
    case 15: answer(t); break;
    case 16: look_over(t); break;
    case 17: drop_range(t, byte(s) % RANGES); break;
    case 18: drain(t); break;
    case 19: hear(&t->peer); break;
    case 20: offer(t); break;
    case 21: lend_device(t); break;
    case 22: prove(t); break;
    case 23: /* the peer says DONE, or not, in the page; in the slot of a call that is over it could only hold the page back */
        if (t->peer.page && t->peer.done_seq == t->seq)
            atomic_store(&t->peer.page[t->peer.done_slot % ZCX_GATE_SLOTS * (ZCX_GATE_STRIDE / 8)], t->peer.done + number(s));
        break;
    case 24: post_again(&t->peer, byte(s)); break;
    case 25:
        switch (byte(s) % 8) {
        case 0: close_peer(&t->peer); break;
        case 1: HOLDS(eventfd_write(t->pidfd, 1) == 0); break;
        case 2: zcx_parent_shutdown(t->p); break;
        case 3: judged(s, zcx_parent_bye(t->p, fresh())); break;
        case 4:
            zcx_parent_gone(t->p);
            t->gone = 1;
            break;
        case 5: return 0;
        }
        break;
    default: post_scripted(s, &t->peer); break;
    }
    return 1;
}

static void parent_session(struct parent *t) {
    int pair[2], controls[2];
    HOLDS(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    HOLDS(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, controls) == 0);
    t->pidfd = eventfd(0, EFD_CLOEXEC);
    HOLDS(t->pidfd >= 0 && zcx_parent_new(&t->p, t->files, pair[0], controls[0], t->pidfd, NULL) == 0);
    memset(&t->peer, 0, sizeof t->peer);
    memset(t->owners, 0, sizeof t->owners);
    t->peer.fd = pair[1];
    t->control = controls[1];
    t->gone = t->watched = 0;
    t->nowners = 0;
    t->seq = t->request = 0;
    HOLDS(zcx_parent_hello(t->p, "1", "3", NULL) == 0);
    while (more(t->s) && parent_op(t)) {}
    end_call(t);
    zcx_parent_gone(t->p);
    t->gone = 1;
    /* READY, and copies of ours, are on their way. */
    for (int64_t end = zcx_now() + 10000000000; !zcx_parent_idle(t->p);) HOLDS(zcx_now() < end);
    drain(t);
    for (unsigned i = 0; i < t->nowners; i++) HOLDS(t->owners[i].taken == t->owners[i].released);
    zcx_parent_free(t->p);
    end_peer(&t->peer);
    close(t->control);
    close(t->pidfd);
}

static void fuzz_parent(struct script *s) {
    static struct parent t;
    t.s = s;
    t.proofs = 0;
    t.files = zcx_files_new();
    HOLDS(t.files && zcx_files_add(t.files, foreign, NULL) == 0);
    parent_session(&t);
    for (unsigned i = 0; i < 2 && more(s); i++) parent_session(&t); /* results of one session are lent in the next */
    for (unsigned i = 0; i < RANGES; i++) drop_range(&t, i);
    zcx_files_free(t.files);
}

/* ---- the worker's end ---- */

struct worker {
    struct script *s;
    struct peer peer;
    struct zcx_worker *w;
    int over, in_call;
    uint64_t requests;
    struct zcx_import *imports[IMPORTS];
    unsigned nimports;
};

static void hold_import(struct worker *t, struct zcx_import *i) {
    struct zcx_import_info info;
    zcx_import_info(i, &info);
    HOLDS(info.ordinal == -1 && info.address);
    if (info.nbytes) { /* every page answers: nothing was pulled away */
        look_at(info.address, 1);
        look_at((unsigned char *)info.address + info.nbytes - 1, 1);
    }
    if (t->nimports < IMPORTS) t->imports[t->nimports++] = i;
    else zcx_import_drop(i);
}

static void run_call(struct worker *t, const struct zcx_work *work) {
    look_at(work->tree, work->tree_bytes);
    t->in_call = 1;
    if (judged(t->s, zcx_worker_begin(t->w, NULL, NULL, fresh()))) t->over = 1;
    for (uint32_t i = 0; i < work->nbuffers && !t->over; i++) {
        struct zcx_buffer b;
        struct zcx_import *import;
        int r = judged(t->s, zcx_buffer_decode(work->buffers + (size_t)i * ZCX_BUFFER_BYTES, &b, fresh()));
        if (!r && b.rung == ZCX_RUNG_STAGED) {
            judged(t->s, zcx_worker_transfer(t->w, &b, 0, NULL, fresh()));
            continue;
        }
        if (!r) r = judged(t->s, zcx_worker_map(t->w, &b, &import, fresh()));
        if (!r) hold_import(t, import);
    }
}

/* Its wait has no deadline: something that ends it is behind whatever the script sent. */
static void next(struct worker *t) {
    struct zcx_work work;
    if (t->over || t->in_call) return;
    t->peer.queued = 0;
    post(&t->peer, ZCX_HANDLE_DROP, 0, 0, NULL, 0, -1);
    if (!t->peer.queued) close_peer(&t->peer);
    for (int done = 0; !done && !t->over;) {
        int r = judged(t->s, zcx_worker_next(t->w, &work, fresh()));
        if (r < 0) t->over = 1;
        if (r) break;
        switch (work.kind) {
        case ZCX_WORK_HELLO:
            look_at_text(work.hello.version);
            look_at_text(work.hello.python);
            r = judged(t->s, zcx_worker_hello(t->w, &work.hello, "1", "3", fresh()));
            if (!r) r = judged(t->s, zcx_worker_started(t->w, fresh()));
            t->over = r < 0;
            break;
        case ZCX_WORK_CALL:
            run_call(t, &work);
            done = 1; /* the mark is still to come: the next look finds it */
            break;
        case ZCX_WORK_BYE: t->over = 1; break;
        case ZCX_WORK_HANDLE_DROP: done = !work.handle; break;
        }
        hear(&t->peer);
    }
    t->peer.queued = 0;
}

/* The same for an answer: whatever the script sent as one, a refusal comes last. */
static void ask(struct worker *t) {
    unsigned char shape[8], body[64];
    struct zcx_alloc a = {.ndim = 1, .itemsize = 1, .dtype = zcx_text_of("uint8"), .shape = shape, .nbytes = number(t->s)};
    struct zcx_refused no = {.code = ZCX_REFUSED_MEMORY, .reason = zcx_text_of("no")};
    struct zcx_import *import;
    struct zcx_buffer staged;
    uint64_t request = 0;
    uint32_t code;
    a.place = (uint16_t)(byte(t->s) % 3);
    if (t->over) return;
    zcx_wire_put_u64(shape, 0, a.nbytes);
    if (t->in_call) t->requests++;
    t->peer.queued = 0;
    post(&t->peer, ZCX_REFUSED, t->peer.seq, t->requests, body, (size_t)zcx_refused_encode(&no, body, sizeof body, NULL), -1);
    if (!t->peer.queued) close_peer(&t->peer);
    int r = judged(t->s, zcx_worker_alloc(t->w, &a, &request, NULL, NULL, &import, &staged, &code, fresh()));
    HOLDS(r <= 1);
    if (t->in_call && !request) t->requests--; /* not asked: it could not be encoded */
    if (r == 0 && import) hold_import(t, import);
    if (r == 0 && !import) r = judged(t->s, zcx_worker_transfer(t->w, &staged, 0, NULL, fresh()));
    if (r < 0 && r != -ZCX_E_RANGE && r != -ZCX_E_UNFIT) t->over = 1;
    hear(&t->peer);
    t->peer.queued = 0;
}

static void finish(struct worker *t) {
    static const enum zcx_type types[] = {ZCX_RESULT, ZCX_ERROR, ZCX_IMPORT_REFUSED};
    uint8_t type = byte(t->s) % 3;
    struct zcx_text tree = text(t->s);
    if (!t->in_call || t->over) return;
    t->in_call = 0;
    HOLDS(zcx_worker_alive(t->w) <= IMPORTS);
    int r = judged(t->s, zcx_worker_finish(t->w, types[type], type == 1, number(t->s), tree.bytes, tree.length, fresh()));
    if (r < 0) t->over = 1;
    else t->s->calls_ended++;
    hear(&t->peer);
}

static void drop_import(struct worker *t, unsigned i) {
    if (i >= t->nimports) return;
    zcx_import_drop(t->imports[i]);
    t->imports[i] = t->imports[--t->nimports];
}

static void worker_op(struct worker *t) {
    struct script *s = t->s;
    struct zcx_import_info info;
    uint8_t i;
    switch (byte(s) % 16) {
    case 0: case 1: next(t); break;
    case 2: ask(t); break;
    case 3: case 4: finish(t); break;
    case 5: drop_import(t, byte(s)); break;
    case 6:
        i = byte(s);
        if (i >= t->nimports) break;
        zcx_import_info(t->imports[i], &info);
        if (!info.nbytes) break;
        ((unsigned char *)info.address)[info.nbytes - 1] ^= 1; /* private or the parent's own lie: it must not fault */
        zcx_import_edited(t->imports[i]);
        break;
    case 7:
        judged(s, zcx_worker_progress(t->w, 1, byte(s), "on", 2, fresh()));
        hear(&t->peer);
        break;
    case 8:
        if (!t->over) judged(s, zcx_worker_drop_handle(t->w, number(s), fresh()));
        hear(&t->peer);
        break;
    case 9: t->peer.seq++; break;
    case 10: post_again(&t->peer, byte(s)); break;
    case 11:
        if (byte(s) % 4 == 0) close_peer(&t->peer);
        break;
    default: post_scripted(s, &t->peer); break;
    }
}

static void fuzz_worker(struct script *s) {
    static struct worker t;
    int pair[2];
    memset(&t, 0, sizeof t);
    HOLDS(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    HOLDS(zcx_worker_new(&t.w, pair[0], NULL) == 0);
    t.s = s;
    t.peer.fd = pair[1];
    while (more(s)) worker_op(&t);
    zcx_worker_free(t.w);
    end_peer(&t.peer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct script s = {.at = data, .end = data + size};
    start_once();
    int fds = count_fds(), mappings = count_mappings();
    if (byte(&s) & 1) fuzz_worker(&s);
    else fuzz_parent(&s);
    HOLDS(count_fds() == fds && count_mappings() == mappings);
    fuzz_accepted = s.calls_ended && !s.protocol_broken;
    return 0;
}
