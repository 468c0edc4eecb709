/* session.c: what the processes of one test share: charged device memory, interprocess events, happens-before.
 *
 * The file lies in $SIMCUDA_DIR, which the test made and deletes, so that nothing is left behind by a kill. Without it the
 * session is private to the process: pools and registered memory still cross (they travel as descriptors), charges and
 * interprocess events do not. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "session.h"

struct session *session;
static bool shared;

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

int sim_session_open(void) {
    const char *folder = getenv("SIMCUDA_DIR"), *name = getenv("SIMCUDA_SESSION");
    int fd = -1;
    if (folder && *folder) {
        char path[4096];
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
    return 0;
}

/* ---- charges ---- */

static bool same(struct process_id a, struct process_id b) { return a.pid == b.pid && a.start == b.start; }
static bool gone(struct process_id p) { return !same(p, sim_self()) && sim_dead(p); }

static bool imported(struct pool_charge *c) {
    for (int i = 0; i < SESSION_IMPORTERS; i++)
        if (c->importers[i].pid) return true;
    return false;
}

/* Memory of those who died comes back; an exported pool's only when its importers are gone too. */
static void purge(void) {
    for (int i = 0; i < SESSION_PROCESSES; i++) {
        struct process_charge *c = &session->processes[i];
        if (c->owner.pid && gone(c->owner)) memset(c, 0, sizeof *c);
    }
    for (int i = 0; i < SESSION_POOLS; i++) {
        struct pool_charge *c = &session->pools[i];
        if (!c->id) continue;
        for (int k = 0; k < SESSION_IMPORTERS; k++)
            if (c->importers[k].pid && gone(c->importers[k])) c->importers[k].pid = 0;
        if (!imported(c) && (c->destroyed || gone(c->owner))) memset(c, 0, sizeof *c);
    }
}

static uint64_t charged(int device) {
    uint64_t sum = 0;
    for (int i = 0; i < SESSION_PROCESSES; i++) sum += session->processes[i].bytes[device];
    for (int i = 0; i < SESSION_POOLS; i++)
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
    for (int i = 0; i < SESSION_POOLS; i++)
        if (session->pools[i].id == id) return &session->pools[i];
    return NULL;
}

static uint64_t *account(int device, uint64_t pool) {
    if (pool) {
        struct pool_charge *c = pool_charge(pool);
        if (!c && (c = pool_charge(0))) *c = (struct pool_charge){.id = pool, .device = device, .owner = sim_self()};
        return c ? &c->bytes : NULL;
    }
    struct process_charge *empty = NULL;
    for (int i = 0; i < SESSION_PROCESSES; i++) {
        struct process_charge *c = &session->processes[i];
        if (same(c->owner, sim_self())) return &c->bytes[device];
        if (!c->owner.pid && !empty) empty = c;
    }
    if (!empty) return NULL;
    empty->owner = sim_self();
    return &empty->bytes[device];
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

void sim_charge_import(uint64_t pool, int device, int delta) {
    sim_session_lock();
    if (device >= 0 && account(device, pool)) {
        struct pool_charge *c = pool_charge(pool);
        struct process_id from = delta > 0 ? (struct process_id){0} : sim_self();
        for (int i = 0; i < SESSION_IMPORTERS; i++)
            if (delta > 0 ? !c->importers[i].pid : same(c->importers[i], from)) {
                c->importers[i] = delta > 0 ? sim_self() : (struct process_id){0};
                break;
            }
        purge();
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
