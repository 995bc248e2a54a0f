// Writes new tokens' keys and values to their slots in 8-bit pages: round(x / scale). With scales of tokens,
// a row's largest finite magnitude chooses its scale, which is written beside the pages. A slot below 0: nothing of the
// token is read or written.
// Block 128: a warp a row. Grid: ceil(2·num_slots·num_kv_heads / 4), keys first.
#pragma once

#include "dtype.cuh"
#include "params.hpp"

namespace qkv::cuda {
namespace cache_quantise {

constexpr int kWarps = 4;
constexpr int kVector = 4;  // elements a lane takes at once

// Both rows begin at multiples of a vector, and are whole vectors long.
__device__ __forceinline__ bool allows_vectors(const CacheWriteSide& side) {
  const long long elements = side.source_token_stride | side.source_head_stride | side.page_stride | side.token_stride |
                             side.head_stride | side.head_dim;
  const long long source = reinterpret_cast<long long>(side.source) / size_of(side.source_dtype);
  return ((elements | source | reinterpret_cast<long long>(side.pages)) & (kVector - 1)) == 0;
}

__device__ __forceinline__ float load_element(const void* row, int dtype, int column) {
  if (dtype == kF32) return static_cast<const float*>(row)[column];
  const unsigned short bits = static_cast<const unsigned short*>(row)[column];
  return dtype == kBf16 ? ptx::f32_from_bf16(bits) : ptx::f32_from_f16(bits);
}

__device__ __forceinline__ void load_vector(const void* row, int dtype, int column, float (&values)[kVector]) {
  if (dtype == kF32) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(row) + column);
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    return;
  }
  const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(row) + column);
  const unsigned words[2] = {pairs.x, pairs.y};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const unsigned short low = static_cast<unsigned short>(words[w]);
    const unsigned short high = static_cast<unsigned short>(words[w] >> 16);
    values[2 * w] = dtype == kBf16 ? ptx::f32_from_bf16(low) : ptx::f32_from_f16(low);
    values[2 * w + 1] = dtype == kBf16 ? ptx::f32_from_bf16(high) : ptx::f32_from_f16(high);
  }
}

// By the lanes of a warp; all get the result.
__device__ __forceinline__ float choose_scale(const void* row, int source_dtype, int head_dim, bool vectors,
                                              int pages_dtype) {
  float largest = 0.0F;
  if (vectors) {
    for (int column = threadIdx.x % 32 * kVector; column < head_dim; column += 32 * kVector) {
      float values[kVector];
      load_vector(row, source_dtype, column, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, finite_magnitude(values[i]));
    }
  } else {
    for (int column = threadIdx.x % 32; column < head_dim; column += 32) {
      largest = fmaxf(largest, finite_magnitude(load_element(row, source_dtype, column)));
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
  return index::row_scale(largest, largest_8bit(pages_dtype));
}

__device__ __forceinline__ void quantise_row(const CacheWriteSide& side, const void* row, float scale, bool vectors,
                                             unsigned char* target) {
  if (vectors) {
    for (int column = threadIdx.x % 32 * kVector; column < side.head_dim; column += 32 * kVector) {
      float values[kVector];
      load_vector(row, side.source_dtype, column, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = __fdiv_rn(values[i], scale);
      const unsigned low = pack_8bit(side.pages_dtype, values[0], values[1]);
      const unsigned high = pack_8bit(side.pages_dtype, values[2], values[3]);
      *reinterpret_cast<unsigned*>(target + column) = low | high << 16;
    }
    return;
  }
  for (int column = threadIdx.x % 32; column < side.head_dim; column += 32) {
    const float value = __fdiv_rn(load_element(row, side.source_dtype, column), scale);
    target[column] = static_cast<unsigned char>(pack_8bit(side.pages_dtype, value, 0.0F));
  }
}

// Row `index` of those of all keys, then of all values.
__device__ __forceinline__ void write_row(const CacheWriteParams& params, long long rows, long long index) {
  const int of_value = index >= rows ? 1 : 0;
  const long long token = (index - of_value * rows) / params.num_kv_heads;
  const long long head = (index - of_value * rows) % params.num_kv_heads;
  const long long slot = params.slots[token];
  if (slot < 0) return;
  const long long page = slot / params.page_size;
  const long long offset = slot % params.page_size;
  const long long request = params.slot_requests != nullptr ? params.slot_requests[token] : 0;

  const CacheWriteSide& side = params.sides[of_value];
  const KeyValueScales& scales = params.scales[of_value];
  const char* row = static_cast<const char*>(side.source) +
                    (token * side.source_token_stride + head * side.source_head_stride) * size_of(side.source_dtype);
  unsigned char* target = static_cast<unsigned char*>(side.pages) + page * side.page_stride +
                          offset * side.token_stride + head * side.head_stride;
  float* scale_at = scales.data + request * scales.request_stride + page * scales.page_stride +
                    offset * scales.token_stride + head * scales.head_stride;
  const bool vectors = allows_vectors(side);
  float scale;
  if (params.token_scales) {
    scale = choose_scale(row, side.source_dtype, side.head_dim, vectors, side.pages_dtype);
    if (threadIdx.x % 32 == 0) *scale_at = scale;
  } else {
    scale = *scale_at;
  }
  quantise_row(side, row, scale, vectors, target);
}

}  // namespace cache_quantise

extern "C" __global__ void __launch_bounds__(cache_quantise::kWarps * 32)
    cache_quantise_pages(const __grid_constant__ CacheWriteParams params) {
  const long long rows = static_cast<long long>(*params.num_slots) * params.num_kv_heads;
  const long long first = static_cast<long long>(blockIdx.x) * cache_quantise::kWarps + threadIdx.x / 32;
  for (long long index = first; index < 2 * rows; index += gridDim.x * cache_quantise::kWarps) {
    cache_quantise::write_row(params, rows, index);
  }
}

}  // namespace qkv::cuda
