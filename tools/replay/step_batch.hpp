// A step's index arrays, made once at the declared maxima and filled again for each step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "qkv/batch.hpp"
#include "scheduler.hpp"

namespace qkv::replay {

class StepBatch {
 public:
  StepBatch(int32_t max_requests, int32_t max_step_tokens, int32_t max_pages_per_request, int32_t page_size);

  void fill(std::span<const StepRequest> step);
  // Views of the arrays, valid until the next fill.
  Batch batch() const;

 private:
  int32_t page_size_;
  int32_t table_width_;
  int64_t num_requests_ = 0;
  std::vector<int32_t> query_start_loc_;  // [max_requests + 1]
  std::vector<int32_t> seq_lens_;         // [max_requests]
  std::vector<int32_t> block_table_;      // [max_requests, table_width]
  std::vector<int64_t> slot_mapping_;     // [max_step_tokens]
};

}  // namespace qkv::replay
