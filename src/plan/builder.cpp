#include "plan/builder.hpp"

#include <algorithm>

#include "core/checks.hpp"
#include "plan/schedule.hpp"

namespace qkv::plan {
namespace {

template <class Int>
void check_at_most(const std::string& what, Int value, Int limit, const char* name) {
  if (value <= limit) return;
  refuse(what, value, fmt::format("at most {}: the planner's limits.{}", limit, name));
}

void make_work(PlanData& plan, const RequestCutter& cut_request, const DeviceRules& rules) {
  plan.segments.clear();
  plan.items.clear();
  plan.shared_rows.clear();
  plan.merges.clear();
  plan.num_state_rows = 0;
  cut_work(plan, cut_request);
  share_prefixes(plan, cut_request, rules);
  // Longest first, so that the last items to start are short ones. Stable: the order is the same everywhere.
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
}

DeviceRules with_shared_rows(DeviceRules rules, int32_t divisor) {
  rules.shared_few_rows = divisor == 0 ? 0 : rules.shared_few_rows / divisor;
  rules.shared_many_rows = divisor == 0 ? 0 : rules.shared_many_rows / divisor;
  return rules;
}

// Fewer rows an item are more items for the workers, and more reading; 0 is no sharing. The quickest by the cost model.
void share_where_it_pays(PlanData& plan, const RequestCutter& cut_request, const DeviceRules& rules) {
  constexpr int32_t kDivisors[] = {1, 4, 0};
  int32_t best = 1;
  double best_seconds = 0;
  for (const int32_t divisor : kDivisors) {
    if (divisor != 1) make_work(plan, cut_request, with_shared_rows(rules, divisor));
    const double seconds = schedule(plan).seconds;
    if (divisor == 1 || seconds < best_seconds) {
      best = divisor;
      best_seconds = seconds;
    }
    if (divisor == 0) plan.seconds_apart = seconds;
  }
  if (best != 0) make_work(plan, cut_request, with_shared_rows(rules, best));
}

}  // namespace

PlanData build(const LayerSpec& layer, const Batch& batch, const RequestCutter& cut_request,
               const DeviceRules& device_rules) {
  PlanData plan = read_batch(layer, batch);
  if (plan.prefix_sharing == PrefixSharing::always && device_rules.shared_few_rows == 0) {
    refuse("prefix_sharing", "always",
           "automatic or off: the work items of this layer and planner hold rows of one request",
           ErrorCode::unsupported);
  }
  // With scales of their own, requests read other keys from the same bytes.
  const bool are_keys_own = layer.cache && layer.kv_scales == KvScales::per_request_head;
  const DeviceRules rules = are_keys_own ? with_shared_rows(device_rules, 0) : device_rules;
  plan.costs = rules.costs;
  const bool may_share = plan.prefix_sharing != PrefixSharing::off && rules.shared_few_rows > 0;
  if (may_share && plan.prefix_groups.empty()) find_prefix_groups(plan);
  make_work(plan, cut_request, rules);
  const bool is_choice = plan.prefix_sharing == PrefixSharing::automatic && !plan.shared_rows.empty();
  if (is_choice) share_where_it_pays(plan, cut_request, rules);
  return plan;
}

void check_limits(const PlanData& plan, const PlanLimits& limits) {
  check_at_most("query_start_loc: requests", plan.num_requests, limits.max_requests, "max_requests");
  check_at_most("query_start_loc: new tokens", plan.num_tokens, limits.max_tokens, "max_tokens");
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    check_at_most(fmt::format("query_start_loc: new tokens of request {}", r), plan.mask_inputs[r].q_len,
                  limits.max_query_len, "max_query_len");
    check_at_most(fmt::format("seq_lens[{}]", r), plan.seq_lens[r], limits.max_seq_len, "max_seq_len");
  }
  check_at_most("seq_lens: keys of all requests", plan.num_keys, limits.max_keys, "max_keys");
  if (!plan.layer.cache) return;
  check_at_most("block_table: page", plan.max_page, limits.num_pages - 1, "num_pages - 1");
  const auto num_slots = static_cast<int64_t>(plan.slot_mapping.size());
  const bool cross = plan.layer.type == AttentionType::encoder_decoder;
  check_at_most("slot_mapping: slots", num_slots, max_slots(plan.layer, limits), cross ? "max_keys" : "max_tokens");
  check_at_most("slot_mapping: slot", plan.max_slot, int64_t{limits.num_pages} * plan.layer.cache->page_size - 1,
                "num_pages·page_size - 1");
}

}  // namespace qkv::plan
