#include "api/mla_layers.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/checks.hpp"
#include "core/eight_bit.hpp"
#include "mask/shift.hpp"
#include "spec/rules.hpp"

namespace qkv {
namespace api {
namespace {

LayerSpec layer_of(const MlaSpec& spec, KeyRun run) {
  LayerSpec layer;
  layer.num_q_heads = spec.num_heads;
  layer.num_kv_heads = spec.num_heads;
  layer.head_dim = spec.head_dim();
  layer.head_dim_v = spec.v_head_dim;
  layer.query_dtype = spec.dtype;
  layer.kv_dtype = spec.dtype;
  layer.mask = mask::shift(spec.mask.value_or(mask::causal()), run);
  layer.scale = spec.scale;
  layer.softcap = spec.softcap;
  return layer;
}

}  // namespace

MlaSpec checked_layer(MlaSpec spec, Device device) {
  const std::vector<std::string> reasons = explain(spec, device);
  if (reasons.empty()) return spec;
  refuse("spec", "a layer that cannot run", fmt::format("{}", fmt::join(reasons, "; also ")), ErrorCode::unsupported);
}

LayerSpec new_tokens_layer(const MlaSpec& spec) {
  LayerSpec layer = layer_of(spec, KeyRun::new_tokens);
  layer.output_dtype = spec.output_dtype;
  layer.output_scales = spec.output_scales;
  layer.sinks = spec.sinks;
  return layer;
}

LayerSpec new_tokens_state_layer(const MlaSpec& spec) {
  LayerSpec layer = new_tokens_layer(spec);
  if (!is_float8(spec.out_dtype())) return layer;
  layer.output_dtype = DType::f32;
  layer.output_scales = OutputScales::per_tensor;
  return layer;
}

LayerSpec context_layer(const MlaSpec& spec) {
  LayerSpec layer = layer_of(spec, KeyRun::context);
  layer.output_dtype = DType::f32;
  return layer;
}

}  // namespace api

namespace {

using Reasons = std::vector<std::string>;

void check_at_least(const char* name, int32_t value, int32_t least, Reasons& reasons) {
  if (value < least) reasons.push_back(fmt::format("{}: got {}; allowed: at least {}", name, value, least));
}

// What LayerSpec does not know.
Reasons own_reasons(const MlaSpec& spec) {
  Reasons reasons;
  check_at_least("num_heads", spec.num_heads, 1, reasons);
  check_at_least("qk_nope_head_dim", spec.qk_nope_head_dim, 1, reasons);
  check_at_least("qk_rope_head_dim", spec.qk_rope_head_dim, 0, reasons);
  check_at_least("v_head_dim", spec.v_head_dim, 1, reasons);
  check_at_least("kv_lora_rank", spec.kv_lora_rank, 1, reasons);
  check_at_least("cache.page_size", spec.cache.page_size, 1, reasons);
  if (is_8bit(spec.dtype)) {
    reasons.push_back(fmt::format("dtype: got {}; allowed: f32, f16 or bf16", to_string(spec.dtype)));
  }
  if (spec.latent_dtype() != spec.dtype && !is_8bit(spec.latent_dtype())) {
    reasons.push_back(fmt::format("cache_dtype: got {}; allowed: dtype = {}, f8e4m3, f8e5m2 or i8",
                                  to_string(spec.latent_dtype()), to_string(spec.dtype)));
  }
  for (const OperandDeclaration& operand : operands_of(spec.mask.value_or(mask::causal()))) {
    for (const char* own : {mask::kPositionShift, mask::kKeyShift, mask::kRequestNumber}) {
      if (operand.name == own) {
        reasons.push_back(fmt::format("mask: got an operand {}; allowed: names that chunks do not use", own));
      }
    }
  }
  return reasons;
}

}  // namespace

std::vector<LayerSpec> layers_of(const MlaSpec& spec) {
  std::vector<LayerSpec> layers = {api::new_tokens_layer(spec), api::context_layer(spec)};
  if (is_float8(spec.out_dtype())) layers.push_back(api::new_tokens_state_layer(spec));
  return layers;
}

std::vector<std::string> explain(const MlaSpec& spec, Device device) {
  Reasons reasons = own_reasons(spec);
  if (!reasons.empty()) return reasons;
  try {
    for (const LayerSpec& layer : layers_of(spec)) {
      for (const Error& error : spec::reasons_against(layer, device)) {
        if (std::find(reasons.begin(), reasons.end(), error.what()) == reasons.end()) reasons.push_back(error.what());
      }
    }
  } catch (const Error& error) {  // the mask grows when it is shifted
    reasons.push_back(error.what());
  }
  return reasons;
}

}  // namespace qkv
