// The online softmax of the two rows that a thread holds of a wgmma accumulator (elements 4j, 4j + 1 and 4j + 2,
// 4j + 3), with a maximum that moves only when it must: weights up to 2^8 are as exact, and most steps rescale nothing.
// Every decision is a row's own, so that its bits do not depend on the rows beside it.
#pragma once

#include "softmax.cuh"

namespace qkv::cuda::tile {

constexpr float kLazyRise = 8.0F;  // log2

struct LazySoftmax {
  float max[2] = {negative_infinity(), negative_infinity()};  // in the scores' units, alike in the row's four lanes
  float sum[2] = {0.0F, 0.0F};                                // of this lane's columns

  // Scores become weights 2^(factor·(score - max)); decay = 2^(factor·(old max - max)), exactly 1 where it stayed.
  template <int kCount>
  __device__ __forceinline__ void update(float (&scores)[kCount], float factor, float (&decay)[2]) {
    float tile_max[2] = {fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])};
#pragma unroll
    for (int i = 4; i < kCount; i += 4) {
      tile_max[0] = fmaxf(tile_max[0], fmaxf(scores[i], scores[i + 1]));
      tile_max[1] = fmaxf(tile_max[1], fmaxf(scores[i + 2], scores[i + 3]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffff, tile_max[r], 1));
      tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffff, tile_max[r], 2));
      const float old = max[r];
      // From -inf the first finite score moves it; one that stays at -inf has seen nothing, and base is 0.
      if ((tile_max[r] - old) * factor > kLazyRise) max[r] = tile_max[r];
      const float base = max[r] == negative_infinity() ? 0.0F : max[r] * factor;
      decay[r] = max[r] == old ? 1.0F : exp2_approx(old * factor - base);
      float tile_sum = 0.0F;
#pragma unroll
      for (int i = 2 * r; i < kCount; i += 4) {
        scores[i] = exp2_approx(fmaf(scores[i], factor, -base));
        scores[i + 1] = exp2_approx(fmaf(scores[i + 1], factor, -base));
        tile_sum += scores[i] + scores[i + 1];
      }
      sum[r] = fmaf(sum[r], decay[r], tile_sum);
    }
  }

  __device__ __forceinline__ void sum_over_lanes() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 2);
    }
  }
};

}  // namespace qkv::cuda::tile
