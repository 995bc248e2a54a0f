// The course of a replay in fixed memory: neighbouring steps are joined so that at most kMaxPoints are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qkv::replay {

// Steps of a run, one or more in a row. Sums over the steps, unless it says otherwise.
struct TimelinePoint {
  int64_t num_steps = 0;
  double end_seconds = 0;  // of the last step, since the replay's begin
  double step_seconds = 0;
  double worst_step_seconds = 0;  // the greatest
  double planning_seconds = 0;
  int64_t tokens = 0;
  int64_t requests = 0;
  int32_t waiting = 0;     // the greatest
  int32_t pages_used = 0;  // the greatest

  void join(const TimelinePoint& next);
};

class Timeline {
 public:
  static constexpr size_t kMaxPoints = 1024;

  Timeline() { points_.reserve(kMaxPoints); }
  void add(const TimelinePoint& step);
  // The last one may hold fewer steps than the others.
  const std::vector<TimelinePoint>& points() const { return points_; }

 private:
  int64_t steps_a_point_ = 1;
  std::vector<TimelinePoint> points_;
};

}  // namespace qkv::replay
