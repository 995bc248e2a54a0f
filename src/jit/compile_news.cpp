#include "jit/compile_news.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <mutex>

#include "core/environment.hpp"

namespace qkv {
namespace jit {
namespace {

// A compile takes seconds, in which a silent process looks hung: it is said when it begins, too.
void print(const CompileEvent& event) {
  const std::string log = environment("QKV_LOG").value_or("");
  if (log == "quiet") return;
  const std::string who = fmt::format("qkv compile {}: {}", event.index, event.kernel);
  switch (event.kind) {
    case CompileEvent::Kind::started:
      fmt::print(stderr, "{} …\n", who);
      return;
    case CompileEvent::Kind::finished:
      fmt::print(stderr, "{}: {:.2f} s, {} registers, {} bytes of spills\n", who, event.seconds, event.registers,
                 event.spill_bytes);
      return;
    case CompileEvent::Kind::failed:
      fmt::print(stderr, "{}: failed\n", who);
      return;
    case CompileEvent::Kind::from_cache:
      if (log == "compile") fmt::print(stderr, "qkv compile: {}: from the cache\n", event.kernel);
      return;
  }
}

struct Listener {
  std::mutex setting, calling;
  std::shared_ptr<const CompileCallback> callback;
};

Listener& listener() {
  static Listener instance;
  return instance;
}

}  // namespace

void report(const CompileEvent& event) {
  Listener& to = listener();
  std::shared_ptr<const CompileCallback> callback;
  {
    const std::lock_guard lock(to.setting);
    callback = to.callback;
  }
  const std::lock_guard one_at_a_time(to.calling);
  if (callback) {
    (*callback)(event);
  } else {
    print(event);
  }
}

}  // namespace jit

void set_compile_callback(CompileCallback callback) {
  jit::Listener& to = jit::listener();
  const std::lock_guard lock(to.setting);
  to.callback = callback ? std::make_shared<const CompileCallback>(std::move(callback)) : nullptr;
}

}  // namespace qkv
