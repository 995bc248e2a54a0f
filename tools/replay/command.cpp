#include "command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../number.hpp"
#include "../progress.hpp"
#include "plot.hpp"
#include "qkv/device.hpp"
#include "qkv/status.hpp"
#include "replay.hpp"
#include "step_writer.hpp"

namespace qkv::replay {
namespace {

struct Arguments {
  std::string trace;
  std::string config;  // of the model; "" = `shape`
  int32_t tensor_parallel = 1;
  ModelShape shape;
  std::string dtype = "bf16";
  std::string device = "cpu";
  int32_t max_caches = 0;  // 0 = one a layer
  int64_t cache_tokens = 65536;
  int32_t max_step_tokens = 2048;
  int32_t max_requests = 256;
  std::string pace = "flat";
  double speed = 1;
  double step_ms = 30;
  double limit_seconds = 0;  // 0 = the whole trace
  int64_t max_steps = 0;     // 0 = to the end
  double stop_after_seconds = 0;
  std::string json_path;
  std::string png_path;
  std::string steps_path;
};

// Names of the command line.
const std::map<std::string, Pace> kPaces = {{"flat", Pace::flat}, {"trace", Pace::trace}, {"steps", Pace::steps}};
const std::map<std::string, DType> kDTypes = {{"bf16", DType::bf16}, {"f16", DType::f16}, {"f32", DType::f32}};
const std::map<std::string, DeviceKind> kDevices = {{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}};

std::vector<TracedRequest> read_part(const Arguments& arguments) {
  std::vector<TracedRequest> trace = read_trace_file(arguments.trace);
  if (arguments.limit_seconds > 0) {
    std::erase_if(trace, [&](const TracedRequest& r) { return r.arrival_seconds >= arguments.limit_seconds; });
  }
  return trace;
}

ReplayOptions options_of(const Arguments& arguments) {
  ReplayOptions options;
  const int32_t page_size = arguments.shape.page_size;
  options.limits = {arguments.max_requests, arguments.max_step_tokens,
                    static_cast<int32_t>((arguments.cache_tokens + page_size - 1) / page_size), page_size};
  options.pace = kPaces.at(arguments.pace);
  options.speed = arguments.speed;
  options.step_seconds = arguments.step_ms * 1e-3;
  if (arguments.max_steps > 0) options.max_steps = arguments.max_steps;
  if (arguments.stop_after_seconds > 0) options.stop_after_seconds = arguments.stop_after_seconds;
  return options;
}

Model chosen_model(const Arguments& arguments) {
  if (!arguments.config.empty()) {
    return model_of(
        tools::read_model(arguments.config, {arguments.tensor_parallel, arguments.shape.page_size, arguments.dtype}));
  }
  ModelShape shape = arguments.shape;
  shape.dtype = kDTypes.at(arguments.dtype);
  return model_of(shape);
}

std::string describe_device(Device device) {
  return device.kind == DeviceKind::cpu ? fmt::format("cpu, {} on {} threads", instruction_set_in_use(), num_threads())
                                        : to_string(device);
}

std::string describe_pace(const Arguments& arguments) {
  switch (kPaces.at(arguments.pace)) {
    case Pace::flat:
      break;
    case Pace::trace:
      return fmt::format("the trace's clock, {} times as fast", arguments.speed);
    case Pace::steps:
      return fmt::format("the trace's clock, a step taken as {} ms", arguments.step_ms);
  }
  return "flat out: arrival times are not waited for";
}

nlohmann::ordered_json setting_of(const Arguments& arguments, const ReplayOptions& options, const Model& model,
                                  Device device) {
  const SchedulerLimits& limits = options.limits;
  return {{"trace", std::filesystem::path(arguments.trace).filename().string()},
          {"limit_seconds", arguments.limit_seconds},
          {"model", model.name},
          {"device", describe_device(device)},
          {"pace", describe_pace(arguments)},
          {"page_size", limits.page_size},
          {"pages", limits.num_pages},
          {"max_step_tokens", limits.max_step_tokens},
          {"max_requests", limits.max_requests},
          {"caches", arguments.max_caches > 0 ? std::to_string(arguments.max_caches) : "one a layer"},
          {"version", version()}};
}

void print_setting(const nlohmann::ordered_json& setting, const std::vector<TracedRequest>& trace,
                   const MemoryNeeds& needs) {
  int64_t context = 0;
  int64_t generated = 0;
  for (const TracedRequest& request : trace) {
    context += request.context_tokens;
    generated += request.generated_tokens;
  }
  fmt::print("trace      {}: {} requests in {:.0f} s, {} tokens of prompts, {} generated\n",
             setting["trace"].get<std::string>(), trace.size(), trace.back().arrival_seconds, context, generated);
  fmt::print("model      {}\n", setting["model"].get<std::string>());
  fmt::print("device     {}\n", setting["device"].get<std::string>());
  fmt::print("pace       {}\n", setting["pace"].get<std::string>());
  fmt::print("needs      {:.2f} GiB of caches, {:.2f} GiB of activations\n",
             static_cast<double>(needs.cache_bytes) * 0x1p-30, static_cast<double>(needs.activation_bytes) * 0x1p-30);
}

// Opened before anything runs: an hour's numbers shall not be lost to a mistyped folder.
std::ofstream open_file(const char* option, const std::string& path) {
  std::ofstream file;
  if (path.empty()) return file;
  file.open(path);
  if (!file) throw Error(ErrorCode::unavailable, option, path, "a file that can be written");
  return file;
}

void run(const Arguments& arguments) {
  const std::vector<TracedRequest> trace = read_part(arguments);
  const ReplayOptions options = options_of(arguments);
  for (const TracedRequest& request : trace) check_fits(request, options.limits);
  const Device device{kDevices.at(arguments.device), 0};
  const Model model = chosen_model(arguments);
  const RunSizes sizes{options.limits.max_step_tokens, options.limits.num_pages,
                       arguments.max_caches > 0 ? arguments.max_caches : std::numeric_limits<int32_t>::max()};
  const MemoryNeeds needs = memory_needs(model, sizes);
  std::ofstream json = open_file("--json", arguments.json_path);
  open_file("--png", arguments.png_path);
  std::ofstream steps = open_file("--write-steps", arguments.steps_path);
  Report report(setting_of(arguments, options, model, device), options.limits.num_pages,
                static_cast<int64_t>(trace.size()));
  print_setting(report.setting(), trace, needs);
  check_memory(needs, device);
  const auto begin = std::chrono::steady_clock::now();
  const int32_t max_model_len = max_tokens_of_request(trace);
  warm_up(model, device, {std::min(max_model_len, options.limits.max_step_tokens), max_model_len});
  ModelRun model_run(model, sizes, device);
  fmt::print("ready      after {:.1f} s for memory and kernels\n",
             std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());

  tools::Progress progress(static_cast<int64_t>(trace.size()));
  const auto show = [&](const SchedulerCounts& counts) {
    if (!progress.is_due(counts.finished_requests)) return;
    progress.show(counts.finished_requests, fmt::format("{}/{} requests, {} steps, {} tokens", counts.finished_requests,
                                                        trace.size(), report.num_steps(), counts.computed_tokens));
  };
  std::optional<StepWriter> step_writer;
  if (steps.is_open()) step_writer.emplace(steps, step_file_setting(model, sizes));
  const auto run_step = [&](const Batch& batch) {
    if (step_writer) step_writer->write(batch);
    return model_run.run(batch);
  };
  replay(trace, model, options, run_step, show, report);
  progress.clear();
  fmt::print("{}", report.text());
  if (steps.is_open() && !steps.flush()) {
    throw Error(ErrorCode::unavailable, "--write-steps", arguments.steps_path, "a disk with room for all steps");
  }
  if (json.is_open()) json << report.json().dump(1) << "\n";
  if (!arguments.png_path.empty()) draw_report_png(report, arguments.png_path);
}

constexpr const char* kFooter =
    R"help(Real traffic as the yardstick. The trace says when requests came, how long their prompts were and how many tokens
were generated: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens. Requests are scheduled as a serving
engine does: a step holds one token of each request that generates and, up to --step-tokens, chunks of prompts; the
cache has --cache-tokens; when it is full, the request admitted last gives its pages back and is computed again later.
For each step the batch is planned, then every layer writes its new keys and values and attends. Nothing else of a
model is computed; queries, keys and values are random.

Paces:
  flat   arrival times are not waited for: the next request is admitted as soon as there is room
  trace  requests arrive when the trace says, --speed times as fast; idle time is slept
  steps  requests arrive when the trace says, on a clock on which each step takes --step-ms: the same steps on every
         machine, as batches of an engine look whose steps take so long

Read the result: a device that keeps up with a trace has few requests waiting; planning is what every step pays on the
host; GB/s and TFLOP/s count what attention must at least move and compute, over the whole step.

Examples:
  qkv replay trace.csv --limit 60
  qkv replay trace.csv --pace steps --step-ms 25 --layers 8 --kv-heads 4 --json replay.json --png replay.png
  qkv replay trace.csv --model config.json --tp 8 --limit 60
  qkv replay trace.csv --device cuda --layers 32 --caches 4 --cache-tokens 1000000 --step-tokens 8192)help";

void add_model_options(CLI::App* command, Arguments& arguments) {
  ModelShape& shape = arguments.shape;
  CLI::Option* config = command->add_option("--model", arguments.config, "The model's config.json: all of its layers");
  command->add_option("--tp", arguments.tensor_parallel, "Ranks that share the heads of --model")
      ->check(tools::whole_number(1))
      ->needs(config)
      ->capture_default_str();
  const auto add_shape = [&](const char* name, int32_t& value, const char* text) {
    return command->add_option(name, value, text)->excludes(config)->capture_default_str();
  };
  add_shape("--layers", shape.num_layers, "Attention layers, where there is no --model")
      ->check(tools::whole_number(1, 1000));
  add_shape("--heads", shape.num_q_heads, "Query heads");
  add_shape("--kv-heads", shape.num_kv_heads, "KV heads");
  add_shape("--head-dim", shape.head_dim, "Head size");
  add_shape("--head-dim-v", shape.head_dim_v, "Head size of values; 0: --head-dim");
  add_shape("--window", shape.window_tokens, "Sliding window of so many tokens in all layers; 0: none")
      ->check(tools::whole_number(0));
  command->add_option("--dtype", arguments.dtype, "Of queries, cache and output: bf16, f16 or f32")
      ->check(CLI::IsMember(kDTypes))
      ->capture_default_str();
  command->add_option("--page-size", shape.page_size, "Tokens a page")
      ->check(tools::whole_number(1, 65536))
      ->capture_default_str();
}

void add_engine_options(CLI::App* command, Arguments& arguments) {
  command->add_option("--cache-tokens", arguments.cache_tokens, "Tokens that each layer's cache holds")
      ->check(tools::whole_number(1, 1 << 30))
      ->capture_default_str();
  command->add_option("--caches", arguments.max_caches, "Caches, shared by layers in turn; default: one a layer")
      ->check(tools::whole_number(1, 1000));
  command->add_option("--step-tokens", arguments.max_step_tokens, "New tokens of a step, at most")
      ->check(tools::whole_number(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--max-requests", arguments.max_requests, "Requests of a step, at most")
      ->check(tools::whole_number(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--device", arguments.device, "cpu or cuda")
      ->check(CLI::IsMember(kDevices))
      ->capture_default_str();
}

void add_run_options(CLI::App* command, Arguments& arguments) {
  command->add_option("--pace", arguments.pace, "flat, trace or steps, see below")
      ->check(CLI::IsMember(kPaces))
      ->capture_default_str();
  command->add_option("--speed", arguments.speed, "Of the clock at --pace trace")
      ->check(tools::positive_number())
      ->capture_default_str();
  command->add_option("--step-ms", arguments.step_ms, "Length of a step at --pace steps")
      ->check(tools::positive_number())
      ->capture_default_str();
  command->add_option("--limit", arguments.limit_seconds, "Only requests of the trace's first so many seconds")
      ->check(tools::positive_number());
  command->add_option("--steps", arguments.max_steps, "Stop after so many steps")->check(tools::whole_number(1));
  command->add_option("--stop-after", arguments.stop_after_seconds, "Stop after running so many seconds")
      ->check(tools::positive_number());
  command->add_option("--json", arguments.json_path, "Write the report and its course to this file");
  command->add_option("--png", arguments.png_path, "Draw the course to this file");
  command->add_option("--write-steps", arguments.steps_path, "Write each step's batch to this file, for other engines");
}

}  // namespace

void add_replay_command(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("replay", "Run the attention of a serving engine on a trace of real traffic");
  command->add_option("trace", arguments->trace, "CSV: TIMESTAMP, ContextTokens, GeneratedTokens")->required();
  add_model_options(command, *arguments);
  add_engine_options(command, *arguments);
  add_run_options(command, *arguments);
  command->footer(kFooter);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace qkv::replay
