// Conversions of i8, two at once, the first in the low byte.
#pragma once

#include "core/index/eight_bit.hpp"
#include "ptx/convert.cuh"

namespace qkv::cuda::ptx {

// The low (0) or the high (1) two bytes of a word. Exact, without a conversion: x with its highest bit turned round is
// x + 128, and as the low byte of an f16 from 1024 on, where neighbours are 1 apart, it makes 1024 + 128 + x.
__device__ __forceinline__ unsigned f16x2_from_int8x2(unsigned word, int pair) {
  constexpr unsigned k1024 = 0x64;             // the upper byte
  constexpr unsigned kMinus1152 = 0xe480e480;  // twice
  const unsigned shifted = __byte_perm(word ^ 0x80808080, k1024, pair == 0 ? 0x4140 : 0x4342);
  unsigned halves;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(shifted), "r"(kMinus1152));
  return halves;
}

// To nearest even, saturating; NaN becomes 0.
__device__ __forceinline__ unsigned char int8_from_f32(float value) {
  const int whole = min(max(__float2int_rn(value), index::kSmallestInt8), index::kLargestInt8);
  return static_cast<unsigned char>(whole);
}

__device__ __forceinline__ unsigned short pack_int8(float low, float high) {
  return static_cast<unsigned short>(int8_from_f32(low) | int8_from_f32(high) << 8);
}

}  // namespace qkv::cuda::ptx
