// MLA prefill over ranks that share the latent cache and exchange states: each projects and attends to its own part of
// the context with the heads of all ranks. Less is moved than by MlaPrefill::forward over ranks, which exchanges
// latents, where a step has some 70 times as many context tokens as new ones (docs/context_parallel.md has the
// formula).
//   MlaContextParallel (once a layer) -> plan (once a step) -> forward (each layer)
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "qkv/collectives.hpp"
#include "qkv/context_parallel.hpp"
#include "qkv/export.hpp"
#include "qkv/mla_prefill.hpp"
#include "qkv/shard.hpp"
#include "qkv/warmup.hpp"

namespace qkv {

struct MlaContextParallelSpec {
  // As on one rank, with the heads of all ranks. Where ranks have heads of their own, num_ranks divides num_heads.
  MlaSpec layer = {};
  int32_t interleave_size = 1;  // tokens in a row that one rank keeps. The same on every rank
  StateExchange exchange = StateExchange::all_to_all;
};

// The layers that a rank of MlaContextParallel(spec, …) runs beside gathers and merges, for warmup(), as those of a
// ContextParallelSpec.
QKV_EXPORT std::vector<LayerSpec> rank_layers(const MlaContextParallelSpec& spec, int32_t rank, int32_t num_ranks);

class QKV_EXPORT MlaContextParallel {
 public:
  // Collective: every rank makes its layers in the same order. Refused on all ranks alike where they differ in the
  // layer, the interleave or the exchange. On the device of the collectives. warm_up: as in Attention.
  MlaContextParallel(MlaContextParallelSpec spec, std::shared_ptr<Collectives> collectives,
                     const std::optional<RequestBounds>& warm_up = {});
  ~MlaContextParallel();
  MlaContextParallel(MlaContextParallel&&) noexcept;
  MlaContextParallel& operator=(MlaContextParallel&&) noexcept;

  const MlaContextParallelSpec& spec() const;
  const Shard& shard() const;
  int32_t num_heads() const;  // of this rank

  // As MlaPrefill::plan, with the rank's own block table. The options' workspace_tokens are those of all ranks: of a
  // chunk, a rank expands as many as it keeps. Ranks and interleave are the layer's, and left out of the options.
  MlaPlan plan(const Batch& batch, const ContextChunkOptions& options, Stream stream = {}) const;

  // Of forward, for all plans of at most so many new tokens and chunks of at most so many context tokens.
  int64_t workspace_bytes(int64_t max_new_tokens, int64_t workspace_tokens) const;

  // Collective, but for batches without context, which exchange nothing.
  //   query [>= num_tokens, num_heads(), head_dim], out likewise with v_head_dim, lse f32 [num_heads(), >= num_tokens]
  //   new_latents, latent_cache, workspace, gather_stream, latent_scale as in MlaPrefill::forward; out_scale likewise,
  //   of the rank's heads
  //   projection: to the keys and values of all ranks' heads
  void forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache, const MlaPlan& plan,
               const Projection& projection, const Tensor& workspace, const Tensor& out, const Tensor& lse = {},
               Stream stream = {}, std::optional<Stream> gather_stream = {}, const Tensor& out_scale = {},
               const Tensor& latent_scale = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
