// A warmed layer meets no batch and makes no planner that needs the compiler. Skipped where there is no GPU.
#include "qkv/warmup.hpp"

#include <random>

#include "cuda/memory.hpp"
#include "cuda/select.hpp"
#include "qkv/compile.hpp"
#include "qkv/mla_context_parallel.hpp"
#include "qkv/mla_prefill.hpp"
#include "support/rank_threads.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_warmup : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

TEST_F(gpu_warmup, table_of_architectures_says_what_the_device_says) {
  const cuda::DeviceFacts& facts = cuda::device_facts(0);
  EXPECT_EQ(cuda::facts_of_arch(facts.arch).max_shared_bytes, facts.max_shared_bytes);
}

// Lengths of steps of every kind: of one token each, of drafts, of prompts; few requests and many.
struct RandomStep {
  RandomStep(std::mt19937& random, bool many_requests) {
    const auto upto = [&](int32_t most) { return std::uniform_int_distribution(0, most)(random); };
    const int32_t longest_query = std::vector{1, 8, 40, 700}[upto(3)];
    const int32_t longest = std::vector{100, 1000, 5000, 20'000}[upto(3)];
    for (int32_t r = upto(many_requests ? 300 : 8); r >= 0; --r) {
      kv_lens.push_back(upto(longest));
      starts.push_back(starts.back() + std::min(kv_lens.back(), upto(longest_query)));
    }
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(kv_lens);
  }
  RandomStep(const RandomStep&) = delete;  // views point inside

  std::vector<int32_t> starts = {0}, kv_lens;
  Batch batch;
};

LayerSpec warmed_layer() {
  LayerSpec layer = testing::layer_of(8, 2, 128);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  return layer;
}

TEST_F(gpu_warmup, random_batches_start_no_compiler) {
  const Attention attention(warmed_layer(), kGpu, RequestBounds{});
  const int64_t before = num_compiles();
  std::mt19937 random(11);
  for (int32_t i = 0; i < 1000; ++i) {
    const RandomStep step(random, i % 10 == 0);
    attention.plan(step.batch);
    ASSERT_EQ(num_compiles(), before) << "batch " << i;
  }
}

TEST_F(gpu_warmup, planners_start_no_compiler) {
  LayerSpec layer = warmed_layer();
  layer.cache = CacheSpec{16};
  for (const PlannerUse use : {PlannerUse::host, PlannerUse::device}) {
    WarmupOptions options;
    options.planners = use;
    for (const WarmedKernel& kernel : warmup({layer}, options).kernels) EXPECT_EQ(kernel.error, "") << kernel.name;
    const Attention attention(layer, kGpu);
    const int64_t before = num_compiles();
    for (const int32_t max_requests : {1, 7, 64, 300}) {
      for (const int32_t max_query_len : {1, 4, 600}) {
        PlanLimits limits;
        limits.max_requests = max_requests;
        limits.max_query_len = max_query_len;
        limits.max_tokens = int64_t{max_requests} * max_query_len;
        limits.max_seq_len = 4000;
        limits.num_pages = 2000;
        limits.plans_on_device = use == PlannerUse::device;
        attention.planner(limits);
        ASSERT_EQ(num_compiles(), before) << max_requests << " requests of " << max_query_len;
      }
    }
  }
}

MlaSpec latent_layer() {
  MlaSpec spec;
  spec.num_heads = 16;
  spec.qk_nope_head_dim = spec.v_head_dim = 128;
  spec.qk_rope_head_dim = 64;
  spec.kv_lora_rank = 512;
  return spec;
}

template <class Layer>
void expect_plans_start_no_compiler(const Layer& layer, int32_t num_steps) {
  const int64_t before = num_compiles();
  ContextChunkOptions options;
  options.workspace_tokens = 8192;
  std::mt19937 random(12);
  for (int32_t i = 0; i < num_steps; ++i) {
    RandomStep step(random, false);
    const auto num_requests = static_cast<int64_t>(step.kv_lens.size());
    const std::vector<int32_t> table(num_requests * (20'000 / 16 + 1), 0);
    step.batch.block_table = Tensor::contiguous(table.data(), DType::i32, {num_requests, 20'000 / 16 + 1});
    layer.plan(step.batch, options);
    ASSERT_EQ(num_compiles(), before) << "batch " << i;
  }
}

TEST_F(gpu_warmup, steps_of_a_warmed_latent_layer_start_no_compiler) {
  expect_plans_start_no_compiler(MlaPrefill(latent_layer(), kGpu, RequestBounds{}), 300);
}

// By their ranks' layers before, so that neither rank compiles when it makes its own.
TEST_F(gpu_warmup, steps_of_a_latent_layer_over_threads_start_no_compiler) {
  MlaContextParallelSpec spec;
  spec.layer = latent_layer();
  for (const WarmedKernel& kernel : warmup(rank_layers(spec, 0, 2)).kernels) EXPECT_EQ(kernel.error, "");
  const int64_t before = num_compiles();
  test::on_each_rank(in_process_ranks(2, kGpu), [&](const std::shared_ptr<Collectives>& ranks) {
    const MlaContextParallel attention(spec, ranks, RequestBounds{});
    EXPECT_EQ(num_compiles(), before);
    expect_plans_start_no_compiler(attention, 50);
  });
}

}  // namespace
}  // namespace qkv
