// Compiles all GPU kernels that a run can reach, before it begins.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "qkv/device.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"

namespace qkv {

// What is known of all requests to come. A request outside is served as well, by a kernel that is compiled then.
struct RequestBounds {
  int32_t max_query_len = INT32_MAX;  // new tokens in one step
  int32_t max_model_len = INT32_MAX;  // keys, cached and new
};

// Planners of the layers (planner.hpp), which run kernels of their own.
enum class PlannerUse : uint8_t {
  none,
  host,    // batches come as host arrays
  device,  // limits.plans_on_device, for layers that allow it
};

// A kernel that the run can reach.
struct WarmedKernel {
  std::string name;       // in words
  double seconds = 0;     // that it took to have it
  bool compiled = false;  // else it was found on disk or in the process
  std::string error;      // why there is none; empty = it is there
};

struct WarmupOptions {
  // The architecture to compile for, such as "sm_90a": no GPU is needed then. Empty: that of `device`.
  std::string arch = {};
  Device device = {DeviceKind::cuda, 0};
  RequestBounds bounds = {};
  PlannerUse planners = PlannerUse::none;
  // Calls that belong to no layer, as far as the run makes them. The states of layers that are shown some of their keys
  // (KeyRun, Shard) are known to be merged.
  bool merge_states = false;
  bool gather_cache = false;
  bool cache_write = false;
  int32_t num_threads = 0;  // that compile; 0 = as many as the process may use
  // After each kernel, from one thread at a time: how many are done, of how many, and the kernel.
  std::function<void(int32_t done, int32_t total, const WarmedKernel& kernel)> on_progress = {};
};

struct WarmupResult {
  std::vector<WarmedKernel> kernels;  // in the order of the layers, each kernel once
  std::vector<std::string> skipped;   // layers that cannot run there: which, and the first reason
  double seconds = 0;                 // wall clock
};

// Compiles all kernels that batches of these layers can reach and no others, and keeps them on disk and in the process.
// Layers that share kernels cost one compile. A kernel that fails to compile is told in the result; nothing is thrown
// for it. MlaPrefill, which gathers and merges, consists of layers_of(spec); ContextParallel and MlaContextParallel of
// rank_layers(spec, …).
QKV_EXPORT WarmupResult warmup(const std::vector<LayerSpec>& layers, const WarmupOptions& options = {});

// Which forward kernel runs for which batches of a layer, for people. An empty arch is that of the first GPU. Throws
// explain()'s first reason for a layer that is refused.
struct KernelChoice {
  std::string batches;  // "1 to 8 new tokens a request"
  std::string kernel;   // "forward_sm90_few_rows"
  std::string why;      // this one and not the kernel that is made for such batches; empty = it is that one
};
QKV_EXPORT std::vector<KernelChoice> kernel_choices(const LayerSpec& layer, const std::string& arch);

}  // namespace qkv
