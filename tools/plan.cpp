#include "plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "batch_text.hpp"
#include "number.hpp"
#include "qkv/device.hpp"
#include "qkv/plan.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

struct PlanArguments {
  std::string batch;
  std::vector<std::string> shared;  // first-last:keys
  std::string device = "cpu";
  int32_t threads = 0;  // 0: the default
  std::string heads = "32/8";
  int32_t head_dim = 128;
  int32_t head_dim_v = 0;
  int32_t page = 16;
  std::string dtype = "bf16";
  std::string mask = "causal";
  std::string sharing = "automatic";
  bool other_bits = false;
  int32_t items = 10;
  std::string json;
  std::string png;
};

LayerSpec layer_of(const PlanArguments& arguments) {
  LayerSpec layer;
  const std::string& heads = arguments.heads;
  const size_t slash = heads.find('/');
  const auto read = [&](std::string_view digits, int32_t& number) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      throw Error(ErrorCode::invalid_argument, "--heads", heads, "query heads/KV heads, as in 32/8");
    }
  };
  read(std::string_view(heads).substr(0, slash), layer.num_q_heads);
  layer.num_kv_heads = layer.num_q_heads;
  if (slash != std::string::npos) read(std::string_view(heads).substr(slash + 1), layer.num_kv_heads);
  layer.head_dim = arguments.head_dim;
  layer.head_dim_v = arguments.head_dim_v;
  const std::map<std::string, DType> dtypes = {{"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}};
  layer.query_dtype = layer.kv_dtype = dtypes.at(arguments.dtype);
  if (arguments.page > 0) layer.cache = CacheSpec{arguments.page};
  layer.mask = parse_mask(arguments.mask);
  return layer;
}

PlanReport report_of(const PlanArguments& arguments, const LayerSpec& layer) {
  BatchText text = parse_batch(arguments.batch);
  for (const std::string& shared : arguments.shared) {
    text.prefix_groups.push_back(parse_prefix_group(shared));
    if (const auto count = static_cast<int32_t>(text.query_lens.size());
        text.prefix_groups.back().requests.back() >= count) {
      throw Error(ErrorCode::invalid_argument, "--shared", shared, fmt::format("requests 0 to {}", count - 1));
    }
  }
  const SyntheticBatch owner(std::move(text), arguments.page);
  Batch batch = owner.batch();
  batch.prefix_sharing = arguments.sharing == "off"      ? PrefixSharing::off
                         : arguments.sharing == "always" ? PrefixSharing::always
                                                         : PrefixSharing::automatic;
  batch.prefix_sharing_keeps_bits = !arguments.other_bits;
  if (arguments.threads > 0) set_num_threads(arguments.threads);
  return preview_plan(layer, batch, arguments.device);
}

std::string seconds_text(double seconds) {
  return seconds < 1e-3 ? fmt::format("{:.1f} us", seconds * 1e6) : fmt::format("{:.2f} ms", seconds * 1e3);
}

std::string bytes_text(int64_t bytes) {
  const auto count = static_cast<double>(bytes);
  if (count < 1e6) return fmt::format("{:.1f} KB", count * 1e-3);
  return count < 1e9 ? fmt::format("{:.1f} MB", count * 1e-6) : fmt::format("{:.2f} GB", count * 1e-9);
}

const char* kind_of(const PlanItem& item) { return item.few_rows ? "few rows" : "many rows"; }

void print_head(const PlanReport& report, const LayerSpec& layer) {
  int64_t new_tokens = 0;
  int64_t keys = 0;
  for (const int32_t length : report.query_lens) new_tokens += length;
  for (const int32_t length : report.seq_lens) keys += length;
  fmt::print("device    {}, {} {}\n", report.device, report.num_workers,
             report.device == "cpu" ? "threads" : "multiprocessors");
  fmt::print("layer     {}/{} heads of {}/{}, {}, {}, mask {}\n", layer.num_q_heads, layer.num_kv_heads, layer.head_dim,
             layer.value_dim(), to_string(layer.kv_dtype),
             layer.cache ? fmt::format("pages of {}", layer.cache->page_size) : "dense keys", layer.mask->text());
  fmt::print("batch     {} requests, {} new tokens, {} keys\n", report.query_lens.size(), new_tokens, keys);
  for (const PrefixGroup& group : report.prefix_groups) {
    fmt::print("group     {} requests from {} on share {} keys\n", group.requests.size(), group.requests.front(),
               group.num_tokens);
  }
}

void print_totals(const PlanReport& report) {
  const auto count = [&](auto is_counted) {
    return std::count_if(report.items.begin(), report.items.end(), is_counted);
  };
  fmt::print("items     {}: {} of few rows, {} of many rows; {} stand for several requests\n", report.items.size(),
             count([](const PlanItem& item) { return item.few_rows; }),
             count([](const PlanItem& item) { return !item.few_rows; }),
             count([](const PlanItem& item) { return item.requests.size() > 1; }));
  fmt::print("merges    {}, of {} of partial states\n", report.num_merges, bytes_text(report.workspace_bytes));
  fmt::print("work      {} to read and write, {:.3g} GFLOP\n", bytes_text(report.bytes),
             static_cast<double>(report.operations) * 1e-9);
  fmt::print("time      {} predicted", seconds_text(report.seconds));
  if (report.seconds_without_sharing > 0) {
    fmt::print(", {} without sharing", seconds_text(report.seconds_without_sharing));
  }
  fmt::print("\n");
}

// Requests of the same lengths in a line.
void print_requests(const PlanReport& report) {
  std::vector<int64_t> items(report.query_lens.size(), 0);
  std::vector<int64_t> shared(report.query_lens.size(), 0);
  for (const PlanItem& item : report.items) {
    for (const int32_t request : item.requests) {
      ++items[request];
      if (item.requests.size() > 1) ++shared[request];
    }
  }
  using Shape = std::tuple<int32_t, int32_t, int64_t, int64_t>;
  std::map<Shape, std::pair<size_t, int64_t>> lines;  // first request, count
  for (size_t r = 0; r < items.size(); ++r) {
    auto [line, is_new] = lines.try_emplace({report.query_lens[r], report.seq_lens[r], items[r], shared[r]}, r, 0);
    ++line->second.second;
  }
  std::vector<std::pair<std::pair<size_t, int64_t>, Shape>> in_order;
  in_order.reserve(lines.size());
  for (const auto& [shape, line] : lines) in_order.emplace_back(line, shape);
  std::sort(in_order.begin(), in_order.end());
  fmt::print("\n{:>8} {:>8} {:>9} {:>14} {:>14}\n", "requests", "new", "keys", "items of each", "of them shared");
  for (const auto& [line, shape] : in_order) {
    fmt::print("{:>8} {:>8} {:>9} {:>14} {:>14}\n", line.second, std::get<0>(shape), std::get<1>(shape),
               std::get<2>(shape), std::get<3>(shape));
  }
}

void print_items(const PlanReport& report, int32_t most) {
  const size_t count = std::min(report.items.size(), static_cast<size_t>(most));
  if (count == 0) return;
  fmt::print("\n{:>6} {:>11} {:>11}  {:<9} {:>7} {:>6} {:>8} {:>17} {:>9} {:>8}\n", "worker", "from", "to", "kernel",
             "KV head", "rows", "requests", "keys", "bytes", "GFLOP");
  for (size_t i = 0; i < count; ++i) {
    const PlanItem& item = report.items[i];
    fmt::print("{:>6} {:>11} {:>11}  {:<9} {:>7} {:>6} {:>8} {:>17} {:>9} {:>8.3f}\n", item.worker,
               seconds_text(item.begin_seconds), seconds_text(item.end_seconds), kind_of(item), item.kv_head, item.rows,
               item.requests.size() == 1 ? fmt::format("{}", item.requests.front())
                                         : fmt::format("{} of them", item.requests.size()),
               fmt::format("{} - {}", item.key_begin, item.key_end), bytes_text(item.bytes),
               static_cast<double>(item.operations) * 1e-9);
  }
  if (count < report.items.size()) {
    fmt::print("{:>6} {} more; --items N shows N of them, --json all\n", "", report.items.size() - count);
  }
}

nlohmann::json json_of(const PlanReport& report) {
  nlohmann::json items = nlohmann::json::array();
  for (const PlanItem& item : report.items) {
    items.push_back({{"kernel", item.few_rows ? "few_rows" : "many_rows"},
                     {"kv_head", item.kv_head},
                     {"requests", item.requests},
                     {"rows", item.rows},
                     {"key_begin", item.key_begin},
                     {"key_end", item.key_end},
                     {"keys", item.keys},
                     {"is_state", item.is_state},
                     {"bytes", item.bytes},
                     {"operations", item.operations},
                     {"worker", item.worker},
                     {"begin_seconds", item.begin_seconds},
                     {"end_seconds", item.end_seconds}});
  }
  nlohmann::json groups = nlohmann::json::array();
  for (const PrefixGroup& group : report.prefix_groups) {
    groups.push_back({{"requests", group.requests}, {"num_tokens", group.num_tokens}});
  }
  return {{"device", report.device},
          {"num_workers", report.num_workers},
          {"query_lens", report.query_lens},
          {"seq_lens", report.seq_lens},
          {"key_lens", report.key_lens},
          {"prefix_groups", groups},
          {"items", items},
          {"num_merges", report.num_merges},
          {"workspace_bytes", report.workspace_bytes},
          {"bytes", report.bytes},
          {"operations", report.operations},
          {"seconds", report.seconds},
          {"seconds_without_sharing", report.seconds_without_sharing}};
}

void write_json(const PlanReport& report, const std::string& path) {
  const std::string text = json_of(report).dump(path == "-" ? 1 : -1);
  if (path == "-") {
    fmt::print("{}\n", text);
    return;
  }
  std::ofstream file(path);
  file << text << "\n";
  if (!file.flush())
    throw Error(ErrorCode::unavailable, "--json", path, "a file that can be written, or - to print it");
  fmt::print("json      {}\n", path);
}

void run(const PlanArguments& arguments) {
  const LayerSpec layer = layer_of(arguments);
  const PlanReport report = report_of(arguments, layer);
  if (arguments.json == "-") return write_json(report, arguments.json);
  print_head(report, layer);
  print_totals(report);
  print_requests(report);
  print_items(report, arguments.items);
  if (!arguments.json.empty()) write_json(report, arguments.json);
  if (!arguments.png.empty()) {
    draw_plan_png(report, arguments.png);
    fmt::print("picture   {}\n", arguments.png);
  }
}

constexpr const char* kExamples =
    R"help(A batch is written in runs joined by _: [count]q<new tokens>s<keys>[p<shared keys>], where s counts cached and new
keys, a k multiplies by 1024, and requests of a run with p share their first keys:

  q513s60513_31q1s4k     one request with 513 new of 60513 keys, and 31 decode steps over 4096 keys
  64q1s8704p8k           64 decode steps over 8704 keys, of which the first 8192 are the same

--shared adds groups, nested ones too. An item is query rows x a run of keys: a thread or a multiprocessor works on one
at a time. Rows are new tokens x the query heads of a KV head. Items that see only some of their rows' keys leave partial
states, which merges join. The picture shows items over time, a line a worker. Times come from a cost model; they compare
plans, and are no measurement. No GPU is needed.

Examples:
  qkv plan q513s60513_31q1s4k --device h200 --png plan.png
  qkv plan 64q1s8704p8k --device cpu --threads 16
  qkv plan 64q1s10k --shared 0-63:4k --shared 0-31:8k --sharing always
  qkv plan 8q1s32k --mask "causal & window(4095, 0)" --json - | head)help";

}  // namespace

void add_plan_command(CLI::App& app) {
  const auto arguments = std::make_shared<PlanArguments>();
  CLI::App* command = app.add_subcommand("plan", "Show the work items that a batch becomes, and what they cost");
  command->add_option("batch", arguments->batch, "The batch, for example q513s60513_31q1s4k")->required();
  command->add_option("--shared", arguments->shared, "Requests that share their first keys, as in 0-31:8k; repeatable")
      ->allow_extra_args(false);
  command->add_option("--device", arguments->device, "Whose plan; it need not be there")
      ->check(CLI::IsMember({"cpu", "h200"}))
      ->capture_default_str();
  command->add_option("--threads", arguments->threads, "Threads of the CPU; default: all that may be used")
      ->check(whole_number(1));
  command->add_option("--heads", arguments->heads, "Query heads/KV heads")->capture_default_str();
  command->add_option("--head-dim", arguments->head_dim, "Of query and key")
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_option("--head-dim-v", arguments->head_dim_v, "Of value; default: --head-dim")->check(whole_number(1));
  command->add_option("--page", arguments->page, "Tokens a page; 0: dense keys")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--dtype", arguments->dtype, "Of query, keys and values")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  command->add_option("--mask", arguments->mask, "The mask, without operands (see qkv mask)")->capture_default_str();
  command->add_option("--sharing", arguments->sharing, "Use of shared prefixes")
      ->check(CLI::IsMember({"automatic", "always", "off"}))
      ->capture_default_str();
  command->add_flag("--other-bits", arguments->other_bits, "Sharing may change bits, for a quicker kernel");
  command->add_option("--items", arguments->items, "How many items to list")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--json", arguments->json, "Write everything to this file; - prints it, and nothing else");
  command->add_option("--png", arguments->png, "Draw the items over time to this file");
  command->footer(kExamples);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace qkv::tools
