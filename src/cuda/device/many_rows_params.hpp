// What the sm_90a many-rows kernel is given besides ForwardParams. Compiled by the host compiler and by NVRTC.
#pragma once

namespace qkv::cuda {

// Three tensor maps follow as parameters of their own, all 5-D, of 16-bit elements, with the 128-byte swizzle and
// zeros behind the edge. Dimensions (fastest first; their strides are the tensor's own) and boxes:
//   query  (64, group_size, num_tokens, head_dim/64, num_kv_heads)  box (64, group_size, 64/group_size, head_dim/64, 1)
//   key    (64, tokens, head_dim/64, num_kv_heads, pages)           box (64, box_rows, key_box_blocks, 1, 1)
//   value  (64, tokens, head_dim_v/64, num_kv_heads, pages)         box (64, box_rows, head_dim_v/64, 1, 1)
// tokens and pages: those of a page and of the cache, or, dense, all keys and 1. Where 64 % group_size != 0 the query's
// map is not used. box_rows and key_box_blocks: core/index/forward_sm90_many_rows_shape.hpp.
struct ManyRowsParams {
  const int* cta_begin;  // [grid + 1]: CTA c runs ForwardParams::items[cta_begin[c] … cta_begin[c + 1])
};

}  // namespace qkv::cuda
