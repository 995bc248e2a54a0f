// Writes new tokens' keys and values to their slots.
#pragma once

#include <cstdint>
#include <span>

#include "qkv/attention.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cpu {

// key [>= slots, num_kv_heads, head_dim] and value likewise, checked. Slot -1: the token is skipped, its row not read.
// slot_requests [slots]: whose token it is, where scales are per request.
void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, KvScales scales,
                 std::span<const int64_t> slot_mapping, std::span<const int32_t> slot_requests);

}  // namespace qkv::cpu
