#include "cuda/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "core/checks.hpp"
#include "cuda/block_cache.hpp"
#include "jit/driver.hpp"

namespace qkv::cuda {
namespace {

int32_t attribute(const jit::Driver& driver, jit::CUdevice_attribute which, jit::CUdevice device) {
  int value = 0;
  jit::check(driver.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

// Beyond this, memory goes back to the driver: plans of ordinary steps fit, a lone giant does not stay.
constexpr size_t kMaxKeptBytes = size_t{256} << 20;

struct DeviceEntry {
  jit::CUcontext context = nullptr;  // the primary one, retained for the process's life
  DeviceFacts facts;
  std::mutex blocks_mutex;
  BlockCache blocks{kMaxKeptBytes};
};

std::unique_ptr<DeviceEntry> open_device(int32_t index) {
  const jit::Driver& driver = jit::driver();
  if (index < 0 || index >= driver.num_devices) {
    refuse("device.index", index, fmt::format("0 to {}: this machine's GPUs", driver.num_devices - 1),
           ErrorCode::unavailable);
  }
  jit::CUdevice device = 0;
  jit::check(driver.device_get(&device, index), "cuDeviceGet");
  const int32_t major = attribute(driver, jit::CUdevice_attribute::compute_capability_major, device);
  const int32_t minor = attribute(driver, jit::CUdevice_attribute::compute_capability_minor, device);
  auto entry = std::make_unique<DeviceEntry>();
  entry->facts.arch = arch_of(index, major, minor);
  entry->facts.num_multiprocessors = attribute(driver, jit::CUdevice_attribute::multiprocessor_count, device);
  entry->facts.max_shared_bytes = attribute(driver, jit::CUdevice_attribute::max_shared_bytes_per_block, device);
  jit::check(driver.device_primary_ctx_retain(&entry->context, device), "cuDevicePrimaryCtxRetain");
  return entry;
}

DeviceEntry& device_entry(int32_t index) {
  static std::mutex mutex;
  // Never destroyed: buffers of static owners may end after it.
  static auto& entries = *new std::map<int32_t, std::unique_ptr<DeviceEntry>>();
  const std::lock_guard lock(mutex);
  auto found = entries.find(index);
  if (found == entries.end()) found = entries.emplace(index, open_device(index)).first;
  return *found->second;
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

namespace {

void free_blocks(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) jit::driver().mem_free(block.address);
}

// Where memory is short, what is kept for others goes first.
jit::CUdeviceptr allocate(DeviceEntry& entry, size_t bytes) {
  jit::CUdeviceptr address = 0;
  if (jit::driver().mem_alloc(&address, bytes) == jit::kSuccess) return address;
  {
    const std::lock_guard lock(entry.blocks_mutex);
    free_blocks(entry.blocks.drain());
  }
  jit::check(jit::driver().mem_alloc(&address, bytes), "cuMemAlloc", [&] { return fmt::format("{} bytes", bytes); });
  return address;
}

}  // namespace

DeviceBuffer::DeviceBuffer(int32_t device_index, size_t bytes) : device_index_(device_index) {
  if (bytes == 0) return;
  const CurrentDevice current(device_index);
  address_ = allocate(device_entry(device_index), bytes);
}

DeviceBuffer DeviceBuffer::on_stream(int32_t device_index, size_t bytes, jit::CUstream stream) {
  DeviceBuffer buffer;
  if (bytes == 0) return buffer;
  const CurrentDevice current(device_index);
  DeviceEntry& entry = device_entry(device_index);
  std::optional<Block> block;
  {
    const std::lock_guard lock(entry.blocks_mutex);
    block = entry.blocks.take(bytes, stream);
  }
  if (!block) {
    const size_t asked = BlockCache::bytes_to_ask(bytes);
    block = Block{allocate(entry, asked), asked};
  }
  buffer.address_ = block->address;
  buffer.device_index_ = device_index;
  buffer.kept_bytes_ = block->bytes;
  buffer.stream_ = stream;
  return buffer;
}

DeviceBuffer::~DeviceBuffer() {
  if (address_ == 0) return;
  const CurrentDevice current(device_index_);
  if (kept_bytes_ == 0) {
    jit::driver().mem_free(address_);
    return;
  }
  DeviceEntry& entry = device_entry(device_index_);
  const std::lock_guard lock(entry.blocks_mutex);
  free_blocks(entry.blocks.give({address_, kept_bytes_}, stream_));
}

void DeviceBuffer::upload(const void* data, size_t bytes, jit::CUstream stream) const {
  if (bytes == 0) return;
  jit::check(jit::driver().memcpy_htod_async(address_, data, bytes, stream), "cuMemcpyHtoDAsync",
             [&] { return fmt::format("{} bytes", bytes); });
}

Staging::Staging(size_t bytes) {
  const jit::Driver& driver = jit::driver();
  for (Buffer& buffer : buffers_) {
    void* memory = nullptr;
    jit::check(driver.mem_host_alloc(&memory, std::max<size_t>(bytes, 1), jit::kHostAllocPortable), "cuMemHostAlloc",
               [&] { return fmt::format("{} bytes", bytes); });
    buffer.bytes = static_cast<std::byte*>(memory);
    std::memset(memory, 0, bytes);
    jit::check(driver.event_create(&buffer.copied, jit::kEventDisableTiming), "cuEventCreate");
  }
}

Staging::~Staging() {
  for (const Buffer& buffer : buffers_) {
    if (buffer.copied != nullptr) {
      jit::driver().event_synchronize(buffer.copied);
      jit::driver().event_destroy(buffer.copied);
    }
    if (buffer.bytes != nullptr) jit::driver().mem_free_host(buffer.bytes);
  }
}

std::byte* Staging::next() {
  current_ ^= 1;
  jit::check(jit::driver().event_synchronize(buffers_[current_].copied), "cuEventSynchronize");
  return buffers_[current_].bytes;
}

void Staging::mark_copied(jit::CUstream stream) {
  jit::check(jit::driver().event_record(buffers_[current_].copied, stream), "cuEventRecord");
}

size_t Upload::add_bytes(const void* data, size_t bytes) {
  constexpr size_t kAlignment = 16;
  const size_t offset = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
  bytes_.resize(offset + bytes);
  if (bytes != 0) std::memcpy(bytes_.data() + offset, data, bytes);
  return offset;
}

}  // namespace qkv::cuda
