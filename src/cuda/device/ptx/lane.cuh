// The thread's place in its warp.
#pragma once

namespace qkv::cuda::ptx {

// Volatile: what is made of it stays where it is written, instead of holding registers through a loop.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace qkv::cuda::ptx
