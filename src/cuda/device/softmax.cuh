// The online softmax of the two rows that a thread holds of an mma accumulator (row i: elements 2·i and 2·i + 1 of
// every n8 tile). NaN scores pass by the maximum and reach the sum.
#pragma once

namespace qkv::cuda {

constexpr float kLog2e = 1.44269504088896341F;
constexpr float kLn2 = 0.69314718055994531F;
constexpr float kSmallestNormal = 1.17549435e-38F;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 - 2/(e^2x + 1): absolute error below 2e-7 for every x, so that of a capped score is 2e-7·cap. tanh.approx.f32 has
// 5e-4. Infinities and NaN come out right.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  return 1.0F - __fdividef(2.0F, exp2_approx(2.0F * kLog2e * x) + 1.0F);
}

struct OnlineSoftmax {
  float max[2] = {negative_infinity(), negative_infinity()};  // log2; alike in the four lanes that hold the row
  float sum[2] = {0.0F, 0.0F};                                // of this lane's columns

  // Scores become weights 2^(score·factor - max), factor > 0. decay = 2^(old max - max).
  template <int kTiles>
  __device__ __forceinline__ void update(float (&scores)[kTiles][4], float factor, float (&decay)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float tile_max = fmaxf(scores[0][2 * i], scores[0][2 * i + 1]);
#pragma unroll
      for (int n = 1; n < kTiles; ++n) tile_max = fmaxf(tile_max, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 2));
      const float new_max = fmaxf(max[i], tile_max * factor);
      // A row that has seen nothing yet has no finite maximum to subtract.
      const float base = new_max == negative_infinity() ? 0.0F : new_max;
      decay[i] = exp2_approx(max[i] - base);
      max[i] = new_max;
      float tile_sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          scores[n][e] = exp2_approx(fmaf(scores[n][e], factor, -base));
          tile_sum += scores[n][e];
        }
      }
      sum[i] = sum[i] * decay[i] + tile_sum;
    }
  }

  __device__ __forceinline__ void sum_over_lanes() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffff, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffff, sum[i], 2);
    }
  }
};

}  // namespace qkv::cuda
