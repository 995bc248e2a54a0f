// Prefill of multi-head latent attention (DeepSeek): the cache holds a latent row a token, which is projected up to the
// keys and values of all heads, the context a chunk after another. The life of a step:
//   MlaPrefill (once a layer) -> plan (once a step) -> forward (each layer), which runs the whole of it;
//   or, by a caller who gathers and projects, run_context_chunk for each chunk, run_new_tokens, merge_context.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "qkv/batch.hpp"
#include "qkv/collectives.hpp"
#include "qkv/context_chunks.hpp"
#include "qkv/device.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"
#include "qkv/ops.hpp"
#include "qkv/tensor.hpp"
#include "qkv/warmup.hpp"

namespace qkv {

struct MlaSpec {
  int32_t num_heads = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;  // 0 = a layer without rotary part
  int32_t v_head_dim = 0;
  int32_t kv_lora_rank = 0;  // columns of a latent; its row in the cache ends with the rotary part of the key

  DType dtype = DType::bf16;  // of queries, keys, values and new latents
  // Not given: dtype. 8-bit floats: forward takes an out_scale.
  std::optional<DType> output_dtype = {};
  OutputScales output_scales = OutputScales::per_tensor;
  // Not given: dtype. 8-bit floats or i8: forward takes a latent_scale.
  std::optional<DType> cache_dtype = {};
  CacheSpec cache = {};

  std::optional<float> scale = {};  // not given: 1 / sqrt(head_dim())
  std::optional<Mask> mask = {};    // over absolute positions; not given: causal
  float softcap = 0;                // as in LayerSpec
  std::vector<float> sinks = {};    // [num_heads], join once

  int32_t head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int32_t latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  DType out_dtype() const { return output_dtype.value_or(dtype); }
  DType latent_dtype() const { return cache_dtype.value_or(dtype); }
};

// Why the layer cannot run, one sentence a reason; empty = MlaPrefill(spec, device) succeeds.
QKV_EXPORT std::vector<std::string> explain(const MlaSpec& spec, Device device = {});

// The layers that MlaPrefill(spec) consists of, for warmup() and kernel_choices(): of new tokens, of context, and where
// the output is of 8 bits, of new tokens whose state is joined.
QKV_EXPORT std::vector<LayerSpec> layers_of(const MlaSpec& spec);

// Fills keys and values of `latents`' tokens. Views may be strided; all have the spec's dtype.
struct ProjectionCall {
  Tensor latents;   // [num_tokens, kv_lora_rank]
  Tensor key_nope;  // [num_tokens, num_heads, qk_nope_head_dim]
  Tensor value;     // [num_tokens, num_heads, v_head_dim]
  Stream stream;
};
using Projection = std::function<void(const ProjectionCall&)>;

// The projection by a matrix, kv_b_proj [num_heads·(qk_nope_head_dim + v_head_dim), kv_lora_rank] of the spec's dtype,
// a head's key rows before its value rows. It must stay where it is. Sums are f32. On a GPU, cuBLAS is opened; refused,
// with where it was looked for, if there is none. Copies of the function share what it holds.
QKV_EXPORT Projection matrix_projection(const MlaSpec& spec, const Tensor& kv_b_proj);

namespace mla {
struct PlanData;
struct Call;
struct Result;
}  // namespace mla

// A step's chunks and the plans of their attention. Cheap to copy, read-only, shared by all layers of the same kind.
class QKV_EXPORT MlaPlan {
 public:
  explicit MlaPlan(std::shared_ptr<const mla::PlanData> data) : data_(std::move(data)) {}

  int64_t num_tokens() const;
  const std::vector<ContextChunk>& chunks() const;
  const std::vector<TokenRange>& empty_token_slices() const;
  // Of forward, for this plan.
  int64_t workspace_bytes() const;

  const mla::PlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const mla::PlanData> data_;
};

class QKV_EXPORT MlaPrefill {
 public:
  // Throws Error with all of explain()'s reasons if the layer cannot run on the device. warm_up: as in Attention.
  explicit MlaPrefill(MlaSpec spec, Device device = {}, const std::optional<RequestBounds>& warm_up = {});

  static bool supports_dimensions(int32_t qk_nope_head_dim, int32_t qk_rope_head_dim, int32_t v_head_dim,
                                  Device device = {});
  // Results are written where the caller wants them: values are never padded to the keys' size.
  static constexpr bool supports_out() { return true; }
  // For another micro-batch: shares the compiled kernels. All that changes from call to call lies in plans and in the
  // caller's tensors, so that a clone and its original never meet.
  MlaPrefill clone() const { return *this; }

  const MlaSpec& spec() const;

  // seq_lens counts context and new tokens. The block table may be left out if forward is not called; with
  // options.num_ranks it names the pages of options.rank, everything else is the same on every rank. No slot_mapping.
  // options.page_size must be the spec's. Arrays are host arrays, as in Attention::plan.
  MlaPlan plan(const Batch& batch, const ContextChunkOptions& options, Stream stream = {}) const;

  // Workspace of forward for all plans of at most so many new tokens and chunks of at most so many context tokens.
  int64_t workspace_bytes(int64_t max_new_tokens, int64_t workspace_tokens, int32_t num_ranks = 1) const;

  // Attention of the new tokens to each other: the state over these keys, sinks included.
  //   query, key [>= num_tokens, num_heads, head_dim], value likewise with v_head_dim, of any token and head strides
  //   out [>= num_tokens, num_heads, v_head_dim], lse f32 [num_heads, >= num_tokens] if wanted
  // Outputs of 8-bit floats: where the plan has chunks, this is a state that is joined first, and `out` is f32; else it
  // is the result, with its out_scale.
  void run_new_tokens(const Tensor& query, const Tensor& key, const Tensor& value, const MlaPlan& plan,
                      const Tensor& out, const Tensor& lse = {}, Stream stream = {},
                      const Tensor& out_scale = {}) const;

  // Attention of a chunk's queries to its context: a state in f32, of rows chunk.tokens. Not causal, but for the mask.
  //   query, out, lse: rows of chunk.tokens; out f32; key, value: [>= num_context_tokens, …], rows as gathered
  void run_context_chunk(int32_t chunk, const Tensor& query, const Tensor& key, const Tensor& value,
                         const MlaPlan& plan, const Tensor& out, const Tensor& lse, Stream stream = {}) const;

  // Joins the state over all context with that of the new tokens, which becomes the result in place. Rows without
  // context are not touched. context.out f32 [>= num_tokens, …]; new_tokens.lse is read, and written as well.
  // Outputs of 8-bit floats, and no others: new_tokens.out is f32 and stays, the result of all rows goes to `out`.
  void merge_context(const State& context, const State& new_tokens, const MlaPlan& plan, Stream stream = {},
                     const Tensor& out = {}, const Tensor& out_scale = {}) const;

  // The whole of it: gathers, projects and attends to each chunk, then to the new tokens, and joins the states.
  //   query [>= num_tokens, num_heads, head_dim]
  //   new_latents [>= num_tokens, latent_dim]: rows as in the cache, which need not hold them
  //   latent_cache [num_pages, page_size, latent_dim]
  //   workspace: contiguous memory of any dtype, at least plan.workspace_bytes()
  //   out [>= num_tokens, num_heads, v_head_dim], lse f32 [num_heads, >= num_tokens] if wanted
  //   gather_stream: where chunks are gathered, each while the one before it computes; not given: on `stream`
  //   out_scale: as in Attention::forward, for outputs of 8-bit floats and no others
  //   latent_scale: f32 [1], what the elements of an 8-bit latent_cache are multiplied by, and of no other
  void forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache, const MlaPlan& plan,
               const Projection& projection, const Tensor& workspace, const Tensor& out, const Tensor& lse = {},
               Stream stream = {}, std::optional<Stream> gather_stream = {}, const Tensor& out_scale = {},
               const Tensor& latent_scale = {}) const;

  // The same over ranks that share the latent cache (the plan's num_ranks): each gathers the latents that it keeps, and
  // all get all, chunk by chunk. Collective.
  void forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache, const MlaPlan& plan,
               const Projection& projection, const Tensor& workspace, Collectives& collectives, const Tensor& out,
               const Tensor& lse = {}, Stream stream = {}, std::optional<Stream> gather_stream = {},
               const Tensor& out_scale = {}, const Tensor& latent_scale = {}) const;

 private:
  void forward_over(const mla::Call& call, const MlaPlan& plan, const Tensor& workspace,
                    const mla::Result& result) const;

  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace qkv
