#include "qkv/status.hpp"

#include <fmt/format.h>

namespace qkv {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::mismatch:
      return "mismatch";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::unavailable:
      return "unavailable";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

Error::Error(ErrorCode code, std::string argument, std::string value, std::string allowed)
    : std::runtime_error(fmt::format("{}: got {}; allowed: {}", argument, value, allowed)),
      code_(code),
      argument_(std::move(argument)),
      value_(std::move(value)),
      allowed_(std::move(allowed)) {}

}  // namespace qkv
