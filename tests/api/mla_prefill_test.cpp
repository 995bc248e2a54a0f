// MLA prefill against plain attention over all keys: sizes of models, batches of every kind, the caller's own loop.
#include <cmath>

#include "core/index/interleave.hpp"
#include "mla_cases.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using tools::MlaCase;

// `contexts` and `q`: each request's tokens in the cache, and its new ones.
MlaCase mla_case(int32_t head_dim, int32_t rope, int32_t head_dim_v, const std::vector<int32_t>& contexts,
                 const std::vector<int32_t>& q, int32_t workspace_tokens) {
  MlaCase c;
  c.attention = testing::case_of(4, 4, head_dim, {}, {}, false);
  for (size_t r = 0; r < q.size(); ++r) c.attention.requests.push_back({q[r], contexts[r] + q[r]});
  c.attention.layer.head_dim_v = head_dim_v;
  c.attention.extra_rows = 2;
  c.qk_rope_head_dim = rope;
  c.kv_lora_rank = 48;
  c.options.page_size = 16;
  c.options.workspace_tokens = workspace_tokens;
  return c;
}

void expect_agrees(const MlaCase& c) { EXPECT_EQ(tools::failure_of(c), "") << tools::describe(c); }

TEST(mla_prefill, sizes_of_models_and_others) {
  for (const auto& [head_dim, rope, head_dim_v] :
       {std::tuple{192, 64, 128}, {256, 64, 256}, {128, 64, 128}, {256, 0, 256}, {40, 8, 24}, {24, 16, 72}}) {
    EXPECT_TRUE(MlaPrefill::supports_dimensions(head_dim - rope, rope, head_dim_v));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      MlaCase c = mla_case(head_dim, rope, head_dim_v, {70, 0, 33}, {9, 5, 20}, 64);
      c.attention.layer.query_dtype = c.attention.layer.kv_dtype = dtype;
      expect_agrees(c);
    }
  }
  EXPECT_FALSE(MlaPrefill::supports_dimensions(512, 64, 512));
  EXPECT_FALSE(MlaPrefill::supports_dimensions(128, 64, 0));
  EXPECT_FALSE(MlaPrefill::supports_dimensions(100, 0, 100, {DeviceKind::cuda, 0}));
  EXPECT_TRUE(MlaPrefill::supports_out());
}

TEST(mla_prefill, contexts_of_every_kind) {
  expect_agrees(mla_case(48, 16, 32, {}, {}, 16));           // no requests
  expect_agrees(mla_case(48, 16, 32, {0, 0}, {5, 17}, 32));  // no context
  expect_agrees(mla_case(48, 16, 32, {64}, {8}, 64));        // one chunk, whole
  expect_agrees(mla_case(48, 16, 32, {300}, {8}, 48));       // one request continued six times
  expect_agrees(mla_case(48, 16, 32, {61, 100, 0, 7, 0, 200}, {1, 1, 1, 1, 3, 1}, 96));  // one-token rows
  expect_agrees(mla_case(48, 16, 32, {30, 200, 30}, {3, 0, 5}, 64));                     // a request without new tokens
  MlaCase odd_pages = mla_case(48, 16, 32, {100, 55}, {7, 9}, 28);
  odd_pages.options.page_size = 7;
  expect_agrees(odd_pages);
}

TEST(mla_prefill, masks_and_score_terms) {
  for (const Mask& mask : {mask::causal() & mask::window(20, 0), mask::everything(), mask::prefix_lm(12), mask::rswa(9),
                           mask::per_request_causal(), mask::document() & mask::causal(), mask::tree(),
                           mask::causal() & (mask::request() != 1)}) {
    MlaCase c = mla_case(48, 16, 32, {130, 45, 0, 80}, {12, 30, 6, 1}, 64);
    c.attention.layer.mask = mask;
    c.attention.layer.softcap = 15;
    c.attention.layer.sinks = {0.5F, -1.0F, 2.0F, -INFINITY};
    c.attention.layer.scale = 0.2F;
    expect_agrees(c);
  }
}

// 2 rounds, requests without keys in some of them (casebook 97).
TEST(mla_prefill, casebook_097_rounds_in_which_some_requests_have_no_key) {
  MlaCase c = mla_case(192, 64, 128, {0, 128, 2415}, {4, 3, 5}, 3 * 128);
  c.options.page_size = 128;
  c.attention.layer.num_q_heads = c.attention.layer.num_kv_heads = 2;
  c.kv_lora_rank = 16;
  expect_agrees(c);
}

// Three merges (casebook 100): the needle is found wherever it lies.
TEST(mla_prefill, casebook_100_needle_in_any_chunk) {
  for (const int32_t needle : {5, 2040, 2060, 4090}) {
    MlaSpec spec;
    spec.num_heads = 1;
    spec.qk_nope_head_dim = 8;
    spec.v_head_dim = 8;
    spec.kv_lora_rank = 16;
    spec.dtype = DType::f32;
    spec.scale = 1.0F;
    ContextChunkOptions options;
    options.workspace_tokens = 2048;
    const MlaPrefill attention(spec);
    constexpr int64_t kContext = 4096;
    tools::OwnedTensor cache(DType::f32, {kContext / 16, 16, 16});
    std::vector<int32_t> pages(kContext / 16);
    for (int64_t t = 0; t < kContext; ++t) {
      pages[t / 16] = static_cast<int32_t>(t / 16);
      for (int64_t d = 0; d < 16; ++d) tools::store(cache.view(), {t / 16, t % 16, d}, t == needle ? 6.0F : 0.0F);
    }
    tools::OwnedTensor matrix(DType::f32, {16, 16});
    for (int64_t r = 0; r < 16; ++r) {
      for (int64_t d = 0; d < 16; ++d) tools::store(matrix.view(), {r, d}, r == d ? 1.0F : 0.0F);
    }
    tools::OwnedTensor query(DType::f32, {16, 1, 8}), latents(DType::f32, {16, 16}), out(DType::f32, {16, 1, 8});
    for (int64_t t = 0; t < 16; ++t) {
      for (int64_t d = 0; d < 16; ++d) tools::store(latents.view(), {t, d}, 0);
      for (int64_t d = 0; d < 8; ++d) tools::store(query.view(), {t, 0, d}, 1);
    }
    const std::vector<int32_t> starts = {0, 16};
    const std::vector<int32_t> lengths = {kContext + 16};
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(lengths);
    batch.block_table = Tensor::contiguous(pages.data(), DType::i32, {1, kContext / 16});
    const MlaPlan plan = attention.plan(batch, options);
    ASSERT_EQ(plan.chunks().size(), 2U);
    std::vector<float> workspace(plan.workspace_bytes() / 4);
    attention.forward(query.view(), latents.view(), cache.view(), plan, matrix_projection(spec, matrix.view()),
                      testing::view(workspace, {static_cast<int64_t>(workspace.size())}), out.view());
    // The needle's score is 48, all others 0.
    for (int64_t t = 0; t < 16; ++t) EXPECT_NEAR(tools::load(out.view(), {t, 0, 3}), 6.0F, 1e-5) << needle;
  }
}

TEST(mla_prefill, batch_invariant_chunks_give_each_request_its_own_bits) {
  for (const int32_t workspace_tokens : {96, 128, 256}) {
    MlaCase c = mla_case(48, 16, 32, {50, 260, 0, 90, 33}, {6, 12, 4, 1, 30}, workspace_tokens);
    c.options.batch_invariant = true;
    expect_agrees(c);
  }
}

TEST(mla_prefill, random_cases_agree_with_the_oracle) {
  for (int64_t i = 0; i < 60; ++i) expect_agrees(tools::draw_mla_case(3, i));
}

}  // namespace
}  // namespace qkv
