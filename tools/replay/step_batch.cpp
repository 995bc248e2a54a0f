#include "step_batch.hpp"

#include <algorithm>

namespace qkv::replay {

StepBatch::StepBatch(int32_t max_requests, int32_t max_step_tokens, int32_t max_pages_per_request, int32_t page_size)
    : page_size_(page_size),
      table_width_(max_pages_per_request),
      query_start_loc_(static_cast<size_t>(max_requests) + 1),
      seq_lens_(static_cast<size_t>(max_requests)),
      block_table_(static_cast<size_t>(max_requests) * static_cast<size_t>(max_pages_per_request)),
      slot_mapping_(static_cast<size_t>(max_step_tokens)) {}

void StepBatch::fill(std::span<const StepRequest> step) {
  num_requests_ = static_cast<int64_t>(step.size());
  int32_t token = 0;
  for (size_t r = 0; r < step.size(); ++r) {
    const StepRequest& request = step[r];
    query_start_loc_[r] = token;
    seq_lens_[r] = request.num_keys;
    std::copy(request.pages.begin(), request.pages.end(),
              block_table_.begin() + static_cast<int64_t>(r) * table_width_);
    for (int32_t position = request.num_keys - request.num_new; position < request.num_keys; ++position) {
      slot_mapping_[static_cast<size_t>(token++)] =
          int64_t{request.pages[static_cast<size_t>(position / page_size_)]} * page_size_ + position % page_size_;
    }
  }
  query_start_loc_[step.size()] = token;
}

Batch StepBatch::batch() const {
  Batch batch;
  batch.query_start_loc = Tensor::contiguous(query_start_loc_.data(), DType::i32, {num_requests_ + 1});
  batch.seq_lens = Tensor::contiguous(seq_lens_.data(), DType::i32, {num_requests_});
  batch.block_table = Tensor::contiguous(block_table_.data(), DType::i32, {num_requests_, table_width_});
  batch.slot_mapping =
      Tensor::contiguous(slot_mapping_.data(), DType::i64, {query_start_loc_[static_cast<size_t>(num_requests_)]});
  return batch;
}

}  // namespace qkv::replay
