// The general forward kernel.
#pragma once

#include "core/index/forward_sm80_shape.hpp"
#include "cuda/device/params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/memory.hpp"
#include "jit/module.hpp"
#include "qkv/layer.hpp"

namespace qkv::cuda {

class ForwardSm80 {
 public:
  // Of the kernel for tiles of tile_q packed rows; 0 = as many as suit the head sizes.
  static ForwardKey key(const LayerSpec& layer, const DeviceFacts& facts, int tile_q);
  // Compiles it.
  ForwardSm80(const LayerSpec& layer, const DeviceFacts& facts, int tile_q);

  void run(const ForwardParams& params, uint32_t num_ctas, jit::CUstream stream) const;

 private:
  index::ForwardSm80Shape shape_;
  const jit::Kernel* kernel_;
};

}  // namespace qkv::cuda
