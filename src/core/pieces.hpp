// Places in one workspace, handed out one after another. Sizes are asked for by the same walk that lays a call out.
#pragma once

#include <cstdint>

namespace qkv {

class Pieces {
 public:
  static constexpr int64_t kAlignment = 256;  // of every piece, where the workspace's beginning has it

  // The offset of a piece of so many bytes.
  int64_t add(int64_t num_bytes) {
    const int64_t begin = end_;
    end_ += (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

}  // namespace qkv
