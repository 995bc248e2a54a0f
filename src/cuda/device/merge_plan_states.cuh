// Joins the partial states of a plan, in rising order of keys; the rows get their sink here.
// Block 128; grid (CTAs that take turns at the items, CTAs that share an item's rows, index::merging_rows each).
#pragma once

#include "merge.cuh"

namespace qkv::cuda {

extern "C" __global__ void __launch_bounds__(index::kMergingThreads)
    merge_plan_states(const __grid_constant__ MergePlanParams params) {
  const merge::Team team(params.head_dim_v);
  const int rows_of_cta = index::merging_rows(params.head_dim_v);
  const int num_items = *params.num_items;
#pragma unroll 1
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    const MergeItem& item = params.items[index];
    const int num_rows = (item.query_end - item.query_begin) * params.group_size;
#pragma unroll 1
    for (int first = blockIdx.y * rows_of_cta; first < num_rows; first += gridDim.y * rows_of_cta) {
      const bool has_row = first + team.row_of_cta < num_rows;
      const int row = has_row ? first + team.row_of_cta : num_rows - 1;
      const long long token = params.query_start_loc[item.request] + item.query_begin + row / params.group_size;
      const int head = item.kv_head * params.group_size + row % params.group_size;
      const float sink = params.sinks != nullptr ? params.sinks[head] : negative_infinity();
      const auto state_row = [&](int s) { return item.state_row + static_cast<long long>(s) * num_rows + row; };
      const auto lse_of = [&](int s) { return params.states_lse[state_row(s)]; };
      const auto row_of = [&](int s) { return params.states + state_row(s) * params.head_dim_v; };
      const merge::Weights weights = merge::find_weights(team, item.num_states, sink, lse_of);
      void* out =
          merge::row_at(params.out, params.out_dtype, token * params.out_token_stride + head * params.out_head_stride);
      const merge::Target target{has_row ? out : nullptr, params.out_dtype,
                                 has_row ? scales_of_row(params.out_scale, token, head) : nullptr};
      merge::join_row(
          team, weights, item.num_states, params.head_dim_v, lse_of, row_of, [](int) { return kF32; }, target,
          params.out_scale);
      if (has_row && params.lse != nullptr && team.lane == 0) {
        params.lse[head * params.lse_head_stride + token * params.lse_token_stride] = weights.lse();
      }
    }
  }
}

}  // namespace qkv::cuda
