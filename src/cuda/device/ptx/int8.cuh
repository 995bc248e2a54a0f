// Conversions of i8, two at once, the first in the low byte.
#pragma once

#include "core/index/eight_bit.hpp"
#include "ptx/convert.cuh"

namespace qkv::cuda::ptx {

// The low (0) or the high (1) two bytes of a word. Exact; index/eight_bit.hpp says how.
__device__ __forceinline__ unsigned f16x2_from_int8x2(unsigned word, int pair) {
  const unsigned shifted =
      __byte_perm(word ^ index::kInt8HighestBit * 0x01010101, index::kInt8UpperByte, pair == 0 ? 0x4140 : 0x4342);
  unsigned halves;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(shifted), "r"(index::kInt8ToF16Offset * 0x00010001));
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
