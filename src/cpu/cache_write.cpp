#include "cpu/cache_write.hpp"

#include <cstring>

#include "core/float16.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

void convert_row(const std::byte* source, DType source_dtype, std::byte* target, DType target_dtype, int64_t count) {
  if (source_dtype == target_dtype) {
    std::memcpy(target, source, count * size_bytes(target_dtype));
    return;
  }
  for (int64_t c = 0; c < count; ++c) {
    const float value = load_f32(source + c * size_bytes(source_dtype), source_dtype);
    store_f32(target + c * size_bytes(target_dtype), target_dtype, value);
  }
}

// All heads of one token, from a packed tensor to its place in the cache.
void write_token(const Tensor& source, int64_t token, const Tensor& pages, int64_t page, int64_t offset) {
  const auto* from = static_cast<const std::byte*>(source.data) + token * source.stride[0] * size_bytes(source.dtype);
  auto* to = static_cast<std::byte*>(pages.data) +
             (page * pages.stride[0] + offset * pages.stride[1]) * size_bytes(pages.dtype);
  for (int64_t head = 0; head < pages.shape[2]; ++head) {
    convert_row(from + head * source.stride[1] * size_bytes(source.dtype), source.dtype,
                to + head * pages.stride[2] * size_bytes(pages.dtype), pages.dtype, pages.shape[3]);
  }
}

// Tokens handed to a thread at once: enough to outweigh the hand-over.
constexpr int64_t kTokensPerTask = 64;

}  // namespace

void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, std::span<const int64_t> slot_mapping) {
  const auto num_slots = static_cast<int64_t>(slot_mapping.size());
  const int64_t page_size = cache.key.shape[1];
  const int64_t work = num_slots * cache.key.shape[2] * (cache.key.shape[3] + cache.value.shape[3]);
  parallel_for((num_slots + kTokensPerTask - 1) / kTokensPerTask, work, [&](int64_t task) {
    const int64_t end = std::min(num_slots, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      const int64_t slot = slot_mapping[token];
      if (slot < 0) continue;
      write_token(key, token, cache.key, slot / page_size, slot % page_size);
      write_token(value, token, cache.value, slot / page_size, slot % page_size);
    }
  });
}

}  // namespace qkv::cpu
