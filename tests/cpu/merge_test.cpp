// The merge kernel against the oracle's, over dtypes, strides and numbers of states.
#include <cmath>
#include <limits>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

void expect_merge_agrees(DType dtype, int64_t tokens, int64_t heads, int64_t dim, int32_t num_states, int64_t seed) {
  tools::Draw draw(19, seed);
  std::vector<tools::OwnedTensor> outs;
  std::vector<tools::OwnedTensor> lses;
  std::vector<State> states;
  std::vector<reference::StateValues> values;
  for (int32_t s = 0; s < num_states; ++s) {
    // States of their own strides: padded rows, LSE with the token axis outermost.
    outs.emplace_back(dtype, std::initializer_list<int64_t>{tokens, heads, dim},
                      std::initializer_list<int64_t>{heads * (dim + 3), dim + 3, 1}, tokens * heads * (dim + 3));
    lses.emplace_back(DType::f32, std::initializer_list<int64_t>{heads, tokens},
                      std::initializer_list<int64_t>{1, heads}, tokens * heads);
    reference::StateValues state{heads, std::vector<double>(tokens * heads * dim), std::vector<double>(heads * tokens)};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const bool empty = draw.one_in(3);
        const float lse = empty ? -std::numeric_limits<float>::infinity() : 3 * draw.normal();
        tools::store(lses.back().view(), {h, t}, lse);
        state.lse[h * tokens + t] = lse;
        for (int64_t d = 0; d < dim && !empty; ++d) {  // an empty state's row stays NaN
          tools::store(outs.back().view(), {t, h, d}, draw.normal());
          state.out[(t * heads + h) * dim + d] = tools::load(outs.back().view(), {t, h, d});
        }
      }
    }
    values.push_back(std::move(state));
  }
  for (int32_t s = 0; s < num_states; ++s) states.push_back({outs[s].view(), lses[s].view()});
  tools::OwnedTensor out(dtype, {tokens, heads, dim});
  tools::OwnedTensor lse(DType::f32, {heads, tokens});
  merge_states(states, out.view(), lse.view());
  const auto expected = reference::merge(values);
  const double relative = dtype == DType::f32 ? 1e-6 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const double want_lse = expected.lse[h * tokens + t];
      const double got_lse = tools::load(lse.view(), {h, t});
      if (std::isinf(want_lse)) {
        EXPECT_EQ(got_lse, want_lse);
      } else {
        EXPECT_NEAR(got_lse, want_lse, 1e-5);
      }
      for (int64_t d = 0; d < dim; ++d) {
        const double want = expected.out[(t * heads + h) * dim + d];
        EXPECT_NEAR(tools::load(out.view(), {t, h, d}), want, 1e-6 + relative * std::fabs(want));
      }
    }
  }
  EXPECT_TRUE(out.buffer().guards_intact());
  EXPECT_TRUE(lse.buffer().guards_intact());
}

TEST(merge, any_number_of_states_of_any_dtype) {
  int64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int32_t num_states : {1, 2, 3, 17, 97}) {
      for (const int64_t dim : {8, 48, 64, 65, 192, 512}) expect_merge_agrees(dtype, 5, 3, dim, num_states, ++seed);
    }
  }
  expect_merge_agrees(DType::f32, 0, 3, 64, 2, 1);
}

TEST(merge, the_output_may_be_one_of_the_states) {
  std::vector<float> a(64, 1.0F);
  std::vector<float> b(64, 3.0F);
  std::vector<float> lse(1, 0.0F);
  const Tensor view_a = testing::view(a, {1, 1, 64});
  const Tensor view_lse = testing::view(lse, {1, 1});
  merge_states({{view_a, view_lse}, {testing::view(b, {1, 1, 64}), view_lse}}, view_a, view_lse);
  EXPECT_EQ(a, std::vector<float>(64, 2.0F));
  EXPECT_NEAR(lse[0], std::log(2.0F), 1e-6);
}

TEST(merge, lse_conversion_keeps_strides) {
  std::vector<float> lse = {1, -1, 2, -1};
  lse_from_lse2(Tensor::strided(lse.data(), DType::f32, {2}, {2}));
  EXPECT_FLOAT_EQ(lse[0], std::log(2.0F));
  EXPECT_EQ(lse[1], -1.0F);
  EXPECT_FLOAT_EQ(lse[2], 2 * std::log(2.0F));
}

}  // namespace
}  // namespace qkv
