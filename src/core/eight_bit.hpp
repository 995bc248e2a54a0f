// The 8-bit formats of caches: two of floats, and i8. Their elements are stored divided by a scale.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float8.hpp"
#include "core/index/eight_bit.hpp"

namespace qkv {

inline bool is_8bit(DType dtype) { return is_float8(dtype) || dtype == DType::i8; }

// To nearest even, saturating. An integer is always a number: NaN becomes 0.
inline int8_t int8_from_f32(float value) {
  if (std::isnan(value)) return 0;
  const float whole = std::nearbyint(value);
  if (whole <= index::kSmallestInt8) return index::kSmallestInt8;
  return static_cast<int8_t>(whole >= index::kLargestInt8 ? index::kLargestInt8 : whole);
}

// The number at which a chosen scale puts the largest magnitude.
inline float largest_8bit(DType dtype) {
  return dtype == DType::i8 ? static_cast<float>(index::kLargestInt8) : largest_float8(dtype);
}

}  // namespace qkv
