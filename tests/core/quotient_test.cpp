#include "core/index/quotient.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace qkv::index {
namespace {

float quotient(float x, float scale) { return quotient_for_8bit(x, scale, 1.0F / scale); }

// 8-bit formats round at numbers whose mantissas have 8 bits at most. The x beside them are where a last bit matters.
TEST(quotient, is_that_of_a_division_beside_all_numbers_where_rounding_turns) {
  int64_t differing = 0;
  for (uint32_t mantissa = 0; mantissa < 1U << 23; mantissa += 997) {
    const auto scale = std::bit_cast<float>(0x3f800000U | mantissa);
    for (int turn = 128; turn < 256; ++turn) {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(turn) / 128 * scale);
      for (uint32_t x = bits - 2; x <= bits + 2; ++x) {
        const auto value = std::bit_cast<float>(x);
        differing += quotient(value, scale) != value / scale;
      }
    }
  }
  EXPECT_EQ(differing, 0);
}

TEST(quotient, keeps_zeros_signs_infinities_and_nan) {
  for (const float scale : {0.37F, 0x1p-60F, 0x1p60F, 3.0F}) {
    for (const float x : {0.0F, -0.0F, INFINITY, -INFINITY, 1e-45F, -1e-45F}) {
      const float want = x / scale;
      EXPECT_EQ(std::signbit(quotient(x, scale)), std::signbit(want)) << x << " / " << scale;
      if (x == 0.0F || std::isinf(x)) {
        EXPECT_EQ(quotient(x, scale), want) << x << " / " << scale;
      }
    }
    EXPECT_TRUE(std::isnan(quotient(NAN, scale)));
  }
  EXPECT_EQ(quotient(3e38F, 0x1p-60F), INFINITY);  // beyond f32, and then beyond 8 bits
}

TEST(quotient, is_asked_for_scales_with_exact_remainders) {
  for (const float scale : {0x1p-60F, 0x1p60F, 1.0F}) EXPECT_TRUE(has_exact_remainders(scale)) << scale;
  for (const float scale : {0.0F, -1.0F, 0x1p-61F, 0x1p61F, INFINITY, NAN})
    EXPECT_FALSE(has_exact_remainders(scale)) << scale;
}

}  // namespace
}  // namespace qkv::index
