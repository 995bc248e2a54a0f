// How a block of query rows is cut along its keys, and how its items stand in their list: the device's counterpart of
// plan::Cutter::find_splits. It finds the same segments and splits, for masks whose operands belong to whole requests.
#pragma once

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/index/shown_keys.hpp"
#include "dtype_codes.cuh"
#include "mask_tile.cuh"
#include "plan_params.hpp"

namespace qkv::cuda::planner {

__device__ __forceinline__ index::RequestCut cut_of(const PlanBatchParams& params, int q_len, int kv_len) {
  namespace shape = index::few_rows;
  constexpr shape::KeyValueShape kKeyValue{key::head_dim, key::head_dim_v, size_of(key::kv_dtype), key::token_scales};
  const int rows = q_len * key::group_size;
  if (!params.few_rows_sm90 || rows > params.rules.few_rows) return index::cut_request(params.rules, q_len);
  const int tile_q = shape::tile_rows(rows);
  return {true, q_len, shape::tile_keys(kKeyValue, tile_q),
          shape::split_keys(kKeyValue, kv_len, params.rules.num_kv_heads, tile_q)};
}

__device__ __forceinline__ int list_of(const PlanBatchParams& params, const index::RequestCut& cut, int rows) {
  if (!cut.few_rows) return kListManyRows;
  if (!params.few_rows_sm90) return kListFewRows;
  const int tile_q = index::few_rows::tile_rows(rows);
  return tile_q == 4 ? 0 : tile_q == 8 ? 1 : tile_q == 16 ? 2 : 3;
}

__device__ __forceinline__ int num_blocks_of(const index::RequestCut& cut, int q_len) {
  return q_len <= cut.tokens ? min(max(q_len, 0), 1) : (q_len - 1) / cut.tokens + 1;
}

__device__ __forceinline__ SeqInfo seq_of(const PlanBatchParams& params, int request) {
  const int token_begin = params.forward.query_start_loc[request];
  return {token_begin, params.forward.query_start_loc[request + 1] - token_begin, params.forward.seq_lens[request], 0};
}

__device__ __forceinline__ int num_shown_keys(const PlanBatchParams& params, const SeqInfo& seq) {
  const index::ShownKeys keys{key::key_run, params.forward.rank, key::num_ranks, key::interleave_size};
  return keys.count(seq.q_len, seq.kv_len);
}

using index::few_rows::kMaxClusterSplits;

__device__ __forceinline__ bool joins(const PlanBlock& block) { return block.num_splits > 1; }

// How an item's joins stand in a list: places side by side for each KV head, a power of two.
__device__ __forceinline__ int size_class(const PlanBlock& block) {
  if (block.list >= kFewRowsTiles || block.num_splits > kMaxClusterSplits) return 3;
  return block.num_splits > 4 ? 0 : block.num_splits > 2 ? 1 : block.num_splits > 1 ? 2 : 3;
}

// Places in the list for a KV head.
__device__ __forceinline__ int num_places(const PlanBlock& block, int size) {
  return size < 3 ? 8 >> size : block.num_splits > 1 ? block.num_splits : 1;
}

// The rows' classes over runs of tiles, found by halving, merged where neighbours are alike and cut where splits end.
//
// Ranges of tiles are powers of two on their own multiples, so that where one begins tells how long the next can be and
// none need be remembered: a stack would lie in local memory. Where ranges are halved doesn't show in the segments, as
// no part of a range is less certain than the whole. Who walks asks in one place, so that a walk is compiled once.
class BlockWalk {
 public:
  __device__ __forceinline__ BlockWalk(const PlanBatchParams& params, const PlanBlock& block)
      : seq_(seq_of(params, block.request)),
        context_(params.forward, seq_, block.request),
        num_keys_(num_shown_keys(params, seq_)),
        cut_(cut_of(params, seq_.q_len, num_keys_)),
        q_low_(seq_.q_pos(block.query_begin)),
        q_high_(seq_.q_pos(block.query_end - 1)),
        level_(max(__clz(cut_.tile_kv) - __clz(max(num_keys_, 1)) + 1, 0)) {}

  // The next segment in rising order of keys; false: there is none.
  __device__ __forceinline__ bool next(KeySegment& segment, bool& is_new_split) {
    if (run_.begin >= run_.end) find_run();
    if (run_.begin >= run_.end) return false;
    is_new_split = run_.begin >= split_end_;
    if (is_new_split) split_end_ = index::next_split_end(run_.begin, split_end_, cut_.split_keys, num_keys_);
    segment = {run_.begin, min(run_.end, split_end_), run_.full};
    run_.begin = segment.end;
    return true;
  }

 private:
  // A range that ends the run is left for the next one, and then looked at again.
  __device__ __forceinline__ void find_run() {
    run_ = {0, 0, 0};
    while (begin_ < num_keys_) {
      const unsigned most = static_cast<unsigned>(cut_.tile_kv) << level_;  // below 2^32
      const unsigned left = num_keys_ - begin_;
      const int end = begin_ + static_cast<int>(min(most, left));
      const TileClass tile_class = classify_range(context_, q_low_, q_high_, begin_, end - 1);
      if (tile_class == TileClass::partial && level_ > 0) {
        --level_;
        continue;
      }
      const int full = tile_class == TileClass::full ? 1 : 0;
      const bool has_begun = run_.begin < run_.end;
      if (has_begun && (tile_class == TileClass::empty || full != run_.full)) return;
      if (tile_class != TileClass::empty) run_ = {has_begun ? run_.begin : begin_, end, full};
      begin_ = end;
      tile_ += 1 << level_;
      level_ = __ffs(tile_) - 1;
    }
  }

  const SeqInfo seq_;
  const MaskContext context_;
  const int num_keys_;
  const index::RequestCut cut_;
  const int q_low_, q_high_;
  int level_;  // log2 of the tiles in the range that is looked at next: at first, of all
  int tile_ = 0, begin_ = 0;
  KeySegment run_{0, 0, 0};  // what is left of it
  int split_end_ = 0;        // of the split that the segment before is in; 0 = there is none
};

}  // namespace qkv::cuda::planner
