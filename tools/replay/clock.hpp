// When the trace's requests arrive, as the replay sees it.
#pragma once

#include <chrono>

namespace qkv::replay {

enum class Pace {
  flat,   // all have arrived: the next one is admitted as soon as there is room
  trace,  // as in the trace, on this machine's clock
  steps,  // as in the trace, where each step takes a given time: the same steps on every machine
};

class Clock {
 public:
  // speed: of the trace's clock at pace `trace`; step_seconds: of a step at pace `steps`.
  Clock(Pace pace, double speed, double step_seconds);

  // In the trace's seconds; infinity at pace `flat`.
  double now() const;
  void complete_step();
  // Nothing is left to do before this arrival: sleeps at pace `trace`, passes over the gap at pace `steps`.
  void wait_until(double arrival_seconds);

 private:
  Pace pace_;
  double speed_;
  double step_seconds_;
  double counted_seconds_ = 0;  // at pace `steps`
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace qkv::replay
