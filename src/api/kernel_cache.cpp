#include "qkv/kernel_cache.hpp"

#include <filesystem>

#include "core/checks.hpp"
#include "jit/cache_archive.hpp"
#include "jit/cache_files.hpp"
#include "jit/disk_cache.hpp"

namespace qkv {
namespace {

constexpr int64_t kMaxArchiveBytes = int64_t{8} << 30;

std::optional<jit::CacheEntry> read_entry(const std::string& path, std::string& fault) {
  const auto bytes = jit::read_file(path, fault);
  if (!bytes) {
    if (fault.empty()) fault = "it has just been deleted";
    return std::nullopt;
  }
  auto entry = jit::parse_entry(*bytes, fault);
  if (entry && !path.ends_with('/' + jit::entry_file_name(entry->compiler, entry->key))) {
    fault = "it is another kernel's";
    return std::nullopt;
  }
  return entry;
}

std::string folder_or_refuse() {
  const jit::CachePlace place = jit::cache_place();
  if (place.folder.empty()) {
    refuse("kernel cache", place.origin, "QKV_CACHE_DIR=<a folder>", ErrorCode::unavailable);
  }
  return place.folder;
}

}  // namespace

KernelCachePlace kernel_cache_place() {
  const jit::CachePlace place = jit::cache_place();
  return {place.folder, place.origin, jit::cache_limit_bytes()};
}

std::vector<CachedKernel> cached_kernels() {
  std::vector<CachedKernel> kernels;
  const std::string folder = jit::cache_place().folder;
  if (folder.empty()) return kernels;
  for (const jit::FolderEntry& file : jit::list_files(folder, jit::kEntrySuffix)) {
    CachedKernel kernel;
    kernel.path = file.path;
    kernel.num_bytes = file.num_bytes;
    kernel.last_used = file.last_used;
    if (const auto entry = read_entry(file.path, kernel.fault)) {
      kernel.name = entry->name;
      kernel.compiler = entry->compiler;
      kernel.arch = entry->arch;
      kernel.compile_seconds = entry->compiled.seconds;
      kernel.registers = entry->compiled.usage.registers;
      kernel.spill_bytes = entry->compiled.usage.spill_store_bytes + entry->compiled.usage.spill_load_bytes;
    }
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

int64_t clear_kernel_cache() { return jit::remove_all(folder_or_refuse(), jit::kEntrySuffix); }

int64_t export_kernels(const std::string& path, const std::string& arch) {
  std::vector<jit::CacheEntry> entries;
  for (const jit::FolderEntry& file : jit::list_files(folder_or_refuse(), jit::kEntrySuffix)) {
    std::string fault;
    auto entry = read_entry(file.path, fault);
    if (entry && (arch.empty() || entry->arch == arch)) entries.push_back(std::move(*entry));
  }
  const std::filesystem::path target = std::filesystem::absolute(path);
  const std::string reason =
      jit::write_file(target.parent_path().string(), target.filename().string(), jit::to_archive(entries));
  if (!reason.empty()) refuse(path, reason, "a file that can be written", ErrorCode::unavailable);
  return static_cast<int64_t>(entries.size());
}

int64_t import_kernels(const std::string& path) {
  const std::string folder = folder_or_refuse();
  std::string fault;
  const auto bytes = jit::read_file(path, fault, kMaxArchiveBytes);
  if (!bytes) refuse(path, fault.empty() ? "no such file" : fault, "an archive of kernels", ErrorCode::unavailable);
  const auto entries = jit::parse_archive(*bytes, fault);
  if (!entries) refuse(path, fault, "an archive as `qkv cache export` writes it");
  for (const jit::CacheEntry& entry : *entries) {
    const std::string reason =
        jit::write_file(folder, jit::entry_file_name(entry.compiler, entry.key), jit::to_bytes(entry));
    if (!reason.empty())
      refuse("kernel cache", fmt::format("{}: {}", folder, reason), "a folder to write to", ErrorCode::unavailable);
  }
  jit::remove_least_used(folder, jit::kEntrySuffix, jit::cache_limit_bytes(), "");
  return static_cast<int64_t>(entries->size());
}

}  // namespace qkv
