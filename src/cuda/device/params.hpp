// What kernels are given. Compiled by the host compiler and by NVRTC; strides are in elements.
#pragma once

namespace qkv::cuda {

constexpr int kMaxMaskOperands = 8;

// A run of shown keys: begins at a multiple of the key's tile_kv; full = every row of the item sees all of it.
struct KeySegment {
  int begin;
  int end;
  int full;
};

// Query rows x a run of keys.
struct WorkItem {
  int request;
  int kv_head;
  int query_begin, query_end;      // new tokens of the request; rows are these x the heads of the group
  int segment_begin, segment_end;  // range in ForwardParams::segments; empty = the rows see nothing
  long long state_row;             // first row in the partial states; -1 = the item finishes its rows
};

// One token of an item whose keys several requests share: the item's rows are its tokens x the heads of the group. The
// tokens of one request stand side by side, a run; what is said of the run, its first token says.
struct alignas(16) SharedToken {
  int request;
  int query;         // new token of the request
  int token;         // its row in `query` and `out`
  int position;      // among the request's keys
  int state_row;     // of its first head, in the partial states
  int run_tokens;    // of the run that begins here; 0 = it has begun before
  int ticket;        // of the run: where its states are counted
  short split;       // which of the
  short num_splits;  // splits of the run's rows
};

// How many there are of each in the batch at hand: what a captured launch can't be told when it is captured.
struct PlanCounts {
  int few_rows_sm90[4];  // by query tile: 4, 8, 16, 32 packed rows
  int few_rows;
  int many_rows;
  int merges;
  int slots;
  int shared_sm90[4];  // items of shared rows, by the tile of a request's rows
  int shared_few_rows;
  int blocks;   // of rows, where the device made the plan
  int refused;  // 1: the batch does not fit; then all else is 0
};

// Where keys (or values) lie. Paged: [page][token][head][dim]; dense: page_stride is unused.
struct KeyValueLayout {
  const void* data;
  long long page_stride;
  long long token_stride;
  long long head_stride;
};

// What rows of 8-bit keys (or values, or queries) are multiplied by; what an axis does not tell apart has stride 0.
// Without scales data is nullptr.
struct KeyValueScales {
  float* data;
  long long request_stride, page_stride, token_stride, head_stride;
};

// What rows of 8-bit outputs are divided by: data[0], or a scale a group of index::kScaleGroup columns, which is chosen
// and written to data[token, head, group]. For other outputs data is nullptr.
struct OutputScaleLayout {
  float* data;
  int of_groups;
  long long token_stride, head_stride, group_stride;
};

struct ForwardParams {
  const void* query;  // [num_tokens, num_q_heads, head_dim]
  long long query_token_stride, query_head_stride;
  KeyValueLayout key, value;
  const int* pages;             // pages of all requests, one after another
  const long long* page_start;  // [num_requests] into `pages`; dense: first key of the request in `key`
  int page_size;
  int rank;  // whose keys the layer is shown, of key::num_ranks

  const int* query_start_loc;  // [num_requests + 1]
  const int* seq_lens;         // [num_requests]: of whole requests, whichever keys are shown
  const WorkItem* items;
  const int* num_items;  // on the device, so that a captured launch serves every batch
  const KeySegment* segments;

  float query_factor;         // scores are (query · key)·query_factor: in log2 units, or in units of the softcap
  float softcap_log2;         // 0 = off
  const float* alibi_slopes;  // [num_q_heads], per request alibi_request_stride apart; nullptr = none
  long long alibi_request_stride;
  const float* sinks;                          // [num_q_heads], nullptr = none
  const int* mask_operands[kMaxMaskOperands];  // as in the batch: [num_requests], [num_tokens] or [num_keys]
  const long long* key_start;                  // [num_requests]: first value of the request in operands of scope key

  void* out;  // [num_tokens, num_q_heads, head_dim_v]
  long long out_token_stride, out_head_stride;
  float* lse;  // [num_q_heads, num_tokens], nullptr = not wanted
  long long lse_head_stride, lse_token_stride;
  float* state_out;  // [state rows, head_dim_v], means
  float* state_lse;  // [state rows], natural

  KeyValueScales key_scale, value_scale;
  OutputScaleLayout out_scale;
  KeyValueScales query_scale;  // of 8-bit queries
};

// Joins the states of one row block, in rising order of keys: the plan's.
struct MergeItem {
  int request;
  int kv_head;
  int query_begin, query_end;
  int num_states;  // state s begins at state_row + s·rows
  long long state_row;
};

struct MergePlanParams {
  const MergeItem* items;
  const int* num_items;     // on the device
  const float* states;      // [state rows, head_dim_v], means
  const float* states_lse;  // [state rows], natural
  int group_size;
  int head_dim_v;
  const int* query_start_loc;  // [num_requests + 1]
  const float* sinks;          // [num_q_heads], nullptr = none

  int out_dtype;  // 0 f32, 1 f16, 2 bf16, 3 f8e4m3, 4 f8e5m2
  OutputScaleLayout out_scale;
  void* out;  // [num_tokens, num_q_heads, head_dim_v]
  long long out_token_stride, out_head_stride;
  float* lse;  // [num_q_heads, num_tokens], nullptr = not wanted
  long long lse_head_stride, lse_token_stride;
};

// A state, or the place of a merged one. lse may be nullptr for the latter.
struct StateView {
  void* out;  // [num_tokens, num_heads, head_dim_v]; nullptr: all 0
  long long out_token_stride, out_head_stride;
  float* lse;  // [num_heads, num_tokens]
  long long lse_head_stride, lse_token_stride;
  int dtype;  // of out: as in MergePlanParams
};

constexpr int kMaxInlineStates = 16;

struct MergeStatesParams {
  StateView inline_states[kMaxInlineStates];
  const StateView* states;  // on the device, for more states than fit above; else nullptr
  int num_states;
  StateView merged;
  OutputScaleLayout out_scale;
  long long num_tokens;
  int num_heads;
  int head_dim_v;
};

// One of keys and values: new tokens, and the pages that they are written to.
struct CacheWriteSide {
  const void* source;  // [num_slots, num_kv_heads, head_dim]
  long long source_token_stride, source_head_stride;
  void* pages;  // [num_pages, page_size, num_kv_heads, head_dim]
  long long page_stride, token_stride, head_stride;
  int source_dtype, pages_dtype;  // 0 f32, 1 f16, 2 bf16, pages also 3 f8e4m3, 4 f8e5m2, 5 i8
  int head_dim;
};

struct CacheWriteParams {
  CacheWriteSide sides[2];  // keys, values
  const long long* slots;   // of tokens, -1 = nowhere
  const int* num_slots;     // on the device; nullptr: most_slots
  int most_slots;
  int num_kv_heads;
  int page_size;
  // Of 8-bit pages.
  KeyValueScales scales[2];
  const int* slot_requests;  // of tokens, where scales are of requests
  int token_scales;          // 1: chosen here, and written
  int tokens_of_warp;        // of so many slots as there may be: index::rows_of_warp
};

// Rows [row_start[i], row_start[i + 1]) become the tokens of run i, which begin first_offset[i] into its first page.
struct CacheGatherParams {
  KeyValueLayout pages;  // [num_pages, page_size, num_heads, head_dim]
  void* rows;            // [num rows, num_heads, head_dim]
  long long row_stride, row_head_stride;
  const int* page_numbers;      // pages of all runs, one after another
  const long long* page_start;  // [num_runs] into page_numbers
  const int* first_offset;      // [num_runs]
  const long long* row_start;   // [num_runs + 1]
  int num_heads;
  int head_dim;
  int page_size;
  int element_bytes;  // of both, where bits are kept
  // Where 8-bit pages are widened:
  int pages_dtype, rows_dtype;  // 3 f8e4m3, 4 f8e5m2 or 5 i8; 0 f32, 1 f16 or 2 bf16
  const float* scale;           // rows are elements · *scale
};

}  // namespace qkv::cuda
