#include "cuda/gather.hpp"

#include <algorithm>

#include "cuda/device/params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"
#include "cuda/memory.hpp"

namespace qkv::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr int64_t kRowsOfCta = 32;
constexpr int64_t kMaxGridY = 65535;

// Heads that lie one after another on both sides are moved as one long row: fewer places to find, more bytes at each.
void join_heads(CacheGatherParams& params) {
  if (params.pages.head_stride != params.head_dim || params.row_head_stride != params.head_dim) return;
  params.head_dim *= params.num_heads;
  params.num_heads = 1;
}

struct PlacedGather final : plan::PlacedPlan {
  DeviceBuffer arrays;
  CacheGatherParams params{};  // what the plan knows of a launch
};

}  // namespace

void place_gather(plan::GatherPlan& plan, int32_t device_index, jit::CUstream stream) {
  auto placed = std::make_unique<PlacedGather>();
  Upload upload;
  const size_t pages_at = upload.add(plan.pages);
  const size_t page_start_at = upload.add(plan.page_start);
  const size_t first_offset_at = upload.add(plan.first_offset);
  const size_t row_start_at = upload.add(plan.row_start);
  placed->arrays = DeviceBuffer::on_stream(device_index, upload.num_bytes(), stream);
  upload.place(placed->arrays, stream);
  placed->params.page_numbers = placed->arrays.as<const int>(pages_at);
  placed->params.page_start = placed->arrays.as<const long long>(page_start_at);
  placed->params.first_offset = placed->arrays.as<const int>(first_offset_at);
  placed->params.row_start = placed->arrays.as<const long long>(row_start_at);
  placed->params.page_size = plan.page_size;
  plan.placed = std::move(placed);
}

const char* gather_kernel(const Tensor& pages, const Tensor& rows) {
  return pages.dtype == rows.dtype ? "gather" : "gather_widened";
}

void gather(const jit::Kernel& kernel, const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows,
            const Tensor& scale, jit::CUstream stream) {
  if (plan.num_rows() == 0) return;
  CacheGatherParams params = static_cast<const PlacedGather&>(*plan.placed).params;
  params.pages = {pages.data, pages.stride[0], pages.stride[1], pages.stride[2]};
  params.rows = rows.data;
  params.row_stride = rows.stride[0];
  params.row_head_stride = rows.stride[1];
  params.num_heads = static_cast<int>(rows.shape[1]);
  params.head_dim = static_cast<int>(rows.shape[2]);
  params.element_bytes = size_bytes(pages.dtype);
  params.pages_dtype = dtype_code(pages.dtype);
  params.rows_dtype = dtype_code(rows.dtype);
  params.scale = static_cast<const float*>(scale.data);
  join_heads(params);
  int64_t longest = 0;
  for (int64_t i = 0; i < plan.num_runs(); ++i) longest = std::max(longest, plan.row_start[i + 1] - plan.row_start[i]);
  const auto row_blocks = static_cast<uint32_t>(std::min((longest + kRowsOfCta - 1) / kRowsOfCta, kMaxGridY));
  launch(kernel, {static_cast<uint32_t>(plan.num_runs()), row_blocks, kThreads, 0}, {&params}, stream);
}

}  // namespace qkv::cuda
