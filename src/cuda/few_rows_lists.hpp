// The launches of Hopper's few-rows kernel that a plan needs: one for each size of query tile, its items in the order
// in which they start. A pure function, made on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device/few_rows_params.hpp"
#include "plan/plan_data.hpp"

namespace qkv::cuda {

struct FewRowsList {
  int32_t tile_q = 0;        // rows that the kernel makes room for
  int32_t cluster_size = 1;  // 2, 4 or 8: so many items are a cluster, within which at most so many splits join
  std::vector<FewRowsItem> items;

  bool clustered() const { return cluster_size > 1; }
};

// Whether a list comes in clusters: where most of its items can join in them, no larger than these need; or always in
// the largest, for launches that will run with other batches.
enum class ClusterUse : uint8_t { where_most_join, always };

// Of a tile of 4, 8, 16 or 32 rows.
int32_t few_rows_tile_number(int32_t tile_q);

// An item as the kernel reads it, joined by a ticket where it is joined.
FewRowsItem few_rows_item(const plan::PlanData& plan, const plan::WorkItem& item);

// The plan's items of few rows of one request each, smallest tile first. Tickets are the plan's merges.
std::vector<FewRowsList> make_few_rows_lists(const plan::PlanData& plan, ClusterUse use);

}  // namespace qkv::cuda
