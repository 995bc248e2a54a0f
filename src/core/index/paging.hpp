// Where a token lies in a paged cache. Included by host and device code; includes nothing but integer names.
#pragma once

#include <cstdint>

namespace qkv::index {

constexpr int32_t page_index(int32_t position, int32_t page_size) { return position / page_size; }
constexpr int32_t page_offset(int32_t position, int32_t page_size) { return position % page_size; }
constexpr int32_t num_pages(int32_t num_tokens, int32_t page_size) {
  return num_tokens / page_size + (num_tokens % page_size != 0 ? 1 : 0);
}
constexpr int64_t slot(int64_t page, int32_t offset, int32_t page_size) { return page * page_size + offset; }

}  // namespace qkv::index
