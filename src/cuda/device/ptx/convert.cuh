// Conversions between f32 and the 16-bit formats, which are kept as bits. Rounding is to nearest even.
#pragma once

namespace qkv::cuda::ptx {

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float f32_from_bf16(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ float f32_from_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

template <bool kBf16>
__device__ __forceinline__ unsigned pack_16(float low, float high) {
  if constexpr (kBf16) return pack_bf16(low, high);
  return pack_f16(low, high);
}

template <bool kBf16>
__device__ __forceinline__ float f32_from_16(unsigned short bits) {
  if constexpr (kBf16) return f32_from_bf16(bits);
  return f32_from_f16(bits);
}

// NaN or infinity: all bits of the exponent are set.
template <bool kBf16>
__device__ __forceinline__ bool is_nonfinite_16(unsigned bits) {
  constexpr unsigned kExponent = kBf16 ? 0x7f80 : 0x7c00;
  return (bits & kExponent) == kExponent;
}

// The larger of each of two pairs; of a NaN and x: x.
template <bool kBf16>
__device__ __forceinline__ unsigned max_of_16(unsigned a, unsigned b) {
  unsigned largest;
  if constexpr (kBf16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
  }
  return largest;
}

}  // namespace qkv::cuda::ptx
