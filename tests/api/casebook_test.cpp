// Faults of other attention backends, each by its number in the casebook, as they would show through the public API.
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_agrees;
using testing::expect_refused;
using testing::layer_of;
using testing::view;
using testing::visible_keys;
using testing::with;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

LayerSpec one_head(int32_t head_dim) {
  LayerSpec layer = layer_of(1, 1, head_dim);
  return layer;
}

// --- A: masks and windows ---

TEST(casebook, case_001_window_of_four_tokens_counts_the_own_one) {
  LayerSpec layer = one_head(16);
  layer.mask = mask::sliding_window(4);
  const auto seen = visible_keys(layer, 12, 12);
  for (int32_t i = 0; i < 12; ++i) {
    const float share = 1.0F / static_cast<float>(std::min(i + 1, 4));
    for (int32_t j = 0; j < 12; ++j) {
      const bool visible = j <= i && j >= i - 3;
      EXPECT_NEAR(seen.out[i * 12 + j], visible ? share : 0.0F, 1e-6) << i << ", " << j;
    }
  }
}

TEST(casebook, case_004_rows_whose_window_holds_no_key_are_zero) {
  expect_agrees(with(case_of(4, 2, 64, {129}, {64}), [](LayerSpec& layer) { layer.mask = mask::window(32, 64); }));
  LayerSpec layer = one_head(64);
  layer.mask = mask::window(32, 64);
  const auto seen = visible_keys(layer, 129, 64);
  EXPECT_EQ(seen.lse[0], kMinusInfinity);  // position -65 sees keys up to -1
  EXPECT_TRUE(std::isfinite(seen.lse[1]));
}

TEST(casebook, case_005_causal_with_more_queries_than_keys) {
  const auto seen = visible_keys(one_head(32), 8, 5);
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(seen.lse[i], kMinusInfinity);
    for (int32_t j = 0; j < 8; ++j) EXPECT_EQ(seen.out[i * 8 + j], 0.0F);
  }
  for (int32_t i = 3; i < 8; ++i) EXPECT_NEAR(seen.lse[i], std::log(static_cast<float>(i - 2)), 1e-6);
}

TEST(casebook, case_007_bidirectional_window_of_an_encoder) {
  auto c = case_of(2, 2, 64, {7, 32, 33}, {7, 32, 33}, false);
  c.layer.type = AttentionType::encoder_only;
  c.layer.mask = mask::window(4, 4);
  expect_agrees(c);
}

TEST(casebook, case_010_prefix_lm_keeps_the_window_outside_its_span) {
  LayerSpec layer = one_head(16);
  layer.mask = mask::prefix_lm(7);
  std::vector<int32_t> starts(64, -1);
  std::vector<int32_t> ends(64, -1);
  std::fill(starts.begin() + 10, starts.begin() + 30, 10);
  std::fill(ends.begin() + 10, ends.begin() + 30, 29);
  const auto seen = visible_keys(layer, 64, 64, {{"span_start", view(starts)}, {"span_end", view(ends)}});
  for (int32_t j = 0; j < 64; ++j) {
    EXPECT_EQ(seen.out[60 * 64 + j] > 0, j >= 53 && j <= 60) << j;
    EXPECT_EQ(seen.out[12 * 64 + j] > 0, j >= 5 && j < 30) << j;
  }
}

TEST(casebook, case_013_spans_in_the_batch_leave_other_layers_alone) {
  LayerSpec layer = one_head(8);
  layer.mask = mask::causal() & mask::window(127, 0);
  std::vector<int32_t> starts(256, 100);
  std::vector<int32_t> ends(256, 250);
  const auto seen = visible_keys(layer, 256, 256, {{"span_start", view(starts)}, {"span_end", view(ends)}});
  for (int32_t j = 0; j < 256; ++j) EXPECT_EQ(seen.out[200 * 256 + j] > 0, j >= 73 && j <= 200) << j;
}

TEST(casebook, case_014_each_request_has_its_own_reference_length) {
  const std::vector<int32_t> prefix_lens = {5, 9};
  auto c = case_of(4, 2, 16, {1, 3}, {21, 12});
  c.layer.mask = mask::rswa(4);
  expect_agrees(c);  // random reference lengths
  LayerSpec layer = one_head(16);
  layer.mask = mask::rswa(4);
  for (const int32_t prefix : prefix_lens) {
    const std::vector<int32_t> operand = {prefix};
    const auto seen = visible_keys(layer, 1, 21, {{"prefix_len", view(operand)}});
    for (int32_t j = 0; j < 21; ++j) EXPECT_EQ(seen.out[j] > 0, j < prefix || j >= 17) << j;
    EXPECT_NEAR(seen.lse[0], std::log(static_cast<float>(prefix + 4)), 1e-6);
  }
}

TEST(casebook, case_015_each_request_follows_its_own_causal_flag) {
  for (const Mask& mask : {mask::per_request_causal(), mask::per_request_causal() & mask::window(3, 3)}) {
    auto c = case_of(4, 2, 32, {4, 8, 1}, {10, 8, 33});
    c.layer.mask = mask;
    for (int64_t seed = 0; seed < 8; ++seed) {  // all settings of the three flags come up
      c.index = seed;
      expect_agrees(c);
    }
  }
  LayerSpec layer = one_head(16);
  layer.mask = mask::per_request_causal();
  for (const int32_t flag : {0, 1, 2}) {
    const std::vector<int32_t> flags = {flag};
    EXPECT_EQ(visible_keys(layer, 4, 10, {{"causal", view(flags)}}).out[9] > 0, flag == 0);
  }
}

TEST(casebook, case_018_minus_one_and_huge_windows_are_open_and_zero_sees_the_own_token) {
  for (const bool causal : {false, true}) {
    const Mask base = causal ? mask::causal() : mask::everything();
    LayerSpec layer = one_head(16);
    layer.mask = base;
    const auto open = visible_keys(layer, 20, 20);
    for (const int64_t size : {int64_t{-1}, int64_t{std::numeric_limits<int32_t>::max()}}) {
      layer.mask = base & mask::window(size, size);
      EXPECT_EQ(visible_keys(layer, 20, 20).out, open.out);
    }
    layer.mask = base & mask::window(0, 0);
    const auto own = visible_keys(layer, 20, 20);
    for (int32_t i = 0; i < 20; ++i) EXPECT_EQ(own.out[i * 20 + i], 1.0F);
  }
  expect_refused([] { mask::window(-2, 0); }, ErrorCode::invalid_argument, "window_left");
  expect_refused([] { mask::window(0, -7); }, ErrorCode::invalid_argument, "window_right");
}

// --- B: empty rows, LSE and merging ---

struct MergeInput {
  MergeInput(int64_t tokens, int64_t heads, int64_t dim)
      : tokens(tokens), heads(heads), dim(dim), out(tokens * heads * dim), lse(tokens * heads) {}
  State state() const { return {view(out, {tokens, heads, dim}), view(lse, {heads, tokens})}; }
  int64_t tokens, heads, dim;
  std::vector<float> out, lse;
};

TEST(casebook, case_019_merging_empty_states_gives_no_nan) {
  MergeInput a(8, 4, 64);
  MergeInput b(8, 4, 64);
  MergeInput merged(8, 4, 64);
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t h = 0; h < 4; ++h) {
      const int64_t kind = (t * 4 + h) % 4;  // 0 both empty, 1 and 2 one empty, 3 none
      a.lse[h * 8 + t] = kind == 0 || kind == 1 ? kMinusInfinity : 0.5F * static_cast<float>(t);
      b.lse[h * 8 + t] = kind == 0 || kind == 2 ? kMinusInfinity : 0.3F * static_cast<float>(h);
      for (int64_t d = 0; d < 64; ++d) {
        a.out[(t * 4 + h) * 64 + d] = kind == 0 || kind == 1 ? std::nanf("") : static_cast<float>(d) + 0.1F;
        b.out[(t * 4 + h) * 64 + d] = kind == 0 || kind == 2 ? std::nanf("") : -static_cast<float>(d) - 0.7F;
      }
    }
  }
  merge_states({a.state(), b.state()}, merged.state().out, merged.state().lse);
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t h = 0; h < 4; ++h) {
      const int64_t kind = (t * 4 + h) % 4;
      const int64_t row = (t * 4 + h) * 64;
      const MergeInput& only = kind == 1 ? b : a;
      EXPECT_EQ(merged.lse[h * 8 + t] == kMinusInfinity, kind == 0);
      for (int64_t d = 0; d < 64; ++d) {
        const float got = merged.out[row + d];
        EXPECT_FALSE(std::isnan(got));
        if (kind == 1 || kind == 2) {
          EXPECT_EQ(got, only.out[row + d]);
          EXPECT_EQ(merged.lse[h * 8 + t], only.lse[h * 8 + t]);
        } else if (kind == 0) {
          EXPECT_EQ(got, 0.0F);
        }
      }
    }
  }
}

TEST(casebook, case_021_rows_without_keys_have_lse_minus_infinity) {
  auto c = case_of(2, 1, 32, {3, 3}, {0, 5});
  c.layer.mask = mask::everything();
  expect_agrees(c);
  MergeInput foreign(1, 1, 8);
  foreign.lse[0] = std::numeric_limits<float>::infinity();
  MergeInput good(1, 1, 8);
  MergeInput merged(1, 1, 8);
  merge_states({foreign.state(), good.state()}, merged.state().out, merged.state().lse);
  EXPECT_TRUE(std::isnan(merged.lse[0]));  // documented: +inf is an error that shows, not an empty state
}

TEST(casebook, case_023_shared_pages_read_like_private_ones) {
  const int32_t num_requests = 16;
  const int32_t shared_pages = 16;
  for (const int32_t q_len : {1, 17}) {
    LayerSpec layer = layer_of(8, 2, 32);
    layer.cache = CacheSpec{16};
    std::vector<int32_t> starts = {0};
    std::vector<int32_t> lengths;
    std::vector<int32_t> shared_table;
    std::vector<int32_t> private_table;
    int32_t next_page = shared_pages;
    const int32_t width = shared_pages + 20;
    std::vector<std::pair<int32_t, int32_t>> copies;  // private page, shared page
    for (int32_t r = 0; r < num_requests; ++r) {
      const int32_t own = 1 + (r * 37) % 300;
      starts.push_back(starts.back() + q_len);
      lengths.push_back(shared_pages * 16 + std::max(own, q_len));
      for (int32_t i = 0; i < width; ++i) {
        shared_table.push_back(i < shared_pages ? i : next_page + i);
        private_table.push_back(next_page + i);
        if (i < shared_pages) copies.emplace_back(next_page + i, i);
      }
      next_page += width;
    }
    std::vector<float> pages(static_cast<size_t>(next_page) * 2 * 16 * 64);
    tools::Draw draw(5, q_len);
    for (float& x : pages) x = draw.normal();
    const size_t page_elements = 2 * 16 * 64;
    for (const auto& [target, source] : copies) {
      std::copy_n(pages.begin() + static_cast<int64_t>(source * page_elements), page_elements,
                  pages.begin() + static_cast<int64_t>(target * page_elements));
    }
    std::vector<float> query(static_cast<size_t>(starts.back()) * 8 * 32);
    for (float& x : query) x = draw.normal();
    const KvCache cache = KvCache::from_interleaved(view(pages, {next_page, 2, 16, 64}), 32);
    const Attention attention(layer);
    const auto run = [&](const std::vector<int32_t>& table) {
      Batch batch;
      batch.query_start_loc = view(starts);
      batch.seq_lens = view(lengths);
      batch.block_table = Tensor::contiguous(table.data(), DType::i32, {num_requests, width});
      std::vector<float> out(query.size());
      attention.forward(view(query, {starts.back(), 8, 32}), cache, attention.plan(batch),
                        view(out, {starts.back(), 8, 32}));
      return out;
    };
    EXPECT_EQ(run(shared_table), run(private_table));
  }
}

TEST(casebook, case_026_states_in_base_two_are_converted_before_a_merge) {
  MergeInput base_e(1, 1, 8);
  MergeInput base_2(1, 1, 8);
  std::fill(base_e.out.begin(), base_e.out.end(), 1.0F);
  std::fill(base_2.out.begin(), base_2.out.end(), 3.0F);
  base_e.lse[0] = std::log(100.0F);
  base_2.lse[0] = std::log2(156.0F);
  lse_from_lse2(base_2.state().lse);
  EXPECT_NEAR(base_2.lse[0], std::log(156.0F), 1e-6);
  MergeInput merged(1, 1, 8);
  merge_states({base_e.state(), base_2.state()}, merged.state().out, merged.state().lse);
  EXPECT_NEAR(merged.lse[0], std::log(256.0F), 1e-6);
  EXPECT_NEAR(merged.out[0], (100.0F + 3 * 156.0F) / 256.0F, 1e-6);
}

TEST(casebook, case_029_first_key_tiles_hidden_by_a_window) {
  for (const int32_t head_dim : {8, 64}) {
    auto c = case_of(2, 2, head_dim, {640}, {640}, false);
    c.layer.mask = mask::causal() & mask::window(10, 0);
    expect_agrees(c);
  }
}

TEST(casebook, case_030_a_fully_masked_row_is_zero) {
  LayerSpec layer = one_head(16);
  layer.mask = mask::operand("last_key", OperandScope::query) >= mask::kv_pos();
  const std::vector<int32_t> last_key = {9, 9, 9, 9, 9, -1};
  const auto seen = visible_keys(layer, 6, 10, {{"last_key", view(last_key)}});
  EXPECT_EQ(seen.lse[5], kMinusInfinity);
  for (int32_t j = 0; j < 10; ++j) {
    EXPECT_EQ(seen.out[5 * 10 + j], 0.0F);
    EXPECT_NEAR(seen.out[4 * 10 + j], 0.1F, 1e-6);
  }
}

// --- C: paging, indices, strides, cache writes ---

TEST(casebook, case_031_offsets_beyond_two_to_the_31) {
  const int64_t num_pages = 65538;  // x 32768 elements
  const size_t bytes = static_cast<size_t>(num_pages) * 32768 * sizeof(uint16_t);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  LayerSpec layer = layer_of(8, 8, 128);
  layer.query_dtype = DType::bf16;
  layer.kv_dtype = DType::bf16;
  layer.output_dtype = DType::f32;
  layer.cache = CacheSpec{16};
  const KvCache cache =
      KvCache::from_interleaved(Tensor::contiguous(memory, DType::bf16, {num_pages, 8, 16, 256}), 128);
  const std::vector<int32_t> starts = {0, 40};
  const std::vector<int32_t> lengths = {40};
  const std::vector<int32_t> table = {static_cast<int32_t>(num_pages - 1), static_cast<int32_t>(num_pages - 3),
                                      static_cast<int32_t>(num_pages - 2)};
  std::vector<int64_t> slots;
  for (int32_t t = 0; t < 40; ++t) slots.push_back(static_cast<int64_t>(table[t / 16]) * 16 + t % 16);
  tools::OwnedTensor tokens(DType::bf16, {40, 8, 128});
  tools::Draw draw(31, 0);
  for (int64_t t = 0; t < 40; ++t) {
    for (int64_t h = 0; h < 8; ++h) {
      for (int64_t d = 0; d < 128; ++d) tools::store(tokens.view(), {t, h, d}, draw.normal());
    }
  }
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {1, 3});
  batch.slot_mapping = view(slots);
  const Attention attention(layer);
  const Plan plan = attention.plan(batch);
  attention.update_cache(tokens.view(), tokens.view(), cache, plan);
  std::vector<float> out(40 * 8 * 128);
  attention.forward(tokens.view(), cache, plan, view(out, {40, 8, 128}));
  LayerSpec dense = layer;
  dense.cache.reset();
  batch.block_table = {};
  const auto expected = reference::attention(dense, batch, tokens.view(), tokens.view(), tokens.view());
  for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 1e-4) << i;
  munmap(memory, bytes);
}

TEST(casebook, case_035_pages_of_any_size) {
  for (const int32_t page_size : {1, 3, 16, 19, 32, 48, 64, 128, 256, 544}) {
    auto c = case_of(4, 2, 32, {1, 15, 2, 1, 1}, {1, 15, 16, 17, 300});
    c.layer.cache = CacheSpec{page_size};
    expect_agrees(c);
  }
}

TEST(casebook, case_037_pages_of_an_engine_for_hybrid_models) {
  for (const int32_t page_size : {544, 784}) {
    auto c = case_of(4, 1, 64, {1, 40}, {1500, 800});
    c.layer.cache = CacheSpec{page_size};
    expect_agrees(c);
  }
}

TEST(casebook, case_038_one_kv_head_with_odd_strides) {
  for (const bool interleaved : {false, true}) {
    for (const char* axes : {"pht", "pth", "hpt"}) {
      auto c = case_of(8, 1, 64, {1, 7}, {33, 20});
      c.layout.axes = axes;
      c.layout.interleaved = interleaved;
      c.layout.odd_singleton_strides = true;
      expect_agrees(c);
    }
  }
}

TEST(casebook, case_040_slots_of_minus_one_are_skipped) {
  std::vector<float> pages(4 * 16 * 1 * 8, 7.0F);
  const std::vector<float> before = pages;
  std::vector<float> tokens(4 * 8, std::nanf(""));
  std::fill_n(tokens.begin() + 8, 8, 1.0F);
  std::fill_n(tokens.begin() + 24, 8, 2.0F);
  std::vector<float> values(4 * 16 * 8, 7.0F);
  const std::vector<int64_t> slots = {-1, 5, -1, 37};
  const KvCache cache{view(pages, {4, 16, 1, 8}), view(values, {4, 16, 1, 8})};
  cache_write(view(tokens, {4, 1, 8}), view(tokens, {4, 1, 8}), cache, view(slots));
  for (size_t i = 0; i < pages.size(); ++i) {
    const size_t slot = i / 8;
    const float expected = slot == 5 ? 1.0F : slot == 37 ? 2.0F : before[i];
    EXPECT_EQ(pages[i], expected) << i;
    EXPECT_EQ(values[i], expected) << i;
  }
}

TEST(casebook, case_043_a_cache_of_another_head_size_is_refused) {
  const std::vector<float> pages(4 * 16 * 64, 1.0F);
  const std::vector<float> tokens(128, 1.0F);
  const std::vector<int64_t> slots = {0};
  const KvCache cache{view(pages, {4, 16, 1, 64}), view(pages, {4, 16, 1, 64})};
  try {
    cache_write(view(tokens, {1, 1, 128}), view(tokens, {1, 1, 128}), cache, view(slots));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("128"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("64"), std::string::npos) << error.what();
  }
  EXPECT_EQ(pages, std::vector<float>(4 * 16 * 64, 1.0F));
}

TEST(casebook, case_044_nan_in_unowned_slots_never_leaks) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::vector<int32_t>& q : {std::vector<int32_t>{1, 1}, std::vector<int32_t>{1, 3}}) {
      auto c = case_of(4, 2, 64, q, {1, 3});
      c.layer.query_dtype = dtype;
      c.layer.kv_dtype = dtype;
      expect_agrees(c);
    }
  }
}

TEST(casebook, case_047_bounds_come_from_the_lengths_alone) { expect_agrees(case_of(4, 1, 16, {1}, {24577})); }

// --- D: head sizes and head ratios ---

TEST(casebook, case_048_head_sizes_of_vision_towers) {
  for (const int32_t head_dim : {16, 40, 72, 80, 88, 96, 112, 120, 160, 192}) {
    auto c = case_of(2, 2, head_dim, {197, 64}, {197, 64}, false);
    c.layer.type = AttentionType::encoder_only;
    expect_agrees(c);
  }
  for (const int32_t head_dim : {80, 112}) expect_agrees(case_of(4, 2, head_dim, {1, 20}, {50, 60}));
}

TEST(casebook, case_051_packed_heads_keep_each_rows_causal_limit) {
  expect_agrees(case_of(8, 2, 64, {5}, {5}));
  expect_agrees(case_of(8, 2, 64, {130}, {130}));
  expect_agrees(case_of(8, 2, 64, {5, 130}, {77, 301}));
}

// --- E: variable lengths ---

TEST(casebook, case_053_empty_requests_among_single_tokens) { expect_agrees(case_of(9, 3, 64, {1, 0, 1}, {3, 0, 5})); }

TEST(casebook, case_055_no_keys_at_all) {
  for (const bool causal : {true, false}) {
    auto c = case_of(4, 2, 32, std::vector<int32_t>(8, 1), std::vector<int32_t>(8, 0));
    c.layer.mask = causal ? mask::causal() : mask::everything();
    expect_agrees(c);
  }
  expect_agrees(case_of(4, 2, 32, {}, {}));
}

TEST(casebook, case_058_rows_past_the_last_request_stay_untouched) {
  auto c = case_of(2, 1, 32, {500, 9}, {500, 40});
  c.extra_rows = 3;
  expect_agrees(c);
}

// --- G: softcap, ALiBi, sinks ---

TEST(casebook, case_067_softcap_applies_before_bias_and_mask) {
  for (const float softcap : {0.0F, 5.0F, 50.0F}) {
    for (const bool window : {false, true}) {
      auto c = case_of(4, 2, 32, {1, 40}, {70, 40});
      c.magnitude = 30;
      c.layer.softcap = softcap;
      c.layer.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
      if (window) c.layer.mask = mask::sliding_window(16);
      expect_agrees(c);
    }
  }
}

TEST(casebook, case_069_each_pair_of_features_works) {
  const std::vector<std::function<void(LayerSpec&)>> features = {
      [](LayerSpec& layer) { layer.softcap = 20; },
      [](LayerSpec& layer) { layer.alibi_slopes.assign(4, 0.3F); },
      [](LayerSpec& layer) {
        layer.sinks = {0.5F, -1, 2, 0};
      },
      [](LayerSpec& layer) { layer.mask = layer.effective_mask() & mask::window(9, 9); },
      [](LayerSpec& layer) { layer.mask = layer.effective_mask() & mask::per_request_causal(); },
      [](LayerSpec& layer) { layer.mask = layer.effective_mask() | mask::prefix_lm(); },
      [](LayerSpec& layer) { layer.mask = layer.effective_mask() & mask::rswa(5); },
      [](LayerSpec& layer) { layer.kv_dtype = DType::bf16; },
      [](LayerSpec& layer) { layer.head_dim_v = 24; },
  };
  for (size_t a = 0; a < features.size(); ++a) {
    for (size_t b = a + 1; b < features.size(); ++b) {
      expect_agrees(with(with(case_of(4, 2, 16, {1, 20, 3}, {40, 30, 700}), features[a]), features[b]));
    }
  }
}

TEST(casebook, case_071_alibi_distance_is_zero_at_the_own_token) {
  auto c = case_of(8, 2, 32, {1}, {33});
  for (int32_t h = 1; h <= 8; ++h) c.layer.alibi_slopes.push_back(std::exp2(static_cast<float>(-h)));
  expect_agrees(c);
  LayerSpec layer = one_head(16);
  layer.alibi_slopes = {0.5F};
  layer.mask = mask::window(0, 0);
  EXPECT_EQ(visible_keys(layer, 1, 33).lse[0], 0.0F);
  // The distance form: causal and not give the same LSE for the last query, which sees all keys either way.
  layer.mask = mask::causal();
  const float causal = visible_keys(layer, 1, 33).lse[0];
  layer.mask = mask::everything();
  EXPECT_EQ(visible_keys(layer, 1, 33).lse[0], causal);
  // Two halves of the keys, merged.
  MergeInput low(1, 1, 33);
  MergeInput high(1, 1, 33);
  layer.mask = mask::kv_pos() < 20;
  const auto first = visible_keys(layer, 1, 33);
  layer.mask = mask::kv_pos() >= 20;
  const auto second = visible_keys(layer, 1, 33);
  low.out = first.out;
  low.lse = first.lse;
  high.out = second.out;
  high.lse = second.lse;
  merge_states({low.state(), high.state()}, low.state().out, low.state().lse);
  EXPECT_NEAR(low.lse[0], causal, 1e-6);
}

TEST(casebook, case_073_a_sink_counts_once_however_the_keys_are_split) {
  for (const float softcap : {0.0F, 20.0F}) {
    for (const int32_t kv_len : {0, 1000, 5000}) {
      auto c = case_of(4, 1, 16, {1, 3}, {kv_len, kv_len});
      c.layer.softcap = softcap;
      c.layer.sinks = {0.0F, 1.5F, -2.0F, 4.0F};
      expect_agrees(c);  // all keys: 5000 of them are many splits
      c.layer.mask = mask::sliding_window(64);
      expect_agrees(c);  // the first splits are empty
    }
  }
  LayerSpec layer = one_head(8);
  layer.sinks = {1.25F};
  const auto seen = visible_keys(layer, 1, 0);
  EXPECT_EQ(seen.lse[0], 1.25F);
  EXPECT_EQ(seen.out[0], 0.0F);
}

TEST(casebook, case_076_support_is_answered_without_a_device) {
  LayerSpec layer = layer_of(8, 2, 64);
  layer.sinks.assign(8, 0.0F);
  layer.mask = mask::sliding_window(128);
  EXPECT_TRUE(explain(layer).empty());
  const Device gpu{DeviceKind::cuda, 0};
  const auto reasons = explain(layer, gpu);
  ASSERT_EQ(reasons.size(), 1U);
  EXPECT_EQ(reasons[0], "query_dtype: got f32; allowed: bf16, f16 or, with keys and values of f8e4m3, f8e4m3 on a GPU");
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  EXPECT_TRUE(explain(layer, gpu).empty());
  if (num_cuda_devices() == 0) {  // the layer is fine, the machine is not
    EXPECT_THROW(
        {
          try {
            Attention(layer, gpu);
          } catch (const Error& error) {
            EXPECT_EQ(to_string(error.code()), "unavailable") << error.what();
            throw;
          }
        },
        Error);
  }
}

// --- N: choosing, refusing, explaining ---

TEST(casebook, case_118_refusals_are_one_line_with_value_and_allowed) {
  LayerSpec layer = layer_of(8, 2, 513);
  expect_refused([&] { Attention{layer}; }, ErrorCode::invalid_argument, "head_dim");
  layer.head_dim = 64;
  layer.kv_dtype = DType::i64;
  expect_refused([&] { Attention{layer}; }, ErrorCode::invalid_argument, "kv_dtype");
  layer.kv_dtype = DType::f8e4m3;
  expect_refused([&] { Attention{layer}; }, ErrorCode::invalid_argument, "kv_scales");
  layer.kv_dtype = DType::f32;
  layer.query_dtype = DType::i8;
  expect_refused([&] { Attention{layer}; }, ErrorCode::unsupported, "query_dtype");
  layer.query_dtype = DType::f32;
  layer.cache = CacheSpec{0};
  expect_refused([&] { Attention{layer}; }, ErrorCode::invalid_argument, "cache.page_size");
  // Several reasons: all of them in the one line.
  layer.head_dim = 513;
  try {
    Attention{layer};
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "head_dim");
    EXPECT_NE(std::string(error.what()).find("cache.page_size"), std::string::npos);
  }
}

}  // namespace
}  // namespace qkv
