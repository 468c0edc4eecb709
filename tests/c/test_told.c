/* test_told.c: a worker that is told of memory in many pieces, and what it may say before it has taken them. The worker is a thread that
 * writes packets of its own. */
// sources: csrc/[!m]*.c
// needs: simcuda
#include <pthread.h>
#include <sys/socket.h>

#include "cases.h"
#include "xfer.h"

#define PIECES 70
#define PIECE_BYTES (2ull << 20)

enum manner { PROMPT, TALKS, FLOODS };

static struct zcx_parent *parent;
static struct zcx_files *files;
static int worker; /* its end */
static enum manner manner;
static pthread_t thread;

static int64_t soon(void) { return zcx_now() + CASE_SECONDS * 1000000000ll; }

/* 1: nobody listens any more. */
static int say(enum zcx_type type, uint64_t seq, uint64_t id, const void *body, long n) {
    unsigned char packet[1024];
    struct zcx_header h = {.type = (uint16_t)type, .seq = seq, .id = id, .length = (uint32_t)n};
    zcx_header_encode(&h, packet);
    if (n) memcpy(packet + ZCX_HEADER_BYTES, body, (size_t)n);
    return send(worker, packet, ZCX_HEADER_BYTES + (size_t)n, MSG_NOSIGNAL) < 0;
}

static void progress(uint64_t seq) {
    unsigned char body[64];
    struct zcx_progress m = {1, 2, zcx_text_of("on")};
    say(ZCX_PROGRESS, seq, 0, body, zcx_progress_encode(&m, body, sizeof body, NULL));
}

/* Asks for one result once it is called, and takes pieces in its manner. */
static void *serve(void *arg) {
    unsigned char packet[ZCX_PACKET_MAX], body[256], control[CMSG_SPACE(4 * sizeof(int))];
    uint64_t seq = 0;
    (void)arg;
    for (;;) {
        struct iovec iov = {packet, sizeof packet};
        struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        struct zcx_hello hello = {.protocol_min = 1, .protocol_max = 1, .features = ZCX_FEATURES, .version = zcx_text_of("1"), .python = zcx_text_of("3")};
        struct zcx_pool_reply reply = {0};
        struct zcx_slab_msg slab;
        struct zcx_header h;
        ssize_t n = recvmsg(worker, &mh, MSG_CMSG_CLOEXEC);
        if (n <= 0) return NULL;
        CHECK(zcx_header_decode(packet, (size_t)n, &h, NULL) == 0);
        struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
        int fd;
        if (c) {
            memcpy(&fd, CMSG_DATA(c), sizeof fd);
            close(fd);
        }
        switch (h.type) {
        case ZCX_HELLO:
            say(ZCX_HELLO, 0, 0, body, zcx_hello_encode(&hello, body, sizeof body, NULL));
            say(ZCX_STARTED, 0, 0, NULL, 0);
            break;
        case ZCX_DEVICE: say(ZCX_POOL_REPLY, 0, 0, body, zcx_pool_reply_encode(&reply, body, sizeof body, NULL)); break;
        case ZCX_CALL: {
            unsigned char shape[8];
            struct zcx_alloc a = {.place = 1, .ndim = 1, .itemsize = 1, .nbytes = 1, .dtype = zcx_text_of("uint8"), .shape = shape};
            zcx_wire_put_u64(shape, 0, 1);
            seq = h.seq;
            say(ZCX_ALLOC, seq, 1, body, zcx_alloc_encode(&a, body, sizeof body, NULL));
            break;
        }
        case ZCX_SLAB:
            CHECK(zcx_slab_msg_decode(packet + ZCX_HEADER_BYTES, h.length, &slab, NULL) == 0);
            if (!(slab.flags & ZCX_SLAB_ANSWER)) break;
            if (manner == TALKS) {
                struct zcx_release none = {0};
                progress(seq);
                say(ZCX_RELEASE, 0, 0, body, zcx_release_encode(&none, body, sizeof body, NULL));
                say(ZCX_HANDLE_DROP, 0, 5, NULL, 0);
            }
            while (manner == FLOODS)
                if (say(ZCX_HANDLE_DROP, 0, 5, NULL, 0)) return NULL;
            say(ZCX_SLAB_TAKEN, 0, h.id, NULL, 0);
            break;
        }
    }
}

static zcu_ptr in_pieces(void) {
    zcu_access_desc access = {.location = {.type = ZCU_MEM_LOCATION_TYPE_DEVICE}, .flags = ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    zcu_mem_props props = {.type = ZCU_MEM_ALLOCATION_TYPE_PINNED, .handle_types = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                           .location = {ZCU_MEM_LOCATION_TYPE_DEVICE, 0}};
    struct zcx_scope s;
    zcu_ptr base;
    CHECK(zcx_scope_open(&s, 0, NULL) == 0);
    CHECK(s.d->MemAddressReserve(&base, PIECES * PIECE_BYTES, 0, 0, 0) == 0);
    for (int i = 0; i < PIECES; i++) {
        zcu_mem handle;
        CHECK(s.d->MemCreate(&handle, PIECE_BYTES, &props, 0) == 0 && s.d->MemMap(base + i * PIECE_BYTES, PIECE_BYTES, 0, handle, 0) == 0);
        CHECK(s.d->MemSetAccess(base + i * PIECE_BYTES, PIECE_BYTES, &access, 1) == 0 && s.d->MemRelease(handle) == 0);
    }
    zcx_scope_close(&s);
    return base;
}

static void step_to(enum zcx_event_kind kind, struct zcx_event *ev) {
    struct zcx_err err = {0};
    int r;
    do r = zcx_parent_step(parent, soon(), ev, &err);
    while (r == 2 || (r == 0 && ev->kind != kind));
    CHECK(r == 0, "%d %s", r, err.text);
}

static void begin(enum manner how, struct zcx_event *ev) {
    int pair[2], controls[2], accepted;
    unsigned device;
    uint64_t seq;
    manner = how;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0 && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, controls) == 0);
    worker = pair[1];
    CHECK((files = zcx_files_new()) != NULL && zcx_parent_new(&parent, files, pair[0], controls[0], -1, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, serve, NULL) == 0);
    CHECK(zcx_parent_hello(parent, "1", "3", NULL) == 0);
    step_to(ZCX_EV_STARTED, ev);
    CHECK(zcx_parent_offer(parent, 0, NULL, &device, &accepted, NULL) == 0);
    step_to(ZCX_EV_DEVICE, ev);
    CHECK(!ev->refused && zcx_parent_begin(parent, 1 << 20, &seq, NULL) == 0);
}

static void end(void) {
    zcx_parent_gone(parent);
    CHECK(pthread_join(thread, NULL) == 0);
    while (zcx_parent_released(parent)) {}
}

/* An input, before anything of the call was sent, and a result, while it runs. */
static int tell_of(zcu_ptr memory, int result, struct zcx_event *ev, struct zcx_err *err) {
    uint64_t id;
    if (!result) return zcx_parent_lend_device(parent, 0, ZCX_RUNG_VMM, memory, PIECES * PIECE_BYTES, 0, NULL, &files, &id, err);
    CHECK(zcx_parent_send(parent, "", 0, soon(), err) == 0, "%s", err->text);
    step_to(ZCX_EV_ALLOC, ev);
    return zcx_parent_allocated(parent, ev->request, 0, ZCX_RUNG_VMM, memory, PIECES * PIECE_BYTES, NULL, &files, err);
}

static void taken(enum manner how, int result) {
    struct zcx_event ev;
    struct zcx_err err = {0};
    begin(how, &ev);
    CHECK(tell_of(in_pieces(), result, &ev, &err) == 0, "%s", err.text);
    if (how == TALKS) { /* what was said meanwhile is not lost where it matters */
        CHECK(zcx_parent_step(parent, soon(), &ev, &err) == 0 && ev.kind == ZCX_EV_HANDLE_DROP && ev.handle == 5, "%s", err.text);
    }
    end();
}

static void flooded(int result) {
    struct zcx_event ev;
    struct zcx_err err = {0};
    begin(FLOODS, &ev);
    CHECK(tell_of(in_pieces(), result, &ev, &err) == -ZCX_E_PROTOCOL && strstr(err.text, "talks on"), "%s", err.text);
    CHECK(zcx_parent_state(parent) == ZCX_BROKEN);
    end();
}

CASE(pieces_are_taken) { taken(PROMPT, 0); }
CASE(a_worker_may_let_go_of_handles_and_buffers_before) { taken(TALKS, 0); }
CASE(a_worker_may_report_progress_while_it_is_told_of_a_result) { taken(TALKS, 1); }
CASE(a_flood_breaks_the_session_before_the_call_is_sent) { flooded(0); }
CASE(a_flood_breaks_the_session_while_the_call_runs) { flooded(1); }

int main(void) {
    RUN(pieces_are_taken);
    RUN(a_worker_may_let_go_of_handles_and_buffers_before);
    RUN(a_worker_may_report_progress_while_it_is_told_of_a_result);
    RUN(a_flood_breaks_the_session_before_the_call_is_sent);
    RUN(a_flood_breaks_the_session_while_the_call_runs);
    return 0;
}
