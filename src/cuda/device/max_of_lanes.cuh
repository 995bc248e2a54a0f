// The largest number that neighbouring lanes of a warp hold.
#pragma once

namespace qkv::cuda {

// Among `lanes` neighbours, a power of two; all get it. All lanes of the mask `calling` call this.
__device__ __forceinline__ float max_of_lanes(float x, int lanes, unsigned calling = 0xffffffff) {
  for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(calling, x, step));
  return x;
}

// Of several numbers, which take each step together: none waits for another's shuffles. By all lanes of a warp.
template <int kCount>
__device__ __forceinline__ void max_of_lanes(float (&x)[kCount], int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (float& one : x) one = fmaxf(one, __shfl_xor_sync(0xffffffff, one, step));
  }
}

}  // namespace qkv::cuda
