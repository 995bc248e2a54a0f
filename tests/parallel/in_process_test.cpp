// Ranks that are threads of one process: what they exchange, and what the others are told when one is missing.
#include <gmock/gmock.h>

#include <functional>
#include <thread>

#include "parallel/exchange_scene.hpp"
#include "qkv/status.hpp"
#include "support/rank_threads.hpp"

namespace qkv {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

using Body = std::function<void(Collectives&)>;

// Runs the body on each rank in a thread of its own, which owns the rank's object. What each of them threw, or "".
std::vector<std::string> run_ranks(int32_t num_ranks, milliseconds timeout, const Body& body) {
  std::vector<std::string> messages(num_ranks);
  test::on_each_rank(in_process_ranks(num_ranks, {}, timeout), [&](const std::shared_ptr<Collectives>& own) {
    try {
      body(*own);
    } catch (const std::exception& error) {
      messages[own->rank()] = error.what();
    }
  });
  return messages;
}

void gather_one_float(Collectives& ranks) {
  const float send = 1;
  std::vector<float> receive(static_cast<size_t>(ranks.num_ranks()));
  ranks.all_gather(Tensor::contiguous(&send, DType::f32, {1}), Tensor::of(receive, {ranks.num_ranks(), 1}));
}

class InProcessRanks : public testing::TestWithParam<int32_t> {};

TEST_P(InProcessRanks, random_exchanges_between_threads_follow_the_definition) {
  EXPECT_THAT(run_ranks(GetParam(), milliseconds(60000),
                        [](Collectives& ranks) { test::expect_random_exchanges(ranks, 25, 7); }),
              Each(""));
}

TEST_P(InProcessRanks, every_dtype_moves_between_threads_as_bytes) {
  EXPECT_THAT(run_ranks(GetParam(), milliseconds(60000),
                        [](Collectives& ranks) {
                          for (const DType dtype : test::kAllDtypes) {
                            test::expect_all_gather(ranks, dtype, {3, 5}, 11);
                            test::expect_all_to_all(ranks, dtype, {3, 5}, 11);
                          }
                        }),
              Each(""));
}

TEST_P(InProcessRanks, know_their_numbers_and_device) {
  const auto ranks = in_process_ranks(GetParam());
  for (int32_t i = 0; i < GetParam(); ++i) {
    EXPECT_EQ(ranks[static_cast<size_t>(i)]->rank(), i);
    EXPECT_EQ(ranks[static_cast<size_t>(i)]->num_ranks(), GetParam());
    EXPECT_EQ(ranks[static_cast<size_t>(i)]->device(), Device{});
  }
}

INSTANTIATE_TEST_SUITE_P(ranks, InProcessRanks, testing::Values(1, 2, 3, 4, 8),
                         [](const auto& info) { return std::to_string(info.param); });

TEST(InProcessFailures, late_rank_is_named_to_all_threads_that_wait) {
  const auto messages = run_ranks(3, milliseconds(100), [](Collectives& ranks) {
    if (ranks.rank() == 2) std::this_thread::sleep_for(milliseconds(600));
    gather_one_float(ranks);
  });
  EXPECT_THAT(messages, Each(HasSubstr("all_gather: got no rank 2 within 0.1 s; allowed: every rank")));
}

TEST(InProcessFailures, rank_that_throws_is_named_to_other_threads_at_once) {
  const auto start = std::chrono::steady_clock::now();
  const auto messages = run_ranks(4, milliseconds(60000), [](Collectives& ranks) {
    gather_one_float(ranks);
    if (ranks.rank() == 1) throw std::runtime_error("its own reason");
    gather_one_float(ranks);
  });
  const auto told = AllOf(HasSubstr("all_gather: got rank 1, which has left"));
  EXPECT_THAT(messages, ElementsAre(told, "its own reason", told, told));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(InProcessFailures, every_later_call_of_any_thread_fails_with_the_same_reason) {
  const auto messages = run_ranks(2, milliseconds(50), [](Collectives& ranks) {
    if (ranks.rank() == 1) std::this_thread::sleep_for(milliseconds(300));
    EXPECT_THROW(gather_one_float(ranks), Error);
    EXPECT_THROW(ranks.check(), Error);
    test::expect_all_to_all(ranks, DType::f16, {4}, 1);
  });
  EXPECT_THAT(messages, Each(HasSubstr("all_to_all: got no rank 1 within 0.05 s")));
}

TEST(InProcessFailures, threads_in_different_operations_are_told_who_is_in_which) {
  const auto messages = run_ranks(2, milliseconds(60000), [](Collectives& ranks) {
    if (ranks.rank() == 0) gather_one_float(ranks);
    test::expect_all_to_all(ranks, DType::f16, {4}, 1);
  });
  EXPECT_THAT(messages, ElementsAre(HasSubstr("all_gather: got all_to_all of 8 bytes a rank by rank 1, all_gather of 4 "
                                              "bytes a rank by rank 0"),
                                    HasSubstr("all_to_all: got all_to_all of 8 bytes a rank by rank 1")));
}

TEST(InProcessFailures, threads_with_different_shapes_are_told) {
  const auto messages = run_ranks(3, milliseconds(60000), [](Collectives& ranks) {
    test::expect_reduce_scatter(ranks, {ranks.rank() == 2 ? 3 : 4}, 1);
  });
  EXPECT_THAT(messages, Each(HasSubstr("reduce_scatter of 12 bytes a rank by rank 2, reduce_scatter of 16 bytes a rank "
                                       "by rank 0")));
}

TEST(InProcessFailures, refused_call_leaves_the_threads_in_step) {
  const auto messages = run_ranks(2, milliseconds(60000), [](Collectives& ranks) {
    if (ranks.rank() == 0) EXPECT_THROW(ranks.all_gather({}, {}), Error);
    gather_one_float(ranks);
    EXPECT_NO_THROW(ranks.check());
    gather_one_float(ranks);  // nobody leaves before all have checked
  });
  EXPECT_THAT(messages, Each(""));
}

}  // namespace
}  // namespace qkv
