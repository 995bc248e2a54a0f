#include "jit/compiler_log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

namespace qkv::jit {
namespace {

constexpr size_t kErrorsShown = 3;
constexpr size_t kErrorLength = 400;  // bytes

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (!line.empty()) lines.push_back(line);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  return lines;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number written in front of `words`, as in "16 bytes spill stores"; 0 if the line does not say.
int32_t number_before(std::string_view line, std::string_view words) {
  const size_t end = line.find(words);
  if (end == line.npos) return 0;
  size_t begin = end;
  while (begin > 0 && is_digit(line[begin - 1])) --begin;
  int32_t number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

bool has_wgmma_warning(std::string_view line) {
  const size_t at = line.find("(C751");
  return at != line.npos && at + 6 < line.size() && is_digit(line[at + 5]) && line[at + 6] == ')';
}

// "kernel.cu(3): error: …" of the front end, "ptxas …; error   : …", "ptxas fatal   : …", "nvrtc: error: …"
bool is_error(std::string_view line) {
  for (const std::string_view word : {"error", "fatal"}) {
    const size_t at = line.find(word);
    if (at == line.npos) continue;
    const size_t after = line.find_first_not_of(' ', at + word.size());
    if (after != line.npos && line[after] == ':') return true;
  }
  return false;
}

std::string shortened(std::string_view line) {
  return line.size() <= kErrorLength ? std::string(line) : std::string(line.substr(0, kErrorLength)) + "…";
}

}  // namespace

KernelUsage read_usage(std::string_view log) {
  constexpr std::string_view kEntry = "Compiling entry function '";
  KernelUsage usage;
  for (const std::string_view line : lines_of(log)) {
    if (const size_t at = line.find(kEntry); at != line.npos) {
      const std::string_view name = line.substr(at + kEntry.size());
      usage.entries.emplace_back(name.substr(0, name.find('\'')));
    }
    usage.registers = std::max(usage.registers, number_before(line, " registers"));
    usage.shared_bytes = std::max(usage.shared_bytes, number_before(line, " bytes smem"));
    usage.stack_bytes += number_before(line, " bytes stack frame");
    usage.spill_store_bytes += number_before(line, " bytes spill stores");
    usage.spill_load_bytes += number_before(line, " bytes spill loads");
    if (has_wgmma_warning(line)) usage.serialized_wgmma.emplace_back(line);
  }
  return usage;
}

std::string first_errors(std::string_view log) {
  const auto lines = lines_of(log);
  std::vector<std::string> errors;
  for (const std::string_view line : lines) {
    if (is_error(line)) errors.push_back(shortened(line));
  }
  if (errors.empty()) return shortened(fmt::format("the log names no error: {}", fmt::join(lines, " | ")));
  const size_t count = errors.size();
  errors.resize(std::min(count, kErrorsShown));
  return fmt::format("{} {}: {}", count, count == 1 ? "error" : "errors", fmt::join(errors, " | "));
}

}  // namespace qkv::jit
