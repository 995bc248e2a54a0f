// Joins any states, each with strides and dtype of its own. Block 128; grid ceil(num_tokens·num_heads / 4).
#pragma once

#include "merge.cuh"

namespace qkv::cuda {

// `merged` may be one of the states: a row is read before it is written.
extern "C" __global__ void __launch_bounds__(merge::kWarps * 32)
    merge_states(const __grid_constant__ MergeStatesParams params) {
  const long long row = static_cast<long long>(blockIdx.x) * merge::kWarps + threadIdx.x / 32;
  if (row >= params.num_tokens * params.num_heads) return;
  const long long token = row / params.num_heads;
  const int head = static_cast<int>(row % params.num_heads);
  const StateView* states = params.states != nullptr ? params.states : params.inline_states;
  const auto lse_of = [&](int s) {
    return states[s].lse[head * states[s].lse_head_stride + token * states[s].lse_token_stride];
  };
  const auto row_of = [&](int s) {
    return merge::row_at(states[s].out, states[s].dtype,
                         token * states[s].out_token_stride + head * states[s].out_head_stride);
  };
  const merge::Weights weights = merge::find_weights(params.num_states, negative_infinity(), lse_of);
  const StateView& merged = params.merged;
  void* out = merge::row_at(merged.out, merged.dtype, token * merged.out_token_stride + head * merged.out_head_stride);
  // A state without values weighs, but adds nothing.
  const auto lse_of_values = [&](int s) { return states[s].out != nullptr ? lse_of(s) : negative_infinity(); };
  merge::join_row(
      weights, params.num_states, params.head_dim_v, lse_of_values, row_of, [&](int s) { return states[s].dtype; }, out,
      merged.dtype, params.out_scale, token, head);
  __syncwarp();  // every lane has read the row's LSEs
  if (merged.lse != nullptr && threadIdx.x % 32 == 0) {
    merged.lse[head * merged.lse_head_stride + token * merged.lse_token_stride] = weights.lse();
  }
}

}  // namespace qkv::cuda
