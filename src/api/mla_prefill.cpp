#include "qkv/mla_prefill.hpp"

#include <algorithm>
#include <array>

#include "api/engines.hpp"
#include "api/mla_layers.hpp"
#include "api/mla_plan.hpp"
#include "api/tensor_checks.hpp"
#include "core/checks.hpp"
#include "core/float8.hpp"
#include "plan/builder.hpp"

namespace qkv {
namespace {

MlaSpec checked(MlaSpec spec, Device device) {
  const std::vector<std::string> reasons = explain(spec, device);
  if (reasons.empty()) return spec;
  refuse("spec", "a layer that cannot run", fmt::format("{}", fmt::join(reasons, "; also ")), ErrorCode::unsupported);
}

std::vector<int32_t> context_lens(const plan::PlanData& whole) {
  std::vector<int32_t> lengths;
  for (int32_t r = 0; r < whole.num_requests; ++r) {
    const int32_t q_len = whole.query_start_loc[r + 1] - whole.query_start_loc[r];
    if (whole.seq_lens[r] < q_len) {
      refuse(fmt::format("seq_lens[{}]", r), whole.seq_lens[r],
             fmt::format("at least {}: context and the request's {} new tokens", q_len, q_len), ErrorCode::mismatch);
    }
    lengths.push_back(whole.seq_lens[r] - q_len);
  }
  return lengths;
}

// Every new token is a key of its own.
mla::RunBatch::Run run_of_new_tokens(const plan::PlanData& whole, std::vector<int32_t> starts) {
  std::vector<int32_t> lengths = whole.seq_lens;
  for (int32_t r = 0; r < whole.num_requests; ++r) lengths[r] -= starts[r];
  return {0, whole.num_requests, whole.query_start_loc, std::move(starts), std::move(lengths)};
}

// Rows [num_rows, latent_dim] as [1, num_rows, 1, latent_dim]: one page.
Tensor as_one_page(const Tensor& rows) {
  return Tensor::strided(rows.data, rows.dtype, {1, rows.shape[0], 1, rows.shape[1]},
                         {0, rows.stride[0], rows.shape[1], rows.stride[1]}, rows.device);
}

// [num_pages, page_size, latent_dim] with one head.
Tensor with_one_head(const Tensor& pages) {
  return Tensor::strided(pages.data, pages.dtype, {pages.shape[0], pages.shape[1], 1, pages.shape[2]},
                         {pages.stride[0], pages.stride[1], pages.shape[2], pages.stride[2]}, pages.device);
}

Tensor spread_over_heads(Tensor pages, int32_t num_heads) {
  pages.shape[2] = num_heads;
  pages.stride[2] = 0;
  return pages;
}

}  // namespace

// The tensors of one call.
struct MlaPrefill::ForwardCall {
  Collectives* collectives;  // nullptr: one rank
  const Tensor& query;
  const Tensor& new_latents;
  const Tensor& latent_cache;
  const mla::PlanData& plan;
  const MlaPlan& shared_plan;
  const Projection& projection;
  const Tensor& workspace;
  const Tensor& out;
  const Tensor& lse;
  const Tensor& out_scale;
  const Tensor& latent_scale;
  Stream stream, gather_stream;
};

struct MlaPrefill::Impl {
  MlaSpec spec;
  Device device;
  Attention new_tokens;
  Attention new_tokens_state;  // where chunks join; for other outputs than 8-bit ones the same layer
  Attention context;
  uint64_t new_tokens_mask, context_mask;  // hashes

  // Where a chunk is gathered. [0]: as many rows as the chunk needs begin here.
  struct GatherBuffers {
    Tensor latents;                   // the chunk's tokens in order, without the rotary part
    Tensor own_latents, all_latents;  // with ranks: rows of the cache, of this one and of all
  };

  // The workspace of one forward call as tensors.
  struct Buffers {
    std::array<GatherBuffers, mla::kGatherTurns> gathers;
    Tensor key;     // [rows, num_heads, head_dim]
    Tensor value;   // [rows, num_heads, v_head_dim]
    State context;  // of all new tokens
    State saved;    // of the rows that a chunk continues
    State new_tokens;
  };

  Buffers lay_out(const Tensor& workspace, const mla::PlanData& plan) const {
    const mla::WorkspaceLayout at = mla::layout_workspace(plan);
    const auto tensor = [&](int64_t offset, DType dtype, std::initializer_list<int64_t> shape) {
      return Tensor::contiguous(static_cast<const std::byte*>(workspace.data) + offset, dtype, shape, device);
    };
    const int64_t heads = spec.num_heads;
    const auto state = [&](int64_t out_at, int64_t lse_at, int64_t rows) {
      return State{tensor(out_at, DType::f32, {rows, heads, spec.v_head_dim}),
                   tensor(lse_at, DType::f32, {heads, rows})};
    };
    Buffers buffers{{},
                    tensor(at.key, spec.dtype, {at.rows, heads, spec.head_dim()}),
                    tensor(at.value, spec.dtype, {at.rows, heads, spec.v_head_dim}),
                    state(at.context_out, at.context_lse, at.context_rows),
                    state(at.saved_out, at.saved_lse, at.saved_rows),
                    state(at.new_tokens_out, at.new_tokens_lse, at.context_rows)};
    for (int32_t turn = 0; turn < mla::kGatherTurns; ++turn) {
      buffers.gathers[turn] = {tensor(at.latents[turn], spec.dtype, {0}),
                               tensor(at.own_latents[turn], spec.latent_dtype(), {0}),
                               tensor(at.all_latents[turn], spec.latent_dtype(), {0})};
    }
    return buffers;
  }

  // Keys and values of `num_rows` latents: `pages` through `gather` gives their rotary part to all heads, times
  // latent_scale if it is of 8 bits.
  void expand(const Tensor& latents, const Tensor& pages, const plan::GatherPlan& gather, const Buffers& buffers,
              const Projection& projection, const Tensor& latent_scale, Stream stream) const {
    const int64_t num_rows = gather.num_rows();
    const Tensor key = buffers.key.slice(0, 0, num_rows);
    if (spec.qk_rope_head_dim > 0) {
      const Tensor rope = pages.slice(3, spec.kv_lora_rank, spec.latent_dim());
      api::engine_of(device).gather(spread_over_heads(rope, spec.num_heads), gather,
                                    key.slice(2, spec.qk_nope_head_dim, spec.head_dim()), latent_scale, stream);
    }
    projection({latents, key.slice(2, 0, spec.qk_nope_head_dim), buffers.value.slice(0, 0, num_rows), stream});
  }

  void check_plan(const mla::PlanData& plan) const;
  void check_forward(const ForwardCall& call) const;
  void check_cache(const ForwardCall& call) const;

  // The layer that attends to the new tokens of the plan, and whether its result is a state of f32 for another output.
  const Attention& new_tokens_of(const mla::PlanData& plan) const {
    return plan.context.chunks.empty() ? new_tokens : new_tokens_state;
  }
  bool has_own_state(const mla::PlanData& plan) const {
    return !plan.context.chunks.empty() && is_float8(spec.out_dtype());
  }

  Tensor rows_at(const Tensor& memory, std::initializer_list<int64_t> shape) const {
    return Tensor::contiguous(memory.data, memory.dtype, shape, device);
  }

  // A chunk's tokens: their latents in order, and the rows [pages, page_size, 1, latent_dim] that its gather reads.
  struct GatheredChunk {
    Tensor latents;
    Tensor pages;
  };

  GatheredChunk gather_chunk(const ForwardCall& call, const ContextChunk& chunk, const GatherBuffers& buffers) const {
    const plan::Engine& engine = api::engine_of(device);
    const mla::PlanData& plan = call.plan;
    const Stream stream = call.gather_stream;
    Tensor pages = with_one_head(call.latent_cache);
    if (plan.num_ranks > 1) {
      const int64_t num_rows = chunk.num_padded_local_rows();
      const int64_t dim = spec.latent_dim();
      engine.gather(pages, plan.own_gathers[chunk.index], rows_at(buffers.own_latents, {num_rows, 1, dim}), {}, stream);
      call.collectives->all_gather(rows_at(buffers.own_latents, {num_rows, dim}),
                                   rows_at(buffers.all_latents, {plan.num_ranks, num_rows, dim}), stream);
      pages = rows_at(buffers.all_latents, {plan.num_ranks * num_rows, 1, 1, dim});
    }
    const plan::GatherPlan& gather = plan.chunk_gathers[chunk.index];
    engine.gather(pages.slice(3, 0, spec.kv_lora_rank), gather,
                  rows_at(buffers.latents, {gather.num_rows(), 1, spec.kv_lora_rank}), call.latent_scale, stream);
    return {rows_at(buffers.latents, {gather.num_rows(), spec.kv_lora_rank}), pages};
  }
};

namespace {

void check_ranks(const mla::PlanData& plan, const Collectives* collectives) {
  const auto say = [](int32_t rank, int32_t num_ranks) { return fmt::format("rank {} of {}", rank, num_ranks); };
  if (collectives == nullptr) {
    if (plan.num_ranks == 1) return;
    refuse("plan", fmt::format("a plan for {} ranks", plan.num_ranks),
           "a plan for 1 rank, or collectives to exchange latents by", ErrorCode::mismatch);
  }
  if (collectives->rank() == plan.rank && collectives->num_ranks() == plan.num_ranks) return;
  refuse("collectives", say(collectives->rank(), collectives->num_ranks()),
         fmt::format("{}, the plan's options", say(plan.rank, plan.num_ranks)), ErrorCode::mismatch);
}

}  // namespace

// The plan was made for a layer of this kind.
void MlaPrefill::Impl::check_plan(const mla::PlanData& plan) const {
  const auto check = [](const char* name, const auto& of_plan, const auto& of_layer) {
    if (of_plan == of_layer) return;
    refuse("plan", fmt::format("a plan made for {} = {}", name, of_plan),
           fmt::format("a plan of this layer: {} = {}", name, of_layer), ErrorCode::mismatch);
  };
  check("kv_lora_rank", plan.spec.kv_lora_rank, spec.kv_lora_rank);
  check("qk_rope_head_dim", plan.spec.qk_rope_head_dim, spec.qk_rope_head_dim);
  check("cache.page_size", plan.spec.cache.page_size, spec.cache.page_size);
  // The layout of the workspace follows from these.
  check("cache_dtype", to_string(plan.spec.latent_dtype()), to_string(spec.latent_dtype()));
  check("output_dtype", to_string(plan.spec.out_dtype()), to_string(spec.out_dtype()));
  api::check_plan_fits(new_tokens_of(plan).spec(), new_tokens_mask, plan.new_tokens.data());
  for (const Plan& chunk : plan.chunk_plans) api::check_plan_fits(context.spec(), context_mask, chunk.data());
}

// Everything that forward could stumble over later, before it writes anything.
void MlaPrefill::Impl::check_forward(const ForwardCall& call) const {
  const mla::PlanData& plan = call.plan;
  const Tensor& new_latents = call.new_latents;
  check_plan(plan);
  check_ranks(plan, call.collectives);
  api::check_query(new_tokens.spec(), device, call.query, plan.num_tokens);
  api::check_out(new_tokens.spec(), device, call.out, call.lse, plan.num_tokens);
  api::check_out_scale(spec.output_scales, call.out, call.out_scale, plan.num_tokens);
  check_rank(new_latents, "new_latents", 2, "[num_tokens, latent_dim]");
  check_device(new_latents, "new_latents", device);
  check_dtype(new_latents, "new_latents", spec.dtype);
  check_last_axis_contiguous(new_latents, "new_latents");
  check_extent_at_least(new_latents, "new_latents", 0, plan.num_tokens, "num_tokens");
  check_extent(new_latents, "new_latents", 1, spec.latent_dim(), "kv_lora_rank + qk_rope_head_dim");
  if (!call.projection) refuse("projection", "an empty function", "matrix_projection's, or the caller's own");
  api::check_workspace(call.workspace, device, plan.workspace_bytes);
  if (is_float8(spec.latent_dtype())) {
    api::check_single_scale(call.latent_scale, "latent_scale", device);
  } else if (call.latent_scale.is_given()) {
    refuse("latent_scale", call.latent_scale.describe(),
           fmt::format("none with latents of {}: only 8-bit floats are scaled", to_string(spec.latent_dtype())),
           ErrorCode::mismatch);
  }
  if (!plan.context.chunks.empty()) check_cache(call);
}

void MlaPrefill::Impl::check_cache(const ForwardCall& call) const {
  const mla::PlanData& plan = call.plan;
  const Tensor& latent_cache = call.latent_cache;
  if (plan.chunk_gathers.empty()) refuse("block_table", "nothing", "a Batch with block_table, for forward");
  check_rank(latent_cache, "latent_cache", 3, "[num_pages, page_size, latent_dim]");
  check_device(latent_cache, "latent_cache", device);
  check_dtype(latent_cache, "latent_cache", spec.latent_dtype());
  check_last_axis_contiguous(latent_cache, "latent_cache");
  check_extent(latent_cache, "latent_cache", 1, spec.cache.page_size, "page_size");
  check_extent(latent_cache, "latent_cache", 2, spec.latent_dim(), "kv_lora_rank + qk_rope_head_dim");
  for (const plan::GatherPlan& gather : plan.num_ranks == 1 ? plan.chunk_gathers : plan.own_gathers) {
    if (gather.max_page < latent_cache.shape[0]) continue;
    refuse("block_table", fmt::format("page {}", gather.max_page),
           fmt::format("page numbers below {}, the cache's num_pages", latent_cache.shape[0]), ErrorCode::mismatch);
  }
}

MlaPrefill::MlaPrefill(MlaSpec spec, Device device) {
  spec = checked(std::move(spec), device);
  Attention new_tokens(api::new_tokens_layer(spec), device);
  Attention new_tokens_state(api::new_tokens_state_layer(spec), device);
  Attention context(api::context_layer(spec), device);
  const uint64_t new_tokens_mask = new_tokens.spec().effective_mask().hash();
  const uint64_t context_mask = context.spec().effective_mask().hash();
  impl_.reset(new Impl{std::move(spec), device, std::move(new_tokens), std::move(new_tokens_state), std::move(context),
                       new_tokens_mask, context_mask});
}

bool MlaPrefill::supports_dimensions(int32_t qk_nope_head_dim, int32_t qk_rope_head_dim, int32_t v_head_dim,
                                     Device device) {
  MlaSpec spec;
  spec.num_heads = 1;
  spec.qk_nope_head_dim = qk_nope_head_dim;
  spec.qk_rope_head_dim = qk_rope_head_dim;
  spec.v_head_dim = v_head_dim;
  spec.kv_lora_rank = 512;  // any: it is not a size of attention
  return explain(spec, device).empty();
}

const MlaSpec& MlaPrefill::spec() const { return impl_->spec; }

MlaPlan MlaPrefill::plan(const Batch& batch, const ContextChunkOptions& options, Stream stream) const {
  const MlaSpec& spec = impl_->spec;
  if (batch.slot_mapping.is_given()) {
    refuse("slot_mapping", batch.slot_mapping.describe(), "none: no cache is written here; cache_write does",
           ErrorCode::mismatch);
  }
  if (options.page_size != spec.cache.page_size) {
    refuse("options.page_size", options.page_size, fmt::format("{}, the layer's page size", spec.cache.page_size),
           ErrorCode::mismatch);
  }
  LayerSpec all_keys = impl_->new_tokens.spec();
  all_keys.mask = spec.mask;
  Batch without_table = batch;
  without_table.block_table = {};
  const plan::PlanData whole = plan::read_batch(all_keys, without_table);
  const std::vector<int32_t> contexts = context_lens(whole);
  ContextChunks context = plan_context_chunks(whole.query_start_loc, contexts, options);

  const mla::RunBatch new_tokens(whole, impl_->new_tokens.spec(), run_of_new_tokens(whole, contexts));
  const Attention& own_layer = context.chunks.empty() ? impl_->new_tokens : impl_->new_tokens_state;
  auto data = std::make_shared<mla::PlanData>(mla::PlanData{
      spec, whole.num_tokens, std::move(context), own_layer.plan(new_tokens.batch(), stream), {}, {}, {}, {}});
  const plan::Engine& engine = api::engine_of(impl_->device);
  data->num_ranks = options.num_ranks;
  data->rank = options.rank;
  const auto add_gather = [&](std::vector<plan::GatherPlan>& gathers, plan::GatherPlan gather) {
    gathers.push_back(std::move(gather));
    engine.place(gathers.back(), stream);
  };
  for (const ContextChunk& chunk : data->context.chunks) {
    const mla::RunBatch run(
        whole, impl_->context.spec(),
        {chunk.request_begin, chunk.request_end, chunk.query_start_loc, chunk.starts, chunk.seq_lens});
    data->chunk_plans.push_back(impl_->context.plan(run.batch(), stream));
    if (!batch.block_table.is_given()) continue;
    check_rank(batch.block_table, "block_table", 2, "[num_requests, max_pages]");
    check_extent(batch.block_table, "block_table", 0, whole.num_requests, "num_requests");
    if (options.num_ranks > 1) {
      add_gather(data->own_gathers, mla::gather_of_rank(chunk, batch.block_table, options));
      add_gather(data->chunk_gathers, mla::gather_of_all_ranks(chunk, options));
    } else {
      add_gather(data->chunk_gathers, plan::build_gather(batch.block_table, chunk.request_begin, chunk.starts,
                                                         chunk.seq_lens, spec.cache.page_size));
    }
  }
  data->all_new_tokens = plan::one_page(static_cast<int32_t>(whole.num_tokens));
  engine.place(data->all_new_tokens, stream);
  data->workspace_bytes = mla::layout_workspace(*data).bytes;
  return MlaPlan(std::move(data));
}

int64_t MlaPrefill::workspace_bytes(int64_t max_new_tokens, int64_t workspace_tokens, int32_t num_ranks) const {
  if (max_new_tokens < 0) refuse("max_new_tokens", max_new_tokens, "0 or more");
  if (workspace_tokens < 0) refuse("workspace_tokens", workspace_tokens, "0 or more");
  if (num_ranks < 1) refuse("num_ranks", num_ranks, "1 or more");
  const auto own_rows = static_cast<int32_t>(num_ranks == 1 ? 0 : workspace_tokens / num_ranks);
  return mla::layout_workspace(impl_->spec, max_new_tokens, workspace_tokens, max_new_tokens, own_rows, num_ranks)
      .bytes;
}

void MlaPrefill::run_new_tokens(const Tensor& query, const Tensor& key, const Tensor& value, const MlaPlan& plan,
                                const Tensor& out, const Tensor& lse, Stream stream, const Tensor& out_scale) const {
  impl_->new_tokens_of(plan.data()).forward(query, key, value, plan.data().new_tokens, out, lse, stream, out_scale);
}

void MlaPrefill::run_context_chunk(int32_t chunk, const Tensor& query, const Tensor& key, const Tensor& value,
                                   const MlaPlan& plan, const Tensor& out, const Tensor& lse, Stream stream) const {
  const std::vector<Plan>& plans = plan.data().chunk_plans;
  if (chunk < 0 || chunk >= static_cast<int32_t>(plans.size())) {
    refuse("chunk", chunk,
           plans.empty() ? std::string("none: the batch has no context")
                         : fmt::format("0 to {}: the plan's chunks", plans.size() - 1));
  }
  check_given(lse, "lse", "f32 [num_heads, num_tokens]: a state without it cannot be joined");
  impl_->context.forward(query, key, value, plans[chunk], out, lse, stream);
}

void MlaPrefill::merge_context(const State& context, const State& new_tokens, const MlaPlan& plan, Stream stream,
                               const Tensor& out, const Tensor& out_scale) const {
  const int64_t num_tokens = plan.num_tokens();
  const bool to_out = impl_->has_own_state(plan.data());
  if (to_out) {
    api::check_out(impl_->new_tokens.spec(), impl_->device, out, {}, num_tokens);
    api::check_out_scale(impl_->spec.output_scales, out, out_scale, num_tokens);
  } else {
    for (const auto& [tensor, name] : {std::pair{&out, "out"}, {&out_scale, "out_scale"}}) {
      if (tensor->is_given()) {
        refuse(name, tensor->describe(), "none: the result is new_tokens.out", ErrorCode::mismatch);
      }
    }
  }
  api::check_out(impl_->new_tokens_of(plan.data()).spec(), impl_->device, new_tokens.out, new_tokens.lse, num_tokens);
  api::check_out(impl_->context.spec(), impl_->device, context.out, context.lse, num_tokens);
  check_given(new_tokens.lse, "new_tokens.lse", "f32 [num_heads, num_tokens]");
  check_given(context.lse, "context.lse", "f32 [num_heads, num_tokens]");
  const auto rows = [](const State& state, const TokenRange& tokens) {
    return State{state.out.slice(0, tokens.begin, tokens.end), state.lse.slice(1, tokens.begin, tokens.end)};
  };
  const auto merge = [&](const std::vector<State>& states, const TokenRange& tokens, const Tensor& lse) {
    if (!to_out) return merge_states(states, states.back().out, lse, stream);
    const bool of_tokens = impl_->spec.output_scales == OutputScales::per_token_group;
    merge_states(states, out.slice(0, tokens.begin, tokens.end), lse, stream,
                 of_tokens ? out_scale.slice(0, tokens.begin, tokens.end) : out_scale);
  };
  const ContextChunks& chunks = plan.data().context;
  for (const TokenRange& tokens : chunks.context_token_slices) {
    const State result = rows(new_tokens, tokens);
    merge({rows(context, tokens), result}, tokens, result.lse);
  }
  if (!to_out) return;
  for (const TokenRange& tokens : chunks.empty_token_slices) merge({rows(new_tokens, tokens)}, tokens, {});
}

void MlaPrefill::forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache,
                         const MlaPlan& plan, const Projection& projection, const Tensor& workspace, const Tensor& out,
                         const Tensor& lse, Stream stream, std::optional<Stream> gather_stream, const Tensor& out_scale,
                         const Tensor& latent_scale) const {
  forward_over({nullptr, query, new_latents, latent_cache, plan.data(), plan, projection, workspace, out, lse,
                out_scale, latent_scale, stream, gather_stream.value_or(stream)});
}

void MlaPrefill::forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache,
                         const MlaPlan& plan, const Projection& projection, const Tensor& workspace,
                         Collectives& collectives, const Tensor& out, const Tensor& lse, Stream stream,
                         std::optional<Stream> gather_stream, const Tensor& out_scale,
                         const Tensor& latent_scale) const {
  forward_over({&collectives, query, new_latents, latent_cache, plan.data(), plan, projection, workspace, out, lse,
                out_scale, latent_scale, stream, gather_stream.value_or(stream)});
}

void MlaPrefill::forward_over(const ForwardCall& call) const {
  const mla::PlanData& data = call.plan;
  const MlaPlan& plan = call.shared_plan;
  const MlaSpec& spec = impl_->spec;
  const Stream stream = call.stream;
  impl_->check_forward(call);
  const plan::Engine& engine = api::engine_of(impl_->device);
  const Impl::Buffers buffers = impl_->lay_out(call.workspace, data);
  const std::vector<ContextChunk>& chunks = data.context.chunks;
  // A place is free again when the chunk before last has been computed.
  const auto gather = [&](size_t i) {
    engine.follow(call.gather_stream, stream);
    return impl_->gather_chunk(call, chunks[i], buffers.gathers[i % mla::kGatherTurns]);
  };

  Impl::GatheredChunk next;
  if (!chunks.empty()) next = gather(0);
  for (const ContextChunk& chunk : chunks) {
    const Impl::GatheredChunk gathered = next;
    engine.follow(stream, call.gather_stream);
    if (const auto i = static_cast<size_t>(chunk.index) + 1; i < chunks.size()) next = gather(i);
    impl_->expand(gathered.latents, gathered.pages, data.chunk_gathers[chunk.index], buffers, call.projection,
                  call.latent_scale, stream);
    const auto rows = [](const State& state, int32_t begin, int32_t end) {
      return State{state.out.slice(0, begin, end), state.lse.slice(1, begin, end)};
    };
    const State state = rows(buffers.context, chunk.tokens.begin, chunk.tokens.end);
    // The chunk's state overwrites all of its rows: those that it continues are put aside, and joined again.
    const int32_t num_continued = chunk.is_continuation ? chunk.continuation_token_end - chunk.tokens.begin : 0;
    const State continued = rows(state, 0, num_continued);
    const State saved = rows(buffers.saved, 0, num_continued);
    if (num_continued > 0) merge_states({continued}, saved.out, saved.lse, stream);
    run_context_chunk(chunk.index, call.query.slice(0, chunk.tokens.begin, chunk.tokens.end), buffers.key,
                      buffers.value, plan, state.out, state.lse, stream);
    if (num_continued > 0) merge_states({saved, continued}, continued.out, continued.lse, stream);
  }

  const Tensor new_rows = call.new_latents.slice(0, 0, data.num_tokens);
  impl_->expand(new_rows.slice(1, 0, spec.kv_lora_rank), as_one_page(new_rows), data.all_new_tokens, buffers,
                call.projection, {}, stream);
  if (data.context.chunks.empty()) {
    run_new_tokens(call.query, buffers.key, buffers.value, plan, call.out, call.lse, stream, call.out_scale);
    return;
  }
  const bool has_own_state = impl_->has_own_state(data);
  const State state{has_own_state ? buffers.new_tokens.out : call.out,
                    call.lse.is_given() ? call.lse : buffers.new_tokens.lse};
  run_new_tokens(call.query, buffers.key, buffers.value, plan, state.out, state.lse, stream);
  merge_context(buffers.context, state, plan, stream, has_own_state ? call.out : Tensor(), call.out_scale);
}

int64_t MlaPlan::num_tokens() const { return data_->num_tokens; }
const std::vector<ContextChunk>& MlaPlan::chunks() const { return data_->context.chunks; }
const std::vector<TokenRange>& MlaPlan::empty_token_slices() const { return data_->context.empty_token_slices; }
int64_t MlaPlan::workspace_bytes() const { return data_->workspace_bytes; }

}  // namespace qkv
