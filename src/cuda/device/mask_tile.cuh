// What the mask functions are given. A kernel's text includes this before the generated functions
//     __device__ __forceinline__ bool visible(const MaskContext& m, int q_pos, int kv_pos, int q_head, int query)
//     __device__ __forceinline__ TileClass classify(const MaskContext& m, int q_low, int q_high, int kv_low,
//                                                   int kv_high)
// which lie in qkv::cuda, too. The first is called with tokens and keys that the request has, and no others; the second
// tells what it would say of a range of each (both ends belong to it): empty and full are certain.
#pragma once

#include "key_positions.cuh"
#include "params.hpp"
#include "seq_info.cuh"

namespace qkv::cuda {

enum class TileClass { empty, partial, full };

enum MaskScope { kMaskScopeRequest = 0, kMaskScopeQuery = 1, kMaskScopeKey = 2 };

struct MaskContext {
  int request;
  int q_len;
  int kv_len;
  int rank;
  const int* operand[key::num_mask_operands > 0 ? key::num_mask_operands : 1];  // at the request's own values

  __device__ __forceinline__ MaskContext(const ForwardParams& params, const SeqInfo& seq, int of_request)
      : request(of_request), q_len(seq.q_len), kv_len(seq.kv_len), rank(params.rank), operand{} {
#pragma unroll
    for (int i = 0; i < key::num_mask_operands; ++i) {
      const int scope = key::mask_scope[i];
      const long long first = scope == kMaskScopeRequest ? of_request
                              : scope == kMaskScopeQuery ? seq.token_begin
                                                         : params.key_start[of_request];
      operand[i] = params.mask_operands[i] + first;
    }
  }
};

// Of a shown key. A template, so that texts without a mask need no visible().
template <typename Context>
__device__ __forceinline__ bool is_visible(const Context& context, int q_pos, int shown, const RowInfo& row) {
  if constexpr (key::mask) {
    return visible(context, q_pos, kv_pos_of(context.rank, context, shown), key::mask_by_head ? row.q_head : 0,
                   row.query);
  }
  return true;
}

// Of shown keys, whose positions rise: what is proved of all between the first and the last is proved of them.
template <typename Context>
__device__ __forceinline__ TileClass classify_range(const Context& context, int q_low, int q_high, int shown_low,
                                                    int shown_high) {
  if constexpr (key::mask) {
    return classify(context, q_low, q_high, kv_pos_of(context.rank, context, shown_low),
                    kv_pos_of(context.rank, context, shown_high));
  }
  return TileClass::full;
}

}  // namespace qkv::cuda
