// Keys and values of the few-rows kernel between shared memory and products: the fragments that ldmatrix's words are or
// become, and what of them isn't finite.
#pragma once

#include "core/index/few_rows_fragments.hpp"
#include "core/index/float8.hpp"
#include "dtype.cuh"
#include "few_rows_tile.cuh"
#include "ptx/convert.cuh"

namespace qkv::cuda::few_rows {

// Two neighbouring 8-bit elements of a word, the low or the high ones, as f16.
__device__ __forceinline__ unsigned widen_pair(unsigned word, int pair) {
  if constexpr (key::kv_dtype == kF8E5M2) return __byte_perm(word, 0, pair == 0 ? 0x1404 : 0x3424);  // the upper halves
  return f16x2_from_8bit<key::kv_dtype>(word, pair);
}

// Fragment A of product `step` of a load; index/few_rows_fragments.hpp says what lies where.
__device__ __forceinline__ void make_key_fragment(const unsigned (&words)[4], int step, unsigned (&fragment)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const shape::BytePair from = shape::key_register(step, r);
    fragment[r] = kIs8Bit ? widen_pair(words[from.word], from.pair) : words[r];
  }
}

__device__ __forceinline__ void make_value_fragment(const unsigned (&words)[4], int step, unsigned (&fragment)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const shape::BytePair from = shape::value_register(step, r);
    fragment[r] = kIs8Bit ? widen_pair(__byte_perm(words[from.word], 0, shape::kValueByteOrder), from.pair) : words[r];
  }
}

// All bits that, set in an element, make it NaN or infinite, and the lowest of them (none of an i8); the highest bit of
// an element.
struct ElementBits {
  unsigned nonfinite, lowest, highest, ones;
};
constexpr ElementBits kElementBits = key::kv_dtype == kF8E4M3   ? ElementBits{0x7f7f7f7f, 0x01010101, 0x80808080, 0xff}
                                     : key::kv_dtype == kF8E5M2 ? ElementBits{0x7c7c7c7c, 0x04040404, 0x80808080, 0xff}
                                     : key::kv_dtype == kI8     ? ElementBits{0, 0, 0x80808080, 0xff}
                                     : key::is_bf16 ? ElementBits{0x7f807f80, 0x00800080, 0x80008000, 0xffff}
                                                    : ElementBits{0x7c007c00, 0x04000400, 0x80008000, 0xffff};

// Sets the highest bit of each element of a word that is NaN or infinite.
__device__ __forceinline__ unsigned nonfinite_bits(unsigned word) {
  return ((word & kElementBits.nonfinite) + kElementBits.lowest) & kElementBits.highest;
}

// The word with zeros for what is NaN or infinite.
__device__ __forceinline__ unsigned finite_part(unsigned word) {
  constexpr int kHighestBit = 8 * kElementBytes - 1;
  return word & ~((nonfinite_bits(word) >> kHighestBit) * kElementBits.ones);
}

// One element of a unit of 16 bytes.
class CachedElement {
 public:
  __device__ __forceinline__ CachedElement(const char* unit, int index)
      : bits_(kIs8Bit ? reinterpret_cast<const unsigned char*>(unit)[index]
                      : reinterpret_cast<const unsigned short*>(unit)[index]) {}

  __device__ __forceinline__ bool is_nonfinite() const { return nonfinite_bits(bits_) != 0; }
  __device__ __forceinline__ float to_f32() const {
    if constexpr (!kIs8Bit) return ptx::f32_from_16<key::is_bf16>(static_cast<unsigned short>(bits_));
    if constexpr (key::kv_dtype == kI8) return static_cast<float>(static_cast<signed char>(bits_));
    constexpr index::Float8Format kFormat = key::kv_dtype == kF8E4M3 ? index::kF8E4M3 : index::kF8E5M2;
    return __uint_as_float(index::f32_bits_from_float8(kFormat, static_cast<unsigned char>(bits_)));
  }

 private:
  unsigned bits_;
};

}  // namespace qkv::cuda::few_rows
