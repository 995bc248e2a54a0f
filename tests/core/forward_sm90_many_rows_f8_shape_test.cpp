#include "core/index/forward_sm90_many_rows_f8_shape.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace qkv::index {
namespace {

constexpr int kHeadSizes[] = {64, 128, 256};
constexpr std::pair<int, bool> kKinds[] = {{64, false}, {128, false}, {256, false},
                                           {64, true},  {128, true},  {256, true}};
constexpr int kSharedBytes = 232448;  // of a CTA on sm_90

TEST(many_rows_f8_shape, fits_registers_and_shared_memory) {
  for (const auto& [dim, keeps_more] : kKinds) {
    const ManyRowsShape shape = many_rows_f8_shape(dim, dim, keeps_more);
    const int chunk_columns = many_rows_f8_chunk_columns(dim);
    const int product = chunk_columns == shape.tile_kv ? 0 : chunk_columns / 2;  // else in the scores' registers
    const int weights = many_rows_f8_weights_in_registers(dim) ? shape.tile_kv / 8 : 0;
    const int matrices = dim / 2 + shape.tile_kv / 2 + product + weights;
    EXPECT_LE(matrices, (shape.consumers == 3 ? 152 : 232) - 24) << dim;
    EXPECT_EQ(dim % chunk_columns, 0);
    EXPECT_EQ(shape.tile_kv % 32, 0);
    EXPECT_LE(many_rows_f8_layout(shape, dim, dim).bytes, kSharedBytes) << dim;
  }
}

TEST(many_rows_f8_layout, regions_follow_one_another_on_swizzle_boundaries) {
  for (const auto& [dim, keeps_more] : kKinds) {
    const ManyRowsShape shape = many_rows_f8_shape(dim, dim, keeps_more);
    const ManyRowsF8Layout layout = many_rows_f8_layout(shape, dim, dim);
    EXPECT_EQ(layout.key_begin, shape.query_slots * shape.consumers * 64 * dim);
    EXPECT_EQ(layout.loaded_value_begin - layout.key_begin, 2 * shape.tile_kv * dim);
    EXPECT_EQ(layout.value_begin - layout.loaded_value_begin, 2 * shape.tile_kv * dim);
    EXPECT_EQ(layout.weight_begin - layout.value_begin, many_rows_f8_turned_stages(dim) * shape.tile_kv * dim);
    const int weights = many_rows_f8_weights_in_registers(dim) ? 0 : shape.consumers * 64 * shape.tile_kv;
    EXPECT_EQ(layout.control_begin - layout.weight_begin, weights);
    EXPECT_EQ(layout.bytes - layout.control_begin, kManyRowsControlBytes);
    const int block_bytes = 2 * many_rows_block_columns(many_rows_f8_units(dim));
    for (const int bytes : {layout.key_begin, layout.loaded_value_begin, layout.value_begin, layout.weight_begin,
                            shape.tile_kv * dim, 64 * block_bytes, shape.tile_kv * block_bytes, 16 * block_bytes,
                            64 * shape.tile_kv, many_rows_f8_chunk_columns(dim) * shape.tile_kv}) {
      EXPECT_EQ(bytes % 1024, 0) << dim << " " << bytes;
    }
  }
}

TEST(many_rows_f8_supports, tuned_head_sizes_and_pages_of_sixteen) {
  EXPECT_TRUE(many_rows_f8_supports(128, 128, 16));
  EXPECT_TRUE(many_rows_f8_supports(256, 256, 48));
  EXPECT_TRUE(many_rows_f8_supports(64, 64, 0));
  EXPECT_FALSE(many_rows_f8_supports(128, 128, 8));
  EXPECT_FALSE(many_rows_f8_supports(96, 96, 16));
  EXPECT_FALSE(many_rows_f8_supports(192, 128, 16));
  EXPECT_FALSE(many_rows_f8_supports(256, 128, 16));
}

// --- the PTX manual's fragments, written down apart from the code under test ---

// m64nNk32 accumulators: the key (column) of element i of a lane.
int key_of_score(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

// Operand A of k = 32, 8 bits: k of byte b of register x of a lane; its row is lane/4, and 8 more in odd registers.
int place_of_weight(int lane, int x, int b) { return 16 * (x / 2) + 4 * (lane % 4) + b; }

// The kernel packs scores 8·g + 2·r + {0, 1, 4, 5} of sixteen keys g and row r into register 2·g + r.
TEST(key_of_place, is_the_key_whose_score_becomes_that_weight) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 128 / 8; ++i) {
      for (int b = 0; b < 4; ++b) {
        const int element = i / 2 * 8 + i % 2 * 2 + std::array{0, 1, 4, 5}[b];
        const int place = i / 4 * 32 + place_of_weight(lane, i % 4, b);
        EXPECT_EQ(key_of_place(place), key_of_score(lane, element)) << lane << " " << i << " " << b;
        EXPECT_EQ(element / 2 % 2, i % 2);  // the row's half
      }
    }
  }
  std::set<int> keys;
  for (int place = 0; place < 128; ++place) keys.insert(key_of_place(place));
  EXPECT_EQ(keys.size(), 128U);
  EXPECT_EQ(*keys.rbegin(), 127);
}

// Weights on their way to operand A in shared memory: rows of places, swizzled by address bits. Four registers of a
// lane at once, as the kernel stores them: matrix i of a stmatrix has the rows 8·(i % 2) … of the keys 16·(i / 2) ….
TEST(weight_offset, every_weight_is_stored_at_its_row_and_place) {
  for (const int tile_kv : {64, 128}) {
    std::vector<int> stored(64 * tile_kv, -1);  // row·tile_kv + key
    for (int warp = 0; warp < 4; ++warp) {
      for (int i = 0; i < tile_kv / 32; ++i) {
        for (int lane = 0; lane < 32; ++lane) {
          const int matrix = lane / 8, row = lane % 8;
          const int address = weight_offset(warp * 16 + lane % 16, 2 * i + lane / 16, tile_kv);
          EXPECT_EQ(address % 16, 0);
          for (int b = 0; b < 16; ++b) {
            const int holder = row * 4 + b / 4, of_register = 4 * i + matrix;
            const int element = of_register / 2 * 8 + of_register % 2 * 2 + std::array{0, 1, 4, 5}[b % 4];
            const int row_of_tile = warp * 16 + holder / 4 + 8 * (element / 2 % 2);
            stored[address + b] = row_of_tile * tile_kv + key_of_score(holder, element);
          }
        }
      }
    }
    for (int row = 0; row < 64; ++row) {
      for (int place = 0; place < tile_kv; ++place) {
        const int plain = row * tile_kv + place;
        const int address = plain ^ ((plain >> 7 & (tile_kv / 16 - 1)) << 4);
        ASSERT_EQ(stored[address], row * tile_kv + key_of_place(place)) << tile_kv;
      }
    }
  }
}

// A stage of values as the boxes bring it, each byte a number of its own, turned by lanes as in tile/turn_values.cuh;
// then read as the products do.
void expect_turned(int dim, int tile_kv, int box_rows) {
  std::vector<int> loaded(tile_kv * dim, -1);  // key·dim + column
  const int block_columns = 2 * many_rows_block_columns(many_rows_f8_units(dim));
  for (int box = 0; box < tile_kv / box_rows; ++box) {  // [box][block][row], swizzled by address bits
    for (int block = 0; block < dim / block_columns; ++block) {
      for (int row = 0; row < box_rows; ++row) {
        for (int c = 0; c < block_columns; ++c) {
          const int plain = ((box * (dim / block_columns) + block) * box_rows + row) * block_columns + c;
          const int address = plain ^ ((plain >> 7 & (block_columns / 16 - 1)) << 4);
          loaded[address] = (box * box_rows + row) * dim + block * block_columns + c;
        }
      }
    }
  }
  std::vector<int> turned(tile_kv * dim, -1);
  std::set<int> read;
  for (int group = 0; group < tile_kv / 32; ++group) {
    for (int chunk = 0; chunk < dim / 16; ++chunk) {
      // [matrix][row][byte]: row r of matrix i at the address of lane 8·i + r
      std::array<std::array<std::array<int, 16>, 8>, 4> in{};
      for (int lane = 0; lane < 32; ++lane) {
        const int address = loaded_chunk_offset(group * 32 + lane, chunk, box_rows, dim);
        EXPECT_EQ(address % 16, 0);
        EXPECT_EQ(further_loaded_chunk(loaded_chunk_offset(lane, chunk % 2, box_rows, dim), group * 32, chunk / 2 * 32,
                                       box_rows, dim),
                  static_cast<unsigned>(address));
        read.insert(address);
        for (int b = 0; b < 16; ++b) in[lane / 8][lane % 8][b] = loaded[address + b];
      }
      const auto trans = [&](int matrix, int lane, int b) {
        return in[matrix][2 * (lane % 4) + b / 2][2 * (lane / 4) + b % 2];
      };
      // What each lane holds for stmatrix: prmt picks bytes of the registers of two matrices.
      std::array<std::array<std::array<int, 4>, 32>, 4> out{};
      for (int lane = 0; lane < 32; ++lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          const unsigned selector = turned_bytes(matrix, lane / 4);
          for (int b = 0; b < 4; ++b) {
            const int byte = static_cast<int>(selector >> (4 * b) & 0xF);
            out[matrix][lane][b] = trans(matrix / 2 * 2 + byte / 4, lane, byte % 4);
          }
        }
      }
      for (int lane = 0; lane < 32; ++lane) {  // the address of row lane%8 of matrix lane/8
        const int matrix = lane / 8, row = lane % 8;
        const int address =
            turned_value_offset(chunk * 16 + turned_column(matrix, row), group * 2 + matrix / 2, tile_kv);
        EXPECT_EQ(
            further_turned_value(turned_value_offset(chunk % 2 * 16 + turned_column(matrix, row), matrix / 2, tile_kv),
                                 group * 32, chunk / 2 * 32, tile_kv),
            static_cast<unsigned>(address));
        for (int b = 0; b < 16; ++b) turned[address + b] = out[matrix][row * 4 + b / 4][b % 4];
      }
      // The rows of one matrix lie in different banks.
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::set<int> stored, fetched;
        for (int row = 0; row < 8; ++row) {
          stored.insert(turned_value_offset(chunk * 16 + turned_column(matrix, row), group * 2 + matrix / 2, tile_kv) %
                        128);
          fetched.insert(loaded_chunk_offset(group * 32 + matrix * 8 + row, chunk, box_rows, dim) % 128);
        }
        EXPECT_EQ(stored.size(), 8U);
        EXPECT_EQ(fetched.size(), 8U);
      }
    }
  }
  EXPECT_EQ(read.size(), static_cast<size_t>(tile_kv) * dim / 16);
  for (int column = 0; column < dim; ++column) {  // operand B: rows of columns, swizzled by address bits
    for (int place = 0; place < tile_kv; ++place) {
      const int plain = column * tile_kv + place;
      const int address = plain ^ ((plain >> 7 & (tile_kv / 16 - 1)) << 4);
      ASSERT_EQ(turned[address], key_of_place(place) * dim + column) << dim << " " << tile_kv << " " << box_rows;
    }
  }
}

TEST(turned_values, every_weight_meets_the_value_of_its_key) {
  for (const int dim : kHeadSizes) {
    for (const int tile_kv : {64, 128}) {
      for (int box_rows = 16; box_rows <= tile_kv; box_rows *= 2) expect_turned(dim, tile_kv, box_rows);
    }
  }
}

TEST(turned_values, selectors_of_a_pair_of_matrices_differ_in_the_lowest_bits) {
  for (int row = 0; row < 8; ++row) {
    EXPECT_EQ(turned_bytes(0, row) ^ 0x1111U, turned_bytes(1, row));
    EXPECT_EQ(turned_bytes(0, row), turned_bytes(2, row));
    EXPECT_EQ(turned_bytes(1, row), turned_bytes(3, row));
  }
}

}  // namespace
}  // namespace qkv::index
