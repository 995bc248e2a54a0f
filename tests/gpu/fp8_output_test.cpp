// Outputs of 8-bit floats on a GPU, of a given scale and of chosen ones, through every kernel that stores rows. Skipped
// where there is no GPU.
#include <cmath>

#include "core/float8.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::view;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_fp8_output : public ::testing::TestWithParam<OutputScales> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }

  // Of 16-bit queries, keys and values.
  static tools::Case of(int32_t head_dim, int32_t head_dim_v, std::vector<int32_t> q, std::vector<int32_t> kv,
                        bool cache = true) {
    auto c = case_of(8, 2, head_dim, std::move(q), std::move(kv), cache);
    c.layer.head_dim_v = head_dim_v;
    c.layer.query_dtype = c.layer.kv_dtype = DType::bf16;
    c.layer.output_dtype = DType::f8e4m3;
    c.layer.output_scales = GetParam();
    c.extra_rows = 2;
    return c;
  }

  static void expect_agrees_on_gpu(const tools::Case& c) {
    EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c);
  }
};

INSTANTIATE_TEST_SUITE_P(scales, gpu_fp8_output,
                         ::testing::Values(OutputScales::per_tensor, OutputScales::per_token_group),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// Many rows, few rows, rows that see nothing; head sizes with one group, with two, with a smaller last one.
TEST_P(gpu_fp8_output, head_sizes) {
  for (const auto& [head_dim, head_dim_v] :
       {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {96, 96}, {80, 48}, {128, 192}, {64, 144}, {512, 512}}) {
    expect_agrees_on_gpu(of(head_dim, head_dim_v, {150, 1, 3, 0, 40, 2}, {150, 33, 200, 7, 300, 0}));
  }
}

// States that join in clusters, by tickets, and in a launch of their own.
TEST_P(gpu_fp8_output, splits) {
  for (const int32_t head_dim : {16, 64, 128, 256}) {
    auto c = of(head_dim, head_dim, {1, 2, 1, 20, 1}, {5000, 700, 40'000, 9000, 60});
    expect_agrees_on_gpu(c);
    c.layer.sinks.assign(8, 0.5F);
    c.layer.mask = mask::window(4000, 0);
    expect_agrees_on_gpu(c);
  }
}

TEST_P(gpu_fp8_output, dense_keys_masks_and_score_terms) {
  for (const Mask& mask : {mask::everything(), mask::document() & mask::causal(), mask::prefix_lm(7)}) {
    auto c = of(128, 128, {129, 64, 80, 0, 33}, {64, 300, 500, 7, 33}, false);
    c.layer.output_dtype = DType::f8e5m2;
    c.layer.mask = mask;
    c.layer.softcap = 20;
    c.layer.alibi_slopes.assign(8, 0.05F);
    expect_agrees_on_gpu(c);
  }
}

TEST_P(gpu_fp8_output, caches_and_queries_of_8_bits) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const KvScales scales : {KvScales::per_head, KvScales::per_token_head}) {
      auto c = of(head_dim, head_dim, {150, 1, 3, 40}, {150, 5000, 200, 300});
      c.layer.kv_dtype = DType::f8e4m3;
      c.layer.kv_scales = scales;
      expect_agrees_on_gpu(c);
      c.layer.query_dtype = DType::f8e4m3;
      expect_agrees_on_gpu(c);
    }
  }
}

TEST_P(gpu_fp8_output, prefixes_that_requests_share) {
  auto c = of(128, 128, {1, 1, 1, 1}, {900, 950, 1000, 800});
  c.prefix_groups = {{{0, 1, 2, 3}, 784}};
  c.with_prefix_groups = true;
  c.prefix_sharing = PrefixSharing::always;
  expect_agrees_on_gpu(c);
}

// A hidden value that is NaN makes the prefill kernels compute rows again: these choose their scales again as well.
TEST_P(gpu_fp8_output, rows_that_are_computed_again) {
  for (const int32_t head_dim : {64, 128, 256}) {
    const auto c = of(head_dim, head_dim, {140}, {140}, false);
    tools::CaseData data(c);
    tools::store(data.value.view(), {100, 1, 3}, NAN);
    const reference::Result expected =
        reference::attention(c.layer, data.batch(), data.query.view(), data.key.view(), data.value.view());
    const Attention attention(c.layer, kGpu);
    const Plan plan = attention.plan(data.batch());
    tools::OwnedTensor out(DType::f8e4m3, {140, 8, head_dim});
    tools::OwnedTensor scale = data.output_scale(140, 8);
    const tools::Placed query(data.query, kGpu), key(data.key, kGpu), value(data.value, kGpu), placed(out, kGpu),
        placed_scale(scale, kGpu);
    attention.forward(query.view(), key.view(), value.view(), plan, placed.view(), {}, {}, placed_scale.view());
    placed.fetch();
    placed_scale.fetch();
    EXPECT_EQ(tools::difference(c, kGpu, out.view(), {}, expected, scale.view()), "") << head_dim;
  }
}

// The bits of the CPU: sums in the same order, one division, one rounding.
TEST_P(gpu_fp8_output, merged_states) {
  for (const int64_t dim : {32, 128, 192, 528}) {
    tools::OwnedTensor first(DType::f32, {7, 3, dim}), second(DType::bf16, {7, 3, dim});
    tools::OwnedTensor first_lse(DType::f32, {3, 7}), second_lse(DType::f32, {3, 7});
    tools::Draw draw(5, dim);
    for (int64_t t = 0; t < 7; ++t) {
      for (int64_t h = 0; h < 3; ++h) {
        tools::store(first_lse.view(), {h, t}, t == 2 ? -INFINITY : draw.normal());
        tools::store(second_lse.view(), {h, t}, t == 2 || t == 4 ? -INFINITY : draw.normal());
        for (int64_t d = 0; d < dim; ++d) {
          tools::store(first.view(), {t, h, d}, draw.normal());
          tools::store(second.view(), {t, h, d}, draw.normal());
        }
      }
    }
    const bool chosen = GetParam() == OutputScales::per_token_group;
    const auto scales = [&] {
      tools::OwnedTensor scale =
          chosen ? tools::OwnedTensor(DType::f32, {7, 3, (dim + 127) / 128}) : tools::OwnedTensor(DType::f32, {1});
      if (!chosen) tools::store(scale.view(), {0}, 0.013F);
      return scale;
    };
    tools::OwnedTensor exact(DType::f32, {7, 3, dim}), out(DType::f8e4m3, {7, 3, dim});
    tools::OwnedTensor scale = scales();
    const tools::Placed a(first, kGpu), b(second, kGpu), a_lse(first_lse, kGpu), b_lse(second_lse, kGpu),
        placed_exact(exact, kGpu), placed(out, kGpu), placed_scale(scale, kGpu);
    const std::vector<State> states = {{a.view(), a_lse.view()}, {b.view(), b_lse.view()}};
    merge_states(states, placed_exact.view());
    merge_states(states, placed.view(), {}, {}, placed_scale.view());
    placed_exact.fetch();
    placed.fetch();
    placed_scale.fetch();
    const auto* codes = static_cast<const uint8_t*>(out.view().data);
    for (int64_t i = 0; i < 7 * 3 * dim; ++i) {
      const int64_t t = i / dim / 3, h = i / dim % 3, d = i % dim;
      const auto divisor = static_cast<float>(tools::scale_at(scale.view(), t, h, d));
      const float result = tools::load(exact.view(), {t, h, d});
      ASSERT_EQ(codes[i], float8_from_f32(DType::f8e4m3, result / divisor)) << i;
      if (!chosen || d % 128 != 0) continue;
      float largest = 0;
      for (int64_t e = d; e < std::min(d + 128, dim); ++e) {
        largest = std::max(largest, std::fabs(tools::load(exact.view(), {t, h, e})));
      }
      ASSERT_EQ(divisor, largest == 0 ? 1 : largest / 448) << t << ", " << h;
    }
  }
}

}  // namespace
}  // namespace qkv
