// Writes new tokens' keys and values to their slots in the pages, converting between f32, f16 and bf16. A slot below 0:
// nothing of the token is read or written. Equal dtypes keep their bits.
// Grid: CTAs that take turns at the slots, one each at best; block: any multiple of 32, best the token's 8-element
// chunks, at most 256.
#pragma once

#include "dtype.cuh"
#include "params.hpp"
#include "row_elements.cuh"

namespace qkv::cuda {
namespace cache_write {

constexpr int kVector = kElementsOfVector;

// Every row begins at a multiple of 16 bytes, and is whole vectors long.
__device__ __forceinline__ bool allows_vectors(const CacheWriteSide& side) {
  const long long source = (side.source_token_stride | side.source_head_stride) * size_of(side.source_dtype);
  const long long pages = (side.page_stride | side.token_stride | side.head_stride) * size_of(side.pages_dtype);
  const long long starts = reinterpret_cast<long long>(side.source) | reinterpret_cast<long long>(side.pages);
  return side.head_dim % kVector == 0 && ((source | pages | starts) & 15) == 0;
}

__device__ __forceinline__ unsigned pack(float low, float high, bool is_bf16) {
  return is_bf16 ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
}

__device__ __forceinline__ void store_vector(char* target, int dtype, const float (&values)[kVector]) {
  if (dtype == kF32) {
    reinterpret_cast<float4*>(target)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(target)[1] = make_float4(values[4], values[5], values[6], values[7]);
    return;
  }
  const bool is_bf16 = dtype == kBf16;
  *reinterpret_cast<uint4*>(target) =
      make_uint4(pack(values[0], values[1], is_bf16), pack(values[2], values[3], is_bf16),
                 pack(values[4], values[5], is_bf16), pack(values[6], values[7], is_bf16));
}

__device__ __forceinline__ void copy_vector(const char* source, int source_dtype, char* target, int target_dtype) {
  if (source_dtype == target_dtype) {
    const uint4* from = reinterpret_cast<const uint4*>(source);
    uint4* to = reinterpret_cast<uint4*>(target);
    to[0] = from[0];
    if (target_dtype == kF32) to[1] = from[1];
    return;
  }
  float values[kVector];
  load_vector(source, source_dtype, values);
  store_vector(target, target_dtype, values);
}

__device__ __forceinline__ void copy_element(const char* source, int source_dtype, char* target, int target_dtype) {
  if (source_dtype == kF32 && target_dtype == kF32) {
    *reinterpret_cast<unsigned*>(target) = *reinterpret_cast<const unsigned*>(source);
  } else if (source_dtype == target_dtype) {
    *reinterpret_cast<unsigned short*>(target) = *reinterpret_cast<const unsigned short*>(source);
  } else {
    const float value = load_element(source, source_dtype, 0);
    if (target_dtype == kF32) {
      *reinterpret_cast<float*>(target) = value;
    } else {
      *reinterpret_cast<unsigned short*>(target) =
          static_cast<unsigned short>(pack(value, 0.0F, target_dtype == kBf16));
    }
  }
}

__device__ __forceinline__ void write_side(const CacheWriteSide& side, int num_kv_heads, long long token,
                                           long long page, long long offset) {
  const int source_bytes = size_of(side.source_dtype);
  const int target_bytes = size_of(side.pages_dtype);
  const char* source = static_cast<const char*>(side.source) + token * side.source_token_stride * source_bytes;
  char* target = static_cast<char*>(side.pages) + (page * side.page_stride + offset * side.token_stride) * target_bytes;
  const bool vectors = allows_vectors(side);
  const int step = vectors ? kVector : 1;
  const int steps = side.head_dim / step;
  for (int index = threadIdx.x; index < num_kv_heads * steps; index += blockDim.x) {
    const long long head = index / steps;
    const int element = index % steps * step;
    const char* from = source + (head * side.source_head_stride + element) * source_bytes;
    char* to = target + (head * side.head_stride + element) * target_bytes;
    if (vectors) {
      copy_vector(from, side.source_dtype, to, side.pages_dtype);
    } else {
      copy_element(from, side.source_dtype, to, side.pages_dtype);
    }
  }
}

}  // namespace cache_write

extern "C" __global__ void __launch_bounds__(256) cache_write_pages(const __grid_constant__ CacheWriteParams params) {
  const int num_slots = params.num_slots != nullptr ? *params.num_slots : params.most_slots;
  for (int token = blockIdx.x; token < num_slots; token += gridDim.x) {
    const long long slot = params.slots[token];
    if (slot < 0) continue;
    const long long page = slot / params.page_size;
    const long long offset = slot % params.page_size;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      cache_write::write_side(params.sides[side], params.num_kv_heads, token, page, offset);
    }
  }
}

}  // namespace qkv::cuda
