// The attention layers of a model, as far as a replay needs them.
#pragma once

#include <string>
#include <vector>

#include "../model_config.hpp"
#include "qkv/layer.hpp"

namespace qkv::replay {

// Layers that are alike: they share a plan. A model whose layers alternate between windows has two kinds.
struct LayerKind {
  LayerSpec spec;             // with a cache
  int32_t window_tokens = 0;  // that spec.mask limits a query to, its own token included; 0 = causal only
  int32_t num_layers = 1;
};

struct Model {
  std::string name;
  std::vector<LayerKind> kinds;
};

// A model of one kind of layer, as the command's options give it.
struct ModelShape {
  int32_t num_layers = 4;
  int32_t num_q_heads = 32;
  int32_t num_kv_heads = 8;
  int32_t head_dim = 128;
  int32_t head_dim_v = 0;     // 0 = head_dim
  int32_t window_tokens = 0;  // 0 = causal only
  int32_t page_size = 16;
  DType dtype = DType::bf16;  // of queries, new keys and values, the cache and the output
};

Model model_of(const ModelShape& shape);

// The layers of a model's config.json. Throws where a kind of layer has no paged cache of keys and values (MLA's).
Model model_of(const tools::Model& config);

// "4 layers of 32/8 heads, head size 128, bf16, window 1024"
std::string describe(const LayerKind& kind);

// What one layer's forward and update_cache must at least do for a request's part in a step.
struct LayerWork {
  int64_t bytes = 0;       // each visible key and value once, new ones written, queries read, outputs written
  int64_t operations = 0;  // two products, 2 operations an element
};
LayerWork work_of(const LayerKind& kind, int32_t num_new, int32_t num_keys);

// Bytes of keys and values that one layer keeps of a token.
int64_t cache_bytes_of_token(const LayerSpec& spec);

}  // namespace qkv::replay
