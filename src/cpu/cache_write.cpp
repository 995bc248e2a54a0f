#include "cpu/cache_write.hpp"

#include <algorithm>
#include <cstring>

#include "core/eight_bit.hpp"
#include "core/scale_layout.hpp"
#include "cpu/kernels.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

// Keys or values: the rows of new tokens, where they go, and the scales of the latter.
struct Side {
  const Tensor& source;
  const Tensor& pages;
  KvScales granularity;
  ScaleLayout scales;
  const RowKernels& kernels;

  // All heads of one token, from a packed tensor to its place in the cache.
  void write_token(int64_t token, int64_t request, int64_t page, int64_t offset) const {
    const int64_t dim = pages.shape[3];
    const auto* from = static_cast<const std::byte*>(source.data) + token * source.stride[0] * size_bytes(source.dtype);
    auto* to = static_cast<std::byte*>(pages.data) +
               (page * pages.stride[0] + offset * pages.stride[1]) * size_bytes(pages.dtype);
    for (int64_t head = 0; head < pages.shape[2]; ++head) {
      const std::byte* row = from + head * source.stride[1] * size_bytes(source.dtype);
      std::byte* target = to + head * pages.stride[2] * size_bytes(pages.dtype);
      if (granularity == KvScales::none && source.dtype == pages.dtype) {
        std::memcpy(target, row, dim * size_bytes(pages.dtype));
        continue;
      }
      RowConversion conversion{source.dtype, pages.dtype};
      if (granularity != KvScales::none) {
        float& scale = *scales.at(request, page, offset, head);
        if (granularity == KvScales::per_token_head) {
          scale = index::row_scale(kernels.largest_magnitude(source.dtype, row, dim), largest_8bit(pages.dtype));
        }
        conversion.scaling = Scaling::divided;
        conversion.scale = scale;
      }
      kernels.convert(conversion, row, dim, target);
    }
  }
};

// Tokens handed to a thread at once: enough to outweigh the hand-over.
constexpr int64_t kTokensPerTask = 64;

}  // namespace

void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, KvScales scales,
                 std::span<const int64_t> slot_mapping, std::span<const int32_t> slot_requests) {
  const auto num_slots = static_cast<int64_t>(slot_mapping.size());
  const int64_t page_size = cache.key.shape[1];
  const int64_t work = num_slots * cache.key.shape[2] * (cache.key.shape[3] + cache.value.shape[3]);
  const RowKernels& kernels = *forward_kernels().rows;
  const Side keys{key, cache.key, scales, scale_layout(scales, cache.key_scale), kernels};
  const Side values{value, cache.value, scales, scale_layout(scales, cache.value_scale), kernels};
  parallel_for((num_slots + kTokensPerTask - 1) / kTokensPerTask, work, [&](int64_t task) {
    const int64_t end = std::min(num_slots, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      const int64_t slot = slot_mapping[token];
      if (slot < 0) continue;
      const int64_t request = slot_requests.empty() ? 0 : slot_requests[token];
      keys.write_token(token, request, slot / page_size, slot % page_size);
      values.write_token(token, request, slot / page_size, slot % page_size);
    }
  });
}

}  // namespace qkv::cpu
