// Values of 8 bits on their way to the products: one warp loads them (TMA), and with a second one turns them round,
// from [key][column] to [column][key], a step behind. core/index/forward_sm90_many_rows_f8_shape.hpp has the places.
#pragma once

#include "core/index/forward_sm90_many_rows_f8_shape.hpp"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/item_scales.cuh"
#include "tile/load_tiles.cuh"

namespace qkv::cuda::tile {

constexpr int kTurningWarps = 2;

// Barriers as in Control: loaded_full has the loader's arrival, loaded_free one of each turning warp; so has value_full
// of Control.
struct Float8Control {
  Control control;
  unsigned long long loaded_full[2], loaded_free[2];
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
  init_control(&control->control, consumers, kTurningWarps);
}

// One of the turning warps: every other 16 columns.
class ValueTurner {
 public:
  __device__ __forceinline__ ValueTurner(Float8Control* control, unsigned loaded, unsigned turned, int warp)
      : control_(control), loaded_(loaded), turned_(turned), warp_(warp) {}

  // The next step. Returns whether it was the last one.
  __device__ __forceinline__ bool turn() {
    const int stage = ring_.stage();
    ptx::mbarrier_wait(shared_address_of(&control_->loaded_full[stage]), ring_.phase());
    const int bits = control_->loaded_keys[stage];
    const int keys = bits & kStepKeys;
    const unsigned loaded = loaded_ + stage * kStageBytes;
    if (keys != key::tile_kv) clear_rows(loaded, keys);
    ptx::mbarrier_wait(shared_address_of(&control_->control.value_free[stage]), ring_.phase() ^ 1);
    turn_stage(loaded, turned_ + stage * kStageBytes);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_index() == 0) {
      ptx::mbarrier_arrive(shared_address_of(&control_->control.value_full[stage]));
      ptx::mbarrier_arrive(shared_address_of(&control_->loaded_free[stage]));
    }
    ring_.advance();
    return (bits & kLoadedFinal) != 0;
  }

 private:
  static constexpr int kStageBytes = key::tile_kv * key::head_dim_v;
  static constexpr int kChunks = key::head_dim_v / 16;  // of 16 columns
  static_assert(kChunks % kTurningWarps == 0 && key::tile_kv % 32 == 0);

  // Behind the last key: weights there are 0, but whatever lies there may be NaN.
  __device__ __forceinline__ void clear_rows(unsigned loaded, int keys) {
    constexpr int kOwnChunks = kChunks / kTurningWarps;
#pragma unroll 1
    for (int i = keys * kOwnChunks + lane_index(); i < key::tile_kv * kOwnChunks; i += 32) {
      const int chunk = i % kOwnChunks * kTurningWarps + warp_;
      ptx::store_shared_zero_16(loaded + index::loaded_value_offset(i / kOwnChunks, chunk, kBoxRows, key::head_dim_v));
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
            in[b], loaded + index::loaded_value_offset(group * 32 + lane_index(), chunk, kBoxRows, key::head_dim_v));
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
};

// The first turning warp: turns a step when the next one is on its way.
__device__ __forceinline__ void load_and_turn_values(const ForwardParams& params, const ManyRowsParams& many,
                                                     const TensorMaps& maps, Float8Control* control, unsigned loaded,
                                                     unsigned turned) {
  constexpr int kBoxBytes = kBoxRows * key::head_dim_v;
  const int box = lane_index();
  ValueTurner turner(control, loaded, turned, 0);
  Ring<2> ring;
  walk_steps<key::tile_kv>(params, many, [&](int word, const Step& step) {
    const BoxPlace place = find_box(params, lane_word(word, kWordFirst), box, step);
    const int kv_head = lane_word(word, kWordKvHead);
    const int stage = ring.stage();
    const unsigned full = shared_address_of(&control->loaded_full[stage]);
    ptx::mbarrier_wait(shared_address_of(&control->loaded_free[stage]), ring.phase() ^ 1);
    if (box == 0) {
      const int keys = static_cast<int>(step.bits & kStepKeys);
      control->loaded_keys[stage] = keys | ((step.bits & kStepFinal) != 0 ? kLoadedFinal : 0);
      ptx::mbarrier_arrive_expect_bytes(full, count_boxes(step) * kBoxBytes);
    }
    __syncwarp();
    if (box < count_boxes(step)) {
      ptx::tma_load_5d(loaded + (stage * kBoxes + box) * kBoxBytes, maps.value, 0, place.token, 0, kv_head, place.page,
                       full);
    }
    if (ring.uses > 0) turner.turn();
    ring.advance();
  });
  turner.turn();
}

}  // namespace qkv::cuda::tile
