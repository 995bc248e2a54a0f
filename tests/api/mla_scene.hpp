// A small MLA layer with its latents, and the cache that ranks share.
#pragma once

#include <utility>
#include <vector>

#include "core/index/interleave.hpp"
#include "qkv/reference.hpp"
#include "support/small_layer.hpp"

namespace qkv::testing {

using tools::OwnedTensor;
using Ints = std::vector<int32_t>;

inline constexpr int32_t kHeads = 2, kNope = 16, kRope = 8, kHeadDim = kNope + kRope, kValue = 24, kRank = 32,
                         kPage = 8;

inline MlaSpec small_spec() {
  MlaSpec spec;
  spec.num_heads = kHeads;
  spec.qk_nope_head_dim = kNope;
  spec.qk_rope_head_dim = kRope;
  spec.v_head_dim = kValue;
  spec.kv_lora_rank = kRank;
  spec.dtype = DType::f32;
  spec.cache.page_size = kPage;
  return spec;
}

inline constexpr float kLatentScale = 0.0137F;

// Latents of all tokens of all requests, the matrix, and what plain attention makes of them. With a cache of 8-bit
// floats, latents are such as it holds exactly.
struct Scene {
  Scene(MlaSpec of_layer, Ints context_lens, Ints q_lens)
      : spec(std::move(of_layer)), contexts(std::move(context_lens)) {
    tools::Draw draw(17, static_cast<int64_t>(contexts.size()));
    for (size_t r = 0; r < contexts.size(); ++r) {
      query_start_loc.push_back(query_start_loc.back() + q_lens[r]);
      seq_lens.push_back(contexts[r] + q_lens[r]);
      num_keys += seq_lens.back();
    }
    const auto filled = [&](std::initializer_list<int64_t> shape, float magnitude) {
      return testing::normal_values(draw, magnitude, shape);
    };
    latents = filled({num_keys, kRank + kRope}, 1);
    if (spec.cache_dtype) {
      const OwnedTensor rounded(*spec.cache_dtype, {1, 1});
      auto* values = static_cast<float*>(latents.view().data);
      for (int64_t i = 0; i < latents.view().num_elements(); ++i) {
        tools::store(rounded.view(), {0, 0}, values[i] / kLatentScale);
        values[i] = tools::load(rounded.view(), {0, 0}) * kLatentScale;
      }
    }
    matrix = filled({kHeads * (kNope + kValue), kRank}, 0.2F);
    query = filled({query_start_loc.back(), kHeads, kHeadDim}, 1);
    expand(latents.view(), key, value_memory);
    LayerSpec layer = layer_of(kHeads, kHeads, kHeadDim);
    layer.head_dim_v = kValue;
    layer.mask = spec.mask;
    layer.sinks = spec.sinks;
    expected = reference::attention(layer, batch(), query.view(), key.view(), value(value_memory));
  }

  // Keys, and values as a strided view of rows of a wider projection's result.
  void expand(const Tensor& rows, OwnedTensor& keys, OwnedTensor& wide) const {
    keys = OwnedTensor(DType::f32, {rows.shape[0], kHeads, kHeadDim});
    wide = OwnedTensor(DType::f32, {rows.shape[0], kHeads, kNope + kValue});
    matrix_projection(spec, matrix.view())({rows.slice(1, 0, kRank), keys.view().slice(2, 0, kNope), value(wide), {}});
    for (int64_t t = 0; t < rows.shape[0]; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t d = 0; d < kRope; ++d) {
          tools::store(keys.view(), {t, h, kNope + d}, tools::load(rows, {t, kRank + d}));
        }
      }
    }
  }
  static Tensor value(const OwnedTensor& wide) { return wide.view().slice(2, kNope, kNope + kValue); }

  Batch batch() const {
    Batch batch;
    batch.query_start_loc = view(query_start_loc);
    batch.seq_lens = view(seq_lens);
    return batch;
  }

  // Rows of the new tokens, one request after another.
  OwnedTensor new_latents() const {
    OwnedTensor rows(DType::f32, {query_start_loc.back(), kRank + kRope});
    for (size_t r = 0; r < contexts.size(); ++r) {
      for (int64_t t = contexts[r]; t < seq_lens[r]; ++t) {
        copy_row(first_key(r) + t, rows.view(), query_start_loc[r] + t - contexts[r]);
      }
    }
    return rows;
  }

  int64_t first_key(size_t request) const {
    int64_t first = 0;
    for (size_t r = 0; r < request; ++r) first += seq_lens[r];
    return first;
  }
  // Divided by the scale where the rows are of the cache's 8 bits.
  void copy_row(int64_t key, const Tensor& rows, int64_t row) const {
    const float scale = rows.dtype == DType::f32 ? 1 : kLatentScale;
    for (int64_t d = 0; d < kRank + kRope; ++d) {
      tools::store(rows, {row, d}, tools::load(latents.view(), {key, d}) / scale);
    }
  }

  void expect_right(const OwnedTensor& out, const OwnedTensor& lse) const {
    const int64_t num_tokens = query_start_loc.back();
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        EXPECT_NEAR(tools::load(lse.view(), {h, t}), expected.lse[h * num_tokens + t], 1e-4);
        for (int64_t d = 0; d < kValue; ++d) {
          ASSERT_NEAR(tools::load(out.view(), {t, h, d}), expected.out[(t * kHeads + h) * kValue + d], 1e-4)
              << t << ", " << h;
        }
      }
    }
  }

  MlaSpec spec;
  Ints contexts;
  Ints query_start_loc = {0};
  Ints seq_lens;
  int64_t num_keys = 0;
  OwnedTensor latents, matrix, query, key, value_memory;
  reference::Result expected;
};

// Every rank keeps the tokens that are its own, in pages of its own, under one block table.
struct SharedCache {
  static constexpr int64_t kPagesOfRequest = 16;

  SharedCache(const Scene& scene, int32_t num_ranks, int32_t interleave_size) {
    options.page_size = kPage;
    options.num_ranks = num_ranks;
    options.interleave_size = interleave_size;
    options.workspace_tokens = static_cast<int32_t>(scene.contexts.size()) * chunk_alignment(options);
    const auto num_pages = static_cast<int64_t>(scene.contexts.size()) * kPagesOfRequest;
    for (int32_t p = 0; p < num_pages; ++p) table.push_back(p);
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      caches.emplace_back(scene.spec.latent_dtype(), std::initializer_list<int64_t>{num_pages, kPage, kRank + kRope});
      for (size_t r = 0; r < scene.contexts.size(); ++r) {
        for (int32_t t = 0; t < scene.contexts[r]; ++t) {
          if (index::rank_of_token(t, num_ranks, interleave_size) != rank) continue;
          const int32_t local = index::local_position(t, num_ranks, interleave_size);
          const int64_t page = static_cast<int64_t>(r) * kPagesOfRequest + local / kPage;
          const Tensor pages = caches.back().view();
          const Tensor rows =
              Tensor::contiguous(static_cast<std::byte*>(pages.data) + page * pages.stride[0] * size_bytes(pages.dtype),
                                 pages.dtype, {kPage, kRank + kRope});
          scene.copy_row(scene.first_key(r) + t, rows, local % kPage);
        }
      }
    }
  }

  Tensor block_table() const {
    const auto num_requests = static_cast<int64_t>(table.size()) / kPagesOfRequest;
    return Tensor::contiguous(table.data(), DType::i32, {num_requests, kPagesOfRequest});
  }

  ContextChunkOptions options;
  Ints table;
  std::vector<OwnedTensor> caches;  // [num_ranks]
};

}  // namespace qkv::testing
