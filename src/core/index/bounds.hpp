// What a plan's index arrays may hold: asked by the kernel of QKV_CHECK, and tested on the host.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

QKV_HOST_DEVICE constexpr bool is_page(int page, long long num_pages) { return 0 <= page && page < num_pages; }

// -1: the token is written nowhere.
QKV_HOST_DEVICE constexpr bool is_slot_or_none(long long slot, long long num_slots) {
  return -1 <= slot && slot < num_slots;
}

// `num_pages`: those that the plan holds of the request.
QKV_HOST_DEVICE constexpr bool fits_pages(long long seq_len, long long num_pages, int page_size) {
  return 0 <= seq_len && seq_len <= num_pages * page_size;
}

}  // namespace qkv::index
