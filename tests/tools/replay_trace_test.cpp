#include <gtest/gtest.h>

#include <sstream>

#include "qkv/status.hpp"
#include "replay/trace.hpp"

namespace qkv::replay {
namespace {

std::vector<TracedRequest> read(const std::string& text) {
  std::istringstream stream(text);
  return read_trace(stream, "trace.csv");
}

void expect_refused(const std::string& text, const std::string& argument, const std::string& value) {
  try {
    read(text);
    ADD_FAILURE() << "not refused: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), argument);
    EXPECT_EQ(error.value(), value);
    EXPECT_FALSE(error.allowed().empty());
  }
}

constexpr const char* kHeader = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

TEST(ReadTrace, times_count_from_the_first_request) {
  const auto requests = read(std::string(kHeader) +
                             "2023-11-16 18:17:03.9799600,4808,10\n"
                             "2023-11-16 18:17:04.0319600,3180,8\n"
                             "2023-11-17 18:17:03.9799600,110,0\n");
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0], (TracedRequest{0, 4808, 10}));
  EXPECT_NEAR(requests[1].arrival_seconds, 0.052, 1e-6);
  EXPECT_NEAR(requests[2].arrival_seconds, 86400, 1e-6);
  EXPECT_EQ(requests[2].generated_tokens, 0);
}

TEST(ReadTrace, takes_windows_line_ends_and_a_last_line_without_one) {
  const auto requests = read("TIMESTAMP,ContextTokens,GeneratedTokens\r\n0.5,7,3\r\n2.5,9,4");
  EXPECT_EQ(requests, (std::vector<TracedRequest>{{0, 7, 3}, {2, 9, 4}}));
}

TEST(ReadTrace, finds_columns_by_name_and_ignores_others) {
  const auto requests = read("model,GeneratedTokens,TIMESTAMP,ContextTokens\nx,3,10,7\n");
  EXPECT_EQ(requests, (std::vector<TracedRequest>{{0, 7, 3}}));
}

TEST(ReadTrace, sorts_by_arrival_and_keeps_the_order_of_equal_times) {
  const auto requests = read(std::string(kHeader) + "9,1,1\n5,2,1\n9,3,1\n");
  EXPECT_EQ(requests, (std::vector<TracedRequest>{{0, 2, 1}, {4, 1, 1}, {4, 3, 1}}));
}

TEST(ReadTrace, offsets_from_utc_are_taken_into_account) {
  const auto requests = read(std::string(kHeader) +
                             "2024-05-10 10:00:00.25Z,1,1\n"
                             "2024-05-10 12:00:01.25+02:00,2,1\n"
                             "2024-05-10T03:30:02.25-06:30,3,1\n");
  EXPECT_EQ(requests, (std::vector<TracedRequest>{{0, 1, 1}, {1, 2, 1}, {2, 3, 1}}));
}

TEST(ReadTrace, refusals_name_the_line_and_the_value) {
  const std::string header = kHeader;
  expect_refused("a,b,c\n1,2,3\n", "trace.csv, line 1, columns", "a,b,c");
  expect_refused(header + "0,5,1\n1,5\n", "trace.csv, line 3, fields", "2");
  expect_refused(header + "yesterday,5,1\n", "trace.csv, line 2, TIMESTAMP", "yesterday");
  expect_refused(header + "2023-02-30 10:00:00,5,1\n", "trace.csv, line 2, TIMESTAMP", "2023-02-30 10:00:00");
  expect_refused(header + "0,0,1\n", "trace.csv, line 2, ContextTokens", "0");
  expect_refused(header + "0,5x,1\n", "trace.csv, line 2, ContextTokens", "5x");
  expect_refused(header + "0,5,-1\n", "trace.csv, line 2, GeneratedTokens", "-1");
  expect_refused(header + "0,5,99999999999\n", "trace.csv, line 2, GeneratedTokens", "99999999999");
}

TEST(ReadTrace, a_trace_without_requests_is_refused) {
  expect_refused(kHeader, "trace.csv", "no request");
  expect_refused("", "trace.csv", "no request");
}

}  // namespace
}  // namespace qkv::replay
