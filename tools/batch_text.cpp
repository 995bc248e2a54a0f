#include "batch_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>

#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

constexpr int64_t kMaxRequests = 65536;
constexpr int64_t kMaxTableEntries = 1 << 27;

// Reads a text from left to right; `what` names it in errors.
class Reader {
 public:
  Reader(std::string what, std::string_view text, std::string_view allowed)
      : what_(std::move(what)), text_(text), rest_(text), allowed_(allowed) {}

  bool at_end() const { return rest_.empty(); }
  bool next_is_digit() const { return !rest_.empty() && rest_.front() >= '0' && rest_.front() <= '9'; }
  bool take(char wanted) {
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) refuse();
  }
  // Digits, perhaps with a k behind them.
  int32_t number() {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) refuse();
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    if (take('k')) value = value > std::numeric_limits<int32_t>::max() ? value : value * 1024;
    if (value > std::numeric_limits<int32_t>::max()) refuse();
    return static_cast<int32_t>(value);
  }
  [[noreturn]] void refuse() const {
    const auto position = text_.size() - rest_.size();
    throw Error(ErrorCode::invalid_argument, what_,
                fmt::format("\"{}\", unreadable at character {}", text_, position + 1), std::string(allowed_));
  }

 private:
  std::string what_;
  std::string_view text_, rest_, allowed_;
};

std::vector<int32_t> requests_between(int32_t first, int32_t last) {
  std::vector<int32_t> requests(last - first + 1);
  std::iota(requests.begin(), requests.end(), first);
  return requests;
}

}  // namespace

BatchText parse_batch(std::string_view text) {
  Reader reader("batch", text,
                "runs joined by _, each [count]q<new tokens>s<keys>[p<shared keys>]: q513s60513_31q1s4k");
  BatchText batch;
  do {
    const int32_t count = reader.next_is_digit() ? reader.number() : 1;
    reader.expect('q');
    const int32_t q_len = reader.number();
    reader.expect('s');
    const int32_t kv_len = reader.number();
    const auto first = static_cast<int32_t>(batch.seq_lens.size());
    if (count < 1 || first + int64_t{count} > kMaxRequests) {
      throw Error(ErrorCode::invalid_argument, "batch", fmt::format("{} requests", first + int64_t{count}),
                  fmt::format("1 to {}", kMaxRequests));
    }
    batch.query_lens.insert(batch.query_lens.end(), count, q_len);
    batch.seq_lens.insert(batch.seq_lens.end(), count, kv_len);
    if (reader.take('p')) batch.prefix_groups.push_back({requests_between(first, first + count - 1), reader.number()});
  } while (reader.take('_'));
  if (!reader.at_end()) reader.refuse();
  return batch;
}

PrefixGroup parse_prefix_group(std::string_view text) {
  Reader reader("--shared", text, "first-last:keys, as in 0-31:8k");
  const int32_t first = reader.number();
  const int32_t last = reader.take('-') ? reader.number() : first;
  reader.expect(':');
  const int32_t num_tokens = reader.number();
  if (!reader.at_end() || last < first || last >= kMaxRequests) reader.refuse();
  return {requests_between(first, last), num_tokens};
}

SyntheticBatch::SyntheticBatch(BatchText text, int32_t page_size) : text_(std::move(text)), has_cache_(page_size > 0) {
  query_start_loc_.push_back(0);
  for (const int32_t q_len : text_.query_lens) query_start_loc_.push_back(query_start_loc_.back() + q_len);
  if (!has_cache_) return;
  const auto pages_of = [&](int32_t tokens) { return (int64_t{tokens} + page_size - 1) / page_size; };
  for (const int32_t kv_len : text_.seq_lens) table_width_ = std::max(table_width_, pages_of(kv_len));
  std::stable_sort(text_.prefix_groups.begin(), text_.prefix_groups.end(),
                   [](const PrefixGroup& a, const PrefixGroup& b) { return a.requests.size() > b.requests.size(); });
  const auto num_requests = static_cast<int32_t>(text_.seq_lens.size());
  if (num_requests * table_width_ > kMaxTableEntries) {
    throw Error(ErrorCode::invalid_argument, "batch",
                fmt::format("{} pages of block table", num_requests * table_width_),
                fmt::format("at most {}: give fewer requests, fewer keys or a larger --page", kMaxTableEntries));
  }
  block_table_.resize(num_requests * table_width_);
  std::iota(block_table_.begin(), block_table_.end(), 0);
  for (const PrefixGroup& group : text_.prefix_groups) {
    const int64_t shared = std::min(pages_of(group.num_tokens), table_width_);
    if (group.requests.back() >= num_requests) continue;  // the planner refuses the group by name
    for (const int32_t request : group.requests) {
      std::copy_n(&block_table_[group.requests.front() * table_width_], shared, &block_table_[request * table_width_]);
    }
  }
}

Batch SyntheticBatch::batch() const {
  const auto num_requests = static_cast<int64_t>(text_.seq_lens.size());
  Batch batch;
  batch.query_start_loc = Tensor::contiguous(query_start_loc_.data(), DType::i32, {num_requests + 1});
  batch.seq_lens = Tensor::contiguous(text_.seq_lens.data(), DType::i32, {num_requests});
  if (has_cache_) {
    batch.block_table = Tensor::contiguous(block_table_.data(), DType::i32, {num_requests, table_width_});
  }
  batch.prefix_groups = text_.prefix_groups;
  return batch;
}

}  // namespace qkv::tools
