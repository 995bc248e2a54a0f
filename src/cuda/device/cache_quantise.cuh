// Writes new tokens' keys and values to their slots in 8-bit pages: round(x / scale). With scales of tokens,
// a row's largest finite magnitude chooses its scale, which is written beside the pages. A slot below 0: nothing of the
// token is read or written.
// Block 32 x index::kQuantisingWarps. Grid: CTAs that take turns; core/index/quantised_rows.hpp has a warp's share.
#pragma once

#include "core/index/quantised_rows.hpp"
#include "core/index/quotient.hpp"
#include "dtype.cuh"
#include "max_of_lanes.cuh"
#include "params.hpp"
#include "row_elements.cuh"

namespace qkv::cuda {
namespace cache_quantise {

constexpr int kVector = index::kElementsOfPiece;

// The lanes of a row; all lanes of a warp take part.
struct Team {
  int lane, log2_lanes;

  __device__ __forceinline__ int lanes() const { return 1 << log2_lanes; }
};

// Of one token; nullptr where nothing is written.
struct Row {
  const char* from;
  unsigned char* to;
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

// Of what each lane of the team found in its rows; all get the rows' scales.
template <int kRows>
__device__ __forceinline__ void choose_scales(float (&largest)[kRows], int pages_dtype, const Team& team,
                                              float (&scales)[kRows]) {
  max_of_lanes(largest, team.lanes());
#pragma unroll
  for (int t = 0; t < kRows; ++t) scales[t] = index::row_scale(largest[t], largest_8bit(pages_dtype));
}

// By single elements: rows of any alignment, and scales that need a division.
__device__ __forceinline__ float largest_of_elements(const CacheWriteSide& side, const char* row, const Team& team) {
  float largest = 0.0F;
  for (int column = team.lane; column < side.head_dim; column += team.lanes()) {
    largest = fmaxf(largest, finite_magnitude(load_element(row, side.source_dtype, column)));
  }
  return largest;
}

__device__ __forceinline__ void round_elements(const CacheWriteSide& side, const Row& row, float scale,
                                               const Team& team) {
  for (int column = team.lane; column < side.head_dim; column += team.lanes()) {
    const float value = __fdiv_rn(load_element(row.from, side.source_dtype, column), scale);
    row.to[column] = static_cast<unsigned char>(pack_8bit(side.pages_dtype, value, 0.0F));
  }
}

// Largest of the lane's part of a row, one element after another.
template <int kDtype, int kPieces, typename Magnitude>
__device__ __forceinline__ float largest_of_values(const Piece<kDtype> (&pieces)[kPieces], Magnitude magnitude_of) {
  float largest = 0.0F;
#pragma unroll
  for (const Piece<kDtype>& piece : pieces) {
    float values[kVector];
    piece.widen(values);
#pragma unroll
    for (float value : values) largest = fmaxf(largest, magnitude_of(value));
  }
  return largest;
}

// Infinity included; of a NaN and x: x.
template <int kDtype, int kPieces>
__device__ __forceinline__ float largest_of_pieces(const Piece<kDtype> (&pieces)[kPieces]) {
  if constexpr (kDtype == kF32) return largest_of_values(pieces, [](float value) { return fabsf(value); });
  unsigned pair = 0;
#pragma unroll
  for (const Piece<kDtype>& piece : pieces) {
    const unsigned word[4] = {piece.words[0].x, piece.words[0].y, piece.words[0].z, piece.words[0].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) pair = ptx::max_of_16<kDtype == kBf16>(pair, word[w] & 0x7fff7fffU);
  }
  pair = ptx::max_of_16<kDtype == kBf16>(pair, pair >> 16);
  return ptx::f32_from_16<kDtype == kBf16>(static_cast<unsigned short>(pair));
}

template <int kDtype, int kPieces>
__device__ __forceinline__ float largest_finite_of_pieces(const Piece<kDtype> (&pieces)[kPieces]) {
  const float largest = largest_of_pieces(pieces);
  if (largest == finite_magnitude(largest)) return largest;
  return largest_of_values(pieces, finite_magnitude);
}

template <int kDtype>
__device__ __forceinline__ uint2 round_piece(const Piece<kDtype>& piece, int pages_dtype, float scale,
                                             float reciprocal) {
  float values[kVector];
  piece.widen(values);
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = index::quotient_for_8bit(values[i], scale, reciprocal);
  if (pages_dtype == kF8E4M3) return pack_eight(kF8E4M3, values);
  return pages_dtype == kI8 ? pack_eight(kI8, values) : pack_eight(kF8E5M2, values);
}

// How a team writes the rows of kRows tokens with the given scales, or with such as it chooses and puts in their place.

// Rows of any alignment and length.
struct ByElements {
  static constexpr int kRows = 1;

  static __device__ __forceinline__ void write(const CacheWriteSide& side, const Row (&rows)[kRows],
                                               float (&scales)[kRows], bool chooses, const Team& team) {
    const bool has_row = rows[0].from != nullptr;
    if (chooses) {
      float largest[] = {has_row ? largest_of_elements(side, rows[0].from, team) : 0.0F};
      choose_scales(largest, side.pages_dtype, team, scales);
    }
    if (has_row) round_elements(side, rows[0], scales[0], team);
  }
};

// Rows that a team holds whole: all loads are issued before the first value is used.
template <int kDtype, int kPieces>
struct ByVectors {
  static constexpr int kRows = kDtype != kF32 && kPieces == 2 ? 2 : 1;

  static __device__ __forceinline__ void write(const CacheWriteSide& side, const Row (&rows)[kRows],
                                               float (&scales)[kRows], bool chooses, const Team& team) {
    const int num_pieces = side.head_dim / kVector;
    Piece<kDtype> held[kRows][kPieces];
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int piece = team.lane + p * team.lanes();
        if (rows[t].from != nullptr && piece < num_pieces) {
          held[t][p].load(rows[t].from, piece);
        } else {
          held[t][p].clear();
        }
      }
    }
    if (chooses) {
      float largest[kRows];
#pragma unroll
      for (int t = 0; t < kRows; ++t) largest[t] = largest_finite_of_pieces(held[t]);
      choose_scales(largest, side.pages_dtype, team, scales);
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (rows[t].from != nullptr) round(side, rows[t], held[t], scales[t], team);
    }
  }

  static __device__ __forceinline__ void round(const CacheWriteSide& side, const Row& row,
                                               const Piece<kDtype> (&held)[kPieces], float scale, const Team& team) {
    if (!index::has_exact_remainders(scale)) return round_elements(side, row, scale, team);
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int piece = team.lane + p * team.lanes();
      if (piece < side.head_dim / kVector) {
        reinterpret_cast<uint2*>(row.to)[piece] = round_piece(held[p], side.pages_dtype, scale, reciprocal);
      }
    }
  }
};

// One of the rows that every token has.
struct RowKind {
  int of_value, head;
};

// A token's row, and where its scale lies.
struct Place {
  Row row{nullptr, nullptr};
  float* scale = nullptr;

  __device__ __forceinline__ Place(const CacheWriteParams& params, const RowKind& kind, int token, long long slot) {
    if (slot < 0) return;
    const CacheWriteSide& side = params.sides[kind.of_value];
    const KeyValueScales& scales = params.scales[kind.of_value];
    const long long page = page_of(slot, params.page_size);
    const long long offset = slot - page * params.page_size;
    const long long request = params.slot_requests != nullptr ? params.slot_requests[token] : 0;
    row.from = static_cast<const char*>(side.source) +
               (token * side.source_token_stride + kind.head * side.source_head_stride) * size_of(side.source_dtype);
    row.to = static_cast<unsigned char*>(side.pages) + page * side.page_stride + offset * side.token_stride +
             kind.head * side.head_stride;
    scale = scales.data + request * scales.request_stride + page * scales.page_stride + offset * scales.token_stride +
            kind.head * scales.head_stride;
  }

  // Few caches have 2^32 slots, and 64-bit divisions cost several times as much.
  static __device__ __forceinline__ long long page_of(long long slot, int page_size) {
    if (slot >> 32 != 0) return slot / page_size;
    return static_cast<unsigned>(slot) / static_cast<unsigned>(page_size);
  }
};

template <typename T>
__device__ __forceinline__ T* pointer_of_lane(T* pointer, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(pointer), lane));
}

// The rows of a warp, of so many tokens from `first` on. own_slot: of token first + lane; -1 where there is none.
template <typename Rounding>
__device__ __forceinline__ void write_rows(const CacheWriteParams& params, const RowKind& kind, int first,
                                           int num_tokens, long long own_slot, int log2_lanes) {
  const int lane = threadIdx.x % 32;
  const bool chooses = params.token_scales != 0;
  const Place own(params, kind, first + lane, own_slot);
  float own_scale = chooses || own.scale == nullptr ? 1.0F : *own.scale;
  const Team team{lane & ((1 << log2_lanes) - 1), log2_lanes};
  constexpr int kRows = Rounding::kRows;
  const int num_teams = 32 >> log2_lanes;
#pragma unroll 1
  for (int begin = 0; begin < num_tokens; begin += num_teams * kRows) {
    Row rows[kRows];
    float scales[kRows];
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      const int of_team = begin + t * num_teams + (lane >> log2_lanes);
      rows[t] = {pointer_of_lane(own.row.from, of_team), pointer_of_lane(own.row.to, of_team)};
      if (of_team >= num_tokens) rows[t].from = nullptr;
      scales[t] = __shfl_sync(0xffffffff, own_scale, of_team);
    }
    Rounding::write(params.sides[kind.of_value], rows, scales, chooses, team);
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      const int team_of_own = lane - begin - t * num_teams;
      const float chosen = __shfl_sync(0xffffffff, scales[t], team_of_own << log2_lanes);
      if (team_of_own >= 0 && team_of_own < num_teams) own_scale = chosen;
    }
  }
  if (chooses && own.scale != nullptr) *own.scale = own_scale;
}

template <typename Rounding>
__device__ __forceinline__ void take_turns(const CacheWriteParams& params, int num_vectors) {
  const int log2_lanes = index::quantising_log2_lanes(num_vectors);
  const int num_slots = params.num_slots != nullptr ? *params.num_slots : params.most_slots;
  const unsigned rows_of_token = 2 * params.num_kv_heads;
  const unsigned num_warps = gridDim.x * index::kQuantisingWarps;
  const int tokens_of_warp =
      index::fewer_rows_of_warp(params.tokens_of_warp, log2_lanes, num_slots * rows_of_token, num_warps);
  const unsigned num_units = (num_slots + tokens_of_warp - 1) / tokens_of_warp * rows_of_token;
  const int lane = threadIdx.x % 32;
  // Slots are on their way a turn ahead: all that a turn waits for hangs on them.
  const auto slot_of = [&](unsigned unit) {
    const int token = static_cast<int>(unit / rows_of_token) * tokens_of_warp + lane;
    return unit < num_units && lane < tokens_of_warp && token < num_slots ? params.slots[token] : -1LL;
  };
  unsigned unit = blockIdx.x * index::kQuantisingWarps + threadIdx.x / 32;
  long long slot = slot_of(unit);
#pragma unroll 1
  for (; unit < num_units; unit += num_warps) {
    const long long next_slot = slot_of(unit + num_warps);
    const int row = unit % rows_of_token, first = unit / rows_of_token * tokens_of_warp;
    const int of_value = row < params.num_kv_heads ? 0 : 1;
    write_rows<Rounding>(params, {of_value, row - of_value * params.num_kv_heads}, first,
                         min(tokens_of_warp, num_slots - first), slot, log2_lanes);
    slot = next_slot;
  }
}

template <int kDtype>
__device__ __forceinline__ void take_vectors(const CacheWriteParams& params, int num_vectors) {
  if (index::quantising_pieces_of_lane(num_vectors) == index::kPiecesOfQuantisingLane) {
    take_turns<ByVectors<kDtype, index::kPiecesOfQuantisingLane>>(params, num_vectors);
  } else {
    take_turns<ByVectors<kDtype, index::kMostPiecesOfQuantisingLane>>(params, num_vectors);
  }
}

}  // namespace cache_quantise

extern "C" __global__ void __launch_bounds__(32 * index::kQuantisingWarps, 4)
    cache_quantise_pages(const __grid_constant__ CacheWriteParams params) {
  const CacheWriteSide& key = params.sides[0];
  const CacheWriteSide& value = params.sides[1];
  const int num_vectors = (max(key.head_dim, value.head_dim) - 1) / cache_quantise::kVector + 1;
  if (num_vectors > index::kMostPiecesOfQuantisingLane * index::kMostLanes || key.source_dtype != value.source_dtype ||
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
