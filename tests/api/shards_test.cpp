// Ranks that share a cache, one after another on one machine: what each leaves over its own keys, and the new tokens'
// state, merge into what one layer gives that is shown all keys; over random features. Each rank's cache holds its own
// tokens and NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_refused;
using tools::Case;
using tools::CaseData;
using tools::OwnedTensor;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The pages of one rank, filled from those of a cache that holds the requests whole.
class RankCache {
 public:
  RankCache(const Case& c, CaseData& whole, const Shard& shard) : case_(c), whole_(whole), shard_(shard) {
    const LayerSpec& layer = c.layer;
    const int64_t page_size = layer.cache->page_size;
    width_ = 1;
    for (const int32_t length : whole.seq_lens) {
      width_ = std::max<int64_t>(width_, (shard.local_length(length) + page_size - 1) / page_size);
    }
    const auto num_requests = static_cast<int64_t>(whole.seq_lens.size());
    const int64_t num_pages = num_requests * width_ + 1;
    for (int64_t i = 0; i < num_requests * width_; ++i) table_.push_back(static_cast<int32_t>(num_pages - 1 - i));
    key_ = OwnedTensor(layer.kv_dtype, {num_pages, page_size, layer.num_kv_heads, layer.head_dim});
    value_ = OwnedTensor(layer.kv_dtype, {num_pages, page_size, layer.num_kv_heads, layer.value_dim()});
    if (layer.kv_scales == KvScales::per_token_head) {
      key_scale_ = OwnedTensor(DType::f32, {num_pages, page_size, layer.num_kv_heads});
      value_scale_ = OwnedTensor(DType::f32, {num_pages, page_size, layer.num_kv_heads});
    }
    for (int64_t r = 0; r < num_requests; ++r) copy_context(r);
  }

  KvCache cache() const {
    const bool own_scales = case_.layer.kv_scales == KvScales::per_token_head;
    return {key_.view(), value_.view(), own_scales ? key_scale_.view() : whole_.key_scale.view(),
            own_scales ? value_scale_.view() : whole_.value_scale.view()};
  }

  // The batch as this rank sees it: whole lengths and operands, and pages and slots of its own.
  Batch batch() {
    Batch batch = whole_.batch();
    batch.block_table =
        Tensor::contiguous(table_.data(), DType::i32, {static_cast<int64_t>(whole_.seq_lens.size()), width_});
    slots_ = shard_slots(batch, case_.layer.cache->page_size, shard_);
    batch.slot_mapping = testing::view(slots_);
    return batch;
  }

 private:
  void copy_context(int64_t request) {
    const int64_t page_size = case_.layer.cache->page_size;
    const tools::RequestLengths lengths = case_.requests[request];
    for (int32_t position = 0; position < lengths.kv_len - lengths.q_len; ++position) {
      if (shard_.rank_of(position) != shard_.rank) continue;
      const int64_t local = shard_.local_position(position);
      const int64_t from = whole_.block_table[request * whole_.table_width + position / page_size];
      const int64_t to = table_[request * width_ + local / page_size];
      copy_token(whole_.key_cache, from, position % page_size, key_.view(), to, local % page_size);
      copy_token(whole_.value_cache, from, position % page_size, value_.view(), to, local % page_size);
      if (case_.layer.kv_scales != KvScales::per_token_head) continue;
      for (int64_t h = 0; h < case_.layer.num_kv_heads; ++h) {
        for (const auto& [scale, own] :
             {std::pair{&whole_.key_scale, &key_scale_}, {&whole_.value_scale, &value_scale_}}) {
          tools::store(own->view(), {to, local % page_size, h},
                       tools::load(scale->view(), {from, position % page_size, h}));
        }
      }
    }
  }

  static void copy_token(const Tensor& source, int64_t from_page, int64_t from_token, const Tensor& target,
                         int64_t to_page, int64_t to_token) {
    const int64_t bytes = size_bytes(source.dtype);
    for (int64_t h = 0; h < source.shape[2]; ++h) {
      std::memcpy(static_cast<std::byte*>(target.data) +
                      (to_page * target.stride[0] + to_token * target.stride[1] + h * target.stride[2]) * bytes,
                  static_cast<const std::byte*>(source.data) +
                      (from_page * source.stride[0] + from_token * source.stride[1] + h * source.stride[2]) * bytes,
                  source.shape[3] * bytes);
    }
  }

  const Case& case_;
  CaseData& whole_;
  const Shard shard_;
  int64_t width_ = 0;
  std::vector<int32_t> table_;
  std::vector<int64_t> slots_;
  OwnedTensor key_, value_, key_scale_, value_scale_;
};

struct OwnedState {
  OwnedState(const LayerSpec& layer, int64_t num_tokens)
      : out(DType::f32, {num_tokens, layer.num_q_heads, layer.value_dim()}),
        lse(DType::f32, {layer.num_q_heads, num_tokens}) {}
  State state() const { return {out.view(), lse.view()}; }
  OwnedTensor out, lse;
};

// One layer cut in ranks, and in context and new tokens.
class Cut {
 public:
  Cut(const Case& c, int32_t num_ranks, int32_t interleave) : case_(c), data_(c) {
    Attention whole(c.layer);
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      RankCache& cache = ranks_.emplace_back(case_, data_, Shard{rank, num_ranks, interleave});
      const Attention attention(layer_of_rank(rank, num_ranks, interleave, KeyRun::all));
      attention.update_cache(data_.key.view(), data_.value.view(), cache.cache(), attention.plan(cache.batch()));
      shards_.push_back({rank, num_ranks, interleave});
    }
    whole.update_cache(data_.key.view(), data_.value.view(), data_.cache(), whole.plan(data_.batch()));
  }

  // The states of all ranks over a run of keys, in the order of ranks.
  std::vector<OwnedState> states(KeyRun run) {
    std::vector<OwnedState> states;
    for (const Shard& shard : shards_) {
      const Attention attention(layer_of_rank(shard.rank, shard.num_ranks, shard.interleave_size, run));
      const OwnedState& state = states.emplace_back(case_.layer, data_.num_tokens);
      RankCache& cache = ranks_[shard.rank];
      attention.forward(data_.query.view(), cache.cache(), attention.plan(cache.batch()), state.out.view(),
                        state.lse.view());
    }
    return states;
  }

  OwnedState new_tokens() const {
    const LayerSpec layer = new_token_layer();
    const Attention attention(layer);
    OwnedState state(layer, data_.num_tokens);
    attention.forward(data_.query.view(), data_.key.view(), data_.value.view(), attention.plan(new_token_batch()),
                      state.out.view(), state.lse.view());
    return state;
  }

  OwnedState merged(const std::vector<OwnedState>& states) const {
    std::vector<State> views;
    for (const OwnedState& state : states) views.push_back(state.state());
    OwnedState merged(case_.layer, data_.num_tokens);
    merge_states(views, merged.out.view(), merged.lse.view());
    return merged;
  }

  std::string difference(const OwnedState& state, const reference::Result& expected) const {
    return tools::difference(case_, {}, state.out.view(), state.lse.view(), expected);
  }

  reference::Result whole_reference() {
    return reference::attention(case_.layer, data_.batch(), data_.query.view(), data_.cache());
  }

  // Of the context alone and the new tokens alone, joined: what 8-bit caches and 16-bit new tokens come to.
  reference::Result joined_reference() {
    LayerSpec context = case_.layer;
    context.key_run = KeyRun::context;
    const auto first = reference::attention(context, data_.batch(), data_.query.view(), data_.cache());
    const auto second = reference::attention(new_token_layer(), new_token_batch(), data_.query.view(), data_.key.view(),
                                             data_.value.view());
    const int64_t heads = case_.layer.num_q_heads;
    reference::StateValues joined = reference::merge({{heads, first.out, first.lse}, {heads, second.out, second.lse}});
    return {std::move(joined.out), std::move(joined.lse)};
  }

  CaseData& data() { return data_; }

 private:
  LayerSpec layer_of_rank(int32_t rank, int32_t num_ranks, int32_t interleave, KeyRun run) const {
    LayerSpec layer = case_.layer;
    layer.shard = {rank, num_ranks, interleave};
    layer.key_run = run;
    if (rank != 0) layer.sinks.clear();
    return layer;
  }

  LayerSpec new_token_layer() const {
    LayerSpec layer = case_.layer;
    layer.cache.reset();
    layer.kv_dtype = layer.query_dtype;
    layer.kv_scales = KvScales::none;
    layer.sinks.clear();
    layer.key_run = KeyRun::new_tokens;
    return layer;
  }

  Batch new_token_batch() const {
    Batch batch = data_.batch();
    batch.block_table = {};
    batch.slot_mapping = {};
    batch.prefix_groups.clear();
    return batch;
  }

  const Case& case_;
  CaseData data_;
  std::vector<RankCache> ranks_;
  std::vector<Shard> shards_;
};

void expect_merges(const Case& c, int32_t num_ranks, int32_t interleave) {
  Cut cut(c, num_ranks, interleave);
  const std::string what =
      tools::describe(c) + " on " + std::to_string(num_ranks) + " ranks by " + std::to_string(interleave);
  EXPECT_EQ(cut.difference(cut.merged(cut.states(KeyRun::all)), cut.whole_reference()), "") << "all keys: " << what;
  std::vector<OwnedState> states = cut.states(KeyRun::context);
  states.push_back(cut.new_tokens());
  EXPECT_EQ(cut.difference(cut.merged(states), cut.joined_reference()), "") << "context and new tokens: " << what;
}

// A decoder with a cache over the features that qkv check draws, or nothing where the case drawn is none.
std::optional<Case> draw_decoder(uint64_t seed, int64_t index) {
  Case c = tools::draw_case(seed, index);
  if (c.layer.type != AttentionType::decoder || !c.layer.cache || c.requests.empty()) return std::nullopt;
  if (tools::is_float8(c.layer.query_dtype)) return std::nullopt;  // the new tokens' dense keys have no 8-bit form
  c.layer.shard = {};
  c.layer.key_run = KeyRun::all;
  c.layer.output_dtype = DType::f32;
  c.layer.output_scales = OutputScales::per_tensor;
  c.prefix_groups.clear();
  c.with_lse = true;
  c.extra_rows = 0;
  for (tools::RequestLengths& request : c.requests) request.kv_len = std::max(request.kv_len, request.q_len);
  return c;
}

class ranks : public ::testing::TestWithParam<int32_t> {};

TEST_P(ranks, merge_into_one_layer_over_random_features) {
  const int32_t num_ranks = GetParam();
  int32_t num_cases = 0;
  for (int64_t index = 0; num_cases < 60; ++index) {
    const std::optional<Case> c = draw_decoder(77 + num_ranks, index);
    if (!c) continue;
    const int32_t page_size = c->layer.cache->page_size;
    int32_t interleave = static_cast<int32_t>(index * 7 % page_size) + 1;
    while (page_size % interleave != 0) --interleave;
    expect_merges(*c, num_ranks, interleave);
    ++num_cases;
  }
}

INSTANTIATE_TEST_SUITE_P(shards, ranks, ::testing::Values(1, 2, 3, 4, 8));

// Of the whole batch on one rank, so that a shard of one is the layer itself, bit for bit.
TEST(shards, one_rank_has_the_bits_of_an_unsharded_layer) {
  const Case c = case_of(8, 2, 64, {1, 40, 3}, {700, 90, 33});
  Cut cut(c, 1, 16);
  const OwnedState state = std::move(cut.states(KeyRun::all).front());
  const Attention attention(c.layer);
  OwnedState whole(c.layer, cut.data().num_tokens);
  attention.forward(cut.data().query.view(), cut.data().cache(), attention.plan(cut.data().batch()), whole.out.view(),
                    whole.lse.view());
  EXPECT_TRUE(state.out.buffer() == whole.out.buffer());
  EXPECT_TRUE(state.lse.buffer() == whole.lse.buffer());
}

TEST(shards, a_window_is_counted_in_positions_of_the_request) {
  Case c = case_of(1, 1, 16, {1, 3}, {900, 500});
  c.layer.mask = mask::sliding_window(37);
  for (const int32_t interleave : {1, 2, 8}) expect_merges(c, 4, interleave);
}

TEST(shards, keys_outside_a_window_are_not_read) {
  Case c = case_of(1, 1, 16, {1}, {4001});
  c.layer.mask = mask::sliding_window(64);
  c.layer.shard = {1, 4, 1};
  c.layer.key_run = KeyRun::context;
  const CaseData data(c);
  const PlanReport report = preview_plan(c.layer, data.batch(), "cpu");
  EXPECT_EQ(report.seq_lens, (std::vector<int32_t>{4001}));
  EXPECT_EQ(report.key_lens, (std::vector<int32_t>{1000}));
  ASSERT_EQ(report.items.size(), 1U);
  EXPECT_EQ(report.items[0].key_end, 1000);
  EXPECT_LE(report.items[0].keys, 128 + 64 / 4);
}

TEST(shards, a_request_without_context_gets_the_new_tokens_alone) {
  Case c = case_of(4, 2, 64, {5, 1}, {5, 1});
  Cut cut(c, 3, 4);
  for (const OwnedState& state : cut.states(KeyRun::context)) {
    for (int64_t t = 0; t < 6; ++t) {
      EXPECT_EQ(tools::load(state.lse.view(), {0, t}), kMinusInfinity);
      EXPECT_EQ(tools::load(state.out.view(), {t, 0, 0}), 0.0F);
    }
  }
  expect_merges(c, 3, 4);
}

// --- casebook J ---

TEST(casebook, case_092_long_decodes_on_8_ranks_equal_one_rank) {
  for (const int32_t kv_len : {12000, 20000, 30001}) {
    for (const bool one_kv_head : {false, true}) {
      Case c = case_of(8, one_kv_head ? 1 : 2, 64, {1}, {kv_len});
      if (one_kv_head) {
        c.layer.head_dim = 192;
        c.layer.head_dim_v = 128;
      }
      Cut cut(c, 8, 1);
      const Attention attention(c.layer);
      OwnedState one(c.layer, 1);
      attention.forward(cut.data().query.view(), cut.data().cache(), attention.plan(cut.data().batch()), one.out.view(),
                        one.lse.view());
      std::vector<OwnedState> states = cut.states(KeyRun::context);
      states.push_back(cut.new_tokens());
      const OwnedState merged = cut.merged(states);
      for (int64_t h = 0; h < 8; ++h) {
        ASSERT_NEAR(tools::load(merged.lse.view(), {h, 0}), tools::load(one.lse.view(), {h, 0}), 1e-5) << kv_len;
        for (int64_t d = 0; d < c.layer.value_dim(); ++d) {
          ASSERT_NEAR(tools::load(merged.out.view(), {0, h, d}), tools::load(one.out.view(), {0, h, d}), 1e-5)
              << kv_len;
        }
      }
    }
  }
}

TEST(casebook, case_094_ranks_without_keys_add_nothing) {
  const Case c = case_of(4, 2, 64, {1}, {3});
  Cut cut(c, 8, 1);
  const reference::Result expected = cut.whole_reference();
  std::vector<OwnedState> states = cut.states(KeyRun::all);
  for (size_t rank = 3; rank < 8; ++rank) {
    EXPECT_EQ(tools::load(states[rank].out.view(), {0, 3, 63}), 0.0F);
    EXPECT_EQ(tools::load(states[rank].lse.view(), {3, 0}), kMinusInfinity);
    OwnedState garbage(c.layer, 1);  // NaN
    garbage.lse = std::move(states[rank].lse);
    states[rank] = std::move(garbage);
  }
  EXPECT_EQ(cut.difference(cut.merged(states), expected), "");
}

// --- what is refused ---

TEST(shards, a_plan_of_another_rank_or_run_is_refused) {
  Case c = case_of(4, 2, 64, {1}, {40});
  c.layer.shard = {1, 2, 4};
  CaseData data(c);
  const Plan plan = Attention(c.layer).plan(data.batch());
  const auto forward_with = [&](const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = c.layer;
    change(layer);
    OwnedState state(layer, 1);
    Attention(layer).forward(data.query.view(), data.cache(), plan, state.out.view(), state.lse.view());
  };
  forward_with([](LayerSpec&) {});
  for (const auto& change :
       {+[](LayerSpec& layer) { layer.shard.rank = 0; }, +[](LayerSpec& layer) { layer.shard.num_ranks = 4; },
        +[](LayerSpec& layer) { layer.shard.interleave_size = 1; },
        +[](LayerSpec& layer) { layer.key_run = KeyRun::context; }}) {
    expect_refused([&] { forward_with(change); }, ErrorCode::mismatch, "plan");
  }
}

TEST(shards, a_run_needs_its_new_tokens_among_the_keys) {
  Case c = case_of(4, 2, 64, {9}, {9});
  const CaseData data(c);
  const std::vector<int32_t> lengths = {8};
  Batch batch = data.batch();
  batch.seq_lens = testing::view(lengths);
  Attention(c.layer).plan(batch);
  c.layer.key_run = KeyRun::context;
  expect_refused([&] { Attention(c.layer).plan(batch); }, ErrorCode::mismatch, "seq_lens[0]");
}

TEST(shards, a_block_table_need_hold_only_what_the_rank_keeps) {
  Case c = case_of(4, 2, 64, {1}, {129});
  c.layer.shard = {0, 2, 16};
  const CaseData data(c);
  const std::vector<int32_t> table = {0, 1, 2, 3, 4};
  Batch batch = data.batch();
  batch.slot_mapping = {};
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {1, 5});
  Attention(c.layer).plan(batch);  // 65 keys
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {1, 4});
  expect_refused([&] { Attention(c.layer).plan(batch); }, ErrorCode::invalid_argument, "seq_lens[0]");
  c.layer.shard.rank = 1;
  Attention(c.layer).plan(batch);  // 64 keys
}

// --- prefix groups ---

TEST(shards, prefix_groups_speak_of_whole_requests) {
  Case c = case_of(2, 2, 64, {1, 1}, {16385, 16400});
  c.layer.shard = {1, 2, 16};
  c.prefix_groups = {{{0, 1}, 16384}};
  c.with_prefix_groups = true;
  c.prefix_sharing = PrefixSharing::always;
  const CaseData data(c);
  const PlanReport named = preview_plan(c.layer, data.batch(), "cpu");
  Batch batch = data.batch();
  batch.prefix_groups.clear();
  const PlanReport found = preview_plan(c.layer, batch, "cpu");
  ASSERT_EQ(found.prefix_groups.size(), 1U);
  EXPECT_EQ(found.prefix_groups[0].num_tokens, 16384);
  for (const PlanReport& report : {named, found}) {
    int64_t shared_keys = 0;
    for (const PlanItem& item : report.items) {
      if (item.requests.size() == 2 && item.kv_head == 0) shared_keys += item.keys;
    }
    EXPECT_EQ(shared_keys, 8192);
  }
  testing::expect_agrees(c);
}

}  // namespace
}  // namespace qkv
