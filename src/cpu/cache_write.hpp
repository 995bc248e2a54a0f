// Writes new tokens' keys and values to their slots.
#pragma once

#include <cstdint>
#include <span>

#include "qkv/attention.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cpu {

// key [>= slots, num_kv_heads, head_dim] and value likewise, checked. Slot -1: the token is skipped, its row not read.
void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, std::span<const int64_t> slot_mapping);

}  // namespace qkv::cpu
