// Scalar conversions between f32 and the 8-bit floats. For plain code; kernels convert vectors.
#pragma once

#include <bit>
#include <cstdint>

#include "core/index/float8.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

inline bool is_float8(DType dtype) { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }

inline index::Float8Format float8_format(DType dtype) {
  return dtype == DType::f8e4m3 ? index::kF8E4M3 : index::kF8E5M2;
}

inline float f32_from_float8(DType dtype, uint8_t code) {
  return std::bit_cast<float>(index::f32_bits_from_float8(float8_format(dtype), code));
}

// To nearest even, NaN kept. Beyond the largest number, infinities included: the largest number.
inline uint8_t float8_from_f32(DType dtype, float value) {
  return index::float8_from_f32_bits(float8_format(dtype), std::bit_cast<uint32_t>(value));
}

inline float largest_float8(DType dtype) {
  return f32_from_float8(dtype, static_cast<uint8_t>(float8_format(dtype).largest));
}

}  // namespace qkv
