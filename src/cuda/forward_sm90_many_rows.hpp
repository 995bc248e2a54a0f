// Hopper's forward kernels for many query rows, of 16 bits and of 8: a persistent CTA a multiprocessor, each with a
// list of items.
#pragma once

#include "core/index/forward_sm90_many_rows_shape.hpp"
#include "cuda/device/params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/memory.hpp"
#include "jit/module.hpp"
#include "plan/engine.hpp"

namespace qkv::cuda {

// What supports() asks for, in words.
inline constexpr const char* kManyRowsNeeds =
    "sm_90a, head sizes 64, 96, 128, 256 or 192/128, and dense keys or pages of a multiple of 16 tokens; with 8-bit "
    "outputs of 16-bit layers, head sizes other than 96 and output scales per_tensor; with 16-bit queries on "
    "8-bit keys, head sizes 64 or 128, bf16 where scales are per token, and no ALiBi over uneven shards; with 8-bit "
    "queries, head sizes 64, 128 or 256 (with output scales of groups 64 or 128), keys of f8e4m3 as they are, and "
    "scales not per token";

class ForwardSm90ManyRows {
 public:
  static bool supports(const LayerSpec& layer, const DeviceFacts& facts);
  static ForwardKey key(const LayerSpec& layer, const DeviceFacts& facts);
  ForwardSm90ManyRows(const LayerSpec& layer, const DeviceFacts& facts);

  // cta_begin [num_ctas + 1], on the device.
  void run(const plan::ForwardCall& call, const ForwardParams& params, const int* cta_begin, int32_t num_ctas,
           jit::CUstream stream) const;

 private:
  index::ManyRowsShape shape_;
  const jit::Kernel* kernel_;
};

}  // namespace qkv::cuda
