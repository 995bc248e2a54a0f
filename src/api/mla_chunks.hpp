// An MLA layer at work: its context gathered, projected and attended to, a chunk after another, and its new tokens
// projected. Which keys and heads it has is said by the two attention layers that it is made of.
#pragma once

#include <array>
#include <optional>

#include "api/mla_plan.hpp"
#include "qkv/attention.hpp"
#include "qkv/collectives.hpp"
#include "qkv/mla_prefill.hpp"

namespace qkv::mla {

// What a forward call was given, but for where results go.
struct Call {
  Tensor query, new_latents, latent_cache;
  Tensor latent_scale;  // of an 8-bit cache
  const PlanData& plan;
  const Projection& projection;
  Stream stream, gather_stream;
  Collectives* latent_ranks = nullptr;  // that exchange latents
};

struct Result {
  Tensor out, lse, out_scale;
};

// The workspace of one forward call as tensors.
struct Buffers {
  // Where a chunk is gathered. [0]: as many rows as the chunk needs begin here.
  struct Gather {
    Tensor latents;                   // the chunk's tokens in order, without the rotary part
    Tensor own_latents, all_latents;  // with ranks that exchange latents: rows of the cache, of this one and of all
  };
  std::array<Gather, kGatherTurns> gathers;
  Tensor key;     // [rows, num_heads, head_dim]
  Tensor value;   // [rows, num_heads, v_head_dim]
  State context;  // f32, of all new tokens
  State saved;    // of the rows that a chunk continues
  State new_tokens;
};

class ChunkedLayer {
 public:
  // `spec` is checked (mla_layers.hpp). `context` has all heads of the spec and leaves f32 states; with a shard, it is
  // shown a part of each chunk. `new_tokens` may have some of the heads, and another output than the spec's; where
  // there are chunks to join its state with, `new_tokens_state` takes its place, which is the same but for its output.
  // warm_up: as in Attention, with the gathers and merges.
  ChunkedLayer(MlaSpec spec, Device device, const LayerSpec& new_tokens, const LayerSpec& new_tokens_state,
               const LayerSpec& context, const std::optional<RequestBounds>& warm_up);

  const MlaSpec& spec() const { return spec_; }
  Device device() const { return device_; }
  const Attention& new_tokens(const PlanData& plan) const { return new_tokens(plan.context); }
  const Attention& context() const { return context_; }

  PlanData plan(const Batch& batch, const ContextChunkOptions& options, Stream stream) const;

  // Everything that forward could stumble over later, before it writes anything.
  void check_forward(const Call& call, const Tensor& workspace, const Result& result) const;

  Buffers lay_out(const Tensor& workspace, const PlanData& plan) const;

  // The state over all context in buffers.context, in the rows that have any. `query`: of all heads.
  void run_context(const Call& call, const Tensor& query, const Buffers& buffers) const;

  // Keys and values of the new tokens, of all heads, in the buffers' first rows.
  void expand_new_tokens(const Call& call, const Buffers& buffers) const;

 private:
  // A chunk's tokens: their latents in order, and the rows [pages, page_size, 1, latent_dim] that its gather reads.
  struct GatheredChunk {
    Tensor latents;
    Tensor pages;
  };

  const Attention& new_tokens(const ContextChunks& context) const {
    return context.chunks.empty() ? new_tokens_ : new_tokens_state_;
  }
  void check_plan(const PlanData& plan) const;
  void check_cache(const Tensor& latent_cache, const PlanData& plan) const;
  GatheredChunk gather_chunk(const ContextChunk& chunk, const Call& call, const Buffers::Gather& buffers) const;
  void run_chunk(const ContextChunk& chunk, const Call& call, const Tensor& query, const Buffers& buffers) const;
  // Keys and values of `latents`, of which `pages` through `gather` gives their rotary part to all heads, times `scale`
  // if it is of 8 bits.
  void expand(const Tensor& latents, const Tensor& pages, const plan::GatherPlan& gather, const Tensor& scale,
              const Call& call, const Buffers& buffers) const;
  Tensor rows_at(const Tensor& memory, std::initializer_list<int64_t> shape) const {
    return Tensor::contiguous(memory.data, memory.dtype, shape, device_);
  }

  MlaSpec spec_;
  Device device_;
  Attention new_tokens_;
  Attention new_tokens_state_;
  Attention context_;
  uint64_t new_tokens_mask_, context_mask_;  // hashes
};

}  // namespace qkv::mla
