/* card.c: the driver of a real card, for the programs of tests/faults: it can be stopped at a call, or refuse one.
 *
 * ZCX_LIBCUDA names it in a process that walks or is walked (tests/faults/walk.py). Every call is the driver's own ($CARD_LIBCUDA, else
 * libcuda.so.1); those in the list below ask tests/faults/at.c first, as each call of the simulated driver does. What the walk asks of
 * that driver by name is here too, as far as a card can answer it, and so are two of its variables, SIMCUDA_FAIL and SIMCUDA_HIDE.
 * Does not: see races, count anything but the memory in use, or hold a stream. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define EXPORT __attribute__((visibility("default")))
#define GRAIN (256ll << 20) /* the context of a worker alone takes more; a pool may grow by a few chunks */
#define LONGEST 20000000ull /* us: of a kernel, were it to go on when its process has ended */

extern int faults_at(const char *point) __attribute__((weak));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over what is made once: none of it calls back */

static void *real(const char *name) {
    static void *library;
    pthread_mutex_lock(&lock);
    if (!library) {
        const char *path = getenv("CARD_LIBCUDA");
        library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "card: %s\n", dlerror());
            abort();
        }
    }
    pthread_mutex_unlock(&lock);
    return dlsym(library, name);
}

/* ---- calls that can be stopped or refused ---- */

/* SIMCUDA_FAIL: "name:nth:code[+]", separated by commas. */
static int failure(const char *name, long use) {
    for (const char *rule = getenv("SIMCUDA_FAIL"); rule && *rule; rule = strchr(rule, ',') ? strchr(rule, ',') + 1 : NULL) {
        char which[64], tail = 0;
        long nth;
        int code;
        if (sscanf(rule, "%63[^:]:%ld:%d%c", which, &nth, &code, &tail) < 3 || strcmp(which, name)) continue;
        if (use == nth || (tail == '+' && use > nth)) return code;
    }
    return 0;
}

static int ask(const char *name, long *uses) {
    int refused = faults_at ? faults_at(name) : 0;
    return refused ? refused : failure(name, __atomic_add_fetch(uses, 1, __ATOMIC_RELAXED));
}

#define CALLS(X)                                                                                                                      \
    X(MemHostRegister, (void *p, size_t n, unsigned flags), (p, n, flags))                                                            \
    X(MemPoolImportFromShareableHandle, (zcu_pool *out, void *fd, zcu_handle_type type, unsigned long long flags), (out, fd, type, flags)) \
    X(MemPoolExportPointer, (zcu_pool_blob *out, zcu_ptr p), (out, p))                                                                \
    X(MemPoolImportPointer, (zcu_ptr *out, zcu_pool pool, zcu_pool_blob *blob), (out, pool, blob))                                    \
    X(MemAllocFromPoolAsync, (zcu_ptr *out, size_t n, zcu_pool pool, zcu_stream stream), (out, n, pool, stream))                      \
    X(MemFreeAsync, (zcu_ptr p, zcu_stream stream), (p, stream))                                                                      \
    X(StreamWriteValue64, (zcu_stream stream, zcu_ptr p, uint64_t value, unsigned flags), (stream, p, value, flags))                  \
    X(StreamWaitValue64, (zcu_stream stream, zcu_ptr p, uint64_t value, unsigned flags), (stream, p, value, flags))

#define X(name, parameters, arguments)                              \
    static zcu_result (*next_##name) parameters;                    \
    static zcu_result asked_##name parameters {                     \
        static long uses;                                           \
        int refused = ask("cu" #name, &uses);                       \
        return refused ? refused : next_##name arguments;           \
    }
CALLS(X)
#undef X

static int hidden(const char *name) {
    size_t n = strlen(name);
    for (const char *at = getenv("SIMCUDA_HIDE"); at && *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == n && !strncmp(at, name, n)) return 1;
    return 0;
}

EXPORT zcu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);
zcu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    zcu_result (*look)(const char *, void **, int, uint64_t, int *) = (zcu_result (*)(const char *, void **, int, uint64_t, int *))real("cuGetProcAddress_v2");
    if (!look || hidden(name)) return ZCU_ERROR_NOT_FOUND;
    zcu_result r = look(name, out, version, flags, status);
    if (r || !*out) return r;
#define X(call, parameters, arguments)                                   \
    if (!strcmp(name, "cu" #call)) {                                     \
        next_##call = (zcu_result (*) parameters)*out;                   \
        *out = (void *)asked_##call;                                     \
    }
    CALLS(X)
#undef X
    return 0;
}

/* ---- what the walk calls by name ---- */

#define FORWARD(name, symbol, parameters, arguments)                                       \
    EXPORT zcu_result name parameters;                                                     \
    zcu_result name parameters { return ((zcu_result (*) parameters)real(symbol))arguments; }
FORWARD(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (zcu_ctx *out, zcu_device device), (out, device))
FORWARD(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (zcu_ctx context), (context))
FORWARD(cuCtxPushCurrent_v2, "cuCtxPushCurrent_v2", (zcu_ctx context), (context))
FORWARD(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (zcu_ctx *out), (out))
FORWARD(cuCtxPopCurrent_v2, "cuCtxPopCurrent_v2", (zcu_ctx *out), (out))

static void enter(void) {
    zcu_ctx context;
    if (cuDevicePrimaryCtxRetain(&context, 0) || cuCtxPushCurrent_v2(context)) abort();
}

static void leave(void) {
    zcu_ctx context;
    cuCtxPopCurrent_v2(&context);
}

EXPORT long simcuda_races(void);
long simcuda_races(void) { return 0; }

/* "allocations": how much more memory of the card is in use, by anybody, than when this was first asked, in grains. */
EXPORT long simcuda_count(const char *what);
long simcuda_count(const char *what) {
    static long long first = -1;
    size_t free_bytes = 0, total = 0;
    zcu_result (*info)(size_t *, size_t *) = (zcu_result (*)(size_t *, size_t *))real("cuMemGetInfo_v2");
    if (strcmp(what, "allocations")) return 0;
    enter();
    if (info(&free_bytes, &total)) abort();
    leave();
    long long used = (long long)(total - free_bytes);
    if (first < 0) first = used;
    long long more = used - first + GRAIN / 2;
    return (long)(more >= 0 ? more / GRAIN : (more - GRAIN + 1) / GRAIN);
}

/* ---- kernels ---- */

static const char ptx[] =
    ".version 6.4\n.target sm_75\n.address_size 64\n"
    ".visible .entry spin(.param .u64 nanoseconds)\n"
    "{\n"
    "    .reg .u64 %first, %now, %most, %spent;\n"
    "    .reg .pred %more;\n"
    "    ld.param.u64 %most, [nanoseconds];\n"
    "    mov.u64 %first, %globaltimer;\n"
    "AGAIN:\n"
    "    mov.u64 %now, %globaltimer;\n"
    "    sub.u64 %spent, %now, %first;\n"
    "    setp.lo.u64 %more, %spent, %most;\n"
    "    @%more bra AGAIN;\n"
    "    ret;\n"
    "}\n"
    ".visible .entry wreck(.param .u64 where)\n"
    "{\n"
    "    .reg .u64 %where;\n"
    "    ld.param.u64 %where, [where];\n"
    "    st.global.u64 [%where], %where;\n"
    "    ret;\n"
    "}\n";

/* One thread of a kernel with one argument, in the current context, which has to be the same each time. */
static zcu_result launch(const char *name, zcu_stream stream, uint64_t value) {
    static void *module;
    void *function = NULL, *arguments[1] = {&value};
    zcu_result (*load)(void **, const void *) = (zcu_result (*)(void **, const void *))real("cuModuleLoadData");
    zcu_result (*find)(void **, void *, const char *) = (zcu_result (*)(void **, void *, const char *))real("cuModuleGetFunction");
    zcu_result (*go)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, zcu_stream, void **, void **) =
        (zcu_result (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, zcu_stream, void **, void **))real("cuLaunchKernel");
    zcu_result r = load && find && go ? 0 : ZCU_ERROR_NOT_FOUND;
    if (!r) {
        pthread_mutex_lock(&lock);
        if (!module) r = load(&module, ptx);
        pthread_mutex_unlock(&lock);
    }
    if (!r) r = find(&function, module, name);
    return r ? r : go(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL);
}

EXPORT int simcuda_spin(zcu_stream stream, uint64_t us);
int simcuda_spin(zcu_stream stream, uint64_t us) { return launch("spin", stream, 1000 * (us < LONGEST ? us : LONGEST)); }

/* This process's context is lost when it returns: by a write to where nothing is, whatever the code. */
EXPORT void simcuda_fault(int code);
void simcuda_fault(int code) {
    zcu_result (*synchronize)(void) = (zcu_result (*)(void))real("cuCtxSynchronize");
    (void)code;
    enter();
    if (launch("wreck", NULL, 0x700000000000ull) || synchronize() != ZCU_ERROR_ILLEGAL_ADDRESS) abort();
    leave();
}
