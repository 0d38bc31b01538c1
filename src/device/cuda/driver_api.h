/* The part of the CUDA driver's binary interface that the library uses, declared here so that it
 * builds without the CUDA toolkit. Types carry the prefix oh_cu_; functions keep the names under
 * which libcuda.so.1 exports them, version suffix included, because a suffix pins one signature for
 * good.
 *
 * tests/cuda/check_driver_api.c compares every line below with the real cuda.h where one is
 * installed: each constant, each size and offset, each prototype. Whoever adds a line here adds its
 * check there (prototypes are checked by the table itself). Multicast is
 * touched by cuda_multicast.c alone. */
#ifndef OH_CUDA_DRIVER_API_H
#define OH_CUDA_DRIVER_API_H

#include <stddef.h>
#include <stdint.h>

/* The oldest driver that has every function below: cuFuncLoad came with CUDA 12.4, driver 550. */
#define OH_CU_MIN_VERSION 12040
#define OH_CU_MIN_TEXT    "CUDA 12.4 (driver 550)"

/* Enumerations of the interface are 32-bit; gcc and clang give them unsigned int. */
typedef unsigned int oh_cu_result;
typedef unsigned int oh_cu_device_attribute;
typedef unsigned int oh_cu_p2p_attribute;
typedef unsigned int oh_cu_pointer_attribute;
typedef unsigned int oh_cu_function_attribute;
typedef unsigned int oh_cu_capture_mode;
typedef unsigned int oh_cu_capture_status;
typedef unsigned int oh_cu_handle_type;
typedef unsigned int oh_cu_granularity;
typedef unsigned int oh_cu_multicast_granularity;
typedef unsigned int oh_cu_jit_option;
typedef unsigned int oh_cu_library_option;

typedef int oh_cu_device;
typedef unsigned long long oh_cu_ptr;
typedef unsigned long long oh_cu_allocation;
typedef struct CUctx_st *oh_cu_context;
typedef struct CUstream_st *oh_cu_stream; /* the same type as onehop_stream */
typedef struct CUevent_st *oh_cu_event;
typedef struct CUlib_st *oh_cu_library;
typedef struct CUkern_st *oh_cu_kernel;
typedef struct CUfunc_st *oh_cu_function;
typedef struct CUgraph_st *oh_cu_graph;
typedef struct CUgraphNode_st *oh_cu_graph_node;
typedef struct CUuserObject_st *oh_cu_user_object;
typedef struct oh_cu_graph_edge_st oh_cu_graph_edge; /* only ever passed as NULL */

/* X(name here, name in cuda.h, value) */
#define OH_CU_CONSTANTS(X)                                                                         \
    X(OH_CU_SUCCESS, CUDA_SUCCESS, 0)                                                              \
    X(OH_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE, 1)                                            \
    X(OH_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY, 2)                                            \
    X(OH_CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED, 3)                                        \
    X(OH_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE, 101)                                        \
    X(OH_CU_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU, 209)                                  \
    X(OH_CU_PEER_UNSUPPORTED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217)                             \
    X(OH_CU_NO_JIT, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221)                                        \
    X(OH_CU_UNSUPPORTED_PTX, CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222)                              \
    X(OH_CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM, 304)                                    \
    X(OH_CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND, 500)                                                  \
    X(OH_CU_NOT_READY, CUDA_ERROR_NOT_READY, 600)                                                  \
    X(OH_CU_HOST_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713)                       \
    X(OH_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 801)                                          \
    X(OH_CU_PEER_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)                     \
    X(OH_CU_TOO_MANY_PEERS, CUDA_ERROR_TOO_MANY_PEERS, 711)                                        \
    X(OH_CU_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)                             \
    X(OH_CU_DEVICE_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                  \
    X(OH_CU_DEVICE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                        \
    X(OH_CU_DEVICE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                        \
    X(OH_CU_DEVICE_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103)       \
    X(OH_CU_DEVICE_FABRIC, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 128)                  \
    X(OH_CU_DEVICE_MULTICAST, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 132)                        \
    X(OH_CU_DEVICE_MPS, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 133)                                      \
    X(OH_CU_MULTICAST_GRANULARITY_MINIMUM, CU_MULTICAST_GRANULARITY_MINIMUM, 0)                    \
    X(OH_CU_P2P_RANK, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, 1)                                 \
    X(OH_CU_P2P_ACCESS, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 2)                               \
    X(OH_CU_P2P_ATOMICS, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, 3)                       \
    X(OH_CU_FUNCTION_MAX_THREADS, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0)                      \
    X(OH_CU_FUNCTION_LOCAL_BYTES, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 3)                           \
    X(OH_CU_FUNCTION_REGISTERS, CU_FUNC_ATTRIBUTE_NUM_REGS, 4)                                     \
    X(OH_CU_FUNCTION_PTX_VERSION, CU_FUNC_ATTRIBUTE_PTX_VERSION, 5)                                \
    X(OH_CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED, 2)                               \
    X(OH_CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE, 0)                                        \
    X(OH_CU_CAPTURE_ACTIVE, CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)                                    \
    X(OH_CU_CAPTURE_INVALIDATED, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)                          \
    X(OH_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING, 1)                                        \
    X(OH_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING, 2)                                      \
    X(OH_CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE, 1)                                            \
    X(OH_CU_HOST_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP, 2)                                          \
    X(OH_CU_HANDLE_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                                \
    X(OH_CU_HANDLE_FABRIC, CU_MEM_HANDLE_TYPE_FABRIC, 8)                                           \
    X(OH_CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                   \
    X(OH_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE, 1)                                       \
    X(OH_CU_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                               \
    X(OH_CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1)                      \
    X(OH_CU_POINTER_CONTEXT, CU_POINTER_ATTRIBUTE_CONTEXT, 1)                                      \
    X(OH_CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                              \
    X(OH_CU_POINTER_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                                   \
    X(OH_CU_POINTER_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                               \
    X(OH_CU_POINTER_IPC, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 10)                      \
    X(OH_CU_POINTER_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 14)                   \
    X(OH_CU_POINTER_POOL, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 17)                                 \
    X(OH_CU_MEMORY_HOST, CU_MEMORYTYPE_HOST, 1)                                                    \
    X(OH_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE, 2)                                                \
    X(OH_CU_IPC_LAZY_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)                           \
    X(OH_CU_USER_OBJECT_NO_SYNC, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, 1)                             \
    X(OH_CU_USER_OBJECT_MOVE, CU_GRAPH_USER_OBJECT_MOVE, 1)                                        \
    X(OH_CU_ATTRIBUTE_PDL, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 6)

enum oh_cu_constant {
#define OH_CU_CONSTANT_ENUM(name, original, value) name = value,
    OH_CU_CONSTANTS(OH_CU_CONSTANT_ENUM)
#undef OH_CU_CONSTANT_ENUM
};

/* Handles that mean a stream without naming an object. */
#define OH_CU_STREAM_LEGACY     ((oh_cu_stream)(uintptr_t)1)
#define OH_CU_STREAM_PER_THREAD ((oh_cu_stream)(uintptr_t)2)

typedef struct oh_cu_location { /* CUmemLocation */
    unsigned int type;
    int id;
} oh_cu_location;

typedef struct oh_cu_memory_kind { /* CUmemAllocationProp */
    unsigned int type;
    unsigned int handle_types;
    oh_cu_location location;
    void *windows_only;
    struct {
        unsigned char compression;
        unsigned char rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} oh_cu_memory_kind;

typedef struct oh_cu_access { /* CUmemAccessDesc */
    oh_cu_location location;
    unsigned int flags;
} oh_cu_access;

typedef struct oh_cu_multicast_kind { /* CUmulticastObjectProp */
    unsigned int devices;
    size_t bytes;
    unsigned long long handle_types;
    unsigned long long flags;
} oh_cu_multicast_kind;

typedef struct oh_cu_ipc_handle { /* CUipcMemHandle; passed by value */
    char bytes[64];
} oh_cu_ipc_handle;

typedef struct oh_cu_launch_attribute { /* CUlaunchAttribute */
    unsigned int id;
    unsigned int padding;
    union {
        unsigned char bytes[64];
        uint64_t align;
        int pdl_allowed; /* programmaticStreamSerializationAllowed */
    } value;
} oh_cu_launch_attribute;

typedef struct oh_cu_launch_config { /* CUlaunchConfig */
    unsigned int grid_x, grid_y, grid_z;
    unsigned int block_x, block_y, block_z;
    unsigned int shared_bytes;
    oh_cu_stream stream;
    oh_cu_launch_attribute *attributes;
    unsigned int attribute_count;
} oh_cu_launch_config;

/* X(exported name, parameters); all return oh_cu_result. */
#define OH_CU_FUNCTIONS(X)                                                                         \
    X(cuInit, (unsigned int))                                                                      \
    X(cuDriverGetVersion, (int *))                                                                 \
    X(cuGetErrorName, (oh_cu_result, const char **))                                               \
    X(cuGetErrorString, (oh_cu_result, const char **))                                             \
    X(cuDeviceGetCount, (int *))                                                                   \
    X(cuDeviceGet, (oh_cu_device *, int))                                                          \
    X(cuDeviceGetName, (char *, int, oh_cu_device))                                                \
    X(cuDeviceGetPCIBusId, (char *, int, oh_cu_device))                                            \
    X(cuDeviceGetAttribute, (int *, oh_cu_device_attribute, oh_cu_device))                         \
    X(cuDeviceTotalMem_v2, (size_t *, oh_cu_device))                                               \
    X(cuDeviceCanAccessPeer, (int *, oh_cu_device, oh_cu_device))                                  \
    X(cuDeviceGetP2PAttribute, (int *, oh_cu_p2p_attribute, oh_cu_device, oh_cu_device))           \
    X(cuDevicePrimaryCtxRetain, (oh_cu_context *, oh_cu_device))                                   \
    X(cuDevicePrimaryCtxRelease_v2, (oh_cu_device))                                                \
    X(cuCtxGetCurrent, (oh_cu_context *))                                                          \
    X(cuCtxPushCurrent_v2, (oh_cu_context))                                                        \
    X(cuCtxPopCurrent_v2, (oh_cu_context *))                                                       \
    X(cuCtxGetDevice, (oh_cu_device *))                                                            \
    X(cuCtxEnablePeerAccess, (oh_cu_context, unsigned int))                                        \
    X(cuThreadExchangeStreamCaptureMode, (oh_cu_capture_mode *))                                   \
    X(cuMemCreate, (oh_cu_allocation *, size_t, const oh_cu_memory_kind *, unsigned long long))    \
    X(cuMemRelease, (oh_cu_allocation))                                                            \
    X(cuMemAddressReserve, (oh_cu_ptr *, size_t, size_t, oh_cu_ptr, unsigned long long))           \
    X(cuMemAddressFree, (oh_cu_ptr, size_t))                                                       \
    X(cuMemMap, (oh_cu_ptr, size_t, size_t, oh_cu_allocation, unsigned long long))                 \
    X(cuMemUnmap, (oh_cu_ptr, size_t))                                                             \
    X(cuMemSetAccess, (oh_cu_ptr, size_t, const oh_cu_access *, size_t))                           \
    X(cuMemGetAllocationGranularity, (size_t *, const oh_cu_memory_kind *, oh_cu_granularity))     \
    X(cuMulticastGetGranularity,                                                                   \
      (size_t *, const oh_cu_multicast_kind *, oh_cu_multicast_granularity))                       \
    X(cuMulticastCreate, (oh_cu_allocation *, const oh_cu_multicast_kind *))                       \
    X(cuMulticastAddDevice, (oh_cu_allocation, oh_cu_device))                                      \
    X(cuMulticastBindAddr, (oh_cu_allocation, size_t, oh_cu_ptr, size_t, unsigned long long))      \
    X(cuMemRetainAllocationHandle, (oh_cu_allocation *, void *))                                   \
    X(cuMemExportToShareableHandle,                                                                \
      (void *, oh_cu_allocation, oh_cu_handle_type, unsigned long long))                           \
    X(cuMemImportFromShareableHandle, (oh_cu_allocation *, void *, oh_cu_handle_type))             \
    X(cuMemAlloc_v2, (oh_cu_ptr *, size_t))                                                        \
    X(cuMemFree_v2, (oh_cu_ptr))                                                                   \
    X(cuMemGetAddressRange_v2, (oh_cu_ptr *, size_t *, oh_cu_ptr))                                 \
    X(cuPointerGetAttributes, (unsigned int, oh_cu_pointer_attribute *, void **, oh_cu_ptr))       \
    X(cuIpcGetMemHandle, (oh_cu_ipc_handle *, oh_cu_ptr))                                          \
    X(cuIpcOpenMemHandle_v2, (oh_cu_ptr *, oh_cu_ipc_handle, unsigned int))                        \
    X(cuIpcCloseMemHandle, (oh_cu_ptr))                                                            \
    X(cuMemHostAlloc, (void **, size_t, unsigned int))                                             \
    X(cuMemFreeHost, (void *))                                                                     \
    X(cuMemHostGetDevicePointer_v2, (oh_cu_ptr *, void *, unsigned int))                           \
    X(cuMemsetD8Async, (oh_cu_ptr, unsigned char, size_t, oh_cu_stream))                           \
    X(cuMemcpyAsync, (oh_cu_ptr, oh_cu_ptr, size_t, oh_cu_stream))                                 \
    X(cuStreamCreate, (oh_cu_stream *, unsigned int))                                              \
    X(cuStreamDestroy_v2, (oh_cu_stream))                                                          \
    X(cuStreamSynchronize, (oh_cu_stream))                                                         \
    X(cuStreamQuery, (oh_cu_stream))                                                               \
    X(cuStreamGetCtx, (oh_cu_stream, oh_cu_context *))                                             \
    X(cuStreamGetId, (oh_cu_stream, unsigned long long *))                                         \
    X(cuStreamIsCapturing, (oh_cu_stream, oh_cu_capture_status *))                                 \
    X(cuStreamGetCaptureInfo_v3, (oh_cu_stream, oh_cu_capture_status *, uint64_t *, oh_cu_graph *, \
                                  const oh_cu_graph_node **, const oh_cu_graph_edge **, size_t *)) \
    X(cuUserObjectCreate,                                                                          \
      (oh_cu_user_object *, void *, void (*)(void *), unsigned int, unsigned int))                 \
    X(cuUserObjectRelease, (oh_cu_user_object, unsigned int))                                      \
    X(cuGraphRetainUserObject, (oh_cu_graph, oh_cu_user_object, unsigned int, unsigned int))       \
    X(cuStreamWaitEvent, (oh_cu_stream, oh_cu_event, unsigned int))                                \
    X(cuEventCreate, (oh_cu_event *, unsigned int))                                                \
    X(cuEventDestroy_v2, (oh_cu_event))                                                            \
    X(cuEventRecord, (oh_cu_event, oh_cu_stream))                                                  \
    X(cuLibraryLoadData, (oh_cu_library *, const void *, oh_cu_jit_option *, void **,              \
                          unsigned int, oh_cu_library_option *, void **, unsigned int))            \
    X(cuLibraryGetKernel, (oh_cu_kernel *, oh_cu_library, const char *))                           \
    X(cuKernelGetFunction, (oh_cu_function *, oh_cu_kernel))                                       \
    X(cuFuncLoad, (oh_cu_function))                                                                \
    X(cuFuncGetAttribute, (int *, oh_cu_function_attribute, oh_cu_function))                       \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, oh_cu_function, int, size_t))           \
    X(cuLaunchKernelEx, (const oh_cu_launch_config *, oh_cu_function, void **, void **))

/* The opened driver: oh_cu.cuMemCreate(...). Filled once by oh_cuda_driver; read-only
 * afterwards. */
typedef struct oh_cu_table {
#define OH_CU_MEMBER(name, parameters) oh_cu_result(*name) parameters;
    OH_CU_FUNCTIONS(OH_CU_MEMBER)
#undef OH_CU_MEMBER
} oh_cu_table;

extern oh_cu_table oh_cu;

#endif
