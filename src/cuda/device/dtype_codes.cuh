// The formats of queries, keys, values and outputs by the numbers that the host gives them.
#pragma once

namespace qkv::cuda {

enum Dtype { kF32 = 0, kF16 = 1, kBf16 = 2, kF8E4M3 = 3, kF8E5M2 = 4, kI8 = 5 };

__device__ __forceinline__ constexpr bool is_float8(int dtype) { return dtype == kF8E4M3 || dtype == kF8E5M2; }
__device__ __forceinline__ constexpr bool is_8bit(int dtype) { return is_float8(dtype) || dtype == kI8; }
__device__ __forceinline__ constexpr int size_of(int dtype) { return dtype == kF32 ? 4 : is_8bit(dtype) ? 1 : 2; }

}  // namespace qkv::cuda
