// The planner, first half: how the batch is cut, and where everything goes. One CTA of whole warps. It reads the batch
// on the device, so that a captured step plans itself; plan_items.cuh then writes the items. Splits and the order of
// joins are those of the host's planner; items stand longest first, in an order of their own.
//
// A batch that does not fit the plan's arrays or limits leaves counts of 0 and PlanCounts::refused: nothing runs.
//
// The text before this file: that of a forward kernel, see forward_sm80.cuh, with a mask whose operands are of whole
// requests.
#pragma once

#include "plan_walk.cuh"
#include "ptx/dependent_launch.cuh"

namespace qkv::cuda {
namespace planner {

constexpr int kMaxThreads = 1024;
constexpr int kCostClasses = 40;  // powers of two of row x key pairs
constexpr int kBins = kCostClasses * kSizeClasses;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kBins % kWarp == 0);

__device__ __forceinline__ int lane() { return threadIdx.x % kWarp; }

// Sums of what blocks (or requests) need, up to one of them.
struct Sums {
  long long keys;
  int blocks, segments, tickets, merges;
  long long state_rows;

  __device__ __forceinline__ Sums& operator+=(const Sums& other) {
    keys += other.keys;
    blocks += other.blocks;
    segments += other.segments;
    tickets += other.tickets;
    merges += other.merges;
    state_rows += other.state_rows;
    return *this;
  }
};

struct SharedMemory {
  Sums sums[kMaxThreads / kWarp];  // of a warp's threads
  int places[kNumLists * kBins];   // that the bin's blocks take
  int next[kNumLists * kBins];     // the bin's next free place
  int num_items[kNumLists];
  int refused;
};

template <class T>
__device__ __forceinline__ T shuffle_up(const T& value, int distance) {
  return __shfl_up_sync(kAllLanes, value, distance);
}
__device__ __forceinline__ Sums shuffle_up(const Sums& sums, int distance) {
  return {shuffle_up(sums.keys, distance),    shuffle_up(sums.blocks, distance), shuffle_up(sums.segments, distance),
          shuffle_up(sums.tickets, distance), shuffle_up(sums.merges, distance), shuffle_up(sums.state_rows, distance)};
}

// What the lanes up to this one add up to.
template <class T>
__device__ __forceinline__ T scan_warp(T sum) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T before = shuffle_up(sum, distance);
    if (lane() >= distance) sum += before;
  }
  return sum;
}

// What the threads before this one add up to; `total`: all of them. Every thread calls it.
__device__ inline Sums scan(SharedMemory& shared, const Sums& own, Sums& total) {
  const Sums in_warp = scan_warp(own);
  __syncthreads();  // the sums of the scan before have been read
  if (lane() == kWarp - 1) shared.sums[threadIdx.x / kWarp] = in_warp;
  __syncthreads();
  const Sums in_lanes_before = shuffle_up(in_warp, 1);
  Sums before{};
  total = Sums{};
  for (int warp = 0; warp < blockDim.x / kWarp; ++warp) {
    if (warp == threadIdx.x / kWarp) before = total;
    total += shared.sums[warp];
  }
  if (lane() > 0) before += in_lanes_before;
  return before;
}

// Adds each thread's places to its bin (-1: it has none) and returns what the bin held before: with one addition for
// the threads of a warp whose bins are the same, as most are. Every thread calls it.
__device__ inline int add_places(int* bins, int bin, int places) {
  int before = 0;
  for (unsigned waiting = __ballot_sync(kAllLanes, bin >= 0); waiting != 0;) {
    const int first_bin = __shfl_sync(kAllLanes, bin, __ffs(waiting) - 1);
    const bool is_same = bin == first_bin;
    const int sum = scan_warp(is_same ? places : 0);
    int begin = lane() == kWarp - 1 ? atomicAdd(&bins[first_bin], sum) : 0;
    begin = __shfl_sync(kAllLanes, begin, kWarp - 1);
    if (is_same) before = begin + sum - places;
    waiting &= ~__ballot_sync(kAllLanes, is_same);
  }
  return before;
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
    place += before;
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
    before += total;
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
    int bin = -1, places = 0;
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
      bin = block.list * kBins + block.place;
      places = num_places(params, block, size);
    }
    add_places(shared.places, bin, places);
    Sums place = scan(shared, own, total);
    place += before;
    if (index < num_blocks) {
      block.segment_begin = place.segments;
      block.merge = !joins(block) ? -1 : block.list < kFewRowsTiles ? place.tickets : place.merges;
      block.state_row = static_cast<int>(place.state_rows);
      params.arrays.blocks[index] = block;
    }
    before += total;
  }
  __syncthreads();
  return before;
}

// Where each bin of a list begins, and what fills its last cluster up: bins of clustered lists are whole clusters. A
// warp takes a list.
__device__ inline void place_bins(const PlanBatchParams& params, SharedMemory& shared) {
  for (int list = threadIdx.x / kWarp; list < kNumLists; list += blockDim.x / kWarp) {
    const int grain = list < kFewRowsTiles ? kClusterSize : 1;
    int begin = 0;
    for (int bin = lane(); bin < kBins; bin += kWarp) {
      const int places = shared.places[list * kBins + bin];
      const int room = (places + grain - 1) / grain * grain;
      const int end = begin + scan_warp(room);
      shared.next[list * kBins + bin] = end - room;
      const bool fits = end <= params.arrays.max_items[list];
      if (!fits) shared.refused = 1;
      for (int place = end - room + places; place < end && fits; ++place) {
        params.arrays.few_rows_sm90[list][place].kv_head = -1;
      }
      begin = __shfl_sync(kAllLanes, end, kWarp - 1);
    }
    if (lane() == 0) shared.num_items[list] = begin;
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
  ptx::launch_dependents();
  if (threadIdx.x == 0) shared.refused = 0;
  for (int i = threadIdx.x; i < kNumLists * kBins; i += blockDim.x) shared.places[i] = 0;
  __syncthreads();

  const int num_blocks = cut_requests(params, shared);
  const Sums sums = cut_blocks(params, shared, num_blocks);
  const bool fits = sums.segments <= arrays.max_segments && sums.tickets <= arrays.max_tickets &&
                    sums.merges <= arrays.max_merges && sums.state_rows <= arrays.max_state_rows;
  if (!fits && threadIdx.x == 0) shared.refused = 1;
  place_bins(params, shared);

  for (int first = 0; first < num_blocks; first += blockDim.x) {
    const int i = first + threadIdx.x;
    int bin = -1, places = 0;
    if (i < num_blocks) {
      const PlanBlock block = arrays.blocks[i];
      bin = block.list * kBins + block.place;
      places = num_places(params, block, block.place % kSizeClasses);
    }
    const int place = add_places(shared.next, bin, places);
    if (i < num_blocks) arrays.blocks[i].place = place;
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
