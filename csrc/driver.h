/* driver.h: the table of CUDA driver functions, and the bracket that every use of it stands in.
 *
 * The one global of the extension: libcuda.so.1 (or $ZCX_LIBCUDA) is opened at first use and its symbols are read once,
 * through cuGetProcAddress with the version pinned below, so that a newer signature is never returned.
 * Only driver.c calls dlopen and dlsym. Does not: know pools, gates or tensors. Never: cudart. */
#ifndef ZCX_DRIVER_H
#define ZCX_DRIVER_H

#include "cuda_abi.h"
#include "err.h"

/* X(name without "cu", version that brought this signature, required, result type's arguments)
 * required 1: without it there is no GPU path at all; 0: the caller looks for NULL and takes the documented fallback. */
#define ZCX_DRIVER_SYMBOLS(X)                                                                              \
    X(Init, 2000, 1, (unsigned))                                                                           \
    X(DriverGetVersion, 2020, 1, (int *))                                                                  \
    X(GetErrorName, 6000, 1, (zcu_result, const char **))                                                  \
    X(GetErrorString, 6000, 1, (zcu_result, const char **))                                                \
    X(DeviceGetCount, 2000, 1, (int *))                                                                    \
    X(DeviceGet, 2000, 1, (zcu_device *, int))                                                             \
    X(DeviceGetName, 2000, 1, (char *, int, zcu_device))                                                   \
    X(DeviceGetUuid, 11040, 1, (zcu_uuid *, zcu_device))                                                   \
    X(DeviceGetAttribute, 2000, 1, (int *, zcu_device_attribute, zcu_device))                              \
    X(DeviceTotalMem, 3020, 1, (size_t *, zcu_device))                                                     \
    X(DeviceCanAccessPeer, 4000, 1, (int *, zcu_device, zcu_device))                                       \
    X(DevicePrimaryCtxRetain, 7000, 1, (zcu_ctx *, zcu_device))                                            \
    X(DevicePrimaryCtxRelease, 11000, 1, (zcu_device))                                                     \
    X(DevicePrimaryCtxGetState, 7000, 1, (zcu_device, unsigned *, int *))                                  \
    X(CtxGetCurrent, 4000, 1, (zcu_ctx *))                                                                 \
    X(CtxPushCurrent, 4000, 1, (zcu_ctx))                                                                  \
    X(CtxPopCurrent, 4000, 1, (zcu_ctx *))                                                                 \
    X(CtxSynchronize, 2000, 1, (void))                                                                     \
    X(CtxRecordEvent, 12050, 0, (zcu_ctx, zcu_event))                                                      \
    X(MemGetInfo, 3020, 1, (size_t *, size_t *))                                                           \
    X(PointerGetAttributes, 7000, 1, (unsigned, zcu_pointer_attribute *, void **, zcu_ptr))                \
    X(StreamCreate, 2000, 1, (zcu_stream *, unsigned))                                                     \
    X(StreamDestroy, 4000, 1, (zcu_stream))                                                                \
    X(StreamQuery, 2000, 1, (zcu_stream))                                                                  \
    X(StreamSynchronize, 2000, 1, (zcu_stream))                                                            \
    X(StreamWaitEvent, 3020, 1, (zcu_stream, zcu_event, unsigned))                                         \
    X(StreamIsCapturing, 10000, 1, (zcu_stream, zcu_capture_status *))                                     \
    X(ThreadExchangeStreamCaptureMode, 10010, 1, (zcu_capture_mode *))                                     \
    X(StreamWriteValue64, 11070, 0, (zcu_stream, zcu_ptr, uint64_t, unsigned))                             \
    X(StreamWaitValue64, 11070, 0, (zcu_stream, zcu_ptr, uint64_t, unsigned))                              \
    X(EventCreate, 2000, 1, (zcu_event *, unsigned))                                                       \
    X(EventDestroy, 4000, 1, (zcu_event))                                                                  \
    X(EventRecord, 2000, 1, (zcu_event, zcu_stream))                                                       \
    X(EventQuery, 2000, 1, (zcu_event))                                                                    \
    X(IpcGetEventHandle, 4010, 0, (zcu_ipc_event *, zcu_event))                                            \
    X(IpcOpenEventHandle, 4010, 0, (zcu_event *, zcu_ipc_event))                                           \
    X(MemHostRegister, 6050, 1, (void *, size_t, unsigned))                                                \
    X(MemHostUnregister, 4000, 1, (void *))                                                                \
    X(MemHostGetDevicePointer, 3020, 1, (zcu_ptr *, void *, unsigned))                                     \
    X(DeviceSetMemPool, 11020, 1, (zcu_device, zcu_pool))                                                  \
    X(DeviceGetMemPool, 11020, 1, (zcu_pool *, zcu_device))                                                \
    X(MemPoolCreate, 11020, 1, (zcu_pool *, const zcu_pool_props *))                                       \
    X(MemPoolDestroy, 11020, 1, (zcu_pool))                                                                \
    X(MemPoolSetAttribute, 11020, 1, (zcu_pool, zcu_pool_attribute, void *))                               \
    X(MemPoolGetAttribute, 11020, 1, (zcu_pool, zcu_pool_attribute, void *))                               \
    X(MemPoolTrimTo, 11020, 1, (zcu_pool, size_t))                                                         \
    X(MemPoolSetAccess, 11020, 1, (zcu_pool, const zcu_access_desc *, size_t))                             \
    X(MemPoolExportToShareableHandle, 11020, 1, (void *, zcu_pool, zcu_handle_type, unsigned long long))   \
    X(MemPoolImportFromShareableHandle, 11020, 1, (zcu_pool *, void *, zcu_handle_type, unsigned long long)) \
    X(MemPoolExportPointer, 11020, 1, (zcu_pool_blob *, zcu_ptr))                                          \
    X(MemPoolImportPointer, 11020, 1, (zcu_ptr *, zcu_pool, zcu_pool_blob *))                              \
    X(MemAllocFromPoolAsync, 11020, 1, (zcu_ptr *, size_t, zcu_pool, zcu_stream))                          \
    X(MemAllocAsync, 11020, 1, (zcu_ptr *, size_t, zcu_stream))                                            \
    X(MemFreeAsync, 11020, 1, (zcu_ptr, zcu_stream))                                                       \
    X(MemCreate, 10020, 0, (zcu_mem *, size_t, const zcu_mem_props *, unsigned long long))                 \
    X(MemRelease, 10020, 0, (zcu_mem))                                                                     \
    X(MemAddressReserve, 10020, 0, (zcu_ptr *, size_t, size_t, zcu_ptr, unsigned long long))               \
    X(MemAddressFree, 10020, 0, (zcu_ptr, size_t))                                                         \
    X(MemMap, 10020, 0, (zcu_ptr, size_t, size_t, zcu_mem, unsigned long long))                            \
    X(MemUnmap, 10020, 0, (zcu_ptr, size_t))                                                               \
    X(MemSetAccess, 10020, 0, (zcu_ptr, size_t, const zcu_access_desc *, size_t))                          \
    X(MemExportToShareableHandle, 10020, 0, (void *, zcu_mem, zcu_handle_type, unsigned long long))        \
    X(MemImportFromShareableHandle, 10020, 0, (zcu_mem *, void *, zcu_handle_type))                        \
    X(MemGetAllocationGranularity, 10020, 0, (size_t *, const zcu_mem_props *, zcu_granularity))           \
    X(MemRetainAllocationHandle, 11000, 0, (zcu_mem *, void *))                                            \
    X(MemGetAllocationPropertiesFromHandle, 10020, 0, (zcu_mem_props *, zcu_mem))                          \
    X(MemGetAddressRange, 3020, 0, (zcu_ptr *, size_t *, zcu_ptr))                                         \
    X(MemcpyHtoDAsync, 3020, 1, (zcu_ptr, const void *, size_t, zcu_stream))                               \
    X(MemcpyDtoHAsync, 3020, 1, (void *, zcu_ptr, size_t, zcu_stream))                                     \
    X(MemcpyDtoDAsync, 3020, 1, (zcu_ptr, zcu_ptr, size_t, zcu_stream))                                    \
    X(MemsetD8Async, 3020, 1, (zcu_ptr, unsigned char, size_t, zcu_stream))

/* Above this many devices nothing of ours is offered (the CPU path still serves). */
#define ZCX_MAX_DEVICES 64

struct zcx_driver {
#define X(name, version, required, arguments) zcu_result (*name) arguments;
    ZCX_DRIVER_SYMBOLS(X)
#undef X
    int version;      /* of the driver, as cuDriverGetVersion says: 13000 is CUDA 13.0 */
    int count;        /* devices visible to this process when cuInit ran */
    zcu_uuid uuid[ZCX_MAX_DEVICES];
    unsigned char vmm[ZCX_MAX_DEVICES]; /* the device's memory can be made, mapped and shared as descriptors (cuMemCreate and
                                           its kin are all there, and the device can): else never call one of them */
    char path[256];   /* what was opened */
};

/* Open once for the whole process (thread-safe, idempotent; a failure is remembered and returned again).
 * Calls cuInit, which freezes CUDA_VISIBLE_DEVICES: never call it before the host has set that.
 * -ZCX_E_NODRIVER: no library, a missing required symbol, no device; err->text says which. After a fork of a process that
 * had opened it: -ZCX_E_NODRIVER too (CUDA does not survive a fork). The pointer stays valid for the process's life. */
int zcx_driver_open(const struct zcx_driver **out, struct zcx_err *err);

/* The table if it was opened already in this process, else NULL. Never touches CUDA. */
const struct zcx_driver *zcx_driver_opened(void);

/* The ordinal of the device with this UUID in this process: 0 and *ordinal; 1: not visible here. */
int zcx_driver_find(const struct zcx_driver *d, const zcu_uuid *uuid, int *ordinal);

/* "CUDA_ERROR_…" and its sentence; static strings, never NULL. */
const char *zcx_driver_error_name(int result);
const char *zcx_driver_error_text(int result);

/* The bracket: while it is open the calling thread's capture mode is RELAXED, so that our calls do not invalidate a
 * capture in another thread (seen on driver 580.159.04, measured by research/pool-ipc/probe_graph_capture.py), and the
 * device's primary context is current. ordinal < 0: leave the context alone. The primary context is retained once per
 * device for the process's life. Brackets nest; always close one that opened. */
struct zcx_scope {
    const struct zcx_driver *d;
    int mode;     /* what to put back */
    int pushed;
};
int zcx_scope_open(struct zcx_scope *s, int ordinal, struct zcx_err *err);
void zcx_scope_close(struct zcx_scope *s);

/* `zcx_cu(err, "cuFoo", d->Foo(...))`: 0, or -ZCX_E_CUDA recorded with the place. */
#define zcx_cu(err, name, result) zcx_cu_at((err), __FILE__, __LINE__, (name), (result))
int zcx_cu_at(struct zcx_err *err, const char *file, int line, const char *name, int result);

/* What a pointer is. `pool` first: memory of a pool may show handle types too. Then `legacy_ipc` (cuMemAlloc), and what is
 * left is VMM memory: with handle types it can be exported (cuMemRetainAllocationHandle), without it cannot leave the process.
 * There `base` and `size` may be of one mapping only; a tensor can reach over several. */
struct zcx_ptr_info {
    zcu_ptr base;           /* start of the allocation */
    uint64_t size;          /* of the allocation */
    uint64_t buffer_id;     /* unique per allocation for the process's life */
    zcu_pool pool;          /* NULL: not from a pool */
    int ordinal;            /* device, in this process's numbering */
    int type;               /* ZCU_MEMORYTYPE_* ; 0: unknown to CUDA */
    int legacy_ipc;         /* cuIpcGetMemHandle would work */
    unsigned handle_types;  /* ZCU_MEM_HANDLE_TYPE_*, a mask: how its handle may be exported */
};
/* Needs no current context. A pointer that the driver does not know is no error of its own: type 0, and all else 0. */
int zcx_driver_ptr_info(const struct zcx_driver *d, zcu_ptr p, struct zcx_ptr_info *out, struct zcx_err *err);

/* What concerns the whole context (cuCtxRecordEvent, cuCtxSynchronize) is refused while any thread of this process captures a graph, and takes
 * that capture with it, in relaxed mode too (driver 580.159.04, research/pool-ipc/probe_graph_capture.py). The driver does not tell whether one is
 * under way, so who knows says it: comfy_zerocopy/tensor.py for torch's. A capture that nobody told of is still at risk. */
void zcx_driver_capture_begins(void); /* before it does; nests */
void zcx_driver_capture_ended(void);
/* Both answer ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, and do nothing, while a capture is known. The context is current. */
zcu_result zcx_driver_record_context(const struct zcx_driver *d, zcu_ctx context, zcu_event event);
zcu_result zcx_driver_synchronize_context(const struct zcx_driver *d);

/* 1 while `stream` is being captured, 0 if not, negative on failure. */
int zcx_driver_capturing(const struct zcx_driver *d, int ordinal, zcu_stream stream, struct zcx_err *err);

#endif
