#include "warmup.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model_config.hpp"
#include "number.hpp"
#include "progress.hpp"
#include "qkv/compile.hpp"
#include "qkv/cuda.hpp"
#include "qkv/kernel_cache.hpp"
#include "qkv/status.hpp"
#include "qkv/warmup.hpp"

namespace qkv::tools {
namespace {

struct Options {
  std::string model;
  std::string arch;
  ServingOptions serving;
  int32_t max_model_len = 0;
  PlannerUse planners = PlannerUse::none;
  int32_t num_threads = 0;
};

// Names of the command line.
const std::map<std::string, DType> kCacheDTypes = {{"bf16", DType::bf16},     {"f16", DType::f16},
                                                   {"f32", DType::f32},       {"f8e4m3", DType::f8e4m3},
                                                   {"f8e5m2", DType::f8e5m2}, {"i8", DType::i8}};
const std::map<std::string, KvScales> kScales = {{"per_tensor", KvScales::per_tensor},
                                                 {"per_head", KvScales::per_head},
                                                 {"per_request_head", KvScales::per_request_head},
                                                 {"per_token_head", KvScales::per_token_head}};
const std::map<std::string, PlannerUse> kPlanners = {
    {"none", PlannerUse::none}, {"host", PlannerUse::host}, {"device", PlannerUse::device}};

void add_model_options(CLI::App& command, Options& options) {
  command.add_option("--model", options.model, "The model's config.json")->required();
  command.add_option("--arch", options.arch, "Architecture, such as sm_90a; needed where there is no GPU");
  command.add_option("--tp", options.serving.tensor_parallel, "Ranks that share the heads")
      ->check(whole_number(1))
      ->capture_default_str();
  command.add_option("--page-size", options.serving.page_size, "Tokens a page of the cache")
      ->check(whole_number(1))
      ->capture_default_str();
  command.add_option("--dtype", options.serving.dtype, "Of query, cache and output")
      ->check(CLI::IsMember({"auto", "bf16", "f16", "f32"}))
      ->capture_default_str();
  command
      .add_option_function<std::string>(
          "--kv-dtype", [&](const std::string& name) { options.serving.kv_dtype = kCacheDTypes.at(name); },
          "Of the cache, where it is another than --dtype")
      ->check(CLI::IsMember(kCacheDTypes));
  command
      .add_option_function<std::string>(
          "--kv-scales", [&](const std::string& name) { options.serving.kv_scales = kScales.at(name); },
          "What has a scale of its own in an 8-bit cache; default: per_tensor")
      ->check(CLI::IsMember(kScales));
}

void check_arch(const Options& options) {
  if (!options.arch.empty() || num_cuda_devices() > 0) return;
  throw Error(ErrorCode::unavailable, "--arch", "nothing, and no GPU was found",
              "the architecture to compile for, such as sm_90a");
}

void print_model(const Model& model, const Options& options) {
  fmt::print(
      "{}: {}{}\n", options.model, model.type,
      options.serving.tensor_parallel == 1 ? "" : fmt::format(", one of {} ranks", options.serving.tensor_parallel));
  for (const std::string& note : model.notes) fmt::print("note: {}\n", note);
}

std::string line_of(int32_t done, int32_t total, const WarmedKernel& kernel) {
  const std::string outcome = !kernel.error.empty() ? "\n  failed: " + kernel.error
                              : kernel.compiled     ? ""
                                                    : " (was there)";
  return fmt::format("[{:>{}}/{}] {:6.2f} s  {}{}", done, std::to_string(total).size(), total, kernel.seconds,
                     kernel.name, outcome);
}

// A line for each kernel, and on a terminal a bar below them.
WarmupResult run_warmup(const std::vector<LayerSpec>& layers, WarmupOptions options) {
  std::optional<Progress> progress;
  options.on_progress = [&](int32_t done, int32_t total, const WarmedKernel& kernel) {
    if (!progress) progress.emplace(total);
    progress->clear();
    fmt::print("{}\n", line_of(done, total, kernel));
    std::fflush(stdout);
    progress->show(done, fmt::format("{} of {} kernels", done, total));
  };
  return warmup(layers, options);
}

void warm_up(const Options& options) {
  check_arch(options);
  const Model model = read_model(options.model, options.serving);
  print_model(model, options);
  std::vector<LayerSpec> layers;
  for (const LayerKind& kind : model.kinds) {
    const auto reasons = explain(kind.spec, {DeviceKind::cuda, 0});
    if (reasons.empty()) {
      layers.push_back(kind.spec);
    } else {
      fmt::print("skipped: {} ({}): {}\n", kind.name, layer_numbers(kind.layers), reasons.front());
    }
  }
  set_compile_callback([](const CompileEvent&) {});  // the lines below tell the same
  WarmupOptions warmup_options;
  warmup_options.arch = options.arch;
  warmup_options.num_threads = options.num_threads;
  warmup_options.bounds.max_model_len = options.max_model_len != 0 ? options.max_model_len : model.max_model_len;
  warmup_options.bounds.max_query_len = warmup_options.bounds.max_model_len;
  warmup_options.planners = options.planners;
  warmup_options.gather_cache = warmup_options.merge_states = warmup_options.cache_write = model.has_latent_cache;
  const WarmupResult result = run_warmup(layers, warmup_options);
  size_t compiled = 0;
  size_t failed = 0;
  for (const WarmedKernel& kernel : result.kernels) {
    failed += kernel.error.empty() ? 0 : 1;
    compiled += kernel.error.empty() && kernel.compiled ? 1 : 0;
  }
  const KernelCachePlace place = kernel_cache_place();
  fmt::print("{} kernels: {} compiled, {} were there, {} failed; {:.2f} s\n", result.kernels.size(), compiled,
             result.kernels.size() - compiled - failed, failed, result.seconds);
  fmt::print("cache: {}\n", place.folder.empty() ? "none, " + place.origin : place.folder);
  if (failed != 0) throw CLI::RuntimeError(1);
}

void print_kind(const LayerKind& kind, const Options& options) {
  const LayerSpec& spec = kind.spec;
  fmt::print("\n{}: {}\n", kind.name, layer_numbers(kind.layers));
  fmt::print("  {} query heads, {} KV heads, head size {}, {}, {}{}{}\n", spec.num_q_heads, spec.num_kv_heads,
             spec.value_dim() == spec.head_dim ? fmt::format("{}", spec.head_dim)
                                               : fmt::format("{}/{}", spec.head_dim, spec.value_dim()),
             spec.kv_dtype == spec.query_dtype ? fmt::format("{}", to_string(spec.query_dtype))
                                               : fmt::format("{} over {}, scales {}", to_string(spec.query_dtype),
                                                             to_string(spec.kv_dtype), to_string(spec.kv_scales)),
             spec.cache ? fmt::format("pages of {}", spec.cache->page_size) : "dense keys",
             spec.softcap > 0 ? fmt::format(", softcap {}", spec.softcap) : "", spec.sinks.empty() ? "" : ", sinks");
  fmt::print("  mask: {}\n", spec.effective_mask().text());
  const auto refusals = explain(spec, {DeviceKind::cuda, 0});
  for (const std::string& reason : refusals) fmt::print("  refused on a GPU: {}\n", reason);
  if (refusals.empty()) {
    for (const KernelChoice& choice : kernel_choices(spec, options.arch)) {
      fmt::print("  {:<32} {}{}\n", choice.batches, choice.kernel,
                 choice.why.empty() ? "" : fmt::format("\n  {:<32}   because {}", "", choice.why));
    }
  }
  const auto refusals_on_cpu = explain(spec);
  fmt::print("  on a CPU: {}\n", refusals_on_cpu.empty() ? "runs" : "refused: " + refusals_on_cpu.front());
}

void explain_model(const Options& options) {
  check_arch(options);
  const Model model = read_model(options.model, options.serving);
  print_model(model, options);
  for (const LayerKind& kind : model.kinds) print_kind(kind, options);
}

}  // namespace

void add_warmup_command(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("warmup", "Compile all GPU kernels that a model can reach, before it is served");
  add_model_options(*command, *options);
  command->add_option("--max-model-len", options->max_model_len, "Longest request; default: the model's own")
      ->check(whole_number(1));
  command
      ->add_option_function<std::string>(
          "--planners", [options](const std::string& name) { options->planners = kPlanners.at(name); },
          "Kernels of planners (CUDA graphs), too: none; host: that plan on the host; device: on the device")
      ->check(CLI::IsMember(kPlanners));
  command->add_option("--jobs", options->num_threads, "Kernels compiled at once; default: one a processor")
      ->check(whole_number(1));
  command->footer(
      "Examples:\n  qkv warmup --model config.json\n"
      "  qkv warmup --model config.json --arch sm_90a --tp 8 --kv-dtype f8e4m3 --planners host");
  command->callback([options] { warm_up(*options); });
}

void add_why_command(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("why", "Which kernels run for which batches of a model's layers, and what is refused and why");
  add_model_options(*command, *options);
  command->footer("Example: qkv why --model config.json --arch sm_90a");
  command->callback([options] { explain_model(*options); });
}

}  // namespace qkv::tools
