// The definition: float64, naive, one loop a concept. Slow on purpose; every engine is held against it.
#pragma once

#include <vector>

#include "qkv/attention.hpp"
#include "qkv/batch.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"

namespace qkv::reference {

struct Result {
  std::vector<double> out;  // [num_tokens, num_q_heads, head_dim_v]
  std::vector<double> lse;  // [num_q_heads, num_tokens]
};

// Reads only what the batch owns. Dense layers pass the keys and values, and the scales of 8-bit ones, as in
// Attention::forward, queries of 8-bit floats their query_scale.
QKV_EXPORT Result attention(const LayerSpec& spec, const Batch& batch, const Tensor& query, const KvCache& cache,
                            const Tensor& query_scale = {});
QKV_EXPORT Result attention(const LayerSpec& spec, const Batch& batch, const Tensor& query, const Tensor& key,
                            const Tensor& value, const Tensor& query_scale = {}, const Tensor& key_scale = {},
                            const Tensor& value_scale = {});

struct StateValues {
  int64_t num_heads = 1;
  std::vector<double> out;  // [num_tokens, num_heads, head_dim_v]
  std::vector<double> lse;  // [num_heads, num_tokens]
};

QKV_EXPORT StateValues merge(const std::vector<StateValues>& states);

}  // namespace qkv::reference
