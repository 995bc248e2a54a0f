#include "trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <fstream>
#include <optional>
#include <string_view>

#include "qkv/status.hpp"

namespace qkv::replay {
namespace {

constexpr int32_t kMaxTokens = 1 << 28;  // of a prompt or an answer: sums of two stay an int32_t

struct Line {
  const std::string& file;
  int64_t number;
  [[noreturn]] void refuse(const std::string& what, std::string_view value, std::string allowed) const {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}, line {}, {}", file, number, what), std::string(value),
                std::move(allowed));
  }
};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '"')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '"' || text.back() == '\r')) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split_at_commas(std::string_view line) {
  std::vector<std::string_view> fields;
  for (;;) {
    const size_t comma = line.find(',');
    fields.push_back(trimmed(line.substr(0, comma)));
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

// Takes a number from the front of the text.
template <class Number>
bool take(std::string_view& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

bool take(std::string_view& text, char wanted) {
  if (text.empty() || text.front() != wanted) return false;
  text.remove_prefix(1);
  return true;
}

// "Z", "+01:00", "-08:00" or nothing, in seconds.
std::optional<double> offset_from_utc(std::string_view text) {
  if (text.empty() || text == "Z") return 0;
  const double sign = text.front() == '-' ? -1 : 1;
  int hours = 0;
  int minutes = 0;
  if (!take(text, '-') && !take(text, '+')) return {};
  if (!take(text, hours) || !take(text, ':') || !take(text, minutes) || !text.empty()) return {};
  return sign * (hours * 3600.0 + minutes * 60.0);
}

// Seconds since 1970 of a date and time, or the number itself.
std::optional<double> seconds_of(std::string_view text) {
  std::string_view number = text;
  double seconds = 0;
  if (take(number, seconds) && number.empty()) return seconds;
  int year = 0;
  unsigned month = 0;
  unsigned day = 0;
  if (!take(text, year) || !take(text, '-') || !take(text, month) || !take(text, '-') || !take(text, day)) return {};
  const std::chrono::year_month_day date{std::chrono::year(year), std::chrono::month(month), std::chrono::day(day)};
  int hours = 0;
  int minutes = 0;
  if (!date.ok() || (!take(text, ' ') && !take(text, 'T'))) return {};
  if (!take(text, hours) || !take(text, ':') || !take(text, minutes) || !take(text, ':') || !take(text, seconds)) {
    return {};
  }
  const std::optional<double> offset = offset_from_utc(text);
  if (!offset) return {};
  const auto days = static_cast<double>(std::chrono::sys_days(date).time_since_epoch().count());
  return days * 86400 + hours * 3600 + minutes * 60 + seconds - *offset;
}

// Where the three columns are among a line's fields.
struct Columns {
  size_t time, context, generated;

  static Columns of(const Line& line, std::string_view header) {
    const std::vector<std::string_view> names = split_at_commas(header);
    const auto find = [&](std::string_view name) {
      const auto found = std::find(names.begin(), names.end(), name);
      if (found == names.end()) {
        line.refuse("columns", header.substr(0, 80), "a first line with TIMESTAMP, ContextTokens and GeneratedTokens");
      }
      return static_cast<size_t>(found - names.begin());
    };
    return {find("TIMESTAMP"), find("ContextTokens"), find("GeneratedTokens")};
  }
  size_t last() const { return std::max({time, context, generated}); }
};

int32_t read_count(const Line& line, const char* column, std::string_view text, int32_t at_least) {
  int32_t count = 0;
  std::string_view rest = text;
  if (!take(rest, count) || !rest.empty() || count < at_least || count > kMaxTokens) {
    line.refuse(column, text, fmt::format("a whole number from {} to {}", at_least, kMaxTokens));
  }
  return count;
}

TracedRequest read_line(const Line& line, const Columns& columns, std::string_view text) {
  const std::vector<std::string_view> fields = split_at_commas(text);
  if (fields.size() <= columns.last()) {
    line.refuse("fields", std::to_string(fields.size()), fmt::format("at least {}", columns.last() + 1));
  }
  const std::optional<double> seconds = seconds_of(fields[columns.time]);
  if (!seconds) line.refuse("TIMESTAMP", fields[columns.time], "2023-11-16 18:17:03.97996, or seconds");
  return {*seconds, read_count(line, "ContextTokens", fields[columns.context], 1),
          read_count(line, "GeneratedTokens", fields[columns.generated], 0)};
}

}  // namespace

std::vector<TracedRequest> read_trace(std::istream& text, const std::string& name) {
  std::vector<TracedRequest> requests;
  std::optional<Columns> columns;
  std::string line;
  for (int64_t number = 1; std::getline(text, line); ++number) {
    if (trimmed(line).empty()) continue;
    if (columns) {
      requests.push_back(read_line({name, number}, *columns, line));
    } else {
      columns = Columns::of({name, number}, trimmed(line));
    }
  }
  if (requests.empty()) throw Error(ErrorCode::invalid_argument, name, "no request", "a header and a line a request");
  std::stable_sort(requests.begin(), requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival_seconds < b.arrival_seconds; });
  const double first = requests.front().arrival_seconds;
  for (TracedRequest& request : requests) request.arrival_seconds -= first;
  return requests;
}

std::vector<TracedRequest> read_trace_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::unavailable, "trace", path, "a file that can be read");
  return read_trace(file, path);
}

}  // namespace qkv::replay
