// The thread's place in its warp, and one lane for all.
#pragma once

namespace qkv::cuda::ptx {

// Volatile: what is made of it stays where it is written, instead of holding registers through a loop.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// True in one lane, always the same; all lanes must ask (sm_90). Behind a comparison with a lane's number the compiler
// looks in a loop for the lanes whose operands a tensor copy has; here it knows that there is one.
__device__ __forceinline__ bool elect_lane() {
  unsigned elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

}  // namespace qkv::cuda::ptx
