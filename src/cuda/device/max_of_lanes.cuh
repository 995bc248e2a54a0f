// The largest number that neighbouring lanes of a warp hold.
#pragma once

namespace qkv::cuda {

// Among `lanes` neighbours, a power of two; all get it. All lanes of the mask `calling` call this.
__device__ __forceinline__ float max_of_lanes(float x, int lanes, unsigned calling = 0xffffffff) {
  for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(calling, x, step));
  return x;
}

}  // namespace qkv::cuda
