// Conversions to and from the float formats where the format is an argument of the launch.
#pragma once

#include "dtype_codes.cuh"
#include "ptx/convert.cuh"
#include "ptx/float8.cuh"

namespace qkv::cuda {

__device__ __forceinline__ constexpr float largest_float8(int dtype) { return dtype == kF8E4M3 ? 448.0F : 57344.0F; }

// Of a number that is not finite: 0.
__device__ __forceinline__ float finite_magnitude(float value) {
  const float magnitude = fabsf(value);
  return magnitude <= 3.402823466e38F ? magnitude : 0.0F;
}

__device__ __forceinline__ unsigned short pack_float8(int dtype, float low, float high) {
  return dtype == kF8E4M3 ? ptx::pack_float8<true>(low, high) : ptx::pack_float8<false>(low, high);
}

}  // namespace qkv::cuda
