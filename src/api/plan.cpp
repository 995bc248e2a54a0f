#include "qkv/plan.hpp"

#include "plan/builder.hpp"

namespace qkv {

int32_t Plan::num_requests() const { return data_->num_requests; }
int64_t Plan::num_tokens() const { return data_->num_tokens; }
int64_t Plan::num_work_items() const { return static_cast<int64_t>(data_->items.size()); }

int64_t Plan::workspace_bytes() const {
  return data_->num_state_rows * (data_->layer.value_dim() + 1) * static_cast<int64_t>(sizeof(float));
}

std::string Plan::dump() const { return plan::describe(*data_); }

}  // namespace qkv
