// quantise against its definition: given scales all differ from 1 and from each other.
#include <cmath>

#include "core/index/token_requests.hpp"
#include "support/quantise_scene.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using testing::quantise_cases;
using testing::QuantiseCase;
using testing::QuantiseScene;

constexpr auto kInvalid = ErrorCode::invalid_argument;
constexpr auto kMismatch = ErrorCode::mismatch;

// By the definition, from the scene's own values.
float largest_finite(const QuantiseScene& scene, int64_t request, int64_t scale) {
  float largest = 0;
  for (int64_t t = 0; t < scene.num_tokens(); ++t) {
    for (int64_t h = 0; h < QuantiseScene::kHeads; ++h) {
      if (scene.request_of(t) != request || h / (QuantiseScene::kHeads / scene.c.num_scales) != scale) continue;
      for (int64_t d = 0; d < scene.c.head_dim; ++d) {
        const float magnitude = std::fabs(tools::load(scene.rows.view(), {t, h, d}));
        if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
      }
    }
  }
  return largest;
}

TEST(quantise, bytes_are_those_of_the_quotients) {
  for (const QuantiseCase& c : quantise_cases()) {
    QuantiseScene scene(c);
    scene.run();
    for (int64_t t = 0; t < scene.num_tokens(); ++t) {
      for (int64_t h = 0; h < QuantiseScene::kHeads; ++h) {
        const int64_t of_head = h / (QuantiseScene::kHeads / c.num_scales);
        const float scale = tools::load(scene.scale.view(), {scene.request_of(t), of_head});
        for (int64_t d = 0; d < c.head_dim; ++d) {
          const float value = tools::load(scene.rows.view(), {t, h, d});
          ASSERT_EQ(scene.byte(t, h, d), float8_from_f32(c.to, value / scale)) << t << " " << h << " " << d;
        }
      }
    }
  }
}

TEST(quantise, chosen_scales_put_the_largest_magnitude_at_the_largest_number) {
  for (const QuantiseCase& c : quantise_cases()) {
    if (c.source != ScaleSource::chosen) continue;
    QuantiseScene scene(c);
    scene.run();
    for (int64_t r = 0; r < (c.of_requests ? 4 : 1); ++r) {
      for (int64_t s = 0; s < c.num_scales; ++s) {
        const float largest = largest_finite(scene, r, s);
        const float expected = largest == 0 ? 1.0F : largest / largest_float8(c.to);
        EXPECT_EQ(tools::load(scene.scale.view(), {r, s}), expected) << r << " " << s;
        EXPECT_EQ(largest == 0, c.of_requests && r >= 2);  // no tokens, only zeros
      }
    }
  }
}

TEST(quantise, rows_past_the_last_request_are_untouched) {
  QuantiseScene scene({});
  const QuantiseScene before({});
  scene.run();
  for (int64_t t = QuantiseScene::kOwned; t < QuantiseScene::kTokens; ++t) {
    EXPECT_EQ(scene.byte(t, 0, 0), before.byte(t, 0, 0));
    EXPECT_EQ(scene.byte(t, 5, 79), before.byte(t, 5, 79));
  }
  EXPECT_TRUE(scene.out.buffer().guards_intact());
}

TEST(quantise, given_scales_stay_and_gaps_between_chosen_ones_too) {
  for (const ScaleSource source : {ScaleSource::given, ScaleSource::chosen}) {
    QuantiseScene scene({DType::bf16, DType::f8e4m3, 2, true, source, 80});
    const QuantiseScene before({DType::bf16, DType::f8e4m3, 2, true, source, 80});
    scene.run();
    for (int64_t i = 0; i < 24; ++i) {
      const auto bits = [&](const QuantiseScene& of) { return static_cast<const uint32_t*>(of.scale.view().data)[i]; };
      if (source == ScaleSource::given || i % 3 != 0) EXPECT_EQ(bits(scene), bits(before)) << i;
    }
  }
}

TEST(quantise, bits_of_a_request_do_not_depend_on_the_others) {
  QuantiseScene together({DType::bf16, DType::f8e4m3, 2, true, ScaleSource::chosen, 80});
  together.run();
  QuantiseScene alone(together.c);
  alone.starts = {0, 0, 0, 0, 20};  // the tokens of the first, as the last
  alone.run();
  for (int64_t s = 0; s < 2; ++s) {
    EXPECT_EQ(tools::load(together.scale.view(), {0, s}), tools::load(alone.scale.view(), {3, s}));
  }
  for (int64_t i = 0; i < 20 * 6 * 80; ++i) {
    ASSERT_EQ(together.byte(0, 0, i), alone.byte(0, 0, i)) << i;
  }
}

TEST(quantise, what_does_not_fit_is_refused_by_name) {
  const std::vector<float> values(48, 0.5F);
  std::vector<uint8_t> bytes(48, 7);
  const Tensor rows = Tensor::contiguous(values.data(), DType::f32, {4, 3, 4});
  const Tensor out = Tensor::contiguous(bytes.data(), DType::f8e4m3, {4, 3, 4});
  const std::vector<float> scales = {0.5F, 0.25F, 2.0F, 3.0F, 0.75F, 1.5F};
  const std::vector<int32_t> starts = {0, 3, 4};
  const Tensor of_heads = testing::view(scales, {6}).slice(0, 0, 3), of_requests = testing::view(scales, {2, 3});
  const auto call = [&](const Tensor& r, const Tensor& o, const Tensor& s, const Tensor& sums = {},
                        ScaleSource source = ScaleSource::given) { quantise(r, o, s, source, sums); };
  expect_refused([&] { call(rows, rows, of_heads); }, kInvalid, "out");
  expect_refused([&] { call(out, out, of_heads); }, kMismatch, "rows");
  expect_refused([&] { call(rows, out.slice(0, 0, 3), of_heads); }, kMismatch, "out");
  expect_refused([&] { call(rows, out, {}); }, kInvalid, "scale");
  expect_refused([&] { call(rows, out, of_heads.slice(0, 0, 2)); }, kInvalid, "scale");
  expect_refused([&] { call(rows, out, of_requests); }, kInvalid, "query_start_loc");
  expect_refused([&] { call(rows, out, of_heads, testing::view(starts)); }, kMismatch, "query_start_loc");
  const auto refused_starts = [&](const std::vector<int32_t>& bad, const char* name) {
    expect_refused([&] { call(rows, out, of_requests, testing::view(bad)); }, kInvalid, name);
  };
  refused_starts({1, 3, 4}, "query_start_loc[0]");
  refused_starts({0, 3, 2}, "query_start_loc[2]");
  refused_starts({0, 3, 5}, "query_start_loc[2]");
  for (const float bad : {0.0F, -1.0F, NAN, INFINITY}) {
    const std::vector<float> one = {bad};
    expect_refused([&] { call(rows, out, testing::view(one, {1})); }, kInvalid, "scale[0]");
  }
  Tensor shared = of_heads;
  shared.stride[0] = 0;
  expect_refused([&] { call(rows, out, shared, {}, ScaleSource::chosen); }, kInvalid, "scale");
  EXPECT_EQ(bytes, std::vector<uint8_t>(48, 7));
}

TEST(token_requests, own_their_tokens_and_none_where_they_have_none) {
  const int starts[] = {0, 0, 3, 3, 4, 9, 9};
  const int expected[] = {1, 1, 1, 3, 4, 4, 4, 4, 4};
  for (int token = 0; token < 9; ++token) EXPECT_EQ(index::request_of_token(starts, 6, token), expected[token]);
}

}  // namespace
}  // namespace qkv
