// Shards and runs of keys by brute force: go through a request's tokens one by one.
#include "core/index/shown_keys.hpp"

#include <gtest/gtest.h>

#include "qkv/batch.hpp"
#include "qkv/shard.hpp"
#include "qkv/status.hpp"

namespace qkv {
namespace {

constexpr int32_t kRankCounts[] = {1, 2, 3, 4, 8};
constexpr int32_t kInterleaves[] = {1, 2, 3, 5, 16};

Tensor view(const std::vector<int32_t>& values) {
  return Tensor::contiguous(values.data(), DType::i32, {static_cast<int64_t>(values.size())});
}

TEST(shard, tokens_go_round_the_ranks_in_runs) {
  for (const int32_t num_ranks : kRankCounts) {
    for (const int32_t interleave : kInterleaves) {
      std::vector<int32_t> kept(num_ranks, 0);
      int32_t owner = 0, in_run = 0;
      for (int32_t position = 0; position < 300; ++position) {
        const Shard shard{owner, num_ranks, interleave};
        ASSERT_EQ(shard.rank_of(position), owner);
        ASSERT_EQ(shard.local_position(position), kept[owner]);
        ASSERT_EQ(shard.position(kept[owner]), position);
        for (int32_t rank = 0; rank < num_ranks; ++rank) {
          const Shard other{rank, num_ranks, interleave};
          ASSERT_EQ(other.local_length(position), kept[rank]);
          ASSERT_EQ(other.max_local_length(position), kept[0]);
          ASSERT_LE(kept[rank], kept[0]);
        }
        ++kept[owner];
        if (++in_run == interleave) {
          in_run = 0;
          owner = (owner + 1) % num_ranks;
        }
      }
    }
  }
}

// The positions that a layer is shown, one by one.
std::vector<int32_t> shown_positions(KeyRun run, const Shard& shard, int32_t q_len, int32_t seq_len) {
  std::vector<int32_t> positions;
  for (int32_t position = 0; position < seq_len; ++position) {
    const bool is_new = position >= seq_len - q_len;
    const bool in_run = run == KeyRun::all || is_new == (run == KeyRun::new_tokens);
    if (in_run && shard.rank_of(position) == shard.rank) positions.push_back(position);
  }
  return positions;
}

TEST(shown_keys, are_numbered_in_rising_order_of_positions) {
  for (const int32_t num_ranks : kRankCounts) {
    for (const int32_t interleave : kInterleaves) {
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        for (const KeyRun run : {KeyRun::all, KeyRun::context, KeyRun::new_tokens}) {
          if (run == KeyRun::new_tokens && num_ranks > 1) continue;
          const index::ShownKeys keys{static_cast<int32_t>(run), rank, num_ranks, interleave};
          for (const auto& [q_len, seq_len] : {std::pair(0, 0), {1, 1}, {1, 70}, {7, 64}, {30, 30}, {5, 97}}) {
            const auto expected = shown_positions(run, {rank, num_ranks, interleave}, q_len, seq_len);
            ASSERT_EQ(keys.count(q_len, seq_len), expected.size());
            for (size_t key = 0; key < expected.size(); ++key) {
              ASSERT_EQ(keys.position(static_cast<int32_t>(key), q_len, seq_len), expected[key]);
              if (key == 0 || keys.stride() == 0) continue;
              ASSERT_EQ(expected[key] - expected[key - 1], keys.stride());
            }
          }
        }
      }
    }
  }
}

TEST(shown_keys, a_request_with_more_new_tokens_than_keys_has_no_context) {
  EXPECT_EQ((index::ShownKeys{index::kContextKeys}.count(9, 4)), 0);
  EXPECT_EQ((index::ShownKeys{index::kContextKeys, 1, 2, 1}.count(9, 4)), 0);
}

// As context_parallel.md would write it: a block of page_size tokens of each of the ranks is one entry of the table.
int64_t slot_by_blocks(int32_t position, int32_t page_size, const Shard& shard, const std::vector<int32_t>& table) {
  const int32_t block = page_size * shard.num_ranks;
  const int32_t in_block = position % block;
  if (in_block / shard.interleave_size % shard.num_ranks != shard.rank) return -1;
  const int32_t offset =
      in_block / (shard.num_ranks * shard.interleave_size) * shard.interleave_size + in_block % shard.interleave_size;
  return int64_t{table[position / block]} * page_size + offset;
}

TEST(shard, slots_of_new_tokens_are_those_of_whole_blocks) {
  const std::vector<int32_t> starts = {0, 1, 40, 40, 43};
  const std::vector<int32_t> lengths = {200, 39, 77, 131};
  const int32_t page_size = 12;
  std::vector<int32_t> table;
  for (int32_t i = 0; i < 4 * 17; ++i) table.push_back((i * 31 + 5) % 89);
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {4, 17});
  for (const int32_t num_ranks : kRankCounts) {
    for (const int32_t interleave : {1, 2, 3, 4, 6, 12}) {
      std::vector<int32_t> owners(starts.back(), 0);
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        const Shard shard{rank, num_ranks, interleave};
        const std::vector<int64_t> slots = shard_slots(batch, page_size, shard);
        ASSERT_EQ(slots.size(), owners.size());
        for (size_t r = 0; r < lengths.size(); ++r) {
          const std::vector<int32_t> row(table.begin() + 17 * static_cast<int64_t>(r),
                                         table.begin() + 17 * (static_cast<int64_t>(r) + 1));
          for (int32_t token = starts[r]; token < starts[r + 1]; ++token) {
            const int32_t position = lengths[r] - starts[r + 1] + token;
            ASSERT_EQ(slots[token], slot_by_blocks(position, page_size, shard, row)) << position;
            owners[token] += slots[token] >= 0 ? 1 : 0;
          }
        }
      }
      for (const int32_t count : owners) ASSERT_EQ(count, 1);
    }
  }
}

std::string refused_argument(const Batch& batch, int32_t page_size, const Shard& shard) {
  try {
    shard_slots(batch, page_size, shard);
  } catch (const Error& error) {
    return error.argument();
  }
  return "";
}

TEST(shard, slots_of_what_cannot_be_are_refused) {
  const std::vector<int32_t> starts = {0, 3};
  const std::vector<int32_t> lengths = {33};
  const std::vector<int32_t> short_lengths = {2};
  const std::vector<int32_t> table = {4, -1};
  const std::vector<int32_t> falling = {0, -1};
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {1, 2});
  EXPECT_EQ(refused_argument(batch, 16, {0, 3, 1}), "");
  EXPECT_EQ(refused_argument(batch, 16, {0, 2, 1}), "block_table[0, 1]");  // the page is -1
  EXPECT_EQ(refused_argument(batch, 8, {0, 1, 1}), "block_table[0, 3]");   // behind the table's end
  EXPECT_EQ(refused_argument(batch, 0, {0, 3, 1}), "page_size");
  EXPECT_EQ(refused_argument(batch, 16, {3, 3, 1}), "shard.rank");
  EXPECT_EQ(refused_argument(batch, 16, {0, 0, 1}), "shard.num_ranks");
  EXPECT_EQ(refused_argument(batch, 16, {0, 3, 3}), "shard.interleave_size");
  batch.seq_lens = view(short_lengths);
  EXPECT_EQ(refused_argument(batch, 16, {0, 3, 1}), "seq_lens[0]");
  batch.query_start_loc = view(falling);
  EXPECT_EQ(refused_argument(batch, 16, {0, 3, 1}), "query_start_loc[1]");
  batch.query_start_loc = {};
  EXPECT_EQ(refused_argument(batch, 16, {0, 3, 1}), "query_start_loc");
}

}  // namespace
}  // namespace qkv
