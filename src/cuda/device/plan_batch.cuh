// The planner: how the batch is cut, and where everything goes. It reads the batch on the device, so that a captured
// step plans itself. Splits and the order of joins are those of the host's planner; items stand longest first, in an
// order of their own.
//
// One launch of any number of CTAs. Each finds all places by itself, in its own memory and in the same order, so that
// none waits for another; then each writes its part of the items. Time is a chain of a few look-ups, not work.
//
// A batch that does not fit the plan's arrays or limits leaves counts of 0 and PlanCounts::refused: nothing runs.
//
// The text before this file: that of a forward kernel, see forward_sm80.cuh, with a mask whose operands are of whole
// requests.
#pragma once

#include "plan_items.cuh"

namespace qkv::cuda {
namespace planner {

constexpr int kWarp = 32;
constexpr int kLastLane = kWarp - 1;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kBins % kWarp == 0);

__device__ __forceinline__ int lane() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp() { return threadIdx.x / kWarp; }
__device__ __forceinline__ int num_warps() { return blockDim.x / kWarp; }

__device__ __forceinline__ RequestSums operator+(const RequestSums& a, const RequestSums& b) {
  return {a.keys + b.keys, a.blocks + b.blocks};
}
__device__ __forceinline__ BlockSums operator+(const BlockSums& a, const BlockSums& b) {
  return {a.state_rows + b.state_rows, a.segments + b.segments, a.tickets + b.tickets, a.merges + b.merges};
}

template <class T>
__device__ __forceinline__ T shuffle_up(const T& value, int distance) {
  return __shfl_up_sync(kAllLanes, value, distance);
}
__device__ __forceinline__ RequestSums shuffle_up(const RequestSums& sums, int distance) {
  return {shuffle_up(sums.keys, distance), shuffle_up(sums.blocks, distance)};
}
__device__ __forceinline__ BlockSums shuffle_up(const BlockSums& sums, int distance) {
  return {shuffle_up(sums.state_rows, distance), shuffle_up(sums.segments, distance),
          shuffle_up(sums.tickets, distance), shuffle_up(sums.merges, distance)};
}

template <class T>
__device__ __forceinline__ T last_of_warp(const T& value) {
  return __shfl_sync(kAllLanes, value, kLastLane);
}
__device__ __forceinline__ RequestSums last_of_warp(const RequestSums& sums) {
  return {last_of_warp(sums.keys), last_of_warp(sums.blocks)};
}
__device__ __forceinline__ BlockSums last_of_warp(const BlockSums& sums) {
  return {last_of_warp(sums.state_rows), last_of_warp(sums.segments), last_of_warp(sums.tickets),
          last_of_warp(sums.merges)};
}

// What the lanes up to this one add up to.
template <class T>
__device__ __forceinline__ T scan_warp(T sum) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T before = shuffle_up(sum, distance);
    if (lane() >= distance) sum = before + sum;
  }
  return sum;
}

// What the lanes before this one add up to, on top of `before`, which becomes what all of them add up to.
template <class T>
__device__ __forceinline__ T place_in_warp(const T& own, T& before) {
  const T up_to = scan_warp(own);
  T place = shuffle_up(up_to, 1);
  if (lane() == 0) place = T{};
  place = before + place;
  before = before + last_of_warp(up_to);
  return place;
}

// Of n things, those of a warp: whole turns of its lanes, but for the last.
struct Share {
  int begin, end;
};
__device__ __forceinline__ int turns_of_share(int n) { return (n + blockDim.x - 1) / blockDim.x; }
__device__ __forceinline__ Share share_of(int n) {
  const int size = turns_of_share(n) * kWarp;
  return {min(n, warp() * size), min(n, (warp() + 1) * size)};
}

struct Request {
  SeqInfo seq;
  int num_keys;
  index::RequestCut cut;
  int num_blocks;
};

// One without tokens where the limits don't allow it, or there is none.
__device__ inline Request read_request(const PlanBatchParams& params, PlannerMemory& memory, int request, int end) {
  SeqInfo seq(0, 0, 0, 0);
  if (request < end) seq = seq_of(params, request);
  const bool fits = seq.token_begin >= 0 && seq.q_len >= 0 && seq.q_len <= params.max_query_len && seq.kv_len >= 0 &&
                    seq.kv_len <= params.max_seq_len && (key::key_run == index::kAllKeys || seq.q_len <= seq.kv_len);
  if (!fits) {
    memory.refused = 1;
    seq = SeqInfo(0, 0, 0, 0);
  }
  const int num_keys = num_shown_keys(params, seq);
  const index::RequestCut cut = cut_of(params, seq.q_len, num_keys);
  return {seq, num_keys, cut, num_blocks_of(cut, seq.q_len)};
}

__device__ inline void write_blocks(const PlanBatchParams& params, const Request& request, int number,
                                    const RequestSums& place, PlanBlock* blocks) {
  const long long page_start = key::page_size > 0 ? number * params.block_table_stride : place.keys;
  if (blockIdx.x == 0) {
    params.arrays.key_start[number] = place.keys;  // not read: no mask here has operands of single keys
    params.arrays.page_start[number] = page_start;
  }
  const int list = list_of(params, request.cut, request.seq.q_len * key::group_size);
  int end = index::first_item_tokens(request.seq.q_len, request.cut.tokens);
  const int last = min(place.blocks + request.num_blocks, params.arrays.max_blocks);
  for (int i = place.blocks, begin = 0; i < last; ++i, begin = end, end += request.cut.tokens) {
    PlanBlock block{};
    block.page_start = page_start;
    block.request = number;
    block.query_begin = begin;
    block.query_end = end;
    block.list = list;
    blocks[i] = block;
  }
}

// Cuts the requests into blocks of rows; returns their number.
__device__ inline int cut_requests(const PlanBatchParams& params, PlannerMemory& memory, PlanBlock* blocks) {
  const Share share = share_of(params.num_requests);
  RequestSums own{};
  for (int request = share.begin + lane(); request < share.end; request += kWarp) {
    const Request cut = read_request(params, memory, request, share.end);
    own = own + RequestSums{cut.num_keys, cut.num_blocks};
  }
  const RequestSums of_share = scan_warp(own);
  if (lane() == kLastLane) memory.request_sums[warp()] = of_share;
  __syncthreads();
  RequestSums before{}, total{};
  for (int w = 0; w < num_warps(); ++w) {
    if (w == warp()) before = total;
    total = total + memory.request_sums[w];
  }
  for (int first = share.begin; first < share.end; first += kWarp) {
    const int number = first + lane();
    const Request request = read_request(params, memory, number, share.end);
    const RequestSums place = place_in_warp(RequestSums{request.num_keys, request.num_blocks}, before);
    if (number < share.end) write_blocks(params, request, number, place, blocks);
  }
  if (total.blocks > params.arrays.max_blocks) memory.refused = 1;
  __syncthreads();
  return memory.refused ? 0 : total.blocks;
}

// Longer ones have lower classes.
__device__ __forceinline__ int cost_class(long long pairs) {
  const int log2 = pairs > 0 ? 63 - __clzll(pairs) : 0;
  return kCostClasses - 1 - min(log2, kCostClasses - 1);
}

// Adds each lane's places to its bin (-1: it has none) and returns what the bin held before: with one addition for the
// lanes whose bins are the same, as most are. `bins` are the warp's own.
__device__ inline int add_places(int* bins, int bin, int places) {
  int before = 0;
  for (unsigned waiting = __ballot_sync(kAllLanes, bin >= 0); waiting != 0;) {
    const int first_bin = __shfl_sync(kAllLanes, bin, __ffs(waiting) - 1);
    const bool is_same = bin == first_bin;
    const int sum = scan_warp(is_same ? places : 0);
    int begin = 0;
    if (lane() == kLastLane) {
      begin = bins[first_bin];
      bins[first_bin] = begin + sum;
    }
    begin = __shfl_sync(kAllLanes, begin, kLastLane);
    if (is_same) before = begin + sum - places;
    waiting &= ~__ballot_sync(kAllLanes, is_same);
  }
  return before;
}

// Finds the block's splits, list and bin; returns what it needs.
__device__ inline BlockSums cut_block(const PlanBatchParams& params, PlanBlock& block) {
  const int num_kv_heads = params.rules.num_kv_heads;
  const int rows = (block.query_end - block.query_begin) * key::group_size;
  BlockSums needs{};
  int keys = 0, most_keys = 0;
  BlockWalk(params, block).run([&](const KeySegment& segment, bool is_new_split) {
    ++needs.segments;
    if (is_new_split) {
      ++block.num_splits;
      keys = 0;
    }
    keys += segment.end - segment.begin;
    most_keys = max(most_keys, keys);
  });
  if (joins(block)) {
    (block.list < kFewRowsTiles ? needs.tickets : needs.merges) = num_kv_heads;
    needs.state_rows = static_cast<long long>(rows) * block.num_splits * num_kv_heads;
  }
  block.bin = cost_class(static_cast<long long>(rows) * most_keys) * kSizeClasses + size_class(block);
  return needs;
}

// Where each block's items, segments, joins and states lie in its warp's share.
__device__ inline void cut_blocks(const PlanBatchParams& params, PlannerMemory& memory, PlanBlock* blocks,
                                  int num_blocks) {
  const Share share = share_of(num_blocks);
  BlockSums before{};
  for (int first = share.begin; first < share.end; first += kWarp) {
    const int index = first + lane();
    PlanBlock block{};
    BlockSums needs{};
    int bin = -1, places = 0;
    if (index < share.end) {
      block = blocks[index];
      needs = cut_block(params, block);
      bin = block.list * kBins + block.bin;
      places = num_places(block, block.bin % kSizeClasses) * params.rules.num_kv_heads;
    }
    block.place = add_places(memory.places[warp()], bin, places);
    const BlockSums place = place_in_warp(needs, before);
    if (index < share.end) {
      block.segment_begin = place.segments;
      block.merge = !joins(block) ? -1 : block.list < kFewRowsTiles ? place.tickets : place.merges;
      block.state_row = static_cast<int>(place.state_rows);
      blocks[index] = block;
    }
  }
  if (lane() == 0) memory.block_sums[warp()] = before;
  __syncthreads();
}

// Shares stand one after another, in each bin and everywhere else.
__device__ inline void place_shares(const PlanBatchParams& params, PlannerMemory& memory) {
  for (int bin = threadIdx.x; bin < kNumLists * kBins; bin += blockDim.x) {
    int places[kPlannerWarps];
#pragma unroll
    for (int w = 0; w < kPlannerWarps; ++w) places[w] = memory.places[w][bin];
    int before = 0;
#pragma unroll
    for (int w = 0; w < kPlannerWarps; ++w) {
      memory.places[w][bin] = before;
      before += places[w];
    }
    memory.bin_begin[bin] = before;  // its places, for place_bins
  }
  if (warp() == 0) {
    BlockSums total{};
    const BlockSums own = lane() < num_warps() ? memory.block_sums[lane()] : BlockSums{};
    const BlockSums place = place_in_warp(own, total);
    if (lane() < num_warps()) memory.block_sums[lane()] = place;
    const PlanArrays& arrays = params.arrays;
    const bool fits = total.segments <= arrays.max_segments && total.tickets <= arrays.max_tickets &&
                      total.merges <= arrays.max_merges && total.state_rows <= arrays.max_state_rows;
    if (lane() == 0) {
      memory.total = total;
      if (!fits) memory.refused = 1;
    }
  }
  __syncthreads();
}

// Where each bin of a list begins, and what fills its last cluster up: bins of clustered lists are whole clusters. A
// warp takes a list, a lane some neighbouring bins.
__device__ inline void place_bins(const PlanBatchParams& params, PlannerMemory& memory) {
  constexpr int kBinsOfLane = kBins / kWarp;
  for (int list = warp(); list < kNumLists; list += num_warps()) {
    const int grain = list < kFewRowsTiles ? kClusterSize : 1;
    int* bins = memory.bin_begin + list * kBins + lane() * kBinsOfLane;
    const auto room_of = [&](int places) { return (places + grain - 1) / grain * grain; };
    int room = 0;
    for (int i = 0; i < kBinsOfLane; ++i) room += room_of(bins[i]);
    const int end = scan_warp(room);
    const bool fits = end <= params.arrays.max_items[list];
    if (!fits) memory.refused = 1;
    int begin = end - room;
    for (int i = 0; i < kBinsOfLane; ++i) {
      const int places = bins[i];
      bins[i] = begin;
      const int end_of_bin = begin + room_of(places);
      for (int place = begin + places; place < end_of_bin && fits && blockIdx.x == 0; ++place) {
        params.arrays.few_rows_sm90[list][place].kv_head = -1;
      }
      begin = end_of_bin;
    }
    if (lane() == kLastLane) memory.num_items[list] = end;
  }
  __syncthreads();
}

__device__ inline void write_counts(const PlanBatchParams& params, const PlannerMemory& memory, int num_blocks) {
  PlanCounts counts{};
  if (!memory.refused) {
    for (int tile = 0; tile < kFewRowsTiles; ++tile) counts.few_rows_sm90[tile] = memory.num_items[tile];
    counts.few_rows = memory.num_items[kListFewRows];
    counts.many_rows = memory.num_items[kListManyRows];
    counts.merges = memory.total.merges;
    counts.slots = params.num_slots;
    counts.blocks = num_blocks;
  }
  counts.refused = memory.refused;
  *params.arrays.counts = counts;
}

// A block with its places in the whole plan.
__device__ __forceinline__ PlanBlock placed(const PlannerMemory& memory, PlanBlock block, int share) {
  const BlockSums& before = memory.block_sums[share];
  const int bin = block.list * kBins + block.bin;
  block.place += memory.bin_begin[bin] + memory.places[share][bin];
  block.segment_begin += before.segments;
  block.state_row += static_cast<int>(before.state_rows);
  if (joins(block)) block.merge += block.list < kFewRowsTiles ? before.tickets : before.merges;
  return block;
}

// This CTA's part of all pairs of block and KV head.
__device__ inline void write_all(const PlanBatchParams& params, const PlannerMemory& memory, const PlanBlock* blocks,
                                 int num_blocks) {
  const int num_kv_heads = params.rules.num_kv_heads;
  const int share_size = turns_of_share(num_blocks) * kWarp;
  const int num_many_rows = memory.num_items[kListManyRows];
  for (int i = threadIdx.x * gridDim.x + blockIdx.x; i < num_blocks * num_kv_heads; i += gridDim.x * blockDim.x) {
    const int index = i / num_kv_heads;
    write_items(params, num_many_rows, placed(memory, blocks[index], index / share_size), i % num_kv_heads);
  }
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = first; i < memory.total.tickets; i += gridDim.x * blockDim.x) params.arrays.tickets[i] = 0;
}

}  // namespace planner

extern "C" __global__ void __launch_bounds__(kPlannerThreads, 1)
    plan_batch(const __grid_constant__ PlanBatchParams params) {
  using namespace planner;
  extern __shared__ __align__(16) char shared_memory[];
  PlannerMemory& memory = *reinterpret_cast<PlannerMemory*>(shared_memory);
  PlanBlock* blocks = params.arrays.blocks != nullptr
                          ? params.arrays.blocks + static_cast<long long>(blockIdx.x) * params.arrays.max_blocks
                          : reinterpret_cast<PlanBlock*>(shared_memory + sizeof(PlannerMemory));
  if (threadIdx.x == 0) memory.refused = 0;
  int* places = &memory.places[0][0];
  for (int i = threadIdx.x; i < kPlannerWarps * kNumLists * kBins; i += blockDim.x) places[i] = 0;
  __syncthreads();

  const int num_blocks = cut_requests(params, memory, blocks);
  cut_blocks(params, memory, blocks, num_blocks);
  place_shares(params, memory);
  place_bins(params, memory);
  if (blockIdx.x == 0) {
    const int num_items = memory.refused ? 0 : memory.num_items[kListManyRows];
    for (int cta = threadIdx.x; cta <= params.num_ctas && params.num_ctas > 0; cta += blockDim.x) {
      params.arrays.cta_begin[cta] = begin_of_cta(num_items, params.num_ctas, cta);
    }
    if (threadIdx.x == 0) write_counts(params, memory, num_blocks);
  }
  if (!memory.refused) write_all(params, memory, blocks, num_blocks);
}

}  // namespace qkv::cuda
