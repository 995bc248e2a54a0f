// A plan on the device: its index arrays and work items, and the buffer of partial states.
#pragma once

#include <vector>

#include "cuda/device/params.hpp"
#include "cuda/forward_sm90_few_rows.hpp"
#include "cuda/memory.hpp"
#include "plan/plan_data.hpp"

namespace qkv::cuda {

// What the layer's kernels want.
struct PlacementRules {
  bool few_rows_sm90 = false;  // items of few rows go into few_rows_lists, else into `items`
  int32_t max_ctas = 0;        // items of many rows go into lists of at most so many CTAs; 0 = a CTA an item
};

struct DevicePlan final : plan::PlacedPlan {
  DevicePlan(const plan::PlanData& plan, const PlacementRules& rules, int32_t device_index, jit::CUstream stream);

  // Fill in what the plan knows of a launch.
  void fill(ForwardParams& params) const;
  void fill(MergePlanParams& params) const;

  std::vector<FewRowsLaunch> few_rows_launches;
  int* tickets = nullptr;

  // Items of few rows come first in the device's list.
  int32_t num_few_rows_items = 0;
  int32_t num_many_rows_items = 0;
  int32_t num_ctas = 0;
  const int* cta_begin = nullptr;
  int32_t num_merges = 0;  // of those that no kernel joins by itself
  int64_t max_merge_rows = 0;

  const WorkItem* items = nullptr;
  const int64_t* slots = nullptr;
  const int* slot_requests = nullptr;  // [num_slots], where scales are of requests
  int64_t num_slots = 0;

 private:
  DeviceBuffer arrays_;
  DeviceBuffer states_;  // [num_state_rows, head_dim_v], then [num_state_rows] LSEs
  size_t states_lse_offset_ = 0;
  ForwardParams forward_{};
  MergePlanParams merge_{};
};

}  // namespace qkv::cuda
