// Atomics and loads that see what other CTAs of the same launch wrote.
#pragma once

namespace qkv::cuda::ptx {

// Releases what this CTA wrote before its last barrier, acquires what those wrote who added before.
__device__ __forceinline__ int atomic_add_acq_rel(int* counter, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

}  // namespace qkv::cuda::ptx
