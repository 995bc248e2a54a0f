// The engine of one GPU: kernels chosen and compiled when a layer is made, launches on the caller's stream.
#include "cuda/engine.hpp"

#include <algorithm>
#include <mutex>
#include <numbers>
#include <optional>

#include "core/checks.hpp"
#include "core/environment.hpp"
#include "core/float8.hpp"
#include "core/index/merge_teams.hpp"
#include "core/index/quantised_rows.hpp"
#include "core/output_scale.hpp"
#include "core/scale_layout.hpp"
#include "cuda/device_planner.hpp"
#include "cuda/device_rules.hpp"
#include "cuda/forward_sm80.hpp"
#include "cuda/forward_sm90_few_rows.hpp"
#include "cuda/forward_sm90_many_rows.hpp"
#include "cuda/gather.hpp"
#include "cuda/index_check.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"
#include "cuda/memory.hpp"
#include "cuda/placed_plan.hpp"
#include "cuda/projection.hpp"
#include "cuda/quantise.hpp"
#include "cuda/select.hpp"
#include "jit/driver.hpp"
#include "jit/module.hpp"

namespace qkv::cuda {
namespace {

constexpr uint32_t kMaxGridY = 65535;

jit::CUstream handle_of(Stream stream) { return static_cast<jit::CUstream>(stream.handle); }

CacheWriteSide side_of(const Tensor& source, const Tensor& pages) {
  CacheWriteSide side{};
  side.source = source.data;
  side.source_token_stride = source.stride[0];
  side.source_head_stride = source.stride[1];
  side.pages = pages.data;
  side.page_stride = pages.stride[0];
  side.token_stride = pages.stride[1];
  side.head_stride = pages.stride[2];
  side.source_dtype = dtype_code(source.dtype);
  side.pages_dtype = dtype_code(pages.dtype);
  side.head_dim = static_cast<int>(pages.shape[3]);
  return side;
}

OutputScaleLayout layout_of_output_scale(const Tensor& out_scale) {
  OutputScaleLayout layout{};
  layout.data = static_cast<float*>(out_scale.data);
  if (output_scales(out_scale) == OutputScales::per_tensor) return layout;
  layout.of_groups = 1;
  layout.token_stride = out_scale.stride[0];
  layout.head_stride = out_scale.stride[1];
  layout.group_stride = out_scale.stride[2];
  return layout;
}

KeyValueScales scales_at(const ScaleLayout& layout) {
  return {layout.data, layout.request_stride, layout.page_stride, layout.token_stride, layout.head_stride};
}

// On the device.
struct SlotArrays {
  const int64_t* slots;
  const int* num_slots;  // nullptr: most
  const int* requests;   // where scales are of requests
  int64_t most;          // slots
  uint32_t num_ctas;     // that take turns at them, where one takes a whole slot at a time
};

void write_cache(const jit::Kernel& kernel, const Tensor& key, const Tensor& value, const KvCache& cache,
                 KvScales scales, const SlotArrays& slots, const DeviceFacts& facts, jit::CUstream stream) {
  if (slots.most == 0) return;
  CacheWriteParams params{};
  params.sides[0] = side_of(key, cache.key);
  params.sides[1] = side_of(value, cache.value);
  params.slots = reinterpret_cast<const long long*>(slots.slots);
  params.num_slots = slots.num_slots;
  params.most_slots = static_cast<int>(slots.most);
  params.num_kv_heads = static_cast<int>(cache.key.shape[2]);
  params.page_size = static_cast<int>(cache.key.shape[1]);
  if (scales != KvScales::none) {
    params.scales[0] = scales_at(scale_layout(scales, cache.key_scale));
    params.scales[1] = scales_at(scale_layout(scales, cache.value_scale));
    params.slot_requests = slots.requests;
    params.token_scales = scales == KvScales::per_token_head ? 1 : 0;
    const int widest = std::max(params.sides[0].head_dim, params.sides[1].head_dim);
    const int num_pieces = (widest + index::kElementsOfPiece - 1) / index::kElementsOfPiece;
    const int least_tokens = index::tokens_of_quantising_warp(num_pieces);
    const int64_t num_warps = (slots.most + least_tokens - 1) / least_tokens * 2 * params.num_kv_heads;
    const int64_t num_ctas = (num_warps + index::kQuantisingWarps - 1) / index::kQuantisingWarps;
    constexpr int64_t kResident = 4;  // CTAs of a multiprocessor: more would only queue
    const auto grid = static_cast<uint32_t>(std::min(num_ctas, kResident * facts.num_multiprocessors));
    params.tokens_of_warp =
        index::rows_of_warp(index::quantising_log2_lanes(num_pieces), params.most_slots, 2 * params.num_kv_heads,
                            static_cast<int>(grid) * index::kQuantisingWarps);
    launch(kernel, {grid, 1, 32 * index::kQuantisingWarps, 0}, {&params}, stream);
    return;
  }
  const int64_t chunks = cache.key.shape[2] * (cache.key.shape[3] + 7) / 8;
  const auto threads = static_cast<uint32_t>(std::clamp<int64_t>((chunks + 31) / 32 * 32, 32, 256));
  launch(kernel, {slots.num_ctas, 1, threads, 0}, {&params}, stream);
}

class CudaLayer final : public plan::LayerEngine {
 public:
  CudaLayer(const LayerSpec& layer, int32_t device_index) : device_index_(device_index), layer_(layer) {
    const CurrentDevice current(device_index);
    const DeviceFacts& facts = device_facts(device_index);
    kernels_ = forward_kernels(layer, facts);
    if (kernels_.few_rows_sm90) {
      few_rows_sm90_.emplace(layer, facts);
    } else {
      few_rows_sm80_.emplace(layer, facts, kernels_.cut.few_rows);
    }
    if (kernels_.many_rows_sm90) {
      many_rows_sm90_.emplace(layer, facts);
      placement_.max_ctas = facts.num_multiprocessors;
    } else {
      many_rows_sm80_.emplace(layer, facts, 0);
    }
    placement_.few_rows_sm90 = kernels_.few_rows_sm90;
    placement_.max_few_rows = kernels_.cut.few_rows;
    placement_.max_planner_blocks = max_blocks_of_planner(facts);
    placement_.max_shared_rows = device_rules().shared_few_rows;
    placement_.max_rows_of_merges = std::max(kernels_.cut.few_rows, kernels_.cut.rows_per_item);
    merge_ = &jit::kernels().get(plain_source("merge_plan_states", facts.arch));
    if (layer.cache) cache_write_ = &jit::kernels().get(cache_write_source(layer.kv_scales, facts.arch));
    // Who makes the layer's queries calls it in steps that may be captured.
    if (is_float8(layer.query_dtype)) jit::kernels().get(plain_source("quantise", facts.arch));
    if (layer.cache && is_checked_mode()) index_check_.emplace(device_index, facts.arch);
    Upload upload;
    const size_t slopes_at = upload.add(layer.alibi_slopes);
    const size_t sinks_at = upload.add(layer.sinks);
    score_terms_ = DeviceBuffer(device_index, upload.num_bytes());
    upload.place(score_terms_, nullptr);
    if (!layer.alibi_slopes.empty()) alibi_slopes_ = score_terms_.as<const float>(slopes_at);
    if (!layer.sinks.empty()) sinks_ = score_terms_.as<const float>(sinks_at);
  }

  index::RequestCut cut_request(int32_t q_len, int32_t kv_len) const override {
    return cuda::cut_request(layer_, kernels_, q_len, kv_len);
  }

  plan::DeviceRules device_rules() const override { return cuda::device_rules(layer_, device_facts(device_index_)); }
  plan::DeviceRules planner_rules(const PlanLimits& limits) const override {
    plan::DeviceRules rules = device_rules();
    if (!planner_shares(limits.max_requests, limits.plans_on_device)) rules.shared_few_rows = 0;
    return rules;
  }

  plan::CutBounds cut_bounds() const override { return cuda::cut_bounds(layer_, kernels_); }

  std::shared_ptr<plan::PlacedPlan> reserve(const plan::PlanCapacity& capacity,
                                            const Tensor& workspace) const override {
    const CurrentDevice current(device_index_);
    auto reserved = std::make_shared<DevicePlan>(layer_, placement_, capacity, workspace, device_index_);
    prepare_kernels(*reserved);
    if (capacity.on_device) {
      const std::lock_guard lock(device_planner_mutex_);
      if (!device_planner_) device_planner_.emplace(layer_, device_facts(device_index_), kernels_.cut);
    }
    return reserved;
  }

  int64_t workspace_bytes(const plan::PlanCapacity& capacity) const override {
    return DevicePlan::workspace_bytes(layer_, capacity.state_rows);
  }

  void place(plan::PlanData& plan, Stream stream) const override {
    const CurrentDevice current(device_index_);
    if (plan.placed) {
      static_cast<DevicePlan&>(*plan.placed).update(plan, handle_of(stream));
      return;
    }
    auto placed = std::make_shared<DevicePlan>(plan, placement_, device_index_, handle_of(stream));
    prepare_kernels(*placed);
    plan.placed = std::move(placed);
  }

  void place_on_device(plan::PlanData& plan, const plan::DeviceBatch& batch, Stream stream) const override {
    const CurrentDevice current(device_index_);
    const plan::PlanCapacity capacity = plan::capacity_of(layer_, plan.planner->limits, cut_bounds());
    device_planner_->run(batch, capacity, static_cast<DevicePlan&>(*plan.placed), handle_of(stream));
  }

  bool was_refused(const plan::PlacedPlan& placed, Stream stream) const override {
    const CurrentDevice current(device_index_);
    PlanCounts counts{};
    const auto address = reinterpret_cast<jit::CUdeviceptr>(static_cast<const DevicePlan&>(placed).counts());
    jit::check(jit::driver().memcpy_dtoh_async(&counts, address, sizeof counts, handle_of(stream)),
               "cuMemcpyDtoHAsync");
    jit::check(jit::driver().stream_synchronize(handle_of(stream)), "cuStreamSynchronize");
    return counts.refused != 0;
  }

  bool is_capturing(Stream stream) const override {
    const CurrentDevice current(device_index_);
    auto status = jit::CUstreamCaptureStatus::none;
    jit::check(jit::driver().stream_is_capturing(handle_of(stream), &status), "cuStreamIsCapturing");
    return status != jit::CUstreamCaptureStatus::none;
  }

  void forward(const plan::ForwardCall& call) const override {
    const CurrentDevice current(device_index_);
    const auto& plan = static_cast<const DevicePlan&>(*call.plan.placed);
    const jit::CUstream stream = handle_of(call.stream);
    ForwardParams params{};
    plan.fill(params);
    fill(call, params);
    if (index_check_ && !call.plan.on_device) index_check_->check_pages(call.plan, params, call.key.shape[0], stream);
    if (many_rows_sm90_) {
      params.items = plan.many_rows.items;
      many_rows_sm90_->run(call, params, plan.cta_begin, plan.num_ctas, stream);
    } else {
      run_sm80(*many_rows_sm80_, plan, plan.many_rows, params, stream);
    }
    if (few_rows_sm80_) {
      run_shared_sm80(plan, params, stream);
      run_sm80(*few_rows_sm80_, plan, plan.few_rows, params, stream);
    }
    // Hopper's kernels of one batch run beside each other.
    bool beside_earlier = plan.num_ctas > 0;
    for (const FewRowsLaunch& launch : plan.few_rows_launches) {
      few_rows_sm90_->run(call, params, launch, plan.tickets, beside_earlier, stream);
      beside_earlier = true;
    }
    merge(call, plan, params);
  }

  void update_cache(const Tensor& key, const Tensor& value, const KvCache& cache, const plan::PlanData& plan,
                    Stream stream) const override {
    const CurrentDevice current(device_index_);
    const auto& placed = static_cast<const DevicePlan&>(*plan.placed);
    if (index_check_ && !plan.on_device) {
      index_check_->check_slots(plan, placed.slots, cache.key.shape[0] * cache.key.shape[1], handle_of(stream));
    }
    constexpr int32_t kCtas = 16;  // a multiprocessor's, of 128 threads
    write_cache(*cache_write_, key, value, cache, plan.layer.kv_scales,
                {placed.slots, placed.num_slots, placed.slot_requests, placed.max_slots,
                 placed.grid_of(placed.max_slots, kCtas)},
                device_facts(device_index_), handle_of(stream));
  }

 private:
  void prepare_kernels(const DevicePlan& plan) const {
    for (const FewRowsLaunch& launch : plan.few_rows_launches) few_rows_sm90_->prepare(launch);
    if (plan.shared_few_rows.most > 0) few_rows_sm80_->prepare_shared();
  }

  static constexpr int32_t kSm80Ctas = 4;  // a multiprocessor's: two waves where two share one

  static void run_sm80(const ForwardSm80& kernel, const DevicePlan& plan, const ItemList& list, ForwardParams params,
                       jit::CUstream stream) {
    params.items = list.items;
    params.num_items = list.num_items;
    kernel.run(params, plan.grid_of(list.most, kSm80Ctas), stream);
  }

  void run_shared_sm80(const DevicePlan& plan, ForwardParams params, jit::CUstream stream) const {
    params.items = plan.shared_few_rows.items;
    params.num_items = plan.shared_few_rows.num_items;
    few_rows_sm80_->run_shared(params, plan.shared_tokens, plan.grid_of(plan.shared_few_rows.most, kSm80Ctas), stream);
  }

  void fill(const plan::ForwardCall& call, ForwardParams& params) const {
    const LayerSpec& layer = call.layer;
    const int32_t head_axis = layer.cache ? 2 : 1;
    const auto layout_of = [&](const Tensor& tensor) {
      return KeyValueLayout{tensor.data, layer.cache ? tensor.stride[0] : 0, tensor.stride[head_axis - 1],
                            tensor.stride[head_axis]};
    };
    params.query = call.query.data;
    params.query_token_stride = call.query.stride[0];
    params.query_head_stride = call.query.stride[1];
    params.key = layout_of(call.key);
    params.value = layout_of(call.value);
    constexpr float kLog2e = std::numbers::log2e_v<float>;
    params.query_factor =
        layer.softcap > 0 ? layer.effective_scale() / layer.softcap : layer.effective_scale() * kLog2e;
    params.softcap_log2 = layer.softcap * kLog2e;
    if (!layer.alibi_per_request) params.alibi_slopes = alibi_slopes_;
    params.sinks = sinks_;
    if (call.key_scale.is_given()) {
      params.key_scale = scales_at(scale_layout(layer, call.key_scale));
      params.value_scale = scales_at(scale_layout(layer, call.value_scale));
    }
    if (call.query_scale.is_given()) {
      params.query_scale = scales_at(scale_layout(query_scales(call.query_scale), call.query_scale));
    }
    params.out_scale = layout_of_output_scale(call.out_scale);
    params.out = call.out.data;
    params.out_token_stride = call.out.stride[0];
    params.out_head_stride = call.out.stride[1];
    if (call.lse.is_given()) {
      params.lse = static_cast<float*>(call.lse.data);
      params.lse_head_stride = call.lse.stride[0];
      params.lse_token_stride = call.lse.stride[1];
    }
  }

  void merge(const plan::ForwardCall& call, const DevicePlan& plan, const ForwardParams& forward) const {
    if (plan.max_merges == 0) return;
    MergePlanParams params{};
    plan.fill(params);
    params.group_size = call.layer.group_size();
    params.head_dim_v = call.layer.value_dim();
    params.sinks = forward.sinks;
    params.out_dtype = dtype_code(call.out.dtype);
    params.out_scale = forward.out_scale;
    params.out = forward.out;
    params.out_token_stride = forward.out_token_stride;
    params.out_head_stride = forward.out_head_stride;
    params.lse = forward.lse;
    params.lse_head_stride = forward.lse_head_stride;
    params.lse_token_stride = forward.lse_token_stride;
    constexpr int32_t kCtas = 2;  // a multiprocessor's, times those that share rows
    const int rows_of_cta = index::kMergingWarps * index::merging_rows_of_warp(params.head_dim_v);
    const int64_t row_blocks = (plan.max_rows_of_merges + rows_of_cta - 1) / rows_of_cta;
    launch(*merge_,
           {plan.grid_of(plan.max_merges, kCtas), static_cast<uint32_t>(std::min<int64_t>(row_blocks, kMaxGridY)),
            32 * index::kMergingWarps, 0},
           {&params}, handle_of(call.stream));
  }

  int32_t device_index_;
  LayerSpec layer_;
  ForwardKernels kernels_{};
  PlacementRules placement_;
  std::optional<ForwardSm80> few_rows_sm80_;  // one of the two
  std::optional<ForwardSm90FewRows> few_rows_sm90_;
  std::optional<ForwardSm80> many_rows_sm80_;  // one of the two
  std::optional<ForwardSm90ManyRows> many_rows_sm90_;
  const jit::Kernel* merge_ = nullptr;
  const jit::Kernel* cache_write_ = nullptr;
  std::optional<IndexCheck> index_check_;  // QKV_CHECK=1
  mutable std::mutex device_planner_mutex_;
  mutable std::optional<DevicePlanner> device_planner_;  // from the first planner on that wants it
  DeviceBuffer score_terms_;
  const float* alibi_slopes_ = nullptr;
  const float* sinks_ = nullptr;
};

StateView view_of(const Tensor& out, const Tensor& lse) {
  StateView view{};
  view.out = out.data;
  view.out_token_stride = out.stride[0];
  view.out_head_stride = out.stride[1];
  view.dtype = dtype_code(out.dtype);
  if (lse.is_given()) {
    view.lse = static_cast<float*>(lse.data);
    view.lse_head_stride = lse.stride[0];
    view.lse_token_stride = lse.stride[1];
  }
  return view;
}

class CudaEngine final : public plan::Engine {
 public:
  explicit CudaEngine(int32_t device_index) : device_index_(device_index) { device_facts(device_index); }

  std::unique_ptr<plan::LayerEngine> make_layer(const LayerSpec& layer) const override {
    return std::make_unique<CudaLayer>(layer, device_index_);
  }

  void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, KvScales scales,
                   std::span<const int64_t> slot_mapping, Stream stream) const override {
    const CurrentDevice current(device_index_);
    const jit::Kernel& kernel = jit::kernels().get(cache_write_source(scales, device_facts(device_index_).arch));
    Upload upload;
    const auto num_slots = static_cast<int32_t>(slot_mapping.size());
    const size_t slots_at = upload.add(std::vector<int64_t>(slot_mapping.begin(), slot_mapping.end()));
    const auto slots = DeviceBuffer::on_stream(device_index_, upload.num_bytes(), handle_of(stream));
    upload.place(slots, handle_of(stream));
    write_cache(kernel, key, value, cache, scales,
                {slots.as<const int64_t>(slots_at), nullptr, nullptr, num_slots, static_cast<uint32_t>(num_slots)},
                device_facts(device_index_), handle_of(stream));
    // The slots' memory must outlive the launch. Layers keep theirs in the plan; this single call waits.
    jit::check(jit::driver().stream_synchronize(handle_of(stream)), "cuStreamSynchronize");
  }

  void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale,
                    Stream stream) const override {
    const CurrentDevice current(device_index_);
    const jit::Kernel& kernel = jit::kernels().get(plain_source("merge_states", device_facts(device_index_).arch));
    std::vector<StateView> views;
    views.reserve(states.size());
    for (const State& state : states) views.push_back(view_of(state.out, state.lse));
    MergeStatesParams params{};
    params.num_states = static_cast<int>(states.size());
    params.merged = view_of(out, lse);
    params.out_scale = layout_of_output_scale(out_scale);
    params.num_tokens = out.shape[0];
    params.num_heads = static_cast<int>(out.shape[1]);
    params.head_dim_v = static_cast<int>(out.shape[2]);
    const int64_t num_rows = out.shape[0] * out.shape[1];
    if (num_rows == 0) return;
    // The kernel counts tokens, and warps, in 32 bits.
    if (num_rows > INT32_MAX) refuse("out", out.describe(), "at most 2^31 - 1 rows of tokens and heads on a GPU");
    DeviceBuffer many;
    if (views.size() <= static_cast<size_t>(kMaxInlineStates)) {
      std::copy(views.begin(), views.end(), params.inline_states);
    } else {
      Upload upload;
      upload.add(views);
      many = DeviceBuffer::on_stream(device_index_, upload.num_bytes(), handle_of(stream));
      upload.place(many, handle_of(stream));
      params.states = many.as<const StateView>();
    }
    const int rows_of_warp = index::merging_rows_of_warp(params.head_dim_v);
    const int64_t num_warps = (params.num_tokens + rows_of_warp - 1) / rows_of_warp * params.num_heads;
    const auto num_ctas = static_cast<uint32_t>((num_warps + index::kMergingWarps - 1) / index::kMergingWarps);
    launch(kernel, {num_ctas, 1, 32 * index::kMergingWarps, 0}, {&params}, handle_of(stream));
    if (many.address() != 0) jit::check(jit::driver().stream_synchronize(handle_of(stream)), "cuStreamSynchronize");
  }

  void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
                const Tensor& query_start_loc, Stream stream) const override {
    const CurrentDevice current(device_index_);
    const jit::Kernel& kernel = jit::kernels().get(plain_source("quantise", device_facts(device_index_).arch));
    cuda::quantise(kernel, rows, out, scale, source, query_start_loc, handle_of(stream));
  }

  void place(plan::GatherPlan& plan, Stream stream) const override {
    const CurrentDevice current(device_index_);
    // What is gathered becomes states that are merged: both kernels are compiled now, not in the middle of a step.
    for (const char* kernel : {"gather", "gather_widened", "merge_states"}) {
      jit::kernels().get(plain_source(kernel, device_facts(device_index_).arch));
    }
    place_gather(plan, device_index_, handle_of(stream));
  }

  std::unique_ptr<plan::Projector> make_projector(const plan::ProjectionMatrix& matrix) const override {
    return cuda::make_projector(matrix, device_index_);
  }

  void gather(const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows, const Tensor& scale,
              Stream stream) const override {
    const CurrentDevice current(device_index_);
    const char* name = gather_kernel(pages, rows);
    const jit::Kernel& kernel = jit::kernels().get(plain_source(name, device_facts(device_index_).arch));
    cuda::gather(kernel, pages, plan, rows, scale, handle_of(stream));
  }

  void follow(Stream later, Stream earlier) const override {
    if (later.handle == earlier.handle) return;
    const CurrentDevice current(device_index_);
    const jit::Driver& driver = jit::driver();
    jit::CUevent event = nullptr;
    jit::check(driver.event_create(&event, jit::kEventDisableTiming), "cuEventCreate");
    jit::check(driver.event_record(event, handle_of(earlier)), "cuEventRecord");
    jit::check(driver.stream_wait_event(handle_of(later), event, 0), "cuStreamWaitEvent");
    driver.event_destroy(event);  // the wait stands
  }

 private:
  int32_t device_index_;
};

}  // namespace

std::unique_ptr<plan::Engine> make_engine(int32_t device_index) { return std::make_unique<CudaEngine>(device_index); }

}  // namespace qkv::cuda
