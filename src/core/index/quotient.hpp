// x / scale for rounding to an 8-bit format, without a division for each x: a product with the reciprocal, and its
// remainder put right. What is then rounded to 8 bits is what f32's own division gives: the two quotients are equal
// wherever a result of 8 bits could tell them apart. Included by host and device code.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

QKV_HOST_DEVICE inline float multiply_add(float a, float b, float c) {
#ifdef __CUDACC__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

QKV_HOST_DEVICE inline float magnitude_of(float x) {
#ifdef __CUDACC__
  return fabsf(x);
#else
  return __builtin_fabsf(x);
#endif
}

// Scales whose reciprocal is normal, and whose remainders are exact for all x / scale from 2^-18 on: below, half of the
// smallest number of every 8-bit format, results are zeros anyway. Other scales, those below 0 for the signs of zeros,
// need the division.
QKV_HOST_DEVICE constexpr bool has_exact_remainders(float scale) { return scale >= 0x1p-60F && scale <= 0x1p60F; }

// reciprocal: 1 / scale, rounded to nearest.
QKV_HOST_DEVICE inline float quotient_for_8bit(float x, float scale, float reciprocal) {
  constexpr float kSaturates = 0x1p17F;  // in all formats; and infinities have no remainder
  const float product = x * reciprocal;
  if (!(magnitude_of(product) < kSaturates)) return product;  // NaN, too
  // Of a zero, the sign is kept: the remainder is taken as product·scale - x, not the other way round.
  return multiply_add(-multiply_add(product, scale, -x), reciprocal, product);
}

}  // namespace qkv::index
