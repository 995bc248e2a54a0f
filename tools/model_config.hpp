// A model's attention layers, read from its config.json as Hugging Face publishes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "qkv/layer.hpp"
#include "qkv/tensor.hpp"

namespace qkv::tools {

// What the serving run adds to the model.
struct ServingOptions {
  int32_t tensor_parallel = 1;  // ranks that share the heads
  int32_t page_size = 16;
  std::string dtype = "auto";              // of queries, cache and output: bf16, f16, or the config's own
  std::optional<DType> kv_dtype = {};      // of the cache, where it is another
  std::optional<KvScales> kv_scales = {};  // of an 8-bit cache; not given: per_tensor
};

// Layers of one model that are alike.
struct LayerKind {
  std::string name;             // "sliding window of 4096 tokens"
  std::vector<int32_t> layers;  // their numbers
  LayerSpec spec;
  int32_t window_tokens = 0;  // that spec.mask limits a query to, its own token included; 0 = none
};

struct Model {
  std::string type;           // "llama"
  int32_t max_model_len = 0;  // of max_position_embeddings
  std::vector<LayerKind> kinds;
  bool has_latent_cache = false;   // MlaPrefill's: chunks of it are gathered, and their states merged
  std::vector<std::string> notes;  // parts of the model that are left out, and why
};

// Throws where the file is no such config: names what was found and what is needed.
Model read_model(const std::string& path, const ServingOptions& options);

// "layers 0-5, 7, 9"
std::string layer_numbers(const std::vector<int32_t>& layers);

}  // namespace qkv::tools
