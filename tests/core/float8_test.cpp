#include "core/float8.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace qkv {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The formats' definition: sign · mantissa · 2^exponent, by arithmetic on doubles.
double by_definition(DType dtype, int32_t code) {
  const int32_t mantissa_bits = dtype == DType::f8e4m3 ? 3 : 2;
  const int32_t bias = dtype == DType::f8e4m3 ? 7 : 15;
  const int32_t exponent = code % 128 >> mantissa_bits;
  const int32_t mantissa = code % (1 << mantissa_bits);
  const double sign = code < 128 ? 1 : -1;
  if (dtype == DType::f8e4m3 && code % 128 == 127) return NAN;
  if (dtype == DType::f8e5m2 && exponent == 31) return mantissa == 0 ? sign * kInfinity : NAN;
  const int32_t leading = exponent == 0 ? 0 : 1 << mantissa_bits;
  return sign * std::ldexp(leading + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
}

class float8 : public ::testing::TestWithParam<DType> {};

TEST_P(float8, every_code_has_the_value_of_its_definition) {
  for (int32_t code = 0; code < 256; ++code) {
    const float value = f32_from_float8(GetParam(), static_cast<uint8_t>(code));
    const double expected = by_definition(GetParam(), code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(value, expected) << code;
      EXPECT_EQ(std::signbit(value), code >= 128) << code;
    }
  }
}

TEST_P(float8, a_round_trip_keeps_every_number) {
  for (int32_t code = 0; code < 256; ++code) {
    const float value = f32_from_float8(GetParam(), static_cast<uint8_t>(code));
    const int32_t back = float8_from_f32(GetParam(), value);
    if (std::isnan(value)) {
      EXPECT_EQ(back, 0x7F) << code;
    } else if (std::isfinite(value)) {
      EXPECT_EQ(back, code);
    }
  }
}

// All f32 numbers of 16 significant bits or fewer, and their neighbours: every tie of both formats is among them.
TEST_P(float8, rounds_to_nearest_even) {
  const auto limit = static_cast<uint8_t>(float8_format(GetParam()).largest);
  std::vector<double> numbers;
  for (int32_t code = 0; code <= limit; ++code) numbers.push_back(by_definition(GetParam(), code));
  size_t below = 0;
  for (uint32_t high = 0; high < 0x7F80; ++high) {
    for (const uint32_t bits : {high << 16, (high << 16) + 1, (high << 16) + 0xFFFF}) {
      const auto value = std::bit_cast<float>(bits);
      while (below + 1 < numbers.size() && numbers[below + 1] <= value) ++below;
      size_t nearest = below;
      if (below + 1 < numbers.size()) {
        const double middle = (numbers[below] + numbers[below + 1]) / 2;
        if (value > middle || (value == middle && below % 2 == 1)) nearest = below + 1;
      }
      ASSERT_EQ(float8_from_f32(GetParam(), value), nearest) << value;
      ASSERT_EQ(float8_from_f32(GetParam(), -value), nearest | 0x80) << value;
    }
  }
}

TEST_P(float8, what_is_too_large_saturates_and_nan_stays) {
  const float largest = largest_float8(GetParam());
  EXPECT_EQ(largest, GetParam() == DType::f8e4m3 ? 448.0F : 57344.0F);
  for (const float value : {largest, largest * 1.01F, 1e30F, kInfinity}) {
    EXPECT_EQ(f32_from_float8(GetParam(), float8_from_f32(GetParam(), value)), largest);
    EXPECT_EQ(f32_from_float8(GetParam(), float8_from_f32(GetParam(), -value)), -largest);
  }
  EXPECT_EQ(float8_from_f32(GetParam(), NAN), 0x7F);
  EXPECT_EQ(float8_from_f32(GetParam(), -NAN), 0x7F);
}

INSTANTIATE_TEST_SUITE_P(formats, float8, ::testing::Values(DType::f8e4m3, DType::f8e5m2),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace qkv
