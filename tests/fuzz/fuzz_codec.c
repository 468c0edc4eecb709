// sources: tests/fuzz/fuzz_main.c csrc/codec.c csrc/err.c
/* fuzz_codec.c: the tokens of codec.h. The input is a tree; it is accepted if it is a whole one and nothing follows.
 *
 * With clang: clang -g -fsanitize=fuzzer,address,undefined -Icsrc -Itests/fuzz tests/fuzz/fuzz_codec.c csrc/codec.c csrc/err.c */
#include "codec.h"

#include "fuzz.h"

int fuzz_accepted;

static int write_again(struct zcx_out *o, const struct zcx_token *t) {
    switch (t->tag) {
    case 'i': return zcx_out_int(o, t->i);
    case 'I': return zcx_out_bigint(o, t->bytes, t->length);
    case 'f': return zcx_out_float(o, t->f);
    case 'c': return zcx_out_complex(o, t->f, t->g);
    case 's': case 'b': return zcx_out_bytes(o, t->tag, t->bytes, t->length);
    case 'l': case 't': case 'S': case 'Z': case 'd': return zcx_out_container(o, t->tag, t->count);
    case 'x': return zcx_out_extension(o, (const char *)t->bytes, t->length);
    case 'v': return zcx_out_view(o, &t->view);
    case 'r': return zcx_out_again(o, t->count);
    default: return zcx_out_tag(o, t->tag);
    }
}

/* A view that fits into n bytes fits into more, and one with elements does not fit into none. */
static void check_view(const struct zcx_view *v) {
    uint64_t elements = 1;
    for (unsigned i = 0; i < v->ndim; i++) {
        HOLDS(v->shape[i] >= 0);
        if (v->shape[i] == 0) elements = 0;
    }
    for (unsigned shift = 0; shift < 63; shift += 7)
        HOLDS(zcx_view_fits(v, 4, 1ull << shift) <= zcx_view_fits(v, 4, 1ull << (shift + 1)));
    HOLDS(zcx_view_fits(v, 1, 0) == !elements);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct zcx_in in = {.at = data, .end = data + size};
    struct zcx_out out = {.limit = size};
    uint64_t promised = 0;
    fuzz_accepted = 0;
    do {
        const uint8_t *before = in.at;
        struct zcx_token t;
        struct zcx_err err = {0};
        int rc = zcx_in_next(&in, &t, &err);
        HOLDS(rc == 0 || (rc == -ZCX_E_PROTOCOL && err.text[0] && in.at == before));
        if (rc) goto done;
        HOLDS(in.at > before && in.at <= in.end && in.pending <= (uint64_t)(in.end - in.at));
        if (t.length) HOLDS(t.bytes > before && t.bytes + t.length <= in.at);
        if (t.tag == 'v') {
            HOLDS((const uint8_t *)t.view.dtype > before && (const uint8_t *)t.view.dtype + t.view.dtype_length <= in.at);
            check_view(&t.view);
        }
        if (strchr("ltSZd", t.tag)) promised += t.count;
        HOLDS(promised <= size); /* of all containers together */
        HOLDS(write_again(&out, &t) == 0);
        HOLDS(out.length == (size_t)(in.at - data) && !memcmp(out.data, data, out.length));
    } while (in.pending);
    fuzz_accepted = in.at == in.end;
done:
    zcx_out_free(&out);
    return 0;
}
