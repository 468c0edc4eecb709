/* wire.h: every message of docs/protocol.md as a struct, and its bytes.
 *
 * All integers are little-endian. Encoding writes into the caller's buffer, decoding points into it: no I/O, no allocation,
 * no CUDA, no Python. Every count, length and offset that arrives is checked against the bytes that are there
 * (-ZCX_E_PROTOCOL); what a number *means* is checked by its user. Golden bytes: tests/c/test_wire.c. */
#ifndef ZCX_WIRE_H
#define ZCX_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"

#define ZCX_WIRE_MAGIC 0x3158435Au /* "ZCX1" */
#define ZCX_PROTOCOL_MIN 1
#define ZCX_PROTOCOL_MAX 1
#define ZCX_HEADER_BYTES 32u
#define ZCX_PACKET_MAX 65536u            /* header and body; above, the body travels in a sealed memfd */
#define ZCX_BODY_MAX (32u << 20)         /* of any message, packet or memfd */
#define ZCX_FDS_MAX 4u                   /* per packet */
#define ZCX_BUFFER_BYTES 128u
#define ZCX_GATE_REF_BYTES 32u
#define ZCX_STRING_MAX 4096u

enum zcx_type {
    ZCX_HELLO = 1,        /* both ways, once */
    ZCX_GATE = 2,         /* parent → worker, 1 fd: the page of counters */
    ZCX_POOL = 3,         /* parent → worker, 1 fd: a device and its pool */
    ZCX_POOL_REPLY = 4,   /* worker → parent */
    ZCX_STARTED = 5,      /* worker → parent: the target is imported (else ERROR with seq 0) */
    ZCX_SEGMENT = 6,      /* parent → worker, 1 fd: host memory, before the first message that names it */
    ZCX_SEGMENT_DROP = 7, /* parent → worker */
    ZCX_CALL = 8,
    ZCX_ALLOC = 9,        /* worker → parent: shape first */
    ZCX_ALLOCATED = 10,
    ZCX_REFUSED = 11,     /* parent → worker: answer to ALLOC */
    ZCX_RESULT = 12,
    ZCX_ERROR = 13,
    ZCX_IMPORT_REFUSED = 14, /* worker → parent, body as REFUSED: the call was not run; plan this buffer on another rung */
    ZCX_RELEASE = 15,     /* worker → parent: kept buffers that are kept no more */
    ZCX_PROGRESS = 16,
    ZCX_CANCEL = 17,      /* parent → worker, on the control socket */
    ZCX_PING = 18,
    ZCX_PONG = 19,
    ZCX_BYE = 20,
    ZCX_HANDLE_DROP = 21, /* both ways: the holder of a handle dropped it; id: the handle */
    ZCX_GATE_EVENT = 22,  /* parent → worker, event fallback only: a slot's interprocess event, before the slot is named */
    ZCX_PROVE = 23,       /* parent → worker: a start-up check on a pool (csrc/canary.h); also while a call runs */
    ZCX_PROVED = 24,      /* worker → parent: what it saw */
    ZCX_DEVICE = 25,      /* parent → worker: a device without a pool, body as POOL; the answer is POOL_REPLY */
    ZCX_SLAB = 26,        /* parent → worker, 1 fd: a piece of a slab of device memory, before the first message that names the slab */
    ZCX_SLAB_TAKEN = 27,  /* worker → parent: that piece's descriptor is closed (where it was asked for: ZCX_SLAB_ANSWER) */
    ZCX_SLAB_DROP = 28,   /* parent → worker: no message will name it again */
    ZCX_TYPE_END = 29,
};

enum { ZCX_FLAG_BODY_FD = 1 }; /* the body is in the packet's last fd, a sealed memfd */

struct zcx_header {
    uint16_t type, flags;
    uint32_t nfds;
    uint32_t length; /* of the body */
    uint64_t seq;    /* of the call; 0: the session's */
    uint64_t id;     /* transfer, segment or request, by type */
};
void zcx_header_encode(const struct zcx_header *h, unsigned char out[ZCX_HEADER_BYTES]);
/* `n`: the size of the whole packet. Checks magic, type, known flags, the number of descriptors that this type carries, and
 * that the length is that of what follows the header (with BODY_FD: that nothing follows). */
int zcx_header_decode(const unsigned char *bytes, size_t n, struct zcx_header *out, struct zcx_err *err);

/* A string on the wire: u16 length, bytes (UTF-8, not checked here). Decoded ones point into the body, without a NUL. */
struct zcx_text { const char *bytes; uint32_t length; };
struct zcx_text zcx_text_of(const char *s); /* cut at ZCX_STRING_MAX */

struct zcx_hello {
    uint16_t protocol_min, protocol_max;
    uint32_t pid;
    uint64_t features;        /* ZCX_FEATURE_* */
    struct zcx_text version;  /* of the package */
    struct zcx_text python;   /* "3.12.3" */
};
enum { ZCX_FEATURE_HOST = 1, ZCX_FEATURE_POOL = 2, ZCX_FEATURE_VMM = 4, ZCX_FEATURE_RING = 8 };
#define ZCX_FEATURES (ZCX_FEATURE_HOST | ZCX_FEATURE_POOL | ZCX_FEATURE_VMM | ZCX_FEATURE_RING) /* of this version */

struct zcx_gate_page { uint32_t slots, stride; };
struct zcx_pool_msg { uint16_t index; unsigned char uuid[16]; };
struct zcx_pool_reply { uint16_t index, refused; struct zcx_text reason; };
enum {
    ZCX_POOL_REFUSED = 1,   /* the device is open there, its pool is not */
    ZCX_POOL_UNSEEN = 2,    /* that GPU is not visible there: no rung leads to it */
    ZCX_POOL_NO_DEVICE = 3, /* it is, and cannot be opened */
};
struct zcx_gate_event { uint16_t pool; uint32_t slot; unsigned char handle[64]; };
struct zcx_segment { uint64_t size; uint16_t kind; };
struct zcx_slab_msg {
    uint16_t pool, flags;     /* the device; ZCX_SLAB_* */
    uint32_t piece, npieces;  /* pieces come in order, and lie side by side */
    uint64_t piece_bytes, bytes;
};
enum {
    ZCX_SLAB_WRITABLE = 1,
    ZCX_SLAB_STAYS = 2,       /* stays mapped until SLAB_DROP; else until the last buffer in it is unmapped */
    ZCX_SLAB_ANSWER = 4,      /* say SLAB_TAKEN: the credit, so that not too many descriptors are under way */
};

/* One device's gate for one call. */
struct zcx_gate_ref {
    uint16_t pool;
    uint32_t ready_slot, done_slot;
    uint64_t ready, done;     /* the values to await and to post */
};

enum zcx_rung { ZCX_RUNG_POOL = 1, ZCX_RUNG_IPC = 2, ZCX_RUNG_VMM = 3, ZCX_RUNG_EAGER = 4, ZCX_RUNG_STAGED = 5, ZCX_RUNG_HOST = 6 };

/* A buffer lent. */
struct zcx_buffer {
    uint64_t id;              /* transfer id: never used twice in a session */
    uint8_t rung;
    uint8_t flags;            /* ZCX_BUFFER_* */
    uint16_t pool;            /* index of POOL; 0 on host */
    uint64_t nbytes;          /* lent, from `offset` on */
    uint64_t offset;          /* from the start of the allocation (pool), slab (vmm, and the window of staged) or segment (host) */
    uint32_t window;          /* pool: chunks per window of the import; 0: imported whole */
    uint64_t alloc_bytes;     /* of the whole allocation (pool) or slab (vmm); 0 on host and staged */
    uint64_t key;             /* buffer id (pool), slab id (vmm), segment id (host); staged: of the slab or segment that carries */
    unsigned char blob[64];   /* pool: the exported pointer; staged: a zcx_ring_ref */
};
enum {
    ZCX_BUFFER_RESULT = 1,
    ZCX_BUFFER_PRIVATE = 2, /* an input that is a copy, made for this call: the worker may write to it, and the parent does not look */
};

/* A buffer that crosses piece by piece through a window (csrc/ring.h): the receiver's memory is its own. */
struct zcx_ring_ref {
    uint16_t carrier;         /* ZCX_CARRIER_*: what the buffer's key names, the window lies in it at the buffer's offset */
    uint32_t filled_slot, emptied_slot;
    uint64_t filled, emptied; /* values of the first piece */
};
enum { ZCX_CARRIER_SLAB = 1, ZCX_CARRIER_SEGMENT = 2 };
void zcx_ring_ref_encode(const struct zcx_ring_ref *r, unsigned char blob[64]);
int zcx_ring_ref_decode(const unsigned char blob[64], struct zcx_ring_ref *out, struct zcx_err *err);

struct zcx_alloc {
    uint16_t place;           /* 0 host, 1 device, 2 device, of which the worker has the bytes in memory of its own: they may cross staged */
    uint16_t ndim;
    uint32_t itemsize;        /* bytes, 1..16 */
    unsigned char uuid[16];   /* of the device */
    uint64_t nbytes;          /* must be the product of shape and itemsize */
    struct zcx_text dtype;    /* "float32" */
    const unsigned char *shape; /* ndim × i64, little-endian, not aligned */
};
#define ZCX_NDIM_MAX 64
/* shape[i], of a decoded one */
int64_t zcx_alloc_dim(const struct zcx_alloc *a, unsigned i);
/* The product, with every overflow and negative dimension refused (-ZCX_E_PROTOCOL). */
int zcx_alloc_bytes(const struct zcx_alloc *a, uint64_t *out, struct zcx_err *err);

enum zcx_refusal { ZCX_REFUSED_TOO_LARGE = 1, ZCX_REFUSED_MEMORY = 2, ZCX_REFUSED_RUNG = 3 /* take your own memory, then host */ };
struct zcx_refused { uint32_t code; struct zcx_text reason; };

enum zcx_failure {
    ZCX_FAILED_EXCEPTION = 1, ZCX_FAILED_CANCELLED = 2, ZCX_FAILED_MEMORY = 3, ZCX_FAILED_STARTUP = 4,
    ZCX_FAILED_GPU = 5 /* its context is poisoned: the worker exits */, ZCX_FAILED_MODIFIED = 6, ZCX_FAILED_TOO_LARGE = 7,
};

/* CALL, RESULT and ERROR end in a tree (docs/protocol.md, csrc/codec.h), which runs to the end of the body. */
struct zcx_call_msg {
    uint32_t ngates, nbuffers;
    const unsigned char *gates, *buffers; /* encoded, back to back */
    const unsigned char *tree; size_t tree_bytes;
};
struct zcx_result_msg {
    uint32_t nkept, code;     /* code: enum zcx_failure in ERROR, 0 in RESULT */
    const unsigned char *kept; /* nkept × u64 */
    const unsigned char *tree; size_t tree_bytes;
};
struct zcx_allocated { uint32_t has_gate; struct zcx_gate_ref gate; struct zcx_buffer buffer; };
struct zcx_prove { uint32_t step; uint64_t seed; struct zcx_gate_ref gate; struct zcx_buffer buffer; };
struct zcx_proved { uint16_t pool, failed; uint32_t step; struct zcx_text reason; };
struct zcx_release { uint32_t count; const unsigned char *ids; };
struct zcx_progress { double done, total; struct zcx_text message; };
uint64_t zcx_wire_u64(const unsigned char *array, uint32_t i); /* element of an encoded u64 array */
void zcx_wire_put_u64(unsigned char *array, uint32_t i, uint64_t value);

/* Fixed parts. */
void zcx_gate_ref_encode(const struct zcx_gate_ref *g, unsigned char *out); /* ZCX_GATE_REF_BYTES */
int zcx_gate_ref_decode(const unsigned char in[ZCX_GATE_REF_BYTES], struct zcx_gate_ref *out, struct zcx_err *err);
void zcx_buffer_encode(const struct zcx_buffer *b, unsigned char *out);     /* ZCX_BUFFER_BYTES */
int zcx_buffer_decode(const unsigned char in[ZCX_BUFFER_BYTES], struct zcx_buffer *out, struct zcx_err *err); /* rung, flags, offset + nbytes overflow */

/* Bodies: encode returns the bytes written, or -ZCX_E_LIMIT when `cap` is too small (as a long). CALL, RESULT and ERROR
 * encode only what stands before the tree; the sender passes the tree as a second piece. */
#define ZCX_WIRE_BODIES(X)                                                                     \
    X(hello, struct zcx_hello) X(gate_page, struct zcx_gate_page) X(pool_msg, struct zcx_pool_msg) \
    X(pool_reply, struct zcx_pool_reply) X(gate_event, struct zcx_gate_event) X(segment, struct zcx_segment) X(slab_msg, struct zcx_slab_msg) X(call_msg, struct zcx_call_msg) \
    X(alloc, struct zcx_alloc) X(allocated, struct zcx_allocated) X(refused, struct zcx_refused) \
    X(result_msg, struct zcx_result_msg) X(prove, struct zcx_prove) X(proved, struct zcx_proved) X(release, struct zcx_release) X(progress, struct zcx_progress)
#define X(name, type)                                                                          \
    long zcx_##name##_encode(const type *m, unsigned char *out, size_t cap, struct zcx_err *err); \
    int zcx_##name##_decode(const unsigned char *body, size_t n, type *out, struct zcx_err *err);
ZCX_WIRE_BODIES(X)
#undef X

#endif
