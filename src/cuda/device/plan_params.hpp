// What the planner kernels are given. Compiled by the host compiler and by NVRTC.
#pragma once

#include "core/index/split.hpp"
#include "few_rows_params.hpp"
#include "params.hpp"

namespace qkv::cuda {

// Which kernel runs a block of rows: one of the few-rows tiles, or
constexpr int kListFewRows = kFewRowsTiles;  // the sm_80 kernel's few rows
constexpr int kListManyRows = kListFewRows + 1;
constexpr int kNumLists = kListManyRows + 1;

// Query rows of one request that are worked on together, for any KV head. What lies in `place`, `segment_begin`,
// `merge` and `state_row` counts from the first block of the warp's share.
struct PlanBlock {
  long long page_start;  // as in FewRowsItem
  int request;
  int query_begin, query_end;
  int list;
  int bin;            // of the list
  int num_splits;     // in which the rows see a key
  int segment_begin;  // in PlanArrays::segments
  int place;          // of the first item in its bin
  int merge;          // of KV head 0: ticket or merge item; -1 = none
  int state_row;      // of KV head 0
};

// The planner's own memory, that of a CTA. A warp takes turns at the requests, then a share of the blocks.
constexpr int kPlannerWarps = 8;
constexpr int kPlannerThreads = 32 * kPlannerWarps;
constexpr int kCostClasses = 40;  // powers of two of row x key pairs
constexpr int kSizeClasses = 4;   // items that stand side by side: 8, 4, 2, 1
constexpr int kBins = kCostClasses * kSizeClasses;

struct RequestSums {
  long long keys;
  int blocks;
};

struct BlockSums {
  long long state_rows;
  int segments, tickets, merges;
};

struct PlannerMemory {
  BlockSums block_sums[kPlannerWarps];           // of a share; then of those before it
  RequestSums request_sums[2][kPlannerWarps];    // of a warp's turn: while some still read one, others write the next
  int places[kPlannerWarps][kNumLists * kBins];  // that a share's blocks take in a bin; then those of shares before it
  int bin_begin[kNumLists * kBins];
  BlockSums total;
  int num_items[kNumLists];
};

// CTAs that plan where the blocks of a batch may be too many for a CTA's memory: each has room for them elsewhere.
constexpr int kPlannersWithRoomOfTheirOwn = 16;

// Where the plan goes, and how much room there is.
struct PlanArrays {
  PlanCounts* counts;
  int* cta_begin;
  long long* key_start;
  long long* page_start;
  int* tickets;
  MergeItem* merges;
  WorkItem* few_rows;
  WorkItem* many_rows;
  FewRowsItem* few_rows_sm90[kFewRowsTiles];
  KeySegment* segments;
  PlanBlock* blocks;  // [grid, max_blocks]; nullptr: they lie behind the CTA's PlannerMemory
  int max_blocks, max_segments, max_tickets, max_merges, max_state_rows;
  int max_items[kNumLists];
};

struct PlanBatchParams {
  ForwardParams forward;  // of the batch: query_start_loc, seq_lens, mask_operands
  int num_requests;
  int num_slots;
  long long block_table_stride;
  int max_query_len, max_seq_len;
  bool few_rows_sm90;
  int num_ctas;  // that share the items of many rows; 0 = they stand in one list
  index::CutRules rules;
  PlanArrays arrays;
};

}  // namespace qkv::cuda
