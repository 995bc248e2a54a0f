#include "cpu/threads.hpp"

#include <fmt/format.h>

#include <charconv>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/checks.hpp"
#include "core/environment.hpp"
#include "qkv/device.hpp"

namespace qkv {
namespace {

struct Settings {
  std::mutex mutex;
  int32_t num_threads = 0;  // 0 = not set
  std::shared_ptr<const ParallelFor> host_pool;
};

constexpr int32_t kMaxThreads = 4096;  // libgomp ends the process where it cannot make as many as it is told

Settings& settings() {
  static Settings instance;
  return instance;
}

int32_t default_num_threads() {
  if (const auto text = environment("QKV_THREADS")) {
    int32_t count = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), count);
    if (error != std::errc() || end != text->data() + text->size() || count < 1 || count > kMaxThreads) {
      refuse("QKV_THREADS", *text, fmt::format("a whole number from 1 to {}", kMaxThreads));
    }
    return count;
  }
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

}  // namespace

void set_num_threads(int32_t num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    refuse("num_threads", num_threads, fmt::format("1 to {}, or 0 for the default", kMaxThreads));
  }
  const std::lock_guard lock(settings().mutex);
  settings().num_threads = num_threads;
}

int32_t num_threads() {
  const std::lock_guard lock(settings().mutex);
  return settings().num_threads > 0 ? settings().num_threads : default_num_threads();
}

void set_parallel_for(ParallelFor run) {
  const std::lock_guard lock(settings().mutex);
  settings().host_pool = run ? std::make_shared<const ParallelFor>(std::move(run)) : nullptr;
}

namespace cpu {
namespace {

std::shared_ptr<const ParallelFor> host_pool() {
  const std::lock_guard lock(settings().mutex);
  return settings().host_pool;
}

// An exception must not leave a thread of somebody's pool: the first one is kept and rethrown by the caller.
class FirstException {
 public:
  template <class Body>
  void run(const Body& body) noexcept {
    try {
      body();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!exception_) exception_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr exception_;
};

// Some 20 µs of one core, several times what it takes to wake another.
constexpr int64_t kLittleWork = 1 << 18;

}  // namespace

void parallel_for(int64_t n, int64_t work, const std::function<void(int64_t)>& body) {
  if (n <= 1 || work < kLittleWork) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  FirstException exception;
  const auto guarded = [&](int64_t i) { exception.run([&] { body(i); }); };
  if (const auto pool = host_pool()) {
    (*pool)(n, guarded);
    exception.rethrow();
    return;
  }
  [[maybe_unused]] const int32_t threads = static_cast<int32_t>(std::min<int64_t>(num_threads(), n));
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
#endif
  for (int64_t i = 0; i < n; ++i) guarded(i);
  exception.rethrow();
}

}  // namespace cpu
}  // namespace qkv
