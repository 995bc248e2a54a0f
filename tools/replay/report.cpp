#include "report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace qkv::replay {
namespace {

constexpr int64_t kStepsAMemorySample = 64;

// 0 where the system does not say.
int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0;
  int64_t resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} µs", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} s", seconds);
}

std::string durations(const Histogram& histogram) {
  return fmt::format("median {}, 95 % {}, 99 % {}, worst {}", duration(histogram.percentile(50)),
                     duration(histogram.percentile(95)), duration(histogram.percentile(99)),
                     duration(histogram.worst()));
}

nlohmann::ordered_json milliseconds(const Histogram& histogram) {
  return {{"mean", histogram.mean() * 1e3},
          {"median", histogram.percentile(50) * 1e3},
          {"p95", histogram.percentile(95) * 1e3},
          {"p99", histogram.percentile(99) * 1e3},
          {"worst", histogram.worst() * 1e3}};
}

nlohmann::ordered_json json_of(const Timeline& timeline, int32_t num_pages) {
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  for (const TimelinePoint& point : timeline.points()) {
    const auto steps = static_cast<double>(point.num_steps);
    points.push_back({{"end_s", point.end_seconds},
                      {"steps", point.num_steps},
                      {"mean_ms", point.step_seconds / steps * 1e3},
                      {"worst_ms", point.worst_step_seconds * 1e3},
                      {"planning_ms", point.planning_seconds / steps * 1e3},
                      {"tokens_a_step", static_cast<double>(point.tokens) / steps},
                      {"requests_a_step", static_cast<double>(point.requests) / steps},
                      {"most_waiting", point.waiting},
                      {"most_cache_use", static_cast<double>(point.pages_used) / num_pages}});
  }
  return points;
}

}  // namespace

Report::Report(nlohmann::ordered_json setting, int32_t num_pages, int64_t num_requests)
    : setting_(std::move(setting)), num_pages_(num_pages), num_requests_(num_requests) {}

void Report::add(const StepRecord& step) {
  const double seconds = step.seconds();
  steps_.add(seconds);
  planning_.add(step.parts.planning);
  timeline_.add({1, step.end_seconds, seconds, seconds, step.parts.planning, step.num_tokens, step.num_requests,
                 step.num_waiting, step.pages_used});
  parts_.planning += step.parts.planning;
  parts_.cache_writes += step.parts.cache_writes;
  parts_.attention += step.parts.attention;
  parts_.wait += step.parts.wait;
  scheduling_seconds_ += step.scheduling_seconds;
  elapsed_seconds_ = step.end_seconds;
  tokens_ += step.num_tokens;
  bytes_ += step.bytes;
  operations_ += step.operations;
  requests_ += step.num_requests;
  most_requests_ = std::max(most_requests_, step.num_requests);
  most_waiting_ = std::max(most_waiting_, step.num_waiting);
  pages_ += step.pages_used;
  most_pages_ = std::max(most_pages_, step.pages_used);
  if (num_steps() % kStepsAMemorySample == 1) sample_memory();
}

void Report::sample_memory() {
  resident_last_ = resident_bytes();
  if (resident_first_ == 0) resident_first_ = resident_last_;
}

std::string Report::text() const {
  std::string text = fmt::format("replayed   {} of {} requests in {} steps, {}; {} of it waiting for arrivals\n",
                                 counts_.finished_requests, num_requests_, num_steps(), duration(elapsed_seconds_),
                                 duration(idle_seconds_));
  text += fmt::format("tokens     {} computed, {} of them again after {} preemptions; {} generated\n", tokens_,
                      counts_.recomputed_tokens, counts_.preemptions, counts_.generated_tokens);
  text += fmt::format("step       {}\n", durations(steps_));
  text += fmt::format("planning   {}\n", durations(planning_));
  text += fmt::format(
      "share      planning {:.2f} %, cache writes {:.2f} %, attention {:.2f} %, waiting for the device {:.2f} %, "
      "scheduling {:.2f} %\n",
      100 * share_of(parts_.planning), 100 * share_of(parts_.cache_writes), 100 * share_of(parts_.attention),
      100 * share_of(parts_.wait), 100 * share_of(scheduling_seconds_));
  text += fmt::format("rate       {:.4g} tokens/s, {:.3g} generated/s, {:.3g} GB/s, {:.3g} TFLOP/s\n",
                      rate_of(static_cast<double>(tokens_)), rate_of(static_cast<double>(counts_.generated_tokens)),
                      rate_of(static_cast<double>(bytes_)) * 1e-9, rate_of(static_cast<double>(operations_)) * 1e-12);
  text += fmt::format("batch      {:.1f} requests and {:.1f} new tokens a step; at most {} requests, {} waiting\n",
                      mean_of(static_cast<double>(requests_)), mean_of(static_cast<double>(tokens_)), most_requests_,
                      most_waiting_);
  text += fmt::format("cache      {:.1f} % of {} pages in use, at most {:.1f} %\n",
                      100 * mean_of(static_cast<double>(pages_)) / num_pages_, num_pages_,
                      100.0 * most_pages_ / num_pages_);
  text += fmt::format("memory     {:.2f} GiB resident at the first step, {:.2f} GiB at the last\n",
                      static_cast<double>(resident_first_) * 0x1p-30, static_cast<double>(resident_last_) * 0x1p-30);
  return text;
}

nlohmann::ordered_json Report::json() const {
  nlohmann::ordered_json json = {{"setting", setting_}};
  json["requests"] = {{"replayed", num_requests_}, {"finished", counts_.finished_requests}};
  json["steps"] = num_steps();
  json["seconds"] = {{"elapsed", elapsed_seconds_}, {"in_steps", steps_.sum()}, {"idle", idle_seconds_}};
  json["tokens"] = {{"computed", tokens_},
                    {"recomputed", counts_.recomputed_tokens},
                    {"generated", counts_.generated_tokens},
                    {"preemptions", counts_.preemptions}};
  json["step_ms"] = milliseconds(steps_);
  json["planning_ms"] = milliseconds(planning_);
  json["share"] = {{"planning", share_of(parts_.planning)},
                   {"cache_writes", share_of(parts_.cache_writes)},
                   {"attention", share_of(parts_.attention)},
                   {"wait", share_of(parts_.wait)},
                   {"scheduling", share_of(scheduling_seconds_)}};
  json["rate"] = {{"tokens_a_second", rate_of(static_cast<double>(tokens_))},
                  {"generated_a_second", rate_of(static_cast<double>(counts_.generated_tokens))},
                  {"bytes_a_second", rate_of(static_cast<double>(bytes_))},
                  {"operations_a_second", rate_of(static_cast<double>(operations_))}};
  json["batch"] = {{"mean_requests", mean_of(static_cast<double>(requests_))},
                   {"most_requests", most_requests_},
                   {"mean_tokens", mean_of(static_cast<double>(tokens_))},
                   {"most_waiting", most_waiting_}};
  json["cache"] = {{"pages", num_pages_},
                   {"mean_use", mean_of(static_cast<double>(pages_)) / num_pages_},
                   {"most_use", static_cast<double>(most_pages_) / num_pages_}};
  json["resident_bytes"] = {{"first_step", resident_first_}, {"last_step", resident_last_}};
  json["timeline"] = json_of(timeline_, num_pages_);
  return json;
}

}  // namespace qkv::replay
