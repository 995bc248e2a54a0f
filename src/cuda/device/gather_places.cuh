// Runs of tokens in their pages, and the dense rows that they become: what the kernels of a gather share. Grid (runs,
// blocks that share the rows of a run); block 256.
#pragma once

#include "params.hpp"

namespace qkv::cuda::gather {

constexpr int kThreads = 256;
constexpr int kRows = 16;  // that a CTA takes at once

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

// action(run, first, last) for the CTA's blocks of rows.
template <typename Action>
__device__ __forceinline__ void for_each_block(const CacheGatherParams& params, Action action) {
  const int num_rows = static_cast<int>(params.row_start[blockIdx.x + 1] - params.row_start[blockIdx.x]);
  for (int first = blockIdx.y * kRows; first < num_rows; first += gridDim.y * kRows) {
    action(blockIdx.x, first, min(first + kRows, num_rows));
  }
}

}  // namespace qkv::cuda::gather
