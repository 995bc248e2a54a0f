// The cost model: items over workers, and what sharing gains.
#include "plan/schedule.hpp"

#include <gtest/gtest.h>

#include "plan/builder.hpp"
#include "support/small_layer.hpp"

namespace qkv::plan {
namespace {

index::DeviceCosts costs_of(int32_t num_workers) {
  index::DeviceCosts costs;
  costs.num_workers = num_workers;
  costs.bytes_per_second = num_workers * 10e9;
  costs.worker_bytes_per_second = 20e9;
  costs.few_rows_operations = 100e9;
  costs.many_rows_operations = 150e9;
  costs.item_seconds = 1e-6;
  return costs;
}

PlanData plan_of(const LayerSpec& layer, const Batch& batch, const DeviceRules& rules) {
  const index::CutRules cut{layer.num_kv_heads, layer.group_size(), 16, 128, 128, 96, 384};
  return build(
      layer, batch, [&](int32_t q_len, int32_t) { return index::cut_request(cut, q_len); }, rules);
}

TEST(cost, bytes_and_operations_of_an_item) {
  const index::ItemSizes sizes{.head_dim = 64, .head_dim_v = 32, .query_bytes = 2, .kv_bytes = 2, .output_bytes = 4};
  EXPECT_EQ(index::item_bytes(sizes, 4, 1000, 1, false), 1000 * 96 * 2 + 4 * (64 * 2 + 32 * 4));
  EXPECT_EQ(index::item_bytes(sizes, 4, 1000, 1, true), 1000 * 96 * 2 + 4 * (64 * 2 + 33 * 4));
  EXPECT_EQ(index::item_bytes(sizes, 4, 1000, 8, false), 1000 * 96 * 2 / 8 + 4 * (64 * 2 + 32 * 4));
  EXPECT_EQ(index::item_operations(sizes, 4000), 2 * 4000 * 96);
  EXPECT_EQ(index::merge_bytes(sizes, 4, 3), 4 * (3 * 33 * 4 + 32 * 4));
}

TEST(cost, an_item_waits_for_memory_or_for_arithmetic) {
  index::DeviceCosts costs = costs_of(4);
  costs.few_rows_tile = 8;
  const double overhead = costs.item_seconds;
  // Alone, a worker gets 20 GB/s, and a quarter of 40 GB/s beside three others.
  EXPECT_DOUBLE_EQ(index::item_seconds(costs, {8, 1, 20'000'000, 1, true}, 1), overhead + 1e-3);
  EXPECT_DOUBLE_EQ(index::item_seconds(costs, {8, 1, 20'000'000, 1, true}, 4), overhead + 2e-3);
  EXPECT_DOUBLE_EQ(index::item_seconds(costs, {8, 1, 1, 100'000'000, true}, 1), overhead + 1e-3);
  EXPECT_DOUBLE_EQ(index::item_seconds(costs, {4, 1, 1, 100'000'000, true}, 1), overhead + 2e-3);  // half a tile
}

TEST(schedule, turns_of_a_worker_follow_one_another_and_no_worker_waits) {
  auto c = testing::case_of(4, 2, 16, {1, 40, 1}, {3000, 500, 700});
  const tools::CaseData data(c);
  const PlanData plan = plan_of(c.layer, data.batch(), {.costs = costs_of(3)});
  const Schedule times = schedule(plan);
  ASSERT_EQ(times.turns.size(), plan.items.size());
  std::vector<double> free_at(3, 0.0);
  for (const Turn& turn : times.turns) {
    EXPECT_EQ(turn.begin, free_at[turn.worker]);
    for (const double other : free_at) EXPECT_LE(turn.begin, other);  // the idlest worker
    EXPECT_GT(turn.end, turn.begin);
    free_at[turn.worker] = turn.end;
  }
  EXPECT_EQ(times.items_seconds, *std::max_element(free_at.begin(), free_at.end()));
  EXPECT_GE(times.seconds, times.items_seconds);
}

// 8 decode steps over 4096 shared keys: two workers gain by reading them once. Of 1000 workers, each with bandwidth to
// spare, the most would stand idle.
TEST(schedule, automatic_shares_where_workers_are_few_and_not_where_they_are_many) {
  auto c = testing::case_of(4, 1, 64, std::vector<int32_t>(8, 1), std::vector<int32_t>(8, 4200));
  c.prefix_groups = {{{0, 1, 2, 3, 4, 5, 6, 7}, 4096}};
  const tools::CaseData data(c);
  for (const int32_t num_workers : {2, 1000}) {
    DeviceRules rules{.shared_few_rows = 64, .shared_many_rows = 384, .costs = costs_of(num_workers)};
    rules.costs.few_rows_operations = 20e9;
    const PlanData plan = plan_of(c.layer, data.batch(), rules);
    EXPECT_EQ(plan.shared_rows.empty(), num_workers == 1000) << num_workers << " workers";
    EXPECT_LE(schedule(plan).seconds, plan.seconds_apart);
  }
}

}  // namespace
}  // namespace qkv::plan
