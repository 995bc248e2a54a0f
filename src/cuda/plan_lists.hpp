// The arrays of a plan as the kernels read them: made on the host, pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/device/few_rows_params.hpp"
#include "cuda/device/params.hpp"
#include "cuda/device/plan_params.hpp"
#include "cuda/few_rows_lists.hpp"
#include "cuda/shared_lists.hpp"
#include "plan/capacity.hpp"
#include "plan/plan_data.hpp"

namespace qkv::cuda {

// What the layer's kernels want.
struct PlacementRules {
  bool few_rows_sm90 = false;      // items of few rows go into lists by query tile
  int32_t max_few_rows = 0;        // packed rows of a request of few rows
  int32_t max_ctas = 0;            // items of many rows go into lists of at most so many CTAs; 0 = no such lists
  int32_t max_rows_of_merges = 0;  // packed rows of a merge that the few-rows kernel does not join by itself
  int32_t max_shared_rows = 0;     // packed rows of an item that several requests share; 0 = there are no such items
  int32_t max_planner_blocks = 0;  // that lie in a CTA's own memory when the device plans
};

// In the order in which they lie on the device: small ones first.
enum PlanArray : int32_t {
  kCounts,
  kCtaBegin,
  kQueryStartLoc,
  kSeqLens,
  kKeyStart,
  kPageStart,
  kAlibiSlopes,
  kTickets,
  kMerges,
  kSlots,
  kSlotRequests,
  kFewRowsItems,  // of the sm_80 kernel
  kManyRowsItems,
  kFewRowsSm90,  // one a query tile
  kSharedTokens = kFewRowsSm90 + kFewRowsTiles,
  kSharedItems,  // of the sm_80 kernel
  kSharedSm90,   // one a query tile of a request
  kSegments = kSharedSm90 + kFewRowsTiles,
  kPages,
  kOperands,                               // one an operand of the mask
  kBlocks = kOperands + kMaxMaskOperands,  // of the device's planner
  kNumPlanArrays,
};

// Room for so many items of few rows in clusters, which are at least half full however joins fit into them.
constexpr int64_t kClusterSlack = 1280;  // the device planner fills up a cluster for each kind of cost and join
constexpr int64_t clustered_room(int64_t num_items) { return 2 * num_items + kClusterSlack; }
constexpr int64_t items_of_clustered_room(int64_t room) { return (room - kClusterSlack) / 2; }

struct PlanLists {
  PlanCounts counts{};
  std::vector<int32_t> cta_begin;
  std::vector<int32_t> tickets;
  std::vector<MergeItem> merges;
  std::vector<WorkItem> few_rows;
  std::vector<WorkItem> many_rows;
  std::array<FewRowsList, kFewRowsTiles> few_rows_sm90;
  SharedLists shared;
  std::vector<KeySegment> segments;
  int64_t max_rows_of_merges = 0;

  // The bytes of each array; they lie in this object and in the plan.
  std::array<std::span<const std::byte>, kNumPlanArrays> arrays(const plan::PlanData& plan) const;
};

// `clusters`: always also fills cta_begin up to max_ctas.
PlanLists make_plan_lists(const plan::PlanData& plan, const PlacementRules& rules, ClusterUse clusters);

// Bytes of each array for any plan within the capacity.
std::array<size_t, kNumPlanArrays> array_bytes(const LayerSpec& layer, const PlacementRules& rules,
                                               const plan::PlanCapacity& capacity);

}  // namespace qkv::cuda
