// Joins the partial states of a plan, in rising order of keys; the rows get their sink here.
// Block 128; grid (CTAs that take turns at the items, CTAs that share an item's rows).
// A warp a row.
#pragma once

#include "merge.cuh"

namespace qkv::cuda {

extern "C" __global__ void __launch_bounds__(merge::kWarps * 32)
    merge_plan_states(const __grid_constant__ MergePlanParams params) {
  const int num_items = *params.num_items;
#pragma unroll 1
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    const MergeItem& item = params.items[index];
    const long long num_rows = static_cast<long long>(item.query_end - item.query_begin) * params.group_size;
#pragma unroll 1
    for (long long row = blockIdx.y * merge::kWarps + threadIdx.x / 32; row < num_rows;
         row += gridDim.y * merge::kWarps) {
      const long long token = params.query_start_loc[item.request] + item.query_begin + row / params.group_size;
      const int head = item.kv_head * params.group_size + static_cast<int>(row % params.group_size);
      const float sink = params.sinks != nullptr ? params.sinks[head] : negative_infinity();
      const auto lse_of = [&](int s) { return params.states_lse[item.state_row + s * num_rows + row]; };
      const auto row_of = [&](int s) {
        return params.states + (item.state_row + s * num_rows + row) * params.head_dim_v;
      };
      const merge::Weights weights = merge::find_weights(item.num_states, sink, lse_of);
      void* out =
          merge::row_at(params.out, params.out_dtype, token * params.out_token_stride + head * params.out_head_stride);
      merge::join_row(
          weights, item.num_states, params.head_dim_v, lse_of, row_of, [](int) { return kF32; }, out, params.out_dtype,
          params.out_scale, token, head);
      if (params.lse != nullptr && threadIdx.x % 32 == 0) {
        params.lse[head * params.lse_head_stride + token * params.lse_token_stride] = weights.lse();
      }
    }
  }
}

}  // namespace qkv::cuda
