/* xfer_watch.c: the worker's eye on the control socket. See xfer.h.
 *
 * A thread of plain C that never needs the GIL, so that it works while the worker is deep in a library call. */
#include "xfer.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct zcx_watch {
    int fd, signal_number;
    pthread_t reader, told;
    atomic_uint_fast64_t cancelled, answered;
};

/* A signal that arrives between the interpreter's last look and a system call that sleeps is lost on that sleep. So it is sent
 * again until the call has answered, for as long as the parent waits for that. */
#define AGAIN_MS 50
#define AGAIN_TIMES 100

/* The session id of a process, or -1: the sixth field of its stat line, counted from behind the name (which may hold anything). */
static long session_of(const char *pid) {
    char path[64], line[1024], *at;
    long session = -1;
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, line, sizeof line - 1);
    close(fd);
    if (n <= 0) return -1;
    line[n] = 0;
    at = strrchr(line, ')');
    if (at && sscanf(at + 1, " %*c %*d %*d %ld", &session) != 1) session = -1;
    return session;
}

/* Everything that this worker started ends with it, in whatever process group it is. */
static void end_session(void) {
    long own = getsid(0);
    DIR *proc = own == getpid() ? opendir("/proc") : NULL; /* only a session of ours: never the user's terminal */
    if (proc) {
        for (struct dirent *e; (e = readdir(proc));)
            if (isdigit((unsigned char)e->d_name[0]) && atol(e->d_name) != getpid() && session_of(e->d_name) == own)
                kill((pid_t)atol(e->d_name), SIGKILL);
        closedir(proc);
    }
    kill(getpid(), SIGKILL);
}

static void *run(void *arg) {
    struct zcx_watch *w = arg;
    int again = 0;
    for (;;) {
        unsigned char packet[ZCX_HEADER_BYTES];
        struct zcx_header h;
        struct pollfd f = {.fd = w->fd, .events = POLLIN};
        if (again && atomic_load(&w->answered) >= atomic_load(&w->cancelled)) again = 0;
        if (poll(&f, 1, again ? AGAIN_MS : -1) == 0) {
            again--;
            pthread_kill(w->told, w->signal_number);
            continue;
        }
        ssize_t n = recv(w->fd, packet, sizeof packet, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) end_session();
        if (zcx_header_decode(packet, (size_t)n, &h, NULL) || h.type != ZCX_CANCEL) continue;
        if (h.seq <= atomic_load(&w->answered)) continue; /* it is over: the signal would cut short a sleep of the next call's */
        atomic_store(&w->cancelled, h.seq);
        pthread_kill(w->told, w->signal_number);
        again = AGAIN_TIMES;
    }
    return NULL;
}

int zcx_watch_start(struct zcx_watch **out, int control_fd, int signal_number, struct zcx_err *err) {
    sigset_t all, before;
    struct zcx_watch *w = calloc(1, sizeof *w);
    int r = w ? 0 : ENOMEM;
    if (w) {
        w->fd = control_fd;
        w->signal_number = signal_number;
        w->told = pthread_self();
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the main thread's business */
        r = pthread_create(&w->reader, NULL, run, w);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (r) {
        free(w);
        close(control_fd);
        return zcx_fail(err, r, "the watch on the parent cannot be started");
    }
    pthread_detach(w->reader);
    *out = w;
    return 0;
}

uint64_t zcx_watch_cancelled(const struct zcx_watch *w) { return atomic_load(&w->cancelled); }
void zcx_watch_answer(struct zcx_watch *w, uint64_t seq) { atomic_store(&w->answered, seq); }
