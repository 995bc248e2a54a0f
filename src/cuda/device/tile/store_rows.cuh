// How a warpgroup's accumulator becomes rows of out, or of the partial states: no shared memory, no fence, and ragged
// items need a predicate only.
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "tile/lazy_softmax.cuh"

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

// A row's columns in 16 bits, 16 bytes a lane and chunk.
template <int kRow, int kCount>
__device__ __forceinline__ void store_row_16(const float (&output)[kCount], float factor, bool exists, void* row) {
#pragma unroll
  for (int group = 0; group < kCount / 16; ++group) {
    unsigned x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = (group * 4 + j) * 4 + kRow * 2;
      // The added 0 turns -0 into 0: steps in which a row sees nothing leave no trace.
      x[j] = ptx::pack_16<key::out_dtype == kBf16>(output[i] * factor + 0.0F, output[i + 1] * factor + 0.0F);
    }
    transpose_quad(x);
    if (exists) static_cast<uint4*>(row)[group * 4 + threadIdx.x % 4] = make_uint4(x[0], x[1], x[2], x[3]);
  }
}

template <int kRow, int kCount>
__device__ __forceinline__ void store_row_f32(const float (&output)[kCount], float factor, bool exists, float* row) {
  if (!exists) return;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int i = j * 4 + kRow * 2;
    *reinterpret_cast<float2*>(row + j * 8 + threadIdx.x % 4 * 2) =
        make_float2(output[i] * factor + 0.0F, output[i + 1] * factor + 0.0F);
  }
}

// Returns whether the row's lane holds a value that is not finite.
template <int kRow, int kCount>
__device__ __forceinline__ bool store_row(const ForwardParams& params, const ItemRecord& record, int row, float max,
                                          float sum, const float (&output)[kCount]) {
  const WorkItem item = record.item;
  const SeqInfo seq(record.token_begin, record.q_len, record.kv_len, 0);
  const int num_rows = (item.query_end - item.query_begin) * key::group_size;
  const bool exists = row < num_rows;
  const RowTarget target =
      RowTarget::of<key::group_size, key::head_dim_v>(params, seq, item, exists ? row : num_rows - 1, max, sum);
  const float factor = target.end.factor;
  if (target.is_state) {
    store_row_f32<kRow>(output, factor, exists, params.state_out + target.offset);
  } else if constexpr (key::out_dtype == kF32) {
    store_row_f32<kRow>(output, factor, exists, static_cast<float*>(params.out) + target.offset);
  } else {
    store_row_16<kRow>(output, factor, exists, static_cast<unsigned short*>(params.out) + target.offset);
  }
  if (exists && threadIdx.x % 4 == 0) target.store_lse(params);
  if constexpr (!key::mask) return false;
  float zero = 0.0F;
#pragma unroll
  for (int i = 2 * kRow; i < kCount; i += 4) zero = fmaf(output[i + 1], 0.0F, fmaf(output[i], 0.0F, zero));
  return exists && zero != 0.0F;
}

// The rows of consumer `consumer`; softmax.max · factor is in log2 units. Returns whether this lane's part of them
// holds a value that is not finite, where keys can be hidden.
template <int kCount>
__device__ __forceinline__ bool store_rows(const ForwardParams& params, const ItemRecord& record, int consumer,
                                           LazySoftmax softmax, const float (&output)[kCount]) {
  softmax.sum_over_lanes();
  const int row = consumer * 64 + index::accumulator_row(threadIdx.x % 128, 0);
  const bool first = store_row<0>(params, record, row, softmax.max[0], softmax.sum[0], output);
  const bool second = store_row<1>(params, record, row + 8, softmax.max[1], softmax.sum[1], output);
  return first || second;
}

}  // namespace qkv::cuda::tile
