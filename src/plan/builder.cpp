#include "plan/builder.hpp"

namespace qkv::plan {

PlanData build(const LayerSpec& layer, const Batch& batch, const PlanShape& shape) {
  PlanData plan = read_batch(layer, batch);
  cut_work(plan, shape);
  return plan;
}

}  // namespace qkv::plan
