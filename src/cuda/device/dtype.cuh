// Conversions to and from the 8-bit formats: where the format is an argument of the launch, or of a template.
#pragma once

#include "dtype_codes.cuh"
#include "ptx/convert.cuh"
#include "ptx/float8.cuh"
#include "ptx/int8.cuh"

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

// The number at which a chosen scale puts the largest magnitude of a row.
__device__ __forceinline__ constexpr float largest_8bit(int dtype) {
  return dtype == kI8 ? static_cast<float>(index::kLargestInt8) : largest_float8(dtype);
}

__device__ __forceinline__ unsigned short pack_8bit(int dtype, float low, float high) {
  return dtype == kI8 ? ptx::pack_int8(low, high) : pack_float8(dtype, low, high);
}

// Eight elements of a row, in their order.
__device__ __forceinline__ uint2 pack_eight(int dtype, const float (&values)[8]) {
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = pack_8bit(dtype, values[2 * i], values[2 * i + 1]);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Two neighbours, the low (0) or the high (1) two bytes of a word. Exact: both 16-bit formats hold every number of all
// 8-bit ones.
template <int kDtype>
__device__ __forceinline__ unsigned f16x2_from_8bit(unsigned word, int pair) {
  if constexpr (kDtype == kI8) return ptx::f16x2_from_int8x2(word, pair);
  return ptx::f16x2_from_float8x2<kDtype == kF8E4M3>(word, pair);
}

__device__ __forceinline__ unsigned f16x2_from_8bit(int dtype, unsigned word, int pair) {
  if (dtype == kI8) return f16x2_from_8bit<kI8>(word, pair);
  return dtype == kF8E4M3 ? f16x2_from_8bit<kF8E4M3>(word, pair) : f16x2_from_8bit<kF8E5M2>(word, pair);
}

template <bool kBf16, int kDtype>
__device__ __forceinline__ unsigned widen_8bit(unsigned word, int pair) {
  const unsigned halves = f16x2_from_8bit<kDtype>(word, pair);
  if constexpr (!kBf16) return halves;
  return ptx::pack_bf16(ptx::f32_from_f16(static_cast<unsigned short>(halves)),
                        ptx::f32_from_f16(static_cast<unsigned short>(halves >> 16)));
}

// Eight elements in 16 bits each.
template <bool kBf16, int kDtype>
__device__ __forceinline__ uint4 widen_eight(uint2 bytes) {
  return {widen_8bit<kBf16, kDtype>(bytes.x, 0), widen_8bit<kBf16, kDtype>(bytes.x, 1),
          widen_8bit<kBf16, kDtype>(bytes.y, 0), widen_8bit<kBf16, kDtype>(bytes.y, 1)};
}

}  // namespace qkv::cuda
