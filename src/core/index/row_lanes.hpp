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

// Rows of a warp that finds out about them first, a lane a row, and then goes over them in teams of 2^log2_lanes, a
// multiple of those that it goes over at once. The first part costs the same for one row and for 32. At least: few, so
// that small batches fill a machine.
QKV_HOST_DEVICE constexpr int least_rows_of_warp(int log2_lanes) {
  const int at_once = kMostLanes >> log2_lanes;
  return at_once < 8 ? 8 : at_once;
}

// Rows of the warp that has most, where num_warps take turns at runs of so many tokens' rows of one kind each.
QKV_HOST_DEVICE constexpr unsigned rows_of_busiest_warp(unsigned rows, unsigned num_tokens, unsigned kinds,
                                                        unsigned num_warps) {
  const unsigned runs = (num_tokens + rows - 1) / rows * kinds;
  return (runs + num_warps - 1) / num_warps * rows;
}

// As many as a lane each, where the busiest warp then has no more rows in all: large batches.
QKV_HOST_DEVICE constexpr int rows_of_warp(int log2_lanes, int num_tokens, int kinds, int num_warps) {
  int rows = least_rows_of_warp(log2_lanes);
  while (rows < kMostLanes && rows_of_busiest_warp(2 * rows, num_tokens, kinds, num_warps) <=
                                  rows_of_busiest_warp(rows, num_tokens, kinds, num_warps)) {
    rows *= 2;
  }
  return rows;
}

// The same, or fewer where so many would leave warps without any row of all there are.
QKV_HOST_DEVICE constexpr int fewer_rows_of_warp(int rows, int log2_lanes, unsigned all_rows, unsigned num_warps) {
  while (rows > least_rows_of_warp(log2_lanes) && all_rows <= rows / 2 * num_warps) rows /= 2;
  return rows;
}

}  // namespace qkv::index
