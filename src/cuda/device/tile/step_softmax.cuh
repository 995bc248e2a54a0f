// The online softmax where weights are rounded to e4m3, of the two rows that a thread holds of a wgmma accumulator
// (elements 4j, 4j + 1 and 4j + 2, 4j + 3). An e4m3 has 2^17 of range, a long context more: so the weights of each step
// are relative to the step's own maximum, which becomes 2^8, and what they stand for is multiplied in when their
// product with the values is added to the output, in f32. Output and sum are relative to a number that rarely moves.
// Every decision is a row's own, so that its bits do not depend on the rows beside it.
#pragma once

#include "softmax.cuh"

namespace qkv::cuda::tile {

constexpr float kLargestWeightLog2 = 8.0F;  // the largest e4m3 is 448
constexpr float kLargestRiseLog2 = 16.0F;   // of a step over the output, before the latter is rescaled
constexpr float kLargestFactor = 65536.0F;  // 2^kLargestRiseLog2

// What the weights of one step stand for.
struct StepScale {
  float base[2];    // log2 of a score whose weight is 1
  float factor[2];  // of weights, in units of the output
};

struct StepSoftmax {
  float max[2] = {negative_infinity(),
                  negative_infinity()};  // log2 of the output's unit, alike in the row's four lanes
  float sum[2] = {0.0F, 0.0F};           // of this lane's columns

  // Finds the step's base. Where the unit of one of the warp's rows moves, rescale(decay) is to multiply the output by
  // 2^(old - new), exactly 1 for a row whose unit stays.
  template <int kCount, class Rescale>
  __device__ __forceinline__ void find_base(const float (&scores)[kCount], float factor, StepScale& scale,
                                            Rescale&& rescale) {
    const float old[2] = {max[0], max[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float step_max = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int i = 4 + 2 * r; i < kCount; i += 4) step_max = fmaxf(step_max, fmaxf(scores[i], scores[i + 1]));
      step_max = fmaxf(step_max, __shfl_xor_sync(0xffffffff, step_max, 1));
      step_max = fmaxf(step_max, __shfl_xor_sync(0xffffffff, step_max, 2));
      const float unit = fmaf(step_max, factor, -kLargestWeightLog2);
      if (unit > old[r] + kLargestRiseLog2) max[r] = unit;
      scale.base[r] = unit == negative_infinity() ? 0.0F : unit;
    }
    if (!__any_sync(0xffffffff, max[0] != old[0] || max[1] != old[1])) return;
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      decay[r] = max[r] == old[r] ? 1.0F : exp2_approx(old[r] - max[r]);
      sum[r] *= decay[r];
    }
    rescale(decay);
  }

  // Scores become weights, and are added to the sum. Their factor is found last: registers are scarce before.
  template <int kCount>
  __device__ __forceinline__ void exponentiate(float (&scores)[kCount], float factor, StepScale& scale) {
    float step_sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = i >> 1 & 1;
      scores[i] = exp2_approx(fmaf(scores[i], factor, -scale.base[r]));
      step_sum[r][i & 1] += scores[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Only a row that sees nothing of the step could have more, and its weights are 0.
      scale.factor[r] = fminf(exp2_approx(scale.base[r] - max[r]), kLargestFactor);
      sum[r] = fmaf(step_sum[r][0] + step_sum[r][1], scale.factor[r], sum[r]);
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
