/* codec.c: see codec.h. */
#include "codec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define VIEW_FIXED 21u /* id, offset, lib, ndim, flags, length of the dtype */
#define VIEW_FLAGS (ZCX_VIEW_CONJ | ZCX_VIEW_NEG | ZCX_VIEW_PARAMETER)

static void store(unsigned char *p, uint64_t v, unsigned n) {
    for (unsigned i = 0; i < n; i++) p[i] = (unsigned char)(v >> (8 * i));
}

static uint64_t load(const unsigned char *p, unsigned n) {
    uint64_t v = 0;
    for (unsigned i = 0; i < n; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static uint64_t bits_of(double v) {
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits) {
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* ---- writing ---- */

void zcx_out_free(struct zcx_out *o) {
    free(o->data);
    memset(o, 0, sizeof *o);
}

/* Room for a tag and n bytes behind it; *at points at the n bytes. Nothing is counted as written on failure. */
static int begin(struct zcx_out *o, char tag, uint64_t n, unsigned char **at) {
    if (o->limit - o->length < 1 || n > o->limit - o->length - 1) return -ZCX_E_LIMIT;
    size_t need = o->length + 1 + (size_t)n;
    if (need > o->capacity) {
        size_t capacity = o->capacity > o->limit / 2 ? o->limit : o->capacity * 2;
        if (capacity < 256) capacity = 256;
        if (capacity < need) capacity = need;
        unsigned char *data = realloc(o->data, capacity);
        if (!data) return -ENOMEM;
        o->data = data;
        o->capacity = capacity;
    }
    o->data[o->length] = (unsigned char)tag;
    *at = o->data + o->length + 1;
    o->length = need;
    return 0;
}

int zcx_out_tag(struct zcx_out *o, char tag) {
    unsigned char *p;
    if (tag != 'N' && tag != 'T' && tag != 'F') return -ZCX_E_RANGE;
    return begin(o, tag, 0, &p);
}

int zcx_out_int(struct zcx_out *o, int64_t v) {
    unsigned char *p;
    int rc = begin(o, 'i', 8, &p);
    if (!rc) store(p, (uint64_t)v, 8);
    return rc;
}

int zcx_out_float(struct zcx_out *o, double v) {
    unsigned char *p;
    int rc = begin(o, 'f', 8, &p);
    if (!rc) store(p, bits_of(v), 8);
    return rc;
}

int zcx_out_complex(struct zcx_out *o, double re, double im) {
    unsigned char *p;
    int rc = begin(o, 'c', 16, &p);
    if (rc) return rc;
    store(p, bits_of(re), 8);
    store(p + 8, bits_of(im), 8);
    return 0;
}

static int out_counted(struct zcx_out *o, char tag, const void *bytes, size_t n) {
    unsigned char *p;
    int rc;
    if (n > UINT32_MAX) return -ZCX_E_LIMIT;
    if ((rc = begin(o, tag, 4 + (uint64_t)n, &p))) return rc;
    store(p, n, 4);
    if (n) memcpy(p + 4, bytes, n);
    return 0;
}

int zcx_out_bigint(struct zcx_out *o, const void *bytes, uint32_t n) {
    return n ? out_counted(o, 'I', bytes, n) : -ZCX_E_RANGE; /* without a byte there is no sign */
}

int zcx_out_bytes(struct zcx_out *o, char tag, const void *bytes, size_t n) {
    return tag == 's' || tag == 'b' ? out_counted(o, tag, bytes, n) : -ZCX_E_RANGE;
}

int zcx_out_container(struct zcx_out *o, char tag, size_t n) {
    unsigned char *p;
    int rc;
    if (!tag || !strchr("ltSZd", tag)) return -ZCX_E_RANGE;
    if (n > UINT32_MAX) return -ZCX_E_LIMIT;
    if ((rc = begin(o, tag, 4, &p))) return rc;
    store(p, n, 4);
    return 0;
}

int zcx_out_extension(struct zcx_out *o, const char *tag, size_t n) {
    unsigned char *p;
    int rc;
    if (n < 1 || n > UINT8_MAX) return -ZCX_E_RANGE;
    if ((rc = begin(o, 'x', 1 + n, &p))) return rc;
    p[0] = (unsigned char)n;
    memcpy(p + 1, tag, n);
    return 0;
}

int zcx_out_view(struct zcx_out *o, const struct zcx_view *v) {
    unsigned char *p;
    int rc;
    if (v->ndim > ZCX_NDIM_MAX || v->dtype_length < 1 || v->lib < ZCX_LIB_TORCH || v->lib > ZCX_LIB_ARRAY ||
        v->flags & ~VIEW_FLAGS)
        return -ZCX_E_RANGE;
    for (unsigned i = 0; i < v->ndim; i++)
        if (v->shape[i] < 0) return -ZCX_E_RANGE;
    if ((rc = begin(o, 'v', VIEW_FIXED + v->dtype_length + 16u * v->ndim, &p))) return rc;
    store(p, v->id, 8);
    store(p + 8, v->offset, 8);
    p[16] = v->lib;
    p[17] = v->ndim;
    store(p + 18, v->flags, 2);
    p[20] = v->dtype_length;
    memcpy(p + VIEW_FIXED, v->dtype, v->dtype_length);
    p += VIEW_FIXED + v->dtype_length;
    for (unsigned i = 0; i < v->ndim; i++) {
        store(p + 8u * i, (uint64_t)v->shape[i], 8);
        store(p + 8u * (v->ndim + i), (uint64_t)v->strides[i], 8);
    }
    return 0;
}

int zcx_out_again(struct zcx_out *o, uint32_t k) {
    unsigned char *p;
    int rc = begin(o, 'r', 4, &p);
    if (!rc) store(p, k, 4);
    return rc;
}

/* ---- reading ---- */

static int cut(struct zcx_err *err, char tag) {
    return zcx_fail(err, ZCX_E_PROTOCOL, "the tree ends inside a '%c'", tag);
}

/* Check the view whose `left` bytes start at p; its size in *used. */
static int check_view(const unsigned char *p, size_t left, uint64_t *used, struct zcx_err *err) {
    if (left < VIEW_FIXED) return cut(err, 'v');
    unsigned lib = p[16], ndim = p[17], flags = (unsigned)load(p + 18, 2), dtype_length = p[20];
    unsigned size = VIEW_FIXED + dtype_length + 16 * ndim;
    if (ndim > ZCX_NDIM_MAX)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a view of %u dimensions is above the limit of %d", ndim, ZCX_NDIM_MAX);
    if (left < size) return cut(err, 'v');
    if (lib < ZCX_LIB_TORCH || lib > ZCX_LIB_ARRAY) return zcx_fail(err, ZCX_E_PROTOCOL, "a view of unknown kind %u", lib);
    if (flags & ~(unsigned)VIEW_FLAGS) return zcx_fail(err, ZCX_E_PROTOCOL, "a view with unknown flags %#x", flags);
    if (dtype_length < 1) return zcx_fail(err, ZCX_E_PROTOCOL, "a view without a dtype");
    for (unsigned i = 0; i < ndim; i++)
        if ((int64_t)load(p + VIEW_FIXED + dtype_length + 8u * i, 8) < 0)
            return zcx_fail(err, ZCX_E_PROTOCOL, "dimension %u of a view is negative", i);
    *used = size;
    return 0;
}

/* Of bytes that check_view found right. */
static void read_view(const unsigned char *p, struct zcx_view *v) {
    v->id = load(p, 8);
    v->offset = load(p + 8, 8);
    v->lib = p[16];
    v->ndim = p[17];
    v->flags = (uint16_t)load(p + 18, 2);
    v->dtype = (const char *)p + VIEW_FIXED;
    v->dtype_length = p[20];
    p += VIEW_FIXED + v->dtype_length;
    for (unsigned i = 0; i < v->ndim; i++) {
        v->shape[i] = (int64_t)load(p + 8u * i, 8);
        v->strides[i] = (int64_t)load(p + 8u * (v->ndim + i), 8);
    }
}

int zcx_in_next(struct zcx_in *in, struct zcx_token *out, struct zcx_err *err) {
    size_t left = (size_t)(in->end - in->at);
    uint64_t used = 0, children = 0, pending;
    const unsigned char *p, *bytes = NULL;
    uint32_t n = 0;
    char tag;
    int rc;
    if (!left) return zcx_fail(err, ZCX_E_PROTOCOL, "the tree ends where a node should follow");
    tag = (char)in->at[0];
    p = in->at + 1;
    left--;
    switch (tag) {
    case 'N': case 'T': case 'F':
        break;
    case 'i': case 'f':
        used = 8;
        break;
    case 'c':
        used = 16;
        break;
    case 'I': case 's': case 'b':
        if (left < 4) return cut(err, tag);
        n = (uint32_t)load(p, 4);
        if (tag == 'I' && !n) return zcx_fail(err, ZCX_E_PROTOCOL, "an integer without bytes");
        bytes = p + 4;
        used = 4 + (uint64_t)n;
        break;
    case 'l': case 't': case 'S': case 'Z': case 'd':
        if (left < 4) return cut(err, tag);
        n = (uint32_t)load(p, 4);
        children = tag == 'd' ? 2 * (uint64_t)n : n;
        used = 4;
        break;
    case 'x':
        if (left < 1) return cut(err, tag);
        n = p[0];
        if (!n) return zcx_fail(err, ZCX_E_PROTOCOL, "an extension without a tag");
        bytes = p + 1;
        children = 1;
        used = 1 + (uint64_t)n;
        break;
    case 'v':
        if ((rc = check_view(p, left, &used, err))) return rc;
        break;
    case 'r':
        used = 4;
        break;
    default:
        return zcx_fail(err, ZCX_E_PROTOCOL, "unknown tag %#x in the tree", (unsigned)(unsigned char)tag);
    }
    if (used > left) return cut(err, tag);
    pending = in->pending - (in->pending ? 1 : 0) + children;
    if (pending > left - used)
        return zcx_fail(err, ZCX_E_PROTOCOL, "the tree promises more nodes than it has bytes left (at a '%c')", tag);
    out->tag = tag;
    out->bytes = bytes;
    out->length = bytes ? n : 0;
    out->count = bytes ? 0 : tag == 'r' ? (uint32_t)load(p, 4) : n;
    if (tag == 'i') out->i = (int64_t)load(p, 8);
    if (tag == 'f' || tag == 'c') out->f = double_of(load(p, 8));
    if (tag == 'c') out->g = double_of(load(p + 8, 8));
    if (tag == 'v') read_view(p, &out->view);
    in->at = p + used;
    in->pending = pending;
    return 0;
}

/* ---- bounds of a view ---- */

int zcx_view_fits(const struct zcx_view *v, uint64_t itemsize, uint64_t nbytes) {
    __int128 low = v->offset, high = low;
    if (v->ndim > ZCX_NDIM_MAX) return 0;
    for (unsigned i = 0; i < v->ndim; i++)
        if (v->shape[i] < 0) return 0;
    for (unsigned i = 0; i < v->ndim; i++)
        if (v->shape[i] == 0) return 1;
    for (unsigned i = 0; i < v->ndim; i++) {
        /* One product stays below 2^126, and both sums stay below 2^65 or we are done. */
        __int128 reach = (__int128)(v->shape[i] - 1) * v->strides[i];
        if (reach < 0) low += reach;
        else high += reach;
        if (low < 0 || high > (__int128)nbytes) return 0;
    }
    return high + (__int128)itemsize <= (__int128)nbytes;
}
