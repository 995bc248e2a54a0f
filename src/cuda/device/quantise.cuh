// Rounds rows to 8-bit floats: round(x / scale). Scales that are chosen here take two launches before that: they are
// cleared, then each row raises its own to what its largest finite magnitude asks for. A scale grows with the
// magnitude, so the largest scale is that of the largest magnitude, and bits do not depend on who comes first. Block
// 128: 16 lanes a row. Grid of rows: (ceil(num_tokens / 8) or fewer, num_heads); of scales: ceil(scales / 128).
#pragma once

#include "core/index/token_requests.hpp"
#include "dtype.cuh"
#include "max_of_lanes.cuh"
#include "quantise_params.hpp"
#include "row_elements.cuh"

namespace qkv::cuda {
namespace quantise {

constexpr int kThreads = 128;
constexpr int kLanes = 16;  // of a row
constexpr int kVector = kElementsOfVector;

// The lane's columns of a row: whole vectors first, then what is left of the row, an element a lane.
template <typename OfVector, typename OfElement>
__device__ __forceinline__ void for_each_column(int head_dim, OfVector of_vector, OfElement of_element) {
  const int lane = threadIdx.x % kLanes;
  const int vectors_end = head_dim / kVector * kVector;
  for (int column = lane * kVector; column < vectors_end; column += kLanes * kVector) of_vector(column);
  if (vectors_end + lane < head_dim) of_element(vectors_end + lane);
}

__device__ __forceinline__ const char* address_of(const QuantiseParams& params, const void* row, int column) {
  return static_cast<const char*>(row) + column * size_of(params.rows_dtype);
}

// By the lanes of a row; all get the result.
__device__ __forceinline__ float largest_of_row(const QuantiseParams& params, const void* row) {
  float largest = 0.0F;
  for_each_column(
      params.head_dim,
      [&](int column) {
        float values[kVector];
        load_vector(address_of(params, row, column), params.rows_dtype, values);
#pragma unroll
        for (const float value : values) largest = fmaxf(largest, finite_magnitude(value));
      },
      [&](int column) { largest = fmaxf(largest, finite_magnitude(load_element(row, params.rows_dtype, column))); });
  return max_of_lanes(largest, kLanes, 0xffffU << (threadIdx.x & 16));
}

// Scales above 0 are in the order of their bits. Most rows find theirs high enough: then nobody queues for it.
__device__ __forceinline__ void raise_scale(const QuantiseParams& params, const void* row, float* scale) {
  const float largest = largest_of_row(params, row);
  if (threadIdx.x % kLanes != 0 || largest == 0.0F) return;
  const float wanted = index::row_scale(largest, largest_float8(params.out_dtype));
  if (wanted > *static_cast<volatile float*>(scale)) {
    atomicMax(reinterpret_cast<unsigned*>(scale), __float_as_uint(wanted));
  }
}

__device__ __forceinline__ void round_row(const QuantiseParams& params, const void* row, float scale,
                                          unsigned char* out) {
  for_each_column(
      params.head_dim,
      [&](int column) {
        float values[kVector];
        load_vector(address_of(params, row, column), params.rows_dtype, values);
#pragma unroll
        for (float& value : values) value = __fdiv_rn(value, scale);
        *reinterpret_cast<uint2*>(out + column) = pack_eight(params.out_dtype, values);
      },
      [&](int column) {
        const float quotient = __fdiv_rn(load_element(row, params.rows_dtype, column), scale);
        out[column] = static_cast<unsigned char>(pack_float8(params.out_dtype, quotient, 0.0F));
      });
}

// Rows of head blockIdx.y.
__device__ __forceinline__ void take_rows(const QuantiseParams& params) {
  const long long head = blockIdx.y;
  const long long num_tokens =
      params.query_start_loc == nullptr
          ? params.num_tokens
          : min(params.num_tokens, static_cast<long long>(params.query_start_loc[params.num_requests]));
  constexpr int kTokens = kThreads / kLanes;
  for (long long token = static_cast<long long>(blockIdx.x) * kTokens + threadIdx.x / kLanes; token < num_tokens;
       token += static_cast<long long>(gridDim.x) * kTokens) {
    const long long request = params.query_start_loc == nullptr
                                  ? 0
                                  : index::request_of_token(params.query_start_loc, params.num_requests, token);
    float* scale_at =
        params.scale + request * params.scale_request_stride + head / params.heads_of_scale * params.scale_head_stride;
    const char* row = static_cast<const char*>(params.rows) +
                      (token * params.row_token_stride + head * params.row_head_stride) * size_of(params.rows_dtype);
    if (params.step == kRaiseScales) {
      raise_scale(params, row, scale_at);
      continue;
    }
    const float scale = *static_cast<volatile float*>(scale_at);
    round_row(
        params, row, params.writes_scales != 0 && scale == 0.0F ? 1.0F : scale,
        static_cast<unsigned char*>(params.out) + token * params.out_token_stride + head * params.out_head_stride);
  }
}

// action(scale) for those that the threads of `num_ctas` CTAs share.
template <typename Action>
__device__ __forceinline__ void for_each_scale(const QuantiseParams& params, unsigned num_ctas, Action action) {
  const long long num_scales = static_cast<long long>(params.num_requests) * params.num_scales;
  for (long long i = blockIdx.x * kThreads + threadIdx.x; i < num_scales; i += num_ctas * kThreads) {
    action(params.scale + i / params.num_scales * params.scale_request_stride +
           i % params.num_scales * params.scale_head_stride);
  }
}

}  // namespace quantise

extern "C" __global__ void __launch_bounds__(quantise::kThreads)
    quantise_rows(const __grid_constant__ QuantiseParams params) {
  if (params.step == kClearScales) {
    quantise::for_each_scale(params, gridDim.x, [](float* scale) { *scale = 0.0F; });
    return;
  }
  quantise::take_rows(params);
  if (params.writes_scales == 0 || blockIdx.x != 0 || blockIdx.y != 0) return;
  quantise::for_each_scale(params, 1, [](float* scale) {
    if (*static_cast<volatile float*>(scale) == 0.0F) *scale = 1.0F;
  });
}

}  // namespace qkv::cuda
