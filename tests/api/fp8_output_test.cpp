// Outputs of 8-bit floats whose scales are chosen, a group of 128 columns of a head each.
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
constexpr int64_t kGroup = 128;

// An output of chosen scales.
struct Quantised {
  Quantised(DType of, int64_t tokens, int64_t heads, int64_t columns)
      : dtype(of),
        dim(columns),
        groups((columns + kGroup - 1) / kGroup),
        codes(tokens * heads * columns, 0x55),
        scales(tokens * heads * groups, NAN),
        out(Tensor::contiguous(codes.data(), of, {tokens, heads, columns})),
        scale(Tensor::contiguous(scales.data(), DType::f32, {tokens, heads, groups})) {}
  Quantised(const Quantised&) = delete;

  // Each group's largest value became the format's largest number.
  void expect_made_of(const std::vector<float>& exact) const {
    ASSERT_EQ(codes.size(), exact.size());
    for (size_t row = 0; row < exact.size() / dim; ++row) {
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t end = std::min((group + 1) * kGroup, dim);
        float largest = 0;
        for (int64_t d = group * kGroup; d < end; ++d) {
          const float magnitude = std::fabs(exact[row * dim + d]);
          if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
        }
        const float expected = largest == 0 ? 1 : largest / largest_float8(dtype);
        const float got = scales[row * groups + group];
        ASSERT_EQ(got, expected) << row << ", " << group;
        for (int64_t d = group * kGroup; d < end; ++d) {
          ASSERT_EQ(codes[row * dim + d], float8_from_f32(dtype, exact[row * dim + d] / got)) << row << ", " << d;
        }
      }
    }
  }

  DType dtype;
  int64_t dim, groups;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  Tensor out, scale;
};

LayerSpec with_group_scales(LayerSpec layer, DType dtype) {
  layer.output_dtype = dtype;
  layer.output_scales = OutputScales::per_token_group;
  return layer;
}

tools::Case case_of_values(int32_t head_dim_v, bool cache) {
  auto c = case_of(8, 4, 64, {1, 40, 3}, {5000, 300, 0}, cache);
  c.layer.head_dim_v = head_dim_v;
  return c;
}

TEST(fp8_output, groups_are_the_f32_results_divided_by_their_own_scale) {
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    for (const int32_t head_dim_v : {24, 64, 128, 192, 512}) {
      for (const bool cache : {true, false}) {
        const auto c = case_of_values(head_dim_v, cache);
        tools::CaseData data(c);
        const Attention plain(c.layer), quantised(with_group_scales(c.layer, dtype));
        std::vector<float> exact(data.num_tokens * 8 * head_dim_v);
        Quantised result(dtype, data.num_tokens, 8, head_dim_v);
        const auto run = [&](const Attention& layer, const Tensor& out, const Tensor& scale) {
          const Plan plan = layer.plan(data.batch());
          if (cache) {
            layer.update_cache(data.key.view(), data.value.view(), data.cache(), plan);
            layer.forward(data.query.view(), data.cache(), plan, out, {}, {}, scale);
          } else {
            layer.forward(data.query.view(), data.key.view(), data.value.view(), plan, out, {}, {}, scale);
          }
        };
        run(plain, view(exact, {data.num_tokens, 8, head_dim_v}), {});
        run(quantised, result.out, result.scale);
        result.expect_made_of(exact);
      }
    }
  }
}

TEST(fp8_output, group_scales_go_with_every_feature) {
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    auto c = case_of_values(192, true);
    c.layer = with_group_scales(c.layer, dtype);
    expect_agrees(c);
    c.layer.sinks.assign(8, 0.5F);
    c.layer.mask = mask::window(30, 0);
    c.layer.kv_dtype = DType::f8e4m3;
    c.layer.kv_scales = KvScales::per_token_head;
    c.extra_rows = 3;
    expect_agrees(c);
  }
}

TEST(fp8_output, a_row_that_sees_nothing_is_zero_with_scale_1) {
  auto c = case_of(2, 2, 64, {2}, {5});
  c.layer = with_group_scales(c.layer, DType::f8e4m3);
  c.layer.mask = mask::kv_pos() < mask::q_pos() - 3;
  tools::CaseData data(c);
  const Attention layer(c.layer);
  const Plan plan = layer.plan(data.batch());
  layer.update_cache(data.key.view(), data.value.view(), data.cache(), plan);
  Quantised result(DType::f8e4m3, 2, 2, 64);
  layer.forward(data.query.view(), data.cache(), plan, result.out, {}, {}, result.scale);
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(result.scales[h], 1.0F);
    EXPECT_EQ(result.codes[h * 64], 0x00);
    EXPECT_NE(result.scales[2 + h], 1.0F);
  }
}

TEST(fp8_output, merged_states_and_values_that_are_not_finite) {
  std::vector<float> first(192, 1.5F), second(192, -40.0F);
  second[3] = NAN;
  second[5] = INFINITY;
  second[190] = -300;
  const std::vector<float> lse = {0.5F};
  const std::vector<State> states = {{view(first, {1, 1, 192}), view(lse, {1, 1})},
                                     {view(second, {1, 1, 192}), view(lse, {1, 1})}};
  std::vector<float> exact(192);
  merge_states(states, view(exact, {1, 1, 192}));
  Quantised result(DType::f8e4m3, 1, 1, 192);
  merge_states(states, result.out, {}, {}, result.scale);
  result.expect_made_of(exact);
  EXPECT_EQ(result.codes[3], 0x7F);  // NaN stays
  EXPECT_EQ(result.codes[5], 0x7E);  // infinity becomes the largest number
  EXPECT_EQ(result.codes[190], 0xFE);
  EXPECT_NE(result.scales[0], result.scales[1]);
}

TEST(fp8_output, a_varlen_call_chooses_scales_where_there_is_room_for_them) {
  const auto c = case_of_values(192, true);
  tools::CaseData data(c);
  const Attention layer(with_group_scales(c.layer, DType::f8e4m3));
  const Plan plan = layer.plan(data.batch());
  layer.update_cache(data.key.view(), data.value.view(), data.cache(), plan);
  Quantised expected(DType::f8e4m3, data.num_tokens, 8, 192), got(DType::f8e4m3, data.num_tokens, 8, 192);
  layer.forward(data.query.view(), data.cache(), plan, expected.out, {}, {}, expected.scale);
  VarlenArguments arguments;
  arguments.query = data.query.view();
  arguments.key = data.cache().key;
  arguments.value = data.cache().value;
  arguments.query_start_loc = data.batch().query_start_loc;
  arguments.seq_lens = data.batch().seq_lens;
  arguments.block_table = data.batch().block_table;
  arguments.mask = mask::causal();
  arguments.out = got.out;
  arguments.out_scale = got.scale;
  varlen_attention(arguments);
  EXPECT_EQ(got.codes, expected.codes);
  EXPECT_EQ(got.scales, expected.scales);
}

TEST(fp8_output, what_does_not_fit_is_refused_and_nothing_is_written) {
  auto c = case_of(8, 4, 192, {3}, {20});
  tools::CaseData data(c);
  const Attention layer(with_group_scales(c.layer, DType::f8e4m3));
  const Plan plan = layer.plan(data.batch());
  Quantised result(DType::f8e4m3, 3, 8, 192);
  const std::vector<uint8_t> untouched = result.codes;
  const auto refused = [&](ErrorCode code, const char* argument, const Tensor& scale) {
    expect_refused([&] { layer.forward(data.query.view(), data.cache(), plan, result.out, {}, {}, scale); }, code,
                   argument);
  };
  refused(kInvalid, "out_scale", {});
  refused(kInvalid, "out_scale", view(result.scales, {3 * 8 * 2}));
  refused(kMismatch, "out_scale", result.scale.slice(0, 0, 2));
  refused(kMismatch, "out_scale", result.scale.slice(1, 0, 7));
  refused(kMismatch, "out_scale", result.scale.slice(2, 0, 1));
  Tensor other = result.scale;
  other.dtype = DType::i32;
  refused(kMismatch, "out_scale", other);
  other = result.scale;
  other.stride[0] = 0;
  refused(kInvalid, "out_scale", other);

  // Of a layer whose scale is given, and the reverse.
  LayerSpec given = layer.spec();
  given.output_scales = OutputScales::per_tensor;
  const Attention of_given(given);
  expect_refused([&] { of_given.forward(data.query.view(), data.cache(), plan, result.out, {}, {}, result.scale); },
                 kMismatch, "plan");
  const Plan plan_of_given = of_given.plan(data.batch());
  expect_refused(
      [&] { of_given.forward(data.query.view(), data.cache(), plan_of_given, result.out, {}, {}, result.scale); },
      kInvalid, "out_scale");
  EXPECT_EQ(result.codes, untouched);

  LayerSpec wide = layer.spec();
  wide.output_dtype = DType::bf16;
  expect_refused([&] { Attention{wide}; }, kInvalid, "output_scales");
}

TEST(fp8_output, a_gpu_refuses_rows_whose_groups_it_would_cut) {
  LayerSpec layer = with_group_scales(testing::layer_of(8, 2, 128), DType::f8e4m3);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  for (const int32_t head_dim_v : {16, 80, 128, 192, 256, 512}) {
    layer.head_dim_v = head_dim_v;
    EXPECT_TRUE(explain(layer, {DeviceKind::cuda, 0}).empty()) << head_dim_v;
  }
  layer.head_dim_v = 320;
  ASSERT_EQ(explain(layer, {DeviceKind::cuda, 0}).size(), 1U);
  EXPECT_NE(explain(layer, {DeviceKind::cuda, 0})[0].find("head_dim_v: got 320"), std::string::npos);
  EXPECT_TRUE(explain(layer).empty());
}

}  // namespace
}  // namespace qkv
