// The planner's second half: writes the items, merges and segments of a block that has its places.
#pragma once

#include "plan_walk.cuh"

namespace qkv::cuda {
namespace planner {

// CTAs that share items take turns at them, the longest first: where the list of one begins.
__device__ __forceinline__ int begin_of_cta(int num_items, int num_ctas, int cta) {
  return num_items / num_ctas * cta + min(cta, num_items % num_ctas);
}

// The items of one block and KV head, split by split.
class ItemWriter {
 public:
  __device__ __forceinline__ ItemWriter(const PlanBatchParams& params, int num_many_rows, const PlanBlock& block,
                                        int kv_head)
      : params_(params),
        num_many_rows_(num_many_rows),
        block_(block),
        kv_head_(kv_head),
        seq_(seq_of(params, block.request)),
        rows_((block.query_end - block.query_begin) * key::group_size),
        side_by_side_(num_places(block, size_class(block))),
        joins_in_cluster_(size_class(block) < 3) {}

  // Segments [segment_begin, segment_end) are split `split` of the rows.
  __device__ __forceinline__ void write(int split, int segment_begin, int segment_end, const KeySegment& first) const {
    const int place = block_.place + kv_head_ * side_by_side_ + split;
    const int state_row = joins(block_) ? block_.state_row + (kv_head_ * block_.num_splits + split) * rows_ : -1;
    if (block_.list < kFewRowsTiles) {
      params_.arrays.few_rows_sm90[block_.list][place] =
          few_rows_item(split, segment_begin, segment_end, first, state_row);
      return;
    }
    const WorkItem item{block_.request, kv_head_,    block_.query_begin, block_.query_end,
                        segment_begin,  segment_end, state_row};
    if (block_.list == kListFewRows) {
      params_.arrays.few_rows[place] = item;
    } else {
      params_.arrays.many_rows[place_in_cta_lists(place)] = item;
    }
  }

  // A place of a cluster that the join leaves free.
  __device__ __forceinline__ void fill(int split) const {
    params_.arrays.few_rows_sm90[block_.list][block_.place + kv_head_ * side_by_side_ + split] = nothing_to_do();
  }

  // Places in the list that are the block's and KV head's.
  __device__ __forceinline__ int side_by_side() const { return side_by_side_; }

  __device__ __forceinline__ void write_merge() const {
    if (!joins(block_) || block_.list < kFewRowsTiles) return;
    params_.arrays.merges[block_.merge + kv_head_] = {
        block_.request,   kv_head_,          block_.query_begin,
        block_.query_end, block_.num_splits, block_.state_row + kv_head_ * block_.num_splits * rows_};
  }

 private:
  __device__ __forceinline__ FewRowsItem few_rows_item(int split, int segment_begin, int segment_end,
                                                       const KeySegment& first, int state_row) const {
    FewRowsItem item{};
    item.request = block_.request;
    item.kv_head = kv_head_;
    item.query_begin = block_.query_begin;
    item.query_end = block_.query_end;
    item.query_token = seq_.token_begin + block_.query_begin;
    item.cached_keys = seq_.kv_len - seq_.q_len;
    item.segment_begin = segment_begin;
    item.segment_end = segment_end;
    item.first = first;
    item.page_start = block_.page_start;
    item.ticket = joins(block_) && !joins_in_cluster_ ? block_.merge + kv_head_ : -1;
    item.num_splits = static_cast<short>(joins(block_) ? block_.num_splits : 1);
    if (joins(block_)) {
      item.state_row = state_row;
      item.split = static_cast<short>(split);
    }
    return item;
  }

  // Item i of the sorted list is the (i / num_ctas)-th of CTA i % num_ctas.
  __device__ __forceinline__ int place_in_cta_lists(int place) const {
    if (params_.num_ctas == 0) return place;
    return begin_of_cta(num_many_rows_, params_.num_ctas, place % params_.num_ctas) + place / params_.num_ctas;
  }

  const PlanBatchParams& params_;
  const int num_many_rows_;
  const PlanBlock& block_;
  const int kv_head_;
  const SeqInfo seq_;
  const int rows_;
  const int side_by_side_;
  const bool joins_in_cluster_;
};

// Threads that write the items of a block and KV head together: each walks all keys and writes every `num`-th split.
struct Part {
  int number, num;  // a power of two
  __device__ __forceinline__ bool has(int split) const { return (split & (num - 1)) == number; }
};

__device__ inline void write_items(const PlanBatchParams& params, int num_many_rows, const PlanBlock& block,
                                   int kv_head, const Part& part) {
  const ItemWriter writer(params, num_many_rows, block, kv_head);
  KeySegment first{0, 0, 1};  // rows that see nothing still get their zeros
  int split = -1, split_begin = 0;
  int position = block.segment_begin;
  BlockWalk walk(params, block);
#pragma unroll 1
  for (bool is_last = false; !is_last;) {
    KeySegment segment;
    bool is_new_split = false;
    is_last = !walk.next(segment, is_new_split);
    if (is_last ? part.has(max(split, 0)) : is_new_split && split >= 0 && part.has(split)) {
      writer.write(max(split, 0), split_begin, split < 0 ? 0 : position, first);
    }
    if (is_last) break;
    if (is_new_split) {
      ++split;
      split_begin = position;
      first = segment;
    }
    if (kv_head == 0 && part.has(split)) params.arrays.segments[position] = segment;
    ++position;
  }
  for (int free = max(split, 0) + 1; free < writer.side_by_side(); ++free) {
    if (part.has(free)) writer.fill(free);
  }
  if (part.number == 0) writer.write_merge();
}

}  // namespace planner

}  // namespace qkv::cuda
