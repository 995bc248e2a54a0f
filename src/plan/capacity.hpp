// How large the arrays of a plan can become for any batch within declared maxima: bounds, never estimates.
#pragma once

#include <optional>

#include "core/index/split_bounds.hpp"
#include "mask/program.hpp"
#include "qkv/layer.hpp"
#include "qkv/planner.hpp"
#include "qkv/status.hpp"

namespace qkv::plan {

// An engine's way of cutting requests (LayerEngine::cut_request), bounded.
struct CutBounds {
  int32_t few_rows;             // packed rows of a request up to which the few-rows kernel runs, in one block
  int32_t few_rows_tile_kv;     // its keys a tile, at least
  int32_t rows_per_block;       // of the many-rows kernel, at least
  int32_t rows_per_block_most;  // requests of more rows are not split along their keys
  int32_t tile_kv;              // keys a tile of the many-rows kernel
  index::SplitBounds few_rows_splits;
  index::SplitBounds many_rows_splits;
};

// Segments of a plan that shares prefixes, as a multiple of its segments without: those of items that became one stay.
constexpr int64_t kSegmentsWithSharing = 3;

// Entries of each array.
struct PlanCapacity {
  int32_t query_len = 0;  // new tokens of a request
  int32_t seq_len = 0;    // keys of a request
  bool on_device = false;
  int64_t blocks = 0;  // of rows
  int64_t requests = 0;
  int64_t tokens = 0;
  int64_t keys = 0;
  int64_t pages = 0;
  int64_t slots = 0;
  int64_t few_rows_items = 0;
  int64_t many_rows_items = 0;
  int64_t segments = 0;
  int64_t few_rows_merges = 0;
  int64_t many_rows_merges = 0;
  int64_t state_rows = 0;
};

// The same limits on what the layer is shown: max_seq_len and max_keys of shown keys.
PlanLimits shown_limits(const LayerSpec& layer, PlanLimits limits);

PlanCapacity capacity_of(const LayerSpec& layer, const PlanLimits& limits, const CutBounds& bounds);

// Why a planner of the layer cannot have limits.plans_on_device; none: it can.
std::optional<Error> reason_against_plans_on_device(const LayerSpec& layer);

// Refuses what cannot be meant and fills in what 0 stands for.
PlanLimits checked_limits(const LayerSpec& layer, PlanLimits limits);

}  // namespace qkv::plan
