// 8-bit keys or values: what their rows are multiplied by, and a tile of them as the 16-bit rows that
// mma.sync reads. Widening is exact; scales go to scores, weights and outputs, which are f32.
#pragma once

#include "dtype.cuh"
#include "params.hpp"

namespace qkv::cuda {

// The scale of a whole request and KV head.
template <typename Item>
__device__ __forceinline__ float uniform_scale(const KeyValueScales& scales, const Item& item) {
  return scales.data[item.request * scales.request_stride + item.kv_head * scales.head_stride];
}

// Rows of kDim bytes, one after another, to rows of 16-bit elements kRowBytes apart. By all threads of the CTA.
template <bool kBf16, int kDtype, int kRows, int kDim, int kRowBytes, int kThreads>
__device__ __forceinline__ void widen_rows(const char* bytes, char* rows) {
  static_assert(kDim % 16 == 0);
  constexpr int kChunks = kDim / 16;
  for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
    const uint4 chunk = reinterpret_cast<const uint4*>(bytes)[index];
    uint4* row = reinterpret_cast<uint4*>(rows + index / kChunks * kRowBytes + index % kChunks * 32);
    row[0] = widen_eight<kBf16, kDtype>({chunk.x, chunk.y});
    row[1] = widen_eight<kBf16, kDtype>({chunk.z, chunk.w});
  }
}

}  // namespace qkv::cuda
