// movmatrix: an 8x8 matrix of 16-bit elements, one register a lane (elements 2·(lane%4) and the next of row lane/4),
// transposed within the warp.
#pragma once

namespace qkv::cuda::ptx {

__device__ __forceinline__ unsigned movmatrix_trans(unsigned fragment) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

}  // namespace qkv::cuda::ptx
