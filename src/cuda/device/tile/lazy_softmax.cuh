// The online softmax of the two rows that a thread holds of a wgmma accumulator (elements 4j, 4j + 1 and 4j + 2,
// 4j + 3). The maximum that is subtracted need not be the largest score: weights up to 2^8 are as exact. So weights are
// first computed with the maximum of the steps before, and only where a row's sum shows that it rose by much, or that
// there was none, the step's maximum is looked for: in most steps there is neither a search nor a rescaling.
// Every decision is a row's own, so that its bits do not depend on the rows beside it.
#pragma once

#include "softmax.cuh"

namespace qkv::cuda::tile {

constexpr float kLargestLaneSum = 256.0F;  // of weights of one step; bounds each of them

struct LazySoftmax {
  float max[2] = {negative_infinity(), negative_infinity()};  // log2, alike in the row's four lanes
  float sum[2] = {0.0F, 0.0F};                                // of this lane's columns

  // Weights 2^(factor·score - max) of a step, which pack(i, low, high) makes 16-bit: low is that of score i, high the
  // next. Returns whether the maximum of one of the warp's rows has moved: then decay = 2^(old max - max), exactly 1
  // where it stayed.
  template <int kCount, class Pack>
  __device__ __forceinline__ bool weigh(const float (&scores)[kCount], float factor, bool first,
                                        unsigned (&weights)[kCount / 2], float (&decay)[2], Pack&& pack) {
    if (!first) {
      float tile_sum[2];
      exponentiate(scores, factor, weights, tile_sum, pack);
      const bool rose[2] = {rises(0, tile_sum[0]), rises(1, tile_sum[1])};
      if (!__any_sync(0xffffffff, rose[0] || rose[1])) {
        sum[0] += tile_sum[0];
        sum[1] += tile_sum[1];
        return false;
      }
      move_max(scores, factor, rose, decay);
    } else {
      const bool rose[2] = {true, true};
      move_max(scores, factor, rose, decay);
    }
    float tile_sum[2];
    exponentiate(scores, factor, weights, tile_sum, pack);
    sum[0] = fmaf(sum[0], decay[0], tile_sum[0]);
    sum[1] = fmaf(sum[1], decay[1], tile_sum[1]);
    return true;
  }

  __device__ __forceinline__ void sum_over_lanes() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 2);
    }
  }

 private:
  // NaN rises: it reaches the sum either way.
  __device__ __forceinline__ bool rises(int r, float tile_sum) const {
    return !(tile_sum <= kLargestLaneSum) || max[r] == negative_infinity();
  }

  // Of the rows in which one of the four lanes rose.
  template <int kCount>
  __device__ __forceinline__ void move_max(const float (&scores)[kCount], float factor, const bool (&rose)[2],
                                           float (&decay)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_max = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int i = 4 + 2 * r; i < kCount; i += 4) tile_max = fmaxf(tile_max, fmaxf(scores[i], scores[i + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 2));
      const unsigned lanes = __ballot_sync(0xffffffff, rose[r]) >> (threadIdx.x & 28);
      const float old = max[r];
      if ((lanes & 15) != 0) max[r] = fmaxf(old, tile_max * factor);
      decay[r] = max[r] == old ? 1.0F : exp2_approx(old - max[r]);
    }
  }

  template <int kCount, class Pack>
  __device__ __forceinline__ void exponentiate(const float (&scores)[kCount], float factor,
                                               unsigned (&weights)[kCount / 2], float (&tile_sum)[2],
                                               Pack&& pack) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A row that has seen nothing yet has no finite maximum to subtract.
      const float base = max[r] == negative_infinity() ? 0.0F : max[r];
      tile_sum[r] = 0.0F;
#pragma unroll
      for (int i = 2 * r; i < kCount; i += 4) {
        const float low = exp2_approx(fmaf(scores[i], factor, -base));
        const float high = exp2_approx(fmaf(scores[i + 1], factor, -base));
        tile_sum[r] += low + high;
        weights[i / 2] = pack(i, low, high);
      }
    }
  }
};

}  // namespace qkv::cuda::tile
