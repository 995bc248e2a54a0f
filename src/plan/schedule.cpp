#include "plan/schedule.hpp"

#include <algorithm>
#include <functional>
#include <queue>

namespace qkv::plan {
namespace {

index::ItemSizes sizes_of(const LayerSpec& layer) {
  return {layer.head_dim, layer.value_dim(), size_bytes(layer.query_dtype), size_bytes(layer.kv_dtype),
          size_bytes(layer.out_dtype())};
}

}  // namespace

index::ItemCost cost_of(const PlanData& plan, const WorkItem& item) {
  index::ItemCost cost{};
  cost.few_rows = item.few_rows;
  cost.rows = packed_rows(plan, item);
  for (int32_t s = item.segment_begin; s < item.segment_end; ++s) {
    cost.keys += plan.segments[s].end - plan.segments[s].begin;
  }
  const index::ItemSizes sizes = sizes_of(plan.layer);
  const int32_t tokens = item.query_end - item.query_begin;
  const int32_t row_blocks = (plan.mask_inputs[item.request].q_len + tokens - 1) / tokens;
  cost.bytes = index::item_bytes(sizes, cost.rows, cost.keys, row_blocks, item.state_row >= 0);
  cost.operations = index::item_operations(sizes, item.cost);
  return cost;
}

Schedule schedule(const PlanData& plan) {
  Schedule result;
  const index::DeviceCosts& costs = plan.costs;
  const auto busy =
      static_cast<int32_t>(std::clamp<int64_t>(static_cast<int64_t>(plan.items.size()), 1, costs.num_workers));
  using Idle = std::pair<double, int32_t>;  // since when, which worker
  std::priority_queue<Idle, std::vector<Idle>, std::greater<>> workers;
  for (int32_t worker = 0; worker < costs.num_workers; ++worker) workers.emplace(0, worker);
  for (const WorkItem& item : plan.items) {
    const auto [begin, worker] = workers.top();
    workers.pop();
    const double end = begin + index::item_seconds(costs, cost_of(plan, item), busy);
    workers.emplace(end, worker);
    result.turns.push_back({worker, begin, end});
    result.items_seconds = std::max(result.items_seconds, end);
  }
  int64_t merged_bytes = 0;
  for (const MergeItem& merge : plan.merges) {
    const int64_t rows = int64_t{merge.query_end - merge.query_begin} * plan.layer.group_size();
    merged_bytes += index::merge_bytes(sizes_of(plan.layer), rows, merge.num_states);
  }
  result.seconds =
      costs.step_seconds + result.items_seconds + static_cast<double>(merged_bytes) / costs.bytes_per_second;
  if (!plan.shared_rows.empty()) result.seconds += costs.shared_seconds;
  return result;
}

}  // namespace qkv::plan
