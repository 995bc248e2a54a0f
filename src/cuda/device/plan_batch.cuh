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

__device__ __forceinline__ RequestSums operator-(const RequestSums& a, const RequestSums& b) {
  return {a.keys - b.keys, a.blocks - b.blocks};
}
__device__ __forceinline__ BlockSums operator-(const BlockSums& a, const BlockSums& b) {
  return {a.state_rows - b.state_rows, a.segments - b.segments, a.tickets - b.tickets, a.merges - b.merges};
}
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

// Of n things, those of a warp: whole turns of its lanes, but for the last.
struct Share {
  int begin, end;
};
__device__ __forceinline__ int turns_of_share(int n) {
  return n <= blockDim.x ? 1 : (n + blockDim.x - 1) / blockDim.x;  // a division is a long wait where all is short
}
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
__device__ inline Request read_request(const PlanBatchParams& params, int request, bool& fits) {
  SeqInfo seq(0, 0, 0, 0);
  if (request < params.num_requests) seq = seq_of(params, request);
  const bool is_within = seq.token_begin >= 0 && seq.q_len >= 0 && seq.q_len <= params.max_query_len &&
                         seq.kv_len >= 0 && seq.kv_len <= params.max_seq_len &&
                         (key::key_run == index::kAllKeys || seq.q_len <= seq.kv_len);
  if (!is_within) {
    fits = false;
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
  int end =
      request.num_blocks > 1 ? index::first_item_tokens(request.seq.q_len, request.cut.tokens) : request.seq.q_len;
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

// Cuts the requests into blocks of rows; returns their number. The CTA takes turns of a request a thread.
__device__ inline int cut_requests(const PlanBatchParams& params, PlannerMemory& memory, PlanBlock* blocks,
                                   bool& fits) {
  RequestSums before{};
  int turn = 0;
#pragma unroll 1
  for (int first = 0; first < params.num_requests; first += blockDim.x, turn ^= 1) {
    const int number = first + threadIdx.x;
    const Request request = read_request(params, number, fits);
    const RequestSums own{request.num_keys, request.num_blocks};
    const RequestSums up_to = scan_warp(own);
    if (lane() == kLastLane) memory.request_sums[turn][warp()] = up_to;
    __syncthreads();
    RequestSums place = before + up_to - own;
#pragma unroll
    for (int w = 0; w < kPlannerWarps; ++w) {
      // Read whether or not there is such a warp, so that no look-up waits for another.
      const RequestSums read = memory.request_sums[turn][w];
      const RequestSums of_warp = w < num_warps() ? read : RequestSums{};
      place = place + (w < warp() ? of_warp : RequestSums{});
      before = before + of_warp;
    }
    if (number < params.num_requests) write_blocks(params, request, number, place, blocks);
  }
  const bool has_room = before.blocks <= params.arrays.max_blocks;
  if (!has_room) fits = false;
  __syncthreads();
  return has_room ? before.blocks : 0;
}

// Lists without room have no items in any batch that fits; their bins are left alone.
__device__ __forceinline__ bool has_room(const PlanBatchParams& params, int list) {
  return params.arrays.max_items[list] > 0;
}

// The warp's own bins.
__device__ inline void empty_bins(const PlanBatchParams& params, PlannerMemory& memory) {
#pragma unroll
  for (int list = 0; list < kNumLists; ++list) {
    if (!has_room(params, list)) continue;
    for (int bin = lane(); bin < kBins; bin += kWarp) memory.places[warp()][list * kBins + bin] = 0;
  }
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

// Finds the block's splits and bin; returns what it needs.
__device__ inline BlockSums cut_block(const PlanBatchParams& params, PlanBlock& block) {
  const int num_kv_heads = params.rules.num_kv_heads;
  const int rows = (block.query_end - block.query_begin) * key::group_size;
  BlockSums needs{};
  int keys = 0, most_keys = 0;
  BlockWalk walk(params, block);
  KeySegment segment;
#pragma unroll 1
  for (bool is_new_split = false; walk.next(segment, is_new_split); ++needs.segments) {
    block.num_splits += is_new_split ? 1 : 0;
    keys = (is_new_split ? 0 : keys) + segment.end - segment.begin;
    most_keys = max(most_keys, keys);
  }
  if (joins(block)) {
    (block.list < kFewRowsTiles ? needs.tickets : needs.merges) = num_kv_heads;
    needs.state_rows = static_cast<long long>(rows) * block.num_splits * num_kv_heads;
  }
  block.bin = cost_class(static_cast<long long>(rows) * most_keys) * kSizeClasses + size_class(block);
  return needs;
}

// Where each block's items, segments, joins and states lie in its warp's share.
__device__ inline void cut_blocks(const PlanBatchParams& params, PlannerMemory& memory, PlanBlock* blocks,
                                  int num_blocks, bool& fits) {
  const Share share = share_of(num_blocks);
  BlockSums before{};
#pragma unroll 1
  for (int first = share.begin; first < share.end; first += kWarp) {
    const int index = first + lane();
    PlanBlock block{};
    BlockSums needs{};
    int bin = -1, places = 0;
    if (index < share.end) {
      block = blocks[index];
      needs = cut_block(params, block);
      places = num_places(block, block.bin % kSizeClasses) * params.rules.num_kv_heads;
      if (has_room(params, block.list)) {
        bin = block.list * kBins + block.bin;
      } else {
        fits = false;
      }
    }
    block.place = add_places(memory.places[warp()], bin, places);
    const BlockSums up_to = scan_warp(needs);
    const BlockSums place = before + up_to - needs;
    before = before + last_of_warp(up_to);
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

// Shares stand one after another, in each bin; bins of a list do, too, and those of clustered lists are whole clusters.
// A warp takes a list, a lane some neighbouring bins.
__device__ inline void place_list(const PlanBatchParams& params, PlannerMemory& memory, int list, bool& fits) {
  constexpr int kBinsOfLane = kBins / kWarp;
  const int first_bin = list * kBins + lane() * kBinsOfLane;
  const int grain = list < kFewRowsTiles ? kMaxClusterSplits : 1;
  const auto room_of = [&](int places) { return (places + grain - 1) & -grain; };
  int places[kBinsOfLane] = {};
  int room = 0;
#pragma unroll
  for (int i = 0; i < kBinsOfLane; ++i) {
#pragma unroll
    for (int w = 0; w < kPlannerWarps; ++w) {
      if (w >= num_warps()) continue;
      const int of_share = memory.places[w][first_bin + i];
      memory.places[w][first_bin + i] = places[i];
      places[i] += of_share;
    }
    room += room_of(places[i]);
  }
  const int end = scan_warp(room);
  const bool list_fits = end <= params.arrays.max_items[list];
  if (!list_fits) fits = false;
  int begin = end - room;
#pragma unroll
  for (int i = 0; i < kBinsOfLane; ++i) {
    memory.bin_begin[first_bin + i] = begin;
    const int end_of_bin = begin + room_of(places[i]);
    // What fills the last cluster up.
#pragma unroll 1
    for (int place = begin + places[i]; place < end_of_bin && list_fits && blockIdx.x == 0; ++place) {
      params.arrays.few_rows_sm90[list][place] = nothing_to_do();
    }
    begin = end_of_bin;
  }
  if (lane() == kLastLane) memory.num_items[list] = end;
}

__device__ inline void place_sums(const PlanBatchParams& params, PlannerMemory& memory, bool& fits) {
  const BlockSums own = lane() < num_warps() ? memory.block_sums[lane()] : BlockSums{};
  const BlockSums up_to = scan_warp(own);
  if (lane() < num_warps()) memory.block_sums[lane()] = up_to - own;
  if (lane() != kLastLane) return;
  memory.total = up_to;
  const PlanArrays& arrays = params.arrays;
  if (up_to.segments > arrays.max_segments || up_to.tickets > arrays.max_tickets || up_to.merges > arrays.max_merges ||
      up_to.state_rows > arrays.max_state_rows) {
    fits = false;
  }
}

// What the warps' shares come to, list by list and everywhere else. False: the batch does not fit.
__device__ inline bool place_shares(const PlanBatchParams& params, PlannerMemory& memory, bool fits) {
#pragma unroll 1
  for (int list = warp(); list < kNumLists; list += num_warps()) {
    if (has_room(params, list)) {
      place_list(params, memory, list, fits);
    } else if (lane() == 0) {
      memory.num_items[list] = 0;
    }
  }
  if (warp() == num_warps() - 1) place_sums(params, memory, fits);  // it has no list where there are warps enough
  return __syncthreads_or(fits ? 0 : 1) == 0;
}

__device__ inline void write_counts(const PlanBatchParams& params, const PlannerMemory& memory, int num_blocks,
                                    bool fits) {
  PlanCounts counts{};
  if (fits) {
    for (int tile = 0; tile < kFewRowsTiles; ++tile) counts.few_rows_sm90[tile] = memory.num_items[tile];
    counts.few_rows = memory.num_items[kListFewRows];
    counts.many_rows = memory.num_items[kListManyRows];
    counts.merges = memory.total.merges;
    counts.slots = params.num_slots;
    counts.blocks = num_blocks;
  }
  counts.refused = fits ? 0 : 1;
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

// log2 of the threads for each pair of block and KV head: several if there are more threads than pairs.
__device__ __forceinline__ int parts_of_pair(unsigned num_pairs, unsigned num_threads) {
  int parts = 0;
#pragma unroll
  for (int more = 1; 1 << more <= kMaxClusterSplits; ++more) parts += num_pairs << more <= num_threads ? 1 : 0;
  return parts;
}

// This CTA's part of all pairs of block and KV head.
__device__ inline void write_all(const PlanBatchParams& params, const PlannerMemory& memory, const PlanBlock* blocks,
                                 int num_blocks) {
  const unsigned num_kv_heads = params.rules.num_kv_heads;
  const unsigned turns = turns_of_share(num_blocks);
  const unsigned num_pairs = num_blocks * num_kv_heads;
  const unsigned num_threads = gridDim.x * blockDim.x;
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  const int parts = parts_of_pair(num_pairs, num_threads);
  const int num_many_rows = memory.num_items[kListManyRows];
#pragma unroll 1
  for (unsigned i = first; i < num_pairs << parts; i += num_threads) {
    const unsigned pair = i >> parts;
    const unsigned index = pair / num_kv_heads;
    const unsigned share = turns == 1 ? index / kWarp : index / (turns * kWarp);
    const Part part{static_cast<int>(i - (pair << parts)), 1 << parts};
    write_items(params, num_many_rows, placed(memory, blocks[index], share), static_cast<int>(pair % num_kv_heads),
                part);
  }
  for (int i = first; i < memory.total.tickets; i += num_threads) params.arrays.tickets[i] = 0;
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
  bool fits = true;  // as far as this thread has seen
  empty_bins(params, memory);
  const int num_blocks = cut_requests(params, memory, blocks, fits);
  cut_blocks(params, memory, blocks, num_blocks, fits);
  fits = place_shares(params, memory, fits);
  if (blockIdx.x == 0) {
    const int num_items = fits ? memory.num_items[kListManyRows] : 0;
    for (int cta = threadIdx.x; cta <= params.num_ctas && params.num_ctas > 0; cta += blockDim.x) {
      params.arrays.cta_begin[cta] = begin_of_cta(num_items, params.num_ctas, cta);
    }
    if (threadIdx.x == 0) write_counts(params, memory, num_blocks, fits);
  }
  if (fits) write_all(params, memory, blocks, num_blocks);
}

}  // namespace qkv::cuda
