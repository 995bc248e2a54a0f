// QKV_CHECK: looks for indices of a plan on the device that lead outside the cache. Reads nothing through them.
// Any grid of 256 threads: threads stride over the arrays.
#pragma once

#include "check_params.hpp"
#include "core/index/bounds.hpp"

namespace qkv::cuda {

extern "C" __global__ void __launch_bounds__(256) check_indices(const __grid_constant__ CheckIndicesParams params) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long r = first; r < params.num_requests; r += step) {
    const long long end = r + 1 < params.num_requests ? params.page_start[r + 1] : params.num_entries;
    const long long num_pages = end - params.page_start[r];
    const int seq_len = params.seq_lens[r];
    const int q_len = params.query_start_loc[r + 1] - params.query_start_loc[r];
    const bool fits = seq_len >= 0 && index::fits_pages(params.keys.count(q_len, seq_len), num_pages, params.page_size);
    if (!fits) atomicMin(&params.found->length, r);
  }
  for (long long e = first; e < params.num_entries; e += step) {
    if (!index::is_page(params.pages[e], params.num_pages)) atomicMin(&params.found->entry, e);
  }
  for (long long t = first; t < params.num_slots; t += step) {
    if (!index::is_slot_or_none(params.slots[t], params.num_cache_slots)) atomicMin(&params.found->slot, t);
  }
}

}  // namespace qkv::cuda
