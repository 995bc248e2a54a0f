// A layer over several ranks is two layers on each of them: all heads over the rank's part of the contexts, and the
// rank's own heads over the new tokens, which every rank has. Their states are joined as any others.
#include "qkv/context_parallel.hpp"

#include "api/engines.hpp"
#include "api/layer_checks.hpp"
#include "api/rank_agreement.hpp"
#include "api/rank_heads.hpp"
#include "api/tensor_checks.hpp"
#include "core/checks.hpp"
#include "core/float8.hpp"
#include "mask/shift.hpp"
#include "parallel/exchange.hpp"
#include "plan/plan_data.hpp"

namespace qkv {

namespace parallel {

// What forward runs by. Launches that bring queries into place need the number of rows only.
struct StepPlan {
  Plan context;
  Plan new_tokens;
  std::shared_ptr<const plan::GatherPlan> query_rows;
  bool exchanges;
  int64_t workspace_bytes;

  int64_t num_rows() const { return new_tokens.data().rows_of_tokens(); }
};

}  // namespace parallel

namespace {

using parallel::StepPlan;

void check_spec(const ContextParallelSpec& spec, int32_t num_ranks) {
  const LayerSpec& layer = spec.layer;
  if (layer.type != AttentionType::decoder) {
    refuse("layer.type", to_string(layer.type), "decoder: the contexts of others are not shared by ranks",
           ErrorCode::unsupported);
  }
  if (is_float8(layer.query_dtype)) {
    refuse("layer.query_dtype", to_string(layer.query_dtype), "f32, f16 or bf16: ranks exchange no scales of queries",
           ErrorCode::unsupported);
  }
  if (!layer.cache) refuse("layer.cache", "none", "a cache, of which each rank keeps a part");
  if (spec.interleave_size < 1 || layer.cache->page_size % spec.interleave_size != 0) {
    refuse("interleave_size", spec.interleave_size,
           fmt::format("a divisor of layer.cache.page_size = {}", layer.cache->page_size));
  }
  if (layer.key_run != KeyRun::all) refuse("layer.key_run", to_string(layer.key_run), "all: ranks choose their own");
  if (layer.shard.num_ranks != 1) {
    refuse("layer.shard", fmt::format("{} ranks", layer.shard.num_ranks), "none: it follows from the collectives");
  }
  if (spec.exchange == StateExchange::all_gather) return;
  api::check_heads("layer.num_q_heads", layer.num_q_heads, spec.exchange, num_ranks);
  if (layer.num_kv_heads % num_ranks != 0 && num_ranks % layer.num_kv_heads != 0) {
    refuse("layer.num_kv_heads", layer.num_kv_heads,
           fmt::format("a divisor or a multiple of {}, the number of ranks", num_ranks));
  }
}

ContextParallelSpec checked_spec(ContextParallelSpec spec, Device device, int32_t num_ranks) {
  spec.layer = api::checked_layer(std::move(spec.layer), device);
  check_spec(spec, num_ranks);
  return spec;
}

// A rank's query heads, and the KV heads that they read.
struct Heads : api::RankHeads {
  int32_t kv_begin, kv_end;

  Heads(const ContextParallelSpec& spec, const Shard& shard)
      : RankHeads(api::heads_of_rank(spec.layer.num_q_heads, spec.exchange, shard)),
        kv_begin(begin / spec.layer.group_size()),
        kv_end((end - 1) / spec.layer.group_size() + 1) {}

  std::vector<float> of(const std::vector<float>& all) const {
    return all.empty() ? all : std::vector<float>(all.begin() + begin, all.begin() + end);
  }
};

LayerSpec with_output(LayerSpec layer, DType dtype) {
  layer.output_dtype = dtype;
  layer.output_scales = OutputScales::per_tensor;
  return layer;
}

// Without the sinks, which join once: with the new tokens.
LayerSpec context_layer(LayerSpec layer, const Shard& shard, DType state_dtype) {
  layer.key_run = KeyRun::context;
  layer.shard = shard;
  layer.sinks.clear();
  return with_output(std::move(layer), state_dtype);
}

LayerSpec new_tokens_layer(LayerSpec layer, const Heads& heads) {
  layer.key_run = KeyRun::new_tokens;
  layer.num_q_heads = heads.count();
  layer.num_kv_heads = heads.kv_end - heads.kv_begin;
  layer.kv_dtype = layer.query_dtype;
  layer.kv_scales = KvScales::none;
  layer.cache.reset();
  layer.mask = mask::with_first_head(layer.effective_mask(), heads.begin);
  layer.alibi_slopes = heads.of(layer.alibi_slopes);
  layer.sinks = heads.of(layer.sinks);
  return layer;
}

parallel::ExchangeShape exchange_shape(const ContextParallelSpec& spec, const Shard& shard) {
  const LayerSpec& layer = spec.layer;
  return {shard.num_ranks,   Heads(spec, shard).count(), layer.num_q_heads, layer.head_dim,
          layer.value_dim(), layer.query_dtype,          spec.exchange};
}

// What a rank runs. New tokens are the result where nothing is exchanged, and else a state.
struct RankLayers {
  LayerSpec context, new_tokens, new_tokens_state;

  RankLayers(const ContextParallelSpec& spec, const Shard& shard)
      : context(context_layer(spec.layer, shard, exchange_shape(spec, shard).state_dtype())),
        new_tokens(new_tokens_layer(spec.layer, Heads(spec, shard))),
        new_tokens_state(with_output(new_tokens, DType::f32)) {}
};

Batch new_tokens_batch(const Batch& batch, const Heads& heads) {
  Batch own = batch;
  own.block_table = {};
  own.slot_mapping = {};
  own.prefix_groups = {};
  own.prefix_sharing = PrefixSharing::off;
  if (own.alibi_slopes.rank == 2 && own.alibi_slopes.shape[1] >= heads.end) {
    own.alibi_slopes = own.alibi_slopes.slice(1, heads.begin, heads.end);
  }
  return own;
}

PlanLimits new_tokens_limits(PlanLimits limits) {
  limits.num_pages = 0;
  return limits;
}

std::shared_ptr<const plan::GatherPlan> place_rows(int64_t num_rows, const plan::Engine& engine, Stream stream) {
  auto rows = std::make_shared<plan::GatherPlan>(plan::one_page(static_cast<int32_t>(num_rows)));
  engine.place(*rows, stream);
  return rows;
}

// From the whole requests, so that all ranks say the same.
bool has_context(const plan::PlanData& plan) {
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    if (plan.seq_lens[r] > plan.query_start_loc[r + 1] - plan.query_start_loc[r]) return true;
  }
  return false;
}

}  // namespace

std::string_view to_string(StateExchange exchange) {
  switch (exchange) {
    case StateExchange::all_to_all:
      return "all_to_all";
    case StateExchange::reduce_scatter:
      return "reduce_scatter";
    case StateExchange::all_gather:
      return "all_gather";
  }
  return "unknown";
}

std::vector<LayerSpec> rank_layers(const ContextParallelSpec& spec, int32_t rank, int32_t num_ranks) {
  api::check_rank_of(rank, num_ranks);
  const ContextParallelSpec checked = checked_spec(spec, {DeviceKind::cuda, 0}, num_ranks);
  const RankLayers layers(checked, {rank, num_ranks, spec.interleave_size});
  return {layers.context, layers.new_tokens, layers.new_tokens_state};
}

struct ContextParallel::Impl {
  Impl(ContextParallelSpec of_spec, std::shared_ptr<Collectives> of_collectives, const Shard& of_shard,
       const RankLayers& layers, const std::optional<RequestBounds>& warm_up)
      : spec(std::move(of_spec)),
        collectives(std::move(of_collectives)),
        shard(of_shard),
        heads(spec, shard),
        shape(exchange_shape(spec, shard)),
        device(collectives->device()),
        engine(api::engine_of(device)),
        context(layers.context, device, warm_up),
        new_tokens(layers.new_tokens, device, warm_up),
        new_tokens_state(layers.new_tokens_state, device, warm_up) {}

  ContextParallelSpec spec;
  std::shared_ptr<Collectives> collectives;
  Shard shard;
  Heads heads;
  parallel::ExchangeShape shape;
  Device device;
  const plan::Engine& engine;
  Attention context;           // all heads, the rank's tokens
  Attention new_tokens;        // own heads, to the result
  Attention new_tokens_state;  // the same, to an f32 state

  int64_t workspace_bytes(int64_t num_rows) const {
    alignas(256) static const std::byte anywhere[1] = {};
    return parallel::lay_out(shape, num_rows, anywhere, device).bytes;
  }

  void check_forward(const Tensor& query, const Tensor& key, const Tensor& value, const KvCache& cache,
                     const StepPlan& plan, const Tensor& workspace, const Tensor& out, const Tensor& lse,
                     const Tensor& out_scale) const;
};

// Everything that could fail later on one rank only, while the others wait in an exchange.
void ContextParallel::Impl::check_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const KvCache& cache, const StepPlan& plan, const Tensor& workspace,
                                          const Tensor& out, const Tensor& lse, const Tensor& out_scale) const {
  const int64_t num_rows = plan.num_rows();
  api::check_query(new_tokens.spec(), device, query, num_rows);
  LayerSpec all_heads = spec.layer;
  all_heads.kv_dtype = spec.layer.query_dtype;
  api::check_dense_keys(all_heads, device, key, value, num_rows);
  api::check_out(new_tokens.spec(), device, out, lse, num_rows);
  api::check_out_scale(spec.layer.output_scales, out, out_scale, num_rows);
  api::check_cache(context.spec(), device, cache, plan.context.data().highest_page());
  api::check_scales(context.spec(), device, cache, plan.context.data().rows_of_requests());
  api::check_workspace(workspace, device, plan.workspace_bytes);
}

ContextParallel::ContextParallel(ContextParallelSpec spec, std::shared_ptr<Collectives> collectives,
                                 const std::optional<RequestBounds>& warm_up) {
  const Shard shard = api::agreed_shard(spec, collectives.get());
  spec = checked_spec(std::move(spec), collectives->device(), shard.num_ranks);
  const RankLayers layers(spec, shard);
  impl_ = std::make_unique<Impl>(std::move(spec), std::move(collectives), shard, layers, warm_up);
}

ContextParallel::~ContextParallel() = default;
ContextParallel::ContextParallel(ContextParallel&&) noexcept = default;
ContextParallel& ContextParallel::operator=(ContextParallel&&) noexcept = default;

const ContextParallelSpec& ContextParallel::spec() const { return impl_->spec; }
const Shard& ContextParallel::shard() const { return impl_->shard; }
int32_t ContextParallel::num_heads() const { return impl_->heads.count(); }

int64_t ContextParallel::workspace_bytes(int64_t max_tokens) const {
  if (max_tokens < 0) refuse("max_tokens", max_tokens, "0 or more");
  return impl_->workspace_bytes(max_tokens);
}

ContextParallelPlan ContextParallel::plan(const Batch& batch, Stream stream) const {
  Plan context = impl_->context.plan(batch, stream);
  const bool exchanges = has_context(context.data());
  const Attention& new_tokens = exchanges ? impl_->new_tokens_state : impl_->new_tokens;
  Plan own = new_tokens.plan(new_tokens_batch(batch, impl_->heads), stream);
  const int64_t num_rows = context.num_tokens();
  return ContextParallelPlan(std::make_shared<const StepPlan>(
      StepPlan{std::move(context), std::move(own), place_rows(num_rows, impl_->engine, stream), exchanges,
               exchanges ? impl_->workspace_bytes(num_rows) : 0}));
}

void ContextParallel::update_cache(const Tensor& key, const Tensor& value, const KvCache& cache,
                                   const ContextParallelPlan& plan, Stream stream) const {
  impl_->context.update_cache(key, value, cache, plan.context(), stream);
}

void ContextParallel::forward(const Tensor& query, const Tensor& key, const Tensor& value, const KvCache& cache,
                              const ContextParallelPlan& plan, const Tensor& workspace, const Tensor& out,
                              const Tensor& lse, Stream stream, const Tensor& out_scale,
                              std::optional<Stream> new_tokens_stream) const {
  const StepPlan& step = plan.data();
  impl_->check_forward(query, key, value, cache, step, workspace, out, lse, out_scale);
  const Heads& heads = impl_->heads;
  const Tensor own_key = key.slice(1, heads.kv_begin, heads.kv_end);
  const Tensor own_value = value.slice(1, heads.kv_begin, heads.kv_end);
  if (!step.exchanges) {
    impl_->new_tokens.forward(query, own_key, own_value, step.new_tokens, out, lse, stream, out_scale);
    return;
  }
  const int64_t num_rows = step.num_rows();
  if (num_rows == 0) return;
  const parallel::ExchangeBuffers buffers = parallel::lay_out(impl_->shape, num_rows, workspace.data, impl_->device);
  const Stream beside = new_tokens_stream.value_or(stream);
  impl_->engine.follow(beside, stream);
  impl_->new_tokens_state.forward(query, own_key, own_value, step.new_tokens, buffers.new_tokens.out,
                                  buffers.new_tokens.lse, beside);
  const Tensor all_queries = parallel::gather_queries(impl_->shape, query, *step.query_rows, buffers, impl_->engine,
                                                      *impl_->collectives, stream);
  impl_->context.forward(all_queries, cache, step.context, buffers.context.out, buffers.context.lse, stream);
  std::vector<State> states =
      parallel::exchange_states(impl_->shape, buffers, impl_->engine, *impl_->collectives, stream);
  impl_->engine.follow(stream, beside);
  states.push_back(buffers.new_tokens);
  merge_states(states, out.slice(0, 0, num_rows), lse.is_given() ? lse.slice(1, 0, num_rows) : lse, stream, out_scale);
}

bool ContextParallelPlan::exchanges() const { return data_->exchanges; }
int64_t ContextParallelPlan::workspace_bytes() const { return data_->workspace_bytes; }
const Plan& ContextParallelPlan::context() const { return data_->context; }
const Plan& ContextParallelPlan::new_tokens() const { return data_->new_tokens; }

struct ContextParallelPlanner::Impl {
  Heads heads;
  Planner context;
  Planner new_tokens;
  std::shared_ptr<const plan::GatherPlan> query_rows;
  int64_t workspace_bytes;
};

ContextParallelPlanner::ContextParallelPlanner(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ContextParallelPlanner::~ContextParallelPlanner() = default;
ContextParallelPlanner::ContextParallelPlanner(ContextParallelPlanner&&) noexcept = default;
ContextParallelPlanner& ContextParallelPlanner::operator=(ContextParallelPlanner&&) noexcept = default;

ContextParallelPlanner ContextParallel::planner(const PlanLimits& limits) const {
  Planner context = impl_->context.planner(limits);
  const int64_t num_rows = context.limits().max_tokens;
  Planner new_tokens = impl_->new_tokens_state.planner(new_tokens_limits(context.limits()));
  return ContextParallelPlanner(std::unique_ptr<ContextParallelPlanner::Impl>(
      new ContextParallelPlanner::Impl{impl_->heads, std::move(context), std::move(new_tokens),
                                       place_rows(num_rows, impl_->engine, {}), impl_->workspace_bytes(num_rows)}));
}

ContextParallelPlan ContextParallelPlanner::plan(const Batch& batch, Stream stream) {
  Plan context = impl_->context.plan(batch, stream);
  Plan new_tokens = impl_->new_tokens.plan(new_tokens_batch(batch, impl_->heads), stream);
  return ContextParallelPlan(std::make_shared<const StepPlan>(
      StepPlan{std::move(context), std::move(new_tokens), impl_->query_rows, true, impl_->workspace_bytes}));
}

void ContextParallelPlanner::check(Stream stream) const {
  impl_->context.check(stream);
  impl_->new_tokens.check(stream);
}

}  // namespace qkv
