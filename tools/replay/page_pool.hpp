// The pages of a paged cache and its free list.
#pragma once

#include <cstdint>
#include <vector>

namespace qkv::replay {

class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  int32_t num_pages() const { return num_pages_; }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return num_pages_ - num_free(); }

  // Lengthens `pages` to `count` pages. Takes all that this needs or, where too few are free, none and says false.
  bool grow(std::vector<int32_t>& pages, int32_t count);
  void give_back(std::vector<int32_t>& pages);

 private:
  int32_t num_pages_;
  std::vector<int32_t> free_;  // the one given back last is taken first: pages of a request soon lie anywhere
};

}  // namespace qkv::replay
