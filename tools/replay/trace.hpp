// A trace of real traffic: when each request came, how long its prompt was, how many tokens were generated.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace qkv::replay {

struct TracedRequest {
  double arrival_seconds;    // since the trace's first request
  int32_t context_tokens;    // of the prompt, 1 or more
  int32_t generated_tokens;  // 0 = the prompt is all
  bool operator==(const TracedRequest&) const = default;
};

// CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens in any order, others ignored: the form of the Azure
// LLM inference traces. A time is "2023-11-16 18:17:03.9799600", with or without an offset from UTC, or plain seconds.
// The result is in order of arrival. `name` is what errors call the file.
std::vector<TracedRequest> read_trace(std::istream& text, const std::string& name);
std::vector<TracedRequest> read_trace_file(const std::string& path);

}  // namespace qkv::replay
