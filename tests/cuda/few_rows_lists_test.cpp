// Every item lies in one list, and the items of a join stand where the kernel looks for them.
#include "cuda/few_rows_lists.hpp"

#include <bit>
#include <map>
#include <set>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "plan/builder.hpp"
#include "support/small_layer.hpp"

namespace qkv::cuda {
namespace {

namespace shape = index::few_rows;

plan::PlanData plan_of(const tools::Case& c) {
  const tools::CaseData data(c);
  const int32_t dim = c.layer.head_dim;
  const shape::KeyValueShape kv{dim, dim, 2, false};
  return plan::build(c.layer, data.batch(), [&](int32_t q_len, int32_t kv_len) -> index::RequestCut {
    const int32_t rows = q_len * c.layer.group_size();
    if (rows > shape::max_rows(dim)) return {false, q_len, 128, INT32_MAX};
    const int tile_q = shape::tile_rows(rows);
    return {true, q_len, shape::tile_keys(kv, tile_q), shape::split_keys(kv, kv_len, c.layer.num_kv_heads, tile_q)};
  });
}

void expect_sound_lists(const plan::PlanData& plan, ClusterUse use) {
  std::set<std::tuple<int32_t, int32_t, int32_t>> wanted;  // request, KV head, first segment
  for (const plan::WorkItem& item : plan.items) {
    if (item.few_rows) wanted.insert({item.request, item.kv_head, item.segment_begin});
  }
  size_t found = 0;
  int32_t last_tile_q = 0;
  for (const FewRowsList& list : make_few_rows_lists(plan, use)) {
    EXPECT_GT(list.tile_q, last_tile_q);
    last_tile_q = list.tile_q;
    std::map<int, int> arrivals;  // of tickets
    uint32_t most_splits = 2;     // that join within a cluster
    for (size_t i = 0; i < list.items.size(); ++i) {
      const FewRowsItem& item = list.items[i];
      if (item.kv_head < 0) {
        EXPECT_TRUE(list.clustered());
        continue;
      }
      ++found;
      EXPECT_TRUE(wanted.contains({item.request, item.kv_head, item.segment_begin}));
      const int32_t rows = (item.query_end - item.query_begin) * plan.layer.group_size();
      EXPECT_EQ(shape::tile_rows(rows), list.tile_q);
      EXPECT_EQ(item.query_token, plan.query_start_loc[item.request] + item.query_begin);
      if (item.num_splits == 1) continue;
      EXPECT_LT(item.split, item.num_splits);
      if (item.ticket >= 0) {
        EXPECT_TRUE(!list.clustered() || item.num_splits > 8);
        ++arrivals[item.ticket];
        EXPECT_EQ(item.state_row, plan.merges[item.ticket].state_row + item.split * rows);
        EXPECT_EQ(item.num_splits, plan.merges[item.ticket].num_states);
        continue;
      }
      const size_t first = i - item.split;
      EXPECT_EQ(first / list.cluster_size, (first + item.num_splits - 1) / list.cluster_size);
      most_splits = std::max<uint32_t>(most_splits, item.num_splits);
      for (int s = 0; s < item.num_splits; ++s) {
        const FewRowsItem& other = list.items[first + s];
        EXPECT_EQ(other.split, s);
        EXPECT_EQ(std::tuple(other.request, other.kv_head), std::tuple(item.request, item.kv_head));
      }
    }
    for (const auto& [ticket, count] : arrivals) EXPECT_EQ(count, plan.merges[ticket].num_states);
    EXPECT_EQ(list.items.size() % list.cluster_size, 0U);
    if (list.clustered()) {
      EXPECT_EQ(list.cluster_size, use == ClusterUse::always ? 8 : static_cast<int32_t>(std::bit_ceil(most_splits)));
    }
  }
  EXPECT_EQ(found, wanted.size());
}

void expect_sound(const plan::PlanData& plan) {
  for (const ClusterUse use : {ClusterUse::where_most_join, ClusterUse::always}) expect_sound_lists(plan, use);
}

TEST(few_rows_lists, joins_of_few_splits_stand_within_a_cluster) {
  const plan::PlanData plan =
      plan_of(testing::case_of(8, 2, 64, {1, 1, 2, 1, 8, 9, 1}, {3000, 1, 900, 2000, 777, 50, 0}));
  expect_sound(plan);
  EXPECT_TRUE(make_few_rows_lists(plan, ClusterUse::where_most_join).front().clustered());
}

TEST(few_rows_lists, long_requests_join_by_tickets) {
  const plan::PlanData plan = plan_of(testing::case_of(4, 1, 64, {1, 1}, {60'000, 5}));
  expect_sound(plan);
  const auto lists = make_few_rows_lists(plan, ClusterUse::where_most_join);
  ASSERT_EQ(lists.size(), 1U);
  EXPECT_FALSE(lists[0].clustered());
  EXPECT_GT(lists[0].items.size(), 9U);
}

TEST(few_rows_lists, long_and_short_requests_share_a_clustered_list) {
  std::vector<int32_t> kv_lens(20, 900);
  kv_lens.push_back(20'000);
  const plan::PlanData plan = plan_of(testing::case_of(4, 1, 64, std::vector<int32_t>(21, 1), kv_lens));
  expect_sound(plan);
}

TEST(few_rows_lists, clusters_are_no_larger_than_their_joins) {
  for (const auto& [kv_len, cluster_size] : {std::pair{1000, 2}, {1500, 4}, {2000, 4}, {2100, 8}, {4000, 8}}) {
    const plan::PlanData plan =
        plan_of(testing::case_of(4, 1, 64, std::vector<int32_t>(9, 1), std::vector<int32_t>(9, kv_len)));
    expect_sound(plan);
    EXPECT_EQ(make_few_rows_lists(plan, ClusterUse::where_most_join).front().cluster_size, cluster_size) << kv_len;
  }
}

TEST(few_rows_lists, an_empty_batch_has_none) {
  EXPECT_TRUE(make_few_rows_lists(plan_of(testing::case_of(4, 2, 64, {}, {})), ClusterUse::always).empty());
}

}  // namespace
}  // namespace qkv::cuda
