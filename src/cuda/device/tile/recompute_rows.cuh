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

// Elements of queries, keys and values: 16 bits, or 8.
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
using Element = Bits<size_of(key::kv_dtype)>::Element;
using ElementPair = Bits<size_of(key::kv_dtype)>::Pair;

struct FloatPair {
  float first, second;
};

__device__ __forceinline__ FloatPair widen_pair(ElementPair pair) {
  if constexpr (is_float8(key::kv_dtype)) {
    const unsigned halves = ptx::f16x2_from_float8x2<key::kv_dtype == kF8E4M3>(pair);
    return {ptx::f32_from_f16(halves), ptx::f32_from_f16(halves >> 16)};
  } else {
    return {ptx::f32_from_16<key::is_bf16>(pair), ptx::f32_from_16<key::is_bf16>(pair >> 16)};
  }
}

__device__ __forceinline__ float dot_row(const Element* a, const Element* b) {
  constexpr int kPairBits = 8 * sizeof(ElementPair);
  float sum = 0.0F;
#pragma unroll 1
  for (int chunk = 0; chunk < key::head_dim * static_cast<int>(sizeof(Element)) / 16; ++chunk) {
    const uint4 x = reinterpret_cast<const uint4*>(a)[chunk], y = reinterpret_cast<const uint4*>(b)[chunk];
    const unsigned pairs_x[4] = {x.x, x.y, x.z, x.w}, pairs_y[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 128 / kPairBits; ++i) {
      const int word = i * kPairBits / 32, shift = i * kPairBits % 32;
      const FloatPair p = widen_pair(static_cast<ElementPair>(pairs_x[word] >> shift));
      const FloatPair q = widen_pair(static_cast<ElementPair>(pairs_y[word] >> shift));
      sum = fmaf(p.first, q.first, sum);
      sum = fmaf(p.second, q.second, sum);
    }
  }
  return sum;
}

// A warp's row in the making: 32 keys at a time, a lane each for the scores, columns by lane for the values.
struct RowState {
  float max = negative_infinity();
  float sum = 0.0F;
  float output[2 * kLanePairs] = {};

  __device__ __forceinline__ void add(int lane, float score, bool seen, const Element* values, long long offset) {
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
      const float key_weight = __shfl_sync(kAllLanes, weight, k);
      const Element* value = values + __shfl_sync(kAllLanes, offset, k) + 2 * lane;
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        if (!has_pair(lane, i)) continue;
        const FloatPair pair = widen_pair(*reinterpret_cast<const ElementPair*>(value + 64 * i));
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
  const auto* query = static_cast<const Element*>(params.query) +
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
      if (seen) {
        score = dot_row(query, keys + key_value_offset(params, params.key, seq, item.kv_head, position));
        score = apply_score_terms(params, score, scales.score, slope, q_pos - kv_pos_of(params.rank, seq, position));
        value = key_value_offset(params, params.value, seq, item.kv_head, position);
      }
      state.add(lane, score, seen, static_cast<const Element*>(params.value.data), value);
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
