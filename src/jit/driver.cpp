#include "jit/driver.hpp"

#include <fmt/format.h>

#include <optional>

#include "core/checks.hpp"

namespace qkv::jit {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
// The loader's own search, then where container runtimes and Windows' Linux put it without telling the loader.
constexpr const char* kNames[] = {kLibrary, "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"};
constexpr const char* kInstall = "NVIDIA's driver for CUDA 12.0 or later (525 or later)";

// Symbols as cuda.h maps them: the plain name of some is an older function with other arguments.
const char* missing_symbol(const Library& library, DriverFunctions& f) {
  const char* missing = nullptr;
  const auto find = [&](const char* symbol, auto& function) {
    if (!find_function(library, symbol, function) && missing == nullptr) missing = symbol;
  };
  find("cuGetErrorName", f.get_error_name);
  find("cuGetErrorString", f.get_error_string);
  find("cuInit", f.init);
  find("cuDriverGetVersion", f.driver_get_version);

  find("cuDeviceGetCount", f.device_get_count);
  find("cuDeviceGet", f.device_get);
  find("cuDeviceGetName", f.device_get_name);
  find("cuDeviceGetAttribute", f.device_get_attribute);
  find("cuDeviceTotalMem_v2", f.device_total_mem);
  find("cuDevicePrimaryCtxRetain", f.device_primary_ctx_retain);
  find("cuDevicePrimaryCtxRelease_v2", f.device_primary_ctx_release);
  find("cuCtxGetCurrent", f.ctx_get_current);
  find("cuCtxSetCurrent", f.ctx_set_current);
  find("cuCtxGetDevice", f.ctx_get_device);
  find("cuCtxGetId", f.ctx_get_id);

  find("cuMemAlloc_v2", f.mem_alloc);
  find("cuMemFree_v2", f.mem_free);
  find("cuMemHostAlloc", f.mem_host_alloc);
  find("cuMemFreeHost", f.mem_free_host);
  find("cuMemcpyHtoDAsync_v2", f.memcpy_htod_async);
  find("cuMemcpyDtoHAsync_v2", f.memcpy_dtoh_async);
  find("cuMemcpyDtoDAsync_v2", f.memcpy_dtod_async);
  find("cuMemsetD8Async", f.memset_d8_async);
  find("cuMemsetD32Async", f.memset_d32_async);
  find("cuPointerGetAttribute", f.pointer_get_attribute);

  find("cuModuleLoadData", f.module_load_data);
  find("cuModuleUnload", f.module_unload);
  find("cuModuleGetFunction", f.module_get_function);
  find("cuFuncGetAttribute", f.func_get_attribute);
  find("cuFuncSetAttribute", f.func_set_attribute);
  find("cuOccupancyMaxActiveBlocksPerMultiprocessor", f.occupancy_max_active_blocks_per_multiprocessor);
  find("cuLaunchKernelEx", f.launch_kernel_ex);
  find("cuTensorMapEncodeTiled", f.tensor_map_encode_tiled);

  find("cuStreamCreate", f.stream_create);
  find("cuStreamDestroy_v2", f.stream_destroy);
  find("cuStreamSynchronize", f.stream_synchronize);
  find("cuStreamWaitEvent", f.stream_wait_event);
  find("cuStreamBeginCapture_v2", f.stream_begin_capture);
  find("cuStreamEndCapture", f.stream_end_capture);
  find("cuStreamIsCapturing", f.stream_is_capturing);
  find("cuGraphInstantiateWithFlags", f.graph_instantiate);
  find("cuGraphLaunch", f.graph_launch);
  find("cuGraphExecDestroy", f.graph_exec_destroy);
  find("cuGraphDestroy", f.graph_destroy);
  find("cuEventCreate", f.event_create);
  find("cuEventDestroy_v2", f.event_destroy);
  find("cuEventRecord", f.event_record);
  find("cuEventSynchronize", f.event_synchronize);
  find("cuEventElapsedTime", f.event_elapsed_time);
  return missing;
}

Library open_first(const std::vector<std::string>& names) {
  std::string reasons;
  for (const std::string& name : names) {
    std::string reason;
    if (auto library = open_library(name, reason)) return *library;
    reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", reason);
  }
  refuse(kLibrary, fmt::format("no library that opens ({})", reasons), kInstall, ErrorCode::unavailable);
}

std::string describe_device(const Driver& driver, int ordinal) {
  CUdevice device = 0;
  char name[128] = "unknown";
  size_t bytes = 0;
  if (const CUresult result = driver.device_get(&device, ordinal); result != kSuccess) {
    return fmt::format("device {}: {}", ordinal, error_text(driver, result));
  }
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    return driver.device_get_attribute(&value, which, device) == kSuccess ? value : 0;
  };
  driver.device_get_name(name, sizeof name, device);
  driver.device_total_mem(&bytes, device);
  return fmt::format("device {}: {}, sm_{}{}, {} multiprocessors, {:.1f} GiB", ordinal, name,
                     attribute(CUdevice_attribute::compute_capability_major),
                     attribute(CUdevice_attribute::compute_capability_minor),
                     attribute(CUdevice_attribute::multiprocessor_count), static_cast<double>(bytes) / (1 << 30));
}

}  // namespace

std::string error_text(const DriverFunctions& functions, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  functions.get_error_name(result, &name);
  functions.get_error_string(result, &text);
  if (name == nullptr || text == nullptr) return fmt::format("CUDA error {}", result);
  return fmt::format("{} ({})", name, text);
}

void throw_failure(const DriverFunctions& functions, CUresult result, const char* call, std::string_view what) {
  const bool memory = result == kErrorOutOfMemory;
  refuse(call, fmt::format("{}{}{}", error_text(functions, result), what.empty() ? "" : " for ", what),
         memory ? "what fits into the free memory of the device" : "CUDA_SUCCESS",
         memory ? ErrorCode::unavailable : ErrorCode::internal);
}

Driver open_driver(const std::vector<std::string>& names) {
  const Library library = open_first(names);
  Driver driver;
  driver.path = library.path;
  if (const char* symbol = missing_symbol(library, driver)) {
    refuse(kLibrary, fmt::format("{} without {}", library.path, symbol), kInstall, ErrorCode::unavailable);
  }
  CUresult result = driver.init(0);
  if (result == kSuccess) result = driver.driver_get_version(&driver.version);
  if (result == kSuccess) result = driver.device_get_count(&driver.num_devices);
  if (result == kSuccess && driver.num_devices == 0) result = kErrorNoDevice;
  if (result != kSuccess) {
    refuse(kLibrary, fmt::format("{} from cuInit of {}", error_text(driver, result), library.path),
           "a GPU that this process may use (its driver loaded; in a container, passed in; not hidden by "
           "CUDA_VISIBLE_DEVICES)",
           ErrorCode::unavailable);
  }
  return driver;
}

const Driver& driver() {
  static const Driver opened = open_driver({std::begin(kNames), std::end(kNames)});  // tried again after a failure
  return opened;
}

Probe probe_driver() {
  try {
    const Driver& found = driver();
    std::string text = fmt::format("CUDA {}.{} at {}", found.version / 1000, found.version % 1000 / 10, found.path);
    for (int ordinal = 0; ordinal < found.num_devices; ++ordinal) text += "; " + describe_device(found, ordinal);
    return {true, text};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

}  // namespace qkv::jit
