// The few-rows kernel's products, replayed: tiles as the copy engine writes them, ldmatrix and mma.m16n8k16 by their
// definitions in the PTX manual, and between them the lanes' own arithmetic.
#include "core/index/few_rows_fragments.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/index/swizzled_tile.hpp"

namespace qkv::index::few_rows {
namespace {

constexpr int kLanes = 32;
constexpr int kKeys = 16;
constexpr int kRows = 8;
using Words = std::array<uint32_t, 4>;
using Operand = std::array<double, 2>;  // of a register

// Elements are small whole numbers, told apart by their bits: sums are exact, whatever their order.
using Matrix = std::vector<std::vector<int>>;

Matrix random_matrix(int rows, int columns, int seed) {
  std::mt19937 random(seed);
  Matrix matrix(rows, std::vector<int>(columns));
  for (auto& row : matrix) {
    for (int& element : row) element = static_cast<int>(random() % 251);
  }
  return matrix;
}

template <int kElementBytes, int kDim>
struct Memory {
  using Tile = SwizzledTile<kDim * kElementBytes, kKeys>;
  std::vector<uint8_t> bytes;

  explicit Memory(const Matrix& matrix) : bytes(Tile::kBytes + Tile::kColumnBytes, 0xEE) {
    for (int key = 0; key < kKeys; ++key) {
      for (int dim = 0; dim < kDim; ++dim) {
        const int byte = dim * kElementBytes;
        std::memcpy(&bytes[Tile::offset(key, byte / 16) + byte % 16], &matrix[key][dim], kElementBytes);
      }
    }
  }
  uint32_t word(unsigned address) const {
    uint32_t word = 0;
    std::memcpy(&word, &bytes.at(address), 4);
    return word;
  }
  uint16_t half(unsigned address) const { return static_cast<uint16_t>(word(address & ~3U) >> (address & 2) * 8); }
};

template <typename Memory, typename AddressOf>
std::array<Words, kLanes> ldmatrix_x4(const Memory& memory, bool transposed, AddressOf address_of) {
  std::array<Words, kLanes> loaded{};
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const auto row_address = [&](int row) { return address_of(8 * i + row); };
      if (!transposed) {
        loaded[lane][i] = memory.word(row_address(lane / 4) + lane % 4 * 4);
      } else {
        const int row = lane % 4 * 2;
        loaded[lane][i] = memory.half(row_address(row) + lane / 4 * 2) |
                          static_cast<uint32_t>(memory.half(row_address(row + 1) + lane / 4 * 2)) << 16;
      }
    }
  }
  return loaded;
}

uint32_t byte_perm(uint32_t word, unsigned selector) {
  uint32_t permuted = 0;
  for (int i = 0; i < 4; ++i) permuted |= (word >> (selector >> 4 * i & 3) * 8 & 0xFF) << 8 * i;
  return permuted;
}

// What the widened or the 16-bit elements of register r are.
Operand operand_of(int element_bytes, bool is_value, const Words& words, int step, int r) {
  if (element_bytes == 2) return {static_cast<double>(words[r] & 0xFFFF), static_cast<double>(words[r] >> 16)};
  const BytePair from = is_value ? value_register(step, r) : key_register(step, r);
  const uint32_t word = is_value ? byte_perm(words[from.word], kValueByteOrder) : words[from.word];
  const uint32_t pair = word >> 16 * from.pair;
  return {static_cast<double>(pair & 0xFF), static_cast<double>(pair >> 8 & 0xFF)};
}

struct Mma {
  double c[16][8] = {};

  // a[lane][4 registers], b[lane][2 registers]
  void add(const std::array<std::array<Operand, 4>, kLanes>& a, const std::array<std::array<Operand, 2>, kLanes>& b) {
    double matrix_a[16][16];
    double matrix_b[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int e = 0; e < 2; ++e) {
        for (int r = 0; r < 4; ++r) matrix_a[lane / 4 + r % 2 * 8][lane % 4 * 2 + e + r / 2 * 8] = a[lane][r][e];
        for (int r = 0; r < 2; ++r) matrix_b[lane % 4 * 2 + e + r * 8][lane / 4] = b[lane][r][e];
      }
    }
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        for (int k = 0; k < 16; ++k) c[m][n] += matrix_a[m][k] * matrix_b[k][n];
      }
    }
  }
  double element(int lane, int i) const { return c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; }
};

template <int kElementBytes, bool kIsValue>
std::array<std::array<Operand, 4>, kLanes> a_of(const std::array<Words, kLanes>& loaded, int step) {
  std::array<std::array<Operand, 4>, kLanes> a;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int r = 0; r < 4; ++r) a[lane][r] = operand_of(kElementBytes, kIsValue, loaded[lane], step, r);
  }
  return a;
}

template <int kElementBytes, int kDim>
void expect_scores() {
  const Matrix keys = random_matrix(kKeys, kDim, kDim);
  const Matrix queries = random_matrix(kRows, kDim, kDim + 1);
  const Memory<kElementBytes, kDim> memory(keys);
  using Tile = typename Memory<kElementBytes, kDim>::Tile;
  Mma scores;
  for (int step = 0; step < kDim / 16; ++step) {
    const int load = step / steps_of_load(kElementBytes);
    const auto loaded = ldmatrix_x4(memory, false, [&](int lane) {
      const LoadRow row = key_load_row(lane);
      return Tile::address(Tile::offset(row.key, row.unit), load);
    });
    std::array<std::array<Operand, 2>, kLanes> b;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < 2; ++r) {
        const int dim = 16 * step + 2 * query_word(kElementBytes, lane, r);
        const auto& row = queries[lane / 4];
        b[lane][r] = {static_cast<double>(row[dim]), static_cast<double>(row[dim + 1])};
      }
    }
    scores.add(a_of<kElementBytes, false>(loaded, step % steps_of_load(kElementBytes)), b);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      double expected = 0;
      for (int d = 0; d < kDim; ++d) {
        expected += static_cast<double>(keys[lane / 4 + i / 2 * 8][d]) * queries[lane % 4 * 2 + i % 2][d];
      }
      ASSERT_EQ(scores.element(lane, i), expected) << kElementBytes << " bytes, dim " << kDim << ", lane " << lane;
    }
  }
}

template <int kElementBytes, int kDim>
void expect_outputs() {
  const Matrix values = random_matrix(kKeys, kDim, kDim + 2);
  const Matrix weights = random_matrix(kRows, kKeys, kDim + 3);
  const Memory<kElementBytes, kDim> memory(values);
  using Tile = typename Memory<kElementBytes, kDim>::Tile;
  std::array<std::array<Operand, 2>, kLanes> b;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int r = 0; r < 2; ++r) {
      const auto& row = weights[lane / 4];
      const int key = lane % 4 * 2 + r * 8;
      b[lane][r] = {static_cast<double>(row[key]), static_cast<double>(row[key + 1])};
    }
  }
  for (int m = 0; m < kDim / 16; ++m) {
    const auto loaded = ldmatrix_x4(memory, true, [&](int lane) {
      const LoadRow row = value_load_row(kElementBytes, lane);
      return Tile::address(Tile::offset(row.key, row.unit), m / steps_of_load(kElementBytes));
    });
    Mma out;
    out.add(a_of<kElementBytes, true>(loaded, m % steps_of_load(kElementBytes)), b);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int dim = 16 * m + value_dim(kElementBytes, lane, i / 2);
        double expected = 0;
        for (int key = 0; key < kKeys; ++key) {
          expected += static_cast<double>(values[key][dim]) * weights[lane % 4 * 2 + i % 2][key];
        }
        ASSERT_EQ(out.element(lane, i), expected) << kElementBytes << " bytes, dim " << kDim << ", lane " << lane;
        // Repairs of single values find the element by its place.
        const ValuePlace place = value_place(kElementBytes, lane, i / 2);
        const int unit = m * kElementBytes + place.unit;
        int element = 0;
        std::memcpy(&element, &memory.bytes[Tile::offset(3, unit) + place.element * kElementBytes], kElementBytes);
        ASSERT_EQ(element, values[3][dim]);
      }
    }
  }
}

template <int... kSteps>
void for_each_dim(std::integer_sequence<int, kSteps...>) {
  (expect_scores<1, (kSteps + 1) * 16>(), ...);
  (expect_scores<2, (kSteps + 1) * 16>(), ...);
  (expect_outputs<1, (kSteps + 1) * 16>(), ...);
  (expect_outputs<2, (kSteps + 1) * 16>(), ...);
}

TEST(few_rows_fragments, products_are_those_of_keys_and_queries_and_of_values_and_weights) {
  for_each_dim(std::make_integer_sequence<int, 16>());
}

// ldmatrix gives register r of a lane word lane%4 of unit r.
TEST(few_rows_fragments, queries_in_shared_memory_are_ordered_as_those_in_registers) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int r = 0; r < 2; ++r) EXPECT_EQ(query_word_of_unit(r, lane % 4), query_word(1, lane, r));
  }
}

float f32_of_bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

TEST(few_rows_fragments, a_row_of_queries_fits_f16_and_its_power_is_taken_back_exactly) {
  for (unsigned largest = 0; largest < 0x8000; ++largest) {
    const float power = std::bit_cast<float>(query_power_bits(largest));
    const float inverse = std::bit_cast<float>(inverse_power_bits(query_power_bits(largest)));
    EXPECT_TRUE(std::isnormal(power) && std::isnormal(inverse)) << largest;
    EXPECT_EQ(power * inverse, 1.0F) << largest;
    const float magnitude = f32_of_bf16(largest);
    if (!std::isfinite(magnitude)) continue;
    const float scaled = magnitude * power;
    EXPECT_EQ(scaled * inverse, magnitude);
    EXPECT_LT(scaled, 0x1p15F);
    if (magnitude >= 0x1p-112F) EXPECT_GE(scaled, 0x1p14F);
    // All 8 bits of an element 2^-31 as large are multiples of f16's smallest number.
    if (magnitude >= 0x1p-112F) EXPECT_EQ(std::fmod(scaled * 0x1p-31F, 0x1p-24F), 0.0F) << largest;
  }
}

TEST(few_rows_fragments, unit_of_scales_is_the_largest_power_of_two_that_is_not_above) {
  for (const float largest : {1.0F, 1.5F, 0.01F, 448.0F, 1e-30F, 3e37F}) {
    const float unit = std::bit_cast<float>(scale_unit_bits(std::bit_cast<unsigned>(largest)));
    EXPECT_LE(unit, largest);
    EXPECT_GT(2 * unit, largest);
    EXPECT_EQ(std::bit_cast<float>(inverse_power_bits(scale_unit_bits(std::bit_cast<unsigned>(largest)))) * unit, 1.0F);
  }
  for (const float extreme : {0.0F, 1e-45F, 3.4e38F, INFINITY}) {
    const unsigned unit = scale_unit_bits(std::bit_cast<unsigned>(extreme));
    EXPECT_TRUE(std::isnormal(std::bit_cast<float>(unit)));
    EXPECT_TRUE(std::isnormal(std::bit_cast<float>(inverse_power_bits(unit))));
  }
}

}  // namespace
}  // namespace qkv::index::few_rows
