// Which step comes next? Each loading warp walks its CTA's items and their segments on its own. Lanes hold the words of
// an item and its segments: a loading warp has few registers.
#pragma once

#include "many_rows_params.hpp"
#include "params.hpp"
#include "pipeline.cuh"

namespace qkv::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Words of WorkItem.
constexpr int kWordRequest = 0, kWordKvHead = 1, kWordQueryBegin = 2, kWordQueryEnd = 3, kWordSegmentBegin = 4,
              kWordSegmentEnd = 5, kWordFirst = 8, kWordQLen = 9, kWordKvLen = 10;
static_assert(sizeof(WorkItem) == 32);

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int lane_word(int word, int lane) { return __shfl_sync(kAllLanes, word, lane); }

// Lane l < 8: word l of the item.
__device__ __forceinline__ int load_item_word(const ForwardParams& params, int position, int end) {
  const int lane = lane_index();
  if (position >= end || lane >= 8) return 0;
  return reinterpret_cast<const int*>(params.items + position)[lane];
}

// Lane l: segment first + l of the item, packed so that a warp needs few registers.
struct SegmentLanes {
  int begin = 0;
  int end_full = 0;  // end·2 + full
};

__device__ __forceinline__ SegmentLanes load_segments(const ForwardParams& params, int first, int end) {
  SegmentLanes lanes;
  const int index = first + lane_index();
  if (index < end) {
    const KeySegment segment = params.segments[index];
    lanes.begin = segment.begin;
    lanes.end_full = segment.end * 2 + (segment.full != 0);
  }
  return lanes;
}

// Lane l < 8: word l of the item. Then of its request: first page-table entry or, dense, first key; lengths.
__device__ __forceinline__ int load_request_words(const ForwardParams& params, int word) {
  const int request = lane_word(word, kWordRequest);
  const int lane = lane_index();
  if (lane == kWordFirst) word = static_cast<int>(params.page_start[request]);
  if (lane == kWordQLen) word = params.query_start_loc[request + 1] - params.query_start_loc[request];
  if (lane == kWordKvLen) word = params.seq_lens[request];
  return word;
}

// visit(word, step) for each step of this CTA, with the words of load_request_words. An item whose rows see nothing
// has one step without keys.
template <int kTileKv, class Visit>
__device__ __forceinline__ void walk_steps(const ForwardParams& params, const ManyRowsParams& many, Visit&& visit) {
  const int end = many.cta_begin[blockIdx.x + 1];
  int position = many.cta_begin[blockIdx.x];
  int word_next = load_item_word(params, position, end);
  while (position < end) {
    const int word = load_request_words(params, word_next);
    ++position;
    word_next = load_item_word(params, position, end);
    int index = lane_word(word, kWordSegmentBegin);
    unsigned flags = kStepFirst;
    SegmentLanes lanes;
    do {
      const int s = (index - lane_word(word, kWordSegmentBegin)) % 32;
      if (s == 0) lanes = load_segments(params, index, lane_word(word, kWordSegmentEnd));
      ++index;
      int kv = lane_word(lanes.begin, s);
      const int end_full = lane_word(lanes.end_full, s);
      do {
        const int keys = end_full / 2 - kv;
        if (keys <= kTileKv && index >= lane_word(word, kWordSegmentEnd)) {
          flags |= position == end ? kStepLast | kStepFinal : kStepLast;
        }
        visit(word, Step{kv, min(keys, kTileKv) | flags | (end_full & 1 ? 0 : kStepPartial)});
        flags = 0;
        kv += kTileKv;
      } while (kv < end_full / 2);
    } while (index < lane_word(word, kWordSegmentEnd));
  }
}

}  // namespace qkv::cuda
