/* Property: what src/device/cuda/driver_api.h declares is what the real cuda.h declares.
 * Compile-only: built where the CUDA toolkit is installed (gcc -fsyntax-only is enough); every
 * difference is a compile error. */
#include "device/cuda/driver_api.h"

#include <cuda.h>

_Static_assert(CUDA_VERSION >= OH_CU_MIN_VERSION, "this cuda.h is older than the oldest driver");

#define CHECK_CONSTANT(name, original, value)                                                      \
    _Static_assert((long long)(name) == (long long)(original), #name " differs from " #original);
OH_CU_CONSTANTS(CHECK_CONSTANT)

#define CHECK_SIZE(ours, theirs)                                                                   \
    _Static_assert(sizeof(ours) == sizeof(theirs), "size of " #ours);                              \
    _Static_assert(_Alignof(ours) == _Alignof(theirs), "alignment of " #ours);
#define CHECK_FIELD(ours, field, theirs, original)                                                 \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, original), #ours "." #field);         \
    _Static_assert(sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->original),                  \
                   "size of " #ours "." #field);

CHECK_SIZE(oh_cu_location, CUmemLocation)
CHECK_FIELD(oh_cu_location, type, CUmemLocation, type)
CHECK_FIELD(oh_cu_location, id, CUmemLocation, id)

CHECK_SIZE(oh_cu_memory_kind, CUmemAllocationProp)
CHECK_FIELD(oh_cu_memory_kind, type, CUmemAllocationProp, type)
CHECK_FIELD(oh_cu_memory_kind, handle_types, CUmemAllocationProp, requestedHandleTypes)
CHECK_FIELD(oh_cu_memory_kind, location, CUmemAllocationProp, location)
CHECK_FIELD(oh_cu_memory_kind, windows_only, CUmemAllocationProp, win32HandleMetaData)
CHECK_FIELD(oh_cu_memory_kind, flags, CUmemAllocationProp, allocFlags)
CHECK_FIELD(oh_cu_memory_kind, flags.compression, CUmemAllocationProp, allocFlags.compressionType)
CHECK_FIELD(oh_cu_memory_kind, flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)
CHECK_FIELD(oh_cu_memory_kind, flags.usage, CUmemAllocationProp, allocFlags.usage)
CHECK_FIELD(oh_cu_memory_kind, flags.reserved, CUmemAllocationProp, allocFlags.reserved)

CHECK_SIZE(oh_cu_access, CUmemAccessDesc)
CHECK_FIELD(oh_cu_access, location, CUmemAccessDesc, location)
CHECK_FIELD(oh_cu_access, flags, CUmemAccessDesc, flags)

CHECK_SIZE(oh_cu_multicast_kind, CUmulticastObjectProp)
CHECK_FIELD(oh_cu_multicast_kind, devices, CUmulticastObjectProp, numDevices)
CHECK_FIELD(oh_cu_multicast_kind, bytes, CUmulticastObjectProp, size)
CHECK_FIELD(oh_cu_multicast_kind, handle_types, CUmulticastObjectProp, handleTypes)
CHECK_FIELD(oh_cu_multicast_kind, flags, CUmulticastObjectProp, flags)

CHECK_SIZE(oh_cu_ipc_handle, CUipcMemHandle)
CHECK_FIELD(oh_cu_ipc_handle, bytes, CUipcMemHandle, reserved)

CHECK_SIZE(oh_cu_launch_attribute, CUlaunchAttribute)
CHECK_FIELD(oh_cu_launch_attribute, id, CUlaunchAttribute, id)
CHECK_FIELD(oh_cu_launch_attribute, value, CUlaunchAttribute, value)
CHECK_FIELD(oh_cu_launch_attribute, value.pdl_allowed, CUlaunchAttribute,
            value.programmaticStreamSerializationAllowed)

CHECK_SIZE(oh_cu_launch_config, CUlaunchConfig)
CHECK_FIELD(oh_cu_launch_config, grid_x, CUlaunchConfig, gridDimX)
CHECK_FIELD(oh_cu_launch_config, grid_y, CUlaunchConfig, gridDimY)
CHECK_FIELD(oh_cu_launch_config, grid_z, CUlaunchConfig, gridDimZ)
CHECK_FIELD(oh_cu_launch_config, block_x, CUlaunchConfig, blockDimX)
CHECK_FIELD(oh_cu_launch_config, block_y, CUlaunchConfig, blockDimY)
CHECK_FIELD(oh_cu_launch_config, block_z, CUlaunchConfig, blockDimZ)
CHECK_FIELD(oh_cu_launch_config, shared_bytes, CUlaunchConfig, sharedMemBytes)
CHECK_FIELD(oh_cu_launch_config, stream, CUlaunchConfig, hStream)
CHECK_FIELD(oh_cu_launch_config, attributes, CUlaunchConfig, attrs)
CHECK_FIELD(oh_cu_launch_config, attribute_count, CUlaunchConfig, numAttrs)

/* The space of the handle that travels to peers, and how we pick its bytes. */
_Static_assert(sizeof(CUmemFabricHandle) == 64, "oh_mem_handle.data is 64 bytes");
_Static_assert(sizeof(CUipcMemHandle) == 64, "oh_mem_handle.data is 64 bytes");

/* What the answers of cuPointerGetAttributes are written into. */
_Static_assert(sizeof(CUmemorytype) == sizeof(unsigned int), "memory type");
_Static_assert(sizeof(CUmemoryPool) == sizeof(void *), "memory pool");

_Static_assert(sizeof(CUdeviceptr) == sizeof(void *), "device addresses are pointers");

_Static_assert((uintptr_t)OH_CU_STREAM_LEGACY == (uintptr_t)CU_STREAM_LEGACY, "legacy stream");
_Static_assert((uintptr_t)OH_CU_STREAM_PER_THREAD == (uintptr_t)CU_STREAM_PER_THREAD,
               "per-thread stream");

/* Prototypes: the table is expanded a second time with cuda.h's own types in place of ours. A name
 * that cuda.h would replace by a later version has another length after expansion. */
#define TEXT_OF(name)               #name
#define EXPANDED_TEXT_OF(name)      TEXT_OF(name)
#define oh_cu_result                CUresult
#define oh_cu_device_attribute      CUdevice_attribute
#define oh_cu_p2p_attribute         CUdevice_P2PAttribute
#define oh_cu_pointer_attribute     CUpointer_attribute
#define oh_cu_function_attribute    CUfunction_attribute
#define oh_cu_capture_mode          CUstreamCaptureMode
#define oh_cu_capture_status        CUstreamCaptureStatus
#define oh_cu_handle_type           CUmemAllocationHandleType
#define oh_cu_granularity           CUmemAllocationGranularity_flags
#define oh_cu_multicast_granularity CUmulticastGranularity_flags
#define oh_cu_multicast_kind        CUmulticastObjectProp
#define oh_cu_jit_option            CUjit_option
#define oh_cu_library_option        CUlibraryOption
#define oh_cu_device                CUdevice
#define oh_cu_ptr                   CUdeviceptr
#define oh_cu_allocation            CUmemGenericAllocationHandle
#define oh_cu_context               CUcontext
#define oh_cu_stream                CUstream
#define oh_cu_event                 CUevent
#define oh_cu_library               CUlibrary
#define oh_cu_kernel                CUkernel
#define oh_cu_function              CUfunction
#define oh_cu_graph                 CUgraph
#define oh_cu_graph_node            CUgraphNode
#define oh_cu_user_object           CUuserObject
#define oh_cu_graph_edge            CUgraphEdgeData
#define oh_cu_memory_kind           CUmemAllocationProp
#define oh_cu_access                CUmemAccessDesc
#define oh_cu_launch_config         CUlaunchConfig
#define oh_cu_ipc_handle            CUipcMemHandle
#define uint64_t                    cuuint64_t

#define CHECK_PROTOTYPE(name, parameters)                                                          \
    _Static_assert(sizeof(#name) == sizeof(EXPANDED_TEXT_OF(name)), #name " has a later version"); \
    _Static_assert(                                                                                \
        __builtin_types_compatible_p(__typeof__(&name), CUresult(CUDAAPI *) parameters),           \
        "prototype of " #name);
OH_CU_FUNCTIONS(CHECK_PROTOTYPE)
