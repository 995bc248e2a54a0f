#include "qkv/warmup.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "api/warm_layers.hpp"
#include "core/checks.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/select.hpp"
#include "jit/module.hpp"
#include "spec/rules.hpp"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void add_missing(std::vector<jit::Source>& all, std::vector<jit::Source> sources) {
  for (jit::Source& source : sources) {
    if (std::find(all.begin(), all.end(), source) == all.end()) all.push_back(std::move(source));
  }
}

WarmedKernel make_ready(const jit::Source& source) {
  WarmedKernel kernel;
  kernel.name = source.name;
  const Clock::time_point start = Clock::now();
  try {
    kernel.compiled = jit::kernels().make_ready(source);
  } catch (const std::exception& error) {
    kernel.error = error.what();
  }
  kernel.seconds = seconds_since(start);
  return kernel;
}

// Threads take the next kernel as they become free. What on_progress throws ends the work and is thrown again.
class WarmupRun {
 public:
  WarmupRun(const std::vector<jit::Source>& sources, const WarmupOptions& options)
      : sources_(sources), options_(options), kernels_(sources.size()) {}

  std::vector<WarmedKernel> run(int32_t max_threads) {
    const auto num_threads = std::min<size_t>(sources_.size(), static_cast<size_t>(max_threads));
    std::vector<std::thread> threads;
    for (size_t i = 1; i < num_threads; ++i) threads.emplace_back([this] { work(); });
    work();
    for (std::thread& thread : threads) thread.join();
    if (failure_) std::rethrow_exception(failure_);
    return std::move(kernels_);
  }

 private:
  void work() {
    for (size_t at = next_++; at < sources_.size(); at = next_++) {
      kernels_[at] = make_ready(sources_[at]);
      const std::lock_guard lock(mutex_);
      ++done_;
      if (!options_.on_progress || failure_) continue;
      try {
        options_.on_progress(done_, static_cast<int32_t>(sources_.size()), kernels_[at]);
      } catch (...) {
        failure_ = std::current_exception();
        next_ = sources_.size();
      }
    }
  }

  const std::vector<jit::Source>& sources_;
  const WarmupOptions& options_;
  std::vector<WarmedKernel> kernels_;
  std::atomic<size_t> next_ = 0;
  std::mutex mutex_;
  int32_t done_ = 0;
  std::exception_ptr failure_;
};

cuda::DeviceFacts target_of(const WarmupOptions& options) {
  if (!options.arch.empty()) return cuda::facts_of_arch(options.arch);
  if (options.device.kind != DeviceKind::cuda) {
    refuse("device", to_string(options.device), "cuda: the CPU engine compiles nothing at run time");
  }
  return cuda::device_facts(options.device.index);
}

// A layer that is shown some of its keys makes states, which ranks gather queries for and merge.
bool makes_states(const LayerSpec& layer) { return layer.key_run != KeyRun::all || layer.shard.num_ranks > 1; }

// Of the calls that belong to no layer.
std::vector<jit::Source> single_call_sources(const WarmupOptions& options, const std::string& arch) {
  std::vector<jit::Source> sources;
  if (options.merge_states) sources.push_back(cuda::plain_source("merge_states", arch));
  if (options.gather_cache) {  // of pages of the rows' dtype, and of 8 bits
    for (const char* kernel : {"gather", "gather_widened"}) sources.push_back(cuda::plain_source(kernel, arch));
  }
  if (options.cache_write) {  // to pages of floats, and of 8 bits
    for (const KvScales scales : {KvScales::none, KvScales::per_tensor}) {
      sources.push_back(cuda::cache_write_source(scales, arch));
    }
  }
  return sources;
}

// Layers that can run bring their kernels, others a reason.
std::vector<jit::Source> sources_of(const std::vector<LayerSpec>& layers, WarmupOptions options,
                                    const cuda::DeviceFacts& facts, std::vector<std::string>& skipped) {
  std::vector<jit::Source> sources;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (const auto reasons = spec::reasons_against(layers[i], {DeviceKind::cuda, 0}); !reasons.empty()) {
      skipped.push_back(fmt::format("layer {}: {}", i, reasons.front().what()));
      continue;
    }
    add_missing(sources, cuda::reachable_sources(layers[i], facts, options.bounds, options.planners));
    add_missing(sources, cuda::created_sources(layers[i], facts));
    if (makes_states(layers[i])) options.merge_states = options.gather_cache = true;
  }
  add_missing(sources, single_call_sources(options, facts.arch));
  return sources;
}

}  // namespace

WarmupResult warmup(const std::vector<LayerSpec>& layers, const WarmupOptions& options) {
  if (options.num_threads < 0) refuse("num_threads", options.num_threads, "at least 1, or 0 for num_threads()");
  for (const auto& [name, bound] : {std::pair{"bounds.max_query_len", options.bounds.max_query_len},
                                    {"bounds.max_model_len", options.bounds.max_model_len}}) {
    if (bound < 1) refuse(name, bound, "at least 1");
  }
  const Clock::time_point start = Clock::now();
  const cuda::DeviceFacts facts = target_of(options);
  WarmupResult result;
  const std::vector<jit::Source> sources = sources_of(layers, options, facts, result.skipped);
  result.kernels = WarmupRun(sources, options).run(options.num_threads != 0 ? options.num_threads : num_threads());
  result.seconds = seconds_since(start);
  return result;
}

namespace api {

void warm_layers(const std::vector<LayerSpec>& layers, Device device, const RequestBounds& bounds,
                 WarmupOptions calls) {
  if (device.kind != DeviceKind::cuda) return;
  calls.device = device;
  calls.bounds = bounds;
  for (const WarmedKernel& kernel : warmup(layers, calls).kernels) {
    if (!kernel.error.empty()) refuse(kernel.name, kernel.error, "a kernel that compiles", ErrorCode::internal);
  }
}

}  // namespace api

std::vector<KernelChoice> kernel_choices(const LayerSpec& layer, const std::string& arch) {
  const cuda::DeviceFacts facts = arch.empty() ? cuda::device_facts(0) : cuda::facts_of_arch(arch);
  if (const auto reasons = spec::reasons_against(layer, {DeviceKind::cuda, 0}); !reasons.empty()) throw reasons.front();
  const cuda::ForwardKernels kernels = cuda::forward_kernels(layer, facts);
  const int32_t few_tokens = kernels.cut.few_rows / kernels.cut.group_size;
  const auto choice = [&](std::string batches, int64_t num_rows, bool is_own, const char* own, const char* needs) {
    const std::string kernel = cuda::forward_key(layer, facts, {num_rows, false, false}).kernel;
    return KernelChoice{std::move(batches), kernel, is_own ? "" : fmt::format("{} needs {}", own, needs)};
  };
  std::vector<KernelChoice> choices;
  if (few_tokens > 0) {
    choices.push_back(
        choice(few_tokens == 1 ? "1 new token a request" : fmt::format("1 to {} new tokens a request", few_tokens),
               kernels.cut.group_size, kernels.few_rows_sm90, "forward_sm90_few_rows", cuda::kFewRowsNeeds));
  }
  choices.push_back(choice(fmt::format("{} or more new tokens a request", few_tokens + 1), kernels.cut.few_rows + 1,
                           kernels.many_rows_sm90, "forward_sm90_many_rows", cuda::kManyRowsNeeds));
  return choices;
}

}  // namespace qkv
