#include "parallel/failures.hpp"

#include <fmt/format.h>

#include "core/checks.hpp"

namespace qkv::parallel {

void throw_collective(const char* operation, ErrorCode code, const std::string& value) {
  refuse(operation, value, "every rank, making the same calls in the same order; after a failure, make the ranks anew",
         code);
}

std::string name_ranks(const std::vector<int32_t>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string is_missing(const std::string& ranks, std::chrono::milliseconds timeout) {
  return fmt::format("no {} within {:g} s", ranks, std::chrono::duration<double>(timeout).count());
}

std::string has_left(int32_t rank) { return fmt::format("rank {}, which has left", rank); }

std::string differs(int32_t rank, const char* operation, int64_t row_bytes, int32_t other_rank,
                    const char* other_operation, int64_t other_row_bytes) {
  const std::string bytes = row_bytes < 0 ? fmt::format("more than {}", other_row_bytes) : fmt::format("{}", row_bytes);
  return fmt::format("{} of {} bytes a rank by rank {}, {} of {} bytes a rank by rank {}", operation, bytes, rank,
                     other_operation, other_row_bytes, other_rank);
}

}  // namespace qkv::parallel
