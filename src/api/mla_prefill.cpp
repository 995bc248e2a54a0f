#include "qkv/mla_prefill.hpp"

#include "api/mla_chunks.hpp"
#include "api/mla_layers.hpp"
#include "api/tensor_checks.hpp"
#include "core/checks.hpp"

namespace qkv {

struct MlaPrefill::Impl : mla::ChunkedLayer {
  using ChunkedLayer::ChunkedLayer;
};

MlaPrefill::MlaPrefill(MlaSpec spec, Device device, const std::optional<RequestBounds>& warm_up) {
  spec = api::checked_layer(std::move(spec), device);
  const LayerSpec new_tokens = api::new_tokens_layer(spec);
  const LayerSpec context = api::context_layer(spec);
  impl_ = std::make_shared<const Impl>(std::move(spec), device, new_tokens, context, warm_up);
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
  return mla::layout_workspace(impl_->spec(), max_new_tokens, workspace_tokens, max_new_tokens, own_rows, num_ranks)
      .bytes;
}

void MlaPrefill::run_new_tokens(const Tensor& query, const Tensor& key, const Tensor& value, const MlaPlan& plan,
                                const Tensor& out, const Tensor& lse, Stream stream) const {
  impl_->new_tokens().forward(query, key, value, plan.data().new_tokens, out, lse, stream);
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

void MlaPrefill::merge_context(const State& context, const State& new_tokens, const MlaPlan& plan,
                               Stream stream) const {
  const int64_t num_tokens = plan.num_tokens();
  api::check_out(impl_->new_tokens().spec(), impl_->device(), new_tokens.out, new_tokens.lse, num_tokens);
  api::check_out(impl_->context().spec(), impl_->device(), context.out, context.lse, num_tokens);
  check_given(new_tokens.lse, "new_tokens.lse", "f32 [num_heads, num_tokens]");
  check_given(context.lse, "context.lse", "f32 [num_heads, num_tokens]");
  for (const TokenRange& tokens : plan.data().context.context_token_slices) {
    const auto rows = [&](const State& state) {
      return State{state.out.slice(0, tokens.begin, tokens.end), state.lse.slice(1, tokens.begin, tokens.end)};
    };
    const State result = rows(new_tokens);
    merge_states({rows(context), result}, result.out, result.lse, stream);
  }
}

void MlaPrefill::forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache,
                         const MlaPlan& plan, const Projection& projection, const Tensor& workspace, const Tensor& out,
                         const Tensor& lse, Stream stream, std::optional<Stream> gather_stream) const {
  forward_over(nullptr, query, new_latents, latent_cache, plan, projection, workspace, out, lse, stream,
               gather_stream.value_or(stream));
}

void MlaPrefill::forward(const Tensor& query, const Tensor& new_latents, const Tensor& latent_cache,
                         const MlaPlan& plan, const Projection& projection, const Tensor& workspace,
                         Collectives& collectives, const Tensor& out, const Tensor& lse, Stream stream,
                         std::optional<Stream> gather_stream) const {
  forward_over(&collectives, query, new_latents, latent_cache, plan, projection, workspace, out, lse, stream,
               gather_stream.value_or(stream));
}

void MlaPrefill::forward_over(Collectives* collectives, const Tensor& query, const Tensor& new_latents,
                              const Tensor& latent_cache, const MlaPlan& plan, const Projection& projection,
                              const Tensor& workspace, const Tensor& out, const Tensor& lse, Stream stream,
                              Stream gather_stream) const {
  const mla::PlanData& data = plan.data();
  const mla::Call call{query, new_latents, latent_cache, data, projection, stream, gather_stream, collectives};
  impl_->check_forward(call, workspace, out, lse);
  const mla::Buffers buffers = impl_->lay_out(workspace, data);
  impl_->run_context(call, query, buffers);
  impl_->expand_new_tokens(call, buffers);
  if (data.context.chunks.empty()) {
    run_new_tokens(query, buffers.key, buffers.value, plan, out, lse, stream);
    return;
  }
  const State result{out, lse.is_given() ? lse : buffers.new_tokens_lse};
  run_new_tokens(query, buffers.key, buffers.value, plan, result.out, result.lse, stream);
  merge_context(buffers.context, result, plan, stream);
}

int64_t MlaPlan::num_tokens() const { return data_->num_tokens; }
const std::vector<ContextChunk>& MlaPlan::chunks() const { return data_->context.chunks; }
const std::vector<TokenRange>& MlaPlan::empty_token_slices() const { return data_->context.empty_token_slices; }
int64_t MlaPlan::workspace_bytes() const { return data_->workspace_bytes; }

}  // namespace qkv
