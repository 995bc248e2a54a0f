// Hopper's forward kernel for many query rows: a persistent CTA a multiprocessor, each with a list of items.
#pragma once

#include "core/index/forward_sm90_many_rows_shape.hpp"
#include "cuda/device/params.hpp"
#include "cuda/memory.hpp"
#include "jit/module.hpp"
#include "plan/engine.hpp"

namespace qkv::cuda {

class ForwardSm90ManyRows {
 public:
  static bool supports(const LayerSpec& layer, const DeviceFacts& facts);
  ForwardSm90ManyRows(const LayerSpec& layer, const DeviceFacts& facts);

  int tile_q() const { return index::many_rows_tile_q(shape_); }
  int tile_kv() const { return shape_.tile_kv; }
  // cta_begin [num_ctas + 1], on the device.
  void run(const plan::ForwardCall& call, const ForwardParams& params, const int* cta_begin, int32_t num_ctas,
           jit::CUstream stream) const;

 private:
  index::ManyRowsShape shape_;
  const jit::Kernel* kernel_;
};

}  // namespace qkv::cuda
