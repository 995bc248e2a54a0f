// The compile cache's dealings with the file system. Nothing here throws for what a file system may do: a cache that
// cannot be read or written is slower, and no more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qkv::jit {

inline constexpr int64_t kMaxEntryBytes = int64_t{256} << 20;  // a kernel has some 100 KB

// All bytes of a regular file. Nothing if it is not there, and then `reason` is empty; nothing and the reason
// otherwise.
std::optional<std::string> read_file(const std::string& path, std::string& reason, int64_t max_bytes = kMaxEntryBytes);

// Under another name first, then renamed: whoever opens `folder/name` sees all of it or what was there before. Makes
// the folder if need be. Returns the reason if it cannot be written, else nothing.
std::string write_file(const std::string& folder, const std::string& name, std::string_view bytes);

struct FolderEntry {
  std::string path;
  int64_t num_bytes = 0;
  int64_t last_used = 0;  // seconds since 1970
};

// Regular files in the folder whose names end so, the least recently used first.
std::vector<FolderEntry> list_files(const std::string& folder, std::string_view suffix);

// Notes that a file was used now. It may fail: in a folder that is read only nothing is removed either.
void mark_used(const std::string& path);

// Deletes files, the least recently used first, until the others have at most `max_bytes` together; `keep` stays. What
// killed processes left behind goes too, once it is an hour old.
void remove_least_used(const std::string& folder, std::string_view suffix, int64_t max_bytes, const std::string& keep);

// Deletes all files with the suffix, and what was left behind. Returns how many files there were.
int64_t remove_all(const std::string& folder, std::string_view suffix);

// One process or thread at a time for one name in a folder, while it lives. Nobody waits for the dead, whose locks the
// kernel drops, nor longer than a minute for the living: then, or where there are no locks, this holds nothing.
class NameLock {
 public:
  NameLock(const std::string& folder, std::string_view name);
  ~NameLock();
  NameLock(const NameLock&) = delete;
  NameLock& operator=(const NameLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace qkv::jit
