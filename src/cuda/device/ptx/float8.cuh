// Conversions of the 8-bit floats, two at once, the first in the low byte. GPUs of sm_89 and later have instructions;
// before, the same bits come from integer arithmetic.
#pragma once

#include "core/index/float8.hpp"
#include "ptx/convert.cuh"

namespace qkv::cuda::ptx {

constexpr bool kHasFloat8 = __CUDA_ARCH__ >= 890;

// The low (0) or the high (1) two bytes of a word. An e5m2 is the upper half of an f16. An e4m3 fits into one, but for
// its exponent, 8 too small, and its NaN.
template <bool kE4M3, bool kInstruction = kHasFloat8>
__device__ __forceinline__ unsigned f16x2_from_float8x2(unsigned word, int pair) {
  if constexpr (!kE4M3) {  // not __byte_perm: the sm80 kernel would spill more
    const unsigned upper = pair == 0 ? word << 16 : word;
    return (upper & 0xFF000000U) | (upper >> 8 & 0xFF00U);
  }
  unsigned halves;
  if constexpr (kInstruction) {
    unsigned short pairs[2];  // the conversion reads either half of a register in place; a shift would be done
    asm("mov.b32 {%0, %1}, %2;" : "=h"(pairs[0]), "=h"(pairs[1]) : "r"(word));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pairs[pair]));
    return halves;
  }
  const unsigned apart = __byte_perm(word, 0, pair == 0 ? 0x4140 : 0x4342);
  constexpr unsigned k256 = 0x5C005C00;  // twice
  asm("mul.rn.f16x2 %0, %1, %2;"
      : "=r"(halves)
      : "r"((apart & 0x00800080U) << 8 | (apart & 0x007F007FU) << 7), "r"(k256));
  if ((apart & 0x7FU) == 0x7FU) halves |= 0x7FFFU;
  if ((apart & 0x7F0000U) == 0x7F0000U) halves |= 0x7FFF0000U;
  return halves;
}

// To nearest even, saturating, NaN kept.
template <bool kE4M3, bool kInstruction = kHasFloat8>
__device__ __forceinline__ unsigned short pack_float8(float low, float high) {
  if constexpr (kInstruction) {
    unsigned short pair;
    if constexpr (kE4M3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    }
    return pair;
  } else {
    constexpr index::Float8Format kFormat = kE4M3 ? index::kF8E4M3 : index::kF8E5M2;
    return static_cast<unsigned short>(index::float8_from_f32_bits(kFormat, __float_as_uint(low)) |
                                       index::float8_from_f32_bits(kFormat, __float_as_uint(high)) << 8);
  }
}

// Four at once, the first in the lowest byte. For GPUs that have instructions.
__device__ __forceinline__ unsigned pack_e4m3x4(float x0, float x1, float x2, float x3) {
  unsigned bytes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(bytes)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return bytes;
}

}  // namespace qkv::cuda::ptx
