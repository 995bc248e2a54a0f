#include "clock.hpp"

#include <algorithm>
#include <limits>
#include <thread>

namespace qkv::replay {

Clock::Clock(Pace pace, double speed, double step_seconds) : pace_(pace), speed_(speed), step_seconds_(step_seconds) {}

double Clock::now() const {
  switch (pace_) {
    case Pace::flat:
      break;
    case Pace::trace:
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() * speed_;
    case Pace::steps:
      return counted_seconds_;
  }
  return std::numeric_limits<double>::infinity();
}

void Clock::complete_step() { counted_seconds_ += step_seconds_; }

void Clock::wait_until(double arrival_seconds) {
  counted_seconds_ = std::max(counted_seconds_, arrival_seconds);
  if (pace_ != Pace::trace) return;
  // Rounded up, so that the request has arrived when this returns.
  std::this_thread::sleep_until(start_ + std::chrono::ceil<std::chrono::steady_clock::duration>(
                                             std::chrono::duration<double>(arrival_seconds / speed_)));
}

}  // namespace qkv::replay
