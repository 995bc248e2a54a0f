// Joins any states, each with strides and dtype of its own. A warp takes one head of neighbouring tokens, whose LSEs
// lie side by side, its neighbour the next head. Block 32 x index::kMergingWarps; grid: a warp for as many tokens and a
// head as index::merging_rows_of_warp, all of them.
#pragma once

#include "merge.cuh"

namespace qkv::cuda {
namespace merge {

struct GivenStates {
  const MergeStatesParams& params;
  const StateView* states;
  int head;

  __device__ __forceinline__ int num_states() const { return params.num_states; }
  __device__ __forceinline__ int head_dim_v() const { return params.head_dim_v; }
  __device__ __forceinline__ Place place_of(int row) const { return {row, row, head}; }  // a token's
  __device__ __forceinline__ float sink_of(const Place&) const { return negative_infinity(); }
  __device__ __forceinline__ float lse_of(const Place& place, int s) const { return *lse_at(states[s], place); }
  __device__ __forceinline__ const void* values_of(const Place& place, int s) const {
    return states[s].out != nullptr ? values_at(states[s], place) : nullptr;
  }
  __device__ __forceinline__ int dtype_of(int s) const { return states[s].dtype; }
  __device__ __forceinline__ int out_dtype() const { return params.merged.dtype; }
  __device__ __forceinline__ const OutputScaleLayout& out_scale() const { return params.out_scale; }
  __device__ __forceinline__ void* out_at(const Place& place) const { return values_at(params.merged, place); }
  __device__ __forceinline__ void store_lse(const Place& place, float lse) const {
    if (params.merged.lse != nullptr) *lse_at(params.merged, place) = lse;
  }

  static __device__ __forceinline__ float* lse_at(const StateView& state, const Place& place) {
    return state.lse + place.head * state.lse_head_stride + place.token * state.lse_token_stride;
  }
  static __device__ __forceinline__ void* values_at(const StateView& state, const Place& place) {
    return row_at(state.out, state.dtype, place.token * state.out_token_stride + place.head * state.out_head_stride);
  }
};

}  // namespace merge

extern "C" __global__ void __launch_bounds__(32 * index::kMergingWarps, index::kMergingCtas)
    merge_states(const __grid_constant__ MergeStatesParams params) {
  const unsigned warp = blockIdx.x * index::kMergingWarps + threadIdx.x / 32;
  const unsigned heads = params.num_heads;
  const int rows = index::merging_rows_of_warp(params.head_dim_v);
  const long long first = static_cast<long long>(warp / heads) * rows;
  if (first >= params.num_tokens) return;
  const merge::GivenStates states{params, params.states != nullptr ? params.states : params.inline_states,
                                  static_cast<int>(warp % heads)};
  const int tokens = min(rows, static_cast<int>(params.num_tokens - first));
  if (params.head_dim_v % merge::kVector == 0) {
    merge::WarpRows<true, merge::GivenStates>(states).join(static_cast<int>(first), tokens);
  } else {
    merge::WarpRows<false, merge::GivenStates>(states).join(static_cast<int>(first), tokens);
  }
}

}  // namespace qkv::cuda
