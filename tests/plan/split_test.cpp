// The planner's items against brute force: every (row, visible key) pair lies in exactly one item of its head.
#include "core/index/split.hpp"

#include <map>
#include <set>

#include "plan/builder.hpp"
#include "support/small_layer.hpp"

namespace qkv::plan {
namespace {

constexpr int32_t kFewRowsTileKv = 16;
constexpr int32_t kTileKv = 80;

RequestCutter cutter_of(const LayerSpec& layer) {
  const index::CutRules rules{.num_kv_heads = layer.num_kv_heads,
                              .group_size = layer.group_size(),
                              .few_rows = 4,
                              .few_rows_tile_kv = kFewRowsTileKv,
                              .tile_kv = kTileKv,
                              .tile_q = 8,
                              .rows_per_item = 24};
  return [rules](int32_t q_len, int32_t) { return index::cut_request(rules, q_len); };
}

PlanData plan_of(const tools::Case& c) {
  const tools::CaseData data(c);
  return build(c.layer, data.batch(), cutter_of(c.layer), {64, 64});
}

MaskScene scene_of(const tools::Case& c, const tools::CaseData& data, int32_t request) {
  MaskScene scene;
  scene.request = request;
  scene.q_len = c.requests[request].q_len;
  scene.kv_len = c.requests[request].kv_len;
  scene.query_start = data.query_start_loc[request];
  for (int32_t r = 0; r < request; ++r) scene.key_start += c.requests[r].kv_len;
  scene.operands = data.batch().mask_operands;
  return scene;
}

void expect_items_cover(const tools::Case& c) {
  const tools::CaseData data(c);
  const PlanData plan = build(c.layer, data.batch(), cutter_of(c.layer), {64, 64});
  const int32_t group = c.layer.group_size();
  // covered[request, kv_head, query, key]: how many items hold the pair.
  std::map<std::array<int32_t, 4>, int32_t> covered;
  std::map<std::array<int32_t, 3>, int32_t> finishers;  // of a row: items that finish it, or merges
  for (const WorkItem& item : plan.items) {
    for_each_run(plan, item, [&](const RowRun& run) {
      for (int32_t query = run.query_begin; query < run.query_end; ++query) {
        if (run.state_row < 0) ++finishers[{run.request, item.kv_head, query}];
        for (int32_t s = item.segment_begin; s < item.segment_end; ++s) {
          const mask::KeySegment& segment = plan.segments[s];
          ASSERT_EQ(segment.begin % (item.few_rows ? kFewRowsTileKv : kTileKv), 0);
          ASSERT_LT(segment.begin, segment.end);
          for (int32_t key = segment.begin; key < segment.end; ++key) {
            ++covered[{run.request, item.kv_head, query, key}];
          }
        }
      }
    });
  }
  for (const MergeItem& merge : plan.merges) {
    ASSERT_GT(merge.num_states, 1);
    for (int32_t query = merge.query_begin; query < merge.query_end; ++query) {
      ++finishers[{merge.request, merge.kv_head, query}];
    }
  }
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    MaskScene scene = scene_of(c, data, r);
    for (int32_t head = 0; head < c.layer.num_q_heads; ++head) {
      scene.q_head = head;
      for (int32_t query = 0; query < scene.q_len; ++query) {
        ASSERT_EQ((finishers[{r, head / group, query}]), 1);
        for (int32_t key = 0; key < plan.key_lens[r]; ++key) {
          const int32_t times = covered[{r, head / group, query, key}];
          ASSERT_LE(times, 1);
          const bool visible = is_visible(c.layer.effective_mask(), scene, query, plan.mask_inputs[r].kv_pos(key));
          ASSERT_TRUE(!visible || times == 1) << tools::describe(c);
        }
      }
    }
  }
}

TEST(split, every_visible_pair_lies_in_one_item) {
  int32_t used = 0;
  for (int64_t index = 0; used < 60; ++index) {
    tools::Case c = tools::draw_case(11, index);
    int64_t pairs = 0;
    for (const auto& r : c.requests) pairs += static_cast<int64_t>(r.q_len) * r.kv_len * c.layer.num_q_heads;
    if (pairs > 60'000) continue;
    ++used;
    expect_items_cover(c);
  }
}

TEST(split, states_of_a_merge_lie_behind_one_another_in_rising_key_order) {
  auto c = testing::case_of(4, 1, 8, {1, 2, 6}, {3000, 700, 2500});
  const PlanData plan = plan_of(c);
  ASSERT_FALSE(plan.merges.empty());
  for (const MergeItem& merge : plan.merges) {
    std::map<int64_t, int32_t> first_key;  // by state row
    for (const WorkItem& item : plan.items) {
      if (item.request == merge.request && item.kv_head == merge.kv_head && item.query_begin == merge.query_begin) {
        first_key[item.state_row] = plan.segments[item.segment_begin].begin;
      }
    }
    ASSERT_EQ(first_key.size(), static_cast<size_t>(merge.num_states));
    int64_t expected_row = merge.state_row;
    int32_t last_key = -1;
    for (const auto& [row, key] : first_key) {
      EXPECT_EQ(row, expected_row);
      EXPECT_GT(key, last_key);
      expected_row += static_cast<int64_t>(merge.query_end - merge.query_begin) * 4;
      last_key = key;
    }
  }
}

TEST(split, the_odd_tokens_come_first) {
  const PlanData plan = plan_of(testing::case_of(1, 1, 8, {1000}, {1000}));
  std::set<int32_t> begins;
  for (const WorkItem& item : plan.items) {
    begins.insert(item.query_begin);
    EXPECT_EQ(item.query_end - item.query_begin, item.query_begin == 0 ? 16 : 24);
    EXPECT_EQ((1000 - item.query_end) % 24, 0);
  }
  EXPECT_EQ(begins.size(), 42U);
}

TEST(split, longest_items_come_first) {
  const PlanData plan = plan_of(testing::case_of(4, 2, 8, {40, 1, 3}, {40, 3000, 100}));
  for (size_t i = 1; i < plan.items.size(); ++i) EXPECT_GE(plan.items[i - 1].cost, plan.items[i].cost);
}

TEST(split, a_window_reads_only_its_own_keys) {
  auto c = testing::case_of(1, 1, 8, {1}, {100'000});
  c.layer.mask = mask::sliding_window(128);
  const tools::CaseData data(c);
  const PlanData plan = build(c.layer, data.batch(), cutter_of(c.layer), {64, 64});
  int64_t keys = 0;
  for (const WorkItem& item : plan.items) {
    for (int32_t s = item.segment_begin; s < item.segment_end; ++s) {
      keys += plan.segments[s].end - plan.segments[s].begin;
    }
  }
  EXPECT_LE(keys, 256);
  EXPECT_GE(keys, 128);
}

TEST(split, rules_see_only_the_requests_own_numbers) {
  using namespace index;
  EXPECT_EQ(split_keys(1, 8, 16, 384), 2048);
  EXPECT_EQ(split_keys(16, 1, 16, 384), 512);
  EXPECT_EQ(split_keys(17, 1, 16, 384), 2048);
  EXPECT_EQ(split_keys(385, 1, 16, 384), INT32_MAX);
  EXPECT_EQ(whole_tiles(2048, 128), 2048);
  EXPECT_EQ(whole_tiles(2048, 80), 2080);
  EXPECT_EQ(whole_tiles(INT32_MAX, 80), INT32_MAX);
  EXPECT_EQ(split_end(0, 2048, 5000), 2048);
  EXPECT_EQ(split_end(2048, 2048, 5000), 4096);
  EXPECT_EQ(split_end(4096, 2048, 5000), 5000);
  EXPECT_EQ(split_end(INT32_MAX - 10, 2048, INT32_MAX), INT32_MAX);
  EXPECT_EQ(split_end(7, INT32_MAX, 5000), 5000);
  // Few rows of few heads make small items, many rows full ones; one token's heads are never torn apart.
  EXPECT_EQ(tokens_per_item(100, 1, 4, 384, 96), 24);
  EXPECT_EQ(tokens_per_item(100'000, 8, 4, 384, 96), 96);
  EXPECT_EQ(tokens_per_item(100'000, 1, 500, 384, 96), 1);
  EXPECT_EQ(first_item_tokens(1000, 24), 16);
  EXPECT_EQ(first_item_tokens(1008, 24), 24);
  EXPECT_EQ(first_item_tokens(5, 24), 5);
  EXPECT_EQ(first_item_tokens(0, 0), 0);
}

TEST(split, the_next_end_is_that_of_the_split_whichever_end_was_known) {
  for (const int keys : {1, 7, 128, INT32_MAX}) {
    for (const int kv_end : {1, 7, 300, INT32_MAX}) {
      int before = 0;
      for (int position = 0; position < kv_end && position < 1000; position += position % 3 + 1) {
        const int expected = index::split_end(position, keys, kv_end);
        EXPECT_EQ(index::next_split_end(position, before, keys, kv_end), expected);
        if (position >= before) before = expected;
      }
    }
  }
  EXPECT_EQ(index::next_split_end(1 << 30, 1 << 30, 1 << 30, INT32_MAX), INT32_MAX);
}

TEST(split, a_dump_names_every_request) {
  const std::string text = describe(plan_of(testing::case_of(4, 2, 8, {4, 1}, {40, 3000})));
  EXPECT_NE(text.find("request 0: 4 new of 40 keys"), std::string::npos) << text;
  EXPECT_NE(text.find("request 1: 1 new of 3000 keys"), std::string::npos) << text;
}

}  // namespace
}  // namespace qkv::plan
