// The planner, first half: how the batch is cut, and where everything goes. One CTA of any size. It reads the batch on
// the device, so that a captured step plans itself; plan_items.cuh then writes the items. Splits and the order of joins
// are those of the host's planner; items stand longest first, in an order of their own.
//
// A batch that does not fit the plan's arrays or limits leaves counts of 0 and PlanCounts::refused: nothing runs.
//
// The text before this file: that of a forward kernel, see forward_sm80.cuh, with a mask whose operands are of whole
// requests.
#pragma once

#include "plan_walk.cuh"

namespace qkv::cuda {
namespace planner {

constexpr int kMaxThreads = 1024;
constexpr int kCostClasses = 40;  // powers of two of row x key pairs
constexpr int kBins = kCostClasses * kSizeClasses;

// Sums of what blocks (or requests) need, up to one of them.
struct Sums {
  long long keys;
  int blocks, segments, tickets, merges;
  long long state_rows;

  __device__ __forceinline__ void add(const Sums& other) {
    keys += other.keys;
    blocks += other.blocks;
    segments += other.segments;
    tickets += other.tickets;
    merges += other.merges;
    state_rows += other.state_rows;
  }
};

struct SharedMemory {
  Sums sums[kMaxThreads];
  int places[kNumLists][kBins];  // that the bin's blocks take
  int next[kNumLists][kBins];    // the bin's next free place
  int num_items[kNumLists];
  int refused;
};

// What the threads before this one add up to; `total`: all of them. Every thread calls it.
__device__ inline Sums scan(SharedMemory& shared, const Sums& own, Sums& total) {
  const int thread = threadIdx.x;
  const int threads = blockDim.x;
  __syncthreads();
  shared.sums[thread] = own;
  for (int distance = 1; distance < threads; distance *= 2) {
    __syncthreads();
    Sums sum = shared.sums[thread];
    if (thread >= distance) sum.add(shared.sums[thread - distance]);
    __syncthreads();
    shared.sums[thread] = sum;
  }
  __syncthreads();
  total = shared.sums[threads - 1];
  return thread > 0 ? shared.sums[thread - 1] : Sums{};
}

// Longer ones have lower classes.
__device__ __forceinline__ int cost_class(long long pairs) {
  int log2 = 0;
  while (log2 + 1 < kCostClasses && pairs >> (log2 + 1) != 0) ++log2;
  return kCostClasses - 1 - log2;
}

// Cuts the requests into blocks of rows; returns their number.
__device__ inline int cut_requests(const PlanBatchParams& params, SharedMemory& shared) {
  const PlanArrays& arrays = params.arrays;
  Sums before{};
  for (int first = 0; first < params.num_requests; first += blockDim.x) {
    const int request = first + threadIdx.x;
    Sums own{};
    Sums total;
    SeqInfo seq(0, 0, 0, 0);
    if (request < params.num_requests) {
      seq = seq_of(params, request);
      const bool fits = seq.token_begin >= 0 && seq.q_len >= 0 && seq.q_len <= params.max_query_len &&
                        seq.kv_len >= 0 && seq.kv_len <= params.max_seq_len &&
                        (key::key_run == index::kAllKeys || seq.q_len <= seq.kv_len);
      if (!fits) {
        shared.refused = 1;
        seq = SeqInfo(0, 0, 0, 0);
      }
      own.keys = num_shown_keys(params, seq);
      own.blocks = num_blocks_of(cut_of(params, seq.q_len, num_shown_keys(params, seq)), seq.q_len);
    }
    Sums place = scan(shared, own, total);
    place.add(before);
    if (request < params.num_requests) {
      arrays.key_start[request] = place.keys;  // not read: no mask here has operands of single keys
      arrays.page_start[request] = key::page_size > 0 ? request * params.block_table_stride : place.keys;
      const index::RequestCut cut = cut_of(params, seq.q_len, num_shown_keys(params, seq));
      int end = index::first_item_tokens(seq.q_len, cut.tokens);
      for (int i = 0, begin = 0; i < own.blocks; ++i, begin = end, end += cut.tokens) {
        if (place.blocks + i >= arrays.max_blocks) break;
        PlanBlock block{};
        block.request = request;
        block.query_begin = begin;
        block.query_end = end;
        block.list = list_of(params, cut, seq.q_len * key::group_size);
        arrays.blocks[place.blocks + i] = block;
      }
    }
    before.add(total);
  }
  if (before.blocks > arrays.max_blocks) shared.refused = 1;
  __syncthreads();
  return shared.refused ? 0 : before.blocks;
}

// Finds each block's splits, and where its segments, joins and states go. Its bin stands in `place` meanwhile.
__device__ inline Sums cut_blocks(const PlanBatchParams& params, SharedMemory& shared, int num_blocks) {
  Sums before{};
  const int num_kv_heads = params.rules.num_kv_heads;
  for (int first = 0; first < num_blocks; first += blockDim.x) {
    const int index = first + threadIdx.x;
    PlanBlock block{};
    Sums own{};
    Sums total;
    if (index < num_blocks) {
      block = params.arrays.blocks[index];
      const int rows = (block.query_end - block.query_begin) * key::group_size;
      int keys = 0, most_keys = 0;
      BlockWalk(params, block).run([&](const KeySegment& segment, bool is_new_split) {
        ++own.segments;
        if (is_new_split) {
          ++block.num_splits;
          keys = 0;
        }
        keys += segment.end - segment.begin;
        most_keys = max(most_keys, keys);
      });
      if (joins(block)) {
        (block.list < kFewRowsTiles ? own.tickets : own.merges) = num_kv_heads;
        own.state_rows = static_cast<long long>(rows) * block.num_splits * num_kv_heads;
      }
      const int size = size_class(block);
      block.place = cost_class(static_cast<long long>(rows) * most_keys) * kSizeClasses + size;
      atomicAdd(&shared.places[block.list][block.place], num_places(params, block, size));
    }
    Sums place = scan(shared, own, total);
    place.add(before);
    if (index < num_blocks) {
      block.segment_begin = place.segments;
      block.merge = !joins(block) ? -1 : block.list < kFewRowsTiles ? place.tickets : place.merges;
      block.state_row = static_cast<int>(place.state_rows);
      params.arrays.blocks[index] = block;
    }
    before.add(total);
  }
  __syncthreads();
  return before;
}

// Bins of clustered lists are whole clusters.
__device__ __forceinline__ int room_of(const SharedMemory& shared, int list, int bin) {
  const int places = shared.places[list][bin];
  return list < kFewRowsTiles ? (places + kClusterSize - 1) / kClusterSize * kClusterSize : places;
}

// Where each bin of a list begins, and what fills its last cluster up.
__device__ inline void place_bins(const PlanBatchParams& params, SharedMemory& shared) {
  for (int i = threadIdx.x; i < kNumLists * kBins; i += blockDim.x) {
    const int list = i / kBins;
    const int bin = i % kBins;
    int begin = 0;
    for (int earlier = 0; earlier < bin; ++earlier) begin += room_of(shared, list, earlier);
    shared.next[list][bin] = begin;
    const int end = begin + room_of(shared, list, bin);
    if (end > params.arrays.max_items[list]) shared.refused = 1;
    if (bin == kBins - 1) shared.num_items[list] = end;
    for (int place = begin + shared.places[list][bin]; place < end && end <= params.arrays.max_items[list]; ++place) {
      params.arrays.few_rows_sm90[list][place].kv_head = -1;
    }
  }
  __syncthreads();
}

__device__ inline void write_counts(const PlanBatchParams& params, const SharedMemory& shared, const Sums& sums,
                                    int num_blocks) {
  const bool runs = shared.refused == 0;
  PlanCounts counts{};
  if (runs) {
    for (int tile = 0; tile < kFewRowsTiles; ++tile) counts.few_rows_sm90[tile] = shared.num_items[tile];
    counts.few_rows = shared.num_items[kListFewRows];
    counts.many_rows = shared.num_items[kListManyRows];
    counts.merges = sums.merges;
    counts.slots = params.num_slots;
    counts.blocks = num_blocks;
  }
  counts.refused = shared.refused;
  *params.arrays.counts = counts;
}

}  // namespace planner

extern "C" __global__ void __launch_bounds__(planner::kMaxThreads, 1)
    plan_batch(const __grid_constant__ PlanBatchParams params) {
  using namespace planner;
  __shared__ SharedMemory shared;
  const PlanArrays& arrays = params.arrays;
  if (threadIdx.x == 0) shared.refused = 0;
  for (int i = threadIdx.x; i < kNumLists * kBins; i += blockDim.x) shared.places[i / kBins][i % kBins] = 0;
  __syncthreads();

  const int num_blocks = cut_requests(params, shared);
  const Sums sums = cut_blocks(params, shared, num_blocks);
  const bool fits = sums.segments <= arrays.max_segments && sums.tickets <= arrays.max_tickets &&
                    sums.merges <= arrays.max_merges && sums.state_rows <= arrays.max_state_rows;
  if (!fits && threadIdx.x == 0) shared.refused = 1;
  place_bins(params, shared);

  for (int i = threadIdx.x; i < num_blocks; i += blockDim.x) {
    PlanBlock& block = arrays.blocks[i];
    const int bin = block.place;
    block.place = atomicAdd(&shared.next[block.list][bin], num_places(params, block, bin % kSizeClasses));
  }
  for (int i = threadIdx.x; i < sums.tickets && fits; i += blockDim.x) arrays.tickets[i] = 0;
  // The CTAs that share the items of many rows take turns at them, the longest first.
  const int num_items = shared.refused ? 0 : shared.num_items[kListManyRows];
  for (int i = threadIdx.x; i <= params.num_ctas && params.num_ctas > 0; i += blockDim.x) {
    const int rest = num_items % params.num_ctas;
    arrays.cta_begin[i] = num_items / params.num_ctas * i + (i < rest ? i : rest);
  }
  if (threadIdx.x == 0) write_counts(params, shared, sums, num_blocks);
}

}  // namespace qkv::cuda
