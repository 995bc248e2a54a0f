#include "mla_cases.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "case_data.hpp"

namespace qkv::tools {

MlaSpec MlaCase::spec() const {
  const LayerSpec& layer = attention.layer;
  MlaSpec spec;
  spec.num_heads = layer.num_q_heads;
  spec.qk_rope_head_dim = qk_rope_head_dim;
  spec.qk_nope_head_dim = layer.head_dim - qk_rope_head_dim;
  spec.v_head_dim = layer.value_dim();
  spec.kv_lora_rank = kv_lora_rank;
  spec.dtype = layer.query_dtype;
  spec.output_dtype = layer.output_dtype;
  spec.output_scales = layer.output_scales;
  spec.cache_dtype = cache_dtype;
  spec.cache.page_size = options.page_size;
  spec.scale = layer.scale;
  spec.mask = layer.mask;
  spec.softcap = layer.softcap;
  spec.sinks = layer.sinks;
  return spec;
}

namespace {

// What MLA has of a layer: a key head a query head, one dtype, none of 8 bits but the output's, no ALiBi.
void fit_layer(Draw& draw, DeviceKind device, LayerSpec& layer) {
  layer.type = AttentionType::decoder;
  layer.cache.reset();
  layer.num_q_heads = std::min(layer.num_q_heads, 6);
  layer.num_kv_heads = layer.num_q_heads;
  if (is_float8(layer.query_dtype)) layer.query_dtype = DType::bf16;
  layer.kv_dtype = layer.query_dtype;
  layer.kv_scales = KvScales::none;
  layer.alibi_per_request = false;
  layer.alibi_slopes.clear();
  if (!layer.sinks.empty()) layer.sinks.resize(static_cast<size_t>(layer.num_q_heads));
  if (draw.one_in(2)) return;
  // The sizes of models.
  const auto [head_dim, head_dim_v] =
      draw.pick<std::pair<int32_t, int32_t>>({{192, 128}, {256, 256}, {128, 128}, {192, 128}});
  layer.head_dim = head_dim;
  layer.head_dim_v = head_dim_v;
  if (device == DeviceKind::cuda && layer.output_dtype == DType::f32 && draw.one_in(2)) layer.output_dtype.reset();
}

// How ranks share the cache. Where they have heads of their own, there are as many for each.
void draw_ranks(Draw& draw, int32_t num_ranks, MlaCase& c) {
  c.with_ranks = true;
  c.options.num_ranks = num_ranks;
  c.options.interleave_size = draw.pick<int32_t>({1, 1, 2, 5, 16});
  c.exchange = draw.pick<std::optional<StateExchange>>(
      {std::nullopt, StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather});
  if (!c.exchange || c.exchange == StateExchange::all_gather) return;
  LayerSpec& layer = c.attention.layer;
  layer.num_q_heads = layer.num_kv_heads = num_ranks * static_cast<int32_t>(draw.range(1, num_ranks > 3 ? 1 : 2));
  if (!layer.sinks.empty()) layer.sinks.resize(static_cast<size_t>(layer.num_q_heads), 0.5F);
}

// Contexts of all kinds beside prefills of few tokens: the oracle takes time.
RequestLengths draw_prefill(Draw& draw) {
  const auto q_len = static_cast<int32_t>(draw.one_in(4) ? 1 : draw.range(draw.one_in(9) ? 0 : 1, 40));
  const auto context = static_cast<int32_t>(draw.one_in(4) ? 0 : draw.range(1, draw.one_in(3) ? 700 : 90));
  return {q_len, q_len + context};
}

}  // namespace

MlaCase draw_mla_case(uint64_t seed, int64_t index, DeviceKind device, int32_t num_ranks) {
  MlaCase c;
  c.attention = draw_case(seed, index, device);
  c.attention.layer.key_run = KeyRun::all;
  c.attention.layer.shard = {};
  Draw draw_of_layer(seed ^ 0x313AULL, layer_number(index, device));
  fit_layer(draw_of_layer, device, c.attention.layer);
  const LayerSpec& layer = c.attention.layer;
  c.qk_rope_head_dim = draw_of_layer.one_in(4) ? 0 : layer.head_dim / 3 / 8 * 8;
  c.kv_lora_rank = draw_of_layer.pick<int32_t>({8, 16, 40, 64, 72});
  c.options.page_size = draw_of_layer.pick<int32_t>({1, 3, 16, 16, 64});
  if (draw_of_layer.one_in(3)) c.cache_dtype = draw_of_layer.pick<DType>({DType::f8e4m3, DType::f8e5m2, DType::i8});
  if (num_ranks > 0) draw_ranks(draw_of_layer, num_ranks, c);

  Draw draw(~seed ^ 0x313AULL, index);
  c.attention.requests.clear();
  const auto num_requests = static_cast<int32_t>(draw.one_in(40) ? 0 : draw.range(1, 5));
  constexpr int64_t kWork = 3'000'000;  // of the oracle, in multiply-adds
  int64_t work = 0;
  for (int32_t r = 0; r < num_requests; ++r) {
    const RequestLengths lengths = draw_prefill(draw);
    work += int64_t{lengths.q_len} * lengths.kv_len * layer.num_q_heads * (layer.head_dim + layer.value_dim());
    if (work < kWork) c.attention.requests.push_back(lengths);
  }
  c.options.workspace_tokens =
      chunk_alignment(c.options) * static_cast<int32_t>(std::max(num_requests, 1) + draw.range(0, 20));
  c.options.batch_invariant = draw.one_in(2);
  return c;
}

std::string describe(const MlaCase& c) {
  const std::string ranks =
      c.with_ranks ? fmt::format(" {} ranks interleave {} {}", c.options.num_ranks, c.options.interleave_size,
                                 c.exchange ? to_string(*c.exchange) : "latents")
                   : "";
  return fmt::format("mla rank {} rope {} page {}{} workspace {}{}{}: {}", c.kv_lora_rank, c.qk_rope_head_dim,
                     c.options.page_size, c.cache_dtype ? fmt::format(" of {}", to_string(*c.cache_dtype)) : "",
                     c.options.workspace_tokens, c.options.batch_invariant ? " batch-invariant" : "", ranks,
                     describe(c.attention));
}

}  // namespace qkv::tools
