/* fake_libcuda.c: a libcuda.so.1 that does nothing, says whatever it is told to, and writes down what it was asked.
 *
 * tests/c/test_driver.c compiles it (with -DFAKE_PLAIN: without cuGetProcAddress_v2, as CUDA 11 had it) and sets fake_say in it
 * through the symbol of that name. For everything that has to behave like a driver there is tests/simcuda. */
#include "fake_libcuda.h"

#include <pthread.h>
#include <string.h>

#pragma GCC visibility push(default)
struct fake_say fake_say = {.version = 13000, .count = 2};
#pragma GCC visibility pop

static void note(const char *what) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    strncat(fake_say.log, what, sizeof fake_say.log - strlen(fake_say.log) - 1);
    pthread_mutex_unlock(&lock);
}

static _Thread_local zcu_ctx current[8];
static _Thread_local int depth; /* current[depth] is the current context; [0] is NULL */
static _Thread_local int mode; /* 0 is "global", what a thread begins with */
static char contexts[64];

static zcu_result fake_Init(unsigned flags) { note("init "); return flags ? ZCU_ERROR_INVALID_VALUE : fake_say.init; }
static zcu_result fake_DriverGetVersion(int *v) { *v = fake_say.version; return 0; }
static zcu_result fake_GetErrorName(zcu_result r, const char **s) {
    *s = r == ZCU_ERROR_NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return *s ? 0 : ZCU_ERROR_INVALID_VALUE;
}
static zcu_result fake_GetErrorString(zcu_result r, const char **s) {
    *s = r == ZCU_ERROR_NO_DEVICE ? "no device is there" : NULL;
    return *s ? 0 : ZCU_ERROR_INVALID_VALUE;
}
static zcu_result fake_DeviceGetCount(int *n) { *n = fake_say.count; return 0; }
static zcu_result fake_DeviceGet(zcu_device *d, int i) { *d = 100 + i; return 0; }
static zcu_result fake_DeviceGetUuid(zcu_uuid *u, zcu_device d) { memset(u, d, sizeof *u); return 0; }
static zcu_result fake_DeviceGetAttribute(int *v, zcu_device_attribute which, zcu_device d) {
    *v = which != fake_say.cannot || d != 101;
    return fake_say.attribute;
}
static zcu_result fake_DevicePrimaryCtxRetain(zcu_ctx *c, zcu_device d) {
    __atomic_add_fetch(&fake_say.retained, 1, __ATOMIC_SEQ_CST);
    if (fake_say.retain) return fake_say.retain;
    *c = (zcu_ctx)(void *)&contexts[d - 100];
    return 0;
}
static zcu_result fake_CtxGetCurrent(zcu_ctx *c) { *c = current[depth]; return 0; }
static zcu_result fake_CtxPushCurrent(zcu_ctx c) {
    note("push ");
    if (fake_say.push) return fake_say.push;
    current[++depth] = c;
    return 0;
}
static zcu_result fake_CtxPopCurrent(zcu_ctx *c) { note("pop "); *c = current[depth--]; return 0; }
static zcu_result fake_ThreadExchangeStreamCaptureMode(zcu_capture_mode *m) {
    int before = mode;
    note(*m == ZCU_STREAM_CAPTURE_MODE_RELAXED ? "relax " : "back ");
    mode = *m;
    *m = before;
    return 0;
}
static zcu_result fake_StreamIsCapturing(zcu_stream s, zcu_capture_status *status) {
    note("capturing ");
    *status = s ? 1 : 0;
    return mode == ZCU_STREAM_CAPTURE_MODE_RELAXED ? 0 : ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
static zcu_result fake_PointerGetAttributes(unsigned n, zcu_pointer_attribute *which, void **data, zcu_ptr p) {
    note("attributes ");
    for (unsigned i = 0; i < n; i++) {
        switch (which[i]) {
        case ZCU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data[i] = p ? ZCU_MEMORYTYPE_DEVICE : 0; break;
        case ZCU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(zcu_ptr *)data[i] = p ? 0x700000000000 : 0; break;
        case ZCU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data[i] = p ? (size_t)5 << 30 : 0; break;
        case ZCU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t *)data[i] = p ? (uint64_t)7 << 40 : 0; break;
        case ZCU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data[i] = p ? 1 : -2; break;
        case ZCU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(char *)data[i] = p ? 1 : 0; break;
        case ZCU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned *)data[i] = p ? 1 : 0; break;
        case ZCU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)data[i] = p ? (void *)contexts : NULL; break;
        default: return ZCU_ERROR_INVALID_VALUE;
        }
    }
    return 0;
}

static zcu_result fake_other(void) { return ZCU_ERROR_NOT_SUPPORTED; }

static const struct { const char *name; void *function; } known[] = {
#define KNOWN(name) {"cu" #name, (void *)fake_##name}
    KNOWN(Init), KNOWN(DriverGetVersion), KNOWN(GetErrorName), KNOWN(GetErrorString), KNOWN(DeviceGetCount), KNOWN(DeviceGet),
    KNOWN(DeviceGetUuid), KNOWN(DeviceGetAttribute), KNOWN(DevicePrimaryCtxRetain), KNOWN(CtxGetCurrent), KNOWN(CtxPushCurrent),
    KNOWN(CtxPopCurrent), KNOWN(ThreadExchangeStreamCaptureMode), KNOWN(StreamIsCapturing), KNOWN(PointerGetAttributes),
};

static zcu_result get(const char *name, void **out, int version, uint64_t flags, int *status) {
    struct fake_asked *a = &fake_say.asked[fake_say.nasked++ % FAKE_ASKED_MAX];
    a->name = name;
    a->version = version;
    a->flags = flags;
    if (version > fake_say.version || strcmp(name, fake_say.lacks) == 0) {
        *status = version > fake_say.version ? ZCU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                             : ZCU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        *out = NULL;
        return fake_say.lacks_as_error ? ZCU_ERROR_NOT_FOUND : ZCU_SUCCESS;
    }
    *status = ZCU_GET_PROC_ADDRESS_SUCCESS;
    *out = (void *)fake_other;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0) *out = known[i].function;
    return 0;
}

#pragma GCC visibility push(default)
#ifdef FAKE_PLAIN
zcu_result cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
zcu_result cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    int status;
    fake_say.entry = "plain";
    return get(name, out, version, flags, &status);
}
#else
zcu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);
zcu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    fake_say.entry = "v2";
    return get(name, out, version, flags, status);
}
#endif
#pragma GCC visibility pop
