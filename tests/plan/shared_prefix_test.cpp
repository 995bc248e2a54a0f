// Prefix groups, given or found, and the items that share their keys.
#include <set>

#include "plan/builder.hpp"
#include "support/small_layer.hpp"

namespace qkv::plan {
namespace {

constexpr DeviceRules kRules{.shared_few_rows = 64, .shared_many_rows = 384, .many_rows_from = 12};

RequestCutter cutter_of(const LayerSpec& layer) {
  const index::CutRules rules{.num_kv_heads = layer.num_kv_heads,
                              .group_size = layer.group_size(),
                              .few_rows = 16,
                              .few_rows_tile_kv = 128,
                              .tile_kv = 128,
                              .tile_q = 96,
                              .rows_per_item = 384};
  return [rules](int32_t q_len, int32_t) { return index::cut_request(rules, q_len); };
}

PlanData plan_of(const LayerSpec& layer, const Batch& batch, const DeviceRules& rules = kRules) {
  return build(layer, batch, cutter_of(layer), rules);
}

tools::Case decode_of(std::vector<int32_t> kv, std::vector<PrefixGroup> groups) {
  auto c = testing::case_of(4, 1, 8, std::vector<int32_t>(kv.size(), 1), kv);
  c.prefix_groups = std::move(groups);
  c.prefix_sharing = PrefixSharing::always;
  return c;
}

std::vector<PrefixGroup> found_groups(const tools::Case& c) {
  const tools::CaseData data(c);
  return plan_of(c.layer, data.batch()).prefix_groups;
}

// Requests whose rows an item with the split [begin, end) works on, as sets.
std::set<std::vector<int32_t>> readers_of(const PlanData& plan, int32_t begin, int32_t end) {
  std::set<std::vector<int32_t>> readers;
  for (const WorkItem& item : plan.items) {
    if (plan.segments[item.segment_begin].begin < begin || plan.segments[item.segment_end - 1].end > end) continue;
    std::vector<int32_t> requests;
    for_each_run(plan, item, [&](const RowRun& run) { requests.push_back(run.request); });
    readers.insert(requests);
  }
  return readers;
}

TEST(prefix_groups, equal_leading_pages_make_nested_groups) {
  const auto groups = found_groups(decode_of({1000, 900, 800, 50, 700}, {{{0, 1, 2, 4}, 320}, {{0, 2}, 640}}));
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].requests, (std::vector<int32_t>{0, 1, 2, 4}));
  EXPECT_EQ(groups[0].num_tokens, 320);
  EXPECT_EQ(groups[1].requests, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(groups[1].num_tokens, 640);
}

TEST(prefix_groups, requests_with_pages_of_their_own_make_none) {
  EXPECT_TRUE(found_groups(decode_of({1000, 900, 800}, {})).empty());
}

// Both requests of the case get the first one's 40 pages; the planner finds one group of so many tokens.
void expect_one_found_group(const tools::Case& c, int32_t num_tokens) {
  const tools::CaseData data(c);
  std::vector<int32_t> table = data.block_table;
  std::copy_n(table.begin(), 40, table.begin() + data.table_width);
  Batch batch = data.batch();
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {2, data.table_width});
  const PlanData plan = plan_of(c.layer, batch);
  ASSERT_EQ(plan.prefix_groups.size(), 1U);
  EXPECT_EQ(plan.prefix_groups[0].num_tokens, num_tokens);
}

// A page that holds a new token is nobody else's, whatever the table says.
TEST(prefix_groups, a_found_group_ends_before_the_first_new_token_of_every_member) {
  auto c = decode_of({640, 640}, {{{0, 1}, 624}});
  expect_one_found_group(c, 624);
}

// Beams of one source sequence: all of its whole pages.
TEST(prefix_groups, cross_attention_shares_to_the_end) {
  auto c = decode_of({640, 640}, {});
  c.layer.type = AttentionType::encoder_decoder;
  expect_one_found_group(c, 640);
}

TEST(shared_prefix, whole_splits_are_read_once_for_all_members) {
  const auto c = decode_of({2000, 2100, 2200, 700}, {{{0, 1, 2}, 1600}});
  const tools::CaseData data(c);
  const PlanData plan = plan_of(c.layer, data.batch());
  const std::vector<int32_t> all = {0, 1, 2};
  for (const int32_t begin : {0, 512, 1024}) {
    const auto readers = readers_of(plan, begin, begin + 512);
    EXPECT_TRUE(readers.contains(all)) << "split " << begin;
    EXPECT_FALSE(readers.contains({0})) << "split " << begin;
  }
  EXPECT_TRUE(readers_of(plan, 1536, 2048).contains({0}));  // the prefix ends inside
}

TEST(shared_prefix, nested_groups_share_what_each_has) {
  const auto c = decode_of({2500, 2500, 2500, 2500}, {{{0, 1, 2, 3}, 512}, {{1, 3}, 1024}});
  const tools::CaseData data(c);
  const PlanData plan = plan_of(c.layer, data.batch());
  EXPECT_EQ(readers_of(plan, 0, 512), (std::set<std::vector<int32_t>>{{0, 1, 2, 3}}));
  EXPECT_EQ(readers_of(plan, 512, 1024), (std::set<std::vector<int32_t>>{{1, 3}, {0}, {2}}));
}

TEST(shared_prefix, splits_and_merges_are_those_of_a_plan_without) {
  auto c = decode_of({2000, 2100, 2200}, {{{0, 1, 2}, 1600}});
  const tools::CaseData data(c);
  const PlanData shared = plan_of(c.layer, data.batch());
  c.prefix_sharing = PrefixSharing::off;
  const PlanData apart = plan_of(c.layer, data.batch());
  EXPECT_LT(shared.items.size(), apart.items.size());
  ASSERT_EQ(shared.merges.size(), apart.merges.size());
  EXPECT_EQ(shared.num_state_rows, apart.num_state_rows);
  for (size_t i = 0; i < shared.merges.size(); ++i) {
    EXPECT_EQ(shared.merges[i].state_row, apart.merges[i].state_row);
    EXPECT_EQ(shared.merges[i].num_states, apart.merges[i].num_states);
  }
}

TEST(shared_prefix, an_engine_whose_items_are_of_one_request_gets_such) {
  const auto c = decode_of({2000, 2100}, {{{0, 1}, 1600}});
  const tools::CaseData data(c);
  Batch batch = data.batch();
  testing::expect_refused([&] { plan_of(c.layer, batch, {}); }, ErrorCode::unsupported, "prefix_sharing");
  batch.prefix_sharing = PrefixSharing::automatic;
  for (const WorkItem& item : plan_of(c.layer, batch, {}).items) EXPECT_EQ(item.shared_begin, item.shared_end);
}

// A window that only some members' rows have left: the others take no part.
TEST(shared_prefix, members_that_see_nothing_of_a_split_take_no_part) {
  auto c = decode_of({1200, 3000, 1300}, {{{0, 1, 2}, 1100}});
  c.layer.mask = mask::causal() & mask::window(700, -1);
  const tools::CaseData data(c);
  const PlanData plan = plan_of(c.layer, data.batch());
  EXPECT_EQ(readers_of(plan, 512, 1024), (std::set<std::vector<int32_t>>{{0, 2}}));
}

void expect_group_refused(std::vector<PrefixGroup> groups, const std::string& argument) {
  auto c = decode_of({1000, 900, 800, 50}, {{{0, 1, 2}, 320}});
  const tools::CaseData data(c);
  Batch batch = data.batch();
  batch.prefix_groups = std::move(groups);
  testing::expect_refused([&] { plan_of(c.layer, batch); }, ErrorCode::invalid_argument, argument);
}

TEST(prefix_groups, bad_groups_are_refused_by_name) {
  expect_group_refused({{{}, 16}}, "prefix_groups[0].requests");
  expect_group_refused({{{0, 1}, 16}, {{0, 4}, 16}}, "prefix_groups[1].requests[1]");
  expect_group_refused({{{0, -1}, 16}}, "prefix_groups[0].requests[1]");
  expect_group_refused({{{1, 0, 1}, 16}}, "prefix_groups[0].requests[2]");
  expect_group_refused({{{0, 1}, 0}}, "prefix_groups[0].num_tokens");
  expect_group_refused({{{0, 1}, 336}}, "prefix_groups[0].requests[1]");  // the 21st page differs
  expect_group_refused({{{0, 3}, 50}}, "prefix_groups[0].num_tokens");    // its first query is at 49
  expect_group_refused({{{0, 1}, 16}, {{1, 2}, 16}}, "prefix_groups");    // neither nested nor apart
}

TEST(prefix_groups, layers_without_a_cache_have_none) {
  auto c = testing::case_of(4, 1, 8, {1, 1}, {64, 64}, false);
  const tools::CaseData data(c);
  Batch batch = data.batch();
  batch.prefix_groups = {{{0, 1}, 16}};
  testing::expect_refused([&] { plan_of(c.layer, batch); }, ErrorCode::mismatch, "prefix_groups");
}

// Segments stay few however many KV heads read them.
TEST(shared_prefix, kv_heads_have_the_same_joined_segments) {
  auto c = decode_of({40'000, 40'000, 40'000}, {{{0, 1, 2}, 32'000}});
  c.layer.num_kv_heads = 4;
  c.layer.num_q_heads = 16;
  const tools::CaseData data(c);
  const PlanData plan = plan_of(c.layer, data.batch());
  std::set<int32_t> first_keys;
  std::set<int32_t> segments;
  for (const WorkItem& item : plan.items) {
    if (!item.is_shared()) continue;
    first_keys.insert(plan.segments[item.segment_begin].begin);
    segments.insert(item.segment_begin);
  }
  EXPECT_GT(first_keys.size(), 1U);
  EXPECT_EQ(segments.size(), first_keys.size());
}

}  // namespace
}  // namespace qkv::plan
