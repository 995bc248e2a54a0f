// The oracle itself, held against numbers worked out by hand.
#include <cmath>
#include <limits>

#include "qkv/reference.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::layer_of;
using testing::view;

// Two queries over two keys, one head, head_dim 8 of which only the first element is used.
struct Tiny {
  std::vector<int32_t> starts = {0, 2};
  std::vector<int32_t> lengths = {2};
  std::vector<float> query = std::vector<float>(16, 0.0F);
  std::vector<float> key = std::vector<float>(16, 0.0F);
  std::vector<float> value = std::vector<float>(16, 0.0F);
  LayerSpec layer = layer_of(1, 1, 8);

  Tiny() {
    query[0] = 1;
    query[8] = 2;
    key[0] = 1;
    key[8] = 3;
    value[0] = 10;
    value[8] = 20;
    layer.scale = 1.0F;
  }

  reference::Result run() const {
    Batch batch;
    batch.query_start_loc = view(starts);
    batch.seq_lens = view(lengths);
    return reference::attention(layer, batch, view(query, {2, 1, 8}), view(key, {2, 1, 8}), view(value, {2, 1, 8}));
  }
};

TEST(oracle, causal_rows_by_hand) {
  const auto result = Tiny().run();
  EXPECT_EQ(result.out[0], 10.0);  // query 0 sees key 0 only
  EXPECT_EQ(result.lse[0], 1.0);
  const double e2 = std::exp(2.0);
  const double e6 = std::exp(6.0);
  EXPECT_NEAR(result.out[8], (10 * e2 + 20 * e6) / (e2 + e6), 1e-12);
  EXPECT_NEAR(result.lse[1], std::log(e2 + e6), 1e-12);
}

TEST(oracle, order_of_scale_softcap_and_bias) {
  Tiny tiny;
  tiny.layer.scale = 0.5F;
  tiny.layer.softcap = 2;
  tiny.layer.alibi_slopes = {0.25F};
  const auto result = tiny.run();
  const double s0 = 2 * std::tanh(0.5 * 2 * 1 / 2.0) - 0.25 * 1;
  const double s1 = 2 * std::tanh(0.5 * 2 * 3 / 2.0);
  EXPECT_NEAR(result.lse[1], std::log(std::exp(s0) + std::exp(s1)), 1e-12);
}

TEST(oracle, a_sink_joins_the_denominator_only) {
  Tiny tiny;
  tiny.layer.sinks = {1.0F};
  const auto result = tiny.run();
  EXPECT_NEAR(result.out[0], 5.0, 1e-12);  // the sink's logit equals key 0's
  EXPECT_NEAR(result.lse[0], 1.0 + std::log(2.0), 1e-12);
}

TEST(oracle, empty_rows_and_nan) {
  Tiny tiny;
  tiny.layer.mask = mask::nothing();
  auto result = tiny.run();
  EXPECT_EQ(result.out[0], 0.0);
  EXPECT_EQ(result.lse[0], -std::numeric_limits<double>::infinity());
  tiny.layer.sinks = {0.75F};
  EXPECT_EQ(tiny.run().lse[0], 0.75);
  tiny.layer = Tiny().layer;
  tiny.key[8] = NAN;
  result = tiny.run();
  EXPECT_EQ(result.out[0], 10.0);  // does not see the NaN
  EXPECT_TRUE(std::isnan(result.out[8]));
  EXPECT_TRUE(std::isnan(result.lse[1]));
}

TEST(oracle, merging_halves_gives_the_whole) {
  reference::StateValues a{1, {1, 2}, {std::log(3.0)}};
  reference::StateValues b{1, {5, 6}, {std::log(1.0)}};
  const reference::StateValues empty{1, {NAN, NAN}, {-std::numeric_limits<double>::infinity()}};
  const auto merged = reference::merge({a, empty, b});
  EXPECT_NEAR(merged.out[0], 2.0, 1e-12);
  EXPECT_NEAR(merged.out[1], 3.0, 1e-12);
  EXPECT_NEAR(merged.lse[0], std::log(4.0), 1e-12);
  EXPECT_EQ(reference::merge({empty}).out[0], 0.0);
  EXPECT_TRUE(std::isnan(reference::merge({{1, {0, 0}, {INFINITY}}}).lse[0]));
}

}  // namespace
}  // namespace qkv
