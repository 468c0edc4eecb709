/* abi_against_cuda_h.c: csrc/cuda_abi.h and the table of csrc/driver.h, held against NVIDIA's own cuda.h and cudaTypedefs.h.
 *
 * Nothing in here runs: that it compiles is the proof. tests/py/test_cuda_abi.py compiles it wherever it finds those headers,
 * and checks that no constant of ours is missing below. */
#include <cuda.h>
#include <cudaTypedefs.h>

#include "driver.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " differs from " #theirs)
#define CONSTANT(name) SAME(ZCU_##name, CU_##name)
#define RESULT(name) SAME(ZCU_##name, CUDA_##name)

RESULT(SUCCESS);
RESULT(ERROR_INVALID_VALUE);
RESULT(ERROR_OUT_OF_MEMORY);
RESULT(ERROR_NOT_INITIALIZED);
RESULT(ERROR_DEINITIALIZED);
RESULT(ERROR_NO_DEVICE);
RESULT(ERROR_INVALID_DEVICE);
RESULT(ERROR_INVALID_CONTEXT);
RESULT(ERROR_INVALID_HANDLE);
RESULT(ERROR_NOT_FOUND);
RESULT(ERROR_NOT_READY);
RESULT(ERROR_ILLEGAL_ADDRESS);
RESULT(ERROR_NOT_PERMITTED);
RESULT(ERROR_NOT_SUPPORTED);
RESULT(ERROR_STREAM_CAPTURE_UNSUPPORTED);
RESULT(ERROR_STREAM_CAPTURE_INVALIDATED);
RESULT(ERROR_UNKNOWN);

CONSTANT(DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
CONSTANT(DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
CONSTANT(DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
CONSTANT(DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
CONSTANT(DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES);
CONSTANT(DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
CONSTANT(DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR);

CONSTANT(POINTER_ATTRIBUTE_CONTEXT);
CONSTANT(POINTER_ATTRIBUTE_MEMORY_TYPE);
CONSTANT(POINTER_ATTRIBUTE_BUFFER_ID);
CONSTANT(POINTER_ATTRIBUTE_DEVICE_ORDINAL);
CONSTANT(POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
CONSTANT(POINTER_ATTRIBUTE_RANGE_START_ADDR);
CONSTANT(POINTER_ATTRIBUTE_RANGE_SIZE);
CONSTANT(POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
CONSTANT(POINTER_ATTRIBUTE_MEMPOOL_HANDLE);

CONSTANT(MEMORYTYPE_HOST);
CONSTANT(MEMORYTYPE_DEVICE);

CONSTANT(STREAM_DEFAULT);
CONSTANT(STREAM_NON_BLOCKING);
CONSTANT(STREAM_CAPTURE_STATUS_NONE);
CONSTANT(STREAM_CAPTURE_MODE_RELAXED);
CONSTANT(STREAM_WAIT_VALUE_GEQ);
CONSTANT(STREAM_WRITE_VALUE_DEFAULT);

CONSTANT(EVENT_DISABLE_TIMING);
CONSTANT(EVENT_INTERPROCESS);

CONSTANT(MEMHOSTREGISTER_PORTABLE);
CONSTANT(MEMHOSTREGISTER_DEVICEMAP);

CONSTANT(MEM_ALLOCATION_TYPE_PINNED);
CONSTANT(MEM_HANDLE_TYPE_NONE);
CONSTANT(MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
CONSTANT(MEM_LOCATION_TYPE_DEVICE);
CONSTANT(MEM_ACCESS_FLAGS_PROT_NONE);
CONSTANT(MEM_ACCESS_FLAGS_PROT_READ);
CONSTANT(MEM_ACCESS_FLAGS_PROT_READWRITE);
CONSTANT(MEM_ALLOC_GRANULARITY_MINIMUM);
CONSTANT(MEM_ALLOC_GRANULARITY_RECOMMENDED);

CONSTANT(MEMPOOL_ATTR_RELEASE_THRESHOLD);
CONSTANT(MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
CONSTANT(MEMPOOL_ATTR_RESERVED_MEM_HIGH);
CONSTANT(MEMPOOL_ATTR_USED_MEM_CURRENT);
CONSTANT(MEMPOOL_ATTR_USED_MEM_HIGH);

CONSTANT(GET_PROC_ADDRESS_LEGACY_STREAM);
CONSTANT(GET_PROC_ADDRESS_SUCCESS);
CONSTANT(GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
CONSTANT(GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

#define TYPE(ours, theirs)                                                                             \
    SAME(sizeof(ours), sizeof(theirs));                                                                \
    SAME(_Alignof(ours), _Alignof(theirs))
#define FIELD(ours, field, theirs, their_field)                                                        \
    SAME(offsetof(ours, field), offsetof(theirs, their_field));                                        \
    SAME(sizeof(((ours *)0)->field), sizeof(((theirs *)0)->their_field))

TYPE(zcu_result, CUresult);
TYPE(zcu_device, CUdevice);
TYPE(zcu_ptr, CUdeviceptr);
TYPE(zcu_ctx, CUcontext);
TYPE(zcu_stream, CUstream);
TYPE(zcu_event, CUevent);
TYPE(zcu_pool, CUmemoryPool);
TYPE(zcu_mem, CUmemGenericAllocationHandle);
TYPE(zcu_device_attribute, CUdevice_attribute);
TYPE(zcu_pointer_attribute, CUpointer_attribute);
TYPE(zcu_capture_status, CUstreamCaptureStatus);
TYPE(zcu_capture_mode, CUstreamCaptureMode);
TYPE(zcu_pool_attribute, CUmemPool_attribute);
TYPE(zcu_handle_type, CUmemAllocationHandleType);
TYPE(zcu_granularity, CUmemAllocationGranularity_flags);

TYPE(zcu_uuid, CUuuid);
FIELD(zcu_uuid, bytes, CUuuid, bytes);

TYPE(zcu_location, CUmemLocation);
FIELD(zcu_location, type, CUmemLocation, type);
FIELD(zcu_location, id, CUmemLocation, id);

TYPE(zcu_pool_props, CUmemPoolProps);
SAME(sizeof(zcu_pool_props), 88);
FIELD(zcu_pool_props, alloc_type, CUmemPoolProps, allocType);
FIELD(zcu_pool_props, handle_types, CUmemPoolProps, handleTypes);
FIELD(zcu_pool_props, location, CUmemPoolProps, location);
FIELD(zcu_pool_props, win32_security_attributes, CUmemPoolProps, win32SecurityAttributes);
FIELD(zcu_pool_props, max_size, CUmemPoolProps, maxSize);
FIELD(zcu_pool_props, usage, CUmemPoolProps, usage);
/* What is reserved for us may have got a name since, but must still end where ours ends. */
_Static_assert(offsetof(zcu_pool_props, reserved) <= offsetof(CUmemPoolProps, reserved), "reserved begins elsewhere");

TYPE(zcu_mem_props, CUmemAllocationProp);
SAME(sizeof(zcu_mem_props), 32);
FIELD(zcu_mem_props, type, CUmemAllocationProp, type);
FIELD(zcu_mem_props, handle_types, CUmemAllocationProp, requestedHandleTypes);
FIELD(zcu_mem_props, location, CUmemAllocationProp, location);
FIELD(zcu_mem_props, win32_metadata, CUmemAllocationProp, win32HandleMetaData);
FIELD(zcu_mem_props, alloc_flags, CUmemAllocationProp, allocFlags);
FIELD(zcu_mem_props, alloc_flags.compression, CUmemAllocationProp, allocFlags.compressionType);
FIELD(zcu_mem_props, alloc_flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
FIELD(zcu_mem_props, alloc_flags.usage, CUmemAllocationProp, allocFlags.usage);

TYPE(zcu_access_desc, CUmemAccessDesc);
FIELD(zcu_access_desc, location, CUmemAccessDesc, location);
FIELD(zcu_access_desc, flags, CUmemAccessDesc, flags);

TYPE(zcu_pool_blob, CUmemPoolPtrExportData);
TYPE(zcu_ipc_event, CUipcEventHandle);

/* From here on our names *are* their types, so that the table below spells their signatures. */
#define zcu_device CUdevice
#define zcu_ptr CUdeviceptr
#define zcu_ctx CUcontext
#define zcu_stream CUstream
#define zcu_event CUevent
#define zcu_pool CUmemoryPool
#define zcu_mem CUmemGenericAllocationHandle
#define zcu_result CUresult
#define zcu_uuid CUuuid
#define zcu_pool_props CUmemPoolProps
#define zcu_mem_props CUmemAllocationProp
#define zcu_access_desc CUmemAccessDesc
#define zcu_pool_blob CUmemPoolPtrExportData
#define zcu_ipc_event CUipcEventHandle
#define zcu_device_attribute CUdevice_attribute
#define zcu_pointer_attribute CUpointer_attribute
#define zcu_capture_status CUstreamCaptureStatus
#define zcu_capture_mode CUstreamCaptureMode
#define zcu_pool_attribute CUmemPool_attribute
#define zcu_handle_type CUmemAllocationHandleType
#define zcu_granularity CUmemAllocationGranularity_flags

/* PFN_cuFoo_v11020 exists only if 11.2 did bring a signature of cuFoo, so that the pinned version is checked as well. */
#define X(name, version, required, arguments)                                                          \
    _Static_assert(__builtin_types_compatible_p(CUresult(*) arguments, PFN_cu##name##_v##version),     \
                   "cu" #name " has another signature as of " #version);
ZCX_DRIVER_SYMBOLS(X)
#undef X
