#include "jit/disk_cache.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <filesystem>

#include "core/checks.hpp"
#include "core/environment.hpp"
#include "jit/cache_files.hpp"

namespace qkv::jit {
namespace {

constexpr int64_t kDefaultMegabytes = 512;  // some 5000 kernels
constexpr int64_t kMaxMegabytes = 1 << 20;

}  // namespace

CachePlace choose_cache_place(const std::optional<std::string>& cache_dir, const std::optional<std::string>& xdg_home,
                              const std::optional<std::string>& home) {
  std::error_code ignored;
  if (cache_dir) return {std::filesystem::absolute(*cache_dir, ignored).string(), "QKV_CACHE_DIR"};
  if (xdg_home && xdg_home->starts_with('/')) return {*xdg_home + "/qkv", "XDG_CACHE_HOME"};
  if (home && home->starts_with('/')) return {*home + "/.cache/qkv", "HOME"};
  return {"", "none of QKV_CACHE_DIR, XDG_CACHE_HOME and HOME names a folder"};
}

CachePlace cache_place() {
  return choose_cache_place(environment("QKV_CACHE_DIR"), environment("XDG_CACHE_HOME"), environment("HOME"));
}

int64_t cache_limit_bytes() {
  const auto text = environment("QKV_CACHE_MB");
  int64_t megabytes = kDefaultMegabytes;
  if (text) {
    const char* end = text->data() + text->size();
    const auto [stop, error] = std::from_chars(text->data(), end, megabytes);
    if (error != std::errc{} || stop != end || megabytes < 1 || megabytes > kMaxMegabytes) {
      refuse("QKV_CACHE_MB", *text, fmt::format("a number of megabytes from 1 to {}", kMaxMegabytes));
    }
  }
  return megabytes << 20;
}

Compiled DiskCache::get(const CacheEntry& wanted, const std::function<Compiled()>& compile) {
  if (folder_.empty()) return compile();
  if (auto found = load(wanted)) return std::move(*found);
  const NameLock lock(folder_, entry_file_name(wanted.compiler, wanted.key));
  if (auto found = load(wanted)) return std::move(*found);  // somebody else has made it meanwhile
  CacheEntry entry = wanted;
  entry.compiled = compile();
  store(entry);
  return std::move(entry.compiled);
}

std::optional<Compiled> DiskCache::load(const CacheEntry& wanted) {
  const std::string path = fmt::format("{}/{}", folder_, entry_file_name(wanted.compiler, wanted.key));
  std::string fault;
  const auto bytes = read_file(path, fault);
  if (!bytes && fault.empty()) return std::nullopt;
  auto entry = bytes ? parse_entry(*bytes, fault) : std::nullopt;
  if (entry && (entry->key != wanted.key || entry->compiler != wanted.compiler)) {
    fault = "it is another kernel's";
    entry.reset();
  }
  if (!entry) {
    say_once(path, fmt::format("{} is not used: {}; the kernel is compiled again", path, fault));
    return std::nullopt;
  }
  mark_used(path);
  return std::move(entry->compiled);
}

void DiskCache::store(const CacheEntry& entry) {
  const std::string name = entry_file_name(entry.compiler, entry.key);
  const std::string reason = write_file(folder_, name, to_bytes(entry));
  if (!reason.empty()) {
    say_once(folder_, fmt::format("{} cannot be written ({}): kernels are compiled and not kept", folder_, reason));
    return;
  }
  remove_least_used(folder_, kEntrySuffix, max_bytes_, fmt::format("{}/{}", folder_, name));
}

void DiskCache::say_once(const std::string& about, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (said_.insert(about).second) fmt::print(stderr, "qkv cache: {}\n", text);
}

DiskCache& disk_cache() {
  static DiskCache cache(cache_place().folder, cache_limit_bytes());
  return cache;
}

}  // namespace qkv::jit
