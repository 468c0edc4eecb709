// sources: csrc/shm.c csrc/err.c
// also: thread
/* test_shm.c: sealed memfds. "Worker" here is this process again, through a second descriptor: what the kernel allows depends
 * on the descriptor and its seals, not on who holds it. Fork cases use a real child. */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include "check.h"

#define MIB (1ull << 20)
#define OK(call) do { int ok_ = (call); CHECK(ok_ == 0, "%d: %s", ok_, err.text); } while (0)

static struct zcx_err err;

/* In front of libc's: fails from the `fail_from`-th call on, `fail_times` times, with fail_errno. Linux 6.18 no longer lets an
 * ordinary signal interrupt fallocate, older ones do. */
static _Atomic int fallocates, fail_from, fail_times, fail_errno;
static _Atomic off_t longest_piece;

int fallocate(int fd, int mode, off_t offset, off_t length) {
    if (++fallocates >= fail_from && fail_times > 0) {
        fail_times--;
        errno = fail_errno;
        return -1;
    }
    if (length > longest_piece) longest_piece = length;
    return (int)syscall(SYS_fallocate, fd, mode, offset, length);
}

static void fallocate_fails(int from, int times, int code) {
    fallocates = 0;
    fail_from = from;
    fail_times = times;
    fail_errno = code;
}

/* ASan's does nothing. */
int munlock(const void *addr, size_t n) { return (int)syscall(SYS_munlock, addr, n); }

static uint64_t allocated(int fd) {
    struct stat st;
    CHECK(fstat(fd, &st) == 0, "fstat");
    return (uint64_t)st.st_blocks * 512;
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

/* The worker's side of `s`: the descriptor as it would have arrived. */
static struct zcx_shm *taken(struct zcx_shm *s, enum zcx_shm_kind kind) {
    struct zcx_shm *w;
    OK(zcx_shm_take_fd(&w, fcntl(zcx_shm_fd(s), F_DUPFD_CLOEXEC, 0), kind, zcx_shm_size(s), &err));
    return w;
}

/* ---- inputs ---- */

static void input(void) {
    struct zcx_shm *s, *w;
    void *map;
    int fd, seals;
    OK(zcx_shm_input_new(&s, 3 * MIB + 1, &err));
    fd = zcx_shm_fd(s);
    CHECK(zcx_shm_size(s) == 3 * MIB + 4096 && allocated(fd) == 3 * MIB + 4096, "whole pages, all there");
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC, "close-on-exec");
    seals = fcntl(fd, F_GET_SEALS);
    CHECK((seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)) ==
          (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), "seals %#x", (unsigned)seals);
    memset(zcx_shm_base(s), 1, zcx_shm_size(s));

    CHECK(ftruncate(fd, 4096) && errno == EPERM, "shrink");
    CHECK(ftruncate(fd, 8 * (off_t)MIB) && errno == EPERM, "grow");
    CHECK(write(fd, "x", 1) < 0 && errno == EPERM, "write");
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) && errno == EPERM, "punch");
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EPERM, "a second writable mapping");
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) && errno == EPERM, "further seals");

    w = taken(s, ZCX_SHM_INPUT);
    CHECK(zcx_shm_base(w) == NULL && zcx_shm_size(w) == zcx_shm_size(s), "a worker maps nothing at first");
    OK(zcx_shm_map(w, 4096 + 10, 20, &map, &err));
    CHECK((uintptr_t)map % 4096 == 10 && ((unsigned char *)map)[0] == 1, "points at the byte asked for");
    zcx_shm_base(s)[4096 + 10] = 2;
    CHECK(((unsigned char *)map)[0] == 2, "the parent's writes are seen until the page is the worker's own");
    memset(map, 9, 20);
    CHECK(zcx_shm_base(s)[4096 + 10] == 2 && ((unsigned char *)map)[0] == 9, "an edit stays where it was made");
    zcx_shm_unmap(map, 20);
    zcx_shm_unref(w);
    zcx_shm_unref(s);
    OK(zcx_shm_input_new(&s, 0, &err));
    CHECK(zcx_shm_size(s) == 4096, "nothing still is a page");
    zcx_shm_unref(s);
    CHECK(zcx_shm_input_new(&s, UINT64_MAX, &err) == -ZCX_E_RANGE && zcx_shm_result_new(&s, INT64_MAX, &err) == -ZCX_E_RANGE,
          "no such size");
}

static void edited(void) {
    struct zcx_shm *s, *w;
    const uint64_t size = 1100 * 4096; /* more entries than are read at once */
    volatile unsigned char *map;
    void *p;
    OK(zcx_shm_input_new(&s, size, &err));
    memset(zcx_shm_base(s), 1, size);
    w = taken(s, ZCX_SHM_INPUT);
    OK(zcx_shm_map(w, 0, size, &p, &err));
    map = p;
    CHECK(zcx_shm_edited(p, size) == 0, "untouched");
    for (uint64_t i = 0; i < size; i += 4096) CHECK(map[i] == 1, "read");
    CHECK(zcx_shm_edited(p, size) == 0, "read only");
    map[1099 * 4096 + 17] = 1; /* the same value: an edit all the same, nobody can tell it from one */
    CHECK(zcx_shm_edited(p, size) == 1, "the last page was written");
    CHECK(zcx_shm_edited(p, size - 4096) == 0, "the others were not");
    CHECK(zcx_shm_edited((char *)p + 1099 * 4096 - 1, 1) == 0 && zcx_shm_edited((char *)p + 1099 * 4096 - 1, 2) == 1, "ranges cut pages");
    CHECK(zcx_shm_edited((char *)p + 1099 * 4096, 0) == 0, "nothing");
    map[600 * 4096] = 5;
    CHECK(zcx_shm_edited((char *)p + 3, 600 * 4096 - 3) == 0 && zcx_shm_edited((char *)p + 3, 600 * 4096 - 2) == 1, "second piece");
    zcx_shm_unmap(p, size);
    CHECK(zcx_shm_edited((void *)(uintptr_t)(1ull << 60), 1) == 1, "cannot be told");
    zcx_shm_unref(w);
    zcx_shm_unref(s);
}

/* ---- ranges ---- */

static void ranges(void) {
    struct zcx_shm *s;
    uint64_t a, b, c, d, taken_bytes, warm;
    int fd;
    OK(zcx_shm_result_new(&s, 64 * MIB, &err));
    fd = zcx_shm_fd(s);
    CHECK(allocated(fd) == 0 && zcx_shm_size(s) == 64 * MIB, "sparse");
    CHECK((fcntl(fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) ==
          (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), "seals");
    OK(zcx_shm_range_take(s, 1, &a, &err));
    OK(zcx_shm_range_take(s, 0, &b, &err));
    OK(zcx_shm_range_take(s, 3 * MIB, &c, &err));
    OK(zcx_shm_range_take(s, 4097, &d, &err));
    CHECK(a == 0 && b == 4096 && c == 2 * MIB && d == 8192, "first fit, large ones aligned: %llu %llu", (unsigned long long)c,
          (unsigned long long)d);
    CHECK(allocated(fd) == 4096 + 4096 + 3 * MIB + 8192, "pages are there at once");
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(taken_bytes == 3 * MIB + 4 * 4096 && warm == 0, "usage");
    memset(zcx_shm_base(s) + c, 7, 3 * MIB);

    zcx_shm_range_put(s, c, 3 * MIB);
    zcx_shm_range_put(s, c, 3 * MIB); /* again: ignored */
    zcx_shm_range_put(s, 128 * MIB, 4096);
    zcx_shm_range_put(s, UINT64_MAX - 4095, 4096);
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(taken_bytes == 4 * 4096 && warm == 3 * MIB && allocated(fd) == 3 * MIB + 4 * 4096, "warm");
    OK(zcx_shm_range_take(s, 2 * MIB + 1, &c, &err));
    CHECK(c == 2 * MIB && zcx_shm_base(s)[c] == 7, "the same pages again");
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(warm == MIB - 4096, "what was not needed of them stays warm");
    OK(zcx_shm_range_take(s, MIB - 4096, &b, &err));
    CHECK(b == 4 * MIB + 4096 && zcx_shm_base(s)[b] == 7, "and is found");
    zcx_shm_range_put(s, b, MIB - 4096);
    zcx_shm_range_put(s, c, 2 * MIB + 1);
    OK(zcx_shm_range_take(s, 3 * MIB, &c, &err));
    CHECK(c == 2 * MIB && zcx_shm_base(s)[c] == 7 && zcx_shm_base(s)[c + 3 * MIB - 1] == 7, "warm neighbours are one");
    zcx_shm_range_put(s, c, MIB);
    zcx_shm_range_put(s, c + MIB, 2 * MIB); /* a range in two halves, the other way round */
    zcx_shm_range_put(s, c + MIB, 2 * MIB); /* and again, now inside of what is free */
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(taken_bytes == 4 * 4096 && warm == 3 * MIB, "once");
    OK(zcx_shm_range_take(s, 3 * MIB, &c, &err));
    CHECK(c == 2 * MIB && zcx_shm_base(s)[c] == 7 && zcx_shm_base(s)[c + 3 * MIB - 1] == 7, "warm neighbours are one");
    zcx_shm_range_put(s, c, 3 * MIB);

    CHECK(zcx_shm_reclaim(s) == 3 * MIB && zcx_shm_reclaim(s) == 0, "bytes given back");
    CHECK(allocated(fd) == 4 * 4096, "really");
    OK(zcx_shm_range_take(s, 3 * MIB, &c, &err));
    CHECK(c == 2 * MIB && zcx_shm_base(s)[c] == 0, "fresh pages");
    zcx_shm_range_put(s, c, 3 * MIB);
    zcx_shm_range_put(s, a, 1);
    zcx_shm_range_put(s, 4096, 0);
    zcx_shm_range_put(s, d, 4097);
    OK(zcx_shm_range_take(s, 64 * MIB, &a, &err));
    CHECK(a == 0, "nothing is lost: the whole file in one piece, warm parts and all");
    CHECK(zcx_shm_range_take(s, 1, &b, &err) == -ZCX_E_LIMIT && strstr(err.text, "release"), "used up: %s", err.text);
    CHECK(zcx_shm_range_take(s, 64 * MIB + 1, &b, &err) == -ZCX_E_LIMIT, "larger than the file");
    CHECK(zcx_shm_range_take(s, UINT64_MAX, &b, &err) == -ZCX_E_LIMIT, "larger than anything");
    zcx_shm_range_put(s, a, 64 * MIB);
    zcx_shm_unref(s);

    OK(zcx_shm_input_new(&s, 4096, &err));
    CHECK(zcx_shm_range_take(s, 1, &a, &err) == -ZCX_E_RANGE && zcx_shm_reclaim(s) == 0, "not a result file");
    zcx_shm_range_put(s, 0, 1);
    zcx_shm_unref(s);
}

/* The bound on what is kept warm: the older ones go, and what is larger than the bound never stays. */
static void warm_bound(void) {
    struct zcx_shm *s;
    uint64_t at[3], large, warm, taken_bytes;
    OK(zcx_shm_result_new(&s, 1024 * MIB, &err));
    for (int i = 0; i < 3; i++) OK(zcx_shm_range_take(s, 100 * MIB, &at[i], &err));
    zcx_shm_range_put(s, at[0], 100 * MIB);
    zcx_shm_range_put(s, at[2], 100 * MIB);
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(warm == 200 * MIB, "both stay");
    zcx_shm_range_put(s, at[1], 100 * MIB);
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(warm == 100 * MIB && allocated(zcx_shm_fd(s)) == 100 * MIB, "the last one stays, the others went");
    OK(zcx_shm_range_take(s, 100 * MIB, &large, &err));
    CHECK(large == at[1], "and is what is given out next");
    zcx_shm_range_put(s, large, 100 * MIB);
    OK(zcx_shm_range_take(s, 300 * MIB, &large, &err));
    zcx_shm_range_put(s, large, 300 * MIB);
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(taken_bytes == 0 && warm == 100 * MIB && allocated(zcx_shm_fd(s)) == 100 * MIB, "above the bound: given back at once");
    zcx_shm_unref(s);
}

static unsigned draw(unsigned *seed, unsigned n) { return ((*seed = *seed * 1103515245u + 12345u) >> 16) % n; }

/* Random takes and puts against a map of who owns each page. */
static void ranges_random(void) {
    enum { PAGES = 4096, LIVE = 200 };
    static unsigned char owner[PAGES];
    struct { uint64_t offset, nbytes; unsigned char mark; } live[LIVE];
    struct zcx_shm *s;
    unsigned seed = 7;
    int n = 0, full = 0;
    uint64_t at, sum = 0, taken_bytes, warm;
    memset(owner, 0, sizeof owner);
    OK(zcx_shm_result_new(&s, PAGES * 4096, &err));
    for (int step = 0; step < 20000; step++) {
        if (step % 1000 == 999) zcx_shm_reclaim(s);
        if (n < LIVE && draw(&seed, 2)) {
            uint64_t nbytes = draw(&seed, 20) ? draw(&seed, 10 * 4096) : draw(&seed, 5) * MIB + draw(&seed, 9999), pages = nbytes ? (nbytes + 4095) / 4096 : 1;
            int rc = zcx_shm_range_take(s, nbytes, &at, &err);
            if (rc) {
                CHECK(rc == -ZCX_E_LIMIT, "%s", err.text);
                full++;
                continue;
            }
            CHECK(at % 4096 == 0 && (pages < 512 || at % (2 * MIB) == 0), "aligned");
            live[n].mark = (unsigned char)(1 + draw(&seed, 255));
            for (uint64_t p = 0; p < pages; p++) {
                CHECK(!owner[at / 4096 + p], "page %llu is somebody's", (unsigned long long)(at / 4096 + p));
                owner[at / 4096 + p] = live[n].mark;
                zcx_shm_base(s)[at + p * 4096] = live[n].mark;
            }
            live[n].offset = at;
            live[n++].nbytes = nbytes;
            sum += pages * 4096;
        } else if (n) {
            int i = (int)draw(&seed, (unsigned)n);
            uint64_t pages = live[i].nbytes ? (live[i].nbytes + 4095) / 4096 : 1;
            for (uint64_t p = 0; p < pages; p++) {
                CHECK(zcx_shm_base(s)[live[i].offset + p * 4096] == live[i].mark, "bytes of a live range changed");
                owner[live[i].offset / 4096 + p] = 0;
            }
            zcx_shm_range_put(s, live[i].offset, live[i].nbytes);
            sum -= pages * 4096;
            live[i] = live[--n];
        }
        zcx_shm_usage(s, &taken_bytes, &warm);
        CHECK(taken_bytes == sum && allocated(zcx_shm_fd(s)) == taken_bytes + warm, "every page is somebody's or warm");
    }
    CHECK(full > 10, "the file was full now and then: %d", full);
    while (n--) zcx_shm_range_put(s, live[n].offset, live[n].nbytes);
    zcx_shm_reclaim(s);
    CHECK(allocated(zcx_shm_fd(s)) == 0, "all is given back");
    OK(zcx_shm_range_take(s, PAGES * 4096, &at, &err));
    zcx_shm_unref(s);
}

static struct zcx_shm *shared_by_threads;

static void *take_and_put(void *arg) {
    unsigned seed = (unsigned)(uintptr_t)arg;
    unsigned char mark = (unsigned char)seed;
    struct zcx_err e;
    for (int i = 0; i < 1500; i++) {
        uint64_t at, nbytes = 1 + draw(&seed, 30 * 4096);
        CHECK(zcx_shm_range_take(shared_by_threads, nbytes, &at, &e) == 0, "%s", e.text);
        memset(zcx_shm_base(shared_by_threads) + at, mark, nbytes);
        zcx_shm_ref(shared_by_threads);
        for (uint64_t k = 0; k < nbytes; k += 512) CHECK(zcx_shm_base(shared_by_threads)[at + k] == mark, "another's bytes");
        zcx_shm_range_put(shared_by_threads, at, nbytes);
        if (i % 100 == 0) zcx_shm_reclaim(shared_by_threads);
        zcx_shm_unref(shared_by_threads);
    }
    return NULL;
}

static void ranges_threads(void) {
    pthread_t threads[4];
    uint64_t taken_bytes, warm;
    OK(zcx_shm_result_new(&shared_by_threads, 16 * MIB, &err));
    for (uintptr_t i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, take_and_put, (void *)(i + 1)), "thread");
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    zcx_shm_usage(shared_by_threads, &taken_bytes, &warm);
    CHECK(taken_bytes == 0 && allocated(zcx_shm_fd(shared_by_threads)) == warm, "usage");
    CHECK(zcx_shm_refs(shared_by_threads) == 1, "references");
    zcx_shm_unref(shared_by_threads);
}

#ifdef __SANITIZE_THREAD__
#define ABSURD (128 * 1024 * MIB) /* its shadow memory leaves no larger gap */
#else
#define ABSURD (1024 * 1024 * MIB)
#endif

/* That much address space costs nothing; asking for memory that the machine lacks is an error, and leaves no trace. */
static void refused_by_the_machine(void) {
    struct zcx_shm *s, *in;
    uint64_t at = 5, taken_bytes, warm;
    OK(zcx_shm_result_new(&s, ABSURD, &err));
    CHECK(zcx_shm_range_take(s, ABSURD, &at, &err) == -ENOMEM && at == 5 && strstr(err.text, "memory"), "%s", err.text);
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(taken_bytes == 0 && warm == 0 && allocated(zcx_shm_fd(s)) == 0, "no trace");
    OK(zcx_shm_range_take(s, MIB, &at, &err));
    CHECK(at == 0, "goes on");
    zcx_shm_unref(s);
    CHECK(zcx_shm_input_new(&in, ABSURD, &err) == -ENOMEM, "input");
}

/* A full machine, met halfway: what was allocated goes, warm ranges too if that helps. */
static void full_machine(void) {
    static const int codes[] = {ENOSPC, ENOMEM};
    struct zcx_shm *s;
    uint64_t at, other, taken_bytes, warm;
    OK(zcx_shm_result_new(&s, 256 * MIB, &err));
    for (int i = 0; i < 2; i++) {
        at = 5;
        fallocate_fails(3, 1000, codes[i]);
        CHECK(zcx_shm_range_take(s, 60 * MIB, &at, &err) == -codes[i] && at == 5 && strstr(err.text, "60 MiB"), "%s", err.text);
        zcx_shm_usage(s, &taken_bytes, &warm);
        CHECK(taken_bytes == 0 && allocated(zcx_shm_fd(s)) == 0, "no trace");
        CHECK(fallocates == 3, "no second try where nothing was freed");
        fallocate_fails(3, 1000, codes[i]);
        CHECK(zcx_shm_input_new(&shared_by_threads, 60 * MIB, &err) == -codes[i], "input");
        fail_times = 0;
    }
    OK(zcx_shm_range_take(s, 10 * MIB, &other, &err));
    zcx_shm_range_put(s, other, 10 * MIB);
    fallocate_fails(2, 1, ENOSPC);
    OK(zcx_shm_range_take(s, 60 * MIB, &at, &err));
    zcx_shm_usage(s, &taken_bytes, &warm);
    CHECK(taken_bytes == 60 * MIB && warm == 0 && allocated(zcx_shm_fd(s)) == 60 * MIB, "in the place of the warm ones");
    fallocate_fails(1, 1, EIO);
    CHECK(zcx_shm_range_take(s, 1, &at, &err) == -EIO && !strcmp(err.call, "fallocate"), "anything else is said as it is");
    zcx_shm_unref(s);
}

static void retired(void) {
    struct zcx_shm *s;
    uint64_t a, b, at;
    int fd;
    OK(zcx_shm_result_new(&s, 64 * MIB, &err));
    OK(zcx_shm_range_take(s, MIB, &a, &err));
    OK(zcx_shm_range_take(s, MIB, &b, &err));
    memset(zcx_shm_base(s) + a, 3, MIB);
    zcx_shm_range_put(s, b, MIB);
    fd = fcntl(zcx_shm_fd(s), F_DUPFD_CLOEXEC, 0); /* for looking only */
    zcx_shm_base(s)[40 * MIB] = 1;                 /* a worker that wrote where it was given nothing */
    CHECK(allocated(fd) == 2 * MIB + 4096, "before");
    zcx_shm_retire(s, 0);
    CHECK(zcx_shm_fd(s) == -1 && allocated(fd) == MIB, "only what is out remains");
    CHECK(zcx_shm_base(s)[a] == 3 && zcx_shm_base(s)[a + MIB - 1] == 3, "and is readable");
    CHECK(zcx_shm_range_take(s, 1, &at, &err) == -ZCX_E_RANGE, "nothing more is taken");
    CHECK(zcx_shm_readonly_fd(s, &err) == -ZCX_E_UNFIT, "nor lent");
    zcx_shm_retire(s, 0);
    zcx_shm_range_put(s, a, MIB);
    CHECK(allocated(fd) == 0, "given back without a descriptor");
    close(fd);
    zcx_shm_unref(s);
}

static void locked_pages(void) {
    struct zcx_shm *s;
    uint64_t at;
    OK(zcx_shm_result_new(&s, 64 * MIB, &err));
    OK(zcx_shm_range_take(s, MIB, &at, &err));
    CHECK(syscall(SYS_mlock, zcx_shm_base(s) + at, MIB) == 0, "mlock");
    zcx_shm_range_put(s, at, MIB);
    CHECK(zcx_shm_reclaim(s) == MIB && allocated(zcx_shm_fd(s)) == 0, "locked pages are given back too");
    zcx_shm_unref(s);
}

/* ---- worker ---- */

static void mapping(void) {
    struct zcx_shm *s, *w, *f;
    unsigned char *shared, *foreign;
    void *p;
    uint64_t at;
    int fd;
    OK(zcx_shm_result_new(&s, 64 * MIB, &err));
    OK(zcx_shm_range_take(s, 3 * 4096, &at, &err));
    w = taken(s, ZCX_SHM_RESULT);
    OK(zcx_shm_map(w, at + 4096, 2 * 4096, &p, &err));
    shared = p;
    shared[0] = 42;
    CHECK(zcx_shm_base(s)[at + 4096] == 42, "a result is filled in place");

    fd = zcx_shm_readonly_fd(s, &err);
    CHECK(fd >= 0 && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY && (fcntl(fd, F_GETFD) & FD_CLOEXEC), "%s", err.text);
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES, "not writable by it");
    OK(zcx_shm_take_fd(&f, fd, ZCX_SHM_FOREIGN, 64 * MIB, &err));
    OK(zcx_shm_map(f, at + 4096 + 1, 10, &p, &err));
    foreign = (unsigned char *)p - 1;
    CHECK(foreign[0] == 42 && zcx_shm_edited(p, 10) == 0, "read");
    foreign[0] = 1;
    CHECK(zcx_shm_base(s)[at + 4096] == 42 && zcx_shm_edited(p, 10) == 1, "an edit stays there");
    zcx_shm_unmap(p, 10);

    static const struct { uint64_t offset, nbytes; } outside[] = {
        {64 * MIB, 1}, {64 * MIB + 1, 0}, {0, 64 * MIB + 1}, {4096, UINT64_MAX}, {UINT64_MAX, 1}, {UINT64_MAX, UINT64_MAX},
        {UINT64_MAX - 4095, 4096}, {64 * MIB - 1, 2},
    };
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        p = NULL;
        CHECK(zcx_shm_map(w, outside[i].offset, outside[i].nbytes, &p, &err) == -ZCX_E_PROTOCOL && !p, "row %zu", i);
    }
    OK(zcx_shm_map(w, 64 * MIB - 1, 1, &p, &err));
    zcx_shm_unmap(p, 1);
    OK(zcx_shm_map(w, 64 * MIB, 0, &p, &err)); /* a tensor without elements may begin at the end */
    zcx_shm_unmap(p, 0);
    OK(zcx_shm_map(w, 0, 64 * MIB, &p, &err));
    zcx_shm_unmap(p, 64 * MIB);
    zcx_shm_unmap(shared, 2 * 4096);
    zcx_shm_unref(f);
    zcx_shm_unref(w);
    zcx_shm_unref(s);
}

/* Mappings made and dropped leave the process's address space as it was. */
static void unmapping(void) {
    struct zcx_shm *s, *w;
    OK(zcx_shm_input_new(&s, 4 * MIB, &err));
    w = taken(s, ZCX_SHM_INPUT);
    for (int i = 0; i < 70000; i++) { /* above vm.max_map_count, if each left one behind */
        void *p;
        uint64_t offset = (uint64_t)(i * 37 % 5000), nbytes = (uint64_t)(i % 9000);
        OK(zcx_shm_map(w, offset, nbytes, &p, &err));
        zcx_shm_unmap(p, nbytes);
    }
    zcx_shm_unref(w);
    zcx_shm_unref(s);
}

static int memfd(uint64_t size, int seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0, "memfd");
    return fd;
}

static void refuse(const char *why, int fd, enum zcx_shm_kind kind, uint64_t size) {
    struct zcx_shm *w = NULL;
    int before = check_fds();
    memset(&err, 0, sizeof err);
    CHECK(fd >= 0, "%s", why);
    CHECK(zcx_shm_take_fd(&w, fd, kind, size, &err) == -ZCX_E_PROTOCOL && !w && err.text[0], "%s", why);
    CHECK(check_fds() == before - 1, "closed: %s", why);
}

static void forged(void) {
    const int fixed = F_SEAL_SHRINK | F_SEAL_GROW, input_seals = fixed | F_SEAL_FUTURE_WRITE;
    struct zcx_shm *w;
    int pipe_fds[2], fd;
    refuse("unsealed", memfd(4096, 0), ZCX_SHM_RESULT, 4096);
    refuse("may shrink", memfd(4096, F_SEAL_GROW), ZCX_SHM_RESULT, 4096);
    refuse("may grow", memfd(4096, F_SEAL_SHRINK), ZCX_SHM_RESULT, 4096);
    refuse("input that others may write", memfd(4096, fixed), ZCX_SHM_INPUT, 4096);
    refuse("smaller than announced", memfd(4096, input_seals), ZCX_SHM_INPUT, 8192);
    refuse("larger than announced", memfd(8192, input_seals), ZCX_SHM_INPUT, 4096);
    refuse("empty", memfd(0, input_seals), ZCX_SHM_INPUT, 0);
    refuse("kind 0", memfd(4096, input_seals), 0, 4096);
    refuse("kind 4", memfd(4096, input_seals), 4, 4096);
    refuse("foreign, but writable", memfd(4096, fixed), ZCX_SHM_FOREIGN, 4096);
    fd = memfd(4096, fixed);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    refuse("result, but read-only", open(path, O_RDONLY | O_CLOEXEC), ZCX_SHM_RESULT, 4096);
    close(fd);
    CHECK(pipe2(pipe_fds, O_CLOEXEC) == 0, "pipe");
    refuse("pipe", pipe_fds[0], ZCX_SHM_INPUT, 4096);
    close(pipe_fds[1]);
    refuse("folder", open("/", O_RDONLY | O_CLOEXEC), ZCX_SHM_FOREIGN, 4096);
    refuse("device", open("/dev/zero", O_RDWR | O_CLOEXEC), ZCX_SHM_INPUT, 4096);
    refuse("ordinary file", open("/proc/self/exe", O_RDONLY | O_CLOEXEC), ZCX_SHM_FOREIGN, 4096);
    fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd >= 0) { /* a kernel with hugetlb */
        CHECK(ftruncate(fd, 2 * (off_t)MIB) == 0 && fcntl(fd, F_ADD_SEALS, input_seals) == 0, "huge memfd");
        refuse("huge pages may fail to appear", fd, ZCX_SHM_INPUT, 2 * MIB);
    }
    OK(zcx_shm_take_fd(&w, memfd(4096, input_seals), ZCX_SHM_INPUT, 4096, &err));
    zcx_shm_unref(w);
}

/* ---- blobs ---- */

static void blobs(void) {
    const uint64_t size = 17 * MIB + 3; /* more than is written at once */
    unsigned char *bytes = malloc(size);
    const void *map = NULL;
    const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    int fd, pipe_fds[2];
    for (uint64_t i = 0; i < size; i++) bytes[i] = (unsigned char)(i * 7 + (i >> 16));
    OK(zcx_shm_blob_new(bytes, size, &fd, &err));
    CHECK((fcntl(fd, F_GET_SEALS) & all) == all && (fcntl(fd, F_GETFD) & FD_CLOEXEC), "sealed");
    CHECK(pwrite(fd, "x", 1, 0) < 0 && errno == EPERM, "for good");
    OK(zcx_shm_blob_map(fd, size, &map, &err));
    CHECK(!memcmp(map, bytes, size), "bytes");
    zcx_shm_blob_unmap(map, size);
    map = NULL;
    CHECK(zcx_shm_blob_map(fd, size + 1, &map, &err) == -ZCX_E_PROTOCOL && !map, "more than there is");
    CHECK(zcx_shm_blob_map(fd, 0, &map, &err) == -ZCX_E_PROTOCOL && !map, "nothing");
    close(fd);
    CHECK(zcx_shm_blob_new(bytes, 0, &fd, &err) == -ZCX_E_RANGE, "nothing");
    free(bytes);
    for (int bit = 0; bit < 4; bit++) {
        const int seals[] = {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_SEAL};
        fd = memfd(4096, all & ~seals[bit]);
        CHECK(zcx_shm_blob_map(fd, 4096, &map, &err) == -ZCX_E_PROTOCOL && !map, "without seal %d", bit);
        close(fd);
    }
    CHECK(pipe2(pipe_fds, O_CLOEXEC) == 0, "pipe");
    CHECK(zcx_shm_blob_map(pipe_fds[0], 4096, &map, &err) == -ZCX_E_PROTOCOL && !map, "pipe");
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

/* ---- fork, signals, limits ---- */

static struct zcx_shm *forked;
static uint64_t forked_at;

static void child_lets_go(void) {
    uint64_t at, a, b;
    int fd = zcx_shm_fd(forked);
    zcx_shm_range_put(forked, forked_at, MIB);
    CHECK(zcx_shm_reclaim(forked) == 0, "reclaim");
    zcx_shm_retire(forked, 0);
    zcx_shm_usage(forked, &a, &b);
    CHECK(a == 0 && b == 0, "usage");
    CHECK(zcx_shm_range_take(forked, 1, &at, &err) == -ZCX_E_RANGE, "take");
    CHECK(zcx_shm_base(forked)[forked_at] == 5, "still readable");
    zcx_shm_unref(forked);
    CHECK(fcntl(fd, F_GETFD) >= 0, "the number is left alone: it may be somebody else's by then");
}

static void fork_is_harmless(void) {
    uint64_t taken_bytes, warm, other;
    OK(zcx_shm_result_new(&forked, 64 * MIB, &err));
    OK(zcx_shm_range_take(forked, MIB, &forked_at, &err));
    OK(zcx_shm_range_take(forked, MIB, &other, &err));
    zcx_shm_range_put(forked, other, MIB);
    memset(zcx_shm_base(forked) + forked_at, 5, MIB);
    in_child(child_lets_go);
    zcx_shm_usage(forked, &taken_bytes, &warm);
    CHECK(taken_bytes == MIB && warm == MIB && allocated(zcx_shm_fd(forked)) == 2 * MIB, "nothing was given back");
    CHECK(zcx_shm_base(forked)[forked_at] == 5 && zcx_shm_base(forked)[forked_at + MIB - 1] == 5, "the parent's bytes");
    zcx_shm_unref(forked);
}

static volatile sig_atomic_t alarms;
static void on_alarm(int n) { (void)n; alarms++; }

static void signals(void) {
    struct sigaction action = {.sa_handler = on_alarm}; /* no SA_RESTART */
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    struct zcx_shm *s;
    uint64_t at;
    int fd;
    unsigned char *bytes = calloc(1, 16 * MIB);
    sigaction(SIGALRM, &action, NULL);
    OK(zcx_shm_result_new(&s, 1024 * MIB, &err));
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < 100 && (i < 3 || alarms < 20); i++) {
        OK(zcx_shm_range_take(s, 300 * MIB, &at, &err));
        CHECK(allocated(zcx_shm_fd(s)) == 300 * MIB, "all pages");
        zcx_shm_range_put(s, at, 300 * MIB);
        OK(zcx_shm_blob_new(bytes, 16 * MIB, &fd, &err));
        close(fd);
    }
    setitimer(ITIMER_REAL, &never, NULL);
    CHECK(alarms >= 20, "signals arrived meanwhile: %d", (int)alarms);
    fallocate_fails(2, 50, EINTR);
    OK(zcx_shm_range_take(s, 300 * MIB, &at, &err));
    CHECK(allocated(zcx_shm_fd(s)) == 300 * MIB && fail_times == 0, "interrupted, and gone on");
    CHECK(longest_piece <= (off_t)(32 * MIB), "in pieces that get done between two signals");
    zcx_shm_range_put(s, at, 300 * MIB);
    free(bytes);
    zcx_shm_unref(s);
}

static void child_without_fds(void) {
    struct zcx_shm *s;
    struct rlimit none = {0, 0};
    int fd;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    CHECK(zcx_shm_input_new(&s, 4096, &err) == -EMFILE && strstr(err.text, "ulimit -n"), "%s", err.text);
    CHECK(zcx_shm_result_new(&s, 4096, &err) == -EMFILE && strstr(err.text, "ulimit -n"), "%s", err.text);
    CHECK(zcx_shm_blob_new("x", 1, &fd, &err) == -EMFILE && strstr(err.text, "ulimit -n"), "%s", err.text);
    CHECK(zcx_shm_edited(&s, sizeof s) == 1, "cannot be told");
}

static void child_with_small_files(void) {
    struct zcx_shm *s;
    struct rlimit small = {MIB, MIB};
    static char bytes[2 * MIB];
    int fd, before = check_fds();
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0 && signal(SIGXFSZ, SIG_DFL) != SIG_ERR, "setrlimit"); /* the signal would kill */
    CHECK(zcx_shm_input_new(&s, 2 * MIB, &err) == -EFBIG && strstr(err.text, "ulimit -f"), "%s", err.text);
    CHECK(zcx_shm_result_new(&s, 2 * MIB, &err) == -EFBIG && strstr(err.text, "ulimit -f"), "%s", err.text);
    CHECK(zcx_shm_blob_new(bytes, sizeof bytes, &fd, &err) == -EFBIG && strstr(err.text, "ulimit -f"), "%s", err.text);
    OK(zcx_shm_input_new(&s, MIB, &err));
    zcx_shm_unref(s);
    CHECK(check_fds() == before, "descriptors");
}

static void limits(void) {
    struct zcx_shm *s;
    in_child(child_without_fds);
    in_child(child_with_small_files);
    CHECK(zcx_shm_result_new(&s, 1ull << 60, &err) == -ENOMEM && !strcmp(err.call, "mmap"), "more than addresses");
}

/* ---- what the machine has ---- */

static char root[64];

static void file(const char *path, const char *text) {
    char full[256];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = 0;
        mkdir(full, 0700);
    }
    FILE *f = fopen(full, "w");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0, "%s", full);
}

static uint64_t available(uint64_t need) {
    char proc[128], cgroups[128];
    snprintf(proc, sizeof proc, "%s/proc", root);
    snprintf(cgroups, sizeof cgroups, "%s/cg", root);
    return zcx_shm_available(need, proc, cgroups);
}

static void memory_available(void) {
    char command[96];
    strcpy(root, "/tmp/zcx-test-XXXXXX");
    CHECK(mkdtemp(root), "mkdtemp");
    CHECK(available(1) == UINT64_MAX, "nothing is known");
    file("proc/meminfo", "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:    4096 kB\nSwapTotal: 9 kB\nSwapFree:  1024 kB\n");
    CHECK(available(1) == 5 * MIB, "the machine's");
    file("proc/self/cgroup", "0::/a/b\n");
    CHECK(available(1) == 5 * MIB, "no limits there");
    file("cg/a/b/memory.max", "max\n");
    file("cg/a/b/memory.current", "1048576\n");
    CHECK(available(1) == 5 * MIB, "no limit");
    file("cg/a/memory.max", "4194304\n");
    file("cg/a/memory.current", "2097152\n");
    CHECK(available(1) == 2 * MIB, "the group above has two MiB left");
    CHECK(available(3 * MIB) == 3 * MIB, "and may swap one");
    file("cg/a/memory.stat", "anon 1000000\nfile 9\ninactive_file 524288\nactive_file 524288\nfile_x 5\n");
    CHECK(available(3 * MIB) == 4 * MIB, "and may drop one of cached files");
    file("cg/a/memory.swap.max", "0\n");
    file("cg/a/memory.swap.current", "0\n");
    CHECK(available(3 * MIB) == 3 * MIB, "but not swap");
    file("cg/memory.max", "1048576\n"); /* what a container sees of its own group */
    file("cg/memory.current", "2097152\n");
    CHECK(available(1) == MIB, "over its limit: only swap is left");
    file("proc/meminfo", "MemAvailable:    4096 kB\nSwapFree:  0 kB\n");
    CHECK(available(1) == 0, "and not even that");
    file("proc/meminfo", "MemAvailable:    4096 kB\nSwapFree:  1024 kB\n");

    file("proc/self/cgroup", "12:cpuset:/x\n4:memory:/not/seen/here\n0::/\n");
    CHECK(available(1) == 5 * MIB, "version 1, where version 2's files do not count");
    file("cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
    file("cg/memory/memory.usage_in_bytes", "1048576\n");
    CHECK(available(1) == 5 * MIB, "version 1's way to say no limit");
    file("cg/memory/memory.limit_in_bytes", "2097152\n");
    CHECK(available(1) == MIB, "a limit");
    file("cg/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1048576\ntotal_active_file 0\n");
    CHECK(available(2 * MIB) == 3 * MIB, "with cached files and swap");
    CHECK(zcx_shm_available(1, "/proc", "/sys/fs/cgroup") > 64 * MIB, "this machine");
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0, "rm");
}

int main(void) {
    RUN(input);
    RUN(edited);
    RUN(ranges);
    RUN(warm_bound);
    RUN(ranges_random);
    RUN(ranges_threads);
    RUN(refused_by_the_machine);
    RUN(full_machine);
    RUN(retired);
    RUN(locked_pages);
    RUN(mapping);
    RUN(unmapping);
    RUN(forged);
    RUN(blobs);
    RUN(fork_is_harmless);
    RUN(signals);
    RUN(limits);
    RUN(memory_available);
    return 0;
}
