// The compile cache among processes that start at once, are killed, may not write, or have no room.
#include <grp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "jit/cache_files.hpp"
#include "jit/cache_folder.hpp"
#include "jit/disk_cache.hpp"

namespace qkv {
namespace {

using testing::code_of;
using testing::wanted;

constexpr int64_t kAmple = int64_t{1} << 30;
constexpr int kProcesses = 8;
constexpr int kKeys = 6;
constexpr size_t kCodeBytes = 40000;  // several pages: a write that can be seen half done

enum Outcome : int { kAllRight = 0, kWrongKernel = 1, kThrew = 2 };

class CacheUnderFire : public testing::CacheFolder {
 protected:
  // What a process does that wants all kernels, each of which takes `compile_time`. Counts compiles in files.
  int use_cache(std::chrono::microseconds compile_time, int64_t max_bytes = kAmple) const {
    try {
      jit::DiskCache cache(folder, max_bytes);
      for (int key = 0; key < kKeys; ++key) {
        const jit::CacheEntry entry = wanted(std::to_string(key));
        const jit::Compiled expected = code_of(entry, kCodeBytes);
        const jit::Compiled got = cache.get(entry, [&] {
          std::this_thread::sleep_for(compile_time);
          testing::write_bytes(root + "/compiled_" + std::to_string(key) + "_" + std::to_string(getpid()), "");
          return expected;
        });
        if (got.cubin != expected.cubin || got.entry != expected.entry) return kWrongKernel;
      }
      return kAllRight;
    } catch (...) {
      return kThrew;
    }
  }

  static pid_t start(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a hang ends as a signal, which is no outcome that a test accepts
      _exit(body());
    }
    return child;
  }

  static int outcome_of(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  int num_compiles() const {
    int count = 0;
    for (const auto& file : std::filesystem::directory_iterator(root)) {
      count += file.path().filename().string().starts_with("compiled_") ? 1 : 0;
    }
    return count;
  }

  void expect_all_entries_sound() const {
    for (const std::string& file : files()) {
      std::string fault;
      EXPECT_TRUE(jit::parse_entry(testing::read_bytes(file), fault)) << file << ": " << fault;
    }
  }
};

TEST_F(CacheUnderFire, casebook_104_processes_at_once_on_an_empty_folder_compile_each_key_once) {
  for (int round = 0; round < 20; ++round) {
    std::filesystem::remove_all(root);
    std::filesystem::create_directory(root);
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
      children.push_back(start([&] { return use_cache(std::chrono::milliseconds(2)); }));
    }
    for (const pid_t child : children) EXPECT_EQ(outcome_of(child), kAllRight);
    EXPECT_EQ(num_compiles(), kKeys);
    EXPECT_EQ(files().size(), size_t{kKeys});
    EXPECT_TRUE(files(".tmp").empty());
    expect_all_entries_sound();
  }
}

TEST_F(CacheUnderFire, casebook_104_different_kernels_do_not_wait_for_each_other) {
  const auto start_time = std::chrono::steady_clock::now();
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(start([&, i] {
      jit::DiskCache cache(folder, kAmple);
      const jit::CacheEntry entry = wanted("own " + std::to_string(i));
      cache.get(entry, [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        return code_of(entry);
      });
      return int{kAllRight};
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(outcome_of(child), kAllRight);
  const auto took = std::chrono::steady_clock::now() - start_time;
  EXPECT_LT(took, std::chrono::milliseconds(500 * kProcesses / 2));
}

TEST_F(CacheUnderFire, killed_at_random_moments_leaves_no_wrong_kernel_and_nobody_waiting) {
  std::mt19937 random(20);
  for (int round = 0; round < 100; ++round) {
    if (round % 10 == 0) std::filesystem::remove_all(folder);
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
      children.push_back(start([&] { return use_cache(std::chrono::microseconds(300)); }));
    }
    std::shuffle(children.begin(), children.end(), random);
    for (int i = 0; i < kProcesses / 2; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution(0, 1500)(random)));
      kill(children[i], SIGKILL);
    }
    for (int i = 0; i < kProcesses; ++i) {
      const int outcome = outcome_of(children[i]);
      EXPECT_TRUE(outcome == kAllRight || (i < kProcesses / 2 && outcome == -SIGKILL)) << outcome;
    }
    expect_all_entries_sound();
  }
}

TEST_F(CacheUnderFire, bytes_that_change_while_processes_read_are_never_believed) {
  std::mt19937 random(21);
  ASSERT_EQ(use_cache({}), kAllRight);
  for (int round = 0; round < 20; ++round) {
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
      children.push_back(start([&] {
        if (std::freopen("/dev/null", "w", stderr) == nullptr) return int{kThrew};  // it tells of each damage
        return use_cache({});
      }));
    }
    for (int i = 0; i < 40; ++i) {
      const auto all = files();
      if (all.empty()) continue;
      std::fstream file(all[random() % all.size()], std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>(random() % kCodeBytes));
      file.put(static_cast<char>(random()));
    }
    for (const pid_t child : children) EXPECT_EQ(outcome_of(child), kAllRight);
  }
}

TEST_F(CacheUnderFire, folder_smaller_than_the_kernels_serves_processes_at_once) {
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(start([&] {
      for (int pass = 0; pass < 20; ++pass) {
        if (const int outcome = use_cache({}, 2 * kCodeBytes + kCodeBytes / 2); outcome != kAllRight) return outcome;
      }
      return int{kAllRight};
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(outcome_of(child), kAllRight);
  EXPECT_LE(files().size(), 3U);
}

TEST_F(CacheUnderFire, full_disk_and_file_size_limit_are_said_once_and_done_without) {
  ::testing::internal::CaptureStderr();
  const pid_t child = start([&] {
    const rlimit limit{kCodeBytes / 2, kCodeBytes / 2};  // an entry does not fit: the write fails in its middle
    setrlimit(RLIMIT_FSIZE, &limit);
    jit::DiskCache cache(folder, kAmple);
    for (int pass = 0; pass < 2; ++pass) {
      for (int key = 0; key < kKeys; ++key) {
        const jit::CacheEntry entry = wanted(std::to_string(key));
        const jit::Compiled expected = code_of(entry, kCodeBytes);
        if (cache.get(entry, [&] { return expected; }).cubin != expected.cubin) return int{kWrongKernel};
      }
    }
    return int{kAllRight};
  });
  EXPECT_EQ(outcome_of(child), kAllRight);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_TRUE(files().empty());
  EXPECT_TRUE(files(".tmp").empty());
}

// Root may write everywhere; another user may not.
void become_nobody() {
  constexpr uid_t kNobody = 65534;
  if (getuid() != 0) return;
  if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(100);
}

TEST_F(CacheUnderFire, casebook_107_read_only_folder_of_another_user_serves_what_it_has) {
  std::filesystem::permissions(root, std::filesystem::perms(0755));
  ASSERT_EQ(use_cache({}), kAllRight);
  std::filesystem::remove(files().front());
  const size_t there = files().size();
  std::filesystem::permissions(folder, std::filesystem::perms(0555));
  const pid_t child = start([&] {
    become_nobody();
    int compiles = 0;
    jit::DiskCache cache(folder, 1);  // nothing can be removed either
    for (int key = 0; key < kKeys; ++key) {
      const jit::CacheEntry entry = wanted(std::to_string(key));
      const jit::Compiled expected = code_of(entry, kCodeBytes);
      const jit::Compiled got = cache.get(entry, [&] {
        ++compiles;
        return expected;
      });
      if (got.cubin != expected.cubin) return int{kWrongKernel};
    }
    return compiles == 1 ? int{kAllRight} : 10 + compiles;
  });
  EXPECT_EQ(outcome_of(child), kAllRight);
  EXPECT_EQ(files().size(), there);
  std::filesystem::permissions(folder, std::filesystem::perms(0755));
}

TEST_F(CacheUnderFire, lock_of_a_dead_process_is_free_at_once) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t holder = start([&] {
    const jit::NameLock lock(folder, "a");
    if (write(ready[1], "x", 1) != 1) return int{kThrew};
    pause();
    return int{kAllRight};
  });
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  kill(holder, SIGKILL);
  EXPECT_EQ(outcome_of(holder), -SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  const jit::NameLock lock(folder, "a");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  close(ready[0]);
  close(ready[1]);
}

TEST_F(CacheUnderFire, lock_is_one_threads_at_a_time) {
  std::atomic<int> inside = 0, most = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kProcesses; ++i) {
    threads.emplace_back([&] {
      const jit::NameLock lock(folder, "a");
      most = std::max<int>(most, ++inside);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      --inside;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
}

}  // namespace
}  // namespace qkv
