#include "cuda/few_rows_lists.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <functional>
#include <map>

#include "core/index/forward_sm90_few_rows_shape.hpp"

namespace qkv::cuda {
namespace {

using index::few_rows::kMaxClusterSplits;

// Merges some of whose states come from items that several requests share: they are in another launch.
std::vector<bool> find_shared_merges(const plan::PlanData& plan) {
  std::vector<bool> shared(plan.merges.size(), false);
  for (const plan::WorkItem& item : plan.items) {
    if (!item.is_shared()) continue;
    plan::for_each_run(plan, item, [&](const plan::RowRun& run) { shared[run.merge] = true; });
  }
  return shared;
}

// Which joins happen within a cluster.
class ClusterJoins {
 public:
  explicit ClusterJoins(const plan::PlanData& plan) : shared_(find_shared_merges(plan)) {}
  bool operator()(const FewRowsItem& item) const {
    return item.num_splits > 1 && item.num_splits <= kMaxClusterSplits && !shared_[item.ticket];
  }

 private:
  std::vector<bool> shared_;  // [merges]
};

// Places for groups of items in bins of cluster_size, each group whole, each in a bin with least room for it.
class Clusters {
 public:
  explicit Clusters(int32_t cluster_size) : cluster_size_(cluster_size) {}

  // The place of the group's first item; the others follow.
  size_t add(int32_t size) {
    const int32_t bin = bin_with_room(size);
    const int32_t used = used_[bin];
    used_[bin] += size;
    by_room_[cluster_size_ - used_[bin]].push_back(bin);
    return static_cast<size_t>(bin) * cluster_size_ + used;
  }

  size_t num_places() const { return used_.size() * cluster_size_; }

 private:
  int32_t bin_with_room(int32_t size) {
    for (int32_t room = size; room < cluster_size_; ++room) {
      if (by_room_[room].empty()) continue;
      const int32_t bin = by_room_[room].back();
      by_room_[room].pop_back();
      return bin;
    }
    used_.push_back(0);
    return static_cast<int32_t>(used_.size()) - 1;
  }

  int32_t cluster_size_;
  std::vector<int32_t> used_;                                    // of each bin
  std::array<std::vector<int32_t>, kMaxClusterSplits> by_room_;  // bins, by the items that still fit
};

// The first place of each join that is in a cluster, by ticket; -1 for others. Large joins first, and among equals
// those with the longest item: bins start in the order in which they were opened.
std::vector<int64_t> places_of_joins(const std::vector<FewRowsItem>& items, const ClusterJoins& joins_in_cluster,
                                     size_t num_merges, Clusters& clusters) {
  std::array<std::vector<int>, kMaxClusterSplits + 1> tickets;  // by the number of splits
  std::vector<int64_t> places(num_merges, -1);
  for (const FewRowsItem& item : items) {
    if (!joins_in_cluster(item) || places[item.ticket] == 0) continue;
    places[item.ticket] = 0;
    tickets[item.num_splits].push_back(item.ticket);
  }
  for (int32_t size = kMaxClusterSplits; size > 1; --size) {
    for (const int ticket : tickets[size]) places[ticket] = static_cast<int64_t>(clusters.add(size));
  }
  return places;
}

// Of the clusters that hold each of the joins. A cluster begins where all its CTAs find room at once, so it should be
// no larger.
int32_t least_cluster_size(const std::vector<FewRowsItem>& items, const ClusterJoins& joins_in_cluster) {
  uint32_t most_splits = 2;
  for (const FewRowsItem& item : items) {
    if (joins_in_cluster(item)) most_splits = std::max<uint32_t>(most_splits, item.num_splits);
  }
  return static_cast<int32_t>(std::bit_ceil(most_splits));
}

// Joins within clusters stand side by side; all else fills the gaps. No container for each join: there are thousands in
// a step, and this is most of what planning costs.
std::vector<FewRowsItem> in_clusters(const std::vector<FewRowsItem>& items, const ClusterJoins& joins_in_cluster,
                                     size_t num_merges, int32_t cluster_size) {
  Clusters clusters(cluster_size);
  const std::vector<int64_t> place_of_join = places_of_joins(items, joins_in_cluster, num_merges, clusters);
  std::vector<size_t> places;
  places.reserve(items.size());
  for (const FewRowsItem& item : items) {
    places.push_back(joins_in_cluster(item) ? static_cast<size_t>(place_of_join[item.ticket]) + item.split
                                            : clusters.add(1));
  }
  std::vector<FewRowsItem> placed(clusters.num_places(), nothing_to_do());
  for (size_t i = 0; i < items.size(); ++i) {
    FewRowsItem& item = placed[places[i]];
    item = items[i];
    if (joins_in_cluster(item)) item.ticket = -1;
  }
  return placed;
}

}  // namespace

int32_t few_rows_tile_number(int32_t tile_q) { return std::countr_zero(static_cast<uint32_t>(tile_q)) - 2; }

FewRowsItem few_rows_item(const plan::PlanData& plan, const plan::WorkItem& item) {
  const int32_t request = item.request;
  const int32_t cached_keys = plan.seq_lens[request] - plan.mask_inputs[request].q_len;
  FewRowsItem placed{};
  placed.request = request;
  placed.kv_head = item.kv_head;
  placed.query_begin = item.query_begin;
  placed.query_end = item.query_end;
  placed.query_token = plan.query_start_loc[request] + item.query_begin;
  placed.cached_keys = cached_keys;
  placed.segment_begin = item.segment_begin;
  placed.segment_end = item.segment_end;
  placed.first = {0, 0, 1};
  if (item.segment_begin < item.segment_end) {
    const mask::KeySegment& first = plan.segments[item.segment_begin];
    placed.first = {first.begin, first.end, first.tile_class == TileClass::full ? 1 : 0};
  }
  placed.page_start = plan.page_start[request];
  placed.ticket = -1;
  placed.num_splits = 1;
  if (item.merge >= 0) {
    const plan::MergeItem& merge = plan.merges[item.merge];
    const int64_t rows = static_cast<int64_t>(item.query_end - item.query_begin) * plan.layer.group_size();
    placed.state_row = static_cast<int>(item.state_row);
    placed.ticket = item.merge;
    placed.split = static_cast<short>((item.state_row - merge.state_row) / rows);
    placed.num_splits = static_cast<short>(merge.num_states);
  }
  return placed;
}

std::vector<FewRowsList> make_few_rows_lists(const plan::PlanData& plan, ClusterUse use) {
  std::map<int32_t, std::vector<FewRowsItem>> by_tile;
  for (const plan::WorkItem& item : plan.items) {
    if (!item.few_rows || item.is_shared()) continue;
    const int32_t rows = (item.query_end - item.query_begin) * plan.layer.group_size();
    std::vector<FewRowsItem>& items = by_tile[index::few_rows::tile_rows(rows)];
    if (items.empty()) items.reserve(plan.items.size());
    items.push_back(few_rows_item(plan, item));
  }
  const ClusterJoins joins_in_cluster(plan);
  std::vector<FewRowsList> lists;
  for (auto& [tile_q, items] : by_tile) {
    const auto joining = std::count_if(items.begin(), items.end(), std::cref(joins_in_cluster));
    if (use == ClusterUse::where_most_join && 2 * joining <= static_cast<int64_t>(items.size())) {
      lists.push_back({tile_q, 1, std::move(items)});
      continue;
    }
    const int32_t cluster_size =
        use == ClusterUse::always ? kMaxClusterSplits : least_cluster_size(items, joins_in_cluster);
    lists.push_back({tile_q, cluster_size, in_clusters(items, joins_in_cluster, plan.merges.size(), cluster_size)});
  }
  return lists;
}

}  // namespace qkv::cuda
