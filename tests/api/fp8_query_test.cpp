// Queries of 8-bit floats: each path multiplies them by their scale, and what does not fit is refused by name. All
// scales differ from 1 and from each other.
#include <cmath>

#include "core/float8.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_agrees;
using testing::expect_refused;
using testing::view;

constexpr auto kInvalid = ErrorCode::invalid_argument;
constexpr auto kMismatch = ErrorCode::mismatch;

// Decode, a few tokens, a prefill; 8-bit everything.
tools::Case fp8_query_case(KvScales query_scales = KvScales::per_tensor) {
  auto c = case_of(8, 4, 64, {1, 5, 70}, {40, 60, 90});
  c.layer.query_dtype = c.layer.kv_dtype = DType::f8e4m3;
  c.layer.kv_scales = KvScales::per_head;
  c.query_scales = query_scales;
  return c;
}

// A case after update_cache; forward with a query scale of the caller's.
struct Step {
  explicit Step(const tools::Case& of)
      : c(of), data(c), attention(c.layer), plan(attention.plan(data.batch())), cache(data.cache()) {
    attention.update_cache(data.key.view(), data.value.view(), cache, plan);
  }

  std::vector<uint16_t> forward(const Tensor& query_scale) const {
    std::vector<uint16_t> out(data.num_tokens * c.layer.num_q_heads * c.layer.value_dim(), kUntouched);
    forward_to(out, query_scale);
    return out;
  }

  void forward_to(std::vector<uint16_t>& out, const Tensor& query_scale) const {
    const Tensor out_view = Tensor::contiguous(out.data(), c.layer.out_dtype(),
                                               {data.num_tokens, c.layer.num_q_heads, c.layer.value_dim()});
    attention.forward(data.query.view(), cache, plan, out_view, {}, {}, {}, query_scale);
  }

  static constexpr uint16_t kUntouched = 0x1234;
  tools::Case c;
  tools::CaseData data;
  Attention attention;
  Plan plan;
  KvCache cache;
};

TEST(fp8_query, the_output_is_bf16_unless_asked_otherwise) {
  LayerSpec layer = fp8_query_case().layer;
  EXPECT_EQ(layer.out_dtype(), DType::bf16);
  layer.output_dtype = DType::f32;
  EXPECT_EQ(layer.out_dtype(), DType::f32);
  layer.output_dtype = {};
  layer.query_dtype = DType::f16;
  EXPECT_EQ(layer.out_dtype(), DType::f16);
}

TEST(fp8_query, every_granularity_format_and_feature) {
  for (const KvScales granularity : {KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head}) {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
      auto c = fp8_query_case(granularity);
      c.layer.query_dtype = dtype;
      expect_agrees(c);
      c.layer.output_dtype = DType::f32;
      c.layer.kv_scales = KvScales::per_token_head;
      c.layer.softcap = 20;
      c.layer.sinks.assign(8, 0.5F);
      c.layer.mask = mask::window(30, 0);
      expect_agrees(c);
      c.requests.push_back({2, 5000});  // splits
      c.layer.alibi_slopes.assign(8, 0.1F);
      c.layer.head_dim_v = 24;
      c.layer.kv_dtype = DType::bf16;
      c.layer.kv_scales = KvScales::none;
      expect_agrees(c);
      c.layer.output_dtype = DType::f8e4m3;
      expect_agrees(c);
    }
  }
}

TEST(fp8_query, dense_keys_and_shared_prefixes) {
  auto dense = case_of(8, 4, 64, {1, 70}, {40, 90}, false);
  dense.layer.query_dtype = DType::f8e4m3;
  dense.query_scales = KvScales::per_request_head;
  expect_agrees(dense);
  // Rows of several requests in one item, each with its own scale.
  auto shared = case_of(8, 4, 64, {1, 1, 2}, {700, 670, 690});
  shared.layer.query_dtype = DType::f8e4m3;
  shared.query_scales = KvScales::per_request_head;
  shared.prefix_groups = {{{0, 1, 2}, 656}};
  shared.with_prefix_groups = true;
  shared.prefix_sharing = PrefixSharing::always;
  expect_agrees(shared);
}

// A power of two moves no rounding: twice the query scale is twice the layer's scale, bit for bit.
TEST(fp8_query, the_scale_multiplies_the_scores_of_its_own_head) {
  Step step(fp8_query_case());
  const std::vector<float> scales = {0.25F, 0.5F, 0.25F, 0.125F};
  const std::vector<uint16_t> per_head = step.forward(view(scales, {4}));
  for (int32_t h = 0; h < 4; ++h) {
    const std::vector<uint16_t> per_tensor = step.forward(view(scales, {4}).slice(0, h, h + 1));
    for (int64_t t = 0; t < step.data.num_tokens; ++t) {
      for (int64_t i = 0; i < 2 * 64; ++i) {
        const int64_t at = (t * 8 + 2 * h) * 64 + i;
        ASSERT_EQ(per_head[at], per_tensor[at]) << h << " " << t << " " << i;
      }
    }
  }
  auto twice = fp8_query_case();
  twice.layer.scale = 2 * twice.layer.effective_scale();
  EXPECT_EQ(Step(twice).forward(view(scales, {4}).slice(0, 0, 1)), step.forward(view(scales, {4}).slice(0, 1, 2)));
}

TEST(casebook, case_061_queries_of_each_request_and_head_have_their_own_scale) {
  Step step(fp8_query_case(KvScales::per_request_head));
  const std::vector<float> scales = {0.5F, 0.25F, 0.125F, 1.0F, 0.75F, 0.375F, 0.62F, 0.31F, 0.155F, 0.81F, 0.4F, 0.2F};
  const std::vector<uint16_t> together = step.forward(view(scales, {3, 4}));
  for (int64_t r = 0; r < 3; ++r) {
    const Tensor own = view(scales, {3, 4}).slice(0, r, r + 1);
    Tensor per_head = own;
    per_head.rank = 1;
    per_head.shape[0] = own.shape[1];
    per_head.stride[0] = own.stride[1];
    const std::vector<uint16_t> alike = step.forward(per_head);
    for (int64_t i = step.data.query_start_loc[r] * 8 * 64; i < step.data.query_start_loc[r + 1] * 8 * 64; ++i) {
      ASSERT_EQ(together[i], alike[i]) << r << " " << i;
    }
  }
}

TEST(casebook, case_064_query_scales_are_read_when_the_work_runs) {
  Step step(fp8_query_case());
  std::vector<float> scale = {0.5F};
  const Tensor scale_view = view(scale, {1});
  const std::vector<uint16_t> before = step.forward(scale_view);
  scale[0] = 0.1F;
  EXPECT_NE(step.forward(scale_view), before);
}

TEST(fp8_query, varlen_attention_takes_the_scale) {
  Step step(fp8_query_case(KvScales::per_head));
  std::vector<uint16_t> out(step.data.num_tokens * 8 * 64);
  const Batch batch = step.data.batch();
  VarlenArguments arguments;
  arguments.query = step.data.query.view();
  arguments.key = step.cache.key;
  arguments.value = step.cache.value;
  arguments.key_scale = step.cache.key_scale;
  arguments.value_scale = step.cache.value_scale;
  arguments.query_start_loc = batch.query_start_loc;
  arguments.seq_lens = batch.seq_lens;
  arguments.block_table = batch.block_table;
  arguments.mask = mask::causal();
  arguments.out = Tensor::contiguous(out.data(), DType::bf16, {step.data.num_tokens, 8, 64});
  arguments.query_scale = step.data.query_scale.view();
  varlen_attention(arguments);
  EXPECT_EQ(out, step.forward(step.data.query_scale.view()));
  arguments.query_scale = {};
  expect_refused([&] { varlen_attention(arguments); }, kInvalid, "query_scale");
}

TEST(fp8_query, scales_that_do_not_fit_are_refused_and_nothing_is_written) {
  Step step(fp8_query_case());
  std::vector<uint16_t> out(step.data.num_tokens * 8 * 64, Step::kUntouched);
  const auto refused = [&](ErrorCode code, const std::string& argument, const Tensor& scale) {
    expect_refused([&] { step.forward_to(out, scale); }, code, argument);
  };
  const std::vector<float> many(24, 0.5F);
  refused(kInvalid, "query_scale", {});
  refused(kMismatch, "query_scale", view(many, {8}));  // one a query head
  refused(kMismatch, "query_scale", view(many, {2, 4}));
  refused(kMismatch, "query_scale", view(many, {3, 8}));
  refused(kInvalid, "query_scale", view(many, {3, 4, 2}));
  Tensor other = view(many, {4});
  other.dtype = DType::bf16;
  refused(kMismatch, "query_scale", other);
  other = view(many, {4});
  other.device = {DeviceKind::cuda, 0};
  refused(kMismatch, "query_scale", other);
  for (const float bad : {0.0F, -0.5F, NAN, INFINITY}) {
    const std::vector<float> scales = {0.1F, 0.2F, bad, 0.4F};
    refused(kInvalid, "query_scale[2]", view(scales, {4}));
    refused(kInvalid, "query_scale[0]", view(scales, {4}).slice(0, 2, 3));
  }
  EXPECT_EQ(out, std::vector<uint16_t>(out.size(), Step::kUntouched));
}

TEST(fp8_query, a_scale_for_other_queries_and_other_dtypes_are_refused) {
  auto plain = fp8_query_case();
  plain.layer.query_dtype = DType::bf16;
  Step step(plain);
  std::vector<uint16_t> out(step.data.num_tokens * 8 * 64, Step::kUntouched);
  const std::vector<float> scale = {0.5F};
  expect_refused([&] { step.forward_to(out, view(scale, {1})); }, kMismatch, "query_scale");
  const Attention eight_bit(fp8_query_case().layer);
  const Plan plan = eight_bit.plan(step.data.batch());
  const Tensor out_view = Tensor::contiguous(out.data(), DType::bf16, {step.data.num_tokens, 8, 64});
  expect_refused(
      [&] { eight_bit.forward(step.data.query.view(), step.cache, plan, out_view, {}, {}, {}, view(scale, {1})); },
      kMismatch, "query");
  expect_refused([&] { eight_bit.forward(step.data.query.view(), step.cache, step.plan, out_view); }, kMismatch,
                 "plan");
  EXPECT_EQ(out, std::vector<uint16_t>(out.size(), Step::kUntouched));
}

}  // namespace
}  // namespace qkv
