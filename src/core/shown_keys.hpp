// A layer's KeyRun and Shard as index arithmetic.
#pragma once

#include "core/index/shown_keys.hpp"
#include "qkv/layer.hpp"

namespace qkv {

// Tokens of a round of all ranks, at most: positions behind the last one still fit 32 bits.
constexpr int32_t kMaxRound = 1 << 24;

inline index::ShownKeys shown_keys(const LayerSpec& layer) {
  return {static_cast<int32_t>(layer.key_run), layer.shard.rank, layer.shard.num_ranks, layer.shard.interleave_size};
}

}  // namespace qkv
