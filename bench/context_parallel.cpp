// Decode steps of a layer whose cache several ranks share: how long, of which so much attention and so much exchange,
// beside the same step on one rank.
//   context_parallel --ranks 2                     threads of this process, on the CPU
//   mpirun -n 2 context_parallel --mpi             processes
//   context_parallel --device cuda                 a rank on each GPU, through NCCL; eager and in graphs
#include "qkv/context_parallel.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <functional>
#include <future>
#include <nlohmann/json.hpp>

#include "bench/support/on_device.hpp"
#include "qkv/cuda.hpp"
#include "qkv/device.hpp"

namespace qkv::bench {
namespace {

struct Options {
  int32_t ranks = 2;
  bool mpi = false;
  std::string device = "cpu";
  std::string kv_dtype;  // bf16, f32, f8e4m3
  std::vector<std::string> cases;
  int32_t num_q_heads = 32, num_kv_heads = 8, head_dim = 128, page_size = 16;
  double seconds = 0.5;
  std::string out;  // a folder
};

// num_requests x context keys, one new token each.
struct Shape {
  int32_t num_requests;
  int32_t context;
};

Shape parse_shape(const std::string& text) {
  const size_t x = text.find('x');
  const bool thousands = text.ends_with('k');
  if (x == std::string::npos) throw CLI::ValidationError("--case", text + "; allowed: requests x keys, as in 1x128k");
  return {std::stoi(text.substr(0, x)), std::stoi(text.substr(x + 1)) * (thousands ? 1024 : 1)};
}

DType dtype_of(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw CLI::ValidationError("--kv-dtype", name + "; allowed: f32, f16, bf16 or f8e4m3");
}

LayerSpec layer_of(const Options& options) {
  LayerSpec layer;
  layer.num_q_heads = options.num_q_heads;
  layer.num_kv_heads = options.num_kv_heads;
  layer.head_dim = options.head_dim;
  layer.kv_dtype = dtype_of(options.kv_dtype);
  layer.cache = CacheSpec{options.page_size};
  layer.query_dtype = layer.kv_dtype;
  if (size_bytes(layer.kv_dtype) == 1) {
    layer.query_dtype = DType::bf16;
    layer.kv_scales = KvScales::per_tensor;
  }
  return layer;
}

// A step of one rank: its part of every context, in pages in order.
class Step {
 public:
  Step(const LayerSpec& layer, const Shape& shape, const Shard& shard, Device device)
      : shape_(shape),
        pages_of_request_((shard.max_local_length(shape.context + 1) + layer.cache->page_size - 1) /
                          layer.cache->page_size),
        key_pages_(device, layer.kv_dtype,
                   {int64_t{shape.num_requests} * pages_of_request_, layer.cache->page_size, layer.num_kv_heads,
                    layer.head_dim}),
        value_pages_(device, layer.kv_dtype,
                     {int64_t{shape.num_requests} * pages_of_request_, layer.cache->page_size, layer.num_kv_heads,
                      layer.head_dim}),
        scale_(device, DType::f32, {1}),
        query_(device, layer.query_dtype, {shape.num_requests, layer.num_q_heads, layer.head_dim}),
        key_(device, layer.query_dtype, {shape.num_requests, layer.num_kv_heads, layer.head_dim}),
        value_(device, layer.query_dtype, {shape.num_requests, layer.num_kv_heads, layer.head_dim}),
        out_(device, layer.query_dtype, {shape.num_requests, layer.num_q_heads, layer.head_dim}) {
    for (int32_t r = 0; r <= shape.num_requests; ++r) query_start_loc_.push_back(r);
    seq_lens_.assign(shape.num_requests, shape.context + 1);
    for (int32_t page = 0; page < shape.num_requests * pages_of_request_; ++page) block_table_.push_back(page);
    is_scaled_ = layer.kv_scales != KvScales::none;
  }

  Batch batch() const {
    Batch batch;
    batch.query_start_loc = Tensor::of(query_start_loc_, {shape_.num_requests + 1});
    batch.seq_lens = Tensor::of(seq_lens_, {shape_.num_requests});
    batch.block_table = Tensor::of(block_table_, {shape_.num_requests, pages_of_request_});
    return batch;
  }
  KvCache cache() const {
    const Tensor scale = is_scaled_ ? scale_.view() : Tensor{};
    return {key_pages_.view(), value_pages_.view(), scale, scale};
  }
  Tensor query(int32_t num_heads) const { return query_.view().slice(1, 0, num_heads); }
  Tensor out(int32_t num_heads) const { return out_.view().slice(1, 0, num_heads); }
  const Tensor& key() const { return key_.view(); }
  const Tensor& value() const { return value_.view(); }

 private:
  Shape shape_;
  int32_t pages_of_request_;
  Buffer key_pages_, value_pages_, scale_, query_, key_, value_, out_;
  std::vector<int32_t> query_start_loc_, seq_lens_, block_table_;
  bool is_scaled_ = false;
};

struct Seconds {
  double alone = 0;      // one rank with the whole cache
  double attention = 0;  // over the rank's part, all heads
  double whole = 0;      // attention, exchange, new tokens, merge
  double attention_in_graph = 0, whole_in_graph = 0, alone_in_graph = 0;
};

struct Timed {
  double eager = 0, in_graph = 0;
};

Timed time(const Clock& clock, const std::function<void()>& call, int32_t num_calls, bool on_gpu) {
  call();
  Timed timed;
  timed.eager = clock.median(call, num_calls);
  if (on_gpu) timed.in_graph = clock.median_in_graph([&](int32_t) { call(); }, 20);
  return timed;
}

Timed time_alone(const Options& options, const Shape& shape, Device device) {
  const LayerSpec layer = layer_of(options);
  const Clock clock(device, options.seconds);
  const Step step(layer, shape, {}, device);
  const Attention attention(layer, device);
  const Plan plan = attention.plan(step.batch(), clock.stream());
  const auto call = [&] {
    attention.forward(step.query(layer.num_q_heads), step.cache(), plan, step.out(layer.num_q_heads), {},
                      clock.stream());
  };
  call();
  return time(clock, call, clock.calls_for(clock.median(call, 1)), device.kind == DeviceKind::cuda);
}

// `num_calls`: agreed on by the ranks.
Seconds time_rank(const Options& options, const Shape& shape, StateExchange exchange,
                  const std::shared_ptr<Collectives>& collectives, double seconds_alone) {
  const Device device = collectives->device();
  const bool on_gpu = device.kind == DeviceKind::cuda;
  const LayerSpec layer = layer_of(options);
  const Clock clock(device, options.seconds);
  const ContextParallel attention({layer, 1, exchange}, collectives);
  const Step step(layer, shape, attention.shard(), device);
  const ContextParallelPlan plan = attention.plan(step.batch(), clock.stream());
  const Buffer workspace(device, DType::i32, {plan.workspace_bytes() / 4});
  const int32_t heads = attention.num_heads();
  const int32_t num_calls = clock.calls_for(seconds_alone / collectives->num_ranks());
  Seconds seconds;
  const Timed whole = time(
      clock,
      [&] {
        attention.forward(step.query(heads), step.key(), step.value(), step.cache(), plan, workspace.view(),
                          step.out(heads), {}, clock.stream(), {}, clock.side_stream());
      },
      num_calls, on_gpu);
  LayerSpec own = layer;
  own.key_run = KeyRun::context;
  own.shard = attention.shard();
  const Attention context(own, device);
  const Plan context_plan = context.plan(step.batch(), clock.stream());
  const Timed part = time(
      clock,
      [&] {
        context.forward(step.query(layer.num_q_heads), step.cache(), context_plan, step.out(layer.num_q_heads), {},
                        clock.stream());
      },
      num_calls, on_gpu);
  seconds.whole = whole.eager;
  seconds.whole_in_graph = whole.in_graph;
  seconds.attention = part.eager;
  seconds.attention_in_graph = part.in_graph;
  return seconds;
}

// Received by a rank for each new token of a layer.
int64_t bytes_per_token(const Options& options, StateExchange exchange, int32_t num_ranks) {
  const LayerSpec layer = layer_of(options);
  const int64_t others = num_ranks - 1;
  const int64_t element = size_bytes(layer.query_dtype);
  const int64_t all_heads = layer.num_q_heads;
  const int64_t heads = all_heads / num_ranks;
  const int64_t dim = layer.head_dim;
  if (exchange == StateExchange::all_gather) return others * all_heads * (dim * element + 4);
  const int64_t queries = others * heads * dim * element;
  if (exchange == StateExchange::all_to_all) return queries + others * heads * (dim * element + 4);
  return queries + others * all_heads * 4 + others * heads * dim * 4;
}

class Table {
 public:
  Table(const Options& options, int32_t num_ranks, std::string carrier) : options_(options), num_ranks_(num_ranks) {
    rows_["ranks"] = num_ranks;
    rows_["carrier"] = carrier;
    fmt::print(
        "{} ranks through {}, {}/{} heads, D {}, {} cache, page {}, one new token a request\n\n{}\n", num_ranks,
        carrier, options.num_q_heads, options.num_kv_heads, options.head_dim, options.kv_dtype, options.page_size,
        "case       exchange         bytes/token   one rank us   attention us   whole us   over attention   speed-up");
  }

  void add(const std::string& shape, StateExchange exchange, const Seconds& s) {
    add_row(shape, exchange, "", s.alone, s.attention, s.whole);
    if (s.whole_in_graph > 0) {
      add_row(shape, exchange, " graph", s.alone_in_graph, s.attention_in_graph, s.whole_in_graph);
    }
  }

  void write() const {
    if (options_.out.empty()) return;
    const std::string path = options_.out + "/context_parallel.json";
    std::ofstream(path) << rows_.dump(1) << "\n";
    fmt::print("\nwritten: {}\n", path);
  }

 private:
  void add_row(const std::string& shape, StateExchange exchange, const char* how, double alone, double attention,
               double whole) {
    const int64_t bytes = bytes_per_token(options_, exchange, num_ranks_);
    fmt::print("{:<10} {:<16} {:>11} {:>13.1f} {:>14.1f} {:>10.1f} {:>15.0f}% {:>10.2f}\n", shape,
               fmt::format("{}{}", to_string(exchange), how), bytes, alone * 1e6, attention * 1e6, whole * 1e6,
               100 * (whole / attention - 1), alone / whole);
    rows_["rows"].push_back({{"case", shape},
                             {"exchange", fmt::format("{}{}", to_string(exchange), how)},
                             {"bytes_per_token", bytes},
                             {"one_rank_us", alone * 1e6},
                             {"attention_us", attention * 1e6},
                             {"whole_us", whole * 1e6}});
  }

  const Options& options_;
  int32_t num_ranks_;
  nlohmann::json rows_;
};

// A thread for each rank; what one of them throws is thrown here.
void run_ranks(size_t num_ranks, const std::function<void(size_t)>& run_rank) {
  std::vector<std::future<void>> ranks;
  for (size_t r = 0; r < num_ranks; ++r) ranks.push_back(std::async(std::launch::async, run_rank, r));
  for (std::future<void>& rank : ranks) rank.get();
}

// All ranks that this process has, as threads; the slowest one's times.
Seconds time_ranks(const Options& options, const Shape& shape, StateExchange exchange,
                   const std::vector<std::shared_ptr<Collectives>>& ranks, double seconds_alone) {
  std::vector<Seconds> of(ranks.size());
  run_ranks(ranks.size(), [&](size_t r) { of[r] = time_rank(options, shape, exchange, ranks[r], seconds_alone); });
  Seconds slowest = of[0];
  for (const Seconds& one : of) {
    slowest.whole = std::max(slowest.whole, one.whole);
    slowest.attention = std::max(slowest.attention, one.attention);
    slowest.whole_in_graph = std::max(slowest.whole_in_graph, one.whole_in_graph);
    slowest.attention_in_graph = std::max(slowest.attention_in_graph, one.attention_in_graph);
  }
  return slowest;
}

std::vector<std::shared_ptr<Collectives>> make_ranks(const Options& options) {
  if (options.mpi) return {mpi_ranks()};
  if (options.device == "cpu") return in_process_ranks(options.ranks);
  const int32_t num_ranks = num_cuda_devices();
  const NcclUniqueId id = nccl_unique_id();
  std::vector<std::shared_ptr<Collectives>> ranks(num_ranks);
  run_ranks(ranks.size(), [&](size_t r) {
    const auto rank = static_cast<int32_t>(r);
    ranks[r] = nccl_ranks(id, num_ranks, rank, rank);
  });
  return ranks;
}

// The processes wait for each other here, and agree on how many calls are to come.
double from_rank_0(double own, Collectives& ranks) {
  std::vector<float> all(ranks.num_ranks());
  const auto value = static_cast<float>(own);
  ranks.all_gather(Tensor::contiguous(&value, DType::f32, {1}),
                   Tensor::contiguous(all.data(), DType::f32, {ranks.num_ranks(), 1}));
  return all[0];
}

void run(const Options& options) {
  const auto ranks = make_ranks(options);
  const Device device = ranks[0]->device();
  const bool on_gpu = device.kind == DeviceKind::cuda;
  const bool is_speaker = ranks[0]->rank() == 0;
  std::optional<Table> table;
  if (is_speaker) {
    table.emplace(options, ranks[0]->num_ranks(), options.mpi ? "MPI" : on_gpu ? "NCCL" : "threads");
  }
  for (const std::string& text : options.cases) {
    const Shape shape = parse_shape(text);
    Timed alone;
    if (is_speaker) alone = time_alone(options, shape, device);
    const double agreed = options.mpi ? from_rank_0(alone.eager, *ranks[0]) : alone.eager;
    for (const StateExchange exchange :
         {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
      Seconds seconds = time_ranks(options, shape, exchange, ranks, agreed);
      seconds.alone = alone.eager;
      seconds.alone_in_graph = alone.in_graph;
      if (table) table->add(text, exchange, seconds);
    }
  }
  if (table) table->write();
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  qkv::bench::Options options;
  CLI::App app("Decode steps over several ranks, beside one");
  app.add_option("--ranks", options.ranks, "Threads of this process, on the CPU")->capture_default_str();
  app.add_flag("--mpi", options.mpi, "The processes that mpirun started");
  app.add_option("--device", options.device, "cpu, or cuda: a rank on each GPU")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--kv-dtype", options.kv_dtype, "Of the cache (f32; on GPUs bf16)");
  app.add_option("--case", options.cases, "Requests x keys of context (1x8k 8x4k; on GPUs 1x128k 8x64k 64x8k)");
  app.add_option("--heads", options.num_q_heads, "Query heads of all ranks")->capture_default_str();
  app.add_option("--kv-heads", options.num_kv_heads, "KV heads")->capture_default_str();
  app.add_option("--head-dim", options.head_dim, "Head size")->capture_default_str();
  app.add_option("--page-size", options.page_size, "Tokens a page")->capture_default_str();
  app.add_option("--seconds", options.seconds, "For each number")->capture_default_str();
  app.add_option("--out", options.out, "Folder for context_parallel.json");
  CLI11_PARSE(app, argc, argv);
  const bool on_gpu = options.device == "cuda";
  if (options.kv_dtype.empty()) options.kv_dtype = on_gpu ? "bf16" : "f32";
  if (options.cases.empty()) {
    options.cases = on_gpu ? std::vector<std::string>{"1x128k", "8x64k", "64x8k"}
                           : std::vector<std::string>{"1x8k", "1x64k", "8x4k"};
  }
  try {
    qkv::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
