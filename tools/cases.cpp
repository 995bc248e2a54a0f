#include "cases.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace qkv::tools {

Draw::Draw(uint64_t seed, int64_t index) : engine_(seed * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(index)) {}

int64_t Draw::range(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
}

float Draw::normal() {
  const double u = (static_cast<double>(engine_() >> 11) + 1) * 0x1p-53;
  const double v = static_cast<double>(engine_() >> 11) * 0x1p-53;
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
}

namespace {

// Multiply-adds that the float64 oracle may spend on one case; rare cases may be longer, to reach splits.
constexpr int64_t kWork = 400'000;
constexpr int64_t kLongWork = 4'000'000;

MaskValue draw_value(Draw& draw) {
  switch (draw.range(0, 9)) {
    case 0:
      return mask::q_pos();
    case 1:
      return mask::kv_pos();
    case 2:
      return mask::q_head();
    case 3:
      return mask::request();
    case 4:
      return mask::q_len();
    case 5:
      return mask::kv_len();
    case 6:
      return mask::operand("per_request", OperandScope::request);
    case 7:
      return mask::operand("per_token", draw.one_in(2) ? OperandScope::query : OperandScope::new_key);
    case 8:
      return mask::operand("per_key", OperandScope::key);
    default:
      return draw.range(-3, 40);
  }
}

Mask draw_comparison(Draw& draw) {
  MaskValue left = draw_value(draw);
  MaskValue right = draw_value(draw);
  if (draw.one_in(2)) left = left + draw_value(draw);
  if (draw.one_in(2)) right = right - draw_value(draw);
  switch (draw.range(0, 3)) {
    case 0:
      return left < right;
    case 1:
      return left == right;
    case 2:
      return left != right;
    default:
      return left <= right;
  }
}

Mask draw_builtin(Draw& draw) {
  switch (draw.range(0, 10)) {
    case 0:
      return mask::everything();
    case 1:
      return mask::window(draw.range(-1, 40), draw.range(-1, 40));
    case 2:
      return mask::causal() & mask::window(draw.range(0, 200), -1);
    case 3:
      return mask::rswa(draw.range(0, 20));
    case 4:
      return mask::prefix_lm();
    case 5:
      return mask::prefix_lm(draw.range(0, 30), draw.one_in(2));
    case 6:
      return mask::per_request_causal();
    case 7:
      return mask::per_request_causal() & mask::window(9, 9);
    case 8:
      return mask::document();
    case 9:
      return mask::tree();
    default:
      return mask::causal();
  }
}

Mask draw_mask(Draw& draw) {
  switch (draw.range(0, 5)) {
    case 0:
      return draw_comparison(draw) & draw_builtin(draw);
    case 1:
      return draw_comparison(draw) | (draw_builtin(draw) & ~draw_comparison(draw));
    default:
      return draw_builtin(draw);
  }
}

DType draw_dtype(Draw& draw) { return draw.pick<DType>({DType::f32, DType::f16, DType::bf16}); }

int32_t draw_head_dim(Draw& draw, bool small) {
  if (small) return static_cast<int32_t>(draw.range(8, 24));
  return draw.one_in(3) ? static_cast<int32_t>(draw.range(8, 80))
                        : draw.pick<int32_t>({8, 16, 32, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256, 512});
}

// Layers that are shown some of the keys only.
void draw_shown_keys(Draw& draw, LayerSpec& layer) {
  if (layer.type == AttentionType::decoder && draw.one_in(5)) {
    const bool may_be_new_only = !layer.cache.has_value();
    layer.key_run = may_be_new_only && draw.one_in(2) ? KeyRun::new_tokens : KeyRun::context;
  }
  if (layer.key_run == KeyRun::new_tokens || !draw.one_in(4)) return;
  layer.shard.num_ranks = draw.pick<int32_t>({2, 2, 3, 4, 8});
  layer.shard.rank = static_cast<int32_t>(draw.range(0, layer.shard.num_ranks - 1));
  const int32_t page_size = layer.cache ? layer.cache->page_size : 16;
  const auto interleave = static_cast<int32_t>(draw.range(1, page_size));
  layer.shard.interleave_size = page_size % interleave == 0 ? interleave : 1;
}

void draw_layer(Draw& draw, bool small, Case& c) {
  LayerSpec& layer = c.layer;
  layer.num_kv_heads = small ? draw.pick<int32_t>({1, 2, 5}) : draw.pick<int32_t>({1, 1, 2, 3, 4, 8});
  const int32_t group = draw.pick<int32_t>({1, 1, 2, 3, 4, 4, 5, 7, 8, 12, 16, 33});
  layer.num_q_heads = layer.num_kv_heads * (small ? std::min(group, 8) : group);
  layer.head_dim = draw_head_dim(draw, small);
  layer.head_dim_v = draw.one_in(3) ? draw_head_dim(draw, small) : 0;
  layer.query_dtype = draw_dtype(draw);
  layer.kv_dtype = draw.one_in(2) ? layer.query_dtype : draw_dtype(draw);
  if (draw.one_in(3)) layer.output_dtype = draw_dtype(draw);
  layer.type =
      draw.pick<AttentionType>({AttentionType::decoder, AttentionType::decoder, AttentionType::decoder,
                                AttentionType::encoder_only, AttentionType::encoder, AttentionType::encoder_decoder});
  const bool has_cache = layer.type == AttentionType::decoder || layer.type == AttentionType::encoder_decoder;
  if (has_cache && !draw.one_in(4)) {
    layer.cache = CacheSpec{draw.pick<int32_t>({1, 2, 3, 7, 8, 16, 16, 16, 19, 32, 48, 64, 128, 256})};
  }
  if (!draw.one_in(4)) layer.mask = draw_mask(draw);
  if (draw.one_in(4)) layer.scale = 0.05F * static_cast<float>(draw.range(-2, 10));
  if (draw.one_in(4)) layer.softcap = draw.pick<float>({0.5F, 5, 30, 50});
  if (draw.one_in(4)) {
    if (draw.one_in(2)) {
      layer.alibi_per_request = true;
    } else {
      for (int32_t h = 0; h < layer.num_q_heads; ++h) layer.alibi_slopes.push_back(std::exp2(-0.5F * (1 + h % 16)));
    }
  }
  if (draw.one_in(4)) {
    for (int32_t h = 0; h < layer.num_q_heads; ++h) layer.sinks.push_back(2 * draw.normal());
    if (draw.one_in(4)) layer.sinks[0] = -INFINITY;
  }
  if (draw.one_in(3)) {
    layer.kv_dtype = draw.pick<DType>({DType::f8e4m3, DType::f8e5m2, DType::i8});
    layer.kv_scales = draw.pick<KvScales>(
        {KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head, KvScales::per_token_head});
  }
  if (draw.one_in(8)) layer.output_dtype = draw.pick<DType>({DType::f8e4m3, DType::f8e5m2});
  if (draw.one_in(size_bytes(layer.kv_dtype) == 1 ? 3 : 12)) {
    layer.query_dtype = draw.pick<DType>({DType::f8e4m3, DType::f8e4m3, DType::f8e5m2});
    c.query_scales = draw.pick<KvScales>({KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head});
  }
  draw_shown_keys(draw, layer);
  if (layer.output_dtype && size_bytes(*layer.output_dtype) == 1 && draw.one_in(2)) {
    layer.output_scales = OutputScales::per_token_group;
  }
}

void draw_layout(Draw& draw, Case& c) {
  c.layout.axes = draw.pick<std::string>({"pth", "pht", "pht", "hpt", "tph", "htp"});
  c.layout.interleaved = draw.one_in(2);
  c.layout.row_padding = draw.one_in(3) ? static_cast<int32_t>(draw.range(1, 9)) : 0;
  c.layout.odd_singleton_strides = draw.one_in(2);
}

RequestLengths draw_lengths(Draw& draw, AttentionType type) {
  const auto length = [&] {
    return static_cast<int32_t>(draw.one_in(3) ? draw.pick<int64_t>({0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257})
                                               : draw.range(1, draw.one_in(4) ? 600 : 60));
  };
  RequestLengths lengths{length(), length()};
  if (type == AttentionType::encoder || type == AttentionType::encoder_only) {
    lengths.kv_len = lengths.q_len;
  } else if (type == AttentionType::decoder) {
    switch (draw.range(0, 7)) {
      case 0:  // more queries than keys
        break;
      case 1:  // a first prefill
        lengths.kv_len = lengths.q_len;
        break;
      case 2:
      case 3:  // a chunk
        lengths.kv_len += lengths.q_len;
        break;
      case 4:  // speculative decode
        lengths.q_len = static_cast<int32_t>(draw.range(2, 8));
        lengths.kv_len += lengths.q_len;
        break;
      default:  // decode
        lengths.q_len = 1;
        break;
    }
  }
  return lengths;
}

void draw_requests(Draw& draw, Case& c) {
  const int64_t num_requests = draw.one_in(40) ? 0 : draw.range(1, 5);
  const LayerSpec& layer = c.layer;
  int64_t work = 0;
  for (int64_t r = 0; r < num_requests; ++r) {
    RequestLengths lengths = draw_lengths(draw, layer.type);
    if (layer.key_run != KeyRun::all) lengths.kv_len = std::max(lengths.kv_len, lengths.q_len);
    const int64_t cost = static_cast<int64_t>(lengths.q_len) * lengths.kv_len * layer.num_q_heads *
                         (layer.head_dim + layer.value_dim() + 40);
    if (work + cost > kWork) continue;
    work += cost;
    c.requests.push_back(lengths);
  }
}

// One request of few rows over many keys, so that its keys are split and merged.
void draw_long_request(Draw& draw, Case& c) {
  const LayerSpec& layer = c.layer;
  const auto q_len = static_cast<int32_t>(draw.range(1, 9));
  const int64_t cost_per_key =
      static_cast<int64_t>(q_len) * layer.num_q_heads * (layer.head_dim + layer.value_dim() + 40);
  const auto most = std::clamp<int64_t>(kLongWork / cost_per_key, 1000, 9000);
  c.requests.push_back({q_len, static_cast<int32_t>(draw.range(600, most))});
}

// Requests of few tokens behind the last one, which share its first keys, some of them more than others.
void draw_shared_prefix(Draw& draw, Case& c) {
  if (c.requests.empty()) return;
  const auto first = static_cast<int32_t>(c.requests.size()) - 1;
  const int32_t page_size = c.layer.cache->page_size * c.layer.shard.num_ranks;  // a page of every rank
  const RequestLengths like = c.requests.back();
  const int32_t most = (like.kv_len - like.q_len) / page_size;  // pages
  if (most < 1) return;
  PrefixGroup all{{first}, static_cast<int32_t>(draw.range((most + 1) / 2, most)) * page_size};
  PrefixGroup some{{}, static_cast<int32_t>(draw.range(all.num_tokens / page_size, most)) * page_size};
  const auto members = static_cast<int32_t>(draw.range(2, 5));
  for (int32_t r = first + 1; r < first + members; ++r) {
    const auto q_len = static_cast<int32_t>(draw.range(1, 3));
    const bool is_in_both = draw.one_in(2);
    const int32_t shared = is_in_both ? some.num_tokens : all.num_tokens;
    c.requests.push_back({q_len, shared + q_len + static_cast<int32_t>(draw.range(0, 200))});
    all.requests.push_back(r);
    if (is_in_both) some.requests.push_back(r);
  }
  c.prefix_groups.push_back(all);
  if (!some.requests.empty()) c.prefix_groups.push_back(some);
}

int32_t round_up(int32_t count, int32_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Elements of a row's 16-byte piece.
int32_t piece_of(const LayerSpec& layer) {
  return size_bytes(layer.kv_dtype) == 1 || size_bytes(layer.out_dtype()) == 1 ? 16 : 8;
}

// The GPU engine's layers: one 16-bit dtype for queries and keys, or 8-bit keys, or e4m3 both; rows of whole 16-byte
// pieces.
void fit_to_cuda(LayerSpec& layer) {
  const bool is_float8 = layer.query_dtype == DType::f8e4m3 && layer.kv_dtype == DType::f8e4m3;
  if (layer.query_dtype != DType::f16 && !is_float8) layer.query_dtype = DType::bf16;
  if (size_bytes(layer.kv_dtype) != 1) layer.kv_dtype = layer.query_dtype;
  layer.head_dim = round_up(layer.head_dim, piece_of(layer));
  layer.head_dim_v = round_up(layer.head_dim_v, piece_of(layer));
}

}  // namespace

int32_t num_shown_keys(const LayerSpec& layer, const RequestLengths& request) {
  if (layer.key_run == KeyRun::new_tokens) return request.q_len;
  const int32_t context = std::max(request.kv_len - request.q_len, 0);
  return layer.shard.local_length(layer.key_run == KeyRun::context ? context : request.kv_len);
}

int64_t layer_number(int64_t index, DeviceKind device) {
  constexpr int64_t kCasesOfACompiledLayer = 25;  // each layer is kernels to compile
  return device == DeviceKind::cuda ? index / kCasesOfACompiledLayer : index;
}

Case draw_case(uint64_t seed, int64_t index, DeviceKind device) {
  Draw draw_of_layer(seed, layer_number(index, device));
  Case c;
  c.seed = seed;
  c.index = index;
  const bool is_long = draw_of_layer.one_in(12);
  draw_layer(draw_of_layer, is_long, c);
  if (device == DeviceKind::cuda) fit_to_cuda(c.layer);
  Draw draw(~seed, index);
  draw_layout(draw, c);
  if (device == DeviceKind::cuda) c.layout.row_padding = round_up(c.layout.row_padding, piece_of(c.layer));
  draw_requests(draw, c);
  if (is_long && c.layer.type != AttentionType::encoder && c.layer.type != AttentionType::encoder_only) {
    draw_long_request(draw, c);
  }
  c.magnitude = draw.pick<float>({1, 1, 1, 4});
  c.extra_rows = draw.one_in(3) ? static_cast<int32_t>(draw.range(1, 4)) : 0;
  c.with_lse = !draw.one_in(4);
  c.with_seq_lens = !draw.one_in(2);
  if (c.layer.cache && c.layer.type == AttentionType::decoder && draw.one_in(is_long ? 2 : 8)) {
    draw_shared_prefix(draw, c);
    c.with_prefix_groups = draw.one_in(2);
    c.prefix_sharing_keeps_bits = !draw.one_in(4);
    // Few-rows items of any GPU kernel have room for 16 rows: with larger groups `always` may be refused. So it may
    // with 8-bit elements.
    const bool has_8bit = size_bytes(c.layer.kv_dtype) == 1 || size_bytes(c.layer.query_dtype) == 1;
    if (device == DeviceKind::cpu || (2 * c.layer.group_size() <= 16 && !has_8bit)) {
      c.prefix_sharing = draw.pick<PrefixSharing>(
          {PrefixSharing::automatic, PrefixSharing::always, PrefixSharing::always, PrefixSharing::off});
    }
  }
  return c;
}

std::string describe(const Case& c) {
  const LayerSpec& layer = c.layer;
  std::string text = fmt::format("{} h{}/{} d{}/{} {}->{} kv {}", to_string(layer.type), layer.num_q_heads,
                                 layer.num_kv_heads, layer.head_dim, layer.value_dim(), to_string(layer.query_dtype),
                                 to_string(layer.out_dtype()), to_string(layer.kv_dtype));
  if (layer.output_scales != OutputScales::per_tensor) {
    text += fmt::format(" output scales {}", to_string(layer.output_scales));
  }
  if (layer.kv_scales != KvScales::none) text += fmt::format(" scales {}", to_string(layer.kv_scales));
  if (layer.cache) {
    text += fmt::format(" page {} {}{}", layer.cache->page_size, c.layout.axes, c.layout.interleaved ? " K|V" : "");
  }
  for (const RequestLengths& r : c.requests) text += fmt::format(" {}/{}", r.q_len, r.kv_len);
  for (const PrefixGroup& group : c.prefix_groups) {
    text += fmt::format(" share {} of {}", group.num_tokens, fmt::join(group.requests, ","));
  }
  if (size_bytes(layer.query_dtype) == 1) text += fmt::format(" query scales {}", to_string(c.query_scales));
  if (layer.softcap > 0) text += fmt::format(" softcap {}", layer.softcap);
  if (layer.alibi_per_request || !layer.alibi_slopes.empty()) text += " alibi";
  if (!layer.sinks.empty()) text += " sinks";
  if (layer.key_run != KeyRun::all) text += fmt::format(" keys {}", to_string(layer.key_run));
  if (layer.shard.num_ranks > 1) {
    text += fmt::format(" rank {}/{} by {}", layer.shard.rank, layer.shard.num_ranks, layer.shard.interleave_size);
  }
  return text + " mask " + layer.effective_mask().text();
}

}  // namespace qkv::tools
