// Joins states of the same rows over disjoint keys: LSE = ln Σ exp(lse), out = Σ exp(lse - LSE)·out, in the order
// given. A state with lse = -inf is empty and its out is not read; NaN or +inf gives NaN.
#pragma once

#include "core/index/merge_teams.hpp"
#include "epilogue.cuh"
#include "max_of_lanes.cuh"
#include "output_scale.cuh"
#include "params.hpp"
#include "ptx/load.cuh"
#include "ptx/pin.cuh"

namespace qkv::cuda {
namespace merge {

constexpr int kVector = index::kMergedColumns;
constexpr int kAtOnce = 2;  // states whose values are under way together

struct Place {
  int row;  // of those that are merged
  int token, head;
};

// What a row's states weigh: state s has exp(lse - max)/total, exactly 1 where it is alone.
struct Weights {
  float max = negative_infinity();
  float total = 0.0F, inverse = 0.0F;  // NaN where a state is

  __device__ __forceinline__ float of(float lse) const { return expf(lse - max) * inverse; }
  __device__ __forceinline__ bool is_nan() const { return inverse != inverse; }
  __device__ __forceinline__ bool is_empty() const { return max == negative_infinity(); }
  __device__ __forceinline__ float lse() const { return is_nan() ? inverse : is_empty() ? max : max + logf(total); }
};

// lse_of(s) is state s's.
template <typename LseOf>
__device__ __forceinline__ Weights find_weights(int num_states, float sink, LseOf lse_of) {
  Weights weights;
  weights.max = sink;
  bool is_nan = false;
#pragma unroll 4
  for (int s = 0; s < num_states; ++s) {
    const float lse = lse_of(s);
    // +inf is no LSE of finite scores: it comes from kernels that mark empty rows so, and is not guessed at.
    is_nan |= !(lse < -negative_infinity());
    weights.max = fmaxf(weights.max, lse);
  }
  if (is_nan) weights.total = weights.inverse = __int_as_float(0x7fffffff);
  if (is_nan || weights.is_empty()) return weights;
#pragma unroll 4
  for (int s = 0; s < num_states; ++s) weights.total += expf(lse_of(s) - weights.max);
  weights.total += expf(sink - weights.max);
  weights.inverse = 1.0F / weights.total;
  return weights;
}

// Columns as they lie in memory: of 16 bits, they fill the first half. Kept so until they are used, since converting
// would wait for them.
struct Raw {
  unsigned word[kVector];
};

// 0 where there is no row (nullptr), and behind its last column. Whole: the row's columns are whole vectors.
template <bool kWhole>
__device__ __forceinline__ Raw load_columns(const void* row, int dtype, int first, int dim) {
  if constexpr (kWhole) {
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const char*>(row) + first * size_of(dtype));
    const uint4 low = ptx::load_global_16_if(row != nullptr, from);
    const uint4 high = ptx::load_global_16_if(row != nullptr && dtype == kF32, from + 1);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  } else {
    Raw raw{};
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (row == nullptr || first + c >= dim) continue;
      if (dtype == kF32) {
        raw.word[c] = static_cast<const unsigned*>(row)[first + c];
      } else {
        raw.word[c / 2] |= static_cast<unsigned>(static_cast<const unsigned short*>(row)[first + c]) << (c % 2 * 16);
      }
    }
    return raw;
  }
}

template <bool kBf16>
__device__ __forceinline__ void add_columns_of_16(float (&sum)[kVector], const Raw& raw, float weight) {
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    sum[c] += weight * ptx::f32_from_16<kBf16>(static_cast<unsigned short>(raw.word[c / 2] >> (c % 2 * 16)));
  }
}

__device__ __forceinline__ void add_columns(float (&sum)[kVector], const Raw& raw, int dtype, float weight) {
  if (dtype == kF32) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum[c] += weight * __uint_as_float(raw.word[c]);
  } else if (dtype == kBf16) {
    add_columns_of_16<true>(sum, raw, weight);
  } else {
    add_columns_of_16<false>(sum, raw, weight);
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

template <bool kWhole>
__device__ __forceinline__ void store_columns(void* row, int dtype, int first, int dim,
                                              const float (&values)[kVector]) {
  char* to = static_cast<char*>(row) + first * size_of(dtype);
  if (!kWhole && first + kVector > dim) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (first + c < dim) store_element(row, dtype, first + c, values[c]);
    }
  } else if (dtype == kF32) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else if (is_float8(dtype)) {
    *reinterpret_cast<uint2*>(to) = pack_eight(dtype, values);
  } else {
    unsigned pair[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      pair[i] = dtype == kBf16 ? ptx::pack_bf16(values[2 * i], values[2 * i + 1])
                               : ptx::pack_f16(values[2 * i], values[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

__device__ __forceinline__ void* row_at(void* data, int dtype, long long offset) {
  return static_cast<char*>(data) + offset * size_of(dtype);
}

// The rows of a warp. States has
//   num_states(), head_dim_v()
//   place_of(row), sink_of(place), lse_of(place, s)
//   values_of(place, s)  where state s has the row; nullptr: it weighs, but adds nothing
//   dtype_of(s)          of those
//   out_dtype(), out_scale()
//   out_at(place)        where the joined row goes: may be one of the states'
//   store_lse(place, lse)
// Whole: their columns are whole vectors.
template <bool kWhole, typename States>
class WarpRows {
 public:
  __device__ __forceinline__ explicit WarpRows(const States& states) : states_(states) {}

  // So many rows from first_row on, at most index::merging_rows_of_warp.
  __device__ __forceinline__ void join(int first_row, int rows) const {
    const int lane = threadIdx.x % 32;
    const bool has_row = lane < rows;
    Place place{};
    Weights weights;
    if (has_row) {
      place = states_.place_of(first_row + lane);
      const auto lse_of = [&](int s) { return states_.lse_of(place, s); };
      weights = find_weights(states_.num_states(), states_.sink_of(place), lse_of);
    }
    const int log2 = index::merging_log2_lanes(states_.head_dim_v());
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += 32 >> log2) {
      const int r = begin + (lane >> log2);
      Place of_team;
      of_team.row = first_row + r;
      of_team.token = __shfl_sync(0xffffffff, place.token, r);
      of_team.head = __shfl_sync(0xffffffff, place.head, r);
      Weights team_weights;
      team_weights.max = __shfl_sync(0xffffffff, weights.max, r);
      team_weights.inverse = __shfl_sync(0xffffffff, weights.inverse, r);
      join_row(of_team, team_weights, r < rows, 1 << log2);
    }
    __syncwarp();  // the rows' LSEs have been read
    if (has_row) states_.store_lse(place, weights.lse());
  }

 private:
  // By a team of lanes; all lanes of the warp call this.
  __device__ __forceinline__ void join_row(const Place& place, const Weights& weights, bool has_row, int lanes) const {
    const int dim = states_.head_dim_v();
#pragma unroll 1
    for (int begin = 0; begin < dim; begin += lanes * kVector) {
      const int first = begin + (threadIdx.x & (lanes - 1)) * kVector;
      const bool has_columns = has_row && first < dim;
      float sum[kVector];
      // -0 leaves every first summand's bits alone.
      const float start = weights.is_nan() ? weights.inverse : weights.is_empty() ? 0.0F : -0.0F;
#pragma unroll
      for (float& column : sum) column = start;
      if (has_columns && !weights.is_nan()) add_states(place, weights, first, sum);
      if (is_float8(states_.out_dtype())) divide(place, has_columns, lanes, first, sum);
      if (has_columns) store_columns<kWhole>(states_.out_at(place), states_.out_dtype(), first, dim, sum);
    }
  }

  __device__ __forceinline__ void add_states(const Place& place, const Weights& weights, int first,
                                             float (&sum)[kVector]) const {
#pragma unroll 1
    for (int begin = 0; begin < states_.num_states(); begin += kAtOnce) {
      // Where values lie is looked up for all of them first: a look-up between their loads would wait for the first.
      const void* values[kAtOnce] = {};
      int dtype[kAtOnce] = {};
      float weight[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int s = begin + i;
        if (s >= states_.num_states()) continue;
        const float lse = states_.lse_of(place, s);
        weight[i] = weights.of(lse);
        dtype[i] = states_.dtype_of(s);
        if (lse != negative_infinity()) values[i] = states_.values_of(place, s);
      }
      Raw raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        raw[i] = load_columns<kWhole>(values[i], dtype[i], first, states_.head_dim_v());
      }
#pragma unroll
      for (Raw& columns : raw) ptx::pin(columns.word);  // or the first are used before the second are asked for
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (values[i] != nullptr) add_columns(sum, raw[i], dtype[i], weight[i]);
      }
    }
  }

  // A row of 8 bits by its scale, or by that of its group of columns, which 16 lanes hold, or all of the team's.
  __device__ __forceinline__ void divide(const Place& place, bool has_columns, int lanes, int first,
                                         float (&sum)[kVector]) const {
    constexpr int kLanesOfGroup = index::kScaleGroup / kVector;
    const OutputScaleLayout& scale = states_.out_scale();
    float divisor;
    if (scale.of_groups) {
      float largest = 0.0F;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        if (has_columns && first + c < states_.head_dim_v()) largest = fmaxf(largest, finite_magnitude(sum[c]));
      }
      divisor = index::row_scale(max_of_lanes(largest, min(lanes, kLanesOfGroup)), largest_float8(states_.out_dtype()));
      if (has_columns && first % index::kScaleGroup == 0) {
        scales_of_row(scale, place.token, place.head)[first / index::kScaleGroup * scale.group_stride] = divisor;
      }
    } else {
      divisor = *scale.data;
    }
#pragma unroll
    for (float& column : sum) column = __fdiv_rn(column, divisor);
  }

  const States& states_;
};

}  // namespace merge
}  // namespace qkv::cuda
