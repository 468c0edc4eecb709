/* codec.h: data trees as bytes: the tokens, without any Python object.
 *
 * One node is a tag byte and what follows it; a container says how many nodes follow. Integers are little-endian.
 *   N None   T True   F False   i i64   I u32 n, n bytes: two's complement of any length   f f64   c f64 f64
 *   s u32 n, UTF-8 (lone surrogates kept as "surrogatepass" writes them)   b u32 n, bytes
 *   l u32 n, n nodes: list   t tuple   S set   Z frozenset   d u32 n, 2n nodes: key, value
 *   x u8 n, tag, 1 node: a registered type, or one of the package's own (docs/protocol.md lists them)
 *   v a view of a buffer that the message lends, see struct zcx_view   r u32 k: the k-th v of this tree again, the same object
 * Writing grows one buffer up to a limit; reading points into the bytes and checks every length and count against what is
 * left, so that no count can ask for more than the message's own size. Depth is the walkers' to bound: ZCX_TREE_DEPTH.
 * Does not: recurse, do I/O, know Python. Fuzzed by tests/fuzz. */
#ifndef ZCX_CODEC_H
#define ZCX_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "wire.h"

#define ZCX_TREE_DEPTH 200

enum zcx_lib { ZCX_LIB_TORCH = 1, ZCX_LIB_NUMPY = 2, ZCX_LIB_ARRAY = 3 /* our own, where neither is there */ };

struct zcx_view {
    uint64_t id;              /* of the buffer */
    uint64_t offset;          /* bytes from the first byte lent to the element at index 0, 0, … */
    uint8_t lib, ndim;        /* ndim ≤ ZCX_NDIM_MAX */
    uint16_t flags;           /* ZCX_VIEW_* */
    const char *dtype; uint8_t dtype_length;   /* "float32"; not NUL-terminated when read */
    int64_t shape[ZCX_NDIM_MAX];
    int64_t strides[ZCX_NDIM_MAX];             /* bytes, may be 0 or negative */
};
enum { ZCX_VIEW_CONJ = 1, ZCX_VIEW_NEG = 2, ZCX_VIEW_PARAMETER = 4 };

struct zcx_out { unsigned char *data; size_t length, capacity, limit; }; /* zero it, set limit; free with zcx_out_free */
void zcx_out_free(struct zcx_out *o);
/* 0, -ENOMEM, or -ZCX_E_LIMIT past the limit. */
int zcx_out_tag(struct zcx_out *o, char tag);                         /* N T F */
int zcx_out_int(struct zcx_out *o, int64_t v);
int zcx_out_bigint(struct zcx_out *o, const void *bytes, uint32_t n);
int zcx_out_float(struct zcx_out *o, double v);
int zcx_out_complex(struct zcx_out *o, double re, double im);
int zcx_out_bytes(struct zcx_out *o, char tag, const void *bytes, size_t n); /* s b */
int zcx_out_container(struct zcx_out *o, char tag, size_t n);         /* l t S Z d */
int zcx_out_extension(struct zcx_out *o, const char *tag, size_t n);
int zcx_out_view(struct zcx_out *o, const struct zcx_view *v);
int zcx_out_again(struct zcx_out *o, uint32_t k);

/* `pending` starts at 0: nodes that the containers opened so far still wait for. It is never above the bytes left, so what a
 * walker allocates by the counts of all open containers together is bounded by the message too; at 0 the tree is complete. */
struct zcx_in { const unsigned char *at, *end; uint64_t pending; };
struct zcx_token {
    char tag;
    int64_t i;                /* i */
    double f, g;              /* f, c */
    const unsigned char *bytes; uint32_t length; /* I s b x */
    uint32_t count;           /* l t S Z d: nodes that follow are count, or 2 × count for d; r: the index */
    struct zcx_view view;     /* v */
};
/* The next token; of `out` only what its tag names is set. -ZCX_E_PROTOCOL (nothing consumed): truncated, unknown tag, a count
 * larger than what is left can hold, negative shape. */
int zcx_in_next(struct zcx_in *in, struct zcx_token *out, struct zcx_err *err);

/* Does every byte that the view can touch lie in [0, nbytes)? Overflow-safe; a view without elements always does. */
int zcx_view_fits(const struct zcx_view *v, uint64_t itemsize, uint64_t nbytes);

#endif
