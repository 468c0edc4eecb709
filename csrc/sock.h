/* sock.h: a SOCK_SEQPACKET socket: whole packets with their descriptors, and the wait that always has an eye on the peer.
 *
 * Every descriptor that arrives is close-on-exec from the first instant and owned by the message; a truncated packet, a
 * truncated control area or more descriptors than the header says disconnect (whatever was received is closed).
 * Sending is atomic per packet, so any thread may send; one thread at a time may receive.
 * Does not: know what a message means, CUDA, or Python. Never blocks except in zcx_sock_wait and in a send to a full peer. */
#ifndef ZCX_SOCK_H
#define ZCX_SOCK_H

#include <stdint.h>

#include "wire.h"

struct zcx_sock {
    int fd;          /* owned; open until zcx_sock_close, also when disconnected: other threads may be sending on it */
    int pidfd;       /* borrowed; -1: none. Readable means that the peer is dead */
    unsigned char *packet; /* ZCX_PACKET_MAX, for receiving */
    int broken;      /* private to the receiving thread: the peer broke the protocol, nothing more is received */
};

/* Take `fd` (owned from here on, also on failure), check that it is a SEQPACKET socket and that the peer's credentials
 * carry our own uid. */
int zcx_sock_open(struct zcx_sock *s, int fd, int pidfd, struct zcx_err *err);
void zcx_sock_close(struct zcx_sock *s);
/* Shut both directions down, from any thread: waits and receives end. The descriptor stays until zcx_sock_close. */
void zcx_sock_shutdown(struct zcx_sock *s);

struct zcx_msg {
    struct zcx_header header;    /* as it came: nfds counts the body's memfd too */
    const unsigned char *body;   /* header.length bytes, into the socket's packet, or into a mapped memfd */
    int fds[ZCX_FDS_MAX];        /* owned by the message; the body's own memfd is not among them */
    uint32_t nfds;
    const void *mapped;          /* private */
};

/* Receive without blocking: 0 and a message; 1: nothing there. -ZCX_E_DIED: end of file, or reset with nothing left in the
 * queue; -ZCX_E_PROTOCOL; -EMFILE: this process may open no descriptor more. After the last two the socket is disconnected.
 * The message is valid until the next receive; zcx_msg_free closes the descriptors that nobody took. */
int zcx_sock_recv(struct zcx_sock *s, struct zcx_msg *m, struct zcx_err *err);
void zcx_msg_free(struct zcx_msg *m);
/* Take the i-th descriptor out of the message: the caller's to close; -1 if there is none. */
int zcx_msg_take_fd(struct zcx_msg *m, uint32_t i);

/* Send header + body pieces + borrowed fds; a body above one packet goes through a sealed memfd. Header's length, nfds and
 * BODY_FD are set here. Waits for room until `deadline` (CLOCK_MONOTONIC ns; 0: do not wait; INT64_MAX: for ever).
 * A signal does not end that wait: half of a conversation cannot be taken back, so who must see signals waits in slices.
 * 0; 1: no room in time, nothing was sent; -ZCX_E_DIED; -ZCX_E_LIMIT: above ZCX_BODY_MAX; -ZCX_E_RANGE: not what this type
 * carries, or more than ZCX_PIECES_MAX pieces. */
#define ZCX_PIECES_MAX 8
struct zcx_piece { const void *bytes; size_t length; };
int zcx_sock_send(struct zcx_sock *s, struct zcx_header h, const struct zcx_piece *pieces, int npieces, const int *fds, uint32_t nfds,
                  int64_t deadline, struct zcx_err *err);

/* Wait until a packet can be received. Looks `spin_ns` long without sleeping first. A signal that is handled before it sleeps
 * goes unseen: who must see every signal waits in slices.
 * 0: something to receive (end of file included); 1: deadline; 2: a signal arrived (EINTR); -ZCX_E_DIED: the pidfd fired and
 * nothing is left to receive. */
int zcx_sock_wait(struct zcx_sock *s, int64_t deadline, int64_t spin_ns, struct zcx_err *err);

int64_t zcx_now(void); /* CLOCK_MONOTONIC, ns */

#endif
