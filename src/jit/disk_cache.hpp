// Compiled kernels on disk, shared by all processes that use the folder. Whatever happens to the folder, get() returns
// the right kernel: what is not exactly the entry that was written is compiled again.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "jit/cache_entry.hpp"

namespace qkv::jit {

// Where the cache lies, and which environment name said so; an empty path, and why, if there is none.
struct CachePlace {
  std::string folder;
  std::string origin;
};

// QKV_CACHE_DIR, else qkv in XDG_CACHE_HOME, else .cache/qkv in HOME. Relative paths are passed over, as XDG asks,
// but not in QKV_CACHE_DIR.
CachePlace choose_cache_place(const std::optional<std::string>& cache_dir, const std::optional<std::string>& xdg_home,
                              const std::optional<std::string>& home);
CachePlace cache_place();

// QKV_CACHE_MB; throws if it is no number of megabytes.
int64_t cache_limit_bytes();

class DiskCache {
 public:
  // An empty folder: nothing is kept.
  DiskCache(std::string folder, int64_t max_bytes) : folder_(std::move(folder)), max_bytes_(max_bytes) {}

  // From disk, else from compile(), which is kept. Of processes that want the same kernel one compiles and the others
  // wait, for a minute at most. What is wrong with an entry or the folder is said once, on stderr.
  Compiled get(const CacheEntry& wanted, const std::function<Compiled()>& compile);

 private:
  std::optional<Compiled> load(const CacheEntry& wanted);
  void store(const CacheEntry& entry);
  void say_once(const std::string& about, const std::string& text);

  const std::string folder_;
  const int64_t max_bytes_;
  std::mutex mutex_;
  std::set<std::string> said_;
};

// The process's cache, at cache_place().
DiskCache& disk_cache();

}  // namespace qkv::jit
