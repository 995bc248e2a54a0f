// Forward attention for Hopper, many query rows, queries, keys and values all e4m3: the kernel of
// forward_sm90_many_rows.cuh on the tensor cores' 8-bit products, at twice their rate.
//   scores  queries · keysᵀ, both as they lie
//   values  weights, rounded to e4m3 with a scale of each row and step (tile/step_softmax.cuh), · values, which two
//           warps turn round on their way (tile/turn_values.cuh). The product of a step is added to the output in f32:
//           the tensor cores' own sums keep some 14 bits only
// A warpgroup does one thing after another, and the others fill its waits: at most 128 columns leave room for three,
// whose weights lie in shared memory; of two, they stay in registers.
// docs/forward_sm90_many_rows_f8.md tells why; core/index/forward_sm90_many_rows_f8_shape.hpp has its shapes.
//
// The text before this file: as for forward_sm90_many_rows.cuh.
#pragma once

#include "core/index/forward_sm90_many_rows_f8_shape.hpp"
#include "pipeline.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/float8.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_f8.cuh"
#include "tile/descriptor.cuh"
#include "tile/load_tiles.cuh"
#include "tile/recompute_rows.cuh"
#include "tile/step_consumer.cuh"
#include "tile/step_softmax.cuh"
#include "tile/store_rows.cuh"
#include "tile/turn_values.cuh"

namespace qkv::cuda {
namespace many_rows_f8 {

constexpr index::ManyRowsShape kShape =
    index::many_rows_f8_shape(key::head_dim, key::head_dim_v, key::tile_q < 3 * index::kManyRowsRowsPerConsumer);
constexpr index::ManyRowsF8Layout kLayout = index::many_rows_f8_layout(kShape, key::head_dim, key::head_dim_v);
constexpr int kThreads = index::many_rows_threads(kShape);
constexpr int kKeyColumns = tile::kColumns;                               // of a block, in units of 16 bits
constexpr int kValueColumns = index::many_rows_f8_units(kShape.tile_kv);  // of a row of turned values, likewise
constexpr int kKeySteps = key::head_dim / 32;                             // products of k = 32
constexpr int kChunkColumns = index::many_rows_f8_chunk_columns(key::head_dim_v);
constexpr int kChunks = key::head_dim_v / kChunkColumns;  // of the output
constexpr bool kTakesScores = kChunkColumns == kShape.tile_kv;
constexpr bool kWeightsInRegisters = index::many_rows_f8_weights_in_registers(key::head_dim_v);
// 168 x 384 threads, 128 x 512.
constexpr int kConsumerRegisters = kShape.consumers == 2 ? 232 : 152,
              kLoaderRegisters = kShape.consumers == 2 ? 40 : 56;

static_assert(kShape.tile_kv == key::tile_kv && index::many_rows_tile_q(kShape) == key::tile_q);
static_assert(index::many_rows_f8_supports(key::head_dim, key::head_dim_v, key::page_size));

// A warpgroup of 64 query rows.
class Consumer : tile::StepConsumer<kShape> {
 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, unsigned memory, tile::Float8Control* control,
                                      int consumer)
      : StepConsumer(params, &control->control, consumer),
        float8_control_(control),
        queries_(tile::descriptor_k_major(memory + consumer * (64 * key::head_dim))),
        keys_(tile::descriptor_k_major(memory + kLayout.key_begin)),
        values_(tile::descriptor_k_major(memory + kLayout.value_begin)),
        weights_(tile::descriptor_k_major(memory + kLayout.weight_begin + consumer * (64 * kShape.tile_kv))) {}

  __device__ __forceinline__ void run() {
    begin();
    multiply_keys<0>();
    weigh<0>();
    while (run_step<0>() && run_step<1>()) phase_ ^= 1;
  }

 private:
  // Returns whether a step follows: then it is the present one.
  template <int kStage>
  __device__ __forceinline__ bool run_step() {
    wait(float8_control_->turned_full[turned_.stage()], turned_.phase());
    take_turn();
    add_chunks<0>();
    release(float8_control_->turned_free[turned_.stage()]);
    turned_.advance();
    if (step_.bits & kStepLast) {
      store_item();
#pragma unroll
      for (float& column : output_) column = 0.0F;
    }
    if (!begin_next<kStage>()) {
      pass_turn();
      return false;
    }
    multiply_keys<kStage ^ 1>();
    pass_turn();
    weigh<kStage ^ 1>();
    return true;
  }

  // The products with chunk kChunk of the values and those behind it.
  template <int kChunk>
  __device__ __forceinline__ void add_chunks() {
    multiply_values<kChunk>();
    ptx::wgmma_wait_group<0>();
    add_product<kChunk>();
    if constexpr (kChunk + 1 < kChunks) add_chunks<kChunk + 1>();
  }

  template <int kChunk>
  __device__ __forceinline__ void add_product() {
    constexpr int kCount = kChunkColumns / 2;
    auto& product = product_registers();
    ptx::pin(product);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& column = output_[kChunk * kCount + i];
      column = fmaf(product[i], scale_.factor[i >> 1 & 1], column);
    }
  }

  // Scores have become weights: a product with values that is as large takes their registers. (In half of them, ptxas
  // serialises the products.)
  __device__ __forceinline__ auto& product_registers() {
    if constexpr (kTakesScores) {
      return scores_;
    } else {
      return product_;
    }
  }

  // Scores, whose products are under way, to weights, and what those stand for. A product reads a row's weights for the
  // warp that holds the row: they wait for nobody else, and the product that read the last ones is done.
  template <int kStage>
  __device__ __forceinline__ void weigh() {
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores_);
    release_keys<kStage>(step_);
    if (step_.bits & kStepFirst) softmax_ = tile::StepSoftmax();
    if constexpr (tile::kTransformsScores) transform(step_, float8_control_->scales[items_ % kItemRecords].score);
    if (hides(step_)) hide(step_);
    softmax_.find_base(scores_, score_factor(), scale_, [&](const float(&decay)[2]) {
#pragma unroll
      for (int i = 0; i < key::head_dim_v / 2; ++i) output_[i] *= decay[i >> 1 & 1];
    });
    softmax_.exponentiate(scores_, score_factor(), scale_, [&](int i) { take_weights(i); });
    if constexpr (!kWeightsInRegisters) {
      ptx::fence_proxy_async();
      __syncwarp();
    }
  }

  // Four neighbouring weights in the order of index::key_of_place: register i of the operand.
  __device__ __forceinline__ unsigned packed(int i) const {
    const float* s = &scores_[i / 2 * 8 + i % 2 * 2];
    return ptx::pack_e4m3x4(s[0], s[1], s[4], s[5]);
  }

  // The weights of keys 32·i … 32·i + 31. In shared memory, matrices of one stmatrix are rows 0 … 7 and 8 … 15 of the
  // warp's of 16 keys, then of the next 16.
  __device__ __forceinline__ void take_weights(int i) {
    const unsigned words[4] = {packed(4 * i), packed(4 * i + 1), packed(4 * i + 2), packed(4 * i + 3)};
    if constexpr (kWeightsInRegisters) {
#pragma unroll
      for (int j = 0; j < 4; ++j) packed_[4 * i + j] = words[j];
    } else {
      const int lane = lane_index(), row = threadIdx.x % 128 / 32 * 16 + lane % 16;
      ptx::stmatrix_x4(tile::address_of_descriptor(weights_) + index::weight_offset(row, 2 * i + lane / 16, kTileKv),
                       words);
    }
  }

  __device__ __forceinline__ float score_factor() const {
    return tile::kTransformsScores ? 1.0F : float8_control_->scales[items_ % kItemRecords].score;
  }

  template <int kStage>
  __device__ __forceinline__ void multiply_keys() {
    constexpr unsigned kSlotStep = kLayout.query_slot_bytes / 16;
    constexpr unsigned kStageStep = kLayout.key_stage_bytes / 16;
    const unsigned queries = queries_ + (kShape.query_slots == 1 ? 0 : query_.stage() * kSlotStep);
    ptx::pin(scores_);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      ptx::wgmma_k32_ss<tile::kDescriptorHigh<kKeyColumns>>(
          scores_, queries + tile::k_major_step<kKeyColumns>(k, 64),
          keys_ + kStage * kStageStep + tile::k_major_step<kKeyColumns>(k, kTileKv), k > 0);
    }
    ptx::wgmma_commit_group();
  }

  template <int kChunk>
  __device__ __forceinline__ void multiply_values() {
    constexpr unsigned kStageStep = kLayout.value_stage_bytes / 16;
    constexpr unsigned kChunkStep = kChunkColumns * kTileKv / 16;
    const unsigned values = values_ + turned_.stage() * kStageStep + kChunk * kChunkStep;
    auto& product = product_registers();
    ptx::pin(product);
    if constexpr (kWeightsInRegisters) ptx::pin(packed_);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileKv / 32; ++k) {
      multiply_step(product, k, values + tile::k_major_step<kValueColumns>(k, key::head_dim_v));
    }
    ptx::wgmma_commit_group();
  }

  template <int kCount>
  __device__ __forceinline__ void multiply_step(float (&product)[kCount], int k, unsigned values) {
    if constexpr (kWeightsInRegisters) {
      ptx::wgmma_k32_rs<tile::kDescriptorHigh<kValueColumns>>(product, &packed_[4 * k], values, k > 0);
    } else {
      const unsigned weights = weights_ + tile::k_major_step<kValueColumns>(k, 64);
      ptx::wgmma_k32_ss<tile::kDescriptorHigh<kValueColumns>>(product, weights, values, k > 0);
    }
  }

  __device__ __forceinline__ void store_item() {
    if (tile::store_rows(params_, record(items_), consumer_, softmax_, output_,
                         float8_control_->scales[items_ % kItemRecords].value)) {
      control_->not_finite[threadIdx.x / 32 - 4] = true;
    }
  }

  tile::Float8Control* const float8_control_;
  const unsigned queries_, keys_, values_, weights_;  // descriptors; of slot and stage 0

  float output_[key::head_dim_v / 2] = {};
  float product_[kTakesScores ? 1 : kChunkColumns / 2];
  unsigned packed_[kWeightsInRegisters ? kTileKv / 8 : 1];  // the present step's weights
  tile::StepScale scale_ = {};                              // what they stand for
  tile::StepSoftmax softmax_;                               // of its item
  Ring<tile::kTurnedStages> turned_;                        // its values
};

}  // namespace many_rows_f8

// Grid: at most one CTA an SM, index::many_rows_threads threads, index::many_rows_f8_layout(…).bytes of shared memory.
extern "C" __global__ void __launch_bounds__(many_rows_f8::kThreads, 1)
    forward_sm90_many_rows_f8(const __grid_constant__ ForwardParams params, const __grid_constant__ ManyRowsParams many,
                              const __grid_constant__ ptx::TensorMap query_map,
                              const __grid_constant__ ptx::TensorMap key_map,
                              const __grid_constant__ ptx::TensorMap value_map) {
  using namespace many_rows_f8;
  extern __shared__ __align__(1024) char shared_memory[];
  const unsigned memory = shared_address_of(shared_memory);
  const unsigned loaded = memory + kLayout.loaded_value_begin, turned = memory + kLayout.value_begin;
  auto* const control = reinterpret_cast<tile::Float8Control*>(shared_memory + kLayout.control_begin);
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  ptx::launch_dependents();  // few rows of the same batch may run on SMs that this grid has left
  if (threadIdx.x == 0) tile::init_float8_control(control, kShape.consumers);
  __syncthreads();
  if (many.cta_begin[blockIdx.x] == many.cta_begin[blockIdx.x + 1]) return;

  if (warpgroup == 0) {
    ptx::give_registers<kLoaderRegisters>();
    const tile::TensorMaps maps{&query_map, &key_map, &value_map};
    if (warp == 0) {
      tile::load_queries<kShape.query_slots>(params, many, maps, &control->control, memory, [&](int word, int i) {
        tile::write_item_scales(params, word, &control->scales[i % kItemRecords]);
      });
    } else if (warp == 2) {
      tile::ValueLoader values(control, &value_map, loaded);
      tile::load_keys<1>(
          params, many, maps, &control->control, memory + kLayout.key_begin, 0,
          [&](const tile::BoxPlace& place, int kv_head, const Step& step) { values.load(place, kv_head, step); });
    } else {
      tile::ValueTurner(control, loaded, turned, warp / 2).run();
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    Consumer(params, memory, control, warpgroup - 1).run();
    if constexpr (key::mask) tile::recompute_rows(params, many, &control->control);
  }
}

}  // namespace qkv::cuda
