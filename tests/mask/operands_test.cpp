// The makers of mask operands: spans of new tokens and the numbering of token trees.
#include "scene_of.hpp"

namespace qkv::test {
namespace {

using Values = std::vector<int32_t>;

PrefixLmOperands fill(const std::vector<PrefixLmSpan>& spans, const Values& query_start_loc, const Values& seq_lens) {
  return fill_prefix_lm_spans(spans, view_of(query_start_loc), view_of(seq_lens));
}

TEST(PrefixLmSpans, bounds_are_absolute_and_unclipped) {
  const PrefixLmOperands operands = fill({{0, 4, 9}}, {0, 4}, {6});
  EXPECT_EQ(operands.span_start, (Values{-1, -1, 4, 4}));
  EXPECT_EQ(operands.span_end, (Values{-1, -1, 9, 9}));
}

TEST(PrefixLmSpans, a_span_that_began_in_the_context_is_kept) {
  const PrefixLmOperands operands = fill({{1, 1, 11}, {1, 13, 14}}, {0, 2, 6}, {2, 14});
  EXPECT_EQ(operands.span_start, (Values{-1, -1, 1, 1, -1, 13}));
  EXPECT_EQ(operands.span_end, (Values{-1, -1, 11, 11, -1, 14}));
}

TEST(PrefixLmSpans, spans_that_meet_no_new_token_do_nothing) {
  const PrefixLmOperands operands = fill({{0, 0, 3}, {0, 10, 12}, {1, 0, 3}}, {0, 2, 2}, {8, 8});
  EXPECT_EQ(operands.span_start, (Values{-1, -1}));
  EXPECT_EQ(operands.span_end, (Values{-1, -1}));
}

TEST(PrefixLmSpans, spans_of_one_token_do_nothing) {
  const PrefixLmOperands operands = fill({{0, 1, 1}, {0, 1, 1}, {0, 1, 2}}, {0, 3}, {3});
  EXPECT_EQ(operands.span_start, (Values{-1, 1, 1}));
}

TEST(PrefixLmSpans, overlap_is_refused_within_a_request_only) {
  expect_refused(
      [] {
        fill({{0, 5, 8}, {0, 1, 5}}, {0, 10}, {10});
      },
      "span: got [5, 8] of request 0; allowed: spans that do not overlap; [1, 5] of request 0 does");
  EXPECT_EQ(fill({{0, 1, 2}, {0, 3, 4}}, {0, 5}, {5}).span_start, (Values{-1, 1, 1, 3, 3}));
  EXPECT_EQ(fill({{0, 0, 1}, {1, 0, 1}}, {0, 2, 4}, {2, 2}).span_start, (Values{0, 0, 0, 0}));
}

TEST(PrefixLmSpans, bad_input_is_refused_by_name) {
  expect_refused([] { fill({{1, 0, 1}}, {0, 2}, {2}); }, "span request: got 1; allowed: 0 to num_requests - 1 = 0");
  expect_refused([] { fill({{-1, 0, 1}}, {0, 2}, {2}); }, "span request: got -1");
  expect_refused([] { fill({{0, 3, 1}}, {0, 2}, {2}); }, "span: got [3, 1] of request 0");
  expect_refused([] { fill({{0, -1, 1}}, {0, 2}, {2}); }, "span: got [-1, 1] of request 0");
  expect_refused([] { fill({}, {0, 2, 1}, {2, 2}); }, "query_start_loc[2]: got 1; allowed: at least 2");
  expect_refused([] { fill({}, {1, 2}, {2}); }, "query_start_loc[0]: got 1; allowed: 0");
  expect_refused([] { fill({}, {0, 2}, {2, 3}); }, "seq_lens");
  expect_refused([] { fill({}, {0, 2}, {-1}); }, "seq_lens[0]: got -1");
  expect_refused([] { fill_prefix_lm_spans({}, {}, {}); }, "query_start_loc");
}

TEST(PrefixLmSpans, index_arrays_may_have_strides) {
  const Values query_start_loc{0, 7, 3, 7};
  const Values seq_lens{3, 7};
  const PrefixLmOperands operands =
      fill_prefix_lm_spans({{0, 0, 1}}, Tensor::strided(query_start_loc.data(), DType::i32, {2}, {2}),
                           Tensor::strided(seq_lens.data(), DType::i32, {1}, {2}));
  EXPECT_EQ(operands.span_start, (Values{0, 0, -1}));
}

TEST(Tree, numbers_follow_a_depth_first_walk) {
  // Request 0: 0 -> (1 -> 3, 2). Request 1: two roots, the second with a child.
  const Values query_start_loc{0, 4, 4, 7};
  const TreeOperands operands = fill_tree({-1, 0, 0, 1, -1, -1, 1}, view_of(query_start_loc));
  EXPECT_EQ(operands.tree_enter, (Values{0, 1, 3, 2, 0, 1, 2}));
  EXPECT_EQ(operands.tree_leave, (Values{4, 3, 4, 3, 1, 3, 3}));
}

TEST(Tree, parents_come_before_their_children) {
  const Values query_start_loc{0, 2, 4};
  expect_refused(
      [&] {
        fill_tree({-1, 0, 0, 0}, view_of(query_start_loc));
      },
      "parents[2]: got 0; allowed: -1 (a root), or an earlier token of request 1");
  expect_refused([&] { fill_tree({-1, 1, -1, 0}, view_of(query_start_loc)); }, "parents[1]: got 1");
  expect_refused([&] { fill_tree({-2, 0, -1, 0}, view_of(query_start_loc)); }, "parents[0]: got -2");
  expect_refused(
      [&] {
        fill_tree({-1, 0, -1}, view_of(query_start_loc));
      },
      "parents: got 3 values; allowed: one a new token: 4");
}

TEST(Tree, a_long_chain_needs_no_recursion) {
  constexpr int32_t kLength = 200000;
  const Values query_start_loc{0, kLength};
  const TreeOperands operands = fill_tree(range(-1, kLength - 1), view_of(query_start_loc));
  EXPECT_EQ(operands.tree_enter, range(0, kLength));
  EXPECT_EQ(operands.tree_leave, Values(kLength, kLength));
}

}  // namespace
}  // namespace qkv::test
