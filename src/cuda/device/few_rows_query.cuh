// The query rows of an item, as fragments for products with keys: in registers while these are few, else in shared
// memory, in the order of dimensions that the keys' fragments have. Rows behind the item's are zeros. With 8-bit keys
// they are f16: a row of bf16 is brought into f16's range by a power of two, which its scores' factor takes back; 8-bit
// queries are widened, and their scale is in the factor.
#pragma once

#include "core/index/few_rows_fragments.hpp"
#include "few_rows_params.hpp"
#include "few_rows_tile.cuh"
#include "float8_tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"

namespace qkv::cuda::few_rows {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kBlocks = shape::num_row_blocks(key::tile_q);  // n8 tiles of rows
constexpr int kKeySteps = key::head_dim / 16;
constexpr int kStepWords = 8;  // of two elements
constexpr bool kQueryInSmem = shape::query_in_smem(key::tile_q, key::head_dim);
constexpr bool kRescalesQuery = kIs8Bit && key::is_bf16;

// Which tokens and heads the packed rows of an item are.
struct ItemRows {
  const ForwardParams& params;
  const FewRowsItem& item;
  const SharedToken* tokens;  // of the item, where its rows are shared

  __device__ __forceinline__ int count() const { return (item.query_end - item.query_begin) * key::group_size; }
  __device__ __forceinline__ int query_of(int row) const { return item.query_begin + row / key::group_size; }
  __device__ __forceinline__ int head_of(int row) const {
    return item.kv_head * key::group_size + row % key::group_size;
  }
  // Where rows are shared; of a row that exists.
  __device__ __forceinline__ const SharedToken& token_of(int row) const { return tokens[row / key::group_size]; }
  __device__ __forceinline__ const char* query_row(int row) const {
    long long token = item.query_token + row / key::group_size;
    if constexpr (kSharedRows) token = token_of(min(row, count() - 1)).token;
    const long long element = token * params.query_token_stride + head_of(row) * params.query_head_stride;
    return static_cast<const char*>(params.query) + element * size_of(key::query_dtype);
  }
};

// Two neighbouring elements of a query row in 16 bits each.
__device__ __forceinline__ unsigned load_word(const char* row, int word) {
  if constexpr (kFloat8Query) {
    return f16x2_from_8bit<key::query_dtype>(reinterpret_cast<const unsigned short*>(row)[word], 0);
  }
  return reinterpret_cast<const unsigned*>(row)[word];
}

// The words of a step's 16 dimensions.
__device__ __forceinline__ void load_step(const char* row, int step, unsigned (&words)[kStepWords]) {
  constexpr int kUnits = size_of(key::query_dtype);  // of 16 bytes
  const uint4* units = reinterpret_cast<const uint4*>(row) + kUnits * step;
  const uint4 first = units[0];
  const unsigned low[4] = {first.x, first.y, first.z, first.w};
  if constexpr (kFloat8Query) {
#pragma unroll
    for (int w = 0; w < kStepWords; ++w) {
      words[w] = f16x2_from_8bit<key::query_dtype>(low[w / 2], w % 2);
    }
  } else {
    const uint4 second = units[1];
    const unsigned high[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int w = 0; w < kStepWords; ++w) words[w] = w < 4 ? low[w] : high[w - 4];
  }
}

// The largest magnitude among bf16 pairs, seen so far and in `pair`, in the upper half.
__device__ __forceinline__ unsigned larger_magnitude(unsigned largest, unsigned pair) {
  constexpr unsigned kMagnitude = 0x7fff0000;
  return max(largest, max(pair & kMagnitude, pair << 16 & kMagnitude));
}

// What a row's elements are multiplied by; `largest` as larger_magnitude gives it.
struct RowPower {
  unsigned bits;

  __device__ __forceinline__ explicit RowPower(unsigned largest) : bits(shape::query_power_bits(largest >> 16)) {}

  __device__ __forceinline__ unsigned f16_from_bf16(unsigned pair) const {
    const float power = __uint_as_float(bits);
    return ptx::pack_f16(__uint_as_float(pair << 16) * power, __uint_as_float(pair & 0xffff0000) * power);
  }
  __device__ __forceinline__ float inverse() const { return __uint_as_float(shape::inverse_power_bits(bits)); }
};

class QueryRows {
 public:
  __device__ __forceinline__ QueryRows(const ItemRows& rows, char* smem, int lane)
      : rows_(rows),
        lane_(lane),
        factors_smem_(reinterpret_cast<float*>(smem + kLayout.query_factors)),
        fragments_smem_(ptx::shared_address(smem) + kLayout.query +
                        QueryTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2)) {}

  // Into registers, where they stay there.
  __device__ __forceinline__ void load() {
    if constexpr (kQueryInSmem) return;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int row = 8 * n + lane_ / 4;
      const char* query = rows_.query_row(row);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int word = kStepWords * step + shape::query_word(kElementBytes, lane_, r);
          fragments_[step][n][r] = row < rows_.count() ? load_word(query, word) : 0;
        }
      }
      if constexpr (kIs8Bit) finish_block(n);
    }
  }

  // By all threads of the CTA, where they are read from there; a barrier must follow.
  __device__ __forceinline__ void copy_to_smem(char* smem) const {
    if constexpr (kIs8Bit) return copy_steps_to_smem(smem + kLayout.query);
    for (int i = threadIdx.x; i < key::tile_q * QueryTile::kRowUnits; i += kThreads) {
      const int row = i / QueryTile::kRowUnits;
      const int unit = i % QueryTile::kRowUnits;
      const uint4 zeros = {0, 0, 0, 0};
      *reinterpret_cast<uint4*>(smem + kLayout.query + QueryTile::offset(row, unit)) =
          row < rows_.count() ? reinterpret_cast<const uint4*>(rows_.query_row(row))[unit] : zeros;
    }
  }

  __device__ __forceinline__ void take(int step, unsigned (&query)[kBlocks][2]) const {
    if constexpr (kQueryInSmem) {
#pragma unroll
      for (int n = 0; n + 1 < kBlocks; n += 2) {
        unsigned fragments[4];
        ptx::ldmatrix_x4(fragments, QueryTile::address(fragments_smem_ + 8 * n * QueryTile::kChunk, step));
        query[n][0] = fragments[0];
        query[n][1] = fragments[1];
        query[n + 1][0] = fragments[2];
        query[n + 1][1] = fragments[3];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        query[n][0] = fragments_[step][n][0];
        query[n][1] = fragments_[step][n][1];
      }
    }
  }

  // What products of the lane's two rows of block n are multiplied by to be scores.
  __device__ __forceinline__ float2 score_factors(int n) const {
    if constexpr (!kIs8Bit) return {rows_.params.query_factor, rows_.params.query_factor};
    if constexpr (kQueryInSmem) return *reinterpret_cast<const float2*>(factors_smem_ + 8 * n + 2 * (lane_ % 4));
    return factors_[n];
  }

 private:
  // Of scores, before what a row adds: scales that all queries or keys of the head share are among it.
  __device__ __forceinline__ float common_factor() const {
    float factor = rows_.params.query_factor;
    if constexpr (kIs8Bit && !key::token_scales) factor *= uniform_scale(rows_.params.key_scale, rows_.item);
    if constexpr (kFloat8Query) factor *= uniform_scale(rows_.params.query_scale, rows_.item);
    return factor;
  }

  // The row of block n that four lanes hold, to f16; then each lane gets the factors of the rows whose scores it has.
  __device__ __forceinline__ void finish_block(int n) {
    float factor = common_factor();
    if constexpr (kRescalesQuery) {
      unsigned largest = 0;
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        largest = larger_magnitude(larger_magnitude(largest, fragments_[step][n][0]), fragments_[step][n][1]);
      }
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const RowPower power(largest);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        fragments_[step][n][0] = power.f16_from_bf16(fragments_[step][n][0]);
        fragments_[step][n][1] = power.f16_from_bf16(fragments_[step][n][1]);
      }
      factor *= power.inverse();
    }
    const int first = lane_ % 4 * 8;  // of the lanes that hold row 2·(lane%4)
    factors_[n] = {__shfl_sync(kAllLanes, factor, first), __shfl_sync(kAllLanes, factor, first + 4)};
  }

  // 16 lanes a row, each the 16 dimensions of a step.
  __device__ __forceinline__ void copy_steps_to_smem(char* tile) const {
    constexpr int kRowLanes = 16;
    static_assert(kKeySteps <= kRowLanes && (!kQueryInSmem || key::tile_q * kRowLanes % kThreads == 0));
    const int step = threadIdx.x % kRowLanes;
    for (int row = threadIdx.x / kRowLanes; row < key::tile_q; row += kThreads / kRowLanes) {
      unsigned words[kStepWords] = {};
      if (step < kKeySteps && row < rows_.count()) load_step(rows_.query_row(row), step, words);
      float factor = common_factor();
      if constexpr (kRescalesQuery) {
        unsigned largest = 0;
#pragma unroll
        for (int w = 0; w < kStepWords; ++w) largest = larger_magnitude(largest, words[w]);
#pragma unroll
        for (int distance = 1; distance < kRowLanes; distance *= 2) {
          largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
        }
        const RowPower power(largest);
#pragma unroll
        for (int w = 0; w < kStepWords; ++w) words[w] = power.f16_from_bf16(words[w]);
        factor *= power.inverse();
      }
      if (step == 0) factors_smem_[row] = factor;
      if (step >= kKeySteps) continue;
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const auto word = [&](int i) { return words[shape::query_word_of_unit(unit, i)]; };
        *reinterpret_cast<uint4*>(tile + QueryTile::offset(row, 2 * step + unit)) = {word(0), word(1), word(2),
                                                                                     word(3)};
      }
    }
  }

  const ItemRows rows_;
  const int lane_;
  float* factors_smem_;
  unsigned fragments_smem_;
  unsigned fragments_[kQueryInSmem ? 1 : kKeySteps][kBlocks][2];
  float2 factors_[kIs8Bit && !kQueryInSmem ? kBlocks : 1];
};

}  // namespace qkv::cuda::few_rows
