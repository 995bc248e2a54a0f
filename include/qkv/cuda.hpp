// Memory of a GPU for programs that bring no CUDA toolkit of their own: tools, tests, examples. Engines hand qkv the
// memory, streams and graphs that they have.
#pragma once

#include <cstdint>

#include "qkv/device.hpp"
#include "qkv/export.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// How many GPUs the engine can use; 0 where there is no driver. Never fails.
QKV_EXPORT int32_t num_cuda_devices();

// Owned bytes on a device. Throws unavailable where there is no device, or not enough memory.
class QKV_EXPORT DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device device, int64_t num_bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  void* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

  // Both wait until the copy, and all work before it on the stream, is done.
  void copy_from_host(const void* source, Stream stream = {}) const;
  void copy_to_host(void* target, Stream stream = {}) const;

 private:
  Device device_;
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace qkv
