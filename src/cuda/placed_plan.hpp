// A plan on the device: its index arrays and work items, and the buffer of partial states.
#pragma once

#include "cuda/device/params.hpp"
#include "cuda/memory.hpp"
#include "plan/plan_data.hpp"

namespace qkv::cuda {

struct DevicePlan final : plan::PlacedPlan {
  // The many-rows items go into lists of at most `max_ctas` CTAs (0: the kernel has a CTA an item).
  DevicePlan(const plan::PlanData& plan, int32_t device_index, int32_t max_ctas, jit::CUstream stream);

  // Fill in what the plan knows of a launch.
  void fill(ForwardParams& params) const;
  void fill(MergePlanParams& params) const;

  // Items of few rows come first in the device's list.
  int32_t num_few_rows_items = 0;
  int32_t num_many_rows_items = 0;
  int32_t num_ctas = 0;
  const int* cta_begin = nullptr;
  int32_t num_merges = 0;
  int64_t max_merge_rows = 0;

  const WorkItem* items = nullptr;
  const int64_t* slots = nullptr;
  int64_t num_slots = 0;

 private:
  DeviceBuffer arrays_;
  DeviceBuffer states_;  // [num_state_rows, head_dim_v], then [num_state_rows] LSEs
  size_t states_lse_offset_ = 0;
  ForwardParams forward_{};
  MergePlanParams merge_{};
};

}  // namespace qkv::cuda
