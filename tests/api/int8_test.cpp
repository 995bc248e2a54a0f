// Caches of i8: every granularity with what is computed differently, what is written, what is refused. All scales
// differ from 1 and from each other.
#include <cmath>

#include "support/eight_bit_case.hpp"

namespace qkv {
namespace {

using testing::eight_bit_case;
using testing::expect_agrees;
using testing::expect_every_feature_agrees;
using testing::expect_refused;
using testing::kGranularities;
using testing::view;

tools::Case int8_case(KvScales scales) { return eight_bit_case(scales, DType::i8); }

TEST(int8, every_granularity_and_feature) {
  for (const KvScales granularity : kGranularities) {
    auto c = int8_case(granularity);
    expect_every_feature_agrees(c);
    c.layer.query_dtype = DType::f8e4m3;
    c.query_scales = KvScales::per_head;
    c.layer.output_dtype = DType::f8e4m3;
    c.layer.output_scales = OutputScales::per_token_group;
    expect_agrees(c);
  }
}

TEST(int8, shards_and_cross_attention) {
  for (const KvScales granularity : kGranularities) {
    auto c = int8_case(granularity);
    c.layer.shard = {1, 3, 4};
    expect_agrees(c);
    c.layer.shard = {};
    c.layer.type = AttentionType::encoder_decoder;
    expect_agrees(c);
  }
}

// --- what is written ---

// One KV head of 8 columns; pages of 2 tokens.
struct Pages {
  explicit Pages(int64_t num_pages) : keys(num_pages * 16, 99), values(num_pages * 16, 99), count(num_pages) {}
  KvCache cache(const Tensor& key_scale, const Tensor& value_scale) const {
    return {Tensor::contiguous(keys.data(), DType::i8, {count, 2, 1, 8}),
            Tensor::contiguous(values.data(), DType::i8, {count, 2, 1, 8}), key_scale, value_scale};
  }

  std::vector<int8_t> keys, values;
  int64_t count;
};

TEST(int8, writing_rounds_to_even_saturates_and_makes_zero_of_nan) {
  const std::vector<float> key = {0.25F, -0.25F, 0.75F, -1.25F, 2000, -INFINITY, NAN, -64};
  const std::vector<float> value = {5, -5, 3, 253.9F, 254, 257, -255, -300};
  const std::vector<float> key_scale = {0.5F}, value_scale = {2.0F};
  const std::vector<int64_t> slots = {1};
  const Pages pages(1);
  cache_write(view(key, {1, 1, 8}), view(value, {1, 1, 8}), pages.cache(view(key_scale, {1}), view(value_scale, {1})),
              view(slots));
  const std::vector<int8_t> untouched(8, 99);
  EXPECT_EQ(std::vector<int8_t>(pages.keys.begin(), pages.keys.begin() + 8), untouched);
  EXPECT_EQ(std::vector<int8_t>(pages.values.begin(), pages.values.begin() + 8), untouched);
  EXPECT_EQ(std::vector<int8_t>(pages.keys.begin() + 8, pages.keys.end()),
            (std::vector<int8_t>{0, 0, 2, -2, 127, -128, 0, -128}));
  EXPECT_EQ(std::vector<int8_t>(pages.values.begin() + 8, pages.values.end()),
            (std::vector<int8_t>{2, -2, 2, 127, 127, 127, -128, -128}));
}

TEST(int8, a_row_gets_the_scale_that_puts_its_largest_finite_magnitude_at_127) {
  const std::vector<float> rows = {0, 0, 0, 0, 0, 0, 0, 0, 1, -7, INFINITY, NAN, 0.5F, 0, -INFINITY, 3};
  const std::vector<int64_t> slots = {2, 0};
  const std::vector<float> key_scale(4, NAN), value_scale(4, NAN);
  const Pages pages(2);
  cache_write(view(rows, {2, 1, 8}), view(rows, {2, 1, 8}),
              pages.cache(view(key_scale, {2, 2, 1}), view(value_scale, {2, 2, 1})), view(slots));
  for (const std::vector<float>* scales : {&key_scale, &value_scale}) {
    EXPECT_EQ((*scales)[0], 7.0F / 127.0F);
    EXPECT_EQ((*scales)[2], 1.0F);
    EXPECT_TRUE(std::isnan((*scales)[1]) && std::isnan((*scales)[3]));
  }
  for (const std::vector<int8_t>* bytes : {&pages.keys, &pages.values}) {
    EXPECT_EQ(std::vector<int8_t>(bytes->begin(), bytes->begin() + 8),
              (std::vector<int8_t>{18, -127, 127, 0, 9, 0, -128, 54}));
    EXPECT_EQ(std::vector<int8_t>(bytes->begin() + 16, bytes->begin() + 24), std::vector<int8_t>(8, 0));
  }
}

TEST(int8, what_comes_back_is_half_a_scale_off_at_most) {
  const std::vector<float> key_scale = {0.013F}, value_scale = {0.4F};
  std::vector<float> key(4 * 8), value(4 * 8), back(4 * 8);
  for (size_t i = 0; i < key.size(); ++i) {
    key[i] = 1.65F * std::sin(static_cast<float>(i));
    value[i] = 50.8F * std::cos(static_cast<float>(i));
  }
  const std::vector<int64_t> slots = {3, 0, 1, 2};
  const Pages pages(2);
  const KvCache cache = pages.cache(view(key_scale, {1}), view(value_scale, {1}));
  cache_write(view(key, {4, 1, 8}), view(value, {4, 1, 8}), cache, view(slots));
  const std::vector<int32_t> table = {0, 1}, starts = {0}, cu_seq_lens = {0, 4};
  for (const auto& [pages_of, scale, written] :
       {std::tuple{&cache.key, &key_scale, &key}, {&cache.value, &value_scale, &value}}) {
    gather_cache(*pages_of, Tensor::of(table, {1, 2}), view(starts), view(cu_seq_lens), view(back, {4, 1, 8}), {},
                 view(*scale, {1}));
    for (int64_t token = 0; token < 4; ++token) {
      for (int64_t d = 0; d < 8; ++d) {
        const float expected = (*written)[token * 8 + d];
        ASSERT_LE(std::fabs(back[slots[token] * 8 + d] - expected), 0.50001F * (*scale)[0]) << expected;
      }
    }
  }
}

// --- refusals ---

TEST(int8, layers_that_do_not_fit_are_refused_by_name) {
  const auto refused = [](const char* argument, ErrorCode code, const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = int8_case(KvScales::per_head).layer;
    change(layer);
    expect_refused([&] { Attention{layer}; }, code, argument);
  };
  refused("query_dtype", ErrorCode::unsupported, [](LayerSpec& l) { l.query_dtype = DType::i8; });
  refused("output_dtype", ErrorCode::unsupported, [](LayerSpec& l) { l.output_dtype = DType::i8; });
  refused("kv_scales", ErrorCode::invalid_argument, [](LayerSpec& l) { l.kv_scales = KvScales::none; });
}

TEST(int8, pages_and_rows_of_another_dtype_are_refused) {
  const auto c = int8_case(KvScales::per_head);
  tools::CaseData data(c);
  const Attention attention(c.layer);
  const Plan plan = attention.plan(data.batch());
  KvCache cache = data.cache();
  cache.value.dtype = DType::f8e4m3;
  expect_refused([&] { attention.update_cache(data.key.view(), data.value.view(), cache, plan); }, ErrorCode::mismatch,
                 "cache.value");
  // New tokens come as floats: integers would have no scale.
  tools::OwnedTensor rows(DType::i8, {data.num_tokens, 4, 64});
  expect_refused([&] { attention.update_cache(rows.view(), data.value.view(), data.cache(), plan); },
                 ErrorCode::mismatch, "key");
  LayerSpec float8 = c.layer;
  float8.kv_dtype = DType::f8e4m3;
  expect_refused([&] { Attention(float8).update_cache(data.key.view(), data.value.view(), data.cache(), plan); },
                 ErrorCode::mismatch, "plan");
  tools::OwnedTensor out(DType::i8, {data.num_tokens, 8, 64}), state(DType::f32, {data.num_tokens, 8, 64}),
      lse(DType::f32, {8, data.num_tokens});
  expect_refused([&] { merge_states({{state.view(), lse.view()}}, out.view()); }, ErrorCode::mismatch, "out");
}

}  // namespace
}  // namespace qkv
