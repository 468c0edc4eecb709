// sources: csrc/wire.c csrc/err.c
/* test_wire.c: the bytes of every message, written by hand from docs/protocol.md, both ways; then what a hostile peer would
 * send instead: cut short at every length, one byte too many, forged counts, lengths that overflow. */
#include "wire.h"

#include <ctype.h>
#include <limits.h>

#include "check.h"

/* Hex digits, blanks between them as one likes, to bytes. */
static size_t hex(const char *text, unsigned char *out, size_t cap) {
    size_t n = 0;
    while (*text) {
        char pair[3] = {0};
        if (isspace((unsigned char)*text)) {
            text++;
            continue;
        }
        memcpy(pair, text, 2);
        CHECK(n < cap && isxdigit((unsigned char)pair[0]) && isxdigit((unsigned char)pair[1]), "hex literal: %s", text);
        out[n++] = (unsigned char)strtoul(pair, NULL, 16);
        text += 2;
    }
    return n;
}

static void same(const char *what, const unsigned char *got, size_t n, const unsigned char *want, size_t m) {
    for (size_t i = 0; i < n && i < m; i++) CHECK(got[i] == want[i], "%s: byte %zu is %02x, not %02x", what, i, got[i], want[i]);
    CHECK(n == m, "%s: %zu bytes, not %zu", what, n, m);
}

static int text_is(struct zcx_text t, const char *want) {
    return t.length == strlen(want) && !memcmp(t.bytes, want, t.length);
}

/* The golden bytes of `name` are what `message` encodes to, into no less room than they need; they decode (into `back`); no
 * shorter body does, down to `least` bytes (a body that ends in a tree may lose that), and none with a byte more unless `open`.
 * Every body lies in memory of just its size, so that ASan sees a read too far. */
#define GOLDEN(name, type, message, digits, tree_bytes, open)                                                        \
    unsigned char golden[4096];                                                                                    \
    size_t golden_n = hex(digits, golden, sizeof golden);                                                          \
    struct zcx_err err;                                                                                            \
    type back;                                                                                                     \
    unsigned char *exact = malloc(golden_n);                                                                       \
    do {                                                                                                           \
        size_t head = golden_n - (tree_bytes);                                                                     \
        unsigned char *out = malloc(head + 1);                                                                     \
        long wrote = zcx_##name##_encode(&(message), out, head, &err);                                             \
        CHECK(wrote >= 0, "%s", err.text);                                                                         \
        same(#name, out, (size_t)wrote, golden, head);                                                             \
        for (size_t cap = 0; cap < head; cap++)                                                                    \
            CHECK(zcx_##name##_encode(&(message), out, cap, &err) == -ZCX_E_LIMIT, "room of %zu", cap);            \
        free(out);                                                                                                 \
        for (size_t cut = 0; cut < head; cut++) {                                                                  \
            unsigned char *body = malloc(cut ? cut : 1);                                                           \
            memcpy(body, golden, cut);                                                                             \
            memset(&back, 0x5a, sizeof back);                                                                      \
            err.code = 0;                                                                                          \
            CHECK(zcx_##name##_decode(body, cut, &back, &err) == -ZCX_E_PROTOCOL, "cut at %zu", cut);              \
            CHECK(err.code == ZCX_E_PROTOCOL && err.text[0], "cut at %zu is said", cut);                           \
            CHECK(*(unsigned char *)&back == 0x5a, "cut at %zu set the output", cut);                              \
            free(body);                                                                                            \
        }                                                                                                          \
        CHECK(golden_n == 0 || zcx_##name##_decode(NULL, 0, &back, &err) == -ZCX_E_PROTOCOL, "no body");           \
        CHECK(zcx_##name##_decode(golden, golden_n + 1, &back, &err) == ((open) ? 0 : -ZCX_E_PROTOCOL), "longer"); \
        memcpy(exact, golden, golden_n);                                                                           \
        CHECK(zcx_##name##_decode(exact, golden_n, &back, &err) == 0, "%s", err.text);                             \
    } while (0)

#define REFUSED(name, type, digits)                                                                       \
    do {                                                                                                \
        unsigned char bytes[4096];                                                                      \
        size_t n = hex(digits, bytes, sizeof bytes);                                                      \
        struct zcx_err e = {0};                                                                         \
        type m;                                                                                         \
        CHECK(zcx_##name##_decode(bytes, n, &m, &e) == -ZCX_E_PROTOCOL && e.text[0], "%s", digits);       \
    } while (0)

#define UUID "00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee ff"
static const unsigned char uuid[16] = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                       0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};

#define GATE_HEX                                                          \
    "02 00 00 00 03 00 00 00 04 00 00 00 00 00 00 00"                     \
    "05 00 00 00 00 00 00 00 06 00 00 00 00 00 00 80"
static const struct zcx_gate_ref gate = {.pool = 2, .ready_slot = 3, .done_slot = 4, .ready = 5, .done = 0x8000000000000006};

#define BUFFER_HEX                                                        \
    "08 07 06 05 04 03 02 01 01 01 03 00 0d 0c 0b 0a"                     \
    "00 10 00 00 00 00 00 00 00 02 00 00 00 00 00 00"                     \
    "00 00 00 00 01 00 00 00 0a 00 00 00 00 00 00 00"                     \
    "40 41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f"                     \
    "50 51 52 53 54 55 56 57 58 59 5a 5b 5c 5d 5e 5f"                     \
    "60 61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f"                     \
    "70 71 72 73 74 75 76 77 78 79 7a 7b 7c 7d 7e 7f"                     \
    "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"
static struct zcx_buffer buffer(void) {
    struct zcx_buffer b = {.id = 0x0102030405060708, .rung = ZCX_RUNG_POOL, .flags = ZCX_BUFFER_RESULT, .pool = 3, .nbytes = 4096,
                           .offset = 512, .window = 0x0a0b0c0d, .alloc_bytes = 1ull << 32, .key = 10};
    for (int i = 0; i < 64; i++) b.blob[i] = (unsigned char)(0x40 + i);
    return b;
}

/* ---- header ---- */

static void header(void) {
    static const struct {
        struct zcx_header h;
        const char *text;
        uint32_t body; /* bytes of it in the packet */
    } rows[] = {
        {{ZCX_HELLO, 0, 0, 32, 0, 0}, "5a 43 58 31 01 00 00 00 00 00 00 00 20 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 32},
        {{ZCX_GATE, 0, 1, 8, 0, 0}, "5a 43 58 31 02 00 00 00 01 00 00 00 08 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 8},
        {{ZCX_POOL, 0, 1, 18, 0, 0}, "5a 43 58 31 03 00 00 00 01 00 00 00 12 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 18},
        {{ZCX_POOL_REPLY, 0, 0, 6, 0, 0}, "5a 43 58 31 04 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 6},
        {{ZCX_STARTED, 0, 0, 0, 0, 0}, "5a 43 58 31 05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 0},
        {{ZCX_SEGMENT, 0, 1, 10, 0, 7}, "5a 43 58 31 06 00 00 00 01 00 00 00 0a 00 00 00 00 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00", 10},
        {{ZCX_SEGMENT_DROP, 0, 0, 0, 0, 7}, "5a 43 58 31 07 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00", 0},
        {{ZCX_CALL, ZCX_FLAG_BODY_FD, 1, 1u << 20, 0x1122334455667788, 0},
         "5a 43 58 31 08 00 01 00 01 00 00 00 00 00 10 00 88 77 66 55 44 33 22 11 00 00 00 00 00 00 00 00", 0},
        {{ZCX_ALLOC, 0, 0, 64, 9, 1}, "5a 43 58 31 09 00 00 00 00 00 00 00 40 00 00 00 09 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00", 64},
        {{ZCX_ALLOCATED, 0, 0, 164, 9, 1}, "5a 43 58 31 0a 00 00 00 00 00 00 00 a4 00 00 00 09 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00", 164},
        {{ZCX_REFUSED, 0, 0, 6, 9, 1}, "5a 43 58 31 0b 00 00 00 00 00 00 00 06 00 00 00 09 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00", 6},
        {{ZCX_RESULT, 0, 0, 9, 9, 0}, "5a 43 58 31 0c 00 00 00 00 00 00 00 09 00 00 00 09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 9},
        {{ZCX_ERROR, 0, 0, 9, 9, 0}, "5a 43 58 31 0d 00 00 00 00 00 00 00 09 00 00 00 09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 9},
        {{ZCX_IMPORT_REFUSED, 0, 0, 6, 9, 3}, "5a 43 58 31 0e 00 00 00 00 00 00 00 06 00 00 00 09 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00", 6},
        {{ZCX_RELEASE, 0, 0, 12, 0, 0}, "5a 43 58 31 0f 00 00 00 00 00 00 00 0c 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 12},
        {{ZCX_PROGRESS, 0, 0, 18, 9, 0}, "5a 43 58 31 10 00 00 00 00 00 00 00 12 00 00 00 09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 18},
        {{ZCX_CANCEL, 0, 0, 0, 9, 0}, "5a 43 58 31 11 00 00 00 00 00 00 00 00 00 00 00 09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 0},
        {{ZCX_PING, 0, 0, 0, 0, 5}, "5a 43 58 31 12 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00", 0},
        {{ZCX_PONG, 0, 0, 0, 0, 5}, "5a 43 58 31 13 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00", 0},
        {{ZCX_BYE, 0, 0, 0, 0, 0}, "5a 43 58 31 14 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 0},
        {{ZCX_HANDLE_DROP, 0, 0, 0, 0, 0xffffffffffffffff},
         "5a 43 58 31 15 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff", 0},
        {{ZCX_GATE_EVENT, 0, 0, 70, 0, 0}, "5a 43 58 31 16 00 00 00 00 00 00 00 46 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 70},
        {{ZCX_PROVE, 0, 0, 172, 0, 0}, "5a 43 58 31 17 00 00 00 00 00 00 00 ac 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 172},
        {{ZCX_PROVED, 0, 0, 10, 0, 0}, "5a 43 58 31 18 00 00 00 00 00 00 00 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 10},
        {{ZCX_DEVICE, 0, 0, 18, 0, 0}, "5a 43 58 31 19 00 00 00 00 00 00 00 12 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", 18},
        {{ZCX_SLAB, 0, 1, 28, 0, 7}, "5a 43 58 31 1a 00 00 00 01 00 00 00 1c 00 00 00 00 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00", 28},
        {{ZCX_SLAB_TAKEN, 0, 0, 0, 0, 7}, "5a 43 58 31 1b 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00", 0},
        {{ZCX_SLAB_DROP, 0, 0, 0, 0, 7}, "5a 43 58 31 1c 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00", 0},
    };
    struct zcx_err err;
    CHECK(sizeof rows / sizeof *rows == ZCX_TYPE_END - 1, "a row for each type");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        unsigned char golden[ZCX_HEADER_BYTES], out[ZCX_HEADER_BYTES];
        struct zcx_header h;
        size_t n = hex(rows[i].text, golden, sizeof golden), packet = ZCX_HEADER_BYTES + rows[i].body;
        CHECK(rows[i].h.type == i + 1, "row %zu", i);
        zcx_header_encode(&rows[i].h, out);
        same("header", out, sizeof out, golden, n);
        CHECK(zcx_header_decode(golden, packet, &h, &err) == 0, "row %zu: %s", i, err.text);
        CHECK(h.type == rows[i].h.type && h.flags == rows[i].h.flags && h.nfds == rows[i].h.nfds, "row %zu", i);
        CHECK(h.length == rows[i].h.length && h.seq == rows[i].h.seq && h.id == rows[i].h.id, "row %zu", i);
        for (size_t other = 0; other < packet + 2; other++) /* no other size of packet goes with it */
            CHECK(other == packet || zcx_header_decode(golden, other, &h, &err) == -ZCX_E_PROTOCOL, "row %zu of %zu", i, other);
        for (uint32_t nfds = 0; nfds < 6; nfds++) { /* nor another number of descriptors */
            unsigned char forged[ZCX_HEADER_BYTES];
            memcpy(forged, golden, sizeof forged);
            forged[8] = (unsigned char)nfds;
            CHECK((zcx_header_decode(forged, packet, &h, &err) == 0) == (nfds == rows[i].h.nfds), "row %zu, %u fds", i, nfds);
        }
    }
}

static void header_refused(void) {
    unsigned char good[ZCX_HEADER_BYTES], b[ZCX_HEADER_BYTES];
    struct zcx_header h, ping = {.type = ZCX_PING, .id = 1};
    struct zcx_err err;
    zcx_header_encode(&ping, good);
#define FORGED(offset, value, ...)                                                        \
    do {                                                                                  \
        memcpy(b, good, sizeof b);                                                        \
        b[offset] = (value);                                                              \
        h.seq = 77;                                                                       \
        err.text[0] = 0;                                                                  \
        CHECK(zcx_header_decode(b, sizeof b, &h, &err) == -ZCX_E_PROTOCOL, __VA_ARGS__);  \
        CHECK(h.seq == 77 && err.text[0], __VA_ARGS__);                                   \
    } while (0)
    FORGED(0, 'Y', "magic");
    FORGED(3, '2', "magic of another version");
    FORGED(4, 0, "type 0");
    FORGED(4, ZCX_TYPE_END, "type past the last");
    FORGED(5, 1, "type with a high byte");
    FORGED(6, 2, "unknown flag");
    FORGED(7, 0x80, "unknown flag");
    FORGED(6, 1, "body in a descriptor, but none there");
    FORGED(8, 1, "a descriptor with PING");
    FORGED(11, 0x80, "2^31 descriptors");
    FORGED(12, 1, "a body that is not there");
    FORGED(15, 0xff, "a body of 4 GiB");
#undef FORGED
    zcx_header_encode(&(struct zcx_header){.type = ZCX_CALL, .flags = ZCX_FLAG_BODY_FD, .nfds = 1, .length = ZCX_BODY_MAX}, b);
    CHECK(zcx_header_decode(b, sizeof b, &h, &err) == 0, "the largest body: %s", err.text);
    zcx_header_encode(&(struct zcx_header){.type = ZCX_CALL, .flags = ZCX_FLAG_BODY_FD, .nfds = 1, .length = ZCX_BODY_MAX + 1}, b);
    CHECK(zcx_header_decode(b, sizeof b, &h, &err) == -ZCX_E_PROTOCOL, "a body above the limit");
    zcx_header_encode(&(struct zcx_header){.type = ZCX_CALL, .flags = ZCX_FLAG_BODY_FD, .nfds = 1}, b);
    CHECK(zcx_header_decode(b, sizeof b, &h, &err) == -ZCX_E_PROTOCOL, "an empty body in a descriptor");
    CHECK(zcx_header_decode(NULL, 0, &h, &err) == -ZCX_E_PROTOCOL, "nothing");
}

/* ---- bodies ---- */

static void hello(void) {
    struct zcx_hello m = {.protocol_min = 1, .protocol_max = 2, .pid = 0x01020304, .features = ZCX_FEATURE_HOST | ZCX_FEATURE_POOL,
                          .version = zcx_text_of("0.1.0"), .python = zcx_text_of("3.12.3")};
    GOLDEN(hello, struct zcx_hello, m,
           "01 00 02 00 04 03 02 01 03 00 00 00 00 00 00 00"
           "05 00 30 2e 31 2e 30"
           "06 00 33 2e 31 32 2e 33", 0, 1);
    CHECK(back.protocol_min == 1 && back.protocol_max == 2 && back.pid == 0x01020304 && back.features == 3, "fields");
    CHECK(text_is(back.version, "0.1.0") && text_is(back.python, "3.12.3"), "strings");
    free(exact);
    REFUSED(hello, struct zcx_hello, "02 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"); /* 2 to 1 */
    REFUSED(hello, struct zcx_hello, "00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"); /* from 0 */
    REFUSED(hello, struct zcx_hello, "01 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 ff ff 41 41 00 00"); /* string past the end */
}

static void gate_page(void) {
    struct zcx_gate_page m = {.slots = 64, .stride = 0x0a0b0c0d};
    GOLDEN(gate_page, struct zcx_gate_page, m, "40 00 00 00 0d 0c 0b 0a", 0, 0);
    CHECK(back.slots == 64 && back.stride == 0x0a0b0c0d, "fields");
    free(exact);
}

static void pool_msg(void) {
    struct zcx_pool_msg m = {.index = 0x0102};
    memcpy(m.uuid, uuid, 16);
    GOLDEN(pool_msg, struct zcx_pool_msg, m, "02 01 " UUID, 0, 0);
    CHECK(back.index == 0x0102 && !memcmp(back.uuid, uuid, 16), "fields");
    free(exact);
}

static void pool_reply(void) {
    struct zcx_pool_reply m = {.index = 1, .refused = 1, .reason = zcx_text_of("no")};
    GOLDEN(pool_reply, struct zcx_pool_reply, m, "01 00 01 00 02 00 6e 6f", 0, 0);
    CHECK(back.index == 1 && back.refused == 1 && text_is(back.reason, "no"), "fields");
    free(exact);
    struct zcx_pool_reply unseen;
    CHECK(zcx_pool_reply_decode((const unsigned char *)"\1\0\2\0\0\0", 6, &unseen, &err) == 0 && unseen.refused == ZCX_POOL_UNSEEN);
    CHECK(zcx_pool_reply_decode((const unsigned char *)"\1\0\3\0\0\0", 6, &unseen, &err) == 0 && unseen.refused == ZCX_POOL_NO_DEVICE);
    REFUSED(pool_reply, struct zcx_pool_reply, "01 00 04 00 00 00");
}

static void gate_event(void) {
    struct zcx_gate_event m = {.pool = 1, .slot = 0x3f};
    for (int i = 0; i < 64; i++) m.handle[i] = (unsigned char)(0xc0 + i);
    GOLDEN(gate_event, struct zcx_gate_event, m,
           "01 00 3f 00 00 00"
           "c0 c1 c2 c3 c4 c5 c6 c7 c8 c9 ca cb cc cd ce cf d0 d1 d2 d3 d4 d5 d6 d7 d8 d9 da db dc dd de df"
           "e0 e1 e2 e3 e4 e5 e6 e7 e8 e9 ea eb ec ed ee ef f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff", 0, 0);
    CHECK(back.pool == 1 && back.slot == 0x3f && !memcmp(back.handle, m.handle, 64), "fields");
    free(exact);
}

static void prove(void) {
    struct zcx_prove m = {.step = 2, .seed = 0x1122334455667788, .gate = gate, .buffer = buffer()};
    GOLDEN(prove, struct zcx_prove, m, "02 00 00 00 88 77 66 55 44 33 22 11" GATE_HEX BUFFER_HEX, 0, 0);
    CHECK(back.step == 2 && back.seed == 0x1122334455667788 && back.gate.ready == 5 && back.gate.done == gate.done, "step, seed, gate");
    CHECK(back.buffer.id == m.buffer.id && back.buffer.window == 0x0a0b0c0d && !memcmp(back.buffer.blob, m.buffer.blob, 64), "buffer");
    free(exact);
#define HEAD "02 00 00 00 88 77 66 55 44 33 22 11 "
    unsigned char forged[256];
    size_t n = hex(HEAD GATE_HEX BUFFER_HEX, forged, sizeof forged);
    forged[12 + 2] = 1; /* a byte of the gate that must be zero */
    CHECK(zcx_prove_decode(forged, n, &back, &err) == -ZCX_E_PROTOCOL, "gate");
    forged[12 + 2] = 0;
    forged[12 + ZCX_GATE_REF_BYTES + 8] = ZCX_RUNG_HOST; /* which has no windows */
    CHECK(zcx_prove_decode(forged, n, &back, &err) == -ZCX_E_PROTOCOL, "rung");
    forged[12 + ZCX_GATE_REF_BYTES + 8] = ZCX_RUNG_POOL;
    memset(forged + 12 + ZCX_GATE_REF_BYTES + 16, 0xff, 8); /* nbytes: beyond the allocation, and beyond any address */
    CHECK(zcx_prove_decode(forged, n, &back, &err) == -ZCX_E_PROTOCOL, "bytes");
#undef HEAD
}

static void proved(void) {
    struct zcx_proved m = {.pool = 0x0102, .failed = 1, .step = 0x0a0b0c0d, .reason = zcx_text_of("no")};
    GOLDEN(proved, struct zcx_proved, m, "02 01 01 00 0d 0c 0b 0a 02 00 6e 6f", 0, 0);
    CHECK(back.pool == 0x0102 && back.failed == 1 && back.step == 0x0a0b0c0d && text_is(back.reason, "no"), "fields");
    free(exact);
    REFUSED(proved, struct zcx_proved, "02 01 02 00 01 00 00 00 00 00"); /* neither yes nor no */
    REFUSED(proved, struct zcx_proved, "02 01 01 00 01 00 00 00 03 00 6e 6f"); /* string past the end */
}

static void segment(void) {
    struct zcx_segment m = {.size = 0x0000010000001000, .kind = 2};
    GOLDEN(segment, struct zcx_segment, m, "00 10 00 00 00 01 00 00 02 00", 0, 0);
    CHECK(back.size == 0x0000010000001000 && back.kind == 2, "fields");
    free(exact);
}

static void slab_msg(void) {
    struct zcx_slab_msg m = {.pool = 0x0102, .flags = ZCX_SLAB_WRITABLE | ZCX_SLAB_ANSWER, .piece = 0x0a0b0c0d, .npieces = 0x0a0b0c0e,
                             .piece_bytes = 0x0000000000200000, .bytes = 0x1122334455667788};
    GOLDEN(slab_msg, struct zcx_slab_msg, m,
           "02 01 05 00 0d 0c 0b 0a 0e 0c 0b 0a 00 00 20 00 00 00 00 00 88 77 66 55 44 33 22 11", 0, 0);
    CHECK(back.pool == 0x0102 && back.flags == 5 && back.piece == 0x0a0b0c0d && back.npieces == 0x0a0b0c0e, "fields");
    CHECK(back.piece_bytes == 0x200000 && back.bytes == 0x1122334455667788, "sizes");
    free(exact);
#define SLAB(flags, piece, npieces, piece_bytes, bytes) "00 00" flags "00" piece npieces piece_bytes bytes
#define N(x) x " 00 00 00"
#define MIB(x) "00 00 " x " 00 00 00 00 00"
    struct zcx_slab_msg stays;
    unsigned char ok[28];
    size_t n = hex(SLAB("02", N("00"), N("01"), MIB("20"), MIB("20")), ok, sizeof ok);
    CHECK(zcx_slab_msg_decode(ok, n, &stays, &err) == 0 && stays.flags == ZCX_SLAB_STAYS && stays.piece_bytes == stays.bytes, "one piece");
    REFUSED(slab_msg, struct zcx_slab_msg, SLAB("08", N("00"), N("01"), MIB("20"), MIB("20"))); /* an unknown flag */
    REFUSED(slab_msg, struct zcx_slab_msg, SLAB("00", N("01"), N("01"), MIB("20"), MIB("20"))); /* one piece too many */
    REFUSED(slab_msg, struct zcx_slab_msg, SLAB("00", N("00"), N("00"), MIB("20"), MIB("20"))); /* of none */
    REFUSED(slab_msg, struct zcx_slab_msg, SLAB("00", N("00"), N("01"), MIB("00"), MIB("20"))); /* an empty piece */
    REFUSED(slab_msg, struct zcx_slab_msg, SLAB("00", N("00"), N("01"), MIB("40"), MIB("20"))); /* larger than the whole */
#undef SLAB
#undef N
#undef MIB
}

static void call_msg(void) {
    unsigned char gates[2 * ZCX_GATE_REF_BYTES], buffers[ZCX_BUFFER_BYTES];
    struct zcx_buffer b = buffer(), b2;
    struct zcx_gate_ref g2;
    zcx_gate_ref_encode(&gate, gates);
    zcx_gate_ref_encode(&gate, gates + ZCX_GATE_REF_BYTES);
    zcx_buffer_encode(&b, buffers);
    struct zcx_call_msg m = {.ngates = 2, .nbuffers = 1, .gates = gates, .buffers = buffers};
    GOLDEN(call_msg, struct zcx_call_msg, m, "02 00 00 00 01 00 00 00" GATE_HEX GATE_HEX BUFFER_HEX "4e", 1, 1);
    CHECK(back.ngates == 2 && back.nbuffers == 1 && back.tree_bytes == 1 && back.tree[0] == 'N', "fields");
    CHECK(zcx_gate_ref_decode(back.gates + ZCX_GATE_REF_BYTES, &g2, &err) == 0 && g2.done == gate.done, "second gate");
    CHECK(zcx_buffer_decode(back.buffers, &b2, &err) == 0 && b2.id == b.id, "buffer");
    free(exact);
    struct zcx_call_msg none = {0};
    unsigned char out[8];
    CHECK(zcx_call_msg_encode(&none, out, sizeof out, &err) == 8, "neither gates nor buffers");
    REFUSED(call_msg, struct zcx_call_msg, "01 00 00 00 00 00 00 00");
    REFUSED(call_msg, struct zcx_call_msg, "00 00 00 00 01 00 00 00 4e");
    REFUSED(call_msg, struct zcx_call_msg, "ff ff ff ff 00 00 00 00" GATE_HEX);
    REFUSED(call_msg, struct zcx_call_msg, "00 00 00 08 00 00 00 00" GATE_HEX); /* times their size: 2^32 */
    REFUSED(call_msg, struct zcx_call_msg, "00 00 00 00 00 00 00 02" GATE_HEX);
    REFUSED(call_msg, struct zcx_call_msg, "ff ff ff ff ff ff ff ff" BUFFER_HEX);
}

#define ALLOC_HEAD(place, ndim, itemsize, nbytes) place ndim itemsize UUID nbytes "07 00 66 6c 6f 61 74 33 32"
static void alloc(void) {
    static const unsigned char shape[] = {2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0};
    struct zcx_alloc m = {.place = 1, .ndim = 2, .itemsize = 4, .nbytes = 2048, .dtype = zcx_text_of("float32"), .shape = shape};
    memcpy(m.uuid, uuid, 16);
    GOLDEN(alloc, struct zcx_alloc, m,
           ALLOC_HEAD("01 00", "02 00", "04 00 00 00", "00 08 00 00 00 00 00 00")
           "02 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00", 0, 0);
    CHECK(back.place == 1 && back.ndim == 2 && back.itemsize == 4 && back.nbytes == 2048, "fields");
    CHECK(!memcmp(back.uuid, uuid, 16) && text_is(back.dtype, "float32"), "fields");
    CHECK(zcx_alloc_dim(&back, 0) == 2 && zcx_alloc_dim(&back, 1) == 256, "shape");
    free(exact);
    golden[0] = 2; /* may come through a window */
    CHECK(zcx_alloc_decode(golden, golden_n, &back, &err) == 0 && back.place == 2, "place 2");
#define ONE "01 00 00 00 00 00 00 00"
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("03 00", "01 00", "04 00 00 00", "04 00 00 00 00 00 00 00") ONE); /* place */
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("00 00", "01 00", "00 00 00 00", "00 00 00 00 00 00 00 00") ONE); /* itemsize */
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("00 00", "01 00", "11 00 00 00", "11 00 00 00 00 00 00 00") ONE);
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("00 00", "01 00", "04 00 00 00", "03 00 00 00 00 00 00 00") ONE); /* other size */
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("00 00", "01 00", "04 00 00 00", "fc ff ff ff ff ff ff ff") "ff ff ff ff ff ff ff ff");
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("00 00", "ff ff", "04 00 00 00", "04 00 00 00 00 00 00 00") ONE); /* ndim */
    /* 2^32 × 2^32 × 4 is 0 in 64 bits */
    REFUSED(alloc, struct zcx_alloc, ALLOC_HEAD("00 00", "02 00", "04 00 00 00", "00 00 00 00 00 00 00 00")
            "00 00 00 00 01 00 00 00 00 00 00 00 01 00 00 00");
    struct zcx_alloc wide = m;
    wide.ndim = ZCX_NDIM_MAX + 1;
    unsigned char out[1024];
    CHECK(zcx_alloc_encode(&wide, out, sizeof out, &err) == -ZCX_E_RANGE, "too many dimensions to send");
}

static void alloc_bytes(void) {
    static const struct {
        uint32_t itemsize;
        uint16_t ndim;
        int64_t dims[4];
        int rc;
        uint64_t bytes;
    } rows[] = {
        {4, 0, {0}, 0, 4},
        {4, 1, {0}, 0, 0},
        {1, 1, {INT64_MAX}, 0, INT64_MAX},
        {2, 1, {INT64_MAX}, -ZCX_E_PROTOCOL, 0},
        {1, 2, {INT64_MAX, 2}, -ZCX_E_PROTOCOL, 0},
        {1, 3, {INT64_MAX, INT64_MAX, 0}, -ZCX_E_PROTOCOL, 0}, /* empty, but its strides would overflow */
        {16, 3, {3, 0, 5}, 0, 0},
        {16, 3, {3, 5, 7}, 0, 1680},
        {1, 2, {0, -1}, -ZCX_E_PROTOCOL, 0},
        {1, 1, {INT64_MIN}, -ZCX_E_PROTOCOL, 0},
        {1, 4, {1ll << 31, 1ll << 31, 1, 1}, 0, 1ull << 62},
        {2, 4, {1ll << 31, 1ll << 31, 1, 1}, -ZCX_E_PROTOCOL, 0}, /* 2^63 */
        {1, 4, {1ll << 32, 1ll << 32, 1, 1}, -ZCX_E_PROTOCOL, 0}, /* 2^64 */
    };
    struct zcx_err err;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        unsigned char shape[32];
        uint64_t bytes = 99;
        struct zcx_alloc a = {.ndim = rows[i].ndim, .itemsize = rows[i].itemsize, .shape = shape};
        for (uint32_t k = 0; k < 4; k++) zcx_wire_put_u64(shape, k, (uint64_t)rows[i].dims[k]);
        CHECK(zcx_alloc_bytes(&a, &bytes, &err) == rows[i].rc, "row %zu", i);
        CHECK(bytes == (rows[i].rc ? 99 : rows[i].bytes), "row %zu: %llu", i, (unsigned long long)bytes);
    }
}

static void allocated(void) {
    struct zcx_allocated m = {.has_gate = 1, .gate = gate, .buffer = buffer()};
    GOLDEN(allocated, struct zcx_allocated, m, "01 00 00 00" GATE_HEX BUFFER_HEX, 0, 0);
    CHECK(back.has_gate == 1 && back.gate.pool == 2 && back.gate.ready_slot == 3 && back.gate.done_slot == 4, "gate");
    CHECK(back.gate.ready == 5 && back.gate.done == 0x8000000000000006 && back.buffer.id == m.buffer.id, "gate, buffer");
    free(exact);
    REFUSED(allocated, struct zcx_allocated, "00 00 00 00" GATE_HEX BUFFER_HEX); /* a gate it does not have */
    REFUSED(allocated, struct zcx_allocated, "02 00 00 00" GATE_HEX BUFFER_HEX);
}

static void allocated_without_gate(void) {
    struct zcx_allocated m = {.has_gate = 0, .gate = gate, .buffer = buffer()};
    GOLDEN(allocated, struct zcx_allocated, m,
           "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00" BUFFER_HEX,
           0, 0);
    CHECK(back.has_gate == 0, "no gate");
    free(exact);
}

static void refused(void) {
    struct zcx_refused m = {.code = ZCX_REFUSED_RUNG, .reason = zcx_text_of("full")};
    GOLDEN(refused, struct zcx_refused, m, "03 00 00 00 04 00 66 75 6c 6c", 0, 0);
    CHECK(back.code == ZCX_REFUSED_RUNG && text_is(back.reason, "full"), "fields");
    free(exact);
}

static void result_msg(void) {
    unsigned char kept[16];
    zcx_wire_put_u64(kept, 0, 1);
    zcx_wire_put_u64(kept, 1, 0x0102030405060708);
    struct zcx_result_msg m = {.nkept = 2, .code = ZCX_FAILED_CANCELLED, .kept = kept};
    GOLDEN(result_msg, struct zcx_result_msg, m,
           "02 00 00 00 02 00 00 00 01 00 00 00 00 00 00 00 08 07 06 05 04 03 02 01 54 46", 2, 1);
    CHECK(back.nkept == 2 && back.code == ZCX_FAILED_CANCELLED && back.tree_bytes == 2 && !memcmp(back.tree, "TF", 2), "fields");
    CHECK(zcx_wire_u64(back.kept, 0) == 1 && zcx_wire_u64(back.kept, 1) == 0x0102030405060708, "ids");
    free(exact);
    REFUSED(result_msg, struct zcx_result_msg, "01 00 00 00 00 00 00 00 4e");
    REFUSED(result_msg, struct zcx_result_msg, "00 00 00 20 00 00 00 00 4e"); /* times 8: 2^32 */
    REFUSED(result_msg, struct zcx_result_msg, "ff ff ff ff 00 00 00 00 01 00 00 00 00 00 00 00");
}

static void release(void) {
    unsigned char ids[16];
    zcx_wire_put_u64(ids, 0, 0x10);
    zcx_wire_put_u64(ids, 1, UINT64_MAX);
    struct zcx_release m = {.count = 2, .ids = ids};
    GOLDEN(release, struct zcx_release, m, "02 00 00 00 10 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff", 0, 0);
    CHECK(back.count == 2 && zcx_wire_u64(back.ids, 0) == 0x10 && zcx_wire_u64(back.ids, 1) == UINT64_MAX, "ids");
    free(exact);
    REFUSED(release, struct zcx_release, "00 00 00 20 10 00 00 00 00 00 00 00");
    REFUSED(release, struct zcx_release, "01 00 00 00 10 00 00 00 00 00 00 00 11 00 00 00 00 00 00 00");
}

static void progress(void) {
    struct zcx_progress m = {.done = 1.5, .total = -2, .message = zcx_text_of("h\xc3\xa9")};
    GOLDEN(progress, struct zcx_progress, m, "00 00 00 00 00 00 f8 3f 00 00 00 00 00 00 00 c0 03 00 68 c3 a9", 0, 0);
    CHECK(back.done == 1.5 && back.total == -2 && text_is(back.message, "h\xc3\xa9"), "fields");
    free(exact);
}

/* ---- fixed parts, strings ---- */

static void fixed_parts(void) {
    unsigned char golden[ZCX_BUFFER_BYTES], out[ZCX_BUFFER_BYTES];
    struct zcx_buffer b = buffer(), back;
    struct zcx_gate_ref g;
    struct zcx_err err;
    CHECK(hex(GATE_HEX, golden, sizeof golden) == ZCX_GATE_REF_BYTES, "size of a gate");
    memset(out, 0xff, sizeof out);
    zcx_gate_ref_encode(&gate, out);
    same("gate", out, ZCX_GATE_REF_BYTES, golden, ZCX_GATE_REF_BYTES);
    CHECK(zcx_gate_ref_decode(golden, &g, &err) == 0 && g.pool == 2 && g.ready_slot == 3 && g.done_slot == 4, "gate");
    for (size_t i = 0; i < ZCX_GATE_REF_BYTES; i++) {
        int reserved = (i >= 2 && i < 4) || (i >= 12 && i < 16);
        golden[i] ^= 0x80;
        CHECK(zcx_gate_ref_decode(golden, &g, &err) == (reserved ? -ZCX_E_PROTOCOL : 0), "gate, byte %zu", i);
        golden[i] ^= 0x80;
    }

    CHECK(hex(BUFFER_HEX, golden, sizeof golden) == ZCX_BUFFER_BYTES, "size of a buffer");
    memset(out, 0xff, sizeof out);
    zcx_buffer_encode(&b, out);
    same("buffer", out, ZCX_BUFFER_BYTES, golden, ZCX_BUFFER_BYTES);
    CHECK(zcx_buffer_decode(golden, &back, &err) == 0, "%s", err.text);
    CHECK(back.id == b.id && back.rung == b.rung && back.flags == b.flags && back.pool == b.pool && back.nbytes == b.nbytes &&
          back.offset == b.offset && back.window == b.window && back.alloc_bytes == b.alloc_bytes && back.key == b.key && !memcmp(back.blob, b.blob, 64),
          "fields");
    for (size_t i = 112; i < ZCX_BUFFER_BYTES; i++) {
        golden[i] = 1;
        CHECK(zcx_buffer_decode(golden, &back, &err) == -ZCX_E_PROTOCOL, "buffer, byte %zu", i);
        golden[i] = 0;
    }
#define FORGED(field, value, rc)                                                    \
    do {                                                                            \
        struct zcx_buffer forged = buffer();                                        \
        forged.field = (value);                                                     \
        zcx_buffer_encode(&forged, out);                                            \
        CHECK(zcx_buffer_decode(out, &back, &err) == (rc), #field " = " #value);    \
    } while (0)
    FORGED(rung, 0, -ZCX_E_PROTOCOL);
    FORGED(rung, ZCX_RUNG_HOST + 1, -ZCX_E_PROTOCOL);
    FORGED(flags, 0, 0);
    FORGED(flags, ZCX_BUFFER_PRIVATE, 0);
    FORGED(flags, ZCX_BUFFER_RESULT | ZCX_BUFFER_PRIVATE, -ZCX_E_PROTOCOL);
    FORGED(flags, 4, -ZCX_E_PROTOCOL);
    FORGED(offset, UINT64_MAX, -ZCX_E_PROTOCOL);
    FORGED(nbytes, UINT64_MAX - 511, -ZCX_E_PROTOCOL); /* + 512: 2^64 */
    FORGED(nbytes, UINT64_MAX, -ZCX_E_PROTOCOL);
    FORGED(alloc_bytes, 4096 + 511, -ZCX_E_PROTOCOL); /* one byte beyond it */
    FORGED(alloc_bytes, 4096 + 512, 0);
    FORGED(window, 0, 0);
    FORGED(window, UINT32_MAX, 0); /* what the importer can bear is the importer's to say */
    for (uint8_t rung = ZCX_RUNG_POOL + 1; rung <= ZCX_RUNG_HOST; rung++) FORGED(rung, rung, -ZCX_E_PROTOCOL); /* with a window */
#undef FORGED
    b.rung = ZCX_RUNG_HOST; /* whose allocation is the segment: its size is known to the user alone */
    b.window = 0;
    b.alloc_bytes = 0;
    zcx_buffer_encode(&b, out);
    CHECK(zcx_buffer_decode(out, &back, &err) == 0, "host: %s", err.text);
    b.rung = ZCX_RUNG_STAGED; /* the offset is the window's, and says nothing about the bytes */
    zcx_buffer_encode(&b, out);
    CHECK(zcx_buffer_decode(out, &back, &err) == 0, "staged: %s", err.text);
    b.rung = ZCX_RUNG_VMM;
    zcx_buffer_encode(&b, out);
    CHECK(zcx_buffer_decode(out, &back, &err) == -ZCX_E_PROTOCOL, "vmm: beyond its slab");
    b.alloc_bytes = b.offset + b.nbytes;
    zcx_buffer_encode(&b, out);
    CHECK(zcx_buffer_decode(out, &back, &err) == 0, "vmm, to the end of its slab: %s", err.text);
}

static void ring_ref(void) {
    static const char digits[] = "02 00 00 00 3f 00 00 00 0d 0c 0b 0a 00 00 00 00"
                                 "88 77 66 55 44 33 22 11 00 00 00 00 01 00 00 80"
                                 "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00";
    struct zcx_ring_ref r = {.carrier = ZCX_CARRIER_SEGMENT, .filled_slot = 0x3f, .emptied_slot = 0x0a0b0c0d, .filled = 0x1122334455667788,
                             .emptied = 0x8000000100000000}, back;
    unsigned char golden[64], out[64];
    struct zcx_err err;
    CHECK(hex(digits, golden, sizeof golden) == 64, "size of a blob");
    memset(out, 0xff, sizeof out);
    zcx_ring_ref_encode(&r, out);
    same("ring", out, sizeof out, golden, sizeof golden);
    CHECK(zcx_ring_ref_decode(golden, &back, &err) == 0, "%s", err.text);
    CHECK(back.carrier == 2 && back.filled_slot == 0x3f && back.emptied_slot == 0x0a0b0c0d && back.filled == r.filled && back.emptied == r.emptied, "fields");
    for (size_t i = 0; i < 64; i++) {
        int reserved = (i >= 2 && i < 4) || (i >= 12 && i < 16) || i >= 32, carrier = i < 2;
        golden[i] ^= 0x80;
        CHECK(zcx_ring_ref_decode(golden, &back, &err) == (reserved || carrier ? -ZCX_E_PROTOCOL : 0), "ring, byte %zu", i);
        golden[i] ^= 0x80;
    }
    golden[0] = ZCX_CARRIER_SLAB;
    CHECK(zcx_ring_ref_decode(golden, &back, &err) == 0 && back.carrier == ZCX_CARRIER_SLAB, "a slab carries");
    golden[0] = 0;
    CHECK(zcx_ring_ref_decode(golden, &back, &err) == -ZCX_E_PROTOCOL, "nothing carries");
    golden[0] = 3;
    CHECK(zcx_ring_ref_decode(golden, &back, &err) == -ZCX_E_PROTOCOL, "an unknown carrier");
}

static void strings(void) {
    char longest[ZCX_STRING_MAX + 8];
    unsigned char out[ZCX_STRING_MAX + 64];
    struct zcx_err err;
    struct zcx_refused m = {.code = 1}, back;
    memset(longest, 'a', sizeof longest);
    longest[ZCX_STRING_MAX] = 0;
    m.reason = zcx_text_of(longest);
    CHECK(m.reason.length == ZCX_STRING_MAX, "just fits");
    long n = zcx_refused_encode(&m, out, sizeof out, &err);
    CHECK(n == 6 + ZCX_STRING_MAX && zcx_refused_decode(out, (size_t)n, &back, &err) == 0 && text_is(back.reason, longest), "round");
    longest[ZCX_STRING_MAX] = 'b';
    longest[ZCX_STRING_MAX + 1] = 0;
    CHECK(zcx_text_of(longest).length == ZCX_STRING_MAX, "cut");
    memcpy(longest + ZCX_STRING_MAX - 2, "\xe2\x82\xac", 4); /* a euro sign over the edge */
    CHECK(zcx_text_of(longest).length == ZCX_STRING_MAX - 2, "cut between characters, not inside one");
    CHECK(zcx_text_of(NULL).length == 0 && zcx_text_of("").length == 0, "empty");
    m.reason.length = ZCX_STRING_MAX + 1; /* not made by zcx_text_of */
    CHECK(zcx_refused_encode(&m, out, sizeof out, &err) == -ZCX_E_RANGE, "too long to send");
    memset(out, 'a', sizeof out); /* the bytes would be there */
    memcpy(out, "\1\0\0\0\1\x10", 6);
    CHECK(zcx_refused_decode(out, 6 + ZCX_STRING_MAX + 1, &back, &err) == -ZCX_E_PROTOCOL, "too long to receive");
}

int main(void) {
    RUN(header);
    RUN(header_refused);
    RUN(hello);
    RUN(gate_page);
    RUN(pool_msg);
    RUN(pool_reply);
    RUN(gate_event);
    RUN(prove);
    RUN(proved);
    RUN(segment);
    RUN(slab_msg);
    RUN(call_msg);
    RUN(alloc);
    RUN(alloc_bytes);
    RUN(allocated);
    RUN(allocated_without_gate);
    RUN(refused);
    RUN(result_msg);
    RUN(release);
    RUN(progress);
    RUN(fixed_parts);
    RUN(ring_ref);
    RUN(strings);
    return 0;
}
