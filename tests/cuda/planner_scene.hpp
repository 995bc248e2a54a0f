// Layers and batches for tests of plans on the device, and how Hopper's kernels cut them.
#pragma once

#include <algorithm>
#include <vector>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/index/split.hpp"
#include "support/small_layer.hpp"

namespace qkv::cuda {

// How Hopper's two kernels cut a layer's requests.
struct Rules {
  explicit Rules(const LayerSpec& layer)
      : layer(layer),
        cut{layer.num_kv_heads, layer.group_size(), index::few_rows::max_rows(layer.value_dim()), 0, 128, 64, 128} {}

  index::RequestCut operator()(int32_t q_len, int32_t kv_len) const {
    const int rows = q_len * layer.group_size();
    if (rows > cut.few_rows) return index::cut_request(cut, q_len);
    const int tile_q = index::few_rows::tile_rows(rows);
    return {true, q_len, index::few_rows::tile_keys(layer.head_dim, layer.value_dim(), tile_q),
            index::few_rows::split_keys(kv_len, layer.num_kv_heads, layer.head_dim, layer.value_dim(), tile_q)};
  }

  const LayerSpec& layer;
  index::CutRules cut;
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
    const int64_t kv_len = draw.one_in(8) ? 0 : draw.range(0, draw.one_in(4) ? 20'000 : 900);
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
    batch.block_table =
        Tensor::contiguous(table.data(), DType::i32, {static_cast<int64_t>(seq_lens.size()), num_pages});
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

}  // namespace qkv::cuda
