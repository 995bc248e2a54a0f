#include "qkv/context_chunks.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/checks.hpp"
#include "core/index/interleave.hpp"

namespace qkv {
namespace {

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

void check_at_least_one(const char* name, int32_t value) {
  if (value < 1) refuse(name, value, "at least 1");
}

// A run of one request's context.
struct Piece {
  int32_t request;
  int32_t start;
  int32_t length;
};

// Cuts contexts into pieces and pieces into chunks.
class Packer {
 public:
  explicit Packer(const ContextChunkOptions& options)
      : alignment_(chunk_alignment(options)), round_(options.num_ranks * options.interleave_size), options_(options) {}

  void add_request(int32_t request, int32_t context_len) {
    for (int32_t start = 0; start < context_len;) {
      const int32_t length = next_length(context_len - start, context_len);
      if (length == 0) {
        end_chunk();
        continue;
      }
      open_.push_back({request, start, length});
      used_ += rows_of(length);
      start += length;
      if (start < context_len) end_chunk();
    }
  }

  void end_chunk() {
    if (!open_.empty()) chunks_.push_back(std::move(open_));
    open_.clear();
    used_ = 0;
  }

  std::vector<std::vector<Piece>> take() {
    end_chunk();
    return std::move(chunks_);
  }

 private:
  // Of the workspace. Padding is counted, so that what all ranks gather together fits.
  int64_t rows_of(int32_t length) const { return options_.num_ranks == 1 ? length : round_up(length, round_); }

  // How much of a request's remaining context goes into the open chunk; 0 = the chunk is full.
  int32_t next_length(int32_t remaining, int32_t context_len) const {
    const int64_t free = options_.workspace_tokens - used_;
    if (rows_of(remaining) <= free) return remaining;
    if (options_.batch_invariant) {
      const bool is_cut = rows_of(context_len) > options_.workspace_tokens;
      return is_cut && used_ == 0 ? options_.workspace_tokens : 0;
    }
    return static_cast<int32_t>(free / alignment_ * alignment_);
  }

  int32_t alignment_;
  int32_t round_;
  const ContextChunkOptions& options_;
  std::vector<std::vector<Piece>> chunks_;
  std::vector<Piece> open_;
  int64_t used_ = 0;
};

void fill_ranks(const ContextChunkOptions& options, ContextChunk& chunk) {
  const int32_t num_ranks = options.num_ranks;
  chunk.padded_local_cu_seq_lens = {0};
  for (int32_t r = 0; r < chunk.num_requests(); ++r) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      chunk.local_seq_lens.push_back(index::local_length(chunk.seq_lens[r], rank, num_ranks, options.interleave_size));
    }
    const int32_t padded = index::local_length(chunk.seq_lens[r], 0, num_ranks, options.interleave_size);
    chunk.padded_local_seq_lens.push_back(padded);
    chunk.padded_local_cu_seq_lens.push_back(chunk.padded_local_cu_seq_lens.back() + padded);
    chunk.local_starts.push_back(chunk.starts[r] / num_ranks);
  }
  for (int32_t r = 0; r < chunk.num_requests(); ++r) {
    for (int32_t t = 0; t < chunk.seq_lens[r]; ++t) {
      const int32_t rank = index::rank_of_token(t, num_ranks, options.interleave_size);
      chunk.all_gathered_rows.push_back(rank * chunk.num_padded_local_rows() + chunk.padded_local_cu_seq_lens[r] +
                                        index::local_position(t, num_ranks, options.interleave_size));
    }
  }
}

ContextChunk make_chunk(const std::vector<Piece>& pieces, const std::vector<int32_t>& query_start_loc, int32_t index,
                        const ContextChunkOptions& options) {
  ContextChunk chunk;
  chunk.index = index;
  chunk.request_begin = pieces.front().request;
  chunk.request_end = pieces.back().request + 1;
  chunk.tokens = {query_start_loc[chunk.request_begin], query_start_loc[chunk.request_end]};
  chunk.is_continuation = pieces.front().start > 0;
  if (chunk.is_continuation) chunk.continuation_token_end = query_start_loc[chunk.request_begin + 1];
  chunk.query_start_loc = {0};
  chunk.cu_seq_lens = {0};
  for (const Piece& piece : pieces) {
    const int32_t row = static_cast<int32_t>(chunk.seq_lens.size());
    const int32_t query_end = query_start_loc[piece.request + 1] - chunk.tokens.begin;
    chunk.max_query_len = std::max(chunk.max_query_len, query_end - chunk.query_start_loc.back());
    chunk.query_start_loc.push_back(query_end);
    chunk.starts.push_back(piece.start);
    chunk.seq_lens.push_back(piece.length);
    chunk.max_seq_len = std::max(chunk.max_seq_len, piece.length);
    chunk.cu_seq_lens.push_back(chunk.cu_seq_lens.back() + piece.length);
    chunk.token_to_seq.insert(chunk.token_to_seq.end(), static_cast<size_t>(piece.length), row);
  }
  chunk.num_context_tokens = chunk.cu_seq_lens.back();
  if (options.num_ranks > 1) fill_ranks(options, chunk);
  return chunk;
}

void append(std::vector<TokenRange>& ranges, TokenRange range) {
  if (range.begin == range.end) return;
  if (!ranges.empty() && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

void check_lengths(const std::vector<int32_t>& query_start_loc, const std::vector<int32_t>& context_lens) {
  if (query_start_loc.size() != context_lens.size() + 1) {
    refuse("context_lens", fmt::format("{} values", context_lens.size()),
           fmt::format("one a request: query_start_loc has {} entries, one more than requests", query_start_loc.size()),
           ErrorCode::mismatch);
  }
  if (query_start_loc[0] != 0) refuse("query_start_loc[0]", query_start_loc[0], "0");
  for (size_t r = 0; r < context_lens.size(); ++r) {
    if (query_start_loc[r + 1] < query_start_loc[r]) {
      refuse(fmt::format("query_start_loc[{}]", r + 1), query_start_loc[r + 1],
             fmt::format("at least query_start_loc[{}] = {}: prefix sums never decrease", r, query_start_loc[r]));
    }
    if (context_lens[r] < 0) refuse(fmt::format("context_lens[{}]", r), context_lens[r], "0 or more");
  }
}

void check_workspace(int32_t workspace_tokens, int64_t alignment, int64_t num_context_requests) {
  if (num_context_requests == 0) return;
  const int64_t needed = alignment * num_context_requests;
  if (workspace_tokens < needed) {
    refuse("workspace_tokens", workspace_tokens,
           fmt::format("at least {}: {} tokens for each of {} requests with context", needed, alignment,
                       num_context_requests));
  }
  if (workspace_tokens % alignment != 0) {
    refuse("workspace_tokens", workspace_tokens,
           fmt::format("a multiple of {}, where chunks may begin: {}, say", alignment,
                       round_up(workspace_tokens, alignment)));
  }
}

}  // namespace

int32_t chunk_alignment(const ContextChunkOptions& options) {
  check_at_least_one("page_size", options.page_size);
  check_at_least_one("num_ranks", options.num_ranks);
  check_at_least_one("interleave_size", options.interleave_size);
  if (options.rank < 0 || options.rank >= options.num_ranks) {
    refuse("rank", options.rank,
           fmt::format("0 to {}: one of num_ranks = {}", options.num_ranks - 1, options.num_ranks));
  }
  if (options.num_ranks == 1) return options.page_size;
  const int64_t alignment =
      std::lcm(int64_t{options.page_size}, int64_t{options.num_ranks} * int64_t{options.interleave_size});
  if (alignment > std::numeric_limits<int32_t>::max()) {
    refuse(
        "interleave_size", options.interleave_size,
        fmt::format("a round of all ranks that shares a multiple below 2^31 with page_size = {}", options.page_size));
  }
  return static_cast<int32_t>(alignment);
}

int32_t default_workspace_tokens(const ContextChunkOptions& options, int64_t max_model_len, int64_t max_num_requests) {
  constexpr int64_t kMost = 65536;
  const int64_t alignment = chunk_alignment(options);
  if (max_model_len < 1) refuse("max_model_len", max_model_len, "at least 1");
  if (max_num_requests < 1) refuse("max_num_requests", max_num_requests, "at least 1");
  const int64_t wanted = std::min(std::max(8 * max_model_len, 4 * max_num_requests * options.page_size), kMost);
  const int64_t tokens = round_up(std::max(wanted, max_num_requests * alignment), alignment);
  if (tokens > std::numeric_limits<int32_t>::max()) {
    refuse("max_num_requests", max_num_requests, fmt::format("fewer than 2^31 / {} requests", alignment));
  }
  return static_cast<int32_t>(tokens);
}

ContextChunks plan_context_chunks(const std::vector<int32_t>& query_start_loc, const std::vector<int32_t>& context_lens,
                                  const ContextChunkOptions& options) {
  check_lengths(query_start_loc, context_lens);
  const auto num_requests = static_cast<int32_t>(context_lens.size());
  const auto enters = [&](int32_t r) { return context_lens[r] > 0 && query_start_loc[r + 1] > query_start_loc[r]; };
  int64_t num_context_requests = 0;
  for (int32_t r = 0; r < num_requests; ++r) num_context_requests += enters(r) ? 1 : 0;
  check_workspace(options.workspace_tokens, chunk_alignment(options), num_context_requests);

  ContextChunks planned;
  Packer packer(options);
  for (int32_t r = 0; r < num_requests; ++r) {
    const TokenRange tokens{query_start_loc[r], query_start_loc[r + 1]};
    if (enters(r)) {
      packer.add_request(r, context_lens[r]);
      append(planned.context_token_slices, tokens);
    } else {
      packer.end_chunk();
      append(planned.empty_token_slices, tokens);
    }
  }
  for (const std::vector<Piece>& pieces : packer.take()) {
    planned.chunks.push_back(make_chunk(pieces, query_start_loc, static_cast<int32_t>(planned.chunks.size()), options));
  }
  return planned;
}

}  // namespace qkv
