// Layers that are shown only some of a request's keys: one rank's share of a cache, the context without the new tokens,
// the new tokens alone. The states that they leave merge into what one layer over all keys gives (merge_states).
//
// Masks, ALiBi and all operands keep the positions of the whole request, and a batch is the same on every rank:
// lengths, operands and prefix groups speak of whole requests. Only block_table and slot_mapping are a rank's own.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "qkv/export.hpp"

namespace qkv {

struct Batch;

// Ranks that share a cache: runs of interleave_size tokens go round the ranks, rank 0 first.
struct Shard {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  int32_t interleave_size = 1;  // divides the page size

  // Which rank keeps the token at a position, and where among its own.
  QKV_EXPORT int32_t rank_of(int32_t position) const;
  QKV_EXPORT int32_t local_position(int32_t position) const;
  // Where this rank's token sits in the request: the inverse of local_position.
  QKV_EXPORT int32_t position(int32_t local) const;
  // How many of a request's first num_tokens this rank keeps; and rank 0, which keeps the most.
  QKV_EXPORT int32_t local_length(int32_t num_tokens) const;
  QKV_EXPORT int32_t max_local_length(int32_t num_tokens) const;

  bool operator==(const Shard&) const = default;
};

// Which of a request's keys a layer is shown.
enum class KeyRun : uint8_t {
  all,
  context,     // without the new tokens
  new_tokens,  // alone: dense keys and values [num_tokens, num_kv_heads, head_dim], a row a new token; every rank has
               // them
};

QKV_EXPORT std::string_view to_string(KeyRun run);

// Slots for update_cache on a rank, one a new token: -1 where another rank keeps it. From the batch's query_start_loc,
// seq_lens and the rank's block_table, whose entry i holds the rank's tokens [i·page_size, (i+1)·page_size). Host
// arrays.
QKV_EXPORT std::vector<int64_t> shard_slots(const Batch& batch, int32_t page_size, const Shard& shard);

}  // namespace qkv
