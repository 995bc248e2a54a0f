// A plan on the device: its arrays, and the buffer of partial states. Every array has a place of its own, so that
// captured launches find each batch at the same addresses.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "cuda/forward_sm90_few_rows.hpp"
#include "cuda/memory.hpp"
#include "cuda/plan_lists.hpp"

namespace qkv::cuda {

// Items that a kernel's CTAs take turns at.
struct ItemList {
  const WorkItem* items = nullptr;
  const int* num_items = nullptr;  // on the device
  int64_t most = 0;                // that there can be
};

class DevicePlan final : public plan::PlacedPlan {
 public:
  // For any plan within the capacity. `workspace`: for partial states; not given = its own.
  DevicePlan(const LayerSpec& layer, const PlacementRules& rules, const plan::PlanCapacity& capacity,
             const Tensor& workspace, int32_t device_index);
  // For this plan alone.
  DevicePlan(const plan::PlanData& plan, const PlacementRules& rules, int32_t device_index, jit::CUstream stream);

  // Puts another plan in its place. Work that is on the stream already still sees the one before.
  void update(const plan::PlanData& plan, jit::CUstream stream);

  // Points the launches at a batch on the device, and says where its plan goes.
  PlanBatchParams read_from(const plan::DeviceBatch& batch, const plan::PlanCapacity& capacity);
  const PlanCounts* counts() const { return array<const PlanCounts>(kCounts); }

  static int64_t workspace_bytes(const LayerSpec& layer, int64_t num_state_rows);

  // Fill in what the plan knows of a launch.
  void fill(ForwardParams& params) const;
  void fill(MergePlanParams& params) const;

  // CTAs for so many items: one each, or, where their number is only a bound, as many as keep the device busy.
  uint32_t grid_of(int64_t most_items, int32_t ctas_per_multiprocessor) const;

  std::vector<FewRowsLaunch> few_rows_launches;
  int* tickets = nullptr;
  ItemList few_rows;         // of the sm_80 kernel
  ItemList shared_few_rows;  // likewise, rows of several requests
  const SharedToken* shared_tokens = nullptr;
  ItemList many_rows;
  int32_t num_ctas = 0;
  const int* cta_begin = nullptr;
  int64_t max_merges = 0;
  int64_t max_rows_of_merges = 0;
  const int64_t* slots = nullptr;
  const int* slot_requests = nullptr;  // [slots], where scales are of requests
  const int* num_slots = nullptr;      // on the device, where max_slots is only a bound
  int64_t max_slots = 0;

 private:
  using ArrayBytes = std::array<size_t, kNumPlanArrays>;
  using BufferMaker = std::function<DeviceBuffer(size_t num_bytes)>;

  void allocate(const ArrayBytes& bytes, int64_t num_state_rows, const Tensor& workspace,
                const BufferMaker& make_buffer);
  void bind_launches();
  void add_few_rows_launches(const PlanCounts* counts);  // that lie on the device
  void add_shared_launches(const PlanCounts* counts);
  void bind_arrays();
  void copy(const plan::PlanData& plan, const PlanLists& lists, std::byte* image, jit::CUstream stream) const;
  template <class T>
  T* array(int32_t which) const {
    return arrays_.as<T>(offset_[which]);
  }
  template <class T>
  int64_t most(int32_t which) const {
    return static_cast<int64_t>(bytes_[which] / sizeof(T));
  }

  LayerSpec layer_;
  PlacementRules rules_;
  int32_t device_index_;
  bool is_exact_;  // made for one plan
  ArrayBytes bytes_{};
  ArrayBytes offset_{};
  size_t total_bytes_ = 0;
  DeviceBuffer arrays_;
  DeviceBuffer own_states_;
  std::optional<Staging> staging_;
  ForwardParams forward_{};
  MergePlanParams merge_{};
};

}  // namespace qkv::cuda
