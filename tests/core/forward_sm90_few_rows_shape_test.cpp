#include "core/index/forward_sm90_few_rows_shape.hpp"

#include <gtest/gtest.h>

namespace qkv::index::few_rows {
namespace {

constexpr int kReservedOfCta = 1024;
constexpr KeyValueShape k128{128, 128, 2, false};

struct Shape {
  KeyValueShape kv;
  int tile_q;
  bool few_items;
  bool takes_turns;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << shape.kv.head_dim << "/" << shape.kv.head_dim_v << " of " << shape.kv.element_bytes
             << " bytes, token_scales " << shape.kv.token_scales << ", rows " << shape.tile_q << ", few "
             << shape.few_items << ", turns " << shape.takes_turns;
}

// Calls `check` for every shape that a launch can have.
template <typename Check>
void for_each_shape(Check check) {
  for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
    for (int head_dim_v = 16; head_dim_v <= 256; head_dim_v += 16) {
      for (const auto& [element_bytes, token_scales] : {std::pair(2, false), std::pair(1, false), std::pair(1, true)}) {
        const KeyValueShape kv{head_dim, head_dim_v, element_bytes, token_scales};
        for (int tile_q = 4; tile_q <= max_rows(head_dim_v); tile_q *= 2) {
          for (const bool few_items : {false, true}) {
            for (const bool takes_turns : {false, true}) check(Shape{kv, tile_q, few_items, takes_turns});
          }
        }
      }
    }
  }
}

LaunchShape launch_of(const Shape& shape) {
  return launch_shape(shape.kv, shape.tile_q, shape.few_items, shape.takes_turns);
}

SmemLayout layout_of(const Shape& shape, int cluster_size) {
  const LaunchShape launch = launch_of(shape);
  return smem_layout(shape.kv, shape.tile_q, tile_keys(shape.kv, shape.tile_q), launch.num_warps, launch.num_stages,
                     cluster_size, shape.tile_q);
}

LaunchShape shared_launch_of(const Shape& shape) {
  return shared_launch_shape(shape.kv, shape.tile_q, shape.few_items);
}

// Of items that hold rows of several requests, each at most half of an item's.
SmemLayout shared_layout_of(const Shape& shape) {
  const LaunchShape launch = shared_launch_of(shape);
  return smem_layout(shape.kv, max_rows(shape.kv.head_dim_v), tile_keys(shape.kv, shape.tile_q), launch.num_warps,
                     launch.num_stages, 1, shape.tile_q);
}

template <typename Check>
void for_each_shared_shape(Check check) {
  for_each_shape([&](const Shape& shape) {
    if (2 * shape.tile_q <= max_rows(shape.kv.head_dim_v)) check(shape);
  });
}

TEST(few_rows_shape, rows_of_several_requests_fit_shared_memory_and_registers) {
  for_each_shared_shape([](const Shape& shape) {
    const LaunchShape launch = shared_launch_of(shape);
    const int bytes = shared_layout_of(shape).total_bytes;
    EXPECT_LE(bytes, kMaxSmemBytes) << shape.kv.head_dim << "/" << shape.kv.head_dim_v << " rows " << shape.tile_q;
    EXPECT_LE(launch.min_ctas * (bytes + kReservedOfCta), kSmemOfSm)
        << shape.kv.head_dim << "/" << shape.kv.head_dim_v << " rows " << shape.tile_q;
    EXPECT_LE(launch.min_ctas * launch.num_warps * kWarpSize * 255, 65536);  // an SM's registers
  });
}

// The end of an item joins the lanes that its requests have alone, all of them at once.
TEST(few_rows_shape, rows_of_several_requests_have_a_warp_a_lane) {
  for_each_shared_shape([](const Shape& shape) {
    const LaunchShape launch = shared_launch_of(shape);
    EXPECT_EQ(launch.num_warps, num_lanes(shape.tile_q, shape.kv.head_dim_v));
    const SmemLayout layout = shared_layout_of(shape);
    const int rows = max_rows(shape.kv.head_dim_v);
    const bool in_smem = query_in_smem(rows, shape.kv.head_dim);
    EXPECT_EQ(layout.query_factors, layout.query + (in_smem ? rows * shape.kv.head_dim * kQueryBytes : 0));
    EXPECT_EQ(layout.scales, layout.states);
    EXPECT_EQ(layout.item % 16, 0);
    EXPECT_EQ(layout.total_bytes, layout.item + kItemBytes);
    EXPECT_LE(kMaxSplits * rows * 4, launch.num_warps * layout.warp_bytes);
  });
}

TEST(few_rows_shape, every_launch_fits_shared_memory) {
  for_each_shape([](const Shape& shape) {
    for (const int cluster_size : {1, kMaxClusterSplits}) {
      EXPECT_LE(layout_of(shape, cluster_size).total_bytes, kMaxSmemBytes) << shape;
    }
  });
}

TEST(few_rows_shape, shared_memory_holds_the_ctas_that_registers_are_bounded_for) {
  for_each_shape([](const Shape& shape) {
    const LaunchShape launch = launch_of(shape);
    const int bytes = layout_of(shape, kMaxClusterSplits).total_bytes + kReservedOfCta;
    EXPECT_LE(launch.min_ctas * bytes, kSmemOfSm) << shape;
  });
}

TEST(few_rows_shape, warps_share_lanes_evenly) {
  for_each_shape([](const Shape& shape) {
    const LaunchShape launch = launch_of(shape);
    EXPECT_EQ(num_lanes(shape.tile_q, shape.kv.head_dim_v) % launch.num_warps, 0);
  });
}

TEST(few_rows_shape, parts_of_shared_memory_are_aligned) {
  for_each_shape([](const Shape& shape) {
    const SmemLayout layout = layout_of(shape, kMaxClusterSplits);
    EXPECT_EQ(layout.warp_bytes % kSmemAlignment, 0);  // the swizzle's pattern begins with each ring
    EXPECT_EQ(layout.query % kSmemAlignment, 0);
    EXPECT_EQ(layout.query_factors % 16, 0);
    EXPECT_EQ(layout.states % 16, 0);
    EXPECT_EQ(layout.scales % 16, 0);
    EXPECT_EQ(layout.state_bytes % 16, 0);
    EXPECT_EQ(layout.received % 16, 0);
    EXPECT_EQ(layout.barriers % 8, 0);
  });
}

TEST(few_rows_shape, lse_of_all_splits_fits_where_lanes_were) {
  for_each_shape([](const Shape& shape) {
    const LaunchShape launch = launch_of(shape);
    EXPECT_LE(kMaxSplits * shape.tile_q * 4, launch.num_warps * layout_of(shape, 1).warp_bytes);
  });
}

TEST(few_rows_shape, splits_are_whole_tiles_and_not_too_many) {
  for (const int num_kv_heads : {1, 2, 4, 8, 32}) {
    for (const int tile_q : {4, 8, 16, 32}) {
      for (int kv_len = 1; kv_len < 3'000'000; kv_len += kv_len / 7 + 1) {
        const int keys = split_keys(k128, kv_len, num_kv_heads, tile_q);
        EXPECT_EQ(keys % 128, 0);
        EXPECT_LE((kv_len - 1) / keys + 1, kMaxSplits) << kv_len;
      }
    }
  }
}

TEST(few_rows_shape, requests_up_to_16k_join_in_a_cluster) {
  for (int kv_len = 1; kv_len <= 16384; ++kv_len) {
    ASSERT_LE((kv_len - 1) / split_keys(k128, kv_len, 8, 4) + 1, kMaxClusterSplits) << kv_len;
  }
  EXPECT_EQ(split_keys(k128, 512, 8, 4), 512);  // not cut
  EXPECT_EQ(split_keys(k128, 513, 8, 4), 256);
  EXPECT_EQ(split_keys(k128, 1024, 8, 4), 256);
  EXPECT_EQ(split_keys(k128, 8192, 8, 4), 1024);
  EXPECT_EQ(split_keys(k128, 65536, 8, 4), 2048);
}

TEST(few_rows_shape, caches_of_8_bits_are_cut_by_bytes) {
  constexpr KeyValueShape k8Bits{128, 128, 1, true};
  EXPECT_EQ(split_keys(k8Bits, 1024, 8, 4), 1024);
  EXPECT_EQ(split_keys({64, 64, 1, false}, 1024, 8, 4), 512);
  EXPECT_EQ(split_keys(k8Bits, 32'768, 8, 4), 4096);  // as many bytes as 2048 keys of 16 bits
  EXPECT_EQ(split_keys(k8Bits, 65'536, 8, 4), 4096);
  EXPECT_EQ(split_keys(k8Bits, 65'536, 4, 8), 2048);
  EXPECT_EQ(tile_keys(k8Bits, 16), 32);
  EXPECT_EQ(tile_keys(k8Bits, 32), 16);
  EXPECT_EQ(tile_keys({256, 256, 1, false}, 4), 32);  // 16 of 16 bits
}

TEST(few_rows_shape, bounds_hold_for_every_length) {
  for (const int element_bytes : {1, 2}) {
    const KeyValueShape kv{128, 128, element_bytes, false};
    for (const int num_kv_heads : {1, 4, 8}) {
      for (int kv_len = 1; kv_len < 3'000'000; kv_len += kv_len / 9 + 1) {
        const int splits = (kv_len - 1) / split_keys(kv, kv_len, num_kv_heads, 4) + 1;
        EXPECT_LE(splits, splits_of_request(split_bounds(num_kv_heads, element_bytes), kv_len)) << kv_len;
      }
    }
  }
}

TEST(few_rows_shape, rings_of_8_bits_hold_as_many_bytes_as_those_of_16_where_ctas_share_a_multiprocessor) {
  const auto under_way = [](const KeyValueShape& kv) {
    const LaunchShape launch = launch_shape(kv, 4, false, false);
    return launch.min_ctas * launch.num_warps * launch.num_stages * tile_keys(kv, 4) * kv.token_bytes();
  };
  constexpr KeyValueShape k8Bits{128, 128, 1, false};
  EXPECT_EQ(under_way(k8Bits), under_way(k128));
  EXPECT_EQ(launch_shape(k8Bits, 4, true, false).num_stages, 1);  // a tile in hand and its first copy count
}

TEST(few_rows_shape, scales_of_tokens_have_a_fourth_cta_unless_it_takes_turns) {
  constexpr KeyValueShape kTokenScales{128, 128, 1, true}, kHeadScales{128, 128, 1, false};
  EXPECT_EQ(launch_shape(kTokenScales, 4, false, false).min_ctas, 4);
  EXPECT_EQ(launch_shape(kTokenScales, 4, false, true).min_ctas, 3);
  EXPECT_EQ(launch_shape(kHeadScales, 4, false, false).min_ctas, 3);
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
