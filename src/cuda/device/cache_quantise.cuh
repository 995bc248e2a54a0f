// Writes new tokens' keys and values to their slots in 8-bit pages: round(x / scale). With scales of tokens,
// a row's largest finite magnitude chooses its scale, which is written beside the pages. A slot below 0: nothing of the
// token is read or written.
// Block 256, in teams that index/quantised_rows.hpp counts out. Grid: CTAs that take turns at the slots.
#pragma once

#include "core/index/quantised_rows.hpp"
#include "core/index/quotient.hpp"
#include "dtype.cuh"
#include "params.hpp"

namespace qkv::cuda {
namespace cache_quantise {

constexpr int kVector = index::kElementsOfPiece;
constexpr int kMostPieces = 3;  // of a row that a lane holds: rows of up to 768 elements are held whole

// A lane of a team.
struct Lane {
  int index, count;
  unsigned team;  // the lanes of the warp that are of the team
};

// Of one token.
struct Row {
  const char* from;
  unsigned char* to;
  float* scale;
};

// What a lane holds of a row: a vector as it lies in memory.
template <int kDtype>
struct Piece {
  static constexpr int kLoads = kDtype == kF32 ? 2 : 1;

  uint4 words[kLoads];

  __device__ __forceinline__ void load(const char* row, int piece) {
    const uint4* from = reinterpret_cast<const uint4*>(row) + piece * kLoads;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = from[i];
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void widen(float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const unsigned word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (kDtype == kF32) {
          values[4 * i + w] = __uint_as_float(word[w]);
        } else {
          values[2 * w] = ptx::f32_from_16<kDtype == kBf16>(static_cast<unsigned short>(word[w]));
          values[2 * w + 1] = ptx::f32_from_16<kDtype == kBf16>(static_cast<unsigned short>(word[w] >> 16));
        }
      }
    }
  }
};

// Every row begins at a whole vector on both sides, and is whole vectors long.
__device__ __forceinline__ bool allows_vectors(const CacheWriteSide& side) {
  const long long source = (side.source_token_stride | side.source_head_stride) * size_of(side.source_dtype) |
                           reinterpret_cast<long long>(side.source);
  const long long pages =
      side.page_stride | side.token_stride | side.head_stride | reinterpret_cast<long long>(side.pages);
  return side.head_dim % kVector == 0 && source % 16 == 0 && pages % kVector == 0;
}

__device__ __forceinline__ float load_element(const char* row, int dtype, int column) {
  if (dtype == kF32) return reinterpret_cast<const float*>(row)[column];
  const unsigned short bits = reinterpret_cast<const unsigned short*>(row)[column];
  return dtype == kBf16 ? ptx::f32_from_bf16(bits) : ptx::f32_from_f16(bits);
}

// Of what each lane of the team found; all get the scale, and the first writes it.
__device__ __forceinline__ float choose_scale(float largest, int pages_dtype, const Lane& lane, float* scale_at) {
  for (int step = lane.count / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(lane.team, largest, step));
  }
  const float scale = index::row_scale(largest, largest_8bit(pages_dtype));
  if (lane.index == 0 && scale_at != nullptr) *scale_at = scale;
  return scale;
}

// By single elements: rows of any alignment, and scales that need a division.
__device__ __forceinline__ float largest_of_elements(const CacheWriteSide& side, const char* row, const Lane& lane) {
  float largest = 0.0F;
  for (int column = lane.index; column < side.head_dim; column += lane.count) {
    largest = fmaxf(largest, finite_magnitude(load_element(row, side.source_dtype, column)));
  }
  return largest;
}

__device__ __forceinline__ void round_elements(const CacheWriteSide& side, const Row& row, float scale,
                                               const Lane& lane) {
  for (int column = lane.index; column < side.head_dim; column += lane.count) {
    const float value = __fdiv_rn(load_element(row.from, side.source_dtype, column), scale);
    row.to[column] = static_cast<unsigned char>(pack_8bit(side.pages_dtype, value, 0.0F));
  }
}

template <int kDtype>
__device__ __forceinline__ float largest_of_piece(const Piece<kDtype>& piece) {
  float values[kVector];
  piece.widen(values);
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, fabsf(values[i]));  // of a NaN and x: x
  if (largest == finite_magnitude(largest)) return largest;
  largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, finite_magnitude(values[i]));
  return largest;
}

template <int kPagesDtype>
__device__ __forceinline__ uint2 pack_vector(const float (&values)[kVector]) {
  unsigned pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) pairs[i] = pack_8bit(kPagesDtype, values[2 * i], values[2 * i + 1]);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

template <int kDtype>
__device__ __forceinline__ uint2 round_piece(const Piece<kDtype>& piece, int pages_dtype, float scale,
                                             float reciprocal) {
  float values[kVector];
  piece.widen(values);
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = index::quotient_for_8bit(values[i], scale, reciprocal);
  if (pages_dtype == kF8E4M3) return pack_vector<kF8E4M3>(values);
  return pages_dtype == kI8 ? pack_vector<kI8>(values) : pack_vector<kF8E5M2>(values);
}

// The rows of keys or of values, of one head, of kTokens tokens from `first` on.
template <int kTokens>
struct Rows {
  Row rows[kTokens];  // from: nullptr where nothing is written

  __device__ __forceinline__ Rows(const CacheWriteParams& params, int of_value, int head, long long first,
                                  long long num_slots) {
    long long slots[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) slots[t] = first + t < num_slots ? params.slots[first + t] : -1;
    const CacheWriteSide& side = params.sides[of_value];
    const KeyValueScales& scales = params.scales[of_value];
    const char* from = static_cast<const char*>(side.source) +
                       (first * side.source_token_stride + head * side.source_head_stride) * size_of(side.source_dtype);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      rows[t] = {nullptr, nullptr, nullptr};
      if (slots[t] < 0) continue;
      const long long page = page_of(slots[t], params.page_size);
      const long long offset = slots[t] - page * params.page_size;
      const long long request = params.slot_requests != nullptr ? params.slot_requests[first + t] : 0;
      rows[t].from = from + t * side.source_token_stride * size_of(side.source_dtype);
      rows[t].to = static_cast<unsigned char*>(side.pages) + page * side.page_stride + offset * side.token_stride +
                   head * side.head_stride;
      rows[t].scale = scales.data + request * scales.request_stride + page * scales.page_stride +
                      offset * scales.token_stride + head * scales.head_stride;
    }
  }

  // Few caches have 2^32 slots, and 64-bit divisions cost several times as much.
  static __device__ __forceinline__ long long page_of(long long slot, int page_size) {
    if (slot >> 32 != 0) return slot / page_size;
    return static_cast<unsigned>(slot) / static_cast<unsigned>(page_size);
  }
};

// Rows of any alignment and length.
struct ByElements {
  static constexpr int kTokens = 1;
  static constexpr int kPieces = 2;

  static __device__ __forceinline__ void write(const CacheWriteParams& params, const CacheWriteSide& side,
                                               const Rows<kTokens>& unit, const Lane& lane) {
    const Row& row = unit.rows[0];
    if (row.from == nullptr) return;
    const float scale = params.token_scales
                            ? choose_scale(largest_of_elements(side, row.from, lane), side.pages_dtype, lane, row.scale)
                            : *row.scale;
    round_elements(side, row, scale, lane);
  }
};

// Rows that a team holds whole, of up to 32 · kPieces vectors: all loads are issued before the first value is used.
template <int kDtype, int kTokensHeld, int kPiecesOfLane>
struct ByVectors {
  static constexpr int kTokens = kTokensHeld;
  static constexpr int kPieces = kPiecesOfLane;

  static __device__ __forceinline__ void write(const CacheWriteParams& params, const CacheWriteSide& side,
                                               const Rows<kTokens>& unit, const Lane& lane) {
    const int num_pieces = side.head_dim / kVector;
    Piece<kDtype> held[kTokens][kPieces];
    float scales[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int piece = lane.index + p * lane.count;
        if (unit.rows[t].from != nullptr && piece < num_pieces) {
          held[t][p].load(unit.rows[t].from, piece);
        } else {
          held[t][p].clear();
        }
      }
      scales[t] = params.token_scales == 0 && unit.rows[t].from != nullptr ? *unit.rows[t].scale : 1.0F;
    }
    if (params.token_scales) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float largest = 0.0F;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) largest = fmaxf(largest, largest_of_piece(held[t][p]));
        scales[t] = choose_scale(largest, side.pages_dtype, lane, unit.rows[t].scale);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (unit.rows[t].from == nullptr) continue;
      if (!index::has_exact_remainders(scales[t])) {
        round_elements(side, unit.rows[t], scales[t], lane);
        continue;
      }
      const float reciprocal = __frcp_rn(scales[t]);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int piece = lane.index + p * lane.count;
        if (piece < num_pieces) {
          reinterpret_cast<uint2*>(unit.rows[t].to)[piece] =
              round_piece(held[t][p], side.pages_dtype, scales[t], reciprocal);
        }
      }
    }
  }
};

template <typename Rounding>
__device__ __forceinline__ void take_turns(const CacheWriteParams& params, int num_vectors) {
  const index::RowTeams teams{index::lanes_that_hold(num_vectors, Rounding::kPieces), 2 * params.num_kv_heads,
                              Rounding::kTokens};
  const int team = threadIdx.x / teams.lanes;
  const int lane_index = threadIdx.x % teams.lanes;
  const Lane lane{lane_index, teams.lanes, 0xffffffffU >> (32 - teams.lanes) << (threadIdx.x % 32 - lane_index)};
  const long long num_slots = *params.num_slots;
  const int tokens_of_turn = teams.tokens_of_turn();
  for (long long turn = static_cast<long long>(blockIdx.x) * tokens_of_turn; turn < num_slots;
       turn += static_cast<long long>(gridDim.x) * tokens_of_turn) {
    for (int unit = team; unit < teams.units_of_turn(); unit += teams.num_teams()) {
      const int row = teams.row_of(unit);
      const int of_value = row < params.num_kv_heads ? 0 : 1;
      const Rows<Rounding::kTokens> rows(params, of_value, row - of_value * params.num_kv_heads,
                                         turn + teams.first_token_of(unit), num_slots);
      Rounding::write(params, params.sides[of_value], rows, lane);
    }
  }
}

template <int kDtype>
__device__ __forceinline__ void take_vectors(const CacheWriteParams& params, int num_vectors) {
  if (num_vectors <= 2 * index::kMostLanes) {
    take_turns<ByVectors<kDtype, kDtype == kF32 ? 1 : 2, 2>>(params, num_vectors);
  } else {
    take_turns<ByVectors<kDtype, 1, kMostPieces>>(params, num_vectors);
  }
}

}  // namespace cache_quantise

extern "C" __global__ void __launch_bounds__(index::kQuantisingThreads, 4)
    cache_quantise_pages(const __grid_constant__ CacheWriteParams params) {
  const CacheWriteSide& key = params.sides[0];
  const CacheWriteSide& value = params.sides[1];
  const int num_vectors = (max(key.head_dim, value.head_dim) - 1) / cache_quantise::kVector + 1;
  if (num_vectors > cache_quantise::kMostPieces * index::kMostLanes || key.source_dtype != value.source_dtype ||
      !cache_quantise::allows_vectors(key) || !cache_quantise::allows_vectors(value)) {
    cache_quantise::take_turns<cache_quantise::ByElements>(params, num_vectors);
  } else if (key.source_dtype == kBf16) {
    cache_quantise::take_vectors<kBf16>(params, num_vectors);
  } else if (key.source_dtype == kF16) {
    cache_quantise::take_vectors<kF16>(params, num_vectors);
  } else {
    cache_quantise::take_vectors<kF32>(params, num_vectors);
  }
}

}  // namespace qkv::cuda
