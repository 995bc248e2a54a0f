// The definition of attention, in float64: for each query row, the scores of the keys it sees, their softmax, and the
// weighted mean of their values. Nothing here knows of tiles, splits or plans.
#include <cmath>
#include <limits>

#include "core/float16.hpp"
#include "core/scale_layout.hpp"
#include "qkv/reference.hpp"

namespace qkv::reference {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

int32_t at_i32(const Tensor& tensor, int64_t i) {
  return static_cast<const int32_t*>(tensor.data)[i * tensor.stride[0]];
}

double element(const Tensor& tensor, int64_t offset) {
  return load_f32(static_cast<const std::byte*>(tensor.data) + offset * size_bytes(tensor.dtype), tensor.dtype);
}

// Of a request's keys, the layer is shown a run, and of that what its rank keeps.
struct ShownRun {
  const Shard& shard;
  int32_t begin, end;  // positions

  bool has(int32_t position) const {
    return begin <= position && position < end && shard.rank_of(position) == shard.rank;
  }
  int32_t num_keys() const { return end > begin ? shard.local_length(end) - shard.local_length(begin) : 0; }
};

ShownRun shown_run(const LayerSpec& spec, int32_t q_len, int32_t kv_len) {
  const int32_t context = std::max(kv_len - q_len, 0);
  const bool is_new_only = spec.key_run == KeyRun::new_tokens;
  return {spec.shard, is_new_only ? context : 0, spec.key_run == KeyRun::context ? context : kv_len};
}

// What the elements of a request's queries are multiplied by.
double query_scale_at(const Tensor& scales, int64_t request, int64_t kv_head) {
  if (!scales.is_given()) return 1;
  return *scale_layout(query_scales(scales), scales).at(request, 0, 0, kv_head);
}

// Where the shown keys of a request lie, by position: `token(j)` gives the offset of key j's head 0 in a tensor of keys
// or values, `scale(j)` what its elements are multiplied by.
struct KeyLocator {
  const LayerSpec& spec;
  const Batch& batch;
  int64_t request;
  int64_t first_dense_key;
  ShownRun run;

  // Among the request's shown keys.
  int32_t local(int32_t position) const {
    return spec.shard.local_position(position) - spec.shard.local_length(run.begin);
  }

  int64_t page(int32_t position) const {
    const Tensor& table = batch.block_table;
    const int64_t entry = local(position) / spec.cache->page_size;
    return static_cast<const int32_t*>(table.data)[request * table.stride[0] + entry * table.stride[1]];
  }

  int64_t token(const Tensor& tensor, int32_t position) const {
    if (!spec.cache) return (first_dense_key + local(position)) * tensor.stride[0];
    return page(position) * tensor.stride[0] + (local(position) % spec.cache->page_size) * tensor.stride[1];
  }

  double scale(const Tensor& scales, int32_t position, int64_t kv_head) const {
    if (!scales.is_given()) return 1;
    const ScaleLayout layout = scale_layout(spec, scales);
    if (!spec.cache) return *layout.at(request, 0, first_dense_key + local(position), kv_head);
    return *layout.at(request, page(position), local(position) % spec.cache->page_size, kv_head);
  }

  int64_t head_stride(const Tensor& tensor) const { return tensor.stride[spec.cache ? 2 : 1]; }
};

float alibi_slope(const LayerSpec& spec, const Batch& batch, int64_t request, int32_t head) {
  if (spec.alibi_per_request) {
    const Tensor& slopes = batch.alibi_slopes;
    return static_cast<const float*>(slopes.data)[request * slopes.stride[0] + head * slopes.stride[1]];
  }
  return spec.alibi_slopes.empty() ? 0.0F : spec.alibi_slopes[head];
}

double score(const LayerSpec& spec, double dot, double slope, int64_t q_pos, int64_t kv_pos) {
  double s = static_cast<double>(spec.effective_scale()) * dot;
  if (spec.softcap > 0) s = spec.softcap * std::tanh(s / spec.softcap);
  return s - slope * static_cast<double>(std::llabs(q_pos - kv_pos));
}

// std::max would lose a NaN.
double larger_or_nan(double a, double b) { return std::isnan(a) || std::isnan(b) ? std::nan("") : std::max(a, b); }

class Reference {
 public:
  Reference(const LayerSpec& spec, const Batch& batch, const Tensor& query, const KvCache& cache,
            const Tensor& query_scale)
      : spec_(spec),
        batch_(batch),
        query_(query),
        key_(cache.key),
        value_(cache.value),
        key_scale_(cache.key_scale),
        value_scale_(cache.value_scale),
        query_scale_(query_scale),
        mask_(spec.effective_mask()) {}

  Result run() {
    const int64_t num_requests = batch_.query_start_loc.shape[0] - 1;
    num_tokens_ = at_i32(batch_.query_start_loc, num_requests);
    result_.out.resize(num_tokens_ * spec_.num_q_heads * spec_.value_dim());
    result_.lse.resize(num_tokens_ * spec_.num_q_heads);
    MaskScene scene;
    scene.operands = batch_.mask_operands;
    for (int64_t request = 0; request < num_requests; ++request) {
      const int32_t first = at_i32(batch_.query_start_loc, request);
      scene.request = static_cast<int32_t>(request);
      scene.q_len = at_i32(batch_.query_start_loc, request + 1) - first;
      scene.kv_len = batch_.seq_lens.is_given() ? at_i32(batch_.seq_lens, request) : scene.q_len;
      scene.query_start = first;
      for (scene.q_head = 0; scene.q_head < spec_.num_q_heads; ++scene.q_head) {
        for (int32_t query = 0; query < scene.q_len; ++query) attend(scene, query);
      }
      scene.key_start += scene.kv_len;
      first_dense_key_ += shown_run(spec_, scene.q_len, scene.kv_len).num_keys();
    }
    return std::move(result_);
  }

 private:
  void attend(const MaskScene& scene, int32_t query) {
    const ShownRun run = shown_run(spec_, scene.q_len, scene.kv_len);
    const KeyLocator keys{spec_, batch_, scene.request, first_dense_key_, run};
    const int32_t head = scene.q_head;
    const int32_t kv_head = head / spec_.group_size();
    const int64_t row = scene.query_start + query;
    const int64_t q_pos = static_cast<int64_t>(query) + scene.kv_len - scene.q_len;
    const double slope = alibi_slope(spec_, batch_, scene.request, head);
    const double query_scale = query_scale_at(query_scale_, scene.request, kv_head);

    std::vector<int32_t> visible;
    std::vector<double> scores;
    double maximum = spec_.sinks.empty() ? kMinusInfinity : spec_.sinks[head];
    for (int32_t j = 0; j < scene.kv_len; ++j) {
      if (!run.has(j) || !is_visible(mask_, scene, query, j)) continue;
      const int64_t key_offset = keys.token(key_, j) + kv_head * keys.head_stride(key_);
      double dot = 0;
      for (int32_t c = 0; c < spec_.head_dim; ++c) {
        dot += element(query_, row * query_.stride[0] + head * query_.stride[1] + c) * element(key_, key_offset + c);
      }
      visible.push_back(j);
      scores.push_back(score(spec_, dot * query_scale * keys.scale(key_scale_, j, kv_head), slope, q_pos, j));
      maximum = larger_or_nan(maximum, scores.back());
    }

    double& lse = result_.lse[head * num_tokens_ + row];
    lse = kMinusInfinity;
    if (maximum == kMinusInfinity) return;  // nothing visible and no sink (or only scores of -inf): out stays 0
    double denominator = spec_.sinks.empty() ? 0.0 : std::exp(spec_.sinks[head] - maximum);
    for (double& s : scores) {
      s = std::exp(s - maximum);
      denominator += s;
    }
    lse = maximum + std::log(denominator);
    double* out = &result_.out[(row * spec_.num_q_heads + head) * spec_.value_dim()];
    for (size_t i = 0; i < visible.size(); ++i) {
      const int64_t value_offset = keys.token(value_, visible[i]) + kv_head * keys.head_stride(value_);
      const double weight = scores[i] / denominator * keys.scale(value_scale_, visible[i], kv_head);
      for (int32_t c = 0; c < spec_.value_dim(); ++c) out[c] += weight * element(value_, value_offset + c);
    }
  }

  const LayerSpec& spec_;
  const Batch& batch_;
  const Tensor& query_;
  const Tensor& key_;
  const Tensor& value_;
  const Tensor& key_scale_;
  const Tensor& value_scale_;
  const Tensor& query_scale_;
  const Mask mask_;
  int64_t num_tokens_ = 0;
  int64_t first_dense_key_ = 0;  // of the request at hand
  Result result_;
};

}  // namespace

Result attention(const LayerSpec& spec, const Batch& batch, const Tensor& query, const Tensor& key, const Tensor& value,
                 const Tensor& query_scale, const Tensor& key_scale, const Tensor& value_scale) {
  return attention(spec, batch, query, KvCache{key, value, key_scale, value_scale}, query_scale);
}

Result attention(const LayerSpec& spec, const Batch& batch, const Tensor& query, const KvCache& cache,
                 const Tensor& query_scale) {
  return Reference(spec, batch, query, cache, query_scale).run();
}

}  // namespace qkv::reference
