// Caches and outputs of 8-bit floats: the casebook's faults of kind F by number, what is written, what is refused.
// All scales differ from 1 and from each other.
#include <cmath>
#include <cstring>

#include "core/float8.hpp"
#include "support/eight_bit_case.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::eight_bit_case;
using testing::expect_agrees;
using testing::expect_every_feature_agrees;
using testing::expect_refused;
using testing::kGranularities;
using testing::view;

constexpr auto kInvalid = ErrorCode::invalid_argument;
constexpr auto kMismatch = ErrorCode::mismatch;

tools::Case fp8_case(KvScales scales, DType dtype = DType::f8e4m3) { return eight_bit_case(scales, dtype); }

// A case after update_cache, and what forward makes of it.
struct Step {
  explicit Step(const tools::Case& of)
      : c(of), data(c), attention(c.layer), plan(attention.plan(data.batch())), cache(data.cache()) {
    if (c.layer.cache) attention.update_cache(data.key.view(), data.value.view(), cache, plan);
  }

  std::vector<float> forward() const {
    std::vector<float> out(data.num_tokens * c.layer.num_q_heads * c.layer.value_dim());
    const Tensor out_view = view(out, {data.num_tokens, c.layer.num_q_heads, c.layer.value_dim()});
    attention.forward(data.query.view(), cache, plan, out_view);
    return out;
  }

  tools::Case c;
  tools::CaseData data;
  Attention attention;
  Plan plan;
  KvCache cache;
};

// --- kind F ---

TEST(casebook, case_059_every_entry_point_applies_the_scales) {
  // Every number is an e4m3 times its scale, so that the 8-bit cache holds what the f32 cache holds.
  const std::vector<float> key_scale = {0.25F};
  const std::vector<float> value_scale = {0.5F};
  auto c = case_of(8, 4, 64, {1, 33, 1}, {5000, 60, 90});
  tools::CaseData exact(c);
  const auto round_to_fp8 = [](tools::OwnedTensor& tensor, float scale) {
    auto* values = static_cast<float*>(tensor.view().data);
    for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
      values[i] = f32_from_float8(DType::f8e4m3, float8_from_f32(DType::f8e4m3, values[i] / scale)) * scale;
    }
  };
  for (tools::OwnedTensor* tensor : {&exact.key, &exact.key_pages}) round_to_fp8(*tensor, key_scale[0]);
  for (tools::OwnedTensor* tensor : {&exact.value, &exact.value_pages}) round_to_fp8(*tensor, value_scale[0]);
  const Tensor pages = exact.key_cache;
  const std::vector<std::byte> key_bytes(pages.num_elements(), std::byte{0xFF});
  const std::vector<std::byte> value_bytes = key_bytes;
  KvCache fp8;
  fp8.key = Tensor::contiguous(key_bytes.data(), DType::f8e4m3, {pages.shape[0], 16, 4, 64});
  fp8.value = Tensor::contiguous(value_bytes.data(), DType::f8e4m3, {pages.shape[0], 16, 4, 64});
  fp8.key_scale = view(key_scale, {1});
  fp8.value_scale = view(value_scale, {1});

  // cache_write brings the context over, update_cache the new tokens.
  std::vector<int64_t> all_slots;
  for (int64_t slot = 0; slot < pages.shape[0] * 16; ++slot) all_slots.push_back(slot);
  const auto rows = static_cast<int64_t>(all_slots.size());
  cache_write(Tensor::contiguous(exact.key_cache.data, DType::f32, {rows, 4, 64}),
              Tensor::contiguous(exact.value_cache.data, DType::f32, {rows, 4, 64}), fp8, view(all_slots));
  LayerSpec layer = c.layer;
  layer.kv_dtype = DType::f8e4m3;
  layer.kv_scales = KvScales::per_tensor;
  const Attention f32_attention(c.layer);
  const Attention fp8_attention(layer);
  const Plan f32_plan = f32_attention.plan(exact.batch());
  const Plan fp8_plan = fp8_attention.plan(exact.batch());
  f32_attention.update_cache(exact.key.view(), exact.value.view(), exact.cache(), f32_plan);
  fp8_attention.update_cache(exact.key.view(), exact.value.view(), fp8, fp8_plan);

  const auto num_values = static_cast<size_t>(exact.num_tokens * 8 * 64);
  std::vector<float> expected(num_values), paged(num_values), varlen(num_values);
  const auto out_view = [&](const std::vector<float>& out) { return view(out, {exact.num_tokens, 8, 64}); };
  f32_attention.forward(exact.query.view(), exact.cache(), f32_plan, out_view(expected));
  fp8_attention.forward(exact.query.view(), fp8, fp8_plan, out_view(paged));
  const Batch batch = exact.batch();
  VarlenArguments arguments;
  arguments.query = exact.query.view();
  arguments.key = fp8.key;
  arguments.value = fp8.value;
  arguments.key_scale = fp8.key_scale;
  arguments.value_scale = fp8.value_scale;
  arguments.query_start_loc = batch.query_start_loc;
  arguments.seq_lens = batch.seq_lens;
  arguments.block_table = batch.block_table;
  arguments.mask = mask::causal();
  arguments.out = out_view(varlen);
  varlen_attention(arguments);
  EXPECT_EQ(paged, varlen);
  for (size_t i = 0; i < num_values; ++i) ASSERT_NEAR(paged[i], expected[i], 1e-5) << i;

  // Paths that cannot use scales say so.
  KvCache of_f32 = exact.cache();
  of_f32.key_scale = fp8.key_scale;
  expect_refused([&] { f32_attention.forward(exact.query.view(), of_f32, f32_plan, out_view(expected)); }, kMismatch,
                 "cache.key_scale");
  expect_refused([&] { f32_attention.update_cache(exact.key.view(), exact.value.view(), of_f32, f32_plan); }, kMismatch,
                 "cache.key_scale");
  expect_refused([&] { cache_write(exact.key.view(), exact.value.view(), of_f32, view(exact.slot_mapping)); },
                 kMismatch, "cache.key_scale");
  const std::vector<int32_t> new_tokens = {1, 33, 1};
  arguments.block_table = {};
  arguments.seq_lens = view(new_tokens);
  arguments.key = arguments.value = exact.key.view();
  expect_refused([&] { varlen_attention(arguments); }, kMismatch, "key_scale");
}

TEST(casebook, case_061_each_request_and_head_has_its_own_scales) {
  const std::vector<float> key_scale = {0.01F, 0.03F, 0.1F, 0.2F, 0.3F, 0.7F, 1.5F, 3};
  // Values of some hundred at most: f32 sums of larger ones that cancel err by more than is allowed here.
  const std::vector<float> value_scale = {0.25F, 0.02F, 0.9F, 0.4F, 0.05F, 0.6F, 0.15F, 1.1F};
  auto c = fp8_case(KvScales::per_request_head);
  c.requests.resize(2);
  Step step(c);
  step.cache.key_scale = view(key_scale, {2, 4});
  step.cache.value_scale = view(value_scale, {2, 4});
  const std::vector<float> out = step.forward();
  const auto expected = reference::attention(c.layer, step.data.batch(), step.data.query.view(), step.cache);
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], expected.out[i], 1e-4 * (1 + std::fabs(expected.out[i]))) << i;
  }
  std::swap(step.cache.key_scale, step.cache.value_scale);
  const std::vector<float> swapped = step.forward();
  for (int64_t row = 0; row < step.data.num_tokens * 8; ++row) EXPECT_NE(swapped[row * 64], out[row * 64]) << row;
}

TEST(casebook, case_064_scales_are_read_when_the_work_runs) {
  for (const KvScales granularity : {KvScales::per_tensor, KvScales::per_head}) {
    auto c = fp8_case(granularity);
    for (tools::RequestLengths& request : c.requests) request.kv_len = request.q_len;  // no keys of other scales
    std::vector<float> scale(granularity == KvScales::per_head ? 4 : 1, 1.0F);
    Step step(c);
    step.cache.key_scale = step.cache.value_scale = view(scale, {static_cast<int64_t>(scale.size())});
    step.attention.update_cache(step.data.key.view(), step.data.value.view(), step.cache, step.plan);
    const std::vector<float> before = step.forward();
    scale.assign(scale.size(), 0.1F);
    step.attention.update_cache(step.data.key.view(), step.data.value.view(), step.cache, step.plan);
    const std::vector<float> after = step.forward();
    const auto expected = reference::attention(c.layer, step.data.batch(), step.data.query.view(), step.cache);
    for (size_t i = 0; i < after.size(); ++i) ASSERT_NEAR(after[i], expected.out[i], 1e-4) << i;
    EXPECT_NE(before, after);
  }
}

TEST(casebook, case_066_a_plan_carries_the_cache_that_it_was_made_for) {
  auto c = fp8_case(KvScales::per_head);
  Step step(c);
  std::vector<float> out(step.data.num_tokens * 8 * 64, 9.0F);
  const Tensor out_view = view(out, {step.data.num_tokens, 8, 64});
  const auto refused_for = [&](const LayerSpec& planned_for) {
    const Plan plan = Attention(planned_for).plan(step.data.batch());
    expect_refused([&] { step.attention.forward(step.data.query.view(), step.cache, plan, out_view); }, kMismatch,
                   "plan");
    expect_refused([&] { Attention(planned_for).forward(step.data.query.view(), step.cache, step.plan, out_view); },
                   kMismatch, "plan");
  };
  LayerSpec other = c.layer;
  other.kv_dtype = DType::bf16;
  other.kv_scales = KvScales::none;
  refused_for(other);
  other = c.layer;
  other.kv_scales = KvScales::per_token_head;
  refused_for(other);
  other = c.layer;
  other.kv_dtype = DType::f8e5m2;
  refused_for(other);
  EXPECT_EQ(out, std::vector<float>(out.size(), 9.0F));
}

// --- every granularity with what is computed differently ---

TEST(fp8, every_granularity_format_and_feature) {
  for (const KvScales granularity : kGranularities) {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
      auto c = fp8_case(granularity, dtype);
      expect_every_feature_agrees(c);
    }
  }
}

TEST(fp8, cross_attention_writes_the_keys_of_each_request_with_its_scales) {
  auto c = fp8_case(KvScales::per_request_head);
  c.layer.type = AttentionType::encoder_decoder;
  expect_agrees(c);
}

// --- what is written ---

TEST(fp8, writing_rounds_saturates_and_keeps_nan) {
  const std::vector<float> key = {0.5F, -0.0F, 2000, -INFINITY, NAN, 0.53F, 1e-9F, -100};
  const std::vector<float> value(8, 3.0F);
  const std::vector<int64_t> slots = {1};
  std::vector<uint8_t> key_pages(16, 0xEE), value_pages(16, 0xEE);
  const std::vector<float> key_scale = {0.5F}, value_scale = {2.0F};
  KvCache cache{Tensor::contiguous(key_pages.data(), DType::f8e4m3, {1, 2, 1, 8}),
                Tensor::contiguous(value_pages.data(), DType::f8e4m3, {1, 2, 1, 8}), view(key_scale, {1}),
                view(value_scale, {1})};
  cache_write(view(key, {1, 1, 8}), view(value, {1, 1, 8}), cache, view(slots));
  EXPECT_EQ(std::vector<uint8_t>(key_pages.begin() + 8, key_pages.end()),
            (std::vector<uint8_t>{0x38, 0x80, 0x7E, 0xFE, 0x7F, 0x38, 0x00, 0xF4}));
  EXPECT_EQ(value_pages[8], 0x3C);  // 1.5
  for (int32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(key_pages[i], 0xEE);
    EXPECT_EQ(value_pages[i], 0xEE);
  }
}

TEST(fp8, a_row_gets_the_scale_of_its_largest_finite_magnitude) {
  const std::vector<float> key = {0, 0, 0, 0, 0, 0, 0, 0, 1, -7, INFINITY, NAN, 0.5F, 0, 0, 3};
  const std::vector<int64_t> slots = {2, 0};
  std::vector<uint8_t> pages(4 * 8, 0xEE);
  std::vector<float> scales = {NAN, NAN, NAN, NAN};
  KvCache cache{Tensor::contiguous(pages.data(), DType::f8e4m3, {2, 2, 1, 8}),
                Tensor::contiguous(pages.data(), DType::f8e4m3, {2, 2, 1, 8}), view(scales, {2, 2, 1}),
                view(scales, {2, 2, 1})};
  cache_write(view(key, {2, 1, 8}), view(key, {2, 1, 8}), cache, view(slots));
  EXPECT_EQ(scales[2], 1.0F);
  EXPECT_EQ(scales[0], 7.0F / 448.0F);
  EXPECT_TRUE(std::isnan(scales[1]) && std::isnan(scales[3]));
  EXPECT_EQ(pages[16], 0x00);
  EXPECT_EQ(pages[1], 0xFE);  // -7 is the largest number
  EXPECT_EQ(pages[2], 0x7E);  // infinity saturates
  EXPECT_EQ(pages[3], 0x7F);
}

// --- outputs ---

TEST(fp8, outputs_are_the_f32_results_divided_and_rounded) {
  const std::vector<float> out_scale = {0.02F};
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    for (const bool cache : {true, false}) {
      auto c = case_of(8, 4, 64, {1, 40, 3}, {5000, 300, 0}, cache);
      Step step(c);
      LayerSpec layer = c.layer;
      layer.output_dtype = dtype;
      const Attention attention(layer);
      const Plan plan = attention.plan(step.data.batch());
      const std::vector<int64_t> shape = {step.data.num_tokens, 8, 64};
      std::vector<uint8_t> rounded(step.data.num_tokens * 8 * 64);
      const Tensor rounded_view = Tensor::contiguous(rounded.data(), dtype, {step.data.num_tokens, 8, 64});
      std::vector<float> exact(rounded.size());
      const Tensor exact_view = view(exact, {step.data.num_tokens, 8, 64});
      const Tensor query = step.data.query.view();
      if (cache) {
        step.attention.forward(query, step.cache, step.plan, exact_view);
        attention.forward(query, step.cache, plan, rounded_view, {}, {}, view(out_scale, {1}));
      } else {
        const Tensor key = step.data.key.view();
        const Tensor value = step.data.value.view();
        step.attention.forward(query, key, value, step.plan, exact_view);
        attention.forward(query, key, value, plan, rounded_view, {}, {}, view(out_scale, {1}));
      }
      for (size_t i = 0; i < exact.size(); ++i) ASSERT_EQ(rounded[i], float8_from_f32(dtype, exact[i] / out_scale[0]));
    }
  }
}

TEST(fp8, merged_states_are_divided_and_rounded) {
  const std::vector<float> first(64, 1.5F), second(64, -40.0F), lse = {0.5F};
  const std::vector<State> states = {{view(first, {1, 1, 64}), view(lse, {1, 1})},
                                     {view(second, {1, 1, 64}), view(lse, {1, 1})}};
  const std::vector<float> out_scale = {0.3F};
  std::vector<uint8_t> out(64);
  const Tensor out_view = Tensor::contiguous(out.data(), DType::f8e4m3, {1, 1, 64});
  merge_states(states, out_view, {}, {}, view(out_scale, {1}));
  EXPECT_EQ(out, std::vector<uint8_t>(64, float8_from_f32(DType::f8e4m3, -19.25F / 0.3F)));
  expect_refused([&] { merge_states(states, out_view); }, kInvalid, "out_scale");
  expect_refused(
      [&] {
        merge_states(states, view(first, {1, 1, 64}), {}, {}, view(out_scale, {1}));
      },
      kMismatch, "out_scale");
}

// --- refusals ---

TEST(fp8, layers_that_do_not_fit_are_refused) {
  const auto refused = [](const char* argument, ErrorCode code, const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = fp8_case(KvScales::per_head).layer;
    change(layer);
    expect_refused([&] { Attention{layer}; }, code, argument);
  };
  refused("kv_scales", kInvalid, [](LayerSpec& l) { l.kv_scales = KvScales::none; });
  refused("kv_scales", kInvalid, [](LayerSpec& l) { l.kv_dtype = DType::bf16; });
}

TEST(fp8, scales_that_do_not_fit_are_refused_and_nothing_is_written) {
  const std::vector<float> of_heads = {0.1F, 0.2F, 0.3F, 0.4F};
  const auto refused = [&](KvScales granularity, ErrorCode code, const std::string& argument,
                           const std::function<void(KvCache&)>& change) {
    const auto c = fp8_case(granularity);
    Step step(c);
    change(step.cache);
    const tools::GuardedBuffer before = step.data.key_pages.buffer();
    std::vector<float> out(step.data.num_tokens * 8 * 64, 9.0F);
    const Tensor out_view = view(out, {step.data.num_tokens, 8, 64});
    expect_refused([&] { step.attention.forward(step.data.query.view(), step.cache, step.plan, out_view); }, code,
                   argument);
    expect_refused(
        [&] { step.attention.update_cache(step.data.key.view(), step.data.value.view(), step.cache, step.plan); }, code,
        argument);
    EXPECT_EQ(out, std::vector<float>(out.size(), 9.0F));
    EXPECT_TRUE(before == step.data.key_pages.buffer());
  };
  for (const KvScales granularity : kGranularities) {
    refused(granularity, kInvalid, "cache.key_scale", [](KvCache& c) { c.key_scale = {}; });
    refused(granularity, kInvalid, "cache.value_scale", [](KvCache& c) { c.value_scale = {}; });
    refused(granularity, kMismatch, "cache.key_scale", [](KvCache& c) { c.key_scale.dtype = DType::bf16; });
    refused(granularity, kMismatch, "cache.value_scale", [](KvCache& c) {
      c.value_scale.device = {DeviceKind::cuda, 0};
    });
  }
  refused(KvScales::per_tensor, kMismatch, "cache.key_scale", [&](KvCache& c) { c.key_scale = view(of_heads, {4}); });
  refused(KvScales::per_request_head, kInvalid, "cache.key_scale",
          [&](KvCache& c) { c.key_scale = view(of_heads, {4}); });
  refused(KvScales::per_request_head, kMismatch, "cache.key_scale", [&](KvCache& c) {
    c.key_scale = view(of_heads, {1, 4});
  });
  refused(KvScales::per_token_head, kInvalid, "cache.value_scale", [&](KvCache& c) {
    c.value_scale = view(of_heads, {1, 4});
  });
  for (const float bad : {0.0F, -0.5F, NAN, INFINITY}) {
    const std::vector<float> scales = {0.1F, 0.2F, bad, 0.4F};
    refused(KvScales::per_head, kInvalid, "cache.value_scale[2]",
            [&](KvCache& c) { c.value_scale = view(scales, {4}); });
    refused(KvScales::per_tensor, kInvalid, "cache.key_scale[0]",
            [&](KvCache& c) { c.key_scale = view(scales, {4}).slice(0, 2, 3); });
  }
  // 16-bit pages where the layer says 8, and the reverse.
  refused(KvScales::per_head, kMismatch, "cache.key", [](KvCache& c) { c.key.dtype = DType::bf16; });
  refused(KvScales::per_head, kMismatch, "cache.value", [](KvCache& c) { c.value.dtype = DType::f8e5m2; });
}

TEST(fp8, scales_per_request_need_a_slot_for_each_new_token) {
  const auto c = fp8_case(KvScales::per_request_head);
  tools::CaseData data(c);
  Batch batch = data.batch();
  batch.slot_mapping = batch.slot_mapping.slice(0, 0, 3);
  expect_refused([&] { Attention(c.layer).plan(batch); }, kMismatch, "slot_mapping");
  const std::vector<float> scales(8, 0.5F);
  KvCache cache = data.cache();
  cache.key_scale = view(scales, {2, 4});
  expect_refused([&] { cache_write(data.key.view(), data.value.view(), cache, batch.slot_mapping); }, kInvalid,
                 "cache.key_scale");
}

TEST(fp8, out_scales_that_do_not_fit_are_refused) {
  auto c = fp8_case(KvScales::per_head);
  c.layer.output_dtype = DType::f8e4m3;
  Step step(c);
  std::vector<uint8_t> out(step.data.num_tokens * 8 * 64, 9);
  const Tensor out_view = Tensor::contiguous(out.data(), DType::f8e4m3, {step.data.num_tokens, 8, 64});
  const auto refused = [&](ErrorCode code, const std::string& argument, const Tensor& out_scale) {
    expect_refused(
        [&] { step.attention.forward(step.data.query.view(), step.cache, step.plan, out_view, {}, {}, out_scale); },
        code, argument);
  };
  const std::vector<float> bad = {0.5F, 0, -1, NAN};
  refused(kInvalid, "out_scale", {});
  refused(kMismatch, "out_scale", view(bad, {4}));
  for (int64_t i = 1; i < 4; ++i) refused(kInvalid, "out_scale[0]", view(bad, {4}).slice(0, i, i + 1));
  EXPECT_EQ(out, std::vector<uint8_t>(out.size(), 9));
  auto plain = case_of(8, 4, 64, {1}, {40});
  Step other(plain);
  std::vector<float> floats(8 * 64);
  expect_refused(
      [&] {
        other.attention.forward(other.data.query.view(), other.cache, other.plan, view(floats, {1, 8, 64}), {}, {},
                                view(bad, {4}).slice(0, 0, 1));
      },
      kMismatch, "out_scale");
}

}  // namespace
}  // namespace qkv
