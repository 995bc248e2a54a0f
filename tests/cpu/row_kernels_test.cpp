// The row kernels of every instruction set against the plain definition, bit for bit.
#include "cpu/row_kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/float16.hpp"
#include "cpu/kernels.hpp"

namespace qkv::cpu {
namespace {

constexpr DType kFormats[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2, DType::i8};
constexpr std::byte kGuard{0xA5};
constexpr int64_t kGuardBytes = 64;

using Bytes = std::vector<std::byte>;

Bytes row_of(const std::vector<uint32_t>& f32_bits) {
  Bytes row(f32_bits.size() * sizeof(uint32_t));
  std::memcpy(row.data(), f32_bits.data(), row.size());
  return row;
}

// Every number of the 8- and 16-bit formats. Of f32: all exponents and signs with mantissas about every border of
// rounding, and random bits.
Bytes all_elements(DType dtype) {
  if (dtype != DType::f32) {
    Bytes row;
    const int32_t size = size_bytes(dtype);
    for (uint32_t code = 0; code < 1U << 8 * size; ++code) {
      for (int32_t byte = 0; byte < size; ++byte) row.push_back(std::byte{static_cast<uint8_t>(code >> 8 * byte)});
    }
    return row;
  }
  std::vector<uint32_t> bits;
  for (uint32_t upper = 0; upper < 1U << 16; ++upper) {
    for (const uint32_t lower : {0x0000U, 0x0001U, 0x0FFFU, 0x1000U, 0x1001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      bits.push_back(upper << 16 | lower);
    }
  }
  std::mt19937 random(3);
  for (int32_t i = 0; i < 1 << 16; ++i) bits.push_back(static_cast<uint32_t>(random()));
  return row_of(bits);
}

// Numbers of all sizes that the format has, without NaN and infinities in one row of two.
Bytes random_elements(DType dtype, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes row(count * size_bytes(dtype));
  for (int64_t i = 0; i < count; ++i) {
    std::byte* element = row.data() + i * size_bytes(dtype);
    do {
      for (int32_t byte = 0; byte < size_bytes(dtype); ++byte)
        element[byte] = std::byte{static_cast<uint8_t>(random())};
    } while (seed % 2 == 0 && !std::isfinite(load_f32(element, dtype)));
  }
  return row;
}

Bytes converted(const RowKernels& kernels, const RowConversion& conversion, const std::byte* row, int64_t count) {
  Bytes target(count * size_bytes(conversion.to) + kGuardBytes, kGuard);
  kernels.convert(conversion, row, count, target.data());
  return target;
}

std::string describe(std::string_view set, const RowConversion& conversion) {
  return std::string(set) + " " + std::string(to_string(conversion.from)) + " to " +
         std::string(to_string(conversion.to)) + (conversion.scaling == Scaling::divided ? " / " : " * ") +
         std::to_string(conversion.scale);
}

void expect_plain_bits(const RowConversion& conversion, const Bytes& row) {
  const int64_t count = static_cast<int64_t>(row.size()) / size_bytes(conversion.from);
  const Bytes expected = converted(kPlainRowKernels, conversion, row.data(), count);
  for (const ForwardKernels& set : all_forward_kernels()) {
    const Bytes actual = converted(*set.rows, conversion, row.data(), count);
    if (actual == expected) continue;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t size = size_bytes(conversion.to);
      ASSERT_EQ(std::memcmp(actual.data() + i * size, expected.data() + i * size, size), 0)
          << describe(set.name, conversion) << ": element " << i << ", "
          << load_f32(row.data() + i * size_bytes(conversion.from), conversion.from) << ", becomes "
          << load_f32(actual.data() + i * size, conversion.to) << ", not "
          << load_f32(expected.data() + i * size, conversion.to);
    }
    FAIL() << describe(set.name, conversion) << " writes behind the row";
  }
}

TEST(row_kernels, every_conversion_has_the_plain_bits) {
  for (const DType from : kFormats) {
    const Bytes row = all_elements(from);
    for (const DType to : kFormats) {
      expect_plain_bits({from, to}, row);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(row_kernels, scales_of_every_size_have_the_plain_bits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float scale : {0.37F, 3.0F, 0x1p-126F, 0x1p-149F, 0x1.8p100F, 0x1p127F, 0.0F, kInfinity, -1.5F}) {
    for (const DType from : kFormats) {
      const Bytes row = all_elements(from);
      for (const DType to : kFormats) {
        expect_plain_bits({from, to, Scaling::divided, scale}, row);
        expect_plain_bits({from, to, Scaling::multiplied, scale}, row);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// What the conversions are, told without the scalar ones: so that both cannot be wrong alike.
TEST(row_kernels, numbers_come_back_saturate_and_tie_to_even) {
  struct Example {
    DType to;
    float value;
    float stored;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto& [to, value, stored] : std::vector<Example>{{DType::f8e4m3, 1e9F, 448},
                                                              {DType::f8e4m3, -kInfinity, -448},
                                                              {DType::f8e4m3, 0x1.1p0F, 1},
                                                              {DType::f8e4m3, 0x1.3p0F, 1.25F},
                                                              {DType::f8e4m3, 0x1p-10F, 0},
                                                              {DType::f8e4m3, 0x1.8p-9F, 0x1p-8F},
                                                              {DType::f8e5m2, kInfinity, 57344},
                                                              {DType::f8e5m2, 0x1p-17F, 0},
                                                              {DType::i8, 2.5F, 2},
                                                              {DType::i8, -3.5F, -4},
                                                              {DType::i8, 1e9F, 127},
                                                              {DType::i8, -kInfinity, -128},
                                                              {DType::f16, 65519, 65504},
                                                              {DType::f16, 65520, kInfinity},
                                                              {DType::f16, 0x1p-25F, 0},
                                                              {DType::f16, 0x1.8p-24F, 0x1p-23F},
                                                              {DType::bf16, 0x1.01p0F, 1},
                                                              {DType::bf16, 0x1.03p0F, 0x1.04p0F}}) {
    for (const ForwardKernels& set : all_forward_kernels()) {
      const auto* row = reinterpret_cast<const std::byte*>(&value);
      const Bytes target = converted(*set.rows, {DType::f32, to}, row, 1);
      EXPECT_EQ(load_f32(target.data(), to), stored) << set.name << " " << to_string(to) << " of " << value;
    }
  }
}

TEST(row_kernels, rows_of_every_length_at_any_address_are_converted_alone) {
  for (const DType from : kFormats) {
    const int64_t size = size_bytes(from);
    for (const DType to : kFormats) {
      for (int64_t count = 0; count < 300; count += count < 70 ? 1 : 37) {
        // At the end of its memory, which AddressSanitizer watches, and at an odd element.
        const Bytes row = random_elements(from, count + 1, static_cast<uint32_t>(count));
        const Bytes alone(row.begin() + size, row.end());
        for (const ForwardKernels& set : all_forward_kernels()) {
          const RowConversion conversion{from, to, Scaling::multiplied, 0.3F};
          ASSERT_EQ(converted(*set.rows, conversion, row.data() + size, count),
                    converted(kPlainRowKernels, conversion, alone.data(), count))
              << describe(set.name, conversion) << ", " << count << " elements";
        }
      }
    }
  }
}

TEST(row_kernels, largest_magnitudes_skip_what_is_not_finite) {
  for (const DType dtype : kFormats) {
    for (int64_t count = 0; count < 300; count += count < 70 ? 1 : 37) {
      const Bytes row = random_elements(dtype, count, static_cast<uint32_t>(count) + 7);
      for (const ForwardKernels& set : all_forward_kernels()) {
        ASSERT_EQ(set.rows->largest_magnitude(dtype, row.data(), count),
                  kPlainRowKernels.largest_magnitude(dtype, row.data(), count))
            << set.name << " " << to_string(dtype) << ", " << count << " elements";
      }
    }
  }
  const std::vector<uint32_t> nothing_finite = {0x7F800000, 0xFF800000, 0x7FC00000};
  for (const ForwardKernels& set : all_forward_kernels()) {
    EXPECT_EQ(set.rows->largest_magnitude(DType::f32, row_of(nothing_finite).data(), 3), 0) << set.name;
  }
}

// A fused multiply-add would leave other bits on CPUs that have one.
TEST(row_kernels, weighted_sums_have_the_plain_bits) {
  for (const DType dtype : kFormats) {
    for (int64_t count = 0; count < 300; count += count < 70 ? 1 : 37) {
      const Bytes row = random_elements(dtype, count, 2 * static_cast<uint32_t>(count));
      std::vector<float> start(count + 16, 1.1F);
      for (int64_t i = 0; i < count; ++i) start[i] = 0.7F * load_f32(row.data() + i * size_bytes(dtype), dtype) + 0.1F;
      std::vector<float> expected = start;
      kPlainRowKernels.add_weighted(dtype, row.data(), 0.317F, count, expected.data());
      for (const ForwardKernels& set : all_forward_kernels()) {
        std::vector<float> sum = start;
        set.rows->add_weighted(dtype, row.data(), 0.317F, count, sum.data());
        for (size_t i = 0; i < sum.size(); ++i) {
          ASSERT_EQ(std::bit_cast<uint32_t>(sum[i]), std::bit_cast<uint32_t>(expected[i]))
              << set.name << " " << to_string(dtype) << ", element " << i << " of " << count;
        }
      }
    }
  }
}

}  // namespace
}  // namespace qkv::cpu
