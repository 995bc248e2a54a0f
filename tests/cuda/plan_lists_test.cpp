// Every batch within a planner's limits fits the arrays that were made for it, and launches that will run with other
// batches find what they need.
#include "cuda/plan_lists.hpp"

#include <numeric>

#include "cuda/device_rules.hpp"
#include "cuda/planner_scene.hpp"
#include "plan/builder.hpp"

namespace qkv::cuda {
namespace {

constexpr int32_t kMaxCtas = 6;

// The smallest limits that hold the batch.
PlanLimits limits_of(const tools::Case& c) {
  PlanLimits limits{.max_requests = 1, .max_tokens = 1, .max_query_len = 1, .max_seq_len = 1, .num_pages = 1};
  int64_t tokens = 0;
  int64_t keys = 0;
  for (const tools::RequestLengths& request : c.requests) {
    tokens += request.q_len;
    keys += request.kv_len;
    limits.max_query_len = std::max(limits.max_query_len, request.q_len);
    limits.max_seq_len = std::max(limits.max_seq_len, request.kv_len);
  }
  limits.max_requests = std::max<int32_t>(1, static_cast<int32_t>(c.requests.size()));
  limits.max_tokens = std::max<int64_t>(1, tokens);
  limits.max_keys = std::max<int64_t>(1, keys);
  return limits;
}

TEST(plan_lists, of_every_batch_within_the_limits_fit_the_arrays) {
  size_t num_shared = 0;
  for (const LayerSpec& layer : planner_layers()) {
    for (int64_t i = 0; i < 120; ++i) {
      const bool hopper = i % 2 == 0;
      const Rules rules(layer, hopper ? "sm_90a" : "sm_80");
      const tools::Case c = draw_batch(layer, i);
      const Lengths lengths(c);
      // All pages are page 0: half of the batches share whatever they can, where a planner has room for it.
      Batch batch = lengths.batch(layer);
      batch.prefix_sharing = c.requests.size() >= 8 && i % 4 < 2 ? PrefixSharing::always : PrefixSharing::off;
      const DeviceFacts facts = facts_of_arch(hopper ? "sm_90a" : "sm_80");
      plan::DeviceRules device = device_rules(layer, facts);
      if (!planner_shares(static_cast<int64_t>(c.requests.size()), false)) device.shared_few_rows = 0;
      const plan::PlanData plan = plan::build(layer, batch, rules, device);
      num_shared += plan.shared_rows.size();
      const PlanLimits limits = plan::checked_limits(layer, limits_of(c));
      const plan::PlanCapacity capacity = plan::capacity_of(layer, limits, cut_bounds(layer, rules.kernels));
      const PlacementRules placement{rules.kernels.few_rows_sm90, rules.kernels.cut.few_rows, hopper ? kMaxCtas : 0,
                                     rules.kernels.cut.rows_per_item, device.shared_few_rows};
      const PlanLists lists = make_plan_lists(plan, placement, ClusterUse::always);
      const auto arrays = lists.arrays(plan);
      const auto bytes = array_bytes(layer, placement, capacity);
      for (int32_t a = 0; a < kNumPlanArrays; ++a) {
        EXPECT_LE(arrays[a].size(), bytes[a]) << "array " << a << " of " << tools::describe(c);
      }
      EXPECT_LE(plan.num_state_rows, capacity.state_rows) << tools::describe(c);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(num_shared, 100U);
}

// The prefix of all, then keys of each: every item of the prefix is shared, and brings segments of its own.
TEST(plan_lists, of_a_long_prefix_that_all_requests_share_fit_the_arrays) {
  LayerSpec layer = testing::layer_of(32, 8, 128);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache = CacheSpec{16};
  for (const int32_t window : {0, 5000}) {
    if (window > 0) layer.mask = mask::sliding_window(window);
    auto c = testing::case_of(32, 8, 128, std::vector<int32_t>(64, 1), std::vector<int32_t>(64, 8704));
    c.layer = layer;
    std::vector<int32_t> all(64);
    std::iota(all.begin(), all.end(), 0);
    const Lengths lengths(c);
    Batch batch = lengths.batch(layer);
    batch.prefix_groups = {{all, 8192}};
    batch.prefix_sharing = PrefixSharing::always;
    const Rules rules(layer, "sm_90a");
    const plan::DeviceRules device = device_rules(layer, facts_of_arch("sm_90a"));
    const plan::PlanData plan = plan::build(layer, batch, rules, device);
    EXPECT_GT(plan.shared_rows.size(), 1000U);
    const PlanLimits limits = plan::checked_limits(
        layer, {.max_requests = 64, .max_tokens = 64, .max_query_len = 1, .max_seq_len = 8704, .num_pages = 1});
    const PlacementRules placement{true, rules.kernels.cut.few_rows, kMaxCtas, rules.kernels.cut.rows_per_item,
                                   device.shared_few_rows};
    const PlanLists lists = make_plan_lists(plan, placement, ClusterUse::always);
    const auto arrays = lists.arrays(plan);
    const auto bytes =
        array_bytes(layer, placement, plan::capacity_of(layer, limits, cut_bounds(layer, rules.kernels)));
    for (int32_t a = 0; a < kNumPlanArrays; ++a) EXPECT_LE(arrays[a].size(), bytes[a]) << "array " << a;
  }
}

TEST(plan_lists, planners_whose_plans_share_nothing_have_no_room_for_it) {
  const LayerSpec layer = planner_layers().front();
  const Rules rules(layer, "sm_90a");
  const PlacementRules placement{true, 32, kMaxCtas, 128, device_rules(layer, facts_of_arch("sm_90a")).shared_few_rows};
  PlanLimits limits{.max_requests = 8, .max_tokens = 8, .max_query_len = 1, .max_seq_len = 4096, .num_pages = 100};
  const auto shared_bytes = [&] {
    const PlanLimits checked = plan::checked_limits(layer, limits);
    const auto bytes =
        array_bytes(layer, placement, plan::capacity_of(layer, checked, cut_bounds(layer, rules.kernels)));
    EXPECT_EQ(bytes[kSharedSm90] > 0, bytes[kSharedTokens] > 0);
    return bytes[kSharedTokens];
  };
  EXPECT_GT(shared_bytes(), 0U);
  limits.plans_on_device = true;
  EXPECT_EQ(shared_bytes(), 0U);
  limits.plans_on_device = false;
  limits.max_requests = 7;
  EXPECT_EQ(shared_bytes(), 0U);
}

TEST(plan_lists, captured_launches_find_a_list_for_each_cta) {
  const LayerSpec layer = planner_layers().front();
  auto c = testing::case_of(8, 2, 64, {50, 1}, {60, 30});
  c.layer = layer;
  const plan::PlanData plan = plan::build(layer, Lengths(c).batch(layer), Rules(layer, "sm_90a"));
  const PlacementRules placement{true, 32, kMaxCtas, 128};
  const PlanLists lists = make_plan_lists(plan, placement, ClusterUse::always);
  ASSERT_EQ(lists.cta_begin.size(), static_cast<size_t>(kMaxCtas) + 1);
  EXPECT_EQ(lists.cta_begin.back(), lists.counts.many_rows);
  EXPECT_GT(lists.counts.many_rows, 0);
  for (const FewRowsList& list : lists.few_rows_sm90) EXPECT_TRUE(list.items.empty() || list.cluster_size == 8);
  EXPECT_EQ(lists.counts.few_rows, 0);
}

TEST(plan_lists, decode_alone_leaves_out_the_kernels_of_prefill) {
  const LayerSpec layer = planner_layers().front();
  const Rules rules(layer, "sm_90a");
  const PlanLimits limits = plan::checked_limits(
      layer, {.max_requests = 8, .max_tokens = 8, .max_query_len = 1, .max_seq_len = 4096, .num_pages = 100});
  const auto bytes =
      array_bytes(layer, {true, 32, kMaxCtas, 128}, plan::capacity_of(layer, limits, cut_bounds(layer, rules.kernels)));
  EXPECT_EQ(bytes[kManyRowsItems], 0U);
  EXPECT_EQ(bytes[kMerges], 0U);
  EXPECT_GT(bytes[kFewRowsSm90], 0U);
  for (int32_t tile = 1; tile < kFewRowsTiles; ++tile) EXPECT_EQ(bytes[kFewRowsSm90 + tile], 0U);
}

}  // namespace
}  // namespace qkv::cuda
