// The exact path for values that are not finite and hidden. In the products, 0·NaN is NaN: such a value spoils the rows
// of its step that do not see it, so a row that came out as NaN may be innocent. Rows are stored first, and when a
// warp's stream has ended, those that hold NaN are computed again, key by visible key. Nothing is paid for it before.
#pragma once

#include "epilogue.cuh"
#include "mask_tile.cuh"
#include "pipeline.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler.cuh"
#include "tile/item_scales.cuh"

namespace qkv::cuda::tile {

constexpr int kLanePairs = (key::head_dim_v + 63) / 64;  // of a row's columns: 64·i + 2·lane and the next

__device__ __forceinline__ bool has_pair(int lane, int i) {
  return key::head_dim_v % 64 == 0 || 64 * i + 2 * lane < key::head_dim_v;
}

__device__ __forceinline__ long long key_value_offset(const ForwardParams& params, const KeyValueLayout& layout,
                                                      const SeqInfo& seq, int kv_head, int position) {
  constexpr int kPageTokens = key::page_size > 0 ? key::page_size : 1;
  const bool paged = key::page_size > 0;
  const long long page = paged ? params.pages[seq.key_begin + position / kPageTokens] : 0;
  const long long token = paged ? position % kPageTokens : seq.key_begin + position;
  return page * layout.page_stride + token * layout.token_stride + kv_head * layout.head_stride;
}

// What two neighbouring elements of a dtype are read as.
template <int kBytes>
struct Bits {
  using Element = unsigned short;
  using Pair = unsigned;
};
template <>
struct Bits<1> {
  using Element = unsigned char;
  using Pair = unsigned short;
};
template <int kDtype>
using ElementOf = Bits<size_of(kDtype)>::Element;
template <int kDtype>
using PairOf = Bits<size_of(kDtype)>::Pair;
using Element = ElementOf<key::kv_dtype>;

struct FloatPair {
  float first, second;
};

template <int kDtype>
__device__ __forceinline__ FloatPair widen_pair(PairOf<kDtype> pair) {
  if constexpr (is_float8(kDtype)) {
    const unsigned halves = ptx::f16x2_from_float8x2<kDtype == kF8E4M3>(pair, 0);
    return {ptx::f32_from_f16(halves), ptx::f32_from_f16(halves >> 16)};
  } else {
    return {ptx::f32_from_16<kDtype == kBf16>(pair), ptx::f32_from_16<kDtype == kBf16>(pair >> 16)};
  }
}

// Eight columns of a row of queries or keys.
template <int kDtype>
struct alignas(8 * size_of(kDtype)) Chunk {
  PairOf<kDtype> pairs[4];
};

__device__ __forceinline__ float dot_row(const ElementOf<key::query_dtype>* query_row, const Element* key_row) {
  float sum = 0.0F;
#pragma unroll 1
  for (int chunk = 0; chunk < key::head_dim / 8; ++chunk) {
    const auto x = reinterpret_cast<const Chunk<key::query_dtype>*>(query_row)[chunk];
    const auto y = reinterpret_cast<const Chunk<key::kv_dtype>*>(key_row)[chunk];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const FloatPair p = widen_pair<key::query_dtype>(x.pairs[i]), q = widen_pair<key::kv_dtype>(y.pairs[i]);
      sum = fmaf(p.first, q.first, sum);
      sum = fmaf(p.second, q.second, sum);
    }
  }
  return sum;
}

// Of a key, whose value has one alike.
__device__ __forceinline__ float token_scale(const ForwardParams& params, const KeyValueScales& scales,
                                             const SeqInfo& seq, int kv_head, int position) {
  if constexpr (!key::token_scales) return 1.0F;
  constexpr int kPageTokens = key::page_size > 0 ? key::page_size : 1;
  const long long page = params.pages[seq.key_begin + position / kPageTokens];
  return scales
      .data[page * scales.page_stride + position % kPageTokens * scales.token_stride + kv_head * scales.head_stride];
}

// A warp's row in the making: 32 keys at a time, a lane each for the scores, columns by lane for the values.
struct RowState {
  float max = negative_infinity();
  float sum = 0.0F;
  float output[2 * kLanePairs] = {};

  __device__ __forceinline__ void add(int lane, float score, bool seen, const Element* values, long long offset,
                                      float value_scale) {
    float tile_max = score;
    for (int lanes = 16; lanes > 0; lanes /= 2) tile_max = fmaxf(tile_max, __shfl_xor_sync(kAllLanes, tile_max, lanes));
    const float new_max = fmaxf(max, tile_max);
    const float base = new_max == negative_infinity() ? 0.0F : new_max;
    const float decay = exp2_approx(max - base);
    const float weight = exp2_approx(score - base);
    float tile_sum = weight;
    for (int lanes = 16; lanes > 0; lanes /= 2) tile_sum += __shfl_xor_sync(kAllLanes, tile_sum, lanes);
    max = new_max;
    sum = fmaf(sum, decay, tile_sum);
    for (float& column : output) column *= decay;
    const unsigned visible = __ballot_sync(kAllLanes, seen);
#pragma unroll 1
    for (int k = 0; k < 32; ++k) {
      if ((visible >> k & 1) == 0) continue;
      const float key_weight = __shfl_sync(kAllLanes, weight * value_scale, k);
      const Element* value = values + __shfl_sync(kAllLanes, offset, k) + 2 * lane;
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        if (!has_pair(lane, i)) continue;
        const FloatPair pair =
            widen_pair<key::kv_dtype>(*reinterpret_cast<const PairOf<key::kv_dtype>*>(value + 64 * i));
        output[2 * i] = fmaf(key_weight, pair.first, output[2 * i]);
        output[2 * i + 1] = fmaf(key_weight, pair.second, output[2 * i + 1]);
      }
    }
  }
};

__device__ __forceinline__ float apply_score_terms(const ForwardParams& params, float score, float factor, float slope,
                                                   int distance) {
  score *= factor;
  if constexpr (key::softcap) score = tanh_by_exp2(score) * params.softcap_log2;
  if constexpr (key::alibi) score -= slope * static_cast<float>(abs(distance));
  return score;
}

__device__ __forceinline__ bool is_nan_at(const void* out, int dtype, long long index) {
  if (dtype == kF32) return isnan(static_cast<const float*>(out)[index]);
  if (is_float8(dtype)) {
    const unsigned magnitude = static_cast<const unsigned char*>(out)[index] & 0x7FU;
    return magnitude > (dtype == kF8E4M3 ? 0x7EU : 0x7CU);
  }
  const unsigned short bits = static_cast<const unsigned short*>(out)[index];
  return isnan(dtype == kBf16 ? ptx::f32_from_bf16(bits) : ptx::f32_from_f16(bits));
}

__device__ __forceinline__ bool holds_nan(const ForwardParams& params, const RowTarget& target, int lane) {
  bool found = false;
  for (int i = lane; i < key::head_dim_v; i += 32) {
    found |= target.is_state ? is_nan_at(params.state_out, kF32, target.offset + i)
                             : is_nan_at(params.out, key::out_dtype, target.offset + i);
  }
  return __any_sync(kAllLanes, found);
}

__device__ __forceinline__ void recompute_row(const ForwardParams& params, const WorkItem& item, const SeqInfo& seq,
                                              const MaskContext& context, int row, int lane) {
  const RowInfo info = RowInfo::of<key::group_size>(item, row);
  const int q_pos = seq.q_pos(info.query);
  float slope = 0.0F;
  if constexpr (key::alibi) {
    slope = kLog2e * params.alibi_slopes[item.request * params.alibi_request_stride + info.q_head];
  }
  const ItemScales scales = item_scales(params, item);
  const auto* query = static_cast<const ElementOf<key::query_dtype>*>(params.query) +
                      (seq.token_begin + info.query) * params.query_token_stride +
                      info.q_head * params.query_head_stride;
  const auto* keys = static_cast<const Element*>(params.key.data);
  RowState state;
#pragma unroll 1
  for (int s = item.segment_begin; s < item.segment_end; ++s) {
    const KeySegment segment = params.segments[s];
#pragma unroll 1
    for (int begin = segment.begin; begin < segment.end; begin += 32) {
      const int position = begin + lane;
      const bool seen = position < segment.end && is_visible(context, q_pos, position, info);
      float score = negative_infinity();
      long long value = 0;
      float value_scale = 1.0F;
      if (seen) {
        score = dot_row(query, keys + key_value_offset(params, params.key, seq, item.kv_head, position)) *
                token_scale(params, params.key_scale, seq, item.kv_head, position);
        score = apply_score_terms(params, score, scales.score, slope, q_pos - kv_pos_of(params.rank, seq, position));
        value = key_value_offset(params, params.value, seq, item.kv_head, position);
        value_scale = token_scale(params, params.value_scale, seq, item.kv_head, position);
      }
      state.add(lane, score, seen, static_cast<const Element*>(params.value.data), value, value_scale);
    }
  }
  RowTarget target = RowTarget::of<key::group_size, key::head_dim_v>(params, seq, item, row, state.max, state.sum);
  target.end.factor *= scales.value;
  float scale = 1.0F;
  if constexpr (!key::group_scales) scale = target.given_scale<key::out_dtype>(params);
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    if constexpr (key::group_scales) {
      // Two pairs of each lane are a group; columns behind the last are 0.
      if (i % 2 == 0) {
        float largest = 0.0F;
#pragma unroll
        for (int c = 2 * i; c < min(2 * i + 4, 2 * kLanePairs); ++c) {
          largest = fmaxf(largest, finite_magnitude(target.mean(state.output[c])));
        }
        scale = target.group_scale<key::out_dtype, 32>(params, i / 2, largest);
      }
    }
    if (!has_pair(lane, i)) continue;
    target.store<key::out_dtype>(params, 64 * i + 2 * lane, state.output[2 * i], state.output[2 * i + 1], scale);
  }
  if (lane == 0) target.store_lse(params);
}

// Of all of the CTA's items, the rows that this consumer warp has stored.
__device__ __forceinline__ void recompute_rows(const ForwardParams& params, const ManyRowsParams& many,
                                               const Control* control) {
  __syncwarp();
  const int warp = ptx::read_thread_index() / 32 - 4;
  if (!control->not_finite[warp]) return;
  const int lane = ptx::read_thread_index() % 32;
#pragma unroll 1
  for (int i = many.cta_begin[blockIdx.x]; i < many.cta_begin[blockIdx.x + 1]; ++i) {
    const WorkItem item = params.items[i];
    const SeqInfo seq(params, item.request);
    const MaskContext context(params, seq, item.request);
    const int end = min(16 * warp + 16, (item.query_end - item.query_begin) * key::group_size);
#pragma unroll 1
    for (int row = 16 * warp; row < end; ++row) {
      const RowTarget target =
          RowTarget::of<key::group_size, key::head_dim_v>(params, seq, item, row, negative_infinity(), 0.0F);
      if (holds_nan(params, target, lane)) recompute_row(params, item, seq, context, row, lane);
    }
  }
}

}  // namespace qkv::cuda::tile
