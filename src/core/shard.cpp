#include "qkv/shard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/checks.hpp"
#include "core/index/interleave.hpp"
#include "core/index/paging.hpp"
#include "core/index/shown_keys.hpp"
#include "core/shard_rules.hpp"
#include "qkv/batch.hpp"

namespace qkv {
namespace {

static_assert(static_cast<int32_t>(KeyRun::all) == index::kAllKeys);
static_assert(static_cast<int32_t>(KeyRun::context) == index::kContextKeys);
static_assert(static_cast<int32_t>(KeyRun::new_tokens) == index::kNewTokenKeys);

void check_vector(const Tensor& tensor, const char* name, const char* axes) {
  check_rank(tensor, name, 1, axes);
  check_dtype(tensor, name, DType::i32);
  check_host(tensor, name);
}

int32_t at(const Tensor& tensor, int64_t i) { return static_cast<const int32_t*>(tensor.data)[i * tensor.stride[0]]; }

void check_shard(const Shard& shard) {
  if (const std::vector<Error> reasons = reasons_against(shard); !reasons.empty()) throw reasons.front();
}

void check_shard(const Shard& shard, int32_t page_size) {
  if (page_size < 1) refuse("page_size", page_size, "at least 1 token");
  check_shard(shard);
  if (page_size % shard.interleave_size != 0) {
    refuse("shard.interleave_size", shard.interleave_size, fmt::format("a divisor of page_size = {}", page_size));
  }
}

void check_call(const Shard& shard, const char* name, int32_t value) {
  check_shard(shard);
  if (value < 0) refuse(name, value, "0 or more");
}

// Where the tokens that a rank keeps of one request lie.
class RequestSlots {
 public:
  RequestSlots(const Tensor& block_table, int64_t request, int32_t page_size)
      : block_table_(block_table), request_(request), page_size_(page_size) {}

  int64_t slot(int32_t local) const {
    const int32_t entry = index::page_index(local, page_size_);
    const std::string name = fmt::format("block_table[{}, {}]", request_, entry);
    if (entry >= block_table_.shape[1]) {
      refuse(name, fmt::format("{} pages a request", block_table_.shape[1]),
             fmt::format("a page for the rank's token {} of request {}", local, request_));
    }
    const int32_t page = static_cast<const int32_t*>(
        block_table_.data)[request_ * block_table_.stride[0] + entry * block_table_.stride[1]];
    if (page < 0) refuse(name, page, "a page number >= 0: the rank keeps a new token there");
    return index::slot(page, index::page_offset(local, page_size_), page_size_);
  }

 private:
  const Tensor& block_table_;
  const int64_t request_;
  const int32_t page_size_;
};

}  // namespace

std::vector<Error> reasons_against(const Shard& shard) {
  // Tokens of a round of all ranks: positions behind the last one still fit 32 bits.
  constexpr int32_t kMaxRound = 1 << 24;
  std::vector<Error> reasons;
  const auto against = [&](const char* name, int32_t value, std::string allowed) {
    reasons.emplace_back(ErrorCode::invalid_argument, name, std::to_string(value), std::move(allowed));
  };
  if (shard.num_ranks < 1) {
    against("shard.num_ranks", shard.num_ranks, "at least 1");
  } else if (shard.rank < 0 || shard.rank >= shard.num_ranks) {
    against("shard.rank", shard.rank, fmt::format("0 to {}, below shard.num_ranks", shard.num_ranks - 1));
  }
  const int32_t num_ranks = std::max(shard.num_ranks, 1);
  if (shard.interleave_size < 1 || int64_t{shard.interleave_size} * num_ranks > kMaxRound) {
    against("shard.interleave_size", shard.interleave_size,
            fmt::format("1 to {}: a round of all ranks has at most {} tokens", kMaxRound / num_ranks, kMaxRound));
  }
  return reasons;
}

int32_t Shard::rank_of(int32_t position) const {
  check_call(*this, "position", position);
  return index::rank_of_token(position, num_ranks, interleave_size);
}

int32_t Shard::local_position(int32_t position) const {
  check_call(*this, "position", position);
  return index::local_position(position, num_ranks, interleave_size);
}

int32_t Shard::position(int32_t local) const {
  check_call(*this, "local", local);
  return index::position_of_local(local, rank, num_ranks, interleave_size);
}

int32_t Shard::local_length(int32_t num_tokens) const {
  check_call(*this, "num_tokens", num_tokens);
  return index::local_length(num_tokens, rank, num_ranks, interleave_size);
}

int32_t Shard::max_local_length(int32_t num_tokens) const {
  check_call(*this, "num_tokens", num_tokens);
  return index::local_length(num_tokens, 0, num_ranks, interleave_size);
}

std::string_view to_string(KeyRun run) {
  switch (run) {
    case KeyRun::all:
      return "all";
    case KeyRun::context:
      return "context";
    case KeyRun::new_tokens:
      return "new_tokens";
  }
  return "unknown";
}

std::vector<int64_t> shard_slots(const Batch& batch, int32_t page_size, const Shard& shard) {
  check_shard(shard, page_size);
  check_vector(batch.query_start_loc, "query_start_loc", "[num_requests + 1]");
  const int64_t num_requests = batch.query_start_loc.shape[0] - 1;
  if (num_requests < 0) refuse("query_start_loc", batch.query_start_loc.describe(), "at least one entry");
  check_vector(batch.seq_lens, "seq_lens", "[num_requests]");
  check_extent(batch.seq_lens, "seq_lens", 0, num_requests, "num_requests");
  check_rank(batch.block_table, "block_table", 2, "[num_requests, max_pages]");
  check_dtype(batch.block_table, "block_table", DType::i32);
  check_host(batch.block_table, "block_table");
  check_extent(batch.block_table, "block_table", 0, num_requests, "num_requests");
  if (at(batch.query_start_loc, 0) != 0) refuse("query_start_loc[0]", at(batch.query_start_loc, 0), "0");

  std::vector<int64_t> slots;
  for (int64_t r = 0; r < num_requests; ++r) {
    const int32_t q_len = at(batch.query_start_loc, r + 1) - at(batch.query_start_loc, r);
    const int32_t seq_len = at(batch.seq_lens, r);
    if (q_len < 0) {
      refuse(fmt::format("query_start_loc[{}]", r + 1), at(batch.query_start_loc, r + 1),
             fmt::format("at least {}: prefix sums never decrease", at(batch.query_start_loc, r)));
    }
    if (seq_len < q_len) {
      refuse(fmt::format("seq_lens[{}]", r), seq_len, fmt::format("at least {}, the request's new tokens", q_len));
    }
    const RequestSlots of_request(batch.block_table, r, page_size);
    for (int32_t position = seq_len - q_len; position < seq_len; ++position) {
      const bool is_own = shard.rank_of(position) == shard.rank;
      slots.push_back(is_own ? of_request.slot(shard.local_position(position)) : -1);
    }
  }
  return slots;
}

}  // namespace qkv
