// Attention of few query rows (decode: up to 32 packed rows of one KV head) on Hopper, bound by the memory that K and V
// come from. A CTA takes one item after another. The item's tiles of 16 to 64 keys are dealt out to 8 or 4 lanes; a
// warp owns a lane (or two, one after another) and a piece of shared memory, so that no warp waits for another until
// the item ends. Products have keys (then dimensions of V) as the matrix unit's 16 rows and query rows as its 8
// columns: rows are padded to 8, not to 64. Keys and values of 8 bits are widened to f16 between shared memory and
// products. docs/forward_sm90_few_rows.md says why.
//
// Asks of the prologue, besides the common constants: tile_q (4, 8, 16 or 32 rows), tile_kv (keys of a warp's tile),
// num_warps (divides num_lanes), num_stages (of each ring), min_ctas (of an SM), cluster_size (8: splits join
// within clusters of 2, 4 or 8 CTAs; 1: by tickets only), takes_turns (0: the grid has a CTA an item, and each ends
// with it), request_tile_q (tile_q; less: an item holds rows of several requests, each with the arithmetic of such a
// tile alone). head_dim and head_dim_v: multiples of 16 up to 256. Segments begin at multiples of tile_kv. Grid: a CTA
// an item, or fewer that take turns, in whole clusters. Dynamic shared memory: index::few_rows::smem_layout(...)
// .total_bytes. Bits of a row: see the shape header; warps, stages, CTAs of an SM and clusters don't enter them.
#pragma once

#include "few_rows_loads.cuh"
#include "few_rows_merge.cuh"
#include "few_rows_params.hpp"
#include "few_rows_query.cuh"
#include "few_rows_tile.cuh"
#include "few_rows_widen.cuh"
#include "mask_tile.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"
#include "softmax.cuh"

namespace qkv::cuda::few_rows {

constexpr int kRequestBlocks = shape::num_row_blocks(key::request_tile_q);
constexpr int kLoadSteps = shape::steps_of_load(kElementBytes);  // products that one ldmatrix feeds
constexpr int kKeyLoads = (kKeySteps + kLoadSteps - 1) / kLoadSteps;
constexpr int kValueSteps = key::head_dim_v / 16;
constexpr int kValueLoads = (kValueSteps + kLoadSteps - 1) / kLoadSteps;
constexpr int kKeyStageBytes = shape::stage_bytes(kKeyValue.key_bytes(), kTileKeys);
constexpr int kStageBytes = kKeyStageBytes + shape::stage_bytes(kKeyValue.value_bytes(), kTileKeys);
constexpr int kScaleBytes = kTileKeys * static_cast<int>(sizeof(float));  // of a stage's keys, or values

static_assert(shape::supports(key::head_dim, key::head_dim_v) && key::tile_q * key::head_dim_v <= 4096);
static_assert(kBoxes == 1 || kBoxes == 2 || kBoxes == 4);
static_assert(kBoxes * kBlocks * 4 <= 64, "a lane's elements are the bits of a word");
static_assert(KeyBox::kBytes % (8 * KeyBox::kChunk) == 0 && ValueBox::kBytes % (8 * ValueBox::kChunk) == 0,
              "a box begins where the swizzle's pattern does");
static_assert(kKeySteps % kLoadSteps == 0 || kBoxes * KeyBox::kBytes + KeyBox::kColumnBytes <= kKeyStageBytes,
              "half of the last load is read behind the box, and not used");
static_assert(kValueSteps % kLoadSteps == 0 ||
              kBoxes * ValueBox::kBytes + ValueBox::kColumnBytes <= kStageBytes - kKeyStageBytes);

// What is made of threadIdx the compiler makes again for every tile, behind a look-up of a special register; what is
// made of ptx::lane_id() it holds. Where that spills (tests/cuda/kernels_compile_test.cpp), it isn't held.
constexpr bool kHoldsOffsets =
    kSharedRows ? key::takes_turns != 0 : kSmallTile && (key::min_ctas < 4 || key::head_dim <= 128);

template <bool kFitsWord>
struct BitsOf {
  using Type = unsigned;
};
template <>
struct BitsOf<false> {
  using Type = unsigned long long;
};
using SeenBits = BitsOf<kBoxes * kBlocks * 4 <= 32>::Type;

// The rows of an item over the tiles of one warp. Of each 16 x 8 product a lane holds elements i = 0 … 3: key
// lane/4 + 8·(i/2), or dimension value_dim(i/2), row 2·(lane%4) + i%2.
class WarpRows {
 public:
  __device__ __forceinline__ WarpRows(const FewRowsParams& params, const FewRowsItem& item, const SharedToken* tokens,
                                      char* smem, int lane)
      : params_(params.forward),
        item_(item),
        rows_{params.forward, item, tokens},
        lane_(lane),
        query_(rows_, smem, lane) {
    const int held_lane = kHoldsOffsets ? ptx::lane_id() : lane;
    const shape::LoadRow key_row = shape::key_load_row(held_lane);
    const shape::LoadRow value_row = shape::value_load_row(kElementBytes, held_lane);
    key_lane_offset_ = KeyBox::offset(key_row.key, key_row.unit);
    value_lane_offset_ = ValueBox::offset(value_row.key, value_row.unit);
  }

  // Nothing seen yet.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        max_[n][e] = negative_infinity();
        sum_[n][e] = 0.0F;
        if constexpr (key::token_scales) unit_[n][e] = kSmallestNormal;
      }
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.0F;
      }
    }
  }

  __device__ __forceinline__ void load_query() {
    if constexpr (key::alibi && !kSharedRows) load_slopes();
    query_.load();
  }

  // By all threads of the CTA; a barrier must follow.
  __device__ __forceinline__ void copy_query_to_smem(char* smem) const { query_.copy_to_smem(smem); }

  // scores = query · key of the tile in log2 units, hidden ones -infinity. seen_ has a bit for each that is visible.
  __device__ __forceinline__ void multiply_keys(unsigned keys, const float* key_scales, const TileCursor& tile) {
    if constexpr (kSharedRows && kBoxes > 1) {
      // Box after box: the sums of all would fill the registers. Unrolled, they would be interleaved.
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
        for (int later = 1; later < kBoxes; ++later) {
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores_[later - 1][n][i] = scores_[later][n][i];
          }
        }
        multiply_boxes<1>(keys + box * KeyBox::kBytes, kBoxes - 1);
      }
    } else {
      multiply_boxes<kBoxes>(keys, 0);
    }
    apply_terms(key_scales, tile);
    if (is_edge(tile)) [[unlikely]]
      hide(tile);
  }

  // Scores become weights 2^(score - max), those of values times the values' scales; earlier sums and outputs are
  // rescaled to the new maximum.
  __device__ __forceinline__ void update_softmax(const float* value_scales) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float tile_max = fmaxf(scores_[0][n][e], scores_[0][n][e + 2]);
#pragma unroll
        for (int box = 1; box < kBoxes; ++box) {
          tile_max = fmaxf(tile_max, fmaxf(scores_[box][n][e], scores_[box][n][e + 2]));
        }
#pragma unroll
        for (int distance = 4; distance < shape::kWarpSize; distance *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(kAllLanes, tile_max, distance));
        }
        const float max = fmaxf(max_[n][e], tile_max);
        // A row that has seen nothing yet has no finite maximum to subtract.
        const float base = max == negative_infinity() ? 0.0F : max;
        float decay = exp2_approx(max_[n][e] - base);
        max_[n][e] = max;
        float tile_sum = 0.0F;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
          for (int i = e; i < 4; i += 2) {
            scores_[box][n][i] = exp2_approx(scores_[box][n][i] - base);
            tile_sum += scores_[box][n][i];
          }
        }
        sum_[n][e] = __fmaf_rn(sum_[n][e], decay, tile_sum);
        if constexpr (key::token_scales) decay *= scale_weights(n, e, value_scales);
#pragma unroll
        for (int m = 0; m < kValueSteps; ++m) {
          out_[m][n][e] *= decay;
          out_[m][n][e + 2] *= decay;
        }
      }
    }
  }

  // out += weights · values. `values` is the tile in shared memory, which edge tiles change.
  __device__ __forceinline__ void multiply_values(unsigned values, char* values_pointer, const TileCursor& tile) {
    if (is_edge(tile)) [[unlikely]]
      repair_values(values_pointer, tile);
    unsigned weights[kBoxes][kBlocks][2];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weights[box][n][half] =
              ptx::movmatrix_trans(ptx::pack_16<kMathBf16>(scores_[box][n][2 * half], scores_[box][n][2 * half + 1]));
        }
      }
    }
#pragma unroll
    for (int load = 0; load < kValueLoads; ++load) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        unsigned words[4];
        ptx::ldmatrix_x4_trans(words, ValueBox::address(values + value_lane_offset_ + box * ValueBox::kBytes, load));
#pragma unroll
        for (int half = 0; half < kLoadSteps; ++half) {
          const int m = load * kLoadSteps + half;
          if (m >= kValueSteps) break;
          unsigned value[4];
          make_value_fragment(words, half, value);
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            ptx::mma_m16n8k16<kMathBf16>(out_[m][n], value, weights[box][n][0], weights[box][n][1]);
          }
        }
      }
    }
  }

  // Weighted sums [tile_q][kStatePitch], then max and sum of each row.
  __device__ __forceinline__ void store_state(float* state) {
#pragma unroll
    for (int distance = 4; distance < shape::kWarpSize; distance *= 2) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        sum_[n][0] += __shfl_xor_sync(kAllLanes, sum_[n][0], distance);
        sum_[n][1] += __shfl_xor_sync(kAllLanes, sum_[n][1], distance);
      }
    }
    if (2 * (lane_ % 4) >= key::tile_q) return;  // rows that are padding
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int row = 8 * n + 2 * (lane_ % 4);
      if (lane_ < 4) {
        const float4 stats = {max_[n][0], sum_[n][0], max_[n][1], sum_[n][1]};
        *reinterpret_cast<float4*>(state + key::tile_q * kStatePitch + 2 * row) = stats;
      }
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) store_out(state + (row + e) * kStatePitch + 16 * m, m, n, e);
      }
    }
  }

 private:
  // The keys of kCount boxes; scores of box `first` and those behind it.
  template <int kCount>
  __device__ __forceinline__ void multiply_boxes(unsigned keys, int first) {
    // A product waits for itself at every step: with few products at once, steps are summed apart.
    constexpr int kProducts = kBoxes * kRequestBlocks;
    constexpr int kChains = kProducts < 4 ? 4 / kProducts : 1;
    float sums[kChains][kCount][kBlocks][4] = {};
#pragma unroll
    for (int load = 0; load < kKeyLoads; ++load) {
      unsigned query[kLoadSteps][kBlocks][2];
#pragma unroll
      for (int half = 0; half < kLoadSteps; ++half) {
        if (load * kLoadSteps + half < kKeySteps) query_.take(load * kLoadSteps + half, query[half]);
      }
#pragma unroll
      for (int box = 0; box < kCount; ++box) {
        unsigned words[4];
        ptx::ldmatrix_x4(words, KeyBox::address(keys + key_lane_offset_ + box * KeyBox::kBytes, load));
#pragma unroll
        for (int half = 0; half < kLoadSteps; ++half) {
          const int step = load * kLoadSteps + half;
          if (step >= kKeySteps) break;
          unsigned key_fragment[4];
          make_key_fragment(words, half, key_fragment);
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            ptx::mma_m16n8k16<kMathBf16>(sums[step % kChains][box][n], key_fragment, query[half][n][0],
                                         query[half][n][1]);
          }
        }
      }
    }
#pragma unroll
    for (int box = 0; box < kCount; ++box) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float score = sums[0][box][n][i];
#pragma unroll
          for (int chain = 1; chain < kChains; ++chain) score += sums[chain][box][n][i];
          scores_[first + box][n][i] = score;
        }
      }
    }
  }

  static __device__ __forceinline__ bool is_edge(const TileCursor& tile) {
    return tile.partial || tile.begin + kTileKeys > tile.end;
  }

  __device__ __forceinline__ float find_slope(int request, int head) const {
    return params_.alibi_slopes[request * params_.alibi_request_stride + head] * kLog2e;
  }

  __device__ __forceinline__ void load_slopes() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + 2 * (lane_ % 4) + e;
        slope_[n][e] = row < rows_.count() ? find_slope(item_.request, rows_.head_of(row)) : 0.0F;
      }
    }
  }

  // Of the lane's row e of block n. Rows of several requests look theirs up for every tile: registers are full.
  struct Alibi {
    int q_pos;
    float slope;  // in log2 units
  };
  __device__ __forceinline__ Alibi alibi_of(int n, int e) const {
    const int row = 8 * n + 2 * (lane_ % 4) + e;
    if constexpr (kSharedRows) {
      const int existing = min(row, rows_.count() - 1);
      const SharedToken& token = rows_.token_of(existing);
      return {token.position, find_slope(token.request, rows_.head_of(existing))};
    }
    return {rows_.query_of(row) + item_.cached_keys, slope_[n][e]};
  }

  // Two dimensions of a row, in what its sums are in units of.
  __device__ __forceinline__ void store_out(float* dims, int m, int n, int e) const {
    const float unit = key::token_scales ? unit_[n][e] : 1.0F;
    const float first = key::token_scales ? out_[m][n][e] * unit : out_[m][n][e];
    const float second = key::token_scales ? out_[m][n][e + 2] * unit : out_[m][n][e + 2];
    if constexpr (kIs8Bit) {
      *reinterpret_cast<float2*>(dims + shape::value_dim(kElementBytes, lane_, 0)) = {first, second};
    } else {
      dims[shape::value_dim(kElementBytes, lane_, 0)] = first;
      dims[shape::value_dim(kElementBytes, lane_, 1)] = second;
    }
  }

  // Of the lane's keys lane/4 + 8·half of a box; `scales` are the tile's.
  __device__ __forceinline__ float token_scale(const float* scales, int box, int half) const {
    return scales[box * shape::kBoxKeys + lane_ / 4 + half * 8];
  }

  // Weights of a row times their tokens' scales, in units of the largest scale that the row has met, rounded down to a
  // power of two: what f16 holds of a product doesn't depend on how large scales are. Returns what earlier outputs are
  // multiplied by. A key without weight is hidden, or as good as hidden: its scale may be anything.
  __device__ __forceinline__ float scale_weights(int n, int e, const float* value_scales) {
    float largest = unit_[n][e];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = fabsf(token_scale(value_scales, box, half));
        if (scores_[box][n][e + 2 * half] != 0.0F) largest = fmaxf(largest, scale);
      }
    }
#pragma unroll
    for (int distance = 4; distance < shape::kWarpSize; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const unsigned unit_bits = shape::scale_unit_bits(__float_as_uint(largest));
    const float inverse = __uint_as_float(shape::inverse_power_bits(unit_bits));
    const float growth = unit_[n][e] * inverse;
    unit_[n][e] = __uint_as_float(unit_bits);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& weight = scores_[box][n][e + 2 * half];
        weight = weight == 0.0F ? 0.0F : weight * (token_scale(value_scales, box, half) * inverse);
      }
    }
    return growth;
  }

  __device__ __forceinline__ void apply_terms(const float* key_scales, const TileCursor& tile) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float2 factors = query_.score_factors(n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float score = scores_[box][n][i] * (i % 2 == 0 ? factors.x : factors.y);
          if constexpr (key::token_scales) score *= token_scale(key_scales, box, i / 2);
          if constexpr (key::softcap) score = tanh_by_exp2(score) * params_.softcap_log2;
          if constexpr (key::alibi) {
            const Alibi row = alibi_of(n, i % 2);
            const int shown = tile.begin + box * shape::kBoxKeys + lane_ / 4 + i / 2 * 8;
            const int kv_pos = kv_pos_of(params_.rank, SeqInfo(0, 0, item_.cached_keys, 0), shown);
            score = __fmaf_rn(-row.slope, static_cast<float>(abs(row.q_pos - kv_pos)), score);
          }
          scores_[box][n][i] = score;
        }
      }
    }
  }

  // Asks the mask for each of the lane's elements. is_seen(row, shown key).
  template <typename IsSeen>
  __device__ __forceinline__ void ask(const TileCursor& tile, IsSeen is_seen) {
#pragma unroll 1
    for (int bit = 0; bit < kBoxes * kBlocks * 4; ++bit) {
      const int row = row_of(bit);
      if (row >= rows_.count() || key_of(tile, bit) >= tile.end) continue;
      seen_ |= static_cast<SeenBits>(is_seen(row, key_of(tile, bit))) << bit;
    }
  }

  __device__ __forceinline__ void ask_mask(const TileCursor& tile) {
    if constexpr (kSharedRows) {
      ask(tile, [&](int row, int shown) {
        const SharedToken& token = rows_.token_of(row);
        const MaskContext context(params_, SeqInfo(params_, token.request), token.request);
        return is_visible(context, token.position, shown, RowInfo{token.query, rows_.head_of(row)});
      });
    } else {
      const MaskContext context(params_, SeqInfo(params_, item_.request), item_.request);
      ask(tile, [&](int row, int shown) {
        return is_visible(context, rows_.query_of(row) + item_.cached_keys, shown,
                          RowInfo{rows_.query_of(row), rows_.head_of(row)});
      });
    }
  }

  // Of the lane's element (box·kBlocks + n)·4 + i: its key among those shown, its row.
  __device__ __forceinline__ int key_of(const TileCursor& tile, int bit) const {
    return tile.begin + bit / (4 * kBlocks) * shape::kBoxKeys + lane_ / 4 + bit / 2 % 2 * 8;
  }
  __device__ __forceinline__ int row_of(int bit) const { return bit / 4 % kBlocks * 8 + 2 * (lane_ % 4) + bit % 2; }

  // Bit (box·kBlocks + n)·4 + i of `seen_`: the lane's element is a key of the segment that its row sees.
  __device__ __forceinline__ void hide(const TileCursor& tile) {
    seen_ = 0;
    if constexpr (key::mask) {
      if (tile.partial) ask_mask(tile);
    }
    if (!key::mask || !tile.partial) {
#pragma unroll
      for (int bit = 0; bit < kBoxes * kBlocks * 4; ++bit) {
        seen_ |= static_cast<SeenBits>(key_of(tile, bit) < tile.end) << bit;
      }
    }
#pragma unroll
    for (int bit = 0; bit < kBoxes * kBlocks * 4; ++bit) {
      float& score = scores_[bit / (4 * kBlocks)][bit / 4 % kBlocks][bit % 4];
      if ((seen_ >> bit & 1) == 0) score = negative_infinity();
    }
  }

  // Weights of hidden keys are 0, but 0 · NaN is NaN: values behind the segment's end become zeros, and so do infinite
  // values and NaN of partial tiles after they were added to the rows that see them. The product then gives a row the
  // same bits whatever its hidden values are.
  __device__ __forceinline__ void repair_values(char* values, const TileCursor& tile) {
    bool has_nonfinite = false;
    for (int i = lane_; i < kTileKeys * ValueBox::kRowUnits; i += shape::kWarpSize) {
      uint4& unit = value_unit(values, i);
      if (tile.begin + i / ValueBox::kRowUnits >= tile.end) {
        unit = {0, 0, 0, 0};
      } else if (key::mask && tile.partial) {
        const uint4 v = unit;
        has_nonfinite |= (nonfinite_bits(v.x) | nonfinite_bits(v.y) | nonfinite_bits(v.z) | nonfinite_bits(v.w)) != 0;
      }
    }
    if constexpr (key::mask) {
      if (__any_sync(kAllLanes, has_nonfinite)) {
        add_nonfinite_values(values, tile);
        __syncwarp();
        zero_nonfinite_values(values);
      }
    }
    if constexpr (kCopyBoxes) ptx::fence_proxy_async();  // before the copy engine refills the stage
    __syncwarp();
  }

  static __device__ __forceinline__ uint4& value_unit(char* values, int i) {
    const int row = i / ValueBox::kRowUnits;
    const int offset =
        row / shape::kBoxKeys * ValueBox::kBytes + ValueBox::offset(row % shape::kBoxKeys, i % ValueBox::kRowUnits);
    return *reinterpret_cast<uint4*>(values + offset);
  }

  __device__ __forceinline__ void add_nonfinite_values(const char* values, const TileCursor& tile) {
#pragma unroll 1
    for (int k = 0; k < kTileKeys && tile.begin + k < tile.end; ++k) {
      // Who holds the scores of key k and of this lane's rows, and from which bit on.
      const int box = k / shape::kBoxKeys;
      const int key_of_box = k % shape::kBoxKeys;
      const SeenBits seen =
          __shfl_sync(kAllLanes, seen_, key_of_box % 8 * 4 + lane_ % 4) >> (box * kBlocks * 4 + key_of_box / 8 * 2);
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const shape::ValuePlace place = shape::value_place(kElementBytes, lane_, half);
          const int unit = ValueBox::offset(key_of_box, m * kElementBytes + place.unit);
          const CachedElement element(values + box * ValueBox::kBytes + unit, place.element);
          if (!element.is_nonfinite()) continue;
          const float value = element.to_f32();
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (seen >> (4 * n + e) & 1) out_[m][n][2 * half + e] += value;
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void zero_nonfinite_values(char* values) const {
    for (int i = lane_; i < kTileKeys * ValueBox::kRowUnits; i += shape::kWarpSize) {
      uint4& unit = value_unit(values, i);
      unit = {finite_part(unit.x), finite_part(unit.y), finite_part(unit.z), finite_part(unit.w)};
    }
  }

  const ForwardParams& params_;
  const FewRowsItem& item_;
  const ItemRows rows_;
  const int lane_;
  QueryRows query_;
  unsigned key_lane_offset_;
  unsigned value_lane_offset_;
  float slope_[kBlocks][2];  // in log2 units
  float scores_[kBoxes][kBlocks][4];
  SeenBits seen_ = 0;
  float max_[kBlocks][2];
  float sum_[kBlocks][2];   // of this lane's keys
  float unit_[kBlocks][2];  // of outputs, where tokens have scales: a power of two
  float out_[kValueSteps][kBlocks][4];
};

// `again`: it is one already. Barriers are made anew for every item, so that each begins with phase 0.
__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals, bool again) {
  if (again) ptx::mbarrier_invalidate(barrier);
  ptx::mbarrier_init(barrier, arrivals);
}

// A warp's two rings of stages and their barriers.
class WarpRings {
 public:
  __device__ __forceinline__ WarpRings(char* smem, int warp)
      : pointer_(smem + warp * kLayout.warp_bytes),
        address_(ptx::shared_address(pointer_)),
        scales_(smem + kLayout.scales + warp * key::num_stages * 2 * kScaleBytes),
        barriers_(ptx::shared_address(smem) + kLayout.barriers + warp * key::num_stages * shape::kBarrierBytes) {}

  __device__ __forceinline__ unsigned keys(int stage) const { return address_ + stage * kStageBytes; }
  __device__ __forceinline__ unsigned values(int stage) const { return keys(stage) + kKeyStageBytes; }
  __device__ __forceinline__ char* values_pointer(int stage) const {
    return pointer_ + stage * kStageBytes + kKeyStageBytes;
  }
  // Of tokens.
  __device__ __forceinline__ const float* key_scales(int stage) const {
    return reinterpret_cast<const float*>(scales_ + stage * 2 * kScaleBytes);
  }
  __device__ __forceinline__ const float* value_scales(int stage) const { return key_scales(stage) + kTileKeys; }
  __device__ __forceinline__ unsigned keys_full(int stage) const { return barriers_ + stage * shape::kBarrierBytes; }
  __device__ __forceinline__ unsigned values_full(int stage) const {
    return keys_full(stage) + key::num_warps * key::num_stages * shape::kBarrierBytes;
  }

  __device__ __forceinline__ void init_barriers(bool again) const {
    constexpr int kArrivals = key::token_scales ? 1 + shape::kWarpSize : 1;  // the copy engine's, the lanes'
#pragma unroll
    for (int stage = 0; stage < key::num_stages; ++stage) {
      init_barrier(keys_full(stage), kArrivals, again);
      init_barrier(values_full(stage), kArrivals, again);
    }
  }

  __device__ __forceinline__ void refill_keys(TileLoader& loader, int stage) const {
    loader.copy_keys(keys(stage), ptx::shared_address(key_scales(stage)), keys_full(stage));
  }
  __device__ __forceinline__ void refill_values(TileLoader& loader, int stage) const {
    loader.copy_values(values(stage), ptx::shared_address(value_scales(stage)), values_full(stage));
  }

 private:
  char* pointer_;
  unsigned address_;
  char* scales_;
  unsigned barriers_;
};

// The oldest of the copies under way. Gathers count in groups, one for keys and one for values of each tile.
__device__ __forceinline__ void wait_for_copy(unsigned barrier, unsigned parity) {
  if constexpr (kCopyBoxes) {
    ptx::mbarrier_wait(barrier, parity);
  } else {
    ptx::cp_async_wait<2 * key::num_stages - 1>();
    __syncwarp();
  }
}

__device__ __forceinline__ void end_copy() {
  if constexpr (!kCopyBoxes) ptx::cp_async_commit();
}

// Fills the rings.
__device__ __forceinline__ void start_copies(TileLoader& loader, const WarpRings& rings) {
#pragma unroll
  for (int stage = 0; stage < key::num_stages; ++stage) {
    if (!loader.tile.is_over()) {
      rings.refill_keys(loader, stage);
      end_copy();
      rings.refill_values(loader, stage);
      end_copy();
      loader.advance();
    } else {
      end_copy();
      end_copy();
    }
  }
}

// Rows of several requests fill the registers: their item is read where it is needed. By all threads.
__device__ __forceinline__ FewRowsItem& item_in_smem(char* smem) {
  return *reinterpret_cast<FewRowsItem*>(smem + kLayout.item);
}

__device__ __forceinline__ void copy_item_to_smem(const FewRowsItem& item, char* smem) {
  static_assert(sizeof(FewRowsItem) == shape::kItemBytes);
  constexpr int kUnits = shape::kItemBytes / 16;
  if (threadIdx.x < kUnits) {
    reinterpret_cast<uint4*>(&item_in_smem(smem))[threadIdx.x] = reinterpret_cast<const uint4*>(&item)[threadIdx.x];
  }
  __syncthreads();
}

// A launch of this kernel may run beside the one in front of it (a batch's many-rows launch, or other tiles). It ends
// after it, so that what follows in the stream need not know.
__device__ __forceinline__ void end_after_earlier_launch() {
  if (blockIdx.x == gridDim.x - 1) ptx::wait_for_earlier_launches();
}

// All tiles of the warp's lanes, each lane to its state.
__device__ __forceinline__ void run_lanes(WarpRows& rows, const FewRowsParams& params, const FewRowsItem& item,
                                          TileLoader& loader, const WarpRings& rings, char* smem, int warp) {
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int key_lane = warp; key_lane < kNumLanes; key_lane += key::num_warps) {
    rows.reset();
    for (TileCursor tile = tiles_of(params, item, key_lane); !tile.is_over(); tile.advance()) {
      wait_for_copy(rings.keys_full(stage), parity);
      rows.multiply_keys(rings.keys(stage), rings.key_scales(stage), tile);
      __syncwarp();
      const bool refill = !loader.tile.is_over();
      if (refill) rings.refill_keys(loader, stage);
      end_copy();
      if constexpr (!key::token_scales) rows.update_softmax(nullptr);
      wait_for_copy(rings.values_full(stage), parity);
      if constexpr (key::token_scales) rows.update_softmax(rings.value_scales(stage));
      rows.multiply_values(rings.values(stage), rings.values_pointer(stage), tile);
      __syncwarp();
      if (refill) {
        rings.refill_values(loader, stage);
        loader.advance();
      }
      end_copy();
      if (++stage == key::num_stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    rows.store_state(lane_state(smem, key_lane));
    __syncwarp();
  }
}

}  // namespace qkv::cuda::few_rows

extern "C" __global__ void __launch_bounds__(qkv::cuda::few_rows::kThreads, qkv::cuda::key::min_ctas)
    forward_sm90_few_rows(const __grid_constant__ qkv::cuda::FewRowsParams params,
                          const __grid_constant__ qkv::cuda::ptx::TensorMap key_map,
                          const __grid_constant__ qkv::cuda::ptx::TensorMap value_map,
                          const qkv::cuda::SharedToken* shared_tokens) {
  using namespace qkv::cuda;
  using namespace qkv::cuda::few_rows;
  extern __shared__ __align__(1024) char smem[];
  ptx::launch_dependents();
  if (kCopyBoxes && threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&key_map);
    ptx::prefetch_tensor_map(&value_map);
  }
  int index = blockIdx.x;
  bool again = false;
#pragma unroll 1
  while (true) {
    // The item and its first page numbers are on their way while the barriers are made. Where it isn't certain that
    // there is an item, the list still is as long as the grid.
    FewRowsItem in_registers;
    const FewRowsItem& item = kSharedRows ? item_in_smem(smem) : in_registers;
    if constexpr (kSharedRows) {
      copy_item_to_smem(params.items[index], smem);
    } else {
      in_registers = params.items[index];
    }
    if (key::takes_turns && !again) {
      const int num_items = *params.num_items;
      if (index >= num_items) break;  // a cluster's CTAs all take as many turns
      if (threadIdx.x == 0) turn_of(smem) = {index, num_items};
    }
    const int warp = __shfl_sync(kAllLanes, threadIdx.x / shape::kWarpSize, 0);  // the compiler knows it as uniform
    const int lane = threadIdx.x % shape::kWarpSize;
    TileLoader loader(params, key_map, value_map, item, warp, lane);
    const WarpRings rings(smem, warp);
    if (lane == 0) {
      rings.init_barriers(again);
      if (key::cluster_size > 1 && warp == 0) init_barrier(ptx::shared_address(smem) + kReceivedBarrier, 1, again);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    if constexpr (key::cluster_size > 1) {
      if (again) {
        ptx::cluster_arrive();
      } else {
        ptx::cluster_arrive_relaxed();
      }
    }
    if (item.kv_head >= 0) {
      start_copies(loader, rings);
      const SharedToken* tokens = kSharedRows ? shared_tokens + item.query_token : nullptr;
      WarpRows rows(params, item, tokens, smem, lane);
      rows.load_query();
      // Read at the start, so that the end need not wait for it.
      float value_scale = 1.0F;
      if constexpr (kIs8Bit && !key::token_scales) value_scale = uniform_scale(params.forward.value_scale, item);
      if constexpr (kQueryInSmem) {
        rows.copy_query_to_smem(smem);
        __syncthreads();
      }
      // The others' barriers are initialised, and they have read what they received for their last item.
      if constexpr (key::cluster_size > 1) ptx::cluster_wait();
      run_lanes(rows, params, item, loader, rings, smem, warp);
      __syncthreads();
      ItemEnd(params, item, tokens, smem, value_scale).run();
    } else if constexpr (key::cluster_size > 1) {
      ptx::cluster_wait();
    }
    if constexpr (!key::takes_turns) break;
    ptx::fence_proxy_async();  // the copy engine refills what held states
    __syncthreads();
    const CtaTurn turn = turn_of(smem);
    index = turn.index + static_cast<int>(gridDim.x);
    if (index >= turn.num_items) break;
    again = true;
    __syncthreads();  // all have read it
    if (threadIdx.x == 0) turn_of(smem).index = index;
  }
  end_after_earlier_launch();
}
