#include <algorithm>
#include <utility>

#include "core/checks.hpp"
#include "cuda/memory.hpp"
#include "jit/driver.hpp"
#include "qkv/cuda.hpp"

namespace qkv {

int32_t num_cuda_devices() {
  try {
    return jit::driver().num_devices;
  } catch (const Error&) {
    return 0;
  }
}

DeviceMemory::DeviceMemory(Device device, int64_t num_bytes) : device_(device), num_bytes_(num_bytes) {
  if (device.kind != DeviceKind::cuda) refuse("device", to_string(device), "cuda");
  if (num_bytes < 0) refuse("num_bytes", num_bytes, "0 or more");
  const cuda::CurrentDevice current(device.index);
  jit::CUdeviceptr address = 0;
  jit::check(jit::driver().mem_alloc(&address, static_cast<size_t>(std::max<int64_t>(num_bytes, 1))), "cuMemAlloc",
             [&] { return fmt::format("{} bytes of {}", num_bytes, to_string(device)); });
  data_ = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): the driver's addresses are integers
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const cuda::CurrentDevice current(device_.index);
  jit::driver().mem_free(reinterpret_cast<jit::CUdeviceptr>(data_));
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), data_(std::exchange(other.data_, nullptr)), num_bytes_(other.num_bytes_) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

void DeviceMemory::copy_from_host(const void* source, Stream stream) const {
  const cuda::CurrentDevice current(device_.index);
  const auto handle = static_cast<jit::CUstream>(stream.handle);
  jit::check(jit::driver().memcpy_htod_async(reinterpret_cast<jit::CUdeviceptr>(data_), source,
                                             static_cast<size_t>(num_bytes_), handle),
             "cuMemcpyHtoDAsync");
  jit::check(jit::driver().stream_synchronize(handle), "cuStreamSynchronize");
}

void DeviceMemory::copy_to_host(void* target, Stream stream) const {
  const cuda::CurrentDevice current(device_.index);
  const auto handle = static_cast<jit::CUstream>(stream.handle);
  jit::check(jit::driver().memcpy_dtoh_async(target, reinterpret_cast<jit::CUdeviceptr>(data_),
                                             static_cast<size_t>(num_bytes_), handle),
             "cuMemcpyDtoHAsync");
  jit::check(jit::driver().stream_synchronize(handle), "cuStreamSynchronize");
}

}  // namespace qkv
