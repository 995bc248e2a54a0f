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
  return q_len <= 0 ? 0 : (q_len - 1) / cut.tokens + 1;
}

__device__ __forceinline__ SeqInfo seq_of(const PlanBatchParams& params, int request) {
  const int token_begin = params.forward.query_start_loc[request];
  return {token_begin, params.forward.query_start_loc[request + 1] - token_begin, params.forward.seq_lens[request], 0};
}

__device__ __forceinline__ int num_shown_keys(const PlanBatchParams& params, const SeqInfo& seq) {
  const index::ShownKeys keys{key::key_run, params.forward.rank, key::num_ranks, key::interleave_size};
  return keys.count(seq.q_len, seq.kv_len);
}

constexpr int kClusterSize = index::few_rows::kMaxClusterSplits;

__device__ __forceinline__ bool joins(const PlanBlock& block) { return block.num_splits > 1; }

// How an item's joins stand in a list: places side by side for each KV head, a power of two.
__device__ __forceinline__ int size_class(const PlanBlock& block) {
  if (block.list >= kFewRowsTiles || block.num_splits > kClusterSize) return 3;
  return block.num_splits > 4 ? 0 : block.num_splits > 2 ? 1 : block.num_splits > 1 ? 2 : 3;
}

// Places in the list for a KV head.
__device__ __forceinline__ int num_places(const PlanBlock& block, int size) {
  return size < 3 ? 8 >> size : block.num_splits > 1 ? block.num_splits : 1;
}

// The rows' classes over runs of tiles, found by halving, merged where neighbours are alike and cut where splits end.
// visit(segment, is_new_split) in rising order of keys.
//
// Ranges of tiles are powers of two on their own multiples, so that where one begins tells how long the next can be and
// none need be remembered: a stack would lie in local memory. Where ranges are halved doesn't show in the segments, as
// no part of a range is less certain than the whole.
class BlockWalk {
 public:
  __device__ __forceinline__ BlockWalk(const PlanBatchParams& params, const PlanBlock& block)
      : seq_(seq_of(params, block.request)),
        context_(params.forward, seq_, block.request),
        num_keys_(num_shown_keys(params, seq_)),
        cut_(cut_of(params, seq_.q_len, num_keys_)),
        q_low_(seq_.q_pos(block.query_begin)),
        q_high_(seq_.q_pos(block.query_end - 1)) {}

  template <typename Visit>
  __device__ __forceinline__ void run(Visit&& visit) {
    if (num_keys_ <= 0) return;
    const int num_tiles = (num_keys_ - 1) / cut_.tile_kv + 1;
    KeySegment run{0, 0, 0};
    int split_end = 0;
    int level = num_tiles > 1 ? 32 - __clz(num_tiles - 1) : 0;
    for (int tile = 0; tile < num_tiles;) {
      const int begin = tile * cut_.tile_kv;
      const int end = num_tiles - tile <= 1 << level ? num_keys_ : begin + (cut_.tile_kv << level);
      const TileClass tile_class = classify_range(context_, q_low_, q_high_, begin, end - 1);
      if (tile_class == TileClass::partial && level > 0) {
        --level;
        continue;
      }
      tile += 1 << level;
      level = __ffs(tile) - 1;
      if (tile_class == TileClass::empty) continue;
      const int full = tile_class == TileClass::full ? 1 : 0;
      if (run.end == begin && run.full == full) {
        run.end = end;
        continue;
      }
      cut(run, split_end, visit);
      run = {begin, end, full};
    }
    cut(run, split_end, visit);
  }

 private:
  // `split_end`: of the split that the segment before is in; 0 = there is none.
  template <typename Visit>
  __device__ __forceinline__ void cut(KeySegment run, int& split_end, Visit& visit) const {
    while (run.begin < run.end) {
      const bool is_new_split = run.begin >= split_end;
      if (is_new_split) split_end = index::split_end(run.begin, cut_.split_keys, num_keys_);
      const int end = min(run.end, split_end);
      visit(KeySegment{run.begin, end, run.full}, is_new_split);
      run.begin = end;
    }
  }

  const SeqInfo seq_;
  const MaskContext context_;
  const int num_keys_;
  const index::RequestCut cut_;
  const int q_low_, q_high_;
};

}  // namespace qkv::cuda::planner
