// Launches of the kernels that gather.
#pragma once

#include "jit/module.hpp"
#include "plan/gather.hpp"
#include "qkv/device.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cuda {

// Brings the plan's arrays to the device.
void place_gather(plan::GatherPlan& plan, int32_t device_index, jit::CUstream stream);

// Which of them gathers such pages to such rows.
const char* gather_kernel(const Tensor& pages, const Tensor& rows);

// As cpu::gather; the plan has been placed, the kernel is that of gather_kernel.
void gather(const jit::Kernel& kernel, const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows,
            const Tensor& scale, jit::CUstream stream);

}  // namespace qkv::cuda
