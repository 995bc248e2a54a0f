#include "cuda/placed_plan.hpp"

#include <algorithm>
#include <iterator>

#include "core/index/forward_sm90_many_rows_shape.hpp"
#include "core/index/multiprocessor_share.hpp"
#include "cuda/cta_lists.hpp"
#include "cuda/few_rows_lists.hpp"

namespace qkv::cuda {
namespace {

std::vector<plan::WorkItem> items_of(const plan::PlanData& plan, bool few_rows) {
  std::vector<plan::WorkItem> items;
  std::copy_if(plan.items.begin(), plan.items.end(), std::back_inserter(items),
               [&](const plan::WorkItem& item) { return item.few_rows == few_rows; });
  return items;
}

CtaLists lists_of(const plan::PlanData& plan, const std::vector<plan::WorkItem>& items, int32_t max_ctas) {
  if (max_ctas == 0) return {items, {}};
  return make_cta_lists(items, plan.layer.group_size(), max_ctas, [&](int32_t request) {
    return index::many_rows_heads_per_section(plan.seq_lens[request], plan.layer.head_dim, plan.layer.value_dim(),
                                              plan.layer.num_kv_heads);
  });
}

// Multiprocessors that the many-rows kernel leaves to the few-rows kernel.
int32_t few_rows_share(const plan::PlanData& plan, int32_t num_multiprocessors) {
  const int64_t dims = plan.layer.head_dim + plan.layer.value_dim();
  int64_t bytes = 0;
  int64_t operations = 0;
  for (const plan::WorkItem& item : plan.items) {
    const int64_t rows = static_cast<int64_t>(item.query_end - item.query_begin) * plan.layer.group_size();
    if (item.few_rows) {
      bytes += item.cost / rows * dims * size_bytes(plan.layer.kv_dtype);
    } else {
      operations += 2 * item.cost * dims;
    }
  }
  return index::few_rows_multiprocessors(bytes, operations, num_multiprocessors);
}

WorkItem device_item(const plan::WorkItem& item) {
  return {item.request,       item.kv_head,     item.query_begin, item.query_end,
          item.segment_begin, item.segment_end, item.state_row};
}

std::vector<KeySegment> segments_of(const plan::PlanData& plan) {
  std::vector<KeySegment> segments;
  segments.reserve(plan.segments.size());
  for (const mask::KeySegment& segment : plan.segments) {
    segments.push_back({segment.begin, segment.end, segment.tile_class == TileClass::full ? 1 : 0});
  }
  return segments;
}

// The joins of these items' states, each once.
std::vector<MergeItem> merges_of(const plan::PlanData& plan, const std::vector<plan::WorkItem>& items) {
  std::vector<MergeItem> merges;
  for (const plan::WorkItem& item : items) {
    if (item.merge < 0) continue;
    const plan::MergeItem& merge = plan.merges[item.merge];
    if (item.state_row != merge.state_row) continue;
    merges.push_back(
        {merge.request, merge.kv_head, merge.query_begin, merge.query_end, merge.num_states, merge.state_row});
  }
  return merges;
}

}  // namespace

DevicePlan::DevicePlan(const plan::PlanData& plan, const PlacementRules& rules, int32_t device_index,
                       jit::CUstream stream) {
  const bool paged = plan.layer.cache.has_value();
  std::vector<FewRowsList> few_rows_lists;
  if (rules.few_rows_sm90) few_rows_lists = make_few_rows_lists(plan);
  std::vector<plan::WorkItem> few;
  if (!rules.few_rows_sm90) few = items_of(plan, true);
  int32_t max_ctas = rules.max_ctas;
  if (rules.few_rows_sm90 && max_ctas > 0) max_ctas -= few_rows_share(plan, max_ctas);
  const CtaLists many = lists_of(plan, items_of(plan, false), max_ctas);
  num_few_rows_items = static_cast<int32_t>(few.size());
  num_many_rows_items = static_cast<int32_t>(many.items.size());
  num_ctas = std::max(static_cast<int32_t>(many.begin.size()) - 1, 0);
  std::vector<WorkItem> all;
  std::transform(few.begin(), few.end(), std::back_inserter(all), device_item);
  std::transform(many.items.begin(), many.items.end(), std::back_inserter(all), device_item);
  std::vector<plan::WorkItem> joined = many.items;
  joined.insert(joined.end(), few.begin(), few.end());
  const std::vector<MergeItem> merges = merges_of(plan, joined);
  num_merges = static_cast<int32_t>(merges.size());
  for (const MergeItem& merge : merges) {
    max_merge_rows = std::max<int64_t>(max_merge_rows, merge.query_end - merge.query_begin);
  }
  max_merge_rows *= plan.layer.group_size();

  Upload upload;
  const size_t items_at = upload.add(all);
  std::vector<size_t> lists_at;
  lists_at.reserve(few_rows_lists.size());
  for (const FewRowsList& list : few_rows_lists) lists_at.push_back(upload.add(list.items));
  const size_t tickets_at = upload.add(std::vector<int>(few_rows_lists.empty() ? 0 : plan.merges.size()));
  const size_t cta_begin_at = upload.add(many.begin);
  const size_t segments_at = upload.add(segments_of(plan));
  const size_t merges_at = upload.add(merges);
  const size_t starts_at = upload.add(plan.query_start_loc);
  const size_t lengths_at = upload.add(plan.seq_lens);
  const size_t key_start_at = upload.add(plan.key_start);
  const size_t page_start_at = upload.add(plan.page_start);
  const size_t pages_at = upload.add(plan.pages);
  const size_t slots_at = upload.add(plan.slot_mapping);
  const size_t slot_requests_at = upload.add(plan.slot_requests);
  const size_t slopes_at = upload.add(plan.alibi_slopes);
  std::vector<size_t> operands_at;
  for (const std::vector<int32_t>& operand : plan.operands) operands_at.push_back(upload.add(operand));
  arrays_ = DeviceBuffer::on_stream(device_index, upload.num_bytes(), stream);
  upload.place(arrays_, stream);

  const auto rows = static_cast<size_t>(plan.num_state_rows);
  states_lse_offset_ = rows * plan.layer.value_dim() * sizeof(float);
  states_ = DeviceBuffer::on_stream(device_index, states_lse_offset_ + rows * sizeof(float), stream);

  items = arrays_.as<const WorkItem>(items_at);
  for (size_t i = 0; i < few_rows_lists.size(); ++i) {
    const FewRowsList& list = few_rows_lists[i];
    few_rows_launches.push_back({list.tile_q, list.clustered, static_cast<int32_t>(list.items.size()),
                                 arrays_.as<const FewRowsItem>(lists_at[i])});
  }
  tickets = arrays_.as<int>(tickets_at);
  cta_begin = arrays_.as<const int>(cta_begin_at);
  slots = arrays_.as<const int64_t>(slots_at);
  if (!plan.slot_requests.empty()) slot_requests = arrays_.as<const int>(slot_requests_at);
  num_slots = static_cast<int64_t>(plan.slot_mapping.size());

  forward_.pages = arrays_.as<const int>(pages_at);
  forward_.page_start = arrays_.as<const long long>(paged ? page_start_at : key_start_at);
  forward_.page_size = paged ? plan.layer.cache->page_size : 0;
  forward_.query_start_loc = arrays_.as<const int>(starts_at);
  forward_.seq_lens = arrays_.as<const int>(lengths_at);
  forward_.segments = arrays_.as<const KeySegment>(segments_at);
  forward_.key_start = arrays_.as<const long long>(key_start_at);
  for (size_t i = 0; i < operands_at.size(); ++i) forward_.mask_operands[i] = arrays_.as<const int>(operands_at[i]);
  if (plan.layer.alibi_per_request) {
    forward_.alibi_slopes = arrays_.as<const float>(slopes_at);
    forward_.alibi_request_stride = plan.layer.num_q_heads;
  }
  forward_.state_out = states_.as<float>();
  forward_.state_lse = states_.as<float>(states_lse_offset_);

  merge_.items = arrays_.as<const MergeItem>(merges_at);
  merge_.states = forward_.state_out;
  merge_.states_lse = forward_.state_lse;
  merge_.query_start_loc = forward_.query_start_loc;
}

void DevicePlan::fill(ForwardParams& params) const { params = forward_; }

void DevicePlan::fill(MergePlanParams& params) const { params = merge_; }

}  // namespace qkv::cuda
