// Which tokens of a sequence a rank keeps when ranks share a cache: runs of interleave_size tokens go round the ranks,
// rank 0 first. Included by host and device code.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

QKV_HOST_DEVICE constexpr int rank_of_token(int position, int num_ranks, int interleave_size) {
  return position / interleave_size % num_ranks;
}

// Where a token lies among those that its rank keeps.
QKV_HOST_DEVICE constexpr int local_position(int position, int num_ranks, int interleave_size) {
  const int round = interleave_size * num_ranks;
  return position / round * interleave_size + position % interleave_size;
}

// Where a rank's token sits in the sequence: the inverse of local_position.
QKV_HOST_DEVICE constexpr int position_of_local(int local, int rank, int num_ranks, int interleave_size) {
  return (local / interleave_size * num_ranks + rank) * interleave_size + local % interleave_size;
}

// How many of the first num_tokens a rank keeps. Rank 0 keeps the most.
QKV_HOST_DEVICE constexpr int local_length(int num_tokens, int rank, int num_ranks, int interleave_size) {
  const int round = interleave_size * num_ranks;
  const int in_last_round = num_tokens % round - rank * interleave_size;
  const int last_run = in_last_round < 0 ? 0 : in_last_round > interleave_size ? interleave_size : in_last_round;
  return num_tokens / round * interleave_size + last_run;
}

}  // namespace qkv::index
