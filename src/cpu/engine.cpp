// Threads over work items, then over merges. All that a kernel needs is resolved here to one ForwardTask an item.
#include "cpu/engine.hpp"

#include <memory>

#include "core/checks.hpp"
#include "core/scale_layout.hpp"
#include "cpu/cache_write.hpp"
#include "cpu/gather.hpp"
#include "cpu/kernels.hpp"
#include "cpu/merge.hpp"
#include "cpu/projection.hpp"
#include "cpu/quantise.hpp"
#include "cpu/threads.hpp"
#include "qkv/device.hpp"

namespace qkv::cpu {
namespace {

std::byte* at(const Tensor& tensor, int64_t offset) {
  return static_cast<std::byte*>(tensor.data) + offset * size_bytes(tensor.dtype);
}

int64_t stride_bytes(const Tensor& tensor, int32_t axis) { return tensor.stride[axis] * size_bytes(tensor.dtype); }

// The rows of one forward call; holds the buffer of partial states.
class Forward {
 public:
  explicit Forward(const plan::ForwardCall& call)
      : call_(call),
        plan_(call.plan),
        group_size_(call.layer.group_size()),
        dim_v_(call.layer.value_dim()),
        state_out_(new float[plan_.num_state_rows * dim_v_]),  // NOLINT(modernize-make-unique): left uninitialised
        state_lse_(new float[plan_.num_state_rows]),           // NOLINT(modernize-make-unique)
        out_scale_(output_scale(call.out_scale)) {
    if (call.query_scale.is_given()) query_scale_ = scale_layout(query_scales(call.query_scale), call.query_scale);
  }

  void run() const {
    const ForwardKernels& kernels = forward_kernels();
    int64_t pairs = 0;
    for (const plan::WorkItem& item : plan_.items) pairs += item.cost;
    const int64_t work = pairs * (call_.layer.head_dim + dim_v_);
    parallel_for(static_cast<int64_t>(plan_.items.size()), work, [&](int64_t i) {
      static thread_local std::vector<TaskToken> tokens;
      const plan::WorkItem& item = plan_.items[i];
      const ForwardTask task = make_task(item, tokens);
      (item.few_rows ? kernels.few_rows : kernels.many_rows)(task);
    });
    parallel_for(static_cast<int64_t>(plan_.merges.size()), plan_.num_state_rows * dim_v_,
                 [&](int64_t i) { merge(plan_.merges[i]); });
  }

 private:
  // `tokens` holds what the task's tokens point to.
  ForwardTask make_task(const plan::WorkItem& item, std::vector<TaskToken>& tokens) const {
    const LayerSpec& layer = call_.layer;
    const int32_t head = item.kv_head * group_size_;
    tokens.clear();
    plan::for_each_run(plan_, item, [&](const plan::RowRun& run) { append_tokens(run, item.kv_head, tokens); });
    ForwardTask task;
    task.head_dim = layer.head_dim;
    task.head_dim_v = dim_v_;
    task.group_size = group_size_;
    task.tokens = tokens;
    task.query_dtype = call_.query.dtype;
    task.query_head_stride = stride_bytes(call_.query, 1);
    task.kv = key_value_source(item);
    task.segments = {plan_.segments.data() + item.segment_begin, plan_.segments.data() + item.segment_end};
    task.scale = layer.effective_scale();
    task.softcap = layer.softcap;
    task.sinks = sinks(head);
    task.mask = &plan_.mask;
    task.first_head = head;
    task.out_dtype = call_.out.dtype;
    task.out_head_stride = stride_bytes(call_.out, 1);
    if (call_.lse.is_given()) task.lse_head_stride = call_.lse.stride[0];
    return task;
  }

  void append_tokens(const plan::RowRun& run, int32_t kv_head, std::vector<TaskToken>& tokens) const {
    const int32_t head = kv_head * group_size_;
    for (int32_t query = run.query_begin; query < run.query_end; ++query) {
      const int64_t token = plan_.query_start_loc[run.request] + query;
      TaskToken& added = tokens.emplace_back();
      added.query = at(call_.query, token * call_.query.stride[0] + head * call_.query.stride[1]);
      if (query_scale_.data != nullptr) added.query_scale = *query_scale_.at(run.request, 0, 0, kv_head);
      added.mask_input = &plan_.mask_inputs[run.request];
      added.query_index = query;
      added.alibi_slopes = alibi_slopes(run.request, head);
      if (run.state_row >= 0) {
        const int64_t row = run.state_row + int64_t{query - run.query_begin} * group_size_;
        added.state_out = state_out_.get() + row * dim_v_;
        added.state_lse = state_lse_.get() + row;
      }
      added.out = out_row(token, head);
      added.out_scale = out_scale_.at(token, head);
      if (call_.lse.is_given()) added.lse = lse_row(token, head);
    }
  }

  // Items of several requests read the pages of the first: they are all theirs.
  KeyValueSource key_value_source(const plan::WorkItem& item) const {
    const Tensor& key = call_.key;
    const Tensor& value = call_.value;
    KeyValueSource source;
    source.dtype = key.dtype;
    if (call_.layer.cache) {
      source.key = at(key, item.kv_head * key.stride[2]);
      source.value = at(value, item.kv_head * value.stride[2]);
      source.pages = plan_.pages.data() + plan_.page_start[item.request];
      source.page_size = call_.layer.cache->page_size;
      source.key_page_stride = stride_bytes(key, 0);
      source.value_page_stride = stride_bytes(value, 0);
      source.key_token_stride = stride_bytes(key, 1);
      source.value_token_stride = stride_bytes(value, 1);
      source.key_scale = token_scales(call_.key_scale, item, 0);
      source.value_scale = token_scales(call_.value_scale, item, 0);
    } else {
      const int64_t first = plan_.page_start[item.request];
      source.key = at(key, first * key.stride[0] + item.kv_head * key.stride[1]);
      source.value = at(value, first * value.stride[0] + item.kv_head * value.stride[1]);
      source.key_token_stride = stride_bytes(key, 0);
      source.value_token_stride = stride_bytes(value, 0);
      source.key_scale = token_scales(call_.key_scale, item, first);
      source.value_scale = token_scales(call_.value_scale, item, first);
    }
    return source;
  }

  TokenScales token_scales(const Tensor& scale, const plan::WorkItem& item, int64_t first_token) const {
    if (!scale.is_given()) return {};
    const ScaleLayout layout = scale_layout(call_.layer, scale);
    return {layout.at(item.request, 0, first_token, item.kv_head), layout.page_stride, layout.token_stride};
  }

  const float* alibi_slopes(int32_t request, int32_t head) const {
    if (call_.layer.alibi_per_request) {
      return plan_.alibi_slopes.data() + static_cast<int64_t>(request) * call_.layer.num_q_heads + head;
    }
    return call_.layer.alibi_slopes.empty() ? nullptr : call_.layer.alibi_slopes.data() + head;
  }

  const float* sinks(int32_t head) const {
    return call_.layer.sinks.empty() ? nullptr : call_.layer.sinks.data() + head;
  }

  std::byte* out_row(int64_t token, int32_t head) const {
    return at(call_.out, token * call_.out.stride[0] + head * call_.out.stride[1]);
  }

  float* lse_row(int64_t token, int32_t head) const {
    return static_cast<float*>(call_.lse.data) + head * call_.lse.stride[0] + token * call_.lse.stride[1];
  }

  void merge(const plan::MergeItem& item) const {
    const int32_t first_head = item.kv_head * group_size_;
    const int64_t rows = static_cast<int64_t>(item.query_end - item.query_begin) * group_size_;
    std::vector<StateRow> states(item.num_states);
    for (int64_t row = 0; row < rows; ++row) {
      for (int32_t s = 0; s < item.num_states; ++s) {
        const int64_t state_row = item.state_row + s * rows + row;
        states[s] = {reinterpret_cast<const std::byte*>(state_out_.get() + state_row * dim_v_), DType::f32,
                     state_lse_[state_row]};
      }
      const int64_t token = plan_.query_start_loc[item.request] + item.query_begin + row / group_size_;
      const auto head = static_cast<int32_t>(first_head + row % group_size_);
      const float lse =
          merge_row(states, sinks(head), dim_v_, out_row(token, head), call_.out.dtype, out_scale_.at(token, head));
      if (call_.lse.is_given()) *lse_row(token, head) = lse;
    }
  }

  const plan::ForwardCall& call_;
  const plan::PlanData& plan_;
  const int32_t group_size_;
  const int32_t dim_v_;
  std::unique_ptr<float[]> state_out_;  // [num_state_rows, dim_v]
  std::unique_ptr<float[]> state_lse_;  // [num_state_rows]
  const OutputScale out_scale_;
  ScaleLayout query_scale_;  // without data: queries have no scale
};

// Of one core of a Xeon with AVX-512, which the vectors of other instruction sets scale (docs/plans.md). Choices depend
// on the ratio of arithmetic to memory only, which differs little from machine to machine.
index::DeviceCosts costs(const LayerSpec& layer) {
  const std::string_view set = forward_kernels().name;
  const bool has_tiles = set == "amx";
  const bool on_tiles = has_tiles && layer.query_dtype == DType::bf16 && layer.kv_dtype == DType::bf16;
  const double width = has_tiles || set == "avx512" ? 1.0 : set == "avx2" ? 0.6 : 0.3;
  index::DeviceCosts costs;
  costs.num_workers = num_threads();
  costs.worker_bytes_per_second = 10e9;
  costs.bytes_per_second = costs.num_workers * costs.worker_bytes_per_second;
  costs.few_rows_operations = 100e9 * width;
  costs.many_rows_operations = on_tiles ? 480e9 : 150e9 * width;
  costs.few_rows_tile = 4;
  costs.many_rows_tile = on_tiles ? 32 : 6;
  costs.item_seconds = 2e-6;
  costs.step_seconds = 10e-6;
  return costs;
}

class CpuLayer final : public plan::LayerEngine {
 public:
  explicit CpuLayer(const LayerSpec& layer)
      : costs_(costs(layer)), cut_rules_{layer.num_kv_heads, layer.group_size(), kFewRows, kTileKv, kTileKv, kTileQ,
                                         kRowsPerItem} {}

  index::RequestCut cut_request(int32_t q_len, int32_t) const override { return index::cut_request(cut_rules_, q_len); }
  plan::DeviceRules device_rules() const override { return {kSharedFewRows, kRowsPerItem, kManyRowsFrom, costs_}; }
  plan::CutBounds cut_bounds() const override {
    const auto bounds = [&](int32_t keys) { return index::SplitBounds{1, keys, INT32_MAX}; };
    const int32_t keys = index::few_rows_split_keys(cut_rules_.num_kv_heads);
    return {kFewRows, kTileKv, kTileQ, kRowsPerItem, kTileKv, bounds(keys), bounds(4 * keys)};
  }
  // Plans are read where they are.
  std::shared_ptr<plan::PlacedPlan> reserve(const plan::PlanCapacity&, const Tensor&) const override { return nullptr; }
  int64_t workspace_bytes(const plan::PlanCapacity&) const override { return 0; }
  void place(plan::PlanData&, Stream) const override {}
  void place_on_device(plan::PlanData&, const plan::DeviceBatch&, Stream) const override {
    refuse("query_start_loc", "an array of a GPU", "host arrays: the layer runs on the CPU", ErrorCode::mismatch);
  }
  bool was_refused(const plan::PlacedPlan&, Stream) const override { return false; }
  bool is_capturing(Stream) const override { return false; }
  void forward(const plan::ForwardCall& call) const override { Forward(call).run(); }
  void update_cache(const Tensor& key, const Tensor& value, const KvCache& cache, const plan::PlanData& plan,
                    Stream) const override {
    cpu::cache_write(key, value, cache, plan.layer.kv_scales, plan.slot_mapping, plan.slot_requests);
  }

 private:
  index::DeviceCosts costs_;
  index::CutRules cut_rules_;
};

class CpuProjector final : public plan::Projector {
 public:
  explicit CpuProjector(const plan::ProjectionMatrix& matrix) : matrix_(matrix) {}
  void project(const plan::ProjectionTensors& tensors, Stream) const override { cpu::project(matrix_, tensors); }

 private:
  plan::ProjectionMatrix matrix_;
};

class CpuEngine final : public plan::Engine {
 public:
  std::unique_ptr<plan::LayerEngine> make_layer(const LayerSpec& layer) const override {
    return std::make_unique<CpuLayer>(layer);
  }
  void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, KvScales scales,
                   std::span<const int64_t> slot_mapping, Stream) const override {
    cpu::cache_write(key, value, cache, scales, slot_mapping, {});
  }
  void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale,
                    Stream) const override {
    cpu::merge_states(states, out, lse, out_scale);
  }
  void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
                const Tensor& query_start_loc, Stream) const override {
    cpu::quantise(rows, out, scale, source, query_start_loc);
  }
  void place(plan::GatherPlan&, Stream) const override {}  // read where it is
  std::unique_ptr<plan::Projector> make_projector(const plan::ProjectionMatrix& matrix) const override {
    return std::make_unique<CpuProjector>(matrix);
  }
  void gather(const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows, const Tensor& scale,
              Stream) const override {
    cpu::gather(pages, plan, rows, scale);
  }
  void follow(Stream, Stream) const override {}
};

}  // namespace

std::unique_ptr<plan::Engine> make_engine() { return std::make_unique<CpuEngine>(); }

}  // namespace qkv::cpu
