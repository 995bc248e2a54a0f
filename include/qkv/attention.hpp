// The life of a step:  Attention (once a layer) -> plan (once a step) -> update_cache, forward (each layer).
#pragma once

#include <memory>
#include <optional>

#include "qkv/batch.hpp"
#include "qkv/device.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"
#include "qkv/plan.hpp"
#include "qkv/planner.hpp"
#include "qkv/tensor.hpp"
#include "qkv/warmup.hpp"

namespace qkv {

// A layer's paged cache as two views of any strides (the last axis must be contiguous).
struct KvCache {
  Tensor key;    // kv_dtype [num_pages, page_size, num_kv_heads, head_dim]
  Tensor value;  // kv_dtype [num_pages, page_size, num_kv_heads, head_dim_v]
  // Of 8-bit caches, and no others: f32, finite and above 0, of the shape that LayerSpec::kv_scales says, any
  // strides. They are read when the work runs, so that they may change between replays of a graph.
  Tensor key_scale = {};
  Tensor value_scale = {};

  // Views of one tensor [num_pages, num_kv_heads, page_size, head_dim + head_dim_v] (any strides) in which the key and
  // the value of a token lie side by side.
  QKV_EXPORT static KvCache from_interleaved(const Tensor& key_value, int32_t head_dim);
};

class QKV_EXPORT Attention {
 public:
  // Throws Error with all of explain()'s reasons if the layer cannot run on the device.
  // On a GPU, `warm_up` compiles all kernels that requests within the bounds can reach before it returns, several at a
  // time; without, those of further kinds of batches are compiled when a plan first needs them.
  explicit Attention(LayerSpec spec, Device device = {}, const std::optional<RequestBounds>& warm_up = {});
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) noexcept;

  const LayerSpec& spec() const;

  // Checks the batch and cuts it into work items. The plan fits every Attention whose spec differs only in scale,
  // softcap, slopes and sinks.
  // On a GPU the batch's arrays are host arrays (and checked) and the plan is copied on the stream; it must not be
  // destroyed before the work that uses it has run.
  Plan plan(const Batch& batch, Stream stream = {}) const;

  // Plans in memory made once, for all batches within the limits. `workspace`: workspace_bytes(limits) bytes on the
  // device, aligned to 16, for the partial states of a forward; planners whose steps run one after another may share
  // it, and it must outlive their work. Not given: the planner has its own.
  Planner planner(const PlanLimits& limits, const Tensor& workspace = {}) const;
  int64_t workspace_bytes(const PlanLimits& limits) const;

  // Writes key and value of the new tokens to their slots. Rows past the plan's slot_mapping are ignored.
  //   key [>= num_slots, num_kv_heads, head_dim], value [>= num_slots, num_kv_heads, head_dim_v]: f32, f16 or bf16
  // To 8 bits: round(x / scale), beyond the largest number the largest number; NaN stays NaN, and is 0 in i8. With
  // scales per token and head, each row gets the scale that puts its largest finite magnitude at the largest number.
  void update_cache(const Tensor& key, const Tensor& value, const KvCache& cache, const Plan& plan,
                    Stream stream = {}) const;

  // query [>= num_tokens, num_q_heads, head_dim], out [>= num_tokens, num_q_heads, head_dim_v],
  // lse f32 [num_q_heads, >= num_tokens] if wanted: natural log of the sum of exp of the scores, sink included.
  // Rows without a visible key: out = 0, lse = -inf (the sink, if there is one). Rows past num_tokens: untouched.
  // out_scale, for outputs of 8-bit floats and no others: out = round(result / out_scale), saturating. f32 [1], read;
  // or, with OutputScales::per_token_group, f32 [>= num_tokens, num_q_heads, groups] of any strides, written like out:
  // the scale that puts the group's largest finite magnitude at the format's largest number (1 for a group of zeros).
  // query_scale f32 [1], [num_kv_heads] or [num_requests, num_kv_heads], any strides, for queries of 8-bit floats and
  // no others: what their elements are multiplied by. Scales are read when the work runs.
  void forward(const Tensor& query, const KvCache& cache, const Plan& plan, const Tensor& out, const Tensor& lse = {},
               Stream stream = {}, const Tensor& out_scale = {}, const Tensor& query_scale = {}) const;

  // For layers without a cache: key [sum of seq_lens, num_kv_heads, head_dim], value likewise with head_dim_v; with a
  // shard or a key_run, the rows of the keys that the layer is shown. key_scale, value_scale: of 8-bit ones and no
  // others, as in KvCache, of the shape that LayerSpec::kv_scales says.
  void forward(const Tensor& query, const Tensor& key, const Tensor& value, const Plan& plan, const Tensor& out,
               const Tensor& lse = {}, Stream stream = {}, const Tensor& out_scale = {}, const Tensor& query_scale = {},
               const Tensor& key_scale = {}, const Tensor& value_scale = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
