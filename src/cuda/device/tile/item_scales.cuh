// What scores and outputs of an item are multiplied by: scales of 8-bit operands belong to its request and KV head.
#pragma once

#include "dtype.cuh"
#include "float8_tile.cuh"
#include "params.hpp"

namespace qkv::cuda::tile {

struct ItemScales {
  float score;  // query · key
  float value;  // the weighted mean
};

__device__ __forceinline__ ItemScales item_scales(const ForwardParams& params, const WorkItem& item) {
  if constexpr (is_float8(key::kv_dtype)) {
    return {params.query_factor * uniform_scale(params.query_scale, item) * uniform_scale(params.key_scale, item),
            uniform_scale(params.value_scale, item)};
  }
  return {params.query_factor, 1.0F};
}

}  // namespace qkv::cuda::tile
