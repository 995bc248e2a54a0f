#include "core/index/forward_sm90_many_rows_shape.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace qkv::index {
namespace {

constexpr std::pair<int, int> kHeadSizes[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
constexpr int kSharedBytes = 232448;  // of a CTA on sm_90

TEST(many_rows_shape, fits_registers_and_shared_memory) {
  for (const auto& [head_dim, head_dim_v] : kHeadSizes) {
    const ManyRowsShape shape = many_rows_shape(head_dim, head_dim_v);
    const int registers = shape.consumers == 2 ? 232 : 160;
    const int matrices = head_dim_v / 2 + shape.tile_kv / 2 + shape.weight_buffers * shape.tile_kv / 4;
    EXPECT_LE(matrices, registers - 28) << head_dim;
    const ManyRowsLayout layout = many_rows_layout(shape, head_dim, head_dim_v);
    EXPECT_LE(layout.bytes, kSharedBytes) << head_dim;
    EXPECT_EQ(shape.tile_kv % 16, 0);
    EXPECT_EQ(many_rows_tile_q(shape), 64 * shape.consumers);
    EXPECT_EQ(many_rows_threads(shape), 128 + 128 * shape.consumers);
  }
}

// Swizzled blocks begin at multiples of 1024, and nothing overlaps.
TEST(many_rows_layout, regions_follow_one_another_on_swizzle_boundaries) {
  for (const auto& [head_dim, head_dim_v] : kHeadSizes) {
    const ManyRowsShape shape = many_rows_shape(head_dim, head_dim_v);
    const ManyRowsLayout layout = many_rows_layout(shape, head_dim, head_dim_v);
    EXPECT_EQ(layout.query_slot_bytes, many_rows_tile_q(shape) * head_dim * 2);
    EXPECT_EQ(layout.key_begin, shape.query_slots * layout.query_slot_bytes);
    EXPECT_EQ(layout.value_begin - layout.key_begin, kManyRowsStages * shape.tile_kv * head_dim * 2);
    EXPECT_EQ(layout.control_begin - layout.value_begin, kManyRowsStages * shape.tile_kv * head_dim_v * 2);
    EXPECT_EQ(layout.bytes - layout.control_begin, kManyRowsControlBytes);
    EXPECT_EQ(kManyRowsRowsPerConsumer * many_rows_block_columns(head_dim) * 2 % 1024, 0);
    EXPECT_EQ(shape.tile_kv * many_rows_block_columns(head_dim) * 2 % 1024, 0);
    EXPECT_EQ(16 * many_rows_block_columns(head_dim_v) * 2 % 1024, 0);
    EXPECT_EQ(head_dim % many_rows_block_columns(head_dim), 0);
    EXPECT_EQ(head_dim_v % many_rows_block_columns(head_dim_v), 0);
  }
}

TEST(many_rows_supports, tuned_head_sizes_and_pages_of_sixteen) {
  EXPECT_TRUE(many_rows_supports(192, 128, 0));
  EXPECT_TRUE(many_rows_supports(128, 128, 48));
  EXPECT_FALSE(many_rows_supports(128, 128, 8));
  EXPECT_TRUE(many_rows_supports(96, 96, 16));
  EXPECT_FALSE(many_rows_supports(80, 80, 16));
  EXPECT_FALSE(many_rows_supports(96, 64, 16));
  EXPECT_FALSE(many_rows_supports(128, 192, 16));
}

TEST(many_rows_widening_shape, fits_registers_and_shared_memory) {
  constexpr ManyRowsShape shape = many_rows_widening_shape();
  for (const int dim : {64, 128}) {
    ASSERT_TRUE(many_rows_widening_supports(dim, dim, 16));
    EXPECT_LE(dim / 2 + shape.tile_kv / 2 + shape.weight_buffers * shape.tile_kv / 4, 224 - 28) << dim;
    const ManyRowsLayout layout = many_rows_layout(shape, dim, dim);
    EXPECT_LE(layout.bytes, kSharedBytes) << dim;
    EXPECT_EQ(layout.loaded_value_begin - layout.loaded_key_begin, shape.loaded_stages * shape.tile_kv * dim);
    EXPECT_EQ(layout.control_begin - layout.loaded_value_begin, shape.loaded_stages * shape.tile_kv * dim);
    EXPECT_EQ(layout.loaded_key_begin % 1024, 0);
    EXPECT_EQ(layout.loaded_value_begin % 1024, 0);
  }
  EXPECT_EQ(many_rows_threads(shape), 512);
  EXPECT_FALSE(many_rows_widening_supports(256, 256, 16));
  EXPECT_FALSE(many_rows_widening_supports(128, 64, 16));
  EXPECT_FALSE(many_rows_widening_supports(128, 128, 8));
}

// A stage of bytes as the boxes bring it, each a number of its own; the 16-bit tile as the products read it. Offsets
// are found as tile/widen_tiles.cuh does: a thread's first one plus that of a whole number of steps.
TEST(widening, every_byte_reaches_its_place_without_bank_conflicts) {
  constexpr int tile_kv = many_rows_widening_shape().tile_kv;
  for (const int dim : {64, 128}) {
    for (int box_rows = 16; box_rows <= tile_kv; box_rows *= 2) {
      std::vector<int> loaded(tile_kv * dim, -1), widened(tile_kv * dim, -1);  // key·dim + column
      for (int key = 0; key < tile_kv; ++key) {
        for (int column = 0; column < dim; ++column) {  // a block has all columns; swizzled by address bits
          const int plain = key * dim + column;
          loaded[plain ^ ((plain >> 7 & (dim / 16 - 1)) << 4)] = plain;
        }
      }
      const int step_keys = widening_step_keys(dim);
      for (int first_thread = 0; first_thread < 128; first_thread += 8) {
        std::set<int> read, low, high;
        for (int thread = first_thread; thread < first_thread + 8; ++thread) {
          const WideningPlace place = widening_place(thread, dim);
          const int from = loaded_chunk_offset(place.key, place.chunk, box_rows, dim);
          const int to = widened_chunk_offset(place.key, place.chunk, tile_kv);
          read.insert(from % 128), low.insert(to % 128), high.insert((to ^ 16) % 128);
          for (int step = 0; step < tile_kv / step_keys; ++step) {
            const int source = from + loaded_chunk_offset(step * step_keys, 0, box_rows, dim);
            const int target = widened_chunk_offset(step * step_keys, 0, tile_kv);
            for (int c = 0; c < 16; ++c) {
              widened[((c < 8 ? to : to ^ 16) + target) / 2 + c % 8] = loaded[source + c];
            }
          }
        }
        EXPECT_EQ(read.size() * low.size() * high.size(), 512U) << dim << " " << first_thread;
      }
      for (int key = 0; key < tile_kv; ++key) {
        for (int column = 0; column < dim; ++column) {  // [block][row], 128 bytes a row, swizzled by address bits
          const int plain = (column / 64 * tile_kv + key) * 128 + column % 64 * 2;
          ASSERT_EQ(widened[(plain ^ (plain >> 7 & 7) << 4) / 2], key * dim + column) << dim << " " << box_rows;
        }
      }
    }
  }
}

TEST(many_rows_box_rows, largest_run_that_never_crosses_a_page) {
  for (const int tile_kv : {64, 80, 96, 128}) {
    EXPECT_EQ(many_rows_box_rows(0, tile_kv), tile_kv);
    for (int page_size = 16; page_size <= 528; page_size += 16) {
      const int rows = many_rows_box_rows(page_size, tile_kv);
      for (int larger = rows; larger <= tile_kv; larger += 16) {
        // Boxes begin wherever a step begins, plus multiples of their rows.
        bool crosses = tile_kv % larger != 0;
        for (int begin = 0; begin < tile_kv * page_size; begin += larger) {
          crosses |= begin / page_size != (begin + larger - 1) / page_size;
        }
        EXPECT_EQ(crosses, larger != rows) << "tile " << tile_kv << " page " << page_size << " rows " << larger;
      }
    }
  }
}

TEST(many_rows_key_box_blocks, all_where_a_page_holds_whole_tiles) {
  EXPECT_EQ(many_rows_key_box_blocks(192, 0, 128), 3);
  EXPECT_EQ(many_rows_key_box_blocks(128, 256, 128), 2);
  EXPECT_EQ(many_rows_key_box_blocks(128, 64, 128), 1);
  EXPECT_EQ(many_rows_key_box_blocks(256, 16, 64), 1);
  EXPECT_EQ(many_rows_key_box_blocks(96, 0, 128), 3);
}

TEST(many_rows_query_by_box, where_rows_of_a_warpgroup_are_whole_tokens) {
  for (const int group_size : {1, 2, 4, 8, 16, 32, 64}) EXPECT_TRUE(many_rows_query_by_box(group_size));
  for (const int group_size : {3, 5, 6, 7, 12, 71, 128}) EXPECT_FALSE(many_rows_query_by_box(group_size));
}

// The hardware's rule: address bits 4-6 (of the 64-byte swizzle, 4-5) are those of the plain address, XORed with its
// bits 7-9 (7-8).
TEST(swizzled_offset, equals_the_rule_on_address_bits) {
  for (const int block_columns : {64, 32}) {
    const int chunks = block_columns / 8;
    std::set<int> seen;
    for (int row = 0; row < 256; ++row) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int plain = row * block_columns * 2 + chunk * 16;
        const int expected = plain ^ ((plain >> 7 & (chunks - 1)) << 4);
        EXPECT_EQ(swizzled_offset(row, chunk, block_columns), expected);
        seen.insert(expected);
      }
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(256 * chunks));
  }
}

// Row and column of m64nNk16 accumulators as the PTX manual has them: warp w rows 16w …, lane l row l/4 and that + 8,
// columns 2(l%4) and the next of every eight.
TEST(accumulator_place, covers_a_tile_once) {
  constexpr int kColumns = 80;
  std::set<std::pair<int, int>> seen;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = accumulator_row(thread, i), column = accumulator_column(thread, i);
      EXPECT_EQ(row, 16 * (thread / 32) + (thread % 32) / 4 + (i % 4 >= 2 ? 8 : 0));
      EXPECT_EQ(column, 8 * (i / 4) + 2 * (thread % 4) + i % 2);
      seen.insert({row, column});
    }
  }
  EXPECT_EQ(seen.size(), 64u * kColumns);
}

TEST(many_rows_heads_per_section, power_of_two_whose_keys_and_values_fit) {
  for (const int head_dim : {64, 128, 256}) {
    for (long long kv_len = 1; kv_len < 1 << 21; kv_len = kv_len * 3 + 1) {
      const int heads = many_rows_heads_per_section(kv_len, head_dim, head_dim, 32);
      EXPECT_EQ(heads & (heads - 1), 0);
      if (heads > 1) {
        EXPECT_LE(heads * kv_len * head_dim * 4, kManyRowsSectionBytes);
      }
      if (heads < 32) {
        EXPECT_GT(2 * heads * kv_len * head_dim * 4, kManyRowsSectionBytes);
      }
    }
  }
}

}  // namespace
}  // namespace qkv::index
