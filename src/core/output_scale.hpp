// What rows of an output of 8-bit floats are divided by: one scale that is given, or one a group of columns, which is
// chosen from the group's values and written. Other outputs are divided by 1, which changes nothing.
#pragma once

#include <cstdint>

#include "core/index/float8.hpp"
#include "qkv/layer.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// Strides in elements.
struct OutputScale {
  float given = 1;
  float* chosen = nullptr;  // if not nullptr, where the scales are written: [token, head, group]
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t group_stride = 0;

  // The same from that row on.
  OutputScale at(int64_t token, int64_t head) const {
    OutputScale row = *this;
    if (chosen != nullptr) row.chosen += token * token_stride + head * head_stride;
    return row;
  }

  // What the columns [group · kScaleGroup, … + count) of the row are divided by; a chosen scale is written.
  float of_group(DType dtype, int32_t group, const float* values, int32_t count) const;
};

// What the scales of an output belong to, by their shape: [1] or [num_tokens, num_heads, groups].
inline OutputScales output_scales(const Tensor& out_scale) {
  return out_scale.rank == 3 ? OutputScales::per_token_group : OutputScales::per_tensor;
}

// Of a tensor of the shape that its granularity asks for, or of none.
OutputScale output_scale(const Tensor& out_scale);

}  // namespace qkv
