// Warm-up as a program calls it: what is compiled, what is told, what is refused.
#include "qkv/warmup.hpp"

#include <gmock/gmock.h>

#include <set>
#include <stdexcept>

#include "jit/needs_nvrtc.hpp"
#include "qkv/compile.hpp"
#include "qkv/context_parallel.hpp"
#include "qkv/cuda.hpp"
#include "qkv/mla_context_parallel.hpp"
#include "qkv/mla_prefill.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

LayerSpec gpu_layer(int32_t head_dim) {
  LayerSpec layer = testing::layer_of(4, 2, head_dim);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache = CacheSpec{16};
  return layer;
}

WarmupOptions for_sm80() {
  WarmupOptions options;
  options.arch = "sm_80";  // two forward kernels a layer
  return options;
}

Error error_of(const std::vector<LayerSpec>& layers, const WarmupOptions& options) {
  try {
    warmup(layers, options);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorCode::internal, "", "", ""};
}

class Warmup : public NeedsNvrtc {
 protected:
  Warmup() {
    set_compile_callback([](const CompileEvent&) {});
  }
  ~Warmup() override { set_compile_callback({}); }
};

TEST_F(Warmup, compiles_each_kernel_once_and_then_no_more) {
  const int64_t before = num_compiles();
  const std::vector<LayerSpec> layers = {gpu_layer(32), gpu_layer(32), gpu_layer(40)};
  const WarmupResult first = warmup(layers, for_sm80());
  // Two layers alike: 2 · 3 forward kernels, of few rows, of several requests', of many; merge_plan_states,
  // cache_write.
  EXPECT_THAT(first.kernels, SizeIs(8));
  EXPECT_THAT(first.skipped, IsEmpty());
  std::set<std::string> names;
  for (const WarmedKernel& kernel : first.kernels) {
    EXPECT_EQ(kernel.error, "");
    names.insert(kernel.name);
  }
  EXPECT_THAT(names, SizeIs(8));
  const int64_t after = num_compiles();
  EXPECT_LE(after - before, 8);  // fewer where the cache has some
  const WarmupResult second = warmup(layers, for_sm80());
  EXPECT_EQ(num_compiles(), after);
  for (const WarmedKernel& kernel : second.kernels) EXPECT_FALSE(kernel.compiled);
}

std::vector<std::string> names_of(const std::vector<LayerSpec>& layers, const WarmupOptions& options) {
  std::vector<std::string> names;
  for (const WarmedKernel& kernel : warmup(layers, options).kernels) {
    EXPECT_EQ(kernel.error, "");
    names.push_back(kernel.name.substr(0, kernel.name.find(' ')));
  }
  return names;
}

// What a run does not call is not compiled for it.
TEST_F(Warmup, calls_that_belong_to_no_layer_are_compiled_where_the_run_makes_them) {
  WarmupOptions options = for_sm80();
  EXPECT_THAT(names_of({}, options), IsEmpty());
  options.gather_cache = true;
  EXPECT_THAT(names_of({}, options), ElementsAre("gather", "gather_widened"));
  options.merge_states = options.cache_write = true;
  EXPECT_THAT(names_of({}, options),
              ElementsAre("merge_states", "gather", "gather_widened", "cache_write", "cache_quantise"));
}

TEST_F(Warmup, planners_on_the_device_have_a_kernel_more) {
  WarmupOptions options = for_sm80();
  const std::vector<std::string> alone = names_of({gpu_layer(32)}, options);
  options.planners = PlannerUse::device;
  const std::vector<std::string> with_planners = names_of({gpu_layer(32)}, options);
  EXPECT_THAT(alone, ::testing::Not(::testing::Contains("plan_batch")));
  EXPECT_THAT(with_planners, ::testing::Contains("plan_batch"));
  EXPECT_EQ(with_planners.size(), alone.size() + 1);
}

// Both masks differ, and the states over the context are f32.
TEST(LayersOf, latent_attention_are_new_tokens_and_context) {
  MlaSpec spec;
  spec.num_heads = 4;
  spec.qk_nope_head_dim = spec.v_head_dim = 128;
  spec.qk_rope_head_dim = 64;
  spec.kv_lora_rank = 512;
  spec.sinks = {1, 2, 3, 4};
  const std::vector<LayerSpec> layers = layers_of(spec);
  ASSERT_THAT(layers, SizeIs(2));
  EXPECT_EQ(layers[0].head_dim, 192);
  EXPECT_EQ(layers[0].value_dim(), 128);
  EXPECT_EQ(layers[0].effective_mask().text(), mask::causal().text());
  EXPECT_EQ(layers[1].effective_mask().text(), mask::everything().text());
  EXPECT_EQ(layers[1].out_dtype(), DType::f32);
  EXPECT_THAT(layers[1].sinks, IsEmpty()) << "they join once";
}

// Whether it is ContextParallel that runs them or the caller.
TEST_F(Warmup, states_over_some_of_the_keys_are_merged) {
  LayerSpec layer = gpu_layer(32);
  EXPECT_THAT(names_of({layer}, for_sm80()), ::testing::Not(::testing::Contains("merge_states")));
  layer.key_run = KeyRun::context;
  EXPECT_THAT(names_of({layer}, for_sm80()), ::testing::IsSupersetOf({"merge_states", "gather"}));
  layer.key_run = KeyRun::all;
  layer.shard = {0, 2, 1};
  EXPECT_THAT(names_of({layer}, for_sm80()), ::testing::IsSupersetOf({"merge_states", "gather"}));
}

TEST_F(Warmup, progress_counts_every_kernel_though_threads_share_the_work) {
  WarmupOptions options = for_sm80();
  options.num_threads = 3;
  std::vector<int32_t> counts;
  std::vector<std::string> names;
  options.on_progress = [&](int32_t done, int32_t total, const WarmedKernel& kernel) {
    EXPECT_EQ(total, 5);
    counts.push_back(done);
    names.push_back(kernel.name);
  };
  const WarmupResult result = warmup({gpu_layer(48)}, options);
  EXPECT_THAT(counts, ElementsAre(1, 2, 3, 4, 5));
  std::vector<std::string> expected;
  for (const WarmedKernel& kernel : result.kernels) expected.push_back(kernel.name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected));
}

TEST_F(Warmup, what_the_callback_throws_ends_it) {
  WarmupOptions options = for_sm80();
  options.num_threads = 2;
  int calls = 0;
  options.on_progress = [&](int32_t, int32_t, const WarmedKernel&) {
    ++calls;
    throw std::runtime_error("enough");
  };
  EXPECT_THROW(warmup({gpu_layer(48)}, options), std::runtime_error);
  EXPECT_EQ(calls, 1);
}

TEST_F(Warmup, layers_that_cannot_run_are_skipped_with_the_reason) {
  LayerSpec refused = gpu_layer(32);
  refused.head_dim = 36;
  const WarmupResult result = warmup({gpu_layer(32), refused}, for_sm80());
  EXPECT_THAT(result.kernels, SizeIs(5));
  EXPECT_THAT(result.skipped, ElementsAre(HasSubstr("layer 1: head_dim: got 36")));
}

ContextParallelSpec shared_by_ranks(StateExchange exchange) {
  ContextParallelSpec spec;
  spec.layer = gpu_layer(32);
  spec.interleave_size = 4;
  spec.exchange = exchange;
  return spec;
}

// New tokens alone are too few keys for splits that join in clusters, but a layer compiles that kernel, too.
TEST_F(Warmup, what_creating_a_layer_compiles_for_one_new_token_is_there) {
  LayerSpec layer = gpu_layer(64);
  layer.cache.reset();
  layer.key_run = KeyRun::new_tokens;
  WarmupOptions options;
  options.arch = "sm_90a";
  std::string names;
  for (const WarmedKernel& kernel : warmup({layer}, options).kernels) {
    EXPECT_EQ(kernel.error, "");
    names += kernel.name + "\n";
  }
  for (const char* name :
       {"num_warps 4 num_stages 1 min_ctas 5 cluster_size 1 ", "num_warps 8 num_stages 1 min_ctas 1 cluster_size 1 ",
        "num_warps 4 num_stages 1 min_ctas 5 cluster_size 8 ", "num_warps 8 num_stages 1 min_ctas 1 cluster_size 8 "}) {
    EXPECT_THAT(names, HasSubstr(name));
  }
}

// A rank's context, its new tokens as a result and as a state, and the gather and merge of the exchange.
TEST_F(Warmup, layers_of_a_rank_bring_all_that_context_parallel_runs) {
  const WarmupResult result = warmup(rank_layers(shared_by_ranks(StateExchange::all_to_all), 0, 2), for_sm80());
  EXPECT_THAT(result.skipped, IsEmpty());
  std::string names;
  for (const WarmedKernel& kernel : result.kernels) {
    EXPECT_EQ(kernel.error, "");
    names += kernel.name + "\n";
  }
  for (const char* name :
       {"bf16->bf16 d32/32 group 2 page 16 keys context ranks 2 by 4",
        "bf16->bf16 d32/32 group 2 dense keys new_tokens", "bf16->f32 d32/32 group 2 dense keys new_tokens",
        "gather sm_80", "merge_states sm_80", "merge_plan_states sm_80", "cache_write sm_80"}) {
    EXPECT_THAT(names, HasSubstr(name));
  }
}

TEST_F(Warmup, one_rank_warms_all_of_them) {
  for (const StateExchange exchange :
       {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
    const ContextParallelSpec spec = shared_by_ranks(exchange);
    warmup(rank_layers(spec, 0, 2), for_sm80());
    const int64_t before = num_compiles();
    for (const WarmedKernel& kernel : warmup(rank_layers(spec, 1, 2), for_sm80()).kernels) {
      EXPECT_EQ(kernel.error, "");
    }
    EXPECT_EQ(num_compiles(), before) << to_string(exchange);
  }
}

TEST(WarmupRefuses, layers_of_ranks_that_cannot_be) {
  const ContextParallelSpec spec = shared_by_ranks(StateExchange::all_to_all);
  testing::expect_refused([&] { rank_layers(spec, 0, 0); }, ErrorCode::invalid_argument, "num_ranks");
  testing::expect_refused([&] { rank_layers(spec, 2, 2); }, ErrorCode::invalid_argument, "rank");
  testing::expect_refused([&] { rank_layers(spec, 0, 3); }, ErrorCode::invalid_argument, "layer.num_q_heads");
  ContextParallelSpec odd = spec;
  odd.layer.head_dim = 36;
  testing::expect_refused([&] { rank_layers(odd, 0, 2); }, ErrorCode::unsupported, "head_dim");
}

MlaContextParallelSpec latents_shared_by_ranks() {
  MlaContextParallelSpec spec;
  spec.layer.num_heads = 4;
  spec.layer.qk_nope_head_dim = spec.layer.v_head_dim = 32;
  spec.layer.kv_lora_rank = 64;
  spec.layer.sinks = {1, 2, 3, 4};
  spec.interleave_size = 4;
  return spec;
}

// All heads over the rank's part of the context, and the rank's own over the new tokens, each to an f32 state.
TEST_F(Warmup, layers_of_a_rank_bring_all_that_latent_context_parallel_runs) {
  const std::vector<LayerSpec> layers = rank_layers(latents_shared_by_ranks(), 1, 2);
  ASSERT_THAT(layers, SizeIs(2));
  EXPECT_THAT(layers[0].sinks, ElementsAre(3, 4));
  EXPECT_EQ(layers[0].num_kv_heads, 2);
  EXPECT_EQ(layers[1].num_kv_heads, 4);
  std::string names;
  for (const WarmedKernel& kernel : warmup(layers, for_sm80()).kernels) {
    EXPECT_EQ(kernel.error, "");
    names += kernel.name + "\n";
  }
  for (const char* name : {"bf16->f32 d32/32 group 1 dense ranks 2 by 4", "bf16->f32 d32/32 group 1 dense tile",
                           "gather sm_80", "merge_states sm_80"}) {
    EXPECT_THAT(names, HasSubstr(name));
  }
  const int64_t before = num_compiles();
  warmup(rank_layers(latents_shared_by_ranks(), 0, 2), for_sm80());
  EXPECT_EQ(num_compiles(), before) << "of the other rank";
}

TEST(WarmupRefuses, latent_layers_of_ranks_that_cannot_be) {
  MlaContextParallelSpec spec = latents_shared_by_ranks();
  testing::expect_refused([&] { rank_layers(spec, 0, 0); }, ErrorCode::invalid_argument, "num_ranks");
  testing::expect_refused([&] { rank_layers(spec, -1, 2); }, ErrorCode::invalid_argument, "rank");
  testing::expect_refused([&] { rank_layers(spec, 0, 3); }, ErrorCode::invalid_argument, "layer.num_heads");
  spec.interleave_size = 0;
  testing::expect_refused([&] { rank_layers(spec, 0, 2); }, ErrorCode::invalid_argument, "interleave_size");
  spec.layer.kv_lora_rank = 0;
  testing::expect_refused([&] { rank_layers(spec, 0, 2); }, ErrorCode::invalid_argument, "kv_lora_rank");
}

TEST(WarmupRefuses, options_that_mean_nothing) {
  WarmupOptions options = for_sm80();
  options.num_threads = -1;
  EXPECT_EQ(error_of({}, options).argument(), "num_threads");
  options = for_sm80();
  options.bounds.max_query_len = 0;
  EXPECT_EQ(error_of({}, options).argument(), "bounds.max_query_len");
  options = for_sm80();
  options.bounds.max_model_len = -5;
  EXPECT_EQ(error_of({}, options).argument(), "bounds.max_model_len");
  options = for_sm80();
  options.arch = "sm_50";
  EXPECT_EQ(error_of({}, options).argument(), "arch");
  options.arch = "";
  options.device = {};
  EXPECT_EQ(error_of({}, options).argument(), "device");
}

TEST(WarmupRefuses, no_gpu_and_no_architecture) {
  if (num_cuda_devices() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(error_of({gpu_layer(32)}, {}).code(), ErrorCode::unavailable);
}

TEST(WarmupRefuses, nothing_for_no_layers) { EXPECT_THAT(warmup({}, for_sm80()).kernels, IsEmpty()); }

TEST(KernelChoices, name_the_kernel_of_each_kind_of_batch_and_why_not_the_special_one) {
  const auto fit = kernel_choices(gpu_layer(128), "sm_90a");
  ASSERT_THAT(fit, SizeIs(2));
  EXPECT_EQ(fit[0].batches, "1 to 16 new tokens a request");
  EXPECT_EQ(fit[0].kernel, "forward_sm90_few_rows");
  EXPECT_EQ(fit[0].why, "");
  EXPECT_EQ(fit[1].batches, "17 or more new tokens a request");
  EXPECT_EQ(fit[1].kernel, "forward_sm90_many_rows");

  const auto other = kernel_choices(gpu_layer(72), "sm_90a");
  EXPECT_EQ(other[0].kernel, "forward_sm80");
  EXPECT_THAT(other[0].why, HasSubstr("multiples of 16"));
  EXPECT_EQ(other[1].kernel, "forward_sm80");
  EXPECT_THAT(other[1].why, HasSubstr("head sizes 64, 96, 128"));
}

TEST(KernelChoices, layers_with_more_heads_than_few_rows_have_one_kind) {
  LayerSpec layer = gpu_layer(128);
  layer.num_q_heads = 64;
  layer.num_kv_heads = 1;
  const auto choices = kernel_choices(layer, "sm_90a");
  ASSERT_THAT(choices, SizeIs(1));
  EXPECT_EQ(choices[0].batches, "1 or more new tokens a request");
}

TEST(KernelChoices, refused_layer_throws_its_reason) {
  LayerSpec layer = gpu_layer(128);
  layer.query_dtype = DType::f32;
  EXPECT_THROW(kernel_choices(layer, "sm_90a"), Error);
}

}  // namespace
}  // namespace qkv
