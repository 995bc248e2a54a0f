// Copies keys and values of a range of requests from their pages to dense rows. Bits are kept.
// Grid (requests, blocks that share the rows of a request, at most 65535); block 256: a warp a row.
#pragma once

#include "params.hpp"

namespace qkv::cuda {
namespace gather {

constexpr int kWarps = 8;

// One row of one KV head, by the lanes of a warp; 16 bytes at once where all rows begin at such multiples.
__device__ __forceinline__ void copy_row(const char* from, char* to, int bytes, bool vectors) {
  const int lane = threadIdx.x % 32;
  if (vectors) {
    for (int i = lane; i < bytes / 16; i += 32) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    for (int i = lane; i < bytes / 2; i += 32) {
      reinterpret_cast<unsigned short*>(to)[i] = reinterpret_cast<const unsigned short*>(from)[i];
    }
  }
}

__device__ __forceinline__ bool allows_vectors(const CacheGatherSide& side, int element_bytes) {
  const long long strides = side.pages.page_stride | side.pages.token_stride | side.pages.head_stride |
                            side.token_stride | side.head_stride | side.head_dim;
  const long long starts = reinterpret_cast<long long>(side.pages.data) | reinterpret_cast<long long>(side.rows);
  return ((strides * element_bytes | starts) & 15) == 0;
}

}  // namespace gather

extern "C" __global__ void __launch_bounds__(gather::kWarps * 32, 1)
    gather_pages(const __grid_constant__ CacheGatherParams params) {
  const long long first_row = params.row_start[blockIdx.x];
  const long long num_rows = params.row_start[blockIdx.x + 1] - first_row;
  const int first_key = params.key_begin != nullptr ? params.key_begin[blockIdx.x] : 0;
  const int* pages = params.pages + params.page_start[params.first_request + blockIdx.x];
  for (long long row = blockIdx.y * gather::kWarps + threadIdx.x / 32; row < num_rows;
       row += gridDim.y * gather::kWarps) {
    const int position = first_key + static_cast<int>(row);
    const long long page = pages[position / params.page_size];
    const long long offset = position % params.page_size;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const CacheGatherSide& side = params.sides[s];
      const bool vectors = gather::allows_vectors(side, params.element_bytes);
      const char* from = static_cast<const char*>(side.pages.data) +
                         (page * side.pages.page_stride + offset * side.pages.token_stride) * params.element_bytes;
      char* to = static_cast<char*>(side.rows) + (first_row + row) * side.token_stride * params.element_bytes;
      for (int head = 0; head < params.num_kv_heads; ++head) {
        gather::copy_row(from + head * side.pages.head_stride * params.element_bytes,
                         to + head * side.head_stride * params.element_bytes, side.head_dim * params.element_bytes,
                         vectors);
      }
    }
  }
}

}  // namespace qkv::cuda
