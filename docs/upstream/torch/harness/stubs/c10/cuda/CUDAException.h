// Stands in for torch's header of this name: C10_CUDA_CHECK throws.
#pragma once
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#define C10_CUDA_CHECK(call)                                               \
    do {                                                                   \
        const cudaError_t c10_result = (call);                             \
        if (c10_result != cudaSuccess) c10_fail(#call, " -> ", c10_result); \
    } while (0)
