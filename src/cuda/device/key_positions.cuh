// Where the keys that a layer is shown sit in their requests. Asks of the text before it key_run, num_ranks and
// interleave_size in qkv::cuda::key; which of the ranks is an argument.
#pragma once

#include "core/index/shown_keys.hpp"

namespace qkv::cuda {

// Where a shown key sits in its request; `request` has q_len and kv_len. Written out, and not ShownKeys::position, so
// that nothing at all is computed or loaded where every key is shown.
template <typename Request>
__device__ __forceinline__ int kv_pos_of(int rank, const Request& request, int shown) {
  if constexpr (key::key_run == index::kNewTokenKeys) {
    return request.kv_len - request.q_len + shown;
  } else if constexpr (key::num_ranks == 1) {
    return shown;
  } else {
    return index::position_of_local(shown, rank, key::num_ranks, key::interleave_size);
  }
}

// How far behind shown key `first` the key behind it by `offset` sits; `offset` is a constant of an unrolled loop.
__device__ __forceinline__ int position_offset(int rank, int first, int offset) {
  if constexpr (key::num_ranks == 1) {
    return offset;
  } else if constexpr (key::interleave_size == 1) {
    return offset * key::num_ranks;
  } else {
    return index::position_of_local(first + offset, rank, key::num_ranks, key::interleave_size) -
           index::position_of_local(first, rank, key::num_ranks, key::interleave_size);
  }
}

}  // namespace qkv::cuda
