// What the planner asks of a GPU for a layer: what its items may hold, and what they cost.
#pragma once

#include "cuda/memory.hpp"
#include "cuda/select.hpp"
#include "plan/engine.hpp"

namespace qkv::cuda {

// Packed rows of an item whose keys several requests share; 0 = there are no such items.
int32_t max_shared_rows(const LayerSpec& layer, const ForwardKernels& kernels);

plan::DeviceRules device_rules(const LayerSpec& layer, const DeviceFacts& facts);

// Whether requests can read the same keys: from pages, by scales that are not each one's own.
bool has_common_keys(const LayerSpec& layer);

// Whether a planner for so many requests has launches and memory for items of several requests. They are captured with
// every step, some microsecond each where a batch has no use for them, and what the device plans has none.
bool planner_shares(int64_t max_requests, bool plans_on_device);

// An H200, which need not be there.
DeviceFacts h200_facts();

}  // namespace qkv::cuda
