#include "jit/cache_entry.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>

namespace qkv::jit {
namespace {

// A new number for whatever readers before would take for damage.
constexpr std::string_view kMagic = "qkv kernel 1\n";
constexpr size_t kHashLength = 32;

}  // namespace

std::string content_hash(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string entry_file_name(const std::string& compiler, const std::string& key) {
  return fmt::format("{}{}", content_hash(compiler + '\n' + key), kEntrySuffix);
}

void append_piece(std::string& bytes, std::string_view piece) {
  bytes += fmt::format("{}\n", piece.size());
  bytes += piece;
}

std::optional<std::string_view> take_piece(std::string_view& bytes) {
  size_t size = 0;
  const auto [end, error] = std::from_chars(bytes.data(), bytes.data() + bytes.size(), size);
  if (error != std::errc{} || end == bytes.data() + bytes.size() || *end != '\n') return std::nullopt;
  bytes.remove_prefix(static_cast<size_t>(end - bytes.data()) + 1);
  if (size > bytes.size()) return std::nullopt;
  const std::string_view piece = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return piece;
}

std::string to_bytes(const CacheEntry& entry) {
  std::string body;
  const std::string seconds = fmt::format("{:.3f}", entry.compiled.seconds);
  for (const std::string_view piece :
       {std::string_view(entry.name), std::string_view(entry.compiler), std::string_view(entry.arch),
        std::string_view(seconds), std::string_view(entry.key), std::string_view(entry.compiled.log),
        std::string_view(entry.compiled.cubin)}) {
    append_piece(body, piece);
  }
  return fmt::format("{}{}\n", kMagic, content_hash(body)) + body;
}

std::optional<CacheEntry> parse_entry(std::string_view bytes, std::string& fault) {
  const auto refuse_because = [&](const char* reason) {
    fault = reason;
    return std::nullopt;
  };
  if (bytes.empty()) return refuse_because("it is empty");
  if (!bytes.starts_with(kMagic)) return refuse_because("it is no entry of this version");
  bytes.remove_prefix(kMagic.size());
  if (bytes.size() <= kHashLength || bytes[kHashLength] != '\n') return refuse_because("it is cut off");
  const std::string_view checksum = bytes.substr(0, kHashLength);
  std::string_view body = bytes.substr(kHashLength + 1);
  if (content_hash(body) != checksum) return refuse_because("its bytes have changed, or some are missing");

  CacheEntry entry;
  std::string seconds;
  for (std::string* field :
       {&entry.name, &entry.compiler, &entry.arch, &seconds, &entry.key, &entry.compiled.log, &entry.compiled.cubin}) {
    const auto piece = take_piece(body);
    if (!piece) return refuse_because("a part of it is missing");
    *field = *piece;
  }
  std::from_chars(seconds.data(), seconds.data() + seconds.size(), entry.compiled.seconds);
  entry.compiled.usage = read_usage(entry.compiled.log);
  if (!body.empty() || entry.compiled.cubin.empty() || entry.compiled.usage.entries.size() != 1) {
    return refuse_because("it does not hold exactly one kernel");
  }
  entry.compiled.entry = entry.compiled.usage.entries.front();
  return entry;
}

}  // namespace qkv::jit
