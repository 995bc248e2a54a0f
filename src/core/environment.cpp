#include "core/environment.hpp"

#include <cstdlib>

namespace qkv {

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing in the library sets variables
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace qkv
