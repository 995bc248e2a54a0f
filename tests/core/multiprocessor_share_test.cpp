#include "core/index/multiprocessor_share.hpp"

#include <gtest/gtest.h>

namespace qkv::index {
namespace {

TEST(multiprocessor_share, one_kind_alone_shares_nothing) {
  EXPECT_EQ(few_rows_multiprocessors(0, 1'000'000'000, 132), 0);
  EXPECT_EQ(few_rows_multiprocessors(1'000'000'000, 0, 132), 0);
}

TEST(multiprocessor_share, both_end_at_the_same_time) {
  for (const int64_t bytes : {10'000'000LL, 1'000'000'000LL, 100'000'000'000LL}) {
    const int64_t operations = 1'000'000'000'000;
    const int32_t share = few_rows_multiprocessors(bytes, operations, 132);
    ASSERT_LT(share, 132);
    const auto few_rows_time = [&](int32_t n) { return static_cast<double>(bytes) / kBandwidthGain / n; };
    const auto many_rows_time = [&](int32_t n) { return static_cast<double>(operations) / kOperationsPerByte / n; };
    // The balance lies between this share and the next.
    if (share > 0) {
      EXPECT_GE(few_rows_time(share), many_rows_time(132 - share));
    }
    if (share < 131) {
      EXPECT_LE(few_rows_time(share + 1), many_rows_time(132 - share - 1));
    }
  }
}

TEST(multiprocessor_share, more_bytes_never_get_fewer) {
  int32_t last = 0;
  for (int64_t bytes = 1; bytes < 1'000'000'000'000; bytes *= 3) {
    const int32_t share = few_rows_multiprocessors(bytes, 1'000'000'000'000, 132);
    EXPECT_GE(share, last);
    last = share;
  }
  EXPECT_EQ(few_rows_multiprocessors(INT64_MAX / 132, 144, 132), 131);
}

}  // namespace
}  // namespace qkv::index
