// The small calls, in GB/s of bytes read and written, against a plain copy of as many bytes.
#include "bench/support/limits.hpp"
#include "bench/support/report.hpp"
#include "bench/support/workload.hpp"

namespace qkv::bench {
namespace {

void add_cache_write(Suite& suite, DType from, DType to) {
  const int32_t tokens = 8192;
  suite.add_case(
      "cache_write 8k h8 d128 page16 " + std::string(to_string(from)) + " to " + std::string(to_string(to)), "GB/s",
      [=] {
        LayerSpec layer;
        layer.num_q_heads = 8;
        layer.num_kv_heads = 8;
        layer.head_dim = 128;
        layer.query_dtype = from;
        layer.kv_dtype = to;
        layer.cache = CacheSpec{16};
        auto work = std::make_shared<Workload>(layer, std::vector<Lengths>{{tokens, tokens}}, Layout::token_major);
        const int64_t bytes = int64_t{tokens} * 8 * 256 * (size_bytes(from) + size_bytes(to));
        return std::vector<Contestant>{{"qkv", static_cast<double>(bytes) * 1e-9, [work] { work->update_cache(); }},
                                       copy_limit(bytes)};
      });
}

// Writes that quantise: by one scale for all, or by one a token and head, which is chosen from the row.
void add_quantising_write(Suite& suite, DType from, DType to, KvScales scales) {
  constexpr int64_t kTokens = 8192, kHeads = 8, kDim = 128, kPageSize = 16, kPages = kTokens / kPageSize;
  const bool per_token = scales == KvScales::per_token_head;
  suite.add_case("cache_write 8k h8 d128 page16 " + std::string(to_string(from)) + " to " + std::string(to_string(to)) +
                     (per_token ? " scale chosen" : " scale given"),
                 "GB/s", [=] {
                   struct Tensors {
                     std::vector<std::byte> rows, pages;
                     std::vector<float> scales;
                     std::vector<int64_t> slots;
                   };
                   auto own = std::make_shared<Tensors>();
                   own->rows = random_values(kTokens * kHeads * kDim, from);
                   own->pages.resize(2 * kTokens * kHeads * kDim);
                   own->scales.resize(per_token ? kTokens * kHeads : 1, 0.03F);
                   for (int64_t i = 0; i < kTokens; ++i) own->slots.push_back(kTokens - 1 - i);
                   const Tensor rows = Tensor::contiguous(own->rows.data(), from, {kTokens, kHeads, kDim});
                   const auto pages = [&](int64_t side) {
                     return Tensor::contiguous(own->pages.data() + side * kTokens * kHeads * kDim, to,
                                               {kPages, kPageSize, kHeads, kDim});
                   };
                   const Tensor scale =
                       per_token ? Tensor::of(own->scales, {kPages, kPageSize, kHeads}) : Tensor::of(own->scales, {1});
                   const KvCache cache{pages(0), pages(1), scale, scale};
                   const Tensor slots = Tensor::contiguous(own->slots.data(), DType::i64, {kTokens});
                   const int64_t bytes = kTokens * kHeads * 2 * kDim * (size_bytes(from) + size_bytes(to));
                   return std::vector<Contestant>{
                       {"qkv", static_cast<double>(bytes) * 1e-9,
                        [own, rows, cache, slots] { cache_write(rows, rows, cache, slots); }},
                       copy_limit(bytes)};
                 });
}

void add_merge(Suite& suite, int32_t num_states) {
  suite.add_case("merge " + std::to_string(num_states) + " states 4k tokens h32 d128 f32", "GB/s", [=] {
    constexpr int64_t kTokens = 4096;
    constexpr int64_t kHeads = 32;
    constexpr int64_t kDim = 128;
    auto out = std::make_shared<std::vector<float>>((num_states + 1) * kTokens * kHeads * kDim, 1.0F);
    auto lse = std::make_shared<std::vector<float>>((num_states + 1) * kTokens * kHeads, 0.5F);
    const auto state = [=](int64_t s) {
      return State{Tensor::contiguous(out->data() + s * kTokens * kHeads * kDim, DType::f32, {kTokens, kHeads, kDim}),
                   Tensor::contiguous(lse->data() + s * kTokens * kHeads, DType::f32, {kHeads, kTokens})};
    };
    std::vector<State> states;
    for (int64_t s = 0; s < num_states; ++s) states.push_back(state(s));
    const State merged = state(num_states);
    const int64_t bytes = (num_states + 1) * kTokens * kHeads * (kDim + 1) * 4;
    return std::vector<Contestant>{{"qkv", static_cast<double>(bytes) * 1e-9,
                                    [out, lse, states, merged] { merge_states(states, merged.out, merged.lse); }},
                                   copy_limit(bytes)};
  });
}

// Planning, in requests a second: what a step pays before its first layer.
void add_plan(Suite& suite, const std::string& name, int32_t num_requests, int32_t keys, const Mask& mask) {
  suite.add_case("plan " + name, "krequest/s", [=] {
    struct Inputs {
      std::vector<int32_t> query_start_loc = {0}, seq_lens, block_table;
    };
    auto inputs = std::make_shared<Inputs>();
    const int32_t num_pages = (keys + 15) / 16;
    for (int32_t r = 0; r < num_requests; ++r) {
      inputs->query_start_loc.push_back(r + 1);
      inputs->seq_lens.push_back(keys);
      for (int32_t i = 0; i < num_pages; ++i) inputs->block_table.push_back(i);
    }
    LayerSpec layer;
    layer.num_q_heads = 32;
    layer.num_kv_heads = 8;
    layer.head_dim = 128;
    layer.cache = CacheSpec{16};
    layer.mask = mask;
    auto attention = std::make_shared<Attention>(layer);
    Batch batch;
    batch.query_start_loc = Tensor::of(inputs->query_start_loc, {num_requests + 1});
    batch.seq_lens = Tensor::of(inputs->seq_lens, {num_requests});
    batch.block_table = Tensor::of(inputs->block_table, {num_requests, num_pages});
    return std::vector<Contestant>{
        {"qkv", num_requests * 1e-3, [inputs, attention, batch] { attention->plan(batch); }}};
  });
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv;
  using namespace qkv::bench;
  Suite suite("ops");
  add_cache_write(suite, DType::bf16, DType::bf16);
  add_cache_write(suite, DType::f32, DType::bf16);
  add_cache_write(suite, DType::f32, DType::f16);
  for (const KvScales scales : {KvScales::per_tensor, KvScales::per_token_head}) {
    add_quantising_write(suite, DType::bf16, DType::f8e4m3, scales);
    add_quantising_write(suite, DType::bf16, DType::i8, scales);
    add_quantising_write(suite, DType::f32, DType::f8e5m2, scales);
  }
  add_merge(suite, 2);
  add_merge(suite, 8);
  add_plan(suite, "256x8k causal", 256, 8192, mask::causal());
  add_plan(suite, "4096x1k causal", 4096, 1024, mask::causal());
  add_plan(suite, "16x128k window 128", 16, 131072, mask::sliding_window(128));
  return suite.run(argc, argv);
}
