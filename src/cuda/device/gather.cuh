// Copies runs of tokens from their pages to dense rows. Bits are kept. A head stride of 0 in the pages spreads one row
// over all heads. Grid (runs, blocks that share the rows of a run); block 256.
#pragma once

#include "gather_places.cuh"

namespace qkv::cuda {
namespace gather {

constexpr int kUnroll = 4;  // pieces that a thread has in flight

__device__ __forceinline__ bool allows_vectors(const CacheGatherParams& params) {
  const long long strides = params.pages.page_stride | params.pages.token_stride | params.pages.head_stride |
                            params.row_stride | params.row_head_stride | params.head_dim;
  const long long starts = reinterpret_cast<long long>(params.pages.data) | reinterpret_cast<long long>(params.rows);
  return ((strides * params.element_bytes | starts) & 15) == 0;
}

// Where a piece of a run's rows comes from and goes to.
template <typename Piece>
struct Move {
  const Piece* from;
  Piece* to;
};

// Rows [first, last) of a run, in pieces of type Piece.
template <typename Piece>
__device__ __forceinline__ void copy_rows(const CacheGatherParams& params, int run, int first, int last) {
  const Run tokens(params, run);
  const int pieces_of_head = params.head_dim * params.element_bytes / static_cast<int>(sizeof(Piece));
  const int pieces_of_row = pieces_of_head * params.num_heads;
  const int num_pieces = (last - first) * pieces_of_row;
  const auto move_of = [&](int index) {
    const Places places = tokens.places_of(first + index / pieces_of_row, index % pieces_of_row / pieces_of_head);
    const char* source = static_cast<const char*>(params.pages.data) + places.from * params.element_bytes;
    char* target = static_cast<char*>(params.rows) + places.to * params.element_bytes;
    const int piece = index % pieces_of_head;
    return Move<Piece>{reinterpret_cast<const Piece*>(source) + piece, reinterpret_cast<Piece*>(target) + piece};
  };
  int index = threadIdx.x;
  for (; index + (kUnroll - 1) * kThreads < num_pieces; index += kUnroll * kThreads) {
    Piece pieces[kUnroll];
    Piece* targets[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Move<Piece> move = move_of(index + u * kThreads);
      pieces[u] = *move.from;
      targets[u] = move.to;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) *targets[u] = pieces[u];
  }
  for (; index < num_pieces; index += kThreads) {
    const Move<Piece> move = move_of(index);
    *move.to = *move.from;
  }
}

}  // namespace gather

extern "C" __global__ void __launch_bounds__(gather::kThreads)
    gather_pages(const __grid_constant__ CacheGatherParams params) {
  const bool vectors = gather::allows_vectors(params);
  gather::for_each_block(params, [&](int run, int first, int last) {
    if (vectors) {
      gather::copy_rows<uint4>(params, run, first, last);
    } else if (params.element_bytes > 1) {
      gather::copy_rows<unsigned short>(params, run, first, last);
    } else {
      gather::copy_rows<unsigned char>(params, run, first, last);
    }
  });
}

}  // namespace qkv::cuda
