// Decode: a few query rows against a long run of keys, bound by the memory that K and V come from. Keys and values are
// read in place, once, and prefetched some pages ahead; the rows' arithmetic hides behind the loads.
// docs/forward_cpu.md says why. A token's heads form blocks; a block's operations don't depend on the other blocks.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward_few_rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// The order matters: the files below are compiled once a target.
#include "cpu/rows-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

// Tokens between a load and its prefetch: one to two pages of 16. To L2, since rows whose stride is a power of two (all
// heads of a token side by side) fall into few L1 sets and would push each other out.
inline constexpr int32_t kAheadTokens = 24;
// Blocks from which on an item's tiles of 16-bit keys and values are widened to f32 once for all of them, instead of by
// each as it reads them. Bits are the same.
inline constexpr int32_t kWideningBlocks = 8;
inline constexpr int32_t kAccumulators = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 ? 8 : 16;

struct FewRowsScratch {
  Scratch<float> query, output, row, max, sum, decay, weights, wide_keys, wide_values, key_scales, value_scales;
  Scratch<int32_t> visible;
  Scratch<const std::byte*> keys, values;
  mask::RowScratch mask;
};

// Sums of kLanes accumulators, one a lane, all by the same tree: sums[i] ends in lane i.
HWY_INLINE V reduce_four(V a, V b, V c, V d) {  // each 128-bit block: a, b, c, d
  const hn::RepartitionToWide<F32> pairs;
  const V ab = hn::Add(hn::InterleaveLower(F32(), a, b), hn::InterleaveUpper(F32(), a, b));
  const V cd = hn::Add(hn::InterleaveLower(F32(), c, d), hn::InterleaveUpper(F32(), c, d));
  const auto ab2 = hn::BitCast(pairs, ab);
  const auto cd2 = hn::BitCast(pairs, cd);
  return hn::Add(hn::BitCast(F32(), hn::InterleaveLower(pairs, ab2, cd2)),
                 hn::BitCast(F32(), hn::InterleaveUpper(pairs, ab2, cd2)));
}

template <int kSums>
HWY_INLINE V reduce(const V (&sums)[kSums]) {
  static_assert(kSums == kLanes);
  V fours[kSums / 4];
  HWY_UNROLL(4)
  for (int i = 0; i < kSums / 4; ++i) {
    fours[i] = reduce_four(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
  if constexpr (kSums == 4) {
    return fours[0];
  } else {
    const auto halves = [](V low, V high) HWY_ATTR {
      return hn::Add(hn::ConcatLowerLower(F32(), high, low), hn::ConcatUpperUpper(F32(), high, low));
    };
    if constexpr (kSums == 8) {
      return halves(fours[0], fours[1]);
    } else {
      static_assert(kSums == 16);
      const V even = halves(fours[0], fours[2]);  // blocks: 0, 0', 2, 2'
      const V odd = halves(fours[1], fours[3]);
      return hn::Add(hn::OddEvenBlocks(odd, even), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(even, odd)));
    }
  }
}

// T: element of the cache. kHeads: rows of a block (1, 2 or 4), so that kLanes / kHeads keys fill a vector of scores.
template <class T, int kHeads>
class FewRows {
 public:
  FewRows(const ForwardTask& task, FewRowsScratch& scratch)
      : task_(task),
        terms_(task),
        blocks_per_token_((task.group_size + kHeads - 1) / kHeads),
        blocks_(blocks_per_token_ * task.num_tokens()),
        query_stride_(round_up(task.head_dim, kLanes)),
        out_stride_(round_up(task.head_dim_v, kLanes)),
        widens_(sizeof(T) < sizeof(float) && blocks_ >= kWideningBlocks),
        mask_scratch_(scratch.mask),
        query_(scratch.query.reserve(int64_t{blocks_} * kHeads * query_stride_)),
        output_(scratch.output.reserve(int64_t{blocks_} * kHeads * out_stride_)),
        row_(scratch.row.reserve(HWY_MAX(query_stride_, out_stride_))),
        max_(scratch.max.reserve(int64_t{blocks_} * kLanes)),
        sum_(scratch.sum.reserve(int64_t{blocks_} * kLanes)),
        decay_(scratch.decay.reserve(int64_t{blocks_} * kLanes)),
        weights_(scratch.weights.reserve(int64_t{blocks_} * kBlockWeights)),
        key_scales_(scratch.key_scales.reserve(kBlockWeights)),
        value_scales_(scratch.value_scales.reserve(kBlockWeights)),
        visible_(scratch.visible.reserve(kTileKv)),
        keys_(scratch.keys.reserve(2 * kTileKv)),
        values_(scratch.values.reserve(2 * kTileKv)) {
    if (!widens_) return;
    wide_keys_ = scratch.wide_keys.reserve(int64_t{kTileKv} * query_stride_);
    wide_values_ = scratch.wide_values.reserve(int64_t{kTileKv} * out_stride_);
  }

  void run() {
    for (int32_t block = 0; block < blocks_; ++block) start_block(block);
    for (const mask::KeySegment& segment : task_.segments) {
      for (int32_t begin = segment.begin; begin < segment.end; begin += kTileKv) {
        run_key_tile(begin, HWY_MIN(kTileKv, segment.end - begin), segment.end - begin,
                     segment.tile_class != TileClass::full);
      }
    }
    for (int32_t block = 0; block < blocks_; ++block) finish_block(block);
  }

 private:
  static constexpr int32_t kKeys = kLanes / kHeads;    // keys a vector of scores
  static constexpr int32_t kBlocksInL1 = 16 / kHeads;  // 8 KB of queries where head_dim is 128
  // Weights of a block's tile [kTileKv][kHeads], then the compacted ones of a partial tile.
  static constexpr int32_t kBlockWeights = kTileKv * kHeads;
  static constexpr int32_t kPair = 2 * kLanes;

  // load_pair takes bf16 apart into even and odd dimensions, so queries and outputs are kept that way.
  static constexpr bool kEvenOdd = std::is_same_v<T, hwy::bfloat16_t>;

  static void copy_query(const float* row, int32_t count, float* query) {
    int32_t d = 0;
    for (; kEvenOdd && d + kPair <= count; d += kPair) {
      V even, odd;
      hn::LoadInterleaved2(F32(), row + d, even, odd);
      hn::Store(even, F32(), query + d);
      hn::Store(odd, F32(), query + d + kLanes);
    }
    std::memcpy(query + d, row + d, (count - d) * sizeof(float));
  }

  static void copy_output(const float* output, int32_t count, float* row) {
    int32_t d = 0;
    for (; kEvenOdd && d + kPair <= count; d += kPair) {
      hn::StoreInterleaved2(hn::Load(F32(), output + d), hn::Load(F32(), output + d + kLanes), F32(), row + d);
    }
    std::memcpy(row + d, output + d, (count - d) * sizeof(float));
  }

  int32_t token_of(int32_t block) const { return block / blocks_per_token_; }
  const TaskToken& token_at(int32_t block) const { return task_.tokens[token_of(block)]; }
  int32_t first_head_of(int32_t block) const { return block % blocks_per_token_ * kHeads; }
  // Rows of the group; the last block may be filled up with rows of zeros.
  int32_t heads_of(int32_t block) const { return HWY_MIN(kHeads, task_.group_size - first_head_of(block)); }
  float* query_of(int32_t block) const { return query_ + int64_t{block} * kHeads * query_stride_; }
  float* output_of(int32_t block) const { return output_ + int64_t{block} * kHeads * out_stride_; }
  float* weights_of(int32_t block) const { return weights_ + int64_t{block} * kBlockWeights; }

  void start_block(int32_t block) {
    float* query = query_of(block);
    std::memset(query, 0, sizeof(float) * kHeads * query_stride_);
    std::memset(output_of(block), 0, sizeof(float) * kHeads * out_stride_);
    for (int32_t h = 0; h < heads_of(block); ++h, query += query_stride_) {
      load_query_row(task_, token_of(block) * task_.group_size + first_head_of(block) + h, row_);
      copy_query(row_, task_.head_dim, query);
    }
    hn::Store(negative_infinity(), F32(), max_ + int64_t{block} * kLanes);
    hn::Store(hn::Zero(F32()), F32(), sum_ + int64_t{block} * kLanes);
  }

  void finish_block(int32_t block) {
    const float* max = max_ + int64_t{block} * kLanes;
    const float* sum = sum_ + int64_t{block} * kLanes;
    for (int32_t h = 0; h < heads_of(block); ++h) {
      float total = 0;
      for (int32_t lane = h; lane < kLanes; lane += kHeads) total += sum[lane];
      copy_output(output_of(block) + h * out_stride_, task_.head_dim_v, row_);
      finish_row(task_, token_of(block) * task_.group_size + first_head_of(block) + h, max[h], total, row_);
    }
  }

  // `remaining`: keys up to the end of the segment; only those are prefetched.
  void run_key_tile(int32_t kv_begin, int32_t count, int32_t remaining, bool hides_some) {
    kv_begin_ = kv_begin;
    count_ = count;
    const int32_t known = HWY_MIN(remaining, kTileKv + (widens_ ? kTileKv : kAheadTokens));
    find_rows(task_.kv, false, kv_begin, kv_begin + known, keys_);
    find_rows(task_.kv, true, kv_begin, kv_begin + known, values_);
    ahead_ = known - count;
    if (task_.has_alibi()) find_positions<kHeads>(task_, kv_begin, kv_begin + count, positions_);
    if constexpr (kIs8Bit<T>) {
      find_scales_of_heads(false, key_scales_);
      find_scales_of_heads(true, value_scales_);
    }
    if (!widens_) return run_blocks<T>(hides_some);
    widen_rows(keys_, task_.head_dim, wide_keys_, query_stride_);
    widen_rows(values_, task_.head_dim_v, wide_values_, out_stride_);
    run_blocks<float>(hides_some);
  }

  // The tile's rows as f32, each vector of them as load_pair and load give it; rows[i] is then where that is.
  void widen_rows(const std::byte** rows, int32_t dims, float* wide, int32_t stride) {
    for (int32_t key = 0; key < count_; ++key, wide += stride) {
      const T* row = reinterpret_cast<const T*>(rows[key]);
      rows[key] = reinterpret_cast<const std::byte*>(wide);
      int32_t d = 0;
      for (; d + kPair <= dims; d += kPair) {
        V first, second;
        load_pair(row + d, first, second);
        hn::Store(first, F32(), wide + d);
        hn::Store(second, F32(), wide + d + kLanes);
      }
      if (d + kLanes <= dims) {
        hn::Store(load(row + d), F32(), wide + d);
        d += kLanes;
      }
      if (d < dims) hn::Store(load_first(row + d, dims - d), F32(), wide + d);
    }
  }

  // U: element of the rows that keys_ and values_ point to.
  template <class U>
  void run_blocks(bool hides_some) {
    multiply_keys<U>();
    for (int32_t block = 0; block < blocks_; ++block) {
      const bool next_token = block % blocks_per_token_ == 0;
      if (widens_) prefetch_share(block);
      if (terms_.any) apply_terms(block);
      if (hides_some) hide(block, next_token);
      update_softmax(block);
      if constexpr (kIs8Bit<T>) multiply_in_place(weights_of(block), value_scales_);
      if (hides_some) multiply_visible_values<U>(block);
    }
    if (!hides_some) multiply_all_values<U>();
  }

  // Each block's share of the tile behind this one, where rows are widened before they are used.
  void prefetch_share(int32_t block) const {
    const int32_t end = count_ + ahead_ * (block + 1) / blocks_;
    for (int32_t key = count_ + ahead_ * block / blocks_; key < end; ++key) {
      prefetch_row_to_l2(keys_[key], task_.head_dim * static_cast<int32_t>(sizeof(T)));
      prefetch_row_to_l2(values_[key], task_.head_dim_v * static_cast<int32_t>(sizeof(T)));
    }
  }

  // scales[key][head]: of the tile's keys (or values), as scores and weights lie.
  void find_scales_of_heads(bool of_value, float* scales) {
    alignas(64) float of_tokens[kTileKv];
    find_scales(task_.kv, of_value, kv_begin_, kv_begin_ + count_, kTileKv, of_tokens);
    for (int32_t key = 0; key < kTileKv; ++key) {
      for (int h = 0; h < kHeads; ++h) scales[key * kHeads + h] = of_tokens[key];
    }
  }

  // A scale for a row's elements is one for its score, or for its weight.
  void multiply_in_place(float* of_keys, const float* scales) {
    for (int32_t i = 0; i < round_up(count_, kKeys) * kHeads; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(F32(), of_keys + i), hn::Load(F32(), scales + i)), F32(), of_keys + i);
    }
  }

  // weights[key][head] = query · key, a few blocks at a time, whose queries stay in L1 while the keys pass.
  template <class U>
  void multiply_keys() {
    for (int32_t begin = 0; begin < blocks_; begin += kBlocksInL1) {
      multiply_keys<U>(begin, HWY_MIN(blocks_, begin + kBlocksInL1));
    }
    if constexpr (kIs8Bit<T>) {
      for (int32_t block = 0; block < blocks_; ++block) multiply_in_place(weights_of(block), key_scales_);
    }
  }

  template <class U>
  void multiply_keys(int32_t block_begin, int32_t block_end) {
    const std::byte* keys[kKeys];
    const int32_t known = block_begin == 0 && !widens_ ? count_ + ahead_ : 0;
    for (int32_t key = 0; key < count_; key += kKeys) {
      for (int32_t i = 0; i < kKeys; ++i) {
        keys[i] = keys_[HWY_MIN(key + i, count_ - 1)];
        if (key + i + kAheadTokens < known) {
          prefetch_row_to_l2(keys_[key + i + kAheadTokens], task_.head_dim * static_cast<int32_t>(sizeof(T)));
        }
      }
      for (int32_t block = block_begin; block < block_end; ++block) {
        hn::Store(scores<U>(query_of(block), keys), F32(), weights_of(block) + key * kHeads);
      }
    }
  }

  template <class U>
  HWY_INLINE V scores(const float* query, const std::byte* const (&rows)[kKeys]) const {
    V sums[kLanes];
    HWY_UNROLL(16)
    for (int i = 0; i < kLanes; ++i) sums[i] = hn::Zero(F32());
    const auto add = [&](const V(&key)[kKeys], int32_t d) HWY_ATTR {
      HWY_UNROLL(16)
      for (int h = 0; h < kHeads; ++h) {
        const V q = hn::Load(F32(), query + h * query_stride_ + d);
        HWY_UNROLL(16)
        for (int i = 0; i < kKeys; ++i) sums[i * kHeads + h] = hn::MulAdd(q, key[i], sums[i * kHeads + h]);
      }
    };
    const auto at = [&](int i, int32_t d) HWY_ATTR { return reinterpret_cast<const U*>(rows[i]) + d; };
    int32_t d = 0;
    for (; d + kPair <= task_.head_dim; d += kPair) {
      V first[kKeys], second[kKeys];
      HWY_UNROLL(16)
      for (int i = 0; i < kKeys; ++i) load_pair(at(i, d), first[i], second[i]);
      add(first, d);
      add(second, d + kLanes);
    }
    V key[kKeys];
    if (d + kLanes <= task_.head_dim) {
      HWY_UNROLL(16)
      for (int i = 0; i < kKeys; ++i) key[i] = load(at(i, d));
      add(key, d);
      d += kLanes;
    }
    if (d < task_.head_dim) {
      HWY_UNROLL(16)
      for (int i = 0; i < kKeys; ++i) key[i] = load_first(at(i, d), task_.head_dim - d);
      add(key, d);
    }
    return reduce(sums);
  }

  void apply_terms(int32_t block) {
    float slopes[kLanes];
    const TaskToken& token = token_at(block);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int32_t head = first_head_of(block) + lane % kHeads;
      slopes[lane] = head < task_.group_size ? slope_log2(token, head) : 0.0F;
    }
    const V slope = hn::LoadU(F32(), slopes);
    const auto q_pos = hn::Set(I32(), task_.has_alibi() ? token.q_pos() : 0);
    float* weights = weights_of(block);
    for (int32_t key = 0; key < count_; key += kKeys) {
      const auto to_key = hn::Sub(hn::Load(I32(), positions_ + key * kHeads), q_pos);
      const V distance = hn::ConvertTo(F32(), hn::Abs(to_key));
      float* score = weights + key * kHeads;
      hn::Store(terms_.apply(hn::Load(F32(), score), slope, distance), F32(), score);
    }
  }

  // Fills visible_ and hides the scores. Where the mask asks for the head, blocks are single heads.
  void hide(int32_t block, bool next_token) {
    if (next_token || task_.mask->depends_on_head) {
      const TaskToken& token = token_at(block);
      mask::evaluate_row(*task_.mask, *token.mask_input, token.query_index, task_.first_head + first_head_of(block),
                         kv_begin_, kv_begin_ + count_, visible_, mask_scratch_);
    }
    float* weights = weights_of(block);
    for (int32_t key = 0; key < count_; ++key) {
      if (visible_[key] != 0) continue;
      for (int h = 0; h < kHeads; ++h) weights[key * kHeads + h] = -HUGE_VALF;
    }
  }

  // Scores to weights 2^(score - max). Lanes are [key][head]: no step across lanes but one maximum a tile.
  void update_softmax(int32_t block) {
    float* weights = weights_of(block);
    for (int32_t i = count_ * kHeads; i < round_up(count_, kKeys) * kHeads; ++i) weights[i] = -HUGE_VALF;
    const int32_t end = round_up(count_, kKeys) * kHeads;

    V tile_max = hn::Load(F32(), weights);
    for (int32_t i = kLanes; i < end; i += kLanes) tile_max = hn::Max(tile_max, hn::Load(F32(), weights + i));
    float* running_max = max_ + int64_t{block} * kLanes;
    const V old_max = hn::Load(F32(), running_max);
    const V row_max = hn::Max(old_max, across_keys(tile_max));
    // A row that has seen nothing yet has no finite maximum to subtract.
    const V base = hn::IfThenZeroElse(hn::Eq(row_max, negative_infinity()), row_max);

    V tile_sum = hn::Zero(F32());
    for (int32_t i = 0; i < end; i += kLanes) {
      const V weight = exp2_nonpositive(hn::Sub(hn::Load(F32(), weights + i), base));
      tile_sum = hn::Add(tile_sum, weight);
      hn::Store(weight, F32(), weights + i);
    }
    const V decay = exp2_nonpositive(hn::Sub(old_max, base));
    float* running_sum = sum_ + int64_t{block} * kLanes;
    hn::Store(hn::MulAdd(hn::Load(F32(), running_sum), decay, tile_sum), F32(), running_sum);
    hn::Store(row_max, F32(), running_max);
    hn::Store(decay, F32(), decay_ + int64_t{block} * kLanes);
  }

  // Each head's maximum over the keys of a vector, in all of the head's lanes.
  static V across_keys(V max) {
    alignas(64) float lanes[kLanes];
    hn::Store(max, F32(), lanes);
    for (int lane = kHeads; lane < kLanes; ++lane) {
      if (lanes[lane] > lanes[lane % kHeads]) lanes[lane % kHeads] = lanes[lane];
    }
    for (int lane = kHeads; lane < kLanes; ++lane) lanes[lane] = lanes[lane % kHeads];
    return hn::Load(F32(), lanes);
  }

  // Only keys that the token sees: a hidden value may be NaN, and 0·NaN is NaN.
  template <class U>
  void multiply_visible_values(int32_t block) {
    const float* weights = weights_of(block);
    int32_t count = 0;
    for (int32_t key = 0; key < count_; ++key) {
      if (visible_[key] == 0) continue;
      std::memcpy(visible_weights_ + count * kHeads, weights + key * kHeads, sizeof(float) * kHeads);
      visible_values_[count++] = values_[key];
    }
    for_each_strip([&](int32_t d, auto vectors) HWY_ATTR {
      multiply_strip<U, vectors()>(block, d, visible_weights_, visible_values_, count, 0);
    });
  }

  // A strip of the values stays in L1 while the blocks pass. The first block's first strip prefetches whole rows, as
  // far as addresses are known.
  template <class U>
  void multiply_all_values() {
    for_each_strip([&](int32_t d, auto vectors) HWY_ATTR {
      for (int32_t block = 0; block < blocks_; ++block) {
        const bool prefetches = d == 0 && block == 0 && !widens_;
        multiply_strip<U, vectors()>(block, d, weights_of(block), values_, count_, prefetches ? count_ + ahead_ : 0);
      }
    });
  }

  // Calls body(first dimension, integral constant: how many vectors).
  template <class Body>
  HWY_INLINE void for_each_strip(const Body& body) const {
    constexpr int kStrip = kAccumulators / kHeads < 8 ? kAccumulators / kHeads : 8;
    const int32_t dims = task_.head_dim_v;
    int32_t d = 0;
    for (; d + kStrip * kLanes <= dims; d += kStrip * kLanes) body(d, std::integral_constant<int, kStrip>());
    for (; d + kPair <= dims; d += kPair) body(d, std::integral_constant<int, 2>());
    for (; d < dims; d += kLanes) body(d, std::integral_constant<int, 1>());
  }

  // output = output·decay + Σ weight·value, of a strip of dimensions.
  template <class U, int kVectors>
  void multiply_strip(int32_t block, int32_t d, const float* weights, const std::byte* const* values, int32_t count,
                      int32_t known) {
    float* output = output_of(block) + d;
    const float* decay = decay_ + int64_t{block} * kLanes;
    V sums[kHeads][kVectors];
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) {
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) {
        sums[h][v] = hn::Mul(hn::Load(F32(), output + h * out_stride_ + v * kLanes), set(decay[h]));
      }
    }
    const int32_t left = task_.head_dim_v - d;
    const int32_t row_bytes = task_.head_dim_v * static_cast<int32_t>(sizeof(T));
    for (int32_t key = 0; key < count; ++key) {
      if (key + kAheadTokens < known) prefetch_row_to_l2(values[key + kAheadTokens], row_bytes);
      const U* value = reinterpret_cast<const U*>(values[key]) + d;
      V column[kVectors];
      if constexpr (kVectors == 1) {
        column[0] = left >= kLanes ? load(value) : load_first(value, left);
      } else {
        HWY_UNROLL(8)
        for (int v = 0; v < kVectors; v += 2) load_pair(value + v * kLanes, column[v], column[v + 1]);
      }
      HWY_UNROLL(8)
      for (int h = 0; h < kHeads; ++h) {
        const V weight = set(weights[key * kHeads + h]);
        HWY_UNROLL(8)
        for (int v = 0; v < kVectors; ++v) sums[h][v] = hn::MulAdd(weight, column[v], sums[h][v]);
      }
    }
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) {
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) hn::Store(sums[h][v], F32(), output + h * out_stride_ + v * kLanes);
    }
  }

  const ForwardTask& task_;
  const ScoreTerms terms_;
  const int32_t blocks_per_token_;
  const int32_t blocks_;
  const int32_t query_stride_;
  const int32_t out_stride_;
  const bool widens_;
  mask::RowScratch& mask_scratch_;

  float* const query_;         // [blocks, kHeads, query_stride], scaled, in the order of load_pair
  float* const output_;        // [blocks, kHeads, out_stride]: Σ weight·v so far, likewise
  float* const row_;           // a row in plain order
  float* const max_;           // [blocks, kLanes]: of head lane % kHeads, log2
  float* const sum_;           // [blocks, kLanes]: of the keys that met this lane
  float* const decay_;         // [blocks, kLanes]: of the tile's softmax, by head
  float* const weights_;       // [blocks, kTileKv, kHeads]: scores, then weights
  float* const key_scales_;    // [kTileKv, kHeads], of 8-bit caches
  float* const value_scales_;  // likewise
  int32_t* const visible_;
  const std::byte** const keys_;  // addresses of the tile's rows and of those prefetched
  const std::byte** const values_;
  float* wide_keys_ = nullptr;  // [kTileKv, query_stride]: the tile's, where they are widened
  float* wide_values_ = nullptr;

  // The current tile of keys.
  int32_t kv_begin_ = 0;
  int32_t count_ = 0;
  int32_t ahead_ = 0;                                     // keys behind the tile that are prefetched
  alignas(64) int32_t positions_[kTileKv * kHeads] = {};  // [key][head]: of the tile's keys, for ALiBi
  alignas(64) float visible_weights_[kTileKv * kHeads];
  const std::byte* visible_values_[kTileKv];
};

template <class T>
void forward_few_rows_as(const ForwardTask& task, FewRowsScratch& scratch) {
  const bool single_heads = task.group_size == 1 || (task.mask != nullptr && task.mask->depends_on_head);
  if (single_heads) return FewRows<T, 1>(task, scratch).run();
  if (task.group_size == 2) return FewRows<T, 2>(task, scratch).run();
  FewRows<T, 4>(task, scratch).run();
}

void forward_few_rows(const ForwardTask& task) {
  static thread_local FewRowsScratch scratch;
  if (task.kv.dtype == DType::f32) return forward_few_rows_as<float>(task, scratch);
  if (task.kv.dtype == DType::f16) return forward_few_rows_as<hwy::float16_t>(task, scratch);
  if (task.kv.dtype == DType::bf16) return forward_few_rows_as<hwy::bfloat16_t>(task, scratch);
  if (task.kv.dtype == DType::f8e4m3) return forward_few_rows_as<F8E4M3>(task, scratch);
  if (task.kv.dtype == DType::i8) return forward_few_rows_as<int8_t>(task, scratch);
  forward_few_rows_as<F8E5M2>(task, scratch);
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();
