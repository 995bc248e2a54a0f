#include "parallel_cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "case_data.hpp"

namespace qkv::tools {
namespace {

// What ranks share: the context of decoders, queries of 16 or 32 bits. Where they have heads of their own, the numbers
// of heads must fit.
void fit_layer(const ParallelCase& c, DeviceKind device, LayerSpec& layer) {
  layer.key_run = KeyRun::all;
  layer.shard = {};
  if (is_float8(layer.query_dtype)) layer.query_dtype = DType::bf16;
  if (layer.type != AttentionType::decoder || !layer.cache) {
    layer.type = AttentionType::decoder;
    layer.cache = CacheSpec{16};
    layer.kv_scales = KvScales::none;
    layer.kv_dtype = layer.query_dtype;
  }
  if (device == DeviceKind::cpu && layer.head_dim > 128) layer.head_dim = layer.head_dim_v = 72;  // the oracle is slow
  if (c.exchange != StateExchange::all_gather) {
    const int32_t kv_heads = layer.num_kv_heads;
    if (kv_heads % c.num_ranks != 0 && c.num_ranks % kv_heads != 0) layer.num_kv_heads = c.num_ranks;
    int32_t group = layer.num_q_heads / kv_heads;
    if (layer.num_kv_heads * group % c.num_ranks != 0) group *= c.num_ranks / std::gcd(c.num_ranks, layer.num_kv_heads);
    layer.num_q_heads = layer.num_kv_heads * group;
  }
  const auto num_q_heads = static_cast<size_t>(layer.num_q_heads);
  if (!layer.alibi_slopes.empty()) layer.alibi_slopes.resize(num_q_heads, 0.125F);
  if (!layer.sinks.empty()) layer.sinks.resize(num_q_heads, 0.5F);
}

// New tokens with or without a context; a step without any, now and then.
void draw_requests(Draw& draw, Case& c) {
  c.requests.clear();
  const bool has_context = !draw.one_in(8);
  const auto num_requests = draw.one_in(30) ? 0 : draw.range(1, 5);
  constexpr int64_t kWork = 4'000'000;  // of the oracle, in multiply-adds
  int64_t work = 0;
  for (int64_t r = 0; r < num_requests; ++r) {
    const auto q_len = static_cast<int32_t>(draw.one_in(2) ? 1 : draw.range(0, draw.one_in(3) ? 40 : 7));
    const auto context = static_cast<int32_t>(!has_context || draw.one_in(6) ? 0
                                                                             : draw.range(1, draw.one_in(3)   ? 600
                                                                                             : draw.one_in(3) ? 5
                                                                                                              : 80));
    work += int64_t{q_len} * (q_len + context) * c.layer.num_q_heads * (c.layer.head_dim + c.layer.value_dim());
    if (work < kWork) c.requests.push_back({q_len, q_len + context});
  }
}

}  // namespace

ParallelCase draw_parallel_case(uint64_t seed, int64_t index, int32_t num_ranks, DeviceKind device) {
  ParallelCase c;
  c.num_ranks = num_ranks;
  c.attention = draw_case(seed, index, device);
  Draw draw_of_layer(seed ^ 0xC0117EC7ULL, layer_number(index, device));
  c.exchange = draw_of_layer.pick<StateExchange>(
      {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather});
  fit_layer(c, device, c.attention.layer);
  const int32_t page_size = c.attention.layer.cache->page_size;
  std::vector<int32_t> divisors;
  for (int32_t i = 1; i <= page_size; ++i) {
    if (page_size % i == 0) divisors.push_back(i);
  }
  c.interleave_size = draw_of_layer.pick(divisors);

  Draw draw(~seed ^ 0xC0117EC7ULL, index);
  draw_requests(draw, c.attention);
  c.attention.prefix_groups.clear();
  c.attention.with_prefix_groups = false;
  c.attention.prefix_sharing = PrefixSharing::automatic;
  c.with_planner = draw.one_in(3) && !c.attention.requests.empty();
  return c;
}

std::string describe(const ParallelCase& c) {
  return fmt::format("{} ranks interleave {} {}{}: {}", c.num_ranks, c.interleave_size, to_string(c.exchange),
                     c.with_planner ? " planner" : "", describe(c.attention));
}

}  // namespace qkv::tools
