// The context's layer has all heads and is shown the rank's tokens; the new tokens' layer has the rank's heads and is
// shown every new token. Their states are joined as any others.
#include "qkv/mla_context_parallel.hpp"

#include "api/engines.hpp"
#include "api/mla_chunks.hpp"
#include "api/mla_layers.hpp"
#include "api/rank_agreement.hpp"
#include "api/rank_heads.hpp"
#include "api/tensor_checks.hpp"
#include "core/checks.hpp"
#include "mask/shift.hpp"
#include "parallel/exchange.hpp"

namespace qkv {
namespace {

void check_spec(const MlaContextParallelSpec& spec, int32_t num_ranks) {
  if (spec.interleave_size < 1) refuse("interleave_size", spec.interleave_size, "at least 1");
  api::check_heads("layer.num_heads", spec.layer.num_heads, spec.exchange, num_ranks);
}

MlaContextParallelSpec checked_spec(MlaContextParallelSpec spec, Device device, int32_t num_ranks) {
  spec.layer = api::checked_layer(std::move(spec.layer), device);
  check_spec(spec, num_ranks);
  return spec;
}

LayerSpec context_layer(const MlaSpec& spec, const Shard& shard) {
  LayerSpec layer = api::context_layer(spec);
  layer.shard = shard;
  return layer;
}

// Its states are f32: they are rounded once, when they have been joined.
LayerSpec new_tokens_layer(const MlaSpec& spec, const api::RankHeads& heads) {
  LayerSpec layer = api::new_tokens_layer(spec);
  layer.num_q_heads = layer.num_kv_heads = heads.count();
  layer.mask = mask::with_first_head(layer.effective_mask(), heads.begin);
  if (!spec.sinks.empty()) layer.sinks.assign(spec.sinks.begin() + heads.begin, spec.sinks.begin() + heads.end);
  layer.output_dtype = DType::f32;
  layer.output_scales = OutputScales::per_tensor;
  return layer;
}

// What a rank runs.
struct RankLayers {
  LayerSpec new_tokens, context;

  RankLayers(const MlaContextParallelSpec& spec, const Shard& shard)
      : new_tokens(new_tokens_layer(spec.layer, api::heads_of_rank(spec.layer.num_heads, spec.exchange, shard))),
        context(context_layer(spec.layer, shard)) {}
};

State rows_of(const State& state, const TokenRange& tokens) {
  return {state.out.slice(0, tokens.begin, tokens.end), state.lse.slice(1, tokens.begin, tokens.end)};
}

}  // namespace

std::vector<LayerSpec> rank_layers(const MlaContextParallelSpec& spec, int32_t rank, int32_t num_ranks) {
  api::check_rank_of(rank, num_ranks);
  const MlaContextParallelSpec checked = checked_spec(spec, {DeviceKind::cuda, 0}, num_ranks);
  const RankLayers layers(checked, {rank, num_ranks, spec.interleave_size});
  return {layers.new_tokens, layers.context};
}

struct MlaContextParallel::Impl {
  Impl(MlaContextParallelSpec of_spec, std::shared_ptr<Collectives> of_collectives, const Shard& of_shard,
       const RankLayers& layers, const std::optional<RequestBounds>& warm_up)
      : spec(std::move(of_spec)),
        collectives(std::move(of_collectives)),
        shard(of_shard),
        heads(api::heads_of_rank(spec.layer.num_heads, spec.exchange, shard)),
        shape{shard.num_ranks,       heads.count(),    spec.layer.num_heads, spec.layer.head_dim(),
              spec.layer.v_head_dim, spec.layer.dtype, spec.exchange},
        layer(spec.layer, collectives->device(), layers.new_tokens, layers.new_tokens, layers.context, warm_up) {}

  MlaContextParallelSpec spec;
  std::shared_ptr<Collectives> collectives;
  Shard shard;
  api::RankHeads heads;
  parallel::ExchangeShape shape;
  mla::ChunkedLayer layer;

  // Behind the chunks' part of the workspace.
  parallel::ExchangeBuffers lay_out(const void* workspace, int64_t chunk_bytes, int64_t num_tokens) const {
    return parallel::lay_out(shape, num_tokens, static_cast<const std::byte*>(workspace) + chunk_bytes, layer.device());
  }
  int64_t exchange_bytes(int64_t num_tokens) const {
    alignas(256) static const std::byte anywhere[1] = {};
    return lay_out(anywhere, 0, num_tokens).bytes;
  }

  ContextChunkOptions with_ranks(ContextChunkOptions options) const;
  std::vector<State> context_states(const mla::Call& call, const mla::Buffers& buffers,
                                    const parallel::ExchangeBuffers& exchanged) const;
};

ContextChunkOptions MlaContextParallel::Impl::with_ranks(ContextChunkOptions options) const {
  const Shard given{options.rank, options.num_ranks, options.interleave_size};
  if (!(given == Shard{}) && !(given == shard)) {
    refuse("options.num_ranks", fmt::format("rank {} of {} by {}", given.rank, given.num_ranks, given.interleave_size),
           "none: ranks and interleave are the layer's", ErrorCode::mismatch);
  }
  options.rank = shard.rank;
  options.num_ranks = shard.num_ranks;
  options.interleave_size = shard.interleave_size;
  return options;
}

// Of the rank's heads, over all ranks' parts. Rows without context hold anything.
std::vector<State> MlaContextParallel::Impl::context_states(const mla::Call& call, const mla::Buffers& buffers,
                                                            const parallel::ExchangeBuffers& exchanged) const {
  const plan::Engine& engine = api::engine_of(layer.device());
  const Tensor all_queries = parallel::gather_queries(shape, call.query, call.plan.all_new_tokens, exchanged, engine,
                                                      *collectives, call.stream);
  layer.run_context(call, all_queries, buffers);
  for (const TokenRange& tokens : call.plan.context.context_token_slices) {
    const State sent = rows_of(exchanged.context, tokens);
    merge_states({rows_of(buffers.context, tokens)}, sent.out, sent.lse, call.stream);
  }
  return parallel::exchange_states(shape, exchanged, engine, *collectives, call.stream);
}

MlaContextParallel::MlaContextParallel(MlaContextParallelSpec spec, std::shared_ptr<Collectives> collectives,
                                       const std::optional<RequestBounds>& warm_up) {
  const Shard shard = api::agreed_shard(spec, collectives.get());
  spec = checked_spec(std::move(spec), collectives->device(), shard.num_ranks);
  const RankLayers layers(spec, shard);
  impl_ = std::make_unique<Impl>(std::move(spec), std::move(collectives), shard, layers, warm_up);
}

MlaContextParallel::~MlaContextParallel() = default;
MlaContextParallel::MlaContextParallel(MlaContextParallel&&) noexcept = default;
MlaContextParallel& MlaContextParallel::operator=(MlaContextParallel&&) noexcept = default;

const MlaContextParallelSpec& MlaContextParallel::spec() const { return impl_->spec; }
const Shard& MlaContextParallel::shard() const { return impl_->shard; }
int32_t MlaContextParallel::num_heads() const { return impl_->heads.count(); }

MlaPlan MlaContextParallel::plan(const Batch& batch, const ContextChunkOptions& options, Stream stream) const {
  mla::PlanData data = impl_->layer.plan(batch, impl_->with_ranks(options), stream);
  data.workspace_bytes += impl_->exchange_bytes(data.num_tokens);
  return MlaPlan(std::make_shared<const mla::PlanData>(std::move(data)));
}

int64_t MlaContextParallel::workspace_bytes(int64_t max_new_tokens, int64_t workspace_tokens) const {
  if (max_new_tokens < 0) refuse("max_new_tokens", max_new_tokens, "0 or more");
  if (workspace_tokens < 0) refuse("workspace_tokens", workspace_tokens, "0 or more");
  const int64_t own_tokens = workspace_tokens / impl_->shard.num_ranks;
  return mla::layout_workspace(impl_->spec.layer, max_new_tokens, own_tokens, max_new_tokens, 0, 1, true).bytes +
         impl_->exchange_bytes(max_new_tokens);
}

void MlaContextParallel::forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache,
                                 const MlaPlan& plan, const Projection& projection, const Tensor& workspace,
                                 const Tensor& out, const Tensor& lse, Stream stream,
                                 std::optional<Stream> gather_stream, const Tensor& out_scale,
                                 const Tensor& latent_scale) const {
  const mla::PlanData& data = plan.data();
  const mla::ChunkedLayer& layer = impl_->layer;
  const mla::Call call{query, new_latents, latent_cache, latent_scale,
                       data,  projection,  stream,       gather_stream.value_or(stream)};
  layer.check_forward(call, workspace, {out, lse, out_scale});
  const int64_t chunk_bytes = mla::layout_workspace(data).bytes;
  api::check_workspace(workspace, layer.device(), chunk_bytes + impl_->exchange_bytes(data.num_tokens));
  if (data.num_tokens == 0) return;
  const mla::Buffers buffers = layer.lay_out(workspace, data);
  const parallel::ExchangeBuffers exchanged = impl_->lay_out(workspace.data, chunk_bytes, data.num_tokens);
  std::vector<State> states;
  if (!data.context.chunks.empty()) states = impl_->context_states(call, buffers, exchanged);

  layer.expand_new_tokens(call, buffers);
  const auto own_heads = [&](const Tensor& all) { return all.slice(1, impl_->heads.begin, impl_->heads.end); };
  layer.new_tokens(data).forward(query, own_heads(buffers.key), own_heads(buffers.value), data.new_tokens,
                                 exchanged.new_tokens.out, exchanged.new_tokens.lse, stream);
  states.push_back(exchanged.new_tokens);
  const bool of_tokens = spec().layer.output_scales == OutputScales::per_token_group;
  const auto join = [&](const std::vector<State>& parts, const TokenRange& tokens) {
    std::vector<State> rows;
    rows.reserve(parts.size());
    for (const State& part : parts) rows.push_back(rows_of(part, tokens));
    merge_states(rows, out.slice(0, tokens.begin, tokens.end),
                 lse.is_given() ? lse.slice(1, tokens.begin, tokens.end) : lse, stream,
                 of_tokens ? out_scale.slice(0, tokens.begin, tokens.end) : out_scale);
  };
  for (const TokenRange& tokens : data.context.context_token_slices) join(states, tokens);
  for (const TokenRange& tokens : data.context.empty_token_slices) join({exchanged.new_tokens}, tokens);
}

}  // namespace qkv
