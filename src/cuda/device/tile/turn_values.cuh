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

  // Four matrices of 8 keys x 16 columns at once; while a batch of such loads is turned, the next one is under way.
  // Unrolled: the warp shares its processor's issue slots with the consumers, and addresses were half of what it
  // issued.
  __device__ __forceinline__ void turn_stage(unsigned loaded, unsigned turned) {
    constexpr int kOwnChunks = kChunks / kTurningWarps;
    constexpr int kBatch = 2;  // with 4, D = 128 was slower by 4 %
    constexpr int kBatches = key::tile_kv / 32 * kOwnChunks / kBatch;
    const int matrix = lane_index() / 8, row = lane_index() % 8;
    const unsigned bytes = index::turned_bytes(0, lane_index() / 4), other_bytes = bytes ^ 0x1111u;
    const unsigned from = loaded + index::loaded_chunk_offset(lane_index(), warp_, kBoxRows, key::head_dim_v);
    const unsigned to =
        turned + index::turned_value_offset(warp_ * 16 + index::turned_column(matrix, row), matrix / 2, key::tile_kv);
    const auto keys_of = [](int batch) { return batch * kBatch / kOwnChunks * 32; };
    const auto columns_of = [](int batch, int b) { return (batch * kBatch + b) % kOwnChunks * kTurningWarps * 16; };
    unsigned in[2][kBatch][4];
    const auto load = [&](int batch) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        ptx::ldmatrix_x4_trans(in[batch % 2][b], index::further_loaded_chunk(from, keys_of(batch), columns_of(batch, b),
                                                                             kBoxRows, key::head_dim_v));
      }
    };
    load(0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (batch + 1 < kBatches) load(batch + 1);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const unsigned(&words)[4] = in[batch % 2][b];
        const unsigned out[4] = {__byte_perm(words[0], words[1], bytes), __byte_perm(words[0], words[1], other_bytes),
                                 __byte_perm(words[2], words[3], bytes), __byte_perm(words[2], words[3], other_bytes)};
        ptx::stmatrix_x4(index::further_turned_value(to, keys_of(batch), columns_of(batch, b), key::tile_kv), out);
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
