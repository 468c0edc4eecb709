/* fake_nvcuda.c: a made-up nvcuda for the test of research/pool-ipc/wddm_pool_probe.py, on Linux.
 *
 * Handles are small numbers, device memory is files in $FAKE_NVCUDA_DIR, one thread executes what the one stream holds.
 * FAKE_NVCUDA_REFUSE (names, comma-separated): those calls answer NOT_SUPPORTED. FAKE_NVCUDA_CRASH: that one kills the
 * process. FAKE_NVCUDA_LIE: imported memory is somebody else's. Does not: claim to be like the real thing, which nobody has
 * seen yet. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long ptr;
enum { OK = 0, INVALID = 1, NOT_READY = 600, ILLEGAL = 700, NOT_SUPPORTED = 801, WIN32 = 2 };
enum kind { SET, COPY, POST, AWAIT, RECORD };

struct op { struct op *next; enum kind kind; ptr at; void *host; uint64_t n, value; _Atomic uint64_t *word; };
struct pool { int exported; };
struct range { struct range *next; ptr start; uint64_t n; int memory, readonly; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct op *head, **tail = &head;
static struct range *ranges;
static int busy, fault;

#define API __attribute__((visibility("default")))
#define CALL(name, ...) API int name(__VA_ARGS__); API int name(__VA_ARGS__)
#define GATE if (refused(__func__)) return NOT_SUPPORTED

static int refused(const char *name) {
    const char *list = getenv("FAKE_NVCUDA_REFUSE"), *crash = getenv("FAKE_NVCUDA_CRASH");
    if (crash && !strcmp(crash, name)) raise(SIGSEGV);
    if (!list) return 0;
    char copy[512], *rest = copy;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *word; (word = strsep(&rest, ","));)
        if (!strcmp(word, name)) return 1;
    return 0;
}

static void *map_at(void *where, const char *what, unsigned long id, size_t n) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s%lu", getenv("FAKE_NVCUDA_DIR"), what, id);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)n)) abort();
    void *at = mmap(where, n, PROT_READ | PROT_WRITE, MAP_SHARED | (where ? MAP_FIXED : 0), fd, 0);
    close(fd);
    return at;
}

static void *map_file(const char *what, unsigned long id, size_t n) { return map_at(NULL, what, id, n); }

static int next_id(void) {
    static int id;
    return getpid() * 100 + ++id;
}

static ptr add_range(int memory, size_t n, void *where) {
    struct range *r = calloc(1, sizeof *r);
    int foreign = memory / 100 != getpid();
    void *at = map_at(where, foreign && getenv("FAKE_NVCUDA_LIE") ? "lie" : "memory", (unsigned long)memory, n);
    *r = (struct range){ranges, (ptr)(uintptr_t)at, n, memory, 0};
    ranges = r;
    return r->start;
}

static struct range *range_of(ptr p) {
    for (struct range *r = ranges; r; r = r->next)
        if (p >= r->start && p < r->start + r->n) return r;
    return NULL;
}

static void execute(struct op *op) {
    struct range *r = range_of(op->at);
    switch (op->kind) {
    case SET:
        if (!r || r->readonly) fault = ILLEGAL;
        else memset((void *)(uintptr_t)op->at, (int)op->value, op->n);
        break;
    case COPY: memcpy(op->host, (void *)(uintptr_t)op->at, op->n); break;
    case POST: case RECORD: atomic_store(op->word, op->value); break;
    case AWAIT:
        while (atomic_load(op->word) < op->value) usleep(200);
        break;
    }
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!head) pthread_cond_wait(&changed, &lock);
        struct op *op = head;
        head = op->next;
        if (!head) tail = &head;
        busy = 1;
        pthread_mutex_unlock(&lock);
        execute(op);
        free(op);
        pthread_mutex_lock(&lock);
        busy = 0;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static int push(struct op op) {
    struct op *copy = malloc(sizeof *copy);
    if (!copy) return 2;
    *copy = op;
    pthread_mutex_lock(&lock);
    *tail = copy;
    tail = &copy->next;
    copy->next = NULL;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return fault;
}

CALL(cuInit, unsigned flags) {
    GATE;
    pthread_t thread;
    return flags ? INVALID : pthread_create(&thread, NULL, work, NULL);
}
CALL(cuDriverGetVersion, int *out) { *out = 13040; return OK; }
CALL(cuGetErrorName, int code, const char **out) {
    *out = code == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_ERROR_OTHER";
    return OK;
}
CALL(cuDeviceGetCount, int *out) { GATE; *out = 1; return OK; }
CALL(cuDeviceGetName, char *out, int n, int device) { snprintf(out, (size_t)n, "made-up card %d", device); return OK; }
CALL(cuDeviceGetLuid, char *out, unsigned *mask, int device) { memset(out, device + 1, 8); *mask = 1; return OK; }
CALL(cuDeviceGetAttribute, int *out, int number, int device) {
    (void)device;
    *out = number == 119 ? WIN32 : number != 35;
    return OK;
}
CALL(cuDevicePrimaryCtxRetain, void **out, int device) { (void)device; *out = &lock; return OK; }
CALL(cuCtxPushCurrent_v2, void *ctx) { return ctx ? OK : INVALID; }
CALL(cuStreamCreate, void **out, unsigned flags) { (void)flags; *out = &head; return OK; }
CALL(cuStreamQuery, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    int result = head || busy ? NOT_READY : fault;
    pthread_mutex_unlock(&lock);
    return result;
}
CALL(cuStreamSynchronize, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    while (head || busy) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return fault;
}
CALL(cuMemsetD8Async, ptr at, unsigned char byte, size_t n, void *s) {
    (void)s;
    return push((struct op){.kind = SET, .at = at, .value = byte, .n = n});
}
CALL(cuMemcpyDtoHAsync_v2, void *to, ptr at, size_t n, void *s) {
    (void)s;
    return push((struct op){.kind = COPY, .at = at, .host = to, .n = n});
}

CALL(cuMemPoolCreate, void **out, const int *props) {
    GATE;
    if (props[0] != 1 || props[1] != WIN32 || props[2] != 1) return INVALID;
    *out = calloc(1, sizeof(struct pool));
    return OK;
}
CALL(cuMemPoolExportToShareableHandle, void **out, struct pool *pool, int type, unsigned long long flags) {
    GATE;
    if (type != WIN32 || flags) return INVALID;
    pool->exported = 1;
    *out = (void *)(uintptr_t)next_id();
    return OK;
}
CALL(cuMemPoolImportFromShareableHandle, void **out, void *handle, int type, unsigned long long flags) {
    GATE;
    if (!handle || type != WIN32 || flags) return INVALID;
    *out = calloc(1, sizeof(struct pool));
    return OK;
}
CALL(cuMemAllocFromPoolAsync, ptr *out, size_t n, struct pool *pool, void *s) {
    (void)s;
    if (!pool) return INVALID;
    *out = add_range(next_id(), n, NULL);
    return OK;
}
CALL(cuMemFreeAsync, ptr at, void *s) { (void)s; return range_of(at) ? OK : INVALID; }
CALL(cuMemPoolExportPointer, unsigned char blob[64], ptr at) {
    GATE;
    struct range *r = range_of(at);
    static int once;
    if (!r || !once++) return INVALID; /* as if the pool's own export had to come first */
    memset(blob, 0, 64);
    memcpy(blob, &r->memory, sizeof r->memory);
    memcpy(blob + 8, &r->n, sizeof r->n);
    return OK;
}
CALL(cuMemPoolImportPointer, ptr *out, struct pool *pool, const unsigned char blob[64]) {
    GATE;
    int memory;
    uint64_t n;
    memcpy(&memory, blob, sizeof memory);
    memcpy(&n, blob + 8, sizeof n);
    if (!pool) return INVALID;
    *out = add_range(memory, n, NULL);
    return OK;
}

struct ipc_event { unsigned char bytes[64]; };
CALL(cuEventCreate, void **out, unsigned flags) {
    if (flags != 6) return INVALID;
    *out = (void *)(uintptr_t)next_id();
    return OK;
}
CALL(cuIpcGetEventHandle, struct ipc_event *out, void *event) { GATE; memcpy(out->bytes, &event, sizeof event); return OK; }
CALL(cuIpcOpenEventHandle, void **out, struct ipc_event handle) { GATE; memcpy(out, handle.bytes, sizeof *out); return OK; }
CALL(cuEventRecord, void *event, void *s) {
    (void)s;
    return push((struct op){.kind = RECORD, .word = map_file("event", (unsigned long)(uintptr_t)event, 8), .value = 1});
}
CALL(cuStreamWaitEvent, void *s, void *event, unsigned flags) {
    (void)s, (void)flags;
    return push((struct op){.kind = AWAIT, .word = map_file("event", (unsigned long)(uintptr_t)event, 8), .value = 1});
}

CALL(cuMemHostRegister_v2, void *at, size_t n, unsigned flags) { GATE; return at && n && flags == 3 ? OK : INVALID; }
CALL(cuMemHostGetDevicePointer_v2, ptr *out, void *at, unsigned flags) { (void)flags; *out = (ptr)(uintptr_t)at; return OK; }
CALL(cuStreamWriteValue64_v2, void *s, ptr at, uint64_t value, unsigned flags) {
    (void)s, (void)flags;
    return push((struct op){.kind = POST, .word = (_Atomic uint64_t *)(uintptr_t)at, .value = value});
}
CALL(cuStreamWaitValue64_v2, void *s, ptr at, uint64_t value, unsigned flags) {
    (void)s, (void)flags;
    return push((struct op){.kind = AWAIT, .word = (_Atomic uint64_t *)(uintptr_t)at, .value = value});
}

struct semaphore_desc { int type; void *handle, *name; unsigned flags, reserved[16]; };
struct fence_params { uint64_t value; };
CALL(cuImportExternalSemaphore, void **out, const struct semaphore_desc *d) {
    GATE;
    if (d->type != 4 || !d->handle || d->flags) return INVALID;
    *out = map_file("fence", (unsigned long)(uintptr_t)d->handle, 8);
    return OK;
}
CALL(cuSignalExternalSemaphoresAsync, void **list, const struct fence_params *params, unsigned n, void *s) {
    (void)s;
    return n == 1 ? push((struct op){.kind = POST, .word = list[0], .value = params->value}) : INVALID;
}
CALL(cuWaitExternalSemaphoresAsync, void **list, const struct fence_params *params, unsigned n, void *s) {
    (void)s;
    return n == 1 ? push((struct op){.kind = AWAIT, .word = list[0], .value = params->value}) : INVALID;
}

CALL(cuMemCreate, ptr *out, size_t n, const int *prop, unsigned long long flags) {
    GATE;
    if (!n || prop[0] != 1 || prop[1] != WIN32 || flags) return INVALID;
    *out = (ptr)next_id();
    return OK;
}
CALL(cuMemExportToShareableHandle, void **out, ptr memory, int type, unsigned long long flags) {
    GATE;
    if (type != WIN32 || flags) return INVALID;
    *out = (void *)(uintptr_t)memory;
    return OK;
}
CALL(cuMemImportFromShareableHandle, ptr *out, void *handle, int type) {
    GATE;
    *out = (ptr)(uintptr_t)handle;
    return type == WIN32 ? OK : INVALID;
}
CALL(cuMemAddressReserve, ptr *out, size_t n, size_t alignment, ptr where, unsigned long long flags) {
    (void)alignment, (void)where, (void)flags;
    *out = (ptr)(uintptr_t)mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return OK;
}
CALL(cuMemMap, ptr at, size_t n, size_t offset, ptr memory, unsigned long long flags) {
    return offset || flags || !add_range((int)memory, n, (void *)(uintptr_t)at) ? INVALID : OK;
}
CALL(cuMemSetAccess, ptr at, size_t n, const int *access, size_t count) {
    struct range *r = range_of(at);
    if (!r || r->n != n || count != 1 || (access[2] != 1 && access[2] != 3)) return INVALID;
    r->readonly = access[2] == 1;
    return OK;
}
CALL(cuMemUnmap, ptr at, size_t n) { (void)n; return range_of(at) ? OK : INVALID; }
CALL(cuMemAddressFree, ptr at, size_t n) { (void)n; return at ? OK : INVALID; }
CALL(cuMemRelease, ptr memory) { return memory ? OK : INVALID; }
