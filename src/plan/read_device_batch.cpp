// A batch whose arrays lie on the device: what the host can see of it is checked, the rest by the kernels that read it.
#include <algorithm>

#include "core/checks.hpp"
#include "core/index/paging.hpp"
#include "plan/builder.hpp"

namespace qkv::plan {
namespace {

void check_array(const Tensor& tensor, const char* name, Device device, DType dtype, const char* axes) {
  check_rank(tensor, name, 1, axes);
  check_device(tensor, name, device);
  check_dtype(tensor, name, dtype);
  check_last_axis_contiguous(tensor, name);
}

template <class T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data);
}

void read_cache_arrays(const LayerSpec& layer, Device device, const Batch& batch, const PlanLimits& limits,
                       DeviceBatch& read) {
  if (!layer.cache) {
    for (const auto& [tensor, name] :
         {std::pair(batch.block_table, "block_table"), {batch.slot_mapping, "slot_mapping"}}) {
      if (tensor.is_given()) refuse(name, tensor.describe(), "none: the layer has no cache", ErrorCode::mismatch);
    }
    return;
  }
  check_rank(batch.block_table, "block_table", 2, "[num_requests, max_pages]");
  check_device(batch.block_table, "block_table", device);
  check_dtype(batch.block_table, "block_table", DType::i32);
  check_last_axis_contiguous(batch.block_table, "block_table");
  check_extent_at_least(batch.block_table, "block_table", 0, read.num_requests, "num_requests");
  check_extent_at_least(batch.block_table, "block_table", 1,
                        index::num_pages(shown_limits(layer, limits).max_seq_len, layer.cache->page_size),
                        "pages of limits.max_seq_len keys");
  read.block_table = data_of<int32_t>(batch.block_table);
  read.block_table_stride = batch.block_table.stride[0];
  if (!batch.slot_mapping.is_given()) return;
  check_array(batch.slot_mapping, "slot_mapping", device, DType::i64, "[num_slots]");
  if (batch.slot_mapping.shape[0] > max_slots(layer, limits)) {
    refuse("slot_mapping: slots", batch.slot_mapping.shape[0],
           fmt::format("at most {}: the planner's limits", max_slots(layer, limits)));
  }
  read.slot_mapping = data_of<int64_t>(batch.slot_mapping);
  read.num_slots = static_cast<int32_t>(batch.slot_mapping.shape[0]);
}

}  // namespace

DeviceBatch read_device_batch(const LayerSpec& layer, Device device, const Batch& batch, const PlanLimits& limits,
                              PlanData& plan) {
  if (!limits.plans_on_device) {
    refuse("query_start_loc", batch.query_start_loc.describe() + " on a device",
           "a host array, or a planner with limits.plans_on_device", ErrorCode::mismatch);
  }
  DeviceBatch read{};
  check_array(batch.query_start_loc, "query_start_loc", device, DType::i32, "[num_requests + 1]");
  if (batch.query_start_loc.shape[0] < 1) {
    refuse("query_start_loc", batch.query_start_loc.describe(), "at least one entry: [num_requests + 1]");
  }
  if (batch.query_start_loc.shape[0] - 1 > limits.max_requests) {
    refuse("query_start_loc: requests", batch.query_start_loc.shape[0] - 1,
           fmt::format("at most {}: the planner's limits.max_requests", limits.max_requests));
  }
  read.num_requests = static_cast<int32_t>(batch.query_start_loc.shape[0] - 1);
  read.query_start_loc = data_of<int32_t>(batch.query_start_loc);
  check_array(batch.seq_lens, "seq_lens", device, DType::i32, "[num_requests]");
  check_extent(batch.seq_lens, "seq_lens", 0, read.num_requests, "num_requests");
  read.seq_lens = data_of<int32_t>(batch.seq_lens);
  read_cache_arrays(layer, device, batch, limits, read);

  const Mask mask = layer.effective_mask();
  plan.layer = layer;
  plan.mask = mask::compile(mask);
  plan.mask_hash = mask.hash();
  for (const OperandDeclaration& declared : plan.mask.operands) {
    const std::string name = fmt::format("mask_operands[{}]", declared.name);
    const auto found = std::find_if(batch.mask_operands.begin(), batch.mask_operands.end(),
                                    [&](const MaskOperand& operand) { return operand.name == declared.name; });
    if (found == batch.mask_operands.end()) {
      refuse(name, "nothing", fmt::format("i32[{}], one a request: the mask reads it", read.num_requests));
    }
    check_array(found->values, name.c_str(), device, DType::i32, "one a request");
    check_extent(found->values, name.c_str(), 0, read.num_requests, "one a request");
    read.operands.push_back(data_of<int32_t>(found->values));
  }
  if (layer.alibi_per_request) {
    check_rank(batch.alibi_slopes, "alibi_slopes", 2, "[num_requests, num_q_heads]");
    check_device(batch.alibi_slopes, "alibi_slopes", device);
    check_dtype(batch.alibi_slopes, "alibi_slopes", DType::f32);
    check_extent(batch.alibi_slopes, "alibi_slopes", 0, read.num_requests, "num_requests");
    check_extent(batch.alibi_slopes, "alibi_slopes", 1, layer.num_q_heads, "num_q_heads");
    if (batch.alibi_slopes.shape[0] > 1 && batch.alibi_slopes.stride[0] != layer.num_q_heads) {
      refuse("alibi_slopes", batch.alibi_slopes.describe(), "a contiguous tensor");
    }
    check_last_axis_contiguous(batch.alibi_slopes, "alibi_slopes");
    read.alibi_slopes = data_of<float>(batch.alibi_slopes);
  }
  plan.num_requests = read.num_requests;
  plan.num_tokens = limits.max_tokens;
  plan.num_keys = limits.max_keys;
  plan.has_slot_mapping = read.slot_mapping != nullptr;
  plan.on_device = true;
  return read;
}

}  // namespace qkv::plan
