#include "core/index/row_lanes.hpp"

#include <gtest/gtest.h>

#include <vector>

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
      const int lanes = lanes_that_hold(num_pieces, pieces_of_lane);
      EXPECT_GE(lanes * pieces_of_lane, num_pieces);
      if (lanes > 1) EXPECT_LT(lanes / 2 * pieces_of_lane, num_pieces);
    }
  }
  EXPECT_EQ(lanes_that_hold(1000, 3), kMostLanes);
}

}  // namespace
}  // namespace qkv::index
