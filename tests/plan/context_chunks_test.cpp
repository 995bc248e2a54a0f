// Chunks of context: the spec's worked example, and properties over random batches.
#include "qkv/context_chunks.hpp"

#include <set>

#include "core/index/interleave.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using Ints = std::vector<int32_t>;

ContextChunkOptions options_of(int32_t workspace_tokens, int32_t page_size) {
  ContextChunkOptions options;
  options.workspace_tokens = workspace_tokens;
  options.page_size = page_size;
  return options;
}

TEST(interleave, agrees_with_counting) {
  for (const int32_t num_ranks : {1, 2, 3, 8}) {
    for (const int32_t interleave_size : {1, 2, 16}) {
      Ints kept(num_ranks, 0);
      for (int32_t position = 0; position < 200; ++position) {
        for (int32_t rank = 0; rank < num_ranks; ++rank) {
          ASSERT_EQ(index::local_length(position, rank, num_ranks, interleave_size), kept[rank]);
        }
        const int32_t owner = index::rank_of_token(position, num_ranks, interleave_size);
        ASSERT_EQ(index::local_position(position, num_ranks, interleave_size), kept[owner]);
        ++kept[owner];
      }
    }
  }
}

TEST(context_chunks, worked_example_of_two_requests_and_four_ranks) {
  ContextChunkOptions options = options_of(128, 64);
  options.num_ranks = 4;
  const ContextChunks planned = plan_context_chunks({0, 3, 8}, {65, 96}, options);
  ASSERT_EQ(planned.chunks.size(), 2U);
  const ContextChunk& first = planned.chunks[0];
  const ContextChunk& second = planned.chunks[1];
  EXPECT_EQ(first.seq_lens, Ints{65});
  EXPECT_EQ(second.seq_lens, Ints{96});
  EXPECT_EQ(first.starts, Ints{0});
  EXPECT_EQ(second.starts, Ints{0});
  EXPECT_EQ(first.local_seq_lens, (Ints{17, 16, 16, 16}));
  EXPECT_EQ(second.local_seq_lens, (Ints{24, 24, 24, 24}));
  EXPECT_EQ(first.padded_local_seq_lens, Ints{17});
  EXPECT_EQ(second.padded_local_seq_lens, Ints{24});
  EXPECT_EQ(first.cu_seq_lens, (Ints{0, 65}));
  EXPECT_EQ(second.cu_seq_lens, (Ints{0, 96}));
  EXPECT_EQ(first.padded_local_cu_seq_lens, (Ints{0, 17}));
  EXPECT_EQ(second.padded_local_cu_seq_lens, (Ints{0, 24}));
  EXPECT_EQ(second.tokens, (TokenRange{3, 8}));
  EXPECT_EQ(second.query_start_loc, (Ints{0, 5}));
  EXPECT_TRUE(planned.empty_token_slices.empty());
}

TEST(context_chunks, remainder_opens_the_next_chunk_as_a_continuation) {
  const ContextChunks planned = plan_context_chunks({0, 4, 6, 7, 9}, {40, 150, 0, 5}, options_of(96, 16));
  ASSERT_EQ(planned.chunks.size(), 4U);
  EXPECT_EQ(planned.chunks[0].seq_lens, (Ints{40, 48}));  // 56 free, 48 of them whole pages
  EXPECT_FALSE(planned.chunks[0].is_continuation);
  EXPECT_EQ(planned.chunks[0].tokens, (TokenRange{0, 6}));
  EXPECT_EQ(planned.chunks[0].max_query_len, 4);
  EXPECT_EQ(planned.chunks[1].starts, Ints{48});
  EXPECT_EQ(planned.chunks[1].seq_lens, Ints{96});
  EXPECT_TRUE(planned.chunks[1].is_continuation);
  EXPECT_EQ(planned.chunks[1].continuation_token_end, 6);
  EXPECT_EQ(planned.chunks[2].starts, Ints{144});
  EXPECT_EQ(planned.chunks[2].seq_lens, Ints{6});
  // The request without context ends the chunk.
  EXPECT_EQ(planned.chunks[3].seq_lens, Ints{5});
}

TEST(context_chunks, request_without_context_enters_no_chunk) {
  const ContextChunks planned = plan_context_chunks({0, 4, 6, 6, 9}, {7, 0, 9, 3}, options_of(96, 16));
  ASSERT_EQ(planned.chunks.size(), 2U);
  EXPECT_EQ(planned.chunks[0].request_end, 1);
  EXPECT_EQ(planned.chunks[1].request_begin, 3);  // request 2 has no new tokens
  EXPECT_EQ(planned.empty_token_slices, (std::vector<TokenRange>{{4, 6}}));
  EXPECT_EQ(planned.context_token_slices, (std::vector<TokenRange>{{0, 4}, {6, 9}}));
}

TEST(context_chunks, default_workspace_of_the_spec) {
  const ContextChunkOptions options = options_of(0, 16);
  EXPECT_EQ(default_workspace_tokens(options, 1000, 8), 8000);
  EXPECT_EQ(default_workspace_tokens(options, 100, 256), 4 * 256 * 16);
  EXPECT_EQ(default_workspace_tokens(options, 131072, 8), 65536);
  EXPECT_EQ(default_workspace_tokens(options, 131072, 5000), 80000);  // a page a request
  EXPECT_EQ(default_workspace_tokens(options, 1001, 8), 8016);        // whole pages
  ContextChunkOptions ranks = options;
  ranks.num_ranks = 3;
  EXPECT_EQ(chunk_alignment(ranks), 48);
  EXPECT_EQ(default_workspace_tokens(ranks, 1000, 8) % 48, 0);
}

TEST(context_chunks, workspace_too_small_is_refused_with_what_is_needed) {
  try {
    plan_context_chunks({0, 1, 2, 3}, {10, 10, 10}, options_of(32, 16));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "workspace_tokens");
    EXPECT_NE(error.allowed().find("at least 48"), std::string::npos) << error.what();
  }
  expect_refused(
      [] {
        plan_context_chunks({0, 1}, {10}, options_of(40, 16));
      },
      ErrorCode::invalid_argument, "workspace_tokens");
  expect_refused(
      [] {
        plan_context_chunks({0, 1}, {-1}, options_of(32, 16));
      },
      ErrorCode::invalid_argument, "context_lens[0]");
  expect_refused([] { plan_context_chunks({0, 1}, {1, 1}, options_of(32, 16)); }, ErrorCode::mismatch, "context_lens");
  expect_refused(
      [] {
        plan_context_chunks({0, 2, 1}, {1, 1}, options_of(32, 16));
      },
      ErrorCode::invalid_argument, "query_start_loc[2]");
  // No context, no workspace needed.
  EXPECT_TRUE(plan_context_chunks({0, 5}, {0}, options_of(0, 16)).chunks.empty());
}

struct RandomBatch {
  explicit RandomBatch(int64_t index) {
    tools::Draw draw(11, index);
    const auto num_requests = static_cast<int32_t>(draw.range(1, 9));
    for (int32_t r = 0; r < num_requests; ++r) {
      query_start_loc.push_back(query_start_loc.back() + static_cast<int32_t>(draw.range(draw.one_in(6) ? 0 : 1, 7)));
      context_lens.push_back(draw.one_in(4) ? 0 : static_cast<int32_t>(draw.range(1, draw.one_in(3) ? 900 : 90)));
    }
    options.page_size = draw.pick<int32_t>({1, 3, 16, 64});
    options.num_ranks = draw.pick<int32_t>({1, 1, 2, 4, 8});
    options.interleave_size = draw.pick<int32_t>({1, 1, 2, 16});
    options.batch_invariant = draw.one_in(3);
    const int32_t alignment = chunk_alignment(options);
    options.workspace_tokens = alignment * static_cast<int32_t>(num_requests + draw.range(0, 12));
  }
  Ints query_start_loc = {0};
  Ints context_lens;
  ContextChunkOptions options;
};

// What a kernel relies on.
void expect_consistent(const ContextChunk& chunk, const RandomBatch& batch) {
  EXPECT_EQ(chunk.tokens.begin, batch.query_start_loc[chunk.request_begin]);
  EXPECT_EQ(chunk.tokens.end, batch.query_start_loc[chunk.request_end]);
  EXPECT_EQ(chunk.cu_seq_lens.back(), chunk.num_context_tokens);
  EXPECT_LE(chunk.num_context_tokens, batch.options.workspace_tokens);
  EXPECT_EQ(chunk.token_to_seq.size(), static_cast<size_t>(chunk.num_context_tokens));
  int32_t max_query_len = 0;
  int32_t max_seq_len = 0;
  for (int32_t i = 0; i < chunk.num_requests(); ++i) {
    const int32_t request = chunk.request_begin + i;
    const int32_t q_len = batch.query_start_loc[request + 1] - batch.query_start_loc[request];
    EXPECT_GE(q_len, 1);
    EXPECT_GE(chunk.seq_lens[i], 1);
    EXPECT_EQ(chunk.query_start_loc[i + 1] - chunk.query_start_loc[i], q_len);
    EXPECT_EQ(chunk.cu_seq_lens[i + 1] - chunk.cu_seq_lens[i], chunk.seq_lens[i]);
    EXPECT_EQ(chunk.starts[i] % chunk_alignment(batch.options), 0);
    if (i > 0) EXPECT_EQ(chunk.starts[i], 0) << "only the first request continues";
    for (int32_t t = chunk.cu_seq_lens[i]; t < chunk.cu_seq_lens[i + 1]; ++t) EXPECT_EQ(chunk.token_to_seq[t], i);
    max_query_len = std::max(max_query_len, q_len);
    max_seq_len = std::max(max_seq_len, chunk.seq_lens[i]);
  }
  EXPECT_EQ(chunk.max_query_len, max_query_len);
  EXPECT_EQ(chunk.max_seq_len, max_seq_len);
  EXPECT_EQ(chunk.is_continuation, chunk.starts[0] > 0);
  EXPECT_EQ(chunk.continuation_token_end, chunk.is_continuation ? batch.query_start_loc[chunk.request_begin + 1] : 0);
}

// Each token of the chunk has a row of its own in what all ranks gather, of the rank that keeps it.
void expect_ranks_consistent(const ContextChunk& chunk, const ContextChunkOptions& options) {
  EXPECT_LE(int64_t{chunk.num_padded_local_rows()} * options.num_ranks, options.workspace_tokens);
  std::set<int32_t> rows;
  for (int32_t i = 0; i < chunk.num_requests(); ++i) {
    EXPECT_EQ(int64_t{chunk.local_starts[i]} * options.num_ranks, chunk.starts[i]);
    for (int32_t t = 0; t < chunk.seq_lens[i]; ++t) {
      const int32_t position = chunk.starts[i] + t;
      const int32_t rank = index::rank_of_token(position, options.num_ranks, options.interleave_size);
      const int32_t local = index::local_position(position, options.num_ranks, options.interleave_size);
      const int32_t row =
          rank * chunk.num_padded_local_rows() + chunk.padded_local_cu_seq_lens[i] + local - chunk.local_starts[i];
      EXPECT_EQ(chunk.all_gathered_rows[chunk.cu_seq_lens[i] + t], row);
      EXPECT_LT(local - chunk.local_starts[i], chunk.local_seq_lens[i * options.num_ranks + rank]);
      EXPECT_TRUE(rows.insert(row).second);
    }
    for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
      EXPECT_LE(chunk.local_seq_lens[i * options.num_ranks + rank], chunk.padded_local_seq_lens[i]);
    }
  }
}

TEST(context_chunks, hold_each_context_token_once_and_in_order) {
  for (int64_t i = 0; i < 3000; ++i) {
    const RandomBatch batch(i);
    const ContextChunks planned = plan_context_chunks(batch.query_start_loc, batch.context_lens, batch.options);
    Ints done(batch.context_lens.size(), 0);
    int32_t last_request = 0;
    for (size_t c = 0; c < planned.chunks.size(); ++c) {
      const ContextChunk& chunk = planned.chunks[c];
      EXPECT_EQ(chunk.index, static_cast<int32_t>(c));
      EXPECT_GE(chunk.request_begin, last_request);
      last_request = chunk.request_end - 1;
      expect_consistent(chunk, batch);
      if (batch.options.num_ranks > 1) expect_ranks_consistent(chunk, batch.options);
      for (int32_t r = 0; r < chunk.num_requests(); ++r) {
        EXPECT_EQ(chunk.starts[r], done[chunk.request_begin + r]);
        done[chunk.request_begin + r] += chunk.seq_lens[r];
      }
    }
    for (size_t r = 0; r < done.size(); ++r) {
      const bool has_new_tokens = batch.query_start_loc[r + 1] > batch.query_start_loc[r];
      EXPECT_EQ(done[r], has_new_tokens ? batch.context_lens[r] : 0);
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "batch " << i;
  }
}

TEST(context_chunks, token_slices_cover_the_batch_once) {
  for (int64_t i = 0; i < 500; ++i) {
    const RandomBatch batch(i);
    const ContextChunks planned = plan_context_chunks(batch.query_start_loc, batch.context_lens, batch.options);
    Ints seen(batch.query_start_loc.back(), 0);
    for (const auto& [begin, end] : planned.empty_token_slices) {
      for (int32_t t = begin; t < end; ++t) seen[t] += 1;
    }
    for (const auto& [begin, end] : planned.context_token_slices) {
      for (int32_t t = begin; t < end; ++t) seen[t] += 2;
    }
    for (size_t r = 0; r < batch.context_lens.size(); ++r) {
      for (int32_t t = batch.query_start_loc[r]; t < batch.query_start_loc[r + 1]; ++t) {
        ASSERT_EQ(seen[t], batch.context_lens[r] > 0 ? 2 : 1);
      }
    }
  }
}

TEST(context_chunks, batch_invariant_cuts_depend_on_the_request_alone) {
  for (int64_t i = 0; i < 1000; ++i) {
    RandomBatch batch(i);
    batch.options.batch_invariant = true;
    const ContextChunks planned = plan_context_chunks(batch.query_start_loc, batch.context_lens, batch.options);
    for (const ContextChunk& chunk : planned.chunks) {
      for (int32_t r = 0; r < chunk.num_requests(); ++r) {
        const int32_t context_len = batch.context_lens[chunk.request_begin + r];
        ASSERT_EQ(chunk.starts[r] % batch.options.workspace_tokens, 0);
        ASSERT_TRUE(chunk.seq_lens[r] == batch.options.workspace_tokens ||
                    chunk.starts[r] + chunk.seq_lens[r] == context_len);
      }
    }
  }
}

}  // namespace
}  // namespace qkv
