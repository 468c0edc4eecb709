/* driver.c: see driver.h. The only file that opens a library or looks up a symbol in one.
 *
 * Opening is done once and its outcome, good or bad, is kept for the life of the process: CUDA's own initialisation cannot
 * be repeated or undone either. Nothing here is ever closed again once cuInit ran (the driver's threads live in it). */
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OLDEST 11040 /* brought cuDeviceGetUuid as we use it (the UUID of a MIG slice instead of its card's) */

enum { NEW, OPEN, FAILED };

static struct zcx_driver table;
static _Atomic int state = NEW;       /* released after `table` or `failure` was filled */
static struct zcx_err failure;
static _Atomic pid_t opener;          /* 0: nobody tried yet. Set before `lock` is first taken, see zcx_driver_open */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over the opening and over the retaining of contexts */
static _Atomic(zcu_ctx) contexts[ZCX_MAX_DEVICES];

struct symbol {
    const char *name;
    int version, required;
    size_t offset;
};
static const struct symbol symbols[] = {
#define X(name, version, required, arguments) {"cu" #name, version, required, offsetof(struct zcx_driver, name)},
    ZCX_DRIVER_SYMBOLS(X)
#undef X
};

typedef zcu_result (*lookup_with_status)(const char *name, void **out, int version, uint64_t flags, int *status);
typedef zcu_result (*lookup_plain)(const char *name, void **out, int version, uint64_t flags);

/* Asks with the pinned version, never with the driver's own: what comes back is the signature that was current then, so that
 * "cuMemHostRegister" as of 6050 is what newer headers call cuMemHostRegister_v2. NULL: not there. */
static void *look_up(lookup_with_status with_status, lookup_plain plain, const struct symbol *s) {
    void *found = NULL;
    int status = ZCU_GET_PROC_ADDRESS_SUCCESS;
    zcu_result r = with_status ? with_status(s->name, &found, s->version, ZCU_GET_PROC_ADDRESS_LEGACY_STREAM, &status)
                               : plain(s->name, &found, s->version, ZCU_GET_PROC_ADDRESS_LEGACY_STREAM);
    return r == ZCU_SUCCESS && status == ZCU_GET_PROC_ADDRESS_SUCCESS ? found : NULL;
}

static int read_symbols(void *library, struct zcx_driver *d, struct zcx_err *err) {
    /* Two names that no version pins: the function with a status argument came with CUDA 12.0, the plain one with 11.3. */
    lookup_with_status with_status = (lookup_with_status)dlsym(library, "cuGetProcAddress_v2");
    lookup_plain plain = with_status ? NULL : (lookup_plain)dlsym(library, "cuGetProcAddress");
    const struct symbol *missing = NULL;

    if (!with_status && !plain)
        return zcx_fail(err, ZCX_E_NODRIVER, "%s is no CUDA driver, or one older than CUDA 11.4, the oldest that serves",
                        d->path);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *found = look_up(with_status, plain, &symbols[i]);
        if (!found && symbols[i].required && !missing) missing = &symbols[i];
        memcpy((char *)d + symbols[i].offset, &found, sizeof found);
    }
    /* The version first: it says why a symbol is missing. */
    if (d->DriverGetVersion && d->DriverGetVersion(&d->version) == ZCU_SUCCESS && d->version < OLDEST)
        return zcx_fail(err, ZCX_E_NODRIVER, "the NVIDIA driver is for CUDA %d.%d, at least 11.4 is needed: update the driver",
                        d->version / 1000, d->version % 1000 / 10);
    if (missing)
        return zcx_fail(err, ZCX_E_NODRIVER, "%s lacks %s as of CUDA %d.%d", d->path, missing->name, missing->version / 1000,
                        missing->version % 1000 / 10);
    return 0;
}

static const char *name_of(const struct zcx_driver *d, int result) {
    const char *s = NULL;
    return d->GetErrorName(result, &s) == ZCU_SUCCESS && s ? s : "an unknown CUDA error";
}

static const char *text_of(const struct zcx_driver *d, int result) {
    const char *s = NULL;
    return d->GetErrorString(result, &s) == ZCU_SUCCESS && s ? s : "an error that this driver has no words for";
}

static int unusable(const struct zcx_driver *d, const char *call, int result, struct zcx_err *err) {
    return zcx_err_at(err, __FILE__, __LINE__, ZCX_E_NODRIVER, result, call, "%s: %s (%s)", call, name_of(d, result),
                      text_of(d, result));
}

/* Not an error: what cannot be had is done without, and a driver that does not know the question has not got it either. */
static unsigned char can_vmm(const struct zcx_driver *d, zcu_device device) {
    int vmm = 0, descriptors = 0;
    if (!d->MemCreate || !d->MemRelease || !d->MemAddressReserve || !d->MemAddressFree || !d->MemMap || !d->MemUnmap ||
        !d->MemSetAccess || !d->MemExportToShareableHandle || !d->MemImportFromShareableHandle ||
        !d->MemGetAllocationGranularity || !d->MemRetainAllocationHandle || !d->MemGetAllocationPropertiesFromHandle)
        return 0;
    if (d->DeviceGetAttribute(&vmm, ZCU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device)) return 0;
    if (d->DeviceGetAttribute(&descriptors, ZCU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device)) return 0;
    return vmm && descriptors;
}

static int initialise(struct zcx_driver *d, struct zcx_err *err) {
    zcu_result r = d->Init(0);
    if (r != ZCU_SUCCESS) return unusable(d, "cuInit", r, err);
    r = d->DeviceGetCount(&d->count);
    if (r != ZCU_SUCCESS) return unusable(d, "cuDeviceGetCount", r, err);
    if (d->count < 1) return zcx_fail(err, ZCX_E_NODRIVER, "the NVIDIA driver shows no device to this process");
    if (d->count > ZCX_MAX_DEVICES)
        return zcx_fail(err, ZCX_E_NODRIVER, "%d CUDA devices are visible, more than the %d that are provided for", d->count,
                        ZCX_MAX_DEVICES);
    for (int i = 0; i < d->count; i++) {
        zcu_device device;
        r = d->DeviceGet(&device, i);
        if (r != ZCU_SUCCESS) return unusable(d, "cuDeviceGet", r, err);
        r = d->DeviceGetUuid(&d->uuid[i], device);
        if (r != ZCU_SUCCESS) return unusable(d, "cuDeviceGetUuid", r, err);
        d->vmm[i] = can_vmm(d, device);
    }
    return 0;
}

static int open_once(struct zcx_driver *d, struct zcx_err *err) {
    const char *wanted = getenv("ZCX_LIBCUDA");
    struct link_map *map = NULL;
    void *library;
    int rc;

    if (!wanted || !*wanted) wanted = "libcuda.so.1";
    library = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        return zcx_fail(err, ZCX_E_NODRIVER, "no NVIDIA driver: %s", why ? why : wanted);
    }
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0]) wanted = map->l_name;
    snprintf(d->path, sizeof d->path, "%s", wanted);
    rc = read_symbols(library, d, err);
    if (rc) {
        dlclose(library);
        return rc;
    }
    return initialise(d, err);
}

static int again(struct zcx_err *err) {
    if (err) *err = failure;
    return -failure.code;
}

/* The pid is looked at before the mutex: in a child of fork() the mutex may be held by a thread that does not exist there.
 * `opener` is set before anybody takes it, so whoever finds `opener` to be itself may wait for it. */
int zcx_driver_open(const struct zcx_driver **out, struct zcx_err *err) {
    pid_t self = getpid(), first = atomic_load(&opener);

    if (atomic_load_explicit(&state, memory_order_acquire) == FAILED) return again(err);
    if (first == 0 && atomic_compare_exchange_strong(&opener, &first, self)) first = self;
    if (first != self)
        return zcx_fail(err, ZCX_E_NODRIVER,
                        "this process was forked from process %d after that had opened CUDA, which no child survives: start a "
                        "new program instead", (int)first);
    if (atomic_load_explicit(&state, memory_order_acquire) == NEW) {
        pthread_mutex_lock(&lock);
        if (atomic_load_explicit(&state, memory_order_relaxed) == NEW)
            atomic_store_explicit(&state, open_once(&table, &failure) ? FAILED : OPEN, memory_order_release);
        pthread_mutex_unlock(&lock);
        if (atomic_load_explicit(&state, memory_order_acquire) == FAILED) return again(err);
    }
    *out = &table;
    return 0;
}

const struct zcx_driver *zcx_driver_opened(void) {
    if (atomic_load_explicit(&state, memory_order_acquire) != OPEN) return NULL;
    return atomic_load(&opener) == getpid() ? &table : NULL;
}

int zcx_driver_find(const struct zcx_driver *d, const zcu_uuid *uuid, int *ordinal) {
    for (int i = 0; i < d->count; i++)
        if (memcmp(&d->uuid[i], uuid, sizeof *uuid) == 0) {
            *ordinal = i;
            return 0;
        }
    return 1;
}

const char *zcx_driver_error_name(int result) {
    const struct zcx_driver *d = zcx_driver_opened();
    return d ? name_of(d, result) : "a CUDA error";
}

const char *zcx_driver_error_text(int result) {
    const struct zcx_driver *d = zcx_driver_opened();
    return d ? text_of(d, result) : "the driver is not open in this process";
}

int zcx_cu_at(struct zcx_err *err, const char *file, int line, const char *name, int result) {
    if (result == ZCU_SUCCESS) return 0;
    return zcx_err_at(err, file, line, ZCX_E_CUDA, result, name, "%s", zcx_driver_error_text(result));
}

/* The primary context, retained once and never released: torch holds it for the life of the process as well. */
static int context_of(const struct zcx_driver *d, int ordinal, zcu_ctx *out, struct zcx_err *err) {
    zcu_ctx context = atomic_load_explicit(&contexts[ordinal], memory_order_acquire);
    zcu_device device;
    int rc = 0;

    if (!context) {
        pthread_mutex_lock(&lock);
        context = atomic_load_explicit(&contexts[ordinal], memory_order_relaxed);
        if (!context) {
            rc = zcx_cu(err, "cuDeviceGet", d->DeviceGet(&device, ordinal));
            if (!rc) rc = zcx_cu(err, "cuDevicePrimaryCtxRetain", d->DevicePrimaryCtxRetain(&context, device));
            if (!rc) atomic_store_explicit(&contexts[ordinal], context, memory_order_release);
        }
        pthread_mutex_unlock(&lock);
    }
    if (!rc) *out = context;
    return rc;
}

static int make_current(const struct zcx_driver *d, int ordinal, int *pushed, struct zcx_err *err) {
    zcu_ctx wanted, current;
    int rc = context_of(d, ordinal, &wanted, err);

    if (!rc) rc = zcx_cu(err, "cuCtxGetCurrent", d->CtxGetCurrent(&current));
    if (rc || current == wanted) return rc;
    rc = zcx_cu(err, "cuCtxPushCurrent", d->CtxPushCurrent(wanted));
    if (!rc) *pushed = 1;
    return rc;
}

int zcx_scope_open(struct zcx_scope *s, int ordinal, struct zcx_err *err) {
    const struct zcx_driver *d;
    zcu_capture_mode mode = ZCU_STREAM_CAPTURE_MODE_RELAXED;
    int pushed = 0, rc = zcx_driver_open(&d, err);

    if (rc) return rc;
    if (ordinal >= d->count)
        return zcx_fail(err, ZCX_E_RANGE, "device %d: this process sees %d", ordinal, d->count);
    rc = zcx_cu(err, "cuThreadExchangeStreamCaptureMode", d->ThreadExchangeStreamCaptureMode(&mode));
    if (rc) return rc;
    if (ordinal >= 0) rc = make_current(d, ordinal, &pushed, err);
    if (rc) {
        d->ThreadExchangeStreamCaptureMode(&mode);
        return rc;
    }
    *s = (struct zcx_scope){.d = d, .mode = mode, .pushed = pushed};
    return 0;
}

void zcx_scope_close(struct zcx_scope *s) {
    zcu_ctx popped;
    if (s->pushed) s->d->CtxPopCurrent(&popped);
    s->d->ThreadExchangeStreamCaptureMode(&s->mode);
}

int zcx_driver_ptr_info(const struct zcx_driver *d, zcu_ptr p, struct zcx_ptr_info *out, struct zcx_err *err) {
    enum { TYPE, BASE, SIZE, ID, POOL, ORDINAL, LEGACY, HANDLES, COUNT };
    zcu_pointer_attribute attributes[COUNT] = {
        [TYPE] = ZCU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        [BASE] = ZCU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        [SIZE] = ZCU_POINTER_ATTRIBUTE_RANGE_SIZE,
        [ID] = ZCU_POINTER_ATTRIBUTE_BUFFER_ID,
        [POOL] = ZCU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        [ORDINAL] = ZCU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        [LEGACY] = ZCU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        [HANDLES] = ZCU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
    };
    /* Some are bytes, some ints, some 8 bytes wide: zeroed 64-bit words hold each of them. */
    uint64_t values[COUNT] = {0};
    void *data[COUNT];
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, -1, err);

    if (rc) return rc;
    for (int i = 0; i < COUNT; i++) data[i] = &values[i];
    rc = zcx_cu(err, "cuPointerGetAttributes", d->PointerGetAttributes(COUNT, attributes, data, p));
    zcx_scope_close(&s);
    if (rc) return rc;
    /* Unlike cuPointerGetAttribute, this call succeeds on a pointer that CUDA never saw, and then zeroes the attributes
     * (as documented in cuda.h); some are set to "invalid" instead, hence all of ours to 0. */
    *out = (struct zcx_ptr_info){.type = (int)values[TYPE]};
    if (!out->type) return 0;
    out->base = values[BASE];
    out->size = values[SIZE];
    out->buffer_id = values[ID];
    out->pool = (zcu_pool)(uintptr_t)values[POOL];
    out->ordinal = (int)(uint32_t)values[ORDINAL];
    out->legacy_ipc = (values[LEGACY] & 0xff) != 0;
    out->handle_types = (unsigned)values[HANDLES];
    return 0;
}

int zcx_driver_capturing(const struct zcx_driver *d, int ordinal, zcu_stream stream, struct zcx_err *err) {
    zcu_capture_status status = ZCU_STREAM_CAPTURE_STATUS_NONE;
    struct zcx_scope s;
    int rc = zcx_scope_open(&s, ordinal, err);

    if (rc) return rc;
    rc = zcx_cu(err, "cuStreamIsCapturing", d->StreamIsCapturing(stream, &status));
    zcx_scope_close(&s);
    return rc ? rc : status != ZCU_STREAM_CAPTURE_STATUS_NONE;
}

/* ---- captures that are known ---- */

static pthread_mutex_t captures_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned captures;

/* The lock is held over the recording, so that no capture begins in its midst. */
void zcx_driver_capture_begins(void) {
    pthread_mutex_lock(&captures_lock);
    captures++;
    pthread_mutex_unlock(&captures_lock);
}

void zcx_driver_capture_ended(void) {
    pthread_mutex_lock(&captures_lock);
    if (captures) captures--;
    pthread_mutex_unlock(&captures_lock);
}

zcu_result zcx_driver_record_context(const struct zcx_driver *d, zcu_ctx context, zcu_event event) {
    pthread_mutex_lock(&captures_lock);
    zcu_result r = captures ? ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED : d->CtxRecordEvent(context, event);
    pthread_mutex_unlock(&captures_lock);
    return r;
}

zcu_result zcx_driver_synchronize_context(const struct zcx_driver *d) {
    pthread_mutex_lock(&captures_lock);
    unsigned known = captures;
    pthread_mutex_unlock(&captures_lock);
    return known ? ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED : d->CtxSynchronize();
}
