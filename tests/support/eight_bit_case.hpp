// Cases with caches of 8-bit elements, and what is computed differently with each granularity of their scales.
#pragma once

#include "support/small_layer.hpp"

namespace qkv::testing {

constexpr KvScales kGranularities[] = {KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head,
                                       KvScales::per_token_head};

inline tools::Case eight_bit_case(KvScales scales, DType dtype) {
  auto c = case_of(8, 4, 64, {1, 5, 70}, {40, 60, 90});
  c.layer.kv_dtype = dtype;
  c.layer.kv_scales = scales;
  return c;
}

// One feature more at a time; `c` ends with all of them.
inline void expect_every_feature_agrees(tools::Case& c) {
  expect_agrees(c);
  c.layer.softcap = 20;
  c.layer.sinks.assign(8, 0.5F);
  c.layer.mask = mask::window(30, 0);
  expect_agrees(c);
  c.layout.interleaved = true;
  c.layer.cache->page_size = 1;
  c.layer.alibi_slopes.assign(8, 0.1F);
  expect_agrees(c);
  c.requests.push_back({2, 5000});  // splits
  c.layer.query_dtype = DType::bf16;
  c.layer.head_dim_v = 24;
  expect_agrees(c);
}

}  // namespace qkv::testing
