// The cost model over a plan: what each item costs, and when which worker would run it.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan_data.hpp"

namespace qkv::plan {

index::ItemCost cost_of(const PlanData& plan, const WorkItem& item);

struct Turn {
  int32_t worker;
  double begin, end;  // seconds
};

struct Schedule {
  std::vector<Turn> turns;  // [items]
  double items_seconds = 0;
  double seconds = 0;  // with the merges, and the step's own start
};

// Items in the plan's order, each to the worker that is idle first.
Schedule schedule(const PlanData& plan);

}  // namespace qkv::plan
