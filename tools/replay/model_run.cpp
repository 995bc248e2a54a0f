#include "model_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>

#include "../case_data.hpp"
#include "qkv/status.hpp"

namespace qkv::replay {
namespace {

double seconds_since(std::chrono::steady_clock::time_point& last) {
  const auto now = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(now - last).count();
  last = now;
  return seconds;
}

int32_t num_caches(const LayerKind& kind, const RunSizes& sizes) { return std::min(kind.num_layers, sizes.max_caches); }

int64_t activation_bytes_of_token(const LayerSpec& spec) {
  const int64_t query = int64_t{spec.num_q_heads} * spec.head_dim * size_bytes(spec.query_dtype);
  const int64_t key_value =
      int64_t{spec.num_kv_heads} * (spec.head_dim + spec.value_dim()) * size_bytes(spec.query_dtype);
  const int64_t out = int64_t{spec.num_q_heads} * spec.value_dim() * size_bytes(spec.out_dtype());
  return query + key_value + out;
}

// What the kernel could hand out, page cache included; no answer where the system does not say.
int64_t available_host_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  for (int64_t kilobytes = 0; file >> name; file.ignore(80, '\n')) {
    if (name == "MemAvailable:" && file >> kilobytes) return kilobytes * 1024;
  }
  return -1;
}

// Values between -2 and 2, so that a softmax over them has many keys that matter. The period is odd and larger than a
// head, so that heads and tokens differ.
std::vector<std::byte> random_bytes(DType dtype, size_t num_bytes) {
  constexpr int64_t kPeriod = 8191;
  tools::OwnedTensor period(dtype, {kPeriod});
  uint32_t state = 1;
  for (int64_t i = 0; i < kPeriod; ++i) {
    state = state * 1664525 + 1013904223;  // a linear congruential generator: the same values everywhere
    tools::store(period.view(), {i}, static_cast<float>(state >> 8) * 0x1p-22F - 2.0F);
  }
  const auto* values = static_cast<const std::byte*>(period.view().data);
  const size_t period_bytes = static_cast<size_t>(kPeriod) * size_bytes(dtype);
  std::vector<std::byte> bytes(num_bytes);
  for (size_t at = 0; at < num_bytes; at += period_bytes) {
    std::memcpy(bytes.data() + at, values, std::min(period_bytes, num_bytes - at));
  }
  return bytes;
}

}  // namespace

MemoryNeeds memory_needs(const Model& model, const RunSizes& sizes) {
  MemoryNeeds needs;
  for (const LayerKind& kind : model.kinds) {
    const int64_t tokens = int64_t{sizes.num_pages} * kind.spec.cache->page_size;
    needs.cache_bytes += num_caches(kind, sizes) * tokens * cache_bytes_of_token(kind.spec);
    needs.activation_bytes += sizes.max_step_tokens * activation_bytes_of_token(kind.spec);
  }
  return needs;
}

void check_memory(const MemoryNeeds& needs, Device device) {
  if (device.kind != DeviceKind::cpu) return;
  const int64_t available = available_host_bytes();
  if (available < 0 || needs.total() <= available) return;
  throw Error(ErrorCode::unavailable, "memory", fmt::format("{:.1f} GiB needed", needs.total() * 0x1p-30),
              fmt::format("{:.1f} GiB, which are free: give a smaller --cache-tokens, or --caches for layers to share",
                          available * 0x1p-30));
}

void warm_up(const Model& model, Device device, const RequestBounds& bounds) {
  if (device.kind == DeviceKind::cpu) return;
  std::vector<LayerSpec> layers;
  for (const LayerKind& kind : model.kinds) layers.push_back(kind.spec);
  WarmupOptions options;
  options.device = device;
  options.bounds = bounds;
  for (const WarmedKernel& kernel : warmup(layers, options).kernels) {
    if (kernel.error.empty()) continue;
    throw Error(ErrorCode::internal, kernel.name, kernel.error, "a kernel that compiles");
  }
}

ModelRun::ModelRun(const Model& model, const RunSizes& sizes, Device device) : device_(device) {
  for (const LayerKind& kind : model.kinds) make_kind(kind, sizes);
  plans_.reserve(kinds_.size());
  if (device.kind == DeviceKind::cuda) fence_ = DeviceMemory(device, 1);
}

Tensor ModelRun::make_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor tensor = Tensor::contiguous(nullptr, dtype, shape, device_);
  const int64_t num_bytes = tensor.num_elements() * size_bytes(dtype);
  Block block;
  if (device_.kind == DeviceKind::cpu) {
    block.host.resize(static_cast<size_t>(num_bytes));
    block.data = block.host.data();
  } else {
    block.device = DeviceMemory(device_, num_bytes);
    block.data = block.device.data();
  }
  tensor.data = block.data;
  blocks_.push_back(std::move(block));
  return tensor;
}

Tensor ModelRun::make_filled(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor tensor = make_tensor(dtype, shape);
  Block& block = blocks_.back();
  std::vector<std::byte> values =
      random_bytes(dtype, static_cast<size_t>(tensor.num_elements()) * static_cast<size_t>(size_bytes(dtype)));
  if (device_.kind == DeviceKind::cpu) {
    std::copy(values.begin(), values.end(), block.host.begin());
  } else {
    block.device.copy_from_host(values.data());
  }
  return tensor;
}

void ModelRun::make_kind(const LayerKind& kind, const RunSizes& sizes) {
  const LayerSpec& spec = kind.spec;
  const int64_t tokens = sizes.max_step_tokens;
  Kind made{Attention(spec, device_), kind.num_layers, {}, {}, {}, {}, {}};
  // Head-major pages, which the CPU reads faster.
  const auto pages = [&](int64_t head_dim) {
    return make_tensor(spec.kv_dtype, {sizes.num_pages, spec.num_kv_heads, spec.cache->page_size, head_dim})
        .swap_axes(1, 2);
  };
  for (int32_t cache = 0; cache < num_caches(kind, sizes); ++cache) {
    const Tensor key = pages(spec.head_dim);
    made.caches.push_back({key, pages(spec.value_dim())});
  }
  made.query = make_filled(spec.query_dtype, {tokens, spec.num_q_heads, spec.head_dim});
  made.key = make_filled(spec.query_dtype, {tokens, spec.num_kv_heads, spec.head_dim});
  made.value = make_filled(spec.query_dtype, {tokens, spec.num_kv_heads, spec.value_dim()});
  made.out = make_tensor(spec.out_dtype(), {tokens, spec.num_q_heads, spec.value_dim()});
  kinds_.push_back(std::move(made));
}

StepSeconds ModelRun::run(const Batch& batch) {
  StepSeconds seconds;
  auto last = std::chrono::steady_clock::now();
  plans_.clear();
  for (const Kind& kind : kinds_) plans_.push_back(kind.attention.plan(batch));
  seconds.planning = seconds_since(last);
  for (size_t k = 0; k < kinds_.size(); ++k) {
    const Kind& kind = kinds_[k];
    for (int32_t layer = 0; layer < kind.num_layers; ++layer) {
      const KvCache& cache = kind.caches[static_cast<size_t>(layer) % kind.caches.size()];
      kind.attention.update_cache(kind.key, kind.value, cache, plans_[k]);
      seconds.cache_writes += seconds_since(last);
      kind.attention.forward(kind.query, cache, plans_[k], kind.out);
      seconds.attention += seconds_since(last);
    }
  }
  wait();
  seconds.wait = seconds_since(last);
  return seconds;
}

// As an engine does that needs the sampled tokens before it can make the next step.
void ModelRun::wait() const {
  std::byte sampled{};
  if (device_.kind == DeviceKind::cuda) fence_.copy_to_host(&sampled);
}

}  // namespace qkv::replay
