#include "cuda/plan_lists.hpp"

#include <algorithm>
#include <iterator>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/index/forward_sm90_many_rows_shape.hpp"
#include "cuda/cta_lists.hpp"
#include "cuda/device_rules.hpp"

namespace qkv::cuda {
namespace {

std::vector<plan::WorkItem> items_of(const plan::PlanData& plan, bool few_rows) {
  std::vector<plan::WorkItem> items;
  std::copy_if(plan.items.begin(), plan.items.end(), std::back_inserter(items),
               [&](const plan::WorkItem& item) { return item.few_rows == few_rows; });
  return items;
}

CtaLists cta_lists_of(const plan::PlanData& plan, const std::vector<plan::WorkItem>& items, int32_t max_ctas) {
  if (max_ctas == 0) return {items, {}};
  const int32_t element_bytes = size_bytes(plan.layer.kv_dtype);
  return make_cta_lists(items, plan.layer.group_size(), max_ctas, [&, element_bytes](int32_t request) {
    return index::many_rows_heads_per_section(plan.key_lens[request], plan.layer.head_dim * element_bytes / 2,
                                              plan.layer.value_dim() * element_bytes / 2, plan.layer.num_kv_heads);
  });
}

void append(std::vector<WorkItem>& target, const std::vector<plan::WorkItem>& items) {
  for (const plan::WorkItem& item : items) {
    if (item.is_shared()) continue;  // SharedLists
    target.push_back({item.request, item.kv_head, item.query_begin, item.query_end, item.segment_begin,
                      item.segment_end, item.state_row});
  }
}

// The joins of these items' states, each once.
void append_merges(PlanLists& lists, const plan::PlanData& plan, const std::vector<plan::WorkItem>& items) {
  const auto append_merge_of = [&](const plan::RowRun& run) {
    if (run.merge < 0) return;
    const plan::MergeItem& merge = plan.merges[run.merge];
    if (run.state_row != merge.state_row) return;
    lists.merges.push_back(
        {merge.request, merge.kv_head, merge.query_begin, merge.query_end, merge.num_states, merge.state_row});
    const int64_t rows = int64_t{merge.query_end - merge.query_begin} * plan.layer.group_size();
    lists.max_rows_of_merges = std::max(lists.max_rows_of_merges, rows);
  };
  for (const plan::WorkItem& item : items) plan::for_each_run(plan, item, append_merge_of);
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

template <class T>
size_t size_of(int64_t count) {
  return static_cast<size_t>(count) * sizeof(T);
}

// An item of shared rows stands for two or more, each of a request with at most half its rows. What the device plans
// shares nothing.
void add_shared_bytes(const LayerSpec& layer, const PlacementRules& rules, const plan::PlanCapacity& capacity,
                      std::array<size_t, kNumPlanArrays>& bytes) {
  const int32_t most_tokens = std::min(capacity.query_len, rules.max_shared_rows / 2 / layer.group_size());
  if (most_tokens == 0 || !has_common_keys(layer)) return;
  if (!planner_shares(capacity.requests, capacity.on_device)) return;
  bytes[kSegments] *= plan::kSegmentsWithSharing;
  bytes[kSharedTokens] = size_of<SharedToken>(capacity.few_rows_items * most_tokens);
  constexpr int64_t kGrain = index::few_rows::kMaxClusterSplits;  // lists are as long as grids
  const int64_t most_items = (capacity.few_rows_items / 2 + kGrain - 1) / kGrain * kGrain;
  if (!rules.few_rows_sm90) bytes[kSharedItems] = size_of<WorkItem>(most_items);
  for (int32_t tokens = 1; tokens <= most_tokens && rules.few_rows_sm90; ++tokens) {
    const int32_t tile_q = index::few_rows::tile_rows(tokens * layer.group_size());
    bytes[kSharedSm90 + few_rows_tile_number(tile_q)] = size_of<FewRowsItem>(most_items);
  }
}

}  // namespace

PlanLists make_plan_lists(const plan::PlanData& plan, const PlacementRules& rules, ClusterUse clusters) {
  PlanLists lists;
  if (rules.few_rows_sm90) {
    for (FewRowsList& list : make_few_rows_lists(plan, clusters)) {
      const int32_t tile = few_rows_tile_number(list.tile_q);
      lists.counts.few_rows_sm90[tile] = static_cast<int>(list.items.size());
      lists.few_rows_sm90[tile] = std::move(list);
    }
    lists.tickets.resize(plan.merges.size());
  } else {
    const std::vector<plan::WorkItem> few = items_of(plan, true);
    append(lists.few_rows, few);
    append_merges(lists, plan, few);
  }
  lists.shared = make_shared_lists(plan, rules.few_rows_sm90);
  CtaLists many = cta_lists_of(plan, items_of(plan, false), rules.max_ctas);
  append(lists.many_rows, many.items);
  append_merges(lists, plan, many.items);
  lists.cta_begin = std::move(many.begin);
  if (rules.max_ctas > 0 && clusters == ClusterUse::always) {
    lists.cta_begin.resize(rules.max_ctas + 1, lists.cta_begin.back());
  }
  lists.segments.reserve(plan.segments.size());
  for (const mask::KeySegment& segment : plan.segments) {
    lists.segments.push_back({segment.begin, segment.end, segment.tile_class == TileClass::full ? 1 : 0});
  }
  lists.counts.few_rows = static_cast<int>(lists.few_rows.size());
  lists.counts.many_rows = static_cast<int>(lists.many_rows.size());
  lists.counts.merges = static_cast<int>(lists.merges.size());
  lists.counts.shared_few_rows = static_cast<int>(lists.shared.sm80.size());
  for (int32_t tile = 0; tile < kFewRowsTiles; ++tile) {
    lists.counts.shared_sm90[tile] = static_cast<int>(lists.shared.sm90[tile].size());
  }
  lists.counts.slots = static_cast<int>(plan.slot_mapping.size());
  return lists;
}

std::array<std::span<const std::byte>, kNumPlanArrays> PlanLists::arrays(const plan::PlanData& plan) const {
  std::array<std::span<const std::byte>, kNumPlanArrays> arrays;
  arrays[kCounts] = std::as_bytes(std::span(&counts, 1));
  arrays[kCtaBegin] = bytes_of(cta_begin);
  arrays[kQueryStartLoc] = bytes_of(plan.query_start_loc);
  arrays[kSeqLens] = bytes_of(plan.seq_lens);
  arrays[kKeyStart] = bytes_of(plan.key_start);
  arrays[kPageStart] = bytes_of(plan.page_start);
  arrays[kAlibiSlopes] = bytes_of(plan.alibi_slopes);
  arrays[kTickets] = bytes_of(tickets);
  arrays[kMerges] = bytes_of(merges);
  arrays[kSlots] = bytes_of(plan.slot_mapping);
  arrays[kSlotRequests] = bytes_of(plan.slot_requests);
  arrays[kFewRowsItems] = bytes_of(few_rows);
  arrays[kManyRowsItems] = bytes_of(many_rows);
  for (int32_t tile = 0; tile < kFewRowsTiles; ++tile) {
    arrays[kFewRowsSm90 + tile] = bytes_of(few_rows_sm90[tile].items);
    arrays[kSharedSm90 + tile] = bytes_of(shared.sm90[tile]);
  }
  arrays[kSharedTokens] = bytes_of(shared.tokens);
  arrays[kSharedItems] = bytes_of(shared.sm80);
  arrays[kSegments] = bytes_of(segments);
  arrays[kPages] = bytes_of(plan.pages);
  for (size_t i = 0; i < plan.operands.size(); ++i) arrays[kOperands + i] = bytes_of(plan.operands[i]);
  return arrays;
}

std::array<size_t, kNumPlanArrays> array_bytes(const LayerSpec& layer, const PlacementRules& rules,
                                               const plan::PlanCapacity& capacity) {
  std::array<size_t, kNumPlanArrays> bytes{};
  bytes[kCounts] = sizeof(PlanCounts);
  if (rules.max_ctas > 0) bytes[kCtaBegin] = size_of<int32_t>(rules.max_ctas + 1);
  bytes[kQueryStartLoc] = size_of<int32_t>(capacity.requests + 1);
  bytes[kSeqLens] = size_of<int32_t>(capacity.requests);
  bytes[kKeyStart] = size_of<int64_t>(capacity.requests);
  bytes[kPageStart] = size_of<int64_t>(capacity.requests);
  if (layer.alibi_per_request) bytes[kAlibiSlopes] = size_of<float>(capacity.requests * layer.num_q_heads);
  const int64_t all_merges = capacity.few_rows_merges + capacity.many_rows_merges;
  bytes[kMerges] = size_of<MergeItem>(rules.few_rows_sm90 ? capacity.many_rows_merges : all_merges);
  bytes[kSlots] = size_of<int64_t>(capacity.slots);
  const bool scales_of_requests = layer.cache && layer.kv_scales == KvScales::per_request_head;
  if (scales_of_requests) bytes[kSlotRequests] = size_of<int32_t>(capacity.slots);
  bytes[kManyRowsItems] = size_of<WorkItem>(capacity.many_rows_items);
  if (rules.few_rows_sm90) {
    bytes[kTickets] = size_of<int32_t>(all_merges);
    const int64_t most_tokens = std::min(capacity.query_len, rules.max_few_rows / layer.group_size());
    for (int64_t tokens = 1; tokens <= most_tokens; ++tokens) {
      const int32_t tile_q = index::few_rows::tile_rows(static_cast<int>(tokens * layer.group_size()));
      bytes[kFewRowsSm90 + few_rows_tile_number(tile_q)] =
          size_of<FewRowsItem>(clustered_room(capacity.few_rows_items));
    }
  } else {
    bytes[kFewRowsItems] = size_of<WorkItem>(capacity.few_rows_items);
  }
  bytes[kSegments] = size_of<KeySegment>(capacity.segments);
  add_shared_bytes(layer, rules, capacity, bytes);
  if (capacity.on_device && capacity.blocks > rules.max_planner_blocks) {
    bytes[kBlocks] = size_of<PlanBlock>(kPlannersWithRoomOfTheirOwn * capacity.blocks);
  }
  bytes[kPages] = size_of<int32_t>(capacity.pages);
  const mask::Program program = mask::compile(layer.effective_mask());
  for (size_t i = 0; i < program.operands.size(); ++i) {
    const OperandScope scope = program.operands[i].scope;
    const int64_t values = scope == OperandScope::request ? capacity.requests
                           : scope == OperandScope::key   ? capacity.keys
                                                          : capacity.tokens;
    bytes[kOperands + i] = size_of<int32_t>(values);
  }
  return bytes;
}

}  // namespace qkv::cuda
