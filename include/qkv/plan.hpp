// A batch turned into work items for one kind of layer; built once a step, shared by all layers of that kind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/batch.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"

namespace qkv {

namespace plan {
struct PlanData;
}

// One work item, and what the cost model says of it.
struct PlanItem {
  bool few_rows = false;  // which of the device's two kernels runs
  int32_t kv_head = 0;
  std::vector<int32_t> requests = {};  // several where they share the keys
  int64_t rows = 0;                    // new tokens x query heads of the KV head
  int32_t key_begin = 0, key_end = 0;  // of those that the layer is shown; what the mask hides is not read
  int64_t keys = 0;                    // that are read
  bool is_state = false;               // leaves a partial state to a merge
  int64_t bytes = 0;
  int64_t operations = 0;
  int32_t worker = 0;  // a thread or a multiprocessor
  double begin_seconds = 0, end_seconds = 0;
};

// What a plan becomes on a device, as numbers. Times are predictions (docs/plans.md).
struct PlanReport {
  std::string device = {};
  int32_t num_workers = 0;
  std::vector<int32_t> query_lens = {}, seq_lens = {};  // [num_requests]
  std::vector<int32_t> key_lens = {};                   // [num_requests]: of seq_lens, what the layer is shown
  std::vector<PrefixGroup> prefix_groups = {};
  std::vector<PlanItem> items = {};  // in the order in which they start
  int64_t num_merges = 0;
  int64_t workspace_bytes = 0;
  int64_t bytes = 0;  // of all items
  int64_t operations = 0;
  double seconds = 0;
  double seconds_without_sharing = 0;  // 0: there was no choice
};

// The plan that a device would get; the device need not be there. "cpu" is this one, with as many threads as it would
// use; "h200" is an NVIDIA H200.
QKV_EXPORT PlanReport preview_plan(const LayerSpec& layer, const Batch& batch, std::string_view device);

// The items over time, a line a worker (of many workers, the first ones), to a PNG file. Colours tell few rows, many
// rows and shared keys apart.
QKV_EXPORT void draw_plan_png(const PlanReport& report, const std::string& path);

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
  PlanReport report() const;

  const plan::PlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const plan::PlanData> data_;
};

}  // namespace qkv
