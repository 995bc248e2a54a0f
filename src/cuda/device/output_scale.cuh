// The scales of 8-bit outputs: given, or chosen for a group of a row's columns by the lanes that hold it. A chosen one
// puts the group's largest finite magnitude at the format's largest number, as core/output_scale.hpp does.
#pragma once

#include "dtype.cuh"
#include "max_of_lanes.cuh"
#include "params.hpp"

namespace qkv::cuda {

// The scales of a row, group by group.
__device__ __forceinline__ float* scales_of_row(const OutputScaleLayout& scale, long long token, long long head) {
  return scale.data + token * scale.token_stride + head * scale.head_stride;
}

// `largest`: of the lane's own columns. A group lies in kLanes neighbouring lanes (a power of two), which all call this
// and all get the scale.
template <int kLanes>
__device__ __forceinline__ float choose_scale(float largest, int out_dtype) {
  const int lane = threadIdx.x % 32;
  const unsigned lanes = kLanes == 32 ? 0xffffffffU : ((1U << kLanes % 32) - 1) << (lane & ~(kLanes - 1));
  return index::row_scale(max_of_lanes(largest, kLanes, lanes), largest_float8(out_dtype));
}

}  // namespace qkv::cuda
