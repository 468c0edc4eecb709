/* check.h: what a C test program needs: CHECK, a count of descriptors, and a fork whose exit status is looked at.
 *
 * A test program is one file tests/c/test_*.c with a line `// sources: csrc/a.c csrc/b.c` (what it links) and optionally
 * `// needs: simcuda` (run with ZCX_LIBCUDA pointing at the simulated driver) and `// flags: -Dname=value` (for all of its
 * sources) in its first lines. tests/cbuild.py compiles it under ASan and UBSan, tests/py/test_c.py runs it. It prints one line
 * per case and exits 0 only if every check held. */
#ifndef ZCX_CHECK_H
#define ZCX_CHECK_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static _Atomic int check_count; /* threads check too */

#define CHECK(condition, ...)                                                                  \
    do {                                                                                       \
        check_count++;                                                                         \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: %s: CHECK(%s) failed", __FILE__, __LINE__, __func__, #condition); \
            fprintf(stderr, " " __VA_ARGS__);                                                  \
            fputc('\n', stderr);                                                               \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

/* Descriptors open in this process now. */
static inline int check_fds(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = -1; /* the directory's own */
    if (!d) return -1;
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.') n++;
    closedir(d);
    return n;
}

/* Cases that cannot be where this runs (under valgrind): names in $CHECK_SKIP, each with a space before and behind it. */
static inline int check_skipped(const char *name) {
    const char *list = getenv("CHECK_SKIP");
    char key[128];
    snprintf(key, sizeof key, " %s ", name);
    return list && strstr(list, key);
}

/* Run one case: says its name, and that it left no descriptor behind. */
#define RUN(test)                                                              \
    do {                                                                       \
        if (check_skipped(#test)) {                                            \
            printf("skipped %s\n", #test);                                     \
            break;                                                             \
        }                                                                      \
        int check_before = check_fds();                                        \
        test();                                                                \
        CHECK(check_fds() == check_before, "descriptors left by " #test);      \
        printf("ok %s\n", #test);                                              \
        fflush(stdout);                                                        \
    } while (0)

#endif
