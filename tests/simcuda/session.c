/* session.c: what the processes of one test share: charged device memory, interprocess events, happens-before.
 *
 * The file lies in $SIMCUDA_DIR, which the test made and deletes, so that nothing is left behind by a kill. Without it the
 * session is private to the process: pools and registered memory still cross (they travel as descriptors), charges and
 * interprocess events do not. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "session.h"

#define LOCKS_AT (1ll << 40) /* beyond the end of the session file: one byte for each process */

struct session *session;
static bool shared;
static int lock_fd = -1;

static bool read_stat(int pid, uint64_t *start, char *state) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name may hold anything */
    if (!at) return false;
    unsigned long long when = 0;
    const char *format = " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
    if (sscanf(at + 1, format, state, &when) != 2) return false;
    *start = when;
    return true;
}

struct process_id sim_self(void) {
    static struct process_id self;
    char state;
    if (!self.pid) {
        self.pid = getpid();
        read_stat(self.pid, &self.start, &state);
    }
    return self;
}

bool sim_dead(struct process_id p) {
    uint64_t start;
    char state;
    if (!p.pid) return true;
    if (!read_stat(p.pid, &start, &state)) return true;
    return start != p.start || state == 'Z' || state == 'X'; /* a card gives memory back at exit, not at the reaping */
}

static bool same(struct process_id a, struct process_id b) { return a.pid == b.pid && a.start == b.start; }

static struct flock lock_of(const struct process_charge *c) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCKS_AT + (c - session->processes), .l_len = 1};
}

bool sim_gone(struct process_id p) {
    if (same(p, sim_self()) || !sim_dead(p)) return false;
    for (int i = 0; lock_fd >= 0 && i < SESSION_PROCESSES; i++) {
        struct flock l = lock_of(&session->processes[i]);
        if (same(session->processes[i].owner, p)) return fcntl(lock_fd, F_OFD_GETLK, &l) || l.l_type == F_UNLCK;
    }
    return true;
}

void sim_robust_init(pthread_mutex_t *m) {
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(m, &a);
    pthread_mutexattr_destroy(&a);
}

/* Every critical section leaves the data usable at each store, so a dead owner needs no repair. */
void sim_robust_lock(pthread_mutex_t *m) {
    if (pthread_mutex_lock(m) == EOWNERDEAD) pthread_mutex_consistent(m);
}

void sim_session_lock(void) { sim_robust_lock(&session->lock); }
void sim_session_unlock(void) { pthread_mutex_unlock(&session->lock); }
bool sim_session_shared(void) { return shared; }

/* This process's line, made at need. */
static struct process_charge *own_charge(void) {
    struct process_charge *empty = NULL;
    for (int i = 0; i < SESSION_PROCESSES; i++) {
        struct process_charge *c = &session->processes[i];
        if (same(c->owner, sim_self())) return c;
        if (!empty && (!c->owner.pid || sim_gone(c->owner))) empty = c;
    }
    if (empty) *empty = (struct process_charge){.owner = sim_self()};
    return empty;
}

/* What stands for the driver's descriptors: inherited over fork, closed by exec and at the end of the last who has it. */
static int take_lock(const char *path) {
    sim_session_lock();
    lock_fd = open(path, O_RDWR | O_CLOEXEC); /* first: by it one sees that a dead process's line is still held */
    struct process_charge *c = own_charge();
    struct flock l = lock_of(c ? c : session->processes);
    int r = !c || lock_fd < 0 || fcntl(lock_fd, F_OFD_SETLK, &l) ? -1 : 0;
    sim_session_unlock();
    return r;
}

int sim_session_open(void) {
    const char *folder = getenv("SIMCUDA_DIR"), *name = getenv("SIMCUDA_SESSION");
    char path[4096];
    int fd = -1;
    if (folder && *folder) {
        snprintf(path, sizeof path, "%s/session%s%s", folder, name ? "-" : "", name ? name : "");
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) {
            fprintf(stderr, "simcuda: %s: %s\n", path, strerror(errno));
            return -1;
        }
        flock(fd, LOCK_EX);
        if (ftruncate(fd, sizeof *session)) {
            close(fd);
            return -1;
        }
        shared = true;
    }
    int flags = MAP_NORESERVE | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    session = mmap(NULL, sizeof *session, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (session == MAP_FAILED) {
        if (fd >= 0) close(fd);
        return -1;
    }
    if (session->magic != SESSION_MAGIC) {
        sim_robust_init(&session->lock);
        session->magic = SESSION_MAGIC;
    }
    if (fd >= 0) {
        flock(fd, LOCK_UN); /* closing is not enough: the mapping keeps the open file, and with it the lock */
        close(fd);
    }
    return shared ? take_lock(path) : 0;
}

/* ---- charges ---- */

static bool imported(struct pool_charge *c) {
    for (int i = 0; i < SESSION_IMPORTERS; i++)
        if (c->importers[i].pid) return true;
    return false;
}

static bool is_file(int folder, const char *name, const struct pool_charge *c) {
    char link[64];
    struct stat st;
    ssize_t n = readlinkat(folder, name, link, sizeof link);
    if (n < 15 || memcmp(link, "/memfd:simcuda-", 15)) return false;
    return !fstatat(folder, name, &st, 0) && st.st_dev == c->dev && st.st_ino == c->ino;
}

/* Has any process a descriptor of it, whether it uses this driver or not? One that is on its way in a socket is not seen. */
static bool open_somewhere(const struct pool_charge *c) {
    DIR *all = c->ino ? opendir("/proc") : NULL;
    bool found = false;
    for (struct dirent *p; all && !found && (p = readdir(all));) {
        char path[300];
        if (p->d_name[0] < '0' || p->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%s/fd", p->d_name);
        DIR *fds = opendir(path);
        for (struct dirent *f; fds && !found && (f = readdir(fds));) found = is_file(dirfd(fds), f->d_name, c);
        if (fds) closedir(fds);
    }
    if (all) closedir(all);
    return found;
}

/* Memory of those who are gone comes back; an exported pool's or block's only when its importers are gone too, and every
 * descriptor of it is closed. */
static void purge(void) {
    for (int i = 0; i < session->pools_used; i++) {
        struct pool_charge *c = &session->pools[i];
        if (!c->id) continue;
        for (int k = 0; k < SESSION_IMPORTERS; k++)
            if (c->importers[k].pid && sim_gone(c->importers[k])) c->importers[k].pid = 0;
        if (imported(c) || (!c->destroyed && !sim_gone(c->owner)) || open_somewhere(c)) continue;
        hb_forget(c->id);
        memset(c, 0, sizeof *c);
    }
    while (session->pools_used && !session->pools[session->pools_used - 1].id) session->pools_used--;
    for (int i = 0; i < SESSION_PROCESSES; i++) { /* last: what they held is found by them */
        struct process_charge *c = &session->processes[i];
        if (c->owner.pid && sim_gone(c->owner)) memset(c, 0, sizeof *c);
    }
}

static uint64_t charged(int device) {
    uint64_t sum = 0;
    for (int i = 0; i < SESSION_PROCESSES; i++) sum += session->processes[i].bytes[device];
    for (int i = 0; i < session->pools_used; i++)
        if (session->pools[i].id && session->pools[i].device == device) sum += session->pools[i].bytes;
    return sum;
}

uint64_t sim_charged(int device) {
    sim_session_lock();
    purge();
    uint64_t sum = charged(device);
    sim_session_unlock();
    return sum;
}

static struct pool_charge *pool_charge(uint64_t id) {
    for (int i = 0; i < session->pools_used; i++)
        if (session->pools[i].id == id) return &session->pools[i];
    return NULL;
}

static struct pool_charge *pool_charge_new(uint64_t id, int device, struct process_id owner) {
    struct pool_charge *c = pool_charge(0);
    if (!c && session->pools_used < SESSION_POOLS) c = &session->pools[session->pools_used++];
    if (c) *c = (struct pool_charge){.id = id, .device = device, .owner = owner};
    return c;
}

static uint64_t *account(int device, uint64_t pool) {
    if (pool) {
        struct pool_charge *c = pool_charge(pool);
        if (!c) c = pool_charge_new(pool, device, sim_self());
        return c ? &c->bytes : NULL;
    }
    struct process_charge *c = own_charge();
    return c ? &c->bytes[device] : NULL;
}

zcu_result sim_charge(int device, uint64_t pool, int64_t bytes) {
    zcu_result r = ZCU_SUCCESS;
    sim_session_lock();
    if (bytes > 0) {
        uint64_t left = sim.memory[device], sum = charged(device);
        if (sum > left || (uint64_t)bytes > left - sum) {
            purge();
            sum = charged(device);
        }
        if (sum > left || (uint64_t)bytes > left - sum) r = ZCU_ERROR_OUT_OF_MEMORY;
    }
    if (!r) {
        uint64_t *a = account(device, pool);
        if (a) *a += (uint64_t)bytes;
        else r = ZCU_ERROR_OUT_OF_MEMORY;
    }
    sim_session_unlock();
    return r;
}

void sim_charge_import(uint64_t pool, int device, int delta, uint64_t bytes) {
    if (device < 0) return;
    sim_session_lock();
    struct pool_charge *c = pool_charge(pool);
    struct process_id nobody = {0};
    if (!c && delta > 0 && (c = pool_charge_new(pool, device, nobody))) c->bytes = shared ? bytes : 0;
    for (int i = 0; c && i < SESSION_IMPORTERS; i++)
        if (delta > 0 ? !c->importers[i].pid : same(c->importers[i], sim_self())) {
            c->importers[i] = delta > 0 ? sim_self() : nobody;
            break;
        }
    purge();
    sim_session_unlock();
}

void sim_charge_exported(uint64_t pool, int fd) {
    struct stat st;
    sim_session_lock();
    struct pool_charge *c = pool_charge(pool);
    if (c && !fstat(fd, &st)) {
        c->dev = st.st_dev;
        c->ino = st.st_ino;
    }
    sim_session_unlock();
}

void sim_charge_destroyed(uint64_t pool, uint64_t retained) {
    sim_session_lock();
    struct pool_charge *c = pool_charge(pool);
    if (c) {
        c->bytes = retained;
        c->destroyed = true;
        purge();
    }
    sim_session_unlock();
}

/* ---- interprocess events ---- */

int sim_slot_take(uint64_t *generation) {
    int found = -1;
    sim_session_lock();
    for (int i = 0; i < SESSION_EVENTS && found < 0; i++)
        if (!session->events[i].refs) found = i;
    if (found >= 0) {
        struct event_slot *s = &session->events[found];
        memset(s, 0, sizeof *s);
        s->refs = 1;
        s->generation = *generation = ++session->event_generation;
    }
    sim_session_unlock();
    return found;
}

struct event_slot *sim_slot(int index) {
    return index >= 0 && index < SESSION_EVENTS ? &session->events[index] : NULL;
}

void sim_slot_ref(int index, int delta) {
    sim_session_lock();
    session->events[index].refs += (uint32_t)delta;
    sim_session_unlock();
}
