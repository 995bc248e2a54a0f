#include "qkv/layer.hpp"

#include <cmath>

#include "core/float8.hpp"

namespace qkv {

std::string_view to_string(AttentionType type) {
  switch (type) {
    case AttentionType::decoder:
      return "decoder";
    case AttentionType::encoder_only:
      return "encoder_only";
    case AttentionType::encoder:
      return "encoder";
    case AttentionType::encoder_decoder:
      return "encoder_decoder";
  }
  return "unknown";
}

std::string_view to_string(KvScales scales) {
  switch (scales) {
    case KvScales::none:
      return "none";
    case KvScales::per_tensor:
      return "per_tensor";
    case KvScales::per_head:
      return "per_head";
    case KvScales::per_request_head:
      return "per_request_head";
    case KvScales::per_token_head:
      return "per_token_head";
  }
  return "unknown";
}

std::string_view to_string(OutputScales scales) {
  switch (scales) {
    case OutputScales::per_tensor:
      return "per_tensor";
    case OutputScales::per_token_group:
      return "per_token_group";
  }
  return "unknown";
}

DType LayerSpec::out_dtype() const { return output_dtype.value_or(is_float8(query_dtype) ? DType::bf16 : query_dtype); }

float LayerSpec::effective_scale() const { return scale.value_or(1.0F / std::sqrt(static_cast<float>(head_dim))); }

Mask LayerSpec::effective_mask() const {
  if (mask) return *mask;
  return type == AttentionType::decoder ? mask::causal() : mask::everything();
}

}  // namespace qkv
