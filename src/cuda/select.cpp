#include "cuda/select.hpp"

#include <algorithm>

#include "core/checks.hpp"
#include "core/environment.hpp"
#include "core/float8.hpp"
#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/shown_keys.hpp"
#include "core/trace.hpp"
#include "cuda/device_planner.hpp"
#include "cuda/device_rules.hpp"
#include "cuda/forward_sm80.hpp"

namespace qkv::cuda {
namespace {

namespace few_rows = index::few_rows;

constexpr int32_t kSm80FewRows = 16;  // one warp's rows of the sm80 kernel; its other warps share the keys

// Bytes of shared memory that a CTA may ask for: facts of CUDA's compute capabilities.
struct Architecture {
  const char* name;
  int32_t max_shared_bytes;
};
constexpr int32_t kKilobyte = 1024;
constexpr Architecture kArchitectures[] = {
    {"sm_80", 163 * kKilobyte},  {"sm_86", 99 * kKilobyte},   {"sm_87", 163 * kKilobyte},  {"sm_89", 99 * kKilobyte},
    {"sm_90a", 227 * kKilobyte}, {"sm_100", 227 * kKilobyte}, {"sm_103", 227 * kKilobyte}, {"sm_110", 227 * kKilobyte},
    {"sm_120", 99 * kKilobyte},  {"sm_121", 99 * kKilobyte},
};

// Whether requests of few rows and at most seq_len keys are ever cut into splits that join within a cluster.
bool may_join(const LayerSpec& layer, const ForwardKernels& kernels, int32_t q_len, int32_t seq_len) {
  const int32_t kv_len = shown_keys(layer).count(q_len, seq_len);
  const index::RequestCut cut = cut_request(layer, kernels, q_len, kv_len);
  return cut.few_rows && kv_len > cut.split_keys;
}

// Whether the rows of two such requests have room in one item.
bool may_share(const LayerSpec& layer, const ForwardKernels& kernels, int32_t q_len) {
  return has_common_keys(layer) && int64_t{2} * q_len * layer.group_size() <= max_shared_rows(layer, kernels);
}

// A batch's own launches. The longest request is cut into the most splits; shorter ones are among the launches without
// clusters. Requests that share have a whole split in common.
bool is_launched_by_batch(const LayerSpec& layer, const ForwardKernels& kernels, const RequestBounds& bounds,
                          const TracePoint& at) {
  const auto q_len = static_cast<int32_t>(at.at("q_len"));
  const bool clustered = at.at("clustered") != 0;
  const bool shared = at.at("shared_rows") != 0;
  if (!clustered && !shared) return true;
  if (clustered && shared) return false;
  return may_join(layer, kernels, q_len, bounds.max_model_len) && (clustered || may_share(layer, kernels, q_len));
}

// A planner's are made for all of its batches: clustered, or of shared rows; and what the device plans shares nothing.
bool is_launched_by_planner(const LayerSpec& layer, const ForwardKernels& kernels, PlannerUse planners,
                            const TracePoint& at) {
  const bool shared = at.at("shared_rows") != 0;
  if (shared == (at.at("clustered") != 0)) return false;
  return !shared || (planners == PlannerUse::host && may_share(layer, kernels, static_cast<int32_t>(at.at("q_len"))));
}

// Requests of one token, two, … until all rows are many: from there on nothing changes any more.
Axis query_lengths(const ForwardKernels& kernels, int64_t longest) {
  const int64_t first_many = kernels.cut.few_rows / kernels.cut.group_size + 1;
  return Axis::range(1, std::min(longest, first_many) + 1);
}

}  // namespace

DeviceFacts facts_of_arch(const std::string& arch) {
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    if (arch == architecture.name) return {arch, 0, architecture.max_shared_bytes};
    known += fmt::format("{}{}", known.empty() ? "" : ", ", architecture.name);
  }
  refuse("arch", arch, known);
}

ForwardKernels forward_kernels(const LayerSpec& layer, const DeviceFacts& facts) {
  ForwardKernels kernels{};
  kernels.few_rows_sm90 = ForwardSm90FewRows::supports(layer, facts);
  kernels.many_rows_sm90 = ForwardSm90ManyRows::supports(layer, facts);
  const ForwardKey many =
      kernels.many_rows_sm90 ? ForwardSm90ManyRows::key(layer, facts) : ForwardSm80::key(layer, facts, 0);
  kernels.cut.num_kv_heads = layer.num_kv_heads;
  kernels.cut.group_size = layer.group_size();
  kernels.cut.few_rows = kernels.few_rows_sm90 ? few_rows::max_rows(layer.value_dim()) : kSm80FewRows;
  kernels.cut.few_rows_tile_kv =
      kernels.few_rows_sm90 ? 0 : ForwardSm80::key(layer, facts, kSm80FewRows).tile_kv;  // sm_90's is the tile's own
  kernels.cut.tile_kv = many.tile_kv;
  kernels.cut.tile_q = kernels.cut.rows_per_item = many.tile_q;
  return kernels;
}

ForwardKey forward_key(const LayerSpec& layer, const DeviceFacts& facts, const LaunchKind& launch) {
  const ForwardKernels kernels = forward_kernels(layer, facts);
  if (launch.num_rows > kernels.cut.few_rows) {
    return kernels.many_rows_sm90 ? ForwardSm90ManyRows::key(layer, facts) : ForwardSm80::key(layer, facts, 0);
  }
  if (!kernels.few_rows_sm90) return ForwardSm80::key(layer, facts, kSm80FewRows, launch.shared_rows);
  const int32_t tile_q = few_rows::tile_rows(static_cast<int>(launch.num_rows));
  return ForwardSm90FewRows::key(layer, facts,
                                 {tile_q, launch.few_items, launch.clustered, launch.takes_turns, launch.shared_rows});
}

index::RequestCut cut_request(const LayerSpec& layer, const ForwardKernels& kernels, int32_t q_len, int32_t kv_len) {
  const int64_t num_rows = static_cast<int64_t>(q_len) * kernels.cut.group_size;
  if (kernels.few_rows_sm90 && num_rows <= kernels.cut.few_rows) {
    return ForwardSm90FewRows::cut_request(layer, q_len, kv_len);
  }
  return index::cut_request(kernels.cut, q_len);
}

plan::CutBounds cut_bounds(const LayerSpec& layer, const ForwardKernels& kernels) {
  const index::CutRules& cut = kernels.cut;
  const int32_t split_keys = index::few_rows_split_keys(cut.num_kv_heads);
  const auto fixed = [](int32_t keys) { return index::SplitBounds{1, keys, INT32_MAX}; };
  plan::CutBounds bounds{};
  bounds.few_rows = cut.few_rows;
  bounds.few_rows_tile_kv = kernels.few_rows_sm90 ? few_rows::kBoxKeys : cut.few_rows_tile_kv;
  bounds.rows_per_block = cut.tile_q;
  bounds.rows_per_block_most = cut.rows_per_item;
  bounds.tile_kv = cut.tile_kv;
  bounds.few_rows_splits = kernels.few_rows_sm90
                               ? few_rows::split_bounds(layer.num_kv_heads, few_rows_shape(layer).element_bytes)
                               : fixed(split_keys);
  bounds.many_rows_splits = fixed(4 * split_keys);
  return bounds;
}

std::vector<jit::Source> reachable_sources(const LayerSpec& layer, const DeviceFacts& facts,
                                           const RequestBounds& bounds, PlannerUse planners) {
  const ForwardKernels kernels = forward_kernels(layer, facts);
  if (plan::reason_against_plans_on_device(layer)) planners = std::min(planners, PlannerUse::host);
  TraceDomain launches;  // of one list of items each
  launches.add("q_len", query_lengths(kernels, bounds.max_query_len))
      .add("few_items", Axis::choices({1, 0}))
      .add("clustered", Axis::choices({1, 0}))
      .add("shared_rows", Axis::choices({0, 1}))
      .add("takes_turns", planners == PlannerUse::none ? Axis::choices({0}) : Axis::choices({0, 1}));
  launches.keep_if([&](const TracePoint& at) {
    return at.at("takes_turns") == 0 ? is_launched_by_batch(layer, kernels, bounds, at)
                                     : is_launched_by_planner(layer, kernels, planners, at);
  });
  std::vector<jit::Source> sources = trace(launches, [&](const TracePoint& at) {
    const LaunchKind launch{at.at("q_len") * layer.group_size(), at.at("few_items") != 0, at.at("clustered") != 0,
                            at.at("shared_rows") != 0, at.at("takes_turns") != 0};
    return forward_source(layer, forward_key(layer, facts, launch));
  });
  if (planners == PlannerUse::device) {
    sources.push_back(device_planner_source(layer, facts));
  }
  sources.push_back(plain_source("merge_plan_states", facts.arch));
  if (layer.cache) sources.push_back(cache_write_source(layer.kv_scales, facts.arch));
  if (is_float8(layer.query_dtype)) sources.push_back(plain_source("quantise", facts.arch));
  if (layer.cache && is_checked_mode()) sources.push_back(plain_source("check_indices", facts.arch));
  return sources;
}

std::vector<jit::Source> created_sources(const LayerSpec& layer, const DeviceFacts& facts) {
  std::vector<jit::Source> sources;
  if (!ForwardSm90FewRows::supports(layer, facts)) return sources;  // other kernels have one variant, which is reached
  for (const ForwardSm90FewRows::Variant& variant : ForwardSm90FewRows::created_variants(layer)) {
    sources.push_back(forward_source(layer, ForwardSm90FewRows::key(layer, facts, variant)));
  }
  return sources;
}

}  // namespace qkv::cuda
