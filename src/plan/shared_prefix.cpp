// Shared prefixes: items of several requests over the same split of the same keys become one item with the rows of all.
// Nothing else changes, neither splits nor kernels nor merges, and a row's bits do not depend on the rows beside it: so
// sharing changes no bit. (With leave to change bits, items of few rows that became many run the other kernel.)
#include <algorithm>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index/split.hpp"
#include "plan/builder.hpp"

namespace qkv::plan {
namespace {

// Items with equal keys may be joined.
struct SharedKeys {
  int32_t group;       // of PlanData::prefix_groups
  int32_t begin, end;  // of the split
  int32_t kv_head;
  int32_t tile_kv;
  int32_t tile_q;
  bool few_rows;
  int32_t first_key, last_key;  // that are read, where that matters

  auto key() const { return std::tuple(group, begin, end, kv_head, tile_kv, tile_q, few_rows, first_key, last_key); }
};

struct Candidate {
  SharedKeys keys;
  size_t item;
};

class Sharer {
 public:
  Sharer(PlanData& plan, const RequestCutter& cut_request, const DeviceRules& rules) : plan_(plan), rules_(rules) {
    for (int32_t request = 0; request < plan.num_requests; ++request) {
      cuts_.push_back(cut_request(plan.mask_inputs[request].q_len, plan.key_lens[request]));
    }
    groups_of_.resize(plan.num_requests);
    for (size_t g = 0; g < plan.prefix_groups.size(); ++g) {
      shared_keys_.push_back(num_shared_keys(plan.layer, plan.prefix_groups[g]));
      for (const int32_t request : plan.prefix_groups[g].requests) {
        groups_of_[request].push_back(static_cast<int32_t>(g));
      }
    }
  }

  void run() {
    const std::vector<Candidate> candidates = find_candidates();
    std::vector<bool> joined(plan_.items.size(), false);
    for (size_t begin = 0; begin < candidates.size();) {
      size_t end = begin + 1;
      while (end < candidates.size() && candidates[end].keys.key() == candidates[begin].keys.key()) ++end;
      join(std::span(candidates).subspan(begin, end - begin), joined);
      begin = end;
    }
    size_t kept = 0;
    for (size_t i = 0; i < plan_.items.size(); ++i) {
      if (!joined[i]) plan_.items[kept++] = plan_.items[i];
    }
    plan_.items.resize(kept);
  }

 private:
  std::vector<Candidate> find_candidates() const {
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < plan_.items.size(); ++i) {
      const WorkItem& item = plan_.items[i];
      if (item.state_row < 0 || groups_of_[item.request].empty()) continue;
      const index::RequestCut& cut = cuts_[item.request];
      if (cut.split_keys == INT32_MAX) continue;
      const int32_t begin = plan_.segments[item.segment_begin].begin / cut.split_keys * cut.split_keys;
      const int32_t group = outermost_group(item.request, int64_t{begin} + cut.split_keys);
      if (group < 0) continue;
      SharedKeys keys{group, begin, begin + cut.split_keys, item.kv_head, cut.tile_kv, cut.tile_q, item.few_rows, 0, 0};
      if (rules_.shares_equal_tiles_only) {
        if (has_gaps(item)) continue;
        keys.first_key = plan_.segments[item.segment_begin].begin;
        keys.last_key = plan_.segments[item.segment_end - 1].end;
      }
      candidates.push_back({keys, i});
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.keys.key() < b.keys.key(); });
    return candidates;
  }

  bool has_gaps(const WorkItem& item) const {
    for (int32_t s = item.segment_begin + 1; s < item.segment_end; ++s) {
      if (plan_.segments[s].begin != plan_.segments[s - 1].end) return true;
    }
    return false;
  }

  // The largest group that shares the request's keys up to `end`; -1 = none.
  int32_t outermost_group(int32_t request, int64_t end) const {
    for (const int32_t group : groups_of_[request]) {
      if (shared_keys_[group] >= end) return group;
    }
    return -1;
  }

  bool may_change_kernel() const { return !plan_.prefix_sharing_keeps_bits && rules_.many_rows_from > 0; }

  int64_t rows_of(const WorkItem& item) const {
    return int64_t{item.query_end - item.query_begin} * plan_.layer.group_size();
  }

  // Joins as many items at a time as an item's rows may be.
  void join(std::span<const Candidate> same, std::vector<bool>& joined) {
    const bool few_rows = same.front().keys.few_rows && !may_change_kernel();
    const int64_t most_rows = few_rows ? rules_.shared_few_rows : rules_.shared_many_rows;
    while (!same.empty()) {
      int64_t rows = rows_of(plan_.items[same[0].item]);
      size_t count = 1;
      while (count < same.size() && rows + rows_of(plan_.items[same[count].item]) <= most_rows) {
        rows += rows_of(plan_.items[same[count++].item]);
      }
      if (count > 1) {
        join_all(same.first(count), joined);
        if (may_change_kernel() && rows >= rules_.many_rows_from) plan_.items[same[0].item].few_rows = false;
      }
      same = same.subspan(count);
    }
  }

  void join_all(std::span<const Candidate> members, std::vector<bool>& joined) {
    WorkItem& first = plan_.items[members[0].item];
    std::tie(first.segment_begin, first.segment_end) = joined_segments(members);
    first.shared_begin = static_cast<int32_t>(plan_.shared_rows.size());
    for (const Candidate& member : members.subspan(1)) {
      const WorkItem& item = plan_.items[member.item];
      plan_.shared_rows.push_back({item.request, item.query_begin, item.query_end, item.state_row, item.merge});
      first.cost += item.cost;
      joined[member.item] = true;
    }
    first.shared_end = static_cast<int32_t>(plan_.shared_rows.size());
  }

  // Where in the plan they lie. KV heads whose items had the same segments have the same here.
  std::pair<int32_t, int32_t> joined_segments(std::span<const Candidate> members) {
    std::vector<int32_t> begins;
    for (const Candidate& member : members) begins.push_back(plan_.items[member.item].segment_begin);
    const auto [known, is_new] = joined_segments_.try_emplace(begins);
    if (is_new) {
      const std::vector<mask::KeySegment> segments = segments_seen_by_any(members);
      known->second.first = static_cast<int32_t>(plan_.segments.size());
      plan_.segments.insert(plan_.segments.end(), segments.begin(), segments.end());
      known->second.second = static_cast<int32_t>(plan_.segments.size());
    }
    return known->second;
  }

  // Tile by tile: full where every member sees all, read where any sees some. At most twice as many as the members
  // have: each begins or ends where one of theirs does (kSegmentsWithSharing).
  std::vector<mask::KeySegment> segments_seen_by_any(std::span<const Candidate> members) const {
    const SharedKeys& keys = members.front().keys;
    const size_t num_tiles = (keys.end - keys.begin) / keys.tile_kv;  // a split is whole tiles
    std::vector<size_t> readers(num_tiles, 0);
    std::vector<size_t> full(num_tiles, 0);
    for (const Candidate& member : members) {
      const WorkItem& item = plan_.items[member.item];
      for (int32_t s = item.segment_begin; s < item.segment_end; ++s) {
        const mask::KeySegment& segment = plan_.segments[s];
        for (int32_t tile = (segment.begin - keys.begin) / keys.tile_kv; keys.begin + tile * keys.tile_kv < segment.end;
             ++tile) {
          ++readers[tile];
          if (segment.tile_class == TileClass::full) ++full[tile];
        }
      }
    }
    std::vector<mask::KeySegment> segments;
    for (size_t tile = 0; tile < num_tiles; ++tile) {
      if (readers[tile] == 0) continue;
      const TileClass tile_class = full[tile] == members.size() ? TileClass::full : TileClass::partial;
      const int32_t begin = keys.begin + static_cast<int32_t>(tile) * keys.tile_kv;
      if (!segments.empty() && segments.back().end == begin && segments.back().tile_class == tile_class) {
        segments.back().end = begin + keys.tile_kv;
      } else {
        segments.push_back({begin, begin + keys.tile_kv, tile_class});
      }
    }
    return segments;
  }

  PlanData& plan_;
  const DeviceRules& rules_;
  std::vector<index::RequestCut> cuts_;          // [num_requests]
  std::vector<int32_t> shared_keys_;             // [prefix_groups]: that the layer is shown
  std::vector<std::vector<int32_t>> groups_of_;  // [num_requests], larger ones first
  std::map<std::vector<int32_t>, std::pair<int32_t, int32_t>> joined_segments_;  // by where the members' begin
};

}  // namespace

void share_prefixes(PlanData& plan, const RequestCutter& cut_request, const DeviceRules& rules) {
  if (plan.prefix_sharing == PrefixSharing::off || plan.prefix_groups.empty()) return;
  if (rules.shared_few_rows == 0) return;
  Sharer(plan, cut_request, rules).run();
}

}  // namespace qkv::plan
