#include "qkv/mla_prefill.hpp"

#include "api/mla_chunks.hpp"
#include "api/mla_layers.hpp"
#include "api/tensor_checks.hpp"
#include "core/checks.hpp"
#include "core/float8.hpp"

namespace qkv {

struct MlaPrefill::Impl : mla::ChunkedLayer {
  using ChunkedLayer::ChunkedLayer;

  // The new tokens' state is f32, to be joined into an output of 8 bits.
  bool has_own_state(const mla::PlanData& plan) const {
    return !plan.context.chunks.empty() && is_float8(spec().out_dtype());
  }
};

MlaPrefill::MlaPrefill(MlaSpec spec, Device device, const std::optional<RequestBounds>& warm_up) {
  spec = api::checked_layer(std::move(spec), device);
  const LayerSpec new_tokens = api::new_tokens_layer(spec);
  const LayerSpec new_tokens_state = api::new_tokens_state_layer(spec);
  const LayerSpec context = api::context_layer(spec);
  impl_ = std::make_shared<const Impl>(std::move(spec), device, new_tokens, new_tokens_state, context, warm_up);
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

const MlaSpec& MlaPrefill::spec() const { return impl_->spec(); }

MlaPlan MlaPrefill::plan(const Batch& batch, const ContextChunkOptions& options, Stream stream) const {
  return MlaPlan(std::make_shared<const mla::PlanData>(impl_->plan(batch, options, stream)));
}

int64_t MlaPrefill::workspace_bytes(int64_t max_new_tokens, int64_t workspace_tokens, int32_t num_ranks) const {
  if (max_new_tokens < 0) refuse("max_new_tokens", max_new_tokens, "0 or more");
  if (workspace_tokens < 0) refuse("workspace_tokens", workspace_tokens, "0 or more");
  if (num_ranks < 1) refuse("num_ranks", num_ranks, "1 or more");
  const auto own_rows = static_cast<int32_t>(num_ranks == 1 ? 0 : workspace_tokens / num_ranks);
  return mla::layout_workspace(impl_->spec(), max_new_tokens, workspace_tokens, max_new_tokens, own_rows, num_ranks,
                               false)
      .bytes;
}

void MlaPrefill::run_new_tokens(const Tensor& query, const Tensor& key, const Tensor& value, const MlaPlan& plan,
                                const Tensor& out, const Tensor& lse, Stream stream, const Tensor& out_scale) const {
  const mla::PlanData& data = plan.data();
  impl_->new_tokens(data).forward(query, key, value, data.new_tokens, out, lse, stream, out_scale);
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
  impl_->context().forward(query, key, value, plans[chunk], out, lse, stream);
}

void MlaPrefill::merge_context(const State& context, const State& new_tokens, const MlaPlan& plan, Stream stream,
                               const Tensor& out, const Tensor& out_scale) const {
  const int64_t num_tokens = plan.num_tokens();
  const LayerSpec& new_tokens_layer = impl_->new_tokens(plan.data()).spec();
  const bool to_out = impl_->has_own_state(plan.data());
  if (to_out) {
    LayerSpec result = new_tokens_layer;
    result.output_dtype = impl_->spec().out_dtype();
    api::check_out(result, impl_->device(), out, {}, num_tokens);
    api::check_out_scale(impl_->spec().output_scales, out, out_scale, num_tokens);
  } else {
    for (const auto& [tensor, name] : {std::pair{&out, "out"}, {&out_scale, "out_scale"}}) {
      if (tensor->is_given()) {
        refuse(name, tensor->describe(), "none: the result is new_tokens.out", ErrorCode::mismatch);
      }
    }
  }
  api::check_out(new_tokens_layer, impl_->device(), new_tokens.out, new_tokens.lse, num_tokens);
  api::check_out(impl_->context().spec(), impl_->device(), context.out, context.lse, num_tokens);
  check_given(new_tokens.lse, "new_tokens.lse", "f32 [num_heads, num_tokens]");
  check_given(context.lse, "context.lse", "f32 [num_heads, num_tokens]");
  const auto rows = [](const State& state, const TokenRange& tokens) {
    return State{state.out.slice(0, tokens.begin, tokens.end), state.lse.slice(1, tokens.begin, tokens.end)};
  };
  const auto merge = [&](const std::vector<State>& states, const TokenRange& tokens, const Tensor& lse) {
    if (!to_out) return merge_states(states, states.back().out, lse, stream);
    const bool of_tokens = impl_->spec().output_scales == OutputScales::per_token_group;
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
  const Stream gather_on = gather_stream.value_or(stream);
  forward_over({query, new_latents, latent_cache, latent_scale, plan.data(), projection, stream, gather_on, nullptr},
               plan, workspace, {out, lse, out_scale});
}

void MlaPrefill::forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache,
                         const MlaPlan& plan, const Projection& projection, const Tensor& workspace,
                         Collectives& collectives, const Tensor& out, const Tensor& lse, Stream stream,
                         std::optional<Stream> gather_stream, const Tensor& out_scale,
                         const Tensor& latent_scale) const {
  const Stream gather_on = gather_stream.value_or(stream);
  forward_over(
      {query, new_latents, latent_cache, latent_scale, plan.data(), projection, stream, gather_on, &collectives}, plan,
      workspace, {out, lse, out_scale});
}

void MlaPrefill::forward_over(const mla::Call& call, const MlaPlan& plan, const Tensor& workspace,
                              const mla::Result& result) const {
  const mla::PlanData& data = call.plan;
  const Stream stream = call.stream;
  impl_->check_forward(call, workspace, result);
  const mla::Buffers buffers = impl_->lay_out(workspace, data);
  impl_->run_context(call, call.query, buffers);
  impl_->expand_new_tokens(call, buffers);
  if (data.context.chunks.empty()) {
    run_new_tokens(call.query, buffers.key, buffers.value, plan, result.out, result.lse, stream, result.out_scale);
    return;
  }
  const bool has_own_state = impl_->has_own_state(data);
  const State state{has_own_state ? buffers.new_tokens.out : result.out,
                    result.lse.is_given() ? result.lse : buffers.new_tokens.lse};
  run_new_tokens(call.query, buffers.key, buffers.value, plan, state.out, state.lse, stream);
  merge_context(buffers.context, state, plan, stream, has_own_state ? result.out : Tensor(), result.out_scale);
}

int64_t MlaPlan::num_tokens() const { return data_->num_tokens; }
const std::vector<ContextChunk>& MlaPlan::chunks() const { return data_->context.chunks; }
const std::vector<TokenRange>& MlaPlan::empty_token_slices() const { return data_->context.empty_token_slices; }
int64_t MlaPlan::workspace_bytes() const { return data_->workspace_bytes; }

}  // namespace qkv
