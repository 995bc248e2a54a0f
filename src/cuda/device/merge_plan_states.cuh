// Joins the partial states of a plan, in rising order of keys; the rows get their sink here. Head sizes are whole
// vectors.
// Block 32 x index::kMergingWarps; grid (CTAs that take turns at the items, CTAs whose warps share an item's rows,
// index::merging_rows_of_warp each).
#pragma once

#include "merge.cuh"

namespace qkv::cuda {
namespace merge {

struct PlanStates {
  const MergePlanParams& params;
  const MergeItem& item;

  __device__ __forceinline__ int num_states() const { return item.num_states; }
  __device__ __forceinline__ int head_dim_v() const { return params.head_dim_v; }
  __device__ __forceinline__ int num_rows() const { return (item.query_end - item.query_begin) * params.group_size; }
  __device__ __forceinline__ Place place_of(int row) const {
    return {row, params.query_start_loc[item.request] + item.query_begin + row / params.group_size,
            item.kv_head * params.group_size + row % params.group_size};
  }
  __device__ __forceinline__ float sink_of(const Place& place) const {
    return params.sinks != nullptr ? params.sinks[place.head] : negative_infinity();
  }
  __device__ __forceinline__ float lse_of(const Place& place, int s) const {
    return params.states_lse[state_row(place, s)];
  }
  __device__ __forceinline__ const void* values_of(const Place& place, int s) const {
    return params.states + state_row(place, s) * params.head_dim_v;
  }
  __device__ __forceinline__ int dtype_of(int) const { return kF32; }
  __device__ __forceinline__ int out_dtype() const { return params.out_dtype; }
  __device__ __forceinline__ const OutputScaleLayout& out_scale() const { return params.out_scale; }
  __device__ __forceinline__ void* out_at(const Place& place) const {
    return row_at(params.out, params.out_dtype,
                  place.token * params.out_token_stride + place.head * params.out_head_stride);
  }
  __device__ __forceinline__ void store_lse(const Place& place, float lse) const {
    if (params.lse == nullptr) return;
    params.lse[place.head * params.lse_head_stride + place.token * params.lse_token_stride] = lse;
  }

  __device__ __forceinline__ long long state_row(const Place& place, int s) const {
    return item.state_row + static_cast<long long>(s) * num_rows() + place.row;
  }
};

}  // namespace merge

extern "C" __global__ void __launch_bounds__(32 * index::kMergingWarps, index::kMergingCtas)
    merge_plan_states(const __grid_constant__ MergePlanParams params) {
  const int rows_of_warp = index::merging_rows_of_warp(params.head_dim_v);
  const int warp = blockIdx.y * index::kMergingWarps + threadIdx.x / 32;
  const int num_warps = gridDim.y * index::kMergingWarps;
  const int num_items = *params.num_items;
#pragma unroll 1
  for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
    const merge::PlanStates states{params, params.items[i]};
#pragma unroll 1
    for (int first_row = warp * rows_of_warp; first_row < states.num_rows(); first_row += num_warps * rows_of_warp) {
      merge::WarpRows<true, merge::PlanStates>(states).join(first_row,
                                                            min(rows_of_warp, states.num_rows() - first_row));
    }
  }
}

}  // namespace qkv::cuda
