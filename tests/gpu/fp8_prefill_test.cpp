// Prefill of 16-bit queries on 8-bit caches on a GPU: Hopper's many-rows kernel widens them. Skipped where there is no
// GPU.
#include <cmath>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_fp8_prefill : public ::testing::TestWithParam<KvScales> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }

  static tools::Case of(int32_t head_dim, DType query, DType cache) {
    auto c = case_of(8, 2, head_dim, {500, 333, 60, 1}, {900, 700, 60, 300});
    c.layer.query_dtype = query;
    c.layer.kv_dtype = cache;
    c.layer.kv_scales = GetParam();
    return c;
  }
  static void expect_agrees(const tools::Case& c) { EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c); }
};
INSTANTIATE_TEST_SUITE_P(with_scales, gpu_fp8_prefill,
                         ::testing::Values(KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head,
                                           KvScales::per_token_head));

TEST_P(gpu_fp8_prefill, formats_and_head_sizes) {
  for (const int32_t head_dim : {64, 128}) {
    expect_agrees(of(head_dim, DType::bf16, DType::f8e4m3));
    expect_agrees(of(head_dim, DType::bf16, DType::f8e5m2));
    expect_agrees(of(head_dim, DType::f16, DType::f8e4m3));
  }
}

TEST_P(gpu_fp8_prefill, pages_and_groups) {
  for (const int32_t page_size : {16, 48, 256}) {
    auto c = of(128, DType::bf16, DType::f8e4m3);
    c.layer.cache->page_size = page_size;
    c.layer.num_q_heads = page_size == 48 ? 6 : 8;  // groups of 3: rows are gathered
    c.layout.interleaved = page_size == 48;
    expect_agrees(c);
  }
}

TEST_P(gpu_fp8_prefill, masks_and_score_terms) {
  auto window = of(128, DType::bf16, DType::f8e4m3);
  window.layer.mask = mask::window(150, 20);
  window.layer.sinks.assign(8, 0.7F);
  expect_agrees(window);
  auto terms = of(128, DType::bf16, DType::f8e4m3);
  terms.layer.softcap = 30;
  terms.layer.alibi_slopes.assign(8, 0.1F);
  expect_agrees(terms);
}

TEST_P(gpu_fp8_prefill, a_long_context_in_splits) {
  auto c = case_of(8, 2, 128, {200}, {30'000});
  c.layer.query_dtype = DType::bf16;
  c.layer.kv_dtype = DType::f8e4m3;
  c.layer.kv_scales = GetParam();
  expect_agrees(c);
}

TEST_P(gpu_fp8_prefill, outputs_and_shares_of_ranks) {
  for (const DType dtype : {DType::f32, DType::f8e4m3, DType::f8e5m2}) {
    auto c = of(128, DType::bf16, DType::f8e4m3);
    c.layer.output_dtype = dtype;
    expect_agrees(c);
  }
  auto c = of(64, DType::bf16, DType::f8e4m3);
  c.layer.shard = {2, 4, 8};
  expect_agrees(c);
}

// Requests of many rows go to Hopper's kernels at head sizes 64 and 128, and at 256 where queries have 8 bits, too;
// else to the sm80 kernel. Rows behind the last request are NaN.
TEST_P(gpu_fp8_prefill, dense_keys) {
  for (const int32_t head_dim : {64, 80, 96, 128, 256}) {
    for (const DType dtype : {DType::f8e4m3, DType::i8}) {
      auto c = case_of(8, 2, head_dim, {500, 333, 60, 1, 3}, {900, 700, 60, 300, 5000}, false);
      c.layer.query_dtype = DType::bf16;
      c.layer.kv_dtype = dtype;
      c.layer.kv_scales = GetParam();
      c.extra_rows = 3;
      expect_agrees(c);
      if (dtype != DType::f8e4m3) continue;
      c.layer.query_dtype = DType::f8e4m3;
      c.query_scales = KvScales::per_request_head;
      expect_agrees(c);
      c.layer.type = AttentionType::encoder_only;
      c.layer.mask = mask::window(100, 100);
      for (tools::RequestLengths& request : c.requests) request.kv_len = request.q_len;
      expect_agrees(c);
    }
  }
}

// Scores of a negative scale take the path of the terms, which transforms them before the maximum is taken.
TEST_P(gpu_fp8_prefill, negative_scale_beside_all_terms) {
  for (const int32_t head_dim : {64, 128}) {
    auto c = of(head_dim, DType::bf16, DType::f8e4m3);
    c.layer.mask = mask::per_request_causal() & mask::window(30, 30);
    c.layer.sinks.assign(8, 0.5F);
    c.layer.softcap = 20;
    c.layer.alibi_slopes.assign(8, 0.05F);
    c.layer.scale = -0.05F;
    expect_agrees(c);
  }
}

// NaN in a value that most rows do not see reaches those alone that do: rows are computed again from bytes.
TEST_P(gpu_fp8_prefill, casebook_044_hidden_nan_does_not_spread) {
  for (const int32_t head_dim : {64, 128}) {
    auto c = case_of(8, 2, head_dim, {140}, {140});
    c.layer.query_dtype = DType::bf16;
    c.layer.kv_dtype = DType::f8e4m3;
    c.layer.kv_scales = GetParam();
    tools::CaseData data(c);
    const Attention attention(c.layer, kGpu);
    const Plan plan = attention.plan(data.batch());
    tools::store(data.value.view(), {100, 1, 5}, NAN);  // rows 0 to 99 do not see it
    const tools::Placed query(data.query, kGpu), key(data.key, kGpu), value(data.value, kGpu),
        key_pages(data.key_pages, kGpu), value_pages(data.value_pages, kGpu), key_scale(data.key_scale, kGpu),
        value_scale(data.value_scale, kGpu);
    tools::OwnedTensor out(DType::bf16, {140, 8, head_dim});
    const tools::Placed placed_out(out, kGpu);
    const KvCache cache{key_pages.on_device(data.key_cache), value_pages.on_device(data.value_cache), key_scale.view(),
                        value_scale.view()};
    attention.update_cache(key.view(), value.view(), cache, plan);
    attention.forward(query.view(), cache, plan, placed_out.view());
    placed_out.fetch();
    for (int64_t t = 0; t < 140; ++t) {
      for (int64_t h = 0; h < 8; ++h) {
        const bool is_nan = std::isnan(tools::load(out.view(), {t, h, 5}));
        ASSERT_EQ(is_nan, t >= 100 && h >= 4) << head_dim << " " << t << " " << h;
      }
    }
  }
}

}  // namespace
}  // namespace qkv
