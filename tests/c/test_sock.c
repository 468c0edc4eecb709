// sources: csrc/sock.c csrc/wire.c csrc/shm.c csrc/err.c
// also: thread
/* test_sock.c: packets and their descriptors between two ends of a pair, one of them sometimes not ours but a hostile peer's
 * that writes raw packets; and the waits, with a peer that is slow, full, signalled or dead. */
#include "sock.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>

#include "check.h"
#include "shm.h"

#define MS 1000000ll
#define OK(call) do { int ok_ = (call); CHECK(ok_ == 0, "%d: %s", ok_, err.text); } while (0)
#define DEADLINE (zcx_now() + 20000 * MS) /* far beyond what anything here takes */

static struct zcx_err err;

/* In front of libc's: what a peer does between the kernel's look at the socket and its look at the pidfd. */
static void (*between_looks)(void);

int ppoll(struct pollfd *p, nfds_t n, const struct timespec *timeout, const sigset_t *mask) {
    int rc = (int)syscall(SYS_ppoll, p, n, timeout, mask, 8);
    if (rc > 0 && between_looks && !p[0].revents) between_looks();
    return rc;
}

/* ---- fixtures ---- */

struct pair { struct zcx_sock a, b; };

static struct pair pair_new(void) {
    struct pair p;
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0, "socketpair");
    OK(zcx_sock_open(&p.a, fds[0], -1, &err));
    OK(zcx_sock_open(&p.b, fds[1], -1, &err));
    return p;
}

static void pair_free(struct pair *p) {
    zcx_sock_close(&p->a);
    zcx_sock_close(&p->b);
}

static int send_one(struct zcx_sock *s, enum zcx_type type, uint64_t id, const void *body, size_t n, const int *fds, uint32_t nfds) {
    struct zcx_piece piece = {body, n};
    return zcx_sock_send(s, (struct zcx_header){.type = (uint16_t)type, .id = id}, &piece, 1, fds, nfds, DEADLINE, &err);
}

/* A packet past all our checks, as a hostile peer would send it. */
static void send_raw(int fd, const void *bytes, size_t n, const int *fds, size_t nfds) {
    union { struct cmsghdr header; unsigned char bytes[CMSG_SPACE(32 * sizeof(int))]; } control = {0};
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
    if (nfds) {
        mh.msg_control = &control;
        mh.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, nfds * sizeof(int));
    }
    CHECK(sendmsg(fd, &mh, MSG_NOSIGNAL) == (ssize_t)n, "raw packet of %zu bytes", n);
}

static void send_header(int fd, struct zcx_header h, const int *fds, size_t nfds) {
    unsigned char bytes[ZCX_HEADER_BYTES];
    zcx_header_encode(&h, bytes);
    send_raw(fd, bytes, sizeof bytes, fds, nfds);
}

static int pidfd_of(pid_t pid) {
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    CHECK(fd >= 0, "pidfd_open");
    return fd;
}

static void in_child(void (*f)(void)) {
    int status;
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (!pid) {
        f();
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child: %#x", (unsigned)status);
}

static int sockets(int domain, int type) {
    int fd = socket(domain, type | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0, "socket");
    return fd;
}

/* ---- open ---- */

static void not_open(const char *why, int fd, int code) {
    struct zcx_sock s;
    memset(&err, 0, sizeof err);
    CHECK(zcx_sock_open(&s, fd, -1, &err) == -code && err.code == code, "%s: %d", why, err.code);
    CHECK(fd < 0 || (fcntl(fd, F_GETFD) == -1 && errno == EBADF), "%s: closed", why);
}

static void child_of_another_user(void) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0 && setuid(65534) == 0, "pair of root's, then nobody");
    not_open("another user's", fds[0], ZCX_E_PROTOCOL);
    CHECK(strstr(err.text, "user 0"), "%s", err.text);
}

static void open_refused(void) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair");
    not_open("stream", fds[0], ZCX_E_RANGE);
    not_open("stream", fds[1], ZCX_E_RANGE);
    not_open("datagrams", sockets(AF_UNIX, SOCK_DGRAM), ZCX_E_RANGE);
    not_open("network", sockets(AF_INET, SOCK_STREAM), ZCX_E_RANGE);
    CHECK(pipe2(fds, O_CLOEXEC) == 0, "pipe");
    not_open("pipe", fds[0], ENOTSOCK);
    close(fds[1]);
    not_open("nothing", -1, EBADF);
    if (geteuid() == 0) in_child(child_of_another_user);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0, "inherited over exec");
    struct zcx_sock s;
    OK(zcx_sock_open(&s, fds[0], -1, &err));
    CHECK(fcntl(s.fd, F_GETFD) & FD_CLOEXEC, "not inherited any further");
    zcx_sock_close(&s);
    close(fds[1]);
    struct zcx_msg m;
    CHECK(s.fd == -1 && zcx_sock_recv(&s, &m, &err) == -ZCX_E_DIED, "closed");
    CHECK(zcx_sock_wait(&s, INT64_MAX, 0, &err) == -ZCX_E_DIED && send_one(&s, ZCX_PING, 0, NULL, 0, NULL, 0) == -ZCX_E_DIED, "closed");
    zcx_sock_close(&s);
}

/* ---- round trips ---- */

static void round_trip(void) {
    struct pair p = pair_new();
    struct zcx_msg m, unset;
    struct zcx_piece pieces[] = {{"abc", 3}, {NULL, 0}, {"defg", 4}};
    struct zcx_header h = {.type = ZCX_CALL, .seq = 5, .id = 6, .length = 999, .nfds = 9, .flags = ZCX_FLAG_BODY_FD};
    int fd = open("/dev/null", O_RDWR), got;
    struct stat sent, arrived;
    memset(&unset, 0x5a, sizeof unset);
    memcpy(&m, &unset, sizeof m);
    CHECK(zcx_sock_recv(&p.b, &m, &err) == 1 && !memcmp(&m, &unset, sizeof m), "nothing there");
    OK(zcx_sock_send(&p.a, h, pieces, 3, NULL, 0, 0, &err));
    OK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_PING, .id = 7}, NULL, 0, NULL, 0, 0, &err));
    OK(send_one(&p.a, ZCX_SEGMENT, 8, "0123456789", 10, &fd, 1));
    OK(zcx_sock_wait(&p.b, 0, 0, &err));
    OK(zcx_sock_recv(&p.b, &m, &err));
    CHECK(m.header.type == ZCX_CALL && m.header.seq == 5 && m.header.id == 6 && m.header.flags == 0, "header");
    CHECK(m.header.length == 7 && !memcmp(m.body, "abcdefg", 7) && m.nfds == 0 && !m.mapped, "body");
    zcx_msg_free(&m);
    OK(zcx_sock_recv(&p.b, &m, &err));
    CHECK(m.header.type == ZCX_PING && m.header.id == 7 && m.header.length == 0, "empty body");
    zcx_msg_free(&m);
    OK(zcx_sock_recv(&p.b, &m, &err));
    CHECK(m.header.type == ZCX_SEGMENT && m.nfds == 1 && m.header.nfds == 1 && m.fds[0] != fd, "descriptor");
    CHECK(fcntl(m.fds[0], F_GETFD) & FD_CLOEXEC, "close-on-exec");
    CHECK(fstat(fd, &sent) == 0 && fstat(m.fds[0], &arrived) == 0 && sent.st_rdev == arrived.st_rdev, "the same file");
    CHECK(zcx_msg_take_fd(&m, 1) == -1, "there is no second");
    got = zcx_msg_take_fd(&m, 0);
    CHECK(got >= 0 && zcx_msg_take_fd(&m, 0) == -1, "taken once");
    zcx_msg_free(&m);
    zcx_msg_free(&m);
    CHECK(fcntl(got, F_GETFD) >= 0, "the taker's");
    close(got);
    OK(send_one(&p.b, ZCX_GATE, 0, "01234567", 8, &fd, 1)); /* and back */
    OK(zcx_sock_recv(&p.a, &m, &err));
    got = m.fds[0];
    zcx_msg_free(&m);
    CHECK(fcntl(got, F_GETFD) == -1, "nobody took it: closed");
    CHECK(zcx_sock_recv(&p.b, &m, &err) == 1, "nothing more");
    close(fd);
    pair_free(&p);
}

static void send_refused(void) {
    struct pair p = pair_new();
    struct zcx_piece pieces[ZCX_PIECES_MAX + 1] = {{0}};
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC), fds[4] = {fd, fd, fd, fd};
    CHECK(send_one(&p.a, ZCX_CALL, 0, "", 0, fds, 1) == -ZCX_E_RANGE, "CALL carries no descriptor");
    CHECK(send_one(&p.a, ZCX_SEGMENT, 0, "", 0, NULL, 0) == -ZCX_E_RANGE, "SEGMENT carries one");
    CHECK(send_one(&p.a, ZCX_SEGMENT, 0, "", 0, fds, 2) == -ZCX_E_RANGE && send_one(&p.a, ZCX_SEGMENT, 0, "", 0, fds, 4) == -ZCX_E_RANGE, "not more");
    CHECK(send_one(&p.a, 0, 0, "", 0, NULL, 0) == -ZCX_E_RANGE && send_one(&p.a, ZCX_TYPE_END, 0, "", 0, NULL, 0) == -ZCX_E_RANGE, "type");
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_PING}, pieces, ZCX_PIECES_MAX + 1, NULL, 0, 0, &err) == -ZCX_E_RANGE, "pieces");
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_PING, .flags = 4}, NULL, 0, NULL, 0, 0, &err) == -ZCX_E_RANGE, "flags");
    pieces[0].length = ZCX_BODY_MAX; /* refused before a byte of it is read */
    pieces[1].length = 1;
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_CALL}, pieces, 2, NULL, 0, 0, &err) == -ZCX_E_LIMIT, "body");
    pieces[1].length = SIZE_MAX;
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_CALL}, pieces, 2, NULL, 0, 0, &err) == -ZCX_E_LIMIT, "sum overflows");
    struct zcx_msg m;
    CHECK(zcx_sock_recv(&p.b, &m, &err) == 1, "none of it left");
    OK(send_one(&p.a, ZCX_PING, 1, NULL, 0, NULL, 0)); /* and the connection lives */
    close(fd);
    pair_free(&p);
}

/* Bodies below, at and above what a packet holds; the largest; in pieces, with a descriptor beside; both ways. */
static void big_bodies(void) {
    static const size_t sizes[] = {ZCX_PACKET_MAX - ZCX_HEADER_BYTES, ZCX_PACKET_MAX - ZCX_HEADER_BYTES + 1, 1u << 20, ZCX_BODY_MAX};
    unsigned char *bytes = malloc(ZCX_BODY_MAX);
    struct pair p = pair_new();
    struct zcx_msg m;
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC), before = check_fds();
    for (size_t i = 0; i < ZCX_BODY_MAX; i++) bytes[i] = (unsigned char)(i * 31 + (i >> 13));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int back = 0; back < 2; back++) {
            struct zcx_sock *from = back ? &p.b : &p.a, *to = back ? &p.a : &p.b;
            size_t n = sizes[i];
            struct zcx_piece pieces[] = {{bytes, 10}, {bytes + 10, n - 10}};
            int large = n + ZCX_HEADER_BYTES > ZCX_PACKET_MAX;
            OK(zcx_sock_send(from, (struct zcx_header){.type = ZCX_SEGMENT, .seq = 3}, pieces, 2, &fd, 1, DEADLINE, &err));
            OK(send_one(from, ZCX_CALL, 4, bytes, n, NULL, 0));
            OK(zcx_sock_recv(to, &m, &err));
            CHECK(m.header.seq == 3 && m.header.length == n && !memcmp(m.body, bytes, n), "body of %zu", n);
            CHECK(m.nfds == 1 && !!m.mapped == large && !!(m.header.flags & ZCX_FLAG_BODY_FD) == large, "how it came");
            CHECK(m.header.nfds == 1 + (uint32_t)large && fcntl(m.fds[0], F_GETFD) >= 0 && check_fds() == before + 1, "descriptors");
            zcx_msg_free(&m);
            OK(zcx_sock_recv(to, &m, &err));
            CHECK(m.header.id == 4 && m.header.length == n && m.nfds == 0 && !memcmp(m.body, bytes, n), "body of %zu alone", n);
            zcx_msg_free(&m);
            CHECK(check_fds() == before, "closed");
        }
    }
    close(fd);
    free(bytes);
    pair_free(&p);
}

/* ---- the hostile peer ---- */

/* What was sent to p.b by hand must end the connection: everything closed, both directions shut, and it stays so. */
static void disconnects(const char *why, struct pair *p, int fds_before, int code) {
    struct zcx_msg m, unset;
    memset(&unset, 0x5a, sizeof unset);
    memcpy(&m, &unset, sizeof m);
    memset(&err, 0, sizeof err);
    CHECK(zcx_sock_wait(&p->b, 0, 0, &err) == 0, "%s", why);
    int rc = zcx_sock_recv(&p->b, &m, &err);
    CHECK(rc == -code && err.code == code && err.text[0], "%s: %d %s", why, rc, err.text);
    CHECK(!memcmp(&m, &unset, sizeof m), "%s: a message all the same", why);
    CHECK(check_fds() == fds_before, "%s: descriptors left", why);
    CHECK(zcx_sock_wait(&p->b, INT64_MAX, 0, &err) == 0 && zcx_sock_recv(&p->b, &m, &err) == -ZCX_E_PROTOCOL, "%s: for good", why);
    CHECK(send_one(&p->b, ZCX_PING, 1, NULL, 0, NULL, 0) == -ZCX_E_DIED, "%s: nothing is sent any more", why);
    CHECK(send_one(&p->a, ZCX_PING, 1, NULL, 0, NULL, 0) == -ZCX_E_DIED, "%s: the peer sees it", why);
}

#define HOSTILE(why, ...)                                         \
    do {                                                          \
        struct pair p = pair_new();                               \
        int before = check_fds();                                 \
        __VA_ARGS__                                               \
        send_header(p.a.fd, (struct zcx_header){.type = ZCX_PING}, NULL, 0); /* not delivered either */ \
        disconnects(why, &p, before, ZCX_E_PROTOCOL);             \
        pair_free(&p);                                            \
    } while (0)

static void forged(void) {
    static unsigned char large[ZCX_PACKET_MAX + 1];
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC), fds[32], n;
    const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    for (n = 0; n < 32; n++) fds[n] = fd;
    struct zcx_header segment = {.type = ZCX_SEGMENT, .nfds = 1}, ping = {.type = ZCX_PING};
    HOSTILE("a descriptor announced, none there", send_header(p.a.fd, segment, NULL, 0););
    HOSTILE("one announced, two there", send_header(p.a.fd, segment, fds, 2););
    HOSTILE("none announced, one there", send_header(p.a.fd, ping, fds, 1););
    HOSTILE("none announced, as many as fit", send_header(p.a.fd, ping, fds, ZCX_FDS_MAX););
    HOSTILE("one more than fit", send_header(p.a.fd, ping, fds, ZCX_FDS_MAX + 1););
    HOSTILE("far more than fit", send_header(p.a.fd, segment, fds, 32););
    HOSTILE("five announced and there", send_header(p.a.fd, (struct zcx_header){.type = ZCX_SEGMENT, .nfds = 5}, fds, 5););
    HOSTILE("short header", send_raw(p.a.fd, large, ZCX_HEADER_BYTES - 1, NULL, 0););
    HOSTILE("short header with a descriptor", send_raw(p.a.fd, "x", 1, fds, 1););
    HOSTILE("no bytes", send_raw(p.a.fd, "", 0, NULL, 0););
    HOSTILE("no bytes, but a descriptor", send_raw(p.a.fd, "", 0, fds, 1););
    HOSTILE("zeros", send_raw(p.a.fd, large, ZCX_HEADER_BYTES, NULL, 0););
    zcx_header_encode(&(struct zcx_header){.type = ZCX_CALL, .length = ZCX_PACKET_MAX - ZCX_HEADER_BYTES}, large);
    HOSTILE("a byte above the largest packet", send_raw(p.a.fd, large, sizeof large, NULL, 0););
    HOSTILE("a byte above, with descriptors", send_raw(p.a.fd, large, sizeof large, fds, 3););
    HOSTILE("shorter than announced", send_raw(p.a.fd, large, ZCX_PACKET_MAX - 1, NULL, 0););
    HOSTILE("a body that is not there", send_header(p.a.fd, (struct zcx_header){.type = ZCX_CALL, .length = 1}, NULL, 0););

    struct zcx_header body = {.type = ZCX_CALL, .flags = ZCX_FLAG_BODY_FD, .nfds = 1, .length = 4096};
    HOSTILE("body in a descriptor that is not there", send_header(p.a.fd, body, NULL, 0););
    HOSTILE("body in a device", send_header(p.a.fd, body, fds, 1););
    for (int bit = -1; bit < 4; bit++) {
        const int seals[] = {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_SEAL};
        int blob = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(blob >= 0 && ftruncate(blob, bit < 0 ? 4095 : 4096) == 0, "memfd");
        CHECK(fcntl(blob, F_ADD_SEALS, bit < 0 ? all : all & ~seals[bit]) == 0, "seal");
        HOSTILE("body in a memfd that is too small, or unsealed", send_header(p.a.fd, body, &blob, 1););
        close(blob);
    }
    int blob;
    OK(zcx_shm_blob_new(large, 4096, &blob, &err));
    body.length = ZCX_BODY_MAX + 1;
    HOSTILE("body above the limit", send_header(p.a.fd, body, &blob, 1););
    body.length = 0;
    HOSTILE("empty body in a memfd", send_header(p.a.fd, body, &blob, 1););
    body.length = 4096;
    body.nfds = 2;
    fds[0] = blob;
    HOSTILE("a body and a descriptor too many", send_header(p.a.fd, body, fds, 2););
    body.nfds = 1;
    HOSTILE("the same, not announced", send_header(p.a.fd, body, fds, 2););
    close(blob);
    close(fd);
}

/* At this process's own limit the kernel drops an honest peer's descriptors: said as that. */
static void child_at_its_limit(void) {
    for (uint32_t room = 0; room < 2; room++) {
        struct pair p = pair_new();
        struct rlimit limit;
        int fd = open("/dev/null", O_RDWR | O_CLOEXEC), filler[64], n = 0, before;
        unsigned char body[ZCX_PACKET_MAX] = {0};
        struct zcx_msg m;
        OK(send_one(&p.a, ZCX_SEGMENT, 1, body, sizeof body, &fd, 1)); /* two descriptors: this one and the body's */
        CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
        limit.rlim_cur = 64;
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
        while ((filler[n] = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0) n++;
        CHECK(errno == EMFILE, "full");
        for (uint32_t i = 0; i < room; i++) close(filler[--n]);
        int rc = zcx_sock_recv(&p.b, &m, &err);
        CHECK(rc == -EMFILE && strstr(err.text, "limit of 64") && strstr(err.text, "ulimit -n"), "%d: %s", rc, err.text);
        CHECK(zcx_sock_recv(&p.b, &m, &err) == -ZCX_E_PROTOCOL, "the packet is lost, and the connection with it");
        while (n) close(filler[--n]);
        before = check_fds();
        pair_free(&p);
        CHECK(check_fds() == before - 2, "and nothing else");
        close(fd);
    }
}

static void at_its_limit(void) { in_child(child_at_its_limit); }

/* ---- ends and deaths ---- */

static void end_of_file(void) {
    struct pair p = pair_new();
    struct zcx_msg m;
    OK(send_one(&p.a, ZCX_PING, 1, NULL, 0, NULL, 0));
    zcx_sock_close(&p.a);
    OK(zcx_sock_recv(&p.b, &m, &err));
    CHECK(m.header.id == 1, "what was sent before");
    OK(zcx_sock_wait(&p.b, INT64_MAX, 0, &err));
    CHECK(zcx_sock_recv(&p.b, &m, &err) == -ZCX_E_DIED && zcx_sock_recv(&p.b, &m, &err) == -ZCX_E_DIED, "end");
    CHECK(send_one(&p.b, ZCX_PING, 1, NULL, 0, NULL, 0) == -ZCX_E_DIED, "nor the other way");
    pair_free(&p);

    p = pair_new(); /* closed with something unread: the kernel says reset first, but the queue is still there */
    OK(send_one(&p.b, ZCX_PING, 9, NULL, 0, NULL, 0));
    OK(send_one(&p.a, ZCX_PING, 1, NULL, 0, NULL, 0));
    OK(send_one(&p.a, ZCX_PING, 2, NULL, 0, NULL, 0));
    zcx_sock_close(&p.a);
    for (uint64_t i = 1; i <= 2; i++) {
        OK(zcx_sock_wait(&p.b, INT64_MAX, 0, &err));
        OK(zcx_sock_recv(&p.b, &m, &err));
        CHECK(m.header.id == i, "packet %d", (int)i);
    }
    CHECK(zcx_sock_recv(&p.b, &m, &err) == -ZCX_E_DIED, "end");
    pair_free(&p);
}

static void *shut(void *arg) {
    zcx_sock_shutdown(arg);
    return NULL;
}

static void shutdown_wakes(void) {
    struct pair p = pair_new();
    struct zcx_msg m;
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, shut, &p.b), "thread");
    OK(zcx_sock_wait(&p.b, DEADLINE, 0, &err));
    CHECK(zcx_sock_recv(&p.b, &m, &err) == -ZCX_E_DIED, "end");
    pthread_join(thread, NULL);
    CHECK(zcx_sock_recv(&p.a, &m, &err) == -ZCX_E_DIED && p.b.fd >= 0, "the peer sees it; the descriptor stays");
    pair_free(&p);
}

static struct zcx_sock *last_words;

static void say_last_words(void) {
    between_looks = NULL;
    OK(send_one(last_words, ZCX_PING, 3, NULL, 0, NULL, 0));
}

static void dead_peer(void) {
    struct pair p = pair_new();
    struct zcx_msg m;
    int go[2], status;
    CHECK(pipe2(go, O_CLOEXEC) == 0, "pipe");
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (!pid) {
        char c;
        close(go[1]);
        if (send_one(&p.b, ZCX_PING, 1, NULL, 0, NULL, 0) || read(go[0], &c, 1) != 1) _exit(1);
        if (send_one(&p.b, ZCX_PING, 2, NULL, 0, NULL, 0)) _exit(1);
        _exit(0);
    }
    close(go[0]);
    p.a.pidfd = pidfd_of(pid);
    OK(zcx_sock_wait(&p.a, DEADLINE, 0, &err));
    OK(zcx_sock_recv(&p.a, &m, &err));
    CHECK(zcx_sock_wait(&p.a, zcx_now(), 0, &err) == 1, "it lives, and says nothing");
    CHECK(write(go[1], "x", 1) == 1, "let it end");
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child");
    /* Its end of the pair is still open here, as in a child that it left behind: only the pidfd tells. */
    OK(zcx_sock_wait(&p.a, DEADLINE, 0, &err));
    OK(zcx_sock_recv(&p.a, &m, &err));
    CHECK(m.header.id == 2, "what it said last comes first");
    for (int64_t spin = 0; spin < 2; spin++)
        CHECK(zcx_sock_wait(&p.a, INT64_MAX, spin * MS, &err) == -ZCX_E_DIED, "then that it is dead");
    last_words = &p.b;
    between_looks = say_last_words;
    OK(zcx_sock_wait(&p.a, DEADLINE, 0, &err));
    OK(zcx_sock_recv(&p.a, &m, &err));
    CHECK(m.header.id == 3, "said after the socket was looked at, before the pidfd was");
    CHECK(zcx_sock_wait(&p.a, DEADLINE, 0, &err) == -ZCX_E_DIED, "then that it is dead");
    close(p.a.pidfd);
    close(go[1]);
    pair_free(&p);
}

/* ---- waiting ---- */

static void deadlines(void) {
    struct pair p = pair_new();
    int64_t t;
    CHECK(zcx_sock_wait(&p.a, 0, 0, &err) == 1 && zcx_sock_wait(&p.a, 0, 1000 * MS, &err) == 1, "already over");
    for (int64_t spin = 0; spin <= 100 * MS; spin += 50 * MS) { /* none, beyond, far beyond */
        t = zcx_now();
        CHECK(zcx_sock_wait(&p.a, t + 20 * MS, spin, &err) == 1, "deadline");
        CHECK(zcx_now() >= t + 20 * MS, "not before it");
    }
    OK(send_one(&p.b, ZCX_PING, 1, NULL, 0, NULL, 0));
    OK(zcx_sock_wait(&p.a, 0, 0, &err));
    OK(zcx_sock_wait(&p.a, INT64_MAX, INT64_MAX, &err));
    pair_free(&p);
}

static int fill(struct zcx_sock *s) {
    static const unsigned char body[8000];
    struct zcx_piece piece = {body, sizeof body};
    int rc, n = 0;
    while ((rc = zcx_sock_send(s, (struct zcx_header){.type = ZCX_CALL}, &piece, 1, NULL, 0, 0, &err)) == 0) n++;
    CHECK(rc == 1 && n > 1, "full after %d: %d", n, rc);
    return n;
}

static void on_alarm(int n) { (void)n; }

/* Repeated, because one alarm could come before the wait has begun. */
static void alarm_every(suseconds_t us) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, us}, {0, us}};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &timer, NULL);
}

static void signals(void) {
    struct pair p = pair_new();
    alarm_every(5000);
    CHECK(zcx_sock_wait(&p.a, DEADLINE, 0, &err) == 2, "a signal ends the wait");
    fill(&p.a);
    int64_t t = zcx_now();
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_BYE}, NULL, 0, NULL, 0, t + 50 * MS, &err) == 1, "but not a send");
    CHECK(zcx_now() >= t + 50 * MS, "which waits on");
    alarm_every(0);
    pair_free(&p);
}

static void *drain_all(void *arg) {
    struct zcx_sock *s = arg;
    struct zcx_msg m;
    struct zcx_err e;
    do CHECK(zcx_sock_wait(s, DEADLINE, 0, &e) == 0 && zcx_sock_recv(s, &m, &e) == 0, "%s", e.text);
    while (m.header.type != ZCX_BYE);
    return NULL;
}

static void full_peer(void) {
    struct pair p = pair_new();
    pthread_t thread;
    int64_t t;
    fill(&p.a);
    t = zcx_now();
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_BYE}, NULL, 0, NULL, 0, t + 20 * MS, &err) == 1, "no room in time");
    CHECK(zcx_now() >= t + 20 * MS, "not before");
    CHECK(!pthread_create(&thread, NULL, drain_all, &p.b), "thread");
    OK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_BYE}, NULL, 0, NULL, 0, INT64_MAX, &err)); /* room comes */
    pthread_join(thread, NULL);
    fill(&p.a);
    CHECK(!pthread_create(&thread, NULL, shut, &p.b), "thread");
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_BYE}, NULL, 0, NULL, 0, INT64_MAX, &err) == -ZCX_E_DIED, "closed instead");
    pthread_join(thread, NULL);
    pair_free(&p);
}

static void full_peer_dies(void) {
    struct pair p = pair_new();
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (!pid) {
        pause();
        _exit(0);
    }
    p.a.pidfd = pidfd_of(pid);
    fill(&p.a);
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_BYE}, NULL, 0, NULL, 0, 0, &err) == 1, "full, alive");
    kill(pid, SIGKILL);
    CHECK(zcx_sock_send(&p.a, (struct zcx_header){.type = ZCX_BYE}, NULL, 0, NULL, 0, INT64_MAX, &err) == -ZCX_E_DIED, "full, dead");
    CHECK(waitpid(pid, NULL, 0) == pid, "reaped");
    close(p.a.pidfd);
    pair_free(&p);
}

/* ---- threads ---- */

static struct pair crowd;

static void *send_many(void *arg) {
    unsigned char body[3000];
    struct zcx_piece piece = {body, sizeof body};
    struct zcx_err e;
    memset(body, (int)(uintptr_t)arg, sizeof body);
    for (uint64_t i = 0; i < 2000; i++)
        CHECK(zcx_sock_send(&crowd.a, (struct zcx_header){.type = ZCX_CALL, .seq = (uintptr_t)arg, .id = i}, &piece, 1, NULL, 0,
                            INT64_MAX, &e) == 0, "%s", e.text);
    return NULL;
}

static void many_senders(void) {
    enum { SENDERS = 4 };
    pthread_t threads[SENDERS];
    uint64_t next[SENDERS] = {0};
    struct zcx_msg m;
    crowd = pair_new();
    for (uintptr_t i = 0; i < SENDERS; i++) CHECK(!pthread_create(&threads[i], NULL, send_many, (void *)i), "thread");
    for (int i = 0; i < SENDERS * 2000; i++) {
        OK(zcx_sock_wait(&crowd.b, DEADLINE, 100000, &err));
        OK(zcx_sock_recv(&crowd.b, &m, &err));
        CHECK(m.header.seq < SENDERS && m.header.id == next[m.header.seq]++, "each sender's in order");
        CHECK(m.header.length == 3000 && m.body[0] == m.header.seq && m.body[2999] == m.header.seq, "whole");
        zcx_msg_free(&m);
    }
    for (int i = 0; i < SENDERS; i++) pthread_join(threads[i], NULL);
    pair_free(&crowd);
}

int main(void) {
    RUN(open_refused);
    RUN(round_trip);
    RUN(send_refused);
    RUN(big_bodies);
    RUN(forged);
    RUN(at_its_limit);
    RUN(end_of_file);
    RUN(shutdown_wakes);
    RUN(dead_peer);
    RUN(deadlines);
    RUN(signals);
    RUN(full_peer);
    RUN(full_peer_dies);
    RUN(many_senders);
    return 0;
}
