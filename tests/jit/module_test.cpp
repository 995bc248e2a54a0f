// The table of kernels: what is compiled and loaded how often, by whom, and what becomes of failures.
#include "jit/module.hpp"

#include <gmock/gmock.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

#include "jit/driver.hpp"
#include "jit/needs_nvrtc.hpp"
#include "qkv/compile.hpp"

namespace qkv {
namespace {

using testing::HasSubstr;

constexpr int kThreads = 8;

jit::Source source(const std::string& text, const std::string& arch = "sm_80") {
  return {"kernel of " + text, text, {}, arch, {}};
}

// Compiles nothing: hands out names, counts, and can hold compiles back until enough of them run at once.
class CountingToolchain : public jit::Toolchain {
 public:
  uint64_t current_context() const override { return context; }

  std::string compiler() const override { return "a compiler"; }

  jit::Compiled compile(const jit::Source& source) const override {
    ++compiles;
    wait_for_others();
    if (failures-- > 0) throw Error(ErrorCode::internal, source.name, "a failure", "success");
    jit::Compiled compiled;
    compiled.cubin = compiled.entry = source.text;
    compiled.usage.registers = 8;
    return compiled;
  }

  jit::Kernel load(const jit::Source& source, const jit::Compiled& compiled) const override {
    ++loads;
    if (load_failures-- > 0) throw Error(ErrorCode::unavailable, source.name, "no memory", "some memory");
    return {nullptr, source.name, compiled.usage, 1024};
  }

  static thread_local uint64_t context;
  int wait_for = 0;
  mutable std::atomic<int> compiles = 0;
  mutable std::atomic<int> loads = 0;
  mutable std::atomic<int> failures = 0;
  mutable std::atomic<int> load_failures = 0;
  mutable bool all_at_once = false;

 private:
  // Until `wait_for` compiles run together; gives up after ten seconds, so that a table that compiles in turn fails.
  void wait_for_others() const {
    if (wait_for == 0) return;
    std::unique_lock lock(mutex_);
    if (++running_ == wait_for) all_at_once = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return all_at_once; });
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int running_ = 0;
};
thread_local uint64_t CountingToolchain::context = 1;

template <class Body>
void run_threads(Body body) {
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&body, i] { body(i); });
  for (auto& thread : threads) thread.join();
}

TEST(Kernels, second_request_gets_the_same_kernel) {
  const CountingToolchain toolchain;
  jit::Kernels kernels(toolchain);
  const jit::Kernel& first = kernels.get(source("a"));
  EXPECT_EQ(&first, &kernels.get(source("a")));
  EXPECT_EQ(first.name, "kernel of a");
  EXPECT_EQ(first.usage.registers, 8);
  EXPECT_EQ(first.dynamic_shared_bytes, 1024);
  EXPECT_EQ(kernels.compiles_so_far(), 1);
}

TEST(Kernels, key_is_all_that_changes_the_code_and_not_the_name) {
  static constexpr jit::Header headers[] = {{"a.cuh", "int a;"}};
  static constexpr jit::Header other_text[] = {{"a.cuh", "int b;"}};
  static constexpr jit::Header moved_text[] = {{"a.cuhint", " a;"}};
  jit::Source base = source("text");
  std::set<std::string> keys = {jit::key_text(base)};
  base.name = "another name";
  EXPECT_TRUE(keys.contains(jit::key_text(base)));
  for (const auto& with : {std::span<const jit::Header>(headers), std::span<const jit::Header>(other_text),
                           std::span<const jit::Header>(moved_text)}) {
    base.headers = with;
    keys.insert(jit::key_text(base));
  }
  base.arch = "sm_90a";
  keys.insert(jit::key_text(base));
  base.options = {"--maxrregcount=24"};
  keys.insert(jit::key_text(base));
  base.text = "text ";
  keys.insert(jit::key_text(base));
  EXPECT_EQ(keys.size(), 7u);
  EXPECT_THAT(jit::key_text(base), HasSubstr("text "));
}

TEST(Kernels, one_key_is_compiled_once_for_many_threads) {
  const CountingToolchain toolchain;
  jit::Kernels kernels(toolchain);
  std::vector<const jit::Kernel*> got(kThreads);
  run_threads([&](int i) { got[i] = &kernels.get(source("a")); });
  EXPECT_EQ(toolchain.compiles, 1);
  EXPECT_EQ(toolchain.loads, 1);
  EXPECT_EQ(std::set<const jit::Kernel*>(got.begin(), got.end()).size(), 1u);
}

TEST(Kernels, different_keys_are_compiled_at_the_same_time_by_threads) {
  CountingToolchain toolchain;
  toolchain.wait_for = kThreads;
  jit::Kernels kernels(toolchain);
  run_threads([&](int i) { kernels.get(source(std::to_string(i))); });
  EXPECT_TRUE(toolchain.all_at_once);
  EXPECT_EQ(kernels.compiles_so_far(), kThreads);
}

TEST(Kernels, contexts_share_a_compile_and_load_for_themselves_on_threads) {
  const CountingToolchain toolchain;
  jit::Kernels kernels(toolchain);
  std::vector<const jit::Kernel*> got(kThreads);
  run_threads([&](int i) {
    CountingToolchain::context = 1 + i % 2;
    got[i] = &kernels.get(source("a"));
  });
  EXPECT_EQ(kernels.compiles_so_far(), 1);
  EXPECT_EQ(toolchain.loads, 2);
  EXPECT_EQ(got[0], got[2]);
  EXPECT_NE(got[0], got[1]);
}

TEST(Kernels, failure_reaches_all_threads_that_wait_and_is_tried_again) {
  CountingToolchain toolchain;
  toolchain.failures = kThreads;  // whoever comes too late to wait starts a compile of its own
  jit::Kernels kernels(toolchain);
  std::atomic<int> failed = 0;
  run_threads([&](int) {
    try {
      kernels.get(source("a"));
    } catch (const Error& error) {
      if (error.value() == "a failure") ++failed;
    }
  });
  EXPECT_EQ(failed, kThreads);
  EXPECT_LE(kernels.compiles_so_far(), kThreads);
  toolchain.failures = 0;
  EXPECT_EQ(kernels.get(source("a")).name, "kernel of a");
}

TEST(Kernels, failed_load_keeps_the_compiled_code) {
  CountingToolchain toolchain;
  toolchain.load_failures = 1;
  jit::Kernels kernels(toolchain);
  EXPECT_THROW(kernels.get(source("a")), Error);
  kernels.get(source("a"));
  EXPECT_EQ(kernels.compiles_so_far(), 1);
  EXPECT_EQ(toolchain.loads, 2);
}

// NVRTC itself, without the loading.
class CompilingToolchain final : public CountingToolchain {
 public:
  jit::Compiled compile(const jit::Source& source) const override { return jit::compile(source); }
};

using KernelsOfNvrtc = NeedsNvrtc;

TEST_F(KernelsOfNvrtc, are_compiled_on_many_threads) {
  const CompilingToolchain toolchain;
  jit::Kernels kernels(toolchain);
  run_threads([&](int i) {
    const std::string name = "k" + std::to_string(i / 2);
    const jit::Source one = source("extern \"C\" __global__ void " + name + "(int* p) { *p = 1; }");
    EXPECT_EQ(kernels.compiled(one).entry, name);
    EXPECT_GT(kernels.get(one).usage.registers, 0);
  });
  EXPECT_EQ(kernels.compiles_so_far(), kThreads / 2);
}

std::string said_of_compiles(const char* log_setting) {
  const CountingToolchain toolchain;
  jit::Kernels kernels(toolchain);
  setenv("QKV_LOG", log_setting, 1);
  testing::internal::CaptureStderr();
  kernels.get(source("a"));
  kernels.get(source("a"));
  kernels.get(source("b"));
  unsetenv("QKV_LOG");
  return testing::internal::GetCapturedStderr();
}

TEST(Kernels, casebook_113_begin_and_end_of_each_compile_are_said) {
  EXPECT_EQ(said_of_compiles(""),
            "qkv compile 1: kernel of a …\n"
            "qkv compile 1: kernel of a: 0.00 s, 8 registers, 0 bytes of spills\n"
            "qkv compile 2: kernel of b …\n"
            "qkv compile 2: kernel of b: 0.00 s, 8 registers, 0 bytes of spills\n");
  EXPECT_EQ(said_of_compiles("quiet"), "");
}

TEST(Kernels, casebook_113_callback_replaces_the_lines) {
  CountingToolchain toolchain;
  toolchain.failures = 1;
  jit::Kernels kernels(toolchain);
  std::vector<CompileEvent> events;
  set_compile_callback([&](const CompileEvent& event) { events.push_back(event); });
  testing::internal::CaptureStderr();
  EXPECT_THROW(kernels.get(source("a")), Error);
  kernels.get(source("a"));
  kernels.get(source("a"));
  set_compile_callback({});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  using enum CompileEvent::Kind;
  const std::pair<CompileEvent::Kind, int64_t> expected[] = {{started, 1}, {failed, 1}, {started, 2}, {finished, 2}};
  ASSERT_EQ(events.size(), std::size(expected));
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(std::pair(events[i].kind, events[i].index), expected[i]) << i;
    EXPECT_EQ(events[i].kernel, "kernel of a");
  }
  EXPECT_EQ(events.back().registers, 8);
}

TEST(Kernels, without_a_driver_the_error_names_its_library) {
  if (jit::probe_driver().usable) GTEST_SKIP() << "there is a GPU";
  try {
    jit::kernels().get(source("a"));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    EXPECT_EQ(error.argument(), "libcuda.so.1");
  }
}

}  // namespace
}  // namespace qkv
