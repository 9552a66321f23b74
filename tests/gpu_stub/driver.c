// Stands in for libcuda.so.1: answers what Triton asks of CUDA's driver, and runs nothing.
//
// A launch and a tensor map are held against the rules that a driver documents. The first rule
// that one breaks is an error with a message, which `stub_message` returns.

#include "cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// Bytes of shared memory that a block may have, by device; in the order of `devices.DEVICES`.
static const int SHARED[] = {166912, 101376, 101376, 232448, 232448, 101376};
static const int CAPABILITY[] = {80, 86, 89, 90, 100, 120};
enum { NUM_DEVICES = sizeof SHARED / sizeof *SHARED };

static int current;  // device of the next calls
static char message[512];

void stub_begin(int device) { current = device, message[0] = 0; }
const char *stub_message(void) { return message; }

static CUresult refuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (!message[0]) vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return *text = message, CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = NUM_DEVICES, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)message, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice d) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    int shared = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    *value = shared ? SHARED[device] : attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 65536;
    return CUDA_SUCCESS;
}

// All memory is the host's: every pointer is one that the device can read.
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    return *(CUdeviceptr *)data = pointer, CUDA_SUCCESS;
}

// A function is its module, which is the compiled binary: it needs only to be something.
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)message, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)module, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction f, const CUlaunchConfig *c) {
    return *count = 1, CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra) {
    unsigned threads = c->blockDimX * c->blockDimY * c->blockDimZ;
    if (!function) return refuse("no function is launched");
    if (!c->gridDimX || !c->gridDimY || !c->gridDimZ) return refuse("the grid is empty");
    if (c->gridDimX > 0x7fffffffu || c->gridDimY > 65535 || c->gridDimZ > 65535)
        return refuse("the grid %u x %u x %u is too large", c->gridDimX, c->gridDimY, c->gridDimZ);
    if (!threads || threads > 1024) return refuse("a block has %u threads, not 1 to 1024", threads);
    if ((int)c->sharedMemBytes > SHARED[current])
        return refuse("%u bytes of shared memory, a block may have %d", c->sharedMemBytes, SHARED[current]);
    return CUDA_SUCCESS;
}

static unsigned bytes_of(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 4;
    }
}

// The rules of cuTensorMapEncodeTiled in the driver API's reference, for maps without interleaving.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if (CAPABILITY[current] < 90) return refuse("compute capability %d has no tensor maps", CAPABILITY[current]);
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return refuse("an interleaved tensor map");
    if (rank < 1 || rank > 5) return refuse("a tensor map of rank %u, not 1 to 5", rank);
    if ((size_t)map % 64) return refuse("a tensor map is not aligned to 64 bytes");
    if ((size_t)address % 16) return refuse("the address of a tensor map is not aligned to 16 bytes");
    for (unsigned i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > 1ull << 32) return refuse("dim %u of a tensor map has size %llu", i, (unsigned long long)dims[i]);
        if (!box[i] || box[i] > 256) return refuse("dim %u of a tensor map has a box of %u", i, box[i]);
        if (steps[i] < 1 || steps[i] > 8) return refuse("dim %u of a tensor map has a step of %u", i, steps[i]);
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40))
            return refuse("stride %u of a tensor map is %llu bytes", i, (unsigned long long)strides[i]);
    }
    unsigned inner = box[0] * bytes_of(type), most = 32;
    if (inner % 16) return refuse("the box of a tensor map is %u bytes wide", inner);
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_64B) most = 64;
    else if (swizzle != CU_TENSOR_MAP_SWIZZLE_32B) most = 128;
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner > most)
        return refuse("the box of a tensor map is %u bytes wide, its swizzle %u", inner, most);
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}
