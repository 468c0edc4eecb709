/* device.c: cuInit, devices and their numbering, contexts, and the checks at the head of every call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

#define CONTEXT_STACK 32

struct sim sim = {.lock = PTHREAD_MUTEX_INITIALIZER};
static _Thread_local struct ctx *stack[CONTEXT_STACK];
static _Thread_local int depth;

/* ---- small things that all files use ---- */

int sim_lock(void) {
    pthread_mutex_lock(&sim.lock);
    return 1;
}

void sim_leave(int *held) {
    (void)held;
    pthread_mutex_unlock(&sim.lock);
}

zcu_result sim_enter(const char *name, bool faulty) {
    if (sim.forked || !__atomic_load_n(&sim.inited, __ATOMIC_ACQUIRE)) return ZCU_ERROR_NOT_INITIALIZED;
    int fault = faulty ? __atomic_load_n(&sim.fault, __ATOMIC_ACQUIRE) : 0;
    return fault ? fault : sim_fail(name);
}

int64_t sim_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

uint64_t sim_random(void) { /* splitmix64 */
    uint64_t z = sim.seed += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

uint64_t sim_env_size(const char *name, uint64_t otherwise) {
    const char *s = getenv(name);
    char *end;
    if (!s || !*s) return otherwise;
    uint64_t v = strtoull(s, &end, 0);
    switch (*end) {
    case 'K': return v << 10;
    case 'M': return v << 20;
    case 'G': return v << 30;
    case 'T': return v << 40;
    default: return v;
    }
}

/* ---- devices ---- */

void sim_uuid(int physical, zcu_uuid *out) {
    for (int i = 0; i < 16; i++) out->bytes[i] = (unsigned char)(0x51 * (i + 1) + 0x1f * (physical + 1) * (i + 3));
}

static void uuid_text(int physical, char out[41]) {
    zcu_uuid u;
    sim_uuid(physical, &u);
    char *at = out + sprintf(out, "GPU-");
    for (int i = 0; i < 16; i++) at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", u.bytes[i]);
}

/* CUDA_VISIBLE_DEVICES: numbers or UUID prefixes; what follows the first invalid one does not count. */
static void see_devices(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    sim.visible = 0;
    if (!list) {
        for (int i = 0; i < sim.devices; i++) sim.map[sim.visible++] = i;
        return;
    }
    while (*list) {
        size_t n = strcspn(list, ",");
        char word[64], text[41], *end;
        int found = -1;
        snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), list);
        long number = strtol(word, &end, 10);
        if (*word && !*end && number >= 0 && number < sim.devices) found = (int)number;
        for (int i = 0; found < 0 && strlen(word) > 4 && i < sim.devices; i++) {
            uuid_text(i, text);
            if (!strncmp(text, word, strlen(word))) found = i;
        }
        if (found < 0 || sim_ordinal(found) >= 0) break;
        sim.map[sim.visible++] = found;
        list += n + (list[n] == ',');
    }
}

int sim_physical(int ordinal) { return ordinal >= 0 && ordinal < sim.visible ? sim.map[ordinal] : -1; }

int sim_ordinal(int physical) {
    for (int i = 0; i < sim.visible; i++)
        if (sim.map[i] == physical) return i;
    return -1;
}

bool sim_peers(int a, int b) {
    const char *s = getenv("SIMCUDA_PEER");
    return a != b && !(s && *s == '0');
}

static void forked(void) { sim.forked = true; }

CALL(Init, 2000, unsigned flags) {
    if (flags) return ZCU_ERROR_INVALID_VALUE;
    if (sim.forked) return ZCU_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&sim.lock);
    zcu_result r = ZCU_SUCCESS;
    if (!sim.inited) {
        pthread_condattr_t a;
        pthread_condattr_init(&a);
        pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
        pthread_cond_init(&sim.work, &a);
        pthread_cond_init(&sim.progress, &a);
        pthread_condattr_destroy(&a);
        sim.devices = (int)sim_env_size("SIMCUDA_DEVICES", 1);
        if (sim.devices > SIM_DEVICES) sim.devices = SIM_DEVICES;
        for (int i = 0; i < sim.devices; i++) {
            sim.memory[i] = sim_env_size("SIMCUDA_MEMORY", 24ull << 30);
            sim.ctx[i].device = i;
        }
        sim.seed = sim_env_size("SIMCUDA_SEED", 1);
        sim.delay_us = sim_env_size("SIMCUDA_DELAY_US", 50);
        sim.hold_new = sim_env_size("SIMCUDA_HOLD", 0) != 0;
        sim.next_id = 1;
        see_devices();
        if (!sim.visible) r = ZCU_ERROR_NO_DEVICE;
        else if ((r = sim_fail("cuInit"))) {
        } else if (sim_session_open()) r = ZCU_ERROR_UNKNOWN;
        else {
            pthread_atfork(NULL, NULL, forked);
            __atomic_store_n(&sim.inited, true, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

CALL(DriverGetVersion, 2020, int *version) { /* works before cuInit */
    zcu_result r = sim_fail("cuDriverGetVersion");
    if (!r) *version = (int)sim_env_size("SIMCUDA_VERSION", 13000);
    return r;
}

CALL(DeviceGetCount, 2000, int *count) {
    ENTER_CPU(DeviceGetCount);
    *count = sim.visible;
    return ZCU_SUCCESS;
}

CALL(DeviceGet, 2000, zcu_device *device, int ordinal) {
    ENTER_CPU(DeviceGet);
    if (sim_physical(ordinal) < 0) return ZCU_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return ZCU_SUCCESS;
}

CALL(DeviceGetName, 2000, char *name, int length, zcu_device device) {
    ENTER_CPU(DeviceGetName);
    if (sim_physical(device) < 0) return ZCU_ERROR_INVALID_DEVICE;
    if (length < 1) return ZCU_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "Simulated GPU %d", sim_physical(device));
    return ZCU_SUCCESS;
}

CALL_V(DeviceGetUuid, _v2, 11040, zcu_uuid *uuid, zcu_device device) {
    ENTER_CPU(DeviceGetUuid);
    if (sim_physical(device) < 0) return ZCU_ERROR_INVALID_DEVICE;
    sim_uuid(sim_physical(device), uuid);
    return ZCU_SUCCESS;
}

CALL_V(DeviceTotalMem, _v2, 3020, size_t *bytes, zcu_device device) {
    ENTER_CPU(DeviceTotalMem);
    if (sim_physical(device) < 0) return ZCU_ERROR_INVALID_DEVICE;
    *bytes = sim.memory[sim_physical(device)];
    return ZCU_SUCCESS;
}

/* SIMCUDA_ATTRIBUTES="119=0,115=0": what this card cannot do. */
static bool attribute_override(int attribute, int *value) {
    const char *at = getenv("SIMCUDA_ATTRIBUTES");
    while (at && *at) {
        int number, v;
        if (sscanf(at, "%d=%d", &number, &v) == 2 && number == attribute) {
            *value = v;
            return true;
        }
        at = strchr(at, ',');
        if (at) at++;
    }
    return false;
}

CALL(DeviceGetAttribute, 2000, int *value, int attribute, zcu_device device) {
    ENTER_CPU(DeviceGetAttribute);
    if (sim_physical(device) < 0) return ZCU_ERROR_INVALID_DEVICE;
    if (attribute < 1 || attribute > 200) return ZCU_ERROR_INVALID_VALUE;
    if (attribute_override(attribute, value)) return ZCU_SUCCESS;
    switch (attribute) {
    case ZCU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case ZCU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case ZCU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case ZCU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case ZCU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: *value = 1; break;
    case ZCU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: *value = ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; break;
    case ZCU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: *value = !sim_hidden("cuStreamWriteValue64"); break;
    case 16: *value = 8; break;   /* MULTIPROCESSOR_COUNT */
    case 75: *value = 9; break;   /* COMPUTE_CAPABILITY_MAJOR */
    default: *value = 0;
    }
    return ZCU_SUCCESS;
}

CALL(DeviceCanAccessPeer, 4000, int *can, zcu_device device, zcu_device peer) {
    ENTER_CPU(DeviceCanAccessPeer);
    int a = sim_physical(device), b = sim_physical(peer);
    if (a < 0 || b < 0) return ZCU_ERROR_INVALID_DEVICE;
    *can = sim_peers(a, b);
    return ZCU_SUCCESS;
}

/* ---- contexts: the primary one of each device, no other ---- */

struct ctx *sim_current(void) { return depth ? stack[depth - 1] : NULL; }

static struct ctx *ctx_of(zcu_ctx handle) {
    for (int i = 0; i < sim.devices; i++)
        if ((void *)handle == &sim.ctx[i] && sim.ctx[i].active) return &sim.ctx[i];
    return NULL;
}

CALL(DevicePrimaryCtxRetain, 7000, zcu_ctx *out, zcu_device device) {
    ENTER(DevicePrimaryCtxRetain);
    int d = sim_physical(device);
    if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
    struct ctx *c = &sim.ctx[d];
    if (!c->legacy) {
        if (!(c->legacy = sim_stream_new(c, false))) return ZCU_ERROR_OUT_OF_MEMORY;
        c->legacy->legacy = true;
    }
    c->retained++;
    c->active = true;
    *out = (zcu_ctx)(void *)c;
    return ZCU_SUCCESS;
}

CALL_V(DevicePrimaryCtxRelease, _v2, 11000, zcu_device device) {
    ENTER(DevicePrimaryCtxRelease);
    int d = sim_physical(device);
    if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
    if (!sim.ctx[d].retained) return ZCU_ERROR_INVALID_CONTEXT;
    if (!--sim.ctx[d].retained) sim.ctx[d].active = false;
    return ZCU_SUCCESS;
}

CALL(DevicePrimaryCtxGetState, 7000, zcu_device device, unsigned *flags, int *active) {
    ENTER_CPU(DevicePrimaryCtxGetState);
    int d = sim_physical(device);
    if (d < 0) return ZCU_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = sim.ctx[d].active;
    return ZCU_SUCCESS;
}

CALL(CtxGetCurrent, 4000, zcu_ctx *out) {
    ENTER_CPU(CtxGetCurrent);
    *out = (zcu_ctx)(void *)sim_current();
    return ZCU_SUCCESS;
}

CALL(CtxSetCurrent, 4000, zcu_ctx handle) {
    ENTER_CPU(CtxSetCurrent);
    if (handle && !ctx_of(handle)) return ZCU_ERROR_INVALID_CONTEXT;
    if (depth) depth--;
    if (handle) stack[depth++] = ctx_of(handle);
    return ZCU_SUCCESS;
}

CALL_V(CtxPushCurrent, _v2, 4000, zcu_ctx handle) {
    ENTER_CPU(CtxPushCurrent);
    if (!ctx_of(handle) || depth == CONTEXT_STACK) return ZCU_ERROR_INVALID_CONTEXT;
    stack[depth++] = ctx_of(handle);
    return ZCU_SUCCESS;
}

CALL_V(CtxPopCurrent, _v2, 4000, zcu_ctx *out) {
    ENTER_CPU(CtxPopCurrent);
    if (!depth) return ZCU_ERROR_INVALID_CONTEXT;
    depth--;
    if (out) *out = (zcu_ctx)(void *)stack[depth];
    return ZCU_SUCCESS;
}

CALL(CtxGetDevice, 2000, zcu_device *device) {
    ENTER_CPU(CtxGetDevice);
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    *device = sim_ordinal(sim_current()->device);
    return ZCU_SUCCESS;
}

CALL(CtxSynchronize, 2000, void) {
    ENTER(CtxSynchronize);
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    if (sim_capture_forbids_context()) return ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    zcu_result r = sim_wait_ctx(sim_current());
    if (!r) sim_pools_release();
    return r;
}

CALL_V(MemGetInfo, _v2, 3020, size_t *free_bytes, size_t *total) {
    ENTER(MemGetInfo);
    if (!sim_current()) return ZCU_ERROR_INVALID_CONTEXT;
    int d = sim_current()->device;
    uint64_t used = sim_charged(d);
    *total = sim.memory[d];
    *free_bytes = used < sim.memory[d] ? sim.memory[d] - used : 0;
    return ZCU_SUCCESS;
}

/* ---- the names of errors ---- */

static const struct { zcu_result code; const char *name, *text; } errors[] = {
    {ZCU_SUCCESS, "CUDA_SUCCESS", "no error"},
    {ZCU_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {ZCU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {ZCU_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {ZCU_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {ZCU_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {ZCU_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {ZCU_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {ZCU_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ZCU_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ZCU_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ZCU_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {SIM_ERROR_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {SIM_ERROR_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {ZCU_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {ZCU_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {ZCU_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {SIM_ERROR_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {SIM_ERROR_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {ZCU_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CALL(GetErrorName, 6000, zcu_result code, const char **out) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *out = errors[i].name, ZCU_SUCCESS;
    *out = NULL;
    return ZCU_ERROR_INVALID_VALUE;
}

CALL(GetErrorString, 6000, zcu_result code, const char **out) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *out = errors[i].text, ZCU_SUCCESS;
    *out = NULL;
    return ZCU_ERROR_INVALID_VALUE;
}
