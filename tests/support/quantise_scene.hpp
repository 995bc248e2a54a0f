// Calls of quantise with rows, scales and requests of every kind, for whichever device.
#pragma once

#include <limits>

#include "core/float8.hpp"
#include "support/small_layer.hpp"

namespace qkv::testing {

struct QuantiseCase {
  DType from = DType::bf16;
  DType to = DType::f8e4m3;
  int64_t num_scales = 2;
  bool of_requests = true;
  ScaleSource source = ScaleSource::given;
  int64_t head_dim = 80;
};

// Four requests, of which the third has no tokens and the last only zeros; tokens past them; six heads.
struct QuantiseScene {
  static constexpr int64_t kTokens = 61;
  static constexpr int64_t kOwned = 57;
  static constexpr int64_t kHeads = 6;

  explicit QuantiseScene(const QuantiseCase& of)
      : c(of),
        rows(of.from, {kTokens, kHeads, of.head_dim}),
        out(of.to, {kTokens, kHeads, of.head_dim}),
        scale(DType::f32, {4, of.num_scales}, {3 * of.num_scales, 3}, 12 * of.num_scales) {
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t d = 0; d < c.head_dim; ++d) tools::store(rows.view(), {t, h, d}, value_at(t, h, d));
      }
    }
    if (c.source == ScaleSource::chosen) return;
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t s = 0; s < c.num_scales; ++s) {
        tools::store(scale.view(), {r, s}, 0.03F * static_cast<float>(1 + r * c.num_scales + s));
      }
    }
  }

  // Magnitudes differ by request and head; some beyond every format, some not numbers.
  static float value_at(int64_t token, int64_t head, int64_t column) {
    if (token >= 50 && token < kOwned) return column % 2 == 0 ? 0.0F : -0.0F;
    if (token == 3 && column == 5) return std::numeric_limits<float>::quiet_NaN();
    if (token == 4 && column == 6) return -std::numeric_limits<float>::infinity();
    const auto wave = static_cast<float>((token * 31 + head * 17 + column * 7) % 201 - 100);
    return wave * 0.013F * static_cast<float>(1 + head) * (token < 20 ? 1.0F : 9.0F);
  }

  int64_t request_of(int64_t token) const {
    if (!c.of_requests) return 0;
    return token < 20 ? 0 : token < 50 ? 1 : 3;
  }
  int64_t num_tokens() const { return c.of_requests ? kOwned : kTokens; }
  Tensor scale_of(Tensor all) const {
    return c.of_requests ? all : Tensor::strided(all.data, DType::f32, {c.num_scales}, {3}, all.device);
  }

  // On the CPU, or on a GPU and back.
  void run(Device device = {}) {
    tools::OwnedTensor sums(DType::i32, {5});
    for (int64_t i = 0; i < 5; ++i) static_cast<int32_t*>(sums.view().data)[i] = starts[i];
    const tools::Placed placed_rows(rows, device), placed_out(out, device), placed_scale(scale, device),
        placed_sums(sums, device);
    quantise(placed_rows.view(), placed_out.view(), scale_of(placed_scale.view()), c.source,
             c.of_requests ? placed_sums.view() : Tensor());
    placed_out.fetch();
    placed_scale.fetch();
  }

  uint8_t byte(int64_t token, int64_t head, int64_t column) const {
    return static_cast<const uint8_t*>(out.view().data)[(token * kHeads + head) * c.head_dim + column];
  }

  QuantiseCase c;
  std::vector<int32_t> starts = {0, 20, 50, 50, kOwned};
  tools::OwnedTensor rows, out, scale;
};

// Formats, granularities and sources, heads of whole vectors and others.
inline std::vector<QuantiseCase> quantise_cases() {
  std::vector<QuantiseCase> cases;
  for (const DType from : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType to : {DType::f8e4m3, DType::f8e5m2}) {
      for (const ScaleSource source : {ScaleSource::given, ScaleSource::chosen}) {
        for (const int64_t head_dim : {16, 80, 272}) {
          cases.push_back({from, to, 1, false, source, head_dim});
          cases.push_back({from, to, 3, false, source, head_dim});
          cases.push_back({from, to, 1, true, source, head_dim});
          cases.push_back({from, to, 2, true, source, head_dim});
        }
      }
    }
  }
  return cases;
}

}  // namespace qkv::testing
