#include "core/index/forward_sm90_few_rows_shape.hpp"

#include <gtest/gtest.h>

namespace qkv::index::few_rows {
namespace {

constexpr int kReservedOfCta = 1024;

struct Shape {
  int head_dim, head_dim_v, tile_q;
  bool few_items;
};

// Calls `check` for every shape that a launch can have.
template <typename Check>
void for_each_shape(Check check) {
  for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
    for (int head_dim_v = 16; head_dim_v <= 256; head_dim_v += 16) {
      for (int tile_q = 4; tile_q <= max_rows(head_dim_v); tile_q *= 2) {
        for (const bool few_items : {false, true}) check(Shape{head_dim, head_dim_v, tile_q, few_items});
      }
    }
  }
}

SmemLayout layout_of(const Shape& shape, int cluster_size) {
  const LaunchShape launch = launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
  return smem_layout(shape.head_dim, shape.head_dim_v, shape.tile_q,
                     tile_keys(shape.head_dim, shape.head_dim_v, shape.tile_q), launch.num_warps, launch.num_stages,
                     cluster_size, shape.tile_q);
}

// Of items that hold rows of several requests, each at most half of an item's.
SmemLayout shared_layout_of(const Shape& shape) {
  const LaunchShape launch = shared_launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
  return smem_layout(shape.head_dim, shape.head_dim_v, max_rows(shape.head_dim_v),
                     tile_keys(shape.head_dim, shape.head_dim_v, shape.tile_q), launch.num_warps, launch.num_stages, 1,
                     shape.tile_q);
}

template <typename Check>
void for_each_shared_shape(Check check) {
  for_each_shape([&](const Shape& shape) {
    if (2 * shape.tile_q <= max_rows(shape.head_dim_v)) check(shape);
  });
}

TEST(few_rows_shape, rows_of_several_requests_fit_shared_memory_and_registers) {
  for_each_shared_shape([](const Shape& shape) {
    const LaunchShape launch = shared_launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
    const int bytes = shared_layout_of(shape).total_bytes;
    EXPECT_LE(bytes, kMaxSmemBytes) << shape.head_dim << "/" << shape.head_dim_v << " rows " << shape.tile_q;
    EXPECT_LE(launch.min_ctas * (bytes + kReservedOfCta), kSmemOfSm)
        << shape.head_dim << "/" << shape.head_dim_v << " rows " << shape.tile_q;
    EXPECT_LE(launch.min_ctas * launch.num_warps * kWarpSize * 255, 65536);  // an SM's registers
  });
}

// The end of an item joins the lanes that its requests have alone, all of them at once.
TEST(few_rows_shape, rows_of_several_requests_have_a_warp_a_lane) {
  for_each_shared_shape([](const Shape& shape) {
    const LaunchShape launch = shared_launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
    EXPECT_EQ(launch.num_warps, num_lanes(shape.tile_q, shape.head_dim_v));
    const SmemLayout layout = shared_layout_of(shape);
    EXPECT_EQ(layout.states, layout.query + (query_in_smem(max_rows(shape.head_dim_v), shape.head_dim)
                                                 ? max_rows(shape.head_dim_v) * shape.head_dim * kElementBytes
                                                 : 0));
    EXPECT_EQ(layout.received, layout.states);
    EXPECT_EQ(layout.item % 16, 0);
    EXPECT_EQ(layout.total_bytes, layout.item + kItemBytes);
    EXPECT_LE(kMaxSplits * max_rows(shape.head_dim_v) * 4, launch.num_warps * layout.warp_bytes);
  });
}

TEST(few_rows_shape, every_launch_fits_shared_memory) {
  for_each_shape([](const Shape& shape) {
    for (const int cluster_size : {1, kMaxClusterSplits}) {
      EXPECT_LE(layout_of(shape, cluster_size).total_bytes, kMaxSmemBytes)
          << shape.head_dim << "/" << shape.head_dim_v << " rows " << shape.tile_q << " few " << shape.few_items;
    }
  });
}

TEST(few_rows_shape, shared_memory_holds_the_ctas_that_registers_are_bounded_for) {
  for_each_shape([](const Shape& shape) {
    const LaunchShape launch = launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
    const int bytes = layout_of(shape, kMaxClusterSplits).total_bytes + kReservedOfCta;
    EXPECT_LE(launch.min_ctas * bytes, kSmemOfSm)
        << shape.head_dim << "/" << shape.head_dim_v << " rows " << shape.tile_q << " few " << shape.few_items;
  });
}

TEST(few_rows_shape, warps_share_lanes_evenly) {
  for_each_shape([](const Shape& shape) {
    const LaunchShape launch = launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
    EXPECT_EQ(num_lanes(shape.tile_q, shape.head_dim_v) % launch.num_warps, 0);
  });
}

TEST(few_rows_shape, parts_of_shared_memory_are_aligned) {
  for_each_shape([](const Shape& shape) {
    const SmemLayout layout = layout_of(shape, kMaxClusterSplits);
    EXPECT_EQ(layout.warp_bytes % kSmemAlignment, 0);  // the swizzle's pattern begins with each ring
    EXPECT_EQ(layout.query % kSmemAlignment, 0);
    EXPECT_EQ(layout.states % 16, 0);
    EXPECT_EQ(layout.state_bytes % 16, 0);
    EXPECT_EQ(layout.received % 16, 0);
    EXPECT_EQ(layout.barriers % 8, 0);
  });
}

TEST(few_rows_shape, lse_of_all_splits_fits_where_lanes_were) {
  for_each_shape([](const Shape& shape) {
    const LaunchShape launch = launch_shape(shape.head_dim, shape.head_dim_v, shape.tile_q, shape.few_items);
    EXPECT_LE(kMaxSplits * shape.tile_q * 4, launch.num_warps * layout_of(shape, 1).warp_bytes);
  });
}

TEST(few_rows_shape, splits_are_whole_tiles_and_not_too_many) {
  for (const int num_kv_heads : {1, 2, 4, 8, 32}) {
    for (const int tile_q : {4, 8, 16, 32}) {
      for (int kv_len = 1; kv_len < 3'000'000; kv_len += kv_len / 7 + 1) {
        const int keys = split_keys(kv_len, num_kv_heads, 128, 128, tile_q);
        EXPECT_EQ(keys % 128, 0);
        EXPECT_LE((kv_len - 1) / keys + 1, kMaxSplits) << kv_len;
      }
    }
  }
}

TEST(few_rows_shape, requests_up_to_16k_join_in_a_cluster) {
  for (int kv_len = 1; kv_len <= 16384; ++kv_len) {
    ASSERT_LE((kv_len - 1) / split_keys(kv_len, 8, 128, 128, 4) + 1, kMaxClusterSplits) << kv_len;
  }
  EXPECT_EQ(split_keys(256, 8, 128, 128, 4), 256);
  EXPECT_EQ(split_keys(1024, 8, 128, 128, 4), 256);
  EXPECT_EQ(split_keys(8192, 8, 128, 128, 4), 1024);
  EXPECT_EQ(split_keys(65536, 8, 128, 128, 4), 2048);
}

TEST(few_rows_shape, rows_are_padded_to_what_kernels_exist_for) {
  EXPECT_EQ(tile_rows(1), 4);
  EXPECT_EQ(tile_rows(5), 8);
  EXPECT_EQ(tile_rows(9), 16);
  EXPECT_EQ(tile_rows(32), 32);
  EXPECT_EQ(num_row_blocks(4), 1);
  EXPECT_EQ(num_row_blocks(32), 4);
}

}  // namespace
}  // namespace qkv::index::few_rows
