#include "cuda/index_check.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/checks.hpp"
#include "core/shown_keys.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"
#include "jit/driver.hpp"

namespace qkv::cuda {
namespace {

constexpr unsigned long long kNowhere = ~0ULL;
constexpr const char* kWhy =
    "The plan was right when it was built: since then its memory on the device was overwritten, or the plan was "
    "destroyed before its work had run";

// Which of the parts that begin at `starts` holds `position`.
template <class Int>
int64_t part_of(const std::vector<Int>& starts, int64_t position) {
  return std::upper_bound(starts.begin(), starts.end(), position) - starts.begin() - 1;
}

std::string describe_new_token(const plan::PlanData& plan, int64_t row) {
  if (row >= plan.num_tokens) return fmt::format("row {}, past the batch's {} tokens", row, plan.num_tokens);
  const int64_t request = part_of(plan.query_start_loc, row);
  const int64_t position = plan.seq_lens[request] - plan.query_start_loc[request + 1] + row;
  return fmt::format("request {}, position {}", request, position);
}

void refuse_capture(jit::CUstream stream) {
  auto status = jit::CUstreamCaptureStatus::none;
  jit::check(jit::driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  if (status != jit::CUstreamCaptureStatus::none) {
    refuse("QKV_CHECK", "1 in a call that a graph captures",
           "0, or calls outside of captures: the check waits for its kernel's answer", ErrorCode::unsupported);
  }
}

template <class Value>
Value read(const Value* address, jit::CUstream stream) {
  Value value{};
  jit::check(
      jit::driver().memcpy_dtoh_async(&value, reinterpret_cast<jit::CUdeviceptr>(address), sizeof(value), stream),
      "cuMemcpyDtoHAsync");
  jit::check(jit::driver().stream_synchronize(stream), "cuStreamSynchronize");
  return value;
}

}  // namespace

Error bad_length(const plan::PlanData& plan, int64_t request, int32_t value) {
  return {ErrorCode::invalid_argument, fmt::format("seq_lens[{}]", request), fmt::format("{} on the device", value),
          fmt::format("{}, the request's keys in the plan. {}", plan.seq_lens[request], kWhy)};
}

Error bad_page(const plan::PlanData& plan, int64_t entry, int32_t value, int64_t num_pages) {
  const int64_t request = part_of(plan.page_start, entry);
  const int64_t index = entry - plan.page_start[request];
  const int32_t page_size = plan.layer.cache->page_size;
  const mask::ProgramInput& shown = plan.mask_inputs[request];
  const auto first = static_cast<int32_t>(index * page_size);
  const int32_t last = std::min(first + page_size, plan.key_lens[request]) - 1;
  return {ErrorCode::invalid_argument, fmt::format("block_table[{}, {}]", request, index),
          fmt::format("page {} on the device, for request {}, positions {} to {}", value, request, shown.kv_pos(first),
                      shown.kv_pos(last)),
          fmt::format("0 to {}, the cache's pages. {}", num_pages - 1, kWhy)};
}

Error bad_slot(const plan::PlanData& plan, int64_t row, int64_t value, int64_t num_cache_slots) {
  return {ErrorCode::invalid_argument, fmt::format("slot_mapping[{}]", row),
          fmt::format("slot {} on the device, for {}", value, describe_new_token(plan, row)),
          fmt::format("-1 to {}, the cache's slots. {}", num_cache_slots - 1, kWhy)};
}

IndexCheck::IndexCheck(int32_t device_index, const std::string& arch)
    : kernel_(&jit::kernels().get(plain_source("check_indices", arch))), found_(device_index, sizeof(FirstBad)) {}

FirstBad IndexCheck::run(CheckIndicesParams params, int64_t longest_array, jit::CUstream stream) const {
  refuse_capture(stream);
  const std::lock_guard lock(mutex_);
  jit::check(jit::driver().memset_d8_async(found_.address(), 0xff, sizeof(FirstBad), stream), "cuMemsetD8Async");
  params.found = found_.as<FirstBad>();
  constexpr int64_t kThreads = 256;
  const auto ctas = static_cast<uint32_t>(std::clamp<int64_t>((longest_array + kThreads - 1) / kThreads, 1, 1024));
  launch(*kernel_, {ctas, 1, kThreads, 0}, {&params}, stream);
  return read(params.found, stream);
}

void IndexCheck::check_pages(const plan::PlanData& plan, const ForwardParams& placed, int64_t num_pages,
                             jit::CUstream stream) const {
  CheckIndicesParams params{};
  params.seq_lens = placed.seq_lens;
  params.query_start_loc = placed.query_start_loc;
  params.keys = shown_keys(plan.layer);
  params.page_start = placed.page_start;
  params.pages = placed.pages;
  params.num_requests = plan.num_requests;
  params.page_size = plan.layer.cache->page_size;
  params.num_entries = static_cast<int64_t>(plan.pages.size());
  params.num_pages = num_pages;
  const FirstBad found = run(params, std::max<int64_t>(params.num_requests, params.num_entries), stream);
  if (found.length != kNowhere) {
    const auto request = static_cast<int64_t>(found.length);
    throw bad_length(plan, request, read(placed.seq_lens + request, stream));
  }
  if (found.entry != kNowhere) {
    const auto entry = static_cast<int64_t>(found.entry);
    throw bad_page(plan, entry, read(placed.pages + entry, stream), num_pages);
  }
}

void IndexCheck::check_slots(const plan::PlanData& plan, const int64_t* placed_slots, int64_t num_cache_slots,
                             jit::CUstream stream) const {
  CheckIndicesParams params{};
  params.slots = reinterpret_cast<const long long*>(placed_slots);
  params.num_slots = static_cast<int64_t>(plan.slot_mapping.size());
  params.num_cache_slots = num_cache_slots;
  const FirstBad found = run(params, params.num_slots, stream);
  if (found.slot == kNowhere) return;
  const auto row = static_cast<int64_t>(found.slot);
  throw bad_slot(plan, row, read(placed_slots + row, stream), num_cache_slots);
}

}  // namespace qkv::cuda
