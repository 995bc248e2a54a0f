// The two 8-bit float formats, as arithmetic on the bits of f32: exact one way, rounded to nearest even the other.
// Included by host and device code; GPUs with instructions for it give the same bits.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// Sign, exponent, mantissa. 0x7F is the NaN that conversions make, of either format and without a sign.
struct Float8Format {
  unsigned mantissa_bits;
  unsigned min_exponent;  // biased as f32's: of the smallest normal number
  unsigned largest;       // code of the largest finite number
  unsigned infinity;      // code of infinity; where there is none, of the NaN
};

inline constexpr unsigned kFloat8Nan = 0x7F;
inline constexpr Float8Format kF8E4M3{3, 127 - 6, 0x7E, kFloat8Nan};  // largest 448, no infinity, one NaN
inline constexpr Float8Format kF8E5M2{2, 127 - 14, 0x7B, 0x7C};       // largest 57344, infinity and NaNs as in f16

inline constexpr unsigned kF32MantissaBits = 23;
inline constexpr unsigned kF32Infinity = 0x7F800000;
inline constexpr unsigned kF32Nan = 0x7FC00000;

// value / 2^shift, rounded to nearest even; shift 1 … 31.
QKV_HOST_DEVICE constexpr unsigned round_shift(unsigned value, unsigned shift) {
  return (value + (1U << (shift - 1)) - 1 + (value >> shift & 1)) >> shift;
}

// Saturating: what is beyond the largest number, infinities included, becomes the largest number.
QKV_HOST_DEVICE constexpr unsigned char float8_from_f32_bits(Float8Format format, unsigned bits) {
  const unsigned magnitude = bits & 0x7FFFFFFF;
  if (magnitude > kF32Infinity) return kFloat8Nan;
  const unsigned sign = bits >> 24 & 0x80;
  const unsigned dropped = kF32MantissaBits - format.mantissa_bits;
  const unsigned exponent = magnitude >> kF32MantissaBits;
  unsigned code = 0;
  if (exponent >= format.min_exponent) {
    code = round_shift(magnitude, dropped) - ((format.min_exponent - 1) << format.mantissa_bits);
  } else if (format.min_exponent - exponent + dropped <= 24) {  // below, not even half of the smallest number is left
    const unsigned significand = (magnitude & 0x7FFFFF) | 0x800000;
    code = round_shift(significand, format.min_exponent - exponent + dropped);
  }
  return static_cast<unsigned char>(sign | (code < format.largest ? code : format.largest));
}

QKV_HOST_DEVICE constexpr unsigned f32_bits_from_float8(Float8Format format, unsigned char code) {
  const unsigned magnitude = code & 0x7FU;
  const unsigned sign = (code & 0x80U) << 24;
  if (magnitude > format.infinity || magnitude == kFloat8Nan) return sign | kF32Nan;
  if (magnitude == format.infinity) return sign | kF32Infinity;
  const unsigned widened = kF32MantissaBits - format.mantissa_bits;
  const unsigned leading = 1U << format.mantissa_bits;
  if (magnitude >= leading) return sign | ((magnitude << widened) + ((format.min_exponent - 1) << kF32MantissaBits));
  if (magnitude == 0) return sign;
  unsigned mantissa = magnitude;  // subnormal: shifted up until it leads with 1, as f32 wants it
  unsigned exponent = format.min_exponent;
  while (mantissa < leading) {
    mantissa <<= 1;
    --exponent;
  }
  return sign | (exponent << kF32MantissaBits) | ((mantissa - leading) << widened);
}

// Columns of a head of an 8-bit output that share a scale, where scales are of groups.
inline constexpr int kScaleGroup = 128;

QKV_HOST_DEVICE constexpr int num_scale_groups(int head_dim_v) { return (head_dim_v + kScaleGroup - 1) / kScaleGroup; }

}  // namespace qkv::index
