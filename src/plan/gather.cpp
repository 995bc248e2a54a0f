#include "plan/gather.hpp"

#include <algorithm>

#include "core/checks.hpp"
#include "core/index/paging.hpp"

namespace qkv::plan {
namespace {

void add_run(const Tensor& table, int64_t request, int32_t start, int32_t length, GatherPlan& plan) {
  const int32_t first = index::page_index(start, plan.page_size);
  const int64_t end = (int64_t{start} + length + plan.page_size - 1) / plan.page_size;
  if (length > 0 && end > table.shape[1]) {
    refuse("block_table", table.describe(),
           fmt::format("at least {} pages of {} tokens a request: row {} is read up to token {}", end, plan.page_size,
                       request, int64_t{start} + length));
  }
  plan.page_start.push_back(static_cast<int64_t>(plan.pages.size()));
  plan.first_offset.push_back(index::page_offset(start, plan.page_size));
  plan.row_start.push_back(plan.num_rows() + length);
  const auto* entries = static_cast<const int32_t*>(table.data) + request * table.stride[0];
  for (int64_t i = first; length > 0 && i < end; ++i) {
    const int32_t page = entries[i * table.stride[1]];
    if (page < 0) {
      refuse(fmt::format("block_table[{}, {}]", request, i), page,
             fmt::format("a page number >= 0: tokens {} to {} are read", start, int64_t{start} + length - 1));
    }
    plan.max_page = std::max(plan.max_page, page);
    plan.pages.push_back(page);
  }
}

}  // namespace

GatherPlan build_gather(const Tensor& block_table, int32_t first_request, const std::vector<int32_t>& starts,
                        const std::vector<int32_t>& seq_lens, int32_t page_size) {
  check_rank(block_table, "block_table", 2, "[num_requests, max_pages]");
  check_dtype(block_table, "block_table", DType::i32);
  check_host(block_table, "block_table");
  GatherPlan plan;
  plan.page_size = page_size;
  for (size_t i = 0; i < starts.size(); ++i) {
    add_run(block_table, first_request + static_cast<int64_t>(i), starts[i], seq_lens[i], plan);
  }
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
