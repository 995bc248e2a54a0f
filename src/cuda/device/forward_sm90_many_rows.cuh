// Forward attention for Hopper, many query rows: a persistent CTA an SM, one warpgroup that loads (TMA), two or three
// that multiply (wgmma), 64 packed query rows each. A consumer walks one continuous stream of (item, keys) steps and
// never drains at an item's edge. docs/forward_sm90_many_rows.md tells why it looks as it does and what each choice is
// worth; core/index/forward_sm90_many_rows_shape.hpp has its shapes, pipeline.cuh the protocol of its barriers.
// Keys and values of 8 bits are loaded as bytes, and one warpgroup more widens them (tile/widen_tiles.cuh).
//
// The text before this file: namespace qkv::cuda::key with
//   is_bf16, query_dtype, kv_dtype, token_scales, out_dtype, head_dim, head_dim_v, group_size, page_size, softcap,
//   alibi, mask, mask_by_head, num_mask_operands, mask_scope, tile_q, tile_kv, and
//   positive_factor  ForwardParams::query_factor > 0: scores need no factor before the maximum is taken
//   ping_pong        warpgroups take turns
// then #include "mask_tile.cuh" and, where key::mask, the function visible() in qkv::cuda.
#pragma once

#include "pipeline.cuh"
#include "ptx/convert.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "tile/descriptor.cuh"
#include "tile/lazy_softmax.cuh"
#include "tile/load_tiles.cuh"
#include "tile/recompute_rows.cuh"
#include "tile/step_consumer.cuh"
#include "tile/store_rows.cuh"
#include "tile/widen_tiles.cuh"

namespace qkv::cuda {
namespace many_rows {

constexpr bool kWidens = is_float8(key::kv_dtype);
constexpr index::ManyRowsShape kShape =
    kWidens ? index::many_rows_widening_shape() : index::many_rows_shape(key::head_dim, key::head_dim_v);
constexpr index::ManyRowsLayout kLayout = index::many_rows_layout(kShape, key::head_dim, key::head_dim_v);
constexpr int kThreads = index::many_rows_threads(kShape);
constexpr int kConsumers = kShape.consumers;
constexpr int kKeyColumns = index::many_rows_block_columns(key::head_dim);
constexpr int kValueColumns = index::many_rows_block_columns(key::head_dim_v);
constexpr int kConsumerQueryBytes = 64 * key::head_dim * 2;
constexpr int kValueBoxRows = kWidens ? key::tile_kv : tile::kBoxRows;
// Entry registers x threads = what all warps may hold together: 168 x 384, 128 x 512.
constexpr int kConsumerRegisters = kWidens ? 224 : kConsumers == 2 ? 232 : 160;
constexpr int kLoaderRegisters = kThreads == 384 ? 40 : 32;
constexpr int kWidenerRegisters = 32;
using tile::kTransformsScores;

static_assert(kShape.tile_kv == key::tile_kv && index::many_rows_tile_q(kShape) == key::tile_q);
static_assert(kWidens ? index::many_rows_widening_supports(key::head_dim, key::head_dim_v, key::page_size)
                      : index::many_rows_supports(key::head_dim, key::head_dim_v, key::page_size));

// A warpgroup of 64 query rows.
class Consumer : tile::StepConsumer<kShape> {
 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, unsigned memory, Control* control,
                                      const float* token_scales, int consumer)
      : StepConsumer(params, control, consumer),
        queries_(tile::descriptor_k_major(memory + consumer * kConsumerQueryBytes)),
        keys_(tile::descriptor_k_major(memory + kLayout.key_begin)),
        values_(tile::descriptor_n_major<kValueColumns>(memory + kLayout.value_begin, kValueBoxRows)),
        values_address_(memory + kLayout.value_begin),
        token_scales_(token_scales + threadIdx.x % 4 * 2) {}

  __device__ __forceinline__ void run() {
    begin();
    multiply_keys<0>();
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores_);
    release_multiplied_keys<0>();
    weigh<0, true>(step_);
    while (run_step<0>() && run_step<1>()) phase_ ^= 1;
    store_item(items_, softmax_);
  }

 private:
  static constexpr int kBuffers = kShape.weight_buffers;

  // Weights of the present step lie in buffer kStage (of two), its values in stage kStage. Returns whether steps
  // follow.
  template <int kStage>
  __device__ __forceinline__ bool run_step() {
    if constexpr (kBuffers == 2) return run_step_two_buffers<kStage>();
    return run_step_one_buffer<kStage>();
  }

  // Products of two steps overlap: the values of the step before are waited for behind the keys of the next one, and
  // an item that ended is stored under them.
  template <int kStage>
  __device__ __forceinline__ bool run_step_two_buffers() {
    constexpr int kNext = kStage ^ 1;
    const Step step = step_;
    const int item = items_;
    const bool more = begin_next<kStage>();
    take_turn();
    multiply_keys<kNext>();  // of old keys behind the last step: a branch here would serialise the products
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::pin(output_);
    if (step.bits & kStepFirst) {
      pass_turn();  // nobody waits for rows that are stored
      if (item > 0) {
        release(control_->value_free[kNext]);
        store_item(item - 1, ended_);
      }
    } else {
      release(control_->value_free[kNext]);
      rescale();
    }
    multiply_values<kStage>(step);
    if ((step.bits & kStepFirst) == 0) pass_turn();
    if (!more) return drain();
    ptx::wgmma_wait_group<1>();
    ptx::pin(scores_);
    release_multiplied_keys<kNext>();
    weigh<kNext>(step_);
    return true;
  }

  // One buffer of weights: it is free when the product with values is done, a softmax later.
  template <int kStage>
  __device__ __forceinline__ bool run_step_one_buffer() {
    constexpr int kNext = kStage ^ 1;
    const Step step = step_;
    const bool more = begin_next<kStage>();
    take_turn();
    multiply_keys<kNext>();
    ptx::wgmma_commit_group();
    multiply_values<kStage>(step);
    pass_turn();
    if (!more) return drain();
    // ptxas moves score terms before the second wait, where their registers spill: then one wait for both.
    ptx::wgmma_wait_group<kTransformsScores ? 0 : 1>();
    ptx::pin(scores_);
    release_multiplied_keys<kNext>();
    ptx::wgmma_wait_group<0>();
    ptx::pin(output_);
    ptx::pin(weights_[0]);
    release(control_->value_free[kStage]);
    weigh<0>(step_);
    if (step_.bits & kStepFirst) {
      store_item(items_ - 1, ended_);
    } else {
      rescale();
    }
    return true;
  }

  // Waits here, not where the paths join: moving accumulators of products under way would serialise all of them.
  __device__ __forceinline__ bool drain() {
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores_);
    ptx::pin(output_);
    return false;
  }

  // Scores to packed weights.
  template <int kBuffer, bool kFirst = false>
  __device__ __forceinline__ void weigh(const Step& step) {
    const bool first = kFirst || (step.bits & kStepFirst) != 0;
    if (first) {
      ended_ = softmax_;
      softmax_ = tile::LazySoftmax();
    }
    if constexpr (key::token_scales) multiply_by_key_scales<kBuffer>();
    if constexpr (kTransformsScores) transform(step, query_factor());
    if (hides(step)) hide(step);
    moved_ =
        softmax_.weigh(scores_, score_factor(), first, weights_[kBuffer], decay_, [&](int i, float low, float high) {
          if constexpr (key::token_scales) {
            const float2 scale = token_scale<kBuffer>(i, key::tile_kv);
            low *= scale.x;
            high *= scale.y;
          }
          return ptx::pack_16<key::is_bf16>(low, high);
        });
    if constexpr (key::token_scales) release_keys<kBuffer>(step);
  }

  // Keys that have been multiplied. Where their tokens have scales, those lie beside them until weights are made.
  template <int kStage>
  __device__ __forceinline__ void release_multiplied_keys() {
    static_assert(!key::token_scales || kBuffers == 2);
    if constexpr (!key::token_scales) release_keys<kStage>(step_);
  }

  // Of the keys of scores i and i + 1 (offset: 0), or of their values (tile_kv).
  template <int kStage>
  __device__ __forceinline__ float2 token_scale(int i, int offset) const {
    return *reinterpret_cast<const float2*>(token_scales_ + kStage * (2 * kTileKv) + offset + i / 4 * 8);
  }

  template <int kStage>
  __device__ __forceinline__ void multiply_by_key_scales() {
#pragma unroll
    for (int i = 0; i < kTileKv / 2; i += 2) {
      const float2 scale = token_scale<kStage>(i, 0);
      scores_[i] *= scale.x;
      scores_[i + 1] *= scale.y;
    }
  }

  // Of the newest step's item.
  __device__ __forceinline__ float query_factor() const {
    if constexpr (kWidens) return item_scales(items_).score;
    return params_.query_factor;
  }
  __device__ __forceinline__ float score_factor() const { return kTransformsScores ? 1.0F : query_factor(); }
  __device__ __forceinline__ const tile::ItemScales& item_scales(int item) const {
    return tile::widening(control_)->scales[item % kItemRecords];
  }

  template <int kStage>
  __device__ __forceinline__ void multiply_keys() {
    constexpr unsigned kSlotStep = kLayout.query_slot_bytes / 16;
    constexpr unsigned kStageStep = kLayout.key_stage_bytes / 16;
    const unsigned queries = queries_ + (kShape.query_slots == 1 ? 0 : query_.stage() * kSlotStep);
    ptx::pin(scores_);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < key::head_dim / 16; ++k) {
      ptx::wgmma_k16_ss<key::is_bf16, tile::kDescriptorHigh<kKeyColumns>>(
          scores_, queries + tile::k_major_step<kKeyColumns>(k, 64),
          keys_ + kStage * kStageStep + tile::k_major_step<kKeyColumns>(k, kTileKv), k > 0);
    }
  }

  template <int kStage>
  __device__ __forceinline__ void multiply_values(const Step& step) {
    constexpr int kBuffer = kBuffers == 2 ? kStage : 0;
    constexpr unsigned kStageStep = kLayout.value_stage_bytes / 16;
    wait(control_->value_full[kStage], phase_);
    const int keys = step.bits & kStepKeys;
    if (keys != kTileKv) clear_values(values_address_ + kStage * kLayout.value_stage_bytes, keys);
    const int continues = (step.bits & kStepFirst) == 0;
    ptx::pin(output_);
    ptx::pin(weights_[kBuffer]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileKv / 16; ++k) {
      ptx::wgmma_k16_rs_transposed<key::is_bf16, tile::kDescriptorHigh<kValueColumns>>(
          output_, &weights_[kBuffer][4 * k],
          values_ + kStage * kStageStep + tile::n_major_step<kValueColumns>(k, kValueBoxRows, key::head_dim_v),
          k > 0 ? 1 : continues);
    }
    ptx::wgmma_commit_group();
  }

  // Values behind the last key have weight 0, but whatever lies there may be NaN. Every consumer writes the same zeros.
  __device__ __forceinline__ void clear_values(unsigned stage, int keys) {
    constexpr int kRowChunks = key::head_dim_v / 8;
    constexpr int kBlockChunks = kValueColumns / 8;
    constexpr int kBoxChunks = kValueBoxRows * kRowChunks;
    for (int i = keys * kRowChunks + threadIdx.x % 128; i < kTileKv * kRowChunks; i += 128) {
      const int row = i / kRowChunks, chunk = i % kRowChunks;
      const int in_box = (chunk / kBlockChunks * kValueBoxRows + row % kValueBoxRows) * kBlockChunks;
      const unsigned address = stage + (row / kValueBoxRows * kBoxChunks + in_box + chunk % kBlockChunks) * 16;
      ptx::store_shared_zero_16(address);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kBarrierWarpgroup + consumer_, 128);
  }

  // Where the maximum of one of the warp's rows has moved; by exactly 1 where it has not.
  __device__ __forceinline__ void rescale() {
    if (!moved_) return;
#pragma unroll
    for (int i = 0; i < key::head_dim_v / 2; ++i) output_[i] *= decay_[i >> 1 & 1];
  }

  __device__ __forceinline__ void store_item(int item, const tile::LazySoftmax& softmax) {
    float value_scale = 1.0F;
    if constexpr (kWidens) value_scale = item_scales(item).value;
    if (tile::store_rows(params_, record(item), consumer_, softmax, output_, value_scale)) {
      control_->not_finite[threadIdx.x / 32 - 4] = true;
    }
  }

  const unsigned queries_, keys_, values_;  // descriptors of slot and stage 0
  const unsigned values_address_;
  const float* const token_scales_;  // of stage 0, from the thread's first column on

  float output_[key::head_dim_v / 2] = {};
  unsigned weights_[kBuffers][kTileKv / 4];
  tile::LazySoftmax softmax_, ended_;  // of the newest step's item, of the item before
  bool moved_ = false;                 // some maximum of the warp's rows, by the newest step:
  float decay_[2] = {1.0F, 1.0F};      // then of the output
};

// The loading warpgroup: warp 0 brings queries, warp 1 values, the others keys, or keys and scales of tokens.
__device__ __forceinline__ void load(const ForwardParams& params, const ManyRowsParams& many,
                                     const tile::TensorMaps& maps, Control* control, float* token_scales,
                                     unsigned memory, int warp) {
  if (warp == 0) {
    tile::load_queries<kShape.query_slots>(params, many, maps, control, memory, [&](int word, int i) {
      if constexpr (kWidens) tile::write_item_scales(params, word, &tile::widening(control)->scales[i % kItemRecords]);
    });
    return;
  }
  if constexpr (kWidens) {
    if (warp == 1)
      tile::load_value_bytes(params, many, maps, tile::widening(control), memory + kLayout.loaded_value_begin);
    if (warp == 2) tile::load_key_bytes(params, many, maps, tile::widening(control), memory + kLayout.loaded_key_begin);
    if (key::token_scales && warp == 3) tile::load_token_scales(params, many, control, token_scales);
  } else {
    constexpr int kKeyWarps = tile::kBoxes == 1 ? 1 : 2;
    if (warp == 1) {
      tile::load_values(params, many, maps, control, memory + kLayout.value_begin);
    } else if (warp - 2 < kKeyWarps) {
      tile::load_keys<kKeyWarps>(params, many, maps, control, memory + kLayout.key_begin, warp - 2,
                                 [](const tile::BoxPlace&, int, const Step&) {});
    }
  }
}

}  // namespace many_rows

// Grid: at most one CTA an SM, index::many_rows_threads threads, index::many_rows_layout(…).bytes of shared memory.
extern "C" __global__ void __launch_bounds__(many_rows::kThreads, 1)
    forward_sm90_many_rows(const __grid_constant__ ForwardParams params, const __grid_constant__ ManyRowsParams many,
                           const __grid_constant__ ptx::TensorMap query_map,
                           const __grid_constant__ ptx::TensorMap key_map,
                           const __grid_constant__ ptx::TensorMap value_map) {
  using namespace many_rows;
  extern __shared__ __align__(1024) char shared_memory[];
  const unsigned memory = shared_address_of(shared_memory);
  Control* const control = reinterpret_cast<Control*>(shared_memory + kLayout.control_begin);
  auto* const token_scales = reinterpret_cast<float*>(shared_memory + kLayout.token_scales_begin);
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  ptx::launch_dependents();  // few rows of the same batch may run on SMs that this grid has left
  if (threadIdx.x == 0) {
    if constexpr (kWidens)
      tile::init_widening_control(tile::widening(control), kConsumers);
    else
      init_control(control, kConsumers);
  }
  __syncthreads();
  if (many.cta_begin[blockIdx.x] == many.cta_begin[blockIdx.x + 1]) return;

  if (warpgroup == 0) {
    ptx::give_registers<kLoaderRegisters>();
    load(params, many, {&query_map, &key_map, &value_map}, control, token_scales, memory, warp);
  } else if (warpgroup <= kConsumers) {
    ptx::take_registers<kConsumerRegisters>();
    Consumer(params, memory, control, token_scales, warpgroup - 1).run();
    if constexpr (key::mask) tile::recompute_rows(params, many, control);
  } else {
    if constexpr (kWidens) {
      ptx::give_registers<kWidenerRegisters>();
      tile::TileWidener<kShape>(tile::widening(control), shared_memory).run();
    }
  }
}

}  // namespace qkv::cuda
