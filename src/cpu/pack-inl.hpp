// A tile of keys or values as panels of f32: what the product in product-inl.hpp streams through. Packing widens 16-bit
// caches for free and makes every later access contiguous, whatever the pages' layout.
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

using Quad = hn::FixedTag<float, 4>;

// Four rows of four elements to four columns, `column_stride` apart.
HWY_INLINE void store_transposed(hn::Vec<Quad> r0, hn::Vec<Quad> r1, hn::Vec<Quad> r2, hn::Vec<Quad> r3, float* out,
                                 int64_t column_stride) {
  const hn::RepartitionToWide<Quad> pairs;
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(Quad(), r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(Quad(), r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(Quad(), r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(Quad(), r2, r3));
  hn::Store(hn::BitCast(Quad(), hn::InterleaveLower(pairs, low01, low23)), Quad(), out);
  hn::Store(hn::BitCast(Quad(), hn::InterleaveUpper(pairs, low01, low23)), Quad(), out + column_stride);
  hn::Store(hn::BitCast(Quad(), hn::InterleaveLower(pairs, high01, high23)), Quad(), out + 2 * column_stride);
  hn::Store(hn::BitCast(Quad(), hn::InterleaveUpper(pairs, high01, high23)), Quad(), out + 3 * column_stride);
}

// Keys [0, count) to panels [key / kPanel][head_dim][kPanel]; the last panel is filled up with zeros.
template <class T>
void pack_keys(const std::byte* const* rows, int32_t count, int32_t head_dim, float* panels) {
  alignas(64) static constexpr T kNothing[4] = {};
  for (int32_t key = 0; key < round_up(count, kPanel); key += 4) {
    float* column = panels + key / kPanel * kPanel * int64_t{head_dim} + key % kPanel;
    const T* k[4];
    for (int32_t i = 0; i < 4; ++i) k[i] = key + i < count ? reinterpret_cast<const T*>(rows[key + i]) : nullptr;
    const auto quad = [&](int32_t i, int32_t d)
                          HWY_ATTR { return widen(Quad(), k[i] != nullptr ? k[i] + d : kNothing); };
    int32_t d = 0;
    for (; d + 4 <= head_dim; d += 4) {
      store_transposed(quad(0, d), quad(1, d), quad(2, d), quad(3, d), column + int64_t{d} * kPanel, kPanel);
    }
    for (; d < head_dim; ++d) {
      for (int32_t i = 0; i < 4; ++i) {
        column[int64_t{d} * kPanel + i] = k[i] != nullptr ? hn::GetLane(load_first(k[i] + d, 1)) : 0.0F;
      }
    }
  }
}

// Values [0, count) to panels [panel][kTileKv][panel_width]. True if all of them are finite.
template <class T>
bool pack_values(const std::byte* const* rows, int32_t count, int32_t head_dim_v, float* panels) {
  const int32_t width = value_panel_width(head_dim_v);
  V check = hn::Zero(F32());  // 0·x is 0 for every finite x and NaN for the others
  for (int32_t key = 0; key < count; ++key) {
    const T* v = reinterpret_cast<const T*>(rows[key]);
    for (int32_t begin = 0; begin < head_dim_v; begin += width) {
      float* out = panels + int64_t{begin} * kTileKv + int64_t{key} * width;
      const int32_t end = HWY_MIN(begin + width, head_dim_v);
      for (int32_t d = begin; d < end; d += kLanes, out += kLanes) {
        const V x = d + kLanes <= end ? load(v + d) : load_first(v + d, end - d);
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
