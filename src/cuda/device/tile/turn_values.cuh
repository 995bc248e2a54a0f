// Values of 8 bits on their way to the products: the warp that loads keys loads them too (TMA), and two warps turn them
// round, from [key][column] to [column][key]. core/index/forward_sm90_many_rows_f8_shape.hpp has the places.
#pragma once

#include "core/index/forward_sm90_many_rows_f8_shape.hpp"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/item_scales.cuh"
#include "tile/load_tiles.cuh"

namespace qkv::cuda::tile {

constexpr int kTurningWarps = 2;
constexpr int kTurnedStages = index::many_rows_f8_turned_stages(key::head_dim_v);

// Barriers as in Control: loaded_full has the loader's arrival, loaded_free and turned_full one of each turning warp,
// turned_free one of each consumer warp.
struct Float8Control {
  Control control;  // without its barriers of values
  unsigned long long loaded_full[2], loaded_free[2];
  unsigned long long turned_full[kTurnedStages], turned_free[kTurnedStages];
  int loaded_keys[2];               // by stage: keys that count, and kLoadedFinal
  ItemScales scales[kItemRecords];  // beside the records
};
constexpr int kLoadedFinal = 1 << 16;
static_assert(sizeof(Float8Control) <= index::kManyRowsControlBytes);

__device__ __forceinline__ void init_float8_control(Float8Control* control, int consumers) {
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(shared_address_of(&control->loaded_full[i]), 1);
    ptx::mbarrier_init(shared_address_of(&control->loaded_free[i]), kTurningWarps);
  }
  for (int i = 0; i < kTurnedStages; ++i) {
    ptx::mbarrier_init(shared_address_of(&control->turned_full[i]), kTurningWarps);
    ptx::mbarrier_init(shared_address_of(&control->turned_free[i]), 4 * consumers);
  }
  init_control(&control->control, consumers);
}

// One of the turning warps: every other 16 columns.
class ValueTurner {
 public:
  __device__ __forceinline__ ValueTurner(Float8Control* control, unsigned loaded, unsigned turned, int warp)
      : control_(control), loaded_(loaded), turned_(turned), warp_(warp) {}

  __device__ __forceinline__ void run() {
    while (!turn()) {
    }
  }

 private:
  // The next step. Returns whether it was the last one.
  __device__ __forceinline__ bool turn() {
    const int stage = ring_.stage(), turned_stage = turned_ring_.stage();
    ptx::mbarrier_wait(shared_address_of(&control_->loaded_full[stage]), ring_.phase());
    const int bits = control_->loaded_keys[stage];
    const int keys = bits & kStepKeys;
    const unsigned loaded = loaded_ + stage * kStageBytes;
    if (keys != key::tile_kv) clear_rows(loaded, keys);
    ptx::mbarrier_wait(shared_address_of(&control_->turned_free[turned_stage]), turned_ring_.phase() ^ 1);
    turn_stage(loaded, turned_ + turned_stage * kStageBytes);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_index() == 0) {
      ptx::mbarrier_arrive(shared_address_of(&control_->turned_full[turned_stage]));
      ptx::mbarrier_arrive(shared_address_of(&control_->loaded_free[stage]));
    }
    ring_.advance();
    turned_ring_.advance();
    return (bits & kLoadedFinal) != 0;
  }

  static constexpr int kStageBytes = key::tile_kv * key::head_dim_v;
  static constexpr int kChunks = key::head_dim_v / 16;  // of 16 columns
  static_assert(kChunks % kTurningWarps == 0 && key::tile_kv % 32 == 0);

  // Behind the last key: weights there are 0, but whatever lies there may be NaN.
  __device__ __forceinline__ void clear_rows(unsigned loaded, int keys) {
    constexpr int kOwnChunks = kChunks / kTurningWarps;
#pragma unroll 1
    for (int i = keys * kOwnChunks + lane_index(); i < key::tile_kv * kOwnChunks; i += 32) {
      const int chunk = i % kOwnChunks * kTurningWarps + warp_;
      ptx::store_shared_zero_16(loaded + index::loaded_chunk_offset(i / kOwnChunks, chunk, kBoxRows, key::head_dim_v));
    }
    __syncwarp();
  }

  // Four matrices of 8 keys x 16 columns at once, and kBatch such loads under way before the first is waited for.
  __device__ __forceinline__ void turn_stage(unsigned loaded, unsigned turned) {
    constexpr int kOwnChunks = kChunks / kTurningWarps;
    constexpr int kBatch = kOwnChunks < 4 ? kOwnChunks : 4;
    const int matrix = lane_index() / 8, row = lane_index() % 8;
    const unsigned bytes = index::turned_bytes(0, lane_index() / 4), other_bytes = bytes ^ 0x1111u;
#pragma unroll 1
    for (int i = 0; i < key::tile_kv / 32 * kOwnChunks; i += kBatch) {
      const int group = i / kOwnChunks, first = i % kOwnChunks * kTurningWarps + warp_;
      unsigned in[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int chunk = first + b * kTurningWarps;
        ptx::ldmatrix_x4_trans(
            in[b], loaded + index::loaded_chunk_offset(group * 32 + lane_index(), chunk, kBoxRows, key::head_dim_v));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const unsigned out[4] = {__byte_perm(in[b][0], in[b][1], bytes), __byte_perm(in[b][0], in[b][1], other_bytes),
                                 __byte_perm(in[b][2], in[b][3], bytes), __byte_perm(in[b][2], in[b][3], other_bytes)};
        const int column = (first + b * kTurningWarps) * 16 + index::turned_column(matrix, row);
        ptx::stmatrix_x4(turned + index::turned_value_offset(column, group * 2 + matrix / 2, key::tile_kv), out);
      }
    }
  }

  Float8Control* const control_;
  const unsigned loaded_, turned_;
  const int warp_;
  Ring<2> ring_;
  Ring<kTurnedStages> turned_ring_;
};

// Loads the values of each step behind its keys, by the same warp, whose lanes know where the boxes lie.
class ValueLoader {
 public:
  __device__ __forceinline__ ValueLoader(Float8Control* control, const ptx::TensorMap* map, unsigned loaded)
      : control_(control), map_(map), loaded_(loaded) {}

  __device__ __forceinline__ void load(const BoxPlace& key_place, int kv_head, const Step& step) {
    constexpr int kBoxBytes = kBoxRows * key::head_dim_v;
    const int box = lane_index();
    const int token = lane_word(key_place.token, box * kKeyParts), page = lane_word(key_place.page, box * kKeyParts);
    const int stage = ring_.stage();
    const unsigned full = shared_address_of(&control_->loaded_full[stage]);
    ptx::mbarrier_wait(shared_address_of(&control_->loaded_free[stage]), ring_.phase() ^ 1);
    if (box == 0) {
      const int keys = static_cast<int>(step.bits & kStepKeys);
      control_->loaded_keys[stage] = keys | ((step.bits & kStepFinal) != 0 ? kLoadedFinal : 0);
      ptx::mbarrier_arrive_expect_bytes(full, count_boxes(step) * kBoxBytes);
    }
    __syncwarp();
    if (box < count_boxes(step)) {
      ptx::tma_load_5d(loaded_ + (stage * kBoxes + box) * kBoxBytes, map_, 0, token, 0, kv_head, page, full);
    }
    ring_.advance();
  }

 private:
  Float8Control* const control_;
  const ptx::TensorMap* const map_;
  const unsigned loaded_;
  Ring<2> ring_;
};

}  // namespace qkv::cuda::tile
