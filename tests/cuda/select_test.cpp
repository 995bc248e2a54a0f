// What warm-up compiles is what batches reach: the keys of thousands of random batches lie in the traced set, and every
// traced key is met by one of them.
#include "cuda/select.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <set>

#include "cuda/device_planner.hpp"
#include "cuda/device_rules.hpp"
#include "cuda/few_rows_lists.hpp"
#include "cuda/forward_sm80.hpp"
#include "cuda/plan_lists.hpp"
#include "cuda/shared_lists.hpp"
#include "jit/module.hpp"
#include "plan/builder.hpp"
#include "support/small_layer.hpp"

namespace qkv::cuda {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kMultiprocessors = 132;

DeviceFacts facts_of(const char* arch) {
  DeviceFacts facts = facts_of_arch(arch);
  facts.num_multiprocessors = kMultiprocessors;
  return facts;
}

LayerSpec gpu_layer(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t head_dim_v = 0) {
  LayerSpec layer = testing::layer_of(num_q_heads, num_kv_heads, head_dim);
  layer.head_dim_v = head_dim_v;
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache.reset();  // plans of dense keys need no block table
  return layer;
}

std::set<std::string> texts_of(const std::vector<jit::Source>& sources) {
  std::set<std::string> texts;
  for (const jit::Source& source : sources) texts.insert(jit::key_text(source));
  EXPECT_EQ(texts.size(), sources.size()) << "a kernel is listed twice";
  return texts;
}

// The sources that the engine asks for to run such a batch.
std::vector<jit::Source> sources_of_batch(const LayerSpec& layer, const DeviceFacts& facts, std::vector<int32_t> q_lens,
                                          std::vector<int32_t> kv_lens) {
  std::vector<int32_t> starts = {0};
  for (const int32_t q_len : q_lens) starts.push_back(starts.back() + q_len);
  Batch batch;
  batch.query_start_loc = Tensor::of(starts, {static_cast<int64_t>(starts.size())});
  batch.seq_lens = Tensor::of(kv_lens, {static_cast<int64_t>(kv_lens.size())});
  const ForwardKernels kernels = forward_kernels(layer, facts);
  const plan::PlanData plan = plan::build(
      layer, batch, [&](int32_t q_len, int32_t kv_len) { return cut_request(layer, kernels, q_len, kv_len); });
  std::vector<ForwardKey> keys;
  if (kernels.few_rows_sm90) {
    for (const FewRowsList& list : make_few_rows_lists(plan, ClusterUse::where_most_join)) {
      const bool few_items = static_cast<int32_t>(list.items.size()) <= facts.num_multiprocessors;
      keys.push_back(ForwardSm90FewRows::key(layer, facts, {list.tile_q, few_items, list.clustered()}));
    }
  }
  std::set<bool> seen;  // items of few rows, of many: each kind is one launch
  for (const plan::WorkItem& item : plan.items) {
    if ((item.few_rows && kernels.few_rows_sm90) || !seen.insert(item.few_rows).second) continue;
    const int64_t num_rows = int64_t{q_lens[item.request]} * layer.group_size();
    EXPECT_EQ(item.few_rows, num_rows <= kernels.cut.few_rows);
    keys.push_back(forward_key(layer, facts, {num_rows, false, false}));
  }
  std::vector<jit::Source> sources;
  for (const ForwardKey& key : keys) sources.push_back(forward_source(layer, key));
  return sources;
}

// So many requests alike, on the same pages: all that they can share is shared.
std::set<std::string> sources_of_shared_rows(const LayerSpec& layer, const DeviceFacts& facts, int32_t q_len,
                                             int32_t num_requests) {
  constexpr int32_t kKeys = 3008;
  std::vector<int32_t> starts(num_requests + 1);
  for (int32_t r = 0; r <= num_requests; ++r) starts[r] = r * q_len;
  const std::vector<int32_t> lengths(num_requests, kKeys);
  const std::vector<int32_t> table(num_requests * kKeys / 16, 0);
  Batch batch;
  batch.query_start_loc = testing::view(starts);
  batch.seq_lens = testing::view(lengths);
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {num_requests, kKeys / 16});
  batch.prefix_sharing = PrefixSharing::always;
  const ForwardKernels kernels = forward_kernels(layer, facts);
  const plan::PlanData plan = plan::build(
      layer, batch, [&](int32_t q, int32_t kv) { return cut_request(layer, kernels, q, kv); },
      device_rules(layer, facts));
  const SharedLists lists = make_shared_lists(plan, kernels.few_rows_sm90);
  std::set<std::string> texts;
  const int64_t num_rows = int64_t{q_len} * layer.group_size();
  const auto add = [&](size_t num_items) {
    if (num_items == 0) return;
    const bool few_items = static_cast<int32_t>(num_items) <= facts.num_multiprocessors;
    texts.insert(jit::key_text(forward_source(layer, forward_key(layer, facts, {num_rows, few_items, false, true}))));
  };
  add(lists.sm80.size());
  for (const auto& items : lists.sm90) add(items.size());
  return texts;
}

TEST(select, kernels_for_rows_of_several_requests_are_traced_and_each_is_reached) {
  for (const char* arch : {"sm_90a", "sm_80"}) {
    const DeviceFacts facts = facts_of(arch);
    LayerSpec layer = gpu_layer(8, 2, 128);
    layer.cache = CacheSpec{16};
    const std::set<std::string> traced = texts_of(reachable_sources(layer, facts, {}));
    std::set<std::string> reached;
    for (int32_t q_len = 1; q_len <= 9; ++q_len) {
      for (const int32_t num_requests : {3, 400})
        reached.merge(sources_of_shared_rows(layer, facts, q_len, num_requests));
    }
    EXPECT_TRUE(std::includes(traced.begin(), traced.end(), reached.begin(), reached.end()));
    LayerSpec dense = layer;
    dense.cache.reset();
    // Tiles of 4, 8 and 16 rows; of the first, launches of few and of many items are one kernel.
    EXPECT_EQ(reached.size(), facts.arch == "sm_90a" ? 5U : 1U);
    const auto num_forward = [&](const LayerSpec& of) {
      const auto sources = reachable_sources(of, facts, {});
      return std::count_if(sources.begin(), sources.end(),
                           [](const jit::Source& source) { return source.name.starts_with("forward"); });
    };
    EXPECT_EQ(num_forward(layer), num_forward(dense) + static_cast<int64_t>(reached.size()));
  }
}

struct Lengths {
  std::vector<int32_t> q_lens, kv_lens;
};

// Steps of decode, of speculation, of prompts, and mixed; short and long contexts; few and many requests.
Lengths random_lengths(std::mt19937& random, const RequestBounds& bounds) {
  const auto upto = [&](int32_t most) { return std::uniform_int_distribution(0, most)(random); };
  const int32_t longest_query = std::min(bounds.max_query_len, std::vector{1, 8, 40, 700}[upto(3)]);
  const int32_t longest = std::min(bounds.max_model_len, std::vector{100, 1000, 5000, 40'000}[upto(3)]);
  const bool alike = upto(1) == 0;
  const int32_t q_len = upto(longest_query);
  Lengths lengths;
  for (int32_t i = upto(upto(3) == 0 ? 400 : 8); i >= 0; --i) {
    const int32_t kv_len = alike ? longest - upto(longest / 2) : upto(longest);
    lengths.kv_lens.push_back(kv_len);
    lengths.q_lens.push_back(std::min(kv_len, alike ? q_len : upto(longest_query)));
  }
  return lengths;
}

void expect_trace_is_what_batches_reach(const LayerSpec& layer, const char* arch, const RequestBounds& bounds,
                                        int32_t num_batches) {
  const DeviceFacts facts = facts_of(arch);
  const std::vector<jit::Source> traced = reachable_sources(layer, facts, bounds);
  const std::set<std::string> expected = texts_of(traced);
  std::set<std::string> reached;
  std::mt19937 random(7);
  for (int32_t i = 0; i < num_batches; ++i) {
    const Lengths lengths = random_lengths(random, bounds);
    for (const jit::Source& source : sources_of_batch(layer, facts, lengths.q_lens, lengths.kv_lens)) {
      const std::string text = jit::key_text(source);
      ASSERT_TRUE(expected.contains(text)) << source.name;
      reached.insert(text);
    }
  }
  for (const jit::Source& source : traced) {
    if (!source.name.starts_with("forward")) continue;
    EXPECT_TRUE(reached.contains(jit::key_text(source))) << "no batch reaches " << source.name;
  }
}

TEST(select, no_batch_reaches_a_kernel_outside_the_trace_nor_is_one_in_vain) {
  const RequestBounds unbounded;
  for (const char* arch : {"sm_90a", "sm_80"}) {
    expect_trace_is_what_batches_reach(gpu_layer(8, 2, 128), arch, unbounded, 1000);
    expect_trace_is_what_batches_reach(gpu_layer(16, 2, 64), arch, unbounded, 1000);
    expect_trace_is_what_batches_reach(gpu_layer(4, 4, 192, 128), arch, unbounded, 1000);
    expect_trace_is_what_batches_reach(gpu_layer(8, 4, 256), arch, unbounded, 1000);
    expect_trace_is_what_batches_reach(gpu_layer(3, 1, 72), arch, unbounded, 500);
    expect_trace_is_what_batches_reach(gpu_layer(40, 1, 64), arch, unbounded, 500);
    expect_trace_is_what_batches_reach(gpu_layer(20, 1, 64), arch, unbounded, 500);
  }
}

TEST(select, bounds_leave_out_what_they_make_unreachable) {
  const LayerSpec layer = gpu_layer(8, 2, 128);
  const auto count = [&](const RequestBounds& bounds) {
    return reachable_sources(layer, facts_of("sm_90a"), bounds).size();
  };
  for (const RequestBounds& bounds : {RequestBounds{1, INT32_MAX}, RequestBounds{4, INT32_MAX},
                                      RequestBounds{INT32_MAX, 200}, RequestBounds{1, 1}, RequestBounds{3, 300}}) {
    expect_trace_is_what_batches_reach(layer, "sm_90a", bounds, 1000);
    EXPECT_LT(count(bounds), count({}));
  }
}

// A window of 128 keys lies in two splits where one begins inside it; enough such requests make a clustered launch.
TEST(select, windows_that_straddle_splits_are_reached_too) {
  LayerSpec layer = gpu_layer(8, 1, 128);
  layer.mask = mask::sliding_window(128);
  const DeviceFacts facts = facts_of("sm_90a");
  const ForwardKernels kernels = forward_kernels(layer, facts);
  const std::set<std::string> expected = texts_of(reachable_sources(layer, facts, {}));
  for (const int32_t q_len : {1, 2, 4}) {
    int32_t kv_len = 2000;
    while (kv_len % cut_request(layer, kernels, q_len, kv_len).split_keys != 60) ++kv_len;
    const auto sources = sources_of_batch(layer, facts, std::vector(200, q_len), std::vector(200, kv_len));
    ASSERT_EQ(sources.size(), 1U);
    EXPECT_THAT(sources.front().name, HasSubstr("cluster_size 8"));
    EXPECT_TRUE(expected.contains(jit::key_text(sources.front())));
  }
}

TEST(select, keys_need_no_device_and_say_nothing_of_its_size) {
  const LayerSpec layer = gpu_layer(8, 2, 128);
  DeviceFacts larger = facts_of_arch("sm_90a");
  larger.num_multiprocessors = 1000;
  EXPECT_EQ(texts_of(reachable_sources(layer, facts_of_arch("sm_90a"), {})),
            texts_of(reachable_sources(layer, larger, {})));
}

// The sources that the engine asks for when it makes such a planner.
std::set<std::string> sources_of_planner(const LayerSpec& layer, const DeviceFacts& facts, const PlanLimits& given) {
  const ForwardKernels kernels = forward_kernels(layer, facts);
  const PlanLimits limits = plan::checked_limits(layer, given);
  PlacementRules rules;
  rules.few_rows_sm90 = kernels.few_rows_sm90;
  rules.max_few_rows = kernels.cut.few_rows;
  rules.max_shared_rows = max_shared_rows(layer, kernels);
  const plan::PlanCapacity capacity = plan::capacity_of(layer, limits, cut_bounds(layer, kernels));
  const auto bytes = array_bytes(layer, rules, capacity);
  std::set<std::string> texts;
  const auto add = [&](int32_t array, int32_t tile_q, bool shared_rows) {
    const auto most_items = static_cast<int64_t>(bytes[array] / sizeof(FewRowsItem));
    if (most_items == 0) return;
    const int64_t on_grid = shared_rows ? most_items : items_of_clustered_room(most_items);
    texts.insert(jit::key_text(forward_source(
        layer, ForwardSm90FewRows::key(
                   layer, facts, {tile_q, on_grid <= facts.num_multiprocessors, !shared_rows, true, shared_rows}))));
  };
  for (int32_t tile = 0; tile < kFewRowsTiles && kernels.few_rows_sm90; ++tile) {
    add(kFewRowsSm90 + tile, 4 << tile, false);
    add(kSharedSm90 + tile, 4 << tile, true);
  }
  if (bytes[kSharedItems] > 0) {
    texts.insert(jit::key_text(forward_source(layer, ForwardSm80::key(layer, facts, kernels.cut.few_rows, true))));
  }
  if (capacity.on_device) texts.insert(jit::key_text(device_planner_source(layer, facts)));
  return texts;
}

PlanLimits random_limits(std::mt19937& random, const LayerSpec& layer, bool on_device) {
  const auto upto = [&](int32_t most) { return std::uniform_int_distribution(1, most)(random); };
  PlanLimits limits;
  limits.max_requests = upto(std::vector{1, 4, 30, 500}[upto(4) - 1]);
  limits.max_query_len = upto(std::vector{1, 8, 40, 700}[upto(4) - 1]);
  limits.max_tokens = int64_t{limits.max_requests} * limits.max_query_len;
  limits.max_seq_len = upto(std::vector{100, 1000, 40'000}[upto(3) - 1]);
  if (layer.cache) limits.num_pages = 5000;
  limits.plans_on_device = on_device;
  return limits;
}

TEST(select, planners_reach_what_is_traced_for_them_and_all_of_it) {
  LayerSpec paged = gpu_layer(8, 2, 128);
  paged.cache = CacheSpec{16};
  LayerSpec scaled = paged;
  scaled.kv_dtype = DType::f8e4m3;
  scaled.kv_scales = KvScales::per_head;
  for (const char* arch : {"sm_90a", "sm_80"}) {
    for (const LayerSpec& layer : {paged, scaled, gpu_layer(4, 4, 192, 128), gpu_layer(40, 1, 64)}) {
      for (const PlannerUse use : {PlannerUse::host, PlannerUse::device}) {
        const DeviceFacts facts = facts_of(arch);
        const std::vector<jit::Source> traced = reachable_sources(layer, facts, {}, use);
        const std::set<std::string> of_batches = texts_of(reachable_sources(layer, facts, {}));
        const std::set<std::string> expected = texts_of(traced);
        std::set<std::string> reached = of_batches;
        std::mt19937 random(5);
        for (int32_t i = 0; i < 400; ++i) {
          reached.merge(sources_of_planner(layer, facts, random_limits(random, layer, use == PlannerUse::device)));
        }
        EXPECT_TRUE(std::includes(expected.begin(), expected.end(), reached.begin(), reached.end()));
        for (const jit::Source& source : traced) {
          EXPECT_TRUE(reached.contains(jit::key_text(source))) << "no planner reaches " << source.name;
        }
      }
    }
  }
}

TEST(select, layers_that_the_device_cannot_plan_for_are_planned_on_the_host) {
  LayerSpec layer = gpu_layer(8, 2, 128);
  layer.mask = mask::causal() & (mask::q_head() > 3);
  const DeviceFacts facts = facts_of("sm_90a");
  EXPECT_EQ(texts_of(reachable_sources(layer, facts, {}, PlannerUse::device)),
            texts_of(reachable_sources(layer, facts, {}, PlannerUse::host)));
}

TEST(select, cache_and_merge_kernels_belong_to_the_layer) {
  LayerSpec layer = gpu_layer(8, 2, 128);
  const auto names = [&] {
    std::string text;
    for (const jit::Source& source : reachable_sources(layer, facts_of("sm_80"), {})) text += source.name + '\n';
    return text;
  };
  EXPECT_THAT(names(), HasSubstr("merge_plan_states"));
  EXPECT_THAT(names(), ::testing::Not(HasSubstr("cache_write")));
  layer.cache = CacheSpec{16};
  EXPECT_THAT(names(), HasSubstr("cache_write"));
  EXPECT_THAT(names(), ::testing::Not(HasSubstr("cache_quantise")));
  EXPECT_THAT(names(), ::testing::Not(HasSubstr("check_indices")));
  setenv("QKV_CHECK", "1", 1);
  EXPECT_THAT(names(), HasSubstr("check_indices"));
  unsetenv("QKV_CHECK");
}

TEST(select, who_rounds_a_layers_queries_belongs_to_the_layer) {
  LayerSpec layer = gpu_layer(8, 2, 128);
  layer.cache = CacheSpec{16};
  layer.kv_scales = KvScales::per_head;
  layer.kv_dtype = DType::f8e4m3;
  const auto rounds_queries = [&] {
    const std::vector<jit::Source> sources = reachable_sources(layer, facts_of("sm_90a"), {});
    return std::ranges::any_of(sources, [](const jit::Source& s) { return s.name == "quantise sm_90a"; });
  };
  EXPECT_FALSE(rounds_queries());
  layer.query_dtype = DType::f8e4m3;
  EXPECT_TRUE(rounds_queries());
}

TEST(select, layers_of_8_bit_caches_run_hoppers_kernels_and_the_cache_write_that_quantises) {
  LayerSpec layer = gpu_layer(8, 2, 128);
  layer.cache = CacheSpec{16};
  layer.kv_scales = KvScales::per_token_head;
  layer.kv_dtype = DType::f8e4m3;
  const ForwardKernels kernels = forward_kernels(layer, facts_of("sm_90a"));
  EXPECT_TRUE(kernels.few_rows_sm90);
  EXPECT_TRUE(kernels.many_rows_sm90);
  std::string names;
  for (const jit::Source& source : reachable_sources(layer, facts_of("sm_90a"), {})) names += source.name + '\n';
  EXPECT_THAT(names, HasSubstr("cache_quantise"));
  EXPECT_THAT(names, HasSubstr("forward_sm90_few_rows"));
  EXPECT_THAT(names, HasSubstr("forward_sm90_many_rows"));
  EXPECT_FALSE(forward_kernels(layer, facts_of("sm_80")).few_rows_sm90);
  layer.kv_dtype = DType::i8;
  EXPECT_TRUE(forward_kernels(layer, facts_of("sm_90a")).few_rows_sm90);
  EXPECT_FALSE(forward_kernels(layer, facts_of("sm_90a")).many_rows_sm90);
}

TEST(select, layers_of_8_bit_outputs_run_hoppers_kernels_where_these_store_whole_pieces_and_groups) {
  const auto kernels_of = [](int32_t head_dim, OutputScales scales) {
    LayerSpec layer = gpu_layer(8, 2, head_dim);
    layer.cache = CacheSpec{16};
    layer.output_dtype = DType::f8e4m3;
    layer.output_scales = scales;
    return forward_kernels(layer, facts_of("sm_90a"));
  };
  for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
    for (const int32_t head_dim : {64, 128, 256}) {
      EXPECT_TRUE(kernels_of(head_dim, scales).few_rows_sm90);
      EXPECT_EQ(kernels_of(head_dim, scales).many_rows_sm90, scales == OutputScales::per_tensor);
    }
    EXPECT_FALSE(kernels_of(96, scales).many_rows_sm90);
    EXPECT_EQ(kernels_of(96, scales).few_rows_sm90, scales == OutputScales::per_tensor);
    for (const int32_t head_dim : {64, 128, 256}) {
      LayerSpec layer = gpu_layer(8, 2, head_dim);
      layer.cache = CacheSpec{16};
      layer.kv_scales = KvScales::per_head;
      layer.query_dtype = layer.kv_dtype = DType::f8e4m3;
      layer.output_dtype = DType::f8e4m3;
      layer.output_scales = scales;
      const bool has_registers = scales == OutputScales::per_tensor || head_dim <= 128;
      EXPECT_EQ(forward_kernels(layer, facts_of("sm_90a")).many_rows_sm90, has_registers) << head_dim;
    }
  }
}

TEST(select, prefill_of_8_bit_caches_widens_in_hoppers_kernel_where_it_has_room) {
  const auto has_kernel = [](DType query, DType cache, int32_t head_dim, int32_t page_size, KvScales scales) {
    LayerSpec layer = gpu_layer(8, 2, head_dim);
    layer.query_dtype = query;
    layer.kv_dtype = cache;
    layer.kv_scales = scales;
    if (page_size > 0) layer.cache = CacheSpec{page_size};
    return forward_kernels(layer, facts_of("sm_90a")).many_rows_sm90;
  };
  for (const DType cache : {DType::f8e4m3, DType::f8e5m2}) {
    for (const KvScales scales :
         {KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head, KvScales::per_token_head}) {
      for (const int32_t head_dim : {64, 128}) {
        EXPECT_TRUE(has_kernel(DType::bf16, cache, head_dim, 16, scales));
        EXPECT_TRUE(has_kernel(DType::bf16, cache, head_dim, 0, scales));
        EXPECT_EQ(has_kernel(DType::f16, cache, head_dim, 64, scales), scales != KvScales::per_token_head);
      }
      // ptxas asks for more registers than four warpgroups begin with.
      EXPECT_FALSE(has_kernel(DType::bf16, cache, 256, 16, scales));
      EXPECT_FALSE(has_kernel(DType::bf16, cache, 96, 16, scales));
      EXPECT_FALSE(has_kernel(DType::bf16, cache, 128, 8, scales));
    }
  }
}

// Half the bytes a key: twice the keys a split, so that what a CTA reads and leaves behind stays in proportion.
TEST(select, splits_of_8_bit_caches_have_twice_the_keys) {
  const DeviceFacts facts = facts_of("sm_90a");
  LayerSpec wide = gpu_layer(8, 2, 128);
  wide.cache = CacheSpec{16};
  LayerSpec narrow = wide;
  narrow.kv_dtype = DType::f8e5m2;
  narrow.kv_scales = KvScales::per_head;
  const auto split_keys = [&](const LayerSpec& layer, int32_t kv_len) {
    return cut_request(layer, forward_kernels(layer, facts), 1, kv_len).split_keys;
  };
  EXPECT_EQ(split_keys(wide, 20'000), 512);
  EXPECT_EQ(split_keys(narrow, 20'000), 1024);
  EXPECT_EQ(split_keys(narrow, 1'000'000), split_keys(wide, 1'000'000));  // 64 splits are the most of either
}

TEST(select, unknown_architecture_is_refused_with_those_that_are_known) {
  try {
    facts_of_arch("sm_75");
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "arch");
    EXPECT_EQ(error.value(), "sm_75");
    EXPECT_THAT(error.allowed(), HasSubstr("sm_90a"));
  }
}

}  // namespace
}  // namespace qkv::cuda
