// What cache writes, gathers, quantising and merges do to a row of contiguous elements: bring it into another format,
// find its largest magnitude, add it to others. Every instruction set leaves the same bits as the plain definition.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qkv/tensor.hpp"

namespace qkv::cpu {

enum class Scaling : uint8_t { multiplied, divided };

// to[i] = round(from[i] · scale), or / scale, as load_f32 and store_f32 have it: to nearest even; 8-bit formats
// saturate.
struct RowConversion {
  DType from = DType::f32;
  DType to = DType::f32;
  Scaling scaling = Scaling::multiplied;
  float scale = 1;
};

// Of one instruction set. Rows lie anywhere, and nothing behind their `count` elements is read or written.
struct RowKernels {
  // The rows may not overlap.
  void (*convert)(const RowConversion& conversion, const std::byte* row, int64_t count, std::byte* target);
  // Of the numbers that are finite; 0 without any.
  float (*largest_magnitude)(DType dtype, const std::byte* row, int64_t count);
  // sum[i] += weight · row[i], each operation rounded.
  void (*add_weighted)(DType dtype, const std::byte* row, float weight, int64_t count, float* sum);
};

// The definition, an element at a time.
extern const RowKernels kPlainRowKernels;

}  // namespace qkv::cpu
