// Elements of rows of f32, f16 or bf16, where the dtype is an argument of the launch, as f32.
#pragma once

#include "dtype_codes.cuh"
#include "ptx/convert.cuh"

namespace qkv::cuda {

constexpr int kElementsOfVector = 8;  // that a lane loads at once: 16 bytes of 16-bit ones

__device__ __forceinline__ float f32_from_16(int dtype, unsigned bits) {
  const auto half = static_cast<unsigned short>(bits);
  return dtype == kBf16 ? ptx::f32_from_bf16(half) : ptx::f32_from_f16(half);
}

__device__ __forceinline__ float load_element(const void* row, int dtype, int column) {
  if (dtype == kF32) return static_cast<const float*>(row)[column];
  return f32_from_16(dtype, static_cast<const unsigned short*>(row)[column]);
}

// From a place that is a multiple of 16 bytes.
__device__ __forceinline__ void load_vector(const void* from, int dtype, float (&values)[kElementsOfVector]) {
  if (dtype == kF32) {
    const float4 low = static_cast<const float4*>(from)[0];
    const float4 high = static_cast<const float4*>(from)[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    return;
  }
  const uint4 pairs = *static_cast<const uint4*>(from);
  const unsigned words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    values[2 * w] = f32_from_16(dtype, words[w]);
    values[2 * w + 1] = f32_from_16(dtype, words[w] >> 16);
  }
}

}  // namespace qkv::cuda
