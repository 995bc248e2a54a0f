// What the GPU engine says about devices that it cannot use and about indices that are wrong on the device; no GPU
// needed.
#include <gmock/gmock.h>

#include "cuda/index_check.hpp"
#include "cuda/memory.hpp"
#include "support/small_layer.hpp"

namespace qkv::cuda {
namespace {

using ::testing::HasSubstr;

TEST(device_refusals, gpus_before_ampere) {
  testing::expect_refused([] { arch_of(1, 7, 5); }, ErrorCode::unsupported, "device");
  try {
    arch_of(1, 7, 5);
  } catch (const Error& error) {
    EXPECT_EQ(error.value(), "cuda:1 of compute capability 7.5");
    EXPECT_EQ(error.allowed(), "a GPU of compute capability 8.0 (Ampere) or later");
  }
}

TEST(device_refusals, architectures_since_ampere_have_names) {
  EXPECT_EQ(arch_of(0, 8, 0), "sm_80");
  EXPECT_EQ(arch_of(0, 8, 9), "sm_89");
  EXPECT_EQ(arch_of(0, 9, 0), "sm_90a");
  EXPECT_EQ(arch_of(0, 12, 0), "sm_120");
}

// Two requests with 3 and 1 new tokens: 20 keys on 2 pages, 33 keys on 3.
plan::PlanData small_plan() {
  plan::PlanData plan;
  plan.layer = testing::layer_of(4, 2, 8);
  plan.layer.cache = CacheSpec{16};
  plan.num_requests = 2;
  plan.num_tokens = 4;
  plan.query_start_loc = {0, 3, 4};
  plan.seq_lens = plan.key_lens = {20, 33};
  plan.mask_inputs = {{0, 3, 20, {}}, {1, 1, 33, {}}};
  plan.page_start = {0, 2};
  plan.pages = {7, 1, 4, 0, 3};
  plan.slot_mapping = {17, 18, 19, 48, -1};
  return plan;
}

TEST(device_refusals, bad_page_names_request_and_positions) {
  const plan::PlanData plan = small_plan();
  const Error first = bad_page(plan, 1, -5, 8);
  EXPECT_EQ(first.argument(), "block_table[0, 1]");
  EXPECT_EQ(first.value(), "page -5 on the device, for request 0, positions 16 to 19");
  EXPECT_THAT(first.allowed(), HasSubstr("0 to 7, the cache's pages"));
  const Error second = bad_page(plan, 2, 900, 8);
  EXPECT_EQ(second.argument(), "block_table[1, 0]");
  EXPECT_EQ(second.value(), "page 900 on the device, for request 1, positions 0 to 15");
  EXPECT_EQ(bad_page(plan, 4, 8, 8).argument(), "block_table[1, 2]");
  EXPECT_EQ(bad_page(plan, 4, 8, 8).value(), "page 8 on the device, for request 1, positions 32 to 32");
}

// Pages hold a rank's own tokens: their positions are the request's.
TEST(device_refusals, bad_page_of_a_rank_names_positions_of_the_request) {
  plan::PlanData plan = small_plan();
  const index::ShownKeys keys{index::kAllKeys, 1, 4, 2};
  plan.seq_lens = {75, 33};
  plan.key_lens = {19, 9};
  plan.mask_inputs[0] = {0, 3, 75, {}, keys};
  EXPECT_EQ(bad_page(plan, 0, 900, 8).value(), "page 900 on the device, for request 0, positions 2 to 59");
  EXPECT_EQ(bad_page(plan, 1, 900, 8).value(), "page 900 on the device, for request 0, positions 66 to 74");
}

// A request without keys has no entries: its neighbour is named.
TEST(device_refusals, bad_page_behind_an_empty_request) {
  plan::PlanData plan = small_plan();
  plan.num_requests = 3;
  plan.query_start_loc = {0, 3, 3, 4};
  plan.seq_lens = plan.key_lens = {20, 0, 33};
  plan.mask_inputs = {{0, 3, 20, {}}, {1, 0, 0, {}}, {2, 1, 33, {}}};
  plan.page_start = {0, 2, 2};
  EXPECT_EQ(bad_page(plan, 2, 900, 8).argument(), "block_table[2, 0]");
}

TEST(device_refusals, bad_slot_names_request_and_position) {
  const plan::PlanData plan = small_plan();
  const Error error = bad_slot(plan, 1, 4711, 128);
  EXPECT_EQ(error.argument(), "slot_mapping[1]");
  EXPECT_EQ(error.value(), "slot 4711 on the device, for request 0, position 18");
  EXPECT_THAT(error.allowed(), HasSubstr("-1 to 127, the cache's slots"));
  EXPECT_EQ(bad_slot(plan, 3, -9, 128).value(), "slot -9 on the device, for request 1, position 32");
  EXPECT_EQ(bad_slot(plan, 4, -9, 128).value(), "slot -9 on the device, for row 4, past the batch's 4 tokens");
}

TEST(device_refusals, bad_length_names_the_request) {
  const Error error = bad_length(small_plan(), 1, 34000);
  EXPECT_EQ(error.argument(), "seq_lens[1]");
  EXPECT_EQ(error.value(), "34000 on the device");
  EXPECT_THAT(error.allowed(), HasSubstr("33, the request's keys in the plan"));
}

}  // namespace
}  // namespace qkv::cuda
