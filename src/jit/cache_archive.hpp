// Many entries of the compile cache in one file.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jit/cache_entry.hpp"

namespace qkv::jit {

std::string to_archive(const std::vector<CacheEntry>& entries);

// Nothing, and what is wrong, unless all of it is as it was written.
std::optional<std::vector<CacheEntry>> parse_archive(std::string_view bytes, std::string& fault);

}  // namespace qkv::jit
