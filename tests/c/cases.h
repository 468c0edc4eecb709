/* cases.h: test cases that each run in a process of their own, because the driver can be opened only once in one, and a peer
 * process to play the other side. A case that hangs is killed by its alarm. */
#ifndef ZCX_CASES_H
#define ZCX_CASES_H

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "check.h"
#include "driver.h"

#define CASE_SECONDS 60

static inline int one_thread(void) {
    struct stat s;
    return stat("/proc/self/task", &s) == 0 && s.st_nlink == 3;
}

/* Run `body` in a child of fork(): its exit status, or 128 + the signal. */
static inline int case_fork(void (*body)(void)) {
    int status, alone = one_thread();
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(CASE_SECONDS);
        body();
        fflush(stdout);
        if (!alone) _exit(0); /* the search for leaks wants locks of the allocator's, which a thread that is not here may have held */
        exit(0);
    }
    while (waitpid(pid, &status, 0) != pid) CHECK(errno == EINTR);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#define CASE(name)                                                             \
    static void name##_here(void);                                             \
    static void name(void) { CHECK(case_fork(name##_here) == 0, #name); }      \
    static void name##_here(void)

/* The other process. It must be started before this one opens the driver. */
struct peer {
    pid_t pid;
    int sock;
};

static inline struct peer peer_start(void (*body)(int sock)) {
    struct peer p;
    int pair[2];
    CHECK(!zcx_driver_opened());
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    fflush(stdout);
    p.pid = fork();
    CHECK(p.pid >= 0);
    if (p.pid == 0) {
        alarm(CASE_SECONDS);
        close(pair[0]);
        body(pair[1]);
        exit(0);
    }
    close(pair[1]);
    p.sock = pair[0];
    return p;
}

/* Closes the socket and waits for the other's end: its exit status, or 128 + the signal. */
static inline int peer_end(struct peer *p) {
    int status;
    close(p->sock);
    while (waitpid(p->pid, &status, 0) != p->pid) CHECK(errno == EINTR);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static inline void peer_send(int sock, const void *bytes, size_t n, int fd) {
    union { char buffer[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = {{0}};
    struct iovec io = {(void *)(uintptr_t)bytes, n};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = control.buffer;
        m.msg_controllen = sizeof control.buffer;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    CHECK(sendmsg(sock, &m, MSG_NOSIGNAL) == (ssize_t)n);
}

/* Exactly n bytes; returns the descriptor that came along, or -1. -2: the other side closed. */
static inline int peer_recv(int sock, void *bytes, size_t n) {
    union { char buffer[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = {{0}};
    struct iovec io = {bytes, n};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.buffer, .msg_controllen = sizeof control.buffer};
    ssize_t got;
    int fd = -1;
    while ((got = recvmsg(sock, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {}
    if (got == 0) return -2;
    CHECK(got == (ssize_t)n, "%zd bytes instead of %zu", got, n);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c) memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}

/* A function of the library that $ZCX_LIBCUDA names, beyond those in driver.h: the simulated driver's controls
 * (tests/simcuda/README.md), or what only tests need of a driver. */
static inline void *library_symbol(const char *name) {
    void *library = dlopen(getenv("ZCX_LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    void *symbol = dlsym(library, name);
    CHECK(symbol, "%s", dlerror());
    return symbol;
}

/* What the simulated driver's processes share, so that it sees order and charges across them; it aborts at the first race. */
static char case_folder[] = "/tmp/zcx-cases-XXXXXX";

static inline void simcuda_share(void) {
    CHECK(mkdtemp(case_folder));
    CHECK(setenv("SIMCUDA_DIR", case_folder, 1) == 0 && setenv("SIMCUDA_ABORT_ON_RACE", "1", 1) == 0);
}
static inline void simcuda_unshare(void) {
    char path[sizeof case_folder + 16];
    snprintf(path, sizeof path, "%s/session", case_folder);
    CHECK(unlink(path) == 0 && rmdir(case_folder) == 0, "%s", case_folder);
}

/* "pools", "imports", "registered", …: how many this process has. */
static inline long simcuda_count(const char *what) {
    return ((long (*)(const char *))library_symbol("simcuda_count"))(what);
}

#endif
