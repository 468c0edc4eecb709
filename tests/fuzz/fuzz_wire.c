// sources: tests/fuzz/fuzz_main.c csrc/wire.c csrc/err.c
/* fuzz_wire.c: the decoders of wire.h. The first byte is a message type and the rest its body; type 0: the rest is a packet,
 * of which the header is read; type 255: it is the blob of a staged buffer.
 *
 * With clang: clang -g -fsanitize=fuzzer,address,undefined -Icsrc -Itests/fuzz tests/fuzz/fuzz_wire.c csrc/wire.c csrc/err.c */
#include "wire.h"

#include "fuzz.h"

int fuzz_accepted;

static volatile unsigned sink;

static void inside(const void *p, size_t n, const uint8_t *body, size_t size) {
    const uint8_t *at = p;
    HOLDS(at >= body && at <= body + size && n <= (size_t)(body + size - at));
    for (size_t i = 0; i < n; i++) sink += at[i];
}

static void text_inside(struct zcx_text t, const uint8_t *body, size_t size) { inside(t.bytes, t.length, body, size); }

static void hello(const struct zcx_hello *m, const uint8_t *body, size_t size) {
    text_inside(m->version, body, size);
    text_inside(m->python, body, size);
}

static void gate_page(const struct zcx_gate_page *m, const uint8_t *body, size_t size) { (void)m, (void)body, (void)size; }
static void pool_msg(const struct zcx_pool_msg *m, const uint8_t *body, size_t size) { (void)m, (void)body, (void)size; }
static void gate_event(const struct zcx_gate_event *m, const uint8_t *body, size_t size) { (void)m, (void)body, (void)size; }
static void segment(const struct zcx_segment *m, const uint8_t *body, size_t size) { (void)m, (void)body, (void)size; }

static void slab_msg(const struct zcx_slab_msg *m, const uint8_t *body, size_t size) {
    (void)body, (void)size;
    HOLDS(m->piece < m->npieces && m->piece_bytes <= m->bytes);
}

static void prove(const struct zcx_prove *m, const uint8_t *body, size_t size) {
    (void)body, (void)size;
    HOLDS(m->buffer.offset + m->buffer.nbytes >= m->buffer.offset && (!m->buffer.window || m->buffer.rung == ZCX_RUNG_POOL));
}

static void pool_reply(const struct zcx_pool_reply *m, const uint8_t *body, size_t size) { text_inside(m->reason, body, size); }
static void proved(const struct zcx_proved *m, const uint8_t *body, size_t size) { text_inside(m->reason, body, size); }
static void refused(const struct zcx_refused *m, const uint8_t *body, size_t size) { text_inside(m->reason, body, size); }
static void progress(const struct zcx_progress *m, const uint8_t *body, size_t size) { text_inside(m->message, body, size); }

static void call_msg(const struct zcx_call_msg *m, const uint8_t *body, size_t size) {
    unsigned char again[ZCX_BUFFER_BYTES];
    inside(m->gates, (size_t)m->ngates * ZCX_GATE_REF_BYTES, body, size);
    inside(m->buffers, (size_t)m->nbuffers * ZCX_BUFFER_BYTES, body, size);
    inside(m->tree, m->tree_bytes, body, size);
    HOLDS(m->tree + m->tree_bytes == body + size);
    for (uint32_t i = 0; i < m->ngates; i++) {
        const unsigned char *at = m->gates + (size_t)i * ZCX_GATE_REF_BYTES;
        struct zcx_gate_ref g;
        if (zcx_gate_ref_decode(at, &g, NULL)) continue;
        zcx_gate_ref_encode(&g, again);
        HOLDS(!memcmp(at, again, ZCX_GATE_REF_BYTES));
    }
    for (uint32_t i = 0; i < m->nbuffers; i++) {
        const unsigned char *at = m->buffers + (size_t)i * ZCX_BUFFER_BYTES;
        struct zcx_buffer b;
        if (zcx_buffer_decode(at, &b, NULL)) continue;
        HOLDS(b.offset + b.nbytes >= b.offset);
        zcx_buffer_encode(&b, again);
        HOLDS(!memcmp(at, again, ZCX_BUFFER_BYTES));
    }
}

static void alloc(const struct zcx_alloc *m, const uint8_t *body, size_t size) {
    uint64_t nbytes;
    text_inside(m->dtype, body, size);
    inside(m->shape, (size_t)m->ndim * 8, body, size);
    HOLDS(zcx_alloc_bytes(m, &nbytes, NULL) == 0 && nbytes == m->nbytes && nbytes <= INT64_MAX);
}

static void allocated(const struct zcx_allocated *m, const uint8_t *body, size_t size) {
    (void)body, (void)size;
    HOLDS(m->has_gate <= 1 && m->buffer.offset + m->buffer.nbytes >= m->buffer.offset);
}

static void result_msg(const struct zcx_result_msg *m, const uint8_t *body, size_t size) {
    inside(m->kept, (size_t)m->nkept * 8, body, size);
    inside(m->tree, m->tree_bytes, body, size);
    HOLDS(m->tree + m->tree_bytes == body + size);
}

static void release(const struct zcx_release *m, const uint8_t *body, size_t size) { inside(m->ids, (size_t)m->count * 8, body, size); }

/* Decode, look at every byte it points to, and encode again: the same bytes (`open`: the first of them). */
#define X(name, type)                                                                                       \
    static void try_##name(const uint8_t *body, size_t size, int open) {                                    \
        type m;                                                                                             \
        struct zcx_err err = {0};                                                                           \
        int rc = zcx_##name##_decode(body, size, &m, &err);                                                 \
        HOLDS(rc == 0 || (rc == -ZCX_E_PROTOCOL && err.code == ZCX_E_PROTOCOL && err.text[0]));             \
        if (rc) return;                                                                                     \
        fuzz_accepted = 1;                                                                                  \
        name(&m, body, size);                                                                               \
        unsigned char *again = malloc(size + 1);                                                            \
        long n = zcx_##name##_encode(&m, again, size, &err);                                                \
        HOLDS(n >= 0 && (open ? (size_t)n <= size : (size_t)n == size) && !memcmp(again, body, (size_t)n)); \
        free(again);                                                                                        \
    }
ZCX_WIRE_BODIES(X)
#undef X

static void try_header(const uint8_t *packet, size_t size) {
    struct zcx_header h;
    unsigned char again[ZCX_HEADER_BYTES];
    struct zcx_err err = {0};
    if (zcx_header_decode(packet, size, &h, &err)) {
        HOLDS(err.code == ZCX_E_PROTOCOL && err.text[0]);
        return;
    }
    fuzz_accepted = 1;
    HOLDS(h.nfds <= ZCX_FDS_MAX && h.length <= ZCX_BODY_MAX);
    HOLDS(h.flags & ZCX_FLAG_BODY_FD ? h.nfds > 0 && h.length > 0 : ZCX_HEADER_BYTES + h.length == size);
    zcx_header_encode(&h, again);
    HOLDS(!memcmp(again, packet, sizeof again));
}

static void try_ring(const uint8_t *blob, size_t size) {
    struct zcx_ring_ref r;
    unsigned char again[64];
    struct zcx_err err = {0};
    if (size != sizeof again) return;
    if (zcx_ring_ref_decode(blob, &r, &err)) {
        HOLDS(err.code == ZCX_E_PROTOCOL && err.text[0]);
        return;
    }
    fuzz_accepted = 1;
    zcx_ring_ref_encode(&r, again);
    HOLDS(!memcmp(again, blob, sizeof again));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_accepted = 0;
    if (size < 1) return 0;
    const uint8_t *body = data + 1;
    size_t n = size - 1;
    switch (data[0]) {
    case 0: try_header(body, n); break;
    case ZCX_HELLO: try_hello(body, n, 1); break;
    case ZCX_GATE: try_gate_page(body, n, 0); break;
    case ZCX_SLAB: try_slab_msg(body, n, 0); break;
    case ZCX_POOL: case ZCX_DEVICE: try_pool_msg(body, n, 0); break;
    case ZCX_POOL_REPLY: try_pool_reply(body, n, 0); break;
    case ZCX_GATE_EVENT: try_gate_event(body, n, 0); break;
    case ZCX_PROVE: try_prove(body, n, 0); break;
    case ZCX_PROVED: try_proved(body, n, 0); break;
    case ZCX_SEGMENT: try_segment(body, n, 0); break;
    case ZCX_CALL: try_call_msg(body, n, 1); break;
    case ZCX_ALLOC: try_alloc(body, n, 0); break;
    case ZCX_ALLOCATED: try_allocated(body, n, 0); break;
    case ZCX_REFUSED: case ZCX_IMPORT_REFUSED: try_refused(body, n, 0); break;
    case ZCX_RESULT: case ZCX_ERROR: try_result_msg(body, n, 1); break;
    case ZCX_RELEASE: try_release(body, n, 0); break;
    case ZCX_PROGRESS: try_progress(body, n, 0); break;
    case 255: try_ring(body, n); break;
    }
    return 0;
}
