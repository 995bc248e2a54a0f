// The definition of a forward task, loop by loop in float64: scores, softcap, ALiBi, mask, softmax with the sink, mean.
// Both kernels of every instruction set must equal it within rounding. Slow on purpose.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "core/float16.hpp"
#include "cpu/kernels.hpp"

namespace qkv::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double load(DType dtype, const std::byte* row, int32_t index) {
  return load_f32(row + index * size_bytes(dtype), dtype);
}

void store(DType dtype, std::byte* row, int32_t index, float value) {
  store_f32(row + index * size_bytes(dtype), dtype, value);
}

const std::byte* token_row(const KeyValueSource& kv, bool of_value, int64_t position) {
  const std::byte* base = of_value ? kv.value : kv.key;
  const int64_t token_stride = of_value ? kv.value_token_stride : kv.key_token_stride;
  if (kv.pages == nullptr) return base + position * token_stride;
  const int64_t page_stride = of_value ? kv.value_page_stride : kv.key_page_stride;
  return base + kv.pages[position / kv.page_size] * page_stride + position % kv.page_size * token_stride;
}

double token_scale(const KeyValueSource& kv, bool of_value, int64_t position) {
  return is_8bit(kv.dtype) ? kv.scale_of(of_value ? kv.value_scale : kv.key_scale, position) : 1;
}

double score(const ForwardTask& task, const TaskToken& token, int32_t head, int32_t position) {
  const std::byte* query = token.query + head * task.query_head_stride;
  const std::byte* key = token_row(task.kv, false, position);
  double sum = 0;
  for (int32_t d = 0; d < task.head_dim; ++d) sum += load(task.query_dtype, query, d) * load(task.kv.dtype, key, d);
  sum *= token.query_scale * token_scale(task.kv, false, position) * task.scale;
  if (task.softcap > 0) sum = task.softcap * std::tanh(sum / task.softcap);
  if (token.alibi_slopes != nullptr) {
    const int64_t distance = int64_t{token.q_pos()} - token.mask_input->kv_pos(position);
    sum -= double{token.alibi_slopes[head]} * static_cast<double>(std::abs(distance));
  }
  return sum;
}

struct VisibleKey {
  int32_t position;
  double score;
};

std::vector<VisibleKey> visible_keys(const ForwardTask& task, const TaskToken& token, int32_t head) {
  std::vector<VisibleKey> keys;
  std::vector<int32_t> visible;
  mask::RowScratch scratch;
  for (const mask::KeySegment& segment : task.segments) {
    visible.assign(segment.end - segment.begin, -1);
    if (segment.tile_class == TileClass::partial) {
      mask::evaluate_row(*task.mask, *token.mask_input, token.query_index, task.first_head + head, segment.begin,
                         segment.end, visible.data(), scratch);
    }
    for (int32_t position = segment.begin; position < segment.end; ++position) {
      if (visible[position - segment.begin] != 0) keys.push_back({position, score(task, token, head, position)});
    }
  }
  return keys;
}

void compute_row(const ForwardTask& task, const TaskToken& token, int32_t head) {
  const bool finish = token.state_out == nullptr;
  const double sink = finish && task.sinks != nullptr ? task.sinks[head] : -kInfinity;
  const std::vector<VisibleKey> keys = visible_keys(task, token, head);

  double max = sink;
  for (const VisibleKey& key : keys) max = std::isnan(key.score) ? key.score : std::max(key.score, max);
  if (max == -kInfinity) max = 0;  // nothing to see: every exp below is 0
  double sum = std::exp(sink - max);
  std::vector<double> mean(task.head_dim_v, 0.0);
  for (const VisibleKey& key : keys) {
    const double weight = std::exp(key.score - max);
    const std::byte* value = token_row(task.kv, true, key.position);
    const double factor = weight * token_scale(task.kv, true, key.position);
    sum += weight;
    for (int32_t d = 0; d < task.head_dim_v; ++d) mean[d] += factor * load(task.kv.dtype, value, d);
  }

  const double lse = std::log(sum) + max;
  if (!finish) token.state_lse[head] = static_cast<float>(lse);
  if (finish && token.lse != nullptr) token.lse[head * task.lse_head_stride] = static_cast<float>(lse);
  std::byte* out = finish ? token.out + head * task.out_head_stride
                          : reinterpret_cast<std::byte*>(token.state_out + int64_t{head} * task.head_dim_v);
  std::vector<float> results(task.head_dim_v, 0.0F);
  for (int32_t d = 0; d < task.head_dim_v && sum != 0; ++d) results[d] = static_cast<float>(mean[d] / sum);
  const OutputScale scale = finish ? token.out_scale.at(0, head) : OutputScale();
  for (int32_t begin = 0; begin < task.head_dim_v; begin += index::kScaleGroup) {
    const int32_t count = std::min(index::kScaleGroup, task.head_dim_v - begin);
    const float divisor = scale.of_group(task.out_dtype, begin / index::kScaleGroup, &results[begin], count);
    for (int32_t d = begin; d < begin + count; ++d) {
      store(finish ? task.out_dtype : DType::f32, out, d, results[d] / divisor);
    }
  }
}

}  // namespace

void forward_plain(const ForwardTask& task) {
  for (const TaskToken& token : task.tokens) {
    for (int32_t head = 0; head < task.group_size; ++head) compute_row(task, token, head);
  }
}

}  // namespace qkv::cpu
