#include "qkv/plan.hpp"

#include "api/engines.hpp"
#include "api/layer_checks.hpp"
#include "core/checks.hpp"
#include "cuda/device_rules.hpp"
#include "cuda/select.hpp"
#include "plan/builder.hpp"
#include "plan/report.hpp"

namespace qkv {
namespace {

plan::PlanData plan_for_cpu(const LayerSpec& layer, const Batch& batch) {
  const auto engine = api::engine_of({}).make_layer(layer);
  const auto cut_request = [&](int32_t q_len, int32_t kv_len) { return engine->cut_request(q_len, kv_len); };
  return plan::build(layer, batch, cut_request, engine->device_rules());
}

plan::PlanData plan_for_h200(const LayerSpec& layer, const Batch& batch) {
  const cuda::DeviceFacts facts = cuda::h200_facts();
  const cuda::ForwardKernels kernels = cuda::forward_kernels(layer, facts);
  const auto cut_request = [&](int32_t q_len, int32_t kv_len) {
    return cuda::cut_request(layer, kernels, q_len, kv_len);
  };
  return plan::build(layer, batch, cut_request, cuda::device_rules(layer, facts));
}

}  // namespace

int32_t Plan::num_requests() const { return data_->num_requests; }
int64_t Plan::num_tokens() const { return data_->num_tokens; }
int64_t Plan::num_work_items() const { return static_cast<int64_t>(data_->items.size()); }

int64_t Plan::workspace_bytes() const {
  return data_->num_state_rows * (data_->layer.value_dim() + 1) * static_cast<int64_t>(sizeof(float));
}

std::string Plan::dump() const { return plan::describe(*data_); }
PlanReport Plan::report() const { return plan::report_of(*data_, data_->placed ? "cuda" : "cpu"); }

PlanReport preview_plan(const LayerSpec& layer, const Batch& batch, std::string_view device) {
  if (device != "cpu" && device != "h200") refuse("device", device, "cpu or h200");
  const bool is_cpu = device == "cpu";
  const LayerSpec checked = api::checked_layer(layer, {is_cpu ? DeviceKind::cpu : DeviceKind::cuda, 0});
  return plan::report_of(is_cpu ? plan_for_cpu(checked, batch) : plan_for_h200(checked, batch), std::string(device));
}

}  // namespace qkv
