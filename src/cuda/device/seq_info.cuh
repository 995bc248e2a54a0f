// Where a request's queries and keys begin, how long they are, and which row of a work item is which token and head.
// Segments, pages and rows number the keys that the layer is shown; lengths and positions are those of whole requests.
#pragma once

#include "params.hpp"

namespace qkv::cuda {

struct SeqInfo {
  int token_begin;      // the request's first new token among all new tokens
  int q_len;            // new tokens
  int kv_len;           // keys of the request, cached and new, shown or not
  long long key_begin;  // paged: first entry in ForwardParams::pages; dense: first key

  __device__ __forceinline__ SeqInfo(const ForwardParams& params, int request)
      : token_begin(params.query_start_loc[request]),
        q_len(params.query_start_loc[request + 1] - token_begin),
        kv_len(params.seq_lens[request]),
        key_begin(params.page_start[request]) {}

  __device__ __forceinline__ SeqInfo(int of_token_begin, int of_q_len, int of_kv_len, long long of_key_begin)
      : token_begin(of_token_begin), q_len(of_q_len), kv_len(of_kv_len), key_begin(of_key_begin) {}

  __device__ __forceinline__ int q_pos(int query) const { return query + kv_len - q_len; }
};

// A packed row: row = token·group_size + head of the group.
struct RowInfo {
  int query;   // new token of the request
  int q_head;  // among all query heads

  template <int kGroupSize>
  static __device__ __forceinline__ RowInfo of(const WorkItem& item, int row) {
    return {item.query_begin + row / kGroupSize, item.kv_head * kGroupSize + row % kGroupSize};
  }
};

}  // namespace qkv::cuda
