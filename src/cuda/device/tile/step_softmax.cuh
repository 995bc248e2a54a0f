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

// Hopper compares three integers at once, not three floats. The bits of floats are in their order unless all are
// negative, and in the opposite one if they are.
struct OrderOfBits {
  static __device__ __forceinline__ int largest(int a, int b) { return max(a, b); }
  static __device__ __forceinline__ int largest(int a, int b, int c) { return __vimax3_s32(a, b, c); }
};
struct OrderOfNegatives {
  static __device__ __forceinline__ unsigned largest(unsigned a, unsigned b) { return min(a, b); }
  static __device__ __forceinline__ unsigned largest(unsigned a, unsigned b, unsigned c) {
    return __vimin3_u32(a, b, c);
  }
};

// Bits of the largest score of each row in the row's four lanes.
template <class Order, int kCount>
__device__ __forceinline__ void find_largest(const float (&scores)[kCount], int (&largest)[2]) {
  const auto bits = [&](int i) { return __float_as_int(scores[i]); };
  int found[2][2];  // of even and of odd chunks: four chains, that none need wait for itself
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    int& so_far = found[i / 4 % 2][i / 2 % 2];
    so_far = i < 8 ? Order::largest(bits(i), bits(i + 1)) : Order::largest(so_far, bits(i), bits(i + 1));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = Order::largest(found[0][r], found[1][r]);
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = Order::largest(largest[r], __shfl_xor_sync(0xffffffff, largest[r], lanes));
    }
  }
}

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
    int largest[2];
    find_largest<OrderOfBits>(scores, largest);
    if (__any_sync(0xffffffff, (largest[0] | largest[1]) < 0)) {
      int negative[2];
      find_largest<OrderOfNegatives>(scores, negative);
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = largest[r] < 0 ? negative[r] : largest[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float unit = fmaf(__int_as_float(largest[r]), factor, -kLargestWeightLog2);
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

  // Scores become weights, and are added to the sum. take(i) gets those of keys 32·i … 32·i + 31 before the next ones
  // are made: else ptxas would put much of the packing behind all exponentials. Their factor is found last: registers
  // are scarce before.
  template <int kCount, class Take>
  __device__ __forceinline__ void exponentiate(float (&scores)[kCount], float factor, StepScale& scale, Take&& take) {
    float step_sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = i >> 1 & 1;
      scores[i] = exp2_approx(fmaf(scores[i], factor, -scale.base[r]));
      step_sum[r][i & 1] += scores[i];
      if (i % 16 == 15) take(i / 16);
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
