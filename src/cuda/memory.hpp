// Device memory that is freed with its owner, and the current context for the time of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "jit/cuda_api.hpp"

namespace qkv::cuda {

// Makes the device's primary context current on this thread, and what was current before again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  jit::CUcontext before_ = nullptr;
  bool changed_ = false;
};

struct DeviceFacts {
  std::string arch;  // what kernels are compiled for: "sm_90a", "sm_80", …
  int32_t num_multiprocessors = 0;
  int32_t max_shared_bytes = 0;  // that a CTA may ask for
};

// What kernels are compiled for on a device of this compute capability; throws unsupported below 8.0.
std::string arch_of(int32_t device_index, int32_t major, int32_t minor);

// Throws unavailable where there is no such device, unsupported where it is older than sm_80.
const DeviceFacts& device_facts(int32_t index);

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Its end waits for all work of the device.
  DeviceBuffer(int32_t device_index, size_t bytes);
  // Memory that is kept for the next buffer of the same stream, see block_cache.hpp. All that uses it must be ordered
  // on this stream, or have run when the buffer ends. Neither begin nor end waits.
  static DeviceBuffer on_stream(int32_t device_index, size_t bytes, jit::CUstream stream);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  jit::CUdeviceptr address() const { return address_; }
  template <class T>
  T* as(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(address_ + byte_offset);  // NOLINT(performance-no-int-to-ptr): as the driver has it
  }
  // Host memory may be reused when the call returns.
  void upload(const void* data, size_t bytes, jit::CUstream stream) const;

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(device_index_, other.device_index_);
    std::swap(kept_bytes_, other.kept_bytes_);
    std::swap(stream_, other.stream_);
  }
  jit::CUdeviceptr address_ = 0;
  int32_t device_index_ = 0;
  size_t kept_bytes_ = 0;  // of the block, where it is kept at the end
  jit::CUstream stream_ = nullptr;
};

// Host memory that the device copies from while the caller goes on: two buffers take turns, so that one is filled while
// the other may still be read.
class Staging {
 public:
  explicit Staging(size_t bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // A buffer that no copy reads any more. Waits only where two copies are under way.
  std::byte* next();
  // After the copies from that buffer were put on the stream.
  void mark_copied(jit::CUstream stream);

 private:
  struct Buffer {
    std::byte* bytes = nullptr;
    jit::CUevent copied = nullptr;
  };
  Buffer buffers_[2];
  int current_ = 0;
};

// Many small host arrays to the device in one copy.
class Upload {
 public:
  // The offset at which the array will lie.
  template <class T>
  size_t add(const std::vector<T>& values) {
    return add_bytes(values.data(), values.size() * sizeof(T));
  }
  size_t num_bytes() const { return bytes_.size(); }
  void place(const DeviceBuffer& buffer, jit::CUstream stream) const {
    buffer.upload(bytes_.data(), bytes_.size(), stream);
  }

 private:
  size_t add_bytes(const void* data, size_t bytes);
  std::vector<std::byte> bytes_;
};

}  // namespace qkv::cuda
