// Forward attention for every GPU since Ampere: a CTA takes one work item after another, a warp 16 or 32 packed query
// rows, mma.sync, keys and values through cp.async with a tile in flight while one is computed. It runs every feature;
// docs/forward_sm80.md says why it looks as it does, index/forward_sm80_shape.hpp has its tiles, threads and shared
// memory. A row sees the same operations in the same order whichever rows stand beside it.
//
// The text before this file: namespace qkv::cuda::key with
//   is_bf16, query_dtype, kv_dtype, token_scales, out_dtype, head_dim, head_dim_v, group_size, page_size, softcap,
//   alibi, mask, mask_by_head, num_mask_operands, mask_scope, tile_q, tile_kv, and
//   shared_rows  1: an item's rows are of several requests: queries [query_begin, query_end) are those of the launch's
//                SharedTokens, which say where their states go; `request` is one of theirs, whose scales are all theirs
// then #include "mask_tile.cuh" and, where key::mask, the function visible() in qkv::cuda.
#pragma once

#include "core/index/forward_sm80_shape.hpp"
#include "epilogue.cuh"
#include "float8_tile.cuh"
#include "mask_tile.cuh"
#include "page_loader.cuh"
#include "params.hpp"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/lane.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "seq_info.cuh"
#include "softmax.cuh"

namespace qkv::cuda {
namespace sm80 {

constexpr bool kIs8Bit = is_8bit(key::kv_dtype);
constexpr bool kFloat8Query = is_float8(key::query_dtype);
constexpr index::ForwardSm80Shape kShape{key::head_dim, key::head_dim_v, key::tile_q, key::tile_kv, kIs8Bit};
constexpr int kWarps = kShape.num_threads() / 32;
constexpr int kWarpsQ = kShape.warps_q();
constexpr int kWarpsKv = kShape.warps_kv();
constexpr int kRowTiles = kShape.row_tiles();           // m16 tiles of a warp's rows
constexpr int kColumns = kShape.columns();              // of the output a pass
constexpr int kKeys = key::tile_kv / kWarpsKv;          // of a tile that a warp multiplies
constexpr int kScoreTiles = kKeys / 8;                  // n8 tiles of scores
constexpr int kOutTiles = kShape.padded(kColumns) / 8;  // n8 tiles of outputs
constexpr int kKeySteps = kShape.padded(key::head_dim) / 16;
constexpr int kKeyRowBytes = kShape.row_bytes(key::head_dim);
constexpr int kValueRowBytes = kShape.row_bytes(kColumns);
constexpr int kQueryBytes = kShape.query_bytes();
constexpr int kKeyStageBytes = kShape.key_stage_bytes();
constexpr int kValueStageBytes = kShape.value_stage_bytes();
constexpr int kStagesOffset = kQueryBytes + (kIs8Bit ? kShape.key_tile_bytes() + kShape.value_tile_bytes() : 0);
constexpr int kScalesOffset = kStagesOffset + kShape.kStages * (kKeyStageBytes + kValueStageBytes);
constexpr int kSharedBytes = kShape.smem_bytes();
constexpr int kElementBytes = kIs8Bit ? 1 : 2;  // of keys and values in the cache
constexpr int kChunkBytes = 16;
constexpr int kStages = kShape.kStages;
constexpr bool kHasTerms = key::softcap || key::alibi;  // then scores are made log2 units before the softmax

constexpr int kChunkElements = kChunkBytes / kElementBytes;
// Weights times scales of tokens, in f16, would be subnormal for values below about 0.03. Scales of i8 are larger:
// those of the largest f16, 65504 / 127, must not overflow.
constexpr float kWeightBoost = !key::token_scales || key::is_bf16 ? 1.0F : key::kv_dtype == kI8 ? 64.0F : 256.0F;

static_assert(key::head_dim % kChunkElements == 0 && key::head_dim_v % kChunkElements == 0);
static_assert(key::tile_kv % (16 * kWarpsKv) == 0 && key::tile_kv % kWarps == 0);

using Scores = float[kScoreTiles][4];
using Weights = unsigned[kScoreTiles / 2][4];
using Out = float[kOutTiles][4];
using Lookup = PageLookup<key::page_size, key::tile_kv / kWarps>;

// The memory of a CTA: [tile_q] query rows, then stages of [tile_kv] key rows, then stages of value rows. 8-bit rows:
// after the queries one tile of widened keys and one of widened values; after the stages those of their scales.
struct Memory {
  char* pointer;
  unsigned query;

  // Where loads go.
  __device__ __forceinline__ static constexpr int key_stage_offset(int stage) {
    return kStagesOffset + stage * kKeyStageBytes;
  }
  __device__ __forceinline__ static constexpr int value_stage_offset(int stage) {
    return kStagesOffset + kStages * kKeyStageBytes + stage * kValueStageBytes;
  }
  // Where 16-bit rows are read.
  __device__ __forceinline__ static constexpr int key_offset(int stage) {
    return kIs8Bit ? kQueryBytes : key_stage_offset(stage);
  }
  __device__ __forceinline__ static constexpr int value_offset(int stage) {
    return kIs8Bit ? kQueryBytes + kShape.key_tile_bytes() : value_stage_offset(stage);
  }
  __device__ __forceinline__ unsigned key(int stage) const { return query + key_offset(stage); }
  __device__ __forceinline__ unsigned value(int stage) const { return query + value_offset(stage); }
  // [tile_kv] of keys, then of values.
  __device__ __forceinline__ static constexpr int scale_offset(int stage) {
    return kScalesOffset + stage * kShape.scale_stage_bytes();
  }
  __device__ __forceinline__ const float* key_scales(int stage) const {
    return reinterpret_cast<const float*>(pointer + scale_offset(stage));
  }
  __device__ __forceinline__ const float* value_scales(int stage) const { return key_scales(stage) + key::tile_kv; }
};

// What masks and score terms know of a query row. Kept in the 16 bytes that every row of shared memory has to spare,
// and read anew wherever it is needed: registers are scarce.
struct __align__(16) RowFacts {
  RowInfo info;
  int q_pos;
  float slope;  // ALiBi, in log2 units
};
static_assert(sizeof(RowFacts) == kChunkBytes && kKeyRowBytes >= kShape.padded(key::head_dim) * 2 + kChunkBytes);

__device__ __forceinline__ RowFacts& facts_of(const Memory& memory, int row) {
  return *reinterpret_cast<RowFacts*>(memory.pointer + row * kKeyRowBytes + kShape.padded(key::head_dim) * 2);
}

// The token that row `row` of an item belongs to, where its rows are shared.
__device__ __forceinline__ const SharedToken& token_of(const SharedToken* tokens, const WorkItem& item, int row) {
  return tokens[item.query_begin + row / key::group_size];
}

// Rows behind the item's last are computed like it, and never stored.
__device__ __forceinline__ void find_facts(const ForwardParams& params, const WorkItem& item, const SharedToken* tokens,
                                           const SeqInfo& seq, int row_begin, int num_rows, const Memory& memory) {
  for (int row = threadIdx.x; row < key::tile_q; row += kWarps * 32) {
    const int existing = min(row_begin + row, num_rows - 1);
    RowFacts facts{RowInfo::of<key::group_size>(item, existing), 0, 0.0F};
    facts.q_pos = seq.q_pos(facts.info.query);
    int request = item.request;
    if constexpr (key::shared_rows) {
      const SharedToken& token = token_of(tokens, item, existing);
      facts.info.query = token.query;
      facts.q_pos = token.position;
      request = token.request;
    }
    if constexpr (key::alibi) {
      const float* slopes = params.alibi_slopes + request * params.alibi_request_stride;
      facts.slope = slopes[facts.info.q_head] * kLog2e;
    }
    facts_of(memory, row) = facts;
  }
}

// What a warp has of an m16 tile of rows.
struct RowTile {
  OnlineSoftmax softmax;
  Out out;
};

// Rows behind the item's last become zero.
__device__ __forceinline__ void load_query(const ForwardParams& params, const WorkItem& item, const SharedToken* tokens,
                                           const SeqInfo& seq, int row_begin, int num_rows, const Memory& memory) {
  constexpr int kChunks = key::head_dim / 8;
  const char* query = static_cast<const char*>(params.query);
  for (int index = threadIdx.x; index < key::tile_q * kChunks; index += kWarps * 32) {
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const bool used = row_begin + row < num_rows;
    const RowInfo info = RowInfo::of<key::group_size>(item, used ? row_begin + row : 0);
    int token = seq.token_begin + info.query;
    if constexpr (key::shared_rows) token = token_of(tokens, item, used ? row_begin + row : 0).token;
    const long long offset = token * params.query_token_stride + info.q_head * params.query_head_stride;
    const int place = row * kKeyRowBytes + chunk * kChunkBytes;
    if constexpr (kFloat8Query) {
      *reinterpret_cast<uint4*>(memory.pointer + place) =
          used
              ? widen_eight<key::is_bf16, key::query_dtype>(*reinterpret_cast<const uint2*>(query + offset + chunk * 8))
              : make_uint4(0, 0, 0, 0);
    } else {
      ptx::cp_async_16(memory.query + place, query + offset * 2 + chunk * kChunkBytes, used ? kChunkBytes : 0);
    }
  }
}

// Columns that round head_dim up to 16 multiply zeros.
__device__ __forceinline__ void clear_padding(const Memory& memory) {
  if constexpr (key::head_dim % 16 != 0) {
    constexpr int kRows = key::tile_q + kStages * key::tile_kv;  // queries and keys lie side by side, rows alike
    for (int row = threadIdx.x; row < kRows; row += kWarps * 32) {
      *reinterpret_cast<uint4*>(memory.pointer + row * kKeyRowBytes + key::head_dim * 2) = make_uint4(0, 0, 0, 0);
    }
  }
}

// With factor <= 0 the softmax's factor is -factor, so that the largest product is the largest score: queries change
// their signs.
__device__ __forceinline__ void negate_query(const Memory& memory) {
  constexpr int kPairs = key::head_dim / 2;
  for (int index = threadIdx.x; index < key::tile_q * kPairs; index += kWarps * 32) {
    const int offset = index / kPairs * kKeyRowBytes + index % kPairs * 4;
    *reinterpret_cast<unsigned*>(memory.pointer + offset) ^= 0x80008000;
  }
}

// scores = query · key, from the warp's first row of each. Lane addresses: see ptx/ldmatrix.cuh.
__device__ __forceinline__ void multiply_keys(unsigned query, unsigned keys, Scores (&scores)[kRowTiles]) {
  const int lane = ptx::lane_id();
  query += lane % 16 * kKeyRowBytes + lane / 16 * kChunkBytes;
  keys += (lane / 16 * 8 + lane % 8) * kKeyRowBytes + lane / 8 % 2 * kChunkBytes;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0F;
    }
  }
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(a[m], query + m * 16 * kKeyRowBytes + step * 32);
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += 2) {
      unsigned b[4];
      ptx::ldmatrix_x4(b, keys + n * 8 * kKeyRowBytes + step * 32);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<key::is_bf16>(scores[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<key::is_bf16>(scores[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Weights as A fragments of 16 keys: two n8 tiles of an accumulator lie as one does.
__device__ __forceinline__ void pack_weights(const Scores& scores, Weights& weights) {
#pragma unroll
  for (int k = 0; k < kScoreTiles / 2; ++k) {
    const float(&low)[4] = scores[2 * k];
    const float(&high)[4] = scores[2 * k + 1];
    weights[k][0] = ptx::pack_16<key::is_bf16>(low[0], low[1]);
    weights[k][1] = ptx::pack_16<key::is_bf16>(low[2], low[3]);
    weights[k][2] = ptx::pack_16<key::is_bf16>(high[0], high[1]);
    weights[k][3] = ptx::pack_16<key::is_bf16>(high[2], high[3]);
  }
}

// out += weights · value
__device__ __forceinline__ void multiply_values(const Weights (&weights)[kRowTiles], unsigned values,
                                                RowTile (&tiles)[kRowTiles]) {
  const int lane = ptx::lane_id();
  values += lane % 16 * kValueRowBytes + lane / 16 * kChunkBytes;
#pragma unroll
  for (int k = 0; k < kScoreTiles / 2; ++k) {
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, values + k * 16 * kValueRowBytes + n * 16);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<key::is_bf16>(tiles[m].out[n], weights[m][k], b[0], b[1]);
        ptx::mma_m16n8k16<key::is_bf16>(tiles[m].out[n + 1], weights[m][k], b[2], b[3]);
      }
    }
  }
}

// Calls f(score, k) for each score of the thread's row i: of the k-th key from the thread's first one on.
template <typename F>
__device__ __forceinline__ void for_each_score(Scores& scores, int i, F f) {
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) f(scores[n][2 * i + e], n * 8 + e);
  }
}

// The position of the thread's first key among those that its warp multiplies.
__device__ __forceinline__ int thread_key(int first_key) { return first_key + ptx::lane_id() % 4 * 2; }

// Scores, or weights, times the scales of their tokens, from the warp's first key on. A hidden key has no weight, and
// its scale may be anything.
template <bool kOfWeights>
__device__ __forceinline__ void multiply_by_scales(const float* scales, Scores& scores) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for_each_score(scores, i, [&](float& score, int k) {
      const float scale = scales[thread_key(0) + k];
      if constexpr (!kOfWeights) score *= scale;
      if constexpr (kOfWeights) score = score == 0.0F ? 0.0F : score * scale * kWeightBoost;
    });
  }
}

// A stage of 8-bit rows to the tile of 16-bit rows. By all threads.
template <bool kWidens>
__device__ __forceinline__ void widen_stage(const Memory& memory, int stage) {
  if constexpr (kWidens) {
    widen_rows<key::is_bf16, key::kv_dtype, key::tile_kv, key::head_dim, kKeyRowBytes, kWarps * 32>(
        memory.pointer + Memory::key_stage_offset(stage), memory.pointer + Memory::key_offset(stage));
    widen_rows<key::is_bf16, key::kv_dtype, key::tile_kv, kColumns, kValueRowBytes, kWarps * 32>(
        memory.pointer + Memory::value_stage_offset(stage), memory.pointer + Memory::value_offset(stage));
    __syncthreads();
  }
}

// Softcap and ALiBi; afterwards scores are in log2 units.
__device__ __forceinline__ void apply_terms(const ForwardParams& params, const SeqInfo& seq, float query_factor,
                                            const RowFacts& row, int i, int first_key, Scores& scores) {
  const int first = thread_key(first_key);
  const float distance = static_cast<float>(row.q_pos - kv_pos_of(params.rank, seq, first));
  for_each_score(scores, i, [&](float& score, int k) {
    score *= query_factor;
    if constexpr (key::softcap) score = tanh_by_exp2(score) * params.softcap_log2;
    if constexpr (key::alibi)
      score -= row.slope * fabsf(distance - static_cast<float>(position_offset(params.rank, first, k)));
  });
}

__device__ __forceinline__ void hide(const MaskContext& context, const RowFacts& row, int i, const KeyTile& tile,
                                     int first_key, Scores& scores) {
  const int position_begin = thread_key(first_key);
  for_each_score(scores, i, [&](float& score, int k) {
    const int position = position_begin + k;
    const bool seen = position < tile.end() && (tile.is_full() || is_visible(context, row.q_pos, position, row.info));
    if (!seen) score = negative_infinity();
  });
}

// This thread's share of a stage of values: does it hold NaN or infinity? With kClear they become zero.
template <bool kClear>
__device__ __forceinline__ bool has_nonfinite(char* values) {
  constexpr int kPairs = kColumns / 2;
  bool found = false;
  for (int index = threadIdx.x; index < key::tile_kv * kPairs; index += kWarps * 32) {
    unsigned* pair = reinterpret_cast<unsigned*>(values + index / kPairs * kValueRowBytes + index % kPairs * 4);
    const unsigned bits = *pair;
    const bool low = ptx::is_nonfinite_16<key::is_bf16>(bits);
    const bool high = ptx::is_nonfinite_16<key::is_bf16>(bits >> 16);
    found |= low | high;
    if (kClear && (low | high)) *pair = bits & (low ? 0xffff0000 : 0xffffffff) & (high ? 0xffff : 0xffffffff);
  }
  return found;
}

// Adds the values that are not finite to the row, if it sees them: its result is then no number or infinite, too.
__device__ __forceinline__ void add_nonfinite(const MaskContext& context, const RowFacts& row, int i,
                                              const KeyTile& tile, int warp_key, const char* values, Out& out) {
#pragma unroll 1
  for (int k = 0; k < kKeys; ++k) {
    const int position = tile.begin() + warp_key + k;
    if (position >= tile.end()) return;
    if (!is_visible(context, row.q_pos, position, row.info)) continue;
    const char* value = values + (warp_key + k) * kValueRowBytes + ptx::lane_id() % 4 * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const unsigned short bits = *reinterpret_cast<const unsigned short*>(value + n * 16 + e * 2);
        if (ptx::is_nonfinite_16<key::is_bf16>(bits)) out[n][2 * i + e] += ptx::f32_from_16<key::is_bf16>(bits);
      }
    }
  }
}

// Joins the states of the warps that shared the keys into that of the first one, summing in the order of the warps.
// What they exchange fits where the stages were.
__device__ __forceinline__ void join_warps(const Memory& memory, int warp_q, int warp_kv, OnlineSoftmax& softmax,
                                           Out& out) {
  constexpr int kFloats = kOutTiles * 4 + 2;  // of a state, a lane
  static_assert(kWarps * 2 * 128 <= kSharedBytes - kQueryBytes);
  static_assert(kWarpsQ * (kWarpsKv - 1) * kFloats * 128 <= kSharedBytes - kQueryBytes);
  float* exchange = reinterpret_cast<float*>(memory.pointer + kQueryBytes) + threadIdx.x % 32;
  const auto max_at = [&](int warp, int i) -> float& { return exchange[((warp_q * kWarpsKv + warp) * 2 + i) * 32]; };
  const auto state_at = [&](int warp) { return exchange + (warp_q * (kWarpsKv - 1) + warp - 1) * kFloats * 32; };

  __syncthreads();  // nobody reads the stages any more
#pragma unroll
  for (int i = 0; i < 2; ++i) max_at(warp_kv, i) = softmax.max[i];
  __syncthreads();
  float decay[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float max = negative_infinity();
#pragma unroll
    for (int warp = 0; warp < kWarpsKv; ++warp) max = fmaxf(max, max_at(warp, i));
    decay[i] = exp2_approx(softmax.max[i] - (max == negative_infinity() ? 0.0F : max));
    softmax.max[i] = max;
    softmax.sum[i] *= decay[i];
  }
  __syncthreads();
  if (warp_kv > 0) {
    float* state = state_at(warp_kv);
#pragma unroll
    for (int i = 0; i < 2; ++i) state[i * 32] = softmax.sum[i];
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[(2 + n * 4 + e) * 32] = out[n][e] * decay[e / 2];
    }
  }
  __syncthreads();
  if (warp_kv > 0) return;
#pragma unroll
  for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[n][e] *= decay[e / 2];
  }
#pragma unroll 1
  for (int warp = 1; warp < kWarpsKv; ++warp) {
    const float* state = state_at(warp);
#pragma unroll
    for (int i = 0; i < 2; ++i) softmax.sum[i] += state[i * 32];
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] += state[(2 + n * 4 + e) * 32];
    }
  }
}

__device__ __forceinline__ RowTarget target_of(const ForwardParams& params, const WorkItem& item,
                                               const SharedToken* tokens, const SeqInfo& seq, int row, float max,
                                               float sum) {
  if constexpr (key::shared_rows) {
    const long long state_row = token_of(tokens, item, row).state_row + row % key::group_size;
    return RowTarget::of_state<key::head_dim_v>(state_row, max, sum);
  }
  return RowTarget::of<key::group_size, key::head_dim_v>(params, seq, item, row, max, sum);
}

constexpr int kScaleTiles = index::kScaleGroup / 8;  // n8 tiles of a group of output columns
static_assert(!key::group_scales || kColumns == key::head_dim_v || kColumns % index::kScaleGroup == 0,
              "a pass over the keys computes whole groups");

// Of the thread's own columns of the group that begins at tile `first`; columns behind the last are 0.
__device__ __forceinline__ float largest_of_group(const RowTile& tile, const RowTarget& target, int i, int first) {
  float largest = 0.0F;
#pragma unroll
  for (int n = first; n < min(first + kScaleTiles, kColumns / 8); ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) largest = fmaxf(largest, finite_magnitude(target.mean(tile.out[n][2 * i + e])));
  }
  return largest;
}

__device__ __forceinline__ void store_row(const ForwardParams& params, const WorkItem& item, const SharedToken* tokens,
                                          const SeqInfo& seq, int row, int i, int column_begin, const RowTile& tile) {
  RowTarget target = target_of(params, item, tokens, seq, row, tile.softmax.max[i], tile.softmax.sum[i]);
  if constexpr (kIs8Bit) {
    target.end.factor *= key::token_scales ? 1.0F / kWeightBoost : uniform_scale(params.value_scale, item);
  }
  float scale = 1.0F;
  if constexpr (!key::group_scales) scale = target.given_scale<key::out_dtype>(params);
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    const int column = column_begin + n * 8 + threadIdx.x % 4 * 2;
    if constexpr (key::group_scales) {
      if (n % kScaleTiles == 0) {
        const int group = (column_begin + n * 8) / index::kScaleGroup;
        scale = target.group_scale<key::out_dtype, 4>(params, group, largest_of_group(tile, target, i, n));
      }
    }
    if (column < key::head_dim_v) {
      target.store<key::out_dtype>(params, column, tile.out[n][2 * i], tile.out[n][2 * i + 1], scale);
    }
  }
  if (column_begin == 0 && threadIdx.x % 4 == 0) target.store_lse(params);
}

// Rows [row_begin, row_begin + tile_q) of the item and output columns [column_begin, column_begin + kColumns).
__device__ __forceinline__ void attend(const ForwardParams& params, const WorkItem& item, const SharedToken* tokens,
                                       const SeqInfo& seq, int row_begin, int num_rows, int column_begin,
                                       const Memory& memory) {
  const int warp = threadIdx.x / 32;
  const int warp_q = warp % kWarpsQ;
  const int warp_kv = warp / kWarpsQ;
  const int warp_key = warp_kv * kKeys;
  const int warp_row = warp_q * kRowTiles * 16;
  // The thread's row i of the warp's m16 tile m, within the query tile.
  const auto row_at = [&](int m, int i) { return warp_row + m * 16 + i * 8 + ptx::lane_id() / 4; };
  const auto row_of = [&](int m, int i) { return facts_of(memory, row_at(m, i)); };
  const MaskContext item_context(params, seq, item.request);
  const auto context_of = [&](int m, int i) {
    if constexpr (key::shared_rows) {
      const int request = token_of(tokens, item, min(row_begin + row_at(m, i), num_rows - 1)).request;
      return MaskContext(params, SeqInfo(params, request), request);
    } else {
      return item_context;
    }
  };

  const long long first_token = key::page_size > 0 ? 0 : seq.key_begin;
  const auto data_of = [&](const KeyValueLayout& layout, int column) {
    return static_cast<const char*>(layout.data) +
           kElementBytes * (first_token * layout.token_stride + item.kv_head * layout.head_stride + column);
  };
  const char* keys = data_of(params.key, 0);
  const char* values = data_of(params.value, column_begin);
  const int value_chunks = min(kColumns, key::head_dim_v - column_begin) / kChunkElements;
  Lookup lookup(params, seq, warp);
  const auto load = [&](const KeyTile& tile, int stage) {
    lookup.load<key::head_dim / kChunkElements, kIs8Bit ? key::head_dim : kKeyRowBytes>(
        keys, params.key.page_stride * kElementBytes, params.key.token_stride * kElementBytes, tile,
        memory.query + Memory::key_stage_offset(stage));
    lookup.load<kColumns / kChunkElements, kIs8Bit ? kColumns : kValueRowBytes>(
        values, params.value.page_stride * kElementBytes, params.value.token_stride * kElementBytes, tile,
        memory.query + Memory::value_stage_offset(stage), value_chunks);
    if constexpr (key::token_scales) {
      const auto load_scales = [&](const KeyValueScales& scales, int offset) {
        const float* base = scales.data + first_token * scales.token_stride + item.kv_head * scales.head_stride;
        lookup.load_words(base, scales.page_stride, scales.token_stride, tile, memory.query + offset);
      };
      load_scales(params.key_scale, Memory::scale_offset(stage));
      load_scales(params.value_scale, Memory::scale_offset(stage) + key::tile_kv * 4);
    }
  };

  TileWalk walk(item);
  KeyTile tile = walk.next<key::tile_kv>(params.segments);
  lookup.find(tile);
  clear_padding(memory);
  find_facts(params, item, tokens, seq, row_begin, num_rows, memory);
  load_query(params, item, tokens, seq, row_begin, num_rows, memory);
  if (tile.exists()) load(tile, 0);
  ptx::cp_async_commit();
  KeyTile next = walk.next<key::tile_kv>(params.segments);
  lookup.find(next);

  float query_factor = params.query_factor;
  if constexpr (kIs8Bit && !key::token_scales) query_factor *= uniform_scale(params.key_scale, item);
  if constexpr (kFloat8Query) query_factor *= uniform_scale(params.query_scale, item);
  float factor = 1.0F;
  if constexpr (!kHasTerms) {
    factor = fabsf(query_factor);
    if (factor < kSmallestNormal) factor = kSmallestNormal;  // not 0, since 0·-inf is NaN
    if (query_factor < 0.0F) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      negate_query(memory);  // the loop's first barrier is behind it
    }
  }

  RowTile tiles[kRowTiles] = {};
  for (int stage = 0; tile.exists(); stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tile is there, and nobody reads the other stage any more
    widen_stage<kIs8Bit>(memory, stage);
    Scores scores[kRowTiles];
    multiply_keys(memory.query + warp_row * kKeyRowBytes, memory.key(stage) + warp_key * kKeyRowBytes, scores);
    // Issued here and not before: the products start at once, and cover the addresses.
    if (next.exists()) load(next, stage ^ 1);
    ptx::cp_async_commit();
    const KeyTile after = walk.next<key::tile_kv>(params.segments);
    lookup.find(after);

    Weights weights[kRowTiles];
    const int first_key = tile.begin() + warp_key;
    const bool all_visible = tile.is_full() && tile.begin() + key::tile_kv <= tile.end();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (key::token_scales) multiply_by_scales<false>(memory.key_scales(stage) + warp_key, scores[m]);
      if constexpr (kHasTerms) {
#pragma unroll
        for (int i = 0; i < 2; ++i) apply_terms(params, seq, query_factor, row_of(m, i), i, first_key, scores[m]);
      }
      if (!all_visible) {
#pragma unroll
        for (int i = 0; i < 2; ++i) hide(context_of(m, i), row_of(m, i), i, tile, first_key, scores[m]);
      }
      float decay[2];
      tiles[m].softmax.update(scores[m], factor, decay);
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tiles[m].out[n][e] *= decay[e / 2];
      }
      if constexpr (key::token_scales) multiply_by_scales<true>(memory.value_scales(stage) + warp_key, scores[m]);
      pack_weights(scores[m], weights[m]);
    }
    if constexpr (key::mask) {
      // 0·NaN is NaN: a hidden value that is not finite must not be multiplied.
      char* stage_values = memory.pointer + Memory::value_offset(stage);
      if (!tile.is_full() && __syncthreads_or(has_nonfinite<false>(stage_values))) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            add_nonfinite(context_of(m, i), row_of(m, i), i, tile, warp_key, stage_values, tiles[m].out);
          }
        }
        __syncthreads();
        has_nonfinite<true>(stage_values);
        __syncthreads();
      }
    }
    multiply_values(weights, memory.value(stage) + warp_key * kValueRowBytes, tiles);
    tile = next;
    next = after;
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    tiles[m].softmax.sum_over_lanes();
    if constexpr (kWarpsKv > 1) join_warps(memory, warp_q, warp_kv, tiles[m].softmax, tiles[m].out);
    if (warp_kv > 0) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_begin + row_at(m, i);
      if (row < num_rows) store_row(params, item, tokens, seq, row, i, column_begin, tiles[m]);
    }
  }
}

}  // namespace sm80

// Grid: at most one CTA an item, kShape.num_threads() threads, kShape.smem_bytes() of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(sm80::kShape.num_threads(), 1)
    forward_sm80(const __grid_constant__ ForwardParams params, const SharedToken* shared_tokens) {
  extern __shared__ __align__(128) char shared_memory[];
  const sm80::Memory memory{shared_memory, ptx::shared_address(shared_memory)};
  const int num_items = *params.num_items;
#pragma unroll 1
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    const WorkItem& item = params.items[index];
    const SeqInfo seq(params, item.request);
    const int num_rows = (item.query_end - item.query_begin) * key::group_size;
    for (int row_begin = 0; row_begin < num_rows; row_begin += key::tile_q) {
      for (int column_begin = 0; column_begin < key::head_dim_v; column_begin += sm80::kColumns) {
        sm80::attend(params, item, shared_tokens, seq, row_begin, num_rows, column_begin, memory);
        ptx::cp_async_wait<0>();
        __syncthreads();  // before the memory is filled again
      }
    }
  }
}

}  // namespace qkv::cuda
