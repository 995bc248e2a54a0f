// A warmed layer meets no batch that needs the compiler. Skipped where there is no GPU.
#include "qkv/warmup.hpp"

#include <random>

#include "cuda/memory.hpp"
#include "cuda/select.hpp"
#include "qkv/compile.hpp"
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

TEST_F(gpu_warmup, random_batches_start_no_compiler) {
  LayerSpec layer = testing::layer_of(8, 2, 128);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  const Attention attention(layer, kGpu, RequestBounds{});
  const int64_t before = num_compiles();
  std::mt19937 random(11);
  const auto upto = [&](int32_t most) { return std::uniform_int_distribution(0, most)(random); };
  for (int32_t i = 0; i < 1000; ++i) {
    const int32_t longest_query = std::vector{1, 8, 40, 700}[upto(3)];
    const int32_t longest = std::vector{100, 1000, 5000, 20'000}[upto(3)];
    std::vector<int32_t> starts = {0}, kv_lens;
    for (int32_t r = upto(i % 10 == 0 ? 300 : 8); r >= 0; --r) {
      kv_lens.push_back(upto(longest));
      starts.push_back(starts.back() + std::min(kv_lens.back(), upto(longest_query)));
    }
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(kv_lens);
    attention.plan(batch);
    ASSERT_EQ(num_compiles(), before) << "batch " << i;
  }
}

}  // namespace
}  // namespace qkv
