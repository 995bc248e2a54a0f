// What the few-rows kernel is given. Compiled by the host compiler and by NVRTC; strides are in elements.
#pragma once

#include "core/index/host_device.hpp"
#include "params.hpp"

namespace qkv::cuda {

constexpr int kFewRowsTiles = 4;  // 4, 8, 16, 32 packed rows

// A request's packed query rows for one KV head x one split of its keys. One cache line that holds all that
// the first loads need, so that they hang on two look-ups only (this line, the page numbers).
struct alignas(64) FewRowsItem {
  int request;
  int kv_head;                     // -1: nothing to do
  int query_begin, query_end;      // new tokens of the request
  int query_token;                 // row of query_begin in `query` and `out`
  int cached_keys;                 // kv_len - q_len: query i stands at i + cached_keys
  int segment_begin, segment_end;  // the split's range in ForwardParams::segments; empty = the rows see nothing
  KeySegment first;                // copy of the segment at segment_begin; {0, 0, 1} if there is none
  int ticket;                      // whose states join: index into FewRowsParams::tickets, or -1
  long long page_start;            // paged: first entry in ForwardParams::pages; dense: first key in `key`
  int state_row;                   // the split's first row in state_out; not used by splits that join in a cluster
  short split;                     // which of the
  short num_splits;                // splits of these rows; 0 = the state is wanted, others join it
};

// Fills a cluster up. An item's first keys are looked up before it is seen whether it has any: this one has no
// segments.
QKV_HOST_DEVICE constexpr FewRowsItem nothing_to_do() {
  FewRowsItem item{};
  item.kv_head = -1;
  return item;
}

// How an item ends:
//   num_splits 1              writes out and lse
//   num_splits 0              writes its state to state_row
//   num_splits n, ticket >= 0 writes its state; whoever is last joins the n states, which lie one after another
//   num_splits n, ticket -1   items i - split … i - split + n - 1 lie in one cluster and exchange their states there
// Of shared rows (a launch of its own): queries [query_begin, query_end) are tokens query_token … of the launch's
// SharedTokens, which say where the states of each run go and by which ticket they join. `request` is one of theirs.
struct FewRowsParams {
  ForwardParams forward;  // its `items` and `num_items` are not used
  const FewRowsItem* items;
  const int* num_items;  // on the device; whole clusters
  int* tickets;          // zero before the launch, and after it
};

}  // namespace qkv::cuda
