#include "cuda/forward_sm90_many_rows.hpp"

#include "core/eight_bit.hpp"
#include "core/index/forward_sm90_many_rows_f8_shape.hpp"
#include "cuda/device/many_rows_params.hpp"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"

namespace qkv::cuda {
namespace {

constexpr auto kPromotion = jit::CUtensorMapL2promotion::bytes_256;

bool widens(const LayerSpec& layer) { return is_float8(layer.kv_dtype) && !is_float8(layer.query_dtype); }

index::ManyRowsShape shape_of(const LayerSpec& layer) {
  if (widens(layer)) return index::many_rows_widening_shape();
  if (!is_float8(layer.query_dtype)) return index::many_rows_shape(layer.head_dim, layer.value_dim());
  const bool has_alibi = layer.alibi_per_request || !layer.alibi_slopes.empty();
  const bool keeps_more = (layer.softcap > 0 && has_alibi) || layer.output_scales == OutputScales::per_token_group;
  return index::many_rows_f8_shape(layer.head_dim, layer.value_dim(), keeps_more);
}

int shared_bytes_of(const LayerSpec& layer, const index::ManyRowsShape& shape) {
  return is_float8(layer.query_dtype) ? index::many_rows_f8_layout(shape, layer.head_dim, layer.value_dim()).bytes
                                      : index::many_rows_layout(shape, layer.head_dim, layer.value_dim()).bytes;
}

// Elements of a block of a row's columns: blocks are counted in units of 16 bits.
int32_t block_columns(int32_t dim, DType dtype) {
  const int32_t in_unit = 2 / size_bytes(dtype);
  return index::many_rows_block_columns(dim / in_unit) * in_unit;
}

jit::CUtensorMap query_map(const plan::ForwardCall& call) {
  const Tensor& query = call.query;
  const int64_t group = call.layer.group_size();
  const bool by_box = index::many_rows_query_by_box(static_cast<int>(group));
  const int32_t columns = block_columns(call.layer.head_dim, query.dtype);
  const int64_t blocks = call.layer.head_dim / columns;
  return make_tensor_map(query.data, query.dtype,
                         {{{columns, 1, columns},
                           {group, query.stride[1], static_cast<int32_t>(by_box ? group : 1)},
                           {call.plan.rows_of_tokens(), query.stride[0],
                            static_cast<int32_t>(by_box ? index::kManyRowsRowsPerConsumer / group : 1)},
                           {blocks, columns, static_cast<int32_t>(by_box ? blocks : 1)},
                           {call.layer.num_kv_heads, query.stride[1] * group, 1}}},
                         kPromotion, "query");
}

// Dense keys are one page that holds them all.
jit::CUtensorMap pages_map(const Tensor& pages, bool paged, int32_t dim, int32_t box_rows, int32_t box_blocks,
                           const char* name) {
  const int32_t columns = block_columns(dim, pages.dtype);
  const int32_t token_axis = paged ? 1 : 0;
  return make_tensor_map(pages.data, pages.dtype,
                         {{{columns, 1, columns},
                           {pages.shape[token_axis], pages.stride[token_axis], box_rows},
                           {dim / columns, columns, box_blocks},
                           {pages.shape[token_axis + 1], pages.stride[token_axis + 1], 1},
                           {paged ? pages.shape[0] : 1, paged ? pages.stride[0] : 0, 1}}},
                         kPromotion, name);
}

}  // namespace

bool ForwardSm90ManyRows::supports(const LayerSpec& layer, const DeviceFacts& facts) {
  if (facts.arch != "sm_90a" || layer.kv_dtype == DType::i8) return false;
  const int32_t page_size = layer.cache ? layer.cache->page_size : 0;
  if (!is_float8(layer.query_dtype)) {
    // Beside 16-bit weights there are no registers left to choose scales in.
    const bool stores = !is_float8(layer.out_dtype()) || (layer.output_scales == OutputScales::per_tensor &&
                                                          layer.value_dim() % index::kManyRowsFloat8Columns == 0);
    if (!widens(layer)) return stores && index::many_rows_supports(layer.head_dim, layer.value_dim(), page_size);
    // Weights of up to 2^8 times scales of tokens fit bf16 only; distances of keys that lie unevenly have no registers.
    const bool has_range = layer.query_dtype == DType::bf16 || !has_token_scales(layer);
    const bool alibi = layer.alibi_per_request || !layer.alibi_slopes.empty();
    const bool is_uneven = layer.shard.num_ranks > 1 && layer.shard.interleave_size > 1;
    return stores && has_range && !(alibi && is_uneven) &&
           index::many_rows_widening_supports(layer.head_dim, layer.value_dim(), page_size);
  }
  // Nor beside 256 columns.
  if (layer.output_scales == OutputScales::per_token_group && layer.value_dim() > 128) return false;
  return layer.query_dtype == DType::f8e4m3 && layer.kv_dtype == DType::f8e4m3 && !has_token_scales(layer) &&
         index::many_rows_f8_supports(layer.head_dim, layer.value_dim(), page_size);
}

ForwardKey ForwardSm90ManyRows::key(const LayerSpec& layer, const DeviceFacts& facts) {
  const index::ManyRowsShape shape = shape_of(layer);
  return {is_float8(layer.query_dtype) ? "forward_sm90_many_rows_f8" : "forward_sm90_many_rows",
          facts.arch,
          index::many_rows_tile_q(shape),
          shape.tile_kv,
          {{"ping_pong", shape.ping_pong}}};
}

ForwardSm90ManyRows::ForwardSm90ManyRows(const LayerSpec& layer, const DeviceFacts& facts)
    : shape_(shape_of(layer)), kernel_(&jit::kernels().get(forward_source(layer, key(layer, facts)))) {}

void ForwardSm90ManyRows::run(const plan::ForwardCall& call, const ForwardParams& params, const int* cta_begin,
                              int32_t num_ctas, jit::CUstream stream) const {
  if (num_ctas == 0) return;
  const LayerSpec& layer = call.layer;
  const bool paged = layer.cache.has_value();
  const int32_t page_size = paged ? layer.cache->page_size : 0;
  const int32_t box_rows = index::many_rows_box_rows(page_size, shape_.tile_kv);
  const int32_t in_unit = 2 / size_bytes(layer.kv_dtype);
  const int32_t all_key_blocks = layer.head_dim / block_columns(layer.head_dim, layer.kv_dtype);
  const int32_t key_blocks = widens(layer)
                                 ? all_key_blocks
                                 : index::many_rows_key_box_blocks(layer.head_dim / in_unit, page_size, shape_.tile_kv);
  const ManyRowsParams many{cta_begin};
  const jit::CUtensorMap query = query_map(call);
  const jit::CUtensorMap key = pages_map(call.key, paged, layer.head_dim, box_rows, key_blocks, "key");
  const int32_t value_blocks = layer.value_dim() / block_columns(layer.value_dim(), layer.kv_dtype);
  const jit::CUtensorMap value = pages_map(call.value, paged, layer.value_dim(), box_rows, value_blocks, "value");
  const auto shared_bytes = static_cast<uint32_t>(shared_bytes_of(layer, shape_));
  launch(*kernel_,
         {static_cast<uint32_t>(num_ctas), 1, static_cast<uint32_t>(index::many_rows_threads(shape_)), shared_bytes},
         {&params, &many, &query, &key, &value}, stream);
}

}  // namespace qkv::cuda
