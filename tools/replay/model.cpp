#include "model.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "qkv/status.hpp"

namespace qkv::replay {

Model model_of(const ModelShape& shape) {
  LayerKind kind;
  kind.spec.num_q_heads = shape.num_q_heads;
  kind.spec.num_kv_heads = shape.num_kv_heads;
  kind.spec.head_dim = shape.head_dim;
  kind.spec.head_dim_v = shape.head_dim_v;
  kind.spec.query_dtype = shape.dtype;
  kind.spec.kv_dtype = shape.dtype;
  kind.spec.cache = CacheSpec{shape.page_size};
  kind.window_tokens = shape.window_tokens;
  if (shape.window_tokens > 0) kind.spec.mask = mask::sliding_window(shape.window_tokens);
  kind.num_layers = shape.num_layers;
  return {describe(kind), {kind}};
}

Model model_of(const tools::Model& config) {
  Model model;
  for (const tools::LayerKind& kind : config.kinds) {
    if (!kind.spec.cache) {
      throw Error(ErrorCode::unsupported, "--model", fmt::format("{}: {}", config.type, kind.name),
                  "layers with a paged cache of keys and values");
    }
    model.kinds.push_back({kind.spec, kind.window_tokens, static_cast<int32_t>(kind.layers.size())});
    model.name += (model.name.empty() ? config.type + ": " : "; ") + describe(model.kinds.back());
  }
  return model;
}

std::string describe(const LayerKind& kind) {
  const LayerSpec& spec = kind.spec;
  std::string text = fmt::format("{} layer{} of {}/{} heads, head size {}", kind.num_layers,
                                 kind.num_layers == 1 ? "" : "s", spec.num_q_heads, spec.num_kv_heads, spec.head_dim);
  if (spec.value_dim() != spec.head_dim) text += fmt::format("/{}", spec.value_dim());
  text += fmt::format(", {}", to_string(spec.kv_dtype));
  if (kind.window_tokens > 0) text += fmt::format(", window {}", kind.window_tokens);
  return text;
}

LayerWork work_of(const LayerKind& kind, int32_t num_new, int32_t num_keys) {
  const LayerSpec& spec = kind.spec;
  const int64_t window = kind.window_tokens > 0 ? kind.window_tokens : num_keys;
  const int64_t first = int64_t{num_keys} - num_new + 1;  // keys up to and with the first new token
  // Query i sees min(first + i, window) keys: a rising run, then a level one.
  const int64_t rising = std::clamp<int64_t>(window - first + 1, 0, num_new);
  const int64_t pairs = rising * first + rising * (rising - 1) / 2 + (num_new - rising) * window;
  const int64_t read_keys = std::min<int64_t>(num_keys, window + num_new - 1);

  const int64_t dims = spec.head_dim + spec.value_dim();
  const int64_t query_bytes = spec.num_q_heads * (int64_t{spec.head_dim} * size_bytes(spec.query_dtype) +
                                                  int64_t{spec.value_dim()} * size_bytes(spec.out_dtype()));
  const int64_t source_bytes = spec.num_kv_heads * dims * size_bytes(spec.query_dtype);
  const int64_t token_bytes = cache_bytes_of_token(spec);
  return {read_keys * token_bytes + num_new * (query_bytes + source_bytes + token_bytes),
          2 * pairs * spec.num_q_heads * dims};
}

int64_t cache_bytes_of_token(const LayerSpec& spec) {
  return int64_t{spec.num_kv_heads} * (spec.head_dim + spec.value_dim()) * size_bytes(spec.kv_dtype);
}

}  // namespace qkv::replay
