// The row kernels in vectors. A row goes through f32 a strip at a time, which stays in the first cache: so that formats
// need one loop each, not one a pair. Compiled without contraction (CMakeLists.txt): every instruction set leaves the
// bits of the plain definition, with or without fused multiply-adds.
#include "cpu/row_kernels.hpp"

#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/row_kernels.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// The order matters: the files below are compiled once a target.
#include "cpu/convert-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

inline constexpr int64_t kStrip = 256;

// Calls action with an element of the format, for its type.
template <class Action>
HWY_INLINE void with_type(DType dtype, const Action& action) {
  if (dtype == DType::f32) return action(float{});
  if (dtype == DType::f16) return action(hwy::float16_t{});
  if (dtype == DType::bf16) return action(hwy::bfloat16_t{});
  if (dtype == DType::f8e4m3) return action(F8E4M3{});
  if (dtype == DType::f8e5m2) return action(F8E5M2{});
  action(int8_t{});
}

// action(i, elements [i, i + kLanes) of the row): the last ones may be fewer, and zeros then follow.
template <class T, class Action>
HWY_INLINE void for_each_vector(const T* row, int64_t count, const Action& action) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) action(i, load_exactly(row + i));
  if (i == count) return;
  alignas(64) T last[kLanes] = {};
  std::memcpy(last, row + i, (count - i) * sizeof(T));
  action(i, load_exactly(last));
}

// `strip` has room for a whole vector at its end.
void widen_strip(DType dtype, const std::byte* row, int64_t count, float* strip) {
  with_type(dtype, [&](auto element) HWY_ATTR {
    for_each_vector(reinterpret_cast<const decltype(element)*>(row), count,
                    [&](int64_t i, V x) HWY_ATTR { hn::Store(x, F32(), strip + i); });
  });
}

template <Scaling kScaling, class T>
void narrow_strip(const float* values, int64_t count, float scale, T* target) {
  const V factor = set(scale);
  for_each_vector(values, count, [&](int64_t i, V x) HWY_ATTR {
    x = kScaling == Scaling::divided ? hn::Div(x, factor) : hn::Mul(x, factor);
    if (i + kLanes <= count) return store_narrow(x, target + i);
    alignas(64) T last[kLanes];
    store_narrow(x, last);
    std::memcpy(target + i, last, (count - i) * sizeof(T));
  });
}

void convert(const RowConversion& conversion, const std::byte* row, int64_t count, std::byte* target) {
  alignas(64) float strip[kStrip];
  with_type(conversion.to, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (int64_t begin = 0; begin < count; begin += kStrip) {
      const int64_t end = HWY_MIN(begin + kStrip, count);
      const float* values = reinterpret_cast<const float*>(row) + begin;
      if (conversion.from != DType::f32) {
        widen_strip(conversion.from, row + begin * size_bytes(conversion.from), end - begin, strip);
        values = strip;
      }
      T* out = reinterpret_cast<T*>(target) + begin;
      if (conversion.scaling == Scaling::divided) {
        narrow_strip<Scaling::divided>(values, end - begin, conversion.scale, out);
      } else {
        narrow_strip<Scaling::multiplied>(values, end - begin, conversion.scale, out);
      }
    }
  });
}

float largest_magnitude(DType dtype, const std::byte* row, int64_t count) {
  const V infinity = f32_of(index::kF32Infinity);
  V largest = hn::Zero(F32());
  with_type(dtype, [&](auto element) HWY_ATTR {
    for_each_vector(reinterpret_cast<const decltype(element)*>(row), count, [&](int64_t, V x) HWY_ATTR {
      const V magnitude = hn::Abs(x);
      largest = hn::Max(largest, hn::IfThenElseZero(hn::Lt(magnitude, infinity), magnitude));  // false for NaN
    });
  });
  return hn::GetLane(hn::MaxOfLanes(F32(), largest));
}

void add_weighted(DType dtype, const std::byte* row, float weight, int64_t count, float* sum) {
  with_type(dtype, [&](auto element) HWY_ATTR {
    for_each_vector(reinterpret_cast<const decltype(element)*>(row), count, [&](int64_t i, V x) HWY_ATTR {
      const V product = hn::Mul(set(weight), x);
      if (i + kLanes <= count) return hn::StoreU(hn::Add(hn::LoadU(F32(), sum + i), product), F32(), sum + i);
      alignas(64) float last[kLanes];
      const int64_t rest = count - i;
      hn::Store(hn::Add(load_first(sum + i, static_cast<int32_t>(rest)), product), F32(), last);
      std::memcpy(sum + i, last, rest * sizeof(float));
    });
  });
}

extern const RowKernels kRowKernels;  // for dispatch.cpp: else a constant is its file's own
const RowKernels kRowKernels{convert, largest_magnitude, add_weighted};

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();
