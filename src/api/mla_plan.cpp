#include "api/mla_plan.hpp"

#include <algorithm>

#include "core/float8.hpp"
#include "core/index/interleave.hpp"
#include "core/pieces.hpp"
#include "mask/shift.hpp"

namespace qkv::mla {
namespace {

Tensor view_of(const std::vector<int32_t>& values) { return Tensor::of(values, {static_cast<int64_t>(values.size())}); }

}  // namespace

WorkspaceLayout layout_workspace(const MlaSpec& spec, int64_t num_tokens, int64_t chunk_tokens, int64_t saved_tokens,
                                 int64_t own_rows, int32_t num_ranks, bool is_sharded) {
  constexpr int64_t kF32 = sizeof(float);
  const int64_t element = size_bytes(spec.dtype);
  const int64_t latent_element = size_bytes(spec.latent_dtype());
  const int64_t heads = spec.num_heads;
  const int64_t rows = std::max(num_tokens, chunk_tokens);
  const int64_t context_rows = chunk_tokens == 0 ? 0 : num_tokens;
  Pieces pieces;
  WorkspaceLayout layout{};
  layout.rows = rows;
  layout.context_rows = context_rows;
  layout.saved_rows = saved_tokens;
  for (int32_t turn = 0; turn < kGatherTurns; ++turn) {
    layout.latents[turn] = pieces.add(chunk_tokens * spec.kv_lora_rank * element);
    layout.own_latents[turn] = pieces.add(own_rows * spec.latent_dim() * latent_element);
    layout.all_latents[turn] = pieces.add(num_ranks * own_rows * spec.latent_dim() * latent_element);
  }
  layout.key = pieces.add(rows * heads * spec.head_dim() * element);
  layout.value = pieces.add(rows * heads * spec.v_head_dim * element);
  layout.context_out = pieces.add(context_rows * heads * spec.v_head_dim * kF32);
  layout.context_lse = pieces.add(context_rows * heads * kF32);
  layout.saved_out = pieces.add(saved_tokens * heads * spec.v_head_dim * kF32);
  layout.saved_lse = pieces.add(saved_tokens * heads * kF32);
  const int64_t state_rows = is_float8(spec.out_dtype()) && !is_sharded ? context_rows : 0;
  layout.new_tokens_out = pieces.add(state_rows * heads * spec.v_head_dim * kF32);
  layout.new_tokens_lse = pieces.add(context_rows * heads * kF32);
  layout.bytes = pieces.end();
  return layout;
}

WorkspaceLayout layout_workspace(const PlanData& plan) {
  int32_t chunk_tokens = 0;
  int32_t saved_tokens = 0;
  int32_t own_rows = 0;
  for (const ContextChunk& chunk : plan.context.chunks) {
    chunk_tokens = std::max(chunk_tokens, plan.is_sharded ? chunk.num_padded_local_rows() : chunk.num_context_tokens);
    if (plan.num_ranks > 1) own_rows = std::max(own_rows, chunk.num_padded_local_rows());
    if (chunk.is_continuation) {
      saved_tokens = std::max(saved_tokens, chunk.continuation_token_end - chunk.tokens.begin);
    }
  }
  return layout_workspace(plan.spec, plan.num_tokens, chunk_tokens, saved_tokens, own_rows, plan.num_ranks,
                          plan.is_sharded);
}

plan::GatherPlan gather_of_rank(const ContextChunk& chunk, const Tensor& block_table,
                                const ContextChunkOptions& options) {
  if (options.num_ranks == 1) {
    return plan::build_gather(block_table, chunk.request_begin, chunk.starts, chunk.seq_lens, options.page_size);
  }
  std::vector<int32_t> lengths;
  lengths.reserve(chunk.num_requests());
  for (int32_t r = 0; r < chunk.num_requests(); ++r) {
    lengths.push_back(chunk.local_seq_lens[r * options.num_ranks + options.rank]);
  }
  return plan::build_gather(block_table, chunk.request_begin, chunk.local_starts, lengths, options.page_size);
}

plan::GatherPlan gather_of_all_ranks(const ContextChunk& chunk, const ContextChunkOptions& options) {
  std::vector<int32_t> first_row;  // of each rank's tokens of the request at hand
  first_row.reserve(options.num_ranks);
  for (int32_t rank = 0; rank < options.num_ranks; ++rank) first_row.push_back(rank * chunk.num_padded_local_rows());
  plan::GatherPlan gather;  // a row is a page of one token
  for (int32_t r = 0; r < chunk.num_requests(); ++r) {
    for (int32_t t = chunk.starts[r]; t < chunk.starts[r] + chunk.seq_lens[r]; ++t) {
      const int32_t rank = index::rank_of_token(t, options.num_ranks, options.interleave_size);
      const int32_t local = index::local_position(t, options.num_ranks, options.interleave_size);
      gather.pages.push_back(first_row[rank] + local - chunk.local_starts[r]);
    }
    for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
      first_row[rank] += chunk.local_seq_lens[r * options.num_ranks + rank];
    }
  }
  gather.max_page = options.num_ranks * chunk.num_padded_local_rows() - 1;
  gather.page_start = {0};
  gather.first_offset = {0};
  gather.row_start = {0, chunk.num_context_tokens};
  return gather;
}

RunBatch::RunBatch(const plan::PlanData& whole, const LayerSpec& layer, Run run) : run_(std::move(run)) {
  for (const OperandDeclaration& declared : operands_of(layer.effective_mask())) {
    operands_.emplace_back(declared.name, values_of(whole, declared));
  }
}

Batch RunBatch::batch() const {
  Batch batch;
  batch.query_start_loc = view_of(run_.query_start_loc);
  batch.seq_lens = view_of(run_.seq_lens);
  for (const auto& [name, values] : operands_) batch.mask_operands.push_back({name, view_of(values)});
  return batch;
}

int32_t RunBatch::shift_of(const plan::PlanData& whole, const std::string& name, int32_t request) const {
  const int32_t i = request - run_.request_begin;
  if (name == mask::kRequestNumber) return request;
  return name == mask::kKeyShift ? run_.starts[i] : whole.seq_lens[request] - run_.seq_lens[i];
}

std::vector<int32_t> RunBatch::values_of(const plan::PlanData& whole, const OperandDeclaration& declared) const {
  const auto& names = whole.mask.operands;
  const auto found =
      std::find_if(names.begin(), names.end(), [&](const auto& operand) { return operand.name == declared.name; });
  std::vector<int32_t> values;
  for (int32_t r = run_.request_begin; r < run_.request_end; ++r) {
    if (found == names.end()) {
      values.push_back(shift_of(whole, declared.name, r));
      continue;
    }
    const std::vector<int32_t>& all = whole.operands[found - names.begin()];
    const auto append = [&](int64_t begin, int64_t count) {
      values.insert(values.end(), all.begin() + begin, all.begin() + begin + count);
    };
    const int32_t i = r - run_.request_begin;
    if (declared.scope == OperandScope::request) append(r, 1);
    if (declared.scope == OperandScope::query) {
      append(whole.query_start_loc[r], whole.query_start_loc[r + 1] - whole.query_start_loc[r]);
    }
    if (declared.scope == OperandScope::key) append(whole.key_start[r] + run_.starts[i], run_.seq_lens[i]);
  }
  return values;
}

}  // namespace qkv::mla
