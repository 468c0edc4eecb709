// sources: csrc/codec.c csrc/err.c
/* test_codec.c: the bytes of every token, written by hand from docs/protocol.md, both ways; what is refused; and the bounds of
 * views, against a walk over every element. */
#include "codec.h"

#include <errno.h>
#include <limits.h>
#include <math.h>

#include "check.h"

static void bytes_are(const struct zcx_out *o, const char *want, size_t n) {
    CHECK(o->length == n, "%zu bytes, not %zu", o->length, n);
    for (size_t i = 0; i < n; i++)
        CHECK(o->data[i] == (unsigned char)want[i], "byte %zu is %02x, not %02x", i, o->data[i], (unsigned char)want[i]);
}

/* `write` makes just the bytes of `literal`; they are copied to memory of just that size, cut at every length, which is refused
 * with nothing consumed and nothing set, and read whole as one token. */
#define GOLDEN(literal, tag_, write, ...)                                                                              \
    do {                                                                                                            \
        struct zcx_out o = {.limit = 4096};                                                                         \
        struct zcx_token t;                                                                                         \
        struct zcx_err err;                                                                                         \
        CHECK((write) == 0, "written");                                                                             \
        bytes_are(&o, literal, sizeof literal - 1);                                                                 \
        for (size_t cut = 0; cut < o.length; cut++) {                                                               \
            unsigned char *exact = malloc(cut ? cut : 1);                                                           \
            struct zcx_in in = {.at = exact, .end = exact + cut};                                                   \
            memcpy(exact, o.data, cut);                                                                             \
            memset(&t, 0x5a, sizeof t);                                                                             \
            CHECK(zcx_in_next(&in, &t, &err) == -ZCX_E_PROTOCOL && err.text[0], "cut at %zu", cut);                 \
            CHECK(in.at == exact && !in.pending && t.tag == 0x5a, "cut at %zu left a trace", cut);                  \
            free(exact);                                                                                            \
        }                                                                                                           \
        struct zcx_in in = {.at = o.data, .end = o.data + o.length};                                                \
        CHECK(zcx_in_next(&in, &t, &err) == 0, "%s", err.text);                                                     \
        CHECK(t.tag == (tag_) && in.at == in.end, "tag and size");                                                  \
        __VA_ARGS__                                                                                                 \
        zcx_out_free(&o);                                                                                           \
    } while (0)

static void scalars(void) {
    GOLDEN("N", 'N', zcx_out_tag(&o, 'N'));
    GOLDEN("T", 'T', zcx_out_tag(&o, 'T'));
    GOLDEN("F", 'F', zcx_out_tag(&o, 'F'));
    GOLDEN("i\x02\x01\0\0\0\0\0\0", 'i', zcx_out_int(&o, 258), CHECK(t.i == 258, "value"););
    GOLDEN("i\xff\xff\xff\xff\xff\xff\xff\xff", 'i', zcx_out_int(&o, -1), CHECK(t.i == -1, "value"););
    GOLDEN("i\0\0\0\0\0\0\0\x80", 'i', zcx_out_int(&o, INT64_MIN), CHECK(t.i == INT64_MIN, "value"););
    GOLDEN("f\0\0\0\0\0\0\xf8\x3f", 'f', zcx_out_float(&o, 1.5), CHECK(t.f == 1.5, "value"););
    GOLDEN("f\0\0\0\0\0\0\0\x80", 'f', zcx_out_float(&o, -0.0), CHECK(t.f == 0 && signbit(t.f), "the sign of zero"););
    GOLDEN("c\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\xf0\xbf", 'c', zcx_out_complex(&o, 2, -1), CHECK(t.f == 2 && t.g == -1, "value"););
    struct zcx_out o = {.limit = 100};
    CHECK(zcx_out_tag(&o, 'i') == -ZCX_E_RANGE && zcx_out_tag(&o, 0) == -ZCX_E_RANGE && o.length == 0, "not a tag alone");
    zcx_out_free(&o);
}

static void strings(void) {
    GOLDEN("s\x03\0\0\0h\xc3\xa9", 's', zcx_out_bytes(&o, 's', "h\xc3\xa9", 3), CHECK(t.length == 3 && t.bytes[2] == 0xa9, "value"););
    GOLDEN("s\0\0\0\0", 's', zcx_out_bytes(&o, 's', NULL, 0), CHECK(t.length == 0 && t.count == 0, "value"););
    GOLDEN("b\x02\0\0\0\0\xff", 'b', zcx_out_bytes(&o, 'b', "\0\xff", 2), CHECK(t.length == 2 && !memcmp(t.bytes, "\0\xff", 2), "value"););
    GOLDEN("I\x09\0\0\0\0\0\0\0\0\0\0\0\x01", 'I', zcx_out_bigint(&o, "\0\0\0\0\0\0\0\0\x01", 9), CHECK(t.length == 9, "2^64"););
    struct zcx_out o = {.limit = 100};
    CHECK(zcx_out_bigint(&o, "", 0) == -ZCX_E_RANGE, "an integer has a sign");
    CHECK(zcx_out_bytes(&o, 'I', "x", 1) == -ZCX_E_RANGE, "tag");
    zcx_out_free(&o);
}

static void containers(void) {
    /* One node each, of the kind that must follow, so that the count holds. */
    static const char tags[] = "ltSZ";
    for (int i = 0; i < 4; i++) {
        struct zcx_out o = {.limit = 100};
        struct zcx_token t;
        struct zcx_err err;
        char want[] = "?\x02\0\0\0TF";
        want[0] = tags[i];
        CHECK(!zcx_out_container(&o, tags[i], 2) && !zcx_out_tag(&o, 'T') && !zcx_out_tag(&o, 'F'), "written");
        bytes_are(&o, want, 7);
        struct zcx_in in = {.at = o.data, .end = o.data + o.length};
        CHECK(!zcx_in_next(&in, &t, &err) && t.tag == tags[i] && t.count == 2 && t.length == 0 && in.pending == 2, "%s", err.text);
        CHECK(!zcx_in_next(&in, &t, &err) && t.tag == 'T' && in.pending == 1, "first");
        CHECK(!zcx_in_next(&in, &t, &err) && t.tag == 'F' && in.pending == 0 && in.at == in.end, "second");
        CHECK(zcx_in_next(&in, &t, &err) == -ZCX_E_PROTOCOL, "end");
        in = (struct zcx_in){.at = o.data, .end = o.data + o.length - 1};
        CHECK(zcx_in_next(&in, &t, &err) == -ZCX_E_PROTOCOL && in.at == o.data, "two nodes do not fit into one byte");
        zcx_out_free(&o);
    }
    GOLDEN("l\0\0\0\0", 'l', zcx_out_container(&o, 'l', 0), CHECK(t.count == 0 && in.pending == 0, "empty"););
    GOLDEN("d\0\0\0\0", 'd', zcx_out_container(&o, 'd', 0), CHECK(t.count == 0 && in.pending == 0, "empty"););
    struct zcx_out o = {.limit = 100};
    struct zcx_token t;
    struct zcx_err err;
    CHECK(!zcx_out_container(&o, 'd', 1) && !zcx_out_tag(&o, 'N') && !zcx_out_tag(&o, 'T'), "written");
    bytes_are(&o, "d\x01\0\0\0NT", 7);
    struct zcx_in in = {.at = o.data, .end = o.data + o.length};
    CHECK(!zcx_in_next(&in, &t, &err) && t.count == 1 && in.pending == 2, "a key and a value");
    in = (struct zcx_in){.at = o.data, .end = o.data + o.length - 1};
    CHECK(zcx_in_next(&in, &t, &err) == -ZCX_E_PROTOCOL, "a key without a value");
    CHECK(zcx_out_container(&o, 's', 1) == -ZCX_E_RANGE && zcx_out_container(&o, 0, 1) == -ZCX_E_RANGE, "tag");
    CHECK(zcx_out_container(&o, 'l', (size_t)UINT32_MAX + 1) == -ZCX_E_LIMIT, "count");
    zcx_out_free(&o);
}

static void extension(void) {
    struct zcx_out o = {.limit = 1000};
    struct zcx_token t;
    struct zcx_err err;
    char longest[256] = {0};
    CHECK(!zcx_out_extension(&o, "dtype", 5) && !zcx_out_tag(&o, 'N'), "written");
    bytes_are(&o, "x\x05" "dtypeN", 8);
    struct zcx_in in = {.at = o.data, .end = o.data + o.length};
    CHECK(!zcx_in_next(&in, &t, &err) && t.tag == 'x' && t.length == 5 && !memcmp(t.bytes, "dtype", 5), "%s", err.text);
    CHECK(in.pending == 1 && !zcx_in_next(&in, &t, &err) && t.tag == 'N' && in.pending == 0, "its node");
    for (size_t cut = 0; cut < o.length; cut++) {
        in = (struct zcx_in){.at = o.data, .end = o.data + cut};
        CHECK(zcx_in_next(&in, &t, &err) == -ZCX_E_PROTOCOL, "cut at %zu", cut);
    }
    CHECK(zcx_out_extension(&o, "", 0) == -ZCX_E_RANGE && zcx_out_extension(&o, longest, 256) == -ZCX_E_RANGE, "length");
    CHECK(zcx_out_extension(&o, longest, 255) == 0, "longest");
    zcx_out_free(&o);
}

static struct zcx_view example(void) {
    return (struct zcx_view){.id = 7, .offset = 0x100, .lib = ZCX_LIB_NUMPY, .ndim = 2, .flags = ZCX_VIEW_NEG, .dtype = "int8",
                             .dtype_length = 4, .shape = {3, 2}, .strides = {-2, 1}};
}

static void views(void) {
    struct zcx_view v = example();
    GOLDEN("v"
           "\x07\0\0\0\0\0\0\0" "\0\x01\0\0\0\0\0\0" "\x02" "\x02" "\x02\0" "\x04" "int8"
           "\x03\0\0\0\0\0\0\0" "\x02\0\0\0\0\0\0\0"
           "\xfe\xff\xff\xff\xff\xff\xff\xff" "\x01\0\0\0\0\0\0\0", 'v', zcx_out_view(&o, &v),
           CHECK(t.view.id == 7 && t.view.offset == 0x100 && t.view.lib == ZCX_LIB_NUMPY && t.view.ndim == 2, "fields");
           CHECK(t.view.flags == ZCX_VIEW_NEG && t.view.dtype_length == 4 && !memcmp(t.view.dtype, "int8", 4), "fields");
           CHECK(t.view.shape[0] == 3 && t.view.shape[1] == 2 && t.view.strides[0] == -2 && t.view.strides[1] == 1, "shape"););
    v.ndim = 0;
    GOLDEN("v\x07\0\0\0\0\0\0\0" "\0\x01\0\0\0\0\0\0" "\x02\0\x02\0\x04int8", 'v', zcx_out_view(&o, &v),
           CHECK(t.view.ndim == 0, "0-d"););
    GOLDEN("r\x05\0\0\0", 'r', zcx_out_again(&o, 5), CHECK(t.count == 5, "index"););
    v.ndim = ZCX_NDIM_MAX;
    v.dtype_length = 255;
    char name[255] = {0};
    v.dtype = name;
    struct zcx_out o = {.limit = 8192};
    struct zcx_token t;
    struct zcx_err err;
    CHECK(!zcx_out_view(&o, &v), "largest");
    struct zcx_in in = {.at = o.data, .end = o.data + o.length};
    CHECK(!zcx_in_next(&in, &t, &err) && in.at == in.end && t.view.ndim == ZCX_NDIM_MAX, "largest");
    zcx_out_free(&o);

#define FORGED(field, value)                                                              \
    do {                                                                                  \
        struct zcx_view bad = example();                                                  \
        bad.field = (value);                                                              \
        CHECK(zcx_out_view(&o, &bad) == -ZCX_E_RANGE && o.length == 0, #field);           \
    } while (0)
    o.limit = 8192;
    FORGED(ndim, ZCX_NDIM_MAX + 1);
    FORGED(dtype_length, 0);
    FORGED(lib, 0);
    FORGED(lib, 4);
    FORGED(flags, 8);
    FORGED(shape[1], -1);
#undef FORGED
    zcx_out_free(&o);
}

static void refuse(const char *why, const char *bytes, size_t n) {
    unsigned char *exact = malloc(n ? n : 1);
    struct zcx_in in = {.at = exact, .end = exact + n};
    struct zcx_token t;
    struct zcx_err err = {0};
    if (n) memcpy(exact, bytes, n);
    CHECK(zcx_in_next(&in, &t, &err) == -ZCX_E_PROTOCOL, "%s", why);
    CHECK(err.code == ZCX_E_PROTOCOL && err.text[0] && in.at == exact, "%s", why);
    free(exact);
}
#define REFUSE(why, literal) refuse(why, literal, sizeof literal - 1)

static void forged(void) {
    REFUSE("nothing", "");
    REFUSE("tag 0", "\0");
    REFUSE("unknown tag", "p\0\0\0\0");
    REFUSE("tag above ASCII", "\xff");
    REFUSE("string of 4 GiB", "s\xff\xff\xff\xff" "abc");
    REFUSE("bytes, one too many", "b\x03\0\0\0ab");
    REFUSE("integer without bytes", "I\0\0\0\0");
    REFUSE("list of 4 billion", "l\xff\xff\xff\xffNNNN");
    REFUSE("dict of half 4 billion: 2n is 0 in 32 bits", "d\0\0\0\x80NNNN");
    REFUSE("dict, one value short", "d\x02\0\0\0NNN");
    REFUSE("extension without a tag", "x\0N");
    REFUSE("extension without a node", "x\x01" "a");
#define V(lib, ndim, flags, name) "v\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" lib ndim flags name
    REFUSE("view of no library", V("\0", "\0", "\0\0", "\4int8"));
    REFUSE("view of an unknown library", V("\4", "\0", "\0\0", "\4int8"));
    REFUSE("view with unknown flags", V("\1", "\0", "\0\1", "\4int8"));
    REFUSE("view without a dtype", V("\1", "\0", "\0\0", "\0"));
    REFUSE("view of a negative dimension", V("\1", "\1", "\0\0", "\4int8\xff\xff\xff\xff\xff\xff\xff\xff\1\0\0\0\0\0\0\0"));
    char wide[22 + 4 + 16 * 65] = "v\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\x41\0\0\4int8"; /* all bytes there */
    refuse("view of 65 dimensions", wide, sizeof wide);
}

/* Containers inside containers: each count alone would fit, together they ask for more nodes than there are bytes. */
static void forged_together(void) {
    unsigned char bytes[50];
    struct zcx_in in = {.at = bytes, .end = bytes + sizeof bytes};
    struct zcx_token t;
    struct zcx_err err;
    int n = 0;
    memset(bytes, 'N', sizeof bytes);
    for (int i = 0; i < 8; i++) memcpy(bytes + 5 * i, "l\x14\0\0\0", 5); /* 20 each */
    while (zcx_in_next(&in, &t, &err) == 0) n++;
    CHECK(n == 2, "after the second 19 + 20 nodes must follow in 40 bytes; the third goes beyond (%d)", n);
}

static void limits(void) {
    struct zcx_out o = {.limit = 10};
    CHECK(zcx_out_int(&o, 1) == 0 && zcx_out_tag(&o, 'N') == 0 && o.length == 10, "just fits");
    CHECK(zcx_out_tag(&o, 'N') == -ZCX_E_LIMIT && o.length == 10, "full");
    zcx_out_free(&o);
    CHECK(!o.data && !o.limit && zcx_out_tag(&o, 'N') == -ZCX_E_LIMIT, "freed");
    o.limit = 10;
    CHECK(zcx_out_complex(&o, 1, 2) == -ZCX_E_LIMIT && o.length == 0, "one token above the limit");
    CHECK(zcx_out_bytes(&o, 'b', "123456", 6) == -ZCX_E_LIMIT && zcx_out_bytes(&o, 'b', "12345", 5) == 0, "string at the limit");
    zcx_out_free(&o);
    o.limit = 1u << 20;
    for (int i = 0; i < 100000; i++) CHECK(zcx_out_int(&o, i) == 0, "grows");
    CHECK(o.length == 900000 && o.capacity <= o.limit, "%zu in %zu", o.length, o.capacity);
    zcx_out_free(&o);
    o.limit = SIZE_MAX;
    CHECK(zcx_out_bytes(&o, 'b', NULL, (size_t)UINT32_MAX + 1) == -ZCX_E_LIMIT, "above u32");
    zcx_out_free(&o);
}

/* Every byte that any element touches, by going to each. */
static int fits_by_walk(const struct zcx_view *v, int64_t itemsize, int64_t nbytes) {
    int64_t index[4] = {0};
    for (unsigned i = 0; i < v->ndim; i++)
        if (v->shape[i] == 0) return 1;
    for (;;) {
        int64_t at = (int64_t)v->offset;
        unsigned i = 0;
        for (unsigned k = 0; k < v->ndim; k++) at += index[k] * v->strides[k];
        if (at < 0 || at + itemsize > nbytes) return 0;
        while (i < v->ndim && ++index[i] == v->shape[i]) index[i++] = 0;
        if (i == v->ndim) return 1;
    }
}

static void fits(void) {
    unsigned seed = 1;
    int yes = 0, no = 0;
#define DRAW(n) ((int64_t)((seed = seed * 1103515245u + 12345u) >> 16) % (n))
    for (int i = 0; i < 200000; i++) {
        struct zcx_view v = {.offset = (uint64_t)DRAW(40), .ndim = (uint8_t)DRAW(5)};
        for (unsigned k = 0; k < v.ndim; k++) {
            v.shape[k] = DRAW(4);
            v.strides[k] = DRAW(25) - 12;
        }
        int64_t itemsize = 1 + DRAW(8), nbytes = DRAW(60);
        int want = fits_by_walk(&v, itemsize, nbytes);
        CHECK(zcx_view_fits(&v, (uint64_t)itemsize, (uint64_t)nbytes) == want, "case %d", i);
        if (want) yes++;
        else no++;
    }
    CHECK(yes > 10000 && no > 10000, "both were met: %d, %d", yes, no);
}

static void fits_extremes(void) {
    struct zcx_view v = {.ndim = ZCX_NDIM_MAX};
    for (int i = 0; i < ZCX_NDIM_MAX; i++) {
        v.shape[i] = INT64_MAX;
        v.strides[i] = INT64_MAX;
    }
    CHECK(!zcx_view_fits(&v, 1, UINT64_MAX), "64 times the largest product, up");
    for (int i = 0; i < ZCX_NDIM_MAX; i++) v.strides[i] = INT64_MIN;
    CHECK(!zcx_view_fits(&v, 1, UINT64_MAX), "down");
    for (int i = 0; i < ZCX_NDIM_MAX; i++) v.strides[i] = i % 2 ? INT64_MAX : INT64_MIN;
    CHECK(!zcx_view_fits(&v, 1, UINT64_MAX), "both");
    v.shape[63] = 0;
    v.offset = UINT64_MAX;
    CHECK(zcx_view_fits(&v, 16, 0), "without elements, whatever the rest says");
    v.shape[63] = -1;
    CHECK(!zcx_view_fits(&v, 16, UINT64_MAX), "negative dimension");
    v = (struct zcx_view){.ndim = 0, .offset = UINT64_MAX};
    CHECK(!zcx_view_fits(&v, 1, UINT64_MAX) && !zcx_view_fits(&v, UINT64_MAX, UINT64_MAX), "offset + itemsize is above 2^64");
    v.offset = UINT64_MAX - 4;
    CHECK(zcx_view_fits(&v, 4, UINT64_MAX), "the last four bytes");
    v = (struct zcx_view){.ndim = 1, .offset = 1ull << 62, .shape = {1ll << 31}, .strides = {-(1ll << 31)}};
    CHECK(zcx_view_fits(&v, 1, (1ull << 62) + 1), "down to 2^31");
    v.shape[0] = (1ll << 31) + 2;
    CHECK(!zcx_view_fits(&v, 1, (1ull << 62) + 1), "below 0");
    v = (struct zcx_view){.ndim = 1, .shape = {INT64_MAX}, .strides = {0}};
    CHECK(zcx_view_fits(&v, 4, 4) && !zcx_view_fits(&v, 5, 4), "broadcast");
    v.ndim = ZCX_NDIM_MAX + 1;
    CHECK(!zcx_view_fits(&v, 1, UINT64_MAX), "too many dimensions");
}

int main(void) {
    RUN(scalars);
    RUN(strings);
    RUN(containers);
    RUN(extension);
    RUN(views);
    RUN(forged);
    RUN(forged_together);
    RUN(limits);
    RUN(fits);
    RUN(fits_extremes);
    return 0;
}
