/* fail.c: failures on demand: the Nth use of a call returns a code instead of doing anything.
 *
 * SIMCUDA_FAIL="cuMemPoolImportPointer:3:2,cuStreamWriteValue64:1:999+" ("+": that one and all later ones; "*" for the name
 * counts every call of the process). What was injected is counted, and named in the file $SIMCUDA_FAIL_LOG. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

#define RULES 32

/* tests/faults/at.c, where it is loaded: what else is to happen at this call. */
extern int faults_at(const char *point) __attribute__((weak));

static struct rule { char name[64]; long nth, count; int code; bool on; } rules[RULES];
static int nrules;
static long injected;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* "name:nth:code[+]", separated by commas. */
static void parse(const char *text) {
    nrules = 0;
    while (text && *text && nrules < RULES) {
        struct rule *r = &rules[nrules];
        char tail = 0;
        memset(r, 0, sizeof *r);
        int n = sscanf(text, "%63[^:]:%ld:%d%c", r->name, &r->nth, &r->code, &tail);
        if (n < 3) fprintf(stderr, "simcuda: SIMCUDA_FAIL: cannot read \"%s\"\n", text);
        else nrules++;
        r->on = tail == '+';
        text = strchr(text, ',');
        if (text) text++;
    }
}

static void parse_environment(void) { parse(getenv("SIMCUDA_FAIL")); }

static void tell(const struct rule *r, const char *name) {
    char line[160];
    const char *path = getenv("SIMCUDA_FAIL_LOG");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0) return;
    int n = snprintf(line, sizeof line, "%d %s %ld %d\n", (int)getpid(), name, r->count, r->code);
    if (write(fd, line, (size_t)n) != n) fprintf(stderr, "simcuda: cannot write %s\n", path);
    close(fd);
}

int sim_fail(const char *name) {
    pthread_once(&once, parse_environment);
    int refused = faults_at ? faults_at(name) : 0;
    if (refused) return refused;
    for (int i = 0; i < nrules; i++) {
        struct rule *r = &rules[i];
        if (strcmp(r->name, "*") && strcmp(r->name, name)) continue;
        long n = __atomic_add_fetch(&r->count, 1, __ATOMIC_RELAXED);
        if (n != r->nth && !(r->on && n > r->nth)) continue;
        __atomic_add_fetch(&injected, 1, __ATOMIC_RELAXED);
        tell(r, name);
        return r->code;
    }
    return 0;
}

SIM_EXPORT long simcuda_injected(void);
long simcuda_injected(void) { return __atomic_load_n(&injected, __ATOMIC_RELAXED); }

/* Replace the rules from within the process; not while other threads call the driver. */
SIM_EXPORT void simcuda_fail(const char *text);
void simcuda_fail(const char *text) {
    pthread_once(&once, parse_environment);
    parse(text);
}

static bool listed(const char *list, const char *name) {
    size_t n = strlen(name);
    for (const char *at = list; at && *at;) {
        size_t m = strcspn(at, ",");
        if (m == n && !strncmp(at, name, n)) return true;
        at += m + (at[m] == ',');
    }
    return false;
}

/* SIMCUDA_HIDE="cuStreamWriteValue64,cuCtxRecordEvent": what an older driver does not have. */
bool sim_hidden(const char *name) { return listed(getenv("SIMCUDA_HIDE"), name); }

/* SIMCUDA_BREAK="import,post": what a driver may do otherwise than all that were seen. README.md has the list. */
bool sim_breaks(const char *what) { return listed(getenv("SIMCUDA_BREAK"), what); }
