// A batch in short form: "q513s60513_31q1s4k" is one request with 513 new of 60513 keys, and 31 with 1 of 4096.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/batch.hpp"

namespace qkv::tools {

struct BatchText {
  std::vector<int32_t> query_lens;
  std::vector<int32_t> seq_lens;
  std::vector<PrefixGroup> prefix_groups;
};

// Runs joined by '_', each [count]q<new tokens>s<keys>[p<shared keys>]. Numbers may end in k, times 1024. Requests of a
// run with p share their first keys.
BatchText parse_batch(std::string_view text);

// "0-31:8k": requests 0 to 31 share their first 8192 keys.
PrefixGroup parse_prefix_group(std::string_view text);

// The batch as index arrays of its own: each request has pages of its own but for the groups' first keys.
class SyntheticBatch {
 public:
  SyntheticBatch(BatchText text, int32_t page_size);  // 0: no cache
  Batch batch() const;

 private:
  BatchText text_;
  bool has_cache_;
  std::vector<int32_t> query_start_loc_, block_table_;
  int64_t table_width_ = 0;
};

}  // namespace qkv::tools
