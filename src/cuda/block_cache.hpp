// Blocks of device memory that their owners have given back, kept for the next owner: getting memory from the driver
// and returning it takes longer than all else of a plan. Knows sizes and addresses only; its owner calls the driver.
//
// A block is given only to the stream that it came from. Work of the earlier owner that still runs there stands in
// front of all that the later one does.
#pragma once

#include <cstddef>
#include <list>
#include <optional>
#include <vector>

#include "jit/cuda_api.hpp"

namespace qkv::cuda {

struct Block {
  jit::CUdeviceptr address = 0;
  size_t bytes = 0;
};

class BlockCache {
 public:
  explicit BlockCache(size_t max_kept_bytes) : max_kept_bytes_(max_kept_bytes) {}

  // What to ask the driver for where no block is kept: a quarter more, so that a slowly growing need finds one next
  // time.
  static size_t bytes_to_ask(size_t bytes);

  // The smallest kept block that holds `bytes` and is at most twice what bytes_to_ask says.
  std::optional<Block> take(size_t bytes, jit::CUstream stream);
  // Keeps the block. Those that then exceed the limit, oldest first, are returned: the caller frees them.
  std::vector<Block> give(Block block, jit::CUstream stream);
  // All that is kept, for the caller to free.
  std::vector<Block> drain();

  size_t kept_bytes() const { return kept_bytes_; }

 private:
  struct Kept {
    Block block;
    jit::CUstream stream;
  };
  size_t max_kept_bytes_;
  size_t kept_bytes_ = 0;
  std::list<Kept> kept_;  // oldest first; a handful
};

}  // namespace qkv::cuda
