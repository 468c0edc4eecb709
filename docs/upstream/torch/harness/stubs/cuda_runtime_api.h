// Stands in for the CUDA runtime: the few calls that the patched logic makes, passed on to the driver that $ZCX_LIBCUDA
// names. Types and values are those of CUDA 11.2 and later.
#pragma once
#include <cstdint>
#include <cstddef>
#include <cstdlib>
#include <dlfcn.h>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
typedef struct pool_st *cudaMemPool_t;
typedef struct stream_st *cudaStream_t;
enum cudaMemPoolAttr {
    cudaMemPoolReuseFollowEventDependencies = 1, cudaMemPoolReuseAllowOpportunistic = 2,
    cudaMemPoolReuseAllowInternalDependencies = 3, cudaMemPoolAttrReleaseThreshold = 4, cudaMemPoolAttrReservedMemCurrent = 5,
    cudaMemPoolAttrReservedMemHigh = 6, cudaMemPoolAttrUsedMemCurrent = 7, cudaMemPoolAttrUsedMemHigh = 8
};
enum cudaMemAllocationType { cudaMemAllocationTypePinned = 1 };
enum cudaMemAllocationHandleType { cudaMemHandleTypePosixFileDescriptor = 1 };
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1 };
enum cudaMemAccessFlags { cudaMemAccessFlagsProtReadWrite = 3 };
struct cudaMemLocation { cudaMemLocationType type; int id; };
struct cudaMemAccessDesc { cudaMemLocation location; cudaMemAccessFlags flags; };
struct cudaMemPoolProps {
    cudaMemAllocationType allocType; cudaMemAllocationHandleType handleTypes; cudaMemLocation location;
    void *win32SecurityAttributes; size_t maxSize; unsigned short usage; unsigned char reserved[54];
};
struct cudaMemPoolPtrExportData { unsigned char reserved[64]; };

inline void *driver_symbol(const char *name) {
    static void *library = dlopen(std::getenv("ZCX_LIBCUDA"), RTLD_NOW);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) std::abort();
    return found;
}
template <typename... T>
cudaError_t driver(const char *name, T... arguments) {
    return static_cast<cudaError_t>(reinterpret_cast<int (*)(T...)>(driver_symbol(name))(arguments...));
}
inline int current_device = 0;
inline cudaError_t cudaGetDevice(int *out) { *out = current_device; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
    void *context = nullptr;
    current_device = device;
    auto result = driver("cuDevicePrimaryCtxRetain", &context, device);
    return result ? result : driver("cuCtxPushCurrent_v2", context);
}
inline cudaError_t cudaDeviceSynchronize() { return driver("cuCtxSynchronize"); }
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) { return driver("cuDeviceGetDefaultMemPool", p, d); }
inline cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *p, int d) { return driver("cuDeviceGetMemPool", p, d); }
inline cudaError_t cudaDeviceSetMemPool(int d, cudaMemPool_t p) { return driver("cuDeviceSetMemPool", d, p); }
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t *p, const cudaMemPoolProps *q) { return driver("cuMemPoolCreate", p, q); }
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, cudaMemPoolAttr a, void *v) {
    return driver("cuMemPoolSetAttribute", p, int(a), v);
}
inline cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, cudaMemPoolAttr a, void *v) {
    return driver("cuMemPoolGetAttribute", p, int(a), v);
}
inline cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const cudaMemAccessDesc *d, size_t n) {
    return driver("cuMemPoolSetAccess", p, d, n);
}
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { return driver("cuMemPoolTrimTo", p, n); }
inline cudaError_t cudaMemPoolExportToShareableHandle(void *out, cudaMemPool_t p, cudaMemAllocationHandleType t, unsigned f) {
    return driver("cuMemPoolExportToShareableHandle", out, p, int(t), static_cast<unsigned long long>(f));
}
inline cudaError_t cudaMemPoolImportFromShareableHandle(cudaMemPool_t *p, void *h, cudaMemAllocationHandleType t, unsigned f) {
    return driver("cuMemPoolImportFromShareableHandle", p, h, int(t), static_cast<unsigned long long>(f));
}
inline cudaError_t cudaMemPoolExportPointer(cudaMemPoolPtrExportData *out, void *p) {
    return driver("cuMemPoolExportPointer", out, reinterpret_cast<unsigned long long>(p));
}
inline cudaError_t cudaMemPoolImportPointer(void **out, cudaMemPool_t p, cudaMemPoolPtrExportData *d) {
    return driver("cuMemPoolImportPointer", reinterpret_cast<unsigned long long *>(out), p, d);
}
inline cudaError_t cudaMallocAsync(void **out, size_t n, cudaStream_t s) {
    return driver("cuMemAllocAsync", reinterpret_cast<unsigned long long *>(out), n, s);
}
inline cudaError_t cudaFreeAsync(void *p, cudaStream_t s) {
    return driver("cuMemFreeAsync", reinterpret_cast<unsigned long long>(p), s);
}
