// A plan's numbers for people and tools.
#pragma once

#include "plan/plan_data.hpp"
#include "qkv/plan.hpp"

namespace qkv::plan {

PlanReport report_of(const PlanData& plan, std::string device);

}  // namespace qkv::plan
