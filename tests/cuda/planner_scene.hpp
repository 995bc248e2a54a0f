// Layers and batches for tests of plans on the device, and how kernels cut them.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/select.hpp"
#include "support/small_layer.hpp"

namespace qkv::cuda {

// How a GPU's two kernels cut a layer's requests.
struct Rules {
  Rules(const LayerSpec& of_layer, const char* arch)
      : layer(of_layer), kernels(forward_kernels(of_layer, facts_of_arch(arch))) {}
  index::RequestCut operator()(int32_t q_len, int32_t kv_len) const {
    return cut_request(layer, kernels, q_len, kv_len);
  }

  const LayerSpec& layer;
  ForwardKernels kernels;
};

inline tools::Case draw_batch(const LayerSpec& layer, int64_t index) {
  tools::Draw draw(5, index);
  tools::Case c;
  c.seed = 5;
  c.index = index;
  c.layer = layer;
  const int64_t num_requests = draw.range(0, index % 3 == 0 ? 40 : 6);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t q_len = draw.one_in(6) ? 0 : draw.one_in(2) ? 1 : draw.range(1, draw.one_in(2) ? 12 : 500);
    int64_t kv_len = draw.one_in(8) ? 0 : draw.range(0, draw.one_in(4) ? 20'000 : 900);
    if (layer.key_run != KeyRun::all) kv_len = std::max(kv_len, q_len);
    c.requests.push_back({static_cast<int32_t>(q_len), static_cast<int32_t>(kv_len)});
  }
  return c;
}

// The batch's index arrays alone: a case's tensors would be large.
struct Lengths {
  explicit Lengths(const tools::Case& c) {
    for (const tools::RequestLengths& request : c.requests) {
      query_start_loc.push_back(query_start_loc.back() + request.q_len);
      seq_lens.push_back(request.kv_len);
      num_pages = std::max(num_pages, (request.kv_len + 15) / 16);
      flags.push_back(static_cast<int32_t>(flags.size() % 3));
    }
    table.assign(seq_lens.size() * num_pages, 0);
  }
  Batch batch(const LayerSpec& layer) const {
    Batch batch;
    batch.query_start_loc = testing::view(query_start_loc);
    batch.seq_lens = testing::view(seq_lens);
    if (layer.cache) {
      batch.block_table =
          Tensor::contiguous(table.data(), DType::i32, {static_cast<int64_t>(seq_lens.size()), num_pages});
    }
    for (const OperandDeclaration& operand : operands_of(layer.effective_mask())) {
      batch.mask_operands.push_back({operand.name, testing::view(flags)});
    }
    return batch;
  }
  std::vector<int32_t> query_start_loc = {0}, seq_lens, table, flags;
  int32_t num_pages = 1;
};

inline std::vector<LayerSpec> planner_layers() {
  const auto layer_of = [](int32_t q_heads, int32_t kv_heads, int32_t dim, const Mask& mask) {
    LayerSpec layer = testing::layer_of(q_heads, kv_heads, dim);
    layer.query_dtype = layer.kv_dtype = DType::bf16;
    layer.cache = CacheSpec{16};
    layer.mask = mask;
    return layer;
  };
  return {layer_of(8, 2, 64, mask::causal()), layer_of(4, 1, 128, mask::sliding_window(700)),
          layer_of(8, 8, 64, mask::per_request_causal() & mask::window(300, 40))};
}

// Layers that are shown some of the keys.
inline std::vector<LayerSpec> sharded_planner_layers() {
  std::vector<LayerSpec> layers = planner_layers();
  layers[0].shard = {2, 4, 1};
  layers[0].key_run = KeyRun::context;
  layers[1].shard = {1, 3, 16};
  layers[2].shard = {0, 2, 8};
  LayerSpec dense = planner_layers()[1];
  dense.cache.reset();
  dense.key_run = KeyRun::new_tokens;
  layers.push_back(dense);
  dense.key_run = KeyRun::all;
  dense.shard = {3, 8, 5};
  layers.push_back(dense);
  return layers;
}

}  // namespace qkv::cuda
