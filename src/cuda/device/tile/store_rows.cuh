// How a warpgroup's accumulator becomes rows of out, or of the partial states: no shared memory, no fence, and ragged
// items need a predicate only.
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "ptx/warpgroup.cuh"

namespace qkv::cuda::tile {

// Lane q of a quad holds x[j]: its two columns of chunk j. Afterwards it holds chunk q: x[p] came from lane p.
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool upper = threadIdx.x & 2;
  const unsigned a = __shfl_xor_sync(0xffffffff, odd ? x[0] : x[1], 1);
  const unsigned b = __shfl_xor_sync(0xffffffff, odd ? x[2] : x[3], 1);
  x[0] = odd ? a : x[0];
  x[1] = odd ? x[1] : a;
  x[2] = odd ? b : x[2];
  x[3] = odd ? x[3] : b;
  const unsigned c = __shfl_xor_sync(0xffffffff, upper ? x[0] : x[2], 2);
  const unsigned d = __shfl_xor_sync(0xffffffff, upper ? x[1] : x[3], 2);
  x[0] = upper ? c : x[0];
  x[1] = upper ? d : x[1];
  x[2] = upper ? x[2] : c;
  x[3] = upper ? x[3] : d;
}

// Rows `row` and `row` + 8, which the thread shares with the other lanes of its quad.
struct RowPair {
  bool exists[2];
  RowEnd end[2];
  long long offset[2];      // in out or state_out
  int first;                // row, of the item
  long long lse_offset[2];  // in lse or state_lse
};

template <class Softmax>
__device__ __forceinline__ RowPair find_rows(const ForwardParams& params, const ItemRecord& record, bool is_state,
                                             int row, const Softmax& softmax, float value_scale) {
  RowPair rows;
  rows.first = row;
  const int num_rows = record.num_rows, head = record.item.kv_head * key::group_size;
#pragma unroll
  for (int r = 0; r < 2; ++r, row += 8) {
    rows.exists[r] = row < num_rows;
    const int token = row / key::group_size, member = row % key::group_size;
    float sink = negative_infinity();
    if (!is_state && params.sinks != nullptr && rows.exists[r]) sink = params.sinks[head + member];
    rows.end[r] = end_row(softmax.max[r], softmax.sum[r], sink);
    rows.end[r].factor *= value_scale;
    rows.offset[r] = record.out_offset + (is_state ? static_cast<long long>(row) * key::head_dim_v
                                                   : token * params.out_token_stride + member * params.out_head_stride);
    rows.lse_offset[r] =
        record.lse_offset + (is_state ? row : member * params.lse_head_stride + token * params.lse_token_stride);
  }
  return rows;
}

// Columns in 16 bits, 16 bytes a lane and chunk. Returns whether one of them is not finite: asked of all layers, for
// where nobody asks ptxas mixes all groups' arithmetic, which at 256 columns spills even in the loop.
template <int kCount>
__device__ __forceinline__ bool store_16(const float (&output)[kCount], const RowPair& rows, unsigned short* out) {
  constexpr bool kIsBf16 = key::out_dtype == kBf16;
  unsigned zeros[2] = {0, 0};
#pragma unroll
  for (int group = 0; group < kCount / 16; ++group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (group * 4 + j) * 4 + r * 2;
        // The added 0 turns -0 into 0: steps in which a row sees nothing leave no trace.
        const float factor = rows.end[r].factor;
        x[j] = ptx::pack_16<kIsBf16>(fmaf(output[i], factor, 0.0F), fmaf(output[i + 1], factor, 0.0F));
        zeros[r] = ptx::fma_16x2<kIsBf16>(x[j], 0, zeros[r]);
      }
      transpose_quad(x);
      if (rows.exists[r]) {
        reinterpret_cast<uint4*>(out + rows.offset[r])[group * 4 + threadIdx.x % 4] =
            make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  return (rows.exists[0] && zeros[0] != 0) || (rows.exists[1] && zeros[1] != 0);
}

// Of row r's group of columns that begins with the thread's element `first`, chosen by the row's four lanes. Where it
// goes is found out when it is there: the output fills the registers.
template <int kCount>
__device__ __forceinline__ float group_scale(const float (&output)[kCount], const RowPair& rows, int r, int first,
                                             const ForwardParams& params, const ItemRecord& record) {
  constexpr int kElements = index::kScaleGroup / 2;  // that a thread has of a group, in two rows
  float largest = 0.0F;
#pragma unroll
  for (int i = first + 2 * r; i < min(first + kElements, kCount); i += 4) {
    const float factor = rows.end[r].factor;
    largest = fmaxf(largest, finite_magnitude(fmaf(output[i], factor, 0.0F)));
    largest = fmaxf(largest, finite_magnitude(fmaf(output[i + 1], factor, 0.0F)));
  }
  const float chosen = choose_scale<4>(largest, key::out_dtype);
  if (rows.exists[r] && threadIdx.x % 4 == 0) {
    const int row = rows.first + 8 * r;
    const long long token = record.token_begin + record.item.query_begin + row / key::group_size;
    const int head = record.item.kv_head * key::group_size + row % key::group_size;
    scales_of_row(params.out_scale, token, head)[first / kElements * params.out_scale.group_stride] = chosen;
  }
  return chosen;
}

// Columns in 8 bits, 16 bytes a lane and 64 columns: results / their scales.
template <int kCount>
__device__ __forceinline__ bool store_8(const float (&output)[kCount], const RowPair& rows, const ForwardParams& params,
                                        const ItemRecord& record) {
  auto* const out = static_cast<unsigned char*>(params.out);
  static_assert(kCount % 32 == 0);
  float zeros[2] = {0.0F, 0.0F};
  float scales[2];
  if constexpr (!key::group_scales) scales[0] = scales[1] = *params.out_scale.data;
#pragma unroll
  for (int group = 0; group < kCount / 32; ++group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (key::group_scales) {
        if (group % 2 == 0) scales[r] = group_scale(output, rows, r, group * 32, params, record);
      }
      const float factor = rows.end[r].factor;
      const auto pack = [&](int i) -> unsigned {
        const float first = fmaf(output[i], factor, 0.0F), second = fmaf(output[i + 1], factor, 0.0F);
        zeros[r] = fmaf(second, 0.0F, fmaf(first, 0.0F, zeros[r]));
        return pack_float8(key::out_dtype, __fdiv_rn(first, scales[r]), __fdiv_rn(second, scales[r]));
      };
      unsigned x[4];  // of sixteen columns: two of the lower eight, two of the upper
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (group * 8 + j * 2) * 4 + r * 2;
        x[j] = pack(i) | pack(i + 4) << 16;
      }
      transpose_quad(x);
      if (rows.exists[r]) {
        reinterpret_cast<uint4*>(out + rows.offset[r])[group * 4 + threadIdx.x % 4] =
            make_uint4(__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410),
                       __byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632));
      }
    }
  }
  return (rows.exists[0] && zeros[0] != 0.0F) || (rows.exists[1] && zeros[1] != 0.0F);
}

template <int kCount>
__device__ __forceinline__ bool store_f32(const float (&output)[kCount], const RowPair& rows, float* out) {
  float zeros[2] = {0.0F, 0.0F};
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = j * 4 + r * 2;
      const float factor = rows.end[r].factor;
      const float2 pair = make_float2(fmaf(output[i], factor, 0.0F), fmaf(output[i + 1], factor, 0.0F));
      if (rows.exists[r]) *reinterpret_cast<float2*>(out + rows.offset[r] + j * 8 + threadIdx.x % 4 * 2) = pair;
      zeros[r] = fmaf(pair.y, 0.0F, fmaf(pair.x, 0.0F, zeros[r]));
    }
  }
  return (rows.exists[0] && zeros[0] != 0.0F) || (rows.exists[1] && zeros[1] != 0.0F);
}

// The rows of consumer `consumer`: `softmax` has the max and sum of end_row. Returns whether this lane's part of them
// holds a value that is not finite.
template <class Softmax, int kCount>
__device__ __forceinline__ bool store_rows(const ForwardParams& params, const ItemRecord& record, int consumer,
                                           Softmax softmax, const float (&output)[kCount], float value_scale = 1.0F) {
  if (consumer * 64 >= record.num_rows) return false;
  softmax.sum_over_lanes();
  const bool is_state = record.item.state_row >= 0;
  const int row = consumer * 64 + index::accumulator_row(ptx::read_thread_index() % 128, 0);
  const RowPair rows = find_rows(params, record, is_state, row, softmax, value_scale);
  float* lse = is_state ? params.state_lse : params.lse;
  if (lse != nullptr && threadIdx.x % 4 == 0) {
    if (rows.exists[0]) lse[rows.lse_offset[0]] = rows.end[0].lse;
    if (rows.exists[1]) lse[rows.lse_offset[1]] = rows.end[1].lse;
  }
  if (is_state) return store_f32(output, rows, params.state_out);
  if constexpr (key::out_dtype == kF32) {
    return store_f32(output, rows, static_cast<float*>(params.out));
  } else if constexpr (is_float8(key::out_dtype)) {
    return store_8(output, rows, params, record);
  } else {
    return store_16(output, rows, static_cast<unsigned short*>(params.out));
  }
}

}  // namespace qkv::cuda::tile
