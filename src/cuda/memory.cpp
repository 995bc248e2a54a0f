#include "cuda/memory.hpp"

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core/checks.hpp"
#include "jit/driver.hpp"

namespace qkv::cuda {
namespace {

int32_t attribute(const jit::Driver& driver, jit::CUdevice_attribute which, jit::CUdevice device) {
  int value = 0;
  jit::check(driver.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

struct DeviceEntry {
  jit::CUcontext context = nullptr;  // the primary one, retained for the process's life
  DeviceFacts facts;
};

DeviceEntry open_device(int32_t index) {
  const jit::Driver& driver = jit::driver();
  if (index < 0 || index >= driver.num_devices) {
    refuse("device.index", index, fmt::format("0 to {}: this machine's GPUs", driver.num_devices - 1),
           ErrorCode::unavailable);
  }
  jit::CUdevice device = 0;
  jit::check(driver.device_get(&device, index), "cuDeviceGet");
  const int32_t major = attribute(driver, jit::CUdevice_attribute::compute_capability_major, device);
  const int32_t minor = attribute(driver, jit::CUdevice_attribute::compute_capability_minor, device);
  DeviceEntry entry;
  entry.facts.arch = arch_of(index, major, minor);
  entry.facts.num_multiprocessors = attribute(driver, jit::CUdevice_attribute::multiprocessor_count, device);
  entry.facts.max_shared_bytes = attribute(driver, jit::CUdevice_attribute::max_shared_bytes_per_block, device);
  jit::check(driver.device_primary_ctx_retain(&entry.context, device), "cuDevicePrimaryCtxRetain");
  return entry;
}

const DeviceEntry& device_entry(int32_t index) {
  static std::mutex mutex;
  static std::map<int32_t, DeviceEntry> entries;
  const std::lock_guard lock(mutex);
  auto found = entries.find(index);
  if (found == entries.end()) found = entries.emplace(index, open_device(index)).first;
  return found->second;
}

}  // namespace

std::string arch_of(int32_t device_index, int32_t major, int32_t minor) {
  if (major < 8) {
    refuse("device", fmt::format("cuda:{} of compute capability {}.{}", device_index, major, minor),
           "a GPU of compute capability 8.0 (Ampere) or later", ErrorCode::unsupported);
  }
  // Kernels for Hopper use instructions that only sm_90a has; elsewhere the device's own code.
  return major == 9 ? "sm_90a" : fmt::format("sm_{}{}", major, minor);
}

const DeviceFacts& device_facts(int32_t index) { return device_entry(index).facts; }

CurrentDevice::CurrentDevice(int32_t index) {
  const jit::Driver& driver = jit::driver();
  const jit::CUcontext wanted = device_entry(index).context;
  jit::check(driver.ctx_get_current(&before_), "cuCtxGetCurrent");
  if (before_ == wanted) return;
  jit::check(driver.ctx_set_current(wanted), "cuCtxSetCurrent");
  changed_ = true;
}

CurrentDevice::~CurrentDevice() {
  if (changed_) jit::driver().ctx_set_current(before_);
}

DeviceBuffer::DeviceBuffer(int32_t device_index, size_t bytes) : device_index_(device_index) {
  if (bytes == 0) return;
  const CurrentDevice current(device_index);
  jit::check(jit::driver().mem_alloc(&address_, bytes), "cuMemAlloc", [&] { return fmt::format("{} bytes", bytes); });
}

DeviceBuffer::~DeviceBuffer() {
  if (address_ == 0) return;
  const CurrentDevice current(device_index_);
  jit::driver().mem_free(address_);
}

void DeviceBuffer::upload(const void* data, size_t bytes, jit::CUstream stream) const {
  if (bytes == 0) return;
  jit::check(jit::driver().memcpy_htod_async(address_, data, bytes, stream), "cuMemcpyHtoDAsync",
             [&] { return fmt::format("{} bytes", bytes); });
}

size_t Upload::add_bytes(const void* data, size_t bytes) {
  constexpr size_t kAlignment = 16;
  const size_t offset = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
  bytes_.resize(offset + bytes);
  if (bytes != 0) std::memcpy(bytes_.data() + offset, data, bytes);
  return offset;
}

DeviceBuffer Upload::place(int32_t device_index, jit::CUstream stream) const {
  DeviceBuffer buffer(device_index, bytes_.size());
  buffer.upload(bytes_.data(), bytes_.size(), stream);
  return buffer;
}

}  // namespace qkv::cuda
