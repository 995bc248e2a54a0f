#include "spec/rules.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <sstream>

namespace qkv {
namespace {

LayerSpec plain() {
  LayerSpec layer;
  layer.num_q_heads = 8;
  layer.num_kv_heads = 2;
  layer.head_dim = 64;
  return layer;
}

TEST(rules, all_reasons_are_given_at_once) {
  LayerSpec layer = plain();
  layer.head_dim = 1000;
  layer.softcap = -2;
  layer.scale = NAN;
  const auto reasons = explain(layer);
  ASSERT_EQ(reasons.size(), 3U);
  EXPECT_EQ(reasons[0], "head_dim: got 1000; allowed: 8 to 512");
}

TEST(rules, numbers_that_products_would_make_infinite_are_refused) {
  const auto reason = [](const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = plain();
    change(layer);
    const auto reasons = explain(layer);
    return reasons.empty() ? std::string() : reasons.front();
  };
  EXPECT_EQ(reason([](LayerSpec& l) { l.softcap = 1e-20F; }), "");
  EXPECT_EQ(reason([](LayerSpec& l) { l.softcap = 1e-39F; }).substr(0, 12), "softcap: got");
  const auto set_slopes = [](float slope) {
    return [slope](LayerSpec& l) { l.alibi_slopes.assign(static_cast<size_t>(l.num_q_heads), slope); };
  };
  EXPECT_EQ(reason(set_slopes(-1e28F)), "");
  EXPECT_EQ(reason(set_slopes(3e38F)), "alibi_slopes[0]: got 3e+38; allowed: from -1e28 to 1e28");
  EXPECT_EQ(reason([](LayerSpec& l) { l.num_q_heads = l.num_kv_heads = 1 << 17; }),
            "num_q_heads: got 131072; allowed: 1 to 65536");
}

TEST(rules, defaults_of_scale_and_mask) {
  LayerSpec layer = plain();
  EXPECT_FLOAT_EQ(layer.effective_scale(), 0.125F);
  EXPECT_EQ(layer.effective_mask().text(), mask::causal().text());
  layer.type = AttentionType::encoder_decoder;
  EXPECT_EQ(layer.effective_mask().text(), mask::everything().text());
  layer.mask = mask::window(3, 0);
  EXPECT_EQ(layer.effective_mask().text(), mask::window(3, 0).text());
}

TEST(rules, what_a_gpu_cannot_do_is_said_without_one) {
  LayerSpec layer = plain();
  const Device gpu{DeviceKind::cuda, 0};
  EXPECT_EQ(explain(layer, gpu),
            (std::vector<std::string>{
                "query_dtype: got f32; allowed: bf16, f16 or, with keys and values of f8e4m3, f8e4m3 on a GPU"}));
  layer.query_dtype = DType::f8e4m3;
  EXPECT_EQ(explain(layer, gpu)[0],
            "query_dtype: got f8e4m3; allowed: bf16, f16 or, with keys and values of f8e4m3, f8e4m3 on a GPU");
  layer.cache = CacheSpec{16};
  layer.kv_scales = KvScales::per_head;
  layer.kv_dtype = DType::f8e5m2;
  EXPECT_EQ(explain(layer, gpu).size(), 1U);
  layer.kv_dtype = DType::f8e4m3;
  EXPECT_TRUE(explain(layer, gpu).empty());
  layer.query_dtype = DType::bf16;
  layer.kv_dtype = DType::i8;
  EXPECT_TRUE(explain(layer, gpu).empty());
  layer.cache.reset();
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.kv_scales = KvScales::none;
  EXPECT_TRUE(explain(layer, gpu).empty());
  layer.kv_dtype = DType::f16;
  layer.head_dim_v = 20;
  Mask mask = mask::causal();
  for (int32_t i = 0; i < 9; ++i) {
    mask = mask & (mask::kv_pos() <= mask::operand("limit_" + std::to_string(i), OperandScope::request));
  }
  layer.mask = mask;
  EXPECT_EQ(explain(layer, gpu),
            (std::vector<std::string>{"kv_dtype: got f16; allowed: query_dtype = bf16, f8e4m3, f8e5m2 or i8 on a GPU",
                                      "head_dim_v: got 20; allowed: a multiple of 8 on a GPU",
                                      "mask: got 9 operands; allowed: at most 8 operands on a GPU"}));
  EXPECT_EQ(explain(plain(), {DeviceKind::cpu, 1}).size(), 1U);
}

TEST(rules, shards_and_runs_that_cannot_be_are_named) {
  const auto reasons = [](const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = plain();
    layer.cache = CacheSpec{16};
    change(layer);
    return explain(layer);
  };
  const auto shard = [&](Shard shard) { return reasons([&](LayerSpec& layer) { layer.shard = shard; }); };
  using Reasons = std::vector<std::string>;
  EXPECT_EQ(shard({7, 8, 4}), Reasons{});
  EXPECT_EQ(shard({0, 0, 1}), Reasons{"shard.num_ranks: got 0; allowed: at least 1"});
  EXPECT_EQ(shard({2, 2, 1}), Reasons{"shard.rank: got 2; allowed: 0 to 1, below shard.num_ranks"});
  EXPECT_EQ(shard({-1, 2, 1}), Reasons{"shard.rank: got -1; allowed: 0 to 1, below shard.num_ranks"});
  EXPECT_EQ(shard({0, 2, 3}), Reasons{"shard.interleave_size: got 3; allowed: a divisor of cache.page_size = 16"});
  EXPECT_EQ(shard({0, 2, 0}), Reasons{"shard.interleave_size: got 0; allowed: 1 to 8388608: a round of all ranks has "
                                      "at most 16777216 tokens"});
  EXPECT_EQ(reasons([](LayerSpec& layer) {
              layer.cache.reset();
              layer.shard = {0, 2, 3};
            }),
            Reasons{});
  EXPECT_EQ(reasons([](LayerSpec& layer) { layer.key_run = KeyRun::context; }), Reasons{});
  EXPECT_EQ(
      reasons([](LayerSpec& layer) { layer.key_run = KeyRun::new_tokens; }),
      Reasons{"cache: got pages of 16 tokens; allowed: no cache with key_run new_tokens: the new tokens' keys and "
              "values are dense tensors"});
  EXPECT_EQ(reasons([](LayerSpec& layer) {
              layer.cache.reset();
              layer.key_run = KeyRun::new_tokens;
              layer.shard.num_ranks = 2;
            }),
            Reasons{"shard.num_ranks: got 2; allowed: 1 with key_run new_tokens: every rank has the new tokens"});
  EXPECT_EQ(reasons([](LayerSpec& layer) {
              layer.type = AttentionType::encoder_decoder;
              layer.key_run = KeyRun::context;
            }),
            Reasons{"key_run: got context; allowed: all with type encoder_decoder: only a decoder's keys end with its "
                    "new tokens"});
}

TEST(rules, every_head_size_from_8_to_512) {
  LayerSpec layer = plain();
  for (int32_t dim = 8; dim <= 512; ++dim) {
    layer.head_dim = dim;
    layer.head_dim_v = 520 - dim;
    EXPECT_TRUE(explain(layer).empty()) << dim;
  }
}

// The table is the rules: a cell is R exactly where creating the layer would fail.
TEST(rules, the_matrix_shows_refusals_with_their_reasons) {
  const std::string matrix = support_matrix();
  EXPECT_NE(matrix.find("sinks"), std::string::npos);
  std::istringstream lines(matrix);
  std::string line;
  int32_t refused_rows = 0;
  while (std::getline(lines, line)) {
    const bool row = line.size() > 25 && line.find("  Y") != std::string::npos;
    if (row && line.find("  R") != std::string::npos) ++refused_rows;
  }
  EXPECT_GE(refused_rows, 1);
  EXPECT_NE(matrix.find("cache: got pages of 16 tokens; allowed: no cache for type encoder"), std::string::npos)
      << matrix;
}

TEST(rules, features_of_a_gpu_bring_along_the_dtypes_that_they_need) {
  const std::string matrix = support_matrix(DeviceKind::cuda);
  std::istringstream lines(matrix);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("f16 cache") == 3) EXPECT_EQ(line.find('R'), std::string::npos) << line;
    if (line.find("softcap") == 3) EXPECT_EQ(line.find('R'), std::string::npos) << line;
  }
  EXPECT_NE(matrix.find("query_dtype: got f8e4m3; allowed: bf16, f16 or, with keys and values of f8e4m3"),
            std::string::npos);
  EXPECT_NE(matrix.find("head_dim: got 72; allowed: a multiple of 16 with 8-bit elements on a GPU"), std::string::npos);
}

}  // namespace
}  // namespace qkv
