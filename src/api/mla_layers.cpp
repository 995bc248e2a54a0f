#include "api/mla_layers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "api/layer_checks.hpp"
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

void check_at_least(const char* name, int32_t value, int32_t least, std::vector<Error>& reasons) {
  if (value >= least) return;
  reasons.emplace_back(ErrorCode::invalid_argument, name, fmt::format("{}", value), fmt::format("at least {}", least));
}

void check_dtypes(const MlaSpec& spec, Device device, std::vector<Error>& reasons) {
  const bool is_f32_of_gpu = device.kind == DeviceKind::cuda && spec.dtype == DType::f32;
  const bool is_float = spec.dtype == DType::f32 || spec.dtype == DType::f16 || spec.dtype == DType::bf16;
  if (!is_float || is_f32_of_gpu) {
    reasons.emplace_back(is_f32_of_gpu ? ErrorCode::unsupported : ErrorCode::invalid_argument, "dtype",
                         std::string(to_string(spec.dtype)),
                         device.kind == DeviceKind::cuda ? "f16 or bf16 on a GPU" : "f32, f16 or bf16");
  }
  if (spec.latent_dtype() != spec.dtype && !is_8bit(spec.latent_dtype())) {
    reasons.emplace_back(ErrorCode::invalid_argument, "cache_dtype", std::string(to_string(spec.latent_dtype())),
                         fmt::format("dtype = {}, f8e4m3, f8e5m2 or i8", to_string(spec.dtype)));
  }
}

// What LayerSpec does not know.
std::vector<Error> own_reasons(const MlaSpec& spec, Device device) {
  std::vector<Error> reasons;
  check_at_least("num_heads", spec.num_heads, 1, reasons);
  check_at_least("qk_nope_head_dim", spec.qk_nope_head_dim, 1, reasons);
  check_at_least("qk_rope_head_dim", spec.qk_rope_head_dim, 0, reasons);
  check_at_least("v_head_dim", spec.v_head_dim, 1, reasons);
  check_at_least("kv_lora_rank", spec.kv_lora_rank, 1, reasons);
  check_at_least("cache.page_size", spec.cache.page_size, 1, reasons);
  if (constexpr int32_t kMaxRank = 1 << 16; spec.kv_lora_rank > kMaxRank) {
    reasons.emplace_back(ErrorCode::invalid_argument, "kv_lora_rank", fmt::format("{}", spec.kv_lora_rank),
                         fmt::format("1 to {}", kMaxRank));
  }
  check_dtypes(spec, device, reasons);
  for (const OperandDeclaration& operand : operands_of(spec.mask.value_or(mask::causal()))) {
    for (const char* own : {mask::kPositionShift, mask::kKeyShift, mask::kRequestNumber}) {
      if (operand.name != own) continue;
      reasons.emplace_back(ErrorCode::invalid_argument, "mask", fmt::format("an operand {}", own),
                           "names that chunks do not use");
    }
  }
  return reasons;
}

// A reason against one of the layers, with the name that the field has in MlaSpec.
Error renamed(const Error& reason) {
  constexpr std::pair<std::string_view, const char*> kNames[] = {
      {"num_q_heads", "num_heads"},
      {"head_dim", "qk_nope_head_dim + qk_rope_head_dim"},
      {"head_dim_v", "v_head_dim"},
  };
  for (const auto& [of_layer, of_mla] : kNames) {
    if (reason.argument() == of_layer) return {reason.code(), of_mla, reason.value(), reason.allowed()};
  }
  return reason;
}

std::vector<Error> reasons_against(const MlaSpec& spec, Device device) {
  std::vector<Error> reasons = own_reasons(spec, device);
  if (!reasons.empty()) return reasons;
  const auto add = [&](const Error& reason) {
    const auto is_same = [&](const Error& other) { return std::string_view(other.what()) == reason.what(); };
    if (std::none_of(reasons.begin(), reasons.end(), is_same)) reasons.push_back(reason);
  };
  try {
    for (const LayerSpec& layer : layers_of(spec)) {
      for (const Error& reason : spec::reasons_against(layer, device)) add(renamed(reason));
    }
  } catch (const Error& error) {  // the mask grows when it is shifted
    add(error);
  }
  return reasons;
}

}  // namespace

std::vector<LayerSpec> layers_of(const MlaSpec& spec) {
  std::vector<LayerSpec> layers = {api::new_tokens_layer(spec), api::context_layer(spec)};
  if (is_float8(spec.out_dtype())) layers.push_back(api::new_tokens_state_layer(spec));
  return layers;
}

MlaSpec api::checked_layer(MlaSpec spec, Device device) {
  if (const std::vector<Error> reasons = reasons_against(spec, device); !reasons.empty()) api::throw_all(reasons);
  return spec;
}

std::vector<std::string> explain(const MlaSpec& spec, Device device) {
  std::vector<std::string> sentences;
  for (const Error& reason : reasons_against(spec, device)) sentences.emplace_back(reason.what());
  return sentences;
}

}  // namespace qkv
