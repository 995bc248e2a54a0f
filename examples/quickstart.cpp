// One decode step of two requests over a paged cache: plan, write the new keys and values, attend.
#include <cstdio>

#include "qkv/qkv.hpp"

int main() {
  using qkv::Tensor;
  const qkv::Attention attention({.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 64, .cache = qkv::CacheSpec{16}});
  std::vector<int32_t> query_start_loc = {0, 1, 2}, seq_lens = {5, 20}, block_table = {3, -1, 0, 2};
  std::vector<int64_t> slot_mapping = {3 * 16 + 4, 2 * 16 + 3};  // token 4 of request 0 and token 19 of request 1
  const qkv::Plan plan = attention.plan({.query_start_loc = Tensor::of(query_start_loc, {3}),
                                         .seq_lens = Tensor::of(seq_lens, {2}),
                                         .block_table = Tensor::of(block_table, {2, 2}),
                                         .slot_mapping = Tensor::of(slot_mapping, {2})});
  std::vector<float> pages(4 * 2 * 16 * 128, 0.3F);  // [page][KV head][token][key | value]
  const auto cache = qkv::KvCache::from_interleaved(Tensor::of(pages, {4, 2, 16, 128}), 64);
  std::vector<float> query(2 * 8 * 64, 0.1F), key(2 * 2 * 64, 0.2F), value(2 * 2 * 64, 0.8F), out(2 * 8 * 64);
  attention.update_cache(Tensor::of(key, {2, 2, 64}), Tensor::of(value, {2, 2, 64}), cache, plan);
  attention.forward(Tensor::of(query, {2, 8, 64}), cache, plan, Tensor::of(out, {2, 8, 64}));
  std::printf("%srequest 0: %.3f, request 1: %.3f\n", plan.dump().c_str(), out[0], out[8 * 64]);
}
