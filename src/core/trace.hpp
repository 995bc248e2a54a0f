// Runs a pure function over declared ranges of its inputs and keeps each different result once. What chooses at run
// time is traced beforehand, instead of being written down a second time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace qkv {

// The values of one input, in the order in which they are tried.
class Axis {
 public:
  // The next value after one; must be larger.
  using Advance = std::function<int64_t(int64_t)>;

  static Axis choices(std::vector<int64_t> values) { return Axis(std::move(values)); }
  // begin, begin + step … below end. Throws if the step is not positive.
  static Axis range(int64_t begin, int64_t end, int64_t step = 1);
  // begin, advance(begin) … below end. Throws if a value does not grow.
  static Axis range(int64_t begin, int64_t end, const Advance& advance);

  const std::vector<int64_t>& values() const { return values_; }

 private:
  explicit Axis(std::vector<int64_t> values) : values_(std::move(values)) {}
  std::vector<int64_t> values_;
};

using TracePoint = std::map<std::string, int64_t>;

// Inputs by name and all the points that they span.
class TraceDomain {
 public:
  // A name that is empty or taken is refused.
  TraceDomain& add(const std::string& name, const Axis& axis);
  // Inputs that change together: row by row. All rows have the same names.
  TraceDomain& add_rows(const std::vector<TracePoint>& rows);
  // Points for which it is false are left out. Several must all hold.
  TraceDomain& keep_if(std::function<bool(const TracePoint&)> is_wanted);

  // The product of all axes and groups of rows: what was added first changes slowest.
  std::vector<TracePoint> points() const;

 private:
  void check_name(const std::string& name) const;

  std::vector<std::vector<TracePoint>> groups_;  // an axis is a group with one name
  std::vector<std::function<bool(const TracePoint&)>> filters_;
};

// The different results in the order in which they first appear.
template <class Function>
auto trace(const TraceDomain& domain, Function function) {
  std::vector<decltype(function(TracePoint{}))> results;
  for (const TracePoint& point : domain.points()) {
    auto result = function(point);
    if (std::find(results.begin(), results.end(), result) == results.end()) results.push_back(std::move(result));
  }
  return results;
}

}  // namespace qkv
