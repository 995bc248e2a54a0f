// Prefill: many packed query rows against tiles of keys. Each tile of keys and values is packed once and every query
// tile of the item runs over it: scores (product), softmax in place, values (product, which also rescales the output).
// docs/forward_cpu.md says why. A row sees the same operations in the same order whichever rows stand beside it.
#if defined(QKV_CPU_MANY_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_MANY_ROWS_INL_HPP_
#undef QKV_CPU_MANY_ROWS_INL_HPP_
#else
#define QKV_CPU_MANY_ROWS_INL_HPP_
#endif

#include "cpu/rows-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

// Rows of scores are padded so that the rows of a block do not fall into the same L1 sets.
inline constexpr int32_t kScoreStride = kTileKv + 16;
// Scores that the softmax takes at once, in four independent chains.
inline constexpr int32_t kStep = 4 * kLanes;
static_assert(kTileKv % kStep == 0);

// The keys of the current tile that a row sees.
struct RowMask {
  const int32_t* visible = nullptr;  // [kTileKv] -1 or 0; nullptr: all of them
  int32_t begin = 0;                 // visible keys lie in [begin, end)
  int32_t end = 0;
};

// Where the current tile's keys and values lie.
struct KeyTile {
  int32_t begin = 0, count = 0;
  const std::byte* const* keys = nullptr;    // [count]
  const std::byte* const* values = nullptr;  // [count]
};

// A query tile between the two products. Rows are of the tile; `weights` lie in the place of the scores.
struct QueryTile {
  int32_t num_rows = 0;             // whole blocks
  const float* weights = nullptr;   // [num_rows], kScoreStride apart
  const RowMask* ranges = nullptr;  // by block
  const float* decay = nullptr;     // [num_rows]
  float* output = nullptr;          // [num_rows]
};

template <class Products>
struct ManyRowsScratch {
  typename Products::Memory products;
  Scratch<float> output, max, sum, scores;
  Scratch<int32_t> visible;
  Scratch<const std::byte*> keys_at, values_at;
  mask::RowScratch mask;
};

// Products multiplies: query rows by keys, and weights by values, each in its own packed form.
template <class Products>
class ManyRows {
  static constexpr int32_t kBlockRows = Products::kBlockRows;  // rows that are multiplied together
  static constexpr int32_t kPanel = Products::kPanel;          // keys likewise
  static constexpr int32_t kTileRows = Products::kTileRows;    // rows of a query tile
  static_assert(kTileRows % kBlockRows == 0 && kTileKv % kPanel == 0);

 public:
  ManyRows(const ForwardTask& task, ManyRowsScratch<Products>& scratch)
      : task_(task),
        terms_(task),
        rows_(round_up(task.num_rows(), kBlockRows)),
        out_stride_(Products::out_stride(task)),
        mask_scratch_(scratch.mask),
        products_(task, rows_, scratch.products),
        output_(scratch.output.reserve(int64_t{rows_} * out_stride_)),
        max_(scratch.max.reserve(rows_)),
        sum_(scratch.sum.reserve(int64_t{rows_} * kLanes)),
        scores_(scratch.scores.reserve(kTileRows * kScoreStride)),
        visible_(scratch.visible.reserve(kTileRows * kTileKv)),
        keys_at_(scratch.keys_at.reserve(2 * kTileKv)),
        values_at_(scratch.values_at.reserve(2 * kTileKv)) {}

  void run() {
    start_rows();
    for (const mask::KeySegment& segment : task_.segments) {
      for (int32_t begin = segment.begin; begin < segment.end; begin += kTileKv) {
        run_key_tile(begin, segment.end, segment.tile_class == TileClass::full);
      }
    }
    for (int32_t row = 0; row < task_.num_rows(); ++row) {
      const float sum = hn::GetLane(hn::SumOfLanes(F32(), hn::Load(F32(), sum_ + int64_t{row} * kLanes)));
      finish_row(task_, row, max_[row], sum, output_ + int64_t{row} * out_stride_);
    }
  }

 private:
  void start_rows() {
    for (int32_t row = 0; row < rows_; ++row) {
      if (row < task_.num_rows()) {
        products_.load_query(row);
      } else {
        products_.clear_query(row);  // rows that only fill the last block
      }
      max_[row] = -HUGE_VALF;
    }
    std::memset(sum_, 0, int64_t{rows_} * kLanes * sizeof(float));
    std::memset(output_, 0, int64_t{rows_} * out_stride_ * sizeof(float));
  }

  void run_key_tile(int32_t kv_begin, int32_t segment_end, bool all_visible) {
    kv_begin_ = kv_begin;
    count_ = HWY_MIN(kTileKv, segment_end - kv_begin);
    next_count_ = HWY_MIN(kTileKv, segment_end - kv_begin - count_);
    find_rows(task_.kv, false, kv_begin, kv_begin + count_ + next_count_, keys_at_);
    find_rows(task_.kv, true, kv_begin, kv_begin + count_ + next_count_, values_at_);
    if (task_.has_alibi()) find_positions<1>(task_, kv_begin, kv_begin + count_, positions_);
    products_.pack({kv_begin, count_, keys_at_, values_at_});
    for (int32_t begin = 0; begin < rows_; begin += kTileRows) {
      row_begin_ = begin;
      tile_rows_ = HWY_MIN(kTileRows, rows_ - begin);
      run_query_tile(all_visible);
    }
  }

  // Each block of rows brings its share of the next tile to L2 while it computes, so that packing need not wait.
  void prefetch_share(int32_t row) const {
    const int32_t begin = static_cast<int32_t>(int64_t{next_count_} * row / rows_);
    const int32_t end = static_cast<int32_t>(int64_t{next_count_} * (row + kBlockRows) / rows_);
    const int32_t element_bytes = size_bytes(task_.kv.dtype);
    for (int32_t key = count_ + begin; key < count_ + end; ++key) {
      prefetch_row_to_l2(keys_at_[key], task_.head_dim * element_bytes);
      prefetch_row_to_l2(values_at_[key], task_.head_dim_v * element_bytes);
    }
  }

  void run_query_tile(bool all_visible) {
    bool hides_some = false;
    if (!all_visible) {
      const TileClass tile_class = classify_query_tile();
      if (tile_class == TileClass::empty) return;
      hides_some = tile_class == TileClass::partial;
    }
    find_visible(hides_some);
    find_block_ranges();
    multiply_keys();
    if (terms_.any) apply_terms();
    for (int32_t row = 0; row < tile_rows_; row += kBlockRows) update_softmax(row);
    multiply_values(hides_some);
  }

  int32_t last_row() const { return HWY_MIN(row_begin_ + tile_rows_, task_.num_rows()) - 1; }

  // Of one request's tokens at a time; the class of all is theirs if it is the same.
  TileClass classify_query_tile() const {
    const int32_t end = last_row() / task_.group_size + 1;
    int32_t begin = row_begin_ / task_.group_size;
    const TileClass first = classify_run(begin, end);
    while (begin < end) {
      if (first == TileClass::partial || classify_run(begin, end) != first) return TileClass::partial;
    }
    return first;
  }

  // The tokens from `begin` on that follow one another in one request; moves `begin` behind them.
  TileClass classify_run(int32_t& begin, int32_t end) const {
    const TaskToken& first = task_.tokens[begin];
    int32_t last_index = first.query_index;
    while (++begin < end && task_.tokens[begin].mask_input == first.mask_input &&
           task_.tokens[begin].query_index == last_index + 1) {
      ++last_index;
    }
    return mask::classify(*task_.mask, *first.mask_input,
                          {first.query_index, last_index + 1, kv_begin_, kv_begin_ + count_, task_.first_head,
                           task_.first_head + task_.group_size});
  }

  // Fills row_masks_. Without hidden keys a short tile still hides what lies behind its end.
  void find_visible(bool hides_some) {
    if (!hides_some) {
      const int32_t* visible = count_ < kTileKv ? end_of_keys() : nullptr;
      for (int32_t row = 0; row < tile_rows_; ++row) row_masks_[row] = {visible, 0, count_};
      return;
    }
    for (int32_t row = 0; row < tile_rows_; ++row) {
      const int32_t packed = row_begin_ + row;
      const int32_t head = packed % task_.group_size;
      const bool as_before = row > 0 && (packed > last_row() || (head > 0 && !task_.mask->depends_on_head));
      row_masks_[row] = as_before ? row_masks_[row - 1] : evaluate(task_.tokens[packed / task_.group_size], head, row);
    }
  }

  const int32_t* end_of_keys() {
    for (int32_t key = 0; key < kTileKv; ++key) visible_[key] = key < count_ ? -1 : 0;
    return visible_;
  }

  RowMask evaluate(const TaskToken& token, int32_t head, int32_t slot) {
    int32_t* visible = visible_ + int64_t{slot} * kTileKv;
    mask::evaluate_row(*task_.mask, *token.mask_input, token.query_index, task_.first_head + head, kv_begin_,
                       kv_begin_ + count_, visible, mask_scratch_);
    for (int32_t key = count_; key < kTileKv; ++key) visible[key] = 0;
    int32_t begin = 0;
    int32_t end = kTileKv;
    while (begin < end && sees_none(visible + begin)) begin += kLanes;
    while (begin < end && sees_none(visible + end - kLanes)) end -= kLanes;
    if (begin == end) return {visible, 0, 0};
    return {visible, begin, HWY_MIN(end, count_)};
  }

  static bool sees_none(const int32_t* visible) {
    return hn::AllTrue(I32(), hn::Eq(hn::Load(I32(), visible), hn::Zero(I32())));
  }

  // The keys that any row of a block sees: what lies outside costs nothing.
  void find_block_ranges() {
    for (int32_t row = 0; row < tile_rows_; row += kBlockRows) {
      RowMask range = row_masks_[row];
      for (int32_t r = 1; r < kBlockRows; ++r) {
        const RowMask& other = row_masks_[row + r];
        if (other.begin == other.end) continue;
        if (range.begin == range.end) range = other;
        range.begin = HWY_MIN(range.begin, other.begin);
        range.end = HWY_MAX(range.end, other.end);
      }
      block_ranges_[row / kBlockRows] = range;
    }
  }

  const RowMask& block_range(int32_t row) const { return block_ranges_[row / kBlockRows]; }

  void multiply_keys() {
    for (int32_t panel = 0; panel < count_; panel += kPanel) {
      for (int32_t row = 0; row < tile_rows_; row += kBlockRows) {
        if (panel == 0) prefetch_share(row_begin_ + row);
        const RowMask& range = block_range(row);
        if (range.end <= panel || range.begin >= panel + kPanel) continue;
        products_.multiply_keys(row_begin_ + row, panel, HWY_MIN(kPanel, range.end - panel), score_row(row) + panel);
      }
    }
  }

  void apply_terms() {
    for (int32_t row = 0; row < tile_rows_; ++row) {
      const int32_t packed = HWY_MIN(row_begin_ + row, task_.num_rows() - 1);
      const TaskToken& token = task_.tokens[packed / task_.group_size];
      const V slope = set(slope_log2(token, packed % task_.group_size));
      const auto q_pos = hn::Set(I32(), task_.has_alibi() ? token.q_pos() : 0);
      float* scores = score_row(row);
      for (int32_t key = 0; key < count_; key += kLanes) {
        const V distance = hn::ConvertTo(F32(), hn::Abs(hn::Sub(hn::Load(I32(), positions_ + key), q_pos)));
        const V raw = products_.scaled(hn::Load(F32(), scores + key));
        hn::Store(terms_.apply(raw, slope, distance), F32(), scores + key);
      }
    }
  }

  // Scores of a block to weights 2^(score - max), with the running maxima and, lane by lane, the running sums. Two
  // passes, so that the horizontal maxima overlap.
  void update_softmax(int32_t row) {
    const RowMask& range = block_range(row);
    if (range.begin == range.end) return;
    if (range.visible == nullptr) return update_softmax_as<false>(row, 0, kTileKv);
    update_softmax_as<true>(row, range.begin / kStep * kStep, round_up(range.end, kStep));
  }

  // Keys outside [begin, end) are hidden from the whole block: they would add zeros.
  template <bool kMasked>
  HWY_INLINE void update_softmax_as(int32_t row, int32_t begin, int32_t end) {
    float base[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) base[r] = update_max<kMasked>(row + r, begin, end);
    for (int r = 0; r < kBlockRows; ++r) update_sum<kMasked>(row + r, begin, end, base[r]);
  }

  template <bool kMasked>
  HWY_INLINE V score(int32_t row, int32_t key) {
    V score = hn::Load(F32(), score_row(row) + key);
    if (!terms_.any) score = products_.scaled(score);  // terms have done it
    if (!kMasked) return score;
    const auto seen = hn::Ne(hn::Load(I32(), row_masks_[row].visible + key), hn::Zero(I32()));
    return hn::IfThenElse(hn::RebindMask(F32(), seen), score, negative_infinity());
  }

  // Returns what is subtracted from the row's scores.
  template <bool kMasked>
  HWY_INLINE float update_max(int32_t row, int32_t begin, int32_t end) {
    V max[4];
    for (int i = 0; i < 4; ++i) max[i] = score<kMasked>(row, begin + i * kLanes);
    for (int32_t key = begin + kStep; key < end; key += kStep) {
      for (int i = 0; i < 4; ++i) max[i] = hn::Max(max[i], score<kMasked>(row, key + i * kLanes));
    }
    const V tile_max = hn::MaxOfLanes(F32(), hn::Max(hn::Max(max[0], max[1]), hn::Max(max[2], max[3])));
    float& running_max = max_[row_begin_ + row];
    const V old_max = set(running_max);
    const V row_max = hn::Max(old_max, tile_max);
    // A row that has seen nothing yet has no finite maximum to subtract.
    const V base = hn::IfThenZeroElse(hn::Eq(row_max, negative_infinity()), row_max);
    decay_[row] = hn::GetLane(exp2_nonpositive(hn::Sub(old_max, base)));
    running_max = hn::GetLane(row_max);
    return hn::GetLane(base);
  }

  template <bool kMasked>
  HWY_INLINE void update_sum(int32_t row, int32_t begin, int32_t end, float base) {
    V sum[4] = {hn::Zero(F32()), hn::Zero(F32()), hn::Zero(F32()), hn::Zero(F32())};
    for (int32_t key = begin; key < end; key += kStep) {
      V weights[4];
      for (int i = 0; i < 4; ++i) {
        weights[i] = exp2_nonpositive(hn::Sub(score<kMasked>(row, key + i * kLanes), set(base)));
        sum[i] = hn::Add(sum[i], weights[i]);
      }
      Products::store_weights(weights, key, score_row(row));
    }
    float* running_sum = sum_ + int64_t{row_begin_ + row} * kLanes;
    const V tile_sum = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    hn::Store(hn::MulAdd(hn::Load(F32(), running_sum), set(decay_[row]), tile_sum), F32(), running_sum);
  }

  void multiply_values(bool hides_some) {
    // 0·NaN is NaN: a hidden value that is not finite must not be multiplied at all.
    if (hides_some && !products_.are_values_finite()) return multiply_visible_values();
    products_.multiply_values({tile_rows_, scores_, block_ranges_, decay_, output_row(0)});
  }

  // The same sums key by key, for tiles with NaN or infinity where not every row sees every key.
  void multiply_visible_values() {
    for (int32_t row = 0; row < tile_rows_; ++row) {
      const RowMask& mask = row_masks_[row];
      if (mask.begin == mask.end) continue;
      for (int32_t d = 0; d < task_.head_dim_v; d += kLanes) {
        V sum = hn::Zero(F32());
        for (int32_t key = mask.begin; key < mask.end; ++key) {
          if (mask.visible[key] == 0) continue;
          sum = hn::MulAdd(set(Products::weight(score_row(row), key)), products_.value(key, d), sum);
        }
        float* out = output_row(row) + d;
        hn::Store(hn::MulAdd(hn::Load(F32(), out), set(decay_[row]), sum), F32(), out);
      }
    }
  }

  float* score_row(int32_t row) { return scores_ + int64_t{row} * kScoreStride; }
  float* output_row(int32_t row) { return output_ + int64_t{row_begin_ + row} * out_stride_; }

  const ForwardTask& task_;
  const ScoreTerms terms_;
  const int32_t rows_;  // of the item, whole blocks
  const int32_t out_stride_;
  mask::RowScratch& mask_scratch_;
  Products products_;

  float* const output_;  // [rows, out_stride]: Σ weight·v so far
  float* const max_;     // [rows], log2
  float* const sum_;     // [rows, kLanes]
  float* const scores_;  // [kTileRows, kScoreStride]
  int32_t* const visible_;
  const std::byte** const keys_at_;  // [2·kTileKv]: where the tile's keys lie, and those behind it
  const std::byte** const values_at_;

  // The current tile of keys, and of queries.
  int32_t kv_begin_ = 0;
  int32_t count_ = 0;
  int32_t next_count_ = 0;
  int32_t row_begin_ = 0;
  int32_t tile_rows_ = 0;
  alignas(64) int32_t positions_[kTileKv] = {};  // of the tile's keys, for ALiBi
  RowMask row_masks_[kTileRows];
  RowMask block_ranges_[kTileRows / kBlockRows];
  float decay_[kTileRows];
};

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
