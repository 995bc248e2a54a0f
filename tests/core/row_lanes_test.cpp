#include "core/index/row_lanes.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core/index/merge_teams.hpp"
#include "core/index/quantised_rows.hpp"

namespace qkv::index {
namespace {

TEST(row_lanes, every_piece_has_one_lane_and_no_other_width_idles_less) {
  for (int num_pieces = 1; num_pieces <= 600; ++num_pieces) {
    const int lanes = lanes_of_row(num_pieces);
    std::vector<int> taken(num_pieces);
    for (int lane = 0; lane < lanes; ++lane) {
      for (int piece = lane; piece < num_pieces; piece += lanes) ++taken[piece];
    }
    EXPECT_EQ(taken, std::vector<int>(num_pieces, 1));
    for (const int other : {8, 16, 32}) {
      const int places = places_of_row(num_pieces, other);
      EXPECT_GE(places, num_pieces);
      EXPECT_LT(places, num_pieces + other);
      EXPECT_LE(places_of_row(num_pieces, lanes), places);
      if (other > lanes) EXPECT_LT(places_of_row(num_pieces, lanes), places);
    }
  }
}

TEST(row_lanes, of_rows_that_caches_have) {
  EXPECT_EQ(lanes_of_row(128), 32);  // 8 heads of 128, 16 bits
  EXPECT_EQ(lanes_of_row(72), 8);    // latents of 512 + 64, 16 bits
  EXPECT_EQ(lanes_of_row(16), 16);   // a head of 128, 16 bits
  EXPECT_EQ(lanes_of_row(1), 8);
}

TEST(row_lanes, that_hold_a_row_are_as_few_as_can) {
  for (const int pieces_of_lane : {1, 2, 3}) {
    for (int num_pieces = 1; num_pieces <= kMostLanes * pieces_of_lane; ++num_pieces) {
      const int lanes = 1 << log2_lanes_that_hold(num_pieces, pieces_of_lane);
      EXPECT_GE(lanes * pieces_of_lane, num_pieces);
      if (lanes > 1) EXPECT_LT(lanes / 2 * pieces_of_lane, num_pieces);
    }
  }
  EXPECT_EQ(1 << log2_lanes_that_hold(1000, 3), kMostLanes);
}

// As warps deal them out that find out about their rows first.
void expect_each_has_one(int num_pieces, int log2_lanes, int pieces_of_lane, int rows) {
  const int lanes = 1 << log2_lanes;
  ASSERT_LE(rows, kMostLanes);  // a lane finds out about each
  std::vector<int> teams(rows), pieces(num_pieces);
  for (int lane = 0; lane < kMostLanes; lane += lanes) {
    for (int begin = 0; begin < rows; begin += kMostLanes >> log2_lanes) ++teams.at(begin + (lane >> log2_lanes));
  }
  for (int begin = 0; begin < num_pieces; begin += lanes * pieces_of_lane) {
    for (int lane = 0; lane < lanes; ++lane) {
      for (int p = 0; p < pieces_of_lane; ++p) {
        const int piece = begin + lane + p * lanes;
        if (piece < num_pieces) ++pieces[piece];
      }
    }
  }
  EXPECT_EQ(teams, std::vector<int>(rows, 1));
  EXPECT_EQ(pieces, std::vector<int>(num_pieces, 1));
}

TEST(rows_of_warp, every_row_has_one_team_and_every_piece_one_lane) {
  for (int dim = 1; dim <= 600; ++dim) {
    const int num_pieces = (dim + 7) / 8;
    SCOPED_TRACE(dim);
    expect_each_has_one(num_pieces, merging_log2_lanes(dim), 1, merging_rows_of_warp(dim));
    const int log2_lanes = quantising_log2_lanes(num_pieces), pieces_of_lane = quantising_pieces_of_lane(num_pieces);
    for (const int num_tokens : {1, 100, 10000}) {
      const int rows = rows_of_warp(log2_lanes, num_tokens, 16, 100);
      EXPECT_GE(rows, tokens_of_quantising_warp(num_pieces));
      expect_each_has_one(num_pieces, log2_lanes, pieces_of_lane, rows);
    }
  }
}

TEST(rows_of_warp, are_more_where_no_warp_has_more_in_all_for_it) {
  constexpr int kLog2 = 3, kKinds = 16;  // rows of 128 columns, 8 heads' keys and values
  for (const int num_warps : {1, 32, 1000, 4224}) {
    for (const int num_tokens : {0, 1, 8, 9, 500, 1024, 8192, 65536, 1000000}) {
      SCOPED_TRACE(testing::Message() << num_warps << " warps, " << num_tokens << " tokens");
      const int rows = rows_of_warp(kLog2, num_tokens, kKinds, num_warps);
      const auto most_of_a_warp = [&](int at_once) {
        std::vector<int> turns(num_warps);
        for (int run = 0; run < (num_tokens + at_once - 1) / at_once * kKinds; ++run) ++turns[run % num_warps];
        return turns[0] * at_once;
      };
      EXPECT_LE(most_of_a_warp(rows), most_of_a_warp(least_rows_of_warp(kLog2)));
      EXPECT_GE(rows, least_rows_of_warp(kLog2));
      EXPECT_LE(rows, kMostLanes);
    }
  }
  EXPECT_EQ(rows_of_warp(kLog2, 256, kKinds, 4224), 8);
  EXPECT_EQ(rows_of_warp(kLog2, 65536, kKinds, 4224), kMostLanes);
}

TEST(rows_of_warp, are_fewer_where_more_warps_then_have_rows) {
  constexpr int kLog2 = 3, kKinds = 16;
  for (const int num_warps : {1, 32, 1000, 4224}) {
    for (const int most_tokens : {8, 1024, 8192, 65536}) {
      const int of_most = rows_of_warp(kLog2, most_tokens, kKinds, num_warps);
      EXPECT_EQ(fewer_rows_of_warp(of_most, kLog2, most_tokens * kKinds, num_warps), of_most);
      for (int num_tokens = 0; num_tokens <= most_tokens; num_tokens = 2 * num_tokens + 1) {
        SCOPED_TRACE(testing::Message() << num_warps << " warps, " << num_tokens << " of " << most_tokens << " tokens");
        const int rows = fewer_rows_of_warp(of_most, kLog2, num_tokens * kKinds, num_warps);
        EXPECT_LE(rows, of_most);
        EXPECT_GE(rows, least_rows_of_warp(kLog2));
        // With half as many, some warp would take a second turn.
        if (rows > least_rows_of_warp(kLog2)) EXPECT_GT(num_tokens * kKinds, num_warps * rows / 2);
        // With twice as many, all warps' first turns have room for what there is.
        if (rows < of_most) EXPECT_LE(num_tokens * kKinds, num_warps * rows);
      }
    }
  }
}

TEST(quantised_rows, are_held_whole_up_to_768_elements) {
  for (int num_pieces = 1; num_pieces <= 96; ++num_pieces) {
    EXPECT_LE(num_pieces, quantising_pieces_of_lane(num_pieces) << quantising_log2_lanes(num_pieces));
  }
}

}  // namespace
}  // namespace qkv::index
