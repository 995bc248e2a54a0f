// What an MlaPlan holds: the chunks, and for each of them the plans of its gather and of its attention.
#pragma once

#include <vector>

#include "plan/gather.hpp"
#include "qkv/attention.hpp"
#include "qkv/mla_prefill.hpp"

namespace qkv::mla {

struct PlanData {
  MlaSpec spec;  // what the plan was made for
  int64_t num_tokens = 0;
  ContextChunks context;
  Plan new_tokens;                // of the layer whose result is a state, where there are chunks to join it with
  std::vector<Plan> chunk_plans;  // [chunks]
  // [chunks], none without a block table: from the cache or, with ranks, from what all of them have gathered.
  std::vector<plan::GatherPlan> chunk_gathers;
  std::vector<plan::GatherPlan> own_gathers;  // [chunks], with ranks: the latents that this one keeps
  plan::GatherPlan all_new_tokens;            // the new tokens' own rows, as one page
  int32_t num_ranks = 1;                      // that exchange latents
  int32_t rank = 0;                           // of them
  bool is_sharded = false;  // of each chunk, the layer is shown what this rank keeps: ranks exchange states
  int64_t workspace_bytes = 0;
};

// Chunks are gathered into two places by turns: the next one while this one computes.
inline constexpr int32_t kGatherTurns = 2;

// Where forward keeps what it computes, in bytes from the workspace's start.
struct WorkspaceLayout {
  int64_t latents[kGatherTurns];
  int64_t key, value;                      // of the widest chunk, or of the new tokens
  int64_t context_out, context_lse;        // f32 state over the context, of all new tokens
  int64_t saved_out, saved_lse;            // f32 state of the rows that a chunk continues
  int64_t new_tokens_out, new_tokens_lse;  // their state, with chunks: `out` f32, where the output is of 8 bits
  int64_t own_latents[kGatherTurns], all_latents[kGatherTurns];  // with ranks: rows of the cache
  int64_t bytes;

  int64_t rows;  // of `key` and `value`
  int64_t context_rows;
  int64_t saved_rows;
};

// No chunks: chunk_tokens 0. saved_tokens: new tokens of the longest request that is continued. own_rows: of a chunk's
// tokens that any of num_ranks keeps, at most; 0 with one rank. is_sharded: the new tokens' state is kept elsewhere.
WorkspaceLayout layout_workspace(const MlaSpec& spec, int64_t num_tokens, int64_t chunk_tokens, int64_t saved_tokens,
                                 int64_t own_rows, int32_t num_ranks, bool is_sharded);
WorkspaceLayout layout_workspace(const PlanData& plan);

// Gathers of a chunk: the tokens that a rank keeps, request after request; and, from the rows of all ranks,
// num_padded_local_rows() of each, the chunk's tokens in order.
plan::GatherPlan gather_of_rank(const ContextChunk& chunk, const Tensor& block_table,
                                const ContextChunkOptions& options);
plan::GatherPlan gather_of_all_ranks(const ContextChunk& chunk, const ContextChunkOptions& options);

// The chunk's batch as the context layer sees it, and the batch of the new tokens.
class RunBatch {
 public:
  struct Run {
    int32_t request_begin, request_end;
    std::vector<int32_t> query_start_loc;
    std::vector<int32_t> starts;    // position of each request's first key in the run
    std::vector<int32_t> seq_lens;  // keys in the run
  };
  // `whole`: the batch with all its keys and operands, checked. `layer`: whose mask reads the operands.
  RunBatch(const plan::PlanData& whole, const LayerSpec& layer, Run run);
  RunBatch(const RunBatch&) = delete;  // views point inside

  Batch batch() const;

 private:
  std::vector<int32_t> values_of(const plan::PlanData& whole, const OperandDeclaration& declared) const;
  int32_t shift_of(const plan::PlanData& whole, const std::string& name, int32_t request) const;

  Run run_;
  std::vector<std::pair<std::string, std::vector<int32_t>>> operands_;
};

}  // namespace qkv::mla
