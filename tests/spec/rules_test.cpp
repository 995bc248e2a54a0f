#include "spec/rules.hpp"

#include <gtest/gtest.h>

#include <cmath>
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

TEST(rules, defaults_of_scale_and_mask) {
  LayerSpec layer = plain();
  EXPECT_FLOAT_EQ(layer.effective_scale(), 0.125F);
  EXPECT_EQ(layer.effective_mask().text(), mask::causal().text());
  layer.type = AttentionType::encoder_decoder;
  EXPECT_EQ(layer.effective_mask().text(), mask::everything().text());
  layer.mask = mask::window(3, 0);
  EXPECT_EQ(layer.effective_mask().text(), mask::window(3, 0).text());
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
    const bool fp8 = line.find("fp8 cache") != std::string::npos;
    const bool row = line.size() > 25 && line.find("  Y") != std::string::npos;
    if (fp8) {
      EXPECT_EQ(line.find("  Y"), std::string::npos) << "fp8 is not supported yet: " << line;
    }
    if (row && line.find("  R") != std::string::npos) ++refused_rows;
  }
  EXPECT_GE(refused_rows, 1);
  EXPECT_NE(matrix.find("kv_dtype: got f8e4m3"), std::string::npos) << matrix;
  EXPECT_NE(support_matrix(DeviceKind::cuda).find("device: got cuda:0"), std::string::npos);
}

}  // namespace
}  // namespace qkv
