// Joins states of the same rows over disjoint keys: LSE = ln Σ exp(lse), out = Σ exp(lse - LSE)·out, in the order
// given. A state with lse = -inf is empty and its out is not read; NaN or +inf gives NaN. A team of lanes a row; all
// lanes of a warp come along, those of teams without a row, too.
#pragma once

#include "core/index/merge_teams.hpp"
#include "epilogue.cuh"
#include "output_scale.cuh"
#include "params.hpp"

namespace qkv::cuda {
namespace merge {

constexpr int kVector = index::kMergedColumns;  // neighbouring columns that a lane holds
constexpr int kUnroll = 2;                      // states that are read at once

// The lanes that share the caller's row.
struct Team {
  int count, lane;
  int row_of_cta;

  __device__ __forceinline__ explicit Team(int head_dim_v)
      : count(index::merging_lanes(head_dim_v)), lane(threadIdx.x % count), row_of_cta(threadIdx.x / count) {}

  __device__ __forceinline__ bool any(bool what) const {
    const unsigned own = 0xffffffffU >> (32 - count) << (threadIdx.x % 32 - lane);
    return (__ballot_sync(0xffffffff, what) & own) != 0;
  }
  __device__ __forceinline__ float max(float x) const { return max_of_lanes(x, count); }
  __device__ __forceinline__ float sum(float x) const {
    for (int step = count / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
  }
  // Of so many neighbouring lanes, a power of two.
  static __device__ __forceinline__ float max_of_lanes(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
  }
};

// What a row's states weigh: state s has exp(lse - max)/total, exactly 1 where it is alone.
struct Weights {
  float max;
  float total, inverse;
  bool is_nan;

  __device__ __forceinline__ float of(float lse) const { return expf(lse - max) * inverse; }
  __device__ __forceinline__ bool is_empty() const { return max == negative_infinity(); }
  __device__ __forceinline__ float lse() const {
    if (is_nan) return __int_as_float(0x7fffffff);
    return is_empty() ? max : max + logf(total);
  }
};

// lse_of(s) is called by all lanes, each with states of its own; the order of the sum depends on the number of states
// and the head size only.
template <typename LseOf>
__device__ __forceinline__ Weights find_weights(const Team& team, int num_states, float sink, LseOf lse_of) {
  float largest = sink;
  bool is_nan = false;
  for (int s = team.lane; s < num_states; s += team.count) {
    const float lse = lse_of(s);
    // +inf is no LSE of finite scores: it comes from kernels that mark empty rows so, and is not guessed at.
    is_nan |= !(lse < -negative_infinity());
    largest = fmaxf(largest, lse);
  }
  Weights weights{team.max(largest), 0.0F, 0.0F, team.any(is_nan)};
  float total = 0.0F;
  if (!weights.is_empty() && !weights.is_nan) {
    for (int s = team.lane; s < num_states; s += team.count) total += expf(lse_of(s) - weights.max);
  }
  weights.total = team.sum(total) + expf(sink - weights.max);
  weights.inverse = 1.0F / weights.total;
  return weights;
}

// Columns of a row: 16 bytes at a time where they lie at multiples of 16, else one by one; 0 behind the last.
__device__ __forceinline__ void load_columns(const void* row, int dtype, int first, int dim, float (&values)[kVector]) {
  const char* from = static_cast<const char*>(row) + first * size_of(dtype);
  const bool is_whole = first + kVector <= dim && reinterpret_cast<unsigned long long>(from) % 16 == 0;
  if (is_whole && dtype == kF32) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else if (is_whole) {
    const uint4 pairs = *reinterpret_cast<const uint4*>(from);
    const unsigned word[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const auto bits = static_cast<unsigned short>(word[c / 2] >> (c % 2 * 16));
      values[c] = dtype == kBf16 ? ptx::f32_from_bf16(bits) : ptx::f32_from_f16(bits);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      values[c] = 0.0F;
      if (first + c >= dim) continue;
      if (dtype == kF32) {
        values[c] = static_cast<const float*>(row)[first + c];
      } else {
        const unsigned short bits = static_cast<const unsigned short*>(row)[first + c];
        values[c] = dtype == kBf16 ? ptx::f32_from_bf16(bits) : ptx::f32_from_f16(bits);
      }
    }
  }
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

__device__ __forceinline__ void store_columns(void* row, int dtype, int first, int dim,
                                              const float (&values)[kVector]) {
  char* to = static_cast<char*>(row) + first * size_of(dtype);
  const bool is_whole = first + kVector <= dim && reinterpret_cast<unsigned long long>(to) % 16 == 0;
  if (is_whole && dtype == kF32) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else if (is_whole && !is_float8(dtype)) {
    unsigned pairs[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      pairs[i] = dtype == kBf16 ? ptx::pack_bf16(values[2 * i], values[2 * i + 1])
                                : ptx::pack_f16(values[2 * i], values[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (first + c < dim) store_element(row, dtype, first + c, values[c]);
    }
  }
}

__device__ __forceinline__ void* row_at(void* data, int dtype, long long offset) {
  return static_cast<char*>(data) + offset * size_of(dtype);
}

// What a group of columns of a row of 8 bits is divided by. All lanes of the warp call this, each with its columns.
__device__ __forceinline__ float scale_of(const Team& team, const float (&columns)[kVector], int first, int dtype,
                                          const OutputScaleLayout& scale, float* row_scales) {
  if (!scale.of_groups) return *scale.data;
  float largest = 0.0F;
#pragma unroll
  for (int c = 0; c < kVector; ++c) largest = fmaxf(largest, finite_magnitude(columns[c]));
  const int lanes = min(team.count, index::kScaleGroup / kVector);
  const float chosen = index::row_scale(Team::max_of_lanes(largest, lanes), largest_float8(dtype));
  if (row_scales != nullptr && team.lane % lanes == 0)
    row_scales[first / index::kScaleGroup * scale.group_stride] = chosen;
  return chosen;
}

// Where a joined row goes. Teams without a row have one that is not stored.
struct Target {
  void* out;  // nullptr: nowhere
  int dtype;
  float* scales;  // of a row of 8 bits whose scales are chosen
};

// The joined values of the team's row. row_of(s) is where state s has it, dtype_of(s) in which format.
template <typename LseOf, typename RowOf, typename DtypeOf>
__device__ __forceinline__ void join_row(const Team& team, const Weights& weights, int num_states, int dim,
                                         LseOf lse_of, RowOf row_of, DtypeOf dtype_of, const Target& target,
                                         const OutputScaleLayout& out_scale) {
  // Lanes without a column come along: they have a say in the group's scale.
#pragma unroll 1
  for (int begin = 0; begin < dim; begin += team.count * kVector) {
    const int first = begin + team.lane * kVector;
    // -0 leaves every first summand's bits alone.
    const float start = weights.is_nan ? __int_as_float(0x7fffffff) : weights.is_empty() ? 0.0F : -0.0F;
    float sum[kVector];
#pragma unroll
    for (float& column : sum) column = start;
    if (!weights.is_nan && first < dim) {
#pragma unroll kUnroll
      for (int s = 0; s < num_states; ++s) {
        const float lse = lse_of(s);
        if (lse == negative_infinity()) continue;
        const float weight = weights.of(lse);
        float values[kVector];
        load_columns(row_of(s), dtype_of(s), first, dim, values);
#pragma unroll
        for (int c = 0; c < kVector; ++c) sum[c] += weight * values[c];
      }
    }
    if (is_float8(target.dtype)) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        if (first + c >= dim) sum[c] = 0.0F;  // no column of the group
      }
      const float scale = scale_of(team, sum, first, target.dtype, out_scale, first < dim ? target.scales : nullptr);
#pragma unroll
      for (int c = 0; c < kVector; ++c) sum[c] = __fdiv_rn(sum[c], scale);
    }
    if (target.out != nullptr && first < dim) store_columns(target.out, target.dtype, first, dim, sum);
  }
}

}  // namespace merge

}  // namespace qkv::cuda
