// What scores and outputs of an item are multiplied by: scales of 8-bit operands that belong to its request and KV
// head. Those of tokens are not among them.
#pragma once

#include "dtype.cuh"
#include "float8_tile.cuh"
#include "params.hpp"
#include "scheduler.cuh"

namespace qkv::cuda::tile {

struct ItemScales {
  float score;  // query · key
  float value;  // the weighted mean
};

__device__ __forceinline__ ItemScales item_scales(const ForwardParams& params, const WorkItem& item) {
  ItemScales scales{params.query_factor, 1.0F};
  if constexpr (is_float8(key::query_dtype)) scales.score *= uniform_scale(params.query_scale, item);
  if constexpr (is_float8(key::kv_dtype) && !key::token_scales) {
    scales.score *= uniform_scale(params.key_scale, item);
    scales.value = uniform_scale(params.value_scale, item);
  }
  return scales;
}

// By all lanes, which hold the item's words.
__device__ __forceinline__ void write_item_scales(const ForwardParams& params, int word, ItemScales* scales) {
  WorkItem item{};
  item.request = lane_word(word, kWordRequest);
  item.kv_head = lane_word(word, kWordKvHead);
  if (lane_index() == 0) *scales = item_scales(params, item);
}

}  // namespace qkv::cuda::tile
