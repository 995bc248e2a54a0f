// stmatrix: the reverse of ldmatrix, to shared memory. Lane 8·i + r gives the address of row r of matrix i (16 bytes,
// aligned); register i of a lane holds elements 2·(lane%4) and the next of row lane/4.
#pragma once

namespace qkv::cuda::ptx {

__device__ __forceinline__ void stmatrix_x4(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace qkv::cuda::ptx
