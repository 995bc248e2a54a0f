// Rows to 8-bit floats: one kernel, launched once, or three times where scales are chosen.
#pragma once

#include "jit/module.hpp"
#include "qkv/ops.hpp"

namespace qkv::cuda {

void quantise(const jit::Kernel& kernel, const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
              const Tensor& query_start_loc, jit::CUstream stream);

}  // namespace qkv::cuda
