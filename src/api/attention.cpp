#include "qkv/attention.hpp"

#include "api/engines.hpp"
#include "api/layer_checks.hpp"
#include "api/tensor_checks.hpp"
#include "api/warm_layers.hpp"
#include "core/checks.hpp"
#include "plan/builder.hpp"

namespace qkv {

KvCache KvCache::from_interleaved(const Tensor& key_value, int32_t head_dim) {
  check_rank(key_value, "key_value", 4, "[num_pages, num_kv_heads, page_size, head_dim + head_dim_v]");
  if (head_dim < 1 || head_dim >= key_value.shape[3]) {
    refuse("head_dim", head_dim, fmt::format("1 to {}: the last axis holds key and value", key_value.shape[3] - 1));
  }
  const Tensor by_token = key_value.swap_axes(1, 2);
  return {by_token.slice(3, 0, head_dim), by_token.slice(3, head_dim, by_token.shape[3])};
}

struct Attention::Impl {
  LayerSpec spec;
  Device device;
  uint64_t mask_hash;
  std::shared_ptr<const plan::LayerEngine> engine;

  void run(const plan::ForwardCall& call) const {
    api::check_query(spec, device, call.query, call.plan.rows_of_tokens());
    api::check_query_scale(spec, device, call.query_scale, call.plan.rows_of_requests());
    api::check_out(spec, device, call.out, call.lse, call.plan.rows_of_tokens());
    api::check_out_scale(spec.output_scales, call.out, call.out_scale, call.plan.rows_of_tokens());
    engine->forward(call);
  }
};

Attention::Attention(LayerSpec spec, Device device, const std::optional<RequestBounds>& warm_up) {
  spec = api::checked_layer(std::move(spec), device);
  if (warm_up) api::warm_layers({spec}, device, *warm_up);
  const uint64_t mask_hash = spec.effective_mask().hash();
  auto engine = api::engine_of(device).make_layer(spec);
  impl_.reset(new Impl{std::move(spec), device, mask_hash, std::move(engine)});
}

Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

const LayerSpec& Attention::spec() const { return impl_->spec; }

Plan Attention::plan(const Batch& batch, Stream stream) const {
  const plan::LayerEngine& engine = *impl_->engine;
  const auto cut_request = [&](int32_t q_len, int32_t kv_len) { return engine.cut_request(q_len, kv_len); };
  auto data = std::make_shared<plan::PlanData>(plan::build(impl_->spec, batch, cut_request, engine.device_rules()));
  impl_->engine->place(*data, stream);
  return Plan(std::move(data));
}

Planner Attention::planner(const PlanLimits& limits, const Tensor& workspace) const {
  return {impl_->spec, impl_->device, impl_->engine, limits, workspace};
}

int64_t Attention::workspace_bytes(const PlanLimits& limits) const {
  const PlanLimits checked = plan::checked_limits(impl_->spec, limits);
  return impl_->engine->workspace_bytes(plan::capacity_of(impl_->spec, checked, impl_->engine->cut_bounds()));
}

void Attention::update_cache(const Tensor& key, const Tensor& value, const KvCache& cache, const Plan& plan,
                             Stream stream) const {
  const plan::PlanData& data = plan.data();
  api::check_plan_fits(impl_->spec, impl_->mask_hash, data);
  if (!impl_->spec.cache) {
    refuse("cache", cache.key.describe(), "no update_cache: the layer has no cache", ErrorCode::mismatch);
  }
  if (!data.has_slot_mapping) refuse("slot_mapping", "nothing", "a Batch with slot_mapping, for update_cache");
  api::check_cache(impl_->spec, impl_->device, cache, data.highest_page());
  api::check_scales(impl_->spec, impl_->device, cache, data.rows_of_requests());
  api::check_cache_slots(impl_->spec, cache, data.highest_slot());
  api::check_new_tokens(impl_->device, key, value, cache, data.rows_of_slots());
  impl_->engine->update_cache(key, value, cache, data, stream);
}

void Attention::forward(const Tensor& query, const KvCache& cache, const Plan& plan, const Tensor& out,
                        const Tensor& lse, Stream stream, const Tensor& out_scale, const Tensor& query_scale) const {
  api::check_plan_fits(impl_->spec, impl_->mask_hash, plan.data());
  if (!impl_->spec.cache) {
    refuse("cache", cache.key.describe(), "key and value: the layer has no cache", ErrorCode::mismatch);
  }
  api::check_cache(impl_->spec, impl_->device, cache, plan.data().highest_page());
  api::check_scales(impl_->spec, impl_->device, cache, plan.data().rows_of_requests());
  impl_->run({impl_->spec, plan.data(), query, cache.key, cache.value, out, lse, stream, cache.key_scale,
              cache.value_scale, out_scale, query_scale});
}

void Attention::forward(const Tensor& query, const Tensor& key, const Tensor& value, const Plan& plan,
                        const Tensor& out, const Tensor& lse, Stream stream, const Tensor& out_scale,
                        const Tensor& query_scale, const Tensor& key_scale, const Tensor& value_scale) const {
  api::check_plan_fits(impl_->spec, impl_->mask_hash, plan.data());
  if (impl_->spec.cache) {
    refuse("key", key.describe(), "a KvCache: the layer has a cache of pages", ErrorCode::mismatch);
  }
  api::check_dense_keys(impl_->spec, impl_->device, key, value, plan.data().rows_of_keys());
  api::check_scales(impl_->spec, impl_->device, {key, value, key_scale, value_scale}, plan.data().rows_of_requests());
  impl_->run(
      {impl_->spec, plan.data(), query, key, value, out, lse, stream, key_scale, value_scale, out_scale, query_scale});
}

}  // namespace qkv
