#include "cuda/device_rules.hpp"

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
  return costs;
}

}  // namespace

// Items hold rows of one request: kernels find a row's request in its item.
plan::DeviceRules device_rules(const DeviceFacts& facts) { return {0, 0, 0, device_costs(facts)}; }

DeviceFacts h200_facts() { return {"sm_90a", 132, 232448}; }

}  // namespace qkv::cuda
