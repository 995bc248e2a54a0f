// How rows come in and go out: addresses of keys, scaled queries, finished outputs or states. Shared by both kernels.
#if defined(QKV_CPU_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_CPU_ROWS_INL_HPP_
#undef QKV_CPU_ROWS_INL_HPP_
#else
#define QKV_CPU_ROWS_INL_HPP_
#endif

#include <cmath>

#include "core/float16.hpp"
#include "cpu/kernels.hpp"
#include "cpu/vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

// rows[i] = where the key (or value) at position begin + i lies. The only reader of the page table: entries of
// positions outside [begin, end) are not touched.
inline void find_rows(const KeyValueSource& kv, bool of_value, int32_t begin, int32_t end, const std::byte** rows) {
  const std::byte* base = of_value ? kv.value : kv.key;
  const int64_t token_stride = of_value ? kv.value_token_stride : kv.key_token_stride;
  if (kv.pages == nullptr) {
    for (int32_t position = begin; position < end; ++position) *rows++ = base + position * token_stride;
    return;
  }
  const int64_t page_stride = of_value ? kv.value_page_stride : kv.key_page_stride;
  int32_t page = begin / kv.page_size;
  int32_t offset = begin % kv.page_size;
  for (int32_t position = begin; position < end; ++page, offset = 0) {
    const std::byte* first = base + kv.pages[page] * page_stride;
    for (; offset < kv.page_size && position < end; ++offset, ++position) *rows++ = first + offset * token_stride;
  }
}

// scales[i] = that of the key (or value) at position begin + i, for kv.dtype of 8 bits; 1 up to `capacity`.
inline void find_scales(const KeyValueSource& kv, bool of_value, int32_t begin, int32_t end, int32_t capacity,
                        float* scales) {
  const TokenScales& source = of_value ? kv.value_scale : kv.key_scale;
  for (int32_t position = begin; position < end; ++position) *scales++ = kv.scale_of(source, position);
  for (int32_t i = end - begin; i < capacity; ++i) *scales++ = 1;
}

// positions[i] = where the shown key begin + i sits, kHeads times each. Tokens of several requests share keys only
// where these sit alike in all of them.
template <int kHeads>
void find_positions(const ForwardTask& task, int32_t begin, int32_t end, int32_t* positions) {
  const mask::ProgramInput& request = *task.tokens.front().mask_input;
  for (int32_t key = begin; key < end; ++key) {
    const int32_t position = request.kv_pos(key);
    for (int h = 0; h < kHeads; ++h) *positions++ = position;
  }
}

inline constexpr int32_t kCacheLineBytes = 64;

HWY_INLINE void prefetch_row_to_l2(const std::byte* row, int32_t bytes) {
  for (int32_t offset = 0; offset < bytes; offset += kCacheLineBytes) __builtin_prefetch(row + offset, 0, 2);
}

// The score of a row in units of log2: query · key + terms. The query rows carry this factor, so that the product
// needs no further scaling.
inline float query_factor(const ForwardTask& task) {
  return task.softcap > 0 ? task.scale / task.softcap : task.scale * kLog2e;
}

template <class T>
void load_row_as(const std::byte* row, int32_t count, float factor, float* out) {
  const T* elements = reinterpret_cast<const T*>(row);
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::Mul(load(elements + i), set(factor)), F32(), out + i);
  }
  if (i == count) return;
  alignas(64) float last[kLanes];
  hn::Store(hn::Mul(load_first(elements + i, count - i), set(factor)), F32(), last);
  std::memcpy(out + i, last, (count - i) * sizeof(float));
}

inline void load_query_row(const ForwardTask& task, int32_t row, float* out) {
  const TaskToken& token = task.tokens[row / task.group_size];
  const std::byte* query = token.query + row % task.group_size * task.query_head_stride;
  const float factor = query_factor(task) * token.query_scale;
  if (task.query_dtype == DType::f32) return load_row_as<float>(query, task.head_dim, factor, out);
  if (task.query_dtype == DType::f16) return load_row_as<hwy::float16_t>(query, task.head_dim, factor, out);
  if (task.query_dtype == DType::bf16) return load_row_as<hwy::bfloat16_t>(query, task.head_dim, factor, out);
  if (task.query_dtype == DType::f8e4m3) return load_row_as<F8E4M3>(query, task.head_dim, factor, out);
  load_row_as<F8E5M2>(query, task.head_dim, factor, out);
}

// Softcap and ALiBi, where the layer has them: `raw` is query · key with the factor above, the result is in log2.
struct ScoreTerms {
  bool any;
  bool softcap;
  float softcap_log2;

  explicit ScoreTerms(const ForwardTask& task)
      : any(task.softcap > 0 || task.has_alibi()), softcap(task.softcap > 0), softcap_log2(task.softcap * kLog2e) {}

  // distance = |q_pos - kv_pos|, slope in log2 units; slope 0 where there is none
  HWY_INLINE V apply(V raw, V slope, V distance) const {
    if (softcap) raw = hn::Mul(tanh(raw), set(softcap_log2));
    return hn::NegMulAdd(slope, distance, raw);
  }
};

inline float slope_log2(const TaskToken& token, int32_t head) {
  return token.alibi_slopes != nullptr ? token.alibi_slopes[head] * kLog2e : 0.0F;
}

// Outputs of 8-bit floats are divided by their scales.
inline void store_row(DType dtype, const float* values, int32_t count, const OutputScale& out_scale, std::byte* out) {
  if (dtype == DType::f32) {
    std::memcpy(out, values, count * sizeof(float));
  } else if (is_float8(dtype)) {
    for (int32_t begin = 0; begin < count; begin += index::kScaleGroup) {
      const int32_t end = begin + index::kScaleGroup < count ? begin + index::kScaleGroup : count;
      const float scale = out_scale.of_group(dtype, begin / index::kScaleGroup, values + begin, end - begin);
      for (int32_t i = begin; i < end; ++i) store_f32(out + i, dtype, values[i] / scale);
    }
  } else if (dtype == DType::bf16) {
    for (int32_t i = 0; i < count; ++i) store_f32(out + 2 * i, DType::bf16, values[i]);
  } else {
    for (int32_t i = 0; i < count; ++i) store_f32(out + 2 * i, DType::f16, values[i]);
  }
}

// Ends a row: sum = Σ 2^(score - max) and weighted = Σ 2^(score - max)·v, max in log2 (-inf: nothing was seen).
// `weighted` is overwritten.
inline void finish_row(const ForwardTask& task, int32_t row, float max, float sum, float* weighted) {
  const TaskToken& token = task.tokens[row / task.group_size];
  const int32_t head = row % task.group_size;
  const bool is_state = token.state_out != nullptr;
  const double sink = !is_state && task.sinks != nullptr ? task.sinks[head] : -HUGE_VAL;
  const double own = double{max} * 0.693147180559945309;
  double joined = sink > own ? sink : own;
  if (joined == -HUGE_VAL) joined = 0;  // every exp below is 0
  const double weight = std::exp(own - joined);
  const double total = sum * weight + std::exp(sink - joined);
  const auto lse = static_cast<float>(std::log(total) + joined);
  const float factor = total == 0 ? 0.0F : static_cast<float>(weight / total);
  // A row that sees nothing has weighted = 0. The added 0 turns -0 into 0, so that tiles in which a row sees nothing
  // cannot be told from tiles that were skipped.
  for (int32_t d = 0; d < task.head_dim_v; ++d) weighted[d] = total == 0 ? 0.0F : weighted[d] * factor + 0.0F;

  if (is_state) {
    std::memcpy(token.state_out + int64_t{head} * task.head_dim_v, weighted, task.head_dim_v * sizeof(float));
    token.state_lse[head] = lse;
    return;
  }
  store_row(task.out_dtype, weighted, task.head_dim_v, token.out_scale.at(0, head),
            token.out + head * task.out_head_stride);
  if (token.lse != nullptr) token.lse[head * task.lse_head_stride] = lse;
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
