#include "cuda/forward_sm80.hpp"

#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"

namespace qkv::cuda {

ForwardSm80::ForwardSm80(const LayerSpec& layer, const DeviceFacts& facts, int tile_q)
    : shape_(index::forward_sm80_shape(layer.head_dim, layer.value_dim(), facts.max_shared_bytes)) {
  if (tile_q != 0) shape_.tile_q = tile_q;
  kernel_ = &jit::kernels().get(forward_source(layer, {"forward_sm80", facts.arch, shape_.tile_q, shape_.tile_kv}));
}

void ForwardSm80::run(const ForwardParams& params, int32_t num_items, jit::CUstream stream) const {
  if (num_items == 0) return;
  launch(*kernel_,
         {static_cast<uint32_t>(num_items), 1, static_cast<uint32_t>(shape_.num_threads()),
          static_cast<uint32_t>(shape_.smem_bytes())},
         {&params}, stream);
}

}  // namespace qkv::cuda
