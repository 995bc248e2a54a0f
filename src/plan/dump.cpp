#include <fmt/format.h>

#include <map>

#include "plan/builder.hpp"
#include "plan/schedule.hpp"

namespace qkv::plan {
namespace {

struct RequestTotals {
  int64_t items = 0;
  int64_t shared_items = 0;
  int64_t partial_states = 0;
  int64_t pairs = 0;
};

std::string describe_sharing(const PlanData& plan) {
  std::string text;
  for (const PrefixGroup& group : plan.prefix_groups) {
    text += fmt::format("  prefix group: {} requests from {} on share {} keys\n", group.requests.size(),
                        group.requests.front(), group.num_tokens);
  }
  if (plan.seconds_apart > 0) {
    text += fmt::format("  predicted: {:.4g} ms, {:.4g} ms without sharing\n", schedule(plan).seconds * 1e3,
                        plan.seconds_apart * 1e3);
  }
  return text;
}

}  // namespace

std::string describe(const PlanData& plan) {
  if (plan.on_device) return fmt::format("{} requests, planned on the device\n", plan.num_requests);
  std::map<int32_t, RequestTotals> totals;
  for (const WorkItem& item : plan.items) {
    const index::ItemCost cost = cost_of(plan, item);
    for_each_run(plan, item, [&](const RowRun& run) {
      RequestTotals& request = totals[run.request];
      ++request.items;
      request.shared_items += item.shared_begin < item.shared_end ? 1 : 0;
      request.partial_states += run.state_row >= 0 ? 1 : 0;
      request.pairs += cost.keys * (run.query_end - run.query_begin) * plan.layer.group_size();
    });
  }
  std::string text = fmt::format(
      "{} requests, {} new tokens, {} keys: {} items, {} merges, {} rows of partial states\n", plan.num_requests,
      plan.num_tokens, plan.num_shown_keys, plan.items.size(), plan.merges.size(), plan.num_state_rows);
  text += describe_sharing(plan);
  for (const auto& [request, total] : totals) {
    const mask::ProgramInput& input = plan.mask_inputs[request];
    const int32_t shown = plan.key_lens[request];
    text +=
        fmt::format("  request {}: {} new of {} keys{}, {} items ({} partial, {} shared), {:.3g} row x key pairs\n",
                    request, input.q_len, input.kv_len, shown == input.kv_len ? "" : fmt::format(" ({} shown)", shown),
                    total.items, total.partial_states, total.shared_items, static_cast<double>(total.pairs));
  }
  return text;
}

}  // namespace qkv::plan
