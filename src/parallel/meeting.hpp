// Where ranks that are threads wait for each other: all offer what they send, all read, all go on. Whoever waits in
// vain ends the meeting for good, and everybody is told the same reason.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "qkv/status.hpp"

namespace qkv::parallel {

struct Offer {
  const char* operation = "";
  const std::byte* send = nullptr;
  int64_t row_bytes = 0;
};

class Meeting {
 public:
  Meeting(int32_t num_ranks, std::chrono::milliseconds timeout);

  // Returns the offers of all ranks, whose memory may be read until this rank calls finish. Throws if a rank has left,
  // does not come in time, or offers another operation.
  const std::vector<Offer>& exchange(int32_t rank, const Offer& offer);
  // Returns when all ranks have finished: what they offered may be overwritten.
  void finish(int32_t rank);
  void leave(int32_t rank);
  // Throws if the meeting has ended.
  void check(const char* operation);

 private:
  struct Failure {
    ErrorCode code;
    std::string value;
  };
  using Lock = std::unique_lock<std::mutex>;

  void come(int32_t rank, Lock& lock);
  void compare_offers();
  void fail(ErrorCode code, std::string value);
  [[noreturn]] void throw_failure(const char* operation) const;
  std::string absent_ranks() const;

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Offer> offers_;   // [num_ranks]
  std::vector<bool> has_come_;  // [num_ranks], of the present round
  size_t num_come_ = 0;
  uint64_t round_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace qkv::parallel
