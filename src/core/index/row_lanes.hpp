// How the lanes of a warp share rows that are moved in pieces: every lane takes every lanes-th piece of its row.
// Included by host and device code.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

constexpr int kFewestLanes = 8;  // 8 pieces of 16 bytes are a whole line of the cache
constexpr int kMostLanes = 32;

// Places for pieces when so many lanes go over a row: the pieces, and those that idle lanes leave in the last turn.
QKV_HOST_DEVICE constexpr int places_of_row(int num_pieces, int lanes) {
  return (num_pieces + lanes - 1) / lanes * lanes;
}

// How many lanes, a power of two, share a row: as leave the fewest places idle; among those, the most.
QKV_HOST_DEVICE constexpr int lanes_of_row(int num_pieces) {
  int best = kMostLanes;
  for (int lanes = kMostLanes / 2; lanes >= kFewestLanes; lanes /= 2) {
    if (places_of_row(num_pieces, lanes) < places_of_row(num_pieces, best)) best = lanes;
  }
  return best;
}

// How many lanes, 2^this, of at most kMostLanes, hold a row whole when a lane holds so many pieces of it. Rows of more
// than kMostLanes · pieces_of_lane pieces are not held.
QKV_HOST_DEVICE constexpr int log2_lanes_that_hold(int num_pieces, int pieces_of_lane) {
  int log2 = 0;
  while (1 << log2 < kMostLanes && pieces_of_lane << log2 < num_pieces) ++log2;
  return log2;
}
QKV_HOST_DEVICE constexpr int lanes_that_hold(int num_pieces, int pieces_of_lane) {
  return 1 << log2_lanes_that_hold(num_pieces, pieces_of_lane);
}

// Rows of a warp that finds out about them first, a lane a row, and then goes over them in teams of 2^log2_lanes:
// enough for the first part to cost little, few enough for small batches to fill a machine; a multiple of those that it
// goes over at once.
QKV_HOST_DEVICE constexpr int rows_of_warp(int log2_lanes) {
  const int at_once = kMostLanes >> log2_lanes;
  return at_once < 8 ? 8 : at_once;
}

}  // namespace qkv::index
