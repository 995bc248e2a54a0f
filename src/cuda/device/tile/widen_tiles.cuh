// Keys and values of 8 bits on their way to 16-bit products: loading warps bring boxes of bytes (TMA), a warpgroup
// widens them to the tiles that the products read, where keys and values of 16 bits come as they are. Consumers see no
// difference, but for scales. core/index/forward_sm90_many_rows_shape.hpp has the places.
#pragma once

#include "tile/item_scales.cuh"
#include "tile/load_tiles.cuh"

namespace qkv::cuda::tile {

constexpr int kWideningWarps = 4;
constexpr int kLoadedStages = index::many_rows_widening_shape().loaded_stages;

// Barriers as in Control: loaded_*_full have the loader's arrival, loaded_*_free one of each widening warp. key_full
// and value_full then have those of the widening warps, and key_full one more where a warp brings scales of tokens.
struct WideningControl : Control {
  unsigned long long loaded_key_full[kLoadedStages], loaded_key_free[kLoadedStages];
  unsigned long long loaded_value_full[kLoadedStages], loaded_value_free[kLoadedStages];
  Step loaded_steps[kLoadedStages];  // by stage of loaded keys
  ItemScales scales[kItemRecords];   // beside the records
};
static_assert(sizeof(WideningControl) <= index::kManyRowsControlBytes);

__device__ __forceinline__ WideningControl* widening(Control* control) {
  return static_cast<WideningControl*>(control);
}
__device__ __forceinline__ const WideningControl* widening(const Control* control) {
  return static_cast<const WideningControl*>(control);
}

__device__ __forceinline__ void init_widening_control(WideningControl* control, int consumers) {
  for (int i = 0; i < kLoadedStages; ++i) {
    ptx::mbarrier_init(shared_address_of(&control->loaded_key_full[i]), 1);
    ptx::mbarrier_init(shared_address_of(&control->loaded_key_free[i]), kWideningWarps);
    ptx::mbarrier_init(shared_address_of(&control->loaded_value_full[i]), 1);
    ptx::mbarrier_init(shared_address_of(&control->loaded_value_free[i]), kWideningWarps);
  }
  init_control(control, consumers, kWideningWarps + (key::token_scales ? 1 : 0), kWideningWarps);
}

// Boxes of key bytes, and what is to be known of their step.
__device__ __forceinline__ void load_key_bytes(const ForwardParams& params, const ManyRowsParams& many,
                                               const TensorMaps& maps, WideningControl* control, unsigned keys) {
  load_rows<kUnits, kLoadedStages>(params, many, maps.key, control->loaded_key_full, control->loaded_key_free, keys,
                                   control->loaded_steps);
}

__device__ __forceinline__ void load_value_bytes(const ForwardParams& params, const ManyRowsParams& many,
                                                 const TensorMaps& maps, WideningControl* control, unsigned values) {
  load_rows<kUnitsV, kLoadedStages>(params, many, maps.value, control->loaded_value_full, control->loaded_value_free,
                                    values, nullptr);
}

// Scales of tokens, those of keys, then of values, to the stage of the step's keys. Behind the last key they are 0: the
// weights there are 0, too, and their products shall be.
__device__ __forceinline__ void load_token_scales(const ForwardParams& params, const ManyRowsParams& many,
                                                  Control* control, float* scales) {
  constexpr int kKeys = key::tile_kv / 32;  // of a lane
  Ring<2> ring;
  walk_steps<key::tile_kv>(params, many, [&](int word, const Step& step) {
    const int first = lane_word(word, kWordFirst), kv_head = lane_word(word, kWordKvHead);
    const int end = step.kv_begin + static_cast<int>(step.bits & kStepKeys);
    float of_key[kKeys] = {}, of_value[kKeys] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int position = step.kv_begin + i * 32 + lane_index();
      if (position >= end) continue;
      const BoxPlace place = find_key(params, first, position);
      const auto scale_in = [&](const KeyValueScales& of) {
        return of.data[place.page * of.page_stride + place.token * of.token_stride + kv_head * of.head_stride];
      };
      of_key[i] = scale_in(params.key_scale);
      of_value[i] = scale_in(params.value_scale);
    }
    ptx::mbarrier_wait(shared_address_of(&control->key_free[ring.stage()]), ring.phase() ^ 1);
    float* const stage = scales + ring.stage() * (2 * key::tile_kv) + lane_index();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      stage[i * 32] = of_key[i];
      stage[key::tile_kv + i * 32] = of_value[i];
    }
    __syncwarp();
    if (lane_index() == 0) ptx::mbarrier_arrive(shared_address_of(&control->key_full[ring.stage()]));
    ring.advance();
  });
}

// The widening warpgroup. Keys of the next step are widened before the values of the present one, as consumers read
// them.
template <index::ManyRowsShape kShape>
class TileWidener {
 public:
  __device__ __forceinline__ TileWidener(WideningControl* control, char* memory)
      : control_(control),
        loaded_keys_(memory + kLayout.loaded_key_begin),
        loaded_values_(memory + kLayout.loaded_value_begin),
        keys_(memory + kLayout.key_begin),
        values_(memory + kLayout.value_begin) {}

  __device__ __forceinline__ void run() {
    bool is_final = false;
    do {
      if (!is_final) is_final = widen_keys();
      if (is_final || key_ring_.uses > 1) widen_values();
    } while (!is_final || value_ring_.uses < key_ring_.uses);
  }

 private:
  static constexpr index::ManyRowsLayout kLayout = index::many_rows_layout(kShape, key::head_dim, key::head_dim_v);
  static constexpr int kThreads = 32 * kWideningWarps;

  // Returns whether the stream ends with this step.
  __device__ __forceinline__ bool widen_keys() {
    const int from = loaded_key_ring_.stage(), to = key_ring_.stage();
    ptx::mbarrier_wait(shared_address_of(&control_->loaded_key_full[from]), loaded_key_ring_.phase());
    const Step step = control_->loaded_steps[from];
    ptx::mbarrier_wait(shared_address_of(&control_->key_free[to]), key_ring_.phase() ^ 1);
    if (threadIdx.x % kThreads == 0) control_->steps[to] = step;
    constexpr int kLoadedBytes = key::tile_kv * key::head_dim;
    widen_tile<key::head_dim>(loaded_keys_ + from * kLoadedBytes, keys_ + to * (2 * kLoadedBytes));
    pass_on(control_->loaded_key_free[from], control_->key_full[to]);
    loaded_key_ring_.advance();
    key_ring_.advance();
    return (step.bits & kStepFinal) != 0;
  }

  __device__ __forceinline__ void widen_values() {
    const int from = loaded_value_ring_.stage(), to = value_ring_.stage();
    ptx::mbarrier_wait(shared_address_of(&control_->loaded_value_full[from]), loaded_value_ring_.phase());
    ptx::mbarrier_wait(shared_address_of(&control_->value_free[to]), value_ring_.phase() ^ 1);
    constexpr int kLoadedBytes = key::tile_kv * key::head_dim_v;
    widen_tile<key::head_dim_v>(loaded_values_ + from * kLoadedBytes, values_ + to * (2 * kLoadedBytes));
    pass_on(control_->loaded_value_free[from], control_->value_full[to]);
    loaded_value_ring_.advance();
    value_ring_.advance();
  }

  // Ordinary stores are fenced by each lane before products may read them.
  __device__ __forceinline__ static void pass_on(const unsigned long long& loaded, const unsigned long long& widened) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_index() != 0) return;
    ptx::mbarrier_arrive(shared_address_of(&widened));
    ptx::mbarrier_arrive(shared_address_of(&loaded));
  }

  // Of a tile, whose rows behind the last key may be anything: hidden keys, and values that consumers clear. Several
  // loads are under way before the first is waited for.
  template <int kDim>
  __device__ __forceinline__ static void widen_tile(const char* loaded, char* widened) {
    constexpr int kStepKeys = index::widening_step_keys(kDim);
    constexpr int kSteps = key::tile_kv / kStepKeys, kBatch = 2;
    static_assert(kSteps % kBatch == 0 && kStepKeys % 8 == 0);
    const index::WideningPlace place = index::widening_place(threadIdx.x % kThreads, kDim);
    loaded += index::loaded_chunk_offset(place.key, place.chunk, kBoxRows, kDim);
    const int first = index::widened_chunk_offset(place.key, place.chunk, key::tile_kv);
    char* const low = widened + first;
    char* const high = widened + (first ^ 16);
#pragma unroll 1
    for (int begin = 0; begin < kSteps; begin += kBatch) {
      uint4 bytes[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int offset = index::loaded_chunk_offset((begin + b) * kStepKeys, 0, kBoxRows, kDim);
        bytes[b] = *reinterpret_cast<const uint4*>(loaded + offset);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int offset = index::widened_chunk_offset((begin + b) * kStepKeys, 0, key::tile_kv);
        *reinterpret_cast<uint4*>(low + offset) = widen_eight<key::is_bf16, key::kv_dtype>({bytes[b].x, bytes[b].y});
        *reinterpret_cast<uint4*>(high + offset) = widen_eight<key::is_bf16, key::kv_dtype>({bytes[b].z, bytes[b].w});
      }
    }
  }

  WideningControl* const control_;
  const char* const loaded_keys_;
  const char* const loaded_values_;
  char* const keys_;
  char* const values_;
  Ring<kLoadedStages> loaded_key_ring_, loaded_value_ring_;
  Ring<2> key_ring_, value_ring_;
};

}  // namespace qkv::cuda::tile
