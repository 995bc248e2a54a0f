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

// Query rows of one request that are worked on together, for any KV head.
struct PlanBlock {
  int request;
  int query_begin, query_end;
  int list;
  int num_splits;     // in which the rows see a key
  int segment_begin;  // in PlanArrays::segments
  int place;          // of the first item in its list
  int merge;          // of KV head 0: ticket or merge item; -1 = none
  int state_row;      // of KV head 0
};

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
  PlanBlock* blocks;
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
