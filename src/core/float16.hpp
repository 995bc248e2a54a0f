// Scalar conversions between f32 and the 16-bit formats, round to nearest even, NaN kept, and access to an element of
// any format of queries, keys, values and outputs. For plain code; kernels convert vectors.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/eight_bit.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

inline float f32_from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t bf16_from_f32(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);  // keep it a NaN: quiet it
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float f32_from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13));
  // Exponents differ by 112; scaling a normal float by 2^-112 also makes the f16 subnormals right.
  const float scaled = std::bit_cast<float>((magnitude << 13) + (uint32_t{112} << 23));
  if (magnitude >= 0x400) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
}

inline uint16_t f16_from_f32(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0F) return sign | 0x7C00;
  if (magnitude < 0x1p-14F) {
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24F));  // subnormal, or 2^-14 by rounding up
  }
  const uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - (uint32_t{112} << 10));
}

// One element of a tensor at `address`, of an 8-bit one without its scale.
inline float load_f32(const std::byte* address, DType dtype) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, address, sizeof(value));
    return value;
  }
  if (is_float8(dtype)) return f32_from_float8(dtype, std::to_integer<uint8_t>(*address));
  if (dtype == DType::i8) return static_cast<float>(std::to_integer<int8_t>(*address));
  uint16_t bits;
  std::memcpy(&bits, address, sizeof(bits));
  return dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits);
}

inline void store_f32(std::byte* address, DType dtype, float value) {
  if (dtype == DType::f32) {
    std::memcpy(address, &value, sizeof(value));
    return;
  }
  if (is_float8(dtype)) {
    *address = std::byte{float8_from_f32(dtype, value)};
    return;
  }
  if (dtype == DType::i8) {
    *address = std::byte{static_cast<uint8_t>(int8_from_f32(value))};
    return;
  }
  const uint16_t bits = dtype == DType::bf16 ? bf16_from_f32(value) : f16_from_f32(value);
  std::memcpy(address, &bits, sizeof(bits));
}

}  // namespace qkv
