// What we use of CUDA's driver API and of NVRTC, declared by ourselves so that the library builds where no CUDA is
// installed. Types have CUDA's names, functions theirs without the prefix. Layouts and values are facts of CUDA 12 and
// 13: tests/jit/cuda_api_test.cpp compares them with cuda.h and nvrtc.h where these are at hand.
#pragma once

#include <cstddef>
#include <cstdint>

// CUDA's own tags, at global scope as in cuda.h: a caller's CUstream is ours.
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUgraphExec_st;
struct CUgraph_st;
struct CUmod_st;
struct CUstream_st;

namespace qkv::jit {

using CUcontext = ::CUctx_st*;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUevent = ::CUevent_st*;
using CUfunction = ::CUfunc_st*;
using CUgraph = ::CUgraph_st*;
using CUgraphExec = ::CUgraphExec_st*;
using CUmodule = ::CUmod_st*;
using CUresult = int;
using CUstream = ::CUstream_st*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kErrorOutOfMemory = 2;
inline constexpr CUresult kErrorNoDevice = 100;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;

enum class CUdevice_attribute : int {
  clock_rate_khz = 13,
  multiprocessor_count = 16,
  l2_cache_bytes = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  max_shared_bytes_per_multiprocessor = 81,
  max_shared_bytes_per_block = 97,  // with the function's own consent (max_dynamic_shared_bytes)
};

enum class CUfunction_attribute : int {
  shared_bytes = 1,
  local_bytes = 3,
  num_registers = 4,
  max_dynamic_shared_bytes = 8,
  preferred_shared_carveout = 9,
  non_portable_cluster_size_allowed = 14,
};

enum class CUpointer_attribute : int { context = 1, memory_type = 2, is_managed = 8, device_ordinal = 9 };

enum class CUmemorytype : int { host = 1, device = 2 };

enum class CUstreamCaptureMode : int { global = 0, this_thread = 1, relaxed = 2 };

enum class CUstreamCaptureStatus : int { none = 0, active = 1, invalidated = 2 };

enum class CUtensorMapDataType : int { uint8 = 0, uint16 = 1, uint32 = 2, float16 = 6, float32 = 7, bfloat16 = 9 };

enum class CUtensorMapInterleave : int { none = 0 };

enum class CUtensorMapSwizzle : int { none = 0, bytes_32 = 1, bytes_64 = 2, bytes_128 = 3 };

enum class CUtensorMapL2promotion : int { none = 0, bytes_64 = 1, bytes_128 = 2, bytes_256 = 3 };

enum class CUtensorMapFloatOOBfill : int { zeros = 0, nans = 1 };

// Opaque; the address of one that a kernel takes as a parameter is a multiple of 64.
struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

enum class CUlaunchAttributeID : int { cluster_dimension = 4, programmatic_stream_serialization = 6 };

union CUlaunchAttributeValue {
  char bytes[64];
  struct {
    unsigned x, y, z;
  } cluster_dimension;                    // in CTAs; divides the grid
  int programmatic_stream_serialization;  // 1: may start before the kernel in front of it has ended
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char padding[4];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;     // CTAs
  unsigned block_x, block_y, block_z;  // threads of a CTA
  unsigned dynamic_shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};

struct DriverFunctions {
  CUresult (*get_error_name)(CUresult, const char** name);
  CUresult (*get_error_string)(CUresult, const char** text);
  CUresult (*init)(unsigned flags);
  CUresult (*driver_get_version)(int* version);

  CUresult (*device_get_count)(int* count);
  CUresult (*device_get)(CUdevice*, int ordinal);
  CUresult (*device_get_name)(char* name, int length, CUdevice);
  CUresult (*device_get_attribute)(int* value, CUdevice_attribute, CUdevice);
  CUresult (*device_total_mem)(size_t* bytes, CUdevice);
  CUresult (*device_primary_ctx_retain)(CUcontext*, CUdevice);
  CUresult (*device_primary_ctx_release)(CUdevice);
  CUresult (*ctx_get_current)(CUcontext*);
  CUresult (*ctx_set_current)(CUcontext);
  CUresult (*ctx_get_device)(CUdevice*);
  CUresult (*ctx_get_id)(CUcontext, unsigned long long* id);

  CUresult (*mem_alloc)(CUdeviceptr*, size_t bytes);
  CUresult (*mem_free)(CUdeviceptr);
  CUresult (*mem_host_alloc)(void**, size_t bytes, unsigned flags);
  CUresult (*mem_free_host)(void*);
  CUresult (*memcpy_htod_async)(CUdeviceptr to, const void* from, size_t bytes, CUstream);
  CUresult (*memcpy_dtoh_async)(void* to, CUdeviceptr from, size_t bytes, CUstream);
  CUresult (*memcpy_dtod_async)(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream);
  CUresult (*memset_d8_async)(CUdeviceptr, unsigned char value, size_t count, CUstream);
  CUresult (*memset_d32_async)(CUdeviceptr, unsigned value, size_t count, CUstream);
  CUresult (*pointer_get_attribute)(void* value, CUpointer_attribute, CUdeviceptr);

  CUresult (*module_load_data)(CUmodule*, const void* image);
  CUresult (*module_unload)(CUmodule);
  CUresult (*module_get_function)(CUfunction*, CUmodule, const char* name);
  CUresult (*func_get_attribute)(int* value, CUfunction_attribute, CUfunction);
  CUresult (*func_set_attribute)(CUfunction, CUfunction_attribute, int value);
  CUresult (*occupancy_max_active_blocks_per_multiprocessor)(int* blocks, CUfunction, int threads, size_t shared_bytes);
  CUresult (*launch_kernel_ex)(const CUlaunchConfig*, CUfunction, void** parameters, void** extra);
  // Strides in bytes and without the innermost; extents and box innermost first.
  CUresult (*tensor_map_encode_tiled)(CUtensorMap*, CUtensorMapDataType, uint32_t rank, void* address,
                                      const uint64_t* extents, const uint64_t* strides, const uint32_t* box,
                                      const uint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle,
                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

  CUresult (*stream_create)(CUstream*, unsigned flags);
  CUresult (*stream_destroy)(CUstream);
  CUresult (*stream_synchronize)(CUstream);
  CUresult (*stream_wait_event)(CUstream, CUevent, unsigned flags);
  CUresult (*stream_begin_capture)(CUstream, CUstreamCaptureMode);
  CUresult (*stream_end_capture)(CUstream, CUgraph*);
  CUresult (*stream_is_capturing)(CUstream, CUstreamCaptureStatus*);
  CUresult (*graph_instantiate)(CUgraphExec*, CUgraph, unsigned long long flags);
  CUresult (*graph_launch)(CUgraphExec, CUstream);
  CUresult (*graph_exec_destroy)(CUgraphExec);
  CUresult (*graph_destroy)(CUgraph);
  CUresult (*event_create)(CUevent*, unsigned flags);
  CUresult (*event_destroy)(CUevent);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_synchronize)(CUevent);
  CUresult (*event_elapsed_time)(float* milliseconds, CUevent start, CUevent end);
};

using nvrtcProgram = struct NvrtcProgram*;
using nvrtcResult = int;

inline constexpr nvrtcResult kNvrtcSuccess = 0;

struct NvrtcFunctions {
  const char* (*get_error_string)(nvrtcResult);
  nvrtcResult (*version)(int* major, int* minor);
  nvrtcResult (*create_program)(nvrtcProgram*, const char* text, const char* name, int num_headers,
                                const char* const* header_texts, const char* const* header_names);
  nvrtcResult (*destroy_program)(nvrtcProgram*);
  nvrtcResult (*compile_program)(nvrtcProgram, int num_options, const char* const* options);
  nvrtcResult (*get_program_log_size)(nvrtcProgram, size_t* bytes);  // the closing zero included
  nvrtcResult (*get_program_log)(nvrtcProgram, char* log);
  nvrtcResult (*get_cubin_size)(nvrtcProgram, size_t* bytes);
  nvrtcResult (*get_cubin)(nvrtcProgram, char* cubin);
};

}  // namespace qkv::jit
