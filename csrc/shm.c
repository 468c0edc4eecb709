/* shm.c: see shm.h.
 *
 * A result file keeps one array of the extents that are free, in address order: cold ones without pages, warm ones with the
 * pages of the range that was last there. Neighbours of one kind are merged. What is handed out is nowhere recorded but in its
 * owner; the array always has room for one extent more than ranges are out, so that putting one back cannot fail.
 * After a fork the child shares the files and mappings with its parent: there, nothing but the child's own memory is freed. */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

/* What a file may keep warm unless it is told otherwise: a batch of images of one workflow is some tens of MiB, and pages that
 * are there already make a result of 64 MiB several times cheaper. */
#define WARM_MAX (256ull << 20)
/* Ranges from here on start at a multiple of it, so that the kernel may use huge pages. */
#define LARGE (2ull << 20)
/* A signal makes fallocate give up and undo the whole call; in pieces it gets on even under a profiling timer. */
#define ALLOCATE_PIECE (16ull << 20)
/* From here on the machine is asked whether it has the memory before it is allocated. */
#define ASK_FROM (64ull << 20)

#define FIXED_SIZE (F_SEAL_SHRINK | F_SEAL_GROW)

struct extent {
    uint64_t offset, size;
    int warm;
};

struct zcx_shm {
    atomic_int refs;
    pid_t pid; /* that made or took it */
    int fd;    /* -1 once retired */
    enum zcx_shm_kind kind;
    uint64_t size;
    unsigned char *base; /* parent: the whole mapping */
    pthread_mutex_t mutex; /* over what follows; result files of the parent only */
    int retired;
    struct extent *free; /* NULL: not a result file of the parent */
    size_t nfree, capacity, nout;
    uint64_t taken, warm, warm_max;
};

static uint64_t page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* To whole pages, at least one; 0 when there is no such number. */
static uint64_t to_pages(uint64_t n) {
    uint64_t page = page_size();
    if (n == 0) n = 1;
    return n > INT64_MAX - page ? 0 : (n + page - 1) / page * page;
}

static int foreign_process(const struct zcx_shm *s) { return s->pid != getpid(); }

/* ---- memfds ---- */

static int fail_full(struct zcx_err *err, int code, const char *call, uint64_t nbytes) {
    return zcx_err_at(err, __FILE__, __LINE__, code, 0, call,
                      "the machine has no room for %" PRIu64 " MiB of shared memory: free memory, or give it more or swap",
                      (nbytes + (1 << 20) - 1) >> 20);
}

/* Past RLIMIT_FSIZE the kernel sends SIGXFSZ, which kills whoever does not ignore it: so ask first. */
static int check_file_limit(uint64_t nbytes, struct zcx_err *err) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && nbytes > limit.rlim_cur)
        return zcx_fail(err, EFBIG,
                        "shared memory of %" PRIu64 " bytes is above this process's file size limit of %" PRIu64
                        ": raise it (ulimit -f unlimited)", nbytes, (uint64_t)limit.rlim_cur);
    return 0;
}

static int memfd_new(const char *name, uint64_t nbytes, struct zcx_err *err) {
    int fd, rc = check_file_limit(nbytes, err);
    if (rc) return rc;
    fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0) return fd;
    if (errno == EMFILE || errno == ENFILE) {
        struct rlimit limit = {0};
        int code = errno;
        getrlimit(RLIMIT_NOFILE, &limit);
        return zcx_err_at(err, __FILE__, __LINE__, code, 0, "memfd_create",
                          "no descriptor is free (this process may open %" PRIu64 "): raise the limit (ulimit -n)",
                          (uint64_t)limit.rlim_cur);
    }
    return zcx_fail_errno(err, "memfd_create");
}

static int set_size(int fd, uint64_t nbytes, struct zcx_err *err) {
    int rc;
    do rc = ftruncate(fd, (off_t)nbytes);
    while (rc && errno == EINTR);
    return rc ? zcx_fail_errno(err, "ftruncate") : 0;
}

/* ---- what the machine has ---- */

/* The number in a file of /proc or a control group: the first one, or the one on the line that begins with `key`.
 * UINT64_MAX: no such file or line, or no number ("max"). */
static uint64_t number_in(const char *path, const char *key) {
    char text[8192];
    const char *p = text;
    size_t n = 0;
    ssize_t got;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return UINT64_MAX;
    while (n < sizeof text - 1 && (got = read(fd, text + n, sizeof text - 1 - n)) > 0) n += (size_t)got;
    close(fd);
    text[n] = 0;
    if (key) {
        size_t length = strlen(key);
        while (strncmp(p, key, length) || (p[length] != ' ' && p[length] != ':')) {
            p = strchr(p, '\n');
            if (!p++) return UINT64_MAX;
        }
        p += length + 1;
        p += strspn(p, " ");
    }
    return *p >= '0' && *p <= '9' ? strtoull(p, NULL, 10) : UINT64_MAX;
}

static uint64_t number_below(const char *folder, const char *name, const char *key) {
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n < 0 || (size_t)n >= sizeof path ? UINT64_MAX : number_in(path, key);
}

/* The path of this process's control group that limits memory, with its mount point before it. Version 1 where it has the
 * memory controller, else version 2; 0: none. */
static int memory_group(const char *proc, const char *cgroups, char *path, size_t cap, size_t *mount) {
    char name[PATH_MAX], line[PATH_MAX];
    int version = 0;
    snprintf(name, sizeof name, "%s/self/cgroup", proc);
    FILE *f = fopen(name, "re");
    if (!f) return 0;
    while (version != 1 && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (strcmp(controllers, ":memory") && strcmp(controllers, ":")) continue;
        version = controllers[1] ? 1 : 2;
        int n = snprintf(path, cap, "%s%s", cgroups, version == 1 ? "/memory" : "");
        *mount = (size_t)n;
        if (n < 0 || (size_t)n >= cap || strlen(group) >= cap - *mount) version = 0;
        else strcpy(path + n, group);
    }
    fclose(f);
    return version;
}

uint64_t zcx_shm_available(uint64_t need, const char *proc, const char *cgroups) {
    char path[PATH_MAX];
    size_t mount = 0;
    uint64_t memory = number_below(proc, "meminfo", "MemAvailable"), swap = number_below(proc, "meminfo", "SwapFree"), least;
    int version = memory_group(proc, cgroups, path, sizeof path, &mount);
    swap = swap == UINT64_MAX ? 0 : swap << 10;
    least = memory == UINT64_MAX ? UINT64_MAX : (memory << 10) + swap;
    while (version) {
        uint64_t limit = number_below(path, version == 1 ? "memory.limit_in_bytes" : "memory.max", NULL);
        uint64_t usage = number_below(path, version == 1 ? "memory.usage_in_bytes" : "memory.current", NULL);
        if (limit < UINT64_MAX / 2 && usage != UINT64_MAX) {
            uint64_t room = limit > usage ? limit - usage : 0;
            if (room < need) { /* only then: these make the kernel add up counters of every processor */
                uint64_t active = number_below(path, "memory.stat", version == 1 ? "total_active_file" : "active_file");
                uint64_t inactive = number_below(path, "memory.stat", version == 1 ? "total_inactive_file" : "inactive_file");
                uint64_t max = number_below(path, "memory.swap.max", NULL), used = number_below(path, "memory.swap.current", NULL);
                uint64_t swappable = max == UINT64_MAX || used == UINT64_MAX ? swap : max > used ? max - used : 0;
                room += (active == UINT64_MAX ? 0 : active) + (inactive == UINT64_MAX ? 0 : inactive);
                room += swappable < swap ? swappable : swap;
            }
            if (room < least) least = room;
        }
        /* Every group above limits this one too. A container may not see its own path, but it sees its own at the mount. */
        char *last = strrchr(path + mount, '/');
        if (!last) break;
        *last = 0;
    }
    return least;
}

/* Give [offset, offset + size) its pages. Asking too much of fallocate does not fail on most machines: it wakes the kernel's
 * out-of-memory killer, and that may well choose us. On failure some pages may be there: the caller drops them. */
static int allocate(int fd, uint64_t offset, uint64_t size, struct zcx_err *err) {
    uint64_t end = offset + size;
    if (size >= ASK_FROM && size > zcx_shm_available(size, "/proc", "/sys/fs/cgroup")) return fail_full(err, ENOMEM, NULL, size);
    while (offset < end) {
        uint64_t piece = end - offset < ALLOCATE_PIECE ? end - offset : ALLOCATE_PIECE;
        if (fallocate(fd, 0, (off_t)offset, (off_t)piece) == 0) {
            offset += piece;
        } else if (errno == ENOSPC || errno == ENOMEM) {
            return fail_full(err, errno, "fallocate", size);
        } else if (errno != EINTR) {
            return zcx_fail_errno(err, "fallocate");
        }
    }
    return 0;
}

/* Give the pages back. Through the mapping, because a retired file has no descriptor. */
static void punch(struct zcx_shm *s, uint64_t offset, uint64_t size) {
    if (madvise(s->base + offset, size, MADV_REMOVE) && errno == EINVAL) {
        munlock(s->base + offset, size); /* mlockall: locked pages are not removed */
        madvise(s->base + offset, size, MADV_REMOVE);
    }
}

static int add_seals(int fd, int seals, struct zcx_err *err) {
    return fcntl(fd, F_ADD_SEALS, seals) ? zcx_fail_errno(err, "fcntl(F_ADD_SEALS)") : 0;
}

/* ---- objects ---- */

static struct zcx_shm *object_new(int fd, enum zcx_shm_kind kind, uint64_t size) {
    struct zcx_shm *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    atomic_init(&s->refs, 1);
    s->pid = getpid();
    s->fd = fd;
    s->kind = kind;
    s->size = size;
    pthread_mutex_init(&s->mutex, NULL);
    return s;
}

static int parent_new(struct zcx_shm **out, const char *name, enum zcx_shm_kind kind, uint64_t nbytes, struct zcx_err *err) {
    uint64_t size = to_pages(nbytes);
    struct zcx_shm *s;
    void *base;
    int fd, rc;
    if (!size) return zcx_fail(err, ZCX_E_RANGE, "no file is %" PRIu64 " bytes large", nbytes);
    if ((fd = memfd_new(name, size, err)) < 0) return fd;
    if ((rc = set_size(fd, size, err))) goto close_fd;
    if (kind == ZCX_SHM_INPUT && (rc = allocate(fd, 0, size, err))) goto close_fd;
    base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
        rc = zcx_fail_errno(err, "mmap");
        goto close_fd;
    }
    /* The kernel lets a mapping that was writable before FUTURE_WRITE stay so. */
    if ((rc = add_seals(fd, FIXED_SIZE | F_SEAL_SEAL | (kind == ZCX_SHM_INPUT ? F_SEAL_FUTURE_WRITE : 0), err))) goto unmap;
    s = object_new(fd, kind, size);
    if (!s) {
        rc = zcx_fail(err, ENOMEM, "%s", "");
        goto unmap;
    }
    s->base = base;
    *out = s;
    return 0;

unmap:
    munmap(base, size);
close_fd:
    close(fd);
    return rc;
}

int zcx_shm_input_new(struct zcx_shm **out, uint64_t nbytes, struct zcx_err *err) {
    return parent_new(out, "zcx-input", ZCX_SHM_INPUT, nbytes, err);
}

int zcx_shm_result_new(struct zcx_shm **out, uint64_t nbytes, struct zcx_err *err) {
    struct zcx_shm *s;
    struct extent *extents = malloc(16 * sizeof *extents);
    int rc;
    if (!extents) return zcx_fail(err, ENOMEM, "%s", "");
    if ((rc = parent_new(&s, "zcx-result", ZCX_SHM_RESULT, nbytes, err))) {
        free(extents);
        return rc;
    }
    extents[0] = (struct extent){0, s->size, 0};
    s->free = extents;
    s->nfree = 1;
    s->capacity = 16;
    s->warm_max = WARM_MAX;
    *out = s;
    return 0;
}

int zcx_shm_fd(const struct zcx_shm *s) { return s->fd; }
uint64_t zcx_shm_size(const struct zcx_shm *s) { return s->size; }
unsigned char *zcx_shm_base(struct zcx_shm *s) { return s->base; }

struct zcx_shm *zcx_shm_ref(struct zcx_shm *s) {
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

unsigned zcx_shm_refs(const struct zcx_shm *s) { return (unsigned)atomic_load_explicit(&s->refs, memory_order_acquire); }

void zcx_shm_unref(struct zcx_shm *s) {
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return;
    if (!foreign_process(s)) {
        /* A child leaves both alone: by now its table of descriptors may hold something else under this number. */
        if (s->base) munmap(s->base, s->size);
        if (s->fd >= 0) close(s->fd);
        pthread_mutex_destroy(&s->mutex);
    }
    free(s->free);
    free(s);
}

int zcx_shm_readonly_fd(struct zcx_shm *s, struct zcx_err *err) {
    char path[64];
    int fd;
    pthread_mutex_lock(&s->mutex); /* retired in between, its number could be another file's */
    if (s->fd < 0) {
        fd = zcx_fail(err, ZCX_E_UNFIT, "the worker that made this is gone, and its file with it");
    } else {
        snprintf(path, sizeof path, "/proc/self/fd/%d", s->fd);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) fd = zcx_fail_errno(err, "open(/proc/self/fd)");
    }
    pthread_mutex_unlock(&s->mutex);
    return fd;
}

/* ---- ranges of a result file ---- */

/* Replace free extent i by its parts before and behind [offset, offset + size). */
static void carve(struct zcx_shm *s, size_t i, uint64_t offset, uint64_t size) {
    struct extent e = s->free[i], parts[2];
    size_t n = 0;
    if (offset > e.offset) parts[n++] = (struct extent){e.offset, offset - e.offset, e.warm};
    if (offset + size < e.offset + e.size)
        parts[n++] = (struct extent){offset + size, e.offset + e.size - offset - size, e.warm};
    memmove(s->free + i + n, s->free + i + 1, (s->nfree - i - 1) * sizeof e);
    memcpy(s->free + i, parts, n * sizeof e);
    s->nfree += n;
    s->nfree--;
    if (e.warm) s->warm -= size;
}

/* Index of the first free extent at or behind `offset`. */
static size_t extent_after(const struct zcx_shm *s, uint64_t offset) {
    size_t low = 0, high = s->nfree;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (s->free[middle].offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Join neighbours of one kind, from extent `from` on up to and including `to`. */
static void merge(struct zcx_shm *s, size_t from, size_t to) {
    size_t kept = from;
    for (size_t i = from + 1; i <= to; i++) {
        struct extent *a = &s->free[kept], b = s->free[i];
        if (a->offset + a->size == b.offset && a->warm == b.warm) a->size += b.size;
        else s->free[++kept] = b;
    }
    memmove(s->free + kept + 1, s->free + to + 1, (s->nfree - to - 1) * sizeof *s->free);
    s->nfree -= to - kept;
}

static void insert(struct zcx_shm *s, size_t i, uint64_t offset, uint64_t size, int warm) {
    memmove(s->free + i + 1, s->free + i, (s->nfree - i) * sizeof *s->free);
    s->free[i] = (struct extent){offset, size, warm};
    s->nfree++;
    if (warm) s->warm += size;
    merge(s, i ? i - 1 : 0, i + 1 < s->nfree ? i + 1 : i);
}

/* Punch out all that is warm. */
static uint64_t cool(struct zcx_shm *s) {
    uint64_t bytes = s->warm;
    if (!bytes) return 0;
    for (size_t i = 0; i < s->nfree; i++) {
        if (!s->free[i].warm) continue;
        punch(s, s->free[i].offset, s->free[i].size);
        s->free[i].warm = 0;
    }
    s->warm = 0;
    merge(s, 0, s->nfree - 1);
    return bytes;
}

static uint64_t align(uint64_t offset, uint64_t size) {
    return size >= LARGE ? (offset + LARGE - 1) / LARGE * LARGE : offset;
}

/* Carve `size` bytes out of the smallest warm extent that needs no gap before it, or out of the first cold one that will do. */
static int find(struct zcx_shm *s, uint64_t size, int warm, uint64_t *offset) {
    size_t best = s->nfree;
    uint64_t start;
    for (size_t i = 0; i < s->nfree; i++) {
        const struct extent *e = &s->free[i];
        start = align(e->offset, size);
        if (e->warm != warm || e->size < size || start - e->offset > e->size - size) continue;
        if (!warm) {
            best = i;
            break;
        }
        if (start == e->offset && (best == s->nfree || e->size < s->free[best].size)) best = i;
    }
    if (best == s->nfree) return 0;
    start = align(s->free[best].offset, size);
    carve(s, best, start, size);
    *offset = start;
    return 1;
}

/* Room for what one take (two parts for one) and every later put can add. */
static int reserve(struct zcx_shm *s, struct zcx_err *err) {
    size_t need = s->nfree + s->nout + 3;
    struct extent *extents;
    if (need <= s->capacity) return 0;
    extents = realloc(s->free, 2 * need * sizeof *extents);
    if (!extents) return zcx_fail(err, ENOMEM, "%s", "");
    s->free = extents;
    s->capacity = 2 * need;
    return 0;
}

static void put_back(struct zcx_shm *s, uint64_t offset, uint64_t size, int warm) {
    s->nout--;
    s->taken -= size;
    insert(s, extent_after(s, offset), offset, size, warm);
}

int zcx_shm_range_take(struct zcx_shm *s, uint64_t nbytes, uint64_t *offset, struct zcx_err *err) {
    uint64_t size = to_pages(nbytes), start = 0;
    int rc, warm;
    if (!s->free || foreign_process(s)) return zcx_fail(err, ZCX_E_RANGE, "not a result file of this process");
    if (!size || size > s->size)
        return zcx_fail(err, ZCX_E_LIMIT, "a result of %" PRIu64 " bytes is above the %" PRIu64 " of address space of its worker",
                        nbytes, s->size);
    pthread_mutex_lock(&s->mutex);
    if (s->retired) rc = zcx_fail(err, ZCX_E_RANGE, "the worker of this result file is gone");
    else rc = reserve(s, err);
    if (rc) goto unlock;
    warm = find(s, size, 1, &start);
    if (!warm && !find(s, size, 0, &start)) {
        cool(s); /* warm and cold neighbours become one */
        if (!find(s, size, 0, &start)) {
            rc = zcx_fail(err, ZCX_E_LIMIT,
                          "no %" PRIu64 " bytes in one piece are left of this worker's %" PRIu64 " of address space: release results",
                          size, s->size);
            goto unlock;
        }
    }
    s->nout++;
    s->taken += size;
    pthread_mutex_unlock(&s->mutex);

    if (!warm && (rc = allocate(s->fd, start, size, err)) && zcx_shm_reclaim(s)) rc = allocate(s->fd, start, size, err);
    if (rc) {
        punch(s, start, size);
        pthread_mutex_lock(&s->mutex);
        put_back(s, start, size, 0);
        goto unlock;
    }
    *offset = start;
    return 0;

unlock:
    pthread_mutex_unlock(&s->mutex);
    return rc;
}

void zcx_shm_range_put(struct zcx_shm *s, uint64_t offset, uint64_t nbytes) {
    uint64_t size = to_pages(nbytes);
    size_t i;
    int warm;
    if (!s->free || foreign_process(s)) return;
    pthread_mutex_lock(&s->mutex);
    i = extent_after(s, offset);
    if (!size || offset > s->size || size > s->size - offset || (i < s->nfree && s->free[i].offset < offset + size) ||
        (i > 0 && s->free[i - 1].offset + s->free[i - 1].size > offset)) {
        pthread_mutex_unlock(&s->mutex); /* was free already: the second put of one range must not free another's */
        return;
    }
    warm = !s->retired && size <= s->warm_max;
    /* What was used last is what will be asked for next: so the older ones go. */
    if (warm && s->warm + size > s->warm_max) cool(s);
    if (!warm) {
        pthread_mutex_unlock(&s->mutex);
        punch(s, offset, size); /* can take long, and the range is still nobody else's */
        pthread_mutex_lock(&s->mutex);
    }
    put_back(s, offset, size, warm);
    pthread_mutex_unlock(&s->mutex);
}

void zcx_shm_keep_warm(struct zcx_shm *s, uint64_t bound) { s->warm_max = bound; }

void zcx_shm_usage(struct zcx_shm *s, uint64_t *taken, uint64_t *warm) {
    *taken = *warm = 0;
    if (!s->free || foreign_process(s)) return;
    pthread_mutex_lock(&s->mutex);
    *taken = s->taken;
    *warm = s->warm;
    pthread_mutex_unlock(&s->mutex);
}

uint64_t zcx_shm_reclaim(struct zcx_shm *s) {
    uint64_t bytes;
    if (!s->free || foreign_process(s)) return 0;
    pthread_mutex_lock(&s->mutex);
    bytes = cool(s);
    pthread_mutex_unlock(&s->mutex);
    return bytes;
}

void zcx_shm_retire(struct zcx_shm *s, int keep_fd) {
    if (!s->free || foreign_process(s)) return;
    pthread_mutex_lock(&s->mutex);
    cool(s);
    for (size_t i = 0; i < s->nfree; i++) punch(s, s->free[i].offset, s->free[i].size); /* what a worker put there unasked */
    s->retired = 1;
    if (!keep_fd && s->fd >= 0) {
        close(s->fd);
        s->fd = -1;
    }
    pthread_mutex_unlock(&s->mutex);
}

/* ---- worker ---- */

/* Is `fd` a memfd with at least these seals? Only ordinary memfds: the pages of a hugetlb one can fail to appear (SIGBUS). */
static int check_memfd(int fd, int seals, const char *what, struct stat *st, struct zcx_err *err) {
    struct statfs fs;
    int has;
    if (fstat(fd, st)) return zcx_fail_errno(err, "fstat");
    if (!S_ISREG(st->st_mode) || fstatfs(fd, &fs) || fs.f_type != TMPFS_MAGIC)
        return zcx_fail(err, ZCX_E_PROTOCOL, "%s is not a memfd", what);
    has = fcntl(fd, F_GET_SEALS);
    if (has < 0 || (has & seals) != seals)
        return zcx_fail(err, ZCX_E_PROTOCOL, "%s lacks seals (%#x of %#x)", what, has < 0 ? 0u : (unsigned)(has & seals),
                        (unsigned)seals);
    return 0;
}

int zcx_shm_take_fd(struct zcx_shm **out, int fd, enum zcx_shm_kind kind, uint64_t size, struct zcx_err *err) {
    struct stat st;
    struct zcx_shm *s;
    int rc, mode;
    if (kind != ZCX_SHM_INPUT && kind != ZCX_SHM_RESULT && kind != ZCX_SHM_FOREIGN) {
        rc = zcx_fail(err, ZCX_E_PROTOCOL, "unknown kind %d of segment", (int)kind);
        goto close_fd;
    }
    if ((rc = check_memfd(fd, FIXED_SIZE | (kind == ZCX_SHM_INPUT ? F_SEAL_FUTURE_WRITE : 0), "a segment", &st, err)))
        goto close_fd;
    if (size == 0 || (uint64_t)st.st_size != size) {
        rc = zcx_fail(err, ZCX_E_PROTOCOL, "a segment has %" PRIu64 " bytes, announced were %" PRIu64, (uint64_t)st.st_size, size);
        goto close_fd;
    }
    mode = fcntl(fd, F_GETFL) & O_ACCMODE;
    if (kind == ZCX_SHM_FOREIGN ? mode != O_RDONLY : mode != O_RDWR) {
        rc = zcx_fail(err, ZCX_E_PROTOCOL, "a segment's descriptor may %s be written", mode == O_RDONLY ? "not" : "not only");
        goto close_fd;
    }
    s = object_new(fd, kind, size);
    if (!s) {
        rc = zcx_fail(err, ENOMEM, "%s", "");
        goto close_fd;
    }
    *out = s;
    return 0;

close_fd:
    close(fd);
    return rc;
}

/* What mmap was, or munmap is to be, asked for: the pages around a range. */
static uint64_t whole_pages(uint64_t start, uint64_t nbytes, uint64_t *lead) {
    *lead = start % page_size();
    return to_pages(*lead + nbytes);
}

int zcx_shm_map(struct zcx_shm *s, uint64_t offset, uint64_t nbytes, void **addr, struct zcx_err *err) {
    uint64_t lead, length;
    void *p;
    if (offset > s->size || nbytes > s->size - offset)
        return zcx_fail(err, ZCX_E_PROTOCOL, "%" PRIu64 " bytes from %" PRIu64 " on lie outside a segment of %" PRIu64, nbytes,
                        offset, s->size);
    length = whole_pages(offset, nbytes, &lead);
    /* A result's pages are there already, and all of them will be written: mapping them at once takes a quarter of the time of
     * a fault for each. An input is mapped page by page as it is read: the kernel maps the neighbours with each. */
    p = mmap(NULL, length, PROT_READ | PROT_WRITE, (s->kind == ZCX_SHM_RESULT ? MAP_SHARED | MAP_POPULATE : MAP_PRIVATE) | MAP_NORESERVE, s->fd,
             (off_t)(offset - lead));
    if (p == MAP_FAILED) return zcx_fail_errno(err, "mmap");
    *addr = (unsigned char *)p + lead;
    return 0;
}

void zcx_shm_unmap(void *addr, uint64_t nbytes) {
    uint64_t lead, length = whole_pages((uintptr_t)addr, nbytes, &lead);
    munmap((unsigned char *)addr - lead, length);
}

int zcx_shm_edited(const void *addr, uint64_t nbytes) {
    const uint64_t file = 1ull << 61, swapped = 1ull << 62, present = 1ull << 63;
    uint64_t entries[512], page = page_size(), first = (uintptr_t)addr / page, last;
    int fd, edited = 0;
    if (nbytes == 0) return 0;
    last = ((uintptr_t)addr + nbytes - 1) / page;
    fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 1;
    while (!edited && first <= last) {
        uint64_t n = last - first + 1 < 512 ? last - first + 1 : 512;
        ssize_t got = pread(fd, entries, n * sizeof *entries, (off_t)(first * sizeof *entries));
        if (got < 0 && errno == EINTR) continue;
        if (got < (ssize_t)sizeof *entries) {
            edited = 1;
            break;
        }
        n = (uint64_t)got / sizeof *entries;
        for (uint64_t i = 0; i < n && !edited; i++) edited = !(entries[i] & file) && (entries[i] & (present | swapped));
        first += n;
    }
    close(fd);
    return edited;
}

/* ---- blobs ---- */

#define BLOB_SEALS (FIXED_SIZE | F_SEAL_WRITE | F_SEAL_SEAL)

int zcx_shm_blob_new(const void *bytes, uint64_t nbytes, int *fd, struct zcx_err *err) {
    const unsigned char *at = bytes;
    uint64_t left = nbytes;
    int made, rc;
    if (!nbytes) return zcx_fail(err, ZCX_E_RANGE, "a payload without bytes needs no memfd");
    if ((made = memfd_new("zcx-blob", nbytes, err)) < 0) return made;
    while (left) {
        ssize_t n = write(made, at, left < ALLOCATE_PIECE ? left : ALLOCATE_PIECE);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            rc = errno == ENOSPC || errno == ENOMEM ? fail_full(err, errno, "write", nbytes) : zcx_fail_errno(err, "write");
            goto close_fd;
        }
        at += n;
        left -= (uint64_t)n;
    }
    if ((rc = add_seals(made, BLOB_SEALS, err))) goto close_fd;
    *fd = made;
    return 0;

close_fd:
    close(made);
    return rc;
}

int zcx_shm_blob_map(int fd, uint64_t nbytes, const void **addr, struct zcx_err *err) {
    struct stat st;
    void *p;
    int rc = check_memfd(fd, BLOB_SEALS, "a body's descriptor", &st, err);
    if (rc) return rc;
    if (nbytes == 0 || (uint64_t)st.st_size < nbytes)
        return zcx_fail(err, ZCX_E_PROTOCOL, "a body of %" PRIu64 " bytes is in a memfd of %" PRIu64, nbytes, (uint64_t)st.st_size);
    /* Private, although nobody writes: before Linux 6.7 a write-sealed memfd cannot be mapped shared, not even for reading. */
    p = mmap(NULL, nbytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) return zcx_fail_errno(err, "mmap");
    *addr = p;
    return 0;
}

void zcx_shm_blob_unmap(const void *addr, uint64_t nbytes) { munmap((void *)(uintptr_t)addr, nbytes); }
