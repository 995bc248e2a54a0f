// Lanes take the tiles of an item's segments in turn, each tile once.
#include "core/index/few_rows_tiles.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace qkv::index::few_rows {
namespace {

struct Segment {
  int begin, end, full;
};

struct Tile {
  int begin, end;
  bool partial;
  bool operator==(const Tile&) const = default;
};

std::vector<Segment> random_segments(std::mt19937& random, int count, int tile_keys) {
  std::vector<Segment> segments;
  int begin = static_cast<int>(random() % 5) * tile_keys;
  for (int i = 0; i < count; ++i) {
    const int end = begin + 1 + static_cast<int>(random() % (9 * tile_keys));
    segments.push_back({begin, end, static_cast<int>(random() % 2)});
    begin = (end / tile_keys + 1 + static_cast<int>(random() % 3)) * tile_keys;
  }
  return segments;
}

template <int kTileKeys, int kNumLanes>
void expect_tiles_in_turn(std::mt19937& random, int num_segments) {
  const int before = static_cast<int>(random() % 3);  // segments of other items
  const std::vector<Segment> all = random_segments(random, before + num_segments + 2, kTileKeys);
  std::vector<Tile> tiles;
  for (int s = before; s < before + num_segments; ++s) {
    for (int begin = all[s].begin; begin < all[s].end; begin += kTileKeys) {
      tiles.push_back({begin, all[s].end, all[s].full == 0});
    }
  }
  const Segment first = num_segments > 0 ? all[before] : Segment{0, 0, 1};
  for (int lane = 0; lane < kNumLanes; ++lane) {
    std::vector<Tile> expected, taken;
    for (size_t i = lane; i < tiles.size(); i += kNumLanes) expected.push_back(tiles[i]);
    TileCursor<Segment, kTileKeys, kNumLanes> cursor(all.data(), before, before + num_segments, first, lane);
    for (; !cursor.is_over(); cursor.advance()) taken.push_back({cursor.begin, cursor.end, cursor.partial});
    ASSERT_EQ(taken, expected) << "lane " << lane << " of " << kNumLanes << ", " << num_segments << " segments";
  }
}

TEST(few_rows_tiles, lanes_take_the_tiles_of_all_segments_in_turn) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    expect_tiles_in_turn<64, 8>(random, round % 7);
    expect_tiles_in_turn<32, 8>(random, round % 7);
    expect_tiles_in_turn<16, 8>(random, round % 7);
    expect_tiles_in_turn<64, 4>(random, round % 7);
    expect_tiles_in_turn<32, 4>(random, round % 7);
    expect_tiles_in_turn<16, 4>(random, round % 7);
  }
}

}  // namespace
}  // namespace qkv::index::few_rows
