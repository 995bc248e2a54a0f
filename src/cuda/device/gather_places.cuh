// Runs of tokens in their pages, and the dense rows that they become: what the kernels of a gather share. Grid (runs,
// blocks that share the rows of a run); block 256.
#pragma once

#include "core/index/row_lanes.hpp"
#include "params.hpp"

namespace qkv::cuda::gather {

constexpr int kThreads = 256;
constexpr int kRows = 32;  // that a CTA takes at once: a row for each team of 8 lanes

// Of a head's row, in elements.
struct Places {
  long long from;  // in the pages
  long long to;    // in the rows
};

class Run {
 public:
  __device__ __forceinline__ Run(const CacheGatherParams& params, int run)
      : params_(params),
        pages_(params.page_numbers + params.page_start[run]),
        first_offset_(params.first_offset[run]),
        first_row_(params.row_start[run]) {}

  // row: of the run.
  __device__ __forceinline__ Places places_of(int row, int head) const {
    const int position = first_offset_ + row;
    return {pages_[position / params_.page_size] * params_.pages.page_stride +
                position % params_.page_size * params_.pages.token_stride + head * params_.pages.head_stride,
            (first_row_ + row) * params_.row_stride + head * params_.row_head_stride};
  }

 private:
  const CacheGatherParams& params_;
  const int* pages_;
  const int first_offset_;
  const long long first_row_;
};

// action(places, lane, lanes) for the heads' rows that the CTA moves, each by one team of lanes: the divisions that
// find a row's place are paid once a row, not once a piece.
template <typename Action>
__device__ __forceinline__ void for_each_row(const CacheGatherParams& params, int pieces_of_head, Action action) {
  const int lanes = index::lanes_of_row(pieces_of_head);
  const int team = threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;
  const Run tokens(params, blockIdx.x);
  const int num_rows = static_cast<int>(params.row_start[blockIdx.x + 1] - params.row_start[blockIdx.x]);
  for (int first = blockIdx.y * kRows; first < num_rows; first += gridDim.y * kRows) {
    const int num_heads_rows = min(kRows, num_rows - first) * params.num_heads;
    for (int i = team; i < num_heads_rows; i += kThreads / lanes) {
      action(tokens.places_of(first + i / params.num_heads, i % params.num_heads), lane, lanes);
    }
  }
}

// A lane's pieces of a row: all loads of a turn, of kUnroll pieces, are issued before its first store.
template <typename Piece, int kUnroll = 4, typename Load, typename Store>
__device__ __forceinline__ void move_pieces(int num_pieces, int lane, int lanes, Load load, Store store) {
  for (int first = lane; first < num_pieces; first += kUnroll * lanes) {
    Piece held[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * lanes < num_pieces) held[u] = load(first + u * lanes);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * lanes < num_pieces) store(first + u * lanes, held[u]);
    }
  }
}

}  // namespace qkv::cuda::gather
