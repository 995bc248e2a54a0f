#include "core/environment.hpp"

#include <cstdlib>

#include "core/checks.hpp"

namespace qkv {

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing in the library sets variables
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

bool is_checked_mode() {
  const std::string value = environment("QKV_CHECK").value_or("0");
  if (value != "0" && value != "1") refuse("QKV_CHECK", value, "1 (check), or 0 or nothing (do not)");
  return value == "1";
}

}  // namespace qkv
