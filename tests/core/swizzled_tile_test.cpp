// Tiles lie in shared memory as the copy engine lays them down.
#include "core/index/swizzled_tile.hpp"

#include <gtest/gtest.h>

#include <set>

namespace qkv::index {
namespace {

// CUDA's rule for a swizzle of `chunk` bytes: bits of the address from 2^4 on, as many as choose a unit of the chunk,
// are exchanged by those from 2^7 on.
int engine_address(int address, int chunk) { return address ^ ((address >> 7) % (chunk / 16) << 4); }

template <int kRowBytes, int kRows>
void expect_engine_layout() {
  using Tile = SwizzledTile<kRowBytes, kRows>;
  constexpr int kUnits = Tile::kChunk / 16;
  for (int row = 0; row < kRows; ++row) {
    for (int unit = 0; unit < kRowBytes / 16; ++unit) {
      const int dense = unit / kUnits * kRows * Tile::kChunk + row * Tile::kChunk + unit % kUnits * 16;
      ASSERT_EQ(Tile::offset(row, unit), engine_address(dense, Tile::kChunk)) << kRowBytes << " " << row << " " << unit;
    }
  }
}

template <int kRowBytes, int kRows>
void expect_pairs_from_one_offset() {
  using Tile = SwizzledTile<kRowBytes, kRows>;
  for (const unsigned begin : {0U, 1024U, 7U * 1024}) {
    for (int row = 0; row < kRows; ++row) {
      for (int unit = 0; unit < kRowBytes / 16; ++unit) {
        ASSERT_EQ(Tile::address(begin + Tile::offset(row, unit % 2), unit / 2), begin + Tile::offset(row, unit));
      }
    }
  }
}

template <int kRowBytes, int kRows>
void expect_no_bank_conflicts() {
  using Tile = SwizzledTile<kRowBytes, kRows>;
  for (int first = 0; first < kRows; first += 8) {
    for (int unit = 0; unit < kRowBytes / 16; ++unit) {
      std::set<int> banks;
      for (int row = first; row < first + 8; ++row) banks.insert(Tile::offset(row, unit) % 128);
      ASSERT_EQ(banks.size(), 8U) << kRowBytes;
    }
  }
}

template <int... kSteps>
void for_each_row_bytes(std::integer_sequence<int, kSteps...>) {
  (expect_engine_layout<(kSteps + 1) * 16, 16>(), ...);
  (expect_pairs_from_one_offset<(kSteps + 1) * 16, 16>(), ...);
  (expect_no_bank_conflicts<(kSteps + 1) * 16, 16>(), ...);
}

TEST(swizzled_tile, lies_as_the_copy_engine_writes_it_and_is_read_without_conflicts) {
  for_each_row_bytes(std::make_integer_sequence<int, 32>());  // rows of 16 … 512 bytes
}

TEST(swizzled_tile, chunks_are_the_widest_that_divide_a_row) {
  EXPECT_EQ(chunk_bytes(256), 128);
  EXPECT_EQ(chunk_bytes(192), 64);
  EXPECT_EQ(chunk_bytes(96), 32);
  EXPECT_EQ(chunk_bytes(80), 16);
}

}  // namespace
}  // namespace qkv::index
