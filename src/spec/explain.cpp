#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "qkv/layer.hpp"
#include "spec/rules.hpp"

namespace qkv {
namespace {

// A feature of the support matrix: how to ask for it on top of a plain decoder layer. Features of one choice exclude
// each other.
enum class Choice { none, keys, kv_dtype, output, alibi, type, key_run, query };

struct Feature {
  const char* name;
  Choice choice;
  std::function<void(LayerSpec&)> add;
};

// Masks of two features hold together: both must see the key.
void and_mask(LayerSpec& spec, const Mask& mask) { spec.mask = spec.effective_mask() & mask; }

// Of f16 or bf16; on a GPU, whose plain layer is of bf16, the queries go along.
void set_keys(LayerSpec& spec, DType dtype) {
  if (spec.query_dtype == DType::bf16) spec.query_dtype = dtype;
  spec.kv_dtype = dtype;
  spec.kv_scales = KvScales::none;
}

void set_8bit_keys(LayerSpec& spec, DType dtype) {
  spec.kv_dtype = dtype;
  spec.kv_scales = KvScales::per_head;
}

// On a GPU the keys go along.
void set_8bit_query(LayerSpec& spec) {
  if (spec.query_dtype == DType::bf16) set_8bit_keys(spec, DType::f8e4m3);
  spec.query_dtype = DType::f8e4m3;
}

const std::vector<Feature>& features() {
  static const std::vector<Feature> list = {
      {"paged cache", Choice::keys, [](LayerSpec& s) { s.cache = CacheSpec{16}; }},
      {"page size 1", Choice::keys, [](LayerSpec& s) { s.cache = CacheSpec{1}; }},
      {"dense keys", Choice::keys, [](LayerSpec& s) { s.cache.reset(); }},
      {"f16 cache", Choice::kv_dtype, [](LayerSpec& s) { set_keys(s, DType::f16); }},
      {"bf16 cache", Choice::kv_dtype, [](LayerSpec& s) { set_keys(s, DType::bf16); }},
      {"fp8 cache", Choice::kv_dtype, [](LayerSpec& s) { set_8bit_keys(s, DType::f8e4m3); }},
      {"int8 cache", Choice::kv_dtype, [](LayerSpec& s) { set_8bit_keys(s, DType::i8); }},
      {"fp8 query", Choice::query, set_8bit_query},
      {"bf16 output", Choice::output, [](LayerSpec& s) { s.output_dtype = DType::bf16; }},
      {"fp8 output", Choice::output, [](LayerSpec& s) { s.output_dtype = DType::f8e4m3; }},
      {"fp8 output by group", Choice::output,
       [](LayerSpec& s) {
         s.output_dtype = DType::f8e4m3;
         s.output_scales = OutputScales::per_token_group;
       }},
      {"one KV head", Choice::none, [](LayerSpec& s) { s.num_kv_heads = 1; }},
      {"head_dim 72", Choice::none, [](LayerSpec& s) { s.head_dim = 72; }},
      {"head_dim_v 512", Choice::none, [](LayerSpec& s) { s.head_dim_v = 512; }},
      {"window", Choice::none, [](LayerSpec& s) { and_mask(s, mask::window(127, 0)); }},
      {"per-request causal", Choice::none, [](LayerSpec& s) { and_mask(s, mask::per_request_causal()); }},
      {"prefix-LM", Choice::none, [](LayerSpec& s) { and_mask(s, mask::prefix_lm()); }},
      {"R-SWA", Choice::none, [](LayerSpec& s) { and_mask(s, mask::rswa(128)); }},
      {"document mask", Choice::none, [](LayerSpec& s) { and_mask(s, mask::document()); }},
      {"token tree", Choice::none, [](LayerSpec& s) { and_mask(s, mask::tree()); }},
      {"softcap", Choice::none, [](LayerSpec& s) { s.softcap = 30; }},
      {"ALiBi", Choice::alibi, [](LayerSpec& s) { s.alibi_slopes.assign(s.num_q_heads, 0.5F); }},
      {"ALiBi per request", Choice::alibi, [](LayerSpec& s) { s.alibi_per_request = true; }},
      {"sinks", Choice::none, [](LayerSpec& s) { s.sinks.assign(s.num_q_heads, 0.0F); }},
      {"one of 4 ranks", Choice::none,
       [](LayerSpec& s) {
         s.shard = {1, 4, 1};
       }},
      {"context keys", Choice::key_run, [](LayerSpec& s) { s.key_run = KeyRun::context; }},
      {"new tokens' keys", Choice::key_run, [](LayerSpec& s) { s.key_run = KeyRun::new_tokens; }},
      {"encoder", Choice::type, [](LayerSpec& s) { s.type = AttentionType::encoder_only; }},
      {"cross attention", Choice::type, [](LayerSpec& s) { s.type = AttentionType::encoder_decoder; }},
  };
  return list;
}

LayerSpec plain_layer(DeviceKind device) {
  LayerSpec spec;
  if (device == DeviceKind::cuda) spec.query_dtype = spec.kv_dtype = DType::bf16;
  spec.num_q_heads = 8;
  spec.num_kv_heads = 2;
  spec.head_dim = 64;
  return spec;
}

}  // namespace

namespace {

// Features are asked for in both orders: the second may take back what the first brought along (dense keys, the pages
// of an 8-bit cache).
std::vector<std::string> reasons_against(const Feature& first, const Feature& second, DeviceKind device) {
  for (const auto& [one, other] : {std::pair{&first, &second}, {&second, &first}}) {
    LayerSpec spec = plain_layer(device);
    one->add(spec);
    other->add(spec);
    if (auto reasons = explain(spec, Device{device, 0}); !reasons.empty()) return reasons;
  }
  return {};
}

}  // namespace

std::vector<std::string> explain(const LayerSpec& spec, Device device) {
  std::vector<std::string> sentences;
  for (const Error& reason : spec::reasons_against(spec, device)) sentences.emplace_back(reason.what());
  return sentences;
}

std::string support_matrix(DeviceKind device) {
  const auto& all = features();
  std::string text =
      fmt::format("Features in pairs on {} (Y works, R refused when the layer is created, - one or the other):\n\n",
                  device == DeviceKind::cpu ? "cpu" : "cuda");
  text += fmt::format("{:<22}", "");
  for (size_t column = 0; column < all.size(); ++column) text += fmt::format("{:>3}", column + 1);
  text += '\n';
  std::vector<std::string> notes;
  for (size_t row = 0; row < all.size(); ++row) {
    text += fmt::format("{:>2} {:<19}", row + 1, all[row].name);
    for (size_t column = 0; column <= row; ++column) {
      if (row != column && all[row].choice != Choice::none && all[row].choice == all[column].choice) {
        text += "  -";
        continue;
      }
      const auto reasons = reasons_against(all[column], all[row], device);
      text += reasons.empty() ? "  Y" : "  R";
      if (!reasons.empty() && std::find(notes.begin(), notes.end(), reasons.front()) == notes.end()) {
        notes.push_back(reasons.front());
      }
    }
    text += '\n';
  }
  if (!notes.empty()) text += "\nRefusals:\n";
  for (const std::string& note : notes) text += "  " + note + '\n';
  return text;
}

}  // namespace qkv
