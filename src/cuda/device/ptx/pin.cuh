// Order that the optimiser has to keep.
#pragma once

namespace qkv::cuda::ptx {

// Pins registers to this place: the optimiser may not move reads of accumulators over a wait, nor writes over a fence,
// nor uses of some loads between others.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i]));
}
template <int kCount>
__device__ __forceinline__ void pin(unsigned (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i]));
}

}  // namespace qkv::cuda::ptx
