#include "cuda/device_planner.hpp"

#include <algorithm>

#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"

namespace qkv::cuda {

jit::Source device_planner_source(const LayerSpec& layer, const DeviceFacts& facts) {
  return forward_source(layer, {"plan_batch", facts.arch, 0, 0});
}

int32_t max_blocks_of_planner(const DeviceFacts& facts) {
  return static_cast<int32_t>((facts.max_shared_bytes - sizeof(PlannerMemory)) / sizeof(PlanBlock));
}

DevicePlanner::DevicePlanner(const LayerSpec& layer, const DeviceFacts& facts, const index::CutRules& rules)
    : rules_(rules),
      num_multiprocessors_(facts.num_multiprocessors),
      kernel_(&jit::kernels().get(device_planner_source(layer, facts))) {}

void DevicePlanner::run(const plan::DeviceBatch& batch, const plan::PlanCapacity& capacity, DevicePlan& plan,
                        jit::CUstream stream) const {
  PlanBatchParams params = plan.read_from(batch, capacity);
  params.rules = rules_;
  const bool in_shared_memory = params.arrays.blocks == nullptr;
  // Few pairs of block and KV head for each CTA: what they write takes longer than to find where. With so many, each
  // split of a cluster has a thread to write it.
  constexpr int64_t kPairsOfCta = kPlannerThreads / index::few_rows::kMaxClusterSplits;
  const int64_t wanted = (capacity.blocks * rules_.num_kv_heads + kPairsOfCta - 1) / kPairsOfCta;
  const int64_t most = in_shared_memory ? num_multiprocessors_ : kPlannersWithRoomOfTheirOwn;
  const auto grid = static_cast<uint32_t>(std::clamp<int64_t>(wanted, 1, most));
  const size_t block_bytes = in_shared_memory ? capacity.blocks * sizeof(PlanBlock) : 0;
  launch(*kernel_, {grid, 1, kPlannerThreads, static_cast<uint32_t>(sizeof(PlannerMemory) + block_bytes)}, {&params},
         stream);
}

}  // namespace qkv::cuda
