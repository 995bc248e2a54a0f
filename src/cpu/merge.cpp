#include "cpu/merge.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/float16.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Values are joined a strip at a time, in f32: a strip lives in registers or the first cache.
constexpr int32_t kStrip = index::kScaleGroup;
using Strip = std::array<float, kStrip>;

void load_strip(const std::byte* row, DType dtype, int32_t begin, int32_t count, Strip& strip) {
  if (dtype == DType::f32) {
    std::memcpy(strip.data(), row + begin * sizeof(float), count * sizeof(float));
    return;
  }
  for (int32_t c = 0; c < count; ++c) strip[c] = load_f32(row + (begin + c) * sizeof(uint16_t), dtype);
}

void store_strip(std::byte* row, DType dtype, int32_t begin, int32_t count, const OutputScale& out_scale,
                 const Strip& strip) {
  const float scale = out_scale.of_group(dtype, begin / kStrip, strip.data(), count);
  for (int32_t c = 0; c < count; ++c) store_f32(row + (begin + c) * size_bytes(dtype), dtype, strip[c] / scale);
}

}  // namespace

float merge_row(std::span<const StateRow> states, const float* sink, int32_t dim, std::byte* out, DType out_dtype,
                const OutputScale& out_scale) {
  float maximum = sink != nullptr ? *sink : -kInfinity;
  bool is_nan = false;
  for (const StateRow& state : states) {
    // +inf is no LSE of finite scores: it comes from kernels that mark empty rows so, and is not guessed at.
    is_nan = is_nan || std::isnan(state.lse) || state.lse == kInfinity;
    maximum = std::max(maximum, state.lse);
  }
  const bool is_empty = maximum == -kInfinity;
  float denominator = sink != nullptr && !is_empty ? std::exp(*sink - maximum) : 0.0F;
  for (const StateRow& state : states) denominator += state.lse == -kInfinity ? 0.0F : std::exp(state.lse - maximum);

  Strip sum;
  Strip values;
  for (int32_t begin = 0; begin < dim; begin += kStrip) {
    const int32_t count = std::min(kStrip, dim - begin);
    sum.fill(is_nan ? std::numeric_limits<float>::quiet_NaN() : 0.0F);
    for (const StateRow& state : states) {
      if (state.lse == -kInfinity || is_nan || state.out == nullptr) continue;
      const float weight = std::exp(state.lse - maximum) / denominator;
      load_strip(state.out, state.dtype, begin, count, values);
      for (int32_t c = 0; c < count; ++c) sum[c] += weight * values[c];
    }
    store_strip(out, out_dtype, begin, count, out_scale, sum);
  }
  if (is_nan) return std::numeric_limits<float>::quiet_NaN();
  return is_empty ? -kInfinity : maximum + std::log(denominator);
}

void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale) {
  const OutputScale scale = output_scale(out_scale);
  const int64_t num_heads = out.shape[1];
  const auto dim = static_cast<int32_t>(out.shape[2]);
  const auto row_of = [](const Tensor& tensor, int64_t token, int64_t head) {
    const int64_t offset = token * tensor.stride[0] + head * tensor.stride[1];
    return tensor.is_given() ? static_cast<std::byte*>(tensor.data) + offset * size_bytes(tensor.dtype) : nullptr;
  };
  const auto lse_of = [](const Tensor& tensor, int64_t token, int64_t head) {
    return static_cast<float*>(tensor.data) + head * tensor.stride[0] + token * tensor.stride[1];
  };
  parallel_for(out.shape[0], out.num_elements() * static_cast<int64_t>(states.size()), [&](int64_t token) {
    std::vector<StateRow> rows(states.size());
    for (int64_t head = 0; head < num_heads; ++head) {
      for (size_t s = 0; s < states.size(); ++s) {
        rows[s] = {row_of(states[s].out, token, head), states[s].out.dtype, *lse_of(states[s].lse, token, head)};
      }
      const float merged = merge_row(rows, nullptr, dim, row_of(out, token, head), out.dtype, scale.at(token, head));
      if (lse.is_given()) *lse_of(lse, token, head) = merged;
    }
  });
}

}  // namespace qkv::cpu
