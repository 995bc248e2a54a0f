#include "api/engines.hpp"
#include "core/checks.hpp"
#include "qkv/mla_prefill.hpp"

namespace qkv {
namespace {

void check_rows(const Tensor& rows, const char* name, const Tensor& weights, int64_t num_heads, int64_t dim) {
  check_rank(rows, name, 3, "[num_tokens, num_heads, dim]");
  check_device(rows, name, weights.device);
  check_dtype(rows, name, weights.dtype);
  check_last_axis_contiguous(rows, name);
  check_writable_layout(rows, name);
  check_extent(rows, name, 1, num_heads, "num_heads");
  check_extent(rows, name, 2, dim, "a head's rows of the matrix");
}

void check_call(const ProjectionCall& call, const plan::ProjectionMatrix& matrix) {
  check_rank(call.latents, "latents", 2, "[num_tokens, kv_lora_rank]");
  check_device(call.latents, "latents", matrix.weights.device);
  check_dtype(call.latents, "latents", matrix.weights.dtype);
  check_last_axis_contiguous(call.latents, "latents");
  check_extent(call.latents, "latents", 1, matrix.depth(), "kv_lora_rank");
  check_rows(call.key_nope, "key_nope", matrix.weights, matrix.num_heads, matrix.key_dim);
  check_rows(call.value, "value", matrix.weights, matrix.num_heads, matrix.value_dim);
  check_extent(call.key_nope, "key_nope", 0, call.latents.shape[0], "num_tokens");
  check_extent(call.value, "value", 0, call.latents.shape[0], "num_tokens");
}

}  // namespace

Projection matrix_projection(const MlaSpec& spec, const Tensor& kv_b_proj) {
  const int64_t rows = int64_t{spec.num_heads} * (spec.qk_nope_head_dim + spec.v_head_dim);
  check_rank(kv_b_proj, "kv_b_proj", 2, "[num_heads·(qk_nope_head_dim + v_head_dim), kv_lora_rank]");
  check_dtype(kv_b_proj, "kv_b_proj", spec.dtype);
  check_float16_or_32(kv_b_proj, "kv_b_proj");
  check_last_axis_contiguous(kv_b_proj, "kv_b_proj");
  check_extent(kv_b_proj, "kv_b_proj", 0, rows, "num_heads·(qk_nope_head_dim + v_head_dim)");
  check_extent(kv_b_proj, "kv_b_proj", 1, spec.kv_lora_rank, "kv_lora_rank");
  const plan::ProjectionMatrix matrix{kv_b_proj, spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim};
  const std::shared_ptr<const plan::Projector> projector = api::engine_of(kv_b_proj.device).make_projector(matrix);
  return [matrix, projector](const ProjectionCall& call) {
    check_call(call, matrix);
    if (call.latents.shape[0] != 0) projector->project({call.latents, call.key_nope, call.value}, call.stream);
  };
}

}  // namespace qkv
