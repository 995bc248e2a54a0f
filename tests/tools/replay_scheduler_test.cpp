#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "qkv/status.hpp"
#include "replay/scheduler.hpp"
#include "replay/step_batch.hpp"

namespace qkv::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

// (num_new, num_keys) of each request of the next step, which is then completed.
std::vector<std::pair<int32_t, int32_t>> run_step(Scheduler& scheduler) {
  std::vector<std::pair<int32_t, int32_t>> lengths;
  for (const StepRequest& request : scheduler.next_step()) lengths.emplace_back(request.num_new, request.num_keys);
  scheduler.complete_step();
  return lengths;
}

TEST(PagePool, grows_by_all_or_none) {
  PagePool pool(3);
  std::vector<int32_t> pages;
  EXPECT_TRUE(pool.grow(pages, 2));
  EXPECT_TRUE(pool.grow(pages, 1)) << "never shrinks";
  EXPECT_EQ(pages.size(), 2U);
  std::vector<int32_t> others;
  EXPECT_FALSE(pool.grow(others, 2));
  EXPECT_TRUE(others.empty());
  EXPECT_EQ(pool.num_free(), 1);
  pool.give_back(pages);
  EXPECT_TRUE(pages.empty());
  EXPECT_TRUE(pool.grow(others, 3));
  EXPECT_EQ(std::set<int32_t>(others.begin(), others.end()), (std::set<int32_t>{0, 1, 2}));
}

TEST(Scheduler, a_prompt_yields_the_first_token_and_the_last_token_is_never_computed) {
  Scheduler scheduler({4, 100, 10, 16});
  scheduler.arrive({0, 5, 3});
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(5, 5)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 6)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 7)));
  EXPECT_FALSE(scheduler.has_work());
  EXPECT_EQ(scheduler.counts().generated_tokens, 3);
  EXPECT_EQ(scheduler.counts().computed_tokens, 7);
  EXPECT_EQ(scheduler.pool().num_used(), 0);
}

TEST(Scheduler, a_request_that_generates_nothing_ends_with_its_prompt) {
  Scheduler scheduler({4, 4, 10, 16});
  scheduler.arrive({0, 5, 0});
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(4, 4)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 5)));
  EXPECT_FALSE(scheduler.has_work());
  EXPECT_EQ(scheduler.counts().finished_requests, 1);
  EXPECT_EQ(scheduler.counts().generated_tokens, 0);
}

TEST(Scheduler, long_prompts_are_cut_by_the_budget_and_decodes_come_first) {
  Scheduler scheduler({4, 8, 10, 16});
  scheduler.arrive({0, 3, 9});
  scheduler.arrive({0, 12, 2});
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(3, 3), Pair(5, 5)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 4), Pair(7, 12)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 5), Pair(1, 13)));
}

TEST(Scheduler, a_step_holds_at_most_max_requests) {
  Scheduler scheduler({2, 100, 10, 16});
  for (int i = 0; i < 3; ++i) scheduler.arrive({0, 4, 1});
  EXPECT_EQ(run_step(scheduler).size(), 2U);
  EXPECT_EQ(run_step(scheduler).size(), 1U);
  EXPECT_FALSE(scheduler.has_work());
}

TEST(Scheduler, a_request_waits_until_its_whole_prompt_fits) {
  Scheduler scheduler({4, 8, 4, 4});  // 16 tokens of cache
  scheduler.arrive({0, 8, 2});
  scheduler.arrive({0, 12, 1});
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(8, 8)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 9)));  // 8 tokens are free: not enough
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(8, 8)));
  EXPECT_EQ(scheduler.counts().preemptions, 0);
}

TEST(Scheduler, a_full_cache_preempts_the_youngest_which_computes_its_tokens_again) {
  Scheduler scheduler({4, 100, 4, 4});
  scheduler.arrive({0, 8, 5});
  scheduler.arrive({0, 7, 4});
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(8, 8), Pair(7, 7)));
  // The older one needs a third page.
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 9)));
  EXPECT_EQ(scheduler.num_waiting(), 1);
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 10)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 11)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 12)));
  // Prompt and the token that it had generated.
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(8, 8)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 9)));
  EXPECT_THAT(run_step(scheduler), ElementsAre(Pair(1, 10)));
  EXPECT_FALSE(scheduler.has_work());
  EXPECT_EQ(scheduler.counts().preemptions, 1);
  EXPECT_EQ(scheduler.counts().recomputed_tokens, 7);
  EXPECT_EQ(scheduler.counts().generated_tokens, 9);
}

TEST(Scheduler, a_request_larger_than_the_cache_is_refused) {
  Scheduler scheduler({4, 100, 4, 4});
  scheduler.arrive({0, 12, 4});
  EXPECT_THROW(scheduler.arrive({0, 12, 5}), Error);
}

// What every step must hold, over random traffic on a cache that is too small.
TEST(Scheduler, steps_keep_the_limits_and_no_page_is_shared) {
  const SchedulerLimits limits{8, 64, 40, 4};
  Scheduler scheduler(limits);
  std::mt19937 random(1);
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  int64_t to_generate = 0;
  int64_t arrived = 0;
  for (int step = 0; step < 4000 && (arrived < 200 || scheduler.has_work()); ++step) {
    for (int i = draw(0, 2); i > 0 && arrived < 200; --i, ++arrived) {
      const TracedRequest request{0, draw(1, 90), draw(0, 60)};
      to_generate += request.generated_tokens;
      scheduler.arrive(request);
    }
    if (!scheduler.has_work()) continue;
    const auto requests = scheduler.next_step();
    ASSERT_FALSE(requests.empty());
    ASSERT_LE(static_cast<int32_t>(requests.size()), limits.max_requests);
    int32_t tokens = 0;
    std::set<int32_t> pages;
    size_t num_pages = 0;
    for (const StepRequest& request : requests) {
      tokens += request.num_new;
      ASSERT_GE(request.num_new, 1);
      ASSERT_GE(request.num_keys, request.num_new);
      ASSERT_EQ(request.pages.size(), static_cast<size_t>((request.num_keys + 3) / 4));
      pages.insert(request.pages.begin(), request.pages.end());
      num_pages += request.pages.size();
    }
    ASSERT_LE(tokens, limits.max_step_tokens);
    ASSERT_EQ(pages.size(), num_pages);
    ASSERT_LT(*pages.rbegin(), limits.num_pages);
    scheduler.complete_step();
  }
  EXPECT_FALSE(scheduler.has_work());
  EXPECT_GT(scheduler.counts().preemptions, 0);
  EXPECT_GT(scheduler.counts().recomputed_tokens, 0);
  EXPECT_EQ(scheduler.counts().finished_requests, 200);
  EXPECT_EQ(scheduler.counts().generated_tokens, to_generate);
  EXPECT_EQ(scheduler.pool().num_used(), 0);
}

TEST(StepBatch, arrays_say_where_new_tokens_go) {
  StepBatch batch(4, 16, 3, 4);
  const std::vector<int32_t> first = {7, 2};
  const std::vector<int32_t> second = {5, 0, 9};
  batch.fill(std::vector<StepRequest>{{3, 6, first}, {1, 9, second}});
  const Batch view = batch.batch();
  const auto values = [](const Tensor& tensor) {
    const auto* data = static_cast<const int32_t*>(tensor.data);
    return std::vector<int32_t>(data, data + tensor.num_elements());
  };
  EXPECT_THAT(values(view.query_start_loc), ElementsAre(0, 3, 4));
  EXPECT_THAT(values(view.seq_lens), ElementsAre(6, 9));
  EXPECT_EQ(view.block_table.shape[0], 2);
  EXPECT_EQ(view.block_table.shape[1], 3);
  EXPECT_EQ(values(view.block_table)[1], 2);
  EXPECT_EQ(values(view.block_table)[5], 9);
  const auto* slots = static_cast<const int64_t*>(view.slot_mapping.data);
  EXPECT_THAT(std::vector<int64_t>(slots, slots + view.slot_mapping.shape[0]),
              ElementsAre(7 * 4 + 3, 2 * 4, 2 * 4 + 1, 9 * 4));
}

}  // namespace
}  // namespace qkv::replay
