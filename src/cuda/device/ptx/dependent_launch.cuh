// Launches that run beside the one in front of them; before Hopper none does.
#pragma once

namespace qkv::cuda::ptx {

// The next launch of the stream may begin once all CTAs say so, if it was launched to run beside this one; else this
// does nothing.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the launch that this one runs beside, and for its writes; does nothing elsewhere.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace qkv::cuda::ptx
