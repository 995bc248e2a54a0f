// Gathers runs of tokens from pages of 8-bit floats into dense rows of f32, f16 or bf16: round(element · scale). Grid
// and block as gather_places.cuh says.
#pragma once

#include "dtype.cuh"
#include "gather_places.cuh"

namespace qkv::cuda {
namespace gather {

constexpr int kVector = 8;  // elements that a thread takes at once: 8 bytes in, 16 or 32 out

__device__ __forceinline__ bool allows_vectors(const CacheGatherParams& params) {
  const long long elements = params.pages.page_stride | params.pages.token_stride | params.pages.head_stride |
                             params.row_stride | params.row_head_stride | params.head_dim;
  const long long rows = reinterpret_cast<long long>(params.rows) / size_of(params.rows_dtype);
  return ((elements | rows | reinterpret_cast<long long>(params.pages.data)) & (kVector - 1)) == 0 &&
         reinterpret_cast<long long>(params.rows) % 16 == 0;
}

__device__ __forceinline__ float2 widen(unsigned short pair, int dtype, float scale) {
  const unsigned halves =
      dtype == kF8E4M3 ? ptx::f16x2_from_float8x2<true>(pair) : ptx::f16x2_from_float8x2<false>(pair);
  return {ptx::f32_from_f16(static_cast<unsigned short>(halves)) * scale,
          ptx::f32_from_f16(static_cast<unsigned short>(halves >> 16)) * scale};
}

__device__ __forceinline__ unsigned pack(float2 values, int dtype) {
  return dtype == kBf16 ? ptx::pack_bf16(values.x, values.y) : ptx::pack_f16(values.x, values.y);
}

__device__ __forceinline__ void widen_vector(const CacheGatherParams& params, const Places& places, int column,
                                             float scale) {
  const auto* from = static_cast<const unsigned char*>(params.pages.data) + places.from + column;
  const uint2 bytes = *reinterpret_cast<const uint2*>(from);
  float2 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = i < 2 ? bytes.x : bytes.y;
    pairs[i] = widen(static_cast<unsigned short>(i % 2 == 0 ? word : word >> 16), params.pages_dtype, scale);
  }
  if (params.rows_dtype == kF32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(params.rows) + places.to + column);
    to[0] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y};
    to[1] = {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y};
    return;
  }
  const int dtype = params.rows_dtype;
  *reinterpret_cast<uint4*>(static_cast<unsigned short*>(params.rows) + places.to + column) = {
      pack(pairs[0], dtype), pack(pairs[1], dtype), pack(pairs[2], dtype), pack(pairs[3], dtype)};
}

__device__ __forceinline__ void widen_element(const CacheGatherParams& params, const Places& places, int column,
                                              float scale) {
  const unsigned char byte = static_cast<const unsigned char*>(params.pages.data)[places.from + column];
  const float value = widen(byte, params.pages_dtype, scale).x;
  if (params.rows_dtype == kF32) {
    static_cast<float*>(params.rows)[places.to + column] = value;
  } else {
    static_cast<unsigned short*>(params.rows)[places.to + column] =
        static_cast<unsigned short>(pack({value, 0.0F}, params.rows_dtype));
  }
}

}  // namespace gather

extern "C" __global__ void __launch_bounds__(gather::kThreads)
    gather_float8(const __grid_constant__ CacheGatherParams params) {
  const bool vectors = gather::allows_vectors(params);
  const int step = vectors ? gather::kVector : 1;
  const int pieces_of_head = params.head_dim / step;
  const int pieces_of_row = pieces_of_head * params.num_heads;
  const float scale = *params.scale;
  gather::for_each_block(params, [&](int run, int first, int last) {
    const gather::Run tokens(params, run);
    for (int index = threadIdx.x; index < (last - first) * pieces_of_row; index += gather::kThreads) {
      const int column = index % pieces_of_head * step;
      const gather::Places places =
          tokens.places_of(first + index / pieces_of_row, index % pieces_of_row / pieces_of_head);
      if (vectors) {
        gather::widen_vector(params, places, column, scale);
      } else {
        gather::widen_element(params, places, column, scale);
      }
    }
  });
}

}  // namespace qkv::cuda
