// How rows end: the sink joined, the mean and the LSE of a row from its maximum, sum and weighted sum.
#pragma once

#include "output_scale.cuh"
#include "params.hpp"
#include "seq_info.cuh"
#include "softmax.cuh"

namespace qkv::cuda {

struct RowEnd {
  float factor;  // mean = weighted sum · factor
  float lse;     // natural
};

// max in log2 (-inf: nothing was seen), sink natural (-inf: none). Natural units inside, so that the LSE of a row that
// sees nothing is the sink exactly.
__device__ __forceinline__ RowEnd end_row(float max, float sum, float sink) {
  const float own = max * kLn2;
  float joined = fmaxf(own, sink);
  if (joined == negative_infinity()) joined = 0.0F;  // every exp below is 0
  const float weight = exp2_approx((own - joined) * kLog2e);
  const float total = sum * weight + exp2_approx((sink - joined) * kLog2e);
  return {total == 0.0F ? 0.0F : __fdividef(weight, total), __logf(total) + joined};
}

template <int kDtype>
__device__ __forceinline__ void store_pair(void* out, long long offset, float first, float second) {
  if constexpr (kDtype == kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out) + offset) = make_float2(first, second);
  } else if constexpr (is_float8(kDtype)) {
    *reinterpret_cast<unsigned short*>(static_cast<char*>(out) + offset) =
        ptx::pack_float8<kDtype == kF8E4M3>(first, second);
  } else {
    const unsigned pair = kDtype == kBf16 ? ptx::pack_bf16(first, second) : ptx::pack_f16(first, second);
    *reinterpret_cast<unsigned*>(static_cast<unsigned short*>(out) + offset) = pair;
  }
}

// Where a packed row of an item goes, and with which end. The item finishes its rows, or leaves their state.
struct RowTarget {
  bool is_state;
  long long offset;      // of the row in ForwardParams::out or state_out
  long long lse_offset;  // in lse or state_lse
  float* scales;         // of a finished row of 8 bits
  RowEnd end;

  template <int kHeadDimV>
  static __device__ __forceinline__ RowTarget of_state(long long state_row, float max, float sum) {
    return {true, state_row * kHeadDimV, state_row, nullptr, end_row(max, sum, negative_infinity())};
  }

  template <int kGroupSize, int kHeadDimV>
  static __device__ __forceinline__ RowTarget of(const ForwardParams& params, const SeqInfo& seq, const WorkItem& item,
                                                 int row, float max, float sum) {
    if (item.state_row >= 0) return of_state<kHeadDimV>(item.state_row + row, max, sum);
    const RowInfo info = RowInfo::of<kGroupSize>(item, row);
    const float sink = params.sinks != nullptr ? params.sinks[info.q_head] : negative_infinity();
    const long long token = seq.token_begin + info.query;
    return {false, token * params.out_token_stride + info.q_head * params.out_head_stride,
            info.q_head * params.lse_head_stride + token * params.lse_token_stride,
            scales_of_row(params.out_scale, token, info.q_head), end_row(max, sum, sink)};
  }

  // The added 0 turns -0 into 0, so that tiles in which a row sees nothing cannot be told from tiles that were skipped.
  __device__ __forceinline__ float mean(float weighted) const { return weighted * end.factor + 0.0F; }

  // What the row's columns are divided by, where its scale is given.
  template <int kOutDtype>
  __device__ __forceinline__ float given_scale(const ForwardParams& params) const {
    return is_float8(kOutDtype) && !is_state ? *params.out_scale.data : 1.0F;
  }

  // What a group's are, where it is chosen: by kLanes lanes, which all call this, each with the largest of its columns.
  template <int kOutDtype, int kLanes>
  __device__ __forceinline__ float group_scale(const ForwardParams& params, int group, float largest) const {
    if (is_state) return 1.0F;
    const float scale = choose_scale<kLanes>(largest, kOutDtype);
    if (threadIdx.x % kLanes == 0) scales[group * params.out_scale.group_stride] = scale;
    return scale;
  }

  // Two neighbouring columns; a state is not scaled.
  template <int kOutDtype>
  __device__ __forceinline__ void store(const ForwardParams& params, int column, float first, float second,
                                        float scale) const {
    const float mean0 = mean(first);
    const float mean1 = mean(second);
    if (is_state) {
      store_pair<kF32>(params.state_out, offset + column, mean0, mean1);
    } else if constexpr (is_float8(kOutDtype)) {
      store_pair<kOutDtype>(params.out, offset + column, __fdiv_rn(mean0, scale), __fdiv_rn(mean1, scale));
    } else {
      store_pair<kOutDtype>(params.out, offset + column, mean0, mean1);
    }
  }

  __device__ __forceinline__ void store_lse(const ForwardParams& params) const {
    if (is_state) {
      params.state_lse[lse_offset] = end.lse;
    } else if (params.lse != nullptr) {
      params.lse[lse_offset] = end.lse;
    }
  }
};

}  // namespace qkv::cuda
