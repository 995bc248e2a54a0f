// The row kernels as they are meant: one element at a time, by the scalar conversions.
#include <algorithm>
#include <cmath>

#include "core/float16.hpp"
#include "cpu/row_kernels.hpp"

namespace qkv::cpu {
namespace {

void convert(const RowConversion& conversion, const std::byte* row, int64_t count, std::byte* target) {
  const auto [from, to, scaling, scale] = conversion;
  for (int64_t i = 0; i < count; ++i) {
    const float value = load_f32(row + i * size_bytes(from), from);
    store_f32(target + i * size_bytes(to), to, scaling == Scaling::divided ? value / scale : value * scale);
  }
}

float largest_magnitude(DType dtype, const std::byte* row, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(load_f32(row + i * size_bytes(dtype), dtype));
    if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
  }
  return largest;
}

void add_weighted(DType dtype, const std::byte* row, float weight, int64_t count, float* sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += weight * load_f32(row + i * size_bytes(dtype), dtype);
}

}  // namespace

constexpr RowKernels kPlainRowKernels{convert, largest_magnitude, add_weighted};

}  // namespace qkv::cpu
