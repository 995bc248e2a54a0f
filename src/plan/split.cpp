// Cuts the batch into work items. Every rule sees one request and the layer, never the rest of the batch.
#include "core/index/split.hpp"

#include <algorithm>

#include "plan/builder.hpp"

namespace qkv::plan {
namespace {

// Rows of one request and one KV head (or of all KV heads, whose items are alike) that are worked on together.
struct RowBlock {
  int32_t request;
  int32_t query_begin, query_end;
  index::RequestCut cut;
};

// The segment ranges of the splits in which the block's rows see any key, in rising order of keys.
struct Splits {
  std::vector<std::pair<int32_t, int32_t>> segments;
  std::vector<int64_t> visible_keys;
};

class Cutter {
 public:
  Cutter(PlanData& plan, const RequestCutter& cut_of)
      : plan_(plan), cut_of_(cut_of), group_size_(plan.layer.group_size()) {}

  void run() {
    for (int32_t request = 0; request < plan_.num_requests; ++request) cut_request(request);
  }

 private:
  void cut_request(int32_t request) {
    const int32_t q_len = plan_.mask_inputs[request].q_len;
    const index::RequestCut cut = cut_of_(q_len, plan_.key_lens[request]);
    int32_t end = index::first_item_tokens(q_len, cut.tokens);
    for (int32_t begin = 0; begin < q_len; begin = end, end += cut.tokens) {
      cut_row_block({request, begin, end, cut});
    }
  }

  void cut_row_block(const RowBlock& block) {
    Splits splits;
    for (int32_t kv_head = 0; kv_head < plan_.layer.num_kv_heads; ++kv_head) {
      const bool first = kv_head == 0;
      if (first || plan_.mask.depends_on_head) splits = find_splits(block, kv_head);
      emit(block, kv_head, splits);
    }
  }

  // Classifies the block's keys and cuts the visible runs where splits end.
  Splits find_splits(const RowBlock& block, int32_t kv_head) {
    runs_.clear();
    const int32_t kv_len = plan_.key_lens[block.request];
    const int32_t head = kv_head * group_size_;
    mask::append_segments(plan_.mask, plan_.mask_inputs[block.request],
                          {block.query_begin, block.query_end, 0, kv_len, head, head + group_size_}, block.cut.tile_kv,
                          runs_);
    Splits splits;
    int32_t current_end = -1;
    for (const mask::KeySegment& run : runs_) {
      for (int32_t begin = run.begin; begin < run.end;) {
        const int32_t split_end = index::split_end(begin, block.cut.split_keys, kv_len);
        const int32_t end = std::min(run.end, split_end);
        const auto position = static_cast<int32_t>(plan_.segments.size());
        if (split_end != current_end) {
          splits.segments.emplace_back(position, position);
          splits.visible_keys.push_back(0);
          current_end = split_end;
        }
        plan_.segments.push_back({begin, end, run.tile_class});
        splits.segments.back().second = position + 1;
        splits.visible_keys.back() += end - begin;
        begin = end;
      }
    }
    return splits;
  }

  void emit(const RowBlock& block, int32_t kv_head, const Splits& splits) {
    const int64_t rows = static_cast<int64_t>(block.query_end - block.query_begin) * group_size_;
    WorkItem item{};
    item.request = block.request;
    item.kv_head = kv_head;
    item.query_begin = block.query_begin;
    item.query_end = block.query_end;
    item.few_rows = block.cut.few_rows;
    item.state_row = -1;
    item.merge = -1;
    const auto num_splits = static_cast<int32_t>(splits.segments.size());
    if (num_splits == 0) {  // rows that see nothing still get their zeros
      plan_.items.push_back(item);
      return;
    }
    if (num_splits > 1) {
      item.merge = static_cast<int32_t>(plan_.merges.size());
      plan_.merges.push_back(
          {block.request, kv_head, block.query_begin, block.query_end, plan_.num_state_rows, num_splits});
    }
    for (int32_t s = 0; s < num_splits; ++s) {
      item.segment_begin = splits.segments[s].first;
      item.segment_end = splits.segments[s].second;
      item.cost = rows * splits.visible_keys[s];
      if (num_splits > 1) {
        item.state_row = plan_.num_state_rows;
        plan_.num_state_rows += rows;
      }
      plan_.items.push_back(item);
    }
  }

  PlanData& plan_;
  const RequestCutter& cut_of_;
  const int32_t group_size_;
  std::vector<mask::KeySegment> runs_;
};

}  // namespace

void cut_work(PlanData& plan, const RequestCutter& cut_request) { Cutter(plan, cut_request).run(); }

}  // namespace qkv::plan
