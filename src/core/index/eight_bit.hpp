// What the 8-bit formats, floats and i8, have in common: a scale for a row. And the numbers of i8.
// Included by host and device code.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// Scales put the largest magnitude at 127. What lies beyond saturates, and may become -128.
inline constexpr int kLargestInt8 = 127;
inline constexpr int kSmallestInt8 = -128;

// An i8 as f16 without a conversion: x with its highest bit turned round is x + 128, which as the low byte of an f16
// from 1024 on, where neighbours are 1 apart, makes 1024 + 128 + x. The upper byte, and the f16 to be added then.
inline constexpr unsigned kInt8UpperByte = 0x64;      // of 1024
inline constexpr unsigned kInt8HighestBit = 0x80;     // of each byte
inline constexpr unsigned kInt8ToF16Offset = 0xe480;  // -1152

// The scale of a row whose largest finite magnitude is `largest`: then that one is stored as the format's largest
// number. Never below f32's smallest normal number, and 1 for a row of zeros.
QKV_HOST_DEVICE constexpr float row_scale(float largest, float format_largest) {
  constexpr float kSmallestNormal = 0x1p-126F;
  if (largest == 0.0F) return 1.0F;
  const float scale = largest / format_largest;
  return scale < kSmallestNormal ? kSmallestNormal : scale;
}

}  // namespace qkv::index
