// Joins states of the same rows over disjoint keys: LSE = ln Σ exp(lse), out = Σ exp(lse - LSE)·out, in the order
// given. A state with lse = -inf is empty and its out is not read; NaN or +inf gives NaN. A warp a row.
#pragma once

#include "epilogue.cuh"
#include "output_scale.cuh"
#include "params.hpp"

namespace qkv::cuda {
namespace merge {

constexpr int kWarps = 4;
constexpr int kVector = 4;  // columns that a lane holds
constexpr int kUnroll = 4;  // states that are read at once

// What a row's states weigh: state s has exp(lse - max)/total.
struct Weights {
  float max;
  float total;
  bool is_nan;

  __device__ __forceinline__ float of(float lse) const { return expf(lse - max) / total; }
  __device__ __forceinline__ bool is_empty() const { return max == negative_infinity(); }
  __device__ __forceinline__ float lse() const {
    if (is_nan) return __int_as_float(0x7fffffff);
    return is_empty() ? max : max + logf(total);
  }
};

// lse_of(s) is called by all lanes, each with states of its own; the order of the sum depends on num_states only.
template <typename LseOf>
__device__ __forceinline__ Weights find_weights(int num_states, float sink, LseOf lse_of) {
  const int lane = threadIdx.x % 32;
  Weights weights{sink, 0.0F, false};
  for (int s = lane; s < num_states; s += 32) {
    const float lse = lse_of(s);
    // +inf is no LSE of finite scores: it comes from kernels that mark empty rows so, and is not guessed at.
    weights.is_nan |= !(lse < -negative_infinity());
    weights.max = fmaxf(weights.max, lse);
  }
  weights.is_nan = __any_sync(0xffffffff, weights.is_nan);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    weights.max = fmaxf(weights.max, __shfl_xor_sync(0xffffffff, weights.max, step));
  }
  if (weights.is_empty() || weights.is_nan) return weights;
  for (int s = lane; s < num_states; s += 32) weights.total += expf(lse_of(s) - weights.max);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) weights.total += __shfl_xor_sync(0xffffffff, weights.total, step);
  weights.total += expf(sink - weights.max);
  return weights;
}

__device__ __forceinline__ float load_element(const void* row, int dtype, int column) {
  if (dtype == kF32) return static_cast<const float*>(row)[column];
  const unsigned short bits = static_cast<const unsigned short*>(row)[column];
  return dtype == kBf16 ? ptx::f32_from_bf16(bits) : ptx::f32_from_f16(bits);
}

__device__ __forceinline__ void store_element(void* row, int dtype, int column, float value) {
  if (dtype == kF32) {
    static_cast<float*>(row)[column] = value;
  } else if (is_float8(dtype)) {
    const unsigned short pair = pack_float8(dtype, value, 0.0F);
    static_cast<unsigned char*>(row)[column] = static_cast<unsigned char>(pair);
  } else {
    const unsigned pair = dtype == kBf16 ? ptx::pack_bf16(value, 0.0F) : ptx::pack_f16(value, 0.0F);
    static_cast<unsigned short*>(row)[column] = static_cast<unsigned short>(pair);
  }
}

__device__ __forceinline__ void* row_at(void* data, int dtype, long long offset) {
  return static_cast<char*>(data) + offset * size_of(dtype);
}

// What a group of columns of a row of 8 bits is divided by. All lanes of the warp call this, each with its columns.
__device__ __forceinline__ float scale_of(const float (&columns)[kVector], int group, int dtype,
                                          const OutputScaleLayout& scale, float* row_scales) {
  if (!scale.of_groups) return *scale.data;
  float largest = 0.0F;
#pragma unroll
  for (int c = 0; c < kVector; ++c) largest = fmaxf(largest, finite_magnitude(columns[c]));
  const float chosen = choose_scale<32>(largest, dtype);
  if (threadIdx.x % 32 == 0) row_scales[group * scale.group_stride] = chosen;
  return chosen;
}

// The joined values of the warp's row. row_of(s) is where state s has it, dtype_of(s) in which format; `token` and
// `head` say where its scales go.
template <typename LseOf, typename RowOf, typename DtypeOf>
__device__ __forceinline__ void join_row(const Weights& weights, int num_states, int dim, LseOf lse_of, RowOf row_of,
                                         DtypeOf dtype_of, void* out, int out_dtype, const OutputScaleLayout& out_scale,
                                         long long token, int head) {
  static_assert(32 * kVector == index::kScaleGroup, "the warp takes a group at a time");
  // Lanes without a column left come along: they have a say in the group's scale.
  const int lane = threadIdx.x % 32;
  for (int first = lane; first - lane < dim; first += index::kScaleGroup) {
    // -0 leaves every first summand's bits alone.
    const float start = weights.is_nan ? __int_as_float(0x7fffffff) : weights.is_empty() ? 0.0F : -0.0F;
    float sum[kVector] = {start, start, start, start};
    if (!weights.is_nan) {
#pragma unroll kUnroll
      for (int s = 0; s < num_states; ++s) {
        const float lse = lse_of(s);
        if (lse == negative_infinity()) continue;
        const float weight = weights.of(lse);
        const void* row = row_of(s);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          if (first + c * 32 < dim) sum[c] += weight * load_element(row, dtype_of(s), first + c * 32);
        }
      }
    }
    if (is_float8(out_dtype)) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        if (first + c * 32 >= dim) sum[c] = 0.0F;  // no column of the group
      }
      const float scale =
          scale_of(sum, first / index::kScaleGroup, out_dtype, out_scale, scales_of_row(out_scale, token, head));
#pragma unroll
      for (int c = 0; c < kVector; ++c) sum[c] = __fdiv_rn(sum[c], scale);
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (first + c * 32 < dim) store_element(out, out_dtype, first + c * 32, sum[c]);
    }
  }
}

}  // namespace merge

}  // namespace qkv::cuda
