#include "plan/gather.hpp"

#include <algorithm>
#include <utility>

#include "core/checks.hpp"
#include "core/index/paging.hpp"

namespace qkv::plan {
namespace {

// [first, end): the pages of a run of `length` tokens from `start` on; empty without tokens.
struct PageRange {
  int64_t first = 0;
  int64_t end = 0;
};

PageRange pages_of(int32_t start, int32_t length, int32_t page_size) {
  const int64_t first = index::page_index(start, page_size);
  return {first, length > 0 ? (int64_t{start} + length + page_size - 1) / page_size : first};
}

// The run's entries of the table, to `pages`. Bad ones are looked for by the caller, once for all.
void copy_entries(const int32_t* entries, int64_t stride, PageRange range, int32_t* pages) {
  if (stride == 1) {
    std::copy(entries + range.first, entries + range.end, pages);
    return;
  }
  for (int64_t i = range.first; i < range.end; ++i) *pages++ = entries[i * stride];
}

// All entries in one sweep, which the compiler makes a vector loop of.
std::pair<int32_t, int32_t> extremes(const std::vector<int32_t>& pages) {
  int32_t lowest = 0, highest = -1;
  for (const int32_t page : pages) {
    lowest = std::min(lowest, page);
    highest = std::max(highest, page);
  }
  return {lowest, highest};
}

[[noreturn]] void refuse_negative_page(const GatherPlan& plan, int32_t first_request,
                                       const std::vector<int32_t>& starts, const std::vector<int32_t>& seq_lens) {
  const auto bad = std::find_if(plan.pages.begin(), plan.pages.end(), [](int32_t page) { return page < 0; });
  const int64_t at = bad - plan.pages.begin();
  // The last run that begins there or before it; those without pages begin where the next one does.
  const int64_t run =
      std::upper_bound(plan.page_start.begin(), plan.page_start.end(), at) - plan.page_start.begin() - 1;
  const int64_t entry = pages_of(starts[run], seq_lens[run], plan.page_size).first + at - plan.page_start[run];
  refuse(fmt::format("block_table[{}, {}]", first_request + run, entry), *bad,
         fmt::format("a page number >= 0: tokens {} to {} are read", starts[run],
                     int64_t{starts[run]} + seq_lens[run] - 1));
}

}  // namespace

GatherPlan build_gather(const Tensor& block_table, int32_t first_request, const std::vector<int32_t>& starts,
                        const std::vector<int32_t>& seq_lens, int32_t page_size) {
  check_rank(block_table, "block_table", 2, "[num_requests, max_pages]");
  check_dtype(block_table, "block_table", DType::i32);
  check_host(block_table, "block_table");
  GatherPlan plan;
  plan.page_size = page_size;
  int64_t num_pages = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    const PageRange range = pages_of(starts[i], seq_lens[i], page_size);
    if (seq_lens[i] > 0 && range.end > block_table.shape[1]) {
      refuse("block_table", block_table.describe(),
             fmt::format("at least {} pages of {} tokens a request: row {} is read up to token {}", range.end,
                         page_size, first_request + static_cast<int64_t>(i), int64_t{starts[i]} + seq_lens[i]));
    }
    plan.page_start.push_back(num_pages);
    plan.first_offset.push_back(index::page_offset(starts[i], page_size));
    plan.row_start.push_back(plan.num_rows() + seq_lens[i]);
    num_pages += range.end - range.first;
  }
  plan.pages.resize(num_pages);
  const auto* table = static_cast<const int32_t*>(block_table.data);
  for (size_t i = 0; i < starts.size(); ++i) {
    copy_entries(table + (first_request + static_cast<int64_t>(i)) * block_table.stride[0], block_table.stride[1],
                 pages_of(starts[i], seq_lens[i], page_size), plan.pages.data() + plan.page_start[i]);
  }
  const auto [lowest, highest] = extremes(plan.pages);
  if (lowest < 0) refuse_negative_page(plan, first_request, starts, seq_lens);
  plan.max_page = highest;
  return plan;
}

GatherPlan one_page(int32_t num_rows) {
  GatherPlan gather;
  gather.page_size = std::max(num_rows, 1);
  gather.max_page = 0;
  gather.pages = {0};
  gather.page_start = {0};
  gather.first_offset = {0};
  gather.row_start = {0, num_rows};
  return gather;
}

}  // namespace qkv::plan
