#include "cuda/device_rules.hpp"

#include "core/float8.hpp"

namespace qkv::cuda {
namespace {

// Measured on an H200 (docs/cuda.md and the kernels' essays): 4.5 TB/s; the sm_90a many-rows kernel at 650 TFLOP/s, the
// sm_80 kernel at 300. A multiprocessor alone draws about twice its even share of the memory. Other GPUs: the H200's
// numbers a multiprocessor, which tells more from less, not microseconds.
index::DeviceCosts device_costs(const DeviceFacts& facts) {
  constexpr double kMultiprocessors = 132;
  const bool is_hopper = facts.arch == "sm_90a";
  index::DeviceCosts costs;
  costs.num_workers = facts.num_multiprocessors;
  costs.worker_bytes_per_second = 2 * 4.5e12 / kMultiprocessors;
  costs.bytes_per_second = 4.5e12 / kMultiprocessors * facts.num_multiprocessors;
  costs.few_rows_operations = 300e12 / kMultiprocessors;
  costs.many_rows_operations = (is_hopper ? 650e12 : 300e12) / kMultiprocessors;
  costs.few_rows_tile = 8;
  costs.many_rows_tile = is_hopper ? 128 : 64;
  costs.item_seconds = 1e-6;
  costs.step_seconds = 3e-6;
  costs.shared_seconds = 4e-6;  // estimated: a launch, and joins through memory
  return costs;
}

}  // namespace

// Rows of several requests stand in items of few rows, as many as a tile holds: these are what waits for memory. (Items
// of many rows are bound by arithmetic.) An item has one scale for all its queries; and beside so many rows, Hopper's
// kernel has no registers for scales of tokens.
int32_t max_shared_rows(const LayerSpec& layer, const ForwardKernels& kernels) {
  if (is_float8(layer.query_dtype) || (kernels.few_rows_sm90 && has_token_scales(layer))) return 0;
  return 2 * layer.group_size() <= kernels.cut.few_rows ? kernels.cut.few_rows : 0;
}

plan::DeviceRules device_rules(const LayerSpec& layer, const DeviceFacts& facts) {
  const ForwardKernels kernels = forward_kernels(layer, facts);
  plan::DeviceRules rules;
  rules.shared_few_rows = max_shared_rows(layer, kernels);
  rules.shares_equal_tiles_only = kernels.few_rows_sm90;  // a lane's tiles are counted from the first that is read
  rules.costs = device_costs(facts);
  return rules;
}

bool has_common_keys(const LayerSpec& layer) { return layer.cache && layer.kv_scales != KvScales::per_request_head; }

bool planner_shares(int64_t max_requests, bool plans_on_device) {
  constexpr int64_t kLeastRequests = 8;  // fewer gain little
  return max_requests >= kLeastRequests && !plans_on_device;
}

DeviceFacts h200_facts() { return {"sm_90a", 132, 232448}; }

}  // namespace qkv::cuda
