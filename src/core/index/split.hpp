// How many rows and keys a work item covers. Rules that see only the layer and the request's own lengths, so that a
// request's bits never depend on its batch. Shared by host and device planners.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// New tokens an item of many rows covers: about `rows_per_item` packed rows, fewer where the request alone would not
// keep a large machine busy, but whole query tiles.
constexpr int kItemsWanted = 32;

QKV_HOST_DEVICE constexpr int tokens_per_item(long long num_rows, int num_kv_heads, int group_size, int rows_per_item,
                                              int tile_q) {
  constexpr long long kMost = 0x7fffffff;
  const long long even_share = num_rows * num_kv_heads / kItemsWanted;
  long long rows = static_cast<int>(even_share < kMost ? even_share : kMost) / tile_q * static_cast<long long>(tile_q);
  if (rows < tile_q) rows = tile_q;
  if (rows > rows_per_item) rows = rows_per_item;
  return group_size >= rows ? 1 : static_cast<int>(rows / group_size);
}

// Tokens of a request's first item: what its other items, of `tokens` each, leave over. Under a causal mask the first
// rows see the fewest keys, and a tile costs alike however many of its rows are used.
QKV_HOST_DEVICE constexpr int first_item_tokens(int q_len, int tokens) {
  const int rest = tokens > 0 ? q_len % tokens : 0;
  return rest > 0 ? rest : tokens;
}

// Keys of a split for requests of few rows, on an absolute grid: fewer KV heads need more splits to fill a machine.
QKV_HOST_DEVICE constexpr int few_rows_split_keys(int num_kv_heads) {
  return num_kv_heads <= 1 ? 512 : num_kv_heads <= 4 ? 1024 : 2048;
}

constexpr int kNoSplit = 0x7fffffff;

// Keys of a split, or no split where the rows alone give enough items. Row counts are of the whole request.
QKV_HOST_DEVICE constexpr int split_keys(long long num_rows, int num_kv_heads, int few_rows, int rows_per_item) {
  if (num_rows <= few_rows) return few_rows_split_keys(num_kv_heads);
  if (num_rows <= rows_per_item) return 4 * few_rows_split_keys(num_kv_heads);
  return kNoSplit;
}

// Splits begin where tiles do.
QKV_HOST_DEVICE constexpr int whole_tiles(int split_keys, int tile_kv) {
  return split_keys == kNoSplit ? split_keys : (split_keys + tile_kv - 1) / tile_kv * tile_kv;
}

// How one request is cut.
struct RequestCut {
  bool few_rows;   // which of the engine's two kernels runs
  int tokens;      // new tokens of an item, at most
  int tile_kv;     // segments begin at its multiples
  int split_keys;  // splits end at its multiples; kNoSplit = no split
  int tile_q = 0;  // which of the kernel's ways with so many rows; 0 = it has one for all
};

// An engine's two kernels, as the rules above see them.
struct CutRules {
  int num_kv_heads;
  int group_size;
  int few_rows;          // packed rows of a request up to which the few-rows kernel runs
  int few_rows_tile_kv;  // its keys a tile
  int tile_kv;           // the many-rows kernel's
  int tile_q;            // packed rows of its query tile: items are cut near multiples of it
  int rows_per_item;     // packed rows of an item, at most (one token's heads may exceed it)
};

QKV_HOST_DEVICE constexpr RequestCut cut_request(const CutRules& rules, int q_len) {
  const long long num_rows = static_cast<long long>(q_len) * rules.group_size;
  const bool few_rows = num_rows <= rules.few_rows;
  const int tile_kv = few_rows ? rules.few_rows_tile_kv : rules.tile_kv;
  const int keys = split_keys(num_rows, rules.num_kv_heads, rules.few_rows, rules.rows_per_item);
  const int tokens =
      few_rows ? q_len
               : tokens_per_item(num_rows, rules.num_kv_heads, rules.group_size, rules.rows_per_item, rules.tile_q);
  return {few_rows, tokens, tile_kv, whole_tiles(keys, tile_kv)};
}

// The end of the split that holds `position`: splits lie on absolute multiples of split_keys.
QKV_HOST_DEVICE constexpr int split_end(int position, int split_keys, int kv_end) {
  if (split_keys == kNoSplit) return kv_end;
  const long long end = (position / split_keys + 1LL) * split_keys;
  return end < kv_end ? static_cast<int>(end) : kv_end;
}

// The same, for who walks the splits in rising order: `end_before` is the end of an earlier one, or 0. Neighbours need
// no division, which a thread of a GPU waits for.
QKV_HOST_DEVICE constexpr int next_split_end(int position, int end_before, int split_keys, int kv_end) {
  if (position != end_before) return split_end(position, split_keys, kv_end);
  return kv_end - position > split_keys ? position + split_keys : kv_end;
}

}  // namespace qkv::index
