// What is said about ranks that fail, in the same words by every engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "qkv/status.hpp"

namespace qkv::parallel {

// A Collectives' call that fails: its name, what was found.
[[noreturn]] void throw_collective(const char* operation, ErrorCode code, const std::string& value);

// "rank 2", "ranks 1, 3"
std::string name_ranks(const std::vector<int32_t>& ranks);
// "no rank 2 within 0.5 s"
std::string is_missing(const std::string& ranks, std::chrono::milliseconds timeout);
// "rank 2, which has left"
std::string has_left(int32_t rank);
// "all_gather of 32 bytes a rank by rank 1, reduce_scatter of 64 bytes a rank by rank 0". row_bytes < 0: more than
// other_row_bytes, by an unknown number.
std::string differs(int32_t rank, const char* operation, int64_t row_bytes, int32_t other_rank,
                    const char* other_operation, int64_t other_row_bytes);

}  // namespace qkv::parallel
