// What a plan's index arrays may hold, at and around every bound.
#include "core/index/bounds.hpp"

#include <gtest/gtest.h>

namespace qkv::index {
namespace {

TEST(bounds, pages_are_those_of_the_cache) {
  for (const int64_t num_pages : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1} << 40}) {
    EXPECT_FALSE(is_page(-1, num_pages));
    EXPECT_EQ(is_page(0, num_pages), num_pages > 0);
    EXPECT_EQ(is_page(6, num_pages), num_pages > 6);
    EXPECT_EQ(is_page(7, num_pages), num_pages > 7);
    EXPECT_FALSE(is_page(INT32_MIN, num_pages));
    EXPECT_EQ(is_page(INT32_MAX, num_pages), num_pages > INT32_MAX);
  }
}

TEST(bounds, slots_may_be_none) {
  EXPECT_TRUE(is_slot_or_none(-1, 0));
  EXPECT_FALSE(is_slot_or_none(0, 0));
  EXPECT_TRUE(is_slot_or_none(47, 48));
  EXPECT_FALSE(is_slot_or_none(48, 48));
  EXPECT_FALSE(is_slot_or_none(-2, 48));
  EXPECT_FALSE(is_slot_or_none(INT64_MIN, 48));
}

TEST(bounds, lengths_end_with_the_requests_pages) {
  EXPECT_TRUE(fits_pages(0, 0, 16));
  EXPECT_FALSE(fits_pages(1, 0, 16));
  EXPECT_TRUE(fits_pages(48, 3, 16));
  EXPECT_FALSE(fits_pages(49, 3, 16));
  EXPECT_FALSE(fits_pages(-1, 3, 16));
  EXPECT_FALSE(fits_pages(16, -1, 16));
}

}  // namespace
}  // namespace qkv::index
