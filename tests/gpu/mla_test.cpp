// MLA prefill on a GPU: the whole against the oracle, the gather against the CPU's.
#include <cmath>
#include <thread>
#include <tuple>

#include "mla_cases.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_mla : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

tools::MlaCase mla_case(int32_t head_dim, int32_t rope, int32_t head_dim_v, const std::vector<int32_t>& contexts,
                        const std::vector<int32_t>& q, int32_t workspace_tokens) {
  tools::MlaCase c;
  c.attention = testing::case_of(4, 4, head_dim, {}, {}, false);
  for (size_t r = 0; r < q.size(); ++r) c.attention.requests.push_back({q[r], contexts[r] + q[r]});
  c.attention.layer.head_dim_v = head_dim_v;
  c.attention.layer.query_dtype = c.attention.layer.kv_dtype = DType::bf16;
  c.attention.extra_rows = 2;
  c.qk_rope_head_dim = rope;
  c.kv_lora_rank = 64;
  c.options.workspace_tokens = workspace_tokens;
  c.options.batch_invariant = true;
  return c;
}

// Kernels are compiled side by side first: one after another, that would take minutes.
void expect_all_agree(const std::vector<tools::MlaCase>& cases) {
  std::vector<std::thread> threads;
  for (const tools::MlaCase& c : cases) {
    threads.emplace_back([&c] {
      try {
        tools::prepare(c, kGpu);
      } catch (const Error&) {  // the case itself will tell
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const tools::MlaCase& c : cases) EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c);
}

TEST_F(gpu_mla, sizes_masks_and_contexts_of_every_kind) {
  std::vector<tools::MlaCase> cases;
  for (const auto& [head_dim, rope, head_dim_v] :
       {std::tuple{192, 64, 128}, {256, 64, 256}, {128, 64, 128}, {256, 0, 256}, {40, 8, 24}}) {
    cases.push_back(mla_case(head_dim, rope, head_dim_v, {300, 0, 33, 200, 64}, {90, 5, 1, 20, 130}, 128));
  }
  for (const Mask& mask : {mask::causal() & mask::window(40, 0), mask::prefix_lm(20), mask::rswa(30)}) {
    tools::MlaCase c = cases.front();
    c.attention.layer.softcap = 20;
    c.attention.layer.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
    c.attention.layer.mask = mask;
    cases.push_back(c);
  }
  expect_all_agree(cases);
}

TEST_F(gpu_mla, latents_and_outputs_of_8_bits) {
  std::vector<tools::MlaCase> cases;
  for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
    for (const auto& [head_dim, rope, head_dim_v] : {std::tuple{192, 64, 128}, {256, 64, 256}, {48, 16, 32}}) {
      tools::MlaCase c = mla_case(head_dim, rope, head_dim_v, {300, 0, 33, 200, 64}, {90, 5, 1, 20, 130}, 128);
      c.attention.layer.output_dtype = DType::f8e4m3;
      c.attention.layer.output_scales = scales;
      cases.push_back(c);
      c.cache_dtype = head_dim == 192 ? DType::f8e4m3 : head_dim == 256 ? DType::f8e5m2 : DType::i8;
      cases.push_back(c);
      c.attention.layer.output_dtype.reset();
      c.attention.layer.output_scales = OutputScales::per_tensor;
      c.attention.layer.softcap = 20;
      cases.push_back(c);
    }
  }
  expect_all_agree(cases);
}

TEST_F(gpu_mla, random_cases_agree_with_the_oracle) {
  std::vector<tools::MlaCase> cases;
  for (int64_t i = 0; i < 100; i += 5) cases.push_back(tools::draw_mla_case(5, i, DeviceKind::cuda));
  expect_all_agree(cases);
}

// The ranks share the GPU: of latents, and of states by each scheme.
TEST_F(gpu_mla, threads_that_share_a_cache_agree_with_the_oracle) {
  for (const int32_t num_ranks : {1, 2, 3, 4}) {
    for (int64_t i = 0; i < 40; i += 5) {
      const tools::MlaCase c = tools::draw_mla_case(7, i, DeviceKind::cuda, num_ranks);
      EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c);
    }
  }
}

TEST_F(gpu_mla, gather_has_the_bits_of_the_cpu) {
  for (const int64_t dim : {72, 68}) {  // rows of whole 16-byte pieces, and others
    tools::OwnedTensor pages(DType::bf16, {9, 16, dim});
    for (int64_t p = 0; p < 9; ++p) {
      for (int64_t t = 0; t < 16; ++t) {
        for (int64_t d = 0; d < dim; ++d) {
          tools::store(pages.view(), {p, t, d}, static_cast<float>((p * 16 + t) % 97 + d));
        }
      }
    }
    const std::vector<int32_t> table = {4, 2, 7, -1, 0, 8, 3, 5}, starts = {5, 16}, sums = {0, 41, 80};
    const Tensor block_table = Tensor::of(table, {2, 4});
    for (const int64_t num_heads : {1, 3}) {
      Tensor spread = pages.view();
      spread = Tensor::strided(spread.data, DType::bf16, {9, 16, num_heads, dim}, {16 * dim, dim, 0, 1});
      tools::OwnedTensor on_cpu(DType::bf16, {80, num_heads, dim}), on_gpu(DType::bf16, {80, num_heads, dim});
      gather_cache(spread, block_table, testing::view(starts), testing::view(sums), on_cpu.view());
      const tools::Placed placed_pages(pages, kGpu), rows(on_gpu, kGpu);
      gather_cache(placed_pages.on_device(spread), block_table, testing::view(starts), testing::view(sums),
                   rows.view());
      rows.fetch();
      EXPECT_EQ(on_cpu.buffer().bytes(), on_gpu.buffer().bytes());
    }
  }
}

// Heads side by side on both sides move as one row; pages with heads outermost, as HND layouts have them, do not.
TEST_F(gpu_mla, gather_of_heads_in_any_order_has_the_bits_of_the_cpu) {
  constexpr int64_t kTokens = 16, kHeads = 3, kDim = 72;
  tools::OwnedTensor pages(DType::bf16, {9, kTokens, kHeads, kDim});
  for (int64_t i = 0; i < 9 * kTokens * kHeads * kDim; ++i) {
    static_cast<uint16_t*>(pages.view().data)[i] = static_cast<uint16_t>(i * 2654435761U >> 17);
  }
  const std::vector<int32_t> table = {4, 2, 7, -1, 0, 8, 3, 5}, starts = {5, 16}, sums = {0, 41, 80};
  const Tensor block_table = Tensor::of(table, {2, 4});
  for (const bool heads_outermost : {false, true}) {
    const int64_t token_stride = heads_outermost ? kDim : kHeads * kDim;
    const int64_t head_stride = heads_outermost ? kTokens * kDim : kDim;
    const Tensor layout = Tensor::strided(pages.view().data, DType::bf16, {9, kTokens, kHeads, kDim},
                                          {kTokens * kHeads * kDim, token_stride, head_stride, 1});
    tools::OwnedTensor on_cpu(DType::bf16, {80, kHeads, kDim}), on_gpu(DType::bf16, {80, kHeads, kDim});
    gather_cache(layout, block_table, testing::view(starts), testing::view(sums), on_cpu.view());
    const tools::Placed placed(pages, kGpu), rows(on_gpu, kGpu);
    gather_cache(placed.on_device(layout), block_table, testing::view(starts), testing::view(sums), rows.view());
    rows.fetch();
    EXPECT_EQ(on_cpu.buffer().bytes(), on_gpu.buffer().bytes());
  }
}

TEST_F(gpu_mla, gather_of_8_bit_pages_has_the_bits_of_the_cpu) {
  std::vector<float> scale = {0.3F};
  const DeviceMemory scale_memory(kGpu, sizeof(float));
  scale_memory.copy_from_host(scale.data());
  const Tensor scale_of_gpu = Tensor::contiguous(scale_memory.data(), DType::f32, {1}, kGpu);
  const std::vector<int32_t> table = {4, 2, 7, -1, 0, 8, 3, 5}, starts = {5, 16}, sums = {0, 41, 80};
  const Tensor block_table = Tensor::of(table, {2, 4});
  for (const DType pages_dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
    for (const DType rows_dtype : {pages_dtype, DType::bf16, DType::f16, DType::f32}) {
      for (const int64_t dim : {80, 576, 648, 68, 67}) {      // vectors in one turn and two, single elements, odd rows
        tools::OwnedTensor pages(pages_dtype, {9, 16, dim});  // NaN, where nothing else is stored
        for (int64_t i = 0; i < 9 * 16 * dim; i += 3) {
          static_cast<uint8_t*>(pages.view().data)[i] = static_cast<uint8_t>(i * 7);
        }
        tools::OwnedTensor on_cpu(rows_dtype, {80, 1, dim}), on_gpu(rows_dtype, {80, 1, dim});
        const bool widens = rows_dtype != pages_dtype;
        const Tensor with_head =
            Tensor::strided(pages.view().data, pages_dtype, {9, 16, 1, dim}, {16 * dim, dim, dim, 1});
        gather_cache(with_head, block_table, testing::view(starts), testing::view(sums), on_cpu.view(), {},
                     widens ? testing::view(scale, {1}) : Tensor());
        const tools::Placed placed(pages, kGpu), rows(on_gpu, kGpu);
        gather_cache(placed.on_device(with_head), block_table, testing::view(starts), testing::view(sums), rows.view(),
                     {}, widens ? scale_of_gpu : Tensor());
        rows.fetch();
        for (int64_t i = 0; i < 80 * dim; ++i) {
          const float cpu = tools::load(on_cpu.view(), {i / dim, 0, i % dim});
          const float gpu = tools::load(on_gpu.view(), {i / dim, 0, i % dim});
          ASSERT_TRUE(cpu == gpu || (std::isnan(cpu) && std::isnan(gpu))) << i << ": " << cpu << ", " << gpu;
        }
      }
    }
  }
}

}  // namespace
}  // namespace qkv
