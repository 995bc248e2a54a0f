#include "core/trace.hpp"

#include "core/checks.hpp"

namespace qkv {

Axis Axis::range(int64_t begin, int64_t end, int64_t step) {
  if (step < 1) refuse("step", step, "at least 1");
  return range(begin, end, [step](int64_t value) { return value + step; });
}

Axis Axis::range(int64_t begin, int64_t end, const Advance& advance) {
  std::vector<int64_t> values;
  for (int64_t value = begin; value < end;) {
    values.push_back(value);
    const int64_t next = advance(value);
    if (next <= value) refuse("advance", fmt::format("{} after {}", next, value), "a larger number");
    value = next;
  }
  return Axis(std::move(values));
}

void TraceDomain::check_name(const std::string& name) const {
  if (name.empty()) refuse("name", "\"\"", "the name of an input");
  for (const auto& group : groups_) {
    if (!group.empty() && group.front().contains(name)) refuse("name", name, "a name that has no values yet");
  }
}

TraceDomain& TraceDomain::add(const std::string& name, const Axis& axis) {
  std::vector<TracePoint> rows;
  for (const int64_t value : axis.values()) rows.push_back({{name, value}});
  if (rows.empty()) refuse(name, "no values", "at least one");
  return add_rows(rows);
}

TraceDomain& TraceDomain::add_rows(const std::vector<TracePoint>& rows) {
  if (rows.empty() || rows.front().empty()) refuse("rows", "nothing", "at least one row with a name");
  const auto names_of = [](const TracePoint& row) {
    std::string names;
    for (const auto& [name, value] : row) names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
    return names;
  };
  for (const TracePoint& row : rows) {
    if (names_of(row) != names_of(rows.front())) refuse("rows", names_of(row), names_of(rows.front()) + " in each row");
  }
  for (const auto& [name, value] : rows.front()) check_name(name);
  groups_.push_back(rows);
  return *this;
}

TraceDomain& TraceDomain::keep_if(std::function<bool(const TracePoint&)> is_wanted) {
  filters_.push_back(std::move(is_wanted));
  return *this;
}

std::vector<TracePoint> TraceDomain::points() const {
  std::vector<TracePoint> points = {{}};
  for (const auto& group : groups_) {
    std::vector<TracePoint> longer;
    for (const TracePoint& point : points) {
      for (const TracePoint& row : group) {
        longer.push_back(point);
        longer.back().insert(row.begin(), row.end());
      }
    }
    points = std::move(longer);
  }
  std::erase_if(points, [&](const TracePoint& point) {
    return !std::all_of(filters_.begin(), filters_.end(), [&](const auto& is_wanted) { return is_wanted(point); });
  });
  return points;
}

}  // namespace qkv
