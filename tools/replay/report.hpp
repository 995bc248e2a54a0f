// What a replay measured, gathered step by step in fixed memory, as text and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "histogram.hpp"
#include "model_run.hpp"
#include "scheduler.hpp"
#include "timeline.hpp"

namespace qkv::replay {

struct StepRecord {
  double end_seconds = 0;         // since the replay's begin
  double scheduling_seconds = 0;  // the scheduler's, and filling the index arrays
  StepSeconds parts;
  int32_t num_requests = 0;
  int32_t num_waiting = 0;
  int32_t pages_used = 0;
  int64_t num_tokens = 0;
  int64_t bytes = 0;  // of all layers, see LayerWork
  int64_t operations = 0;

  double seconds() const {
    return scheduling_seconds + parts.planning + parts.cache_writes + parts.attention + parts.wait;
  }
};

class Report {
 public:
  // What was run, in words: the trace, the model, the device, the pace.
  Report(nlohmann::ordered_json setting, int32_t num_pages, int64_t num_requests);

  void add(const StepRecord& step);
  void add_idle(double seconds) { idle_seconds_ += seconds; }
  // At the end: what the scheduler counted.
  void finish(const SchedulerCounts& counts) { counts_ = counts; }

  std::string text() const;
  nlohmann::ordered_json json() const;

  int64_t num_steps() const { return steps_.count(); }
  const nlohmann::ordered_json& setting() const { return setting_; }
  const Timeline& timeline() const { return timeline_; }
  int32_t num_pages() const { return num_pages_; }

 private:
  void sample_memory();
  double share_of(double seconds) const { return steps_.sum() > 0 ? seconds / steps_.sum() : 0; }
  double rate_of(double amount) const { return steps_.sum() > 0 ? amount / steps_.sum() : 0; }
  double mean_of(double sum) const { return num_steps() > 0 ? sum / static_cast<double>(num_steps()) : 0; }

  nlohmann::ordered_json setting_;
  int32_t num_pages_;
  int64_t num_requests_;  // of the trace's part that is replayed
  SchedulerCounts counts_;
  Histogram steps_;
  Histogram planning_;
  Timeline timeline_;
  StepSeconds parts_;
  double scheduling_seconds_ = 0;
  double idle_seconds_ = 0;
  double elapsed_seconds_ = 0;
  int64_t tokens_ = 0;
  int64_t bytes_ = 0;
  int64_t operations_ = 0;
  int64_t requests_ = 0;  // sum over steps
  int32_t most_requests_ = 0;
  int32_t most_waiting_ = 0;
  int64_t pages_ = 0;  // sum over steps
  int32_t most_pages_ = 0;
  int64_t resident_first_ = 0;  // bytes of the process in memory
  int64_t resident_last_ = 0;
};

}  // namespace qkv::replay
