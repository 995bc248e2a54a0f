// Attention of few query rows (decode: up to 32 packed rows of one KV head) on Hopper, bound by the memory that K and V
// come from. A CTA takes one item after another. The item's tiles of 16 or 32 keys are dealt out to 8 or 4 lanes; a
// warp owns a lane (or two, one after another) and a piece of shared memory, so that no warp waits for another until
// the item ends. Products have keys (then dimensions of V) as the matrix unit's 16 rows and query rows as its 8
// columns: rows are padded to 8, not to 64. docs/forward_sm90_few_rows.md says why.
//
// Asks of the prologue, besides the common constants: tile_q (4, 8, 16 or 32 rows), tile_kv (keys of a warp's tile),
// num_warps (divides num_lanes), num_stages (of each ring), min_ctas (of an SM), cluster_size (1: splits join by
// tickets only, or 8), takes_turns (0: the grid has a CTA an item, and each ends with it), request_tile_q (tile_q;
// less: an item holds rows of several requests, each with the arithmetic of such a tile alone). head_dim and
// head_dim_v: multiples of 16 up to 256. Segments begin at multiples of tile_kv. Grid: a CTA an item, or fewer that
// take turns, in clusters of cluster_size. Dynamic shared memory: index::few_rows::smem_layout(...).total_bytes. Bits
// of a row: see the shape header; warps, stages, CTAs of an SM and clusters don't enter them.
#pragma once

#include "few_rows_loads.cuh"
#include "few_rows_merge.cuh"
#include "few_rows_params.hpp"
#include "few_rows_tile.cuh"
#include "mask_tile.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"
#include "softmax.cuh"

namespace qkv::cuda::few_rows {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kBlocks = shape::num_row_blocks(key::tile_q);  // n8 tiles of rows
constexpr int kRequestBlocks = shape::num_row_blocks(key::request_tile_q);
constexpr int kKeySteps = key::head_dim / 16;
constexpr int kValueSteps = key::head_dim_v / 16;
constexpr bool kQueryInSmem = shape::query_in_smem(key::tile_q, key::head_dim);
constexpr int kKeyStageBytes = shape::key_stage_bytes(key::head_dim, kTileKeys);
constexpr int kStageBytes = kKeyStageBytes + shape::key_stage_bytes(key::head_dim_v, kTileKeys);

using KeyBox = SwizzledTile<key::head_dim, shape::kBoxKeys>;
using ValueBox = SwizzledTile<key::head_dim_v, shape::kBoxKeys>;
using QueryTile = SwizzledTile<key::head_dim, key::tile_q>;

static_assert(shape::supports(key::head_dim, key::head_dim_v) && key::tile_q * key::head_dim_v <= 4096);
static_assert(kBoxes == 1 || kBoxes == 2);
static_assert(kBoxes * kBlocks * 4 <= 32, "a lane's elements are the bits of a word");
static_assert(KeyBox::kBytes % (8 * KeyBox::kChunk) == 0 && ValueBox::kBytes % (8 * ValueBox::kChunk) == 0,
              "a box begins where the swizzle's pattern does");

// Two 16-bit elements at once; sets the high bit of each that is NaN or infinite.
__device__ __forceinline__ unsigned nonfinite_bits(unsigned pair) {
  constexpr unsigned kExponent = key::is_bf16 ? 0x7f80 : 0x7c00;
  constexpr unsigned kLowest = key::is_bf16 ? 0x0080 : 0x0400;
  return ((pair & (kExponent | kExponent << 16)) + (kLowest | kLowest << 16)) & 0x80008000;
}

// The rows of an item over the tiles of one warp. Of each 16 x 8 product a lane holds elements i = 0 … 3: key (or
// dimension) lane/4 + 8·(i/2), row 2·(lane%4) + i%2.
class WarpRows {
 public:
  __device__ __forceinline__ WarpRows(const FewRowsParams& params, const FewRowsItem& item, const SharedToken* tokens,
                                      unsigned query_smem, int lane)
      : params_(params.forward), item_(item), tokens_(tokens), lane_(lane), query_smem_(query_smem) {
    const int pair_row = lane_ % 8 + lane_ / 16 * 8;
    const int pair_odd = lane_ / 8 % 2;
    key_lane_offset_ = KeyBox::lane_offset(lane_ % 16, lane_ / 16);
    value_lane_offset_ = ValueBox::lane_offset(pair_row, pair_odd);
    query_smem_ += QueryTile::lane_offset(pair_row, pair_odd);
  }

  // Nothing seen yet.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        max_[n][e] = negative_infinity();
        sum_[n][e] = 0.0F;
      }
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.0F;
      }
    }
  }

  // Fragments of the query rows; rows behind the item's are zeros.
  __device__ __forceinline__ void load_query() {
    if constexpr (key::alibi && !kSharedRows) load_slopes();
    if constexpr (!kQueryInSmem) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int row = 8 * n + lane_ / 4;
        const unsigned* query = query_row(row) + lane_ % 4;
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          query_[step][n][0] = row < num_rows() ? query[8 * step] : 0;
          query_[step][n][1] = row < num_rows() ? query[8 * step + 4] : 0;
        }
      }
    }
  }

  // All threads of the CTA; a barrier must follow.
  __device__ __forceinline__ void copy_query_to_smem(char* smem) const {
    for (int i = threadIdx.x; i < key::tile_q * QueryTile::kRowUnits; i += kThreads) {
      const int row = i / QueryTile::kRowUnits;
      const int unit = i % QueryTile::kRowUnits;
      const uint4 zeros = {0, 0, 0, 0};
      *reinterpret_cast<uint4*>(smem + QueryTile::offset(row, unit)) =
          row < num_rows() ? reinterpret_cast<const uint4*>(query_row(row))[unit] : zeros;
    }
  }

  // scores = query · key of the tile in log2 units, hidden ones -infinity. seen_ has a bit for each that is visible.
  __device__ __forceinline__ void multiply_keys(unsigned keys, const TileCursor& tile) {
    if constexpr (kSharedRows && kBoxes == 2) {
      // Box after box: the sums of both would fill the registers. Unrolled, they would be interleaved.
#pragma unroll 1
      for (int box = 0; box < 2; ++box) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores_[0][n][i] = scores_[1][n][i];
        }
        multiply_boxes<1>(keys + box * KeyBox::kBytes, 1);
      }
    } else {
      multiply_boxes<kBoxes>(keys, 0);
    }
    apply_terms(tile);
    if (is_edge(tile)) [[unlikely]]
      hide(tile);
  }

  // Scores become weights 2^(score - max); earlier sums and outputs are rescaled to the new maximum.
  __device__ __forceinline__ void update_softmax() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float tile_max = fmaxf(scores_[0][n][e], scores_[0][n][e + 2]);
        if constexpr (kBoxes == 2) {
          tile_max = fmaxf(tile_max, fmaxf(scores_[kBoxes - 1][n][e], scores_[kBoxes - 1][n][e + 2]));
        }
#pragma unroll
        for (int distance = 4; distance < shape::kWarpSize; distance *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(kAllLanes, tile_max, distance));
        }
        const float max = fmaxf(max_[n][e], tile_max);
        // A row that has seen nothing yet has no finite maximum to subtract.
        const float base = max == negative_infinity() ? 0.0F : max;
        const float decay = exp2_approx(max_[n][e] - base);
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
          weights[box][n][half] = ptx::movmatrix_trans(
              ptx::pack_16<key::is_bf16>(scores_[box][n][2 * half], scores_[box][n][2 * half + 1]));
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        unsigned value[4];
        ptx::ldmatrix_x4_trans(value, ValueBox::address(values + value_lane_offset_ + box * ValueBox::kBytes, m));
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          ptx::mma_m16n8k16<key::is_bf16>(out_[m][n], value, weights[box][n][0], weights[box][n][1]);
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
        for (int i = 0; i < 4; ++i) {
          state[(row + i % 2) * kStatePitch + 16 * m + lane_ / 4 + i / 2 * 8] = out_[m][n][i];
        }
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
    for (int step = 0; step < kKeySteps; ++step) {
      unsigned query[kBlocks][2];
      take_query(step, query);
#pragma unroll
      for (int box = 0; box < kCount; ++box) {
        unsigned key_fragment[4];
        ptx::ldmatrix_x4(key_fragment, KeyBox::address(keys + key_lane_offset_ + box * KeyBox::kBytes, step));
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          ptx::mma_m16n8k16<key::is_bf16>(sums[step % kChains][box][n], key_fragment, query[n][0], query[n][1]);
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

  __device__ __forceinline__ int num_rows() const { return (item_.query_end - item_.query_begin) * key::group_size; }
  __device__ __forceinline__ int query_of(int row) const { return item_.query_begin + row / key::group_size; }
  __device__ __forceinline__ int head_of(int row) const {
    return item_.kv_head * key::group_size + row % key::group_size;
  }

  // Where rows are shared; of a row that exists.
  __device__ __forceinline__ const SharedToken& token_of(int row) const { return tokens_[row / key::group_size]; }

  __device__ __forceinline__ const unsigned* query_row(int row) const {
    long long token = item_.query_token + row / key::group_size;
    if constexpr (kSharedRows) token = token_of(min(row, num_rows() - 1)).token;
    const long long element = token * params_.query_token_stride + head_of(row) * params_.query_head_stride;
    return reinterpret_cast<const unsigned*>(static_cast<const unsigned short*>(params_.query) + element);
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
        slope_[n][e] = row < num_rows() ? find_slope(item_.request, head_of(row)) : 0.0F;
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
      const int existing = min(row, num_rows() - 1);
      const SharedToken& token = token_of(existing);
      return {token.position, find_slope(token.request, head_of(existing))};
    }
    return {query_of(row) + item_.cached_keys, slope_[n][e]};
  }

  __device__ __forceinline__ void take_query(int step, unsigned (&query)[kBlocks][2]) const {
    if constexpr (kQueryInSmem) {
#pragma unroll
      for (int n = 0; n + 1 < kBlocks; n += 2) {
        unsigned fragments[4];
        ptx::ldmatrix_x4(fragments, QueryTile::address(query_smem_ + 8 * n * QueryTile::kChunk, step));
        query[n][0] = fragments[0];
        query[n][1] = fragments[1];
        query[n + 1][0] = fragments[2];
        query[n + 1][1] = fragments[3];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        query[n][0] = query_[step][n][0];
        query[n][1] = query_[step][n][1];
      }
    }
  }

  __device__ __forceinline__ void apply_terms(const TileCursor& tile) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float score = scores_[box][n][i] * params_.query_factor;
          if constexpr (key::softcap) score = tanh_by_exp2(score) * params_.softcap_log2;
          if constexpr (key::alibi) {
            const Alibi row = alibi_of(n, i % 2);
            const int kv_pos = tile.begin + box * shape::kBoxKeys + lane_ / 4 + i / 2 * 8;
            score = __fmaf_rn(-row.slope, static_cast<float>(abs(row.q_pos - kv_pos)), score);
          }
          scores_[box][n][i] = score;
        }
      }
    }
  }

  // Asks the mask for each of the lane's elements. is_seen(row, kv_pos).
  template <typename IsSeen>
  __device__ __forceinline__ void ask(const TileCursor& tile, IsSeen is_seen) {
#pragma unroll 1
    for (int bit = 0; bit < kBoxes * kBlocks * 4; ++bit) {
      const int row = row_of(bit);
      if (row >= num_rows() || kv_pos_of(tile, bit) >= tile.end) continue;
      seen_ |= static_cast<unsigned>(is_seen(row, kv_pos_of(tile, bit))) << bit;
    }
  }

  __device__ __forceinline__ void ask_mask(const TileCursor& tile) {
    if constexpr (kSharedRows) {
      ask(tile, [&](int row, int kv_pos) {
        const SharedToken& token = token_of(row);
        const MaskContext context(params_, SeqInfo(params_, token.request), token.request);
        return is_visible(context, token.position, kv_pos, RowInfo{token.query, head_of(row)});
      });
    } else {
      const MaskContext context(params_, SeqInfo(params_, item_.request), item_.request);
      ask(tile, [&](int row, int kv_pos) {
        return is_visible(context, query_of(row) + item_.cached_keys, kv_pos, RowInfo{query_of(row), head_of(row)});
      });
    }
  }

  // Of the lane's element (box·kBlocks + n)·4 + i.
  __device__ __forceinline__ int kv_pos_of(const TileCursor& tile, int bit) const {
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
        seen_ |= static_cast<unsigned>(kv_pos_of(tile, bit) < tile.end) << bit;
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
      const unsigned seen =
          __shfl_sync(kAllLanes, seen_, key_of_box % 8 * 4 + lane_ % 4) >> (box * kBlocks * 4 + key_of_box / 8 * 2);
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim_of_unit = lane_ / 4;
          const char* unit = values + box * ValueBox::kBytes + ValueBox::offset(key_of_box, 2 * m + half);
          const unsigned short bits = reinterpret_cast<const unsigned short*>(unit)[dim_of_unit];
          if (!ptx::is_nonfinite_16<key::is_bf16>(bits)) continue;
          const float value = ptx::f32_from_16<key::is_bf16>(bits);
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
    const auto finite_part = [](unsigned pair) {
      const unsigned bits = nonfinite_bits(pair) >> 15;  // 1 in each half that goes
      return pair & ~(bits * 0xffff);
    };
    for (int i = lane_; i < kTileKeys * ValueBox::kRowUnits; i += shape::kWarpSize) {
      uint4& unit = value_unit(values, i);
      unit = {finite_part(unit.x), finite_part(unit.y), finite_part(unit.z), finite_part(unit.w)};
    }
  }

  const ForwardParams& params_;
  const FewRowsItem& item_;
  const SharedToken* tokens_;  // of the item, where its rows are shared
  const int lane_;
  unsigned query_smem_;
  unsigned key_lane_offset_;
  unsigned value_lane_offset_;
  unsigned query_[kQueryInSmem ? 1 : kKeySteps][kBlocks][2];
  float slope_[kBlocks][2];  // in log2 units
  float scores_[kBoxes][kBlocks][4];
  unsigned seen_ = 0;
  float max_[kBlocks][2];
  float sum_[kBlocks][2];  // of this lane's keys
  float out_[kValueSteps][kBlocks][4];
};

// `again`: it is one already. Barriers are made anew for every item, so that each begins with phase 0.
__device__ __forceinline__ void init_barrier(unsigned barrier, bool again) {
  if (again) ptx::mbarrier_invalidate(barrier);
  ptx::mbarrier_init(barrier, 1);
}

// A warp's two rings of stages and their barriers.
class WarpRings {
 public:
  __device__ __forceinline__ WarpRings(char* smem, int warp)
      : pointer_(smem + warp * kLayout.warp_bytes),
        address_(ptx::shared_address(pointer_)),
        barriers_(ptx::shared_address(smem) + kLayout.barriers + warp * key::num_stages * shape::kBarrierBytes) {}

  __device__ __forceinline__ unsigned keys(int stage) const { return address_ + stage * kStageBytes; }
  __device__ __forceinline__ unsigned values(int stage) const { return keys(stage) + kKeyStageBytes; }
  __device__ __forceinline__ char* values_pointer(int stage) const {
    return pointer_ + stage * kStageBytes + kKeyStageBytes;
  }
  __device__ __forceinline__ unsigned keys_full(int stage) const { return barriers_ + stage * shape::kBarrierBytes; }
  __device__ __forceinline__ unsigned values_full(int stage) const {
    return keys_full(stage) + key::num_warps * key::num_stages * shape::kBarrierBytes;
  }

  __device__ __forceinline__ void init_barriers(bool again) const {
#pragma unroll
    for (int stage = 0; stage < key::num_stages; ++stage) {
      init_barrier(keys_full(stage), again);
      init_barrier(values_full(stage), again);
    }
  }

 private:
  char* pointer_;
  unsigned address_;
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
      loader.copy_keys(rings.keys(stage), rings.keys_full(stage));
      end_copy();
      loader.copy_values(rings.values(stage), rings.values_full(stage));
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
    for (TileCursor tile(params, item, key_lane); !tile.is_over(); tile.advance()) {
      wait_for_copy(rings.keys_full(stage), parity);
      rows.multiply_keys(rings.keys(stage), tile);
      __syncwarp();
      const bool refill = !loader.tile.is_over();
      if (refill) loader.copy_keys(rings.keys(stage), rings.keys_full(stage));
      end_copy();
      rows.update_softmax();
      wait_for_copy(rings.values_full(stage), parity);
      rows.multiply_values(rings.values(stage), rings.values_pointer(stage), tile);
      __syncwarp();
      if (refill) {
        loader.copy_values(rings.values(stage), rings.values_full(stage));
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
    const int warp = threadIdx.x / shape::kWarpSize;
    const int lane = threadIdx.x % shape::kWarpSize;
    TileLoader loader(params, key_map, value_map, item, warp, lane);
    const WarpRings rings(smem, warp);
    if (lane == 0) {
      rings.init_barriers(again);
      if (key::cluster_size > 1 && warp == 0) init_barrier(ptx::shared_address(smem) + kReceivedBarrier, again);
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
      WarpRows rows(params, item, tokens, ptx::shared_address(smem) + kLayout.query, lane);
      rows.load_query();
      if constexpr (kQueryInSmem) {
        rows.copy_query_to_smem(smem + kLayout.query);
        __syncthreads();
      }
      // The others' barriers are initialised, and they have read what they received for their last item.
      if constexpr (key::cluster_size > 1) ptx::cluster_wait();
      run_lanes(rows, params, item, loader, rings, smem, warp);
      __syncthreads();
      ItemEnd(params, item, tokens, smem).run();
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
