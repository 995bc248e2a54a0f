// One launch, with what it was in the error if it fails.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "jit/module.hpp"

namespace qkv::cuda {

struct LaunchShape {
  uint32_t grid_x = 1;
  uint32_t grid_y = 1;
  uint32_t threads = 1;
  uint32_t shared_bytes = 0;
  uint32_t cluster_size = 1;    // CTAs along x; divides grid_x
  bool beside_earlier = false;  // may begin when the launch in front calls launch_dependents
};

// `params`: the address of each of the kernel's parameters.
void launch(const jit::Kernel& kernel, const LaunchShape& shape, std::initializer_list<const void*> params,
            jit::CUstream stream);

}  // namespace qkv::cuda
