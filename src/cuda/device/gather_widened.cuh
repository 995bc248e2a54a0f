// Gathers runs of tokens from 8-bit pages into dense rows of f32, f16 or bf16: round(element · scale). Grid
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
  const unsigned halves = f16x2_from_8bit(dtype, pair);
  return {ptx::f32_from_f16(static_cast<unsigned short>(halves)) * scale,
          ptx::f32_from_f16(static_cast<unsigned short>(halves >> 16)) * scale};
}

__device__ __forceinline__ unsigned pack(float2 values, int dtype) {
  return dtype == kBf16 ? ptx::pack_bf16(values.x, values.y) : ptx::pack_f16(values.x, values.y);
}

// `to`: in the rows.
__device__ __forceinline__ void store_vector(const CacheGatherParams& params, long long to, uint2 bytes, float scale) {
  float2 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = i < 2 ? bytes.x : bytes.y;
    pairs[i] = widen(static_cast<unsigned short>(i % 2 == 0 ? word : word >> 16), params.pages_dtype, scale);
  }
  if (params.rows_dtype == kF32) {
    float4* vectors = reinterpret_cast<float4*>(static_cast<float*>(params.rows) + to);
    vectors[0] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y};
    vectors[1] = {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y};
    return;
  }
  const int dtype = params.rows_dtype;
  *reinterpret_cast<uint4*>(static_cast<unsigned short*>(params.rows) + to) = {
      pack(pairs[0], dtype), pack(pairs[1], dtype), pack(pairs[2], dtype), pack(pairs[3], dtype)};
}

__device__ __forceinline__ void store_element(const CacheGatherParams& params, long long to, unsigned char byte,
                                              float scale) {
  const float value = widen(byte, params.pages_dtype, scale).x;
  if (params.rows_dtype == kF32) {
    static_cast<float*>(params.rows)[to] = value;
  } else {
    static_cast<unsigned short*>(params.rows)[to] = static_cast<unsigned short>(pack({value, 0.0F}, params.rows_dtype));
  }
}

}  // namespace gather

extern "C" __global__ void __launch_bounds__(gather::kThreads)
    gather_widened(const __grid_constant__ CacheGatherParams params) {
  const float scale = *params.scale;
  const auto* pages = static_cast<const unsigned char*>(params.pages.data);
  if (gather::allows_vectors(params)) {
    const int num_vectors = params.head_dim / gather::kVector;
    gather::for_each_row(params, num_vectors, [&](const gather::Places& places, int lane, int lanes) {
      const auto* from = reinterpret_cast<const uint2*>(pages + places.from);
      gather::move_pieces<uint2>(
          num_vectors, lane, lanes, [&](int i) { return from[i]; },
          [&](int i, uint2 bytes) { gather::store_vector(params, places.to + i * gather::kVector, bytes, scale); });
    });
    return;
  }
  gather::for_each_row(params, params.head_dim, [&](const gather::Places& places, int lane, int lanes) {
    gather::move_pieces<unsigned char>(
        params.head_dim, lane, lanes, [&](int i) { return pages[places.from + i]; },
        [&](int i, unsigned char byte) { gather::store_element(params, places.to + i, byte, scale); });
  });
}

}  // namespace qkv::cuda
