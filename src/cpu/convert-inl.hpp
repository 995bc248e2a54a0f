// Vectors of f32 from and to every format of rows, with the very bits of the scalar conversions in core/. What
// vectors-inl.hpp has for the attention kernels is as exact but for NaN, whose sign and payload nobody sees there.
#if defined(QKV_CPU_CONVERT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_CONVERT_INL_HPP_
#undef QKV_CPU_CONVERT_INL_HPP_
#else
#define QKV_CPU_CONVERT_INL_HPP_
#endif

#include "core/index/eight_bit.hpp"
#include "core/index/float8.hpp"
#include "cpu/vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

using Bits = hn::Vec<I32>;

HWY_INLINE Bits set_bits(uint32_t bits) { return hn::Set(I32(), static_cast<int32_t>(bits)); }
HWY_INLINE Bits bits_of(V x) { return hn::BitCast(I32(), x); }
HWY_INLINE V f32_of(Bits bits) { return hn::BitCast(F32(), bits); }
HWY_INLINE V f32_of(uint32_t bits) { return f32_of(set_bits(bits)); }

// A format of fewer bits than f32 and smaller exponents.
struct NarrowFormat {
  uint32_t code_bits;
  uint32_t mantissa_bits;
  uint32_t min_exponent;  // biased as f32's: of the smallest normal number
  uint32_t largest;       // code: what lies beyond it becomes it. f16: infinity
  uint32_t nan;

  constexpr uint32_t sign() const { return 1U << (code_bits - 1); }
  // Of f32's mantissa.
  constexpr uint32_t dropped_bits() const { return index::kF32MantissaBits - mantissa_bits; }
  constexpr uint32_t smallest_normal() const { return min_exponent << index::kF32MantissaBits; }
  // In f32, of a code that is no NaN and not below the smallest normal number.
  constexpr uint32_t f32_bits(uint32_t code) const {
    return (code << dropped_bits()) + smallest_normal() - (1U << index::kF32MantissaBits);
  }
};

constexpr NarrowFormat narrow_format(index::Float8Format format) {
  return {8, format.mantissa_bits, format.min_exponent, format.largest, index::kFloat8Nan};
}

template <class T>
inline constexpr NarrowFormat kNarrowFormat = narrow_format(kIsF8E4M3<T> ? index::kF8E4M3 : index::kF8E5M2);
template <>
inline constexpr NarrowFormat kNarrowFormat<hwy::float16_t> = {16, 10, 127 - 14, 0x7C00, 0x7E00};

// The code of |x| in the lower bits of the lanes, rounded to nearest even; NaN: any.
//
// To |x| with exponent e a power of two is added that is so much larger that the sum's last bit is worth the last bit
// of a code with exponent e: the sum is rounded where the code should be, and its lower bits are the mantissa with its
// leading 1. Below the smallest normal number e stays there, as it does in the format, and there is no leading 1. What
// e adds to the code, less its bias and the leading 1, may carry into the upper bits, which are thrown away.
template <class T>
HWY_INLINE Bits narrow_magnitude(V x) {
  constexpr NarrowFormat kFormat = kNarrowFormat<T>;
  constexpr int kDropped = kFormat.dropped_bits();
  // Even, so that it may lie in the large number: it does not change to which side ties go.
  constexpr uint32_t kBias = (kFormat.min_exponent << kFormat.mantissa_bits) & (2 * kFormat.sign() - 1);
  constexpr uint32_t kLarger = (uint32_t{kDropped} << index::kF32MantissaBits) + 2 * kFormat.sign() - kBias;
  static_assert(kBias % 2 == 0);
  const V limited = hn::Min(hn::Abs(x), f32_of(kFormat.f32_bits(kFormat.largest)));
  const Bits exponent =
      hn::Max(hn::And(bits_of(limited), set_bits(index::kF32Infinity)), set_bits(kFormat.smallest_normal()));
  const V sum = hn::Add(limited, f32_of(hn::Add(exponent, set_bits(kLarger))));
  return hn::Add(bits_of(sum), hn::ShiftRight<kDropped>(exponent));
}

// Codes in the lower bits of the lanes. A NaN is quiet, as every operation leaves it.
template <class T>
HWY_INLINE Bits narrow(V x) {
  constexpr NarrowFormat kFormat = kNarrowFormat<T>;
  const Bits upper = hn::ShiftRight<32 - kFormat.code_bits>(bits_of(x));
  const Bits code = hn::OrAnd(narrow_magnitude<T>(x), upper, set_bits(kFormat.sign()));
  const Bits nan = kIsFloat8<T> ? set_bits(kFormat.nan)  // which has no sign
                                : hn::OrAnd(set_bits(kFormat.nan), upper, set_bits(kFormat.sign()));
  return hn::IfThenElse(hn::RebindMask(I32(), hn::IsNaN(x)), nan, code);
}
template <>
HWY_INLINE Bits narrow<hwy::bfloat16_t>(V x) {
  const Bits upper = hn::ShiftRight<16>(bits_of(x));
  const Bits odd = hn::And(upper, set_bits(1));
  const Bits rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits_of(x), set_bits(0x7FFF)), odd));
  return hn::IfThenElse(hn::RebindMask(I32(), hn::IsNaN(x)), upper, rounded);
}
template <>
HWY_INLINE Bits narrow<int8_t>(V x) {
  // Added to this, a small number is rounded to a whole one, which is the sum's lower bits.
  const V shifter = set(0x1.8p23F);
  const V number = hn::IfThenElseZero(hn::Eq(x, x), x);
  const V limited = hn::Max(hn::Min(number, set(index::kLargestInt8)), set(index::kSmallestInt8));
  return bits_of(hn::Add(limited, shifter));
}

// The exponent and the mantissa are put where f32 has them. Below the smallest normal number there is no leading 1:
// with the smallest exponent it is there, and subtracted.
template <class T>
HWY_INLINE V widen_float8_exactly(hn::Vec<hn::Rebind<uint8_t, F32>> codes) {
  constexpr NarrowFormat kFormat = kNarrowFormat<T>;
  const Bits code = hn::PromoteTo(I32(), codes);
  const Bits magnitude = hn::And(code, set_bits(kFormat.sign() - 1));
  const Bits shifted = hn::ShiftLeft<kFormat.dropped_bits()>(magnitude);
  const V with_leading_one = f32_of(hn::Add(shifted, set_bits(kFormat.smallest_normal())));
  const Bits subnormal = bits_of(hn::Sub(with_leading_one, f32_of(kFormat.smallest_normal())));
  const Bits normal = hn::Add(shifted, set_bits(kFormat.f32_bits(0)));
  const auto is_normal = hn::Gt(magnitude, set_bits((1U << kFormat.mantissa_bits) - 1));
  Bits value = hn::IfThenElse(is_normal, normal, subnormal);
  if constexpr (!kIsF8E4M3<T>) {
    value = hn::IfThenElse(hn::Eq(magnitude, set_bits(index::kF8E5M2.infinity)), set_bits(index::kF32Infinity), value);
  }
  constexpr uint32_t kLargestNumber = kIsF8E4M3<T> ? kFormat.largest : index::kF8E5M2.infinity;
  value = hn::IfThenElse(hn::Gt(magnitude, set_bits(kLargestNumber)), set_bits(index::kF32Nan), value);
  return f32_of(hn::OrAnd(value, hn::ShiftLeft<24>(code), set_bits(0x80000000)));
}

// Elements p[0 … kLanes). Of a signalling NaN of 16 bits, the quiet one.
template <class T>
HWY_INLINE V load_exactly(const T* p) {
  if constexpr (kIsFloat8<T>) {
    return widen_float8_exactly<T>(hn::LoadU(hn::Rebind<uint8_t, F32>(), &p->bits));
  } else {
    return load(p);
  }
}

template <class T, class D>
HWY_INLINE auto narrow_codes(D codes, V x) {
#if HWY_TARGET != HWY_SSE4
  // The instruction keeps the payload of a NaN, of which the scalar conversion leaves nothing.
  if constexpr (std::is_same_v<T, hwy::float16_t>) {
    const V nan = hn::CopySignToAbs(f32_of(index::kF32Nan), x);
    const V number = hn::IfThenElse(hn::IsNaN(x), nan, x);
    return hn::BitCast(codes, hn::DemoteTo(hn::Rebind<hwy::float16_t, F32>(), number));
  }
#endif
  return hn::TruncateTo(codes, hn::BitCast(U32(), narrow<T>(x)));
}

// To p[0 … kLanes), rounded.
template <class T>
HWY_INLINE void store_narrow(V x, T* p) {
  if constexpr (sizeof(T) == sizeof(float)) {
    hn::StoreU(x, F32(), p);
  } else {
    using Code = std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>;
    const hn::Rebind<Code, F32> codes;
    hn::StoreU(narrow_codes<T>(codes, x), codes, reinterpret_cast<Code*>(p));
  }
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
