#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "qkv/layer.hpp"
#include "spec/rules.hpp"

namespace qkv {
namespace {

// A feature of the support matrix: how to ask for it on top of a plain decoder layer.
struct Feature {
  const char* name;
  std::function<void(LayerSpec&)> add;
};

// Masks of two features hold together: both must see the key.
void and_mask(LayerSpec& spec, const Mask& mask) { spec.mask = spec.effective_mask() & mask; }

const std::vector<Feature>& features() {
  static const std::vector<Feature> list = {
      {"paged cache", [](LayerSpec& s) { s.cache = CacheSpec{16}; }},
      {"page size 1", [](LayerSpec& s) { s.cache = CacheSpec{1}; }},
      {"dense keys", [](LayerSpec& s) { s.cache.reset(); }},
      {"f16 cache", [](LayerSpec& s) { s.kv_dtype = DType::f16; }},
      {"bf16 cache", [](LayerSpec& s) { s.kv_dtype = DType::bf16; }},
      {"bf16 output", [](LayerSpec& s) { s.output_dtype = DType::bf16; }},
      {"fp8 cache", [](LayerSpec& s) { s.kv_dtype = DType::f8e4m3; }},
      {"one KV head", [](LayerSpec& s) { s.num_kv_heads = 1; }},
      {"head_dim 72", [](LayerSpec& s) { s.head_dim = 72; }},
      {"head_dim_v 512", [](LayerSpec& s) { s.head_dim_v = 512; }},
      {"window", [](LayerSpec& s) { and_mask(s, mask::window(127, 0)); }},
      {"per-request causal", [](LayerSpec& s) { and_mask(s, mask::per_request_causal()); }},
      {"prefix-LM", [](LayerSpec& s) { and_mask(s, mask::prefix_lm()); }},
      {"R-SWA", [](LayerSpec& s) { and_mask(s, mask::rswa(128)); }},
      {"document mask", [](LayerSpec& s) { and_mask(s, mask::document()); }},
      {"token tree", [](LayerSpec& s) { and_mask(s, mask::tree()); }},
      {"softcap", [](LayerSpec& s) { s.softcap = 30; }},
      {"ALiBi",
       [](LayerSpec& s) {
         if (!s.alibi_per_request) s.alibi_slopes.assign(s.num_q_heads, 0.5F);
       }},
      {"ALiBi per request",
       [](LayerSpec& s) {
         s.alibi_per_request = true;
         s.alibi_slopes.clear();
       }},
      {"sinks", [](LayerSpec& s) { s.sinks.assign(s.num_q_heads, 0.0F); }},
      {"encoder",
       [](LayerSpec& s) {
         s.type = AttentionType::encoder_only;
         s.mask.reset();
       }},
      {"cross attention",
       [](LayerSpec& s) {
         s.type = AttentionType::encoder_decoder;
         s.mask.reset();
       }},
  };
  return list;
}

LayerSpec plain_layer() {
  LayerSpec spec;
  spec.num_q_heads = 8;
  spec.num_kv_heads = 2;
  spec.head_dim = 64;
  return spec;
}

}  // namespace

std::vector<std::string> explain(const LayerSpec& spec, Device device) {
  std::vector<std::string> sentences;
  for (const spec::Reason& reason : spec::reasons_against(spec, device)) {
    sentences.push_back(fmt::format("{}: got {}; allowed: {}", reason.argument, reason.value, reason.allowed));
  }
  return sentences;
}

std::string support_matrix(DeviceKind device) {
  const auto& all = features();
  std::string text = fmt::format("Features in pairs on {} (Y works, R refused when the layer is created):\n\n",
                                 device == DeviceKind::cpu ? "cpu" : "cuda");
  text += fmt::format("{:<22}", "");
  for (size_t column = 0; column < all.size(); ++column) text += fmt::format("{:>3}", column + 1);
  text += '\n';
  std::vector<std::string> notes;
  for (size_t row = 0; row < all.size(); ++row) {
    text += fmt::format("{:>2} {:<19}", row + 1, all[row].name);
    for (size_t column = 0; column <= row; ++column) {
      LayerSpec spec = plain_layer();
      all[column].add(spec);
      all[row].add(spec);
      const auto reasons = explain(spec, Device{device, 0});
      text += reasons.empty() ? "  Y" : "  R";
      if (!reasons.empty() && (notes.empty() || notes.back() != reasons.front())) notes.push_back(reasons.front());
    }
    text += '\n';
  }
  if (!notes.empty()) text += "\nRefusals:\n";
  std::vector<std::string> seen;
  for (const std::string& note : notes) {
    if (std::find(seen.begin(), seen.end(), note) != seen.end()) continue;
    seen.push_back(note);
    text += "  " + note + '\n';
  }
  return text;
}

}  // namespace qkv
