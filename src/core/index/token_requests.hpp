// Whose token is it? Included by host and device code.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// The request r with query_start_loc[r] <= token < query_start_loc[r + 1]: [num_requests + 1] prefix sums from 0, the
// last one above `token`. Requests without tokens own none.
QKV_HOST_DEVICE constexpr int request_of_token(const int* query_start_loc, int num_requests, long long token) {
  int first = 0;
  int last = num_requests - 1;
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (query_start_loc[middle + 1] > token) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

}  // namespace qkv::index
