// Hopper's forward kernel for few query rows.
#pragma once

#include <array>
#include <atomic>
#include <vector>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/index/split.hpp"
#include "cuda/device/few_rows_params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/memory.hpp"
#include "jit/module.hpp"
#include "plan/engine.hpp"

namespace qkv::cuda {

// A list of items (few_rows_lists.hpp, shared_lists.hpp) on the device.
struct FewRowsLaunch {
  int32_t tile_q;  // of the rows of one request
  bool is_exact;   // there are most_items; else that is only a bound
  int64_t most_items;
  const FewRowsItem* items;
  const int* num_items;
  const SharedToken* shared_tokens = nullptr;  // of items whose rows are of several requests
  int32_t cluster_size = 1;                    // FewRowsList::cluster_size
};

// What supports() asks for, in words.
inline constexpr const char* kFewRowsNeeds =
    "sm_90a, head sizes that are multiples of 16 up to 256, and at most 32 query heads a KV head (16 where values are "
    "wider than 128); with output scales of groups, values of 16, 32, 64, 128 or 256";

// How the layer's keys and values lie in the cache, as its shapes depend on it.
index::few_rows::KeyValueShape few_rows_shape(const LayerSpec& layer);

class ForwardSm90FewRows {
 public:
  // What a kernel is compiled for besides the layer. None but tile_q changes bits.
  struct Variant {
    int32_t tile_q;
    bool few_items;
    bool clustered;
    bool takes_turns = false;  // for launches that may meet more items than they have CTAs
    bool shared_rows = false;  // rows of several requests, each with the bits of a tile of tile_q
  };

  static bool supports(const LayerSpec& layer, const DeviceFacts& facts);
  static ForwardKey key(const LayerSpec& layer, const DeviceFacts& facts, const Variant& variant);
  static index::RequestCut cut_request(const LayerSpec& layer, int32_t q_len, int32_t kv_len);

  // Of steps with one new token a request, whether or not batches of such a layer join splits in clusters.
  static std::vector<Variant> created_variants(const LayerSpec& layer);

  // Compiles the kernels of created_variants.
  ForwardSm90FewRows(const LayerSpec& layer, const DeviceFacts& facts);

  // Makes sure that the launch's kernel is there, so that run() never compiles.
  void prepare(const FewRowsLaunch& launch) const { kernel_of(variant_of(launch)); }
  // beside_earlier: the launch in front is the same batch's, of this kernel or of the many-rows kernel.
  void run(const plan::ForwardCall& call, const ForwardParams& params, const FewRowsLaunch& launch, int* tickets,
           bool beside_earlier, jit::CUstream stream) const;

 private:
  static constexpr int kNumVariants = 4 * 2 * 2 * 2 * 2;

  Variant variant_of(const FewRowsLaunch& launch) const {
    return {launch.tile_q, launch.most_items <= facts_.num_multiprocessors, launch.cluster_size > 1, !launch.is_exact,
            launch.shared_tokens != nullptr};
  }
  uint32_t grid_of(const FewRowsLaunch& launch, int32_t ctas_per_multiprocessor) const;
  const jit::Kernel& kernel_of(const Variant& variant) const;

  LayerSpec layer_;
  DeviceFacts facts_;
  // Each filled when first asked for; two threads that fill one find the same kernel.
  mutable std::array<std::atomic<const jit::Kernel*>, kNumVariants> kernels_{};
};

}  // namespace qkv::cuda
