// Durations counted in bins whose widths are 1 % of their place: percentiles of any number of steps in fixed memory.
#pragma once

#include <cstdint>
#include <vector>

namespace qkv::replay {

class Histogram {
 public:
  Histogram();

  void add(double seconds);
  int64_t count() const { return count_; }
  double sum() const { return sum_; }
  double mean() const { return count_ > 0 ? sum_ / static_cast<double>(count_) : 0; }
  double worst() const { return worst_; }  // exact
  // The duration that this share of all does not exceed, to within 1 %; 0 where there is none.
  double percentile(double percent) const;

 private:
  std::vector<int64_t> bins_;
  int64_t count_ = 0;
  double sum_ = 0;
  double worst_ = 0;
};

}  // namespace qkv::replay
