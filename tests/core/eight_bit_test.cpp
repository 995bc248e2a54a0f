#include "core/eight_bit.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/float16.hpp"

namespace qkv {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(row_scale, puts_the_largest_magnitude_at_the_largest_number) {
  EXPECT_EQ(index::row_scale(448.0F, 448.0F), 1.0F);
  EXPECT_EQ(index::row_scale(0.0F, 448.0F), 1.0F);
  EXPECT_EQ(index::row_scale(1e-40F, 448.0F), 0x1p-126F);
  EXPECT_FLOAT_EQ(3.0F / index::row_scale(3.0F, 57344.0F), 57344.0F);
  EXPECT_FLOAT_EQ(3.0F / index::row_scale(3.0F, largest_8bit(DType::i8)), 127.0F);
}

TEST(int8, a_round_trip_keeps_every_number) {
  for (int32_t number = -128; number <= 127; ++number) {
    std::byte element{};
    store_f32(&element, DType::i8, static_cast<float>(number));
    EXPECT_EQ(std::to_integer<int8_t>(element), number);
    EXPECT_EQ(load_f32(&element, DType::i8), static_cast<float>(number));
  }
}

// What GPUs do to a pair of bytes, for each: a byte in the place of the low one of 1024, and an addition that is exact.
TEST(int8, every_number_is_an_f16_without_a_conversion) {
  const float offset = f32_from_f16(index::kInt8ToF16Offset);
  EXPECT_EQ(offset, -1152.0F);
  for (int32_t number = -128; number <= 127; ++number) {
    const uint32_t turned = static_cast<uint8_t>(number) ^ index::kInt8HighestBit;
    EXPECT_EQ(f32_from_f16(static_cast<uint16_t>(index::kInt8UpperByte << 8 | turned)) + offset, number);
  }
}

TEST(int8, rounds_to_nearest_even) {
  for (int32_t below = -128; below < 127; ++below) {
    const float middle = static_cast<float>(below) + 0.5F;
    EXPECT_EQ(int8_from_f32(middle), below % 2 == 0 ? below : below + 1);
    EXPECT_EQ(int8_from_f32(std::nextafter(middle, -kInfinity)), below);
    EXPECT_EQ(int8_from_f32(std::nextafter(middle, kInfinity)), below + 1);
  }
  EXPECT_EQ(int8_from_f32(-0.0F), 0);
}

TEST(int8, what_is_too_large_saturates_and_nan_is_zero) {
  for (const float value : {127.0F, 127.5F, 1000.0F, 3e9F, 1e30F, kInfinity}) EXPECT_EQ(int8_from_f32(value), 127);
  for (const float value : {-128.0F, -128.5F, -1000.0F, -3e9F, -1e30F, -kInfinity}) {
    EXPECT_EQ(int8_from_f32(value), -128);
  }
  EXPECT_EQ(int8_from_f32(NAN), 0);
  EXPECT_EQ(int8_from_f32(-NAN), 0);
}

// Rows whose scale is chosen for them lose half a step at most.
TEST(int8, a_row_of_its_own_scale_comes_back_within_half_of_it) {
  for (const float largest : {1e-30F, 0.37F, 5.0F, 3e30F}) {
    const float scale = index::row_scale(largest, largest_8bit(DType::i8));
    for (int32_t i = -1000; i <= 1000; ++i) {
      const float value = largest * static_cast<float>(i) / 1000;
      const float back = static_cast<float>(int8_from_f32(value / scale)) * scale;
      ASSERT_LE(std::fabs(back - value), scale * 0.50001F) << value << " of " << largest;
    }
  }
}

}  // namespace
}  // namespace qkv
