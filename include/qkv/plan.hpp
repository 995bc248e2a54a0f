// A batch turned into work items for one kind of layer; built once a step, shared by all layers of that kind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "qkv/export.hpp"

namespace qkv {

namespace plan {
struct PlanData;
}

// Holds copies of the batch's index arrays: the caller's may go once it is built. Cheap to copy, read-only, and safe to
// use from several threads.
class QKV_EXPORT Plan {
 public:
  explicit Plan(std::shared_ptr<const plan::PlanData> data) : data_(std::move(data)) {}

  int32_t num_requests() const;
  int64_t num_tokens() const;
  int64_t num_work_items() const;
  int64_t workspace_bytes() const;  // of partial states during forward
  // What the plan would do, as text: items, splits and merges of each request.
  std::string dump() const;

  const plan::PlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const plan::PlanData> data_;
};

}  // namespace qkv
