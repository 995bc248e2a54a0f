#include "cpu/gather.hpp"

#include <algorithm>
#include <cstring>

#include "core/index/paging.hpp"
#include "cpu/kernels.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

// Rows handed to a thread at once: enough to outweigh the hand-over.
constexpr int64_t kRowsPerTask = 64;

// One head of one token. Other formats are 8-bit ones to be widened.
void move_row(const RowConversion& conversion, const std::byte* from, std::byte* to, int64_t count) {
  if (conversion.from == conversion.to) {
    std::memcpy(to, from, static_cast<size_t>(count * size_bytes(conversion.to)));
  } else {
    forward_kernels().rows->convert(conversion, from, count, to);
  }
}

void move_token(const Tensor& pages, int64_t page, int64_t offset, const Tensor& rows, int64_t row, float scale) {
  const auto* from = static_cast<const std::byte*>(pages.data) +
                     (page * pages.stride[0] + offset * pages.stride[1]) * size_bytes(pages.dtype);
  auto* to = static_cast<std::byte*>(rows.data) + row * rows.stride[0] * size_bytes(rows.dtype);
  for (int64_t head = 0; head < rows.shape[1]; ++head) {
    move_row({pages.dtype, rows.dtype, Scaling::multiplied, scale},
             from + head * pages.stride[2] * size_bytes(pages.dtype),
             to + head * rows.stride[1] * size_bytes(rows.dtype), rows.shape[2]);
  }
}

}  // namespace

void gather(const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows, const Tensor& scale) {
  const float factor = scale.is_given() ? *static_cast<const float*>(scale.data) : 1.0F;
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
      move_token(pages, page, index::page_offset(position, plan.page_size), rows, row, factor);
    }
  });
}

}  // namespace qkv::cpu
