// Values that tell by themselves whose they are, and the three exchanges by their definition: the same for every
// engine.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "qkv/collectives.hpp"

namespace qkv::test {

// Bytes of `count` elements that rank `from` sends; all patterns occur, NaN and denormals included.
inline std::vector<std::byte> sent_bytes(int32_t from, int64_t count, DType dtype, uint32_t seed) {
  std::minstd_rand random(seed * 1000 + static_cast<uint32_t>(from) + 1);
  std::vector<std::byte> bytes(static_cast<size_t>(count * size_bytes(dtype)));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 8);
  return bytes;
}

// Floats whose sum depends on the order in which it is taken.
inline std::vector<float> sent_floats(int32_t from, int64_t count, uint32_t seed) {
  std::minstd_rand random(seed * 1000 + static_cast<uint32_t>(from) + 1);
  std::uniform_real_distribution<float> mantissa(-1, 1);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(std::ldexp(mantissa(random), static_cast<int>(random() % 40)));
  return values;
}

inline Tensor with_ranks(Tensor single, void* data, int32_t num_ranks) {
  Tensor stacked = Tensor::contiguous(data, single.dtype, {num_ranks}, single.device);
  stacked.rank = single.rank + 1;
  stacked.stride[0] = single.num_elements();
  for (int32_t axis = 0; axis < single.rank; ++axis) {
    stacked.shape[axis + 1] = single.shape[axis];
    stacked.stride[axis + 1] = single.stride[axis];
  }
  return stacked;
}

constexpr auto kGuard = std::byte{0xA5};
constexpr size_t kGuardBytes = 32;

// What is received, between guard bytes.
class Received {
 public:
  explicit Received(int64_t num_bytes) : bytes_(static_cast<size_t>(num_bytes) + 2 * kGuardBytes, kGuard) {}
  void* data() { return bytes_.data() + kGuardBytes; }
  std::vector<std::byte> content() const { return {bytes_.begin() + kGuardBytes, bytes_.end() - kGuardBytes}; }
  void expect_guards() const {
    for (size_t i = 0; i < kGuardBytes; ++i) {
      EXPECT_EQ(bytes_[i], kGuard) << i << " bytes after the start of the guard in front";
      EXPECT_EQ(bytes_[bytes_.size() - 1 - i], kGuard) << i << " bytes before the end of the guard behind";
    }
  }

 private:
  std::vector<std::byte> bytes_;
};

// The checks run on each rank. `shape` is of one rank's part.
inline void expect_all_gather(Collectives& ranks, DType dtype, std::initializer_list<int64_t> shape, uint32_t seed) {
  const int32_t n = ranks.num_ranks();
  const Tensor shaped = Tensor::contiguous(nullptr, dtype, shape);
  auto send = sent_bytes(ranks.rank(), shaped.num_elements(), dtype, seed);
  Received received(n * static_cast<int64_t>(send.size()));
  ranks.all_gather(Tensor::contiguous(send.data(), dtype, shape), with_ranks(shaped, received.data(), n));
  std::vector<std::byte> expected;
  for (int32_t from = 0; from < n; ++from) {
    const auto part = sent_bytes(from, shaped.num_elements(), dtype, seed);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(received.content(), expected) << "all_gather of " << shaped.describe() << " on rank " << ranks.rank();
  received.expect_guards();
}

inline void expect_all_to_all(Collectives& ranks, DType dtype, std::initializer_list<int64_t> shape, uint32_t seed) {
  const int32_t n = ranks.num_ranks();
  const Tensor shaped = Tensor::contiguous(nullptr, dtype, shape);
  auto send = sent_bytes(ranks.rank(), n * shaped.num_elements(), dtype, seed);
  Received received(static_cast<int64_t>(send.size()));
  ranks.all_to_all(with_ranks(shaped, send.data(), n), with_ranks(shaped, received.data(), n));
  std::vector<std::byte> expected;
  const auto row_bytes = static_cast<ptrdiff_t>(send.size()) / n;
  for (int32_t from = 0; from < n; ++from) {
    const auto all = sent_bytes(from, n * shaped.num_elements(), dtype, seed);
    const auto row = all.begin() + ranks.rank() * row_bytes;
    expected.insert(expected.end(), row, row + row_bytes);
  }
  EXPECT_EQ(received.content(), expected) << "all_to_all of " << shaped.describe() << " on rank " << ranks.rank();
  received.expect_guards();
}

// Bit for bit the sum in the order of ranks.
inline void expect_reduce_scatter(Collectives& ranks, std::initializer_list<int64_t> shape, uint32_t seed) {
  const int32_t n = ranks.num_ranks();
  const Tensor shaped = Tensor::contiguous(nullptr, DType::f32, shape);
  const int64_t row = shaped.num_elements();
  auto send = sent_floats(ranks.rank(), n * row, seed);
  Received received(row * static_cast<int64_t>(sizeof(float)));
  ranks.reduce_scatter(with_ranks(shaped, send.data(), n), Tensor::contiguous(received.data(), DType::f32, shape));
  std::vector<float> expected(static_cast<size_t>(row));
  for (int32_t from = 0; from < n; ++from) {
    const auto all = sent_floats(from, n * row, seed);
    for (int64_t i = 0; i < row; ++i) {
      const float value = all[static_cast<size_t>(ranks.rank() * row + i)];
      float& sum = expected[static_cast<size_t>(i)];
      sum = from == 0 ? value : sum + value;
    }
  }
  const auto* values = static_cast<const float*>(received.data());
  EXPECT_EQ(std::vector<float>(values, values + row), expected)
      << "reduce_scatter of " << shaped.describe() << " on rank " << ranks.rank();
  received.expect_guards();
}

inline constexpr DType kAllDtypes[] = {DType::f32, DType::f16, DType::bf16,   DType::f8e4m3,
                                       DType::i32, DType::i64, DType::f8e5m2, DType::i8};

// Random shapes of up to four axes, empty ones among them. The same on all ranks.
inline void expect_random_exchanges(Collectives& ranks, int count, uint32_t seed) {
  std::minstd_rand random(seed);
  const auto extent = [&](uint32_t largest) { return static_cast<int64_t>((random() >> 8) % (largest + 1)); };
  for (int i = 0; i < count; ++i) {
    const DType dtype = kAllDtypes[(random() >> 8) % std::size(kAllDtypes)];
    const int64_t a = extent(5), b = extent(7), c = extent(33), d = 1 + extent(3);
    const uint32_t case_seed = seed + static_cast<uint32_t>(i);
    expect_all_gather(ranks, dtype, {a, b, c, d}, case_seed);
    expect_all_to_all(ranks, dtype, {b, c, d}, case_seed);
    expect_reduce_scatter(ranks, {a, c}, case_seed);
  }
}

}  // namespace qkv::test
