/* wire.c: see wire.h. One encoder and one decoder per body, over a writer and a reader that remember the first thing that
 * went wrong, so that each body reads as its row in docs/protocol.md.
 *
 * Does not: know which body belongs to which type (the sender and the receiver do), nor whether ids, slots or codes mean
 * anything. */
#include "wire.h"

#include <string.h>

/* ---- integers ---- */

static void store16(unsigned char *p, uint16_t v) {
    p[0] = (unsigned char)v;
    p[1] = (unsigned char)(v >> 8);
}

static void store32(unsigned char *p, uint32_t v) {
    store16(p, (uint16_t)v);
    store16(p + 2, (uint16_t)(v >> 16));
}

static void store64(unsigned char *p, uint64_t v) {
    store32(p, (uint32_t)v);
    store32(p + 4, (uint32_t)(v >> 32));
}

static uint16_t load16(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t load32(const unsigned char *p) { return load16(p) | (uint32_t)load16(p + 2) << 16; }
static uint64_t load64(const unsigned char *p) { return load32(p) | (uint64_t)load32(p + 4) << 32; }

uint64_t zcx_wire_u64(const unsigned char *array, uint32_t i) { return load64(array + 8 * (size_t)i); }
void zcx_wire_put_u64(unsigned char *array, uint32_t i, uint64_t value) { store64(array + 8 * (size_t)i, value); }

static int all_zero(const unsigned char *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return 0;
    return 1;
}

/* ---- header ---- */

/* Descriptors that a type carries, beside that of its body. */
static const unsigned char fds_of_type[ZCX_TYPE_END] = {[ZCX_GATE] = 1, [ZCX_POOL] = 1, [ZCX_SEGMENT] = 1, [ZCX_SLAB] = 1};
/* Types that are a header and nothing else. */
static const unsigned char is_bare[ZCX_TYPE_END] = {[ZCX_STARTED] = 1, [ZCX_SEGMENT_DROP] = 1, [ZCX_CANCEL] = 1, [ZCX_PING] = 1,
                                                    [ZCX_PONG] = 1, [ZCX_BYE] = 1, [ZCX_HANDLE_DROP] = 1, [ZCX_SLAB_TAKEN] = 1,
                                                    [ZCX_SLAB_DROP] = 1};

void zcx_header_encode(const struct zcx_header *h, unsigned char out[ZCX_HEADER_BYTES]) {
    store32(out, ZCX_WIRE_MAGIC);
    store16(out + 4, h->type);
    store16(out + 6, h->flags);
    store32(out + 8, h->nfds);
    store32(out + 12, h->length);
    store64(out + 16, h->seq);
    store64(out + 24, h->id);
}

int zcx_header_decode(const unsigned char *bytes, size_t n, struct zcx_header *out, struct zcx_err *err) {
    struct zcx_header h;
    uint32_t fds;
    if (n < ZCX_HEADER_BYTES)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a packet of %zu bytes is shorter than a header", n);
    if (load32(bytes) != ZCX_WIRE_MAGIC)
        return zcx_fail(err, ZCX_E_PROTOCOL, "not a packet of this protocol (magic %08x)", (unsigned)load32(bytes));
    h.type = load16(bytes + 4);
    h.flags = load16(bytes + 6);
    h.nfds = load32(bytes + 8);
    h.length = load32(bytes + 12);
    h.seq = load64(bytes + 16);
    h.id = load64(bytes + 24);
    if (h.type == 0 || h.type >= ZCX_TYPE_END)
        return zcx_fail(err, ZCX_E_PROTOCOL, "unknown message type %u", (unsigned)h.type);
    if (h.flags & ~ZCX_FLAG_BODY_FD)
        return zcx_fail(err, ZCX_E_PROTOCOL, "unknown flags %#x", (unsigned)h.flags);
    fds = fds_of_type[h.type] + (h.flags & ZCX_FLAG_BODY_FD ? 1u : 0u);
    if (h.nfds != fds)
        return zcx_fail(err, ZCX_E_PROTOCOL, "type %u carries %u descriptors, its header says %u", (unsigned)h.type,
                        (unsigned)fds, (unsigned)h.nfds);
    if (h.length > ZCX_BODY_MAX)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a body of %u bytes is above the limit of %u", (unsigned)h.length, ZCX_BODY_MAX);
    if (h.flags & ZCX_FLAG_BODY_FD ? n != ZCX_HEADER_BYTES || h.length == 0 : n - ZCX_HEADER_BYTES != h.length)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a packet of %zu bytes cannot hold the body of %u that its header announces", n,
                        (unsigned)h.length);
    if (h.length && is_bare[h.type]) return zcx_fail(err, ZCX_E_PROTOCOL, "type %u has no body", (unsigned)h.type);
    *out = h;
    return 0;
}

/* ---- writer ---- */

struct writer {
    unsigned char *start, *at, *end;
    int code; /* ZCX_E_* of the first thing that went wrong */
};

static unsigned char *room(struct writer *w, size_t n) {
    unsigned char *p = w->at;
    if (w->code || (size_t)(w->end - w->at) < n) {
        if (!w->code) w->code = ZCX_E_LIMIT;
        return NULL;
    }
    w->at += n;
    return p;
}

static void put(struct writer *w, const void *bytes, size_t n) {
    unsigned char *p = room(w, n);
    if (p && n) memcpy(p, bytes, n);
}

static void put16(struct writer *w, uint16_t v) {
    unsigned char *p = room(w, 2);
    if (p) store16(p, v);
}

static void put32(struct writer *w, uint32_t v) {
    unsigned char *p = room(w, 4);
    if (p) store32(p, v);
}

static void put64(struct writer *w, uint64_t v) {
    unsigned char *p = room(w, 8);
    if (p) store64(p, v);
}

static void put_double(struct writer *w, double v) {
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    put64(w, bits);
}

static void put_text(struct writer *w, struct zcx_text t) {
    if (t.length > ZCX_STRING_MAX) {
        if (!w->code) w->code = ZCX_E_RANGE;
        return;
    }
    put16(w, (uint16_t)t.length);
    put(w, t.bytes, t.length);
}

static struct writer write_to(unsigned char *out, size_t cap) {
    return (struct writer){.start = out, .at = out, .end = out + cap};
}

static long written(const struct writer *w, struct zcx_err *err) {
    if (w->code == ZCX_E_LIMIT) return zcx_fail(err, ZCX_E_LIMIT, "the buffer for this message is too small");
    if (w->code) return zcx_fail(err, w->code, "a string or shape is longer than the protocol allows");
    return (long)(w->at - w->start);
}

/* ---- reader ---- */

struct reader {
    const unsigned char *at;
    size_t left;
    const char *what; /* the body's name, for errors */
    const char *bad;  /* the first thing that does not hold */
};

static const unsigned char *take(struct reader *r, uint64_t n) {
    const unsigned char *p = r->at;
    if (r->bad || n > r->left) {
        if (!r->bad) r->bad = "is cut short, or a count in it is too large";
        return NULL;
    }
    r->at += n;
    r->left -= (size_t)n;
    return p;
}

static uint16_t get16(struct reader *r) {
    const unsigned char *p = take(r, 2);
    return p ? load16(p) : 0;
}

static uint32_t get32(struct reader *r) {
    const unsigned char *p = take(r, 4);
    return p ? load32(p) : 0;
}

static uint64_t get64(struct reader *r) {
    const unsigned char *p = take(r, 8);
    return p ? load64(p) : 0;
}

static double get_double(struct reader *r) {
    uint64_t bits = get64(r);
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static void get_bytes(struct reader *r, void *out, size_t n) {
    const unsigned char *p = take(r, n);
    if (p) memcpy(out, p, n);
}

static struct zcx_text get_text(struct reader *r) {
    struct zcx_text t = {NULL, get16(r)};
    if (!r->bad && t.length > ZCX_STRING_MAX) r->bad = "holds a string above the limit";
    t.bytes = (const char *)take(r, t.length);
    return t;
}

static struct reader read_from(const unsigned char *body, size_t n, const char *what) {
    return (struct reader){.at = body, .left = n, .what = what};
}

static void require(struct reader *r, int holds, const char *otherwise) {
    if (!r->bad && !holds) r->bad = otherwise;
}

static int verdict(const struct reader *r, struct zcx_err *err) {
    if (r->bad) return zcx_fail(err, ZCX_E_PROTOCOL, "%s %s", r->what, r->bad);
    return 0;
}

/* For bodies of which nothing may be left. */
static int ended(struct reader *r, struct zcx_err *err) {
    require(r, r->left == 0, "has bytes after its end");
    return verdict(r, err);
}

/* ---- strings ---- */

struct zcx_text zcx_text_of(const char *s) {
    struct zcx_text t = {s, 0};
    if (!s) return t;
    t.length = (uint32_t)strnlen(s, ZCX_STRING_MAX + 1);
    if (t.length > ZCX_STRING_MAX)
        for (t.length = ZCX_STRING_MAX; t.length && ((unsigned char)s[t.length] & 0xC0) == 0x80;)
            t.length--; /* never between the bytes of one character */
    return t;
}

/* ---- fixed parts ---- */

void zcx_gate_ref_encode(const struct zcx_gate_ref *g, unsigned char *out) {
    memset(out, 0, ZCX_GATE_REF_BYTES);
    store16(out, g->pool);
    store32(out + 4, g->ready_slot);
    store32(out + 8, g->done_slot);
    store64(out + 16, g->ready);
    store64(out + 24, g->done);
}

int zcx_gate_ref_decode(const unsigned char in[ZCX_GATE_REF_BYTES], struct zcx_gate_ref *out, struct zcx_err *err) {
    if (!all_zero(in + 2, 2) || !all_zero(in + 12, 4))
        return zcx_fail(err, ZCX_E_PROTOCOL, "a gate has bytes set that must be zero");
    out->pool = load16(in);
    out->ready_slot = load32(in + 4);
    out->done_slot = load32(in + 8);
    out->ready = load64(in + 16);
    out->done = load64(in + 24);
    return 0;
}

void zcx_buffer_encode(const struct zcx_buffer *b, unsigned char *out) {
    memset(out, 0, ZCX_BUFFER_BYTES);
    store64(out, b->id);
    out[8] = b->rung;
    out[9] = b->flags;
    store16(out + 10, b->pool);
    store32(out + 12, b->window);
    store64(out + 16, b->nbytes);
    store64(out + 24, b->offset);
    store64(out + 32, b->alloc_bytes);
    store64(out + 40, b->key);
    memcpy(out + 48, b->blob, sizeof b->blob);
}

int zcx_buffer_decode(const unsigned char in[ZCX_BUFFER_BYTES], struct zcx_buffer *out, struct zcx_err *err) {
    struct zcx_buffer b;
    if (!all_zero(in + 112, 16))
        return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer has bytes set that must be zero");
    b.id = load64(in);
    b.rung = in[8];
    b.flags = in[9];
    b.pool = load16(in + 10);
    b.window = load32(in + 12);
    b.nbytes = load64(in + 16);
    b.offset = load64(in + 24);
    b.alloc_bytes = load64(in + 32);
    b.key = load64(in + 40);
    memcpy(b.blob, in + 48, sizeof b.blob);
    if (b.rung < ZCX_RUNG_POOL || b.rung > ZCX_RUNG_HOST)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer names the unknown rung %u", (unsigned)b.rung);
    if (b.flags > ZCX_BUFFER_PRIVATE)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer has unknown flags %#x", (unsigned)b.flags);
    if (b.window && b.rung != ZCX_RUNG_POOL) return zcx_fail(err, ZCX_E_PROTOCOL, "only a pool's buffer is imported in windows");
    if (b.nbytes > UINT64_MAX - b.offset)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer ends beyond any address");
    if ((b.rung == ZCX_RUNG_POOL || b.rung == ZCX_RUNG_VMM) && b.offset + b.nbytes > b.alloc_bytes)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a buffer ends beyond its allocation");
    *out = b;
    return 0;
}

void zcx_ring_ref_encode(const struct zcx_ring_ref *r, unsigned char blob[64]) {
    memset(blob, 0, 64);
    store16(blob, r->carrier);
    store32(blob + 4, r->filled_slot);
    store32(blob + 8, r->emptied_slot);
    store64(blob + 16, r->filled);
    store64(blob + 24, r->emptied);
}

int zcx_ring_ref_decode(const unsigned char blob[64], struct zcx_ring_ref *out, struct zcx_err *err) {
    if (!all_zero(blob + 2, 2) || !all_zero(blob + 12, 4) || !all_zero(blob + 32, 32))
        return zcx_fail(err, ZCX_E_PROTOCOL, "a ring has bytes set that must be zero");
    out->carrier = load16(blob);
    out->filled_slot = load32(blob + 4);
    out->emptied_slot = load32(blob + 8);
    out->filled = load64(blob + 16);
    out->emptied = load64(blob + 24);
    if (out->carrier != ZCX_CARRIER_SLAB && out->carrier != ZCX_CARRIER_SEGMENT)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a ring in an unknown carrier %u", (unsigned)out->carrier);
    return 0;
}

/* ---- bodies ---- */

long zcx_hello_encode(const struct zcx_hello *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put16(&w, m->protocol_min);
    put16(&w, m->protocol_max);
    put32(&w, m->pid);
    put64(&w, m->features);
    put_text(&w, m->version);
    put_text(&w, m->python);
    return written(&w, err);
}

/* The only body that may go on behind what is known: it is read before a version has been agreed on. */
int zcx_hello_decode(const unsigned char *body, size_t n, struct zcx_hello *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "HELLO");
    struct zcx_hello m;
    int rc;
    m.protocol_min = get16(&r);
    m.protocol_max = get16(&r);
    m.pid = get32(&r);
    m.features = get64(&r);
    m.version = get_text(&r);
    m.python = get_text(&r);
    require(&r, m.protocol_min >= 1 && m.protocol_min <= m.protocol_max, "offers an empty range of versions");
    if ((rc = verdict(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_gate_page_encode(const struct zcx_gate_page *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put32(&w, m->slots);
    put32(&w, m->stride);
    return written(&w, err);
}

int zcx_gate_page_decode(const unsigned char *body, size_t n, struct zcx_gate_page *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "GATE");
    struct zcx_gate_page m;
    int rc;
    m.slots = get32(&r);
    m.stride = get32(&r);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_pool_msg_encode(const struct zcx_pool_msg *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put16(&w, m->index);
    put(&w, m->uuid, sizeof m->uuid);
    return written(&w, err);
}

int zcx_pool_msg_decode(const unsigned char *body, size_t n, struct zcx_pool_msg *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "POOL");
    struct zcx_pool_msg m;
    int rc;
    m.index = get16(&r);
    get_bytes(&r, m.uuid, sizeof m.uuid);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_pool_reply_encode(const struct zcx_pool_reply *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put16(&w, m->index);
    put16(&w, m->refused);
    put_text(&w, m->reason);
    return written(&w, err);
}

int zcx_pool_reply_decode(const unsigned char *body, size_t n, struct zcx_pool_reply *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "POOL_REPLY");
    struct zcx_pool_reply m;
    int rc;
    m.index = get16(&r);
    m.refused = get16(&r);
    m.reason = get_text(&r);
    require(&r, m.refused <= ZCX_POOL_NO_DEVICE, "is neither yes nor no");
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_gate_event_encode(const struct zcx_gate_event *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put16(&w, m->pool);
    put32(&w, m->slot);
    put(&w, m->handle, sizeof m->handle);
    return written(&w, err);
}

int zcx_gate_event_decode(const unsigned char *body, size_t n, struct zcx_gate_event *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "GATE_EVENT");
    struct zcx_gate_event m;
    int rc;
    m.pool = get16(&r);
    m.slot = get32(&r);
    get_bytes(&r, m.handle, sizeof m.handle);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_prove_encode(const struct zcx_prove *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    unsigned char *p;
    put32(&w, m->step);
    put64(&w, m->seed);
    if ((p = room(&w, ZCX_GATE_REF_BYTES))) zcx_gate_ref_encode(&m->gate, p);
    if ((p = room(&w, ZCX_BUFFER_BYTES))) zcx_buffer_encode(&m->buffer, p);
    return written(&w, err);
}

int zcx_prove_decode(const unsigned char *body, size_t n, struct zcx_prove *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "PROVE");
    struct zcx_prove m;
    const unsigned char *gate, *buffer;
    int rc;
    m.step = get32(&r);
    m.seed = get64(&r);
    gate = take(&r, ZCX_GATE_REF_BYTES);
    buffer = take(&r, ZCX_BUFFER_BYTES);
    if ((rc = ended(&r, err)) || (rc = zcx_gate_ref_decode(gate, &m.gate, err)) || (rc = zcx_buffer_decode(buffer, &m.buffer, err)))
        return rc;
    *out = m;
    return 0;
}

long zcx_proved_encode(const struct zcx_proved *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put16(&w, m->pool);
    put16(&w, m->failed);
    put32(&w, m->step);
    put_text(&w, m->reason);
    return written(&w, err);
}

int zcx_proved_decode(const unsigned char *body, size_t n, struct zcx_proved *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "PROVED");
    struct zcx_proved m;
    int rc;
    m.pool = get16(&r);
    m.failed = get16(&r);
    m.step = get32(&r);
    m.reason = get_text(&r);
    require(&r, m.failed <= 1, "is neither yes nor no");
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_segment_encode(const struct zcx_segment *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put64(&w, m->size);
    put16(&w, m->kind);
    return written(&w, err);
}

int zcx_segment_decode(const unsigned char *body, size_t n, struct zcx_segment *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "SEGMENT");
    struct zcx_segment m;
    int rc;
    m.size = get64(&r);
    m.kind = get16(&r);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_slab_msg_encode(const struct zcx_slab_msg *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put16(&w, m->pool);
    put16(&w, m->flags);
    put32(&w, m->piece);
    put32(&w, m->npieces);
    put64(&w, m->piece_bytes);
    put64(&w, m->bytes);
    return written(&w, err);
}

int zcx_slab_msg_decode(const unsigned char *body, size_t n, struct zcx_slab_msg *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "SLAB");
    struct zcx_slab_msg m;
    int rc;
    m.pool = get16(&r);
    m.flags = get16(&r);
    m.piece = get32(&r);
    m.npieces = get32(&r);
    m.piece_bytes = get64(&r);
    m.bytes = get64(&r);
    require(&r, !(m.flags & ~(ZCX_SLAB_WRITABLE | ZCX_SLAB_STAYS | ZCX_SLAB_ANSWER)), "has unknown flags");
    require(&r, m.piece < m.npieces, "names a piece that is none");
    require(&r, m.piece_bytes && m.piece_bytes <= m.bytes, "has a piece larger than the whole, or empty");
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_call_msg_encode(const struct zcx_call_msg *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put32(&w, m->ngates);
    put32(&w, m->nbuffers);
    put(&w, m->gates, (size_t)m->ngates * ZCX_GATE_REF_BYTES);
    put(&w, m->buffers, (size_t)m->nbuffers * ZCX_BUFFER_BYTES);
    return written(&w, err);
}

int zcx_call_msg_decode(const unsigned char *body, size_t n, struct zcx_call_msg *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "CALL");
    struct zcx_call_msg m;
    int rc;
    m.ngates = get32(&r);
    m.nbuffers = get32(&r);
    m.gates = take(&r, (uint64_t)m.ngates * ZCX_GATE_REF_BYTES);
    m.buffers = take(&r, (uint64_t)m.nbuffers * ZCX_BUFFER_BYTES);
    m.tree = r.at;
    m.tree_bytes = r.left;
    if ((rc = verdict(&r, err))) return rc;
    *out = m;
    return 0;
}

int64_t zcx_alloc_dim(const struct zcx_alloc *a, unsigned i) { return (int64_t)zcx_wire_u64(a->shape, i); }

int zcx_alloc_bytes(const struct zcx_alloc *a, uint64_t *out, struct zcx_err *err) {
    uint64_t product = a->itemsize;
    int empty = 0;
    if (a->ndim > ZCX_NDIM_MAX)
        return zcx_fail(err, ZCX_E_PROTOCOL, "%u dimensions are above the limit of %d", (unsigned)a->ndim, ZCX_NDIM_MAX);
    if (a->itemsize < 1 || a->itemsize > 16)
        return zcx_fail(err, ZCX_E_PROTOCOL, "no element is %u bytes large", (unsigned)a->itemsize);
    for (unsigned i = 0; i < a->ndim; i++) {
        int64_t dim = zcx_alloc_dim(a, i);
        if (dim < 0) return zcx_fail(err, ZCX_E_PROTOCOL, "dimension %u is negative", i);
        if (dim == 0) {
            empty = 1; /* the others are still checked: their strides are computed from them */
            continue;
        }
        if (__builtin_mul_overflow(product, (uint64_t)dim, &product) || product > INT64_MAX)
            return zcx_fail(err, ZCX_E_PROTOCOL, "the shape is larger than any memory");
    }
    *out = empty ? 0 : product;
    return 0;
}

long zcx_alloc_encode(const struct zcx_alloc *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    if (m->ndim > ZCX_NDIM_MAX) w.code = ZCX_E_RANGE;
    put16(&w, m->place);
    put16(&w, m->ndim);
    put32(&w, m->itemsize);
    put(&w, m->uuid, sizeof m->uuid);
    put64(&w, m->nbytes);
    put_text(&w, m->dtype);
    put(&w, m->shape, (size_t)m->ndim * 8);
    return written(&w, err);
}

int zcx_alloc_decode(const unsigned char *body, size_t n, struct zcx_alloc *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "ALLOC");
    struct zcx_alloc m;
    uint64_t nbytes;
    int rc;
    m.place = get16(&r);
    m.ndim = get16(&r);
    m.itemsize = get32(&r);
    get_bytes(&r, m.uuid, sizeof m.uuid);
    m.nbytes = get64(&r);
    m.dtype = get_text(&r);
    m.shape = take(&r, (uint64_t)m.ndim * 8);
    require(&r, m.place <= 2, "names an unknown place");
    if ((rc = ended(&r, err)) || (rc = zcx_alloc_bytes(&m, &nbytes, err))) return rc;
    if (nbytes != m.nbytes) return zcx_fail(err, ZCX_E_PROTOCOL, "ALLOC asks for other bytes than its shape has");
    *out = m;
    return 0;
}

long zcx_allocated_encode(const struct zcx_allocated *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    unsigned char *p;
    put32(&w, m->has_gate);
    if ((p = room(&w, ZCX_GATE_REF_BYTES))) {
        memset(p, 0, ZCX_GATE_REF_BYTES);
        if (m->has_gate) zcx_gate_ref_encode(&m->gate, p);
    }
    if ((p = room(&w, ZCX_BUFFER_BYTES))) zcx_buffer_encode(&m->buffer, p);
    return written(&w, err);
}

int zcx_allocated_decode(const unsigned char *body, size_t n, struct zcx_allocated *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "ALLOCATED");
    struct zcx_allocated m;
    const unsigned char *gate, *buffer;
    int rc;
    m.has_gate = get32(&r);
    gate = take(&r, ZCX_GATE_REF_BYTES);
    buffer = take(&r, ZCX_BUFFER_BYTES);
    require(&r, m.has_gate <= 1, "neither has a gate nor has none");
    require(&r, m.has_gate || !gate || all_zero(gate, ZCX_GATE_REF_BYTES), "describes a gate that it does not have");
    if ((rc = ended(&r, err)) || (rc = zcx_gate_ref_decode(gate, &m.gate, err)) ||
        (rc = zcx_buffer_decode(buffer, &m.buffer, err)))
        return rc;
    *out = m;
    return 0;
}

long zcx_refused_encode(const struct zcx_refused *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put32(&w, m->code);
    put_text(&w, m->reason);
    return written(&w, err);
}

int zcx_refused_decode(const unsigned char *body, size_t n, struct zcx_refused *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "REFUSED");
    struct zcx_refused m;
    int rc;
    m.code = get32(&r);
    m.reason = get_text(&r);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_result_msg_encode(const struct zcx_result_msg *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put32(&w, m->nkept);
    put32(&w, m->code);
    put(&w, m->kept, (size_t)m->nkept * 8);
    return written(&w, err);
}

int zcx_result_msg_decode(const unsigned char *body, size_t n, struct zcx_result_msg *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "RESULT or ERROR");
    struct zcx_result_msg m;
    int rc;
    m.nkept = get32(&r);
    m.code = get32(&r);
    m.kept = take(&r, (uint64_t)m.nkept * 8);
    m.tree = r.at;
    m.tree_bytes = r.left;
    if ((rc = verdict(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_release_encode(const struct zcx_release *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put32(&w, m->count);
    put(&w, m->ids, (size_t)m->count * 8);
    return written(&w, err);
}

int zcx_release_decode(const unsigned char *body, size_t n, struct zcx_release *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "RELEASE");
    struct zcx_release m;
    int rc;
    m.count = get32(&r);
    m.ids = take(&r, (uint64_t)m.count * 8);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}

long zcx_progress_encode(const struct zcx_progress *m, unsigned char *out, size_t cap, struct zcx_err *err) {
    struct writer w = write_to(out, cap);
    put_double(&w, m->done);
    put_double(&w, m->total);
    put_text(&w, m->message);
    return written(&w, err);
}

int zcx_progress_decode(const unsigned char *body, size_t n, struct zcx_progress *out, struct zcx_err *err) {
    struct reader r = read_from(body, n, "PROGRESS");
    struct zcx_progress m;
    int rc;
    m.done = get_double(&r);
    m.total = get_double(&r);
    m.message = get_text(&r);
    if ((rc = ended(&r, err))) return rc;
    *out = m;
    return 0;
}
