#include "model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "qkv/mla_prefill.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(const std::string& argument, const std::string& value, const std::string& allowed) {
  throw Error(ErrorCode::invalid_argument, argument, value, allowed);
}

// A config's fields. null counts as absent, as in Hugging Face's files.
class Fields {
 public:
  Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {}

  bool has(const char* name) const { return json_.contains(name) && !json_.at(name).is_null(); }
  const Json& at(const char* name) const { return json_.at(name); }

  // All of them are needed; what is missing is named in one message.
  void need(const std::vector<const char*>& names, const std::string& model_type) const {
    std::string missing;
    for (const char* name : names) {
      if (!has(name)) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
    }
    if (!missing.empty()) {
      refuse(path_, fmt::format("a {} config without {}", model_type, missing),
             fmt::format("{}", fmt::join(names, ", ")));
    }
  }

  int32_t integer(const char* name) const {
    if (!has(name) || !at(name).is_number_integer() || at(name) < 1 || at(name) > INT32_MAX) {
      refuse(fmt::format("{}: {}", path_, name), has(name) ? at(name).dump() : "nothing", "an integer, at least 1");
    }
    return at(name).get<int32_t>();
  }
  int32_t integer_or(const char* name, int32_t value) const { return has(name) ? integer(name) : value; }

  double number(const char* name) const {
    if (!has(name) || !at(name).is_number()) {
      refuse(fmt::format("{}: {}", path_, name), has(name) ? at(name).dump() : "nothing", "a number");
    }
    return at(name).get<double>();
  }

  std::string text_or(const char* name, const std::string& value) const {
    return has(name) && at(name).is_string() ? at(name).get<std::string>() : value;
  }

  const std::string& path() const { return path_; }

 private:
  const Json& json_;
  std::string path_;
};

// Every layer's window in tokens, 0 = none.
using Windows = std::vector<int32_t>;

// Newer configs name each layer's kind.
std::optional<Windows> windows_by_layer_types(const Fields& config, int32_t num_layers) {
  if (!config.has("layer_types")) return std::nullopt;
  Windows windows;
  for (const Json& type : config.at("layer_types")) {
    if (type != "full_attention" && type != "sliding_attention") {
      refuse(config.path() + ": layer_types", type.dump(), "full_attention or sliding_attention");
    }
    windows.push_back(type == "sliding_attention" ? config.integer("sliding_window") : 0);
  }
  if (static_cast<int32_t>(windows.size()) != num_layers) {
    refuse(config.path() + ": layer_types", fmt::format("{} entries", windows.size()),
           fmt::format("num_hidden_layers = {}", num_layers));
  }
  return windows;
}

Windows windows_where(const Fields& config, int32_t num_layers, const std::function<bool(int32_t)>& slides) {
  if (auto named = windows_by_layer_types(config, num_layers)) return *named;
  Windows windows(num_layers, 0);
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    if (slides(layer)) windows[layer] = config.integer("sliding_window");
  }
  return windows;
}

Windows windows_of(const std::string& type, const Fields& config, int32_t num_layers) {
  if (type == "mistral" || type == "mixtral") {
    return windows_where(config, num_layers, [&](int32_t) { return config.has("sliding_window"); });
  }
  if (type.starts_with("qwen")) {
    const bool slides = config.has("use_sliding_window") && config.at("use_sliding_window") == true;
    const int32_t first = config.has("max_window_layers") ? config.at("max_window_layers").get<int32_t>() : 0;
    return windows_where(config, num_layers, [&](int32_t layer) { return slides && layer >= first; });
  }
  if (type == "gemma2" || type == "gpt_oss") {
    return windows_where(config, num_layers, [](int32_t layer) { return layer % 2 == 0; });
  }
  if (type == "gemma3" || type == "gemma3_text") {
    const int32_t pattern = config.integer_or("sliding_window_pattern", 6);
    return windows_where(config, num_layers, [&](int32_t layer) { return (layer + 1) % pattern != 0; });
  }
  return Windows(num_layers, 0);
}

DType dtype_of(const Fields& config, const std::string& asked) {
  const std::string own = config.text_or("torch_dtype", config.text_or("dtype", "bfloat16"));
  const std::string name = asked == "auto" ? own : asked;
  if (name == "bf16" || name == "bfloat16") return DType::bf16;
  if (name == "f16" || name == "float16") return DType::f16;
  if (name == "f32" || name == "float32") return DType::f32;
  refuse("dtype", name, "bf16, f16 or f32");
}

int32_t share_of_heads(int32_t heads, int32_t ranks, bool may_repeat, const std::string& what) {
  if (heads % ranks == 0) return heads / ranks;
  if (may_repeat && ranks % heads == 0) return 1;  // ranks keep copies
  refuse("tp", std::to_string(ranks), fmt::format("a divisor of the model's {} {}", heads, what));
}

LayerSpec plain_spec(const Fields& config, const ServingOptions& options) {
  LayerSpec spec;
  spec.query_dtype = dtype_of(config, options.dtype);
  spec.kv_dtype = options.kv_dtype.value_or(spec.query_dtype);
  const bool has_scales = size_bytes(spec.kv_dtype) == 1;
  if (options.kv_scales && !has_scales) {
    refuse("kv-scales", std::string(to_string(*options.kv_scales)),
           fmt::format("none, or an 8-bit cache: this one is of {}", to_string(spec.kv_dtype)));
  }
  if (has_scales) spec.kv_scales = options.kv_scales.value_or(KvScales::per_tensor);
  spec.cache = CacheSpec{options.page_size};
  return spec;
}

// Grouped query heads over one cache: all but DeepSeek.
void add_grouped_layers(Model& model, const Fields& config, const ServingOptions& options) {
  const int32_t num_layers = config.integer("num_hidden_layers");
  const int32_t heads = config.integer("num_attention_heads");
  LayerSpec spec = plain_spec(config, options);
  spec.num_q_heads = share_of_heads(heads, options.tensor_parallel, false, "query heads");
  spec.num_kv_heads =
      share_of_heads(config.integer_or("num_key_value_heads", heads), options.tensor_parallel, true, "KV heads");
  spec.head_dim = config.has("head_dim") ? config.integer("head_dim") : config.integer("hidden_size") / heads;
  if (model.type.starts_with("gemma")) {
    spec.scale = static_cast<float>(1 / std::sqrt(config.number("query_pre_attn_scalar")));
    if (config.has("attn_logit_softcapping"))
      spec.softcap = static_cast<float>(config.number("attn_logit_softcapping"));
  }
  if (model.type == "gpt_oss") spec.sinks.assign(spec.num_q_heads, 0.0F);  // their values are the weights'
  const Windows windows = windows_of(model.type, config, num_layers);
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const int32_t window = windows[layer];
    const std::string name = window == 0 ? "full attention" : fmt::format("sliding window of {} tokens", window);
    auto kind = std::find_if(model.kinds.begin(), model.kinds.end(), [&](const auto& k) { return k.name == name; });
    if (kind == model.kinds.end()) {
      model.kinds.push_back({name, {}, spec, window});
      kind = model.kinds.end() - 1;
      if (window != 0) kind->spec.mask = mask::sliding_window(window);
    }
    kind->layers.push_back(layer);
  }
}

// DeepSeek's latent attention: heads are expanded for a prompt's new tokens and its context, and absorbed for decode.
void add_latent_layers(Model& model, const Fields& config, const ServingOptions& options) {
  const int32_t rope_dim = config.integer("qk_rope_head_dim");
  const int32_t latent_dim = config.integer("kv_lora_rank");
  std::vector<int32_t> numbers(config.integer("num_hidden_layers"));
  std::iota(numbers.begin(), numbers.end(), 0);
  MlaSpec expanded;
  expanded.num_heads =
      share_of_heads(config.integer("num_attention_heads"), options.tensor_parallel, false, "query heads");
  expanded.qk_nope_head_dim = config.integer("qk_nope_head_dim");
  expanded.qk_rope_head_dim = rope_dim;
  expanded.v_head_dim = config.integer("v_head_dim");
  expanded.kv_lora_rank = latent_dim;
  expanded.dtype = dtype_of(config, options.dtype);
  expanded.cache = CacheSpec{options.page_size};
  if (options.kv_dtype.value_or(expanded.dtype) != expanded.dtype && size_bytes(*options.kv_dtype) != 1) {
    throw Error(ErrorCode::unsupported, "kv-dtype", std::string(to_string(*options.kv_dtype)),
                fmt::format("{}, the model's dtype, or 8 bits", to_string(expanded.dtype)));
  }
  expanded.cache_dtype = options.kv_dtype;
  const std::vector<LayerSpec> layers = layers_of(expanded);
  LayerSpec absorbed = plain_spec(config, options);
  absorbed.num_q_heads = expanded.num_heads;
  absorbed.num_kv_heads = 1;
  absorbed.head_dim = latent_dim + rope_dim;
  absorbed.head_dim_v = latent_dim;
  absorbed.scale = layers[0].effective_scale();
  model.kinds = {{"latent attention, expanded: new tokens", numbers, layers[0]},
                 {"latent attention, expanded: chunks of context", numbers, layers[1]},
                 {"latent attention, absorbed: decode", numbers, absorbed}};
  model.has_latent_cache = true;
}

struct Architecture {
  const char* type;  // model_type
  std::vector<const char*> fields;
  void (*add_layers)(Model&, const Fields&, const ServingOptions&);
};

const std::vector<Architecture>& architectures() {
  static const std::vector<const char*> kGrouped = {"hidden_size", "num_hidden_layers", "num_attention_heads",
                                                    "max_position_embeddings"};
  static const std::vector<const char*> kGemma = {"num_hidden_layers", "num_attention_heads",
                                                  "head_dim",          "query_pre_attn_scalar",
                                                  "sliding_window",    "max_position_embeddings"};
  static const std::vector<const char*> kSinks = {"num_hidden_layers", "num_attention_heads", "head_dim",
                                                  "sliding_window", "max_position_embeddings"};
  static const std::vector<const char*> kLatent = {"num_hidden_layers",      "num_attention_heads", "qk_nope_head_dim",
                                                   "qk_rope_head_dim",       "v_head_dim",          "kv_lora_rank",
                                                   "max_position_embeddings"};
  static const std::vector<Architecture> list = {
      {"llama", kGrouped, add_grouped_layers},     {"mistral", kGrouped, add_grouped_layers},
      {"mixtral", kGrouped, add_grouped_layers},   {"qwen2", kGrouped, add_grouped_layers},
      {"qwen2_moe", kGrouped, add_grouped_layers}, {"qwen3", kGrouped, add_grouped_layers},
      {"qwen3_moe", kGrouped, add_grouped_layers}, {"gemma2", kGemma, add_grouped_layers},
      {"gemma3_text", kGemma, add_grouped_layers}, {"gemma3", kGemma, add_grouped_layers},
      {"gpt_oss", kSinks, add_grouped_layers},     {"deepseek_v2", kLatent, add_latent_layers},
      {"deepseek_v3", kLatent, add_latent_layers},
  };
  return list;
}

const Architecture& find_architecture(const std::string& type, const std::string& path) {
  std::string known;
  for (const Architecture& architecture : architectures()) {
    if (type == architecture.type) return architecture;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", architecture.type);
  }
  refuse(path, type.empty() ? "no model_type" : fmt::format("model_type {}", type), "model_type " + known);
}

Json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) {
    throw Error(ErrorCode::unavailable, path, "no file that can be read", "a model's config.json");
  }
  try {
    Json json = Json::parse(file);
    if (json.is_object()) return json;
  } catch (const Json::exception& error) {
    refuse(path, fmt::format("no JSON ({})", error.what()), "a model's config.json");
  }
  refuse(path, "JSON that is no object", "a model's config.json");
}

// What Hugging Face's class fills in where the file is silent; its published configs rely on it.
void fill_defaults(Json& json, const std::string& type) {
  if (type != "gemma3" && type != "gemma3_text") return;
  const Json defaults = {{"num_attention_heads", 8},
                         {"num_key_value_heads", 4},
                         {"head_dim", 256},
                         {"query_pre_attn_scalar", 256},
                         {"max_position_embeddings", 131072}};
  for (const auto& [name, value] : defaults.items()) {
    if (!json.contains(name)) json[name] = value;
  }
}

}  // namespace

Model read_model(const std::string& path, const ServingOptions& options) {
  Json json = read_json(path);
  Model model;
  model.type = Fields(json, path).text_or("model_type", "");
  const Architecture& architecture = find_architecture(model.type, path);
  if (json.contains("text_config") && json.at("text_config").is_object()) {
    if (json.contains("vision_config")) model.notes.emplace_back("vision_config: only the language model is read");
    const Json outer = std::move(json);
    json = outer.at("text_config");
    for (const char* name : {"torch_dtype", "dtype"}) {
      if (outer.contains(name) && !json.contains(name)) json[name] = outer.at(name);
    }
  }
  fill_defaults(json, model.type);
  const Fields config(json, path);
  config.need(architecture.fields, model.type);
  model.max_model_len = config.integer("max_position_embeddings");
  try {
    architecture.add_layers(model, config, options);
  } catch (const Json::exception& error) {
    refuse(path, error.what(), fmt::format("fields as a {} config has them", model.type));
  }
  return model;
}

std::string layer_numbers(const std::vector<int32_t>& layers) {
  std::string text = layers.size() == 1 ? "layer " : "layers ";
  for (size_t first = 0; first < layers.size();) {
    size_t last = first;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    text += fmt::format("{}{}", first == 0 ? "" : ", ", layers[first]);
    if (last > first) text += fmt::format("-{}", layers[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace qkv::tools
