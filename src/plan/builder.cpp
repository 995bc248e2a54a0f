#include "plan/builder.hpp"

#include "core/checks.hpp"

namespace qkv::plan {
namespace {

template <class Int>
void check_at_most(const std::string& what, Int value, Int limit, const char* name) {
  if (value <= limit) return;
  refuse(what, value, fmt::format("at most {}: the planner's limits.{}", limit, name));
}

}  // namespace

PlanData build(const LayerSpec& layer, const Batch& batch, const RequestCutter& cut_request) {
  PlanData plan = read_batch(layer, batch);
  cut_work(plan, cut_request);
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
