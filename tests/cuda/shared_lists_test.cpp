// Items of several requests: every state of the plan is written once, by rows that the token table describes, and is
// counted where the last one to arrive joins it.
#include "cuda/shared_lists.hpp"

#include <map>
#include <set>
#include <tuple>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "cuda/device_rules.hpp"
#include "cuda/few_rows_lists.hpp"
#include "cuda/planner_scene.hpp"
#include "plan/builder.hpp"

namespace qkv::cuda {
namespace {

using StatePlace = std::tuple<int32_t, int32_t, int64_t>;  // request, KV head, first row

plan::PlanData shared_plan(const LayerSpec& layer, const char* arch, const Batch& batch) {
  const Rules rules(layer, arch);
  return plan::build(layer, batch, rules, device_rules(layer, facts_of_arch(arch)));
}

// Which states the plan asks for, and where.
std::set<StatePlace> wanted_states(const plan::PlanData& plan) {
  std::set<StatePlace> places;
  for (const plan::WorkItem& item : plan.items) {
    if (!item.few_rows || item.state_row < 0) continue;
    plan::for_each_run(plan, item, [&](const plan::RowRun& run) {
      EXPECT_TRUE(places.insert({run.request, item.kv_head, run.state_row}).second);
    });
  }
  return places;
}

// What the lists do, as the kernels read them.
class Lists {
 public:
  Lists(const plan::PlanData& plan, bool hopper) : plan_(plan), shared_(make_shared_lists(plan, hopper)) {
    if (hopper) {
      for (const FewRowsList& list : make_few_rows_lists(plan, ClusterUse::always)) {
        for (const FewRowsItem& item : list.items) add(item);
      }
      for (int32_t tile = 0; tile < kFewRowsTiles; ++tile) {
        for (const FewRowsItem& item : shared_.sm90[tile]) {
          add_shared(item.kv_head, item.query_token, item.query_token + item.query_end - item.query_begin);
          expect_tile(item, 4 << tile);
          expect_same_keys(item.segment_begin, item.query_token, item.query_token + item.query_end - item.query_begin);
        }
      }
      return;
    }
    for (const WorkItem& item : shared_.sm80) {
      add_shared(item.kv_head, item.query_begin, item.query_end);
      expect_same_keys(item.segment_begin, item.query_begin, item.query_end);
      EXPECT_LE((item.query_end - item.query_begin) * plan_.layer.group_size(), 16);
    }
    for (const plan::WorkItem& item : plan.items) {
      if (item.few_rows && !item.is_shared() && item.state_row >= 0) {
        places_.insert({item.request, item.kv_head, item.state_row});
      }
    }
  }

  const std::set<StatePlace>& places() const { return places_; }
  size_t num_shared() const { return num_shared_; }

  // Of the tickets that items of several requests draw.
  void expect_every_ticket_is_drawn_once_a_state() const {
    for (const auto& [ticket, arrivals] : arrivals_) {
      EXPECT_EQ(arrivals, plan_.merges[ticket].num_states) << "ticket " << ticket;
    }
  }

 private:
  void add(const FewRowsItem& item) {
    if (item.kv_head < 0 || item.num_splits == 1) return;
    // In a cluster states have no place; their merge says where they would be.
    if (item.ticket < 0) {
      const int32_t rows = (item.query_end - item.query_begin) * plan_.layer.group_size();
      places_.insert({item.request, item.kv_head, first_row_of(item) + int64_t{item.split} * rows});
      return;
    }
    places_.insert({item.request, item.kv_head, item.state_row});
    ++arrivals_[item.ticket];
  }

  int64_t first_row_of(const FewRowsItem& item) const {
    for (const plan::MergeItem& merge : plan_.merges) {
      if (merge.request == item.request && merge.kv_head == item.kv_head) return merge.state_row;
    }
    return -1;
  }

  void add_shared(int32_t kv_head, int32_t begin, int32_t end) {
    ++num_shared_;
    std::set<int32_t> requests;
    int32_t run = begin;
    for (int32_t t = begin; t < end; ++t) {
      const SharedToken& token = shared_.tokens[t];
      if (t == run) {
        ASSERT_GT(token.run_tokens, 0);
        run += token.run_tokens;
        EXPECT_TRUE(requests.insert(token.request).second);
        EXPECT_EQ(token.run_tokens, plan_.mask_inputs[token.request].q_len);
        EXPECT_LT(token.split, token.num_splits);
        EXPECT_EQ(token.num_splits, plan_.merges[token.ticket].num_states);
        EXPECT_EQ(plan_.merges[token.ticket].kv_head, kv_head);
        EXPECT_TRUE(places_.insert({token.request, kv_head, token.state_row}).second);
        ++arrivals_[token.ticket];
      } else {
        const SharedToken& before = shared_.tokens[t - 1];
        EXPECT_EQ(token.run_tokens, 0);
        EXPECT_EQ(std::tuple(token.request, token.query, token.state_row),
                  std::tuple(before.request, before.query + 1, before.state_row + plan_.layer.group_size()));
      }
      EXPECT_EQ(token.token, plan_.query_start_loc[token.request] + token.query);
      EXPECT_EQ(token.position, plan_.seq_lens[token.request] - plan_.mask_inputs[token.request].q_len + token.query);
    }
    EXPECT_EQ(run, end);
    EXPECT_GT(requests.size(), 1U);
  }

  // One arithmetic for all rows: that of each request's own tile.
  void expect_tile(const FewRowsItem& item, int32_t tile_q) const {
    int32_t rows = 0;
    for (int32_t t = item.query_token; t < item.query_token + item.query_end; ++t) {
      const int32_t own = plan_.mask_inputs[shared_.tokens[t].request].q_len * plan_.layer.group_size();
      EXPECT_EQ(index::few_rows::tile_rows(own), tile_q);
      rows += plan_.layer.group_size();
    }
    EXPECT_LE(rows, index::few_rows::max_rows(plan_.layer.value_dim()));
  }

  void expect_same_keys(int32_t segment, int32_t begin, int32_t end) const {
    const int32_t entry = plan_.segments[segment].begin / plan_.layer.cache->page_size;
    const int32_t first = shared_.tokens[begin].request;
    for (int32_t t = begin; t < end; ++t) {
      EXPECT_EQ(plan_.pages[plan_.page_start[shared_.tokens[t].request] + entry],
                plan_.pages[plan_.page_start[first] + entry]);
    }
  }

  const plan::PlanData& plan_;
  SharedLists shared_;
  std::set<StatePlace> places_;
  std::map<int32_t, int32_t> arrivals_;
  size_t num_shared_ = 0;
};

TEST(shared_lists, every_state_is_written_once_and_every_ticket_drawn_as_often_as_it_has_states) {
  size_t num_shared = 0;
  for (const LayerSpec& layer : planner_layers()) {
    for (int64_t i = 0; i < 80; ++i) {
      const bool hopper = i % 2 == 0;
      const tools::Case c = draw_batch(layer, i);
      const Lengths lengths(c);  // all pages are page 0: whatever can be shared is
      Batch batch = lengths.batch(layer);
      batch.prefix_sharing = PrefixSharing::always;
      const plan::PlanData plan = shared_plan(layer, hopper ? "sm_90a" : "sm_80", batch);
      const Lists lists(plan, hopper);
      EXPECT_EQ(lists.places(), wanted_states(plan)) << tools::describe(c);
      if (hopper) lists.expect_every_ticket_is_drawn_once_a_state();
      num_shared += lists.num_shared();
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(num_shared, 500U);
}

// Splits, states and joins are those of the plan that shares nothing: the bits are, too.
TEST(shared_lists, a_plan_that_shares_asks_for_the_same_states) {
  const LayerSpec layer = planner_layers().front();
  auto c = testing::case_of(8, 2, 64, {1, 2, 1, 1, 1}, {3000, 2900, 2950, 10, 3072});
  c.layer = layer;
  const Lengths lengths(c);
  Batch batch = lengths.batch(layer);
  batch.prefix_sharing = PrefixSharing::always;
  const plan::PlanData shared = shared_plan(layer, "sm_90a", batch);
  batch.prefix_sharing = PrefixSharing::off;
  const plan::PlanData apart = shared_plan(layer, "sm_90a", batch);
  EXPECT_FALSE(shared.shared_rows.empty());
  EXPECT_LT(shared.items.size(), apart.items.size());
  EXPECT_EQ(wanted_states(shared), wanted_states(apart));
}

// The rows of a tile of 4 are computed in 8 lanes, those of a tile of 8 in 4: they never stand in one item.
TEST(shared_lists, requests_of_other_tiles_stand_in_other_items) {
  LayerSpec layer = planner_layers()[1];
  layer.mask = mask::causal();
  auto c = testing::case_of(4, 1, 128, {1, 2, 1, 2, 4, 4}, {3000, 3000, 3000, 3000, 3000, 3000});
  c.layer = layer;
  const Lengths lengths(c);
  Batch batch = lengths.batch(layer);
  batch.prefix_sharing = PrefixSharing::always;
  const plan::PlanData plan = shared_plan(layer, "sm_90a", batch);
  const SharedLists lists = make_shared_lists(plan, true);
  for (int32_t tile = 0; tile < 3; ++tile) EXPECT_FALSE(lists.sm90[tile].empty()) << tile;
  EXPECT_TRUE(lists.sm90[3].empty());
}

// A window hides other tiles from the one than from the other: which lane a tile falls to would change.
TEST(shared_lists, on_hopper_members_that_read_other_tiles_of_a_split_stand_apart) {
  LayerSpec layer = planner_layers().front();
  layer.mask = mask::sliding_window(700);
  auto c = testing::case_of(8, 2, 64, {1, 1, 1}, {1500, 1500, 1590});
  c.layer = layer;
  const Lengths lengths(c);
  Batch batch = lengths.batch(layer);
  batch.prefix_sharing = PrefixSharing::always;
  const plan::PlanData plan = shared_plan(layer, "sm_90a", batch);
  ASSERT_FALSE(plan.shared_rows.empty());
  for (const plan::WorkItem& item : plan.items) {
    if (plan.segments[item.segment_begin].tile_class != TileClass::partial) continue;
    plan::for_each_run(plan, item, [&](const plan::RowRun& run) {
      EXPECT_EQ(run.request == 2, item.request == 2) << "keys from " << plan.segments[item.segment_begin].begin;
    });
  }
}

TEST(shared_lists, are_empty_where_nothing_is_shared) {
  const LayerSpec layer = planner_layers().front();
  auto c = testing::case_of(8, 2, 64, {1, 1}, {3000, 3000});
  c.layer = layer;
  const Lengths lengths(c);
  Batch batch = lengths.batch(layer);
  batch.prefix_sharing = PrefixSharing::off;
  const SharedLists lists = make_shared_lists(shared_plan(layer, "sm_90a", batch), true);
  EXPECT_TRUE(lists.tokens.empty());
  for (const auto& list : lists.sm90) EXPECT_TRUE(list.empty());
}

// Three requests of 16 rows each do not fit one item of 32, nor two of a group of 32 heads any.
TEST(device_rules, groups_too_large_for_two_requests_share_nothing) {
  const auto rows_of = [](int32_t group_size, int32_t dim, const char* arch) {
    LayerSpec layer = testing::layer_of(group_size, 1, dim);
    layer.query_dtype = layer.kv_dtype = DType::bf16;
    layer.cache = CacheSpec{16};
    return device_rules(layer, facts_of_arch(arch)).shared_few_rows;
  };
  EXPECT_EQ(rows_of(4, 128, "sm_90a"), 32);
  EXPECT_EQ(rows_of(16, 128, "sm_90a"), 32);
  EXPECT_EQ(rows_of(17, 128, "sm_90a"), 0);
  EXPECT_EQ(rows_of(8, 256, "sm_90a"), 16);
  EXPECT_EQ(rows_of(9, 256, "sm_90a"), 0);
  EXPECT_EQ(rows_of(8, 128, "sm_80"), 16);
  EXPECT_EQ(rows_of(9, 128, "sm_80"), 0);
}

// An item has one scale for all its queries, and scales of tokens no registers beside several requests on Hopper.
TEST(device_rules, caches_of_8_bit_floats_are_shared_by_queries_of_16_bits) {
  LayerSpec layer = testing::layer_of(4, 1, 128);
  layer.query_dtype = DType::bf16;
  layer.kv_dtype = DType::f8e4m3;
  layer.cache = CacheSpec{16};
  layer.kv_scales = KvScales::per_head;
  const auto rows_of = [&](const char* arch) { return device_rules(layer, facts_of_arch(arch)).shared_few_rows; };
  EXPECT_EQ(rows_of("sm_90a"), 32);
  EXPECT_EQ(rows_of("sm_80"), 16);
  layer.kv_scales = KvScales::per_token_head;
  EXPECT_EQ(rows_of("sm_90a"), 0);
  EXPECT_EQ(rows_of("sm_80"), 16);
  layer.head_dim = 272;  // the sm_80 kernel's
  EXPECT_EQ(rows_of("sm_90a"), 16);
  layer.kv_scales = KvScales::per_head;
  EXPECT_EQ(rows_of("sm_90a"), 16);
  layer.query_dtype = DType::f8e4m3;
  EXPECT_EQ(rows_of("sm_90a"), 0);
  EXPECT_EQ(rows_of("sm_80"), 0);
}

}  // namespace
}  // namespace qkv::cuda
