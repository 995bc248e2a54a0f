// The kernels' sources as text, embedded when the library is built: all of src/cuda/device and src/core/index.
#pragma once

#include <span>

#include "jit/nvrtc.hpp"

namespace qkv::cuda {

std::span<const jit::Header> device_headers();

}  // namespace qkv::cuda
