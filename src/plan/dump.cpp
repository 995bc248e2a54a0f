#include <fmt/format.h>

#include <map>

#include "plan/builder.hpp"

namespace qkv::plan {
namespace {

struct RequestTotals {
  int64_t items = 0;
  int64_t partial_states = 0;
  int64_t pairs = 0;
};

}  // namespace

std::string describe(const PlanData& plan) {
  if (plan.on_device) return fmt::format("{} requests, planned on the device\n", plan.num_requests);
  std::map<int32_t, RequestTotals> totals;
  for (const WorkItem& item : plan.items) {
    RequestTotals& request = totals[item.request];
    ++request.items;
    request.partial_states += item.state_row >= 0 ? 1 : 0;
    request.pairs += item.cost;
  }
  std::string text = fmt::format(
      "{} requests, {} new tokens, {} keys: {} items, {} merges, {} rows of partial states\n", plan.num_requests,
      plan.num_tokens, plan.num_keys, plan.items.size(), plan.merges.size(), plan.num_state_rows);
  for (const auto& [request, total] : totals) {
    const mask::ProgramInput& input = plan.mask_inputs[request];
    text += fmt::format("  request {}: {} new of {} keys, {} items ({} partial), {:.3g} row x key pairs\n", request,
                        input.q_len, input.kv_len, total.items, total.partial_states, static_cast<double>(total.pairs));
  }
  return text;
}

}  // namespace qkv::plan
