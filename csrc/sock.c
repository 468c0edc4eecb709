/* sock.c: see sock.h.
 *
 * A peer that breaks the rules loses the connection, and nothing that it sent with the breaking packet is kept. Truncation is
 * among that: both sides know the limits, so an honest peer's packet and descriptors always fit; only when this process may
 * open no descriptor more does the kernel cut an honest packet too, and that is said as what it is. */
#include "sock.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

/* Aligned as the kernel lays it out, with room for as many descriptors as a packet may carry. */
union control {
    struct cmsghdr header;
    unsigned char bytes[CMSG_SPACE(ZCX_FDS_MAX * sizeof(int))];
};
/* Rounding up to alignment can leave room for one more. */
#define CONTROL_FDS ((sizeof(union control) - CMSG_LEN(0)) / sizeof(int))

int64_t zcx_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int fail_dead(struct zcx_err *err) { return zcx_fail(err, ZCX_E_DIED, "the other process is gone"); }

/* ---- open, close ---- */

static int check_socket(int fd, struct zcx_err *err) {
    int domain = 0, type = 0;
    socklen_t n = sizeof domain;
    struct ucred peer;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n)) return zcx_fail_errno(err, "getsockopt(SO_DOMAIN)");
    n = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n)) return zcx_fail_errno(err, "getsockopt(SO_TYPE)");
    if (domain != AF_UNIX || type != SOCK_SEQPACKET)
        return zcx_fail(err, ZCX_E_RANGE, "descriptor %d is not a local SOCK_SEQPACKET socket", fd);
    n = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n)) return zcx_fail_errno(err, "getsockopt(SO_PEERCRED)");
    if (peer.uid != geteuid())
        return zcx_fail(err, ZCX_E_PROTOCOL, "the other end belongs to user %ld, not to %ld", (long)peer.uid, (long)geteuid());
    /* It may have been inherited over exec, which needs the flag clear; from here on no child shall have it. */
    if (fcntl(fd, F_SETFD, FD_CLOEXEC)) return zcx_fail_errno(err, "fcntl(F_SETFD)");
    return 0;
}

int zcx_sock_open(struct zcx_sock *s, int fd, int pidfd, struct zcx_err *err) {
    unsigned char *packet;
    int rc = check_socket(fd, err);
    if (rc) goto close_fd;
    packet = malloc(ZCX_PACKET_MAX);
    if (!packet) {
        rc = zcx_fail(err, ENOMEM, "%s", "");
        goto close_fd;
    }
    *s = (struct zcx_sock){.fd = fd, .pidfd = pidfd, .packet = packet};
    return 0;

close_fd:
    if (fd >= 0) close(fd);
    return rc;
}

void zcx_sock_close(struct zcx_sock *s) {
    if (s->fd >= 0) close(s->fd);
    free(s->packet);
    *s = (struct zcx_sock){.fd = -1, .pidfd = -1};
}

void zcx_sock_shutdown(struct zcx_sock *s) { shutdown(s->fd, SHUT_RDWR); }

static int disconnect(struct zcx_sock *s, int rc) {
    s->broken = 1;
    zcx_sock_shutdown(s);
    return rc;
}

/* ---- messages ---- */

static void close_all(int *fds, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (fds[i] >= 0) close(fds[i]);
}

void zcx_msg_free(struct zcx_msg *m) {
    close_all(m->fds, m->nfds);
    m->nfds = 0;
    if (m->mapped) zcx_shm_blob_unmap(m->mapped, m->header.length);
    m->mapped = NULL;
    m->body = NULL;
}

int zcx_msg_take_fd(struct zcx_msg *m, uint32_t i) {
    int fd;
    if (i >= m->nfds) return -1;
    fd = m->fds[i];
    m->fds[i] = -1;
    return fd;
}

/* ---- receiving ---- */

/* Descriptors of a received control area. Never more than CONTROL_FDS: the kernel had no more room. */
static uint32_t collect(struct msghdr *mh, int *fds) {
    uint32_t n = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        uint32_t count = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds + n, CMSG_DATA(c), count * sizeof(int));
        n += count;
    }
    return n;
}

/* The control area was cut although there was room: can this process open another descriptor at all? */
static int check_fd_limit(int fd, struct zcx_err *err) {
    struct rlimit limit = {0};
    int probe = fcntl(fd, F_DUPFD_CLOEXEC, 0), code = errno;
    if (probe >= 0) {
        close(probe);
        return 0;
    }
    if (code != EMFILE && code != ENFILE) return 0;
    getrlimit(RLIMIT_NOFILE, &limit);
    return zcx_err_at(err, __FILE__, __LINE__, code, 0, "recvmsg",
                      "descriptors were sent that this process cannot take: its limit of %" PRIu64
                      " open ones is reached, raise it (ulimit -n)", (uint64_t)limit.rlim_cur);
}

/* recvmsg, looking again after a reset: a peer that closed with something unread makes the first look fail, but what it had
 * sent before is still in the queue behind that. */
static ssize_t receive(int fd, struct msghdr *mh) {
    ssize_t n;
    int resets = 0;
    do n = recvmsg(fd, mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    return n;
}

/* Everything that must hold of a packet of n bytes; fills *m (fds aside, which stay the caller's on failure). */
static int check_packet(struct zcx_sock *s, const struct msghdr *mh, size_t n, const int *fds, uint32_t nfds, struct zcx_msg *m,
                        struct zcx_err *err) {
    int rc;
    if (mh->msg_flags & MSG_CTRUNC) {
        if (nfds < ZCX_FDS_MAX && (rc = check_fd_limit(s->fd, err))) return rc;
        return zcx_fail(err, ZCX_E_PROTOCOL, "a packet carries more descriptors than the limit of %u", ZCX_FDS_MAX);
    }
    if (mh->msg_flags & MSG_TRUNC)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a packet is larger than the limit of %u bytes", ZCX_PACKET_MAX);
    if ((rc = zcx_header_decode(s->packet, n, &m->header, err))) return rc;
    if (m->header.nfds != nfds)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a header announces %u descriptors, %u arrived", (unsigned)m->header.nfds,
                        (unsigned)nfds);
    m->body = s->packet + ZCX_HEADER_BYTES;
    m->mapped = NULL;
    if (m->header.flags & ZCX_FLAG_BODY_FD) {
        if ((rc = zcx_shm_blob_map(fds[nfds - 1], m->header.length, &m->mapped, err))) return rc;
        m->body = m->mapped;
    }
    return 0;
}

/* A read of no bytes is the end of the connection, or a packet without bytes. */
static int at_end(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLRDHUP};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLHUP | POLLRDHUP));
}

int zcx_sock_recv(struct zcx_sock *s, struct zcx_msg *m, struct zcx_err *err) {
    union control control;
    struct iovec iov = {s->packet, ZCX_PACKET_MAX};
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct zcx_msg got;
    int fds[CONTROL_FDS], rc;
    uint32_t nfds;
    ssize_t n;
    if (s->fd < 0) return zcx_fail(err, ZCX_E_DIED, "the socket is closed");
    if (s->broken) return zcx_fail(err, ZCX_E_PROTOCOL, "the connection was cut after an earlier fault of the other process");
    n = receive(s->fd, &mh);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 1;
    if (n < 0 && errno == ECONNRESET) return fail_dead(err);
    if (n < 0) return zcx_fail_errno(err, "recvmsg");
    nfds = collect(&mh, fds);
    if (n == 0 && nfds == 0 && at_end(s->fd)) return fail_dead(err);
    if ((rc = check_packet(s, &mh, (size_t)n, fds, nfds, &got, err))) {
        close_all(fds, nfds);
        return disconnect(s, rc);
    }
    if (got.mapped) close(fds[--nfds]);
    memcpy(got.fds, fds, nfds * sizeof *fds);
    got.nfds = nfds;
    *m = got;
    return 0;
}

/* ---- waiting ---- */

/* Poll {socket, pidfd} until `deadline` (0: do not wait). 0: the socket answers to `events` (an error or hang-up does too);
 * 1: deadline; 2: a signal; -ZCX_E_DIED: only the pidfd fired. */
static int poll_peer(struct zcx_sock *s, short events, int64_t deadline, struct zcx_err *err) {
    struct pollfd p[2] = {{.fd = s->fd, .events = events}, {.fd = s->pidfd, .events = POLLIN}};
    struct timespec t = {0}, *timeout = &t;
    int n;
    if (deadline == INT64_MAX) {
        timeout = NULL;
    } else if (deadline > 0) {
        int64_t left = deadline - zcx_now();
        if (left > 0) t = (struct timespec){left / 1000000000, left % 1000000000};
    }
    n = ppoll(p, 2, timeout, NULL);
    if (n < 0) return errno == EINTR ? 2 : zcx_fail_errno(err, "ppoll");
    if (p[0].revents) return 0;
    if (!p[1].revents) return 1;
    /* What it sent between the look at the socket and its death is still to be had. */
    if (poll(p, 1, 0) == 1) return 0;
    return fail_dead(err);
}

int zcx_sock_wait(struct zcx_sock *s, int64_t deadline, int64_t spin_ns, struct zcx_err *err) {
    int64_t spin_until;
    int rc;
    if (s->fd < 0) return zcx_fail(err, ZCX_E_DIED, "the socket is closed");
    if ((rc = poll_peer(s, POLLIN, 0, err)) != 1) return rc;
    if (spin_ns > 0) {
        spin_until = zcx_now();
        spin_until = spin_ns < INT64_MAX - spin_until ? spin_until + spin_ns : INT64_MAX;
        if (spin_until > deadline) spin_until = deadline;
        while (zcx_now() < spin_until)
            if ((rc = poll_peer(s, POLLIN, 0, err)) != 1) return rc;
    }
    while ((rc = poll_peer(s, POLLIN, deadline, err)) == 1 && zcx_now() < deadline) {
    }
    return rc;
}

/* ---- sending ---- */

static int died(int code) { return code == EPIPE || code == ECONNRESET || code == ECONNREFUSED || code == ENOTCONN; }

/* One packet; waits for room. */
static int send_packet(struct zcx_sock *s, const struct msghdr *mh, int64_t deadline, struct zcx_err *err) {
    int rc;
    for (;;) {
        if (sendmsg(s->fd, mh, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return 0;
        if (errno == EINTR) continue;
        if (died(errno)) return fail_dead(err);
        if (errno == ETOOMANYREFS)
            return zcx_err_at(err, __FILE__, __LINE__, ETOOMANYREFS, 0, "sendmsg",
                              "too many descriptors of this user are on their way: is a worker stopped? Raise the limit (ulimit -n)");
        if (errno != EAGAIN && errno != EWOULDBLOCK) return zcx_fail_errno(err, "sendmsg");
        rc = poll_peer(s, POLLOUT, deadline, err);
        if (rc < 0) return rc;
        if (rc > 0 && zcx_now() >= deadline) return 1;
    }
}

/* All pieces as one block; the caller frees it. */
static unsigned char *join(const struct zcx_piece *pieces, int npieces, size_t total) {
    unsigned char *all = malloc(total), *at = all;
    for (int i = 0; all && i < npieces; i++) {
        if (pieces[i].length) memcpy(at, pieces[i].bytes, pieces[i].length);
        at += pieces[i].length;
    }
    return all;
}

static int body_memfd(const struct zcx_piece *pieces, int npieces, size_t total, int *fd, struct zcx_err *err) {
    unsigned char *all;
    int rc;
    if (npieces == 1) return zcx_shm_blob_new(pieces[0].bytes, total, fd, err);
    if (!(all = join(pieces, npieces, total))) return zcx_fail(err, ENOMEM, "%s", "");
    rc = zcx_shm_blob_new(all, total, fd, err);
    free(all);
    return rc;
}

int zcx_sock_send(struct zcx_sock *s, struct zcx_header h, const struct zcx_piece *pieces, int npieces, const int *fds, uint32_t nfds,
                  int64_t deadline, struct zcx_err *err) {
    unsigned char header[ZCX_HEADER_BYTES];
    struct iovec iov[1 + ZCX_PIECES_MAX] = {{header, sizeof header}};
    struct msghdr mh = {.msg_iov = iov, .msg_iovlen = 1};
    union control control;
    struct cmsghdr *c;
    int all_fds[ZCX_FDS_MAX], body_fd = -1, rc;
    size_t total = 0;
    if (s->fd < 0) return zcx_fail(err, ZCX_E_DIED, "the socket is closed");
    if (npieces < 0 || npieces > ZCX_PIECES_MAX || nfds > ZCX_FDS_MAX - 1)
        return zcx_fail(err, ZCX_E_RANGE, "%d pieces and %u descriptors do not go into one packet", npieces, (unsigned)nfds);
    for (int i = 0; i < npieces; i++) {
        if (pieces[i].length > ZCX_BODY_MAX - total)
            return zcx_fail(err, ZCX_E_LIMIT, "a message of more than %u MiB: send large data as arrays, not in the tree",
                            ZCX_BODY_MAX >> 20);
        total += pieces[i].length;
        iov[mh.msg_iovlen++] = (struct iovec){(void *)(uintptr_t)pieces[i].bytes, pieces[i].length};
    }
    if (nfds) memcpy(all_fds, fds, nfds * sizeof *fds);
    h.length = (uint32_t)total;
    h.flags &= (uint16_t)~ZCX_FLAG_BODY_FD;
    if (total > ZCX_PACKET_MAX - ZCX_HEADER_BYTES) {
        if ((rc = body_memfd(pieces, npieces, total, &body_fd, err))) return rc;
        h.flags |= ZCX_FLAG_BODY_FD;
        all_fds[nfds++] = body_fd;
        mh.msg_iovlen = 1;
        total = 0;
    }
    h.nfds = nfds;
    zcx_header_encode(&h, header);
    /* What the other side would refuse is our own caller's mistake: said here, it does not cost the connection. */
    if (zcx_header_decode(header, sizeof header + total, &h, NULL)) {
        rc = zcx_fail(err, ZCX_E_RANGE, "a message of type %u cannot be sent with flags %#x and %u descriptors", (unsigned)h.type,
                      (unsigned)h.flags, (unsigned)nfds);
        goto close_body;
    }
    if (nfds) {
        memset(&control, 0, sizeof control);
        mh.msg_control = &control;
        mh.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
        c = CMSG_FIRSTHDR(&mh);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
        memcpy(CMSG_DATA(c), all_fds, nfds * sizeof(int));
    }
    rc = send_packet(s, &mh, deadline, err);
close_body:
    if (body_fd >= 0) close(body_fd);
    return rc;
}
