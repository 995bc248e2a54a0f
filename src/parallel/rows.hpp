// Rows in the memory of one device, moved for ranks that share the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "qkv/device.hpp"

namespace qkv::parallel {

using Rows = std::vector<const std::byte*>;  // [num_ranks]: the row that each rank sends to this one

// Sums in the order of ranks, so that the bits are the same wherever the sum is taken.
void sum_rows(const Rows& rows, float* sum, int64_t row_elements);

// Of one rank. prepare, then, when all ranks have prepared, gather or sum, then, when all have done that, release.
class RowMover {
 public:
  virtual ~RowMover() = default;
  // This rank's rows can be read by whoever comes after; throws if the stream cannot be used.
  virtual void prepare(Stream stream) = 0;
  virtual void gather(const Rows& rows, std::byte* receive, int64_t row_bytes, Stream stream) = 0;
  virtual void sum(const Rows& rows, float* receive, int64_t row_elements, Stream stream) = 0;
  // Work after this may overwrite this rank's rows.
  virtual void release(Stream stream) = 0;
};

std::unique_ptr<RowMover> cpu_row_mover();
// One a rank, for ranks that share a GPU.
std::vector<std::unique_ptr<RowMover>> cuda_row_movers(int32_t num_ranks, int32_t device_index);

}  // namespace qkv::parallel
