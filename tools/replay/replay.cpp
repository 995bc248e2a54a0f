#include "replay.hpp"

#include <algorithm>
#include <chrono>

#include "step_batch.hpp"

namespace qkv::replay {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

double seconds_between(TimePoint begin, TimePoint end) { return std::chrono::duration<double>(end - begin).count(); }

void count_work(const Model& model, std::span<const StepRequest> step, StepRecord& record) {
  record.num_requests = static_cast<int32_t>(step.size());
  for (const StepRequest& request : step) {
    record.num_tokens += request.num_new;
    for (const LayerKind& kind : model.kinds) {
      const LayerWork work = work_of(kind, request.num_new, request.num_keys);
      record.bytes += kind.num_layers * work.bytes;
      record.operations += kind.num_layers * work.operations;
    }
  }
}

}  // namespace

int32_t max_tokens_of_request(const std::vector<TracedRequest>& trace) {
  int32_t tokens = 1;
  for (const TracedRequest& request : trace) {
    tokens = std::max(tokens, request.context_tokens + request.generated_tokens);
  }
  return tokens;
}

void replay(const std::vector<TracedRequest>& trace, const Model& model, const ReplayOptions& options,
            const RunStep& run_step, const ShowProgress& show, Report& report) {
  const SchedulerLimits& limits = options.limits;
  Scheduler scheduler(limits);
  const int32_t table_width = (max_tokens_of_request(trace) + limits.page_size - 1) / limits.page_size;
  StepBatch batch(limits.max_requests, limits.max_step_tokens, table_width, limits.page_size);
  Clock clock(options.pace, options.speed, options.step_seconds);
  const TimePoint begin = std::chrono::steady_clock::now();
  size_t next = 0;  // of the trace: the first request that has not arrived
  const auto must_stop = [&] {
    return report.num_steps() >= options.max_steps ||
           seconds_between(begin, std::chrono::steady_clock::now()) >= options.stop_after_seconds;
  };
  while ((next < trace.size() || scheduler.has_work()) && !must_stop()) {
    TimePoint step_begin = std::chrono::steady_clock::now();
    while (!scheduler.has_work() && trace[next].arrival_seconds > clock.now()) {
      clock.wait_until(trace[next].arrival_seconds);
      const TimePoint arrival = std::chrono::steady_clock::now();
      report.add_idle(seconds_between(step_begin, arrival));
      step_begin = arrival;
    }
    while (next < trace.size() && trace[next].arrival_seconds <= clock.now()) scheduler.arrive(trace[next++]);
    const std::span<const StepRequest> step = scheduler.next_step();
    batch.fill(step);
    StepRecord record;
    record.scheduling_seconds = seconds_between(step_begin, std::chrono::steady_clock::now());
    record.parts = run_step(batch.batch());
    record.end_seconds = seconds_between(begin, std::chrono::steady_clock::now());
    record.num_waiting = scheduler.num_waiting();
    record.pages_used = scheduler.pool().num_used();
    count_work(model, step, record);
    scheduler.complete_step();
    clock.complete_step();
    report.add(record);
    show(scheduler.counts());
  }
  report.finish(scheduler.counts());
}

}  // namespace qkv::replay
