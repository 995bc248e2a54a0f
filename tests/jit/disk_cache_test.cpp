// The compile cache on disk: what is found again, what is not believed, and where it does without a disk.
#include "jit/disk_cache.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "jit/cache_files.hpp"
#include "jit/cache_folder.hpp"
#include "jit/module.hpp"
#include "jit/needs_nvrtc.hpp"
#include "qkv/compile.hpp"

namespace qkv {
namespace {

using testing::code_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::read_bytes;
using ::testing::SizeIs;
using testing::wanted;
using testing::write_bytes;

constexpr int64_t kAmple = int64_t{1} << 30;

class DiskCache : public testing::CacheFolder {
 protected:
  // As a process of its own would: a cache object that has seen nothing.
  jit::Compiled get(const jit::CacheEntry& entry, int64_t max_bytes = kAmple) {
    jit::DiskCache cache(folder, max_bytes);
    ::testing::internal::CaptureStderr();
    jit::Compiled compiled = cache.get(entry, [&] {
      ++compiles;
      return code_of(entry);
    });
    said = ::testing::internal::GetCapturedStderr();
    return compiled;
  }

  void expect_right(const jit::CacheEntry& entry) {
    const jit::Compiled compiled = get(entry);
    EXPECT_EQ(compiled.cubin, code_of(entry).cubin);
    EXPECT_EQ(compiled.entry, "k");
  }

  int compiles = 0;
  std::string said;
};

TEST_F(DiskCache, second_process_finds_what_the_first_compiled) {
  get(wanted("a"));
  const jit::Compiled found = get(wanted("a"));
  EXPECT_EQ(compiles, 1);
  EXPECT_EQ(said, "");
  const jit::Compiled expected = code_of(wanted("a"));
  EXPECT_EQ(found.cubin, expected.cubin);
  EXPECT_EQ(found.entry, expected.entry);
  EXPECT_EQ(found.log, expected.log);
  EXPECT_EQ(found.usage.registers, 8);
  EXPECT_EQ(found.usage.shared_bytes, 16);
  EXPECT_EQ(found.seconds, 0.25);
}

TEST_F(DiskCache, key_compiler_and_arch_are_told_apart) {
  jit::CacheEntry other_compiler = wanted("a");
  other_compiler.compiler = "NVRTC 12.9";
  for (const auto& entry : {wanted("a"), wanted("b"), wanted("a", "sm_90a"), other_compiler}) expect_right(entry);
  EXPECT_EQ(compiles, 4);
  EXPECT_THAT(files(), SizeIs(4));
}

TEST_F(DiskCache, name_in_words_is_no_part_of_the_identity) {
  get(wanted("a"));
  jit::CacheEntry renamed = wanted("a");
  renamed.name = "another name";
  get(renamed);
  EXPECT_EQ(compiles, 1);
}

TEST_F(DiskCache, entry_shows_the_text_that_was_compiled) {
  get(wanted("namespace qkv { constexpr int a = 1; }"));
  EXPECT_THAT(read_bytes(files().front()), HasSubstr("namespace qkv { constexpr int a = 1; }"));
}

TEST_F(DiskCache, failed_compile_leaves_no_entry_and_is_tried_again) {
  jit::DiskCache cache(folder, kAmple);
  EXPECT_THROW(cache.get(wanted("a"), []() -> jit::Compiled { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_THAT(files(), IsEmpty());
  EXPECT_THAT(files(".tmp"), IsEmpty());
  expect_right(wanted("a"));
}

TEST_F(DiskCache, casebook_107_times_owner_of_clock_and_folder_spelling_do_not_matter) {
  get(wanted("a"));
  const std::string file = files().front();
  std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - std::chrono::hours(9999));
  std::filesystem::create_directory_symlink(folder, root + "/link");
  const std::string before = folder;
  for (const std::string& spelling : {root + "/link", root + "/./cache/", root + "/cache/../cache"}) {
    folder = spelling;
    get(wanted("a"));
  }
  folder = before;
  const auto working_folder = std::filesystem::current_path();
  std::filesystem::current_path(root);
  get(wanted("a"));
  std::filesystem::current_path(working_folder);
  EXPECT_EQ(compiles, 1);
}

TEST_F(DiskCache, casebook_109_damaged_entries_are_compiled_again_and_said_once) {
  get(wanted("a"));
  const std::string path = files().front();
  const std::string sound = read_bytes(path);
  get(wanted("a", "sm_90a"));
  std::string foreign_arch;
  for (const std::string& file : files()) {
    if (file != path) foreign_arch = read_bytes(file);
  }
  std::string flipped = sound;
  flipped[flipped.size() / 2] ^= 1;
  const std::pair<std::string, const char*> faults[] = {
      {"", "it is empty"},
      {flipped, "its bytes have changed"},
      {foreign_arch, "it is another kernel's"},
      {sound.substr(0, sound.size() - 1), "its bytes have changed, or some are missing"},
      {sound.substr(0, 20), "it is cut off"},
      {"#!/bin/sh\n", "it is no entry of this version"},
      {sound + "x", "its bytes have changed"},
  };
  for (const auto& [bytes, fault] : faults) {
    write_bytes(path, bytes);
    compiles = 0;
    expect_right(wanted("a"));
    EXPECT_EQ(compiles, 1) << fault;
    EXPECT_THAT(said, HasSubstr(fault));
    EXPECT_THAT(said, HasSubstr(path));
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_EQ(read_bytes(path), sound) << "the entry was not replaced";
    expect_right(wanted("a"));
    EXPECT_EQ(said, "");
  }
}

TEST_F(DiskCache, no_flipped_bit_and_no_cut_is_believed) {
  std::string bytes = jit::to_bytes({"kernel a", "NVRTC 13.0", "sm_80", "a", code_of(wanted("a"), 64)});
  std::string fault;
  ASSERT_TRUE(jit::parse_entry(bytes, fault));
  for (size_t at = 0; at < bytes.size(); ++at) {
    EXPECT_FALSE(jit::parse_entry(bytes.substr(0, at), fault)) << at;
    for (int bit = 0; bit < 8; ++bit) {
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
      fault.clear();
      EXPECT_FALSE(jit::parse_entry(bytes, fault)) << at << ' ' << bit;
      EXPECT_NE(fault, "");
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
    }
  }
}

TEST_F(DiskCache, entry_without_code_is_not_believed_though_its_checksum_is_right) {
  jit::CacheEntry entry = wanted("a");
  entry.compiled = code_of(entry);
  entry.compiled.cubin.clear();
  std::string fault;
  EXPECT_FALSE(jit::parse_entry(jit::to_bytes(entry), fault));
  EXPECT_EQ(fault, "it does not hold exactly one kernel");
}

TEST_F(DiskCache, pipe_or_folder_of_an_entrys_name_makes_nobody_wait) {
  get(wanted("a"));
  const std::string path = files().front();
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  expect_right(wanted("a"));
  EXPECT_THAT(said, HasSubstr("it is not a file"));
  expect_right(wanted("a"));
  EXPECT_EQ(compiles, 2) << "the pipe was replaced by the entry";

  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  expect_right(wanted("a"));
  EXPECT_THAT(said, HasSubstr(path));
}

TEST_F(DiskCache, least_recently_used_entries_go_first_when_it_is_full) {
  const int64_t entry_bytes = static_cast<int64_t>([&] {
    get(wanted("0"));
    return read_bytes(files().front()).size();
  }());
  const int64_t room_for_three = 3 * entry_bytes + entry_bytes / 2;
  const auto age = [&](const std::string& key, int hours) {
    const std::string path = folder + '/' + jit::entry_file_name("NVRTC 13.0", wanted(key).key);
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(hours));
  };
  get(wanted("1"));
  get(wanted("2"));
  age("0", 30);
  age("1", 20);
  age("2", 10);
  get(wanted("0"));  // used: now the youngest
  get(wanted("3"), room_for_three);
  EXPECT_THAT(files(), SizeIs(3));
  compiles = 0;
  for (const char* key : {"0", "2", "3"}) get(wanted(key));
  EXPECT_EQ(compiles, 0);
  get(wanted("1"));
  EXPECT_EQ(compiles, 1);
}

TEST_F(DiskCache, limit_below_one_entry_keeps_the_last) {
  get(wanted("a"), 1);
  get(wanted("b"), 1);
  EXPECT_THAT(files(), SizeIs(1));
  expect_right(wanted("b"));
  EXPECT_EQ(compiles, 2);
}

TEST_F(DiskCache, what_killed_processes_left_is_removed_after_an_hour) {
  std::filesystem::create_directories(folder);
  write_bytes(folder + "/old.kernel.1.1.0.tmp", "half");
  write_bytes(folder + "/young.kernel.1.1.0.tmp", "half");
  std::filesystem::last_write_time(folder + "/old.kernel.1.1.0.tmp",
                                   std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
  get(wanted("a"));
  EXPECT_THAT(files(".tmp"), ::testing::ElementsAre(HasSubstr("young")));
}

TEST_F(DiskCache, folder_that_cannot_be_made_is_said_once_and_done_without) {
  write_bytes(root + "/file", "a file, not a folder");
  jit::DiskCache cache(root + "/file/cache", kAmple);
  ::testing::internal::CaptureStderr();
  for (const char* key : {"a", "b", "a"}) {
    EXPECT_EQ(cache.get(wanted(key), [&] { return code_of(wanted(key)); }).cubin, code_of(wanted(key)).cubin);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("kernels are compiled and not kept"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(DiskCache, without_a_folder_all_is_compiled_and_nothing_written) {
  jit::DiskCache cache("", kAmple);
  int compiles = 0;
  for (int i = 0; i < 2; ++i) {
    cache.get(wanted("a"), [&] {
      ++compiles;
      return code_of(wanted("a"));
    });
  }
  EXPECT_EQ(compiles, 2);
}

TEST_F(DiskCache, place_is_the_first_that_is_named) {
  const auto folder_of = [](const auto&... names) { return jit::choose_cache_place(names...).folder; };
  EXPECT_EQ(folder_of("/c", "/x", "/h"), "/c");
  EXPECT_EQ(folder_of(std::nullopt, "/x", "/h"), "/x/qkv");
  EXPECT_EQ(folder_of(std::nullopt, std::nullopt, "/h"), "/h/.cache/qkv");
  EXPECT_EQ(folder_of(std::nullopt, "relative", "/h"), "/h/.cache/qkv");
  EXPECT_EQ(folder_of(std::nullopt, std::nullopt, "relative"), "");
  EXPECT_EQ(folder_of("here", "/x", "/h"), (std::filesystem::current_path() / "here").string());
  const jit::CachePlace none = jit::choose_cache_place(std::nullopt, std::nullopt, std::nullopt);
  EXPECT_EQ(none.folder, "");
  EXPECT_THAT(none.origin, HasSubstr("none of QKV_CACHE_DIR"));
}

TEST_F(DiskCache, limit_is_a_number_of_megabytes) {
  EXPECT_EQ(jit::cache_limit_bytes(), int64_t{512} << 20);
  setenv("QKV_CACHE_MB", "3", 1);
  EXPECT_EQ(jit::cache_limit_bytes(), int64_t{3} << 20);
  for (const char* bad : {"0", "-1", "3G", "9999999999999999999"}) {
    setenv("QKV_CACHE_MB", bad, 1);
    EXPECT_THROW(jit::cache_limit_bytes(), Error) << bad;
  }
  unsetenv("QKV_CACHE_MB");
}

class CachedNvrtc : public testing::CacheFolder {};

TEST_F(CachedNvrtc, code_from_disk_is_the_code_that_was_compiled) {
  if (const jit::Probe probe = jit::probe_nvrtc(); !probe.usable) GTEST_SKIP() << "needs NVRTC: " << probe.text;
  const jit::Source source{"k", "extern \"C\" __global__ void k(int* p) { *p = 1; }", {}, "sm_90a", {}};
  jit::DiskCache disk(folder, kAmple);
  set_compile_callback([](const CompileEvent&) {});
  jit::Kernels first(jit::cuda_toolchain(), &disk);
  jit::Kernels second(jit::cuda_toolchain(), &disk);
  const jit::Compiled compiled = first.compiled(source);
  const jit::Compiled found = second.compiled(source);
  set_compile_callback({});
  EXPECT_EQ(first.compiles_so_far(), 1);
  EXPECT_EQ(second.compiles_so_far(), 0);
  EXPECT_EQ(found.cubin, compiled.cubin);
  EXPECT_EQ(found.entry, "k");
  EXPECT_EQ(found.usage.registers, compiled.usage.registers);
}

}  // namespace
}  // namespace qkv
