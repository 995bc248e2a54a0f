// Tiles of the sm_80 forward kernel: what the kernel's layout and launch rely on, for every head size.
#include "core/index/forward_sm80_shape.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace qkv::index {
namespace {

constexpr int kSm80Bytes = 166912;
constexpr int kSm86Bytes = 101376;
constexpr int kSm90Bytes = 232448;

template <typename F>
void for_each_shape(F f) {
  for (const int limit : {kSm80Bytes, kSm86Bytes, kSm90Bytes}) {
    for (int head_dim = 8; head_dim <= 512; head_dim += 8) {
      for (int head_dim_v = 8; head_dim_v <= 512; head_dim_v += 8) {
        f(forward_sm80_shape(head_dim, head_dim_v, limit), limit);
      }
    }
  }
}

TEST(forward_sm80_shape, fits_the_shared_memory_whatever_the_head_size) {
  for_each_shape([](const ForwardSm80Shape& shape, int limit) {
    ASSERT_LE(shape.smem_bytes(), limit) << shape.head_dim << "/" << shape.head_dim_v;
  });
}

TEST(forward_sm80_shape, few_rows_fit_with_the_tiles_of_many_rows) {
  for_each_shape([](ForwardSm80Shape shape, int limit) {
    shape.tile_q = 16;
    ASSERT_LE(shape.smem_bytes(), limit) << shape.head_dim << "/" << shape.head_dim_v;
  });
}

TEST(forward_sm80_shape, rows_of_8_bits_fit_with_the_tiles_of_16_bit_ones) {
  for_each_shape([](ForwardSm80Shape shape, int) {
    const int bytes = shape.smem_bytes();
    shape.is_8bit = true;
    if (shape.head_dim % 16 == 0 && shape.head_dim_v % 16 == 0) ASSERT_LE(shape.smem_bytes(), bytes);
  });
}

TEST(forward_sm80_shape, every_warp_multiplies_and_loads_whole_shares_of_a_tile) {
  for_each_shape([](ForwardSm80Shape shape, int) {
    for (const int tile_q : {shape.tile_q, 16}) {
      shape.tile_q = tile_q;
      ASSERT_EQ(shape.warps_q() * 16 * shape.row_tiles(), shape.tile_q);
      ASSERT_EQ(shape.tile_kv % (16 * shape.warps_kv()), 0);
      const int num_warps = shape.num_threads() / 32;
      ASSERT_EQ(shape.tile_kv % num_warps, 0);
      ASSERT_LE(shape.tile_kv / num_warps, 32);  // a lane looks up a row's page
    }
  });
}

TEST(forward_sm80_shape, outputs_of_a_pass_fit_the_registers_and_passes_cover_the_columns) {
  for_each_shape([](const ForwardSm80Shape& shape, int) {
    ASSERT_LE(shape.columns() * shape.row_tiles(), ForwardSm80Shape::kMaxColumns);
    const int passes = (shape.head_dim_v + shape.columns() - 1) / shape.columns();
    ASSERT_LE(passes, 2);
    ASSERT_EQ(shape.columns() % 8, 0);
  });
}

TEST(forward_sm80_shape, rows_are_an_odd_number_of_chunks_apart_with_one_to_spare) {
  for (int dim = 8; dim <= 512; dim += 8) {
    const int bytes = ForwardSm80Shape::row_bytes(dim);
    ASSERT_EQ(bytes % 32, 16) << dim;
    ASSERT_GE(bytes, 2 * ForwardSm80Shape::padded(dim) + 16) << dim;
  }
}

TEST(forward_sm80_shape, two_ctas_share_an_sm_at_the_usual_head_sizes) {
  for (const auto& [head_dim, head_dim_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}}) {
    EXPECT_LE(2 * (forward_sm80_shape(head_dim, head_dim_v, kSm90Bytes).smem_bytes() + 1024), kSm90Bytes + 1024);
  }
}

}  // namespace
}  // namespace qkv::index
