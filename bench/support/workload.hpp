// A layer with its batch, cache and tensors, of random numbers, ready to run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qkv/qkv.hpp"

namespace qkv::bench {

// Bytes of `count` numbers of size 1, the same in every run.
std::vector<std::byte> random_values(int64_t count, DType dtype);

struct Lengths {
  int32_t q_len;
  int32_t kv_len;
};

// head_major: [page][head][token][key|value]; token_major: [page][token][head][key|value]; dense: no cache.
enum class Layout { head_major, token_major, dense };

class Workload {
 public:
  // Members of a prefix group share whole pages; the planner finds the groups.
  Workload(LayerSpec layer, const std::vector<Lengths>& requests, Layout layout,
           const std::vector<PrefixGroup>& prefix_groups = {});

  // Plans again, with another use of the shared prefixes.
  void plan(PrefixSharing sharing, bool keeps_bits = true, const std::vector<PrefixGroup>& given_groups = {});
  void forward() const;
  void update_cache() const;
  int64_t num_tokens() const { return query_start_loc_.back(); }
  // Bytes of keys and values that a forward reads once, each request's counted.
  int64_t cache_bytes() const;

 private:
  int64_t fill_block_table(int64_t width, int64_t page_size, const std::vector<PrefixGroup>& prefix_groups);

  LayerSpec layer_;
  Layout layout_;
  int64_t num_keys_ = 0;
  std::vector<int32_t> query_start_loc_, seq_lens_, block_table_;
  std::vector<int64_t> slot_mapping_;
  std::vector<std::byte> query_, key_, value_, out_;
  KvCache cache_;
  Batch batch_;
  std::unique_ptr<Attention> attention_;
  std::unique_ptr<Plan> plan_;
};

}  // namespace qkv::bench
