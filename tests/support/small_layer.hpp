// Layers, batches and tensors for tests that need a particular one; everything else fills in a tools::Case.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "case_data.hpp"
#include "cases.hpp"
#include "check.hpp"
#include "qkv/qkv.hpp"

namespace qkv::testing {

inline Tensor view(const std::vector<int32_t>& values) {
  return Tensor::contiguous(values.data(), DType::i32, {static_cast<int64_t>(values.size())});
}
inline Tensor view(const std::vector<int64_t>& values) {
  return Tensor::contiguous(values.data(), DType::i64, {static_cast<int64_t>(values.size())});
}
inline Tensor view(const std::vector<float>& values, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(values.data(), DType::f32, shape);
}

// f32, of that deviation.
inline tools::OwnedTensor normal_values(tools::Draw& draw, float deviation, std::initializer_list<int64_t> shape) {
  tools::OwnedTensor tensor(DType::f32, shape);
  auto* values = static_cast<float*>(tensor.view().data);
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) values[i] = deviation * draw.normal();
  return tensor;
}

inline LayerSpec layer_of(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim) {
  LayerSpec layer;
  layer.num_q_heads = num_q_heads;
  layer.num_kv_heads = num_kv_heads;
  layer.head_dim = head_dim;
  return layer;
}

// A case of a decoder layer with a cache of 16-token pages; `q` and `kv` are the requests' lengths.
inline tools::Case case_of(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, std::vector<int32_t> q,
                           std::vector<int32_t> kv, bool cache = true) {
  tools::Case c;
  c.seed = 20261129;
  c.layer = layer_of(num_q_heads, num_kv_heads, head_dim);
  if (cache) c.layer.cache = CacheSpec{16};
  for (size_t r = 0; r < q.size(); ++r) c.requests.push_back({q[r], kv[r]});
  return c;
}

inline tools::Case with(tools::Case c, const std::function<void(LayerSpec&)>& change) {
  change(c.layer);
  return c;
}

// The case agrees with the oracle, reads nothing that is not its own, and each request's bits stand alone.
inline void expect_agrees(const tools::Case& c) { EXPECT_EQ(tools::failure_of(c), "") << tools::describe(c); }

struct Outcome {
  std::vector<float> out;  // [num_tokens, num_q_heads, head_dim_v]
  std::vector<float> lse;  // [num_q_heads, num_tokens]
};

// One request of f32 dense keys, one query head and one KV head; query 0 and one-hot values, so that an output row
// lists the visible keys.
inline Outcome visible_keys(const LayerSpec& layer, int32_t q_len, int32_t kv_len,
                            std::vector<MaskOperand> operands = {}) {
  const auto num_keys = static_cast<size_t>(kv_len);
  LayerSpec one_head = layer;
  one_head.head_dim_v = std::max(kv_len, 8);
  const std::vector<float> query(static_cast<size_t>(q_len) * layer.head_dim, 0.0F);
  const std::vector<float> key(num_keys * layer.head_dim, 1.0F);
  std::vector<float> value(num_keys * one_head.head_dim_v, 0.0F);
  for (size_t j = 0; j < num_keys; ++j) value[j * one_head.head_dim_v + j] = 1.0F;
  const std::vector<int32_t> starts = {0, q_len};
  const std::vector<int32_t> lengths = {kv_len};
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  batch.mask_operands = std::move(operands);
  const Attention attention(one_head);
  Outcome outcome{std::vector<float>(static_cast<size_t>(q_len) * one_head.head_dim_v), std::vector<float>(q_len)};
  attention.forward(view(query, {q_len, 1, layer.head_dim}), view(key, {kv_len, 1, layer.head_dim}),
                    view(value, {kv_len, 1, one_head.head_dim_v}), attention.plan(batch),
                    view(outcome.out, {q_len, 1, one_head.head_dim_v}), view(outcome.lse, {1, q_len}));
  return outcome;
}

// The call throws an Error about this argument with this code, on one line.
inline void expect_refused(const std::function<void()>& call, ErrorCode code, const std::string& argument) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << argument;
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), argument) << error.what();
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_FALSE(error.value().empty());
    EXPECT_FALSE(error.allowed().empty());
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

}  // namespace qkv::testing
