// Loads that are made or not without a branch: the compiler waits for loads under way where branches join.
#pragma once

namespace qkv::cuda::ptx {

// 16 bytes of global memory, at a multiple of 16, where they are wanted; else 0.
__device__ __forceinline__ uint4 load_global_16_if(bool wanted, const void* from) {
  uint4 words = make_uint4(0, 0, 0, 0);
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return words;
}

}  // namespace qkv::cuda::ptx
