// Prefill in GFLOP/s (4·queries·keys·head_dim·heads, half of it where causal) against OpenBLAS's SGEMM of the same run,
// decode in GB/s of keys and values against a plain read loop over as many bytes.
#include <fmt/format.h>

#include "bench/support/limits.hpp"
#include "bench/support/report.hpp"
#include "bench/support/workload.hpp"

namespace qkv::bench {
namespace {

LayerSpec layer_of(int32_t q_heads, int32_t kv_heads, int32_t dim, DType kv_dtype, bool causal = true) {
  LayerSpec layer;
  layer.num_q_heads = q_heads;
  layer.num_kv_heads = kv_heads;
  layer.head_dim = dim;
  layer.query_dtype = kv_dtype;
  layer.kv_dtype = kv_dtype;
  layer.mask = causal ? mask::causal() : mask::everything();
  return layer;
}

std::vector<Contestant> join(std::vector<Contestant> list, std::vector<Contestant> more) {
  list.insert(list.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  return list;
}

void add_prefill(Suite& suite, int32_t q_heads, int32_t kv_heads, int32_t dim, int32_t tokens, bool causal, DType dtype,
                 bool with_naive, const std::string& suffix = "") {
  const std::string name = fmt::format("prefill d{} s{} {} h{}/{} {}{}", dim, tokens, causal ? "causal" : "full",
                                       q_heads, kv_heads, to_string(dtype), suffix);
  suite.add_case(name, "GFLOP/s", [=] {
    const double gflop = 4e-9 * tokens * tokens * dim * q_heads * (causal ? 0.5 : 1.0);
    auto work = std::make_shared<Workload>(layer_of(q_heads, kv_heads, dim, dtype, causal),
                                           std::vector<Lengths>{{tokens, tokens}}, Layout::dense);
    std::vector<Contestant> list = {{"qkv", gflop, [work] { work->forward(); }}};
    list = join(std::move(list), sgemm_limit());
    if (with_naive) list = join(std::move(list), naive_attention(tokens, q_heads, kv_heads, dim, causal, gflop));
    return list;
  });
}

void add_decode(Suite& suite, int32_t requests, int32_t keys, int32_t q_heads, int32_t kv_heads, int32_t dim,
                int32_t page_size, DType dtype, Layout layout) {
  const std::string name =
      fmt::format("decode {}x{} h{}/{} d{} page{} {} {}", requests,
                  keys % 1024 == 0 ? fmt::format("{}k", keys / 1024) : fmt::format("{}", keys), q_heads, kv_heads, dim,
                  page_size, to_string(dtype), layout == Layout::head_major ? "head-major" : "token-major");
  suite.add_case(name, "GB/s", [=] {
    LayerSpec layer = layer_of(q_heads, kv_heads, dim, dtype);
    layer.cache = CacheSpec{page_size};
    auto work = std::make_shared<Workload>(layer, std::vector<Lengths>(requests, {1, keys}), layout);
    const auto bytes = static_cast<double>(work->cache_bytes());
    return std::vector<Contestant>{{"qkv", bytes * 1e-9, [work] { work->forward(); }}, read_limit(work->cache_bytes())};
  });
}

void add_mixed(Suite& suite) {
  suite.add_case("mixed 512 of 2k + 31x1 of 4k h32/8 d128 page16 bf16", "GFLOP/s", [] {
    LayerSpec layer = layer_of(32, 8, 128, DType::bf16);
    layer.cache = CacheSpec{16};
    std::vector<Lengths> requests(31, {1, 4096});
    requests.push_back({512, 2048});
    auto work = std::make_shared<Workload>(layer, requests, Layout::head_major);
    const double pairs = 31.0 * 4096 + 512.0 * (2048 - 512) + 512.0 * 512 / 2;
    return join({{"qkv", 4e-9 * pairs * 128 * 32, [work] { work->forward(); }}}, sgemm_limit());
  });
}

void add_one_thread(Suite& suite) {
  suite.add_case("prefill d128 s2048 full h16/16 f32, peer: qkv on 1 thread", "GFLOP/s", [] {
    const double gflop = 4e-9 * 2048 * 2048 * 128 * 16;
    auto work = std::make_shared<Workload>(layer_of(16, 16, 128, DType::f32, false), std::vector<Lengths>{{2048, 2048}},
                                           Layout::dense);
    return std::vector<Contestant>{{"qkv", gflop, [work] { work->forward(); }}, {"qkv on 1 thread", gflop, [work] {
                                                                                   set_num_threads(1);
                                                                                   work->forward();
                                                                                   set_num_threads(0);
                                                                                 }}};
  });
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv;
  using namespace qkv::bench;
  Suite suite("forward");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int32_t dim : {64, 128}) {
      for (const bool causal : {false, true}) {
        add_prefill(suite, 16, 16, dim, 4096, causal, dtype, dtype == DType::f32);
      }
    }
  }
  for (const int32_t tokens : {128, 512, 2048, 8192}) add_prefill(suite, 32, 8, 128, tokens, true, DType::bf16, true);
  add_one_thread(suite);
  for (const Layout layout : {Layout::head_major, Layout::token_major}) {
    add_decode(suite, 8, 4096, 32, 8, 128, 16, DType::bf16, layout);
    add_decode(suite, 64, 4096, 32, 8, 128, 16, DType::bf16, layout);
  }
  add_decode(suite, 64, 4096, 32, 8, 128, 16, DType::f16, Layout::head_major);
  add_decode(suite, 32, 4096, 32, 8, 128, 16, DType::f32, Layout::head_major);
  add_decode(suite, 64, 4096, 64, 8, 128, 64, DType::bf16, Layout::head_major);
  add_decode(suite, 1, 65536, 32, 8, 128, 16, DType::bf16, Layout::head_major);
  add_mixed(suite);
  return suite.run(argc, argv);
}
