// Joins any states, each with strides and dtype of its own. Block 128; grid: index::merging_rows a CTA.
#pragma once

#include "merge.cuh"

namespace qkv::cuda {

// `merged` may be one of the states: a lane reads its columns before it writes them.
extern "C" __global__ void __launch_bounds__(index::kMergingThreads)
    merge_states(const __grid_constant__ MergeStatesParams params) {
  const merge::Team team(params.head_dim_v);
  const auto num_rows = static_cast<unsigned>(params.num_tokens * params.num_heads);
  const unsigned own = blockIdx.x * index::merging_rows(params.head_dim_v) + team.row_of_cta;
  const bool has_row = own < num_rows;
  const unsigned row = has_row ? own : num_rows - 1;
  const long long token = row / static_cast<unsigned>(params.num_heads);
  const int head = static_cast<int>(row % static_cast<unsigned>(params.num_heads));
  const StateView* states = params.states != nullptr ? params.states : params.inline_states;
  const auto lse_of = [&](int s) {
    return states[s].lse[head * states[s].lse_head_stride + token * states[s].lse_token_stride];
  };
  const auto row_of = [&](int s) {
    return merge::row_at(states[s].out, states[s].dtype,
                         token * states[s].out_token_stride + head * states[s].out_head_stride);
  };
  const merge::Weights weights = merge::find_weights(team, params.num_states, negative_infinity(), lse_of);
  const StateView& merged = params.merged;
  void* out = merge::row_at(merged.out, merged.dtype, token * merged.out_token_stride + head * merged.out_head_stride);
  // A state without values weighs, but adds nothing.
  const auto lse_of_values = [&](int s) { return states[s].out != nullptr ? lse_of(s) : negative_infinity(); };
  const merge::Target target{has_row ? out : nullptr, merged.dtype,
                             has_row ? scales_of_row(params.out_scale, token, head) : nullptr};
  merge::join_row(
      team, weights, params.num_states, params.head_dim_v, lse_of_values, row_of,
      [&](int s) { return states[s].dtype; }, target, params.out_scale);
  __syncwarp();  // every lane has read the row's LSEs
  if (has_row && merged.lse != nullptr && team.lane == 0) {
    merged.lse[head * merged.lse_head_stride + token * merged.lse_token_stride] = weights.lse();
  }
}

}  // namespace qkv::cuda
