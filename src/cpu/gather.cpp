#include "cpu/gather.hpp"

#include <algorithm>
#include <cstring>

#include "core/index/paging.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

// Rows handed to a thread at once: enough to outweigh the hand-over.
constexpr int64_t kRowsPerTask = 64;

void copy_token(const Tensor& pages, int64_t page, int64_t offset, const Tensor& rows, int64_t row) {
  const int64_t element = size_bytes(pages.dtype);
  const auto* from =
      static_cast<const std::byte*>(pages.data) + (page * pages.stride[0] + offset * pages.stride[1]) * element;
  auto* to = static_cast<std::byte*>(rows.data) + row * rows.stride[0] * element;
  for (int64_t head = 0; head < rows.shape[1]; ++head) {
    std::memcpy(to + head * rows.stride[1] * element, from + head * pages.stride[2] * element,
                static_cast<size_t>(rows.shape[2] * element));
  }
}

}  // namespace

void gather(const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows) {
  const int64_t num_rows = plan.num_rows();
  const int64_t work = num_rows * rows.shape[1] * rows.shape[2];
  parallel_for((num_rows + kRowsPerTask - 1) / kRowsPerTask, work, [&](int64_t task) {
    const int64_t begin = task * kRowsPerTask;
    const int64_t end = std::min(num_rows, begin + kRowsPerTask);
    size_t run = std::upper_bound(plan.row_start.begin(), plan.row_start.end(), begin) - plan.row_start.begin() - 1;
    for (int64_t row = begin; row < end; ++row) {
      while (row >= plan.row_start[run + 1]) ++run;
      const auto position = static_cast<int32_t>(plan.first_offset[run] + row - plan.row_start[run]);
      const int64_t page = plan.pages[plan.page_start[run] + index::page_index(position, plan.page_size)];
      copy_token(pages, page, index::page_offset(position, plan.page_size), rows, row);
    }
  });
}

}  // namespace qkv::cpu
