// No batch within the limits is larger than the capacity, and the bounds are not wide of the mark.
#include "plan/capacity.hpp"

#include "plan/builder.hpp"
#include "support/small_layer.hpp"

namespace qkv::plan {
namespace {

using testing::case_of;
using testing::expect_refused;

constexpr int32_t kFewRows = 16;
constexpr int32_t kTileKv = 32;
constexpr int32_t kTileQ = 64;
constexpr int32_t kRowsPerItem = 128;

index::CutRules rules_of(const LayerSpec& layer) {
  return {layer.num_kv_heads, layer.group_size(), kFewRows, kTileKv, kTileKv, kTileQ, kRowsPerItem};
}

CutBounds bounds_of(const LayerSpec& layer) {
  const int32_t keys = index::few_rows_split_keys(layer.num_kv_heads);
  return {kFewRows, kTileKv, kTileQ, kRowsPerItem, kTileKv, {1, keys, INT32_MAX}, {1, 4 * keys, INT32_MAX}};
}

// Requests drawn until one of the limits is reached.
std::vector<tools::RequestLengths> draw_requests(tools::Draw& draw, const PlanLimits& limits, KeyRun run) {
  std::vector<tools::RequestLengths> requests;
  int64_t tokens = 0;
  int64_t keys = 0;
  while (static_cast<int32_t>(requests.size()) < limits.max_requests) {
    const auto q_len = static_cast<int32_t>(draw.range(0, draw.one_in(2) ? 1 : limits.max_query_len));
    auto kv_len = static_cast<int32_t>(draw.range(0, draw.one_in(3) ? 100 : limits.max_seq_len));
    if (run != KeyRun::all) kv_len = std::max(kv_len, q_len);
    tokens += q_len;
    keys += kv_len;
    if (tokens > limits.max_tokens || keys > limits.max_keys) break;
    requests.push_back({q_len, kv_len});
  }
  return requests;
}

void show_some_keys(tools::Draw& draw, LayerSpec& layer) {
  if (draw.one_in(4)) {
    layer.cache.reset();
    layer.key_run = KeyRun::new_tokens;
    return;
  }
  if (draw.one_in(2)) layer.key_run = KeyRun::context;
  layer.shard.num_ranks = static_cast<int32_t>(draw.range(1, 8));
  layer.shard.rank = static_cast<int32_t>(draw.range(0, layer.shard.num_ranks - 1));
  layer.shard.interleave_size = draw.pick<int32_t>({1, 2, 16});
}

PlanLimits with_pages(PlanLimits limits, const LayerSpec& layer) {
  if (!layer.cache) limits.num_pages = 0;
  return limits;
}

void expect_within(const PlanData& plan, const PlanCapacity& capacity) {
  int64_t few_rows_items = 0;
  for (const WorkItem& item : plan.items) few_rows_items += item.few_rows ? 1 : 0;
  EXPECT_LE(few_rows_items, capacity.few_rows_items);
  EXPECT_LE(static_cast<int64_t>(plan.items.size()) - few_rows_items, capacity.many_rows_items);
  EXPECT_LE(static_cast<int64_t>(plan.segments.size()), capacity.segments);
  EXPECT_LE(static_cast<int64_t>(plan.merges.size()), capacity.few_rows_merges + capacity.many_rows_merges);
  EXPECT_LE(plan.num_state_rows, capacity.state_rows);
  EXPECT_LE(static_cast<int64_t>(plan.pages.size()), capacity.pages);
}

TEST(capacity, holds_every_batch_within_the_limits) {
  const std::vector<Mask> masks = {mask::causal(),     mask::sliding_window(70),
                                   mask::everything(), mask::prefix_lm(200),
                                   mask::document(),   mask::tree(),
                                   mask::rswa(90),     mask::per_request_causal() & mask::window(40, 40)};
  const std::vector<PlanLimits> all_limits = {
      {.max_requests = 20, .max_tokens = 20, .max_query_len = 1, .max_seq_len = 5000, .num_pages = 10'000},
      {.max_requests = 5, .max_tokens = 900, .max_seq_len = 3000, .num_pages = 10'000},
      {.max_requests = 30,
       .max_tokens = 200,
       .max_query_len = 40,
       .max_seq_len = 4000,
       .max_keys = 9000,
       .num_pages = 10'000},
  };
  for (int64_t i = 0; i < 360; ++i) {
    tools::Draw draw(7, i);
    auto c = case_of(draw.one_in(2) ? 8 : 4, draw.one_in(2) ? 4 : 1, 16, {}, {});
    c.index = i;
    c.layer.mask = draw.pick(masks);
    if (i >= 240) show_some_keys(draw, c.layer);
    const PlanLimits limits = checked_limits(c.layer, with_pages(all_limits[i % all_limits.size()], c.layer));
    c.requests = draw_requests(draw, limits, c.layer.key_run);
    const tools::CaseData data(c);
    const index::CutRules rules = rules_of(c.layer);
    const PlanData plan =
        build(c.layer, data.batch(), [&](int32_t q_len, int32_t) { return index::cut_request(rules, q_len); });
    check_limits(plan, limits);
    expect_within(plan, capacity_of(c.layer, limits, bounds_of(c.layer)));
    EXPECT_LE(plan.num_shown_keys, shown_limits(c.layer, limits).max_keys);
  }
}

TEST(capacity, of_a_rank_is_its_share) {
  auto c = case_of(8, 8, 16, {}, {});
  const auto limits = [&] {
    return checked_limits(
        c.layer, {.max_requests = 16, .max_tokens = 16, .max_query_len = 1, .max_seq_len = 65536, .num_pages = 8192});
  };
  const PlanCapacity whole = capacity_of(c.layer, limits(), bounds_of(c.layer));
  c.layer.shard = {3, 8, 16};
  const PlanCapacity share = capacity_of(c.layer, limits(), bounds_of(c.layer));
  EXPECT_LE(share.state_rows, whole.state_rows / 6);
  EXPECT_EQ(share.pages, whole.pages / 8);
  EXPECT_EQ(share.keys, whole.keys);  // operands are of whole requests
}

TEST(capacity, of_equal_decode_requests_is_what_they_need) {
  auto c = case_of(8, 8, 16, std::vector<int32_t>(16, 1), std::vector<int32_t>(16, 8192));
  const PlanLimits limits = checked_limits(
      c.layer, {.max_requests = 16, .max_tokens = 16, .max_query_len = 1, .max_seq_len = 8192, .num_pages = 8192});
  const PlanCapacity capacity = capacity_of(c.layer, limits, bounds_of(c.layer));
  const tools::CaseData data(c);
  const index::CutRules rules = rules_of(c.layer);
  const PlanData plan =
      build(c.layer, data.batch(), [&](int32_t q_len, int32_t) { return index::cut_request(rules, q_len); });
  expect_within(plan, capacity);
  EXPECT_LE(capacity.few_rows_items, 2 * static_cast<int64_t>(plan.items.size()));
  EXPECT_EQ(capacity.many_rows_items, 0);
  EXPECT_LE(capacity.state_rows, 2 * plan.num_state_rows);
}

TEST(capacity, limits_that_cannot_be_meant_are_refused) {
  const LayerSpec layer = case_of(4, 2, 64, {1}, {1}).layer;
  const PlanLimits good = {.max_requests = 4, .max_tokens = 8, .max_seq_len = 100, .num_pages = 10};
  const auto refused = [&](const char* name, auto change) {
    PlanLimits limits = good;
    change(limits);
    expect_refused([&] { checked_limits(layer, limits); }, ErrorCode::invalid_argument, name);
  };
  refused("limits.max_requests", [](PlanLimits& l) { l.max_requests = 0; });
  refused("limits.max_tokens", [](PlanLimits& l) { l.max_tokens = 0; });
  refused("limits.max_query_len", [](PlanLimits& l) { l.max_query_len = -1; });
  refused("limits.max_seq_len", [](PlanLimits& l) { l.max_seq_len = 0; });
  refused("limits.max_keys", [](PlanLimits& l) { l.max_keys = -5; });
  refused("limits.num_pages", [](PlanLimits& l) { l.num_pages = 0; });
  const PlanLimits filled = checked_limits(layer, good);
  EXPECT_EQ(filled.max_query_len, 8);
  EXPECT_EQ(filled.max_keys, 400);
}

}  // namespace
}  // namespace qkv::plan
