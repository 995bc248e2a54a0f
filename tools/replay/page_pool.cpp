#include "page_pool.hpp"

#include <cstddef>

namespace qkv::replay {

PagePool::PagePool(int32_t num_pages) : num_pages_(num_pages) {
  free_.reserve(static_cast<size_t>(num_pages));
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool PagePool::grow(std::vector<int32_t>& pages, int32_t count) {
  const int32_t missing = count - static_cast<int32_t>(pages.size());
  if (missing <= 0) return true;
  if (missing > num_free()) return false;
  pages.insert(pages.end(), free_.rbegin(), free_.rbegin() + missing);
  free_.resize(free_.size() - static_cast<size_t>(missing));
  return true;
}

void PagePool::give_back(std::vector<int32_t>& pages) {
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  pages.clear();
}

}  // namespace qkv::replay
