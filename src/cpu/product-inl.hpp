// The matrix product of both steps of attention: six rows of f32, broadcast element by element, times a packed panel,
// as many accumulators as the registers hold. Every element is one chain of fused multiply-adds in rising order, the
// same in every instance of the template, so a row's bits do not depend on its place in a tile.
#if defined(QKV_CPU_PRODUCT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_PRODUCT_INL_HPP_
#undef QKV_CPU_PRODUCT_INL_HPP_
#else
#define QKV_CPU_PRODUCT_INL_HPP_
#endif

#include "cpu/kernels.hpp"
#include "cpu/vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

// 6 x 4 vectors fill 24 of 32 registers (AVX-512, NEON), 6 x 2 fill 12 of 16.
inline constexpr int32_t kBlockRows = 6;
inline constexpr int32_t kBlockVectors = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 ? 2 : 4;
// Keys of a key panel.
inline constexpr int32_t kPanel = kBlockVectors * kLanes;
static_assert(kTileKv % kPanel == 0);

// Dimensions of a value panel: as few panels as possible, as even as possible.
constexpr int32_t value_panel_width(int32_t head_dim_v) {
  const int32_t vectors = (head_dim_v + kLanes - 1) / kLanes;
  const int32_t panels = (vectors + kBlockVectors - 1) / kBlockVectors;
  return (vectors + panels - 1) / panels * kLanes;
}

// sums[r][v] = Σ_i a[r·a_stride + i] · b[i·b_stride + v-th vector]
// The loops over r and v are unrolled by decree: otherwise GCC keeps the sums in memory around the loop over i.
template <int kVectors>
HWY_INLINE void multiply(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT b, int64_t b_stride,
                         int64_t depth, V (&sums)[kBlockRows][kVectors]) {
  HWY_UNROLL(8)
  for (int r = 0; r < kBlockRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(F32());
  }
  for (int64_t i = 0; i < depth; ++i, b += b_stride) {
    V column[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) column[v] = hn::Load(F32(), b + v * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kBlockRows; ++r) {
      const V factor = set(a[r * a_stride + i]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, column[v], sums[r][v]);
    }
  }
}

// out = a·b
template <int kVectors>
HWY_NOINLINE void multiply_store(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                 float* out, int64_t out_stride) {
  V sums[kBlockRows][kVectors];
  multiply<kVectors>(a, a_stride, b, b_stride, depth, sums);
  HWY_UNROLL(8)
  for (int r = 0; r < kBlockRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) hn::Store(sums[r][v], F32(), out + r * out_stride + v * kLanes);
  }
}

// out = out·decay + a·b, one decay a row
template <int kVectors>
HWY_NOINLINE void multiply_accumulate(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                      const float* decay, float* out, int64_t out_stride) {
  V sums[kBlockRows][kVectors];
  multiply<kVectors>(a, a_stride, b, b_stride, depth, sums);
  HWY_UNROLL(8)
  for (int r = 0; r < kBlockRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      float* element = out + r * out_stride + v * kLanes;
      hn::Store(hn::MulAdd(hn::Load(F32(), element), set(decay[r]), sums[r][v]), F32(), element);
    }
  }
}

// Calls body(integral constant) for a run-time count of vectors, 1 … kBlockVectors.
template <class Body>
HWY_INLINE void with_vectors(int32_t vectors, const Body& body) {
  if (vectors == 1) return body(std::integral_constant<int, 1>());
  if (vectors == 2) return body(std::integral_constant<int, 2>());
  if constexpr (kBlockVectors > 2) {
    if (vectors == 3) return body(std::integral_constant<int, 3>());
    body(std::integral_constant<int, 4>());
  }
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
