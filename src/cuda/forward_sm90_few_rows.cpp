#include "cuda/forward_sm90_few_rows.hpp"

#include <algorithm>

#include "core/index/swizzled_tile.hpp"
#include "cuda/few_rows_lists.hpp"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"

namespace qkv::cuda {
namespace {

namespace shape = index::few_rows;

// That a kernel makes room for; it runs in smaller ones, too.
int max_cluster_size(bool clustered) { return clustered ? shape::kMaxClusterSplits : 1; }

// Rows of 64 bytes lie beside those of other heads, whose CTAs want them at the same time: brought into the L2 by lines
// of 128 bytes, decode of 8 bits and 64 columns takes 78 us for 89 (64 x 4k). 256 bytes cost 2 to 5 % elsewhere.
constexpr auto kPromotion = jit::CUtensorMapL2promotion::bytes_128;

// Keys are copied in boxes of 16, which must lie in one page. Dense keys are one page that holds them all.
jit::CUtensorMap pages_map(const Tensor& pages, bool paged, int64_t dim, const char* name) {
  const int64_t element_bytes = size_bytes(pages.dtype);
  const int64_t chunk = index::chunk_bytes(static_cast<int>(dim * element_bytes)) / element_bytes;
  const int32_t token_axis = paged ? 1 : 0;
  return make_tensor_map(pages.data, pages.dtype,
                         {{{chunk, 1, static_cast<int32_t>(chunk)},
                           {pages.shape[token_axis], pages.stride[token_axis], shape::kBoxKeys},
                           {dim / chunk, chunk, static_cast<int32_t>(dim / chunk)},
                           {pages.shape[token_axis + 1], pages.stride[token_axis + 1], 1},
                           {paged ? pages.shape[0] : 1, paged ? pages.stride[0] : 0, 1}}},
                         kPromotion, name);
}

shape::LaunchShape shape_of(const LayerSpec& layer, const ForwardSm90FewRows::Variant& variant) {
  const shape::KeyValueShape kv = few_rows_shape(layer);
  return variant.shared_rows ? shape::shared_launch_shape(kv, variant.tile_q, variant.few_items)
                             : shape::launch_shape(kv, variant.tile_q, variant.few_items, variant.takes_turns);
}

// Rows that an item of the variant has room for.
int32_t rows_of(const LayerSpec& layer, const ForwardSm90FewRows::Variant& variant) {
  return variant.shared_rows ? shape::max_rows(layer.value_dim()) : variant.tile_q;
}

}  // namespace

shape::KeyValueShape few_rows_shape(const LayerSpec& layer) {
  const bool group_scales = layer.output_scales == OutputScales::per_token_group;
  return {layer.head_dim, layer.value_dim(), static_cast<int>(size_bytes(layer.kv_dtype)), has_token_scales(layer),
          group_scales ? shape::group_vectors(layer.value_dim()) : 1};
}

bool ForwardSm90FewRows::supports(const LayerSpec& layer, const DeviceFacts& facts) {
  if (layer.output_scales == OutputScales::per_token_group && !shape::supports_group_scales(layer.value_dim())) {
    return false;
  }
  return facts.arch == "sm_90a" && shape::supports(layer.head_dim, layer.value_dim()) &&
         layer.group_size() <= shape::max_rows(layer.value_dim());
}

ForwardSm90FewRows::ForwardSm90FewRows(const LayerSpec& layer, const DeviceFacts& facts)
    : layer_(layer), facts_(facts) {
  for (const Variant& variant : created_variants(layer)) kernel_of(variant);
}

std::vector<ForwardSm90FewRows::Variant> ForwardSm90FewRows::created_variants(const LayerSpec& layer) {
  const int32_t tile_q = shape::tile_rows(layer.group_size());
  std::vector<Variant> variants;
  for (const bool few_items : {true, false}) {
    for (const bool clustered : {true, false}) variants.push_back({tile_q, few_items, clustered});
  }
  return variants;
}

index::RequestCut ForwardSm90FewRows::cut_request(const LayerSpec& layer, int32_t q_len, int32_t kv_len) {
  const int tile_q = shape::tile_rows(q_len * layer.group_size());
  const shape::KeyValueShape kv = few_rows_shape(layer);
  return {true, q_len, shape::tile_keys(kv, tile_q), shape::split_keys(kv, kv_len, layer.num_kv_heads, tile_q), tile_q};
}

ForwardKey ForwardSm90FewRows::key(const LayerSpec& layer, const DeviceFacts& facts, const Variant& variant) {
  const shape::LaunchShape launch = shape_of(layer, variant);
  return {"forward_sm90_few_rows",
          facts.arch,
          rows_of(layer, variant),
          shape::tile_keys(few_rows_shape(layer), variant.tile_q),
          {{"num_warps", launch.num_warps},
           {"num_stages", launch.num_stages},
           {"min_ctas", launch.min_ctas},
           {"cluster_size", max_cluster_size(variant.clustered)},
           {"takes_turns", variant.takes_turns ? 1 : 0},
           {"request_tile_q", variant.tile_q}}};
}

// One CTA an item. Where their number is only a bound: four waves. Items are dealt out evenly, so fewer waves leave
// more of the last turn idle (256 requests of 1k keys: 16 % with two, 6 % with four); CTAs without an item cost time in
// small batches (one request of 1k: 1.2 us with four, 6 with eight).
uint32_t ForwardSm90FewRows::grid_of(const FewRowsLaunch& launch, int32_t ctas_per_multiprocessor) const {
  if (launch.is_exact) return static_cast<uint32_t>(launch.most_items);
  constexpr int64_t kWaves = 4;
  const int64_t enough = kWaves * facts_.num_multiprocessors * ctas_per_multiprocessor;
  const int32_t whole = launch.cluster_size;
  return static_cast<uint32_t>((std::min(launch.most_items, enough) + whole - 1) / whole * whole);
}

const jit::Kernel& ForwardSm90FewRows::kernel_of(const Variant& variant) const {
  const int tile_number = few_rows_tile_number(variant.tile_q);
  auto& kernel = kernels_[tile_number * 16 + (variant.shared_rows ? 8 : 0) + (variant.few_items ? 4 : 0) +
                          (variant.clustered ? 2 : 0) + (variant.takes_turns ? 1 : 0)];
  if (const jit::Kernel* found = kernel) return *found;
  kernel = &jit::kernels().get(forward_source(layer_, key(layer_, facts_, variant)));
  return *kernel;
}

void ForwardSm90FewRows::run(const plan::ForwardCall& call, const ForwardParams& params, const FewRowsLaunch& launch,
                             int* tickets, bool beside_earlier, jit::CUstream stream) const {
  const Variant variant = variant_of(launch);
  const shape::LaunchShape shape = shape_of(layer_, variant);
  const bool paged = layer_.cache.has_value();
  const shape::KeyValueShape kv = few_rows_shape(layer_);
  const FewRowsParams few{params, launch.items, launch.num_items, tickets};
  jit::CUtensorMap key{};
  jit::CUtensorMap value{};
  if (!paged || layer_.cache->page_size % shape::kBoxKeys == 0) {
    key = pages_map(call.key, paged, kv.head_dim, "key");
    value = pages_map(call.value, paged, kv.head_dim_v, "value");
  }
  const int tile_kv = shape::tile_keys(kv, variant.tile_q);
  const int shared_bytes = shape::smem_layout(kv, rows_of(layer_, variant), tile_kv, shape.num_warps, shape.num_stages,
                                              max_cluster_size(variant.clustered), variant.tile_q)
                               .total_bytes;
  qkv::cuda::launch(kernel_of(variant),
                    {.grid_x = grid_of(launch, shape.min_ctas),
                     .threads = static_cast<uint32_t>(shape.num_warps * shape::kWarpSize),
                     .shared_bytes = static_cast<uint32_t>(shared_bytes),
                     .cluster_size = static_cast<uint32_t>(launch.cluster_size),
                     .beside_earlier = beside_earlier},
                    {&few, &key, &value, &launch.shared_tokens}, stream);
}

}  // namespace qkv::cuda
