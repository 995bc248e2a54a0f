// The vocabulary of the kernels over one target's vectors: loads that widen to f32, and exp2 and tanh that keep NaN.
#if defined(QKV_CPU_VECTORS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_VECTORS_INL_HPP_
#undef QKV_CPU_VECTORS_INL_HPP_
#else
#define QKV_CPU_VECTORS_INL_HPP_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using V = hn::Vec<F32>;

inline constexpr int32_t kLanes = hn::MaxLanes(F32());
inline constexpr float kLog2e = 1.44269504088896341F;

constexpr int32_t round_up(int32_t count, int32_t multiple) { return (count + multiple - 1) / multiple * multiple; }

HWY_INLINE V set(float value) { return hn::Set(F32(), value); }
HWY_INLINE V negative_infinity() { return set(-__builtin_inff()); }

// Elements of the cache to f32.
template <class D>
HWY_INLINE hn::Vec<D> widen(D, hn::Vec<D> x) {
  return x;
}
template <class D>
HWY_INLINE hn::Vec<D> widen(D d, hn::Vec<hn::Rebind<hwy::bfloat16_t, D>> x) {
  return hn::PromoteTo(d, x);
}
template <class D>
HWY_INLINE hn::Vec<D> widen(D d, hn::Vec<hn::Rebind<hwy::float16_t, D>> x) {
#if HWY_TARGET == HWY_SSE4
  // No instruction does it, and Highway's emulation makes numbers of NaN and infinity.
  const hn::RebindToUnsigned<D> u32;
  const auto half = hn::PromoteTo(u32, hn::BitCast(hn::Rebind<uint16_t, D>(), x));
  const auto magnitude = hn::And(half, hn::Set(u32, 0x7FFF));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(half, magnitude));
  const auto scaled = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112F));
  const auto special = hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(u32, 0x7BFF)), hn::Set(u32, 0x7F800000));
  return hn::BitCast(d, hn::Or(hn::Or(hn::BitCast(u32, scaled), special), sign));
#else
  return hn::PromoteTo(d, x);
#endif
}

template <class D>
HWY_INLINE hn::Vec<D> widen(D d, hn::Vec<hn::Rebind<int8_t, D>> x) {
  return hn::ConvertTo(d, hn::PromoteTo(hn::RebindToSigned<D>(), x));
}

// Elements of 8-bit caches, as int8_t is. They are read without their scale.
struct F8E4M3 {
  uint8_t bits;
};
struct F8E5M2 {
  uint8_t bits;
};
template <class T>
inline constexpr bool kIsF8E4M3 = std::is_same_v<T, F8E4M3>;
template <class T>
inline constexpr bool kIsFloat8 = kIsF8E4M3<T> || std::is_same_v<T, F8E5M2>;
template <class T>
inline constexpr bool kIs8Bit = sizeof(T) == 1;
// The lanes in which Highway holds elements.
template <class T>
using Lane = std::conditional_t<kIsFloat8<T>, uint8_t, T>;

// An e5m2 is the upper half of an f16. An e4m3 fits into one, but for its exponent, 8 too small, and its NaN.
template <class T, class D>
HWY_INLINE hn::Vec<D> widen_float8(D d, hn::Vec<hn::Rebind<uint8_t, D>> x) {
  const hn::Rebind<uint16_t, D> u16;
  const hn::Rebind<hwy::float16_t, D> f16;
  const auto bits = hn::PromoteTo(u16, x);
  const auto upper = hn::ShiftLeft<8>(bits);
  if constexpr (!kIsF8E4M3<T>) return widen(d, hn::BitCast(f16, upper));
  const auto sign = hn::And(upper, hn::Set(u16, 0x8000));
  const auto magnitude = hn::ShiftLeft<7>(hn::And(bits, hn::Set(u16, 0x7F)));
  const auto value = hn::Mul(widen(d, hn::BitCast(f16, hn::Or(sign, magnitude))), hn::Set(d, 256.0F));
  const auto is_number = hn::Le(hn::Abs(value), hn::Set(d, 448.0F));
  return hn::IfThenElse(is_number, value, hn::Set(d, __builtin_nanf("")));
}

template <class T, class D>
HWY_INLINE hn::Vec<D> widen_elements(D d, hn::Vec<hn::Rebind<Lane<T>, D>> x) {
  if constexpr (kIsFloat8<T>) {
    return widen_float8<T>(d, x);
  } else {
    return widen(d, x);
  }
}

// Elements p[0 … kLanes) in order.
template <class T>
HWY_INLINE V load(const T* p) {
  return widen_elements<T>(F32(), hn::LoadU(hn::Rebind<Lane<T>, F32>(), reinterpret_cast<const Lane<T>*>(p)));
}

// The first `count` < kLanes elements, then zeros. Reads nothing behind them.
template <class T>
HWY_INLINE V load_first(const T* p, int32_t count) {
  alignas(64) T elements[kLanes] = {};
  std::memcpy(elements, p, count * sizeof(T));
  return load(elements);
}

// Elements p[0 … 2·kLanes) in the order that is cheapest to widen: even and odd ones apart for bf16.
template <class T>
HWY_INLINE void load_pair(const T* p, V& first, V& second) {
  first = load(p);
  second = load(p + kLanes);
}
template <>
HWY_INLINE void load_pair(const hwy::bfloat16_t* p, V& first, V& second) {
  const auto both = hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(p));
  first = hn::BitCast(F32(), hn::ShiftLeft<16>(both));
  second = hn::BitCast(F32(), hn::And(both, hn::Set(U32(), 0xFFFF0000U)));
}

// max(limit, x), and NaN where x is NaN.
HWY_INLINE V at_least(V limit, V x) {
#if HWY_ARCH_X86
  return hn::Max(limit, x);  // returns its second operand if either is NaN
#else
  return hn::IfThenElse(hn::Lt(x, limit), limit, x);
#endif
}

// 2^x = scale·(1 + excess) for x <= 0; exactly 1 at 0, and exactly 0 (never a denormal that would slow the products
// down) below -126.5. NaN stays NaN: it survives in `excess`, which has 4.3e-7 relative error with 5 terms (so that 2^x
// has 1.8e-7) and 1.1e-8 with 6.
struct PowerOfTwo {
  V scale;
  V excess;
};
template <int kTerms>
HWY_INLINE PowerOfTwo split_exp2(V x) {
  // Minimax for (2^f - 1) / f on [-0.5, 0.5], highest power first.
  static_assert(kTerms == 5 || kTerms == 6);
  constexpr float kFive[] = {0x1.5d87dep-10F, 0x1.3cbe58p-7F, 0x1.c6b26ep-5F, 0x1.ebfa4ep-3F, 0x1.62e42ep-1F};
  constexpr float kSix[] = {0x1.4308fap-13F, 0x1.5f07b4p-10F, 0x1.3b2ba0p-7F,
                            0x1.c6af6ep-5F,  0x1.ebfbdep-3F,  0x1.62e430p-1F};
  const float* kFactors = kTerms == 5 ? kFive : kSix;
  x = at_least(set(-127.0F), x);
  const V shifter = set(0x1.8p23F + 127.0F);  // leaves n + 127 in the low bits
  const V shifted = hn::Add(x, shifter);
  const V fraction = hn::Sub(x, hn::Sub(shifted, shifter));
  V excess = set(kFactors[0]);
  for (int i = 1; i < kTerms; ++i) excess = hn::MulAdd(excess, fraction, set(kFactors[i]));
  // A product with the scale, not a sum of exponent bits: bits of a NaN's payload could make it a number.
  const V scale = hn::BitCast(F32(), hn::ShiftLeft<23>(hn::BitCast(U32(), shifted)));
  return {scale, hn::Mul(excess, fraction)};
}

HWY_INLINE V exp2_nonpositive(V x) {
  const PowerOfTwo power = split_exp2<5>(x);
  return hn::MulAdd(power.excess, power.scale, power.scale);
}

// tanh x = (1 - e) / (1 + e) with e = exp(-2|x|); 1 - e is summed without cancellation, so small x keep their digits.
HWY_INLINE V tanh(V x) {
  const PowerOfTwo power = split_exp2<6>(hn::Mul(hn::Abs(x), set(-2.0F * kLog2e)));
  const V expm1 = hn::MulAdd(power.excess, power.scale, hn::Sub(power.scale, set(1.0F)));
  const V magnitude = hn::Div(hn::Neg(expm1), hn::Add(expm1, set(2.0F)));
  return hn::CopySign(magnitude, x);
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
