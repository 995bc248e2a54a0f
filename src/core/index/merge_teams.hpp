// How lanes share rows when states are merged. Included by host and device code.
#pragma once

#include "core/index/row_lanes.hpp"

namespace qkv::index {

constexpr int kMergingThreads = 128;
constexpr int kMergedColumns = 8;  // that a lane holds: 16 bytes of 16-bit columns

// The lanes of a row: as many as hold it whole, a warp at most, which takes turns.
QKV_HOST_DEVICE constexpr int merging_lanes(int head_dim_v) {
  return lanes_that_hold((head_dim_v + kMergedColumns - 1) / kMergedColumns, 1);
}

QKV_HOST_DEVICE constexpr int merging_rows(int head_dim_v) { return kMergingThreads / merging_lanes(head_dim_v); }

}  // namespace qkv::index
