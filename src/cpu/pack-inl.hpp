// A tile of keys or values as panels of f32: what the product in product-inl.hpp streams through. Packing widens 16-
// and 8-bit caches for free, multiplies the latter by their scales, and makes every later access contiguous, whatever
// the pages' layout.
#if defined(QKV_CPU_PACK_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_PACK_INL_HPP_
#undef QKV_CPU_PACK_INL_HPP_
#else
#define QKV_CPU_PACK_INL_HPP_
#endif

#include "cpu/product-inl.hpp"
#include "cpu/vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

// Four elements each of rows[0], rows[4], …: one row of the 4 x 4 squares that transpose() turns.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_squares(D d, const T* const* rows, int32_t offset) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return hn::LoadU(d, reinterpret_cast<const Lane<T>*>(rows[0] + offset));
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_squares(half, rows + hn::MaxLanes(half), offset), load_squares(half, rows, offset));
  }
}
template <class T>
HWY_INLINE V load_squares_f32(const T* const* rows, int32_t offset) {
  return widen_elements<T>(F32(), load_squares(hn::Rebind<Lane<T>, F32>(), rows, offset));
}

// Transposes 4 x 4 squares side by side and stores their columns, that is, four dimensions of kLanes keys. Those of
// 8-bit caches are multiplied by the keys' scales.
template <class T>
HWY_INLINE void store_transposed(V r0, V r1, V r2, V r3, const float* scales, float* out, int64_t stride) {
  const hn::RepartitionToWide<F32> pairs;
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(F32(), r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(F32(), r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(F32(), r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(F32(), r2, r3));
  const auto store = [&](auto column, int d) HWY_ATTR {
    V x = hn::BitCast(F32(), column);
    if constexpr (kIs8Bit<T>) x = hn::Mul(x, hn::LoadU(F32(), scales));
    hn::Store(x, F32(), out + d * stride);
  };
  store(hn::InterleaveLower(pairs, low01, low23), 0);
  store(hn::InterleaveUpper(pairs, low01, low23), 1);
  store(hn::InterleaveLower(pairs, high01, high23), 2);
  store(hn::InterleaveUpper(pairs, high01, high23), 3);
}

// Keys [0, count) to panels [key / kPanel][head_dim][kPanel]; the last panel is filled up with zeros. scales [kTileKv],
// finite behind the last key: of 8-bit caches, not read for others.
template <class T>
void pack_keys(const std::byte* const* rows, const float* scales, int32_t count, int32_t head_dim, float* panels) {
  static constexpr T kZeros[kMaxHeadDim] = {};
  for (int32_t key = 0; key < round_up(count, kPanel); key += kLanes) {
    const T* k[kLanes];
    for (int32_t i = 0; i < kLanes; ++i) k[i] = key + i < count ? reinterpret_cast<const T*>(rows[key + i]) : kZeros;
    float* out = panels + key / kPanel * kPanel * int64_t{head_dim} + key % kPanel;
    int32_t d = 0;
    for (; d + 4 <= head_dim; d += 4, out += 4 * kPanel) {
      store_transposed<T>(load_squares_f32(k, d), load_squares_f32(k + 1, d), load_squares_f32(k + 2, d),
                          load_squares_f32(k + 3, d), scales + key, out, kPanel);
    }
    for (; d < head_dim; ++d, out += kPanel) {
      for (int32_t i = 0; i < kLanes; ++i) {
        out[i] = hn::GetLane(load_first(k[i] + d, 1));
        if constexpr (kIs8Bit<T>) out[i] *= scales[key + i];
      }
    }
  }
}

// Values [0, count) to panels [panel][kTileKv][panel_width]. True if all of them are finite.
template <class T>
bool pack_values(const std::byte* const* rows, const float* scales, int32_t count, int32_t head_dim_v, float* panels) {
  const int32_t width = value_panel_width(head_dim_v);
  V check = hn::Zero(F32());  // 0·x is 0 for every finite x and NaN for the others
  for (int32_t key = 0; key < count; ++key) {
    const T* v = reinterpret_cast<const T*>(rows[key]);
    for (int32_t begin = 0; begin < head_dim_v; begin += width) {
      float* out = panels + int64_t{begin} * kTileKv + int64_t{key} * width;
      const int32_t end = HWY_MIN(begin + width, head_dim_v);
      for (int32_t d = begin; d < end; d += kLanes, out += kLanes) {
        V x = d + kLanes <= end ? load(v + d) : load_first(v + d, end - d);
        if constexpr (kIs8Bit<T>) x = hn::Mul(x, set(scales[key]));
        check = hn::MulAdd(x, hn::Zero(F32()), check);
        hn::Store(x, F32(), out);
      }
    }
  }
  return hn::AllTrue(F32(), hn::Eq(check, check));
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
