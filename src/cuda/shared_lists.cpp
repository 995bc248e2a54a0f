#include "cuda/shared_lists.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "cuda/few_rows_lists.hpp"

namespace qkv::cuda {
namespace {

void append_run(const plan::PlanData& plan, const plan::RowRun& run, std::vector<SharedToken>& tokens) {
  const int32_t group_size = plan.layer.group_size();
  const int32_t num_tokens = run.query_end - run.query_begin;
  const plan::MergeItem& merge = plan.merges[run.merge];
  for (int32_t i = 0; i < num_tokens; ++i) {
    const int32_t query = run.query_begin + i;
    SharedToken token{};
    token.request = run.request;
    token.query = query;
    token.token = plan.query_start_loc[run.request] + query;
    token.position = plan.seq_lens[run.request] - plan.mask_inputs[run.request].q_len + query;
    token.state_row = static_cast<int>(run.state_row) + i * group_size;
    token.run_tokens = i == 0 ? num_tokens : 0;
    token.ticket = run.merge;
    token.split = static_cast<short>((run.state_row - merge.state_row) / (int64_t{num_tokens} * group_size));
    token.num_splits = static_cast<short>(merge.num_states);
    tokens.push_back(token);
  }
}

// Items over the same keys side by side: these are then read from memory once, and from the cache after that. All
// requests that share keys name the same pages.
std::vector<plan::WorkItem> shared_items(const plan::PlanData& plan) {
  std::vector<plan::WorkItem> items;
  std::copy_if(plan.items.begin(), plan.items.end(), std::back_inserter(items),
               [](const plan::WorkItem& item) { return item.is_shared(); });
  const auto keys_of = [&](const plan::WorkItem& item) {
    const int32_t first_key = plan.segments[item.segment_begin].begin;
    const int32_t page = plan.pages[plan.page_start[item.request] + first_key / plan.layer.cache->page_size];
    return std::tuple(page, item.kv_head);
  };
  std::stable_sort(items.begin(), items.end(),
                   [&](const plan::WorkItem& a, const plan::WorkItem& b) { return keys_of(a) < keys_of(b); });
  return items;
}

}  // namespace

SharedLists make_shared_lists(const plan::PlanData& plan, bool few_rows_sm90) {
  SharedLists lists;
  if (plan.shared_rows.empty()) return lists;
  for (const plan::WorkItem& item : shared_items(plan)) {
    const auto begin = static_cast<int32_t>(lists.tokens.size());
    plan::for_each_run(plan, item, [&](const plan::RowRun& run) { append_run(plan, run, lists.tokens); });
    const auto end = static_cast<int32_t>(lists.tokens.size());
    if (few_rows_sm90) {
      const int32_t rows_of_a_request = (item.query_end - item.query_begin) * plan.layer.group_size();
      FewRowsItem placed = few_rows_item(plan, item);
      placed.query_begin = 0;
      placed.query_end = end - begin;
      placed.query_token = begin;
      lists.sm90[few_rows_tile_number(index::few_rows::tile_rows(rows_of_a_request))].push_back(placed);
    } else {
      lists.sm80.push_back(
          {item.request, item.kv_head, begin, end, item.segment_begin, item.segment_end, item.state_row});
    }
  }
  return lists;
}

}  // namespace qkv::cuda
