// mbarrier: a counter in shared memory on which threads wait for arrivals and for bytes (transactions).
#pragma once

namespace qkv::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Of a barrier that nobody uses any more, before its memory is anything else again.
__device__ __forceinline__ void mbarrier_invalidate(unsigned barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised barriers known to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, and `bytes` more to come in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is complete; waits a short while for it.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned is_complete;
  asm volatile(
      "{\n"
      "  .reg .pred complete;\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(is_complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_complete != 0;
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Where other CTAs of the cluster write and arrive.
__device__ __forceinline__ bool mbarrier_try_wait_cluster(unsigned barrier, unsigned parity) {
  unsigned is_complete;
  asm volatile(
      "{\n"
      "  .reg .pred complete;\n"
      "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(is_complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_complete != 0;
}

__device__ __forceinline__ void mbarrier_wait_cluster(unsigned barrier, unsigned parity) {
  while (!mbarrier_try_wait_cluster(barrier, parity)) {
  }
}

}  // namespace qkv::cuda::ptx
