// How warps share the rows of new tokens that are quantised, those of keys and of values: a warp takes one of the rows
// that every token has, of several tokens in a row. Each lane finds out about one of them, then teams of lanes go over
// the columns, a team a row. Included by host and device code.
#pragma once

#include "core/index/row_lanes.hpp"

namespace qkv::index {

constexpr int kQuantisingWarps = 8;  // of a CTA
constexpr int kElementsOfPiece = 8;  // 16 bytes of a 16-bit format become 8
constexpr int kPiecesOfQuantisingLane = 2;
constexpr int kMostPiecesOfQuantisingLane = 3;  // where 2 do not hold the row: of up to 768 elements

QKV_HOST_DEVICE constexpr int quantising_pieces_of_lane(int num_pieces) {
  return num_pieces <= kMostLanes * kPiecesOfQuantisingLane ? kPiecesOfQuantisingLane : kMostPiecesOfQuantisingLane;
}
QKV_HOST_DEVICE constexpr int quantising_log2_lanes(int num_pieces) {
  return log2_lanes_that_hold(num_pieces, quantising_pieces_of_lane(num_pieces));
}
// At least: a grid has no more warps than that takes.
QKV_HOST_DEVICE constexpr int tokens_of_quantising_warp(int num_pieces) {
  return least_rows_of_warp(quantising_log2_lanes(num_pieces));
}

}  // namespace qkv::index
