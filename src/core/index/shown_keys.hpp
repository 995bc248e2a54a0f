// Which of a request's keys a layer is shown, and at which positions they sit. Shown keys are numbered from 0 in rising
// order of positions: those numbers address pages and rows, and split and tile the work; masks and ALiBi see positions.
// Included by host and device code; of constants, all of this folds away for layers that are shown every key.
#pragma once

#include "core/index/host_device.hpp"
#include "core/index/interleave.hpp"

namespace qkv::index {

// qkv::KeyRun, by number.
constexpr int kAllKeys = 0, kContextKeys = 1, kNewTokenKeys = 2;

struct ShownKeys {
  int run = kAllKeys;
  int rank = 0;  // new tokens are not spread over ranks: every rank has them
  int num_ranks = 1;
  int interleave_size = 1;

  // Of a request with q_len new tokens and seq_len keys, these included.
  QKV_HOST_DEVICE constexpr int count(int q_len, int seq_len) const {
    if (run == kNewTokenKeys) return q_len;
    const int context = seq_len > q_len ? seq_len - q_len : 0;
    const int num_tokens = run == kContextKeys ? context : seq_len;
    return num_ranks == 1 ? num_tokens : local_length(num_tokens, rank, num_ranks, interleave_size);
  }

  QKV_HOST_DEVICE constexpr int position(int key, int q_len, int seq_len) const {
    if (run == kNewTokenKeys) return seq_len - q_len + key;
    return num_ranks == 1 ? key : position_of_local(key, rank, num_ranks, interleave_size);
  }

  // How far neighbours are apart; 0 where that differs from key to key.
  QKV_HOST_DEVICE constexpr int stride() const { return num_ranks == 1 ? 1 : interleave_size == 1 ? num_ranks : 0; }
};

}  // namespace qkv::index
