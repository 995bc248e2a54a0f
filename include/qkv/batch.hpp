// One step's requests: prefill and decode mixed in any order.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "qkv/export.hpp"
#include "qkv/mask.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// Requests whose first keys are the same, in the same pages.
struct PrefixGroup {
  std::vector<int32_t> requests = {};  // numbers in the batch, in any order
  int32_t num_tokens = 0;              // how many of their first keys, at most up to any member's first new token
};

// Keys that several requests share may be read once for all of them.
enum class PrefixSharing : uint8_t {
  automatic,  // where the plan's cost model says that it pays
  always,     // wherever two requests or more share the keys of a whole split
  off,
};

QKV_EXPORT std::string_view to_string(PrefixSharing sharing);

struct Batch {
  // i32 [num_requests + 1]: prefix sums of new tokens a request, from 0. Requests without new tokens are ordinary.
  Tensor query_start_loc = {};
  // i32 [num_requests]: keys of each request, cached and new. May be 0. Encoder layers: not given, or the new tokens.
  Tensor seq_lens = {};
  // i32 [num_requests, max_pages]: page numbers by position. Entries past a request's length are never read.
  // Needed by layers with a cache, refused by others.
  Tensor block_table = {};
  // i64 [num_written_tokens]: where update_cache writes each token, page·page_size + offset; -1 = nowhere.
  // Needed for update_cache only.
  Tensor slot_mapping = {};
  // The values of the mask's operands. Operands that the layer's mask does not name are ignored, so that layers of
  // several kinds share one batch.
  std::vector<MaskOperand> mask_operands = {};
  // f32 [num_requests, num_q_heads], for layers with alibi_per_request.
  Tensor alibi_slopes = {};
  PrefixSharing prefix_sharing = PrefixSharing::automatic;
  // True: no bit of the results depends on sharing. False: rows that share keys may be computed by a quicker kernel,
  // and agree within rounding.
  bool prefix_sharing_keeps_bits = true;
  // Shared prefixes, as many as there are; two that have a member in common must be nested. None given: the planner
  // finds them, as equal leading entries of block_table.
  std::vector<PrefixGroup> prefix_groups = {};
};

}  // namespace qkv
