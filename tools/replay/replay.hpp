// The loop of a replay: requests arrive, the scheduler makes a step, the model's layers run it.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "clock.hpp"
#include "report.hpp"
#include "scheduler.hpp"
#include "trace.hpp"

namespace qkv::replay {

struct ReplayOptions {
  SchedulerLimits limits;
  Pace pace = Pace::flat;
  double speed = 1;            // of the trace's clock, at pace `trace`
  double step_seconds = 0.03;  // of a step, at pace `steps`
  int64_t max_steps = std::numeric_limits<int64_t>::max();
  double stop_after_seconds = std::numeric_limits<double>::infinity();
};

// Runs one step's layers.
using RunStep = std::function<StepSeconds(const Batch&)>;
// Told after each step what is finished.
using ShowProgress = std::function<void(const SchedulerCounts&)>;

// Prompt and answer of the longest request of the trace.
int32_t max_tokens_of_request(const std::vector<TracedRequest>& trace);

// Runs the trace to its end, or to max_steps or stop_after_seconds, and adds all of it to the report.
void replay(const std::vector<TracedRequest>& trace, const Model& model, const ReplayOptions& options,
            const RunStep& run_step, const ShowProgress& show, Report& report);

}  // namespace qkv::replay
