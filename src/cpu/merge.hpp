// Joins states of a row: the split-KV merge of a plan and the public merge_states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/output_scale.hpp"
#include "qkv/ops.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cpu {

// One row of one state; `out` is not read where lse is -inf.
struct StateRow {
  const std::byte* out;
  DType dtype;
  float lse;
  float weight = 0;  // for merge_row to write
};

// Joins the states in the order given, then the sink (if not nullptr), and stores `dim` values at `out` in `out_dtype`,
// 8-bit ones divided by the row's scales. Returns the LSE of the union. `out` may be one of the states' rows.
float merge_row(std::span<StateRow> states, const float* sink, int32_t dim, std::byte* out, DType out_dtype,
                const OutputScale& out_scale);

// The same for all rows of checked tensors; lse may be absent, and out_scale is if `out` is not of 8-bit floats.
void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale);

}  // namespace qkv::cpu
