// Rows to 8-bit floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qkv/ops.hpp"

namespace qkv::cpu {

void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
              const Tensor& query_start_loc);

}  // namespace qkv::cpu
