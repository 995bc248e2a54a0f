#include "core/float16.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace qkv {
namespace {

TEST(float16, every_bf16_and_f16_value_survives_the_way_through_f32) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float bf16 = f32_from_bf16(half);
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(bf16))));
    } else {
      EXPECT_EQ(bf16_from_f32(bf16), half);
    }
    const float f16 = f32_from_f16(half);
    if (std::isnan(f16)) {
      EXPECT_TRUE(std::isnan(f32_from_f16(f16_from_f32(f16))));
    } else {
      EXPECT_EQ(f16_from_f32(f16), half);
    }
  }
}

TEST(float16, known_f16_values) {
  EXPECT_EQ(f32_from_f16(0x3C00), 1.0F);
  EXPECT_EQ(f32_from_f16(0xC000), -2.0F);
  EXPECT_EQ(f32_from_f16(0x7BFF), 65504.0F);
  EXPECT_EQ(f32_from_f16(0x0001), 0x1p-24F);
  EXPECT_EQ(f32_from_f16(0x0400), 0x1p-14F);
  EXPECT_EQ(f32_from_f16(0x7C00), std::numeric_limits<float>::infinity());
}

// Halfway between neighbours the even one wins, and just beyond it the nearer one.
TEST(float16, rounding_is_to_nearest_even) {
  for (uint32_t bits = 0; bits + 1 < 0x7C00; ++bits) {
    const float low = f32_from_f16(static_cast<uint16_t>(bits));
    const float high = f32_from_f16(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;
    EXPECT_EQ(f16_from_f32(middle), bits % 2 == 0 ? bits : bits + 1) << bits;
    EXPECT_EQ(f16_from_f32(std::nextafter(middle, high)), bits + 1);
    EXPECT_EQ(f16_from_f32(-middle), 0x8000 | (bits % 2 == 0 ? bits : bits + 1));
  }
  for (uint32_t bits = 0; bits + 1 < 0x7F80; ++bits) {
    const float low = f32_from_bf16(static_cast<uint16_t>(bits));
    const float middle = std::bit_cast<float>((bits << 16) + 0x8000);
    EXPECT_EQ(bf16_from_f32(middle), bits % 2 == 0 ? bits : bits + 1) << low;
    EXPECT_EQ(bf16_from_f32(std::bit_cast<float>((bits << 16) + 0x8001)), bits + 1);
  }
}

TEST(float16, values_beyond_the_range_become_infinite) {
  EXPECT_EQ(f16_from_f32(65519.0F), 0x7BFF);
  EXPECT_EQ(f16_from_f32(65520.0F), 0x7C00);
  EXPECT_EQ(f16_from_f32(-1e10F), 0xFC00);
  EXPECT_EQ(bf16_from_f32(std::numeric_limits<float>::max()), 0x7F80);
}

}  // namespace
}  // namespace qkv
