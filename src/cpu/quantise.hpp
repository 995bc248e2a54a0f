// Rows to 8-bit floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qkv/ops.hpp"

namespace qkv::cpu {

// Of the row's numbers that are finite; 0 without any.
float largest_magnitude(const std::byte* row, DType dtype, int64_t count);

// round(row / scale), saturating.
void quantise_row(const std::byte* row, DType dtype, float scale, std::byte* target, DType target_dtype, int64_t count);

void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
              const Tensor& query_start_loc);

}  // namespace qkv::cpu
