#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace qkv::tools {
namespace {

constexpr size_t kBarWidth = 30;
constexpr size_t kLineWidth = 100;
constexpr std::chrono::milliseconds kInterval{200};

}  // namespace

Progress::Progress(int64_t total) : total_(total), shown_(isatty(STDERR_FILENO) != 0) {}

bool Progress::is_due(int64_t done) const {
  return shown_ && (done == total_ || std::chrono::steady_clock::now() - last_ >= kInterval);
}

void Progress::show(int64_t done, std::string_view text) {
  if (!is_due(done)) return;
  last_ = std::chrono::steady_clock::now();
  const auto filled = static_cast<size_t>(static_cast<int64_t>(kBarWidth) * done / std::max<int64_t>(total_, 1));
  fmt::print(stderr, "\r[{}{}] {:<{}}", std::string(filled, '#'), std::string(kBarWidth - filled, '.'), text,
             kLineWidth - kBarWidth - 4);
}

void Progress::clear() {
  if (shown_) fmt::print(stderr, "\r{}\r", std::string(kLineWidth, ' '));
}

}  // namespace qkv::tools
