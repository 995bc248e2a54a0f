// Checks of options that take numbers. What they refuse reads as the library's refusals do.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>

namespace qkv::tools {

constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();

template <class Number>
CLI::Validator number_check(Number low, Number high, std::string allowed) {
  return CLI::Validator(
      [=](const std::string& text) {
        Number value{};
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc() && stop == end && value >= low && value <= high) return std::string();
        return fmt::format("got {}; allowed: {}", text, allowed);
      },
      "");
}

inline CLI::Validator whole_number(int64_t low, int64_t high = std::numeric_limits<int32_t>::max()) {
  return number_check(low, high, fmt::format("a whole number from {} to {}", low, high));
}

inline CLI::Validator positive_number() {
  return number_check(std::numeric_limits<double>::denorm_min(), std::numeric_limits<double>::max(),
                      "a number above 0");
}

}  // namespace qkv::tools
