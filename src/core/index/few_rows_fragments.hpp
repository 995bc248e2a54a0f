// Which elements the lanes of the few-rows kernel hold as operands of mma.m16n8k16, where keys (then dimensions of V)
// are the 16 rows, query rows the 8 columns. g = lane/4, t = lane%4:
//   A, 4 registers: row g + 8·(r%2), columns 2t + 8·(r/2) and the next        keys x dimensions, dimensions of V x keys
//   B, 2 registers: rows 2t + 8·r and the next, column g                       dimensions x query rows
//   C, 4 elements: row g + 8·(i/2), column 2t + i%2                            keys, dimensions of V x query rows
// A product sums over columns of A in any order, if B's rows have the same; and its rows may be any, if C's are taken
// for them. ldmatrix exchanges pairs of bytes, not bytes, so with 8-bit elements both freedoms are used:
//   keys     a lane gets 4 neighbouring dimensions of a key at once: of 16, columns 2t, 2t+1, 2t+8, 2t+9 of A are
//            dimensions 4t … 4t+3, and so are B's rows
//   values   transposed, a lane gets dimensions 2g, 2g+1 of keys 2t, 2t+1: rows g, g+8 of A are dimensions 2g, 2g+1
// Constants and arithmetic only, for host (where tests replay the products) and device.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index::few_rows {

// Products of 16 columns (keys) or rows (values) that one ldmatrix of 16 keys x 2 units of 16 bytes brings.
QKV_HOST_DEVICE constexpr int steps_of_load(int element_bytes) { return 2 / element_bytes; }

// Word of two 16-bit elements, among the 8 of a query row's 16 dimensions, that is register r of B.
QKV_HOST_DEVICE constexpr int query_word(int element_bytes, int lane, int r) {
  return element_bytes == 1 ? lane % 4 * 2 + r : lane % 4 + 4 * r;
}

// The same from shared memory, where ldmatrix finds words 0 … 3 of unit r: which words of 8-bit keys' queries these
// are.
QKV_HOST_DEVICE constexpr int query_word_of_unit(int unit, int i) { return 2 * i + unit; }

// The dimension of V, among 16, of C's elements i with i/2 = half.
QKV_HOST_DEVICE constexpr int value_dim(int element_bytes, int lane, int half) {
  return element_bytes == 1 ? lane / 4 * 2 + half : lane / 4 + 8 * half;
}

// Where a row in shared memory has it: the unit of 16 bytes, counted from the 16 dimensions' first, and its element.
struct ValuePlace {
  int unit;
  int element;
};
QKV_HOST_DEVICE constexpr ValuePlace value_place(int element_bytes, int lane, int half) {
  return element_bytes == 1 ? ValuePlace{0, lane / 4 * 2 + half} : ValuePlace{half, lane / 4};
}

// The unit of 16 bytes and the key among 16 that ldmatrix takes from a lane for the pair of units (0, 1). Keys of 8 and
// 16 bits and transposed values of 8 bits: matrices are keys 0-7 and 8-15 of the first unit, then of the second.
// Transposed values of 16 bits: keys 0-7 of both units, then keys 8-15.
struct LoadRow {
  int key;
  int unit;
};
QKV_HOST_DEVICE constexpr LoadRow key_load_row(int lane) { return {lane % 16, lane / 16}; }
QKV_HOST_DEVICE constexpr LoadRow value_load_row(int element_bytes, int lane) {
  if (element_bytes == 1) return key_load_row(lane);
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// Register r of A in the given step of a load of 8-bit elements: the low (0) or high (1) two bytes of one of its words.
struct BytePair {
  int word;
  int pair;
};
QKV_HOST_DEVICE constexpr BytePair key_register(int step, int r) { return {2 * step + r % 2, r / 2}; }
QKV_HOST_DEVICE constexpr BytePair value_register(int step, int r) { return {2 * step + r / 2, r % 2}; }

// Before, bytes 1 and 2 of a word of values change places: from two dimensions of a key to two keys of a dimension.
constexpr unsigned kValueByteOrder = 0x3120;  // as __byte_perm takes it

// Queries of bf16 reach further than f16, in which 8-bit keys are multiplied. Each row is multiplied by a power of two
// that puts its largest magnitude between 2^14 and 2^15, which leaves elements whole down to 2^-31 of the largest
// (below, f16 has steps of 2^-38 of it), and its scores by the inverse. Both as bits of f32; `largest` = bits of the
// row's largest magnitude in bf16, 0x7F80 and above for infinities and NaN, which stay what they are. Rows below
// 2^-112 are raised by 2^126 only, whose inverse is f32's smallest normal number.
QKV_HOST_DEVICE constexpr unsigned query_power_bits(unsigned largest) {
  constexpr unsigned kBias = 127;
  constexpr unsigned kMost = kBias + 126;
  const unsigned power = 2 * kBias + 14 - (largest >> 7);
  return (power < kMost ? power : kMost) << 23;
}
QKV_HOST_DEVICE constexpr unsigned inverse_power_bits(unsigned power_bits) { return (254U << 23) - power_bits; }

// The power of two that weights are in units of where tokens have scales: the largest magnitude of a scale, rounded
// down, within the powers whose inverse is a normal number. Both as bits of f32.
QKV_HOST_DEVICE constexpr unsigned scale_unit_bits(unsigned largest) {
  constexpr unsigned kExponent = 0xFFU << 23;
  constexpr unsigned kLeast = 1U << 23;
  constexpr unsigned kMost = 253U << 23;
  const unsigned power = largest & kExponent;
  return power < kLeast ? kLeast : power < kMost ? power : kMost;
}

}  // namespace qkv::index::few_rows
