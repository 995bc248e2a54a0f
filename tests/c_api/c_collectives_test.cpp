// Ranks through the C interface: those of a process, and functions of the caller's own.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "qkv/qkv.h"

namespace qkv {
namespace {

void expect_ok(qkv_status status) { EXPECT_EQ(status, QKV_OK) << qkv_last_error_message(); }

qkv_tensor floats(const std::vector<float>& values, std::vector<int64_t> shape) {
  return qkv_tensor_contiguous(values.data(), QKV_F32, static_cast<int32_t>(shape.size()), shape.data());
}

TEST(c_collectives, threads_of_a_process_exchange) {
  qkv_collectives* ranks[2] = {};
  expect_ok(qkv_in_process_ranks(2, {QKV_CPU, 0}, 0, ranks));
  const auto body = [&](int32_t own) {
    int32_t rank = -1, num_ranks = 0;
    expect_ok(qkv_collectives_rank(ranks[own], &rank));
    expect_ok(qkv_collectives_num_ranks(ranks[own], &num_ranks));
    EXPECT_EQ(rank, own);
    EXPECT_EQ(num_ranks, 2);
    const auto base = static_cast<float>(10 * own);
    const std::vector<float> send = {base, base + 1};
    std::vector<float> gathered(4), exchanged(2), sum(1);
    const qkv_tensor row = floats(send, {2}), stacked = floats(send, {2, 1});
    const qkv_tensor gathered_view = floats(gathered, {2, 2}), exchanged_view = floats(exchanged, {2, 1});
    const qkv_tensor sum_view = floats(sum, {1});
    expect_ok(qkv_all_gather(ranks[own], &row, &gathered_view, nullptr));
    EXPECT_EQ(gathered, (std::vector<float>{0, 1, 10, 11}));
    expect_ok(qkv_all_to_all(ranks[own], &stacked, &exchanged_view, nullptr));
    EXPECT_EQ(exchanged, own == 0 ? (std::vector<float>{0, 10}) : (std::vector<float>{1, 11}));
    expect_ok(qkv_collectives_check(ranks[own]));
    expect_ok(qkv_reduce_scatter(ranks[own], &stacked, &sum_view, nullptr));
    EXPECT_EQ(sum[0], own == 0 ? 10 : 12);
    qkv_collectives_destroy(ranks[own]);
  };
  std::thread other(body, 1);
  body(0);
  other.join();
}

// Rank 0 of 1 by the caller's own hand; `context` counts the calls.
int32_t copy_row(void* context, const void* send, void* receive, int64_t row_bytes, qkv_stream) {
  ++*static_cast<int*>(context);
  std::memcpy(receive, send, static_cast<size_t>(row_bytes));
  return 0;
}
int32_t copy_floats(void* context, const float* send, float* receive, int64_t row_elements, qkv_stream stream) {
  return copy_row(context, send, receive, row_elements * 4, stream);
}
int32_t fail(void*, const void*, void*, int64_t, qkv_stream) { return 7; }

TEST(c_collectives, functions_of_the_caller_are_called_and_may_fail) {
  qkv_collectives_functions functions;
  qkv_collectives_functions_init(&functions, sizeof functions);
  qkv_collectives* ranks = nullptr;
  int num_calls = 0;
  functions.all_gather = copy_row;
  functions.reduce_scatter = copy_floats;
  EXPECT_EQ(qkv_collectives_create(&functions, &num_calls, 0, 1, {QKV_CPU, 0}, &ranks), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "functions");
  EXPECT_EQ(ranks, nullptr);
  functions.all_to_all = fail;
  expect_ok(qkv_collectives_create(&functions, &num_calls, 0, 1, {QKV_CPU, 0}, &ranks));
  const std::vector<float> values = {1, 2, 3};
  std::vector<float> received(3);
  const qkv_tensor row = floats(values, {3}), stacked = floats(values, {1, 3});
  const qkv_tensor received_row = floats(received, {3}), received_stacked = floats(received, {1, 3});
  expect_ok(qkv_all_gather(ranks, &row, &received_stacked, nullptr));
  EXPECT_EQ(received, values);
  received.assign(3, 0);
  expect_ok(qkv_reduce_scatter(ranks, &stacked, &received_row, nullptr));
  EXPECT_EQ(received, values);
  EXPECT_EQ(num_calls, 2);
  EXPECT_EQ(qkv_all_to_all(ranks, &stacked, &received_stacked, nullptr), QKV_UNAVAILABLE);
  EXPECT_STREQ(qkv_last_error_message(), "all_to_all: got result 7; allowed: 0: the caller's function failed");
  qkv_collectives_destroy(ranks);
}

TEST(c_collectives, refusals_are_statuses) {
  qkv_collectives* ranks = nullptr;
  EXPECT_EQ(qkv_in_process_ranks(0, {QKV_CPU, 0}, 0, &ranks), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_in_process_ranks(1, {QKV_CPU, 0}, -1, &ranks), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_in_process_ranks(1, {QKV_CPU, 0}, 0, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_nccl_ranks(nullptr, 1, 0, 0, &ranks), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_nccl_unique_id(nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_mpi_ranks(nullptr, -1, &ranks), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_all_gather(nullptr, nullptr, nullptr, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_collectives_check(nullptr), QKV_INVALID_ARGUMENT);
  expect_ok(qkv_in_process_ranks(1, {QKV_CPU, 0}, 0, &ranks));
  EXPECT_EQ(qkv_all_gather(ranks, nullptr, nullptr, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "send");
  qkv_collectives_destroy(ranks);
  qkv_collectives_destroy(nullptr);
}

}  // namespace
}  // namespace qkv
