#include "plan/builder.hpp"

namespace qkv::plan {

PlanData build(const LayerSpec& layer, const Batch& batch, const RequestCutter& cut_request) {
  PlanData plan = read_batch(layer, batch);
  cut_work(plan, cut_request);
  return plan;
}

}  // namespace qkv::plan
