// The products of prefill on vectors: everything is widened to f32 as it is packed.
#if defined(QKV_CPU_PANEL_PRODUCTS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_PANEL_PRODUCTS_INL_HPP_
#undef QKV_CPU_PANEL_PRODUCTS_INL_HPP_
#else
#define QKV_CPU_PANEL_PRODUCTS_INL_HPP_
#endif

#include "cpu/many_rows-inl.hpp"
#include "cpu/pack-inl.hpp"
#include "cpu/product-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

class PanelProducts {
 public:
  static constexpr int32_t kBlockRows = cpu::HWY_NAMESPACE::kBlockRows;
  static constexpr int32_t kTileRows = kTileQ;
  static constexpr int32_t kPanel = cpu::HWY_NAMESPACE::kPanel;

  struct Memory {
    Scratch<float> query, keys, values, key_scales, value_scales;
  };

  static int32_t out_stride(const ForwardTask& task) { return round_up(task.head_dim_v, kLanes); }

  PanelProducts(const ForwardTask& task, int32_t rows, Memory& memory)
      : task_(task),
        value_width_(value_panel_width(task.head_dim_v)),
        out_stride_(out_stride(task)),
        query_(memory.query.reserve(int64_t{rows} * task.head_dim)),
        keys_(memory.keys.reserve(int64_t{kTileKv} * task.head_dim)),
        values_(memory.values.reserve(int64_t{kTileKv} * round_up(out_stride_, value_width_))),
        key_scales_(memory.key_scales.reserve(kTileKv)),
        value_scales_(memory.value_scales.reserve(kTileKv)) {}

  void load_query(int32_t row) { load_query_row(task_, row, query_row(row)); }
  void clear_query(int32_t row) { std::memset(query_row(row), 0, task_.head_dim * sizeof(float)); }

  void pack(const KeyTile& tile) {
    if (task_.kv.dtype == DType::f32) {
      pack_as<float>(tile);
    } else if (task_.kv.dtype == DType::f16) {
      pack_as<hwy::float16_t>(tile);
    } else if (task_.kv.dtype == DType::bf16) {
      pack_as<hwy::bfloat16_t>(tile);
    } else if (task_.kv.dtype == DType::f8e4m3) {
      pack_as<F8E4M3>(tile);
    } else if (task_.kv.dtype == DType::i8) {
      pack_as<int8_t>(tile);
    } else {
      pack_as<F8E5M2>(tile);
    }
  }

  // Scores of the block of rows from `row` of the item on and `count` keys of the panel.
  void multiply_keys(int32_t row, int32_t panel, int32_t count, float* scores) const {
    const float* keys = keys_ + int64_t{panel} * task_.head_dim;
    with_vectors((count + kLanes - 1) / kLanes, [&](auto vectors) HWY_ATTR {
      multiply_store<vectors()>(query_row(row), task_.head_dim, keys, kPanel, task_.head_dim, scores, kScoreStride);
    });
  }

  // Query rows carry the scale.
  HWY_INLINE V scaled(V score) const { return score; }

  HWY_INLINE static void store_weights(const V (&weights)[4], int32_t key, float* scores) {
    for (int i = 0; i < 4; ++i) hn::Store(weights[i], F32(), scores + key + i * kLanes);
  }
  static float weight(const float* weights, int32_t key) { return weights[key]; }

  bool are_values_finite() const { return values_finite_; }
  // From column d on, zeros behind the last.
  HWY_INLINE V value(int32_t key, int32_t d) const {
    const float* panel = values_ + int64_t{d / value_width_ * value_width_} * kTileKv;
    return hn::Load(F32(), panel + int64_t{key} * value_width_ + d % value_width_);
  }

  void multiply_values(const QueryTile& tile) const {
    for (int32_t begin = 0; begin < task_.head_dim_v; begin += value_width_) {
      const float* values = values_ + int64_t{begin} * kTileKv;
      const int32_t width = HWY_MIN(value_width_, out_stride_ - begin);
      with_vectors(width / kLanes, [&](auto vectors) HWY_ATTR {
        for (int32_t row = 0; row < tile.num_rows; row += kBlockRows) {
          const RowMask& range = tile.ranges[row / kBlockRows];
          if (range.begin == range.end) continue;
          multiply_accumulate<vectors()>(tile.weights + int64_t{row} * kScoreStride + range.begin, kScoreStride,
                                         values + int64_t{range.begin} * value_width_, value_width_,
                                         range.end - range.begin, tile.decay + row,
                                         tile.output + int64_t{row} * out_stride_ + begin, out_stride_);
        }
      });
    }
  }

 private:
  template <class T>
  void pack_as(const KeyTile& tile) {
    if constexpr (kIs8Bit<T>) {
      find_scales(task_.kv, false, tile.begin, tile.begin + tile.count, kTileKv, key_scales_);
      find_scales(task_.kv, true, tile.begin, tile.begin + tile.count, kTileKv, value_scales_);
    }
    pack_keys<T>(tile.keys, key_scales_, tile.count, task_.head_dim, keys_);
    values_finite_ = pack_values<T>(tile.values, value_scales_, tile.count, task_.head_dim_v, values_);
  }

  float* query_row(int32_t row) const { return query_ + int64_t{row} * task_.head_dim; }

  const ForwardTask& task_;
  const int32_t value_width_;
  const int32_t out_stride_;
  float* const query_;         // [rows, head_dim], scaled
  float* const keys_;          // panels, see pack_keys
  float* const values_;        // panels, see pack_values
  float* const key_scales_;    // [kTileKv], of 8-bit caches
  float* const value_scales_;  // likewise
  bool values_finite_ = true;
};

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
