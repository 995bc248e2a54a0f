// Batch -> PlanData: checks and copies the batch's index arrays, then cuts the work.
#pragma once

#include <functional>

#include "core/index/split.hpp"
#include "plan/engine.hpp"
#include "plan/plan_data.hpp"
#include "qkv/batch.hpp"
#include "qkv/layer.hpp"

namespace qkv::plan {

// LayerEngine::cut_request.
using RequestCutter = std::function<index::RequestCut(int32_t q_len, int32_t kv_len)>;

PlanData build(const LayerSpec& layer, const Batch& batch, const RequestCutter& cut_request,
               const DeviceRules& rules = {});

// Checks what can be seen from the host; `device` is where all arrays must lie. Fills in what a plan knows of such a
// batch.
DeviceBatch read_device_batch(const LayerSpec& layer, Device device, const Batch& batch, const PlanLimits& limits,
                              PlanData& plan);

// The same work on other pages and slots.
PlanData with_block_table(const PlanData& plan, const Tensor& block_table, const Tensor& slot_mapping);

// Throws where the batch is larger than the limits.
void check_limits(const PlanData& plan, const PlanLimits& limits);

// Fills everything but segments, items and merges. Throws on the first thing that is wrong.
PlanData read_batch(const LayerSpec& layer, const Batch& batch);

// Checks slots (-1 = nowhere, no slot twice) and returns the highest, or -1.
int64_t check_slots(const std::vector<int64_t>& slots);

// Checks the batch's prefix groups and fills prefix_groups. The rest of the batch has been read.
void read_prefix_groups(const Batch& batch, PlanData& plan);

// Of a group's tokens, those that the layer is shown.
int32_t num_shared_keys(const LayerSpec& layer, const PrefixGroup& group);

// Fills prefix_groups with what the block table says.
void find_prefix_groups(PlanData& plan);

// Fills segments, items, merges and num_state_rows.
void cut_work(PlanData& plan, const RequestCutter& cut_request);

// Joins items of several requests that read the same keys, up to the rules' packed rows an item.
void share_prefixes(PlanData& plan, const RequestCutter& cut_request, const DeviceRules& rules);

// The plan in words, one line a request.
std::string describe(const PlanData& plan);

}  // namespace qkv::plan
