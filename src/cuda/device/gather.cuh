// Copies runs of tokens from their pages to dense rows. Bits are kept. A head stride of 0 in the pages spreads one row
// over all heads. Grid (runs, blocks that share the rows of a run); block 256.
#pragma once

#include "params.hpp"

namespace qkv::cuda {
namespace gather {

constexpr int kThreads = 256;
constexpr int kRows = 16;   // that a CTA copies at once
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
  const int* pages = params.page_numbers + params.page_start[run];
  const int first_offset = params.first_offset[run];
  const long long first_row = params.row_start[run];
  const int pieces_of_head = params.head_dim * params.element_bytes / static_cast<int>(sizeof(Piece));
  const int pieces_of_row = pieces_of_head * params.num_heads;
  const int num_pieces = (last - first) * pieces_of_row;
  const auto move_of = [&](int index) {
    const int row = first + index / pieces_of_row;
    const int head = index % pieces_of_row / pieces_of_head;
    const int position = first_offset + row;
    const long long from = pages[position / params.page_size] * params.pages.page_stride +
                           position % params.page_size * params.pages.token_stride + head * params.pages.head_stride;
    const long long to = (first_row + row) * params.row_stride + head * params.row_head_stride;
    const char* source = static_cast<const char*>(params.pages.data) + from * params.element_bytes;
    char* target = static_cast<char*>(params.rows) + to * params.element_bytes;
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
  const int num_rows = static_cast<int>(params.row_start[blockIdx.x + 1] - params.row_start[blockIdx.x]);
  const bool vectors = gather::allows_vectors(params);
  for (int first = blockIdx.y * gather::kRows; first < num_rows; first += gridDim.y * gather::kRows) {
    const int last = min(first + gather::kRows, num_rows);
    if (vectors) {
      gather::copy_rows<uint4>(params, blockIdx.x, first, last);
    } else {
      gather::copy_rows<unsigned short>(params, blockIdx.x, first, last);
    }
  }
}

}  // namespace qkv::cuda
