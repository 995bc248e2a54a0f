// Copies runs of tokens from their pages to dense rows. Bits are kept. A head stride of 0 in the pages spreads one row
// over all heads. Grid and block as gather_places.cuh says.
#pragma once

#include "gather_places.cuh"

namespace qkv::cuda {
namespace gather {

__device__ __forceinline__ bool allows_vectors(const CacheGatherParams& params) {
  const long long strides = params.pages.page_stride | params.pages.token_stride | params.pages.head_stride |
                            params.row_stride | params.row_head_stride | params.head_dim;
  const long long starts = reinterpret_cast<long long>(params.pages.data) | reinterpret_cast<long long>(params.rows);
  return ((strides * params.element_bytes | starts) & 15) == 0;
}

template <typename Piece>
__device__ __forceinline__ void copy_rows(const CacheGatherParams& params) {
  const int pieces_of_head = params.head_dim * params.element_bytes / static_cast<int>(sizeof(Piece));
  for_each_row(params, pieces_of_head, [&](const Places& places, int lane, int lanes) {
    const auto* from = reinterpret_cast<const Piece*>(static_cast<const char*>(params.pages.data) +
                                                      places.from * params.element_bytes);
    auto* to = reinterpret_cast<Piece*>(static_cast<char*>(params.rows) + places.to * params.element_bytes);
    move_pieces<Piece>(
        pieces_of_head, lane, lanes, [&](int piece) { return from[piece]; },
        [&](int piece, const Piece& held) { to[piece] = held; });
  });
}

}  // namespace gather

extern "C" __global__ void __launch_bounds__(gather::kThreads)
    gather_pages(const __grid_constant__ CacheGatherParams params) {
  if (gather::allows_vectors(params)) {
    gather::copy_rows<uint4>(params);
  } else if (params.element_bytes > 1) {
    gather::copy_rows<unsigned short>(params);
  } else {
    gather::copy_rows<unsigned char>(params);
  }
}

}  // namespace qkv::cuda
