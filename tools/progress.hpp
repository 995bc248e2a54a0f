// One line on the terminal, rewritten in place, where somebody is looking.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace qkv::tools {

class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `text` follows the bar. Cheap: most calls draw nothing.
  void show(int64_t done, std::string_view text);
  void clear();

  // Whether a call would draw now: for texts that cost something to make.
  bool is_due(int64_t done) const;

 private:
  int64_t total_;
  bool shown_;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace qkv::tools
