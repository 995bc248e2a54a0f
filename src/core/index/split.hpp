// How many rows and keys a work item covers. Rules that see only the layer and the request's own lengths, so that a
// request's bits never depend on its batch. Shared by host and device planners.
#pragma once

#include <cstdint>

namespace qkv::index {

// New tokens an item of many rows covers: about `rows_per_item` packed rows, fewer where the request alone would not
// keep a large machine busy, but whole query tiles.
constexpr int32_t kItemsWanted = 32;

constexpr int32_t tokens_per_item(int64_t num_rows, int32_t num_kv_heads, int32_t group_size, int32_t rows_per_item,
                                  int32_t tile_q) {
  const int64_t even_share = num_rows * num_kv_heads / kItemsWanted;
  int64_t rows = (even_share / tile_q) * tile_q;
  if (rows < tile_q) rows = tile_q;
  if (rows > rows_per_item) rows = rows_per_item;
  return group_size >= rows ? 1 : static_cast<int32_t>(rows / group_size);
}

// Tokens of a request's first item: what its other items, of `tokens` each, leave over. Under a causal mask the first
// rows see the fewest keys, and a tile costs alike however many of its rows are used.
constexpr int32_t first_item_tokens(int32_t q_len, int32_t tokens) {
  const int32_t rest = tokens > 0 ? q_len % tokens : 0;
  return rest > 0 ? rest : tokens;
}

// Keys of a split for requests of few rows, on an absolute grid: fewer KV heads need more splits to fill a machine.
constexpr int32_t few_rows_split_keys(int32_t num_kv_heads) {
  return num_kv_heads <= 1 ? 512 : num_kv_heads <= 4 ? 1024 : 2048;
}

// Keys of a split, or no split (INT32_MAX) where the rows alone give enough items. Row counts are of the whole request.
constexpr int32_t split_keys(int64_t num_rows, int32_t num_kv_heads, int32_t few_rows, int32_t rows_per_item) {
  if (num_rows <= few_rows) return few_rows_split_keys(num_kv_heads);
  if (num_rows <= rows_per_item) return 4 * few_rows_split_keys(num_kv_heads);
  return INT32_MAX;
}

// Splits begin where tiles do.
constexpr int32_t whole_tiles(int32_t split_keys, int32_t tile_kv) {
  return split_keys == INT32_MAX ? split_keys : (split_keys + tile_kv - 1) / tile_kv * tile_kv;
}

// How one request is cut.
struct RequestCut {
  bool few_rows;       // which of the engine's two kernels runs
  int32_t tokens;      // new tokens of an item, at most
  int32_t tile_kv;     // segments begin at its multiples
  int32_t split_keys;  // splits end at its multiples; INT32_MAX = no split
};

// An engine's two kernels, as the rules above see them.
struct CutRules {
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t few_rows;          // packed rows of a request up to which the few-rows kernel runs
  int32_t few_rows_tile_kv;  // its keys a tile
  int32_t tile_kv;           // the many-rows kernel's
  int32_t tile_q;            // packed rows of its query tile: items are cut near multiples of it
  int32_t rows_per_item;     // packed rows of an item, at most (one token's heads may exceed it)
};

constexpr RequestCut cut_request(const CutRules& rules, int32_t q_len) {
  const int64_t num_rows = static_cast<int64_t>(q_len) * rules.group_size;
  const bool few_rows = num_rows <= rules.few_rows;
  const int32_t tile_kv = few_rows ? rules.few_rows_tile_kv : rules.tile_kv;
  const int32_t keys = split_keys(num_rows, rules.num_kv_heads, rules.few_rows, rules.rows_per_item);
  const int32_t tokens =
      few_rows ? q_len
               : tokens_per_item(num_rows, rules.num_kv_heads, rules.group_size, rules.rows_per_item, rules.tile_q);
  return {few_rows, tokens, tile_kv, whole_tiles(keys, tile_kv)};
}

// The end of the split that holds `position`: splits lie on absolute multiples of split_keys.
constexpr int32_t split_end(int32_t position, int32_t split_keys, int32_t kv_end) {
  if (split_keys == INT32_MAX) return kv_end;
  const int64_t end = (static_cast<int64_t>(position) / split_keys + 1) * split_keys;
  return end < kv_end ? static_cast<int32_t>(end) : kv_end;
}

}  // namespace qkv::index
