// One step's requests: prefill and decode mixed in any order.
#pragma once

#include <vector>

#include "qkv/mask.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

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
};

}  // namespace qkv
