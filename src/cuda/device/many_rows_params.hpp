// What the sm_90a many-rows kernel is given besides ForwardParams. Compiled by the host compiler and by NVRTC.
#pragma once

namespace qkv::cuda {

// Three tensor maps follow as parameters of their own, all 5-D, of 16-bit elements, under the swizzle of c columns (c =
// many_rows_block_columns of the head size) and with zeros behind the edge. Dimensions (fastest first; their strides
// are the tensor's own) and boxes:
//   query  (c, group_size, num_tokens, head_dim/c, num_kv_heads)  box (c, group_size, 64/group_size, head_dim/c, 1)
//   key    (c, tokens, head_dim/c, num_kv_heads, pages)           box (c, box_rows, key_box_blocks, 1, 1)
//   value  (c, tokens, head_dim_v/c, num_kv_heads, pages)         box (c, box_rows, head_dim_v/c, 1, 1)
// tokens and pages: those of a page and of the cache, or, dense, all keys and 1. Where 64 % group_size != 0 the query's
// map is not used. box_rows and key_box_blocks: core/index/forward_sm90_many_rows_shape.hpp.
struct ManyRowsParams {
  const int* cta_begin;  // [grid + 1]: CTA c runs ForwardParams::items[cta_begin[c] … cta_begin[c + 1])
};

}  // namespace qkv::cuda
