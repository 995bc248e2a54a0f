// What the kernel of QKV_CHECK is given, and what it finds.
#pragma once

#include "core/index/shown_keys.hpp"

namespace qkv::cuda {

// The least index at which each array is wrong; ~0 = nowhere. An atomic minimum over threads, so the same each time.
struct FirstBad {
  unsigned long long length;  // request
  unsigned long long entry;   // of `pages`
  unsigned long long slot;    // row of slot_mapping
};

struct CheckIndicesParams {
  const int* seq_lens;          // [num_requests]
  const long long* page_start;  // [num_requests] into `pages`
  const int* pages;             // [num_entries]
  int num_requests;
  int page_size;
  long long num_entries;
  long long num_pages;  // of the cache

  const long long* slots;  // [num_slots]
  long long num_slots;
  long long num_cache_slots;

  FirstBad* found;  // all bits set before

  const int* query_start_loc;  // [num_requests + 1]
  index::ShownKeys keys;       // whose pages these are
};

}  // namespace qkv::cuda
