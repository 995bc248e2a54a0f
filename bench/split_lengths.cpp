// What batch invariance costs: decode over splits whose length follows from the request alone, as qkv cuts them, beside
// the best single split length for the very batch, which is what a planner that looks at the batch could pick.
//   split_lengths --device cuda        in graphs, over as many caches as keep the L2 cold
//   split_lengths                      the same on the CPU
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "api/engines.hpp"
#include "bench/support/on_device.hpp"
#include "plan/builder.hpp"

namespace qkv::bench {
namespace {

struct Options {
  std::string device = "cpu";
  std::vector<std::string> cases;
  int32_t num_q_heads = 32, num_kv_heads = 8, head_dim = 128, page_size = 16;
  std::string out;  // a folder
};

// "64x4k+1x64k": requests x keys.
std::vector<int32_t> parse_lengths(const std::string& text) {
  std::vector<int32_t> lengths;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('+', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t x = part.find('x');
    if (x == std::string::npos) throw CLI::ValidationError("--case", text + "; allowed: as in 1x64k+255x512");
    const int32_t keys = std::stoi(part.substr(x + 1)) * (part.ends_with('k') ? 1024 : 1);
    lengths.insert(lengths.end(), std::stoi(part.substr(0, x)), keys);
    begin = end + 1;
  }
  return lengths;
}

// A decode step over caches with pages in random order.
class Step {
 public:
  Step(const Options& options, Device device, std::vector<int32_t> lengths)
      : lengths_(std::move(lengths)), num_requests_(static_cast<int32_t>(lengths_.size())) {
    layer_.num_q_heads = options.num_q_heads;
    layer_.num_kv_heads = options.num_kv_heads;
    layer_.head_dim = options.head_dim;
    layer_.query_dtype = layer_.kv_dtype = DType::bf16;
    layer_.cache = CacheSpec{options.page_size};
    engine_ = api::engine_of(device).make_layer(layer_);
    pages_of_request_ = (*std::max_element(lengths_.begin(), lengths_.end()) - 1) / options.page_size + 1;
    int32_t num_pages = 0;
    block_table_.assign(int64_t{num_requests_} * pages_of_request_, 0);
    for (int32_t r = 0; r < num_requests_; ++r) {
      query_start_loc_.push_back(r);
      const int32_t pages = (lengths_[r] - 1) / options.page_size + 1;
      std::iota(&block_table_[r * pages_of_request_], &block_table_[r * pages_of_request_] + pages, num_pages);
      num_pages += pages;
    }
    query_start_loc_.push_back(num_requests_);
    std::vector<int32_t> order(num_pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::minstd_rand(7));
    for (int32_t& page : block_table_) page = order[page];
    const std::initializer_list<int64_t> pages = {num_pages, options.page_size, options.num_kv_heads, options.head_dim};
    // What a graph reads at least: several times any L2.
    constexpr int64_t kColdBytes = int64_t{512} << 20;
    const int64_t bytes = int64_t{4} * num_pages * options.page_size * options.num_kv_heads * options.head_dim;
    num_caches_ = device.kind == DeviceKind::cpu ? 1 : static_cast<int32_t>(kColdBytes / bytes + 1);
    for (int32_t i = 0; i < 2 * num_caches_; ++i) pages_.emplace_back(device, layer_.kv_dtype, pages);
    for (std::optional<Buffer>* tensor : {&query_, &out_}) {
      tensor->emplace(device, layer_.query_dtype,
                      std::initializer_list<int64_t>{num_requests_, options.num_q_heads, options.head_dim});
    }
  }

  int32_t num_caches() const { return num_caches_; }

  // 0: the promised splits.
  plan::PlanData plan(int32_t split_keys, Stream stream) const {
    Batch batch;
    batch.query_start_loc = Tensor::of(query_start_loc_, {num_requests_ + 1});
    batch.seq_lens = Tensor::of(lengths_, {num_requests_});
    batch.block_table = Tensor::of(block_table_, {num_requests_, pages_of_request_});
    const auto cut_request = [&](int32_t q_len, int32_t kv_len) {
      index::RequestCut cut = engine_->cut_request(q_len, kv_len);
      if (split_keys > 0) cut.split_keys = index::whole_tiles(split_keys, cut.tile_kv);
      return cut;
    };
    plan::PlanData plan = plan::build(layer_, batch, cut_request, engine_->device_rules());
    engine_->place(plan, stream);
    return plan;
  }

  void run(const plan::PlanData& plan, int32_t call, Stream stream) const {
    const int32_t cache = call % num_caches_;
    engine_->forward({layer_,
                      plan,
                      query_->view(),
                      pages_[2 * cache].view(),
                      pages_[2 * cache + 1].view(),
                      out_->view(),
                      {},
                      stream,
                      {},
                      {},
                      {},
                      {}});
  }

 private:
  std::vector<int32_t> lengths_;
  int32_t num_requests_;
  LayerSpec layer_;
  std::unique_ptr<plan::LayerEngine> engine_;
  int32_t pages_of_request_ = 0, num_caches_ = 0;
  std::vector<int32_t> query_start_loc_, block_table_;
  std::vector<Buffer> pages_;
  std::optional<Buffer> query_, out_;
};

double seconds_of(const Step& step, const Clock& clock, Device device, int32_t split_keys) {
  const plan::PlanData plan = step.plan(split_keys, clock.stream());
  for (int32_t i = 0; i < step.num_caches(); ++i) step.run(plan, i, clock.stream());
  const auto call = [&](int32_t i) { step.run(plan, i, clock.stream()); };
  if (device.kind == DeviceKind::cuda) return clock.median_in_graph(call, std::max(20, step.num_caches()));
  return clock.median([&] { call(0); }, 3);
}

constexpr int32_t kSplitKeys[] = {256, 512, 1024, 2048, 4096, 8192, index::kNoSplit};

std::string name_of(int32_t split_keys) {
  return split_keys == index::kNoSplit ? "whole" : fmt::format("{}", split_keys);
}

void run(const Options& options) {
  const bool on_gpu = options.device == "cuda";
  const Device device{on_gpu ? DeviceKind::cuda : DeviceKind::cpu, 0};
  const Clock clock(device, 0.5);
  nlohmann::json rows;
  fmt::print("{}/{} heads, D {}, bf16, page {}; us a step\n\n{:<16} {:>9} {:>9}  {:<8} {:>7}   by split length:",
             options.num_q_heads, options.num_kv_heads, options.head_dim, options.page_size, "batch", "promised",
             "best", "of keys", "cost");
  for (const int32_t split_keys : kSplitKeys) fmt::print(" {:>8}", name_of(split_keys));
  fmt::print("\n");
  for (const std::string& text : options.cases) {
    const Step step(options, device, parse_lengths(text));
    const double promised = seconds_of(step, clock, device, 0);
    std::map<std::string, double> all;
    int32_t best = 0;
    double best_seconds = promised;
    for (const int32_t split_keys : kSplitKeys) {
      const double seconds = seconds_of(step, clock, device, split_keys);
      all[name_of(split_keys)] = seconds * 1e6;
      if (seconds < best_seconds) std::tie(best, best_seconds) = std::pair(split_keys, seconds);
    }
    const std::string best_name = best == 0 ? "promised" : name_of(best);
    fmt::print("{:<16} {:>9.2f} {:>9.2f}  {:<8} {:>6.1f}%                   ", text, promised * 1e6, best_seconds * 1e6,
               best_name, 100 * (promised / best_seconds - 1));
    for (const int32_t split_keys : kSplitKeys) fmt::print(" {:>8.2f}", all[name_of(split_keys)]);
    fmt::print("\n");
    std::fflush(stdout);
    rows.push_back({{"case", text},
                    {"promised_us", promised * 1e6},
                    {"best_us", best_seconds * 1e6},
                    {"best_split_keys", best_name},
                    {"us_by_split_keys", all}});
  }
  if (options.out.empty()) return;
  const std::string path = options.out + "/split_lengths.json";
  std::ofstream(path) << rows.dump(1) << "\n";
  fmt::print("\nwritten: {}\n", path);
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  qkv::bench::Options options;
  CLI::App app("Decode with the splits that keep a request's bits, beside the best split length for each batch");
  app.add_option("--device", options.device, "cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--case", options.cases, "Requests x keys, as in 1x64k+255x512 (default: decode's table)");
  app.add_option("--heads", options.num_q_heads, "Query heads")->capture_default_str();
  app.add_option("--kv-heads", options.num_kv_heads, "KV heads")->capture_default_str();
  app.add_option("--head-dim", options.head_dim, "Head size")->capture_default_str();
  app.add_option("--page-size", options.page_size, "Tokens a page")->capture_default_str();
  app.add_option("--out", options.out, "Folder for split_lengths.json");
  CLI11_PARSE(app, argc, argv);
  if (options.cases.empty()) {
    options.cases = options.device == "cuda" ? std::vector<std::string>{"1x1k",  "1x8k",   "1x64k",  "16x8k",
                                                                        "64x4k", "256x1k", "128x8k", "1x64k+255x512"}
                                             : std::vector<std::string>{"1x8k", "16x1k"};
  }
  try {
    qkv::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
