#include "histogram.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace qkv::replay {
namespace {

constexpr double kShortest = 1e-8;  // seconds: the end of the first bin
constexpr double kRatio = 1.01;     // of a bin's end to its begin
constexpr int kNumBins = 2800;      // up to 12000 s

}  // namespace

Histogram::Histogram() : bins_(kNumBins) {}

void Histogram::add(double seconds) {
  const double place = std::ceil(std::log(std::max(seconds, kShortest) / kShortest) / std::log(kRatio));
  ++bins_[static_cast<size_t>(std::min<double>(place, kNumBins - 1))];
  ++count_;
  sum_ += seconds;
  worst_ = std::max(worst_, seconds);
}

double Histogram::percentile(double percent) const {
  if (count_ == 0) return 0;
  const auto rank = std::max<int64_t>(1, std::llround(std::ceil(percent / 100 * static_cast<double>(count_))));
  int64_t below = 0;
  size_t bin = 0;
  while ((below += bins_[bin]) < rank) ++bin;
  return std::min(kShortest * std::pow(kRatio, static_cast<double>(bin)), worst_);
}

}  // namespace qkv::replay
