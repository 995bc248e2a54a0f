// Everything that the library derives from an expression, held against the definition over random expressions.
#include <gtest/gtest.h>

#include <algorithm>

#include "mask/program.hpp"
#include "mask/scene.hpp"
#include "random_mask.hpp"

namespace qkv::test {
namespace {

constexpr int32_t kCases = 12000;

// One random mask in its scene, with the truth of all its pairs by the definition.
struct Case {
  explicit Case(int32_t seed)
      : generator(seed), random_scene(generator), mask(RandomMask(generator).truth(draw(0, 3))) {
    program = mask::compile(mask);
    input = mask::bind_scene(program.operands, scene());
    for (int32_t query = 0; query < scene().q_len; ++query) {
      for (int32_t key = 0; key < scene().kv_len; ++key) truth.push_back(is_visible(mask, scene(), query, key));
    }
  }

  const MaskScene& scene() const { return random_scene.scene; }
  bool visible(int32_t query, int32_t key) const { return truth[query * scene().kv_len + key]; }
  int32_t draw(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(generator); }
  std::pair<int32_t, int32_t> draw_range(int32_t length) {
    const int32_t begin = draw(0, length);
    return {begin, draw(begin, length)};
  }

  int32_t count_visible(int32_t query_begin, int32_t query_end, int32_t kv_begin, int32_t kv_end) const {
    int32_t count = 0;
    for (int32_t query = query_begin; query < query_end; ++query) {
      for (int32_t key = kv_begin; key < kv_end; ++key) count += visible(query, key) ? 1 : 0;
    }
    return count;
  }

  std::mt19937 generator;
  RandomScene random_scene;
  Mask mask;
  mask::Program program;
  mask::ProgramInput input;
  std::vector<bool> truth;
};

std::string reproducer(int32_t seed, const Mask& mask) { return "seed " + std::to_string(seed) + ": " + mask.text(); }

TEST(RandomMasks, evaluate_row_equals_the_definition) {
  mask::RowScratch scratch;
  for (int32_t seed = 0; seed < kCases; ++seed) {
    Case random(seed);
    const MaskScene& scene = random.scene();
    for (int32_t query = 0; query < scene.q_len; ++query) {
      const auto [begin, end] = random.draw_range(scene.kv_len);
      constexpr int32_t kGuard = 77;
      std::vector<int32_t> row(end - begin + 2, kGuard);
      mask::evaluate_row(random.program, random.input, query, scene.q_head, begin, end, row.data() + 1, scratch);
      ASSERT_EQ(row.front(), kGuard);
      ASSERT_EQ(row.back(), kGuard);
      for (int32_t key = begin; key < end; ++key) {
        ASSERT_EQ(row[1 + key - begin], random.visible(query, key) ? -1 : 0)
            << reproducer(seed, random.mask) << " at query " << query << ", key " << key << " of [" << begin << ", "
            << end << ")";
      }
    }
  }
}

TEST(RandomMasks, tile_classes_are_proofs) {
  int32_t num_proved = 0;
  int32_t num_uniform = 0;
  for (int32_t seed = 0; seed < kCases; ++seed) {
    Case random(seed);
    const MaskScene& scene = random.scene();
    for (int32_t repeat = 0; repeat < 4; ++repeat) {
      const auto [query_begin, query_end] = random.draw_range(scene.q_len);
      const auto [kv_begin, kv_end] = random.draw_range(scene.kv_len);
      const TileClass tile_class = classify_tile(random.mask, scene, query_begin, query_end, kv_begin, kv_end);
      const int32_t count = random.count_visible(query_begin, query_end, kv_begin, kv_end);
      const int32_t pairs = (query_end - query_begin) * (kv_end - kv_begin);
      if (tile_class == TileClass::empty) {
        ASSERT_EQ(count, 0) << reproducer(seed, random.mask);
      }
      if (tile_class == TileClass::full) {
        ASSERT_EQ(count, pairs) << reproducer(seed, random.mask);
      }
      if (pairs > 0 && (count == 0 || count == pairs)) {
        ++num_uniform;
        num_proved += tile_class != TileClass::partial ? 1 : 0;
      }
    }
  }
  EXPECT_GT(num_proved, num_uniform * 9 / 10) << "of " << num_uniform;
}

TEST(RandomMasks, tile_classes_hold_for_all_heads_of_a_tile) {
  for (int32_t seed = 0; seed < kCases / 4; ++seed) {
    Case random(seed);
    MaskScene scene = random.scene();
    const auto [query_begin, query_end] = random.draw_range(scene.q_len);
    const auto [kv_begin, kv_end] = random.draw_range(scene.kv_len);
    const TileClass tile_class =
        mask::classify(random.program, random.input, {query_begin, query_end, kv_begin, kv_end, 2, 6});
    if (tile_class == TileClass::partial) continue;
    for (scene.q_head = 2; scene.q_head < 6; ++scene.q_head) {
      for (int32_t query = query_begin; query < query_end; ++query) {
        for (int32_t key = kv_begin; key < kv_end; ++key) {
          ASSERT_EQ(is_visible(random.mask, scene, query, key), tile_class == TileClass::full)
              << reproducer(seed, random.mask);
        }
      }
    }
  }
}

TEST(RandomMasks, segments_equal_the_classes_of_the_grid) {
  for (int32_t seed = 0; seed < kCases; ++seed) {
    Case random(seed);
    const MaskScene& scene = random.scene();
    const auto [query_begin, query_end] = random.draw_range(scene.q_len);
    const auto [kv_begin, kv_end] = random.draw_range(scene.kv_len);
    const int32_t tile_kv = random.draw(1, 9);
    mask::Tile tile{query_begin, query_end, kv_begin, kv_end, scene.q_head, scene.q_head + 1};
    // What lies in the list before must neither change nor grow.
    const mask::KeySegment earlier{0, kv_begin, TileClass::partial};
    std::vector<mask::KeySegment> segments{earlier};
    mask::append_segments(random.program, random.input, tile, tile_kv, segments);

    std::vector<mask::KeySegment> expected{earlier};
    for (int32_t begin = kv_begin; begin < kv_end;) {
      const int32_t end = std::min((begin / tile_kv + 1) * tile_kv, kv_end);
      tile.kv_begin = begin;
      tile.kv_end = end;
      const TileClass tile_class = mask::classify(random.program, random.input, tile);
      if (tile_class != TileClass::empty) {
        const mask::KeySegment& last = expected.back();
        if (expected.size() > 1 && last.end == begin && last.tile_class == tile_class) {
          expected.back().end = end;
        } else {
          expected.push_back({begin, end, tile_class});
        }
      }
      begin = end;
    }
    ASSERT_EQ(segments, expected) << reproducer(seed, random.mask);
  }
}

TEST(RandomMasks, text_parses_back_to_the_same_mask) {
  for (int32_t seed = 0; seed < kCases; ++seed) {
    Case random(seed);
    const Mask parsed = parse_mask(random.mask.text());
    ASSERT_EQ(parsed.text(), random.mask.text());
    ASSERT_EQ(parsed.hash(), random.mask.hash());
    ASSERT_EQ(operands_of(parsed), operands_of(random.mask));
    for (int32_t query = 0; query < random.scene().q_len; ++query) {
      for (int32_t key = 0; key < random.scene().kv_len; ++key) {
        ASSERT_EQ(is_visible(parsed, random.scene(), query, key), random.visible(query, key));
      }
    }
  }
}

}  // namespace
}  // namespace qkv::test
