// Makers of mask operands: what an engine knows (image spans, parent indices) as one number a new token.
#include <algorithm>

#include "core/checks.hpp"
#include "qkv/mask.hpp"

namespace qkv {
namespace {

// Checked prefix sums; returns a copy so that later reads need no view.
std::vector<int32_t> read_query_start_loc(const Tensor& tensor) {
  constexpr const char* kName = "query_start_loc";
  check_given(tensor, kName, "the makers of mask operands");
  check_rank(tensor, kName, 1, "[num_requests + 1]");
  check_dtype(tensor, kName, DType::i32);
  check_host(tensor, kName);
  if (tensor.shape[0] < 1) refuse(kName, tensor.describe(), "num_requests + 1 values, the first of them 0");
  std::vector<int32_t> starts(tensor.shape[0]);
  for (size_t i = 0; i < starts.size(); ++i) {
    starts[i] = static_cast<const int32_t*>(tensor.data)[static_cast<int64_t>(i) * tensor.stride[0]];
    const int32_t least = i == 0 ? 0 : starts[i - 1];
    if (starts[i] < least || (i == 0 && starts[i] != 0)) {
      refuse(fmt::format("{}[{}]", kName, i), starts[i], i == 0 ? "0" : fmt::format("at least {}", least));
    }
  }
  return starts;
}

std::vector<int32_t> read_seq_lens(const Tensor& tensor, int64_t num_requests) {
  constexpr const char* kName = "seq_lens";
  check_given(tensor, kName, "prefix-LM spans");
  check_rank(tensor, kName, 1, "[num_requests]");
  check_dtype(tensor, kName, DType::i32);
  check_host(tensor, kName);
  check_extent(tensor, kName, 0, num_requests, "num_requests");
  std::vector<int32_t> lengths(num_requests);
  for (int64_t i = 0; i < num_requests; ++i) {
    lengths[i] = static_cast<const int32_t*>(tensor.data)[i * tensor.stride[0]];
    if (lengths[i] < 0) refuse(fmt::format("{}[{}]", kName, i), lengths[i], "0 or more");
  }
  return lengths;
}

std::string describe(const PrefixLmSpan& span) {
  return fmt::format("[{}, {}] of request {}", span.start, span.end, span.request);
}

// Spans that do something, by request and start.
std::vector<PrefixLmSpan> sort_spans(const std::vector<PrefixLmSpan>& spans, int64_t num_requests) {
  std::vector<PrefixLmSpan> sorted;
  for (const PrefixLmSpan& span : spans) {
    if (span.request < 0 || span.request >= num_requests) {
      refuse("span request", span.request, fmt::format("0 to num_requests - 1 = {}", num_requests - 1));
    }
    if (span.start < 0 || span.end < span.start) refuse("span", describe(span), "0 <= start <= end, both inclusive");
    if (span.start < span.end) sorted.push_back(span);
  }
  std::sort(sorted.begin(), sorted.end(), [](const PrefixLmSpan& a, const PrefixLmSpan& b) {
    return a.request != b.request ? a.request < b.request : a.start < b.start;
  });
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].request != sorted[i - 1].request || sorted[i].start > sorted[i - 1].end) continue;
    refuse("span", describe(sorted[i]), fmt::format("spans that do not overlap; {} does", describe(sorted[i - 1])));
  }
  return sorted;
}

// Subtree sizes, then the place of each token in a depth-first walk.
void number_tree(const int32_t* parents, int32_t num_tokens, int32_t* enter, int32_t* leave) {
  std::vector<int32_t> subtree(num_tokens, 1);
  for (int32_t t = num_tokens - 1; t >= 0; --t) {
    if (parents[t] >= 0) subtree[parents[t]] += subtree[t];
  }
  std::vector<int32_t> next_child(num_tokens);  // where a token's next child enters
  int32_t next_root = 0;
  for (int32_t t = 0; t < num_tokens; ++t) {
    int32_t& next = parents[t] >= 0 ? next_child[parents[t]] : next_root;
    enter[t] = next;
    leave[t] = next + subtree[t];
    next_child[t] = next + 1;
    next = leave[t];
  }
}

}  // namespace

PrefixLmOperands fill_prefix_lm_spans(const std::vector<PrefixLmSpan>& spans, const Tensor& query_start_loc,
                                      const Tensor& seq_lens) {
  const std::vector<int32_t> starts = read_query_start_loc(query_start_loc);
  const auto num_requests = static_cast<int64_t>(starts.size()) - 1;
  const std::vector<int32_t> lengths = read_seq_lens(seq_lens, num_requests);
  PrefixLmOperands operands;
  operands.span_start.assign(starts.back(), -1);
  operands.span_end.assign(starts.back(), -1);
  for (const PrefixLmSpan& span : sort_spans(spans, num_requests)) {
    const int64_t q_len = int64_t{starts[span.request + 1]} - starts[span.request];
    const int64_t context = lengths[span.request] - q_len;
    const int64_t first = std::max<int64_t>(span.start - context, 0);
    const int64_t last = std::min<int64_t>(span.end - context, q_len - 1);
    for (int64_t token = first; token <= last; ++token) {
      operands.span_start[starts[span.request] + token] = span.start;
      operands.span_end[starts[span.request] + token] = span.end;
    }
  }
  return operands;
}

TreeOperands fill_tree(const std::vector<int32_t>& parents, const Tensor& query_start_loc) {
  const std::vector<int32_t> starts = read_query_start_loc(query_start_loc);
  if (static_cast<int64_t>(parents.size()) != starts.back()) {
    refuse("parents", fmt::format("{} values", parents.size()), fmt::format("one a new token: {}", starts.back()));
  }
  TreeOperands operands;
  operands.tree_enter.resize(parents.size());
  operands.tree_leave.resize(parents.size());
  for (size_t request = 0; request + 1 < starts.size(); ++request) {
    const int32_t begin = starts[request];
    const int32_t num_tokens = starts[request + 1] - begin;
    for (int32_t t = 0; t < num_tokens; ++t) {
      const int32_t parent = parents[begin + t];
      if (parent >= -1 && parent < t) continue;
      refuse(fmt::format("parents[{}]", begin + t), parent,
             fmt::format("-1 (a root), or an earlier token of request {}: 0 to {}", request, t - 1));
    }
    number_tree(parents.data() + begin, num_tokens, operands.tree_enter.data() + begin,
                operands.tree_leave.data() + begin);
  }
  return operands;
}

}  // namespace qkv
