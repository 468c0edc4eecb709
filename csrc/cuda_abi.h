/* cuda_abi.h: the part of the CUDA driver's ABI that we use, in our own names, so that no toolkit is needed to build.
 *
 * Values and layouts are those of CUDA 11.2 and later; tests/c/abi_against_cuda_h.c compares every one of them with the
 * real cuda.h wherever one is found. The table of functions is in driver.h. Does not: declare or call anything. */
#ifndef ZCX_CUDA_ABI_H
#define ZCX_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int zcu_result;
typedef int zcu_device;
typedef unsigned long long zcu_ptr; /* CUdeviceptr */
typedef struct zcu_ctx_s *zcu_ctx;
typedef struct zcu_stream_s *zcu_stream; /* NULL: the legacy default stream */
typedef struct zcu_event_s *zcu_event;
typedef struct zcu_pool_s *zcu_pool;
typedef unsigned long long zcu_mem; /* CUmemGenericAllocationHandle: physical memory, mapped nowhere or anywhere */

/* Parameters that are enums over there; named so that a test can compare whole signatures. */
typedef int zcu_device_attribute;
typedef int zcu_pointer_attribute;
typedef int zcu_capture_status;
typedef int zcu_capture_mode;
typedef int zcu_pool_attribute;
typedef int zcu_handle_type;
typedef int zcu_granularity;

enum {
    ZCU_SUCCESS = 0,
    ZCU_ERROR_INVALID_VALUE = 1,
    ZCU_ERROR_OUT_OF_MEMORY = 2,
    ZCU_ERROR_NOT_INITIALIZED = 3,
    ZCU_ERROR_DEINITIALIZED = 4,
    ZCU_ERROR_NO_DEVICE = 100,
    ZCU_ERROR_INVALID_DEVICE = 101,
    ZCU_ERROR_INVALID_CONTEXT = 201,
    ZCU_ERROR_INVALID_HANDLE = 400,
    ZCU_ERROR_NOT_FOUND = 500,
    ZCU_ERROR_NOT_READY = 600,
    ZCU_ERROR_ILLEGAL_ADDRESS = 700,
    ZCU_ERROR_NOT_PERMITTED = 800,
    ZCU_ERROR_NOT_SUPPORTED = 801,
    ZCU_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    ZCU_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    ZCU_ERROR_UNKNOWN = 999,

    ZCU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    ZCU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    ZCU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    ZCU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
    ZCU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
    ZCU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
    ZCU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR = 123,

    ZCU_POINTER_ATTRIBUTE_CONTEXT = 1,
    ZCU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    ZCU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    ZCU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    ZCU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    ZCU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    ZCU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    ZCU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
    ZCU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,

    ZCU_MEMORYTYPE_HOST = 1,
    ZCU_MEMORYTYPE_DEVICE = 2,

    ZCU_STREAM_DEFAULT = 0,
    ZCU_STREAM_NON_BLOCKING = 1,
    ZCU_STREAM_CAPTURE_STATUS_NONE = 0,
    ZCU_STREAM_CAPTURE_MODE_RELAXED = 2,
    ZCU_STREAM_WAIT_VALUE_GEQ = 0,
    ZCU_STREAM_WRITE_VALUE_DEFAULT = 0,

    ZCU_EVENT_DISABLE_TIMING = 2,
    ZCU_EVENT_INTERPROCESS = 4,

    ZCU_MEMHOSTREGISTER_PORTABLE = 1,
    ZCU_MEMHOSTREGISTER_DEVICEMAP = 2,

    ZCU_MEM_ALLOCATION_TYPE_PINNED = 1,
    ZCU_MEM_HANDLE_TYPE_NONE = 0,
    ZCU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    ZCU_MEM_LOCATION_TYPE_DEVICE = 1,
    ZCU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    ZCU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    ZCU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    ZCU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    ZCU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,

    ZCU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
    ZCU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
    ZCU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
    ZCU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
    ZCU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,

    ZCU_GET_PROC_ADDRESS_LEGACY_STREAM = 1,
    ZCU_GET_PROC_ADDRESS_SUCCESS = 0,
    ZCU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
    ZCU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
};

typedef struct { unsigned char bytes[16]; } zcu_uuid;

typedef struct { int type, id; } zcu_location;

typedef struct {
    int alloc_type, handle_types;
    zcu_location location;
    void *win32_security_attributes;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
} zcu_pool_props; /* CUmemPoolProps, 88 bytes */

typedef struct {
    int type, handle_types;
    zcu_location location;
    void *win32_metadata;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } alloc_flags;
} zcu_mem_props; /* CUmemAllocationProp, 32 bytes */

typedef struct {
    zcu_location location;
    int flags;
} zcu_access_desc;

typedef struct { unsigned char bytes[64]; } zcu_pool_blob; /* CUmemPoolPtrExportData */
typedef struct { unsigned char bytes[64]; } zcu_ipc_event; /* CUipcEventHandle */

#endif
