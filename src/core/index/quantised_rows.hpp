// How a CTA that quantises new tokens shares their rows, those of keys and of values, among teams of lanes: a team
// takes one of the rows that every token has, of several tokens in a row, and holds all of them at once. Included by
// host and device code.
#pragma once

#include "core/index/row_lanes.hpp"

namespace qkv::index {

constexpr int kQuantisingThreads = 256;
constexpr int kElementsOfPiece = 8;  // 16 bytes of a 16-bit format become 8

struct RowTeams {
  int lanes;          // of a team
  int rows_of_token;  // the keys' heads, then the values'
  int tokens_held;    // whose rows a team holds at once

  QKV_HOST_DEVICE constexpr int num_teams() const { return kQuantisingThreads / lanes; }
  // Groups of tokens that a CTA takes in a turn: as many as give each team a row to begin with, one at least.
  QKV_HOST_DEVICE constexpr int groups_of_turn() const {
    return num_teams() < rows_of_token ? 1 : num_teams() / rows_of_token;
  }
  QKV_HOST_DEVICE constexpr int tokens_of_turn() const { return groups_of_turn() * tokens_held; }
  QKV_HOST_DEVICE constexpr int units_of_turn() const { return groups_of_turn() * rows_of_token; }
  // Neighbours are rows of one token, which lie side by side.
  QKV_HOST_DEVICE constexpr int row_of(int unit) const { return unit % rows_of_token; }
  QKV_HOST_DEVICE constexpr int first_token_of(int unit) const { return unit / rows_of_token * tokens_held; }
};

}  // namespace qkv::index
