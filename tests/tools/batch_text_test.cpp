// The short form of batches that qkv plan reads.
#include "batch_text.hpp"

#include "support/small_layer.hpp"

namespace qkv::tools {
namespace {

TEST(batch_text, runs_counts_and_k) {
  const BatchText batch = parse_batch("q513s60513_3q1s4k");
  EXPECT_EQ(batch.query_lens, (std::vector<int32_t>{513, 1, 1, 1}));
  EXPECT_EQ(batch.seq_lens, (std::vector<int32_t>{60513, 4096, 4096, 4096}));
  EXPECT_TRUE(batch.prefix_groups.empty());
}

TEST(batch_text, requests_of_a_run_share_a_prefix) {
  const BatchText batch = parse_batch("q1s100_3q1s4kp2k");
  ASSERT_EQ(batch.prefix_groups.size(), 1U);
  EXPECT_EQ(batch.prefix_groups[0].requests, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(batch.prefix_groups[0].num_tokens, 2048);
  EXPECT_EQ(parse_prefix_group("4-6:1k").requests, (std::vector<int32_t>{4, 5, 6}));
}

TEST(batch_text, what_cannot_be_read_is_refused_with_its_place) {
  for (const char* text : {"", "q1", "q1s", "s5q1", "q1s5_", "q1s5x", "-1q1s5", "q1s99999999999", "q1s4kk", "0q1s5"}) {
    testing::expect_refused([&] { parse_batch(text); }, ErrorCode::invalid_argument, "batch");
  }
  for (const char* text : {"", "3", "3-1:5", "1-2:", "1-2:5x"}) {
    testing::expect_refused([&] { parse_prefix_group(text); }, ErrorCode::invalid_argument, "--shared");
  }
}

TEST(batch_text, its_groups_have_their_pages_in_common_and_nothing_else) {
  const SyntheticBatch owner(parse_batch("4q1s1000p512"), 16);
  const PlanReport report =
      preview_plan(testing::with(testing::case_of(4, 1, 64, {}, {}),
                                 [](LayerSpec& layer) { layer.query_dtype = layer.kv_dtype = DType::bf16; })
                       .layer,
                   owner.batch(), "h200");
  ASSERT_EQ(report.prefix_groups.size(), 1U);
  EXPECT_EQ(report.prefix_groups[0].num_tokens, 512);
  EXPECT_EQ(report.num_workers, 132);
  EXPECT_EQ(report.seq_lens, (std::vector<int32_t>(4, 1000)));
}

}  // namespace
}  // namespace qkv::tools
