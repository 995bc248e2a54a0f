// cp.async: 16 bytes from global to shared memory, past the registers and L1.
#pragma once

namespace qkv::cuda::ptx {

// source_bytes 16, or 0: then nothing is read and 16 zero bytes are written.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}

// The same with 4 bytes, which pass L1.
__device__ __forceinline__ void cp_async_4(unsigned shared, const void* global, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(source_bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// One of the arrivals that an mbarrier expects, when all copies that this thread has issued so far have come.
__device__ __forceinline__ void cp_async_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace qkv::cuda::ptx
