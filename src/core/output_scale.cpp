#include "core/output_scale.hpp"

#include <algorithm>
#include <cmath>

#include "core/eight_bit.hpp"

namespace qkv {

float OutputScale::of_group(DType dtype, int32_t group, const float* values, int32_t count) const {
  if (chosen == nullptr) return given;
  float largest = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (std::isfinite(values[i])) largest = std::max(largest, std::fabs(values[i]));
  }
  return chosen[group * group_stride] = index::row_scale(largest, largest_float8(dtype));
}

OutputScale output_scale(const Tensor& out_scale) {
  OutputScale scale;
  if (!out_scale.is_given()) return scale;
  auto* data = static_cast<float*>(out_scale.data);
  if (output_scales(out_scale) == OutputScales::per_tensor) {
    scale.given = *data;
    return scale;
  }
  scale.chosen = data;
  scale.token_stride = out_scale.stride[0];
  scale.head_stride = out_scale.stride[1];
  scale.group_stride = out_scale.stride[2];
  return scale;
}

}  // namespace qkv
