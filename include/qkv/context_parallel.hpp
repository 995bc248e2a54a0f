// Context parallelism: ranks share the cache of every request, each keeps some of its tokens. For contexts that are too
// long for one device, or that several can read faster. The life of a step, with the same batch on every rank:
//   ContextParallel (once a layer) -> plan (once a step) -> update_cache, forward (each layer)
// A rank has heads of its own, query heads [rank·H, (rank + 1)·H) of the layer, H = num_q_heads / num_ranks, as under
// tensor parallelism; or, with StateExchange::all_gather, every rank has all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "qkv/attention.hpp"
#include "qkv/collectives.hpp"
#include "qkv/export.hpp"
#include "qkv/shard.hpp"

namespace qkv {

// How states over the ranks' parts of a context become the states of a rank's heads.
enum class StateExchange : uint8_t {
  // Ranks with heads of their own: each sends its outputs, in the query's dtype, and their LSEs to those whose heads
  // they are, who join them in f32.
  all_to_all,
  // The same by two calls: LSEs go round, each rank weighs its outputs by them, and the f32 outputs are summed on the
  // way.
  reduce_scatter,
  // Ranks that have all queries and want all results: outputs and LSEs go to everyone.
  all_gather,
};

QKV_EXPORT std::string_view to_string(StateExchange exchange);

struct ContextParallelSpec {
  // As on one rank, with the heads of all ranks. Of type decoder, with a cache. Every rank keeps all KV heads of its
  // tokens. Where ranks have heads of their own, num_ranks divides num_q_heads, and one of num_ranks and num_kv_heads
  // divides the other.
  LayerSpec layer = {};
  int32_t interleave_size = 1;  // tokens in a row that one rank keeps; divides page_size. The same on every rank
  StateExchange exchange = StateExchange::all_to_all;
};

// The layers that a rank of ContextParallel(spec, …) runs, for warmup(): neither the ranks nor a GPU need be there.
// Throws what the constructor would on a GPU. All ranks run the same kernels, unless the mask tells heads apart.
QKV_EXPORT std::vector<LayerSpec> rank_layers(const ContextParallelSpec& spec, int32_t rank, int32_t num_ranks);

namespace parallel {
struct StepPlan;
}

// Cheap to copy, read-only, shared by all layers of the same kind.
class QKV_EXPORT ContextParallelPlan {
 public:
  explicit ContextParallelPlan(std::shared_ptr<const parallel::StepPlan> data) : data_(std::move(data)) {}

  // False where no request has a context: then forward exchanges nothing. The same on every rank.
  bool exchanges() const;
  int64_t workspace_bytes() const;
  const Plan& context() const;     // of all heads over the rank's part of the contexts
  const Plan& new_tokens() const;  // of the rank's heads over the step's own tokens

  const parallel::StepPlan& data() const { return *data_; }

 private:
  std::shared_ptr<const parallel::StepPlan> data_;
};

// Plans in memory made once, for steps that are captured and replayed: a Planner of each part. Its plans always
// exchange, since a captured step runs with other batches.
class QKV_EXPORT ContextParallelPlanner {
 public:
  struct Impl;
  explicit ContextParallelPlanner(std::unique_ptr<Impl> impl);  // ContextParallel::planner
  ~ContextParallelPlanner();
  ContextParallelPlanner(ContextParallelPlanner&&) noexcept;
  ContextParallelPlanner& operator=(ContextParallelPlanner&&) noexcept;

  ContextParallelPlan plan(const Batch& batch, Stream stream = {});
  void check(Stream stream = {}) const;  // Planner::check

 private:
  std::unique_ptr<Impl> impl_;
};

class QKV_EXPORT ContextParallel {
 public:
  // Collective: every rank makes its layers in the same order. Refused on all ranks alike where they differ in the
  // layer, the interleave or the exchange. On the device of the collectives. `warm_up` as in Attention.
  ContextParallel(ContextParallelSpec spec, std::shared_ptr<Collectives> collectives,
                  const std::optional<RequestBounds>& warm_up = {});
  ~ContextParallel();
  ContextParallel(ContextParallel&&) noexcept;
  ContextParallel& operator=(ContextParallel&&) noexcept;

  const ContextParallelSpec& spec() const;
  const Shard& shard() const;
  int32_t num_heads() const;  // of this rank

  // The batch is the same on every rank but for block_table, which names the rank's own pages (shard.hpp), and
  // slot_mapping, which shard_slots() makes of it: -1 for tokens that another rank keeps.
  ContextParallelPlan plan(const Batch& batch, Stream stream = {}) const;
  ContextParallelPlanner planner(const PlanLimits& limits) const;
  // Of forward, for plans of at most so many new tokens.
  int64_t workspace_bytes(int64_t max_tokens) const;

  // As Attention::update_cache; before or after forward, which takes the new tokens from its arguments.
  void update_cache(const Tensor& key, const Tensor& value, const KvCache& cache, const ContextParallelPlan& plan,
                    Stream stream = {}) const;

  // Collective. New tokens are read as given, not as an 8-bit cache rounds them. With a planner's plan, rows
  // of out and lse past num_tokens, up to its max_tokens, are written too, with anything.
  //   query [>= num_tokens, num_heads(), head_dim], out likewise with head_dim_v, lse f32 [num_heads(), >= num_tokens]
  //   key, value [>= num_tokens, num_kv_heads, …]: of the new tokens, of the query's dtype
  //   workspace: contiguous memory of any dtype, at least plan.workspace_bytes()
  //   new_tokens_stream: where the new tokens are attended to, beside the exchanges; not given: on `stream`
  void forward(const Tensor& query, const Tensor& key, const Tensor& value, const KvCache& cache,
               const ContextParallelPlan& plan, const Tensor& workspace, const Tensor& out, const Tensor& lse = {},
               Stream stream = {}, const Tensor& out_scale = {}, std::optional<Stream> new_tokens_stream = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
