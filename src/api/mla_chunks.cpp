#include "api/mla_chunks.hpp"

#include "api/engines.hpp"
#include "api/tensor_checks.hpp"
#include "api/warm_layers.hpp"
#include "core/checks.hpp"
#include "core/eight_bit.hpp"
#include "plan/builder.hpp"

namespace qkv::mla {
namespace {

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
RunBatch::Run run_of_new_tokens(const plan::PlanData& whole, std::vector<int32_t> starts) {
  std::vector<int32_t> lengths = whole.seq_lens;
  for (int32_t r = 0; r < whole.num_requests; ++r) lengths[r] -= starts[r];
  return {0, whole.num_requests, whole.query_start_loc, std::move(starts), std::move(lengths)};
}

void check_batch(const Batch& batch, const ContextChunkOptions& options, const MlaSpec& spec) {
  if (batch.slot_mapping.is_given()) {
    refuse("slot_mapping", batch.slot_mapping.describe(), "none: no cache is written here; cache_write does",
           ErrorCode::mismatch);
  }
  if (options.page_size != spec.cache.page_size) {
    refuse("options.page_size", options.page_size, fmt::format("{}, the layer's page size", spec.cache.page_size),
           ErrorCode::mismatch);
  }
}

void check_ranks(const PlanData& plan, const Collectives* collectives) {
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

void check_latent_scale(const Tensor& scale, const MlaSpec& spec, Device device) {
  if (is_8bit(spec.latent_dtype())) return api::check_single_scale(scale, "latent_scale", device);
  if (!scale.is_given()) return;
  refuse("latent_scale", scale.describe(),
         fmt::format("none with latents of {}: only 8-bit elements are scaled", to_string(spec.latent_dtype())),
         ErrorCode::mismatch);
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

State rows_of(const State& state, int32_t begin, int32_t end) {
  return {state.out.slice(0, begin, end), state.lse.slice(1, begin, end)};
}

// All layers at once and before they are made, so that threads share the work: a layer by itself compiles its kernels
// one after another.
Device warmed(Device device, const std::vector<LayerSpec>& layers, const std::optional<RequestBounds>& bounds) {
  WarmupOptions calls;
  calls.gather_cache = calls.merge_states = true;
  if (bounds) api::warm_layers(layers, device, *bounds, calls);
  return device;
}

}  // namespace

ChunkedLayer::ChunkedLayer(MlaSpec spec, Device device, const LayerSpec& new_tokens, const LayerSpec& new_tokens_state,
                           const LayerSpec& context, const std::optional<RequestBounds>& warm_up)
    : spec_(std::move(spec)),
      device_(warmed(device, {new_tokens, new_tokens_state, context}, warm_up)),
      new_tokens_(new_tokens, device),
      new_tokens_state_(new_tokens_state, device),
      context_(context, device),
      new_tokens_mask_(new_tokens_.spec().effective_mask().hash()),
      context_mask_(context_.spec().effective_mask().hash()) {}

PlanData ChunkedLayer::plan(const Batch& batch, const ContextChunkOptions& options, Stream stream) const {
  check_batch(batch, options, spec_);
  LayerSpec all_keys = new_tokens_.spec();
  all_keys.mask = spec_.mask;
  Batch without_table = batch;
  without_table.block_table = {};
  const plan::PlanData whole = plan::read_batch(all_keys, without_table);
  const std::vector<int32_t> contexts = context_lens(whole);
  ContextChunks context = plan_context_chunks(whole.query_start_loc, contexts, options);

  const RunBatch new_tokens(whole, new_tokens_.spec(), run_of_new_tokens(whole, contexts));
  Plan own = this->new_tokens(context).plan(new_tokens.batch(), stream);
  PlanData data{spec_, whole.num_tokens, std::move(context), std::move(own), {}, {}, {}, {}};
  data.is_sharded = context_.spec().shard.num_ranks > 1;
  data.num_ranks = data.is_sharded ? 1 : options.num_ranks;
  data.rank = data.is_sharded ? 0 : options.rank;
  const plan::Engine& engine = api::engine_of(device_);
  const auto add_gather = [&](std::vector<plan::GatherPlan>& gathers, plan::GatherPlan gather) {
    gathers.push_back(std::move(gather));
    engine.place(gathers.back(), stream);
  };
  for (const ContextChunk& chunk : data.context.chunks) {
    const RunBatch run(whole, context_.spec(),
                       {chunk.request_begin, chunk.request_end, chunk.query_start_loc, chunk.starts, chunk.seq_lens});
    data.chunk_plans.push_back(context_.plan(run.batch(), stream));
    if (!batch.block_table.is_given()) continue;
    check_rank(batch.block_table, "block_table", 2, "[num_requests, max_pages]");
    check_extent(batch.block_table, "block_table", 0, whole.num_requests, "num_requests");
    add_gather(data.num_ranks > 1 ? data.own_gathers : data.chunk_gathers,
               gather_of_rank(chunk, batch.block_table, options));
    if (data.num_ranks > 1) add_gather(data.chunk_gathers, gather_of_all_ranks(chunk, options));
  }
  data.all_new_tokens = plan::one_page(static_cast<int32_t>(whole.num_tokens));
  engine.place(data.all_new_tokens, stream);
  data.workspace_bytes = layout_workspace(data).bytes;
  return data;
}

// The plan was made for a layer of this kind.
void ChunkedLayer::check_plan(const PlanData& plan) const {
  const auto check = [](const char* name, const auto& of_plan, const auto& of_layer) {
    if (of_plan == of_layer) return;
    refuse("plan", fmt::format("a plan made for {} = {}", name, of_plan),
           fmt::format("a plan of this layer: {} = {}", name, of_layer), ErrorCode::mismatch);
  };
  check("kv_lora_rank", plan.spec.kv_lora_rank, spec_.kv_lora_rank);
  check("qk_rope_head_dim", plan.spec.qk_rope_head_dim, spec_.qk_rope_head_dim);
  check("cache.page_size", plan.spec.cache.page_size, spec_.cache.page_size);
  // The layout of the workspace follows from these.
  check("cache_dtype", to_string(plan.spec.latent_dtype()), to_string(spec_.latent_dtype()));
  check("output_dtype", to_string(plan.spec.out_dtype()), to_string(spec_.out_dtype()));
  api::check_plan_fits(new_tokens(plan).spec(), new_tokens_mask_, plan.new_tokens.data());
  for (const Plan& chunk : plan.chunk_plans) api::check_plan_fits(context_.spec(), context_mask_, chunk.data());
}

void ChunkedLayer::check_cache(const Tensor& latent_cache, const PlanData& plan) const {
  if (plan.chunk_gathers.empty()) refuse("block_table", "nothing", "a Batch with block_table, for forward");
  check_rank(latent_cache, "latent_cache", 3, "[num_pages, page_size, latent_dim]");
  check_device(latent_cache, "latent_cache", device_);
  check_dtype(latent_cache, "latent_cache", spec_.latent_dtype());
  check_last_axis_contiguous(latent_cache, "latent_cache");
  check_extent(latent_cache, "latent_cache", 1, spec_.cache.page_size, "page_size");
  check_extent(latent_cache, "latent_cache", 2, spec_.latent_dim(), "kv_lora_rank + qk_rope_head_dim");
  for (const plan::GatherPlan& gather : plan.num_ranks == 1 ? plan.chunk_gathers : plan.own_gathers) {
    if (gather.max_page < latent_cache.shape[0]) continue;
    refuse("block_table", fmt::format("page {}", gather.max_page),
           fmt::format("page numbers below {}, the cache's num_pages", latent_cache.shape[0]), ErrorCode::mismatch);
  }
}

void ChunkedLayer::check_forward(const Call& call, const Tensor& workspace, const Result& result) const {
  const PlanData& plan = call.plan;
  check_plan(plan);
  check_ranks(plan, call.latent_ranks);
  LayerSpec layer = new_tokens_.spec();
  layer.output_dtype = spec_.out_dtype();
  api::check_query(layer, device_, call.query, plan.num_tokens);
  api::check_out(layer, device_, result.out, result.lse, plan.num_tokens);
  api::check_out_scale(spec_.output_scales, result.out, result.out_scale, plan.num_tokens);
  check_rank(call.new_latents, "new_latents", 2, "[num_tokens, latent_dim]");
  check_device(call.new_latents, "new_latents", device_);
  check_dtype(call.new_latents, "new_latents", spec_.dtype);
  check_last_axis_contiguous(call.new_latents, "new_latents");
  check_extent_at_least(call.new_latents, "new_latents", 0, plan.num_tokens, "num_tokens");
  check_extent(call.new_latents, "new_latents", 1, spec_.latent_dim(), "kv_lora_rank + qk_rope_head_dim");
  if (!call.projection) refuse("projection", "an empty function", "matrix_projection's, or the caller's own");
  api::check_workspace(workspace, device_, plan.workspace_bytes);
  check_latent_scale(call.latent_scale, spec_, device_);
  if (!plan.context.chunks.empty()) check_cache(call.latent_cache, plan);
}

Buffers ChunkedLayer::lay_out(const Tensor& workspace, const PlanData& plan) const {
  const WorkspaceLayout at = layout_workspace(plan);
  const auto tensor = [&](int64_t offset, DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(static_cast<const std::byte*>(workspace.data) + offset, dtype, shape, device_);
  };
  const int64_t heads = spec_.num_heads;
  const auto state = [&](int64_t out_at, int64_t lse_at, int64_t rows) {
    return State{tensor(out_at, DType::f32, {rows, heads, spec_.v_head_dim}),
                 tensor(lse_at, DType::f32, {heads, rows})};
  };
  Buffers buffers{{},
                  tensor(at.key, spec_.dtype, {at.rows, heads, spec_.head_dim()}),
                  tensor(at.value, spec_.dtype, {at.rows, heads, spec_.v_head_dim}),
                  state(at.context_out, at.context_lse, at.context_rows),
                  state(at.saved_out, at.saved_lse, at.saved_rows),
                  state(at.new_tokens_out, at.new_tokens_lse, at.context_rows)};
  for (int32_t turn = 0; turn < kGatherTurns; ++turn) {
    buffers.gathers[turn] = {tensor(at.latents[turn], spec_.dtype, {0}),
                             tensor(at.own_latents[turn], spec_.latent_dtype(), {0}),
                             tensor(at.all_latents[turn], spec_.latent_dtype(), {0})};
  }
  return buffers;
}

void ChunkedLayer::expand(const Tensor& latents, const Tensor& pages, const plan::GatherPlan& gather,
                          const Tensor& scale, const Call& call, const Buffers& buffers) const {
  const int64_t num_rows = gather.num_rows();
  if (num_rows == 0) return;
  const Tensor key = buffers.key.slice(0, 0, num_rows);
  if (spec_.qk_rope_head_dim > 0) {
    const Tensor rope = pages.slice(3, spec_.kv_lora_rank, spec_.latent_dim());
    api::engine_of(device_).gather(spread_over_heads(rope, spec_.num_heads), gather,
                                   key.slice(2, spec_.qk_nope_head_dim, spec_.head_dim()), scale, call.stream);
  }
  call.projection({latents, key.slice(2, 0, spec_.qk_nope_head_dim), buffers.value.slice(0, 0, num_rows), call.stream});
}

ChunkedLayer::GatheredChunk ChunkedLayer::gather_chunk(const ContextChunk& chunk, const Call& call,
                                                       const Buffers::Gather& buffers) const {
  const plan::Engine& engine = api::engine_of(device_);
  const PlanData& plan = call.plan;
  const Stream stream = call.gather_stream;
  Tensor pages = with_one_head(call.latent_cache);
  if (plan.num_ranks > 1) {
    const int64_t num_rows = chunk.num_padded_local_rows();
    const int64_t dim = spec_.latent_dim();
    engine.gather(pages, plan.own_gathers[chunk.index], rows_at(buffers.own_latents, {num_rows, 1, dim}), {}, stream);
    call.latent_ranks->all_gather(rows_at(buffers.own_latents, {num_rows, dim}),
                                  rows_at(buffers.all_latents, {plan.num_ranks, num_rows, dim}), stream);
    pages = rows_at(buffers.all_latents, {plan.num_ranks * num_rows, 1, 1, dim});
  }
  const plan::GatherPlan& gather = plan.chunk_gathers[chunk.index];
  engine.gather(pages.slice(3, 0, spec_.kv_lora_rank), gather,
                rows_at(buffers.latents, {gather.num_rows(), 1, spec_.kv_lora_rank}), call.latent_scale, stream);
  return {rows_at(buffers.latents, {gather.num_rows(), spec_.kv_lora_rank}), pages};
}

// The chunk's state overwrites all of its rows: those that it continues are put aside, and joined again.
void ChunkedLayer::run_chunk(const ContextChunk& chunk, const Call& call, const Tensor& query,
                             const Buffers& buffers) const {
  const State state = rows_of(buffers.context, chunk.tokens.begin, chunk.tokens.end);
  const int32_t num_continued = chunk.is_continuation ? chunk.continuation_token_end - chunk.tokens.begin : 0;
  const State continued = rows_of(state, 0, num_continued);
  const State saved = rows_of(buffers.saved, 0, num_continued);
  if (num_continued > 0) merge_states({continued}, saved.out, saved.lse, call.stream);
  context_.forward(query.slice(0, chunk.tokens.begin, chunk.tokens.end), buffers.key, buffers.value,
                   call.plan.chunk_plans[chunk.index], state.out, state.lse, call.stream);
  if (num_continued > 0) merge_states({saved, continued}, continued.out, continued.lse, call.stream);
}

void ChunkedLayer::run_context(const Call& call, const Tensor& query, const Buffers& buffers) const {
  const plan::Engine& engine = api::engine_of(device_);
  const std::vector<ContextChunk>& chunks = call.plan.context.chunks;
  // A place is free again when the chunk before last has been computed.
  const auto gather = [&](size_t i) {
    engine.follow(call.gather_stream, call.stream);
    return gather_chunk(chunks[i], call, buffers.gathers[i % kGatherTurns]);
  };

  GatheredChunk next;
  if (!chunks.empty()) next = gather(0);
  for (const ContextChunk& chunk : chunks) {
    const GatheredChunk gathered = next;
    engine.follow(call.stream, call.gather_stream);
    if (const auto i = static_cast<size_t>(chunk.index) + 1; i < chunks.size()) next = gather(i);
    expand(gathered.latents, gathered.pages, call.plan.chunk_gathers[chunk.index], call.latent_scale, call, buffers);
    run_chunk(chunk, call, query, buffers);
  }
}

void ChunkedLayer::expand_new_tokens(const Call& call, const Buffers& buffers) const {
  const Tensor rows = call.new_latents.slice(0, 0, call.plan.num_tokens);
  expand(rows.slice(1, 0, spec_.kv_lora_rank), as_one_page(rows), call.plan.all_new_tokens, {}, call, buffers);
}

}  // namespace qkv::mla
