#include "cuda/device_planner.hpp"

#include <algorithm>
#include <bit>

#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"

namespace qkv::cuda {

DevicePlanner::DevicePlanner(const LayerSpec& layer, const DeviceFacts& facts, const index::CutRules& rules)
    : rules_(rules),
      num_multiprocessors_(facts.num_multiprocessors),
      launches_beside_(facts.arch == "sm_90a"),
      plan_batch_(&jit::kernels().get(forward_source(layer, {"plan_batch", facts.arch, 0, 0}))),
      plan_items_(&jit::kernels().get(forward_source(layer, {"plan_items", facts.arch, 0, 0}))) {}

void DevicePlanner::run(const plan::DeviceBatch& batch, const plan::PlanCapacity& capacity, DevicePlan& plan,
                        jit::CUstream stream) const {
  PlanBatchParams params = plan.read_from(batch, capacity);
  params.rules = rules_;
  // A thread a request, within what a CTA has; no fewer than share the bins of the lists well.
  const auto threads = std::clamp<uint32_t>(std::bit_ceil(static_cast<uint32_t>(batch.num_requests)), 256, 1024);
  launch(*plan_batch_, {1, 1, threads, 0}, {&params}, stream);
  constexpr int64_t kThreads = 128;
  const int64_t ctas = (capacity.blocks * rules_.num_kv_heads + kThreads - 1) / kThreads;
  const auto grid = static_cast<uint32_t>(std::clamp<int64_t>(ctas, 1, num_multiprocessors_));
  launch(*plan_items_, {grid, 1, static_cast<uint32_t>(kThreads), 0, 1, launches_beside_}, {&params}, stream);
}

}  // namespace qkv::cuda
