// Launches of gather_pages.
#pragma once

#include "jit/module.hpp"
#include "plan/gather.hpp"
#include "qkv/device.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cuda {

// Brings the plan's arrays to the device.
void place_gather(plan::GatherPlan& plan, int32_t device_index, jit::CUstream stream);

// As cpu::gather; the plan has been placed.
void gather(const jit::Kernel& kernel, const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows,
            jit::CUstream stream);

}  // namespace qkv::cuda
