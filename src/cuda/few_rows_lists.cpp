#include "cuda/few_rows_lists.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "core/index/forward_sm90_few_rows_shape.hpp"

namespace qkv::cuda {
namespace {

constexpr int32_t kClusterSize = index::few_rows::kMaxClusterSplits;

FewRowsItem device_item(const plan::PlanData& plan, const plan::WorkItem& item) {
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
  placed.page_start = plan.layer.cache ? plan.page_start[request] : plan.key_start[request];
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

bool joins_in_cluster(const FewRowsItem& item) { return item.num_splits > 1 && item.num_splits <= kClusterSize; }

// Groups of items into bins of kClusterSize, each group whole: large groups first, each into the fullest bin that has
// room. Bins keep the order in which they were opened, and groups come longest first, so long bins start first.
class Clusters {
 public:
  void add(const std::vector<FewRowsItem>& group) {
    const auto size = static_cast<int32_t>(group.size());
    const int32_t bin = bin_with_room(size);
    bins_[bin].insert(bins_[bin].end(), group.begin(), group.end());
    const auto room = kClusterSize - static_cast<int32_t>(bins_[bin].size());
    by_room_[room].push_back(bin);
  }

  std::vector<FewRowsItem> items() const {
    FewRowsItem nothing{};
    nothing.kv_head = -1;
    std::vector<FewRowsItem> all;
    for (const std::vector<FewRowsItem>& bin : bins_) {
      all.insert(all.end(), bin.begin(), bin.end());
      all.insert(all.end(), kClusterSize - bin.size(), nothing);
    }
    return all;
  }

 private:
  int32_t bin_with_room(int32_t size) {
    for (int32_t room = size; room < kClusterSize; ++room) {
      if (by_room_[room].empty()) continue;
      const int32_t bin = by_room_[room].back();
      by_room_[room].pop_back();
      return bin;
    }
    bins_.emplace_back();
    return static_cast<int32_t>(bins_.size()) - 1;
  }

  std::vector<std::vector<FewRowsItem>> bins_;
  std::array<std::vector<int32_t>, kClusterSize> by_room_;  // bins, by the items that still fit
};

// Joins of at most kClusterSize splits stand side by side within a cluster; all else fills the gaps.
std::vector<FewRowsItem> clustered(const std::vector<FewRowsItem>& items) {
  std::map<int, std::vector<FewRowsItem>> joins;  // by ticket
  std::vector<std::vector<FewRowsItem>> groups;
  std::vector<int> order;  // tickets, by their longest item
  std::vector<FewRowsItem> singles;
  for (FewRowsItem item : items) {
    if (!joins_in_cluster(item)) {
      singles.push_back(item);
      continue;
    }
    std::vector<FewRowsItem>& join = joins[item.ticket];
    if (join.empty()) order.push_back(item.ticket);
    item.ticket = -1;
    join.push_back(item);
  }
  for (const int ticket : order) groups.push_back(std::move(joins[ticket]));
  std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
  Clusters clusters;
  for (std::vector<FewRowsItem>& group : groups) {
    std::sort(group.begin(), group.end(), [](const auto& a, const auto& b) { return a.split < b.split; });
    clusters.add(group);
  }
  for (const FewRowsItem& item : singles) clusters.add({item});
  return clusters.items();
}

}  // namespace

std::vector<FewRowsList> make_few_rows_lists(const plan::PlanData& plan) {
  std::map<int32_t, std::vector<FewRowsItem>> by_tile;
  for (const plan::WorkItem& item : plan.items) {
    if (!item.few_rows) continue;
    const int32_t rows = (item.query_end - item.query_begin) * plan.layer.group_size();
    by_tile[index::few_rows::tile_rows(rows)].push_back(device_item(plan, item));
  }
  std::vector<FewRowsList> lists;
  for (auto& [tile_q, items] : by_tile) {
    const auto joining = std::count_if(items.begin(), items.end(), joins_in_cluster);
    const bool in_clusters = 2 * joining > static_cast<int64_t>(items.size());
    lists.push_back({tile_q, in_clusters, in_clusters ? clustered(items) : std::move(items)});
  }
  return lists;
}

}  // namespace qkv::cuda
