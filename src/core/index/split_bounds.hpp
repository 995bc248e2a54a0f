// How many splits the requests of any batch within declared maxima can come to: what buffers are sized by.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// A rule of splits, bounded from above.
struct SplitBounds {
  int of_short;      // of a request of at most of_short·keys_of_long keys, at most
  int keys_of_long;  // of a split of a longer one, at least
  int most;          // of any request
};

QKV_HOST_DEVICE constexpr long long splits_of_request(const SplitBounds& bounds, long long max_seq_len) {
  const long long longest = max_seq_len / bounds.keys_of_long + 1;
  const long long splits = longest < bounds.of_short ? bounds.of_short : longest;
  return splits < bounds.most ? splits : bounds.most;
}

QKV_HOST_DEVICE constexpr long long splits_of_batch(const SplitBounds& bounds, long long num_requests,
                                                    long long max_seq_len, long long num_keys) {
  const long long by_length = num_requests * splits_of_request(bounds, max_seq_len);
  const long long by_keys = num_requests * bounds.of_short + num_keys / bounds.keys_of_long;
  return by_length < by_keys ? by_length : by_keys;
}

}  // namespace qkv::index
