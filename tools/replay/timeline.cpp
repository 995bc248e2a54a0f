#include "timeline.hpp"

#include <algorithm>

namespace qkv::replay {

void TimelinePoint::join(const TimelinePoint& next) {
  num_steps += next.num_steps;
  end_seconds = next.end_seconds;
  step_seconds += next.step_seconds;
  worst_step_seconds = std::max(worst_step_seconds, next.worst_step_seconds);
  planning_seconds += next.planning_seconds;
  tokens += next.tokens;
  requests += next.requests;
  waiting = std::max(waiting, next.waiting);
  pages_used = std::max(pages_used, next.pages_used);
}

void Timeline::add(const TimelinePoint& step) {
  if (!points_.empty() && points_.back().num_steps < steps_a_point_) {
    points_.back().join(step);
    return;
  }
  if (points_.size() == kMaxPoints) {
    for (size_t i = 0; i < kMaxPoints / 2; ++i) {
      points_[i] = points_[2 * i];
      points_[i].join(points_[2 * i + 1]);
    }
    points_.resize(kMaxPoints / 2);
    steps_a_point_ *= 2;
  }
  points_.push_back(step);
}

}  // namespace qkv::replay
