// Forward attention for Hopper, many query rows, queries, keys and values all e4m3: the kernel of
// forward_sm90_many_rows.cuh on the tensor cores' 8-bit products, at twice their rate.
//   scores  queries · keysᵀ, both as they lie; over more than 128 columns in two sums, which are added in f32
//   values  weights, rounded to e4m3 with a scale of each row and step (tile/step_softmax.cuh), · values, which two
//           warps turn round on their way (tile/turn_values.cuh). The product of a step, 64 columns at a time, is added
//           to the output in f32: the tensor cores' own sums keep some 14 bits only
// docs/forward_sm90_many_rows_f8.md tells why; core/index/forward_sm90_many_rows_f8_shape.hpp has its shapes.
//
// The text before this file: as for forward_sm90_many_rows.cuh.
#pragma once

#include "core/index/forward_sm90_many_rows_f8_shape.hpp"
#include "pipeline.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/float8.cuh"
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

constexpr index::ManyRowsShape kShape = index::many_rows_f8_shape(key::head_dim, key::head_dim_v);
constexpr index::ManyRowsF8Layout kLayout = index::many_rows_f8_layout(kShape, key::head_dim, key::head_dim_v);
constexpr int kThreads = index::many_rows_threads(kShape);
constexpr int kKeyColumns = tile::kColumns;                                // of a block, in units of 16 bits
constexpr int kValueColumns = index::many_rows_f8_units(kShape.tile_kv);   // of a row of turned values, likewise
constexpr int kKeySteps = key::head_dim / 32;                              // products of k = 32
constexpr int kKeyPartSteps = index::kManyRowsF8KeyColumns / 32;           // that are summed by the tensor cores
constexpr int kChunks = key::head_dim_v / index::kManyRowsF8ChunkColumns;  // of the output
constexpr int kConsumerRegisters = 232, kLoaderRegisters = 40;             // x 256 and 128 threads: 168 x 384
constexpr bool kTwoKeyParts = kKeySteps > kKeyPartSteps;

static_assert(kShape.tile_kv == key::tile_kv && index::many_rows_tile_q(kShape) == key::tile_q);
static_assert(index::many_rows_f8_supports(key::head_dim, key::head_dim_v, key::page_size));
static_assert(!kTwoKeyParts || (kKeySteps <= 2 * kKeyPartSteps && kShape.tile_kv == index::kManyRowsF8ChunkColumns));

// A warpgroup of 64 query rows.
class Consumer : tile::StepConsumer<kShape> {
 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, unsigned memory, tile::Float8Control* control,
                                      int consumer)
      : StepConsumer(params, &control->control, consumer),
        float8_control_(control),
        queries_(tile::descriptor_k_major(memory + consumer * (64 * key::head_dim))),
        keys_(tile::descriptor_k_major(memory + kLayout.key_begin)),
        values_(tile::descriptor_k_major(memory + kLayout.value_begin)) {}

  __device__ __forceinline__ void run() {
    begin();
    multiply_keys<0>();
    finish_keys<0, 0>();
#pragma unroll
    for (float& sum : product_) sum = 0.0F;  // as if of a step before; scores of keys that do not count may be NaN
    release_keys<0>(step_);
    find_scale<0>();
    exponentiate<0, 0, 1>();
    pack<0>();
    while (run_step<0>() && run_step<1>()) phase_ ^= 1;
    store_item(items_, softmax_);
  }

 private:
  // Weights of the present step lie in buffer kStage, its values in stage kStage. The product of the step before with
  // its last columns is waited for behind the keys of the next step, as the 16-bit kernel does with its values; those
  // of the other columns run under the search for the next step's maximum and its exponentials. Returns whether steps
  // follow.
  template <int kStage>
  __device__ __forceinline__ bool run_step() {
    constexpr int kNext = kStage ^ 1;
    const Step step = step_;
    const int item = items_;
    const bool more = begin_next<kStage>();
    take_turn();
    multiply_keys<kNext>();  // of old keys behind the last step: a branch here would serialise the products
    ptx::wgmma_wait_group<1>();
    end_step<kNext>(step, item);
    if constexpr (kTwoKeyParts) finish_keys<kNext, 0>();
    wait(float8_control_->turned_full[turned_.stage()], turned_.phase());
    multiply_values<kStage>(0);
    if ((step.bits & kStepFirst) == 0) pass_turn();
    if (!more) return drain<kStage>();
    if constexpr (!kTwoKeyParts) finish_keys<kNext, 1>();
    release_keys<kNext>(step_);
    find_scale<kNext>();
    run_chunks<kStage, 0>();
    turned_.advance();
    pack<kNext>();
    return true;
  }

  // The step before the present one, of buffer and stage kStage, has its last product; the item before, if it was its
  // last step, is stored.
  template <int kStage>
  __device__ __forceinline__ void end_step(const Step& step, int item) {
    ptx::pin(weights_[kStage]);
    add_product<kStage, kChunks - 1>();
    if (step.bits & kStepFirst) {
      pass_turn();  // nobody waits for rows that are stored
      if (item > 0) {
        release_values();
        store_item(item - 1, ended_);
#pragma unroll
        for (float& column : output_) column = 0.0F;
      }
    } else {
      release_values();
      rescale();
    }
  }

  // Those of the step before the present one.
  __device__ __forceinline__ void release_values() {
    release(float8_control_->turned_free[(turned_.uses - 1) % index::kManyRowsF8TurnedStages]);
  }

  // The products with chunk kChunk and, but for the last one, those behind it; between them the next step's
  // exponentials.
  template <int kStage, int kChunk>
  __device__ __forceinline__ void run_chunks() {
    constexpr int kParts = kChunks == 1 ? 1 : kChunks - 1;
    if constexpr (kChunks == 1) {
      exponentiate<kStage ^ 1, 0, 1>();
    } else if constexpr (kChunk + 1 < kChunks) {
      ptx::wgmma_wait_group<0>();
      add_product<kStage, kChunk>();
      multiply_values<kStage>(kChunk + 1);
      exponentiate<kStage ^ 1, kChunk, kParts>();
      run_chunks<kStage, kChunk + 1>();
    }
  }

  // Waits here, not where the paths join: moving accumulators of products under way would serialise all of them.
  template <int kStage>
  __device__ __forceinline__ bool drain() {
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores_);
    drain_chunks<kStage, 0>();
    return false;
  }

  template <int kStage, int kChunk>
  __device__ __forceinline__ void drain_chunks() {
    add_product<kStage, kChunk>();
    if constexpr (kChunk + 1 < kChunks) {
      multiply_values<kStage>(kChunk + 1);
      ptx::wgmma_wait_group<0>();
      drain_chunks<kStage, kChunk + 1>();
    }
  }

  // To the output, behind the wait for it.
  template <int kBuffer, int kChunk>
  __device__ __forceinline__ void add_product() {
    constexpr int kCount = index::kManyRowsF8ChunkColumns / 2;
    ptx::pin(product_);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& column = output_[kChunk * kCount + i];
      column = fmaf(product_[i], scale_[kBuffer].factor[i >> 1 & 1], column);
    }
  }

  // What the newest step's weights, in buffer kBuffer, will stand for.
  template <int kBuffer>
  __device__ __forceinline__ void find_scale() {
    if (step_.bits & kStepFirst) {
      ended_ = softmax_;
      softmax_ = tile::StepSoftmax();
    }
    if constexpr (tile::kTransformsScores) transform(step_, float8_control_->scales[items_ % kItemRecords].score);
    if (hides(step_)) hide(step_);
    moved_ = softmax_.find_scale(scores_, score_factor(), scale_[kBuffer], decay_);
    step_sum_[0] = step_sum_[1] = 0.0F;
  }

  template <int kBuffer, int kPart, int kParts>
  __device__ __forceinline__ void exponentiate() {
    constexpr int kQuads = kTileKv / 8;
    softmax_.exponentiate<kQuads * kPart / kParts * 4, kQuads*(kPart + 1) / kParts * 4>(scores_, score_factor(),
                                                                                        scale_[kBuffer], step_sum_);
  }

  // The newest step's weights, in the order of index::key_of_place.
  template <int kBuffer>
  __device__ __forceinline__ void pack() {
    softmax_.add(step_sum_, scale_[kBuffer], decay_);
#pragma unroll
    for (int i = 0; i < kTileKv / 8; ++i) {
      const float* s = &scores_[i / 2 * 8 + i % 2 * 2];  // of 16 keys, row i % 2
      weights_[kBuffer][i] = ptx::pack_e4m3x4(s[0], s[1], s[4], s[5]);
    }
  }

  __device__ __forceinline__ float score_factor() const {
    return tile::kTransformsScores ? 1.0F : float8_control_->scales[items_ % kItemRecords].score;
  }

  template <int kStage>
  __device__ __forceinline__ void multiply_keys() {
    ptx::pin(scores_);
    ptx::wgmma_fence();
    multiply_key_part<kStage, 0>(scores_);
    ptx::wgmma_commit_group();
  }

  // Waits until at most kRemaining products are under way. A second part of the keys takes the chunk's registers.
  template <int kStage, int kRemaining>
  __device__ __forceinline__ void finish_keys() {
    if constexpr (kTwoKeyParts) {
      ptx::pin(product_);
      ptx::wgmma_fence();
      multiply_key_part<kStage, 1>(product_);
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_wait_group<kRemaining>();
    ptx::pin(scores_);
    if constexpr (kTwoKeyParts) {
      ptx::pin(product_);
#pragma unroll
      for (int i = 0; i < index::kManyRowsF8ChunkColumns / 2; ++i) scores_[i] += product_[i];
    }
  }

  template <int kStage, int kPart, int kCount>
  __device__ __forceinline__ void multiply_key_part(float (&sums)[kCount]) {
    constexpr unsigned kSlotStep = kLayout.query_slot_bytes / 16;
    constexpr unsigned kStageStep = kLayout.key_stage_bytes / 16;
    constexpr int kBegin = kPart * kKeyPartSteps;
    constexpr int kEnd = kBegin + kKeyPartSteps < kKeySteps ? kBegin + kKeyPartSteps : kKeySteps;
    const unsigned queries = queries_ + (kShape.query_slots == 1 ? 0 : query_.stage() * kSlotStep);
#pragma unroll
    for (int k = kBegin; k < kEnd; ++k) {
      ptx::wgmma_k32_ss<tile::kDescriptorHigh<kKeyColumns>>(
          sums, queries + tile::k_major_step<kKeyColumns>(k, 64),
          keys_ + kStage * kStageStep + tile::k_major_step<kKeyColumns>(k, kTileKv), k > kBegin);
    }
  }

  template <int kStage>
  __device__ __forceinline__ void multiply_values(int chunk) {
    constexpr unsigned kStageStep = kLayout.value_stage_bytes / 16;
    const unsigned values = values_ + turned_.stage() * kStageStep;
    constexpr unsigned kChunkStep = index::kManyRowsF8ChunkColumns * kTileKv / 16;
    ptx::pin(product_);
    ptx::pin(weights_[kStage]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileKv / 32; ++k) {
      ptx::wgmma_k32_rs<tile::kDescriptorHigh<kValueColumns>>(
          product_, &weights_[kStage][4 * k],
          values + chunk * kChunkStep + tile::k_major_step<kValueColumns>(k, key::head_dim_v), k > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Where the unit of one of the warp's rows has moved; by exactly 1 where it has not.
  __device__ __forceinline__ void rescale() {
    if (!moved_) return;
#pragma unroll
    for (int i = 0; i < key::head_dim_v / 2; ++i) output_[i] *= decay_[i >> 1 & 1];
  }

  __device__ __forceinline__ void store_item(int item, const tile::StepSoftmax& softmax) {
    if (tile::store_rows(params_, record(item), consumer_, softmax, output_,
                         float8_control_->scales[item % kItemRecords].value)) {
      control_->not_finite[threadIdx.x / 32 - 4] = true;
    }
  }

  tile::Float8Control* const float8_control_;
  const unsigned queries_, keys_, values_;  // descriptors of slot and stage 0

  float output_[key::head_dim_v / 2] = {};
  float product_[index::kManyRowsF8ChunkColumns / 2];
  unsigned weights_[2][kTileKv / 8];
  tile::StepScale scale_[2] = {};                // what the weights stand for
  float step_sum_[2];                            // of the newest step's weights
  tile::StepSoftmax softmax_, ended_;            // of the newest step's item, of the item before
  Ring<index::kManyRowsF8TurnedStages> turned_;  // of the present step
  bool moved_ = false;                           // the unit of one of the warp's rows, by the newest step:
  float decay_[2] = {1.0F, 1.0F};                // then of the output
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
