// Each built-in mask against a predicate written by hand, and the casebook's rows about masks.
#include <array>
#include <random>

#include "scene_of.hpp"

namespace qkv::test {
namespace {

constexpr int64_t kHuge = (int64_t{1} << 31) - 1;

TEST(Builtins, causal_is_bottom_right_aligned) {
  for (const auto& [q_len, kv_len] : {std::pair{7, 7}, {3, 11}, {1, 9}, {9, 4}}) {
    expect_visible(mask::causal(), scene_of(q_len, kv_len), [](int q, int k) { return k <= q; });
  }
}

TEST(Builtins, everything_and_nothing) {
  expect_visible(mask::everything(), scene_of(5, 9), [](int, int) { return true; });
  expect_visible(Mask(), scene_of(5, 9), [](int, int) { return true; });
  expect_visible(mask::nothing(), scene_of(5, 9), [](int, int) { return false; });
}

TEST(Builtins, window_counts_keys_besides_the_own_one) {
  for (int32_t left = -1; left < 6; ++left) {
    for (int32_t right = -1; right < 6; ++right) {
      expect_visible(mask::window(left, right), scene_of(9, 13),
                     [&](int q, int k) { return (left < 0 || q - k <= left) && (right < 0 || k - q <= right); });
    }
  }
}

TEST(Builtins, window_zero_sees_own_token) {
  expect_visible(mask::window(0, 0), scene_of(8, 8), [](int q, int k) { return q == k; });
}

TEST(Builtins, sliding_window_counts_the_own_token) {
  for (int32_t tokens = 1; tokens < 6; ++tokens) {
    const MaskScene scene = scene_of(9, 12);
    expect_visible(mask::sliding_window(tokens), scene, [&](int q, int k) { return k <= q && k > q - tokens; });
    expect_visible(mask::sliding_window(tokens, true), scene, [&](int q, int k) { return std::abs(q - k) < tokens; });
  }
}

TEST(Builtins, rswa_sees_prefix_and_window) {
  for (int32_t prefix = 0; prefix < 15; prefix += 3) {
    for (int32_t window = 0; window < 6; ++window) {
      const std::vector<int32_t> prefix_len{prefix};
      expect_visible(mask::rswa(window), scene_of(9, 12, {{"prefix_len", view_of(prefix_len)}}),
                     [&](int q, int k) { return k <= q && (k < prefix || q - k < window); });
    }
  }
}

TEST(Builtins, rswa_window_zero_leaves_the_prefix_only) {
  const std::vector<int32_t> prefix_len{3};
  const MaskScene scene = scene_of(1, 10, {{"prefix_len", view_of(prefix_len)}});
  EXPECT_EQ(visible_keys(mask::rswa(0), scene, 0), range(0, 3));
}

TEST(Builtins, rswa_with_a_prefix_longer_than_the_keys_is_causal) {
  const std::vector<int32_t> prefix_len{99};
  expect_visible(mask::rswa(2), scene_of(6, 9, {{"prefix_len", view_of(prefix_len)}}),
                 [](int q, int k) { return k <= q; });
}

// Spans [3, 6] and [9, 12]; the last reaches past the keys.
struct SpanScene {
  std::vector<int32_t> query_start_loc{0, 9};
  std::vector<int32_t> seq_lens{11};
  PrefixLmOperands operands =
      fill_prefix_lm_spans({{0, 3, 6}, {0, 9, 12}}, view_of(query_start_loc), view_of(seq_lens));
  MaskScene scene =
      scene_of(9, 11, {{"span_start", view_of(operands.span_start)}, {"span_end", view_of(operands.span_end)}});

  static bool same_span(int q, int k) { return (q >= 3 && q <= 6 && k >= 3 && k <= 6) || (q >= 9 && k >= 9); }
};

TEST(Builtins, prefix_lm_is_causal_or_same_span) {
  const SpanScene spans;
  expect_visible(mask::prefix_lm(), spans.scene, [](int q, int k) { return k <= q || SpanScene::same_span(q, k); });
}

TEST(Builtins, prefix_lm_keeps_the_span_behind_the_window) {
  const SpanScene spans;
  for (int32_t left = 0; left < 5; ++left) {
    expect_visible(mask::prefix_lm(left), spans.scene,
                   [&](int q, int k) { return (k <= q && q - k <= left) || SpanScene::same_span(q, k); });
  }
}

TEST(Builtins, prefix_lm_clamp_cuts_one_side_only) {
  const SpanScene spans;
  for (int32_t left = 0; left < 5; ++left) {
    expect_visible(mask::prefix_lm(left, true), spans.scene,
                   [&](int q, int k) { return (k <= q || SpanScene::same_span(q, k)) && q - k <= left; });
  }
}

TEST(Builtins, prefix_lm_clamp_needs_a_window) {
  expect_refused([] { mask::prefix_lm(-1, true); }, "clamp: got true without a window");
}

TEST(Builtins, document_sees_its_own_document) {
  const std::vector<int32_t> documents{0, 0, 0, 1, 1, 5, 5, 5, 5};
  const MaskScene scene =
      scene_of(9, 9, {{"query_document", view_of(documents)}, {"key_document", view_of(documents)}});
  expect_visible(mask::document(), scene, [&](int q, int k) { return documents[q] == documents[k]; });
  expect_visible(mask::document() & mask::causal(), scene,
                 [&](int q, int k) { return documents[q] == documents[k] && k <= q; });
}

TEST(Builtins, tree_sees_context_and_ancestors) {
  std::mt19937 generator(7);
  for (int32_t repeat = 0; repeat < 50; ++repeat) {
    const int32_t q_len = static_cast<int32_t>(generator() % 12) + 1;
    const int32_t context = static_cast<int32_t>(generator() % 6);
    const std::vector<int32_t> query_start_loc{0, q_len};
    std::vector<int32_t> parents;
    for (int32_t t = 0; t < q_len; ++t) parents.push_back(static_cast<int32_t>(generator() % (t + 1)) - 1);
    const TreeOperands operands = fill_tree(parents, view_of(query_start_loc));
    const auto is_ancestor = [&](int32_t of, int32_t candidate) {
      while (of != candidate && of >= 0) of = parents[of];
      return of == candidate;
    };
    const MaskScene scene =
        scene_of(q_len, q_len + context,
                 {{"tree_enter", view_of(operands.tree_enter)}, {"tree_leave", view_of(operands.tree_leave)}});
    expect_visible(mask::tree(), scene,
                   [&](int q, int k) { return k < context || is_ancestor(q - context, k - context); });
  }
}

TEST(Builtins, a_chain_as_tree_is_causal) {
  const std::vector<int32_t> query_start_loc{0, 6};
  const TreeOperands operands = fill_tree({-1, 0, 1, 2, 3, 4}, view_of(query_start_loc));
  const MaskScene scene =
      scene_of(6, 10, {{"tree_enter", view_of(operands.tree_enter)}, {"tree_leave", view_of(operands.tree_leave)}});
  expect_visible(mask::tree(), scene, [](int q, int k) { return k <= q; });
}

TEST(Builtins, windows_below_minus_one_are_refused_by_name) {
  expect_refused([] { mask::window(-2, 0); }, "window_left: got -2");
  expect_refused([] { mask::window(0, -3); }, "window_right: got -3");
  expect_refused([] { mask::prefix_lm(-2); }, "window_left: got -2");
  expect_refused([] { mask::sliding_window(0); }, "num_tokens: got 0");
  expect_refused([] { mask::sliding_window(-1); }, "num_tokens: got -1");
  expect_refused([] { mask::rswa(-1); }, "window_tokens: got -1");
}

TEST(Casebook, casebook_001_a_window_of_n_tokens_holds_n_tokens) {
  const MaskScene scene = scene_of(12, 12);
  for (int32_t i = 0; i < 12; ++i) {
    EXPECT_EQ(visible_keys(mask::causal() & mask::sliding_window(4), scene, i), range(std::max(0, i - 3), i + 1));
    EXPECT_EQ(visible_keys(mask::causal() & mask::window(3, 0), scene, i), range(std::max(0, i - 3), i + 1));
  }
}

TEST(Casebook, casebook_004_two_sided_window_with_more_queries_than_keys) {
  const MaskScene scene = scene_of(129, 64);
  expect_visible(mask::window(32, 64), scene, [](int q, int k) { return q - 32 <= k && k <= q + 64; });
  // q_pos = i - 65: row 0 sees up to key -1, the first key comes into the window with row 1.
  EXPECT_TRUE(visible_keys(mask::window(32, 64), scene, 0).empty());
  EXPECT_EQ(visible_keys(mask::window(32, 64), scene, 1), range(0, 1));
}

TEST(Casebook, casebook_005_causal_with_more_queries_than_keys) {
  const MaskScene scene = scene_of(8, 5);
  for (int32_t i = 0; i < 8; ++i) EXPECT_EQ(visible_keys(mask::causal(), scene, i), range(0, std::max(0, i - 2)));
}

TEST(Casebook, casebook_007_bidirectional_window_stays_a_window) {
  for (const int32_t length : {7, 32, 33}) {
    expect_visible(mask::window(4, 4), scene_of(length, length), [](int q, int k) { return std::abs(q - k) <= 4; });
    expect_visible(mask::sliding_window(5, true), scene_of(length, length),
                   [](int q, int k) { return std::abs(q - k) <= 4; });
  }
}

TEST(Casebook, casebook_010_prefix_lm_keeps_the_window_for_text) {
  const std::vector<int32_t> query_start_loc{0, 64};
  const std::vector<int32_t> seq_lens{64};
  const PrefixLmOperands operands = fill_prefix_lm_spans({{0, 10, 29}}, view_of(query_start_loc), view_of(seq_lens));
  const MaskScene scene =
      scene_of(64, 64, {{"span_start", view_of(operands.span_start)}, {"span_end", view_of(operands.span_end)}});
  const Mask mask = mask::prefix_lm(7);
  EXPECT_EQ(visible_keys(mask, scene, 60), range(53, 61));
  EXPECT_EQ(visible_keys(mask, scene, 12), range(5, 30));
  const auto in_span = [](int position) { return position >= 10 && position < 30; };
  expect_visible(mask, scene, [&](int q, int k) { return (k <= q && q - k < 8) || (in_span(q) && in_span(k)); });
}

TEST(Casebook, casebook_013_spans_do_not_widen_a_layer_that_ignores_them) {
  const std::vector<int32_t> query_start_loc{0, 4096};
  const std::vector<int32_t> seq_lens{4096};
  const PrefixLmOperands operands =
      fill_prefix_lm_spans({{0, 1900, 3947}}, view_of(query_start_loc), view_of(seq_lens));
  const MaskScene scene =
      scene_of(4096, 4096, {{"span_start", view_of(operands.span_start)}, {"span_end", view_of(operands.span_end)}});
  EXPECT_EQ(visible_keys(mask::causal() & mask::sliding_window(128), scene, 1900), range(1773, 1901));
}

TEST(Casebook, casebook_014_each_request_has_its_own_prefix) {
  const std::vector<int32_t> prefix_len{5, 9};
  const std::vector<MaskOperand> operands{{"prefix_len", view_of(prefix_len)}};
  const auto expected_keys = [](int32_t prefix, int32_t position) {
    std::vector<int32_t> keys = range(0, std::min(prefix, position + 1));
    for (const int32_t key : range(std::max(prefix, position - 3), position + 1)) keys.push_back(key);
    return keys;
  };
  for (int32_t request = 0; request < 2; ++request) {
    MaskScene decode = scene_of(1, 21, operands);
    decode.request = request;
    EXPECT_EQ(visible_keys(mask::rswa(4), decode, 0), expected_keys(prefix_len[request], 20));
    for (int32_t end = 3; end <= 21; end += 3) {
      MaskScene chunk = scene_of(3, end, operands);
      chunk.request = request;
      for (int32_t i = 0; i < 3; ++i) {
        EXPECT_EQ(visible_keys(mask::rswa(4), chunk, i), expected_keys(prefix_len[request], end - 3 + i));
      }
    }
  }
}

TEST(Casebook, casebook_015_each_request_follows_its_own_causal_flag) {
  const std::vector<int32_t> causal{1, 0, 1};
  constexpr std::array<int32_t, 3> kQueries = {4, 8, 1};
  constexpr std::array<int32_t, 3> kKeys = {10, 8, 33};
  for (int32_t request = 0; request < 3; ++request) {
    MaskScene scene = scene_of(kQueries[request], kKeys[request], {{"causal", view_of(causal)}});
    scene.request = request;
    const bool is_causal = causal[request] != 0;
    expect_visible(mask::per_request_causal(), scene, [&](int q, int k) { return !is_causal || k <= q; });
    expect_visible(mask::per_request_causal() & mask::window(4, 4), scene,
                   [&](int q, int k) { return (!is_causal || k <= q) && std::abs(q - k) <= 4; });
  }
}

TEST(Casebook, casebook_018_one_meaning_of_no_window) {
  const MaskScene scene = scene_of(20, 20);
  for (const int64_t open : {int64_t{-1}, kHuge, kHuge + 1, INT64_MAX}) {
    EXPECT_EQ(mask::window(open, open).text(), "true");
    EXPECT_EQ(mask::window(open, 0).text(), mask::window(-1, 0).text());
    EXPECT_EQ(mask::prefix_lm(open).text(), mask::prefix_lm().text());
  }
  expect_visible(mask::sliding_window(INT64_MAX), scene, [](int q, int k) { return k <= q; });
  expect_visible(mask::sliding_window(INT64_MAX, true), scene, [](int, int) { return true; });
  expect_visible(mask::causal() & mask::window(kHuge, kHuge), scene, [](int q, int k) { return k <= q; });
  expect_visible(mask::causal() & mask::window(kHuge - 1, 0), scene, [](int q, int k) { return k <= q; });
  expect_visible(mask::window(0, 0), scene, [](int q, int k) { return k == q; });
  expect_visible(mask::causal() & mask::window(1, -1), scene, [](int q, int k) { return k <= q && q - k <= 1; });
  const std::vector<int32_t> prefix_len{3};
  expect_visible(mask::rswa(INT64_MAX), scene_of(20, 20, {{"prefix_len", view_of(prefix_len)}}),
                 [](int q, int k) { return k <= q; });
  for (const int64_t refused : {int64_t{-2}, -kHuge, INT64_MIN}) {
    expect_refused([&] { mask::window(refused, 0); }, "window_left: got " + std::to_string(refused));
  }
}

}  // namespace
}  // namespace qkv::test
