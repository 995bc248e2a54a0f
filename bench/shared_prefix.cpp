// Decode steps of requests that share their first keys, planning included, in steps a second: with what the planner
// chooses (qkv), with every whole split shared (always), the same with leave to change bits, and without sharing.
#include <fmt/format.h>

#include <numeric>

#include "bench/support/report.hpp"
#include "bench/support/workload.hpp"

namespace qkv::bench {
namespace {

std::vector<int32_t> requests_between(int32_t begin, int32_t end) {
  std::vector<int32_t> requests(end - begin);
  std::iota(requests.begin(), requests.end(), begin);
  return requests;
}

std::string short_number(int32_t n) { return n % 1024 == 0 ? fmt::format("{}k", n / 1024) : fmt::format("{}", n); }

void add_sharing(Suite& suite, const std::string& name, int32_t num_requests, int32_t keys,
                 std::vector<PrefixGroup> groups) {
  suite.add_case(name + " h32/8 d128 page16 bf16", "steps/s", [=] {
    LayerSpec layer;
    layer.num_q_heads = 32;
    layer.num_kv_heads = 8;
    layer.head_dim = 128;
    layer.query_dtype = layer.kv_dtype = DType::bf16;
    layer.cache = CacheSpec{16};
    auto work =
        std::make_shared<Workload>(layer, std::vector<Lengths>(num_requests, {1, keys}), Layout::head_major, groups);
    const auto contestant = [&](const char* of, PrefixSharing sharing, bool keeps_bits = true) {
      return Contestant{of, 1.0, [work, sharing, keeps_bits] {
                          work->plan(sharing, keeps_bits);
                          work->forward();
                        }};
    };
    std::vector<Contestant> list = {
        contestant("qkv", PrefixSharing::automatic), contestant("always", PrefixSharing::always),
        contestant("other bits", PrefixSharing::always, false), contestant("off", PrefixSharing::off)};
    if (groups.size() > 1) {
      list.push_back({"outermost group only", 1.0, [work, outermost = groups.front()] {
                        work->plan(PrefixSharing::automatic, true, {outermost});
                        work->forward();
                      }});
    }
    return list;
  });
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv::bench;
  Suite suite("shared_prefix");
  add_sharing(suite, "64 x (8k shared + 512)", 64, 8704, {{requests_between(0, 64), 8192}});
  add_sharing(suite, "64 x (4k shared, 4k by halves, + 512)", 64, 8704,
              {{requests_between(0, 64), 4096}, {requests_between(0, 32), 8192}, {requests_between(32, 64), 8192}});
  for (const int32_t shared : {512, 4096, 32768}) {
    for (const int32_t requests : {1, 8, 64, 256}) {
      add_sharing(suite, fmt::format("{} x ({} shared + 512)", requests, short_number(shared)), requests, shared + 512,
                  {{requests_between(0, requests), shared}});
    }
  }
  return suite.run(argc, argv);
}
