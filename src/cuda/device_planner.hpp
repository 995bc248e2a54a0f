// Plans made by the device itself, from arrays that lie there: one small launch, which a graph can capture.
#pragma once

#include "cuda/placed_plan.hpp"
#include "jit/module.hpp"

namespace qkv::cuda {

jit::Source device_planner_source(const LayerSpec& layer, const DeviceFacts& facts);

// Blocks of rows for which a CTA has room beside what else its planner keeps.
int32_t max_blocks_of_planner(const DeviceFacts& facts);

class DevicePlanner {
 public:
  // Compiles the kernel. The mask must have no operands of single tokens, and name no heads.
  DevicePlanner(const LayerSpec& layer, const DeviceFacts& facts, const index::CutRules& rules);

  void run(const plan::DeviceBatch& batch, const plan::PlanCapacity& capacity, DevicePlan& plan,
           jit::CUstream stream) const;

 private:
  index::CutRules rules_;
  int32_t num_multiprocessors_;
  const jit::Kernel* kernel_;
};

}  // namespace qkv::cuda
