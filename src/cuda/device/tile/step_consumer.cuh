// What a warpgroup of 64 query rows does besides its products: it follows the stream of steps, adds the terms of
// scores, hides keys, and keeps the protocol of the barriers. The kernels derive from it.
#pragma once

#include "mask_tile.cuh"
#include "pipeline.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace qkv::cuda::tile {

constexpr bool kTransformsScores = key::softcap || key::alibi || !key::positive_factor;

template <index::ManyRowsShape kShape>
class StepConsumer {
 protected:
  static constexpr int kTileKv = kShape.tile_kv;

  __device__ __forceinline__ StepConsumer(const ForwardParams& params, Control* control, int consumer)
      : params_(params), control_(control), consumer_(consumer) {}

  // Waits for the first step's queries and keys.
  __device__ __forceinline__ void begin() {
    if (key::ping_pong && consumer_ == kShape.consumers - 1) pass_turn();  // or nobody ever starts
    wait(control_->query_full[0], 0);
    wait(control_->key_full[0], 0);
    step_ = control_->steps[0];
  }

  // Waits for the keys (and queries) of the step after the present one.
  template <int kStage>
  __device__ __forceinline__ bool begin_next() {
    const unsigned bits = step_.bits;
    if (bits & kStepFinal) return false;
    wait(control_->key_full[kStage ^ 1], phase_ ^ (kStage == 1));
    step_ = control_->steps[kStage ^ 1];
    if (bits & kStepLast) {
      query_.advance();
      ++items_;
      wait(control_->query_full[query_.stage()], query_.phase());
    }
    return true;
  }

  __device__ __forceinline__ const ItemRecord& record(int item) const { return control_->records[item % kItemRecords]; }

  // Calls f(score, r, offset) for the thread's row r and the key at kv_begin + offset.
  template <class F>
  __device__ __forceinline__ void for_each_score(F f) {
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) f(scores_[i], i >> 1 & 1, index::accumulator_column(threadIdx.x % 4, i));
  }

  // The row, or the item's last where there is none: computed, never stored.
  __device__ __forceinline__ RowInfo row_info(const WorkItem& item, int num_rows, int r) const {
    const int row = consumer_ * 64 + index::accumulator_row(ptx::read_thread_index() % 128, 2 * r);
    return RowInfo::of<key::group_size>(item, min(row, num_rows - 1));
  }

  __device__ __forceinline__ void transform(const Step& step, float factor) {
    float slope[2] = {0.0F, 0.0F};
    int distance[2] = {0, 0};
    if constexpr (key::alibi) {
      const ItemRecord& of = record(items_);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const RowInfo info = row_info(of.item, of.num_rows, r);
        slope[r] = kLog2e * params_.alibi_slopes[of.item.request * params_.alibi_request_stride + info.q_head];
        distance[r] = info.query + of.kv_len - of.q_len - kv_pos_of(params_.rank, of, step.kv_begin);
      }
    }
    for_each_score([&](float& score, int r, int offset) {
      score *= factor;
      if constexpr (key::softcap) score = tanh_by_exp2(score) * params_.softcap_log2;
      if constexpr (key::alibi)
        score -= slope[r] * static_cast<float>(abs(distance[r] - position_offset(params_.rank, step.kv_begin, offset)));
    });
  }

  __device__ __forceinline__ bool hides(const Step& step) const { return (step.bits >> consumer_ & kStepHides) != 0; }

  // Keys that do not count, and those that the mask hides.
  __device__ __forceinline__ void hide(const Step& step) {
    const int keys = step.bits & kStepKeys;
    // A mask without operands reads nothing: it may be asked about keys that the request does not have. (Two passes
    // spill where the terms of a score need registers, too.)
    constexpr bool kAskAll = key::mask && key::num_mask_operands == 0 && !kTransformsScores;
    if (keys != kTileKv && (!key::mask || kAskAll)) {
      for_each_score([&](float& score, int, int offset) {
        if (offset >= keys) score = negative_infinity();
      });
    }
    if constexpr (key::mask) {
      const ItemRecord& of = record(items_);
      const WorkItem item = of.item;
      const SeqInfo seq(of.token_begin, of.q_len, of.kv_len, 0);
      const MaskContext context(params_, seq, item.request);
      const RowInfo info[2] = {row_info(item, of.num_rows, 0), row_info(item, of.num_rows, 1)};
      const int q_pos[2] = {seq.q_pos(info[0].query), seq.q_pos(info[1].query)};
      for_each_score([&](float& score, int r, int offset) {
        const bool asks = kAskAll || offset < keys;
        if (!(asks && is_visible(context, q_pos[r], step.kv_begin + offset, info[r]))) score = negative_infinity();
      });
    }
  }

  __device__ __forceinline__ static void wait(const unsigned long long& barrier, int parity) {
    ptx::mbarrier_wait(shared_address_of(&barrier), parity);
  }
  __device__ __forceinline__ static void release(const unsigned long long& barrier) {
    if (lane_index() == 0) ptx::mbarrier_arrive(shared_address_of(&barrier));
  }
  template <int kStage>
  __device__ __forceinline__ void release_keys(const Step& step) {
    release(control_->key_free[kStage]);
    if (step.bits & kStepLast) release(control_->query_free[query_.stage()]);
  }

  __device__ __forceinline__ void take_turn() const {
    if constexpr (key::ping_pong) ptx::named_barrier_sync(kBarrierTurn + consumer_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (key::ping_pong) {
      ptx::named_barrier_arrive(kBarrierTurn + (consumer_ + 1 == kShape.consumers ? 0 : consumer_ + 1), 256);
    }
  }

  const ForwardParams& params_;
  Control* const control_;
  const int consumer_;

  float scores_[kTileKv / 2];       // of the newest step
  Step step_;                       // the newest step
  Ring<kShape.query_slots> query_;  // of its item
  int items_ = 0;                   // before its item
  int phase_ = 0;                   // of the present step's stages
};

}  // namespace qkv::cuda::tile
