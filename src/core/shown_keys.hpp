// A layer's KeyRun and Shard as index arithmetic.
#pragma once

#include "core/index/shown_keys.hpp"
#include "qkv/layer.hpp"

namespace qkv {

inline index::ShownKeys shown_keys(const LayerSpec& layer) {
  return {static_cast<int32_t>(layer.key_run), layer.shard.rank, layer.shard.num_ranks, layer.shard.interleave_size};
}

}  // namespace qkv
