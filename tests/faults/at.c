/* at.c: a process that acts at a named point of its own work: it dies, stops talking, waits, or is refused something.
 *
 * Loaded with LD_PRELOAD into a worker or a parent by tests; never part of the package. Points, in the order in which a process
 * passes them:
 *   "send CALL", "sent CALL"    before and after a message of that type leaves
 *   "recv CALL"                 when it has arrived, before anybody looks at it
 *   "memfd_create" "fallocate"  these calls; "mmap": only of the package's own memfds
 *   "cuMemFreeAsync", …         a call of the simulated driver, which asks here (tests/simcuda/fail.c)
 *
 * $FAULTS, or faults_arm(): rules "point|nth|action", separated by commas; "nth+": that one and all later ones. Uses are counted
 * from the arming on. Actions:
 *   kill=N exit=N               end this process, by a signal or with a status
 *   close                       shut the session's socket down
 *   hold=PATH                   create PATH.there, then wait for a lock on PATH (flock: whoever holds it lets go)
 *   refuse=N                    the call fails, with this errno or this code of the driver
 *   fds                         no descriptor can be opened any more
 * Two signals do the same from outside, at any moment: SIGRTMIN+3 exits with status 41, SIGRTMIN+4 closes.
 * Does not: change what a message says. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire.h"

#define RULES 16
#define EXPORT __attribute__((visibility("default")))

static struct rule { char point[48], action[16], argument[256]; long nth, count; int on; } rules[RULES];
static int nrules;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile int session = -1;

static const char *const types[ZCX_TYPE_END] = {
    [ZCX_HELLO] = "HELLO", [ZCX_GATE] = "GATE", [ZCX_POOL] = "POOL", [ZCX_POOL_REPLY] = "POOL_REPLY", [ZCX_STARTED] = "STARTED",
    [ZCX_SEGMENT] = "SEGMENT", [ZCX_SEGMENT_DROP] = "SEGMENT_DROP", [ZCX_CALL] = "CALL", [ZCX_ALLOC] = "ALLOC",
    [ZCX_ALLOCATED] = "ALLOCATED", [ZCX_REFUSED] = "REFUSED", [ZCX_RESULT] = "RESULT", [ZCX_ERROR] = "ERROR",
    [ZCX_IMPORT_REFUSED] = "IMPORT_REFUSED", [ZCX_RELEASE] = "RELEASE", [ZCX_PROGRESS] = "PROGRESS", [ZCX_PING] = "PING",
    [ZCX_PONG] = "PONG", [ZCX_BYE] = "BYE", [ZCX_HANDLE_DROP] = "HANDLE_DROP", [ZCX_GATE_EVENT] = "GATE_EVENT",
    [ZCX_PROVE] = "PROVE", [ZCX_PROVED] = "PROVED",
};

/* ---- rules ---- */

EXPORT void faults_arm(const char *text);
void faults_arm(const char *text) {
    pthread_mutex_lock(&lock);
    nrules = 0;
    while (text && *text && nrules < RULES) {
        struct rule *r = &rules[nrules];
        char tail = 0;
        memset(r, 0, sizeof *r);
        if (sscanf(text, "%47[^|]|%ld%c", r->point, &r->nth, &tail) >= 3) {
            r->on = tail == '+';
            const char *action = strchr(strchr(text, '|') + 1, '|');
            if (action && sscanf(action + 1, "%15[^=,]=%255[^,]", r->action, r->argument) >= 1) nrules++;
        }
        text = strchr(text, ',');
        if (text) text++;
    }
    pthread_mutex_unlock(&lock);
}

static void hold(const char *path) {
    char there[300];
    int fd = open(path, O_RDWR | O_CLOEXEC), mark;
    snprintf(there, sizeof there, "%s.there", path);
    mark = open(there, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (mark >= 0) close(mark);
    while (fd >= 0 && flock(fd, LOCK_SH) && errno == EINTR) {}
    if (fd >= 0) close(fd);
}

static int act(const struct rule *r) {
    int number = atoi(r->argument);
    if (!strcmp(r->action, "refuse")) return number;
    if (!strcmp(r->action, "hold")) hold(r->argument);
    else if (!strcmp(r->action, "exit")) _exit(number);
    else if (!strcmp(r->action, "close")) shutdown(session, SHUT_RDWR);
    else if (!strcmp(r->action, "fds")) setrlimit(RLIMIT_NOFILE, &(struct rlimit){3, 3});
    else if (!strcmp(r->action, "kill")) {
        kill(getpid(), number);
        for (;;) pause(); /* it may reach another thread first */
    }
    return 0;
}

/* 0, or what the call is to fail with. */
EXPORT int faults_at(const char *point);
int faults_at(const char *point) {
    struct rule found = {.nth = 0};
    if (!nrules) return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < nrules && !found.nth; i++) {
        struct rule *r = &rules[i];
        if (strcmp(r->point, point)) continue;
        r->count++;
        if (r->count == r->nth || (r->on && r->count > r->nth)) found = *r;
    }
    pthread_mutex_unlock(&lock);
    return found.nth ? act(&found) : 0;
}

static void from_outside(int number) {
    if (number == SIGRTMIN + 3) _exit(41);
    for (int fd = session < 0 ? 3 : session; fd <= (session < 0 ? 63 : session); fd++) shutdown(fd, SHUT_RDWR); /* not known yet: all */
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("FAULTS");
    struct sigaction a = {.sa_handler = from_outside, .sa_flags = SA_RESTART};
    if (!text) return;
    sigaction(SIGRTMIN + 3, &a, NULL);
    sigaction(SIGRTMIN + 4, &a, NULL);
    faults_arm(text);
}

/* ---- what is looked at on the way ---- */

static void *next(const char *name) {
    void *f = dlsym(RTLD_NEXT, name);
    if (!f) abort();
    return f;
}

/* The point of a packet of ours, or 0. */
static int at_message(const char *when, int fd, const struct msghdr *m) {
    char point[48];
    uint32_t magic;
    uint16_t type;
    if (!m->msg_iovlen || m->msg_iov[0].iov_len < ZCX_HEADER_BYTES) return 0;
    memcpy(&magic, m->msg_iov[0].iov_base, sizeof magic);
    memcpy(&type, (const char *)m->msg_iov[0].iov_base + sizeof magic, sizeof type);
    if (magic != ZCX_WIRE_MAGIC || type >= ZCX_TYPE_END || !types[type]) return 0;
    session = fd;
    snprintf(point, sizeof point, "%s %s", when, types[type]);
    return faults_at(point);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *m, int flags) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (!real) real = (ssize_t (*)(int, const struct msghdr *, int))next("sendmsg");
    int refused = at_message("send", fd, m);
    if (refused) {
        errno = refused;
        return -1;
    }
    ssize_t n = real(fd, m, flags);
    if (n >= 0) at_message("sent", fd, m);
    return n;
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *m, int flags) {
    static ssize_t (*real)(int, struct msghdr *, int);
    if (!real) real = (ssize_t (*)(int, struct msghdr *, int))next("recvmsg");
    ssize_t n = real(fd, m, flags);
    if (n >= (ssize_t)ZCX_HEADER_BYTES) at_message("recv", fd, m);
    return n;
}

EXPORT int memfd_create(const char *name, unsigned flags) {
    static int (*real)(const char *, unsigned);
    if (!real) real = (int (*)(const char *, unsigned))next("memfd_create");
    int refused = faults_at("memfd_create");
    errno = refused;
    return refused ? -1 : real(name, flags);
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t n) {
    static int (*real)(int, int, off_t, off_t);
    if (!real) real = (int (*)(int, int, off_t, off_t))next("fallocate");
    int refused = faults_at("fallocate");
    errno = refused;
    return refused ? -1 : real(fd, mode, offset, n);
}

static int ours(int fd) {
    char path[32], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return readlink(path, name, sizeof name - 1) > 0 && !strncmp(name, "/memfd:zcx", 10);
}

EXPORT void *mmap(void *address, size_t n, int access, int flags, int fd, off_t offset) {
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (!real) real = (void *(*)(void *, size_t, int, int, int, off_t))next("mmap");
    int refused = nrules && fd >= 0 && ours(fd) ? faults_at("mmap") : 0;
    if (refused) {
        errno = refused;
        return MAP_FAILED;
    }
    return real(address, n, access, flags, fd, offset);
}
