#include "jit/cache_files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

namespace qkv::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr const char* kLockFile = "lock";
constexpr int64_t kLeftBehindSeconds = 3600;
constexpr auto kLockPatience = std::chrono::seconds(60);
constexpr auto kLockPause = std::chrono::milliseconds(5);

std::string error_text(int number) { return std::generic_category().message(number); }

class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0) : file_(open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~File() { close_now(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return file_; }
  int release() { return std::exchange(file_, -1); }
  // Some file systems report a full disk here.
  bool close_now() { return file_ < 0 || close(std::exchange(file_, -1)) == 0; }

 private:
  int file_;
};

// A write past the process's limit of file sizes (ulimit -f) would end the process; here it is an error like others.
class FileSizeSignalHeld {
 public:
  FileSizeSignalHeld() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~FileSizeSignalHeld() {
    constexpr timespec kNow{};
    while (sigtimedwait(&signal_, nullptr, &kNow) == SIGXFSZ) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  FileSizeSignalHeld(const FileSizeSignalHeld&) = delete;
  FileSizeSignalHeld& operator=(const FileSizeSignalHeld&) = delete;

 private:
  sigset_t signal_{}, before_{};
};

bool write_all(int file, std::string_view bytes) {
  const FileSizeSignalHeld held;
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

// Another name for each process, thread, call and host.
std::string temporary_name(const std::string& name) {
  static std::atomic<uint64_t> count = 0;
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return fmt::format("{}.{}.{}.{:x}{}", name, getpid(), ++count, now, kTemporarySuffix);
}

void remove_left_behind(const std::string& folder, int64_t min_age_seconds) {
  const int64_t now = std::time(nullptr);
  for (const FolderEntry& file : list_files(folder, kTemporarySuffix)) {
    if (now - file.last_used >= min_age_seconds) unlink(file.path.c_str());
  }
}

}  // namespace

std::optional<std::string> read_file(const std::string& path, std::string& reason, int64_t max_bytes) {
  reason.clear();
  const File file(path, O_RDONLY | O_NONBLOCK);  // a pipe of that name must not make anybody wait
  if (file.get() < 0) {
    if (errno != ENOENT && errno != ENOTDIR) reason = error_text(errno);
    return std::nullopt;
  }
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > max_bytes) {
    reason = "it is not a file, or far too large";
    return std::nullopt;
  }
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = read(file.get(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      reason = error_text(errno);
      return std::nullopt;
    }
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

std::string write_file(const std::string& folder, const std::string& name, std::string_view bytes) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return error.message();
  const std::string temporary = fmt::format("{}/{}", folder, temporary_name(name));
  File file(temporary, O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (file.get() < 0) return error_text(errno);
  const bool complete = write_all(file.get(), bytes) && file.close_now();
  if (complete && rename(temporary.c_str(), fmt::format("{}/{}", folder, name).c_str()) == 0) return "";
  const int number = errno;
  unlink(temporary.c_str());
  return error_text(number);
}

std::vector<FolderEntry> list_files(const std::string& folder, std::string_view suffix) {
  std::vector<FolderEntry> files;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    struct stat status {};
    const std::string path = at->path().string();
    if (!path.ends_with(suffix) || lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    files.push_back({path, status.st_size, status.st_mtime});
  }
  std::sort(files.begin(), files.end(), [](const FolderEntry& a, const FolderEntry& b) {
    return std::pair(a.last_used, a.path) < std::pair(b.last_used, b.path);
  });
  return files;
}

void mark_used(const std::string& path) { utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }

void remove_least_used(const std::string& folder, std::string_view suffix, int64_t max_bytes, const std::string& keep) {
  remove_left_behind(folder, kLeftBehindSeconds);
  const std::vector<FolderEntry> files = list_files(folder, suffix);
  int64_t num_bytes = 0;
  for (const FolderEntry& file : files) num_bytes += file.num_bytes;
  for (const FolderEntry& file : files) {
    if (num_bytes <= max_bytes) return;
    if (file.path == keep) continue;
    unlink(file.path.c_str());
    num_bytes -= file.num_bytes;
  }
}

int64_t remove_all(const std::string& folder, std::string_view suffix) {
  remove_left_behind(folder, 0);
  int64_t removed = 0;
  for (const FolderEntry& file : list_files(folder, suffix)) removed += unlink(file.path.c_str()) == 0 ? 1 : 0;
  return removed;
}

NameLock::NameLock(const std::string& folder, std::string_view name) {
  std::error_code ignored;
  fs::create_directories(folder, ignored);
  File file(fmt::format("{}/{}", folder, kLockFile), O_RDWR | O_CREAT, 0666);
  if (file.get() < 0) return;
  // One file for all names: a name is a byte of it. Locks of the open file, not of the process, part threads too.
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(XXH3_64bits(name.data(), name.size()) >> 2);
  range.l_len = 1;
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (fcntl(file.get(), F_OFD_SETLK, &range) != 0) {
    const bool is_taken = errno == EAGAIN || errno == EACCES || errno == EINTR;
    if (!is_taken || std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(kLockPause);
  }
  file_ = file.release();
}

NameLock::~NameLock() {
  if (file_ >= 0) close(file_);
}

}  // namespace qkv::jit
