// Tensor copies by the copy engine (TMA), and the orders that go with them.
#pragma once

namespace qkv::cuda::ptx {

// CUtensorMap, made by the host.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of the map to shared memory; its bytes count on the barrier. Coordinates from the innermost dimension on.
__device__ __forceinline__ void tma_load_5d(unsigned shared, const TensorMap* map, int c0, int c1, int c2, int c3,
                                            int c4, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

// Ordinary accesses of shared memory before it, the copy engine's after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace qkv::cuda::ptx
