#include "cpu/merge.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/float8.hpp"
#include "cpu/kernels.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Values are joined a strip at a time, in f32: a strip lives in registers or the first cache.
constexpr int32_t kStrip = index::kScaleGroup;
using Strip = std::array<float, kStrip>;

// How many rows before it is merged a row is asked for: rows of several states, and LSEs that lie a head apart, come in
// an order that the hardware does not foresee.
constexpr int64_t kRowsAhead = 4;

void prefetch(const void* address, int64_t bytes) {
  constexpr int64_t kCacheLineBytes = 64;
  for (int64_t i = 0; i < bytes; i += kCacheLineBytes) __builtin_prefetch(static_cast<const std::byte*>(address) + i);
}

}  // namespace

float merge_row(std::span<StateRow> states, const float* sink, int32_t dim, std::byte* out, DType out_dtype,
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
  for (StateRow& state : states) {
    state.weight = state.lse == -kInfinity ? 0.0F : std::exp(state.lse - maximum);
    denominator += state.weight;
  }

  const RowKernels& kernels = *forward_kernels().rows;
  RowConversion rounding{DType::f32, out_dtype, is_float8(out_dtype) ? Scaling::divided : Scaling::multiplied};
  Strip sum;
  for (int32_t begin = 0; begin < dim; begin += kStrip) {
    const int32_t count = std::min(kStrip, dim - begin);
    std::fill_n(sum.data(), count, is_nan ? std::numeric_limits<float>::quiet_NaN() : 0.0F);
    for (const StateRow& state : states) {
      if (state.lse == -kInfinity || is_nan || state.out == nullptr) continue;
      kernels.add_weighted(state.dtype, state.out + begin * size_bytes(state.dtype), state.weight / denominator, count,
                           sum.data());
    }
    rounding.scale = out_scale.of_group(out_dtype, begin / kStrip, sum.data(), count);
    kernels.convert(rounding, reinterpret_cast<const std::byte*>(sum.data()), count,
                    out + begin * size_bytes(out_dtype));
  }
  if (is_nan) return std::numeric_limits<float>::quiet_NaN();
  return is_empty ? -kInfinity : maximum + std::log(denominator);
}

void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale) {
  const OutputScale scale = output_scale(out_scale);
  const int64_t num_tokens = out.shape[0];
  const int64_t num_heads = out.shape[1];
  const auto dim = static_cast<int32_t>(out.shape[2]);
  const auto row_of = [](const Tensor& tensor, int64_t token, int64_t head) {
    const int64_t offset = token * tensor.stride[0] + head * tensor.stride[1];
    return tensor.is_given() ? static_cast<std::byte*>(tensor.data) + offset * size_bytes(tensor.dtype) : nullptr;
  };
  const auto lse_of = [](const Tensor& tensor, int64_t token, int64_t head) {
    return static_cast<float*>(tensor.data) + head * tensor.stride[0] + token * tensor.stride[1];
  };
  const auto prefetch_states = [&](int64_t token, int64_t head) {
    for (const State& state : states) {
      prefetch(lse_of(state.lse, token, head), sizeof(float));
      if (state.out.is_given()) prefetch(row_of(state.out, token, head), dim * size_bytes(state.out.dtype));
    }
  };
  parallel_for(num_tokens, out.num_elements() * static_cast<int64_t>(states.size()), [&](int64_t token) {
    std::vector<StateRow> rows(states.size());
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t ahead = token * num_heads + head + kRowsAhead;
      if (ahead < num_tokens * num_heads) prefetch_states(ahead / num_heads, ahead % num_heads);
      for (size_t s = 0; s < states.size(); ++s) {
        rows[s] = {row_of(states[s].out, token, head), states[s].out.dtype, *lse_of(states[s].lse, token, head)};
      }
      const float merged = merge_row(rows, nullptr, dim, row_of(out, token, head), out.dtype, scale.at(token, head));
      if (lse.is_given()) *lse_of(lse, token, head) = merged;
    }
  });
}

}  // namespace qkv::cpu
