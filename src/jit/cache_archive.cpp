#include "jit/cache_archive.hpp"

#include <fmt/format.h>

namespace qkv::jit {
namespace {

constexpr std::string_view kMagic = "qkv kernels 1\n";

}  // namespace

std::string to_archive(const std::vector<CacheEntry>& entries) {
  std::string bytes(kMagic);
  append_piece(bytes, fmt::format("{}", entries.size()));  // so that a file cut between two entries shows it
  for (const CacheEntry& entry : entries) append_piece(bytes, to_bytes(entry));
  return bytes;
}

std::optional<std::vector<CacheEntry>> parse_archive(std::string_view bytes, std::string& fault) {
  if (!bytes.starts_with(kMagic)) {
    fault = "it is no archive of kernels of this version";
    return std::nullopt;
  }
  bytes.remove_prefix(kMagic.size());
  const auto count = take_piece(bytes);
  std::vector<CacheEntry> entries;
  while (count && !bytes.empty()) {
    const auto piece = take_piece(bytes);
    auto entry = piece ? parse_entry(*piece, fault) : std::nullopt;
    if (!entry) {
      fault = fmt::format("kernel {}: {}", entries.size(), piece ? fault : "it is cut off");
      return std::nullopt;
    }
    entries.push_back(std::move(*entry));
  }
  if (!count || *count != fmt::format("{}", entries.size())) {
    fault = fmt::format("it is cut off after {} kernels", entries.size());
    return std::nullopt;
  }
  return entries;
}

}  // namespace qkv::jit
