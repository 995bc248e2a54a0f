// Runs a model's attention layers over one step: plan, then update_cache and forward of each layer. Owns the layers,
// their caches and the activations, all made at creation at the declared maxima.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "model.hpp"
#include "qkv/attention.hpp"
#include "qkv/cuda.hpp"

namespace qkv::replay {

struct RunSizes {
  int32_t max_step_tokens;
  int32_t num_pages;
  int32_t max_caches;  // of a kind of layer; layers take turns where there are fewer caches than layers
};

struct MemoryNeeds {
  int64_t cache_bytes = 0;
  int64_t activation_bytes = 0;
  int64_t total() const { return cache_bytes + activation_bytes; }
};
// Not counted: the plans' partial states, which a step's lengths decide.
MemoryNeeds memory_needs(const Model& model, const RunSizes& sizes);

// Throws where the device has not that much free. A GPU is asked by allocating.
void check_memory(const MemoryNeeds& needs, Device device);

// Compiles what steps within the bounds can reach, so that no step waits for it. On a CPU there is nothing to compile.
void warm_up(const Model& model, Device device, const RequestBounds& bounds);

// Parts of a step on the host's clock. On a GPU cache_writes and attention are the launches, and wait is the rest.
struct StepSeconds {
  double planning = 0;
  double cache_writes = 0;
  double attention = 0;
  double wait = 0;
};

class ModelRun {
 public:
  ModelRun(const Model& model, const RunSizes& sizes, Device device);
  StepSeconds run(const Batch& batch);

 private:
  // Memory on either device; on a CPU its pages are touched at once.
  struct Block {
    std::vector<std::byte> host;
    DeviceMemory device;
    void* data = nullptr;
  };
  struct Kind {
    Attention attention;
    int32_t num_layers;
    std::vector<KvCache> caches;
    Tensor query, key, value, out;
  };

  Tensor make_tensor(DType dtype, std::initializer_list<int64_t> shape);
  Tensor make_filled(DType dtype, std::initializer_list<int64_t> shape);
  void make_kind(const LayerKind& kind, const RunSizes& sizes);
  void wait() const;

  Device device_;
  std::vector<Block> blocks_;
  std::vector<Kind> kinds_;
  std::vector<Plan> plans_;  // of the last step, one a kind: their memory lives until the device is done with them
  DeviceMemory fence_;
};

}  // namespace qkv::replay
