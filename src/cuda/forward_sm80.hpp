// The general forward kernel.
#pragma once

#include <atomic>

#include "core/index/forward_sm80_shape.hpp"
#include "cuda/device/params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/memory.hpp"
#include "jit/module.hpp"
#include "qkv/layer.hpp"

namespace qkv::cuda {

class ForwardSm80 {
 public:
  // Of the kernel for tiles of tile_q packed rows; 0 = as many as suit the head sizes. shared_rows: an item's are of
  // several requests.
  static ForwardKey key(const LayerSpec& layer, const DeviceFacts& facts, int tile_q, bool shared_rows = false);
  // Compiles the kernel for rows of one request.
  ForwardSm80(const LayerSpec& layer, const DeviceFacts& facts, int tile_q);

  // Makes sure that the kernel for rows of several requests is there, so that run_shared() never compiles.
  void prepare_shared() const;

  void run(const ForwardParams& params, uint32_t num_ctas, jit::CUstream stream) const;
  void run_shared(const ForwardParams& params, const SharedToken* tokens, uint32_t num_ctas,
                  jit::CUstream stream) const;

 private:
  void run(const jit::Kernel& kernel, const ForwardParams& params, const SharedToken* tokens, uint32_t num_ctas,
           jit::CUstream stream) const;

  LayerSpec layer_;
  DeviceFacts facts_;
  int tile_q_;
  index::ForwardSm80Shape shape_;
  const jit::Kernel* kernel_;
  // Filled when first asked for; two threads that fill it find the same kernel.
  mutable std::atomic<const jit::Kernel*> shared_kernel_{nullptr};
};

}  // namespace qkv::cuda
