// Our declarations of CUDA against CUDA's own, where its headers are at hand.
#include "jit/cuda_api.hpp"

#include <gtest/gtest.h>

#if __has_include(<cuda.h>) && __has_include(<nvrtc.h>)
#include <cuda.h>
#include <nvrtc.h>
#define QKV_HAS_CUDA_HEADERS 1
#elif __has_include("/usr/local/cuda/include/cuda.h") && __has_include("/usr/local/cuda/include/nvrtc.h")
#include "/usr/local/cuda/include/cuda.h"
#include "/usr/local/cuda/include/nvrtc.h"
#define QKV_HAS_CUDA_HEADERS 1
#endif

#ifdef QKV_HAS_CUDA_HEADERS

#include "support/same_call.hpp"

namespace qkv {
namespace {

using test::same_call;

using Driver = jit::DriverFunctions;
static_assert(same_call(&Driver::get_error_name, cuGetErrorName));
static_assert(same_call(&Driver::get_error_string, cuGetErrorString));
static_assert(same_call(&Driver::init, cuInit));
static_assert(same_call(&Driver::driver_get_version, cuDriverGetVersion));
static_assert(same_call(&Driver::device_get_count, cuDeviceGetCount));
static_assert(same_call(&Driver::device_get, cuDeviceGet));
static_assert(same_call(&Driver::device_get_name, cuDeviceGetName));
static_assert(same_call(&Driver::device_get_attribute, cuDeviceGetAttribute));
static_assert(same_call(&Driver::device_total_mem, cuDeviceTotalMem));
static_assert(same_call(&Driver::device_primary_ctx_retain, cuDevicePrimaryCtxRetain));
static_assert(same_call(&Driver::device_primary_ctx_release, cuDevicePrimaryCtxRelease));
static_assert(same_call(&Driver::ctx_get_current, cuCtxGetCurrent));
static_assert(same_call(&Driver::ctx_set_current, cuCtxSetCurrent));
static_assert(same_call(&Driver::ctx_get_device, cuCtxGetDevice));
static_assert(same_call(&Driver::ctx_get_id, cuCtxGetId));
static_assert(same_call(&Driver::mem_alloc, cuMemAlloc));
static_assert(same_call(&Driver::mem_free, cuMemFree));
static_assert(same_call(&Driver::mem_host_alloc, cuMemHostAlloc));
static_assert(same_call(&Driver::mem_free_host, cuMemFreeHost));
static_assert(same_call(&Driver::memcpy_htod_async, cuMemcpyHtoDAsync));
static_assert(same_call(&Driver::memcpy_dtoh_async, cuMemcpyDtoHAsync));
static_assert(same_call(&Driver::memcpy_dtod_async, cuMemcpyDtoDAsync));
static_assert(same_call(&Driver::memset_d8_async, cuMemsetD8Async));
static_assert(same_call(&Driver::memset_d32_async, cuMemsetD32Async));
static_assert(same_call(&Driver::pointer_get_attribute, cuPointerGetAttribute));
static_assert(same_call(&Driver::module_load_data, cuModuleLoadData));
static_assert(same_call(&Driver::module_unload, cuModuleUnload));
static_assert(same_call(&Driver::module_get_function, cuModuleGetFunction));
static_assert(same_call(&Driver::func_get_attribute, cuFuncGetAttribute));
static_assert(same_call(&Driver::func_set_attribute, cuFuncSetAttribute));
static_assert(same_call(&Driver::occupancy_max_active_blocks_per_multiprocessor,
                        cuOccupancyMaxActiveBlocksPerMultiprocessor));
static_assert(same_call(&Driver::launch_kernel_ex, cuLaunchKernelEx));
static_assert(same_call(&Driver::tensor_map_encode_tiled, cuTensorMapEncodeTiled));
static_assert(same_call(&Driver::stream_create, cuStreamCreate));
static_assert(same_call(&Driver::stream_destroy, cuStreamDestroy));
static_assert(same_call(&Driver::stream_synchronize, cuStreamSynchronize));
static_assert(same_call(&Driver::stream_wait_event, cuStreamWaitEvent));
static_assert(same_call(&Driver::stream_begin_capture, cuStreamBeginCapture));
static_assert(same_call(&Driver::stream_end_capture, cuStreamEndCapture));
static_assert(same_call(&Driver::stream_is_capturing, cuStreamIsCapturing));
static_assert(same_call(&Driver::graph_instantiate, cuGraphInstantiate));
static_assert(same_call(&Driver::graph_launch, cuGraphLaunch));
static_assert(same_call(&Driver::graph_exec_destroy, cuGraphExecDestroy));
static_assert(same_call(&Driver::graph_destroy, cuGraphDestroy));
static_assert(same_call(&Driver::event_create, cuEventCreate));
static_assert(same_call(&Driver::event_destroy, cuEventDestroy));
static_assert(same_call(&Driver::event_record, cuEventRecord));
static_assert(same_call(&Driver::event_synchronize, cuEventSynchronize));
static_assert(same_call(&Driver::event_elapsed_time, cuEventElapsedTime));

using Nvrtc = jit::NvrtcFunctions;
static_assert(same_call(&Nvrtc::get_error_string, nvrtcGetErrorString));
static_assert(same_call(&Nvrtc::version, nvrtcVersion));
static_assert(same_call(&Nvrtc::create_program, nvrtcCreateProgram));
static_assert(same_call(&Nvrtc::destroy_program, nvrtcDestroyProgram));
static_assert(same_call(&Nvrtc::compile_program, nvrtcCompileProgram));
static_assert(same_call(&Nvrtc::get_program_log_size, nvrtcGetProgramLogSize));
static_assert(same_call(&Nvrtc::get_program_log, nvrtcGetProgramLog));
static_assert(same_call(&Nvrtc::get_cubin_size, nvrtcGetCUBINSize));
static_assert(same_call(&Nvrtc::get_cubin, nvrtcGetCUBIN));

static_assert(std::is_same_v<jit::CUcontext, CUcontext> && std::is_same_v<jit::CUdevice, CUdevice>);
static_assert(std::is_same_v<jit::CUdeviceptr, CUdeviceptr> && std::is_same_v<jit::CUevent, CUevent>);
static_assert(std::is_same_v<jit::CUfunction, CUfunction> && std::is_same_v<jit::CUmodule, CUmodule>);
static_assert(std::is_same_v<jit::CUgraph, CUgraph> && std::is_same_v<jit::CUgraphExec, CUgraphExec>);
static_assert(std::is_same_v<jit::CUstream, CUstream>);

static_assert(sizeof(jit::CUtensorMap) == sizeof(CUtensorMap) && sizeof(CUtensorMap) == 128);
// CUDA 12 declares 64, CUDA 13 declares 128; the encoding call asks for 64.
static_assert(alignof(jit::CUtensorMap) == 64 && alignof(CUtensorMap) % 64 == 0);
static_assert(sizeof(jit::CUlaunchAttributeValue) == sizeof(CUlaunchAttributeValue));
static_assert(sizeof(jit::CUlaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(jit::CUlaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(jit::CUlaunchAttributeValue, cluster_dimension.z) ==
              offsetof(CUlaunchAttributeValue, clusterDim.z));
static_assert(offsetof(jit::CUlaunchAttributeValue, programmatic_stream_serialization) ==
              offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed));
static_assert(sizeof(jit::CUlaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(jit::CUlaunchConfig, grid_z) == offsetof(CUlaunchConfig, gridDimZ));
static_assert(offsetof(jit::CUlaunchConfig, block_x) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(jit::CUlaunchConfig, dynamic_shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(jit::CUlaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(jit::CUlaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(jit::CUlaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));

template <class Ours>
constexpr bool same(Ours ours, int theirs) {
  return static_cast<int>(ours) == theirs;
}

static_assert(same(jit::kSuccess, CUDA_SUCCESS));
static_assert(same(jit::kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY));
static_assert(same(jit::kErrorNoDevice, CUDA_ERROR_NO_DEVICE));
static_assert(same(jit::kNvrtcSuccess, NVRTC_SUCCESS));
static_assert(same(jit::kStreamNonBlocking, CU_STREAM_NON_BLOCKING));
static_assert(same(jit::kEventDisableTiming, CU_EVENT_DISABLE_TIMING));
static_assert(same(jit::kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE));

using Device = jit::CUdevice_attribute;
static_assert(same(Device::clock_rate_khz, CU_DEVICE_ATTRIBUTE_CLOCK_RATE));
static_assert(same(Device::multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
static_assert(same(Device::l2_cache_bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
static_assert(same(Device::compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
static_assert(same(Device::compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
static_assert(same(Device::max_shared_bytes_per_multiprocessor,
                   CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR));
static_assert(same(Device::max_shared_bytes_per_block, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));

using Function = jit::CUfunction_attribute;
static_assert(same(Function::shared_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES));
static_assert(same(Function::local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES));
static_assert(same(Function::num_registers, CU_FUNC_ATTRIBUTE_NUM_REGS));
static_assert(same(Function::max_dynamic_shared_bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES));
static_assert(same(Function::preferred_shared_carveout, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT));
static_assert(same(Function::non_portable_cluster_size_allowed, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED));

using Pointer = jit::CUpointer_attribute;
static_assert(same(Pointer::context, CU_POINTER_ATTRIBUTE_CONTEXT));
static_assert(same(Pointer::memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE));
static_assert(same(Pointer::is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED));
static_assert(same(Pointer::device_ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL));
static_assert(same(jit::CUmemorytype::host, CU_MEMORYTYPE_HOST));
static_assert(same(jit::CUmemorytype::device, CU_MEMORYTYPE_DEVICE));

static_assert(same(jit::CUstreamCaptureMode::global, CU_STREAM_CAPTURE_MODE_GLOBAL));
static_assert(same(jit::CUstreamCaptureMode::this_thread, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
static_assert(same(jit::CUstreamCaptureMode::relaxed, CU_STREAM_CAPTURE_MODE_RELAXED));
static_assert(same(jit::CUstreamCaptureStatus::none, CU_STREAM_CAPTURE_STATUS_NONE));
static_assert(same(jit::CUstreamCaptureStatus::active, CU_STREAM_CAPTURE_STATUS_ACTIVE));
static_assert(same(jit::CUstreamCaptureStatus::invalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED));

static_assert(same(jit::CUlaunchAttributeID::cluster_dimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION));
static_assert(same(jit::CUlaunchAttributeID::programmatic_stream_serialization,
                   CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION));

using Type = jit::CUtensorMapDataType;
static_assert(same(Type::uint8, CU_TENSOR_MAP_DATA_TYPE_UINT8));
static_assert(same(Type::uint16, CU_TENSOR_MAP_DATA_TYPE_UINT16));
static_assert(same(Type::uint32, CU_TENSOR_MAP_DATA_TYPE_UINT32));
static_assert(same(Type::float16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16));
static_assert(same(Type::float32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32));
static_assert(same(Type::bfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16));
static_assert(same(jit::CUtensorMapInterleave::none, CU_TENSOR_MAP_INTERLEAVE_NONE));
static_assert(same(jit::CUtensorMapSwizzle::none, CU_TENSOR_MAP_SWIZZLE_NONE));
static_assert(same(jit::CUtensorMapSwizzle::bytes_32, CU_TENSOR_MAP_SWIZZLE_32B));
static_assert(same(jit::CUtensorMapSwizzle::bytes_64, CU_TENSOR_MAP_SWIZZLE_64B));
static_assert(same(jit::CUtensorMapSwizzle::bytes_128, CU_TENSOR_MAP_SWIZZLE_128B));
static_assert(same(jit::CUtensorMapL2promotion::none, CU_TENSOR_MAP_L2_PROMOTION_NONE));
static_assert(same(jit::CUtensorMapL2promotion::bytes_64, CU_TENSOR_MAP_L2_PROMOTION_L2_64B));
static_assert(same(jit::CUtensorMapL2promotion::bytes_128, CU_TENSOR_MAP_L2_PROMOTION_L2_128B));
static_assert(same(jit::CUtensorMapL2promotion::bytes_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B));
static_assert(same(jit::CUtensorMapFloatOOBfill::zeros, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
static_assert(same(jit::CUtensorMapFloatOOBfill::nans, CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA));

TEST(CudaApi, agrees_with_cuda_headers) { EXPECT_GE(CUDA_VERSION, 12000) << "checked by the compiler, above"; }

}  // namespace
}  // namespace qkv

#else

TEST(CudaApi, agrees_with_cuda_headers) { GTEST_SKIP() << "cuda.h and nvrtc.h are not installed"; }

#endif
