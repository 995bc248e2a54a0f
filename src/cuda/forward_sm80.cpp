#include "cuda/forward_sm80.hpp"

#include "core/eight_bit.hpp"
#include "cuda/launch.hpp"

namespace qkv::cuda {

namespace {

index::ForwardSm80Shape shape_of(const LayerSpec& layer, const DeviceFacts& facts, int tile_q) {
  auto shape = index::forward_sm80_shape(layer.head_dim, layer.value_dim(), facts.max_shared_bytes);
  if (tile_q != 0) shape.tile_q = tile_q;
  shape.is_8bit = is_8bit(layer.kv_dtype);
  return shape;
}

}  // namespace

ForwardKey ForwardSm80::key(const LayerSpec& layer, const DeviceFacts& facts, int tile_q, bool shared_rows) {
  const index::ForwardSm80Shape shape = shape_of(layer, facts, tile_q);
  return {"forward_sm80", facts.arch, shape.tile_q, shape.tile_kv, {{"shared_rows", shared_rows ? 1 : 0}}};
}

ForwardSm80::ForwardSm80(const LayerSpec& layer, const DeviceFacts& facts, int tile_q)
    : layer_(layer),
      facts_(facts),
      tile_q_(tile_q),
      shape_(shape_of(layer, facts, tile_q)),
      kernel_(&jit::kernels().get(forward_source(layer, key(layer, facts, tile_q)))) {}

void ForwardSm80::prepare_shared() const {
  if (shared_kernel_ == nullptr) {
    shared_kernel_ = &jit::kernels().get(forward_source(layer_, key(layer_, facts_, tile_q_, true)));
  }
}

void ForwardSm80::run(const ForwardParams& params, uint32_t num_ctas, jit::CUstream stream) const {
  run(*kernel_, params, nullptr, num_ctas, stream);
}

void ForwardSm80::run_shared(const ForwardParams& params, const SharedToken* tokens, uint32_t num_ctas,
                             jit::CUstream stream) const {
  if (num_ctas > 0) run(*shared_kernel_, params, tokens, num_ctas, stream);  // else it may not be there
}

void ForwardSm80::run(const jit::Kernel& kernel, const ForwardParams& params, const SharedToken* tokens,
                      uint32_t num_ctas, jit::CUstream stream) const {
  if (num_ctas == 0) return;
  launch(kernel, {num_ctas, 1, static_cast<uint32_t>(shape_.num_threads()), static_cast<uint32_t>(shape_.smem_bytes())},
         {&params, &tokens}, stream);
}

}  // namespace qkv::cuda
