// Plans made by the device itself, from arrays that lie there: two small launches, which a graph can capture.
#pragma once

#include "cuda/placed_plan.hpp"
#include "jit/module.hpp"

namespace qkv::cuda {

class DevicePlanner {
 public:
  // Compiles the kernels. The mask must have no operands of single tokens, and name no heads.
  DevicePlanner(const LayerSpec& layer, const DeviceFacts& facts, const index::CutRules& rules);

  void run(const plan::DeviceBatch& batch, const plan::PlanCapacity& capacity, DevicePlan& plan,
           jit::CUstream stream) const;

 private:
  index::CutRules rules_;
  int32_t num_multiprocessors_;
  bool launches_beside_;  // the second kernel may begin before the first has ended
  const jit::Kernel* plan_batch_;
  const jit::Kernel* plan_items_;
};

}  // namespace qkv::cuda
