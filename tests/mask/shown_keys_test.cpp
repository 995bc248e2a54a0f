// Masks of layers that are shown some keys only: rows and tile classes speak of shown keys, and must equal the
// definition at the positions where these sit.
#include <gtest/gtest.h>

#include "mask/program.hpp"
#include "mask/scene.hpp"
#include "random_mask.hpp"

namespace qkv::test {
namespace {

constexpr int32_t kCases = 12000;

struct Case {
  explicit Case(int32_t seed)
      : generator(seed), random_scene(generator), mask(RandomMask(generator).truth(draw(0, 3))) {
    program = mask::compile(mask);
    input = mask::bind_scene(program.operands, scene());
    if (scene().kv_len >= scene().q_len) input.keys.run = draw(0, 2);
    if (input.keys.run != index::kNewTokenKeys) {
      input.keys.num_ranks = draw(1, 4);
      input.keys.rank = draw(0, input.keys.num_ranks - 1);
      input.keys.interleave_size = draw(1, 4);
    }
    num_keys = input.keys.count(scene().q_len, scene().kv_len);
  }

  const MaskScene& scene() const { return random_scene.scene; }
  int32_t draw(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(generator); }
  std::pair<int32_t, int32_t> draw_range(int32_t length) {
    const int32_t begin = draw(0, length);
    return {begin, draw(begin, length)};
  }
  bool visible(int32_t query, int32_t key) const { return is_visible(mask, scene(), query, input.kv_pos(key)); }

  std::mt19937 generator;
  RandomScene random_scene;
  Mask mask;
  mask::Program program;
  mask::ProgramInput input;
  int32_t num_keys = 0;
};

TEST(ShownKeys, rows_are_those_of_their_positions) {
  mask::RowScratch scratch;
  for (int32_t seed = 0; seed < kCases; ++seed) {
    Case random(seed);
    for (int32_t query = 0; query < random.scene().q_len; ++query) {
      const auto [begin, end] = random.draw_range(random.num_keys);
      std::vector<int32_t> row(end - begin + 1, 77);
      mask::evaluate_row(random.program, random.input, query, random.scene().q_head, begin, end, row.data(), scratch);
      ASSERT_EQ(row.back(), 77);
      for (int32_t key = begin; key < end; ++key) {
        ASSERT_EQ(row[key - begin], random.visible(query, key) ? -1 : 0)
            << "seed " << seed << ": " << random.mask.text() << " at query " << query << ", key " << key;
      }
    }
  }
}

TEST(ShownKeys, tile_classes_are_proofs_of_their_positions) {
  int32_t num_proved = 0;
  int32_t num_uniform = 0;
  for (int32_t seed = 0; seed < kCases; ++seed) {
    Case random(seed);
    const int32_t head = random.scene().q_head;
    const auto [query_begin, query_end] = random.draw_range(random.scene().q_len);
    const auto [kv_begin, kv_end] = random.draw_range(random.num_keys);
    const TileClass tile_class =
        mask::classify(random.program, random.input, {query_begin, query_end, kv_begin, kv_end, head, head + 1});
    int32_t count = 0;
    for (int32_t query = query_begin; query < query_end; ++query) {
      for (int32_t key = kv_begin; key < kv_end; ++key) count += random.visible(query, key) ? 1 : 0;
    }
    const int32_t pairs = (query_end - query_begin) * (kv_end - kv_begin);
    if (tile_class == TileClass::empty) {
      ASSERT_EQ(count, 0) << "seed " << seed << ": " << random.mask.text();
    }
    if (tile_class == TileClass::full) {
      ASSERT_EQ(count, pairs) << "seed " << seed << ": " << random.mask.text();
    }
    if (pairs > 0 && (count == 0 || count == pairs)) {
      ++num_uniform;
      num_proved += tile_class != TileClass::partial ? 1 : 0;
    }
  }
  EXPECT_GT(num_proved, num_uniform * 4 / 5) << "of " << num_uniform;
}

TEST(ShownKeys, max_segments_holds_for_every_shard) {
  for (int32_t seed = 0; seed < kCases / 4; ++seed) {
    Case random(seed);
    std::vector<mask::KeySegment> segments;
    const int32_t head = random.scene().q_head;
    mask::append_segments(random.program, random.input, {0, random.scene().q_len, 0, random.num_keys, head, head + 1},
                          random.draw(1, 3), segments);
    ASSERT_LE(static_cast<int64_t>(segments.size()), mask::max_segments(random.program))
        << "seed " << seed << ": " << random.mask.text();
  }
}

}  // namespace
}  // namespace qkv::test
