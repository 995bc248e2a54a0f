// A layer with its batch, cache and tensors, of random numbers, ready to run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qkv/qkv.hpp"

namespace qkv::bench {

struct Lengths {
  int32_t q_len;
  int32_t kv_len;
};

// head_major: [page][head][token][key|value]; token_major: [page][token][head][key|value]; dense: no cache.
enum class Layout { head_major, token_major, dense };

class Workload {
 public:
  Workload(LayerSpec layer, const std::vector<Lengths>& requests, Layout layout);

  void forward() const;
  void update_cache() const;
  int64_t num_tokens() const { return query_start_loc_.back(); }
  int64_t num_keys() const { return num_keys_; }
  // Bytes of keys and values that a forward reads once.
  int64_t cache_bytes() const;

 private:
  LayerSpec layer_;
  Layout layout_;
  int64_t num_keys_ = 0;
  std::vector<int32_t> query_start_loc_, seq_lens_, block_table_;
  std::vector<int64_t> slot_mapping_;
  std::vector<std::byte> query_, key_, value_, out_;
  KvCache cache_;
  std::unique_ptr<Attention> attention_;
  std::unique_ptr<Plan> plan_;
};

}  // namespace qkv::bench
