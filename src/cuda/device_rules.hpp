// What the planner asks of a GPU for a layer: what its items may hold, and what they cost.
#pragma once

#include "cuda/memory.hpp"
#include "plan/engine.hpp"

namespace qkv::cuda {

plan::DeviceRules device_rules(const LayerSpec& layer, const DeviceFacts& facts);

// An H200, which need not be there.
DeviceFacts h200_facts();

}  // namespace qkv::cuda
