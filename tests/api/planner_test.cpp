// A planner's plans on the CPU: the same results, larger batches and older plans refused by name.
#include "qkv/planner.hpp"

#include <algorithm>

#include "plan/plan_data.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_refused;
using testing::view;

constexpr PlanLimits kLimits = {
    .max_requests = 4, .max_tokens = 12, .max_query_len = 8, .max_seq_len = 200, .max_keys = 300, .num_pages = 64};

class planner : public ::testing::Test {
 protected:
  planner() : case_(case_of(4, 2, 16, {3, 1, 8}, {40, 100, 20})), data_(case_), attention_(case_.layer) {}

  std::vector<std::byte> forward(const Plan& plan) {
    tools::OwnedTensor out(DType::f32, {12, 4, 16});
    tools::OwnedTensor query(DType::f32, {12, 4, 16});
    for (int64_t t = 0; t < 12; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t d = 0; d < 16; ++d) tools::store(query.view(), {t, h, d}, static_cast<float>((t + h * d) % 7));
      }
    }
    attention_.forward(query.view(), cache(), plan, out.view());
    return out.buffer().bytes();
  }

  // A cache of the 64 pages that the limits name.
  KvCache cache() {
    if (pages_.view().data == nullptr || !filled_) {
      pages_ = tools::OwnedTensor(DType::f32, {64, 16, 2, 16});
      for (int64_t p = 0; p < 64; ++p) {
        for (int64_t t = 0; t < 16; ++t) {
          for (int64_t h = 0; h < 2; ++h) {
            for (int64_t d = 0; d < 16; ++d) {
              tools::store(pages_.view(), {p, t, h, d}, static_cast<float>((p + t * h + d) % 5));
            }
          }
        }
      }
      filled_ = true;
    }
    return {pages_.view(), pages_.view()};
  }

  tools::Case case_;
  tools::CaseData data_;
  Attention attention_;
  tools::OwnedTensor pages_;
  bool filled_ = false;
};

TEST_F(planner, plans_give_the_bits_of_plans_made_for_the_batch) {
  Planner planner = attention_.planner(kLimits);
  const std::vector<std::byte> wanted = forward(attention_.plan(data_.batch()));
  EXPECT_EQ(forward(planner.plan(data_.batch())), wanted);
  EXPECT_EQ(forward(planner.plan(data_.batch())), wanted);
}

TEST_F(planner, items_stand_longest_first) {
  Planner planner = attention_.planner(kLimits);
  const Plan plan = planner.plan(data_.batch());
  const auto& items = plan.data().items;
  ASSERT_GT(items.size(), 2U);
  EXPECT_TRUE(std::is_sorted(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; }));
}

TEST_F(planner, casebook_086_an_older_plan_is_refused) {
  Planner planner = attention_.planner(kLimits);
  const Plan first = planner.plan(data_.batch());
  const Plan second = planner.plan(data_.batch());
  forward(second);
  expect_refused([&] { forward(first); }, ErrorCode::mismatch, "plan");
}

TEST_F(planner, a_plan_outlives_its_planner) {
  std::optional<Planner> planner = attention_.planner(kLimits);
  const Plan plan = planner->plan(data_.batch());
  planner.reset();
  EXPECT_EQ(forward(plan), forward(attention_.plan(data_.batch())));
}

TEST_F(planner, batches_over_the_limits_are_refused_and_leave_the_plan_alone) {
  Planner planner = attention_.planner(kLimits);
  const Plan plan = planner.plan(data_.batch());
  const auto refused = [&](std::vector<int32_t> q, std::vector<int32_t> kv, const char* argument) {
    auto c = case_of(4, 2, 16, std::move(q), std::move(kv));
    const tools::CaseData data(c);
    expect_refused([&] { planner.plan(data.batch()); }, ErrorCode::invalid_argument, argument);
  };
  refused({1, 1, 1, 1, 1}, {1, 1, 1, 1, 1}, "query_start_loc: requests");
  refused({8, 5}, {8, 5}, "query_start_loc: new tokens");
  refused({1, 9}, {9, 9}, "query_start_loc: new tokens of request 1");
  refused({1}, {201}, "seq_lens[0]");
  refused({1, 1}, {200, 101}, "seq_lens: keys of all requests");
  forward(plan);
}

TEST_F(planner, pages_and_slots_outside_the_declared_cache_are_refused) {
  Planner planner = attention_.planner(kLimits);
  const std::vector<int32_t> starts = {0, 1}, lengths = {20};
  const std::vector<int64_t> slots = {64 * 16};
  std::vector<int32_t> pages = {3, 64};
  Batch batch{view(starts), view(lengths), Tensor::contiguous(pages.data(), DType::i32, {1, 2})};
  expect_refused([&] { planner.plan(batch); }, ErrorCode::invalid_argument, "block_table: page");
  pages[1] = 63;
  batch.slot_mapping = view(slots);
  expect_refused([&] { planner.plan(batch); }, ErrorCode::invalid_argument, "slot_mapping: slot");
}

TEST_F(planner, tensors_must_hold_the_largest_batch) {
  Planner planner = attention_.planner(kLimits);
  const Plan plan = planner.plan(data_.batch());
  tools::OwnedTensor rows(DType::f32, {11, 4, 16}), out(DType::f32, {12, 4, 16});
  expect_refused([&] { attention_.forward(rows.view(), cache(), plan, out.view()); }, ErrorCode::mismatch, "query");
  expect_refused([&] { attention_.forward(out.view(), data_.cache(), plan, out.view()); }, ErrorCode::mismatch,
                 "block_table");
}

TEST_F(planner, padded_requests_change_nothing) {
  Planner planner = attention_.planner(kLimits);
  const std::vector<std::byte> wanted = forward(planner.plan(data_.batch()));
  std::vector<int32_t> starts = data_.query_start_loc, lengths = data_.seq_lens, table = data_.block_table;
  starts.push_back(starts.back());
  lengths.push_back(0);
  table.resize(table.size() + data_.table_width, -7);
  Batch padded = data_.batch();
  padded.query_start_loc = view(starts);
  padded.seq_lens = view(lengths);
  padded.block_table = Tensor::contiguous(table.data(), DType::i32, {4, data_.table_width});
  padded.slot_mapping = {};
  EXPECT_EQ(forward(planner.plan(padded)), wanted);
}

TEST_F(planner, update_block_table_moves_the_same_work_to_other_pages) {
  Planner planner = attention_.planner(kLimits);
  expect_refused([&] { planner.update_block_table({}, {}); }, ErrorCode::invalid_argument, "planner");
  planner.plan(data_.batch());
  std::vector<int32_t> table = data_.block_table;
  for (int32_t& page : table) page = page >= 0 && page < 60 ? page + 3 : page;
  Batch moved = data_.batch();
  moved.block_table = Tensor::contiguous(table.data(), DType::i32, {3, data_.table_width});
  const std::vector<std::byte> wanted = forward(attention_.plan(moved));
  EXPECT_EQ(forward(planner.update_block_table(moved.block_table, {})), wanted);
}

}  // namespace
}  // namespace qkv
