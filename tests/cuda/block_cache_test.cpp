#include "cuda/block_cache.hpp"

#include <gtest/gtest.h>

namespace qkv::cuda {
namespace {

jit::CUstream stream(int number) {
  static int handles[4];
  return reinterpret_cast<jit::CUstream>(&handles[number]);
}

TEST(BlockCache, gives_the_smallest_block_that_is_large_enough) {
  BlockCache cache(1 << 30);
  cache.give({1, 100'000}, stream(0));
  cache.give({2, 60'000}, stream(0));
  cache.give({3, 40'000}, stream(0));
  const auto block = cache.take(50'000, stream(0));
  ASSERT_TRUE(block.has_value());
  EXPECT_EQ(block->address, 2U);
  EXPECT_EQ(block->bytes, 60'000U);
  EXPECT_EQ(cache.kept_bytes(), 140'000U);
}

TEST(BlockCache, a_block_is_only_given_to_its_own_stream) {
  BlockCache cache(1 << 30);
  cache.give({1, 50'000}, stream(0));
  EXPECT_FALSE(cache.take(50'000, stream(1)).has_value());
  EXPECT_FALSE(cache.take(50'000, nullptr).has_value());
  EXPECT_TRUE(cache.take(50'000, stream(0)).has_value());
  EXPECT_FALSE(cache.take(50'000, stream(0)).has_value()) << "it has an owner";
}

TEST(BlockCache, small_needs_do_not_take_large_blocks) {
  BlockCache cache(1 << 30);
  cache.give({1, 1 << 24}, stream(0));
  EXPECT_FALSE(cache.take(1000, stream(0)).has_value());
}

TEST(BlockCache, a_slowly_growing_need_finds_its_block_again) {
  size_t asked = 0;
  BlockCache cache(1 << 30);
  for (size_t bytes = 100'000; bytes < 1'000'000; bytes += 500) {
    std::optional<Block> block = cache.take(bytes, stream(0));
    if (!block) {
      ++asked;
      block = Block{asked, BlockCache::bytes_to_ask(bytes)};
    }
    ASSERT_GE(block->bytes, bytes);
    cache.give(*block, stream(0));
  }
  EXPECT_LT(asked, 15U);
}

TEST(BlockCache, the_oldest_blocks_over_the_limit_come_back_to_be_freed) {
  BlockCache cache(100'000);
  EXPECT_TRUE(cache.give({1, 60'000}, stream(0)).empty());
  const auto freed = cache.give({2, 60'000}, stream(1));
  ASSERT_EQ(freed.size(), 1U);
  EXPECT_EQ(freed[0].address, 1U);
  EXPECT_EQ(cache.give({3, 200'000}, stream(0)).size(), 2U) << "one that is larger than the limit is not kept";
  EXPECT_EQ(cache.kept_bytes(), 0U);
}

TEST(BlockCache, drains) {
  BlockCache cache(100'000);
  cache.give({1, 60'000}, stream(0));
  EXPECT_EQ(cache.drain().size(), 1U);
  EXPECT_EQ(cache.kept_bytes(), 0U);
  EXPECT_FALSE(cache.take(60'000, stream(0)).has_value());
}

}  // namespace
}  // namespace qkv::cuda
