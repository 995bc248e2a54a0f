// The structs of qkv.h for C++ values; what they point to must outlive them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "qkv/qkv.h"
#include "qkv/qkv.hpp"

namespace qkv::testing {

inline qkv_tensor to_c(const Tensor& tensor) {
  qkv_tensor result{};
  result.data = tensor.data;
  result.dtype = static_cast<qkv_dtype>(tensor.dtype);
  result.device = {static_cast<qkv_device_kind>(tensor.device.kind), tensor.device.index};
  result.rank = tensor.rank;
  std::copy(tensor.shape.begin(), tensor.shape.end(), result.shape);
  std::copy(tensor.stride.begin(), tensor.stride.end(), result.stride);
  return result;
}

struct CSpec {
  explicit CSpec(const LayerSpec& layer) : mask_text(layer.mask ? layer.mask->text() : "") {
    qkv_layer_spec_init(&spec, sizeof spec);
    spec.num_q_heads = layer.num_q_heads;
    spec.num_kv_heads = layer.num_kv_heads;
    spec.head_dim = layer.head_dim;
    spec.head_dim_v = layer.head_dim_v;
    spec.query_dtype = static_cast<qkv_dtype>(layer.query_dtype);
    spec.kv_dtype = static_cast<qkv_dtype>(layer.kv_dtype);
    spec.has_output_dtype = layer.output_dtype.has_value();
    spec.output_dtype = static_cast<qkv_dtype>(layer.output_dtype.value_or(DType::f32));
    spec.type = static_cast<qkv_attention_type>(layer.type);
    spec.has_cache = layer.cache.has_value();
    spec.page_size = layer.cache ? layer.cache->page_size : 0;
    spec.mask = layer.mask ? mask_text.c_str() : nullptr;
    spec.has_scale = layer.scale.has_value();
    spec.scale = layer.scale.value_or(0);
    spec.softcap = layer.softcap;
    spec.alibi_slopes = layer.alibi_slopes.data();
    spec.num_alibi_slopes = static_cast<int64_t>(layer.alibi_slopes.size());
    spec.alibi_per_request = layer.alibi_per_request;
    spec.sinks = layer.sinks.data();
    spec.num_sinks = static_cast<int64_t>(layer.sinks.size());
    spec.kv_scales = static_cast<qkv_kv_scales>(layer.kv_scales);
    spec.key_run = static_cast<qkv_key_run>(layer.key_run);
    spec.shard = {layer.shard.rank, layer.shard.num_ranks, layer.shard.interleave_size};
    spec.output_scales = static_cast<qkv_output_scales>(layer.output_scales);
  }
  CSpec(const CSpec&) = delete;
  CSpec& operator=(const CSpec&) = delete;

  std::string mask_text;
  qkv_layer_spec spec;
};

struct CBatch {
  explicit CBatch(const Batch& source) : names(source.mask_operands), source_groups(source.prefix_groups) {
    for (const MaskOperand& operand : names) operands.push_back({operand.name.c_str(), to_c(operand.values)});
    qkv_batch_init(&batch, sizeof batch);
    batch.query_start_loc = to_c(source.query_start_loc);
    batch.seq_lens = to_c(source.seq_lens);
    batch.block_table = to_c(source.block_table);
    batch.slot_mapping = to_c(source.slot_mapping);
    batch.mask_operands = operands.data();
    batch.num_mask_operands = static_cast<int64_t>(operands.size());
    batch.alibi_slopes = to_c(source.alibi_slopes);
    for (const PrefixGroup& group : source_groups) {
      groups.push_back({group.requests.data(), static_cast<int64_t>(group.requests.size()), group.num_tokens});
    }
    batch.prefix_sharing = static_cast<qkv_prefix_sharing>(source.prefix_sharing);
    batch.prefix_sharing_changes_bits = source.prefix_sharing_keeps_bits ? 0 : 1;
    batch.prefix_groups = groups.data();
    batch.num_prefix_groups = static_cast<int64_t>(groups.size());
  }
  CBatch(const CBatch&) = delete;
  CBatch& operator=(const CBatch&) = delete;

  std::vector<MaskOperand> names;
  std::vector<qkv_mask_operand> operands;
  std::vector<PrefixGroup> source_groups;
  std::vector<qkv_prefix_group> groups;
  qkv_batch batch;
};

inline qkv_kv_cache to_c(const KvCache& cache) {
  return {to_c(cache.key), to_c(cache.value), to_c(cache.key_scale), to_c(cache.value_scale)};
}

// A call that must succeed.
inline void expect_ok(qkv_status status) { EXPECT_EQ(status, QKV_OK) << qkv_last_error_message(); }

struct Destroy {
  void operator()(qkv_attention* attention) const { qkv_attention_destroy(attention); }
  void operator()(qkv_plan* plan) const { qkv_plan_destroy(plan); }
};
using AttentionHandle = std::unique_ptr<qkv_attention, Destroy>;
using PlanHandle = std::unique_ptr<qkv_plan, Destroy>;

inline AttentionHandle create(const qkv_layer_spec& spec) {
  qkv_attention* attention = nullptr;
  expect_ok(qkv_attention_create(&spec, {QKV_CPU, 0}, &attention));
  return AttentionHandle(attention);
}

inline PlanHandle make_plan(const AttentionHandle& attention, const qkv_batch& batch) {
  qkv_plan* plan = nullptr;
  expect_ok(qkv_attention_plan(attention.get(), &batch, &plan, nullptr));
  return PlanHandle(plan);
}

// The text of a function that fills the caller's buffer: asked for its size first.
template <class Fill>
std::string text_of(const Fill& fill) {
  size_t needed = 0;
  expect_ok(fill(nullptr, 0, &needed));
  std::vector<char> buffer(needed, 'x');
  expect_ok(fill(buffer.data(), buffer.size(), nullptr));
  EXPECT_EQ(std::string(buffer.data()).size() + 1, needed);
  return buffer.data();
}

}  // namespace qkv::testing
