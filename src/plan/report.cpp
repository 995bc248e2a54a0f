#include "plan/report.hpp"

#include "plan/schedule.hpp"

namespace qkv::plan {
namespace {

PlanItem report_item(const PlanData& plan, const WorkItem& item, const Turn& turn) {
  const index::ItemCost cost = cost_of(plan, item);
  PlanItem reported;
  reported.few_rows = item.few_rows;
  reported.kv_head = item.kv_head;
  for_each_run(plan, item, [&](const RowRun& run) { reported.requests.push_back(run.request); });
  reported.rows = cost.rows;
  if (item.segment_begin < item.segment_end) {
    reported.key_begin = plan.segments[item.segment_begin].begin;
    reported.key_end = plan.segments[item.segment_end - 1].end;
  }
  reported.keys = cost.keys;
  reported.is_state = item.state_row >= 0;
  reported.bytes = cost.bytes;
  reported.operations = cost.operations;
  reported.worker = turn.worker;
  reported.begin_seconds = turn.begin;
  reported.end_seconds = turn.end;
  return reported;
}

}  // namespace

PlanReport report_of(const PlanData& plan, std::string device) {
  const Schedule times = schedule(plan);
  PlanReport report;
  report.device = std::move(device);
  report.num_workers = plan.costs.num_workers;
  for (const mask::ProgramInput& input : plan.mask_inputs) {
    report.query_lens.push_back(input.q_len);
    report.seq_lens.push_back(input.kv_len);
  }
  report.key_lens = plan.key_lens;
  report.prefix_groups = plan.prefix_groups;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    report.items.push_back(report_item(plan, plan.items[i], times.turns[i]));
    report.bytes += report.items.back().bytes;
    report.operations += report.items.back().operations;
  }
  report.num_merges = static_cast<int64_t>(plan.merges.size());
  report.workspace_bytes = plan.num_state_rows * (plan.layer.value_dim() + 1) * static_cast<int64_t>(sizeof(float));
  report.seconds = times.seconds;
  report.seconds_without_sharing = plan.seconds_apart;
  return report;
}

}  // namespace qkv::plan
