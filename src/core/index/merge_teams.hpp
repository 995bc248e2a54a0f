// How warps share the rows whose states are merged: each lane finds the weights of one row, then teams of lanes go over
// the columns, a team a row. Included by host and device code.
#pragma once

#include "core/index/row_lanes.hpp"

namespace qkv::index {

constexpr int kMergingWarps = 4;   // of a CTA
constexpr int kMergingCtas = 6;    // of a multiprocessor: for more of them, ptxas spills
constexpr int kMergedColumns = 8;  // that a lane takes at once: 16 bytes of 16 bits

// 2^this lanes hold a row whole, or take turns at it where it is longer than a warp.
QKV_HOST_DEVICE constexpr int merging_log2_lanes(int head_dim_v) {
  return log2_lanes_that_hold((head_dim_v + kMergedColumns - 1) / kMergedColumns, 1);
}
QKV_HOST_DEVICE constexpr int merging_rows_of_warp(int head_dim_v) {
  return least_rows_of_warp(merging_log2_lanes(head_dim_v));
}

}  // namespace qkv::index
