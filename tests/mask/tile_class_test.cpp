// Skipping is effective: what a planner reads of the built-in masks is as short as the mask allows.

#include "scene_of.hpp"

namespace qkv::test {
namespace {

using mask::KeySegment;

constexpr int32_t kTileKv = 128;

std::vector<KeySegment> segments_of(const Mask& mask, const MaskScene& scene, int32_t query_begin, int32_t query_end) {
  const mask::Program program = mask::compile(mask);
  const mask::ProgramInput input = mask::bind_scene(program.operands, scene);
  std::vector<KeySegment> segments;
  mask::append_segments(program, input, {query_begin, query_end, 0, scene.kv_len, 0, 1}, kTileKv, segments);
  return segments;
}

TEST(Segments, windowed_decode_reads_one_short_run) {
  const MaskScene scene = scene_of(1, 131072);
  const std::vector<KeySegment> expected{{130944, 131072, TileClass::full}};
  EXPECT_EQ(segments_of(mask::causal() & mask::sliding_window(128), scene, 0, 1), expected);
  const std::vector<KeySegment> shifted{{130816, 130944, TileClass::partial}, {130944, 131071, TileClass::full}};
  EXPECT_EQ(segments_of(mask::causal() & mask::sliding_window(128), scene_of(1, 131071), 0, 1), shifted);
}

TEST(Segments, windowed_decode_at_two_billion_keys) {
  const Mask mask = mask::causal() & mask::sliding_window(128);
  const MaskScene scene = scene_of(1, 2000000000);
  // 15 million tiles; `bench/ops` measures how long they take.
  EXPECT_EQ(segments_of(mask, scene, 0, 1).size(), 1u);
}

TEST(Segments, rswa_reads_the_prefix_and_the_window) {
  const std::vector<int32_t> prefix_len{1024};
  const MaskScene scene = scene_of(1, 65536, {{"prefix_len", view_of(prefix_len)}});
  const std::vector<KeySegment> expected{{0, 1024, TileClass::full}, {65280, 65536, TileClass::full}};
  EXPECT_EQ(segments_of(mask::rswa(256), scene, 0, 1), expected);
}

TEST(Segments, causal_chunk_is_full_then_partial) {
  const MaskScene scene = scene_of(512, 4096);
  const std::vector<KeySegment> expected{{0, 3712, TileClass::full}, {3712, 3840, TileClass::partial}};
  EXPECT_EQ(segments_of(mask::causal(), scene, 128, 192), expected);
}

TEST(Segments, last_tile_ends_with_the_keys) {
  const std::vector<KeySegment> expected{{0, 300, TileClass::full}};
  EXPECT_EQ(segments_of(mask::everything(), scene_of(1, 300), 0, 1), expected);
  EXPECT_TRUE(segments_of(mask::everything(), scene_of(1, 0), 0, 1).empty());
  EXPECT_TRUE(segments_of(mask::nothing(), scene_of(1, 300), 0, 1).empty());
}

TEST(Segments, documents_are_read_alone) {
  std::vector<int32_t> documents(4096);
  for (int32_t i = 0; i < 4096; ++i) documents[i] = i / 1024;
  const MaskScene scene =
      scene_of(4096, 4096, {{"query_document", view_of(documents)}, {"key_document", view_of(documents)}});
  const std::vector<KeySegment> expected{{2048, 3072, TileClass::full}};
  EXPECT_EQ(segments_of(mask::document(), scene, 2112, 2176), expected);
  // A tile that holds the end of one document and the begin of the next reads both.
  const std::vector<KeySegment> both{{1024, 3072, TileClass::partial}};
  EXPECT_EQ(segments_of(mask::document(), scene, 2016, 2080), both);
}

TEST(Segments, prefix_lm_spans_do_not_keep_keys_behind_the_window) {
  const std::vector<int32_t> query_start_loc{0, 8192};
  const std::vector<int32_t> seq_lens{8192};
  const PrefixLmOperands operands =
      fill_prefix_lm_spans({{0, 4100, 4200}}, view_of(query_start_loc), view_of(seq_lens));
  const MaskScene scene =
      scene_of(8192, 8192, {{"span_start", view_of(operands.span_start)}, {"span_end", view_of(operands.span_end)}});
  for (int32_t query = 4096; query < 4224; query += 64) {
    const std::vector<KeySegment> segments = segments_of(mask::prefix_lm(255), scene, query, query + 64);
    EXPECT_GE(segments.front().begin, 3840);
    EXPECT_EQ(segments.back().end, 4224);
  }
  const std::vector<KeySegment> text = segments_of(mask::prefix_lm(255), scene, 6144, 6208);
  EXPECT_EQ(text.front().begin, 5888);
  EXPECT_EQ(text.back().end, 6272);
}

TEST(Segments, tree_context_is_full) {
  const std::vector<int32_t> query_start_loc{0, 64};
  std::vector<int32_t> parents;
  for (int32_t t = 0; t < 64; ++t) parents.push_back(t == 0 ? -1 : (t - 1) / 2);
  const TreeOperands operands = fill_tree(parents, view_of(query_start_loc));
  const MaskScene scene = scene_of(
      64, 4096 + 64, {{"tree_enter", view_of(operands.tree_enter)}, {"tree_leave", view_of(operands.tree_leave)}});
  const std::vector<KeySegment> expected{{0, 4096, TileClass::full}, {4096, 4160, TileClass::partial}};
  EXPECT_EQ(segments_of(mask::tree(), scene, 0, 64), expected);
}

TEST(Segments, other_documents_among_four_million_keys_are_skipped) {
  constexpr int32_t kLength = 1 << 22;
  const std::vector<int32_t> documents(kLength, 0);
  const std::vector<int32_t> own{1};
  const MaskScene scene =
      scene_of(1, kLength, {{"query_document", view_of(own)}, {"key_document", view_of(documents)}});
  EXPECT_TRUE(segments_of(mask::document(), scene, 0, 1).empty());
}

TEST(TileClass, tiles_without_pairs_are_empty) {
  const MaskScene scene = scene_of(4, 4);
  EXPECT_EQ(classify_tile(mask::everything(), scene, 2, 2, 0, 4), TileClass::empty);
  EXPECT_EQ(classify_tile(mask::everything(), scene, 0, 4, 3, 3), TileClass::empty);
  EXPECT_EQ(classify_tile(mask::everything(), scene, 0, 4, 0, 4), TileClass::full);
}

TEST(TileClass, ranges_outside_the_request_are_refused) {
  const MaskScene scene = scene_of(4, 6);
  expect_refused([&] { classify_tile(mask::causal(), scene, 0, 5, 0, 6); },
                 "queries: got [0, 5); allowed: a range within [0, 4)");
  expect_refused([&] { classify_tile(mask::causal(), scene, 0, 4, -1, 6); }, "keys: got [-1, 6)");
  expect_refused([&] { classify_tile(mask::causal(), scene, 3, 2, 0, 6); }, "queries: got [3, 2)");
}

TEST(TileClass, has_names) {
  EXPECT_EQ(to_string(TileClass::empty), "empty");
  EXPECT_EQ(to_string(TileClass::partial), "partial");
  EXPECT_EQ(to_string(TileClass::full), "full");
}

}  // namespace
}  // namespace qkv::test
