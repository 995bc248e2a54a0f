#include "qkv/planner.hpp"

#include "api/tensor_checks.hpp"
#include "core/checks.hpp"
#include "plan/builder.hpp"
#include "plan/engine.hpp"

namespace qkv {

struct Planner::Impl {
  Impl(LayerSpec of_layer, Device of_device, std::shared_ptr<const plan::LayerEngine> of_engine)
      : layer(std::move(of_layer)), device(of_device), engine(std::move(of_engine)) {}

  LayerSpec layer;
  Device device;
  std::shared_ptr<const plan::LayerEngine> engine;
  std::shared_ptr<plan::PlannerShare> share = std::make_shared<plan::PlannerShare>();
  std::shared_ptr<plan::PlacedPlan> placed;
  std::shared_ptr<const plan::PlanData> newest;

  void check_stream(Stream stream) const {
    if (!engine->is_capturing(stream)) return;
    refuse("stream", "a stream that is being captured",
           "one that is not: every replay of the graph would bring this batch back");
  }

  Plan place(plan::PlanData data, Stream stream) {
    plan::check_limits(data, share->limits);
    return finish(std::move(data), [&](plan::PlanData& next) { engine->place(next, stream); });
  }

  Plan place_on_device(const Batch& batch, Stream stream) {
    if (batch.prefix_sharing == PrefixSharing::always) {
      refuse("prefix_sharing", "always", "automatic or off: plans made on the device share nothing",
             ErrorCode::unsupported);
    }
    plan::PlanData data;
    const plan::DeviceBatch read = plan::read_device_batch(layer, device, batch, share->limits, data);
    return finish(std::move(data), [&](plan::PlanData& next) { engine->place_on_device(next, read, stream); });
  }

  template <class Place>
  Plan finish(plan::PlanData data, Place place_it) {
    data.placed = placed;
    data.planner = share;
    data.number = share->newest + 1;
    share->newest = data.number;  // first: if placing fails, no plan is left that could be taken for the newest
    place_it(data);
    newest = std::make_shared<const plan::PlanData>(std::move(data));
    return Plan(newest);
  }
};

Planner::Planner(const LayerSpec& layer, Device device, std::shared_ptr<const plan::LayerEngine> engine,
                 const PlanLimits& limits, const Tensor& workspace)
    : impl_(std::make_unique<Impl>(layer, device, std::move(engine))) {
  impl_->share->limits = plan::checked_limits(layer, limits);
  const plan::PlanCapacity capacity = plan::capacity_of(layer, impl_->share->limits, impl_->engine->cut_bounds());
  if (workspace.is_given()) api::check_workspace(workspace, device, impl_->engine->workspace_bytes(capacity));
  impl_->placed = impl_->engine->reserve(capacity, workspace);
}

Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;
Planner& Planner::operator=(Planner&&) noexcept = default;

const PlanLimits& Planner::limits() const { return impl_->share->limits; }

Plan Planner::plan(const Batch& batch, Stream stream) {
  if (batch.query_start_loc.device.kind == DeviceKind::cuda) return impl_->place_on_device(batch, stream);
  impl_->check_stream(stream);
  const plan::LayerEngine& engine = *impl_->engine;
  const auto cut_request = [&](int32_t q_len, int32_t kv_len) { return engine.cut_request(q_len, kv_len); };
  const plan::DeviceRules rules = engine.planner_rules(impl_->share->limits);
  return impl_->place(plan::build(impl_->layer, batch, cut_request, rules), stream);
}

void Planner::check(Stream stream) const {
  if (impl_->newest == nullptr || !impl_->newest->on_device) return;
  if (impl_->engine->was_refused(*impl_->placed, stream)) {
    refuse("batch", "lengths on the device over the planner's limits", "batches within its limits; nothing was run");
  }
}

Plan Planner::update_block_table(const Tensor& block_table, const Tensor& slot_mapping, Stream stream) {
  impl_->check_stream(stream);
  if (impl_->newest == nullptr) {
    refuse("planner", "no plan yet", "plan(batch) first: update_block_table changes its pages");
  }
  if (impl_->newest->on_device) {
    refuse("planner", "a batch on the device", "plan(batch) again: it reads the new pages");
  }
  return impl_->place(plan::with_block_table(*impl_->newest, block_table, slot_mapping), stream);
}

}  // namespace qkv
