// The cached context of a prefill batch, cut into chunks that fit a workspace: what MLA prefill gathers, expands and
// attends to, a chunk after another. A pure function of lengths.
#pragma once

#include <cstdint>
#include <vector>

#include "qkv/export.hpp"

namespace qkv {

struct ContextChunkOptions {
  int32_t workspace_tokens = 0;  // context tokens of a chunk at most; a multiple of chunk_alignment
  int32_t page_size = 16;
  // Context parallel ranks that share the cache: runs of interleave_size tokens go round the ranks. `rank` is the one
  // whose block table the batch has; chunks do not depend on it.
  int32_t num_ranks = 1;
  int32_t interleave_size = 1;
  int32_t rank = 0;
  // Where a request is cut depends on its own length only, so that its bits do not depend on its batch: a context that
  // fits the workspace is never cut, a longer one at multiples of it. Costs chunks that are less full.
  bool batch_invariant = false;
};

// Tokens [begin, end) of the batch.
struct TokenRange {
  int32_t begin = 0;
  int32_t end = 0;
  bool operator==(const TokenRange&) const = default;
};

// The context of consecutive requests, or of a part of the first and the last of them. Arrays have an entry a request
// of the chunk.
struct ContextChunk {
  int32_t index = 0;
  int32_t request_begin = 0, request_end = 0;  // of the batch; each has new tokens and at least one key in the chunk
  TokenRange tokens;                           // the new tokens of these requests
  bool is_continuation = false;                // the chunk before holds earlier context of the first request
  int32_t continuation_token_end = 0;          // of the batch: where the first request's new tokens end; 0 = none
  int32_t num_context_tokens = 0;
  std::vector<int32_t> query_start_loc;  // [num_requests + 1], from 0
  int32_t max_query_len = 0;
  std::vector<int32_t> cu_seq_lens;  // [num_requests + 1]: first row of each request in the gathered chunk
  std::vector<int32_t> starts;       // first context position, a multiple of chunk_alignment
  std::vector<int32_t> seq_lens;     // context tokens in the chunk
  int32_t max_seq_len = 0;
  std::vector<int32_t> token_to_seq;  // [num_context_tokens]: the request of the chunk that each row belongs to

  // With ranks. All of them gather rows as if they kept as many as rank 0, so that one all-gather joins them.
  std::vector<int32_t> local_seq_lens;            // [num_requests, num_ranks]
  std::vector<int32_t> padded_local_seq_lens;     // the most of them
  std::vector<int32_t> padded_local_cu_seq_lens;  // [num_requests + 1]: first row of each request on every rank
  std::vector<int32_t> local_starts;              // `starts` among the tokens that a rank keeps
  std::vector<int32_t> all_gathered_rows;  // [num_context_tokens]: rank · padded rows + row, for the original order

  int32_t num_requests() const { return request_end - request_begin; }
  int32_t num_padded_local_rows() const {
    return padded_local_cu_seq_lens.empty() ? 0 : padded_local_cu_seq_lens.back();
  }
};

struct ContextChunks {
  std::vector<ContextChunk> chunks;
  std::vector<TokenRange> empty_token_slices;    // new tokens of requests without context, as few ranges as possible
  std::vector<TokenRange> context_token_slices;  // the others
};

// Where chunks may begin: multiples of the page size, and with ranks of a whole round of them, too.
QKV_EXPORT int32_t chunk_alignment(const ContextChunkOptions& options);

// A workspace for a server's limits: min(max(8·max_model_len, 4·max_num_requests·page_size), 65536) tokens, at least
// one aligned run a request, rounded up to a multiple of chunk_alignment.
QKV_EXPORT int32_t default_workspace_tokens(const ContextChunkOptions& options, int64_t max_model_len,
                                            int64_t max_num_requests);

// Packs contexts in order. One that does not fit the rest of a chunk is cut at a multiple of chunk_alignment, so only
// the first request of a chunk can be a continuation. A request without context or without new tokens ends a chunk and
// enters none. Refused: a workspace of less than chunk_alignment tokens for each request that has context.
//   query_start_loc [num_requests + 1]: prefix sums of new tokens, from 0; context_lens [num_requests]
QKV_EXPORT ContextChunks plan_context_chunks(const std::vector<int32_t>& query_start_loc,
                                             const std::vector<int32_t>& context_lens,
                                             const ContextChunkOptions& options);

}  // namespace qkv
