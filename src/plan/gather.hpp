// Runs of cached tokens that become dense rows: the block table's used entries, checked and copied.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "plan/plan_data.hpp"
#include "qkv/tensor.hpp"

namespace qkv::plan {

struct GatherPlan {
  int32_t page_size = 1;
  int32_t max_page = -1;                 // highest page number used
  std::vector<int32_t> pages;            // of all runs, one after another, from each run's first page on
  std::vector<int64_t> page_start;       // [num_runs]: a run's first entry in `pages`
  std::vector<int32_t> first_offset;     // [num_runs]: of a run's first token in its first page
  std::vector<int64_t> row_start = {0};  // [num_runs + 1]

  std::unique_ptr<PlacedPlan> placed;

  int64_t num_runs() const { return static_cast<int64_t>(page_start.size()); }
  int64_t num_rows() const { return row_start.back(); }
};

// Run i is tokens [starts[i], starts[i] + seq_lens[i]) of the request in row first_request + i of the block table
// (i32 [num_requests, max_pages], on the host).
GatherPlan build_gather(const Tensor& block_table, int32_t first_request, const std::vector<int32_t>& starts,
                        const std::vector<int32_t>& seq_lens, int32_t page_size);

// num_rows rows that lie in one tensor already, as a page.
GatherPlan one_page(int32_t num_rows);

}  // namespace qkv::plan
