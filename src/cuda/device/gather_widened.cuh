// Gathers runs of tokens from 8-bit pages into dense rows of f32, f16 or bf16: round(element · scale). Grid
// and block as gather_places.cuh says.
#pragma once

#include "dtype.cuh"
#include "gather_places.cuh"

namespace qkv::cuda {
namespace gather {

constexpr int kVector = 8;           // elements that a thread takes at once: 8 bytes in, 16 or 32 out
constexpr int kVectorsInFlight = 9;  // of a thread: latents of 512 + 64 are then one turn

__device__ __forceinline__ bool allows_vectors(const CacheGatherParams& params) {
  const long long elements = params.pages.page_stride | params.pages.token_stride | params.pages.head_stride |
                             params.row_stride | params.row_head_stride | params.head_dim;
  const long long rows = reinterpret_cast<long long>(params.rows) / size_of(params.rows_dtype);
  return ((elements | rows | reinterpret_cast<long long>(params.pages.data)) & (kVector - 1)) == 0 &&
         reinterpret_cast<long long>(params.rows) % 16 == 0;
}

// Formats are told apart once a vector, not once a number.
template <int kPagesDtype>
__device__ __forceinline__ void widen(uint2 bytes, float scale, float (&values)[kVector]) {
  const unsigned words[2] = {bytes.x, bytes.y};
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const unsigned halves = f16x2_from_8bit<kPagesDtype>(words[i / 2], i % 2);
    values[2 * i] = ptx::f32_from_f16(static_cast<unsigned short>(halves)) * scale;
    values[2 * i + 1] = ptx::f32_from_f16(static_cast<unsigned short>(halves >> 16)) * scale;
  }
}

__device__ __forceinline__ void widen(int dtype, uint2 bytes, float scale, float (&values)[kVector]) {
  if (dtype == kF8E4M3) return widen<kF8E4M3>(bytes, scale, values);
  if (dtype == kI8) return widen<kI8>(bytes, scale, values);
  widen<kF8E5M2>(bytes, scale, values);
}

template <bool kBf16>
__device__ __forceinline__ uint4 narrow(const float (&values)[kVector]) {
  return make_uint4(ptx::pack_16<kBf16>(values[0], values[1]), ptx::pack_16<kBf16>(values[2], values[3]),
                    ptx::pack_16<kBf16>(values[4], values[5]), ptx::pack_16<kBf16>(values[6], values[7]));
}

// `to`: in the rows.
__device__ __forceinline__ void store_vector(const CacheGatherParams& params, long long to, uint2 bytes, float scale) {
  float values[kVector];
  widen(params.pages_dtype, bytes, scale, values);
  if (params.rows_dtype == kF32) {
    float4* vectors = reinterpret_cast<float4*>(static_cast<float*>(params.rows) + to);
    vectors[0] = {values[0], values[1], values[2], values[3]};
    vectors[1] = {values[4], values[5], values[6], values[7]};
    return;
  }
  *reinterpret_cast<uint4*>(static_cast<unsigned short*>(params.rows) + to) =
      params.rows_dtype == kBf16 ? narrow<true>(values) : narrow<false>(values);
}

__device__ __forceinline__ void store_element(const CacheGatherParams& params, long long to, unsigned char byte,
                                              float scale) {
  const unsigned halves = f16x2_from_8bit(params.pages_dtype, byte, 0);
  const float value = ptx::f32_from_f16(static_cast<unsigned short>(halves)) * scale;
  if (params.rows_dtype == kF32) {
    static_cast<float*>(params.rows)[to] = value;
  } else {
    static_cast<unsigned short*>(params.rows)[to] = static_cast<unsigned short>(
        params.rows_dtype == kBf16 ? ptx::pack_bf16(value, 0.0F) : ptx::pack_f16(value, 0.0F));
  }
}

}  // namespace gather

extern "C" __global__ void __launch_bounds__(gather::kThreads, 4)
    gather_widened(const __grid_constant__ CacheGatherParams params) {
  const float scale = *params.scale;
  const auto* pages = static_cast<const unsigned char*>(params.pages.data);
  if (gather::allows_vectors(params)) {
    const int num_vectors = params.head_dim / gather::kVector;
    gather::for_each_row(params, num_vectors, [&](const gather::Places& places, int lane, int lanes) {
      const auto* from = reinterpret_cast<const uint2*>(pages + places.from);
      gather::move_pieces<uint2, gather::kVectorsInFlight>(
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
