// The products of prefill on the tiles of AMX, for queries, keys and values of bf16: 16 x 16 sums of 32 products an
// instruction. A weight is the sum of two bf16, so that no accuracy is lost. Numbers below 2^-126 count as 0.
#if defined(QKV_CPU_TILE_PRODUCTS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_TILE_PRODUCTS_INL_HPP_
#undef QKV_CPU_TILE_PRODUCTS_INL_HPP_
#else
#define QKV_CPU_TILE_PRODUCTS_INL_HPP_
#endif

#include "cpu/many_rows-inl.hpp"
#include "cpu/pack-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_TILES

// The eight tile registers, 16 rows of 64 bytes each: sums 0 to 3, left operands 4 and 5, right ones 6 and 7.
// Written as assembly, since the compiler's own functions need a target that Highway's attributes do not name.
namespace tiles {

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A thread's tiles are configured while this lives.
class Use {
 public:
  Use() {
    static constexpr Configuration kAll;
    asm volatile("ldtilecfg %0" ::"m"(kAll) : "memory");
  }
  ~Use() { asm volatile("tilerelease" ::: "memory"); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
};

template <int kTile>
HWY_INLINE void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
HWY_INLINE void load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
HWY_INLINE void store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
// sum[r][c] += Σ_i left[r][i]·right[i][c] over 32 bf16: right holds pairs of neighbouring i side by side.
template <int kSum, int kLeft, int kRight>
HWY_INLINE void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}
HWY_INLINE void multiply_all() {
  multiply<0, 4, 6>();
  multiply<1, 4, 7>();
  multiply<2, 5, 6>();
  multiply<3, 5, 7>();
}

}  // namespace tiles

class TileProducts {
 public:
  static constexpr int32_t kBlockRows = 32;
  static constexpr int32_t kTileRows = 32;
  static constexpr int32_t kPanel = 32;
  // Of a step, which the tiles hold at once: columns of queries and keys, keys of weights and values.
  static constexpr int32_t kDepth = 32;

  struct Memory {
    Scratch<uint16_t> query;
    Scratch<uint32_t> keys, values;
  };

  static bool supports(const ForwardTask& task) {
    return task.query_dtype == DType::bf16 && task.kv.dtype == DType::bf16 && task.head_dim % 8 == 0;
  }

  static int32_t out_stride(const ForwardTask& task) { return round_up(task.head_dim_v, 2 * kLanes); }

  TileProducts(const ForwardTask& task, int32_t rows, Memory& memory)
      : task_(task),
        depth_(round_up(task.head_dim, kDepth)),
        out_stride_(out_stride(task)),
        factor_(set(query_factor(task))),
        query_(memory.query.reserve(int64_t{rows} * depth_)),
        keys_(memory.keys.reserve(int64_t{kTileKv} * depth_ / 2)),
        values_(memory.values.reserve(int64_t{kTileKv} / 2 * out_stride_)) {}

  void load_query(int32_t row) {
    const std::byte* query =
        task_.tokens[row / task_.group_size].query + row % task_.group_size * task_.query_head_stride;
    clear_query(row);
    std::memcpy(query_ + int64_t{row} * depth_, query, task_.head_dim * sizeof(uint16_t));
  }
  void clear_query(int32_t row) { std::memset(query_ + int64_t{row} * depth_, 0, depth_ * sizeof(uint16_t)); }

  void pack(const KeyTile& tile) {
    tile_ = tile;
    for (int32_t key = 0; key < round_up(tile.count, kPanel); key += kLanes) pack_keys(key);
    V check = hn::Zero(F32());
    for (int32_t key = 0; key < round_up(tile.count, kDepth); key += 2) check = pack_value_pair(key, check);
    values_finite_ = hn::AllTrue(F32(), hn::Eq(check, check));
  }

  void multiply_keys(int32_t row, int32_t panel, int32_t /*count*/, float* scores) const {
    const int64_t query_stride = depth_ * sizeof(uint16_t);
    const uint16_t* query = query_ + int64_t{row} * depth_;
    const uint32_t* keys = keys_ + int64_t{panel} * (depth_ / 2);
    const uint32_t* next_keys = keys + int64_t{kLanes} * (depth_ / 2);
    tiles::clear<0>();
    tiles::clear<1>();
    tiles::clear<2>();
    tiles::clear<3>();
    for (int32_t d = 0; d < depth_; d += kDepth) {
      tiles::load<4>(query + d, query_stride);
      tiles::load<5>(query + d + int64_t{kRowsOfTile} * depth_, query_stride);
      tiles::load<6>(keys + int64_t{d / 2} * kLanes, kTileStride);
      tiles::load<7>(next_keys + int64_t{d / 2} * kLanes, kTileStride);
      tiles::multiply_all();
    }
    store_sums(scores, kScoreStride);
  }

  // Queries stay as they are, so that their bits are those of the product.
  HWY_INLINE V scaled(V score) const { return hn::Mul(score, factor_); }

  // Two bf16 in the place of each score, that of 32 keys and what it leaves over: 16 bits of each weight.
  HWY_INLINE static void store_weights(const V (&weights)[4], int32_t key, float* scores) {
    store_pair(weights[0], weights[1], scores + key);
    store_pair(weights[2], weights[3], scores + key + kDepth);
  }
  static float weight(const float* weights, int32_t key) {
    const auto* step = reinterpret_cast<const std::byte*>(weights + key / kDepth * kDepth) + 2 * (key % kDepth);
    return load_f32(step, DType::bf16) + load_f32(step + kTileStride, DType::bf16);
  }

  bool are_values_finite() const { return values_finite_; }
  HWY_INLINE V value(int32_t key, int32_t d) const {
    return load_or_zero(reinterpret_cast<const hwy::bfloat16_t*>(tile_.values[key]) + d, task_.head_dim_v - d);
  }

  void multiply_values(const QueryTile& tile) const {
    static_assert(kTileRows == kBlockRows);
    const RowMask& range = tile.ranges[0];
    if (range.begin == range.end) return;
    for (int32_t row = 0; row < kBlockRows; ++row) rescale(tile.decay[row], tile.output + int64_t{row} * out_stride_);
    for (int32_t column = 0; column < out_stride_; column += 2 * kLanes) {
      accumulate_values(tile.weights, range, column, tile.output + column);
    }
  }

 private:
  static constexpr int32_t kRowsOfTile = 16;
  static constexpr int64_t kTileStride = 64;  // bytes between the rows of a packed tile
  static_assert(kLanes == 16);

  HWY_INLINE void store_sums(float* out, int64_t stride) const {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
    tiles::store<0>(out, bytes);
    tiles::store<1>(out + kLanes, bytes);
    tiles::store<2>(out + kRowsOfTile * stride, bytes);
    tiles::store<3>(out + kRowsOfTile * stride + kLanes, bytes);
  }

  void accumulate_values(const float* weights, const RowMask& range, int32_t column, float* out) const {
    const int64_t bytes = out_stride_ * static_cast<int64_t>(sizeof(float));
    tiles::load<0>(out, bytes);
    tiles::load<1>(out + kLanes, bytes);
    tiles::load<2>(out + kRowsOfTile * out_stride_, bytes);
    tiles::load<3>(out + kRowsOfTile * out_stride_ + kLanes, bytes);
    const uint32_t* values = values_ + int64_t{column} * (kTileKv / 2);
    const uint32_t* next_values = values + int64_t{kLanes} * (kTileKv / 2);
    for (int32_t key = range.begin / kDepth * kDepth; key < range.end; key += kDepth) {
      tiles::load<6>(values + int64_t{key / 2} * kLanes, kTileStride);
      tiles::load<7>(next_values + int64_t{key / 2} * kLanes, kTileStride);
      for (const float* part : {weights + key, weights + key + kLanes}) {
        tiles::load<4>(part, kScoreStride * sizeof(float));
        tiles::load<5>(part + int64_t{kRowsOfTile} * kScoreStride, kScoreStride * sizeof(float));
        tiles::multiply_all();
      }
    }
    store_sums(out, out_stride_);
  }

  HWY_INLINE void rescale(float decay, float* out) const {
    if (decay == 1) return;
    for (int32_t d = 0; d < out_stride_; d += kLanes) {
      hn::Store(hn::Mul(hn::Load(F32(), out + d), set(decay)), F32(), out + d);
    }
  }

  // Keys [key, key + 16): pairs of columns, each of 16 keys side by side.
  void pack_keys(int32_t key) {
    static constexpr float kZeros[kMaxHeadDim / 2] = {};
    const float* pairs[kLanes];
    for (int32_t i = 0; i < kLanes; ++i) {
      pairs[i] = key + i < tile_.count ? reinterpret_cast<const float*>(tile_.keys[key + i]) : kZeros;
    }
    auto* out = reinterpret_cast<float*>(keys_ + int64_t{key} * (depth_ / 2));
    int32_t d = 0;
    for (; d < task_.head_dim / 2; d += 4, out += 4 * kLanes) {
      store_transposed<float>(load_squares_f32(pairs, d), load_squares_f32(pairs + 1, d),
                              load_squares_f32(pairs + 2, d), load_squares_f32(pairs + 3, d), nullptr, out, kLanes);
    }
    for (; d < depth_ / 2; ++d, out += kLanes) hn::Store(hn::Zero(F32()), F32(), out);
  }

  // Values of two keys, column by column, in tiles of 16 columns. 0·x is 0 for every finite x and NaN for the others.
  V pack_value_pair(int32_t key, V check) {
    const auto* first = reinterpret_cast<const hwy::bfloat16_t*>(tile_.values[HWY_MIN(key, tile_.count - 1)]);
    const auto* second = reinterpret_cast<const hwy::bfloat16_t*>(tile_.values[HWY_MIN(key + 1, tile_.count - 1)]);
    uint32_t* out = values_ + int64_t{key / 2} * kLanes;
    for (int32_t d = 0; d < out_stride_; d += kLanes, out += int64_t{kTileKv} / 2 * kLanes) {
      const V low = key < tile_.count ? load_or_zero(first + d, task_.head_dim_v - d) : hn::Zero(F32());
      const V high = key + 1 < tile_.count ? load_or_zero(second + d, task_.head_dim_v - d) : hn::Zero(F32());
      check = hn::MulAdd(low, hn::Zero(F32()), hn::MulAdd(high, hn::Zero(F32()), check));
      hn::Store(hn::Or(hn::ShiftRight<16>(hn::BitCast(U32(), low)), hn::BitCast(U32(), high)), U32(), out);
    }
    return check;
  }

  HWY_INLINE static V load_or_zero(const hwy::bfloat16_t* elements, int32_t count) {
    if (count >= kLanes) return load(elements);
    return count > 0 ? load_first(elements, count) : hn::Zero(F32());
  }

  HWY_INLINE static void store_pair(V first, V second, float* out) {
    const V first_part = nearest_bf16(first);
    const V second_part = nearest_bf16(second);
    hn::Store(to_bf16(first_part, second_part), F32(), out);
    hn::Store(to_bf16(hn::Sub(first, first_part), hn::Sub(second, second_part)), F32(), out + kLanes);
  }

  // Where that makes a number of NaN, what is left over is still NaN.
  HWY_INLINE static V nearest_bf16(V x) {
    const auto rounded = hn::Add(hn::BitCast(U32(), x), hn::Set(U32(), 0x8000));
    return hn::BitCast(F32(), hn::And(rounded, hn::Set(U32(), 0xFFFF0000U)));
  }

  // Side by side, rounded to nearest even; NaN is kept.
  HWY_INLINE static V to_bf16(V first, V second) {
    V both;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both.raw) : "v"(second.raw), "v"(first.raw));
    return both;
  }

  const ForwardTask& task_;
  const int32_t depth_;       // head_dim in whole steps
  const int32_t out_stride_;  // head_dim_v in whole pairs of tiles
  const V factor_;
  uint16_t* const query_;   // [rows, depth], bf16
  uint32_t* const keys_;    // [kTileKv / 16][depth / 2][16]: pairs of columns
  uint32_t* const values_;  // [out_stride / 16][kTileKv / 2][16]: pairs of keys
  KeyTile tile_;
  bool values_finite_ = true;
};

#endif  // QKV_TARGET_HAS_TILES
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
