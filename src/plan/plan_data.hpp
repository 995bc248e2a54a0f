// What a plan holds: the batch's index arrays, checked and copied, and the work items made of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/index/cost.hpp"
#include "mask/program.hpp"
#include "plan/capacity.hpp"
#include "qkv/batch.hpp"
#include "qkv/layer.hpp"
#include "qkv/planner.hpp"

namespace qkv::plan {

// New tokens of one request whose rows, these x the heads of the group, an item works on.
struct RowRun {
  int32_t request;
  int32_t query_begin, query_end;
  int64_t state_row;  // first row in the buffer of partial states; -1 = the item writes the output itself
  int32_t merge;      // index in PlanData::merges of the join that its state enters; -1 = none
};

// Query rows x a run of keys -> a state, or the finished output where the run is all that the rows see.
struct WorkItem {
  int32_t request;
  int32_t kv_head;
  int32_t query_begin, query_end;      // new tokens of the request; rows are these x the heads of the group
  int32_t segment_begin, segment_end;  // range in PlanData::segments
  int64_t state_row;                   // first row in the buffer of partial states; -1 = writes the output itself
  int32_t merge;                       // index in PlanData::merges of the join that its state enters; -1 = none
  int64_t cost;                        // row x key pairs, for balancing
  bool few_rows;                       // which of the engine's two kernels runs: by the request's own rows only
  // Range in PlanData::shared_rows: rows of further requests that share the item's keys. Mostly empty.
  int32_t shared_begin, shared_end;

  bool is_shared() const { return shared_begin < shared_end; }
};

// Joins the states of one row block, in rising order of keys.
struct MergeItem {
  int32_t request;
  int32_t kv_head;
  int32_t query_begin, query_end;
  int64_t state_row;   // first row of the first state
  int32_t num_states;  // state s begins at state_row + s·rows
};

// An engine's own copy of a plan, where it keeps one.
struct PlacedPlan {
  virtual ~PlacedPlan() = default;
};

// Tokens that update_cache writes: in cross attention, those of the other sequence.
inline int64_t max_slots(const LayerSpec& layer, const PlanLimits& limits) {
  return layer.type == AttentionType::encoder_decoder ? limits.max_keys : limits.max_tokens;
}

// What the plans of one planner share. Their memory holds the newest of them only.
struct PlannerShare {
  PlanLimits limits;
  std::atomic<uint64_t> newest{0};
};

// A batch whose arrays lie on the device, contiguous.
struct DeviceBatch {
  int32_t num_requests;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;  // nullptr without a cache
  int64_t block_table_stride;
  const int64_t* slot_mapping;
  int32_t num_slots;
  std::vector<const int32_t*> operands;  // in the order of mask.operands
  const float* alibi_slopes;             // nullptr, or [num_requests, num_q_heads]
};

struct PlanData {
  // Mask inputs point into `operands`: a plan moves, but is never copied.
  PlanData() = default;
  PlanData(PlanData&&) = default;
  PlanData& operator=(PlanData&&) = default;

  LayerSpec layer;  // what the plan was made for
  mask::Program mask;
  uint64_t mask_hash = 0;

  int32_t num_requests = 0;
  int64_t num_tokens = 0;
  // Of whole requests, which masks and operands speak of; and of the keys that the layer is shown, which are tiled,
  // split and addressed. Work items and segments number the latter.
  int64_t num_keys = 0;
  int64_t num_shown_keys = 0;
  std::vector<int32_t> query_start_loc;  // [num_requests + 1]
  std::vector<int32_t> seq_lens;         // [num_requests]
  std::vector<int32_t> key_lens;         // [num_requests]: shown keys
  std::vector<int64_t> key_start;        // [num_requests]: a request's first value in operands of scope key
  std::vector<int32_t> pages;            // pages of all requests, one after another
  std::vector<int64_t> page_start;       // [num_requests]: a request's first entry in `pages`; dense: its first key
  int32_t max_page = -1;                 // highest page number used
  std::vector<int64_t> slot_mapping;
  bool has_slot_mapping = false;
  int64_t max_slot = -1;
  std::vector<int32_t> slot_requests;  // [num_slots]: whose token a slot gets, when scales are per request
  std::vector<float> alibi_slopes;     // [num_requests, num_q_heads], when the layer takes them from the batch

  std::vector<std::vector<int32_t>> operands;   // in the order of mask.operands
  std::vector<mask::ProgramInput> mask_inputs;  // [num_requests], pointing into `operands`

  PrefixSharing prefix_sharing = PrefixSharing::automatic;
  bool prefix_sharing_keeps_bits = true;
  std::vector<PrefixGroup> prefix_groups;  // nested ones behind those that hold them

  std::vector<mask::KeySegment> segments;
  std::vector<WorkItem> items;      // most expensive first
  std::vector<RowRun> shared_rows;  // of items that stand for several requests
  std::vector<MergeItem> merges;
  int64_t num_state_rows = 0;

  index::DeviceCosts costs;  // of the device that the plan was made for
  double seconds_apart = 0;  // predicted without sharing, where that was asked; 0 = it was not

  std::shared_ptr<PlacedPlan> placed;

  bool on_device = false;  // planned there: the arrays above are empty, num_tokens and num_keys are bounds
  std::shared_ptr<const PlannerShare> planner;  // whose plan this is, if it is one's
  uint64_t number = 0;                          // among the planner's plans, from 1

  // What tensors must hold: a captured launch will run with other batches of the planner.
  int64_t rows_of_tokens() const { return planner ? planner->limits.max_tokens : num_tokens; }
  int64_t rows_of_keys() const { return planner ? shown_limits(layer, planner->limits).max_keys : num_shown_keys; }
  int64_t rows_of_slots() const {
    return planner ? max_slots(layer, planner->limits) : static_cast<int64_t>(slot_mapping.size());
  }
  int32_t rows_of_requests() const { return planner ? planner->limits.max_requests : num_requests; }
  int32_t highest_page() const { return planner ? planner->limits.num_pages - 1 : max_page; }
  int64_t highest_slot() const {
    return planner ? int64_t{planner->limits.num_pages} * layer.cache->page_size - 1 : max_slot;
  }
};

// All rows of an item, run by run.
template <class Visit>
void for_each_run(const PlanData& plan, const WorkItem& item, Visit visit) {
  visit(RowRun{item.request, item.query_begin, item.query_end, item.state_row, item.merge});
  for (int32_t i = item.shared_begin; i < item.shared_end; ++i) visit(plan.shared_rows[i]);
}

// Of all its runs.
inline int64_t packed_rows(const PlanData& plan, const WorkItem& item) {
  int64_t tokens = 0;
  for_each_run(plan, item, [&](const RowRun& run) { tokens += run.query_end - run.query_begin; });
  return tokens * plan.layer.group_size();
}

}  // namespace qkv::plan
